"""A worker asks whether its attempt is over when no step ends for long, and only then; it ends when it is told so."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ckpt.elastic.leash import Leash
from ray_ckpt.elastic.word import Word
from ray_ckpt.errors import StaleGenerationError, StorageError


class Stand:
    """A tracker, a step and a clock, as a test sets them."""

    def __init__(
        self, quiet_s: float = 60.0, *, word: Word | None = None, turn: float = 1.0
    ) -> None:
        self.now = self.step_since_s = 0.0
        self.asked, self.ended, self.over, self.reachable = 0, [], False, True
        self.leash = Leash(
            self.check,
            quiet_s,
            word=word,
            turn=turn,
            step_since_s=lambda: self.step_since_s,
            end=self.ended.append,
            clock=lambda: self.now,
        )

    def check(self) -> None:
        self.asked += 1
        if not self.reachable:
            raise StorageError("no way there")
        if self.over:
            raise StaleGenerationError("attempt 2 has taken its place")

    def pass_s(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self.leash.look()


@given(st.integers(1, 59))
def test_steps_that_end_ask_nothing(step_s: int) -> None:
    stand = Stand()
    for _ in range(20):
        stand.pass_s(step_s)
        stand.step_since_s = stand.now
    assert stand.asked == 0


@given(st.integers(0, 400))
def test_a_worker_ends_within_its_bound_after_the_run_went_on_without_it(after_s: int) -> None:
    stand = Stand()
    stand.pass_s(after_s)
    assert stand.ended == []
    assert stand.asked == after_s // 60
    stand.over = True
    stand.pass_s(60)
    assert stand.ended == ["attempt 2 has taken its place"]


def test_a_process_that_was_stopped_asks_as_soon_as_it_goes_on() -> None:
    stand = Stand()
    stand.over = True
    stand.now = 1000.0
    stand.leash.look()
    assert stand.ended


def test_a_tracker_that_is_not_reached_ends_nobody_and_is_asked_again() -> None:
    stand = Stand()
    stand.over, stand.reachable = True, False
    stand.pass_s(200)
    assert (stand.asked, stand.ended) == (3, [])
    stand.reachable = True
    stand.pass_s(60)
    assert stand.ended


class Node:
    """Workers of one node, which hear of each other."""

    def __init__(self, folder: Path, count: int, generation: int = 1) -> None:
        self.now = 0.0
        word = Word(Path("run"), generation, folder=lambda: folder, clock=lambda: self.now)
        self.stands = [Stand(word=word, turn=k / max(1, count - 1)) for k in range(count)]

    def pass_s(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            for stand in self.stands:
                stand.now = self.now
                stand.leash.look()

    @property
    def asked(self) -> list[int]:
        return [stand.asked for stand in self.stands]


@pytest.mark.parametrize("count", [1, 8])
def test_one_of_a_node_asks_and_all_end_within_their_bound(tmp_path: Path, count: int) -> None:
    node = Node(tmp_path, count)
    node.pass_s(45 * 20)
    assert node.asked == [20, *[0] * (count - 1)]
    for stand in node.stands:
        stand.over = True
    node.pass_s(60)
    assert all(stand.ended for stand in node.stands)


def test_when_the_first_of_a_node_does_not_ask_the_next_one_does(tmp_path: Path) -> None:
    node = Node(tmp_path, 4)
    node.pass_s(60)
    first = node.stands.pop(0)
    first.asked = 0
    node.pass_s(600)
    assert node.asked[0] >= 600 // 60
    assert node.asked[1:] == [0, 0]


@pytest.mark.parametrize("word", ["", "1", "x 1.0", "1 x", "2 50.0", "1 1e9", None])
def test_a_word_that_says_nothing_is_none(tmp_path: Path, word: str | None) -> None:
    node = Node(tmp_path, 1)
    node.pass_s(50)
    [path] = tmp_path.iterdir()
    if word is None:
        path.unlink()
    else:
        path.write_text(word)
    found = Word(Path("run"), 1, folder=lambda: tmp_path, clock=lambda: 60.0).heard_s()
    assert found == float("-inf")


def test_a_node_without_a_folder_for_words_asks_for_each_worker(tmp_path: Path) -> None:
    node = Node(tmp_path / "nowhere", 3)
    node.pass_s(60)
    assert node.asked == [1, 1, 1]
    assert Word(tmp_path, 1).heard_s() == float("-inf")
