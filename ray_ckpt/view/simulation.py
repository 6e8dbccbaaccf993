"""The page of `ray-ckpt simulate --html`: curves of waste, and the same as tables."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from ray_ckpt.policy.replay import Totals
from ray_ckpt.policy.scenes import LEARNS, Contest, Scene, band
from ray_ckpt.policy.words import DAY_S, percent, seconds
from ray_ckpt.view.page import still_page
from ray_ckpt.view.plot import NARROW, Axis, Line, Mark, plot

SIGNS = "\u25cf\u25b2\u25c6\u25a0\u2605"
Played = Sequence[tuple[Scene, dict[str, Totals]]]

_LOOKS = 72
# A curve needs fewer runs than a table: what it shows is a shape.
_CURVE_RUNS, _CURVE_POINTS = 100, 25
# What wastes more hardly gets anywhere.
_MOST_WASTE = 20.0


def times_of(contest: Contest) -> list[float]:
    """When the progress is looked at, seconds from the beginning."""
    return [contest.wall_s * (n + 1) / _LOOKS for n in range(_LOOKS)]


def simulation_page(
    contest: Contest, played: Played, rows: list[dict[str, Any]], about: dict[str, Any]
) -> str:
    """One file with everything in it, which loads nothing."""
    scene, totals = played[0]
    own = [row for row in rows if (row["tiers"], row["job"]) == (scene.tiers, scene.job)]
    facts = [
        ("runs", f"{about['runs']} of {about['days']:g} days"),
        ("workers", f"{about['workers']:,}"),
        ("failures", f"every {seconds(about['mtbf_s'])}, {about['failures']}"),
        ("failures a run", f"{about['failures_per_run']:.0f}"),
        ("stall", seconds(scene.setting.tiers[0].stall_s)),
        ("restart", seconds(about["restart_s"])),
        ("seed", f"{contest.seed}"),
    ]
    pairs = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts)
    sections = [
        f'<section class="card"><dl class="facts">{pairs}</dl></section>',
        _interval_section(contest, played, own),
        '<div class="two">',
        _waste_section(contest, scene, totals),
        _goodput_section(contest, played),
        "</div>",
        *(_table(each, rows) for each, _ in played),
    ]
    return still_page("Policies of saving, simulated", "".join(sections), "page.css", "plot.css")


def _interval_section(contest: Contest, played: Played, own: list[dict[str, Any]]) -> str:
    chosen = [row["interval_s"] for row in own]
    low_s, high_s = min(chosen) / 4, max(chosen) * 3
    step_s = played[0][0].setting.step_s
    wanted = np.geomspace(max(low_s, step_s), high_s, _CURVE_POINTS)
    intervals_s = sorted({step_s * max(1, round(each / step_s)) for each in wanted})
    lines = [
        Line(
            name=_short(scene, played),
            points=list(
                zip(intervals_s, contest.curve(scene, intervals_s, _CURVE_RUNS), strict=True)
            ),
        )
        for scene, _ in played
    ]
    most = 1.3 * max(row["waste"]["total"] for row in own)
    most = max(most, *(1.2 * min(y for _, y in line.points) for line in lines))
    most = min(max(most, 1e-4), _MOST_WASTE)
    inside = [
        Line(name=line.name, points=[p for p in line.points if p[1] <= most] or line.points[:1])
        for line in lines
    ]
    x = _time_axis("time between saves to the fastest tier", intervals_s[0], intervals_s[-1])
    y = Axis(title="waste", low=0.0, high=most, words=percent)
    marks = [
        Mark(sign=SIGNS[n % len(SIGNS)], at=(row["interval_s"], row["waste"]["total"]))
        for n, row in enumerate(own)
    ]
    legend = "".join(
        f"<li><b>{SIGNS[n % len(SIGNS)]}</b>{escape(row['policy'])}: {seconds(row['interval_s'])}, "
        f"waste {percent(row['waste']['total'])}</li>"
        for n, row in enumerate(own)
    )
    label = f"Waste against the interval; {own[1]['policy']}: {seconds(own[1]['interval_s'])}"
    return _section(
        "Waste against the interval",
        plot(label, x, y, inside, marks),
        f'<ul class="legend signs">{legend}</ul>',
        f"Curves: a fixed interval for the fastest tier, and the best ones of the others, {_CURVE_RUNS} runs at most. "
        "Signs: what each policy wasted in the first setting, at the interval that it had in the end.",
    )


def _waste_section(contest: Contest, scene: Scene, found: dict[str, Totals]) -> str:
    at_s = np.array(times_of(contest))
    lines = []
    for name, totals in found.items():
        useful_s = np.maximum(totals.progress_s, 1e-9)
        low, high = band(at_s[:, None] / useful_s - 1)
        mean = at_s / np.maximum(totals.progress_s.mean(axis=1), 1e-9) - 1
        seen = slice(3, None)  # the first hours are all noise
        days = (at_s / DAY_S)[seen]
        edges = [list(zip(days, edge[seen], strict=True)) for edge in (mean, low, high)]
        lines.append(Line(name=name, points=edges[0], low=edges[1], high=edges[2]))
    x = Axis(title="days", low=0.0, high=float(at_s[-1] / DAY_S), words=lambda v: f"{v:g}")
    values = [value for line in lines for _, value in (*line.low, *line.high, *line.points)]
    least = min(max(1e-4, min(values)), _MOST_WASTE / 2)
    most = min(max(least, max(values)), _MOST_WASTE)
    y = Axis(title="waste so far", low=0.9 * least, high=1.1 * most, words=percent, log=True)
    return _section(
        f"Waste so far: {scene.name}",
        plot("Waste so far of each policy over the days of a run", x, y, lines, width=NARROW),
        "",
        "Lines: all runs together. Bands: where 8 of 10 runs are. All policies meet the same failures.",
    )


def _goodput_section(contest: Contest, played: Played) -> str:
    at_s = np.array(times_of(contest))
    habit = list(played[0][1])[3]
    lines = [
        Line(name=_short(scene, played), points=_goodput(at_s, found[LEARNS]))
        for scene, found in played
    ]
    lines.append(Line(name=f"{habit}, first setting", points=_goodput(at_s, played[0][1][habit])))
    lowest = min(y for line in lines for _, y in line.points)
    x = Axis(title="days", low=0.0, high=float(at_s[-1] / DAY_S), words=lambda v: f"{v:g}")
    y = Axis(title="goodput so far", low=max(0.0, lowest - 0.02), high=1.0, words=percent)
    return _section(
        "Goodput so far of the policy that learns",
        plot("Goodput so far in each setting over the days of a run", x, y, lines, width=NARROW),
        "",
        "Useful work in seconds of the whole job, over wall time, all runs together.",
    )


def _goodput(at_s: np.ndarray[Any, Any], totals: Totals) -> list[tuple[float, float]]:
    mean = totals.progress_s.mean(axis=1) / at_s
    return [(float(t / DAY_S), float(v)) for t, v in zip(at_s[3:], mean[3:], strict=True)]


def _short(scene: Scene, played: Played) -> str:
    """What tells a setting from the others."""
    tiers = {each.tiers for each, _ in played}
    jobs = {each.job for each, _ in played}
    parts = [scene.tiers] * (len(tiers) > 1) + [scene.job] * (len(jobs) > 1)
    return ", ".join(parts) or "fixed interval"


def _time_axis(title: str, low_s: float, high_s: float) -> Axis:
    unit_s, unit = (60.0, "min") if high_s < 6 * 3600 else (3600.0, "h")
    if high_s < 300:
        unit_s, unit = 1.0, "s"
    return Axis(
        title=f"{title}, {unit}",
        low=low_s,
        high=high_s,
        words=lambda value: f"{value / unit_s:.3g}",
        log=True,
        unit=unit_s,
    )


def _section(title: str, *parts: str) -> str:
    *before, note = parts
    chart, legend = before
    return (
        f'<section class="card"><h3>{escape(title)}</h3><div class="chart" tabindex="0">{chart}</div>{legend}'
        f'<p class="soft">{escape(note)}</p></section>'
    )


def _table(scene: Scene, rows: list[dict[str, Any]]) -> str:
    own = [row for row in rows if (row["tiers"], row["job"]) == (scene.tiers, scene.job)]
    parts = ("save", "rework", "restart", "wait", "fewer", "total")
    titles = ("interval", *parts[:-1], "waste", "goodput", "over the best")
    head = "".join(f'<th class="num">{title}</th>' for title in titles)
    body = "".join(
        f"<tr><td>{escape(row['policy'])}</td>"
        + "".join(
            f'<td class="num">{escape(text)}</td>'
            for text in (
                " / ".join(seconds(each) for each in row["intervals_s"]),
                *(percent(row["waste"][part]) for part in parts),
                f"{100 * row['goodput']:.2f} %",
                percent(row["regret"]),
            )
        )
        + "</tr>"
        for row in own
    )
    return (
        f'<section class="card"><h3>{escape(scene.name)}</h3><div class="scroll" tabindex="0"><table><thead><tr>'
        f"<th>policy</th>{head}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )
