"""Preparation on a real Ray: the same bytes whatever the parallelism, and whole or not at all."""

from __future__ import annotations

import dataclasses
import fcntl
import gzip
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

from ray_ckpt.data.index import DataError, load_index

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "jobs"))

from prepare import PrepareOptions, main, prepare  # noqa: E402

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A Ray of our own; the value is its address."""
    ray.init(address="local", include_dashboard=False, num_cpus=2, log_to_driver=False)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """One document of every kind and size, so that rows cross files and files cross blocks."""
    folder = tmp_path / "input"
    (folder / "sub").mkdir(parents=True)
    (folder / "empty.txt").write_text("")
    (folder / "a.txt").write_text("alpha ä " * 50)
    (folder / "b.md.gz").write_bytes(gzip.compress(b"# beta\n" * 300))
    (folder / "sub" / "c.py").write_text("print('gamma')\n" * 7)
    lines = [json.dumps({"text": f"line {n} " * n}) for n in range(40)]
    (folder / "d.jsonl").write_text("\n".join(lines))
    texts = pa.table({"text": [f"row {n} " * (n % 5) for n in range(100)]})
    pq.write_table(texts, folder / "e.parquet")
    for number in range(20):
        (folder / "sub" / f"f{number:02}.txt").write_text(f"small {number} " * number)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read_rows(folder: Path) -> pa.Table:
    return pa.concat_tables(pq.read_table(path) for path in sorted(folder.glob("*.parquet")))


def options(output: Path, *inputs: Path, **changes: Any) -> PrepareOptions:
    base = PrepareOptions(
        output=str(output),
        input=tuple(map(str, inputs)),
        seq_len=32,
        row_group_rows=8,
        rows_per_file=64,
    )
    return dataclasses.replace(base, **changes)


def test_parallelism_does_not_change_a_byte(cluster: str, mixed: Path, tmp_path: Path) -> None:
    one = prepare(options(tmp_path / "one", mixed, read_tasks=1))
    many = prepare(options(tmp_path / "many", mixed, read_tasks=9))
    assert contents(tmp_path / "one") == contents(tmp_path / "many")
    assert one.fingerprint == many.fingerprint
    assert dataclasses.replace(one, root="") == dataclasses.replace(many, root="")

    sizes = many.row_group_sizes
    assert len(many.files) > 2
    assert (sizes[:-1] == 8).all()
    assert 0 < sizes[-1] <= 8
    table = read_rows(tmp_path / "many")
    assert table.schema.field("tokens").type == pa.list_(pa.uint16(), 32)
    ids = np.concatenate([chunk.flatten().to_numpy() for chunk in table["tokens"].chunks])
    assert len(ids) == many.num_tokens
    assert np.count_nonzero(ids == 256) in (many.num_documents, (many.num_documents or 0) - 1)
    text = "alpha ä " * 50
    assert bytes(ids[: len(text.encode())].astype(np.uint8)).decode() == text

    limited = prepare(options(tmp_path / "limited", mixed, max_rows=20))
    assert (limited.num_rows, limited.dropped_tokens) == (20, 0)
    head = read_rows(tmp_path / "limited")
    assert head["tokens"].to_pylist() == table["tokens"][:20].to_pylist()


def test_bad_input_leaves_nothing(
    cluster: str, mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first bad file in the order of the corpus is named, and no folder is left behind."""
    (mixed / "sub" / "x.jsonl").write_text('{"text": "fine"}\n{"text"')
    (mixed / "sub" / "y.txt.gz").write_bytes(b"not gzip")
    output = tmp_path / "new" / "deep" / "data"
    assert main(["--output", str(output), "--input", str(mixed)]) == 1
    message = capsys.readouterr().err
    assert message.startswith(f"error: input {mixed / 'sub' / 'x.jsonl'}, line 2 is not JSON")
    assert "Traceback" not in message
    assert not (tmp_path / "new").exists()


def test_a_full_disk_leaves_nothing(cluster: str, mixed: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk: writing fails half-way."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    output = tmp_path / "new" / "data"
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(DataError, match=f"--output {output} cannot be written"):
            prepare(options(output, mixed, rows_per_file=4096))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "new").exists()


def test_too_little_text_leaves_nothing(cluster: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(DataError, match=r"holds 6 token ids, fewer than one row"):
        prepare(options(tmp_path / "data", tmp_path / "a.txt"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt"]


def test_a_killed_run_leaves_no_data_and_is_cleaned_up(
    cluster: str, mixed: Path, tmp_path: Path
) -> None:
    output, leftover = tmp_path / "data", tmp_path / ".data.preparing"
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "jobs" / "prepare.py"), "--output", str(output)],
        env=os.environ | {"RAY_ADDRESS": cluster},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    # A first file: the folder is claimed a moment after it is made.
    while not list(leftover.glob("*")) and time.monotonic() < deadline:
        assert process.poll() is None, "ended before it could be killed"
        time.sleep(0.01)
    with pytest.raises(DataError, match="in use"):
        prepare(options(output, mixed))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert leftover.exists()
    assert not output.exists()
    (leftover / "part-00000.parquet").write_bytes(b"half")

    index = prepare(options(output, mixed))
    assert not leftover.exists()
    assert load_index(output) == index


def test_a_run_of_its_own_joins_the_cluster_it_is_given(
    cluster: str, mixed: Path, tmp_path: Path
) -> None:
    command = ["--output", str(tmp_path / "data"), "--input", str(mixed), "--seq-len", "16"]
    result = subprocess.run(
        [sys.executable, str(ROOT / "jobs" / "prepare.py"), *command],
        env=os.environ | {"RAY_ADDRESS": cluster},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    index = load_index(tmp_path / "data")
    assert f"prepared {index.num_rows} rows of 16 uint16 token ids" in result.stdout


def test_outputs_that_would_be_harmed_are_refused(
    mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "data"
    output.mkdir()
    (output / "mine.txt").write_text("precious")
    with pytest.raises(DataError, match="is not empty"):
        prepare(options(output, mixed))
    assert contents(output) == {"mine.txt": b"precious"}
    with pytest.raises(DataError, match="is a file"):
        prepare(options(output / "mine.txt", mixed))

    busy = tmp_path / ".other.preparing"
    busy.mkdir()
    (busy / "part-00000.parquet").write_bytes(b"being written")
    descriptor = os.open(busy, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(DataError, match="another preparation is writing"):
            prepare(options(tmp_path / "other", mixed))
    finally:
        os.close(descriptor)
    assert list(contents(busy)) == ["part-00000.parquet"]

    job = tmp_path / "working_dir_files" / "package"
    job.mkdir(parents=True)
    monkeypatch.chdir(job)
    assert main(["--output", "relative"]) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["--seq-len", "0"],
        ["--rows-per-file", "100"],
        ["--end-token", "</s>"],
        ["--sequence-length", "5"],
        ["--seq-len", "many"],
    ],
)
def test_bad_usage_ends_with_code_2(tmp_path: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--output", str(tmp_path / "data"), *arguments])
    assert exit_.value.code == 2
    assert main(["--output", "x", "--input", "a", "--input", "b"]) == 2
    assert list(tmp_path.iterdir()) == []
