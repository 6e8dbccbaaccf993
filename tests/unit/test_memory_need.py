"""Saving is refused at the start where a node has too little memory for it."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ray_ckpt.checkpoint.memory import Need, available_bytes, shortage

needs = st.lists(
    st.builds(
        Need,
        st.sampled_from(["a", "b", "c"]),
        st.integers(0, 100),
        st.one_of(st.none(), st.integers(0, 200)),
    ),
    min_size=1,
    max_size=8,
)


@given(needs)
def test_a_node_is_short_when_its_workers_together_take_more_than_there_is(
    workers: list[Need],
) -> None:
    short = set()
    for host in {need.host for need in workers}:
        there = [n for n in workers if n.host == host]
        seen = [n.available for n in there if n.available is not None]
        if seen and sum(n.bytes for n in there) > min(seen):
            short.add(host)
    problem = shortage(workers)
    assert (problem is None) == (not short)
    if problem is not None:
        assert problem.startswith(tuple(f"node {host}:" for host in short))


def test_the_message_has_both_numbers_and_a_way_out() -> None:
    problem = shortage([Need("n1", 3 << 30, 4 << 30), Need("n1", 3 << 30, 4 << 30)])
    assert problem is not None
    assert "6,144 MiB" in problem
    assert "4,096 MiB" in problem
    assert "--parallel fsdp" in problem


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:   50 kB\n")
    assert available_bytes(tmp_path / "none", meminfo) == 50 * 1024
    for name, text in (
        ("memory.max", "30000\n"),
        ("memory.current", "20000\n"),
        ("memory.stat", "anon 1\ninactive_file 5000\n"),
    ):
        (tmp_path / name).write_text(text)
    assert available_bytes(tmp_path, meminfo) == 15000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path, meminfo) == 50 * 1024


def test_what_cannot_be_told_refuses_nothing(tmp_path: Path) -> None:
    assert available_bytes(tmp_path, tmp_path / "meminfo") is None
    assert shortage([Need("n", 10**15, None)]) is None


def test_this_machine_has_some_memory() -> None:
    found = available_bytes()
    assert found is None or found > 0
