"""`ray-ckpt`: the shapes that scripts read, the exit codes, and answers without Ray or torch."""

from __future__ import annotations

import argparse
import fcntl
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from making import manifest_of

from ray_ckpt import cli
from ray_ckpt.checkpoint.listing import list_checkpoints
from ray_ckpt.checkpoint.manifest import FileEntry, write_manifest
from ray_ckpt.checkpoint.names import MANIFEST_NAME, checkpoint_name
from ray_ckpt.checkpoint.quarantine import write_quarantine
from ray_ckpt.checkpoint.verify import hash_file
from ray_ckpt.view import place
from ray_ckpt.view.runs import pick

LS_KEYS = {
    "step",
    "generation",
    "committed_at",
    "tiers",
    "verified_at",
    "pinned",
    "world_size",
    "sample_offset",
    "bytes",
}


def add_checkpoint(
    run: Path, step: int, generation: int = 1, *, commit: bool = True, **fields: Any
) -> Path:
    folder = run / "checkpoints" / checkpoint_name(step, generation)
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"meta")
    (folder / "__0_0.distcp").write_bytes(bytes(2048))
    files = tuple(FileEntry(path.name, *hash_file(path)) for path in sorted(folder.iterdir()))
    manifest = manifest_of(
        run=run.name,
        step=step,
        sample_offset=8 * step,
        tokens=512 * step,
        world_size=2,
        generation=generation,
        committed_at=time.time() - 200,
        files=files,
        parallel="fsdp",
        guard={"finite": True},
        metrics={"loss": 2.5},
        config_fingerprint="c0ffee",
        data_fingerprint="da7a",
        versions={"torch": "2.13.0"},
        **fields,
    )
    if commit:
        write_manifest(folder, manifest)
    return folder


@pytest.fixture
def run(tmp_path):
    """A run with one checkpoint of every kind, newest first: none, damaged, bad, two good."""
    run = tmp_path / "runs" / "demo"
    add_checkpoint(run, 100, 1)
    add_checkpoint(run, 200, 1)
    write_quarantine(add_checkpoint(run, 300, 2), "loss was NaN", time_s=1.0)
    (add_checkpoint(run, 400, 2) / MANIFEST_NAME).write_bytes(b"{")
    add_checkpoint(run, 500, 2, commit=False)
    return run


@pytest.fixture
def good_run(tmp_path):
    run = tmp_path / "runs" / "good"
    for step in (100, 200):
        add_checkpoint(run, step)
    return run


def call(capsys, *argv: object) -> tuple[int, str, str]:
    code = cli.main([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    return code, out, err


def call_json(capsys, *argv: object):
    code, out, _ = call(capsys, *argv, "--json")
    return code, json.loads(out)


def test_ls_lists_every_checkpoint_newest_first(run, capsys):
    code, found = call_json(capsys, "ls", run)
    assert code == 0
    assert [item["step"] for item in found] == [500, 400, 300, 200, 100]
    assert all(item.keys() >= LS_KEYS for item in found)
    none, damaged, bad, good, _ = found
    assert none["fault"] == "no manifest"
    assert none["tiers"] == []
    assert "JSON" in damaged["fault"]
    assert bad["quarantined"] == "loss was NaN"
    assert (good["fault"], good["quarantined"]) == (None, None)
    assert good["tiers"] == ["durable"]
    assert good["bytes"] == 2052
    assert good["sample_offset"] == 1600
    assert good["world_size"] == 2
    assert good["pinned"] is False
    assert good["verified_at"] is None


def test_ls_for_people_says_the_state_in_words(run, capsys):
    code, out, _ = call(capsys, "ls", run)
    assert code == 0
    assert "\x1b" not in out
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1:6]] == ["500", "400", "300", "200", "100"]
    assert "not committed" in lines[1]
    assert "DAMAGED" in lines[2]
    assert "QUARANTINED: loss was NaN" in lines[3]
    assert "3m 20s ago" in lines[4]
    assert "2 of 5 usable, newest step 200" in lines[6]


def test_ls_reads_the_last_verification_from_the_journal(good_run, capsys):
    name = checkpoint_name(200, 1)
    lines = [{"time": 5.0, "verified": name}, {"time": 9.0, "verified": name}, {"time": 11.0}]
    torn = '{"time": 12.0, "verif'
    (good_run / "journal.jsonl").write_text("\n".join([*map(json.dumps, lines), torn]))
    _, found = call_json(capsys, "ls", good_run)
    assert [item["verified_at"] for item in found] == [9.0, None]


def test_a_young_run_has_no_checkpoints_yet(tmp_path, capsys):
    (tmp_path / "young").mkdir()
    (tmp_path / "young" / "journal.jsonl").write_text("")
    assert call_json(capsys, "ls", tmp_path / "young") == (0, [])
    code, out, _ = call(capsys, "ls", tmp_path / "young")
    assert (code, "no checkpoints yet" in out) == (0, True)
    code, _, err = call(capsys, "verify", tmp_path / "young")
    assert (code, "no committed checkpoint" in err) == (0, True)


def test_verify_is_silent_success_on_a_good_run(good_run, capsys):
    add_checkpoint(good_run, 300, commit=False)
    code, found = call_json(capsys, "verify", good_run)
    assert code == 0
    assert [(item["step"], item["generation"]) for item in found] == [(200, 1), (100, 1)]
    for item in found:
        assert (item["tier"], item["ok"], item["faults"]) == ("durable", True, [])
    code, out, err = call(capsys, "verify", good_run)
    assert code == 0
    assert out.count(" ok ") == 2
    assert "step-00000300-g1: not committed" in err


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_verify_names_file_and_fault(good_run, capsys, name):
    path = good_run / "checkpoints" / checkpoint_name(200, 1) / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    code, found = call_json(capsys, "verify", good_run)
    assert code == 1
    assert [item["ok"] for item in found] == [False, True]
    assert found[0]["faults"] == [{"path": name, "fault": "checksum differs"}]
    code, out, err = call(capsys, "verify", good_run)
    assert code == 1
    assert f"{path}: checksum differs" in out
    assert "1 of 2 checkpoints damaged" in err
    assert call(capsys, "verify", good_run, 100)[0] == 0


def test_verify_takes_a_damaged_manifest_for_a_fault(run, capsys):
    code, found = call_json(capsys, "verify", run)
    assert code == 1
    assert [item["step"] for item in found] == [400, 300, 200, 100]
    assert found[0]["faults"][0]["path"] == MANIFEST_NAME


def test_verify_of_a_step_that_was_never_committed_fails(run, capsys):
    code, found = call_json(capsys, "verify", run, 500)
    assert code == 1
    assert found[0]["faults"] == [{"path": MANIFEST_NAME, "fault": "no manifest"}]


def test_a_checkpoint_deleted_while_it_is_verified_is_no_fault(good_run, capsys, monkeypatch):
    real = place.verify_files

    def delete_first(folder, manifest):
        if manifest.step == 100:
            for path in folder.iterdir():
                path.unlink()
        return real(folder, manifest)

    monkeypatch.setattr(place, "verify_files", delete_first)
    code, out, err = call(capsys, "verify", good_run)
    assert code == 0
    assert "deleted by the run meanwhile" in err
    assert "step-00000100" not in out


def test_looking_changes_nothing(run, capsys):
    def snapshot():
        return {p: (p.stat().st_mtime_ns, p.is_file() and p.read_bytes()) for p in run.rglob("*")}

    before = snapshot()
    for command in (("ls", run), ("verify", run), ("show", run, 200)):
        call(capsys, *command)
    assert snapshot() == before


def test_show_prints_every_field(run, capsys):
    code, document = call_json(capsys, "show", run, 200)
    assert code == 0
    stored = json.loads((run / "checkpoints" / checkpoint_name(200, 1) / MANIFEST_NAME).read_text())
    del stored["manifest_checksum"]
    assert {key: document[key] for key in stored} == stored
    code, out, _ = call(capsys, "show", run, 200)
    assert code == 0
    for name in stored:
        assert name in out
    assert "3m 20s ago" in out
    assert "2.0 KiB" in out
    assert "metrics.loss" in out


@pytest.mark.parametrize("step", [400, 500])
def test_show_of_an_unusable_manifest_says_why(run, capsys, step):
    code, out, err = call(capsys, "show", run, step)
    assert code == 1
    assert out == ""
    assert MANIFEST_NAME in err


@pytest.mark.parametrize("text", ["100", "00000100", "100-g3", "step-00000100-g3"])
def test_a_step_means_its_newest_committed_generation(tmp_path, text):
    for generation in (1, 3):
        add_checkpoint(tmp_path, 100, generation)
    add_checkpoint(tmp_path, 100, 4, commit=False)
    entries = list_checkpoints(tmp_path)
    assert pick(entries, text).generation == 3
    assert pick(entries, "100-g1").generation == 1
    assert pick(entries, "100-g4").generation == 4


@pytest.mark.parametrize(
    ("step", "said"),
    [("150", "there are: 500-g2, 400-g2"), ("200-g7", "200-g1"), ("new", "such as 1200")],
)
def test_a_wrong_step_says_which_there_are(run, capsys, step, said):
    code, _, err = call(capsys, "show", run, step)
    assert code == 2
    assert said in err


def test_a_run_is_found_by_path_and_by_name(run, capsys, monkeypatch):
    monkeypatch.setenv(cli.STORAGE_VARIABLE, str(run.parent))
    monkeypatch.chdir(run.parent.parent)
    for text in (run, "demo", "runs/demo", "./runs/demo", f"{run}/"):
        assert call(capsys, "ls", text)[0] == 0, text
    monkeypatch.delenv(cli.STORAGE_VARIABLE)
    assert call(capsys, "ls", "demo", "--storage", "runs")[0] == 0
    monkeypatch.chdir(run)
    assert call(capsys, "ls", ".")[0] == 0


def test_a_wrong_run_says_what_is_there_instead(run, good_run, capsys):
    storage = run.parent
    for text in ("dmeo", storage, storage / "dmeo"):
        code, _, err = call(capsys, "ls", text, "--storage", storage)
        assert code == 2
        assert "demo, good" in err
    code, _, err = call(capsys, "ls", run / "checkpoints" / checkpoint_name(100, 1))
    assert code == 2
    assert f"give {run}" in err
    code, _, err = call(capsys, "ls", "demo", "--storage", storage / "elsewhere")
    assert code == 2
    assert "--storage FOLDER" in err
    assert call(capsys, "ls", "")[0] == 2


def test_show_says_in_which_segment_a_checkpoint_was_made(run, capsys):
    mark = {"number": 1, "start_step": 500, "start_offset": 4000, "reason": "larger batch"}
    add_checkpoint(run, 600, 3, segment=mark)
    assert call_json(capsys, "show", run, 600)[1]["segment"] == mark
    line = next(
        line for line in call(capsys, "show", run, 600)[1].splitlines() if "segment" in line
    )
    assert line.split(maxsplit=1)[1] == "1, since step 500, sample 4000: larger batch"
    assert re.search(r"^segment +0$", call(capsys, "show", run, 200)[1], re.MULTILINE)


def test_runs_that_are_called_alike_are_named_first_and_none_is_kept_back_for_one_that_is_not(
    tmp_path, capsys
):
    for n in range(12):
        add_checkpoint(tmp_path / f"ablation-{n:02d}", 1)
    add_checkpoint(tmp_path / "web-7b", 1)
    add_checkpoint(tmp_path / "web-7b-2", 1)
    for text in ("wbe-7b", tmp_path / "wbe-7b"):
        err = call(capsys, "ls", text, "--storage", tmp_path)[2]
        assert f"Runs in {tmp_path}: web-7b, web-7b-2, ablation-00, ablation-01" in err
        assert err.endswith("and 4 more\n")
    assert (
        f"Runs in {tmp_path}: ablation-00, " in call(capsys, "ls", "zzz", "--storage", tmp_path)[2]
    )


@pytest.mark.parametrize("argv", [[], ["list"], ["ls"], ["ls", "x", "--nope"], ["show", "x"]])
def test_wrong_usage_ends_with_code_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert "usage: ray-ckpt" in capsys.readouterr().err


def subcommands() -> dict[str, argparse.ArgumentParser]:
    (found,) = (a for a in cli.build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(found.choices)


@pytest.mark.parametrize("name", subcommands())
def test_every_command_has_the_same_manners(name):
    command = subcommands()[name]
    options = {option for action in command._actions for option in action.option_strings}
    # What completion prints is a script already.
    assert ("--json" in options) == (name != "completion")
    for code in ("0", "1", "2", "130", "141"):
        assert f"\n  {code:<3}  " in command.format_help().partition("exit codes:")[2]
    # A sentence, and with what is computed from numbers an example.
    assert re.match(r"[A-Z].*\.( ray-ckpt .*)?$", command.description.partition("\n")[0])
    run = [action for action in command._actions if action.metavar == "RUN"]
    if run:
        assert "--storage" in options
        # The help of RUN promises an address only where one is taken.
        takes = "address" in run[0].help
        assert takes == (name not in ("save", "stop", "drill", "export"))


@pytest.mark.parametrize("terminal", [False, True])
def test_colours_are_for_terminals_alone(run, capsys, monkeypatch, terminal):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: terminal)
    for argv in (["ls", run], ["verify", run]):
        assert ("\x1b" in call(capsys, *argv)[1]) == terminal
    assert "\x1b" not in call(capsys, "ls", run, "--json")[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in call(capsys, "ls", run)[1]


@pytest.mark.parametrize("argv", [["--help"], ["ls", "--help"], ["verify", "--help"]])
def test_help_lists_the_exit_codes(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 0
    assert "exit codes:" in capsys.readouterr().out


def test_storage_that_cannot_be_read_is_no_usage_error(run, capsys, monkeypatch):
    def refuse(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    code, _, err = call(capsys, "ls", run)
    assert code == 1
    assert "Permission denied" in err
    assert "Traceback" not in err


def test_it_needs_neither_ray_nor_torch(run):
    script = (
        "import sys; from ray_ckpt.cli import main; code = main(sys.argv[1:]);"
        "found = {'ray', 'torch', 'pyarrow', 'numpy'} & sys.modules.keys();"
        "sys.exit(f'imported {found}' if found else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "verify", run, "200"], capture_output=True, text=True
    )
    assert done.stderr == ""
    assert done.returncode == 0


def test_a_reader_that_goes_away_is_no_error(good_run):
    # More than a pipe of one page holds.
    for step in range(1000, 1060):
        (good_run / "checkpoints" / checkpoint_name(step, 1)).mkdir()
    command = [sys.executable, "-m", "ray_ckpt", "ls", str(good_run), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)
        process.stdout.read(1)
        process.stdout.close()
        errors = process.stderr.read()
    assert errors == b""
    assert process.returncode == cli.EXIT_PIPE_CLOSED


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["gc", "RUN", "--retention.keep-newst", "2"], "--retention.keep-newest"),
        (["ls", "RUN", "--jsn"], "--json"),
        (["ls", "RUN", "--nothing-like-it"], ""),
        (["dashboard", "enable", "--jsn"], "--json"),
    ],
)
def test_a_mistyped_option_is_named_with_the_nearest_one(words, meant, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        cli.build_parser().parse_args(words)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert words[2] in said
    assert (f"did you mean {meant}?" in said) == bool(meant)
    assert f"usage: ray-ckpt {words[0]}" in said, "the usage is that of the command"
