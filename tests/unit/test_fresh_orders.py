"""An order of the tracker reaches rank 0 within a long step, and the end of an attempt is not lost in a thread."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from typing import Any

import pytest

from ray_ckpt.errors import StaleGenerationError, StorageError
from ray_ckpt.tracker import listener
from ray_ckpt.tracker.listener import Listener
from ray_ckpt.tracker.records import Attempt, Directive, Leave
from ray_ckpt.tracker.steward import Steward

DIRECTIVE = Directive(
    every_steps=10,
    reason="",
    save_request=0,
    hold_s=0.0,
    last_commit_step=None,
    failed_in_a_row=0,
)
LEAVE = Leave(kind="drain", cause="a node goes", saves=True)


class Tracker:
    """Answers each call with what a test says."""

    def __init__(self) -> None:
        self.answer: Any = DIRECTIVE
        self.lines: list[dict[str, Any]] = []
        self.asked = threading.Event()

    def call(self, method: str, **kwargs: Any) -> Any:
        raise AssertionError(method)

    def post(self, method: str, **kwargs: Any) -> Any:
        assert method == "steps"
        self.lines += kwargs["records"]
        self.asked.set()
        return None

    def poll(self, ticket: Any) -> tuple[bool, Any]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return True, self.answer


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> Tracker:
    made = Tracker()
    # An answer is there when it is asked for a second time.
    monkeypatch.setattr(
        made, "post", lambda method, **more: Tracker.post(made, method, **more) or 1
    )
    return made


def steward(tracker: Tracker | None) -> Steward:
    attempt = Attempt(generation=1, plan=None, directive=DIRECTIVE)
    return Steward(tracker=tracker, attempt=attempt, start_step=0, total_steps=100)


def test_within_a_step_the_present_order_is_asked_for_and_lines_are_sent_once(
    tracker: Tracker,
) -> None:
    rank0 = steward(tracker)
    rank0.executed({"step": 1})
    assert rank0.refresh(0.0)
    tracker.answer = replace(DIRECTIVE, leave=LEAVE)
    assert rank0.refresh(1000.0), "the answer is taken, though it is too early to ask again"
    assert rank0.leave == LEAVE
    rank0.exchange(flush=True)
    assert tracker.lines == [{"step": 1}]


def test_after_a_save_the_next_steps_look_for_the_answer_until_it_is_there_and_ask_nothing(
    tracker: Tracker,
) -> None:
    rank0 = steward(tracker)
    tracker.answer = replace(DIRECTIVE, leave=LEAVE)
    there, looks = False, 0

    def poll(ticket: Any) -> tuple[bool, Any]:
        nonlocal looks
        looks += 1
        return there, tracker.answer if there else None

    tracker.poll = poll  # type: ignore[method-assign]
    rank0.executed({"step": 1})
    rank0.exchange(flush=True)
    rank0.executed({"step": 2})
    rank0.exchange(flush=False)
    assert rank0.leave is None
    there = True
    rank0.exchange(flush=False)
    assert rank0.leave == LEAVE, "a run of quick steps hears it before the thread beside it would"
    assert tracker.lines == [{"step": 1}]
    seen = looks
    rank0.exchange(flush=False)
    assert looks == seen, "once it is there, a step costs nothing"


def test_a_step_says_nothing_itself_but_what_could_not_be_said_beside_it(tracker: Tracker) -> None:
    rank0 = steward(tracker)
    for step in (1, 2):
        rank0.executed({"step": step})
        rank0.exchange(flush=False)
    assert not tracker.asked.is_set()
    said, tracker.post = tracker.post, busy  # type: ignore[method-assign]
    with pytest.raises(StorageError):
        rank0.refresh(0.0)
    with pytest.raises(StorageError):
        rank0.exchange(flush=False)
    tracker.post = said  # type: ignore[method-assign]
    rank0.executed({"step": 3})
    assert rank0.refresh(1000.0), "lines do not wait for the time of a question"
    assert tracker.lines == [{"step": step} for step in (1, 2, 3)]


def busy(method: str, **kwargs: Any) -> Any:
    raise StorageError("the tracker is busy")


def test_that_another_attempt_took_over_is_raised_in_the_training_thread(tracker: Tracker) -> None:
    rank0 = steward(tracker)
    assert rank0.refresh(0.0)
    tracker.answer = StaleGenerationError("attempt 2 has taken its place")
    assert not rank0.refresh(0.0)
    tracker.answer = DIRECTIVE
    with pytest.raises(StaleGenerationError, match="attempt 2"):
        rank0.exchange(flush=False)


def test_other_ranks_have_nobody_to_ask() -> None:
    assert not steward(None).refresh(0.0)


@pytest.mark.parametrize("how", ["closed", "stale", "forgotten"])
def test_the_thread_ends_with_its_attempt(
    tracker: Tracker, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(listener, "FRESH_S", 0.001)
    monkeypatch.setattr(listener, "BUNDLE_S", 0.001)
    before = {*threading.enumerate()}
    rank0 = steward(tracker)
    end = Listener(rank0)
    [thread] = {*threading.enumerate()} - before
    assert tracker.asked.wait(10.0)
    if how == "stale":
        tracker.answer = StorageError("the tracker is busy")
    tracker.asked.clear()
    assert tracker.asked.wait(10.0), "it asks again"
    if how == "closed":
        end.close()
    elif how == "stale":
        tracker.answer = StaleGenerationError("attempt 2 has taken its place")
    else:
        del rank0
        gc.collect()
    thread.join(10.0)
    assert not thread.is_alive()


def test_a_request_is_answered_by_a_save_that_the_ranks_agreed_on_after_it(
    tracker: Tracker,
) -> None:
    rank0 = steward(tracker)
    assert rank0.wants_save(10), "one is due"
    assert not rank0.holds
    tracker.answer = replace(DIRECTIVE, save_request=1, hold_s=60.0)
    assert rank0.refresh(0.0)
    assert rank0.refresh(0.0), "while the ranks agree, somebody asks"
    assert rank0.saving(10) == 0.0
    assert (rank0.answered, rank0.asked) == (0, True)
    assert rank0.wants_save(11)
    assert rank0.holds
    assert rank0.saving(11) == 60.0
    assert (rank0.answered, rank0.asked) == (1, False)
