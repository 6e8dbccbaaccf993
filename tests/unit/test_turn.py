"""The turn of a tracker: one call at a time, and whoever waits lets the others in."""

from __future__ import annotations

import threading

from ray_ckpt.tracker.turn import Turn


def test_nobody_has_a_turn_beside_another_one_unless_that_one_waits() -> None:
    turn, told = Turn(), list[str]()
    waits, go_on = threading.Event(), threading.Event()

    def waiting() -> None:
        with turn, turn:  # a call within a call
            told.append("before")
            with turn.given_up():
                waits.set()
                assert go_on.wait(5)
            told.append("after")

    thread = threading.Thread(target=waiting)
    with turn:
        thread.start()
        assert not waits.wait(0.05), "it has a turn although another one has it"
    assert waits.wait(5)
    with turn:
        go_on.set()
        thread.join(0.05)
        told.append("between")
    thread.join(5)
    assert told == ["before", "between", "after"]
    with turn:  # all that was taken was given back
        pass


def test_a_turn_that_was_given_up_is_taken_again_when_the_wait_fails() -> None:
    turn = Turn()
    with turn:
        try:
            with turn.given_up():
                raise TimeoutError
        except TimeoutError:
            pass
        taken = threading.Event()

        def take() -> None:
            with turn:
                taken.set()

        thread = threading.Thread(target=take)
        thread.start()
        assert not taken.wait(0.05)
    assert taken.wait(5)
    thread.join(5)
