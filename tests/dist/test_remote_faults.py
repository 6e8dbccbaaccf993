"""A checkpoint on an object store that fails in every way that stores fail: whole, or told; never half, never lost.

The store speaks S3 on loopback; the faults are answers of the server.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from disk import add_checkpoint
from s3 import ObjectStore, object_store

from ray_ckpt.checkpoint.manifest import FileEntry, Manifest, read_manifest
from ray_ckpt.checkpoint.names import MANIFEST_NAME
from ray_ckpt.checkpoint.verify import Fault, hash_file
from ray_ckpt.cli import main
from ray_ckpt.errors import DamagedCopyError, StorageError
from ray_ckpt.tiers import remote_store
from ray_ckpt.tiers.address import open_filesystem
from ray_ckpt.tiers.collect import LEAVING_NAME
from ray_ckpt.tiers.remote import RemoteTier
from ray_ckpt.tiers.remote_collect import drop
from ray_ckpt.tiers.remote_store import RemoteStore
from ray_ckpt.tiers.retries import RetryRule

pytestmark = pytest.mark.dist

QUICK = RetryRule(tries=5, first_pause_s=0.01, absent_pause_s=0.01, timeout_s=1.0)


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with object_store() as store:
        yield store


@pytest.fixture
def store(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """The store, without faults yet."""
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "new"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_EC2_METADATA_DISABLED", "true"),
    ):
        monkeypatch.setenv(name, value)
    server.fail()
    return server


class Copy:
    """A checkpoint in a folder, and the tier that it goes to."""

    def __init__(self, store: ObjectStore, tmp_path: Path, **options: object) -> None:
        self.folder = add_checkpoint(tmp_path / "demo", 10)
        self.name, self.manifest = self.folder.name, read_manifest(self.folder)
        uri = store.uri(f"of/{tmp_path.name}")
        self.tier = RemoteTier(RemoteStore(uri, options=QUICK, **options), "demo")  # type: ignore[arg-type]

    def put(self) -> None:
        for entry in self.manifest.files:
            self.tier.put(self.name, entry, self.folder / entry.path)
        self.tier.seal(self.name, self.manifest)

    def get(self, to: Path) -> None:
        for entry in self.manifest.files:
            self.tier.get(self.name, entry, to / entry.path)
            assert (to / entry.path).read_bytes() == (self.folder / entry.path).read_bytes()


def all_well(copy: Copy, tmp_path: Path) -> None:
    [entry] = copy.tier.entries()
    assert entry.usable
    assert entry.manifest == copy.manifest
    assert copy.tier.verify(copy.name) == []
    copy.get(tmp_path / "back")


@pytest.mark.parametrize(
    ("rule", "least_retries"),
    [
        pytest.param({"do": "503", "every": 3}, 10, id="503 to every third request"),
        pytest.param({"do": "404", "method": "HEAD", "path": "COMMITTED", "once": True}, 1, id="404 once"),
        pytest.param({"do": "hang", "seconds": 5.0, "skip": 2, "times": 2}, 2, id="no answer"),
        pytest.param({"do": "slow", "seconds": 0.05}, 0, id="slow"),
    ],
)  # fmt: skip
def test_a_checkpoint_gets_there_and_back_whole_whatever_the_store_answers(
    store, tmp_path, rule, least_retries
):
    copy = Copy(store, tmp_path)
    store.fail(rule)
    copy.put()
    if rule.get("once"):
        store.fail(rule)
    all_well(copy, tmp_path)
    assert store.done[0] > 0
    assert copy.tier.store.retries >= least_retries


def test_a_store_that_does_not_answer_is_told_within_the_time_of_the_tries(store, tmp_path):
    copy = Copy(store, tmp_path)
    store.fail({"do": "hang", "seconds": 30.0})
    started = time.monotonic()
    with pytest.raises(StorageError, match=r"cannot read s3://bucket/of/.*\(5 tries\)\. An error"):
        copy.tier.store.read("small")
    assert time.monotonic() - started < 5 * QUICK.timeout_s + 3
    assert copy.tier.store.retries == 4


def test_what_is_there_outlives_a_write_that_fails(store, tmp_path):
    copy = Copy(store, tmp_path)
    copy.tier.store.write("journal", b"old")
    store.fail({"do": "503", "method": "PUT"})
    with pytest.raises(StorageError, match="cannot write"):
        copy.tier.store.write("journal", b"new")
    assert copy.tier.store.read("journal") == b"old"


@pytest.mark.parametrize("do", ["503", "expired"])
def test_an_error_is_never_an_absence(store, tmp_path, do):
    copy = Copy(store, tmp_path)
    copy.put()
    store.fail({"do": do})
    with pytest.raises(StorageError):
        copy.tier.entries()
    with pytest.raises(StorageError):
        copy.tier.manifest(copy.name)
    assert copy.tier.verify(copy.name)[0].unreadable
    store.fail({"do": do, "path": MANIFEST_NAME})
    [entry] = copy.tier.entries()
    assert entry.unreadable
    assert entry.committed
    assert not entry.usable


def test_not_found_is_asked_for_twice(store, tmp_path):
    copy = Copy(store, tmp_path)
    store.fail({"do": "404", "times": 1})
    copy.tier.store.write("demo/small", b"x")
    store.fail({"do": "404", "method": "HEAD", "times": 1})
    assert copy.tier.store.read("demo/small") == b"x"
    assert copy.tier.store.size("demo/small") == 1
    store.fail()
    assert copy.tier.store.read("demo/none") is None
    assert len(store.log) == 2


def test_keys_that_expire_are_taken_anew(store, tmp_path, monkeypatch):
    opened = []

    def open_fs(uri: str, timeout_s: float):
        # As a process does whose keys are renewed in its surroundings: what is open keeps the old ones.
        key = "old" if not opened else "new"
        opened.append(key)
        return open_filesystem(uri.replace("s3://", f"s3://{key}:secret@"), timeout_s)

    copy = Copy(store, tmp_path, open_fs=open_fs)
    copy.tier.store.write("first", b"x")
    store.fail({"do": "expired", "key": "old"})
    copy.put()
    all_well(copy, tmp_path)
    assert opened == ["old", "new"]
    assert copy.tier.store.reopened == 1


def test_keys_that_stay_refused_are_named_as_the_cause_and_never_shown(store, tmp_path):
    uri = store.uri("x").replace("s3://", "s3://AKIAQ:hush%2Fhush@")
    remote = RemoteStore(uri, options=QUICK)
    store.fail({"do": "expired"})
    with pytest.raises(StorageError, match="keys are refused") as caught:
        remote.write("small", b"x")
    assert remote.reopened >= QUICK.tries - 1
    for secret in ("AKIAQ", "hush", "endpoint_override"):
        assert secret not in str(caught.value)
    assert caught.value.__cause__ is None
    assert "s3://bucket/x/small" in str(caught.value)


def big_file(tmp_path: Path) -> tuple[Path, FileEntry]:
    path = tmp_path / "big"
    path.write_bytes(bytes(range(256)) * (96 << 10))  # three pieces
    return path, FileEntry("big", *hash_file(path))


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_upload_that_is_cut_off_leaves_nothing_that_is_committed(
    store, tmp_path, monkeypatch, at
):
    copy, (path, entry) = Copy(store, tmp_path), big_file(tmp_path)
    real = remote_store.RemoteStore.upload

    class Cut(BaseException):
        """A signal, or the end of the interpreter."""

    def upload(self, place, chunks):
        def some():
            for number, chunk in enumerate(chunks()):
                if number == at:
                    raise Cut
                yield chunk

        real(self, place, some)

    monkeypatch.setattr(remote_store.RemoteStore, "upload", upload)
    with pytest.raises(Cut):
        copy.tier.put(copy.name, entry, path)
    assert copy.tier.store.read(copy.tier.place(copy.name, "big")) is None
    assert [e for e in copy.tier.entries() if e.committed] == []
    monkeypatch.undo()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "new")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    copy.tier.put(copy.name, entry, path)
    assert copy.tier.fault_of(copy.name, entry) is None


def test_a_large_file_survives_failures_of_its_pieces_and_is_not_sent_again(store, tmp_path):
    copy, (path, entry) = Copy(store, tmp_path), big_file(tmp_path)
    store.fail(
        {"do": "503", "method": "PUT", "times": 2}, {"do": "503", "method": "GET", "every": 2}
    )
    copy.tier.put(copy.name, entry, path)
    copy.tier.get(copy.name, entry, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == path.read_bytes()
    assert min(store.done) > 0
    store.fail()
    copy.tier.put(copy.name, entry, path)
    assert not [line for line in store.log if line.startswith(("PUT", "POST"))]


def damage(copy: Copy, how: str) -> Fault | None:
    """Does something to the first file of a checkpoint on the store; what should be found."""
    store, first = copy.tier.store, copy.manifest.files[1]
    place = copy.tier.place(copy.name, first.path)
    data = store.read(place)
    assert data is not None
    if how == "flipped":
        store.write(place, data[:3] + bytes([data[3] ^ 1]) + data[4:])
        return Fault(first.path, "checksum differs")
    if how == "truncated":
        store.write(place, data[:-1])
        return Fault(first.path, f"truncated: {len(data) - 1} of {len(data)} bytes")
    if how == "missing":
        store.delete(place)
        return Fault(first.path, "missing")
    if how == "extra":
        store.write(copy.tier.place(copy.name, "rank/stray"), b"x")
        return Fault("rank/stray", "not in the manifest")
    other = copy.manifest.files[2]  # of the same length
    store.write(place, store.read(copy.tier.place(copy.name, other.path)) or b"")
    return Fault(first.path, "checksum differs")


@pytest.mark.parametrize("how", ["flipped", "truncated", "missing", "extra", "swapped"])
def test_damage_on_the_store_is_found_told_and_never_brought_back(store, tmp_path, how):
    copy = Copy(store, tmp_path)
    copy.put()
    fault = damage(copy, how)
    assert copy.tier.verify(copy.name) == [fault]
    assert copy.tier.entries()[0].usable  # a cheap look reads no bytes
    if how == "extra":
        return
    entry, to = copy.manifest.files[1], tmp_path / "back" / "file"
    with pytest.raises(DamagedCopyError, match=fault.fault) as caught:
        copy.tier.get(copy.name, entry, to)
    assert caught.value.path == entry.path
    assert list(to.parent.iterdir()) == []
    copy.put()  # what is whole is left alone, what is not is sent again
    assert copy.tier.verify(copy.name) == []


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (half, "not valid JSON, perhaps half-written"),
        (lambda data: b"", "empty file"),
        (lambda data: data.replace(b'"schema": 1', b'"schema": 9'), "schema is 9"),
        (lambda data: data.replace(b'"step": 10', b'"step": 11'), "its own checksum differs"),
    ],
)
def test_a_manifest_that_is_not_whole_is_neither_used_nor_an_absence(store, tmp_path, change, says):
    copy = Copy(store, tmp_path)
    copy.put()
    place = copy.tier.place(copy.name, MANIFEST_NAME)
    whole = copy.tier.store.read(place)
    copy.tier.store.write(place, change(whole))
    [entry] = copy.tier.entries()
    assert not entry.usable
    assert entry.committed
    assert says in str(entry.fault)
    assert copy.tier.verify(copy.name)[0].path == MANIFEST_NAME


def test_a_manifest_is_one_request_and_comes_last(store, tmp_path):
    copy = Copy(store, tmp_path)
    copy.put()
    sent = [line for line in store.log if line.startswith(("PUT", "POST"))]
    assert [MANIFEST_NAME in line for line in sent].index(True) == len(sent) - 1
    assert isinstance(copy.manifest, Manifest)


def test_the_command_line_works_on_the_address_of_a_run(store, tmp_path, capsys):
    copy = Copy(store, tmp_path)
    copy.put()
    address = store.uri(f"of/{tmp_path.name}/demo")
    assert main(["ls", address, "--json"]) == 0
    [line] = json.loads(capsys.readouterr().out)
    assert (line["step"], line["tiers"], line["fault"]) == (10, ["durable"], None)
    assert main(["verify", address]) == 0
    damage(copy, "flipped")
    assert main(["verify", address]) == 1
    out = capsys.readouterr().out
    assert f"s3://bucket/of/{tmp_path.name}/demo/checkpoints/{copy.name}/" in out
    assert "checksum differs" in out
    assert "endpoint_override" not in out


@pytest.mark.parametrize(
    "rule", [{"do": "503", "every": 3}, {"do": "503", "method": "DELETE", "times": 1}]
)
def test_a_store_that_fails_while_it_deletes_is_asked_until_nothing_is_left(store, tmp_path, rule):
    copy = Copy(store, tmp_path)
    copy.put()
    # One deletion is three requests to S3, any of which may be the third.
    copy.tier.store.rule = replace(QUICK, tries=40, longest_pause_s=0.02)
    store.fail(rule)
    assert drop(copy.tier, copy.name).problem == ""
    assert store.done[0] > 0
    store.fail()
    assert copy.tier.entries() == []


@pytest.mark.parametrize("after", range(4))
def test_a_store_that_goes_away_while_it_deletes_leaves_a_whole_one_or_files_on_their_way_out(
    store, tmp_path, after
):
    copy = Copy(store, tmp_path)
    copy.put()
    store.fail({"do": "503", "method": "DELETE", "skip": after})
    assert drop(copy.tier, copy.name).problem
    store.fail()
    [entry] = copy.tier.entries()
    if entry.committed:
        assert copy.tier.verify(copy.name) == []
    else:
        assert LEAVING_NAME in entry.records
    assert drop(copy.tier, copy.name).problem == ""
    assert copy.tier.entries() == []
