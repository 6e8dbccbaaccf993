"""The board and the alerts speak of metrics that there are, with the labels that they have; and of all of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from board import BOARD, FOREIGN, GROUPING, PANELS, RULES, expressions, selectors

from ray_ckpt.view.metric_names import METRICS, RUN_TAG

README = Path(__file__).resolve().parents[2] / "README.md"
# Metrics that no panel shows, and why.
NOT_SHOWN = {
    "ckpt_started_seconds": "for the alert on a run that is gone: which tracker is the newest"
}


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_every_metric_that_is_asked_for_exists_with_its_labels(where: str, expression: str) -> None:
    allowed = {RUN_TAG, "WorkerId"}  # which Ray adds
    for base, suffix, matchers in selectors(expression):
        assert base in METRICS, f"{where}: no metric {base}"
        metric = METRICS[base]
        # Of a histogram there are buckets, a sum and a count, and of nothing else are there any.
        assert bool(suffix) == (metric.kind == "histogram"), f"{where}: {base}{suffix}"
        allowed |= {metric.label} if metric.label else set()
        allowed |= {"le"} if suffix == "_bucket" else set()
        for label, operator, value in matchers:
            if label == RUN_TAG:
                assert value == "$run"
                continue
            assert label == metric.label, f"{where}: {base} has no label {label}"
            values = value.split("|") if "~" in operator else [value]
            assert set(values) <= set(metric.values), f"{where}: {label} {value}"
    allowed |= {label for name in FOREIGN if name in expression for label in FOREIGN[name]}
    for group in GROUPING.findall(expression):
        names = {name.strip() for name in group.split(",")}
        assert names <= allowed, f"{where}: {names - allowed} are no labels of what is asked for"


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_panel_says_what_it_shows_in_which_unit_and_of_which_run(
    panel: dict[str, Any],
) -> None:
    assert len(panel["description"]) > 30
    assert panel["fieldConfig"]["defaults"]["unit"]
    for target in panel["targets"]:
        assert target["datasource"]["uid"] == "${datasource}"
        found = list(selectors(target["expr"]))
        assert target["expr"].count(f'{RUN_TAG}="$run"') == max(1, len(found)), (
            "one run, not all of them"
        )
        grouped = {n.strip() for g in GROUPING.findall(target["expr"]) for n in g.split(",")}
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            assert label in grouped, f"{label} is aggregated away"


def test_every_metric_is_on_the_board_or_left_out_for_a_reason() -> None:
    shown = {
        base for panel in PANELS for t in panel["targets"] for base, _, _ in selectors(t["expr"])
    }
    assert shown | set(NOT_SHOWN) == set(METRICS)
    assert not shown & set(NOT_SHOWN)
    assert set(NOT_SHOWN) <= {base for rule in RULES for base, _, _ in selectors(rule["expr"])}


def test_panels_have_numbers_and_places_of_their_own() -> None:
    places: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & places, panel["title"]
        places |= cells
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    assert [p["title"] for p in BOARD["panels"] if p["type"] == "row"] == [
        "Is it safe?", "Is it moving?", "Where does the time go?", "Interruptions", "Storage"
    ]  # fmt: skip
    assert {v["name"] for v in BOARD["templating"]["list"]} == {"datasource", "run", "window"}


def test_every_alert_says_what_is_wrong_and_what_to_do_and_is_in_the_readme() -> None:
    readme = README.read_text()
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert RUN_TAG in rule["annotations"]["summary"], rule["alert"]
        assert len(rule["annotations"]["description"]) > 150, rule["alert"]
        assert f"`{rule['alert']}`" in readme
    told = set(re.findall(r"`(RayCkpt\w+)`", readme))
    assert told == {rule["alert"] for rule in RULES}


def test_a_label_that_is_aggregated_by_would_be_missed() -> None:
    """The test above must see what is wrong."""
    found = list(selectors('sum by (tier) (ray_ckpt_commits_total{tier="durable", kind="x"})'))
    assert found == [("ckpt_commits_total", "", [("tier", "=", "durable"), ("kind", "=", "x")])]
    assert [base for base, _, _ in selectors("ray_ckpt_no_such_thing > 1")] == [
        "ray_ckpt_no_such_thing"
    ]
    assert next(selectors("rate(ray_ckpt_stall_seconds_bucket[1h])"))[1] == "_bucket"
