"""Files from node to node over TCP: the kernel sends them, the depot that takes them in checks every byte.

A connection carries one file: greeting, request (tier, checkpoint, path), answer (size), content; see
:mod:`ray_ckpt.tiers.handshake` for who may ask. Every wait is bounded, and so are connections and requests.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import TracebackType

from ray_ckpt.checkpoint.manifest import FileEntry
from ray_ckpt.checkpoint.names import is_record, parse_checkpoint_name
from ray_ckpt.checkpoint.paths import NotPlainFileError, open_plain, path_fault
from ray_ckpt.errors import ConfigError, CopyError, CutOffError
from ray_ckpt.fault_points import fault_point
from ray_ckpt.tiers.depot import Depot
from ray_ckpt.tiers.handshake import (
    SHORTEST_TOKEN_BYTES,
    Patience,
    PeerError,
    greet,
    hear,
    read_greeting,
    say,
)
from ray_ckpt.tiers.throttle import Throttle

OpenFile = Callable[[str, str, str], Path | None]

_log = logging.getLogger(__name__)

_CONNECTIONS = 16  # at once; more wait in the kernel's queue
_HANDSHAKE_S = 10.0  # all of it, for who connects: a stranger does not hold a place for longer
_SILENCE_S = 120.0  # a client that is throttled may take nothing for that long
_SLOWEST_BYTES_PER_S = 64 << 10  # whoever is slower on the whole is given up
_PIECE_BYTES = 16 << 20  # that the kernel sends at a time
_CHUNK_BYTES = 1 << 20  # that are received at a time
_REQUEST, _ANSWER = b"request", b"answer"


class RefusedError(PeerError):
    """The other side has not what it is asked for."""


class FileServer:
    """Serves files of one node's depots to the run's other nodes, until it is closed.

    Args:
        open_file: (tier, checkpoint, path) to the file, None when it is not here; such as
            :meth:`ray_ckpt.tiers.depot.Depot.find`. Called from several threads.
        host: the node's own address, the one that others connect to; IPv4, IPv6 or a name.
        token: of the run, at least 16 random bytes.

    Raises:
        ConfigError: the token is too short.
        OSError: the address is not one of this node.
    """

    def __init__(self, open_file: OpenFile, *, host: str, token: bytes) -> None:
        self._open_file, self._host, self._token = open_file, host, _checked(token)
        family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._listener = socket.create_server((str(place[0]), 0), family=family, backlog=64)
        self._port = int(self._listener.getsockname()[1])
        self._places = threading.BoundedSemaphore(_CONNECTIONS)
        self._lock = threading.Lock()
        self._peers: set[socket.socket] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="file-server", daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """What others connect to."""
        return self._host, self._port

    def close(self) -> None:
        """Ends every connection and serves no more."""
        with self._lock:
            self._closed.set()
            for peer in self._peers:
                _hang_up(peer)
        _hang_up(self._listener)  # wakes whoever waits in accept
        self._listener.close()
        self._thread.join(5.0)

    def __enter__(self) -> FileServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            if not self._places.acquire(timeout=1.0):
                continue
            try:
                peer, where = self._listener.accept()
            except OSError as error:
                self._places.release()
                # Such as no descriptor left; somebody will close one.
                if not self._closed.wait(0.1):
                    _log.warning("files are not served for a moment: %s", error)
                continue
            with self._lock:
                self._peers.add(peer)
                if self._closed.is_set():
                    _hang_up(peer)
            try:
                threading.Thread(
                    target=self._attend, args=(peer, str(where[0])), name="file-peer", daemon=True
                ).start()
            except RuntimeError as error:  # no thread left; the next client may find one
                _log.warning("no file for %s: %s", where[0], error)
                self._leave(peer)

    def _attend(self, peer: socket.socket, where: str) -> None:
        try:
            self._serve(peer)
        except (PeerError, OSError) as error:
            _log.info("no file for %s: %s", where, error)
        except Exception:  # noqa: BLE001 - whatever fails for one client, the next one is served
            _log.exception("no file for %s", where)
        finally:
            self._leave(peer)

    def _leave(self, peer: socket.socket) -> None:
        with self._lock:
            self._peers.discard(peer)
        peer.close()
        self._places.release()

    def _serve(self, peer: socket.socket) -> None:
        peer.settimeout(_HANDSHAKE_S)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ours = greet(peer)
        patience = Patience(_HANDSHAKE_S, _HANDSHAKE_S)
        theirs, request = hear(peer, self._token, _REQUEST, ours, patience)
        handle, problem = self._find(request)
        if handle is None:
            say(peer, self._token, _ANSWER, theirs, {"problem": problem})
            return
        try:
            size = os.fstat(handle).st_size
            say(peer, self._token, _ANSWER, theirs, {"bytes": size})
            _send(peer, handle, size)
        finally:
            os.close(handle)

    def _find(self, request: object) -> tuple[int | None, str]:
        """A descriptor of what is asked for, or why there is none."""
        match request:
            case {"tier": str(tier), "name": str(name), "path": str(path)}:
                pass
            case _:
                return None, "the request names no tier, checkpoint and path"
        if parse_checkpoint_name(name) is None:
            return None, "that is no name of a checkpoint"
        if path_fault(path) or is_record(path):
            return None, "that is no path of a checkpoint's file"
        try:
            place = self._open_file(tier, name, path)
            return (None, "it is not here") if place is None else (open_plain(place), "")
        except (OSError, NotPlainFileError) as error:
            return None, f"it cannot be opened ({error})"


def fetch(
    address: tuple[str, int],
    token: bytes,
    tier: str,
    name: str,
    entry: FileEntry,
    into: Depot,
    throttle: Throttle,
    timeout_s: float = 30.0,
) -> None:
    """Copies a file from another node's depot; does nothing when the right one is here.

    Args:
        address: of the other node's :class:`FileServer`.
        token: of the run.
        tier: of the depot to take it from.
        name: of the checkpoint.
        entry: of the file in the checkpoint's manifest.
        into: where it goes.
        throttle: how fast it may come.
        timeout_s: longest that the other node may be silent.

    Raises:
        ConfigError: the token is too short.
        CutOffError: the other node is gone, or does not go on; nothing of it stays.
        CopyError: it has not the file, or what came is not the file; nothing of it stays.
        StorageError: this node's tier is full, or refused; nothing of it stays.
    """
    stream = _stream(address, _checked(token), tier, name, entry, throttle, timeout_s)
    with contextlib.closing(stream):
        into.put(name, entry, stream)


def _stream(
    address: tuple[str, int],
    token: bytes,
    tier: str,
    name: str,
    entry: FileEntry,
    throttle: Throttle,
    timeout_s: float,
) -> Generator[memoryview, None, None]:
    """The content as it comes; a connection is made when the first piece is asked for."""
    patience = Patience(timeout_s, timeout_s + entry.bytes / _SLOWEST_BYTES_PER_S)
    try:
        with socket.create_connection(address, timeout_s) as peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _ask(peer, token, tier, name, entry, patience)
            # One buffer: receiving ahead on another thread, beside hash and write, was measured as no faster.
            buffer, left = memoryview(bytearray(_CHUNK_BYTES)), entry.bytes
            while left:
                fault_point("wire.receive")
                count = patience.receive(peer, buffer[:left])
                if not count:
                    raise PeerError(f"truncated: it ended {left} bytes before the end")
                throttle.spend(count)
                yield buffer[:count]
                left -= count
    except (PeerError, OSError) as error:
        host, port = address
        kind = CopyError if isinstance(error, RefusedError) else CutOffError
        raise kind(
            f"copy of {entry.path} of {name} from {host} port {port}: {error}; nothing of it is kept. Copy it from "
            "another node, or retry."
        ) from error


def _ask(
    peer: socket.socket, token: bytes, tier: str, name: str, entry: FileEntry, patience: Patience
) -> None:
    theirs = read_greeting(peer, patience)
    request = {"tier": tier, "name": name, "path": entry.path}
    ours = say(peer, token, _REQUEST, theirs, request)
    _, answer = hear(peer, token, _ANSWER, ours, patience)
    match answer:
        case {"bytes": int(size)}:
            if size != entry.bytes:
                raise RefusedError(
                    f"truncated or another file: it has {size} of {entry.bytes} bytes"
                )
        case {"problem": str(problem)}:
            raise RefusedError(problem)
        case _:
            raise PeerError("its answer says nothing")


def _send(peer: socket.socket, handle: int, size: int) -> None:
    """The content of a file, in the kernel; what is written into it meanwhile is found by the checksum."""
    writable = select.poll()
    writable.register(peer, select.POLLOUT)
    peer.setblocking(False)
    sent, left_s = 0, _SILENCE_S + size / _SLOWEST_BYTES_PER_S
    while sent < size:
        started = time.monotonic()
        fault_point("wire.send")
        if left_s <= 0 or not writable.poll(1000 * min(_SILENCE_S, left_s)):
            raise TimeoutError("it takes nothing, or too slowly")
        left_s -= time.monotonic() - started
        with contextlib.suppress(BlockingIOError):
            count = os.sendfile(peer.fileno(), handle, sent, min(_PIECE_BYTES, size - sent))
            if not count:
                raise PeerError("the file was cut while it was sent")
            sent += count


def _hang_up(peer: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side was faster
        peer.shutdown(socket.SHUT_RDWR)


def _checked(token: bytes) -> bytes:
    if len(token) < SHORTEST_TOKEN_BYTES:
        raise ConfigError(
            f"the token of the run has {len(token)} bytes: must be at least {SHORTEST_TOKEN_BYTES} random ones"
        )
    return token
