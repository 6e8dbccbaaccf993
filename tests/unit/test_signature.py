"""With a key, nothing is restored that its holder has not signed; without one, nothing is new."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from making import manifest_of, tracker_of

from ray_ckpt import cli
from ray_ckpt.checkpoint import signature
from ray_ckpt.checkpoint import verify as verify_module
from ray_ckpt.checkpoint.listing import list_checkpoints
from ray_ckpt.checkpoint.manifest import (
    FileEntry,
    Manifest,
    encode_manifest,
    read_manifest,
    write_manifest,
)
from ray_ckpt.checkpoint.names import MANIFEST_NAME, checkpoint_name
from ray_ckpt.checkpoint.quarantine import write_quarantine
from ray_ckpt.checkpoint.signature import KEY_VARIABLE, Keys, parse_keys
from ray_ckpt.checkpoint.verify import verify_files
from ray_ckpt.errors import ConfigError, ManifestError, RestoreError, SignatureError
from ray_ckpt.tiers.collect import LEAVING_NAME, Gate
from ray_ckpt.tiers.housekeeping import Round, keep_house, read_back
from ray_ckpt.tiers.pins import pin
from ray_ckpt.tiers.rules import Rules

KEY, OTHER = "a key of the run: long", "0f" * 32
FILES = {".metadata": b"meta", "__0_0.distcp": bytes(range(64))}


@pytest.fixture(autouse=True)
def _own_process(monkeypatch):
    """No key but what a test sets; a process says once that it does not check."""
    monkeypatch.setattr(signature, "_installed", signature._UNSET)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    signature.warn_unchecked.cache_clear()


def entry_of(path: str, content: bytes, *, strong: bool = True) -> FileEntry:
    sha256 = hashlib.sha256(content).hexdigest() if strong else None
    return FileEntry(path, len(content), xxhash.xxh3_128_hexdigest(content), sha256)


def make_manifest(step: int = 12, *, strong: bool = True) -> Manifest:
    return manifest_of(
        run="demo",
        step=step,
        sample_offset=8 * step,
        tokens=64 * step,
        world_size=2,
        files=tuple(entry_of(path, content, strong=strong) for path, content in FILES.items()),
        metrics={"loss": 2.5},
    )


def commit(run: Path, step: int = 12, *, strong: bool = True) -> Path:
    manifest = make_manifest(step, strong=strong)
    folder = run / "checkpoints" / manifest.name
    folder.mkdir(parents=True)
    for path, content in FILES.items():
        (folder / path).write_bytes(content)
    write_manifest(folder, manifest)
    return folder


def content_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# ---- the format -----------------------------------------------------------------------------------


def test_without_a_key_a_manifest_has_no_trace_of_signing(tmp_path):
    """The bytes are those of the format before there were keys."""
    manifest = make_manifest(strong=False)
    data = (commit(tmp_path, strong=False) / MANIFEST_NAME).read_bytes()
    text = json.dumps(manifest.to_json(), indent=1)
    head = text[:-2].encode() + b',\n "manifest_checksum": "'
    assert data == head + xxhash.xxh3_128_hexdigest(head).encode() + b'"\n}\n'
    assert b"sha256" not in data


def test_a_signed_manifest_is_read_with_its_key_and_is_plain_json(tmp_path, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    folder = commit(tmp_path)
    assert read_manifest(folder) == make_manifest()
    document = json.loads((folder / MANIFEST_NAME).read_bytes())
    assert list(document)[-2:] == ["manifest_signature", "manifest_checksum"]
    assert KEY not in (folder / MANIFEST_NAME).read_text()


def test_without_a_key_a_signed_manifest_is_read_with_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    for step in (1, 2, 3):
        commit(tmp_path, step)
    monkeypatch.delenv(KEY_VARIABLE)
    with caplog.at_level(logging.WARNING):
        assert all(entry.usable for entry in list_checkpoints(tmp_path))
    assert [record.getMessage().count("not checked") for record in caplog.records] == [1]


@pytest.mark.parametrize("signer", [None, OTHER])
def test_with_a_key_an_unsigned_or_foreign_manifest_is_told_as_such(tmp_path, monkeypatch, signer):
    if signer:
        monkeypatch.setenv(KEY_VARIABLE, signer)
    folder = commit(tmp_path)
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    said = "wrong signature" if signer else "not signed"
    with pytest.raises(SignatureError, match=said) as caught:
        read_manifest(folder)
    assert KEY not in str(caught.value)
    entry = list_checkpoints(tmp_path)[0]
    assert (entry.usable, entry.committed, entry.mistrusted) == (False, True, True)
    assert entry.unreadable, "somebody might delete or quarantine it for a wrong key"


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_is_changed_in_a_signed_manifest_is_refused_even_when_it_is_sealed_anew(data):
    """An attacker without the key: changes bytes, adds fields before or after the signature, seals again."""
    keys = parse_keys(KEY)
    good = encode_manifest(make_manifest().to_json(), keys)
    seal = b'"manifest_checksum": "'
    head = good.rpartition(seal)[0]
    action = data.draw(st.sampled_from(["flip", "after", "before", "twice", "drop"]))
    if action == "flip":
        place = data.draw(st.integers(0, len(head) - 1))
        bad = (
            head[:place] + bytes([head[place] ^ data.draw(st.integers(1, 255))]) + head[place + 1 :]
        )
    else:
        field = data.draw(st.sampled_from([b'"step": 13', b'"files": []', b'"x": "y"']))
        where = {"before": head.rindex(b'"manifest_signature"'), "after": len(head)}
        if action == "twice":
            bad = head + head[head.rindex(b'"manifest_signature"') :]
            bad = head + field + b",\n " + bad[len(head) :]
        elif action == "drop":
            bad = head[: head.rindex(b'"manifest_signature"')]
        else:
            bad = head[: where[action]] + field + b",\n " + head[where[action] :]
    bad += seal
    sealed = bad + xxhash.xxh3_128_hexdigest(bad).encode() + b'"\n}\n'
    with tempfile.TemporaryDirectory() as run:
        folder = Path(run) / "checkpoints" / checkpoint_name(12, 1)
        folder.mkdir(parents=True)
        (folder / MANIFEST_NAME).write_bytes(sealed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(KEY_VARIABLE, KEY)
            with pytest.raises(ManifestError):
                read_manifest(folder)


def test_a_field_of_the_same_name_inside_is_no_signature(tmp_path, monkeypatch):
    """Whoever can choose a metric's name, and no key, cannot sign with it."""
    manifest = make_manifest()
    document = {**manifest.to_json(), "guard": {"manifest_signature": "0" * 64}}
    folder = commit(tmp_path)
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(document))
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with pytest.raises(SignatureError, match="not signed"):
        read_manifest(folder)


def test_damage_is_told_from_a_wrong_key(tmp_path, monkeypatch):
    """A flipped bit in the signature is damage, which may be quarantined; a wrong key is not."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    folder = commit(tmp_path)
    data = bytearray((folder / MANIFEST_NAME).read_bytes())
    place = data.index(b"manifest_signature") + 30
    data[place] ^= 1
    (folder / MANIFEST_NAME).write_bytes(data)
    with pytest.raises(ManifestError, match="its own checksum differs") as caught:
        read_manifest(folder)
    assert not isinstance(caught.value, SignatureError)


def test_a_manifest_is_signed_only_with_the_sha256_of_each_file(tmp_path, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with pytest.raises(ManifestError, match=r"cannot be signed: '\.metadata' has no SHA-256"):
        commit(tmp_path, strong=False)
    folder = tmp_path / "checkpoints" / checkpoint_name(12, 1)
    bare = encode_manifest(make_manifest(strong=False).to_json(), parse_keys(KEY))
    (folder / MANIFEST_NAME).write_bytes(bare)
    with pytest.raises(SignatureError, match="does not cover the content"):
        read_manifest(folder)


def test_content_with_the_quick_checksum_of_another_is_found(tmp_path, monkeypatch):
    """xxh3 finds damage; whoever wants to can make other content with the same value."""
    folder = commit(tmp_path)
    (folder / ".metadata").write_bytes(b"evil")
    expected = {content.path: content.checksum for content in make_manifest().files}
    real = verify_module.hash_file

    def forged(path: Path, *args: Any, **more: Any) -> tuple[int, str]:
        return real(path, *args, **more)[0], expected[path.name]

    monkeypatch.setattr(verify_module, "hash_file", forged)
    faults = verify_files(folder, read_manifest(folder))
    assert [(fault.path, fault.fault[:7]) for fault in faults] == [(".metadata", "SHA-256")]


# ---- keys -----------------------------------------------------------------------------------------


def test_keys_are_hex_text_or_files(tmp_path):
    (tmp_path / "key").write_text("00ff" * 8 + "\n")
    (tmp_path / "raw").write_bytes(bytes([255, 1]) * 16)
    text = f"{'00ff' * 8}, some words as a key ,@{tmp_path / 'key'},@{tmp_path / 'raw'}"
    hexadecimal = bytes.fromhex("00ff" * 8)
    assert parse_keys(text).values == (
        hexadecimal,
        b"some words as a key",
        hexadecimal,
        bytes([255, 1]) * 16,
    )


@pytest.mark.parametrize(
    "text", ["", " ", ",", "secret-short", "ab" * 15, f"{OTHER},", "@", "@here"]
)
def test_a_short_or_empty_key_is_refused_and_never_shown(text):
    with pytest.raises(ConfigError, match=KEY_VARIABLE) as caught:
        parse_keys(text)
    for secret in ("secret-short", "ab" * 15, OTHER):
        assert secret not in str(caught.value)


def test_a_key_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path / 'no'} cannot be read")):
        parse_keys(f"@{tmp_path / 'no'}")


def test_a_key_does_not_show():
    keys = parse_keys(KEY)
    assert KEY not in f"{keys} {keys!r} {[keys]}"


@settings(max_examples=50, deadline=None)
@given(
    st.binary(max_size=200), st.lists(st.binary(min_size=16, max_size=40), min_size=1, max_size=4)
)
def test_the_first_key_signs_and_each_verifies(data, values):
    keys = Keys(tuple(values))
    signed = keys.sign(data)
    assert signed == Keys((values[0],)).sign(data)
    for value in values:
        assert keys.verify(data, Keys((value,)).sign(data))
    assert not keys.verify(data + b"x", signed)
    assert not keys.verify(data, Keys((b"a key that is none of them" * 2,)).sign(data))


def test_a_rotation_loses_nothing(tmp_path, monkeypatch):
    """Old key; new and old; at last the new one alone, when the old checkpoints are gone."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    old = commit(tmp_path, 1)
    monkeypatch.setenv(KEY_VARIABLE, f"{OTHER},{KEY}")
    new = commit(tmp_path, 2)
    assert all(entry.usable for entry in list_checkpoints(tmp_path))
    monkeypatch.setenv(KEY_VARIABLE, OTHER)
    assert read_manifest(new).step == 2
    with pytest.raises(SignatureError):
        read_manifest(old)


def test_taken_keys_are_in_no_environment_that_is_inherited(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    keys = signature.take()
    assert KEY_VARIABLE not in os.environ
    assert signature.active() == keys == signature.take() == parse_keys(KEY)


def test_installed_keys_count_more_than_an_environment(monkeypatch):
    """A tracker has the driver's keys, or none, whatever the node that it runs on says."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    signature.install(None)
    assert signature.active() is None


# ---- a run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("signer", [None, KEY])
def test_a_wrong_key_changes_nothing_and_is_told(tmp_path, monkeypatch, signer):
    """Also when the last attempt is open, and when a manifest among them is damaged."""
    if signer:
        monkeypatch.setenv(KEY_VARIABLE, signer)
    core = tracker_of(tmp_path)
    core.begin_attempt(2, [])
    for step in (1, 2, 3):
        commit(tmp_path, step)
    (tmp_path / "checkpoints" / checkpoint_name(2, 1) / MANIFEST_NAME).write_bytes(b"{")
    before = content_of(tmp_path)
    monkeypatch.setenv(KEY_VARIABLE, OTHER)
    with pytest.raises(RestoreError, match="RAY_CKPT_KEY is probably wrong") as caught:
        tracker_of(tmp_path).begin_attempt(2, [])
    assert content_of(tmp_path) == before
    assert not any(key in str(caught.value) for key in (KEY, OTHER))


def test_a_forged_newest_checkpoint_is_passed_over_and_stays(tmp_path, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    commit(tmp_path, 1)
    monkeypatch.setenv(KEY_VARIABLE, OTHER)
    forged = commit(tmp_path, 2)
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    attempt = tracker_of(tmp_path).begin_attempt(2, [])
    assert attempt.plan is not None
    assert attempt.plan.name == checkpoint_name(1, 1)
    assert "wrong signature" in attempt.plan.reason
    assert attempt.signed
    assert sorted(path.name for path in forged.iterdir()) == sorted([*FILES, MANIFEST_NAME])


@pytest.mark.parametrize("signer", [None, KEY])
def test_with_a_wrong_key_nothing_is_pinned_or_deleted(tmp_path, monkeypatch, capsys, signer):
    if signer:
        monkeypatch.setenv(KEY_VARIABLE, signer)
    for step in (1, 2, 3):
        commit(tmp_path, step)
    evidence = [tmp_path / "checkpoints" / checkpoint_name(step, 1) for step in (1, 2)]
    for folder in evidence:
        write_quarantine(folder, "for a test", time_s=1.0)
    orphan = tmp_path / "checkpoints" / checkpoint_name(4, 1)
    orphan.mkdir()
    os.utime(orphan, (1.0, 1.0))
    pin(evidence[0], "a paper", author="ada", time_s=1.0)
    (evidence[0] / MANIFEST_NAME).rename(evidence[0] / LEAVING_NAME)
    before = content_of(tmp_path)
    monkeypatch.setenv(KEY_VARIABLE, OTHER)
    run = str(tmp_path)
    for argv in (
        ["gc", run, "--retention.keep-newest", "1", "--retention.grace-s", "0"],
        ["gc", run, "--retention.keep-newest", "1", "--dry-run"],
        ["pin", run, "3", "--reason", "x"],
        ["unpin", run, "3"],
    ):
        assert cli.main(argv) == 2, argv
        assert "RAY_CKPT_KEY is probably wrong" in capsys.readouterr().err
    after = {k: v for k, v in content_of(tmp_path).items() if k in before or "checkpoints" in k}
    assert after == before
    assert orphan.is_dir()


def test_what_is_not_signed_with_a_key_in_use_neither_counts_nor_goes(tmp_path, monkeypatch):
    """Newer or older, with a note beside it, or on a course that was left: it is not judged."""
    monkeypatch.setenv(KEY_VARIABLE, OTHER)
    foreign = [commit(tmp_path, step) for step in (1, 3, 5, 7)]
    write_quarantine(foreign[1], "for a test", time_s=1.0)
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    own = [commit(tmp_path, step) for step in (2, 4, 6)]
    for folder in (own[0], own[1]):
        write_quarantine(folder, "for a test", time_s=1.0)
    before = [content_of(folder) for folder in foreign]
    task = Round(
        run_dir=tmp_path,
        rules=Rules(keep_newest=1, quarantined=1),
        generation=1,
        newest_generation=lambda: 1,
        present_generation=1,
        verified={own[2].name, *(folder.name for folder in foreign)},
        in_use={},
        read_back=None,
        gate=Gate(),
        passed=lambda record: "left" if record.step < 6 else None,
    )
    found = keep_house(task, now_s=2e9)
    assert [content_of(folder) for folder in foreign] == before
    reasons = {verdict.name: verdict.reasons for verdict in found.verdicts}
    for folder in foreign:
        assert any("not judged" in reason for reason in reasons[folder.name])
    assert any("the newest" in reason for reason in reasons[own[2].name])
    assert [outcome.name for outcome in found.outcomes] == [own[0].name]


def test_a_signature_that_cannot_be_checked_is_no_finding_of_a_reading_back(tmp_path, monkeypatch):
    """The run sets aside what reading back finds; a checkpoint is not bad because of a key."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    folder = commit(tmp_path)
    assert read_back(folder) == []
    monkeypatch.setenv(KEY_VARIABLE, OTHER)
    faults = read_back(folder)
    assert faults
    assert all(fault.unreadable for fault in faults)


def test_what_a_run_commits_under_a_key_is_signed_and_shows_no_key(tmp_path, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    core = tracker_of(tmp_path)
    generation = core.begin_attempt(1, []).generation
    folder = tmp_path / "checkpoints" / checkpoint_name(5, generation)
    folder.mkdir(parents=True)
    files = []
    for path, content in FILES.items():
        (folder / path).write_bytes(content)
        made = entry_of(path, content)
        files.append(
            {"path": path, "bytes": made.bytes, "checksum": made.checksum, "sha256": made.sha256}
        )
    save: dict[str, Any] = {
        "step": 5,
        "samples": 40,
        "tokens": 320,
        "world_size": 1,
        "files": files,
        "stall_s": 0.1,
        "upload_s": 0.1,
        "metrics": {},
        "guard": {},
        "error": None,
        "bitwise_comparable": True,
    }
    assert core.commit(generation, save)
    assert b"manifest_signature" in (folder / MANIFEST_NAME).read_bytes()
    assert read_manifest(folder).step == 5
    for name, content in content_of(tmp_path).items():
        assert KEY.encode() not in content, name


def test_the_command_line_says_that_a_checkpoint_is_not_trusted(tmp_path, monkeypatch, capsys):
    commit(tmp_path)
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    assert cli.main(["ls", str(tmp_path)]) == 0
    assert "NOT TRUSTED: not signed" in capsys.readouterr().out
    assert cli.main(["verify", str(tmp_path)]) == cli.EXIT_FAULT
    monkeypatch.setenv(KEY_VARIABLE, "short")
    assert cli.main(["ls", str(tmp_path)]) == cli.EXIT_USAGE


# ---- the pickle -----------------------------------------------------------------------------------


class Evil:
    """Unpickling it makes a file, as it could do anything else."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def plant(folder: Path, mark: Path, keys: Keys | None) -> None:
    """Replaces DCP's metadata, which is a pickle, and everything in the manifest that would tell."""
    content = pickle.dumps(Evil(mark))
    (folder / ".metadata").write_bytes(content)
    document = json.loads((folder / MANIFEST_NAME).read_bytes())
    signed = document.pop("manifest_signature", None)
    del document["manifest_checksum"]
    strong = entry_of(".metadata", content)
    for entry in document["files"]:
        if entry["path"] == ".metadata":
            entry.update(bytes=strong.bytes, checksum=strong.checksum)
            if signed:
                entry["sha256"] = strong.sha256
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(document, keys))


@pytest.mark.parametrize("forger", [None, OTHER])
def test_a_planted_pickle_is_refused_before_it_is_unpickled(tmp_path, monkeypatch, forger):
    from ray_ckpt.checkpoint.digest import checkpoint_digest
    from ray_ckpt.checkpoint.export import export_weights

    monkeypatch.setenv(KEY_VARIABLE, KEY)
    folder, mark = commit(tmp_path / "demo"), tmp_path / "mark"
    plant(folder, mark, parse_keys(forger) if forger else None)
    with pytest.raises(SignatureError):
        checkpoint_digest(folder, read_manifest(folder))
    with pytest.raises(RestoreError, match="sign"):
        export_weights(list_checkpoints(tmp_path / "demo")[0], tmp_path / "out")
    with pytest.raises(RestoreError, match="probably wrong"):
        tracker_of(tmp_path / "demo").begin_attempt(1, [])
    assert not mark.exists(), "the planted code was run"


def test_without_a_key_a_planted_pickle_is_run(tmp_path):
    """The limit that the README states: a checksum does not keep out who can write both."""
    from ray_ckpt.checkpoint.digest import checkpoint_digest

    folder, mark = commit(tmp_path, strong=False), tmp_path / "mark"
    plant(folder, mark, None)
    with pytest.raises(AttributeError):  # what comes of it is no metadata
        checkpoint_digest(folder, read_manifest(folder))
    assert mark.exists()
