"""A Llama-style decoder, small enough to read in one sitting.

RMSNorm before every branch, rotary positions, SwiGLU, grouped-query attention. Nothing here knows
about the world size: the same seed gives the same weights on every rank, and the model works under
DDP, under FSDP2 (`fully_shard` on every block of `model.layers`, then on the model) and under
autocast. Its limits: no key-value cache, no packing mask (documents in one row see each other).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape of the decoder; the defaults train on two CPU cores."""

    vocab_size: int = 257
    """Number of token ids; any positive number, odd ones too. Bytes and an end mark are 257."""
    dim: int = 128
    """Width of the residual stream, in features."""
    num_layers: int = 4
    """Number of blocks."""
    num_heads: int = 4
    """Query heads per block; must divide `dim` into an even head width."""
    num_kv_heads: int = 2
    """Key and value heads per block; must divide `num_heads`."""
    ffn_multiple: float = 8 / 3
    """Width of the feed-forward branch in multiples of `dim`, rounded up to 32."""
    hidden_dim: int | None = None
    """Width of the feed-forward branch in features; overrides `ffn_multiple`."""
    max_seq_len: int = 2048
    """Longest row that `forward` accepts, in tokens."""
    rope_theta: float = 10_000.0
    """Base of the rotary wavelengths; larger for longer rows."""
    tied_embeddings: bool = False
    """Whether input embedding and output projection share one matrix."""
    dropout: float = 0.0
    """Probability of zeroing a feature of a residual branch in training."""
    norm_eps: float = 1e-5
    """Added to the mean square in every RMSNorm, against division by zero."""

    def __post_init__(self) -> None:
        counts = ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "max_seq_len")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1")
        if self.dim % self.num_heads or (self.dim // self.num_heads) % 2:
            raise ValueError(
                f"dim={self.dim} over num_heads={self.num_heads} must give an even whole head "
                f"width (rotary turns pairs); make dim a multiple of {2 * self.num_heads}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads} (each "
                "key head serves equally many query heads); choose a divisor"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}; give a probability in [0, 1)")
        if self.hidden_dim is not None and self.hidden_dim < 1:
            raise ValueError(f"hidden_dim is {self.hidden_dim}; give at least 1 or leave it unset")
        for name in ("ffn_multiple", "rope_theta", "norm_eps"):
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise ValueError(f"{name} is {getattr(self, name)}; give a finite number above 0")

    @property
    def head_dim(self) -> int:
        """Features per head."""
        return self.dim // self.num_heads

    @property
    def ffn_dim(self) -> int:
        """Features inside the feed-forward branch."""
        return self.hidden_dim or 32 * math.ceil(self.ffn_multiple * self.dim / 32)


def rotate(heads: Tensor, theta: float) -> Tensor:
    """Rotary positions (Su et al. 2021): turns feature pairs by an angle that grows with position.

    The angles are computed here, in float32, and are no buffer: `to_empty`, `model.to(bfloat16)`
    and FSDP's cast of block inputs would each spoil a table, and the table costs next to nothing.

    Args:
        heads: [batch, heads, time, head_dim].
        theta: base of the wavelengths.

    Returns:
        Same shape and dtype.
    """
    time, half = heads.shape[-2], heads.shape[-1] // 2
    pair = torch.arange(half, device=heads.device, dtype=torch.float32)
    position = torch.arange(time, device=heads.device, dtype=torch.float32)
    angle = position[:, None] * theta ** (-pair / half)
    cos, sin = angle.cos(), angle.sin()
    a, b = heads.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(heads.dtype)


class Attention(nn.Module):
    """Causal attention in which several query heads share one key-value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim, self.theta = config.head_dim, config.rope_theta
        self.group = config.num_heads // config.num_kv_heads
        kv_dim = config.num_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, dim] to the same."""
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        q, k = rotate(q, self.theta), rotate(k, self.theta)
        # Repeated by hand: `enable_gqa` has no memory-saving kernel for float32 on a GPU.
        k, v = (t.repeat_interleave(self.group, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.wo(y.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, dim] to the same."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """Attention and feed-forward, each added to the residual stream; FSDP's unit of sharding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, dim] to the same."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        out: Tensor = x + self.dropout(self.ffn(self.ffn_norm(x)))
        return out


class Transformer(nn.Module):
    """Token ids to next-token logits. Call `init_weights` before sharding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        # Tied: no second module, so that checkpoints and optimizers see the matrix once.
        self.output = None
        if not config.tied_embeddings:
            self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Sets every parameter from `seed` alone: same weights on every rank and device.

        Normal with deviation 0.02; the projections that end a residual branch are smaller by
        sqrt(2 * num_layers) (Radford et al. 2019), which keeps the stream's variance at depth.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            ends_branch = name.endswith(("attention.wo.weight", "ffn.down.weight"))
            std = 0.02 / math.sqrt(2 * self.config.num_layers) if ends_branch else 0.02
            # Drawn on the CPU: other devices have other random streams.
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token.

        Args:
            tokens: int64 [batch, time], time at most `max_seq_len`.

        Returns:
            float32 [batch, time, vocab_size], also under autocast.
        """
        if tokens.shape[1] > self.config.max_seq_len:
            raise ValueError(
                f"row of {tokens.shape[1]} tokens, max_seq_len is {self.config.max_seq_len}; "
                "cut the rows or raise max_seq_len"
            )
        x = self.embedding(tokens)
        for block in self.layers:
            x = block(x)
        x = self.norm(x)
        logits = F.linear(x, self.embedding.weight) if self.output is None else self.output(x)
        return logits.float()

    def num_params(self) -> int:
        """Number of parameters; tied ones count once."""
        return sum(parameter.numel() for parameter in self.parameters())
