"""A controller that dies is replaced in the same job, for as long as the run gets on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from ray_ckpt import refit
from ray_ckpt.errors import RayCkptError
from ray_ckpt.refit import CAUSE, IDLE_TRIES, fit_through_lost_controllers


@pytest.fixture(autouse=True)
def reserved(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Placement groups of the job: one is somebody else's, and each controller makes one."""
    groups = {"theirs"}
    monkeypatch.setattr(refit.ray_private, "placement_groups", lambda: set(groups))
    monkeypatch.setattr(refit.ray_private, "release", groups.difference_update)
    return groups


class Tracker:
    """Says whether an attempt is open, and what follows its end."""

    def __init__(self, attempts: list[bool], verdict: Any = None) -> None:
        self.attempts = attempts
        self.verdict = verdict or SimpleNamespace(go_on=True, reason="", wait_s=0.0)
        self.ends: list[dict[str, Any]] = []

    def call(self, method: str, **kwargs: Any) -> Any:
        if method == "status":
            return {"attempt_open": self.attempts.pop(0)}
        assert method == "interruption"
        self.ends.append(kwargs)
        return self.verdict


def trainers(outcomes: list[BaseException | None]) -> Any:
    """Makes one trainer for each outcome of ``fit()``."""
    left = list(outcomes)

    def make() -> Any:
        outcome = left.pop(0)

        def fit() -> None:
            if outcome is not None:
                raise outcome

        return SimpleNamespace(fit=fit)

    make.left = left  # type: ignore[attr-defined]
    return make


def test_a_new_controller_follows_and_each_attempt_has_one_end(reserved: set[str]) -> None:
    gone = RayActorError()
    make, tracker, slept = trainers([gone, gone, gone, None]), Tracker([True, False, True]), []
    tracker.verdict.wait_s = 2.0

    def reserving() -> Any:
        assert reserved == {"theirs"}, "the one before holds what this one needs"
        reserved.add(f"controller {len(make.left)}")
        return make()

    fit_through_lost_controllers(reserving, tracker, slept.append)  # type: ignore[arg-type]
    assert make.left == []
    # The second one died before an attempt began: that one has no end of its own.
    assert tracker.ends == [{"kind": "lost", "cause": CAUSE}] * 2
    assert slept == [2.0, 2.0]


def test_it_ends_where_the_tracker_sees_no_sense_in_going_on() -> None:
    verdict = SimpleNamespace(go_on=False, reason="3 attempts got nowhere", wait_s=0.0)
    with pytest.raises(RayCkptError, match="3 attempts got nowhere"):
        fit_through_lost_controllers(trainers([RayActorError()]), Tracker([True], verdict))  # type: ignore[arg-type]


def test_controllers_that_die_before_anything_begins_are_not_made_for_ever() -> None:
    make = trainers([RayActorError()] * (IDLE_TRIES + 1))
    with pytest.raises(RayCkptError, match="before an attempt began"):
        fit_through_lost_controllers(make, Tracker([False] * IDLE_TRIES))  # type: ignore[arg-type]
    assert len(make.left) == 1


def test_another_error_is_not_the_controllers() -> None:
    with pytest.raises(ValueError, match="mine"):
        fit_through_lost_controllers(trainers([ValueError("mine")]), Tracker([]))  # type: ignore[arg-type]
