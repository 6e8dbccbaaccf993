"""The goodput ledger: whatever happened to a run, its time adds up, and goes where it was spent."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt import cli
from ray_ckpt.tracker.buckets import BUCKETS, DAY_S, empty
from ray_ckpt.tracker.ledger import make_ledger
from ray_ckpt.tracker.memory import PLANNED

STEP_S = 2.0
STALL_S, VALIDATION_S, UPLOAD_S = 0.5, 0.25, 3.0


class Script:
    """A run that is told what happens to it, with clocks that it is told to have; and what a ledger must find.

    Args:
        modern: whether the marks are written that older runs lack.
    """

    def __init__(self, *, modern: bool = True) -> None:
        self.modern = modern
        self.now = self.submit = 5000.0
        self.date_off, self.boots, self.boot = 1.7e9, 1, 100.0
        self.worker_boot = 77_000.0
        self.events: list[dict[str, Any]] = []
        self.lines: list[dict[str, Any]] = []
        self.spent = empty()
        self.counted: Counter[str] = Counter()
        self.rework: Counter[str] = Counter()
        self.generation = self.step = self.saved = self.lost = 0
        self.done: dict[int, float] = {}  # what the steps took that stand
        self.began = False
        self.last_kind = "lost"

    def spend(self, seconds: float, bucket: str) -> None:
        """Time passes."""
        own = self.began or bucket in ("waiting_for_resources", "idle")
        self.spent[bucket if own else "start"] += seconds
        self.now += seconds

    def write(self, event: str, **fields: Any) -> None:
        line = {"time": self.now + self.date_off, "generation": self.generation, "event": event}
        if self.modern:
            line["monotonic"] = self.now - self.boot
            if event in ("tracker_started", "attempt_started"):
                line["boot"] = f"boot-{self.boots}"
        self.events.append({**line, **fields})

    def job(self, starting_s: float, idle_s: float, *, moved: bool) -> None:
        """A job is submitted, on another machine if it moved."""
        if self.events:
            self.spend(idle_s, "idle")
        if moved:
            self.boots += 1
            self.boot = self.now - 10.0 * self.boots
        submit = self.now
        self.spend(starting_s, "restart_reschedule")
        self.write("tracker_started", submitted_ago_s=self.now - submit)

    def tracker_died(self) -> None:
        """And came again, in the same job."""
        first = next(e for e in reversed(self.events) if e["event"] == "tracker_started")
        submit = first["monotonic"] - first["submitted_ago_s"]
        self.write("tracker_started", submitted_ago_s=self.now - self.boot - submit)

    def group(self, look_s: float, wait_s: float, start_s: float, join_s: float) -> None:
        self.spend(look_s, "restart_reschedule")
        self.spend(wait_s, "waiting_for_resources")
        self.spend(start_s, "restart_start_workers")
        self.spend(join_s, "restart_process_group")
        self.write(
            "group_started",
            world_size=2,
            asked_ago_s=start_s + join_s,
            workers_ago_s=join_s,
            waited_s=wait_s,
        )

    def attempt(self, build_s: float, restore_s: float, *, told: bool) -> None:
        """Workers join and restore."""
        self.spend(build_s, "restart_start_workers")
        if not told:
            # The job before died: the new attempt tells it.
            kept = self.saved
            self.end("lost", step=self.step, lost_steps=self.step - kept)
        self.generation += 1
        self.write("attempt_started", world_size=2)
        self.spend(restore_s, "restart_restore")
        self.worker_boot += 1000.0  # on another machine each time
        self.write(
            "restored",
            step=self.saved,
            seconds=restore_s,
            worker_monotonic=self.now - self.worker_boot,
        )
        for step in [step for step in self.done if step > self.saved]:
            took_s = self.done.pop(step)
            self.spent["useful"] -= took_s
            self.spent["rework"] += took_s
            self.rework[self.last_kind] += took_s
        self.step = self.saved
        self.fresh = True

    def train(self, count: int, wait_s: float, between_s: float) -> None:
        """Some steps."""
        for _ in range(count):
            extra_s = 1.5 if self.fresh else 0.0
            begin = self.now
            self.spend(between_s, "restart_first_step" if self.fresh else "evaluation")
            self.spend(wait_s, "restart_data_seek" if self.fresh else "data_wait")
            self.spend(extra_s, "restart_first_step")
            self.began, self.fresh = True, False
            self.spend(STEP_S, "useful")
            self.step += 1
            self.done[self.step] = STEP_S
            line = {
                "step": self.step,
                "generation": self.generation,
                "step_time_s": self.now - begin,
                "time": self.now + self.date_off,
            }
            if self.modern:
                line["monotonic"] = self.now - self.worker_boot
            self.lines.append({**line, "data_wait_s": wait_s, "between_s": between_s})

    def save(self, more_steps: int) -> None:
        """Saves the present step; the upload ends a few steps later, if there are enough of them."""
        step = self.step
        self.spend(VALIDATION_S, "evaluation")
        self.spend(STALL_S, "stall")
        begun = self.now
        self.train(more_steps, 0.0, 0.0)
        name = f"step-{step:08d}-g{self.generation}"
        if more_steps:
            self.saved = step
            self.write(
                "commit",
                step=step,
                name=name,
                stall_s=STALL_S,
                upload_s=self.now - begun,
                validation_s=VALIDATION_S,
            )

    def interrupt(self, kind: str, detect_s: float, look_s: float) -> None:
        if kind in PLANNED:
            self.spend(detect_s + look_s, "stall")
        else:
            self.spend(detect_s, "restart_detect")
            self.spend(look_s, "restart_reschedule")
        self.began = True
        noticed = {"noticed_ago_s": look_s} if self.modern else {}
        self.end(kind, step=self.step, lost_steps=self.step - self.saved, group="a", **noticed)

    def end(self, kind: str, **fields: Any) -> None:
        self.write("interruption", kind=kind, cause="", **fields)
        self.lost += fields["lost_steps"]
        self.counted[kind] += 1
        self.last_kind = kind
        self.step = self.saved

    def jump(self, seconds: float) -> None:
        """Somebody sets the date, and the tracker is still there to see it."""
        self.date_off += seconds
        self.write("decision")

    def check(self) -> None:
        ledger = make_ledger(self.events, self.lines)
        assert ledger is not None
        wall_s = self.now - self.submit
        assert ledger.wall_s == pytest.approx(wall_s, rel=1e-6)
        assert sum(ledger.buckets.values()) == pytest.approx(wall_s, rel=1e-6)
        assert ledger.buckets == pytest.approx(self.spent, rel=1e-6, abs=1e-3)
        assert ledger.goodput == pytest.approx(STEP_S * len(self.done) / wall_s, abs=1e-6)
        assert ledger.lost_steps == self.lost
        assert ledger.interruptions == self.counted
        assert ledger.rework_by_cause == pytest.approx(self.rework, abs=1e-3)
        check_sums(ledger)


def check_sums(ledger: Any) -> None:
    """Time adds up, however it is looked at; that much holds for any records whatever."""
    assert set(ledger.buckets) == set(BUCKETS)
    assert all(seconds >= 0 for seconds in ledger.buckets.values())
    assert sum(ledger.buckets.values()) == pytest.approx(ledger.wall_s, rel=1e-3, abs=1e-6)
    for parts in (ledger.by_attempt, ledger.by_day):
        summed = empty()
        for each in parts.values():
            assert all(seconds >= 0 for seconds in each.values())
            for name, seconds in each.items():
                summed[name] += seconds
        assert summed == pytest.approx(ledger.buckets, rel=1e-6, abs=1e-6)
    assert all(sum(each.values()) <= DAY_S + 1e-3 for each in ledger.by_day.values())
    rework_s = sum(ledger.rework_by_cause.values())
    assert rework_s == pytest.approx(ledger.buckets["rework"], abs=1e-6)
    phases_s = sum(ledger.buckets[name] for name in BUCKETS if name.startswith("restart_"))
    assert sum(each.seconds for each in ledger.restarts) == pytest.approx(phases_s, abs=1e-6)
    assert json.loads(json.dumps(ledger.to_json()))["wall_s"] == ledger.wall_s


TIMES = st.sampled_from([0.0, 0.01, 1.0, 7.5, 90.0])
ENDS = st.sampled_from(["worker_error", "node_loss", "resize", "user_stop", "job died", "no room"])


def begin(script: Script, draw: Any, *, told: bool) -> None:
    """The way into an attempt."""
    script.group(draw(TIMES), draw(TIMES), draw(TIMES), draw(TIMES))
    script.attempt(draw(TIMES), draw(TIMES), told=told)


@settings(max_examples=40)
@given(data=st.data())
def test_every_second_of_a_run_is_in_the_bucket_that_it_was_spent_on(data):
    draw, script = data.draw, Script()
    script.job(draw(TIMES), 0.0, moved=False)
    begin(script, draw, told=True)
    for _ in range(draw(st.integers(0, 4))):
        # More steps without an upload than beside one, so that it is known what a step takes.
        script.train(draw(st.integers(4, 8)), draw(TIMES), draw(TIMES))
        for _ in range(draw(st.integers(0, 2))):
            script.save(draw(st.integers(1, 2)))
            script.train(3, draw(TIMES), 0.0)
        if draw(st.booleans()):
            script.tracker_died()
            script.train(2, 0.0, 0.0)
        if draw(st.booleans()):
            script.jump(draw(st.sampled_from([-7200.0, -5.0, 3600.0, 1e6])))
        end = draw(ENDS)
        if end == "job died":
            script.job(draw(TIMES), draw(TIMES), moved=draw(st.booleans()))
            script.last_kind = "lost"
            begin(script, draw, told=False)
            continue
        if end == "no room":
            script.interrupt("node_loss", draw(TIMES), draw(TIMES))
            script.job(draw(TIMES), draw(TIMES), moved=draw(st.booleans()))
        else:
            script.interrupt(end, draw(TIMES), draw(TIMES))
        begin(script, draw, told=True)
    script.train(draw(st.integers(4, 5)), draw(TIMES), draw(TIMES))
    script.spend(0.75, "stall")
    script.write("finished", step=script.step)
    script.check()


def simple(*, modern: bool = True, steps: int = 12) -> Script:
    """A run with a save, a failure and an end."""
    script = Script(modern=modern)
    script.job(5.0, 0.0, moved=False)
    script.group(1.0, 0.0, 4.0, 2.0)
    script.attempt(3.0, 1.0, told=True)
    script.train(steps, 0.1, 0.0)
    script.save(2)
    script.train(3, 0.1, 0.0)
    script.interrupt("node_loss", 8.0, 2.0)
    script.group(1.0, 30.0, 4.0, 2.0)
    script.attempt(3.0, 1.0, told=True)
    script.train(steps, 0.1, 0.0)
    script.write("finished", step=script.step)
    return script


@settings(max_examples=40)
@given(data=st.data())
def test_damaged_records_never_sum_to_more_or_less_than_the_time_they_span(data):
    script = simple()
    first, *others = script.events
    events = [dict(event) for event in others if data.draw(st.integers(0, 9))]
    lines = [dict(line) for line in script.lines if data.draw(st.integers(0, 9))]
    for line in data.draw(st.lists(st.sampled_from([*events, *lines, {"": 0}]), max_size=6)):
        for name in data.draw(st.lists(st.sampled_from(sorted(line)), max_size=3)):
            wrong = [None, -5, float("nan"), 1e5, 0, "text"]
            if name in ("time", "monotonic"):
                wrong = [line[name] - 500.0, line[name] + 500.0]
            line[name] = data.draw(st.sampled_from(wrong))
    check_sums(make_ledger([first, *events], lines))
    # Step lines alone, however wrong, never change how much time there was.
    whole = make_ledger(script.events, lines)
    check_sums(whole)
    assert whole.wall_s == pytest.approx(script.now - script.submit)


def test_an_old_run_says_what_it_does_not_know():
    script = simple(modern=False)
    old = [
        {k: v for k, v in event.items() if k != "submitted_ago_s"}
        for event in script.events
        if event["event"] != "group_started"
    ]
    lines = [{k: v for k, v in line.items() if k != "between_s"} for line in script.lines]
    ledger = make_ledger(old, lines)
    check_sums(ledger)
    # What came before its first line is not on record; the rest of the wall is.
    assert ledger.wall_s == pytest.approx(script.now - script.submit - 5.0)
    assert ledger.buckets["useful"] == pytest.approx(script.spent["useful"])
    assert ledger.buckets["rework"] == pytest.approx(script.spent["rework"])
    assert ledger.buckets["unknown"] == pytest.approx(1 + 30 + 4 + 2 + 3)  # the way back in
    assert ledger.buckets["waiting_for_resources"] == 0
    # Lines of steps that have no time at all: each ends its own length after the one before.
    bare = [{k: v for k, v in line.items() if k != "time"} for line in lines]
    again = make_ledger(old, bare)
    check_sums(again)
    assert again.buckets["rework"] == pytest.approx(script.spent["rework"])


def test_an_old_job_that_was_killed_and_started_again_was_idle_in_between():
    script = Script(modern=False)
    script.job(0.0, 0.0, moved=False)
    script.attempt(3.0, 1.0, told=True)
    script.train(6, 0.0, 0.0)
    script.job(0.0, 50.0, moved=False)
    script.attempt(3.0, 1.0, told=False)
    script.train(6, 0.0, 0.0)
    for event in script.events:
        event.pop("submitted_ago_s", None)
    ledger = make_ledger(script.events, script.lines)
    check_sums(ledger)
    assert ledger.buckets["idle"] == pytest.approx(50)
    assert ledger.buckets["unknown"] == pytest.approx(3)
    assert [each.kind for each in ledger.restarts] == ["lost"]
    # Before trackers told of their start, nobody knows when the next one was submitted.
    ledger = make_ledger(
        [e for e in script.events if e["event"] != "tracker_started"], script.lines
    )
    check_sums(ledger)
    assert ledger.buckets["idle"] == 0
    assert ledger.buckets["unknown"] == pytest.approx(53)


def test_steps_beside_an_upload_are_slow_and_the_others_are_not():
    script = Script()
    script.job(5.0, 0.0, moved=False)
    script.group(1.0, 0.0, 4.0, 2.0)
    script.attempt(3.0, 1.0, told=True)
    slowed_s = 0.0
    for _ in range(3):
        script.train(8, 0.0, 0.0)
        begun, step = script.now, script.step
        for _ in range(4):
            script.train(1, 0.0, 0.0)
            script.now += 0.5  # each of them takes 2.5 s
            slowed_s += 0.5
            script.lines[-1]["step_time_s"] += 0.5
            script.lines[-1]["monotonic"] += 0.5
        script.write("commit", step=step, stall_s=0.0, upload_s=script.now - begun)
    ledger = make_ledger(script.events, script.lines)
    check_sums(ledger)
    assert ledger.buckets["slowdown"] == pytest.approx(slowed_s)
    assert ledger.buckets["useful"] == pytest.approx(36 * STEP_S)


def test_a_stall_that_is_waited_for_in_the_next_step_is_a_stall():
    script = simple()
    total_s = 0.0
    for event in script.events:
        if event["event"] == "commit":
            event["stall_s"] += 0.4
            total_s += 0.4
            line = next(x for x in script.lines if x["step"] == event["step"] + 1)
            at = script.lines.index(line)
            for later in script.lines[at:]:
                if later["generation"] == line["generation"]:
                    later["monotonic"] += 0.4  # taken from the time up to the interruption
            line["step_time_s"] += 0.4
    ledger = make_ledger(script.events, script.lines)
    check_sums(ledger)
    assert total_s
    assert ledger.buckets["stall"] == pytest.approx(script.spent["stall"] + total_s)
    assert ledger.buckets["useful"] == pytest.approx(script.spent["useful"])


def test_steps_whose_lines_are_lost_are_unknown_and_a_line_twice_counts_once():
    script = simple()
    few = [line for line in script.lines if line["step"] not in (4, 5, 6) or line["generation"] > 1]
    ledger = make_ledger(script.events, few)
    check_sums(ledger)
    assert ledger.buckets["unknown"] == pytest.approx(3 * (STEP_S + 0.1))
    doubled = [line for line in script.lines for _ in range(2)]
    assert make_ledger(script.events, doubled).buckets == pytest.approx(script.spent)


def test_an_interruption_tells_the_rework_before_anything_was_restored_again():
    script = simple()
    ended = next(i for i, e in enumerate(script.events) if e["event"] == "interruption")
    lines = [line for line in script.lines if line["generation"] == 1]
    running = make_ledger(script.events[:ended], lines)
    told = make_ledger(script.events[: ended + 1], lines)
    assert running.buckets["rework"] == 0
    assert told.buckets["rework"] == pytest.approx(script.spent["rework"])
    assert told.rework_by_cause == pytest.approx(script.rework)
    for ledger in (running, told):
        check_sums(ledger)


def test_what_is_done_by_hand_later_is_no_time_of_the_run():
    script = simple()
    before = make_ledger(script.events, script.lines)
    script.now += 30 * DAY_S
    for event in ("pin", "drill", "delete", "verified"):
        script.write(event, name="step-00000001-g1", author="a", reason="b", drilled_at=1.0)
    assert make_ledger(script.events, script.lines).buckets == before.buckets


def test_days_are_by_the_date_of_most_lines():
    script = Script()
    script.date_off = 20_000 * DAY_S - script.now - 60.0  # a minute before midnight
    script.job(30.0, 0.0, moved=False)
    script.group(0.0, 0.0, 0.0, 0.0)
    script.attempt(0.0, 0.0, told=True)
    script.train(40, 0.0, 0.0)
    ledger = make_ledger(script.events, script.lines)
    check_sums(ledger)
    assert [sum(each.values()) for each in ledger.by_day.values()] == pytest.approx([60, 51.5])
    assert list(ledger.by_day) == ["2024-10-03", "2024-10-04"]


def test_a_run_that_has_not_begun_has_no_ledger_and_one_moment_has_no_goodput():
    assert make_ledger([], []) is None
    one = make_ledger([{"event": "attempt_started", "time": 5.0, "generation": 1}], [])
    assert (one.wall_s, one.goodput) == (0, None)


@pytest.fixture
def folder(tmp_path):
    """A run's folder with the records of a simple script."""
    script = simple()
    run = tmp_path / "runs" / "demo"
    run.mkdir(parents=True)
    for name, lines in (("journal.jsonl", script.events), ("steps.jsonl", script.lines)):
        (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return script, run


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_the_command_gives_scripts_the_shape_of_the_design(folder, scheme, capsys):
    script, run = folder
    assert cli.main(["goodput", f"{scheme}{run}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["buckets"] == pytest.approx(script.spent)
    assert found["wall_s"] == pytest.approx(script.now - script.submit)
    assert found["goodput"] == pytest.approx(script.spent["useful"] / found["wall_s"])
    assert (found["lost_steps"], found["interruptions"]) == (script.lost, {"node_loss": 1})
    assert set(found["attempts"]) == {"1", "2"}
    assert found["restarts"][0]["buckets"]["waiting_for_resources"] == pytest.approx(30)


def test_the_command_tells_people(folder, capsys):
    _, run = folder
    assert cli.main(["goodput", str(run), "--attempts", "--days"]) == 0
    out = capsys.readouterr().out
    for words in (
        "goodput",
        "restart_detect",
        "interruptions: 1 node_loss",
        "interval:",
        "ATTEMPT",
    ):
        assert words in out
    assert "2023-" in out
    assert cli.main(["goodput", str(run.parent)]) == 2


def test_the_new_commands_answer_without_ray_torch_or_numpy(folder):
    _, run = folder
    plan = ["plan", "--mtbf", "3h", "--stall", "1m", "--restart", "1m"]
    code = (
        "import sys; from ray_ckpt import cli;"
        f"codes = [cli.main(a) for a in (['goodput', {str(run)!r}], ['interruptions', {str(run)!r}], {plan!r})];"
        "found = {'ray', 'torch', 'pyarrow', 'numpy'} & sys.modules.keys();"
        "sys.exit(str(found or codes) if found or any(codes) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
