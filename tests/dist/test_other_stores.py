"""``gs://`` and ``abfs://`` as the durable tier: a checkpoint's whole life there, against emulators of the two."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_ckpt import cli
from ray_ckpt.checkpoint.names import MANIFEST_NAME, checkpoint_name
from ray_ckpt.checkpoint.verify import verify_files
from ray_ckpt.errors import StorageError
from ray_ckpt.tiers.address import below
from ray_ckpt.tiers.remote import RemoteTier
from ray_ckpt.tiers.remote_store import RemoteStore
from ray_ckpt.tiers.retries import RetryRule
from ray_ckpt.tiers.stack import Stack
from tests.emulators import azure, google
from tests.tier_world import NODES, World

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.usefixtures("quick_disk")]

QUICK = RetryRule(tries=3, first_pause_s=0.01, absent_pause_s=0.01, timeout_s=5.0)


@pytest.fixture(params=["gs", "abfs"])
def address(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a folder for runs that is empty."""
    with google() if request.param == "gs" else azure(monkeypatch) as uri:
        yield uri


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    code = cli.main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def make(tmp_path: Path, uri: str, **more: Any) -> World:
    stack = Stack(use=("memory", "durable"), replicas=0, memory_keep=1, remote=uri)
    return World(tmp_path, replace(stack, **more), {"durable": 1})


def test_a_run_saves_commits_is_listed_verified_cleaned_and_resumed_there(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world, run = make(tmp_path, address), below(address, "demo")
    attempt = world.begin(NODES)
    assert attempt.plan is None, "a new run"
    for step in (10, 20, 30):
        assert world.save(step, metrics={"loss": 2.5})
        world.settle()
        world.settle()
    assert [event["step"] for event in world.events("promote")] == [10, 20, 30]
    code, rows = told(capsys, "ls", run)
    assert code == 0
    assert [row["step"] for row in rows] == [30, 20, 10]
    assert all("durable" in row["tiers"] and row["bytes"] > 4000 for row in rows)
    code, rows = told(capsys, "verify", run)
    assert (code, [row["ok"] for row in rows]) == (0, [True] * 3)
    assert told(capsys, "show", run, "20")[1]["sample_offset"] == 20
    # The nodes are gone, with the driver: other nodes take it up from there.
    for node in NODES:
        world.fleet.kill(node)
    others = ["e", "f"]
    world.tracker = world.new_tracker()
    attempt = world.begin(others)
    assert attempt.plan.name == checkpoint_name(30, 1)
    for node in others:
        folder = world.provided(attempt.plan, node)
        assert folder is not None
        assert verify_files(folder, attempt.plan.manifest) == []
    world.tracker.restored(world.generation, 30, 0.1, attempt.plan.name, "r")
    assert world.save(40)
    world.settle()
    world.settle()
    # What the rules do not keep goes, and nothing else.
    assert cli.main(["pin", run, "10", "--reason", "the first"]) == 0
    capsys.readouterr()
    rules = ["--retention.keep-newest", "1", "--retention.keep-every-s", "0"]
    code = cli.main(["gc", run, *rules, "--no-driver"])
    text = capsys.readouterr().out
    assert code == 0, text
    assert [row["step"] for row in told(capsys, "ls", run)[1]] == [40, 10]
    store = RemoteStore(address, options=QUICK)
    left = {item.path.split("/")[0] for item in store.list("demo/checkpoints", deep=True)}
    assert left == {checkpoint_name(40, 2), checkpoint_name(10, 1)}
    # Bad bytes there are found, by whoever looks.
    (name,) = [n for n in left if n.startswith("step-00000040")]
    store.write(f"demo/checkpoints/{name}/__1_0.distcp", b"x" * 1001)
    code, rows = told(capsys, "verify", run)
    assert (code, {row["step"]: row["ok"] for row in rows}) == (1, {40: False, 10: True})
    world.fleet.close(drop_memory=False, generation=world.generation)


def test_what_the_store_lacks_is_absent_and_what_fails_is_an_error(
    address: str, tmp_path: Path
) -> None:
    store = RemoteStore(address, options=QUICK)
    assert store.read("none") is None
    assert store.size("none") is None
    assert store.list("none") == []
    store.write("a/b/c", b"123")
    store.write("a/d", b"4")
    assert store.read("a/b/c") == b"123"
    assert store.size("a/b/c") == 3
    assert {(i.path, i.is_folder) for i in store.list("a")} == {("b", True), ("d", False)}
    assert {(i.path, i.bytes) for i in store.list("a", deep=True)} == {("b/c", 3), ("d", 1)}
    assert [item.path for item in store.list()] == ["a"]
    store.delete("a/d")
    assert store.read("a/d") is None
    store.delete("a/d")  # no error: it is not there
    store.write("ab/x", b"of another folder")
    store.delete_below("a")
    assert store.list("a") == []
    assert store.read("ab/x") == b"of another folder"
    store.delete_below("a")
    once = replace(QUICK, tries=1, timeout_s=1.0)
    gone = RemoteStore(address.replace("127.0.0.1", "127.0.0.2", 1), options=once)
    with pytest.raises(StorageError):
        gone.list("a")
    with pytest.raises(StorageError):
        gone.read("none")


def test_a_folder_whose_manifest_was_taken_away_is_no_checkpoint(
    address: str, tmp_path: Path
) -> None:
    world = make(tmp_path, address, memory_keep=1)
    world.begin(NODES)
    assert world.save(10)
    world.settle()
    world.settle()
    tier = RemoteTier(RemoteStore(address, options=QUICK), "demo")
    [entry] = tier.entries()
    assert entry.usable
    tier.store.delete(tier.place(entry.folder.name, MANIFEST_NAME))
    [entry] = tier.entries()
    assert not entry.committed
    world.fleet.close(drop_memory=False, generation=world.generation)
