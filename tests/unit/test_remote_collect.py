"""Deleting on a store without rename: a stop at any request leaves a whole checkpoint or an uncommitted one.

The store is a folder, reached by its address: every call that changes or reads it can be made the last.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from disk import add_checkpoint

from ray_ckpt.checkpoint import signature
from ray_ckpt.checkpoint.manifest import FileEntry, read_manifest
from ray_ckpt.checkpoint.names import MANIFEST_NAME, checkpoint_name
from ray_ckpt.checkpoint.signature import parse_keys
from ray_ckpt.checkpoint.verify import Fault, hash_file
from ray_ckpt.errors import (
    ConfigError,
    DamagedCopyError,
    ManifestError,
    StaleGenerationError,
    StorageError,
)
from ray_ckpt.tiers import remote_pins
from ray_ckpt.tiers.address import open_filesystem
from ray_ckpt.tiers.collect import LEAVING_NAME, Gate
from ray_ckpt.tiers.remote import RemoteTier
from ray_ckpt.tiers.remote_collect import drop, mend
from ray_ckpt.tiers.remote_house import RemoteRound, keep_remote_house
from ray_ckpt.tiers.remote_pins import pin, read_pins, unpin
from ray_ckpt.tiers.remote_records import pull_records, push_records
from ray_ckpt.tiers.remote_store import RemoteStore
from ray_ckpt.tiers.retries import RetryRule
from ray_ckpt.tiers.rules import Rules

AT_ONCE = RetryRule(tries=2, first_pause_s=0.0, absent_pause_s=0.0)


class Stopped(BaseException):
    """The process ends here."""


class Said:
    """A file system that tells of each call before it is made."""

    def __init__(self, fs: Any, say: Any) -> None:
        self._fs, self._say = fs, say

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._fs, name)

        def call(*args: Any, **more: Any) -> Any:
            self._say(name, args[0])
            return method(*args, **more)

        return call


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(remote_pins, "_BACK_S", 0.0)


def tier_of(tmp_path: Path, say: Any = lambda call, what: None) -> RemoteTier:
    def open_fs(uri: str, timeout_s: float) -> tuple[Any, str]:
        fs, base = open_filesystem(uri, timeout_s)
        return Said(fs, say), base

    store = RemoteStore(f"file://{tmp_path}/store", options=AT_ONCE, open_fs=open_fs)
    return RemoteTier(store, "demo")


def add(tmp_path: Path, step: int, *, commit: bool = True) -> str:
    """A checkpoint on the store; its source stays in a folder beside."""
    folder = add_checkpoint(tmp_path / "local", step)
    manifest, tier = read_manifest(folder), tier_of(tmp_path)
    for entry in manifest.files:
        tier.put(folder.name, entry, folder / entry.path)
    if commit:
        tier.seal(folder.name, manifest)
    return folder.name


def whole(tier: RemoteTier) -> set[str]:
    entries = [entry for entry in tier.entries() if entry.committed]
    for entry in entries:
        assert entry.manifest is not None, entry.fault
        assert tier.verify(entry.folder.name) == []
    return {entry.folder.name for entry in entries}


def stopper(count: int):
    """Ends the process at its ``count``-th call."""
    left = [count]

    def say(call: str, what: object) -> None:
        left[0] -= 1
        if left[0] <= 0:
            raise Stopped

    return say


@pytest.mark.parametrize("pinned_when", ["never", "meanwhile"])
def test_a_drop_that_is_stopped_anywhere_leaves_a_whole_checkpoint_or_none(tmp_path, pinned_when):
    at, seen = 0, set()
    while True:
        at += 1
        place = tmp_path / str(at)
        name = add(place, 10)
        try:
            drop(tier_of(place, stopper(at)), name)
            stopped = False
        except Stopped:
            stopped = True
        tier = tier_of(place)
        left = whole(tier)
        assert left <= {name}
        seen.add(bool(left))
        if pinned_when == "meanwhile":
            # A pin that was written before the collector died, and saw the manifest.
            if left:
                pin(tier, name, "a paper", author="ada", time_s=1.0)
                assert drop(tier, name).kept
                assert whole(tier) == {name}
        else:
            assert drop(tier, name).problem == ""
            assert tier.entries() == []
        if not stopped:
            break
    assert at > 10
    assert seen == {True, False}


def test_a_pin_at_any_point_of_a_drop_holds_or_is_refused(tmp_path):
    at, held = 0, set()
    while True:
        at += 1
        place, calls, refused = tmp_path / str(at), [0], []
        name = add(place, 10)

        def say(call, what, calls=calls, place=place, name=name, refused=refused, at=at):
            calls[0] += 1
            if calls[0] == at:
                try:
                    # Seen as the one who pins sees it who looks for the manifest right after the write.
                    pin(tier_of(place), name, "a paper", author="ada", time_s=1.0)
                except ConfigError:
                    refused.append(True)

        outcome = drop(tier_of(place, say), name)
        if calls[0] < at:
            break
        left = whole(tier_of(place))
        assert (left == {name}) == (not refused)
        assert outcome.kept == (not refused)
        held.add(not refused)
    assert held == {True, False}


def test_a_pin_brings_back_what_a_collector_that_died_had_ended(tmp_path):
    name = add(tmp_path, 10)
    tier = tier_of(tmp_path)
    data = tier.store.read(tier.place(name, MANIFEST_NAME))
    pin(tier, name, "a paper", author="ada", time_s=1.0)
    tier.store.write(tier.place(name, LEAVING_NAME), data)
    tier.store.delete(tier.place(name, MANIFEST_NAME))
    assert whole(tier) == set()
    mend(tier)
    assert whole(tier) == {name}
    assert [p.words for p in unpin(tier, name)] == ["a paper (ada)"]
    assert read_pins(tier, name) == ()


def round_of(tier: RemoteTier, **changes: Any) -> RemoteRound:
    values: dict[str, Any] = {
        "tier": tier,
        "rules": Rules(keep_newest=1),
        "generation": 1,
        "newest_generation": lambda: 1,
        "present_generation": 2,
        "verified": set(),
        "in_use": {},
        "read_back": tier.verify,
        "gate": Gate(),
    }
    return RemoteRound(**{**values, **changes})


def test_older_ones_go_only_after_the_newest_was_read_back_from_this_store(tmp_path):
    for step in (10, 20, 30):
        add(tmp_path, step)
    add(tmp_path, 15, commit=False)
    tier, later_s = tier_of(tmp_path), time.time() + 1e6
    first = keep_remote_house(round_of(tier), now_s=later_s)
    assert first.to_read == checkpoint_name(30, 1)
    assert first.faults == ()
    assert len(whole(tier)) == 3
    second = keep_remote_house(round_of(tier, verified={first.to_read}), now_s=later_s)
    assert [outcome.problem for outcome in second.outcomes] == ["", "", ""]
    assert whole(tier) == {checkpoint_name(30, 1)}
    assert len(tier.entries()) == 1  # what was never committed went as well


def test_a_damaged_newest_one_keeps_all_others(tmp_path):
    names = [add(tmp_path, step) for step in (10, 20)]
    tier = tier_of(tmp_path)
    tier.store.write(tier.place(names[1], "rank/rng.json"), b"other")
    found = keep_remote_house(round_of(tier), now_s=time.time() + 1e6)
    assert found.faults
    assert found.outcomes == ()
    tier.quarantine(names[1], "found bad", [{"path": "rank/rng.json"}], time_s=1.0)
    entry = tier.entries()[0]
    assert entry.quarantined == "found bad"
    verified = {"verified": set(names)}
    keep_remote_house(round_of(tier, **verified), now_s=time.time() + 1e6)
    assert {e.folder.name for e in tier.entries()} == set(names)  # the only good one, and evidence


def test_errors_while_looking_delete_nothing(tmp_path):
    names = [add(tmp_path, step) for step in (10, 20)]

    def say(call: str, what: object) -> None:
        if names[0] in str(getattr(what, "base_dir", what)):
            raise OSError("the store is away")

    verified = {names[1]}
    keep_remote_house(round_of(tier_of(tmp_path, say), verified=verified), now_s=time.time() + 1e6)
    assert whole(tier_of(tmp_path)) == set(names)


def test_a_newer_attempt_or_a_shut_gate_ends_a_round(tmp_path):
    names = [add(tmp_path, step) for step in (10, 20)]
    tier, gate = tier_of(tmp_path), Gate()
    stale = round_of(tier, verified={names[1]}, newest_generation=lambda: 2)
    with pytest.raises(StaleGenerationError):
        keep_remote_house(stale, now_s=time.time())
    gate.shut()
    keep_remote_house(round_of(tier, verified={names[1]}, gate=gate), now_s=time.time())
    assert whole(tier) == set(names)


def test_a_commit_is_never_changed_and_one_that_was_cut_off_can_be_ended(tmp_path):
    name = add(tmp_path, 10)
    tier, place = tier_of(tmp_path), f"demo/checkpoints/{checkpoint_name(10, 1)}/{MANIFEST_NAME}"
    manifest, data = tier.manifest(name), tier.store.read(place)
    tier.store.write(place, data[:40])
    assert not tier.entries()[0].usable
    tier.seal(name, manifest)
    assert tier.store.read(place) == data
    tier.store.write(place, data.replace(b"2.5", b"2.6"))
    with pytest.raises(ManifestError, match="already committed with other content"):
        tier.seal(name, manifest)
    with pytest.raises(ManifestError, match="does not belong into"):
        tier.seal(checkpoint_name(11, 1), manifest)


def test_signed_manifests_are_asked_for_on_the_store_too(tmp_path):
    name, tier = add(tmp_path, 10), tier_of(tmp_path)
    manifest = tier.manifest(name)
    signature.install(parse_keys("k" * 32))
    try:
        assert tier.entries()[0].mistrusted
        assert tier.verify(name)[0].unreadable
        with pytest.raises(ManifestError, match="cannot be signed"):
            tier.seal(name, manifest)
        with pytest.raises(ConfigError, match="RAY_CKPT_KEY is probably wrong"):
            keep_remote_house(round_of(tier), now_s=1e12)
    finally:
        signature.install(None)


def test_a_source_with_other_bytes_is_not_sent_and_the_copy_is_not_lost(tmp_path):
    name, tier = add(tmp_path, 10), tier_of(tmp_path)
    other = tmp_path / "other"
    other.write_bytes(b"not it")
    entry = tier.manifest(name).files[0]
    with pytest.raises(DamagedCopyError, match=r"of .* bytes"):
        tier.put(checkpoint_name(11, 1), entry, other)
    assert tier.store.list(tier.place(checkpoint_name(11, 1))) == []
    tier.put(name, entry, other)  # it is there already: the source is not looked at
    assert tier.verify(name) == []
    with pytest.raises(StorageError, match="cannot read"):
        tier.put(name, FileEntry("new", *hash_file(other)), tmp_path / "none")


def test_records_outlive_the_folder_and_never_overwrite_others(tmp_path):
    run, tier = tmp_path / "run", tier_of(tmp_path)
    run.mkdir()
    (run / "run.json").write_text('{"schema": 2}')
    (run / "journal.jsonl").write_text('{"a": 1}\n')
    push_records(tier, run)
    with (run / "journal.jsonl").open("a") as file:
        file.write('{"b": 1}\n')
    push_records(tier, run)
    back = tmp_path / "back"
    assert sorted(pull_records(tier, back)) == ["journal.jsonl", "run.json"]
    assert (back / "journal.jsonl").read_bytes() == (run / "journal.jsonl").read_bytes()
    assert sorted(p.name for p in back.iterdir()) == ["journal.jsonl", "run.json"]
    with pytest.raises(ConfigError, match="not overwritten"):
        pull_records(tier, back)
    (back / "journal.jsonl").write_text('{"other": 1}\n{"other": 2}\n')
    with pytest.raises(ConfigError, match="another run's"):
        push_records(tier, back)
    assert pull_records(RemoteTier(tier.store, "none"), tmp_path / "empty") == []


def test_extra_and_missing_files_are_named(tmp_path):
    name, tier = add(tmp_path, 10), tier_of(tmp_path)
    tier.store.write(tier.place(name, "stray"), b"x")
    tier.store.delete(tier.place(name, "rank/rng.json"))
    assert tier.verify(name) == [
        Fault("rank/rng.json", "missing"),
        Fault("stray", "not in the manifest"),
    ]
