"""The board of Grafana and the rules of Prometheus, taken apart for tests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from ray_ckpt.view.metric_names import METRICS, PREFIX, RUN_TAG

GRAFANA = Path(__file__).resolve().parents[1] / "cluster" / "grafana"
BOARD = json.loads((GRAFANA / "ray_ckpt.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
RULES = yaml.safe_load((GRAFANA / "alerts.yaml").read_text())["groups"][0]["rules"]

# Of Ray Train itself, with the same tag of the run.
FOREIGN = {"ray_train_controller_state": {RUN_TAG, "ray_train_controller_state"}}
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
GROUPING = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")


def expressions() -> Iterator[tuple[str, str]]:
    """Where, and what."""
    for panel in PANELS:
        for target in panel["targets"]:
            yield f"panel {panel['title']!r}", target["expr"]
    for annotation in BOARD["annotations"]["list"]:
        yield f"annotation {annotation['name']!r}", annotation["expr"]
    for rule in RULES:
        yield f"alert {rule['alert']}", rule["expr"]


def selectors(expression: str) -> Iterator[tuple[str, str, list[tuple[str, str, str]]]]:
    """Metric of ours, what is appended to its name, and the matchers."""
    plain = GROUPING.sub("", expression)
    for name, matchers in re.findall(r"\b(ray_\w+)(?:\{([^}]*)\})?", plain):
        if name in FOREIGN or name == RUN_TAG:
            continue
        base = next(
            (b for b in METRICS if re.fullmatch(f"{PREFIX}{b}(_bucket|_sum|_count)?", name)), name
        )
        yield base, name.removeprefix(PREFIX + base), MATCHER.findall(matchers or "")
