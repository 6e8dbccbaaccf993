"""Files over the wire: the right bytes for who has the token, nothing for anybody else, and no wait without end."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ray_ckpt.checkpoint.manifest import FileEntry
from ray_ckpt.checkpoint.names import MANIFEST_NAME
from ray_ckpt.errors import ConfigError, CopyError, StorageError
from ray_ckpt.tiers import wire
from ray_ckpt.tiers.depot import Depot
from ray_ckpt.tiers.handshake import Patience, PeerError, greet, hear, read_greeting, say
from ray_ckpt.tiers.throttle import Throttle
from ray_ckpt.tiers.wire import FileServer, fetch

pytestmark = pytest.mark.usefixtures("quick_disk")

TOKEN = b"0123456789abcdef"
NAME = "step-00000010-g1"
DATA = bytes(range(256)) * 37
FREE = Throttle()


def entry_of(data: bytes = DATA, path: str = "rank/x.distcp") -> FileEntry:
    return FileEntry(path, len(data), xxhash.xxh3_128_hexdigest(data))


def files_below(root: Path) -> list[str]:
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if not p.is_dir())


@pytest.fixture
def source(tmp_path: Path) -> Depot:
    depot = Depot(tmp_path / "source", sync=False)
    depot.put(NAME, entry_of(), [DATA])
    return depot


@pytest.fixture
def target(tmp_path: Path) -> Depot:
    return Depot(tmp_path / "target", sync=False)


@pytest.fixture
def server(source: Depot) -> Iterator[FileServer]:
    with serving(source) as server:
        yield server


def serving(depot: Depot, host: str = "127.0.0.1") -> FileServer:
    def find(tier: str, name: str, path: str) -> Path | None:
        return depot.find(name, path) if tier == "memory" else None

    return FileServer(find, host=host, token=TOKEN)


def copy(server: FileServer, into: Depot, entry: FileEntry | None = None, **changes) -> None:
    values = {"token": TOKEN, "tier": "memory", "name": NAME, "throttle": FREE, "timeout_s": 5.0}
    fetch(server.address, entry=entry or entry_of(), into=into, **{**values, **changes})


def here(depot: Depot) -> bytes:
    return (depot.folder(NAME) / "rank/x.distcp").read_bytes()


# ---- the right bytes -------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_file_comes_over_whole_and_is_not_asked_for_again(source, target, host):
    try:
        server = serving(source, host)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with server:
        copy(server, target)
        assert here(target) == DATA
    copy(server, target)  # the server is gone: nobody was asked


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sampled_from([0, 1, 4095, 4096, 70_000]), st.sampled_from([1000, 4096, 1 << 20]))
def test_files_of_any_size_come_over_in_pieces_of_any_size(tmp_path, size, piece):
    data = os.urandom(size)
    base = tmp_path / os.urandom(8).hex()
    source, target = Depot(base / "a", sync=False), Depot(base / "b", sync=False)
    source.put(NAME, entry_of(data), [data])
    with pytest.MonkeyPatch.context() as patch, serving(source) as server:
        patch.setattr(wire, "_CHUNK_BYTES", piece)
        patch.setattr(wire, "_PIECE_BYTES", piece)
        copy(server, target, entry_of(data))
    assert here(target) == data


def test_a_copy_comes_no_faster_than_the_throttle_lets_it(server, target, monkeypatch):
    monkeypatch.setattr(wire, "_CHUNK_BYTES", 1000)
    slept: list[float] = []
    copy(server, target, throttle=Throttle(1000, clock=lambda: 0.0, sleep=slept.append))
    assert max(slept) >= (len(DATA) - 1000) / 1000


def test_two_who_fetch_the_same_file_at_once_leave_one(server, target):
    errors: list[Exception] = []

    def bring() -> None:
        try:
            copy(server, target)
        except Exception as error:  # noqa: BLE001 - told below
            errors.append(error)

    threads = [threading.Thread(target=bring) for _ in range(24)]  # more than are served at once
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert errors == []
    assert files_below(target.root) == [f"checkpoints/{NAME}/rank/x.distcp"]


# ---- what is wrong with the copy -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda place: place.write_bytes(DATA[:-1] + b"\0"), "checksum differs"),
        (lambda place: place.write_bytes(DATA[:-1]), "truncated or another file: it has 9471 of"),
        (lambda place: place.write_bytes(DATA + b"x"), "it has 9473 of 9472"),
        (lambda place: place.unlink(), "it is not here"),
        (lambda place: (place.unlink(), place.symlink_to("/etc/passwd")), "it is not here"),
        (lambda place: (place.unlink(), place.mkdir()), "it is not here"),
    ],
)
def test_what_is_flipped_cut_or_gone_at_the_source_is_refused_and_nothing_stays(
    source, server, target, spoil: Callable[[Path], object], words
):
    spoil(source.folder(NAME) / "rank/x.distcp")
    with pytest.raises(CopyError, match=words) as caught:
        copy(server, target)
    assert "rank/x.distcp" in str(caught.value)
    assert files_below(target.root) == []


@contextlib.contextmanager
def peer_that(act: Callable[[socket.socket], object]) -> Iterator[tuple[str, int]]:
    """Somebody else's server, who does one thing to whoever connects first."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        peer, _ = listener.accept()
        with peer, contextlib.suppress(OSError, PeerError):
            act(peer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        thread.join(10)
        listener.close()


def answering(words: object, content: bytes = b"", token: bytes = TOKEN):
    def act(peer: socket.socket) -> None:
        ours = greet(peer)
        theirs, _ = hear(peer, TOKEN, b"request", ours, Patience(5, 5))
        say(peer, token, b"answer", theirs, words)
        peer.sendall(content)

    return act


def echo(peer: socket.socket) -> None:
    """Has no token: greets, and sends back what it gets."""
    greet(peer)
    peer.sendall(peer.recv(4096))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, len(DATA) - 1), st.integers(0, 7), st.booleans())
def test_a_peer_that_sends_short_or_flipped_bytes_is_found_out(tmp_path_factory, at, bit, cut):
    target = Depot(tmp_path_factory.mktemp("depot"), sync=False)
    content = bytearray(DATA)
    if cut:
        del content[at:]
    else:
        content[at] ^= 1 << bit
    with peer_that(answering({"bytes": len(DATA)}, bytes(content))) as address:
        with pytest.raises(CopyError, match="truncated" if cut else "checksum differs"):
            fetch(address, TOKEN, "memory", NAME, entry_of(), target, FREE, 5.0)
    assert files_below(target.root) == []


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda peer: None, "ended the connection without an answer"),
        (lambda peer: peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9), "another protocol"),
        (echo, "does not have the run's token"),
        (answering({"bytes": len(DATA)}, DATA, token=b"f" * 16), "not have the run's token"),
        (answering({"bytes": "many"}), "says nothing"),
        (answering([1]), "says nothing"),
        (answering("x" * 20_000), "more than 16384 bytes"),
        (lambda peer: peer.recv(1), "timed out"),
    ],
)
def test_a_peer_that_is_a_stranger_or_says_nonsense_is_not_listened_to(target, act, words):
    def then_wait(peer: socket.socket) -> None:
        act(peer)
        if words == "timed out":
            peer.recv(1)  # until the client has had enough

    with peer_that(then_wait) as address:
        with pytest.raises(CopyError, match=words):
            fetch(address, TOKEN, "memory", NAME, entry_of(), target, FREE, 0.3)
    assert files_below(target.root) == []


def test_a_peer_that_drips_is_given_up(target, monkeypatch):
    monkeypatch.setattr(wire, "_SLOWEST_BYTES_PER_S", 1 << 20)

    def drip(peer: socket.socket) -> None:
        answering({"bytes": len(DATA)})(peer)
        while True:
            peer.sendall(b"x")
            time.sleep(0.01)

    began_s = time.monotonic()
    with peer_that(drip) as address:
        with pytest.raises(CopyError, match="timed out"):
            fetch(address, TOKEN, "memory", NAME, entry_of(), target, FREE, 0.3)
    assert time.monotonic() - began_s < 3
    assert files_below(target.root) == []


def test_a_node_that_is_gone_is_told_with_its_address(server, target):
    server.close()
    host, port = server.address
    with pytest.raises(CopyError, match=f"from {host} port {port}: .*refused"):
        copy(server, target)


def test_a_disk_that_refuses_ends_the_connection(server, target, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(StorageError, match="the tier is full"):
            copy(server, target)
    assert files_below(target.root) == []
    copy(server, target)


# ---- strangers -------------------------------------------------------------------------------------


def test_who_has_another_token_gets_nothing(server, target):
    with pytest.raises(CopyError, match="without an answer"):
        copy(server, target, token=b"f" * 16)
    assert files_below(target.root) == []
    copy(server, target)


@pytest.mark.parametrize("token", [b"", b"short"])
def test_a_token_that_can_be_guessed_is_refused(server, target, token):
    with pytest.raises(ConfigError, match="at least 16"):
        copy(server, target, token=token)
    with pytest.raises(ConfigError, match="at least 16"):
        FileServer(lambda *_: None, host="127.0.0.1", token=token)


def all_of(peer: socket.socket) -> bytes:
    """What comes until the other side ends."""
    data = b""
    peer.settimeout(5)
    with contextlib.suppress(ConnectionResetError):
        while piece := peer.recv(4096):
            data += piece
    return data


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.binary(min_size=1, max_size=300))
def test_garbage_gets_a_greeting_and_nothing_else_and_the_next_one_is_served(server, garbage):
    with socket.create_connection(server.address) as peer:
        with contextlib.suppress(OSError):
            peer.sendall(garbage)
            peer.shutdown(socket.SHUT_WR)
        assert len(all_of(peer)) <= 17 + 32
    with socket.create_connection(server.address) as peer:
        theirs = read_greeting(peer, Patience(5, 5))
        ours = say(peer, TOKEN, b"request", theirs, {"tier": "x", "name": NAME, "path": "y"})
        _, answer = hear(peer, TOKEN, b"answer", ours, Patience(5, 5))
    assert answer == {"problem": "it is not here"}


def test_a_request_that_was_overheard_cannot_be_said_again(server):
    with socket.create_connection(server.address) as first:
        theirs = read_greeting(first, Patience(5, 5))
        heard: list[bytes] = []

        class Spy:
            def sendall(self, data: bytes) -> None:
                heard.append(data)

        request = {"tier": "memory", "name": NAME, "path": "rank/x.distcp"}
        say(Spy(), TOKEN, b"request", theirs, request)  # type: ignore[arg-type]
        first.sendall(heard[0])
        assert all_of(first).endswith(DATA)
    with socket.create_connection(server.address) as second:
        read_greeting(second, Patience(5, 5))
        second.sendall(heard[0])
        assert all_of(second) == b""


def test_a_request_that_another_node_was_lured_into_is_no_answer():
    """A stranger greets it with the number that he has to answer, and passes on what it says."""
    lured, stranger = socket.socketpair()
    with lured, stranger:
        say(lured, TOKEN, b"request", b"n" * 32, {"bytes": 1})
        with pytest.raises(PeerError, match="does not have the run's token"):
            hear(stranger, TOKEN, b"answer", b"n" * 32, Patience(5, 5))


def test_a_request_without_bounds_is_refused_unread(server):
    with socket.create_connection(server.address) as peer:
        read_greeting(peer, Patience(5, 5))
        peer.sendall(struct.pack("!32s32sI", b"n" * 32, b"m" * 32, 1 << 31))
        began_s = time.monotonic()
        assert all_of(peer) == b""  # although none of its text was sent
    assert time.monotonic() - began_s < 2


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"tier": "memory", "name": "..", "path": "passwd"}, "no name of a checkpoint"),
        ({"tier": "memory", "name": NAME, "path": "../../../passwd"}, "no path"),
        ({"tier": "memory", "name": NAME, "path": "/etc/passwd"}, "no path"),
        ({"tier": "memory", "name": NAME, "path": MANIFEST_NAME}, "no path"),
        ({"tier": "memory", "name": NAME, "path": "link/secret"}, "not here"),
        ({"tier": "local", "name": NAME, "path": "rank/x.distcp"}, "not here"),
        ({"tier": "memory", "name": NAME}, "names no"),
        ({"tier": 1, "name": NAME, "path": "x"}, "names no"),
        (["memory"], "names no"),
    ],
)
def test_only_files_of_checkpoints_are_served(source, server, tmp_path, request_, words):
    (tmp_path / "secret").write_text("secret")
    (source.folder(NAME) / "link").symlink_to(tmp_path)
    with socket.create_connection(server.address) as peer:
        theirs = read_greeting(peer, Patience(5, 5))
        ours = say(peer, TOKEN, b"request", theirs, request_)
        _, answer = hear(peer, TOKEN, b"answer", ours, Patience(5, 5))
        assert list(answer) == ["problem"]
        assert words in answer["problem"]
        assert all_of(peer) == b""


def test_strangers_who_only_connect_keep_nobody_out_for_long(source, target, monkeypatch):
    """Each place is taken; who drips a byte now and then loses it as well."""
    monkeypatch.setattr(wire, "_HANDSHAKE_S", 0.4)
    monkeypatch.setattr(wire, "_CONNECTIONS", 3)
    with serving(source) as server, contextlib.ExitStack() as stack:
        stop = threading.Event()
        strangers = [
            stack.enter_context(socket.create_connection(server.address)) for _ in range(3)
        ]

        def drip() -> None:
            while not stop.wait(0.05):
                for peer in strangers:
                    with contextlib.suppress(OSError):
                        peer.sendall(b"x")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            copy(server, target)
        finally:
            stop.set()
            thread.join()
    assert here(target) == DATA


def test_who_asks_and_then_takes_nothing_loses_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr(wire, "_SILENCE_S", 0.2)
    source = Depot(tmp_path / "source", sync=False)
    data = bytes(32 << 20)  # more than the kernel's buffers take
    source.put(NAME, entry_of(data), [data])
    with serving(source) as server, socket.create_connection(server.address) as peer:
        theirs = read_greeting(peer, Patience(5, 5))
        request = {"tier": "memory", "name": NAME, "path": "rank/x.distcp"}
        say(peer, TOKEN, b"request", theirs, request)
        deadline_s = time.monotonic() + 3
        while server._peers:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


def test_a_server_that_is_closed_ends_what_it_sends(tmp_path, target):
    source = Depot(tmp_path / "source", sync=False)
    data = bytes(32 << 20)
    source.put(NAME, entry_of(data), [data])
    with serving(source) as server:
        closing = Throttle(1.0, sleep=lambda _: server.close())
        with pytest.raises(CopyError):
            copy(server, target, entry_of(data), throttle=closing)
    assert files_below(target.root) == []
    assert not server._thread.is_alive()
