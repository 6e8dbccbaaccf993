"""The data bench calls a target met only when it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_data import FEED, PLAIN, judge, make_rows

from ray_ckpt.data.index import load_index


def rate(consumers: int, ratio: float, reader: str = FEED) -> dict[str, object]:
    return {"reader": reader, "consumers": consumers, "rows_per_s_over_plain": ratio}


@pytest.mark.parametrize(
    ("ratios", "seek", "oks"),
    [
        ((0.9, 1.5), 1.0, [True, True, True]),
        ((0.89, 1.5), 1.0, [False, True, True]),
        ((2.0, 0.5), 1.19, [True, False, True]),
        ((2.0, 2.0), 1.21, [True, True, False]),
        ((2.0, 2.0), 0.79, [True, True, False]),
    ],
)
def test_every_target_is_judged(ratios, seek, oks):
    rows = [rate(1, ratios[0]), rate(1, 1.0, PLAIN), rate(2, ratios[1]), rate(2, 0.1, "litdata")]
    rows += [{"reader": FEED, "offset": 0}, {"reader": FEED, "offset": 90, "over_start": seek}]
    assert [target["ok"] for target in judge(rows)] == oks


@pytest.mark.parametrize(("share", "ok"), [(0.0, True), (0.02, True), (0.021, False)])
def test_a_job_that_waits_for_its_data_is_told(share, ok):
    [target] = judge([{"reader": FEED, "consumers": 2, "wait_share": share}])
    assert (target["ok"], target["limit"]) == (ok, 0.02)


def test_the_rows_are_made_once_and_whole(tmp_path: Path):
    make_rows(tmp_path / "set", 800, 4, group_rows=30)
    index = load_index(tmp_path / "set")
    assert (index.num_rows, index.seq_len, len(index.files)) == (800, 4, 8)
    before = (tmp_path / "set" / "part-0.parquet").stat().st_mtime_ns
    make_rows(tmp_path / "set", 800, 4, group_rows=30)
    assert (tmp_path / "set" / "part-0.parquet").stat().st_mtime_ns == before
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
