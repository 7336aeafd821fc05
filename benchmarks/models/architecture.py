"""What sets one family of decoders apart, and its layers in plain torch: what the benchmark of whole models builds.

Parts are named as `transformers` names those of Llama, so that plans and weights fit both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional as F

from ditron_inductor.tools.demo_model import rotate

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
NORMS = ("rms", "gemma", "layer")


@dataclass(frozen=True)
class Architecture:
    """Sizes and forms of a decoder's layers; depth: of the whole model, of which the benchmark builds some.

    gated: down(activation(gate(x)) * up(x)), else down(activation(up(x))). norm: `rms`, `gemma` (which scales by
    1 + weight), or `layer`. bias: of every linear layer. qk_norm: a norm of each head's query and key. sandwich: norms
    behind attention and feed-forward too. theta: of rotary positions, 0 without. scale: of the scores, by default
    1 / sqrt(head_dim). note: how it differs from the model that it is named after.
    Raises ValueError for sizes that do not fit each other.
    """

    hidden: int
    heads: int
    kv_heads: int
    inner: int
    depth: int
    head_dim: int = 128
    activation: str = "silu"
    gated: bool = True
    norm: str = "rms"
    bias: bool = False
    qk_norm: bool = False
    sandwich: bool = False
    theta: float = 500000.0
    scale: float | None = None
    eps: float = 1e-5
    note: str = ""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads are no multiple of {self.kv_heads} heads of keys and values")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation '{self.activation}' is none of {', '.join(ACTIVATIONS)}")
        if self.norm not in NORMS:
            raise ValueError(f"norm '{self.norm}' is none of {', '.join(NORMS)}")

    def like(self, sizes: Architecture) -> Architecture:
        """The same forms in other sizes."""
        kv_heads = sizes.heads if self.heads == self.kv_heads else sizes.kv_heads
        small = replace(self, hidden=sizes.hidden, heads=sizes.heads, kv_heads=kv_heads, inner=sizes.inner)
        return replace(small, depth=sizes.depth, head_dim=sizes.head_dim)

    def layer_weights(self) -> tuple[int, int]:
        """Elements of the weights of (attention, feed-forward) of a layer."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return attention, self.hidden * self.inner * (3 if self.gated else 2)

    def make_norm(self, width: int) -> nn.Module:
        if self.norm == "layer":
            return nn.LayerNorm(width, eps=self.eps)
        return GemmaNorm(width, self.eps) if self.norm == "gemma" else nn.RMSNorm(width, eps=self.eps)

    def linear(self, inner: int, outer: int) -> nn.Linear:
        return nn.Linear(inner, outer, bias=self.bias)


Core = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention itself: q [B, Hq, S, D], k and v [B, Hkv, S, D] of this rank -> [B, Hq, S, D]."""


class GemmaNorm(nn.Module):
    """x / rms(x) * (1 + weight), all of it in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (scaled * (1.0 + self.weight.float())).type_as(x)


class CausalAttention(nn.Module):
    """The tokens of this rank are all there are."""

    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)


class Attention(nn.Module):
    """Projections around a `Core`, on the heads that this rank holds."""

    def __init__(self, arch: Architecture, core: nn.Module) -> None:
        super().__init__()
        self.head_dim = arch.head_dim
        queries, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
        self.q_proj = arch.linear(arch.hidden, queries)
        self.k_proj = arch.linear(arch.hidden, keys)
        self.v_proj = arch.linear(arch.hidden, keys)
        self.o_proj = arch.linear(queries, arch.hidden)
        self.q_norm = arch.make_norm(arch.head_dim) if arch.qk_norm else None
        self.k_norm = arch.make_norm(arch.head_dim) if arch.qk_norm else None
        self.core = core

    def forward(self, x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None) -> torch.Tensor:
        q, k, v = self._heads(self.q_proj(x)), self._heads(self.k_proj(x)), self._heads(self.v_proj(x))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if cos is not None and sin is not None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return self.o_proj(self.core(q, k, v).transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, heads * head_dim] -> [batch, sequence, heads, head_dim]."""
        return x.unflatten(-1, (-1, self.head_dim))


class FeedForward(nn.Module):
    """down(activation(gate(x)) * up(x)), or down(activation(up(x)))."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[arch.activation]
        self.gate_proj = arch.linear(arch.hidden, arch.inner) if arch.gated else None
        self.up_proj = arch.linear(arch.hidden, arch.inner)
        self.down_proj = arch.linear(arch.inner, arch.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate_proj is None:
            return self.down_proj(self.activation(self.up_proj(x)))
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One layer with norms in front of attention and feed-forward, and behind them where they are a sandwich."""

    def __init__(self, arch: Architecture, core: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = arch.make_norm(arch.hidden)
        self.self_attn = Attention(arch, core)
        self.attention_outnorm = arch.make_norm(arch.hidden) if arch.sandwich else None
        self.feedforward_innorm = arch.make_norm(arch.hidden)
        self.mlp = FeedForward(arch)
        self.feedforward_outnorm = arch.make_norm(arch.hidden) if arch.sandwich else None

    def forward(self, x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None) -> torch.Tensor:
        attention = self.self_attn(self.input_layernorm(x), cos, sin)
        if self.attention_outnorm is not None:
            attention = self.attention_outnorm(attention)
        x = x + attention
        feed_forward = self.mlp(self.feedforward_innorm(x))
        if self.feedforward_outnorm is not None:
            feed_forward = self.feedforward_outnorm(feed_forward)
        return x + feed_forward


class Decoder(nn.Module):
    """Hidden states [batch, sequence, hidden] -> the same, normalised. cos and sin: of the tokens' positions, if any.

    make_core: makes the attention of each layer; by default that of all tokens being here.
    """

    def __init__(self, arch: Architecture, num_layers: int, make_core: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        make_core = make_core or functools.partial(CausalAttention, arch.scale)
        self.layers = nn.ModuleList(Layer(arch, make_core()) for _ in range(num_layers))
        self.norm = arch.make_norm(arch.hidden)

    def forward(self, x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)
