"""Each kind of failure is counted once, for the fastest tier that outlives it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt.errors import ConfigError
from ray_ckpt.policy.failures import PRIOR_SHARES
from ray_ckpt.tiers.stack import Stack, tier_rates

STACKS = [
    Stack(),
    Stack(use=("memory", "durable"), replicas=0),
    Stack(use=("memory", "durable"), replicas=2),
    Stack(use=("memory", "local", "durable"), local_folder="/nvme"),
    Stack(use=("local", "durable"), local_folder="/nvme"),
]


@settings(max_examples=30)
@given(
    st.sampled_from(STACKS),
    st.dictionaries(st.sampled_from([*PRIOR_SHARES, "meteor"]), st.floats(0, 1e-3)),
)
def test_no_failure_is_forgotten_or_counted_twice(stack: Stack, rates: dict[str, float]) -> None:
    needs = tier_rates(rates, stack)
    assert set(needs) == set(stack.use)
    assert sum(needs.values()) == pytest.approx(sum(rates.values()))


def test_a_lost_node_needs_a_replica_or_the_durable_tier() -> None:
    rates = {"node_loss": 1.0}
    assert tier_rates(rates, STACKS[1])["durable"] == 1.0
    assert tier_rates(rates, STACKS[2])["memory"] == 1.0
    assert tier_rates(rates, STACKS[4])["durable"] == 1.0  # its disk is lost with it


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use": ("memory",)}, "the last must be durable"),
        ({"use": ("durable", "memory")}, "the fastest first"),
        ({"use": ("memory", "memory", "durable")}, "each tier once"),
        ({"use": ("tape", "durable")}, "'tape'"),
        ({"use": ("local", "durable")}, "--tiers.local-folder"),
        ({"use": ("memory", "durable"), "local_folder": "/x"}, "no local tier"),
        ({"remote": "s3://bucket/x"}, "a tier on the nodes"),
        ({"use": ("local", "durable"), "local_folder": "rel/x"}, "--tiers.local-folder rel/x"),
        ({"use": ("memory", "durable"), "memory_folder": "rel/x"}, "--tiers.memory-folder rel/x"),
        ({"use": ("memory", "durable"), "remote": "/mnt/x"}, "--storage"),
    ],
)
def test_a_stack_that_cannot_work_is_refused_with_the_way_out(
    options: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Stack(**options)  # type: ignore[arg-type]


def test_a_folder_may_name_variables_of_the_node_and_must_be_absolute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stack = Stack(use=("local", "durable"), local_folder="$SCRATCH/copies")
    with pytest.raises(ConfigError, match="does not have"):
        stack.base("local")
    monkeypatch.setenv("SCRATCH", "here")
    with pytest.raises(ConfigError, match="absolute"):
        stack.base("local")
    monkeypatch.setenv("SCRATCH", "/nvme0")
    assert str(stack.base("local")) == "/nvme0/copies"
