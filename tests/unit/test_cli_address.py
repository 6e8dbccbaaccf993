"""The command line on an address says and does what it does on a folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from disk import add_checkpoint

from ray_ckpt.checkpoint.quarantine import write_quarantine
from ray_ckpt.cli import main
from ray_ckpt.errors import ConfigError
from ray_ckpt.tiers import remote_store
from ray_ckpt.tiers.address import (
    RemotePath,
    below,
    is_uri,
    open_filesystem,
    shown,
    split_run,
    without_secrets,
)
from ray_ckpt.tiers.retries import RetryRule, refused


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run on a disk, which is a run on a store by its address."""
    rule = RetryRule(tries=2, first_pause_s=0.0, absent_pause_s=0.0)
    monkeypatch.setattr(remote_store, "RetryRule", lambda: rule)
    run = tmp_path / "demo"
    for step in (10, 20, 30):
        add_checkpoint(run, step)
    add_checkpoint(run, 25, commit=False)
    write_quarantine(run / "checkpoints" / "step-00000020-g1", "loss was NaN", time_s=1.0)
    proof = {"time": 5.0, "event": "verified", "generation": 1, "verified": "step-00000030-g1"}
    (run / "journal.jsonl").write_text(json.dumps(proof) + "\n")
    return run


def said(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(list(argv))
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.parametrize(
    "words",
    [
        ("ls",),
        ("ls", "--json"),
        ("show", "30"),
        ("show", "30", "--json"),
        ("verify", "--json"),
        ("gc", "--dry-run", "--retention.keep-newest", "1", "--json"),
    ],
)
def test_an_address_is_looked_at_like_a_folder(run, capsys, words):
    (run / "checkpoints" / "step-00000010-g1" / "rank" / "rng.json").write_bytes(b"flip")
    command, *rest = words
    folder = said(capsys, command, str(run), *rest)
    address = said(capsys, command, f"file://{run}", *rest)
    # A folder's lock tells that nobody drives the run; of a store it has to be said.
    assert address[0] == folder[0]
    if command != "gc":
        assert address[1].replace("file://", "") == folder[1]
        return
    both = [json.loads(out[1])["checkpoints"] for out in (folder, address)]
    assert [(one["name"], one["keep"]) for one in both[0]] == [
        (one["name"], one["keep"]) for one in both[1]
    ]
    committed = [[one["reasons"] for one in items if one["step"] != 25] for items in both]
    assert committed[0] == committed[1]
    assert not all(one["keep"] for one in both[1])


def test_pins_and_gc_on_an_address(run, capsys):
    address = f"file://{run}"
    code, out, _ = said(capsys, "pin", address, "10", "--reason", "a paper", "--json")
    assert code == 0
    assert json.loads(out)["pins"][0]["reason"] == "a paper"
    assert (run / "checkpoints" / "step-00000010-g1" / "PINNED.json").exists()
    add_checkpoint(run, 5)
    rules = ("--retention.keep-newest", "1")
    code, _, err = said(capsys, "gc", address, *rules)
    assert code == 2
    assert "--no-driver" in err
    assert len(list((run / "checkpoints").iterdir())) == 5
    code, out, _ = said(capsys, "gc", address, "--no-driver", "--retention.grace-s", "0", *rules)
    assert code == 0, out
    left = sorted(p.name for p in (run / "checkpoints").iterdir())
    assert left == ["step-00000010-g1", "step-00000020-g1", "step-00000030-g1"]
    assert said(capsys, "unpin", address, "10")[0] == 0
    assert said(capsys, "verify", address, "30")[0] == 0


def test_a_run_that_is_not_there_and_commands_that_need_a_folder(run, capsys, tmp_path):
    code, _, err = said(capsys, "ls", f"file://{tmp_path}/none")
    assert code == 2
    assert err.strip().endswith(f"no run 'none' in file://{tmp_path}. Runs there: demo")
    code, _, err = said(capsys, "ls", f"file://{run}/none")
    assert code == 2
    assert "no other run is there. Give the address of one" in err
    code, out, _ = said(capsys, "ls", "demo", "--storage", f"file://{tmp_path}")
    assert code == 0
    assert f"in file://{run}" in out
    code, _, err = said(capsys, "export", f"file://{run}", "30", "--to", str(tmp_path / "to"))
    assert code == 2
    assert "needs a run's folder" in err
    shutil.rmtree(run / "checkpoints")
    assert said(capsys, "ls", f"file://{run}")[1] == f"file://{run}: no checkpoints yet\n"


def test_addresses_are_taken_apart_and_shown_without_their_secrets():
    uri = "s3://AKIA:hu%2Fsh@bucket/a%20b/demo?endpoint_override=http%3A%2F%2F127.0.0.1%3A5&scheme=http"
    assert shown(uri) == "s3://bucket/a%20b/demo"
    assert split_run(uri) == (uri.replace("/demo", ""), "demo")
    assert below(*split_run(uri)) == uri
    assert str(RemotePath(shown(uri)) / "x") == "s3://bucket/a%20b/demo/x"
    azure = "abfs://container@account.dfs.core.windows.net/x"
    assert shown(azure) == azure
    text = without_secrets(f"no {uri}, not AKIA, hu/sh nor hu%2Fsh", uri)
    assert text == "no s3://bucket/a%20b/demo, not ***, *** nor ***"
    assert all(map(is_uri, ("s3://b/x", "file:///x")))
    assert not any(map(is_uri, ("demo", "/a:b/c", "./x", "a:b")))
    with pytest.raises(ConfigError, match="names no run"):
        split_run("s3://bucket")
    with pytest.raises(ConfigError, match="'request_timeout'"):
        open_filesystem("s3://bucket/x?request_timeout=3", 1.0)
    for wrong in ("nothing://x/y", "s3:///x", "s3://k:hush@b/x?foo=1"):
        with pytest.raises(ConfigError) as caught:
            open_filesystem(wrong, 1.0)
        assert "hush" not in str(caught.value)


def test_pauses_grow_are_bounded_and_differ():
    rule = RetryRule(first_pause_s=1.0, longest_pause_s=10.0)
    assert [rule.pause_s(n, 0.0) for n in (1, 2, 3, 4, 5, 500)] == [1, 2, 4, 8, 10, 10]
    assert rule.pause_s(1, 1.0) == 0.5
    for wrong in ({"tries": 0}, {"first_pause_s": -1}, {"timeout_s": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            RetryRule(**wrong)
    assert refused(OSError("AWS Error ACCESS_DENIED during PutObject"))
    assert refused(
        OSError(
            "AWS Error UNKNOWN (HTTP status 400) during HeadObject operation: No response body."
        )
    )
    assert not refused(OSError("AWS Error UNKNOWN (HTTP status 503) during HeadObject operation"))
