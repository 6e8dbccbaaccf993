"""The decoder of the example jobs: what training, resuming and sharding rely on."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

_SOURCE = Path(__file__).parents[2] / "jobs" / "model.py"
_spec = importlib.util.spec_from_file_location("jobs_model_under_test", _SOURCE)
assert _spec is not None
assert _spec.loader is not None
model = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = model  # dataclasses with slots look their module up
_spec.loader.exec_module(model)


def build(seed: int = 0, **changes):
    options = {"vocab_size": 61, "dim": 32, "num_layers": 2, "max_seq_len": 64, **changes}
    net = model.Transformer(model.ModelConfig(**options))
    net.init_weights(seed)
    return net


def tokens(batch: int = 2, time: int = 16, vocab_size: int = 61, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (batch, time), generator=generator)


@pytest.mark.parametrize("vocab_size", [1, 61, 257])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_have_one_score_per_token_id(vocab_size, tied):
    net = build(vocab_size=vocab_size, tied_embeddings=tied)
    logits = net(tokens(3, 5, vocab_size))
    assert logits.shape == (3, 5, vocab_size)
    assert logits.dtype == torch.float32


def test_logits_are_float32_under_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert build()(tokens()).dtype == torch.float32


@pytest.mark.parametrize("position", [1, 7, 15])
def test_a_token_changes_no_earlier_logits(position):
    net, before = build(), tokens()
    after = before.clone()
    after[:, position] = (after[:, position] + 1) % 61
    old, new = net(before), net(after)
    assert torch.equal(old[:, :position], new[:, :position])
    assert not torch.equal(old[:, position], new[:, position])


def test_order_of_earlier_tokens_matters():
    # Two layers of causal attention without positions would almost not see a swap.
    net, before = build(), tokens(1, 8)
    after = before.clone()
    after[:, [0, 1]] = before[:, [1, 0]]
    assert not torch.allclose(net(before)[:, -1], net(after)[:, -1], atol=1e-6)


def test_rotary_scores_depend_on_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0))
    q, k = (model.rotate(t.expand(1, 1, 12, 8), 10_000.0) for t in (q, k))
    scores = (q @ k.transpose(-1, -2))[0, 0]
    for distance in range(4):
        same_distance = torch.diagonal(scores, offset=-distance)
        assert torch.allclose(same_distance, same_distance[:1].expand_as(same_distance), atol=1e-5)


def test_grouped_heads_equal_full_heads_with_repeated_weights():
    grouped, full = build(num_kv_heads=2), build(num_kv_heads=4)
    head_dim = grouped.config.head_dim
    state = grouped.state_dict()
    for name, value in state.items():
        if name.endswith(("wk.weight", "wv.weight")):
            heads = value.unflatten(0, (2, head_dim)).repeat_interleave(2, dim=0)
            state[name] = heads.flatten(0, 1)
    full.load_state_dict(state)
    assert torch.allclose(grouped(tokens()), full(tokens()), atol=1e-6)


def test_tied_matrix_is_one_parameter_with_both_gradients():
    tied, free = build(tied_embeddings=True), build()
    assert free.num_params() - tied.num_params() == 61 * 32
    assert sum(value.numel() for value in tied.state_dict().values()) == tied.num_params()
    tied(tokens(1, 2)).square().sum().backward()
    # As a table only the rows of seen tokens have a gradient; as a projection all have.
    assert (tied.embedding.weight.grad.abs().sum(dim=1) > 0).all()


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    first = build(seed=5)
    torch.manual_seed(2)
    second, other = build(seed=5), build(seed=6)
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


def test_init_leaves_the_global_random_stream_alone():
    net = build()
    before = torch.get_rng_state()
    net.init_weights(3)
    assert torch.equal(before, torch.get_rng_state())


def test_no_weight_is_left_unset_after_a_start_without_memory():
    net = model.Transformer(model.ModelConfig(vocab_size=61, dim=32, num_layers=2))
    for tensor in (*net.to_empty(device="cpu").parameters(), *net.buffers()):
        tensor.data.fill_(torch.nan)  # memory as it was found could be right by chance
    net.init_weights(0)
    assert torch.equal(net(tokens()), build()(tokens()))
    assert not list(net.buffers())  # nothing beside parameters that a checkpoint could miss


def test_dropout_acts_in_training_only():
    net = build(dropout=0.5)
    assert not torch.equal(net(tokens()), net(tokens()))
    net.eval()
    assert torch.equal(net(tokens()), net(tokens()))


def test_dropout_follows_the_random_stream():
    net = build(dropout=0.5)
    torch.manual_seed(4)
    first = net(tokens())
    torch.manual_seed(4)
    assert torch.equal(first, net(tokens()))


def test_loss_falls_on_one_batch():
    net, row = build(), tokens(2, 17)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = F.cross_entropy(net(row[:, :-1]).flatten(0, 1), row[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_every_parameter_gets_a_gradient():
    # DDP waits forever for a parameter that takes no part.
    net = build()
    net(tokens()).square().mean().backward()
    assert [name for name, p in net.named_parameters() if p.grad is None] == []


def test_a_row_longer_than_the_limit_is_refused():
    with pytest.raises(ValueError, match="max_seq_len is 64"):
        build()(tokens(1, 65))


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"dim": 30, "num_heads": 4}, "multiple of 8"),
        ({"dim": 12, "num_heads": 4, "num_kv_heads": 4}, "even"),
        ({"num_heads": 4, "num_kv_heads": 3}, "must divide"),
        ({"dropout": 1.0}, "probability"),
        ({"dropout": float("nan")}, "probability"),
        ({"hidden_dim": 0}, "hidden_dim is 0"),
        ({"norm_eps": 0.0}, "norm_eps"),
        ({"rope_theta": float("inf")}, "rope_theta"),
    ],
)
def test_a_shape_that_cannot_work_is_refused_with_the_rule(options, rule):
    with pytest.raises(ValueError, match=rule):
        model.ModelConfig(**options)
