"""Metrics say what is on record: totals of the whole run, ages that fit, and nothing twice after a restart."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from making import tracker_of
from test_tracker_core import OPTIONS, Run

from ray_ckpt.fault_points import arm
from ray_ckpt.tracker.buckets import BUCKETS, PHASES
from ray_ckpt.tracker.journal import JOURNAL_NAME
from ray_ckpt.tracker.records import RunFacts, TrackerOptions
from ray_ckpt.view import metrics as metrics_module
from ray_ckpt.view.account import Account
from ray_ckpt.view.metric_names import ENDS, METRICS, Key
from ray_ckpt.view.metric_values import _intervals
from ray_ckpt.view.metrics import Metrics
from ray_ckpt.view.run_totals import NewestCopies, RunTotals


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "PAUSE_S", 0.0)


class Told:
    """What Ray would be told, with its rules: known names, known labels, finite or not."""

    def __init__(self) -> None:
        self.gauges: dict[Key, float] = {}
        self.observed: list[tuple[str, str, float]] = []
        self.counted: list[tuple[str, str]] = []

    def set(self, name: str, value: str, number: float) -> None:
        assert METRICS[name].kind in ("gauge", "total")
        assert bool(value) == bool(METRICS[name].label)
        assert isinstance(number, float)
        self.gauges[name, value] = number

    def observe(self, name: str, value: str, number: float) -> None:
        assert METRICS[name].kind == "histogram"
        assert bool(value) == bool(METRICS[name].label)
        self.observed.append((name, value, number))

    def count(self, name: str, value: str) -> None:
        assert METRICS[name].kind == "counter"
        assert value in METRICS[name].values
        self.counted.append((name, value))


class Clerk:
    """Gives accounts that were made before."""

    def __init__(self, *accounts: Account | None) -> None:
        self.accounts, self.since = [*accounts], -1

    def look(self, now_s: float, since: int) -> Account | None:
        self.since = since
        return self.accounts.pop(0) if self.accounts else None


def account(restarts: Mapping[int, Mapping[str, float]]) -> Account:
    buckets = dict.fromkeys(BUCKETS, 0.0) | {"useful": 60.0, "stall": 20.0}
    return Account(wall_s=80.0, buckets=buckets, goodput=0.75, restarts=restarts)


class Watched(Run):
    """A run whose tracker tells its metrics; another tracker of it begins with :meth:`again`."""

    def __init__(self, folder: Path, options: TrackerOptions = OPTIONS, clerk: Any = None) -> None:
        self.clerk = clerk or Clerk()
        super().__init__(folder, options)
        self.again()

    def again(self) -> None:
        self.told.clear()
        self.open()
        self.out, self.now_s = Told(), 0.0
        facts = RunFacts(
            run="demo",
            run_dir=str(self.dir),
            config_fingerprint="c",
            data_fingerprint="d",
            parallel="ddp",
            versions={},
        )
        self.metrics = Metrics(
            facts,
            self.options,
            instruments=self.out,
            accountant=self.clerk,
            clock=lambda: self.clock.now,
            monotonic=lambda: self.now_s,
        )
        self.core._record._on_event = self.metrics.count
        self.core.announce()
        self.metrics.look(self.core.status(), self.core.memory)

    def gauges(self) -> dict[Key, float]:
        """What a scrape sees now."""
        self.out.gauges.clear()
        self.metrics.look(self.core.status(), self.core.memory)
        self.metrics.tick()
        return dict(self.out.gauges)


def test_what_a_run_did_is_told_under_its_labels(tmp_path: Path) -> None:
    run = Watched(tmp_path / "demo")
    run.begin(workers=3)
    run.train(10)
    run.save()
    run.train(4)
    run.core.interruption("node_loss", "a node died")
    run.begin(workers=2)
    found = run.gauges()
    assert found["ckpt_commits_total", "durable"] == 1
    assert found["ckpt_bytes_total", "durable"] == 16
    assert found["ckpt_interruptions_total", "node_loss"] == 1
    assert found["ckpt_interruptions_total", "worker_error"] == 0, "0 must be there to grow from"
    assert found["ckpt_lost_steps_total", ""] == 4
    assert found["ckpt_restores_total", "none"] == 1
    assert found["ckpt_restores_total", "durable"] == 1
    assert found["ckpt_world_size", ""] == 2
    assert found["ckpt_generation", ""] == 2
    assert found["ckpt_step", ""] == found["ckpt_last_commit_step", ""] == 10
    assert found["ckpt_copy_step", "durable"] == found["ckpt_copy_step", "any"] == 10
    assert found["ckpt_sample_offset", ""] == 240
    assert found["ckpt_up", ""] == found["ckpt_attempt_open", ""] == 1
    assert found["ckpt_mtbf_low_seconds", ""] < found["ckpt_mtbf_seconds", ""] < 1e6
    assert found["ckpt_mtbf_seconds", ""] == run.core.status()["mtbf_s"]
    steps = run.core.status()["decision"]["every_steps"]
    assert found["ckpt_interval_steps", "durable"] == steps
    assert found["ckpt_interval_seconds", "durable"] == pytest.approx(0.5 * steps)
    assert [name for name, _, _ in run.out.observed] == [
        "ckpt_stall_seconds", "ckpt_upload_seconds", "ckpt_restore_seconds"
    ]  # fmt: skip


HAPPENED: dict[str, dict[str, Any]] = {
    "commit": {"name": "step-00000003-g1", "step": 3, "tier": "durable", "bytes": 16, "stall_s": 0.1, "upload_s": 0.2,
               "sample_offset": 72},
    "save_failed": {"name": "step-00000003-g1", "step": 3, "error": "no space"},
    "quarantine": {"name": "step-00000003-g1", "by": "guard", "findings": [{"kind": "nonfinite"}]},
    "interruption": {"kind": "worker_error", "step": 5, "lost_steps": 2},
    "drill": {"name": "step-00000003-g1", "ok": False, "drilled_at": 1.0},
}  # fmt: skip
COUNTED: dict[Key, str] = {
    ("ckpt_commits_total", "durable"): "commit",
    ("ckpt_failures_total", "save"): "save_failed",
    ("ckpt_quarantined_total", "guard"): "quarantine",
    ("ckpt_interruptions_total", "worker_error"): "interruption",
    ("ckpt_drills_total", "failed"): "drill",
}


@settings(max_examples=40)
@given(story=st.lists(st.sampled_from([*HAPPENED, "tracker"]), max_size=12), torn=st.booleans())
def test_totals_do_not_depend_on_how_many_trackers_told_them(
    tmp_path_factory: pytest.TempPathFactory, story: list[str], torn: bool
) -> None:
    core = tracker_of(tmp_path_factory.getbasetemp() / "idle")
    folder = tmp_path_factory.mktemp("run")
    lines: list[str] = []

    def begin() -> tuple[Metrics, Told]:
        out, facts = Told(), dataclasses.replace(core._facts, run_dir=str(folder))
        made = Metrics(facts, OPTIONS, instruments=out, accountant=Clerk())  # type: ignore[arg-type]
        happens(made, "tracker_started", events_read=len(lines))
        made.look(core.status(), core.memory)
        return made, out

    def happens(metrics: Metrics, event: str, **fields: Any) -> None:
        line = {"event": event, "time": 1.7e9, "generation": 1, **fields}
        lines.append(json.dumps(line))
        end = '\n{"event": "commit", "na' if torn else ""
        (folder / JOURNAL_NAME).write_text("\n".join(lines) + end)
        metrics.count(line)

    metrics, out = begin()
    for what in story:
        if what == "tracker":
            metrics, out = begin()
        else:
            happens(metrics, what, **HAPPENED[what])
    metrics.tick()
    assert {key: out.gauges[key] for key in COUNTED} == {
        key: float(story.count(what)) for key, what in COUNTED.items()
    }
    assert out.gauges["ckpt_lost_steps_total", ""] == 2 * story.count("interruption")
    seen = story[max((at for at, what in enumerate(story) if what == "tracker"), default=0) :]
    assert len(out.observed) == 2 * seen.count("commit"), "histograms count what this tracker saw"


def test_a_line_that_the_disk_refuses_is_told_all_the_same(tmp_path: Path) -> None:
    run = Watched(tmp_path / "demo")
    run.begin()
    run.train(3)
    arm("journal.line@1+=enospc")
    try:
        run.core.commit(run.generation, {**run.written(3), "error": "no space"})
        assert run.gauges()["ckpt_failures_total", "save"] == 1
        assert run.gauges()["ckpt_failed_saves_in_a_row", ""] == 1
    finally:
        arm("")


def test_totals_wait_for_a_journal_that_cannot_be_read_and_the_rest_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Watched(tmp_path / "demo")
    run.begin()
    run.train(3)
    run.save()
    run.again()
    monkeypatch.setattr(run.metrics, "_journal", tmp_path)  # a folder
    found = run.gauges()
    assert found["ckpt_step", ""] == 3
    assert not [key for key in found if METRICS[key[0]].kind == "total"], "0 would be a lie"
    monkeypatch.undo()
    assert run.gauges()["ckpt_commits_total", "durable"] == 1


def test_a_long_journal_is_read_beside_what_is_told_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Watched(tmp_path / "demo")
    run.begin()
    for _ in range(4):
        run.train(3)
        run.save()
    run.again()
    run.train(3)
    run.save()
    monkeypatch.setattr(metrics_module, "SLICE_LINES", 2)
    now_s = itertools.count()
    monkeypatch.setattr(run.metrics, "_monotonic", lambda: float(next(now_s)))
    assert not run.metrics.caught_up
    ticks = 0
    while ("ckpt_commits_total", "durable") not in (found := run.gauges()):
        ticks += 1
        assert found["ckpt_up", ""] == 1.0
        assert not [key for key in found if METRICS[key[0]].kind == "total"]
    assert ticks >= 4
    assert found["ckpt_commits_total", "durable"] == 5


def test_gauges_stay_and_ages_grow_while_the_tracker_says_nothing(tmp_path: Path) -> None:
    run = Watched(tmp_path / "demo")
    run.begin()
    run.train(3)
    run.save()
    run.core.steps(run.generation, [{"step": 4, "loss": 1.0, "step_time_s": 0.5}])
    before = run.gauges()
    run.out.gauges.clear()
    run.now_s += 300.0
    run.clock.now += 300.0
    run.metrics.tick()  # and no look: it waits for its storage
    after = dict(run.out.gauges)
    assert after.keys() == before.keys()
    aged = {"ckpt_copy_age_seconds", "ckpt_step_age_seconds"}
    for key, value in before.items():
        assert after[key] == value + (300.0 if key[0] in aged else 0.0), key


def test_a_tracker_that_was_replaced_tells_no_more(tmp_path: Path) -> None:
    run = Watched(tmp_path / "demo")
    run.begin()
    assert run.gauges()
    run.metrics.fall_silent()
    run.out.gauges.clear()
    run.metrics.tick()
    assert not run.out.gauges


@pytest.mark.parametrize("how", ENDS)
def test_how_a_job_ends_is_counted(tmp_path: Path, how: str) -> None:
    run = Watched(tmp_path / "demo")
    run.metrics.ended(how)
    assert run.out.counted == [("ckpt_ended_total", how)]
    assert run.gauges()["ckpt_started_seconds", ""] <= run.clock.now


def test_no_age_is_negative_when_the_clock_was_set_back(tmp_path: Path) -> None:
    run = Watched(tmp_path / "demo")
    run.begin()
    run.train(3)
    run.save()
    run.clock.now -= 3600.0
    assert run.gauges()["ckpt_copy_age_seconds", "durable"] == 0.0


def test_the_ledger_is_told_again_and_each_restart_once(tmp_path: Path) -> None:
    phases = dict.fromkeys(PHASES, 1.5)
    clerk = Clerk(account({2: phases}), None, account({2: phases, 3: phases}))
    run = Watched(tmp_path / "demo", clerk=clerk)
    run.begin()
    found = run.gauges()
    assert clerk.since == 1, "no attempt was there before this tracker"
    for _ in range(3):
        run.now_s += 10.0
        found = run.gauges()
        assert found["ckpt_time_seconds", "useful"] == 60.0
        assert found["ckpt_goodput_ratio", ""] == 0.75
    assert sum(found["ckpt_time_seconds", bucket] for bucket in BUCKETS) == 80.0
    assert found["ckpt_ledger_age_seconds", ""] == 10.0
    names = [name.removeprefix("restart_") for name in PHASES]
    assert run.out.observed == [("ckpt_restart_seconds", name, 1.5) for name in names] * 2


def test_restarts_before_this_tracker_were_observed_by_another_one(tmp_path: Path) -> None:
    run = Watched(tmp_path / "demo")
    run.begin()
    run.core.interruption("lost", "gone")
    run.begin()
    run.clerk = Clerk(account({2: dict.fromkeys(PHASES, 1.0)}))
    run.again()
    run.gauges()
    assert not run.out.observed
    assert run.clerk.since == 3


def test_intervals_are_told_for_each_tier(tmp_path: Path) -> None:
    totals = RunTotals()
    totals.apply({"event": "tier_decision", "every_steps": {"local": 20, "durable": 100}})
    stack = dataclasses.replace(
        OPTIONS.stack, use=("memory", "local", "durable"), local_folder="/nvme"
    )
    options = dataclasses.replace(OPTIONS, stack=stack, tier_steps={"local": 30})
    status = {"decision": {"every_steps": 5, "interval_s": 1.0}, "step_time_s": 2.0}
    found = _intervals(status, totals, options)
    steps = {tier: found["ckpt_interval_steps", tier] for tier in stack.use}
    assert steps == {"memory": 5, "local": 30, "durable": 100}
    assert found["ckpt_interval_seconds", "durable"] == 200.0


# ---- the newest copies ------------------------------------------------------------------------------


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"event": kind, **fields}


def name(step: int) -> str:
    return f"step-{step:08d}-g1"


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["commit", "promote", "delete", "quarantine", "copies", "trouble"]),
        st.integers(1, 6),
        st.sampled_from(["memory", "local", "durable"]),
    ),
    max_size=25,
)


@given(operations=OPERATIONS)
def test_the_newest_copy_is_the_newest_that_is_there(
    operations: list[tuple[str, int, str]],
) -> None:
    copies = NewestCopies()
    held: dict[int, set[str]] = {}
    for time_s, (kind, step, tier) in enumerate(operations):
        if kind == "copies":
            copies.apply(event(kind, tiers={name(step): ["memory"]}, time=time_s))
            held = {s: tiers & {"durable"} for s, tiers in held.items()}
            held.setdefault(step, set()).add("memory")
        elif kind == "trouble":
            copies.apply(event(kind, action="rollback", to_step=step))
            held = {s: tiers for s, tiers in held.items() if s <= step}
        else:
            copies.apply(event(kind, name=name(step), tier=tier, time=time_s))
            if kind in ("commit", "promote"):
                held.setdefault(step, set()).add(tier)
            else:
                held.get(step, set()).discard("durable" if kind == "quarantine" else tier)
    for which in ("durable", "any"):
        there = [s for s, tiers in held.items() if (which in tiers or (which == "any" and tiers))]
        newest = copies.newest(which)
        assert (newest[0] if newest else None) == max(there, default=None)


def test_a_copy_is_as_old_as_its_state_whenever_it_got_there() -> None:
    copies = NewestCopies()
    copies.apply(event("commit", name=name(5), tier="memory", time=100.0))
    copies.apply(event("promote", name=name(5), tier="durable", time=400.0))
    copies.apply(event("delete", name=name(5), tier="memory", time=500.0))
    assert copies.newest("durable") == copies.newest("any") == (5, 100.0)


@given(garbage=st.dictionaries(st.sampled_from(["name", "tier", "time", "step", "bytes", "kind", "findings",
                                                "ok", "tiers", "every_steps", "action"]),
                               st.one_of(st.none(), st.text(max_size=3), st.integers(), st.lists(st.integers()))),
       kind=st.sampled_from(["commit", "promote", "delete", "quarantine", "copies", "trouble", "drill",
                             "interruption", "restored", "tier_decision", "alert"]))  # fmt: skip
def test_no_line_of_a_journal_ends_the_metrics(garbage: dict[str, Any], kind: str) -> None:
    totals = RunTotals()
    totals.apply({**garbage, "event": kind})
    assert all(isinstance(value, float) for value in totals.values().values())


def test_an_account_goes_through_json_unchanged() -> None:
    made = account({7: dict.fromkeys(PHASES, 0.25)})
    assert Account.from_json(json.loads(json.dumps(made.to_json()))) == made
