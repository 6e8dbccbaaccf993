"""What a rank brings to the end of a step arrives as what it is, and the sums of ranks are exact."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt.elastic import control
from ray_ckpt.elastic.control import LOSS_BITS, Agreement, Vote, agree

NUMBERS = st.integers(0, 2**64 - 1)
QUIET = Vote(
    loss=3 << LOSS_BITS,
    digest=1,
    rng_digest=2,
    bad_losses=0,
    tokens=7,
    busy=False,
    wants_save=False,
    wants_report=False,
)


def counted(*votes: Vote, monkeypatch: pytest.MonkeyPatch) -> Agreement:
    """What the last of the ranks learns; what the others sent is there when it comes. Both ways to add up agree."""

    def learnt(pairwise: int) -> Agreement:
        sent: list[torch.Tensor] = []

        def reduce(tensor: torch.Tensor, group: object = None) -> None:
            tensor += sum(sent)
            sent[:] = [tensor.clone()]

        def exchange(output: torch.Tensor, given: torch.Tensor, group: object = None) -> None:
            sent.append(given.view(len(votes), -1)[0].clone())
            missing = [torch.zeros_like(sent[0])] * (len(votes) - len(sent))
            output.copy_(torch.cat([*sent, *missing]))

        with monkeypatch.context() as patch:
            patch.setattr(dist, "get_world_size", lambda group=None: len(votes))
            patch.setattr(dist, "all_reduce", reduce)
            patch.setattr(dist, "all_to_all_single", exchange)
            patch.setattr(control, "PAIRWISE", pairwise)
            return [agree(vote, torch.device("cpu"), 2) for vote in votes][-1]

    found = learnt(pairwise=len(votes))
    assert found == learnt(pairwise=0)
    return found


@pytest.mark.parametrize(
    ("wish", "told"),
    [
        ("wants_save", {"save"}),
        ("busy", set()),
        ("wants_report", {"report"}),
        ("trouble", {"trouble"}),
        ("wants_direct", {"direct"}),
        ("wants_leave", {"leave", "save"}),
        ("unsaved", {"unsaved"}),
        ("wants_hold", {"hold"}),
    ],
)
def test_each_wish_of_one_rank_is_known_to_all_as_itself(
    wish: str, told: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = counted(QUIET._replace(**{wish: True}), QUIET, monkeypatch=monkeypatch)
    assert {name for name, value in found._asdict().items() if value is True} == told
    assert (found.loss, found.tokens, found.digest) == (3.0, 14, f"{2:016x}")


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(-(2**60), 2**60), NUMBERS, NUMBERS), min_size=1, max_size=5))
def test_wide_numbers_add_up_to_the_last_bit(ranks: list[tuple[int, int, int]]) -> None:
    votes = [
        QUIET._replace(loss=loss, digest=digest, rng_digest=rng) for loss, digest, rng in ranks
    ]
    with pytest.MonkeyPatch.context() as patch:
        found = counted(*votes, monkeypatch=patch)
    loss, digest, rng = (sum(each) for each in zip(*ranks, strict=True))
    assert found.loss == loss / (2 << LOSS_BITS)
    assert found.digest == f"{digest % 2**64:016x}"
    assert found.rng_digest == f"{rng % 2**64:016x}"
