"""Each event that matters has one line, which names what a reader must know."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt.elastic.causes import find_cause
from ray_ckpt.view.human import shorten
from ray_ckpt.view.story import tell

COMMIT = {
    "name": "step-00001200-g3",
    "bytes": 3 << 30,
    "files": 5,
    "stall_s": 0.071,
    "upload_s": 12.2,
}
LINES: list[tuple[dict[str, Any], str]] = [
    (
        {"event": "tracker_started", "host": "node-a", "pid": 7, "events_read": 0},
        "tracker started on node-a (pid 7): the run is new",
    ),
    (
        {"event": "tracker_started", "host": "node-a", "pid": 7, "events_read": 41},
        "tracker started on node-a (pid 7): knows the run from 41 lines of its journal",
    ),
    (
        {"event": "group_started", "world_size": 2, "asked_ago_s": 6.0, "waited_s": 0.4},
        "2 workers up 6.0s after they were asked for",
    ),
    (
        {"event": "group_started", "world_size": 1, "asked_ago_s": 6.0, "waited_s": 75.0},
        "1 worker up 6.0s after they were asked for, after 1m 15s without room",
    ),
    (
        {"event": "group_started", "world_size": 3, "asked_ago_s": 0.8, "waited_s": 0.0, "spares": 2},
        "3 workers up 0.80s after they were asked for, 2 of them in spare processes",
    ),
    ({"event": "attempt_started", "generation": 3, "world_size": 1}, "attempt 3 starts with 1 worker"),
    ({"event": "attempt_started", "generation": 4, "world_size": 2}, "attempt 4 starts with 2 workers"),
    (
        {"event": "restored", "generation": 3, "step": 0, "seconds": 0.0, "source": "",
         "reason": "there is no checkpoint yet"},
        "attempt 3 begins at step 0: there is no checkpoint yet",
    ),
    (
        {"event": "restored", "generation": 3, "step": 1200, "seconds": 4.2,
         "source": "step-00001200-g2", "reason": "newest committed checkpoint"},
        "attempt 3 resumes at step 1200 from step-00001200-g2 in 4.2s: newest committed checkpoint",
    ),
    (
        {"event": "restored", "generation": 3, "step": 800, "seconds": 4.2, "source": "step-00000800-g1",
         "reason": "newer step-00001200-g2 not used: a: checksum differs", "lost_steps_more": 400},
        "attempt 3 resumes at step 800 from step-00000800-g1 in 4.2s: newer step-00001200-g2 not used: a: "
        "checksum differs; 400 steps more to do again",
    ),
    ({"event": "decision", "every_steps": 1, "reason": "fixed: x"}, "save every 1 step: fixed: x"),
    ({"event": "decision", "every_steps": 54, "reason": "young: y"}, "save every 54 steps: young: y"),
    (
        {"event": "commit", **COMMIT},
        "committed step-00001200-g3: 3.0 GiB in 5 files, stall 0.07s, upload 12s",
    ),
    (
        {"event": "save_failed", "step": 7, "name": "x", "error": "no space left on device"},
        "SAVE FAILED at step 7, training goes on and tries again: no space left on device",
    ),
    (
        {"event": "quarantine", "name": "step-00000007-g1", "reason": "a: checksum differs", "faults": []},
        "QUARANTINED step-00000007-g1, it will not be restored: a: checksum differs",
    ),
    (
        {"event": "skipped", "name": "step-00000007-g1", "reason": "a: unreadable", "faults": []},
        "step-00000007-g1 cannot be read just now and is passed over: a: unreadable",
    ),
    (
        {"event": "interruption", "generation": 2, "step": 9, "kind": "node_loss", "cause": "node died",
         "lost_steps": 4},
        "attempt 2 ended at step 9 (node_loss: node died); 4 steps to do again",
    ),
    (
        {"event": "interruption", "generation": 2, "step": 9, "kind": "drain", "cause": "x", "lost_steps": 1},
        "attempt 2 ended at step 9 (drain: x); 1 step to do again",
    ),
    (
        {"event": "save_requested", "reason": "a drain is coming", "number": 1},
        "a save at the next step was asked for: a drain is coming",
    ),
    ({"event": "drain_notice", "name": "spot-7", "left_s": 119.6}, "node spot-7 will be taken away in 2m 00s"),
    ({"event": "drain_notice", "name": "spot-7", "left_s": None}, "node spot-7 will be taken away"),
    (
        {"event": "leave_requested", "cause": "node spot-7 will be taken away", "saves": True, "reason": "it is time"},
        "the workers save and leave (node spot-7 will be taken away): it is time",
    ),
    (
        {"event": "leave_requested", "cause": "rank 1 got SIGTERM", "saves": False, "reason": "rank 1 got SIGTERM"},
        "the workers LEAVE WITHOUT A SAVE (rank 1 got SIGTERM)",
    ),
    ({"event": "left", "step": 134, "request": 0}, "step 134 is safe: the workers leave"),
    (
        {"event": "resize_decision", "possible": 5, "workers": 4, "why": "grow", "reason": "faster"},
        "the cluster has room for 5 workers, the run goes to 4 workers: faster",
    ),
    (
        {"event": "resize_decision", "possible": 3, "workers": 2, "why": "cost", "reason": "too dear"},
        "the cluster has room for 3 workers, the run does not grow: too dear",
    ),
    (
        {"event": "segment", "number": 1, "step": 1200, "sample_offset": 28800, "reason": "larger batch",
         "cause": "declared for this resume", "source": "step-00001200-g2",
         "changed": {"--global-batch": {"old": 24, "new": 48}, "--micro-batch": {"old": 2, "new": 4}}},
        "segment 1 starts at step 1200, sample 28800 (larger batch): declared for this resume; "
        "--global-batch 24 -> 48; --micro-batch 2 -> 4",
    ),
    ({"event": "alert", "name": "step-1", "problem": "gone"}, "ALERT step-1: gone"),
    (
        {"event": "tier_decision", "every_steps": {"durable": 200}, "reasons": ["durable: every 200 steps", "b"]},
        "copies to slower tiers: durable: every 200 steps; b",
    ),
    (
        {"event": "replicated", "name": "step-00000007-g1", "tier": "memory", "copies": 3, "wanted": 3, "first": True,
         "bytes": 3 << 20, "seconds": 2.0},
        "step-00000007-g1 was read back in memory, and has 3 copies there: 3.0 MiB moved in 2.0s",
    ),
    (
        {"event": "replicated", "name": "step-00000007-g1", "tier": "memory", "copies": 1, "wanted": 3, "first": True,
         "bytes": 0, "seconds": 2.0},
        "step-00000007-g1 was read back in memory, and has 1 copy there (3 are wanted: too few nodes): 0 B "
        "moved in 2.0s",
    ),
    (
        {"event": "promote", "name": "step-00000007-g1", "tier": "durable", "bytes": 3 << 20, "seconds": 2.0,
         "tries": 2},
        "step-00000007-g1 is in durable too: 3.0 MiB copied and compared in 2.0s, in 2 tries",
    ),
    (
        {"event": "promote_failed", "name": "step-00000007-g1", "tier": "local", "tries": 5, "error": "no space"},
        "step-00000007-g1 DID NOT GET TO local in 5 tries, the next one that is due is tried: no space",
    ),
    (
        {"event": "bad_copy", "name": "step-00000007-g1", "tier": "memory", "node": "0123456789abcdef", "path": "x"},
        "BAD COPY of step-00000007-g1 in memory on node 0123456789ab: x is not as written",
    ),
    ({"event": "stop_requested", "reason": "ann asked"}, "a save and the end of the job were asked for: ann asked"),
    ({"event": "trouble", "reason": "the loss of step 9 is nan"}, "NOT FINITE: the loss of step 9 is nan"),
    (
        {"event": "hang", "reason": "no step for 305 s", "dumps": "hangs/x-g1"},
        "HANG: no step for 305 s; what each rank was doing is in hangs/x-g1",
    ),
    (
        {"event": "excluded", "nodes": ["a", "b"], "names": ["gpu-1", "gpu-2"], "times": [3, 4]},
        "EXCLUDED, as suspected too often: no workers on node gpu-1 (3 hangs), gpu-2 (4 hangs)",
    ),
    ({"event": "excluded", "nodes": [], "names": [], "times": []}, "no node is left out any more"),
    (
        {"event": "straggler", "rank": 3, "node": "0123456789abcdef", "factor": 1.834, "pace_s": 1.2, "others_s": 0.66,
         "saves": 3},
        "STRAGGLER: rank 3 on node 0123456789ab takes 1.83 times as long for a forward pass as the others "
        "(1.2s and 0.66s), at 3 saves in a row",
    ),
    (
        {"event": "straggler_over", "node": "0123456789abcdef", "factor": 1.02},
        "node 0123456789ab is no straggler any more (1.02 times the time of the others)",
    ),
    ({"event": "crash_loop", "action": "stop", "reason": "it came back"}, "CRASH LOOP (stop): it came back"),
    (
        {"event": "verified", "name": "step-00000007-g1", "seconds": 2.0},
        "read step-00000007-g1 back in 2.0s: every byte is as written",
    ),
    (
        {"event": "drill", "name": "step-00000007-g1", "ok": True, "seconds": 2.0, "host": "h", "expected": 2.5,
         "loss": 2.5, "same_bits": True, "difference": 0.0},
        "drilled step-00000007-g1: restored in 2.0s on h, loss 2.5000, the same bits as at its commit",
    ),
    (
        {"event": "drill", "name": "step-00000007-g1", "ok": False, "seconds": 2.0, "problems": ["a", "b"]},
        "DRILL FAILED: step-00000007-g1 was not restored to what it was: a",
    ),
    ({"event": "delete", "name": "s", "reason": "2 newer ones"}, "deleted s: 2 newer ones"),
    ({"event": "delete", "name": "s", "tier": "memory", "reason": "r"}, "deleted s from memory: r"),
    (
        {"event": "delete_failed", "name": "s", "error": "denied"},
        "s could not be deleted, which is tried again after the next save: denied",
    ),
    ({"event": "keep", "name": "s", "reason": "r"}, "s is kept once it is in the durable tier: r"),
    ({"event": "pin", "name": "s", "author": "ann", "reason": "in the paper"}, "s is pinned by ann: in the paper"),
    ({"event": "unpin", "name": "s", "author": "ann", "reason": "done"}, "s is no longer pinned by ann: done"),
    ({"event": "finished", "step": 300, "exposure_s": 1.0}, "finished at step 300"),
]  # fmt: skip


@pytest.mark.parametrize(("event", "line"), LINES)
def test_an_event_is_told_in_one_line(event, line):
    assert tell({"time": 1.0, "generation": 1, **event}) == line


@pytest.mark.parametrize("event", [{}, {"event": None}, {"event": "stall"}, {"event": 7}])
def test_other_events_are_not_worth_a_line(event):
    assert tell(event) is None


@pytest.mark.parametrize(
    "event",
    [
        {"event": "save_failed", "step": 1, "error": "first line\nsecond line"},
        {"event": "interruption", "generation": 1, "step": 1, "kind": "worker_error",
         "cause": "Traceback:\n  File x", "lost_steps": 0},
        {"event": "alert", "name": "x", "problem": "a\nb"},
    ],
)  # fmt: skip
def test_a_cause_of_several_lines_is_still_one_line(event):
    line = tell(event)
    assert line is not None
    assert "\n" not in line


def test_a_long_cause_is_whole_in_the_journal_and_cut_at_a_words_end_in_the_story():
    error = OSError(" ".join(f"/shared/runs/part-{n:05d}" for n in range(40)))
    cause = find_cause({1: error}, {}).text
    assert cause == f"rank 1: OSError: {error}"
    line = tell({"event": "interruption", "generation": 1, "step": 9, "kind": "worker_error",
                 "cause": cause, "lost_steps": 4})  # fmt: skip
    assert line is not None
    told, _, rest = line.removeprefix("attempt 1 ended at step 9 (worker_error: ").partition(" ...")
    assert rest == "); 4 steps to do again"
    assert cause.startswith(told + " ")
    assert len(told) > 150


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("ab,.:", min_size=1, max_size=30), max_size=20), st.integers(20, 80))
def test_a_text_is_cut_after_a_whole_word_and_only_when_it_is_too_long(words, most):
    text, short = " ".join(words), shorten("  \n".join(words), most)
    assert len(short) <= most
    if len(text) <= most:
        assert short == text
    elif short.endswith(" ..."):
        kept = short.removesuffix(" ...").split(" ")
        assert kept == words[: len(kept)]
        # The next word had no room.
        assert len(" ".join(words[: len(kept) + 1])) > most - len(" ...")
    else:
        assert len(words[0]) > most - len(" ...")
