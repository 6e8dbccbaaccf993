"""Whatever is put on record can be read on the page: no event without words, none of them dropped."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_story_lines import LINES
from test_tracker_core import Run

from ray_ckpt.tracker.journal import JOURNAL_NAME
from ray_ckpt.view import wording
from ray_ckpt.view.chronicle import ALARMING
from ray_ckpt.view.run_view import RunView
from ray_ckpt.view.story import TELLERS
from ray_ckpt.view.wording import QUIET, describe, knows

SOURCE = Path(wording.__file__).parents[1]


def put_on_record() -> Iterator[tuple[str, str]]:
    """Each name of an event that the code can write, and where.

    An event is written by ``record("name", ...)``, in whatever hands the recorder is, or by a function of the module
    whose first argument is ``event: str``. A name that is not written down there cannot be looked up: it is an error.
    """
    for path in sorted(SOURCE.rglob("*.py")):
        if path.parent.name == "view":
            continue
        source = path.read_text()
        if not any(word in source for word in ("record(", '"event"', "event: str", "self(")):
            continue  # to parse all of them takes a second
        tree = ast.parse(source)
        writers = {"_record"} | {
            each.name
            for each in ast.walk(tree)
            if isinstance(each, ast.FunctionDef) and _first_argument(each) == "event: str"
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _called(node) in writers and node.args:
                for name in _names(node.args[0]):
                    yield name, f"{path.relative_to(SOURCE)}:{node.lineno}"
            if isinstance(node, ast.Dict):  # an event that is handed on
                for key, value in zip(node.keys, node.values, strict=True):
                    if (
                        isinstance(key, ast.Constant)
                        and key.value == "event"
                        and isinstance(value, ast.Constant)
                    ):
                        yield str(value.value), f"{path.relative_to(SOURCE)}:{node.lineno}"


def _first_argument(function: ast.FunctionDef) -> str:
    found = [argument for argument in function.args.args if argument.arg != "self"]
    return ast.unparse(found[0]) if found else ""


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        hooked = ast.unparse(node.func).endswith("hooks.record")
        return "_record" if hooked else node.func.attr
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    return "_record" if name == "self" else name  # the recorder itself


def _names(first: ast.expr) -> Iterator[str]:
    if isinstance(first, ast.Constant) and isinstance(first.value, str):
        yield first.value
    elif isinstance(first, ast.IfExp):
        yield from _names(first.body)
        yield from _names(first.orelse)
    elif ast.unparse(first) not in PASSED_ON:
        raise AssertionError(f"an event whose name is made at run time: {ast.unparse(first)}")


# What a function was given, and the events that a drill left (dicts with their names in them).
PASSED_ON = {"event", "event.pop('event')"}

WRITTEN = dict(put_on_record())


def test_the_search_finds_the_events_that_everybody_knows():
    """Also those that are told by way of a helper, or one of two."""
    known = {
        "commit",
        "interruption",
        "tracker_started",
        "straggler",
        "straggler_over",
        "drill",
        "delete",
        "pin",
    }
    assert known <= WRITTEN.keys()
    assert len(WRITTEN) >= 40


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_what_is_put_on_record_has_words(name: str):
    assert knows(name), (
        f"{WRITTEN[name]} writes {name!r}: give it words in view/story.py or view/wording.py"
    )


def test_words_are_of_events_that_somebody_writes():
    assert {*TELLERS, *QUIET} == WRITTEN.keys()
    assert WRITTEN.keys() >= ALARMING


def test_each_kind_is_told_in_some_test():
    told = {event["event"] for event, _ in LINES} | {event["event"] for event, _ in QUIET_LINES}
    assert told == WRITTEN.keys()


QUIET_LINES: list[tuple[dict[str, Any], str]] = [
    ({"event": "copies", "tiers": {}}, "the nodes hold no whole checkpoint"),
    (
        {"event": "copies", "tiers": {"step-00000010-g1": ["memory", "local"],
                                       "b": ["memory"], "c": ["local"], "d": []}},
        "the nodes hold step-00000010-g1 (memory and local), b (memory), c (local) and 1 more",
    ),
    (
        {"event": "tiers", "use": ["memory", "durable"], "remote": "s3://b/r", "replicas": 2},
        "copies are kept in memory, durable, 2 on other nodes, durable on s3://b/r",
    ),
    ({"event": "retention", "rules": {"keep_newest": 0}}, "kept is every checkpoint: nothing is deleted"),
    (
        {"event": "retention", "rules": {"keep_newest": 5, "keep_every_s": 3600.0, "keep_best": 2, "metric": "loss",
                                         "mode": "min", "keep_steps": [7, 9], "keep_every_steps": 100}},
        "kept are the newest 5, one per 1h 00m, one per 100 steps, the best 2 by loss (min), those of steps 7, 9",
    ),
    (
        {"event": "limits", "tries": 3, "on_loop": "stop", "budgets": {"hang": 20, "lost": 0}, "window_s": 3600.0},
        "the same failure may come 3 times in a row (then: stop); at most 20 of hang within 1h 00m of training",
    ),
    (
        {"event": "read_back", "copies": 4, "nodes": ["a", "b"], "faults": [], "num_faults": 0},
        "as somebody asked for, 4 copies on 2 nodes were read back: every byte is as written",
    ),
    (
        {"event": "read_back", "copies": 1, "nodes": ["a"], "num_faults": 30,
         "faults": [{"name": "step-00000010-g1", "tier": "memory", "path": "x", "fault": "not as written"}]},
        "as somebody asked for, 1 copy on 1 node were read back, and 30 faults were FOUND: step-00000010-g1 in memory: "
        "x: not as written",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("event", "line"), [*QUIET_LINES, *LINES])
def test_the_page_tells_each_event(event: dict[str, Any], line: str):
    assert describe({"time": 1.0, "generation": 1, **event}) == line


def test_what_nobody_knows_is_told_by_its_fields():
    event = {
        "time": 1.0,
        "monotonic": 2.0,
        "generation": 1,
        "event": "rank_moved",
        "rank": 3,
        "why": "a\nreason",
    }
    assert describe(event) == "rank moved: rank 3, why a reason"
    assert describe({"event": "rank_moved", "time": 1.0}) == "rank moved"
    # A field is missing, or of another kind: the words that there are do not fit.
    assert describe({"event": "commit", "name": "x"}) == "commit: name x"
    assert describe({"event": "copies", "tiers": 7}) == "copies: tiers 7"
    assert "bytes" in describe(
        {"event": "commit", **{f"f{n}": n for n in range(7)}, "bytes": 1, "more": 2}
    )


def test_no_event_of_a_run_is_missing_from_what_happened(tmp_path: Path):
    run = Run(tmp_path / "run")
    run.begin()
    run.train(10)
    run.save()
    with (run.dir / JOURNAL_NAME).open("a") as file:
        file.write(
            json.dumps(
                {"time": 2e9, "generation": 1, "event": "of_a_later_version", "colour": "blue"}
            )
            + "\n"
        )
    view = RunView(run.dir, clock=lambda: run.clock.now)
    view.update()
    story = view.detail()["story"]
    assert [each["event"] for each in reversed(story)] == [
        event["event"] for event in run.journal()
    ]
    assert all(each["line"] for each in story)
    assert story[0]["line"] == "of a later version: colour blue"
