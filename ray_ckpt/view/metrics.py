"""Metrics of a run, through ``ray.util.metrics``; Ray puts ``ray_`` before each name.

Counters are counted where an event is journalled. Gauges are set again on a tick, because Ray forgets a
gauge that is set once (ray#56405).
"""

from __future__ import annotations

import time
from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

_TAG = "ray_train_run_name"  # the name that Ray Train's own metrics carry

_SECONDS = [0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300]


class Metrics:
    """Counters, gauges and histograms of one run."""

    def __init__(self, run: str) -> None:
        self._tags = {_TAG: run}
        keys = (_TAG,)
        self._commits = Counter("ckpt_commits_total", "Checkpoints committed.", keys)
        self._bytes = Counter("ckpt_committed_bytes_total", "Bytes in committed checkpoints.", keys)
        self._failed = Counter("ckpt_save_failures_total", "Saves that failed.", keys)
        self._deleted = Counter("ckpt_deletes_total", "Checkpoints deleted by the rules.", keys)
        self._refused = Counter(
            "ckpt_quarantined_total",
            "Checkpoints set aside: refused by the guard, or damaged.",
            keys,
        )
        self._rollbacks = Counter(
            "ckpt_rollbacks_total", "Times the run went back because it was not finite.", keys
        )
        self._lost = Counter("ckpt_lost_steps_total", "Steps executed and lost.", keys)
        self._interruptions = Counter(
            "ckpt_interruptions_total", "Attempts that ended early, by kind.", (*keys, "kind")
        )
        self._drills = Counter(
            "ckpt_drills_total", "Checkpoints restored as a drill, by outcome.", (*keys, "outcome")
        )
        self._stall = Histogram("ckpt_stall_seconds", "Stall of a save.", _SECONDS, keys)
        self._upload = Histogram("ckpt_upload_seconds", "End of stall to commit.", _SECONDS, keys)
        self._gauges = {
            name: Gauge(f"ckpt_{name}", text, keys)
            for name, text in {
                "step": "Last executed step.",
                "world_size": "Training workers of the present attempt.",
                "last_commit_step": "Step of the newest commit.",
                "last_commit_age_seconds": "Age of the newest commit.",
                "interval_steps": "Steps between saves, as decided.",
                "mtbf_seconds": "Believed mean time between failures.",
                "generation": "Number of the present attempt.",
            }.items()
        }

    def count(self, event: dict[str, Any]) -> None:
        """Counts an event of the journal."""
        kind, tags = event["event"], self._tags
        if kind == "commit":
            self._commits.inc(1, tags)
            self._bytes.inc(event["bytes"], tags) if event["bytes"] else None
            self._stall.observe(event["stall_s"], tags)
            self._upload.observe(event["upload_s"], tags)
        elif kind == "save_failed":
            self._failed.inc(1, tags)
        elif kind == "delete":
            self._deleted.inc(1, tags)
        elif kind == "quarantine":
            self._refused.inc(1, tags)
        elif kind == "trouble" and event["action"] != "stop":
            self._rollbacks.inc(1, tags)
        elif kind == "interruption":
            self._interruptions.inc(1, {**tags, "kind": event["kind"]})
            self._lose(event["lost_steps"])
        elif kind == "drill":
            self._drills.inc(1, {**self._tags, "outcome": "ok" if event["ok"] else "failed"})
        elif kind == "restored":
            self._lose(event["lost_steps_more"])

    def _lose(self, steps: int) -> None:
        if steps > 0:
            self._lost.inc(steps, self._tags)

    def set(self, status: dict[str, Any]) -> None:
        """Sets every gauge whose value is known."""
        decision, committed = status["decision"] or {}, status["last_commit_time"]
        values = {
            "step": status["step"],
            "world_size": status["world_size"],
            "last_commit_step": status["last_commit_step"],
            "last_commit_age_seconds": None
            if committed is None
            else max(0.0, time.time() - committed),
            "interval_steps": decision.get("every_steps"),
            "mtbf_seconds": status["mtbf_s"],
            "generation": status["generation"],
        }
        for name, value in values.items():
            if value is not None:
                self._gauges[name].set(value, self._tags)
