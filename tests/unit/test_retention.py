"""Which checkpoints stay: the rules, and what no rule can give up."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ray_ckpt.checkpoint.names import checkpoint_name
from ray_ckpt.config import Config, RetentionConfig
from ray_ckpt.errors import ConfigError
from ray_ckpt.facts import tracker_options
from ray_ckpt.options import parse
from ray_ckpt.tiers.retention import (
    AnyOf,
    KeepAll,
    KeepBest,
    KeepEverySeconds,
    KeepEverySteps,
    KeepNewest,
    KeepPolicy,
    KeepSteps,
    Record,
    plan,
    to_read_back,
)
from ray_ckpt.tiers.rules import Rules
from ray_ckpt.tiers.stock import Orphan, judge_orphans

numbers = st.one_of(st.floats(-3, 3), st.sampled_from([math.nan, math.inf, -math.inf, 1.0, 2.0]))


@st.composite
def histories(draw) -> tuple[Record, ...]:
    """Checkpoints of some attempts, newest first, under a clock that may jump."""
    now_s, records = 1e9, {}
    for generation in range(1, draw(st.integers(1, 3)) + 1):
        step = draw(st.integers(0, 30))
        for _ in range(draw(st.integers(0, 6))):
            step += draw(st.integers(1, 12))
            now_s += draw(st.sampled_from([1.0, 60.0, 700.0, 4000.0, -5000.0, 1e8]))
            bad = draw(st.sampled_from([None, None, None, "loss was NaN"]))
            records[step, generation] = Record(
                name=checkpoint_name(step, generation),
                step=step,
                generation=generation,
                committed_at=now_s,
                metrics=draw(st.dictionaries(st.sampled_from(["loss", "accuracy"]), numbers)),
                pinned=draw(st.sampled_from([(), (), (), ("a paper (ada)",)])),
                verified=draw(st.booleans()),
                quarantined=bad,
                in_use=draw(st.sampled_from(["", "", "", "an attempt restores it"])),
                fault=draw(st.sampled_from([None, None, None, None, "unreadable: EIO"])),
            )
    return tuple(records[key] for key in sorted(records, reverse=True))


policies = st.one_of(
    st.builds(KeepNewest, st.integers(0, 5)),
    st.builds(KeepEverySteps, st.integers(1, 20)),
    st.builds(KeepEverySeconds, st.sampled_from([30.0, 600.0, 3600.0])),
    st.builds(
        KeepBest,
        st.sampled_from(["loss", "accuracy"]),
        st.integers(0, 3),
        st.sampled_from(["min", "max"]),
    ),
    st.builds(KeepSteps, st.lists(st.integers(0, 60), max_size=3).map(tuple)),
)
several = st.lists(policies, max_size=3)
limits = st.integers(1, 3)


def kept(records, rules, limit=1) -> set[str]:
    return {v.name for v in plan(records, rules, quarantined=limit) if v.keep}


def key(record: Record) -> tuple[int, int]:
    return record.step, record.generation


@settings(max_examples=60, deadline=None)
@given(histories(), several, limits)
def test_no_rule_gives_up_what_a_run_could_not_do_without(records, rules, limit):
    verdicts = plan(records, rules, quarantined=limit)
    assert [verdict.name for verdict in verdicts] == [record.name for record in records]
    stays = {verdict.name for verdict in verdicts if verdict.keep}
    usable = [record for record in records if record.usable]
    trusted = next((record for record in usable if record.verified), None)
    if usable:
        assert usable[0].name in stays, "the newest"
    if trusted is not None:
        assert trusted.name in stays, "the newest that is verified"
    for record in records:
        if record.pinned or record.in_use or (record.fault and record.quarantined is None):
            assert record.name in stays
        if record.name not in stays:
            # Whatever goes leaves a newer one that was read back; what was found bad, any that was.
            assert trusted is not None
            assert not record.usable or key(record) < key(trusted)
    evidence = [record for record in records if record.quarantined is not None]
    assert {record.name for record in evidence[:limit]} <= stays
    assert all(verdict.reasons and all(verdict.reasons) for verdict in verdicts)


@settings(max_examples=40, deadline=None)
@given(histories(), several, several, limits)
def test_another_rule_never_deletes_more(records, rules, more, limit):
    assert kept(records, rules, limit) <= kept(records, rules + more, limit)


@settings(max_examples=60, deadline=None)
@given(histories(), several, limits)
def test_a_second_look_at_what_is_left_deletes_nothing_more(records, rules, limit):
    stays = kept(records, rules, limit)
    left = tuple(record for record in records if record.name in stays)
    assert kept(left, rules, limit) == stays


@settings(max_examples=40, deadline=None)
@given(histories(), several, limits)
def test_a_checkpoint_is_read_back_exactly_when_more_may_go_then(records, rules, limit):
    name = to_read_back(records, rules, quarantined=limit)
    newest = next((record for record in records if record.usable), None)
    if newest is None:
        assert not name
        return
    trusted = [replace(r, verified=True) if r is newest else r for r in records]
    gain = kept(records, rules, limit) - kept(trusted, rules, limit)
    assert name == (newest.name if gain else "")
    assert not to_read_back(trusted, rules, quarantined=limit), "once is enough"


@settings(max_examples=40, deadline=None)
@given(histories(), several)
def test_any_of_keeps_what_one_of_them_keeps(records, rules):
    usable = [record for record in records if record.usable]
    together = AnyOf(tuple(rules)).keep(usable)
    assert together.keys() == {name for rule in rules for name in rule.keep(usable)}
    assert kept(records, [AnyOf(tuple(rules))]) == kept(records, rules)


def line(*steps: int, every_s: float = 600.0, **more) -> tuple[Record, ...]:
    """Verified checkpoints, newest first."""
    records = [
        Record(
            name=checkpoint_name(step, 1),
            step=step,
            generation=1,
            committed_at=1e9 + i * every_s,
            verified=True,
            **more,
        )
        for i, step in enumerate(steps)
    ]
    return tuple(reversed(records))


def steps(rule: KeepPolicy, records: tuple[Record, ...]) -> list[int]:
    names = rule.keep(records)
    return sorted(record.step for record in records if record.name in names)


def test_the_newest_are_those_of_the_highest_steps():
    assert steps(KeepNewest(2), line(10, 20, 30)) == [20, 30]
    assert steps(KeepNewest(9), line(10, 20, 30)) == [10, 20, 30]
    assert steps(KeepNewest(0), line(10)) == []


def test_one_per_so_many_steps_is_the_first_at_or_after_each_multiple():
    records = line(40, 99, 100, 140, 199, 205, 430)
    assert steps(KeepEverySteps(100), records) == [40, 100, 205, 430]
    # The same step again, by a later attempt: that one counts.
    again = replace(records[4], generation=2, name=checkpoint_name(100, 2))
    names = KeepEverySteps(100).keep((*records[:4], again, *records[4:]))
    assert again.name in names
    assert records[4].name not in names


def test_one_per_so_many_seconds_survives_a_clock_that_jumps():
    assert steps(KeepEverySeconds(3600), line(*range(0, 130, 10))) == [0, 60, 120]
    records = line(10, 20, 30, 40, 50, every_s=3600)
    shifted = tuple(
        replace(r, committed_at=r.committed_at - 1e6) if r.step >= 30 else r for r in records
    )
    assert steps(KeepEverySeconds(3600), shifted) == [10, 20, 30, 40, 50]
    # A clock that was far ahead for one save does not stop the count.
    ahead = tuple(replace(r, committed_at=2e9) if r.step == 30 else r for r in records)
    assert steps(KeepEverySeconds(3600), ahead) == [10, 20, 30, 40, 50]


@pytest.mark.parametrize(("mode", "best"), [("min", [20, 40]), ("max", [30, 40])])
def test_the_best_are_told_by_finite_numbers_only(mode, best):
    values = {10: math.nan, 20: 1.0, 30: 3.0, 40: 2.0, 50: math.inf, 60: -math.inf}
    records = tuple(
        replace(r, metrics={"loss": values[r.step]} if r.step in values else {})
        for r in line(10, 20, 30, 40, 50, 60, 70)
    )
    assert steps(KeepBest("loss", 2, mode), records) == best
    assert steps(KeepBest("no such metric", 2, mode), records) == []


def test_of_equally_good_ones_the_newer_is_better():
    records = line(10, 20, 30, metrics={"loss": 1.0})
    assert steps(KeepBest("loss", 2), records) == [20, 30]


def test_certain_steps_are_kept():
    assert steps(KeepSteps((20, 77)), line(10, 20, 30)) == [20]


def test_quarantined_ones_are_evidence_and_never_count_as_usable():
    good = line(10, 20, 30)
    bad = tuple(replace(r, quarantined="NaN") for r in line(40, 50, 60, 70))
    records = (*bad, *good)
    assert kept(records, [KeepNewest(2)], 2) == {
        checkpoint_name(step, 1) for step in (70, 60, 30, 20)
    }
    # Not even with everything else against it does the last finding go.
    assert checkpoint_name(70, 1) in kept(records, [], 1)
    # Without one that is known to be good, a wrong finding could be all there is.
    unproven = tuple(replace(r, verified=False) for r in records)
    assert kept(unproven, [], 1) == {record.name for record in records}


def test_every_verdict_says_in_words_what_spoke_for_or_against_it():
    records = (*line(10, 20, 30)[:2], replace(line(10)[0], pinned=("a paper (ada)",)))
    words = {v.name: " ".join(v.reasons) for v in plan(records, [KeepNewest(1)])}
    assert "one of the newest 1" in words[checkpoint_name(30, 1)]
    assert "the newest that is verified" in words[checkpoint_name(30, 1)]
    assert words[checkpoint_name(20, 1)] == (
        "no rule keeps it (the newest 1), and step-00000030-g1 is verified"
    )
    assert "a paper (ada)" in words[checkpoint_name(10, 1)]


# ---- folders without a manifest -------------------------------------------------------------------

orphans = st.builds(
    Orphan,
    name=st.just("step-00000010-g2"),
    generation=st.integers(1, 4),
    written_at=st.one_of(st.floats(0, 2e9), st.just(math.inf)),
    leaving=st.booleans(),
    pinned=st.sampled_from([(), ("a paper (ada)",)]),
)


@settings(max_examples=40, deadline=None)
@given(orphans, st.integers(1, 4), st.sampled_from([0.0, 3600.0]), st.floats(1e9, 2e9))
def test_what_may_still_be_committed_or_was_just_written_stays(orphan, present, grace_s, now_s):
    (verdict,) = judge_orphans([orphan], present_generation=present, grace_s=grace_s, now_s=now_s)
    may_commit = orphan.generation >= present
    fresh = now_s - orphan.written_at <= grace_s
    if orphan.pinned:
        assert verdict.keep
    elif orphan.leaving:
        assert not verdict.keep
    else:
        assert verdict.keep == (may_commit or fresh)


# ---- the rules as options and on record -----------------------------------------------------------

rule_sets = st.builds(
    Rules,
    keep_newest=st.integers(0, 9),
    keep_every_steps=st.integers(0, 9),
    keep_every_s=st.floats(0, 1e6),
    keep_best=st.integers(0, 3),
    metric=st.sampled_from(["loss", "eval/accuracy"]),
    mode=st.sampled_from(["min", "max"]),
    keep_steps=st.lists(st.integers(0, 99), max_size=3).map(tuple),
    quarantined=st.integers(1, 9),
    grace_s=st.floats(0, 1e6),
)


@settings(max_examples=50, deadline=None)
@given(rule_sets)
@example(Rules())
def test_rules_come_back_from_the_record_as_they_were(rules):
    document = rules.to_json()
    assert Rules.from_json(document) == rules
    assert Rules.from_json({**document, "a rule of a later version": 3}) == rules


def test_a_rule_that_is_off_keeps_nothing_and_no_newest_keeps_everything():
    assert Rules(keep_every_steps=5, keep_best=2).policies() == (
        KeepAll("every one (--retention.keep-newest 0)"),
    )
    assert Rules(keep_newest=3).policies() == (KeepNewest(3),)
    every = Rules(
        keep_newest=3, keep_every_steps=4, keep_every_s=5, keep_best=6, keep_steps=(7,)
    ).policies()
    assert every == (
        KeepNewest(3),
        KeepEverySteps(4),
        KeepEverySeconds(5),
        KeepBest("loss", 6),
        KeepSteps((7,)),
    )
    assert kept(line(10, 20, 30), Rules().policies()) == {r.name for r in line(10, 20, 30)}


def test_the_options_of_a_run_reach_the_tracker():
    config = parse(
        Config,
        ["--retention.keep-newest", "2", "--retention.keep-steps", "7", "--retention.metric", "x"],
    )
    rules = tracker_options(config).retention
    assert (rules.keep_newest, rules.keep_steps, rules.metric) == (2, (7,), "x")
    assert tracker_options(Config()).retention == Rules(keep_newest=5, keep_every_s=3600.0)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"keep_newest": -1}, "--retention.keep-newest -1: must be 0 or more"),
        ({"keep_every_s": math.nan}, "--retention.keep-every-s"),
        ({"grace_s": -1.0}, "--retention.grace-s"),
        ({"quarantined": 0}, "--retention.quarantined 0: must be at least 1"),
        ({"mode": "best"}, "must be one of min, max"),
        ({"keep_best": 1, "metric": " "}, "--retention.metric"),
        ({"keep_steps": (-1,)}, "--retention.keep-steps"),
    ],
)
def test_a_wrong_rule_is_refused_by_its_name(values, words):
    with pytest.raises(ConfigError) as error:
        RetentionConfig(**values)
    assert words in str(error.value)
