"""Every metric of a run: its name, its kind, its label, and what it says. Plain values; no Ray.

Ray puts ``ray_`` before each name. All carry ``ray_train_run_name``, the tag of Ray Train's own metrics, so that a
board can join the two; and Ray adds ``WorkerId`` and more, so that whoever reads them aggregates: ``max by (...)``
for gauges, ``sum by (...)`` for histograms.

**Totals are those of the whole run**, told again from its journal at every tick, and so of the kind "gauge". Counters
of the process would lie in two ways. Ray's counters cannot be 0, and what appears with 1 has, to ``increase()``, never
grown: nobody would be alerted of the first failure. And they begin anew with every tracker, while a run lives for
weeks over several. A total that is told again neither counts the old journal twice, nor forgets it: ``increase()`` and
``max by`` work as ever. It falls only where the run itself takes something back (lost steps that turned up again).

**Histograms count what this tracker saw**, and begin anew with it. Ray's agent passes on how many values a bucket got,
and takes each for the middle of its bucket: quantiles are as good as the buckets, and ``_sum`` is no better.

**Gauges of the ledger** (``ckpt_time_seconds``, ``ckpt_goodput_ratio``) are as old as ``ckpt_ledger_age_seconds`` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ray_ckpt.policy.failures import PRIOR_SHARES
from ray_ckpt.tracker.buckets import BUCKETS, PHASES, RESTART
from ray_ckpt.tracker.memory import PLANNED

PREFIX = "ray_"
RUN_TAG = "ray_train_run_name"

# Values that a label is known to have: their totals are there from the beginning, with 0.
TIERS = ("memory", "local", "durable")
STAGES = ("save", "promote", "copy", "restore", "delete")
KINDS = (*sorted(PRIOR_SHARES), "nonfinite", *sorted(PLANNED))
SOURCES = ("durable", "nodes", "none")
RESULTS = ("ok", "failed")
WHYS = ("guard", "damaged")
ACTIONS = ("stop", "rollback", "rollback-and-skip", "go-on")
COPIES = ("durable", "any")
ENDS = ("finished", "stopped", "failed")

# From a memory copy to a restart that waited for a node: about three a decade.
SECONDS = tuple(
    digit * 10.0**power for power in range(-2, 4) for digit in (1.0, 2.0, 5.0)
)  # 0.01 s to 5000 s

Key = tuple[str, str]
"""A metric's name and the value of its label, empty where it has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        kind: "total" and "gauge" are gauges of Ray, told again and again; see above.
        text: what it says, in one sentence.
        label: its own label, besides that of the run; empty for none.
        values: that the label can have; others may come, where nobody thought of them.
    """

    kind: Literal["total", "gauge", "histogram", "counter"]
    text: str
    label: str = ""
    values: tuple[str, ...] = ()


def _total(text: str, label: str = "", values: tuple[str, ...] = ()) -> Metric:
    return Metric(kind="total", text=text, label=label, values=values)


def _gauge(text: str, label: str = "", values: tuple[str, ...] = ()) -> Metric:
    return Metric(kind="gauge", text=text, label=label, values=values)


def _histogram(text: str, label: str = "", values: tuple[str, ...] = ()) -> Metric:
    return Metric(kind="histogram", text=text, label=label, values=values)


METRICS: Mapping[str, Metric] = {
    # ---- the course of the run
    "ckpt_up": _gauge("1 while the run's tracker lives."),
    "ckpt_attempt_open": _gauge("1 while an attempt trains, 0 between two."),
    "ckpt_generation": _gauge("Number of the newest attempt."),
    "ckpt_world_size": _gauge("Training workers of the newest attempt."),
    "ckpt_step": _gauge("Last executed step."),
    "ckpt_step_age_seconds": _gauge("Time since a new step was last told, or the tracker began."),
    "ckpt_step_seconds": _gauge("Median time of the last steps."),
    "ckpt_sample_offset": _gauge("Samples that the run has trained on."),
    "ckpt_loss": _gauge("Loss of the last step."),
    # ---- copies
    "ckpt_last_commit_step": _gauge("Step of the newest commit, in whatever tier."),
    "ckpt_copy_step": _gauge("Step of the newest copy that is there.", "tier", COPIES),
    "ckpt_copy_age_seconds": _gauge(
        "Time since the state of the newest copy was saved: what a loss of everything else costs.",
        "tier",
        COPIES,
    ),
    "ckpt_interval_steps": _gauge("Steps between copies, as decided.", "tier", TIERS),
    "ckpt_interval_seconds": _gauge("The same at the present pace.", "tier", TIERS),
    "ckpt_mtbf_seconds": _gauge("Believed mean time between failures at the present size."),
    "ckpt_mtbf_low_seconds": _gauge("It is longer than this with 95 %."),
    "ckpt_mtbf_high_seconds": _gauge("And shorter than this with 95 %."),
    "ckpt_failed_saves_in_a_row": _gauge("Saves that failed since the last commit."),
    "ckpt_fruitless_attempts": _gauge("Attempts in a row without a new step or checkpoint."),
    "ckpt_last_drill_ok": _gauge("1 when the newest restore drill succeeded, 0 when it failed."),
    # ---- where the time went
    "ckpt_goodput_ratio": _gauge("Time of useful steps over all time since the first submit."),
    "ckpt_time_seconds": _gauge(
        "Wall time of the run, by where it went; the buckets sum to it.", "bucket", tuple(BUCKETS)
    ),
    "ckpt_ledger_age_seconds": _gauge("How old the two above are."),
    # ---- totals of the run
    "ckpt_commits_total": _total("Checkpoints that got to a tier.", "tier", TIERS),
    "ckpt_bytes_total": _total(
        "Bytes of checkpoints that went into a tier, replicas too.", "tier", TIERS
    ),
    "ckpt_failures_total": _total(
        "What failed and was tried again or passed over: saves, promotions, copies found bad, checkpoints that a "
        "restore could not read, deletions.",
        "stage",
        STAGES,
    ),
    "ckpt_interruptions_total": _total("Attempts that ended early.", "kind", KINDS),
    "ckpt_lost_steps_total": _total("Steps executed and lost."),
    "ckpt_restores_total": _total("Attempts that began to train.", "source", SOURCES),
    "ckpt_guard_findings_total": _total("Findings of the guard in states that it refused."),
    "ckpt_quarantined_total": _total("Checkpoints set aside.", "why", WHYS),
    "ckpt_nonfinite_total": _total(
        "Times that the run was not finite, by what followed.", "action", ACTIONS
    ),
    "ckpt_drills_total": _total("Checkpoints restored as a drill.", "result", RESULTS),
    "ckpt_deletes_total": _total("Checkpoints deleted by the rules.", "tier", TIERS),
    "ckpt_alerts_total": _total("Alerts in the journal."),
    # ---- how long things took
    "ckpt_stall_seconds": _histogram("Time that training stood still for a save."),
    "ckpt_upload_seconds": _histogram(
        "End of the stall to the commit in the first tier; copy to a slower one.", "tier", TIERS
    ),
    "ckpt_restore_seconds": _histogram("Time to verify and load a checkpoint."),
    "ckpt_restart_seconds": _histogram(
        "Time of each phase of the way into an attempt, once its first step was done.",
        "phase",
        tuple(name.removeprefix(RESTART) for name in PHASES),
    ),
    # ---- of this tracker
    "ckpt_started_seconds": _gauge("When this tracker began, seconds since the epoch."),
    "ckpt_ended_total": Metric(
        kind="counter",
        text="1 once the job of this tracker has said how it ends; it stays when the tracker is gone.",
        label="how",
        values=ENDS,
    ),
}
