"""What sets one family of decoders apart, and its layers in plain torch: what the benchmark of whole models builds.

Parts are named as `transformers` names those of Llama, so that plans and weights fit both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.models.attention import CausalAttention
from benchmarks.models.experts import Experts
from benchmarks.models.latent import LatentAttention
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

    gated: down(activation(gate(x)) * up(x)), else down(activation(up(x))). norm: `rms`, `gemma` (which scales by 1 +
    weight), or `layer`. bias: of every linear layer. qk_norm: a norm of each head's query and key. sandwich: norms
    behind attention and feed-forward too. theta: of rotary positions, 0 without. scale: of the scores, by default 1 /
    sqrt(head_dim). experts: how many a feed-forward has, each of width `inner`, of which a token takes `top_k`; 0 for a
    dense one; with biases they are those of GPT-OSS, see `Experts`. skew: how unequally popular they are. shared: the
    width of one more expert, which all tokens take; 0 without. whole_shared: that of one which no plan cuts, so that
    every rank adds what it computes to the sum of the others; 0 without. query_latent, key_latent, rotary_dim: the
    sizes of latent attention (see latent.py); 0 without. sinks: whether attention has sinks (see attention.py). window:
    how many tokens the layers 0, 2, 4, .. see at most, where it has; 0 for any number. engine: layers as vLLM writes
    them, see `EngineDecoder`, with one projection of queries, keys and values, and one of gate and up. note: how it
    differs from the model that it is named after.
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
    experts: int = 0
    top_k: int = 0
    skew: float = 0.0
    shared: int = 0
    whole_shared: int = 0
    query_latent: int = 0
    key_latent: int = 0
    rotary_dim: int = 0
    sinks: bool = False
    window: int = 0
    engine: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads are no multiple of {self.kv_heads} heads of keys and values")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation '{self.activation}' is none of {', '.join(ACTIVATIONS)}")
        if self.norm not in NORMS:
            raise ValueError(f"norm '{self.norm}' is none of {', '.join(NORMS)}")
        if self.engine and (self.norm != "rms" or self.sandwich):
            raise ValueError("layers as vLLM writes them have an RMS norm right behind each sum here")
        latent = self.query_latent, self.key_latent, self.rotary_dim
        if any(latent) and not (all(latent) and self.theta and self.heads == self.kv_heads and not self.engine):
            raise ValueError("latent attention has all its sizes, rotary positions, and as many keys as queries here")
        if self.window and not self.sinks:
            raise ValueError("layers with a window have sinks here")
        if (self.shared or self.whole_shared) and not self.experts:
            raise ValueError("an expert that all tokens take stands beside others here")

    def like(self, sizes: Architecture) -> Architecture:
        """Returns these forms of layers in the sizes of another architecture."""
        kv_heads = sizes.heads if self.heads == self.kv_heads else sizes.kv_heads
        small = replace(self, hidden=sizes.hidden, heads=sizes.heads, kv_heads=kv_heads, inner=sizes.inner)
        routed = {"experts": min(self.experts, 4), "top_k": min(self.top_k, 2)}
        routed |= {"shared": self.shared and sizes.inner, "whole_shared": self.whole_shared and sizes.inner}
        half = sizes.head_dim // 2
        latent = {"query_latent": half, "key_latent": half, "rotary_dim": half} if self.query_latent else {}
        window = self.window and sizes.head_dim // 2
        return replace(small, depth=sizes.depth, head_dim=sizes.head_dim, window=window, **routed, **latent)

    @property
    def rotated(self) -> int:
        """How many elements of a head have rotary positions."""
        return self.rotary_dim or self.head_dim

    def layer_weights(self, experts: float | None = None) -> tuple[int, float]:
        """Elements of the weights of (attention, feed-forward) of a layer, of which the ranks have parts. experts: so
        many of them, all by default.
        """
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        if self.query_latent:
            of_queries = self.query_latent * (self.hidden + self.heads * (self.head_dim + self.rotary_dim))
            of_keys = self.key_latent * (self.hidden + self.heads * 2 * self.head_dim) + self.hidden * self.rotary_dim
            attention = of_queries + of_keys + self.heads * self.head_dim * self.hidden
        width = self.inner * max(self.experts if experts is None else experts, 1) + self.shared
        return attention, self.hidden * width * self.matmuls

    @property
    def whole_weights(self) -> int:
        """Elements of the weights of a layer that every rank has whole, beside the router and the norms."""
        return self.hidden * self.whole_shared * self.matmuls

    @property
    def matmuls(self) -> int:
        """The matmuls of a feed-forward, or of an expert."""
        return 3 if self.gated else 2

    def make_norm(self, width: int) -> nn.Module:
        if self.norm == "layer":
            return nn.LayerNorm(width, eps=self.eps)
        return GemmaNorm(width, self.eps) if self.norm == "gemma" else nn.RMSNorm(width, eps=self.eps)

    def linear(self, inner: int, outer: int) -> nn.Linear:
        return nn.Linear(inner, outer, bias=self.bias)


Seen = list[torch.Tensor]
"""What the layers pass on, in order: of each its attention in front of the projection, and the residual behind
attention and behind the feed-forward. All of it is in memory anyway, so a program that returns it fuses what one
without it does.
"""


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


class Attention(nn.Module):
    """Projections around a `Core`, on the heads that this rank holds."""

    def __init__(self, arch: Architecture, core: nn.Module) -> None:
        super().__init__()
        self.head_dim = arch.head_dim
        queries, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
        if arch.engine:
            self.qkv_proj = arch.linear(arch.hidden, queries + 2 * keys)
        else:
            self.q_proj = arch.linear(arch.hidden, queries)
            self.k_proj = arch.linear(arch.hidden, keys)
            self.v_proj = arch.linear(arch.hidden, keys)
        self.groups = arch.heads // arch.kv_heads
        self.engine = arch.engine
        self.o_proj = arch.linear(queries, arch.hidden)
        self.q_norm = arch.make_norm(arch.head_dim) if arch.qk_norm else None
        self.k_norm = arch.make_norm(arch.head_dim) if arch.qk_norm else None
        self.core = core

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, seen: Seen | None = None
    ) -> torch.Tensor:
        q, k, v = (one.unflatten(-1, (-1, self.head_dim)) for one in self._projected(x))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if cos is not None and sin is not None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        found = self.core(q, k, v)
        if seen is not None:
            seen.append(found)
        return self.o_proj(found.transpose(1, 2).flatten(2))

    def _projected(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values of this rank's heads, [batch, sequence, heads * head_dim]."""
        if not self.engine:
            return self.q_proj(x), self.k_proj(x), self.v_proj(x)
        both = self.qkv_proj(x)
        keys = both.shape[-1] // (self.groups + 2)
        return both.split((self.groups * keys, keys, keys), -1)

    @torch.no_grad()
    def sharpen(self, factor: float) -> None:
        """Multiplies the scores of fresh weights by a factor."""
        if self.q_norm is not None:
            # What a Gemma norm multiplies by is 1 + weight.
            shift = 1.0 if isinstance(self.q_norm, GemmaNorm) else 0.0
            for parameter in self.q_norm.parameters():
                parameter.add_(shift).mul_(factor).sub_(shift)
            return
        # Keys, and values with them, where they are rows of the same weight.
        projection, each = (self.qkv_proj, factor**0.5) if self.engine else (self.q_proj, factor)
        for parameter in projection.parameters():
            parameter.mul_(each)


class FeedForward(nn.Module):
    """down(activation(gate(x)) * up(x)), or down(activation(up(x)))."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[arch.activation]
        self.packed = arch.engine and arch.gated
        if self.packed:
            self.packed_proj = arch.linear(arch.hidden, 2 * arch.inner)
        else:
            self.gate_proj = arch.linear(arch.hidden, arch.inner) if arch.gated else None
            self.up_proj = arch.linear(arch.hidden, arch.inner)
        self.down_proj = arch.linear(arch.inner, arch.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed:
            gate, up = self.packed_proj(x).chunk(2, -1)
            return self.down_proj(self.activation(gate) * up)
        if self.gate_proj is None:
            return self.down_proj(self.activation(self.up_proj(x)))
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One layer with norms in front of attention and feed-forward, and behind them where they are a sandwich."""

    def __init__(self, arch: Architecture, core: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = arch.make_norm(arch.hidden)
        self.self_attn = LatentAttention(arch, core) if arch.query_latent else Attention(arch, core)
        self.attention_outnorm = arch.make_norm(arch.hidden) if arch.sandwich else None
        self.feedforward_innorm = arch.make_norm(arch.hidden)
        routed = arch.hidden, arch.inner, arch.experts, arch.top_k, arch.shared, arch.bias, arch.skew
        self.mlp = Experts(*routed) if arch.experts else FeedForward(arch)
        self.whole_expert = FeedForward(replace(arch, inner=arch.whole_shared)) if arch.whole_shared else None
        self.feedforward_outnorm = arch.make_norm(arch.hidden) if arch.sandwich else None

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, seen: Seen | None = None
    ) -> torch.Tensor:
        attention = self.self_attn(self.input_layernorm(x), cos, sin, seen=seen)
        if self.attention_outnorm is not None:
            attention = self.attention_outnorm(attention)
        x = x + attention
        normed = self.feedforward_innorm(x)
        feed_forward = self.mlp(normed)
        if self.whole_expert is not None:
            feed_forward = feed_forward + self.whole_expert(normed)
        if self.feedforward_outnorm is not None:
            feed_forward = self.feedforward_outnorm(feed_forward)
        out = x + feed_forward
        if seen is not None:
            seen += (x, out)
        return out


class Decoder(nn.Module):
    """Hidden states [batch, sequence, hidden] -> the same, normalised. cos and sin: of the tokens' positions, if any.

    make_core: makes the attention of each layer; by default that of all tokens being here.
    """

    def __init__(self, arch: Architecture, num_layers: int, make_core: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        make_core = make_core or functools.partial(CausalAttention, arch.scale)
        self.layers = nn.ModuleList(Layer(arch, make_core()) for _ in range(num_layers))
        self.norm = arch.make_norm(arch.hidden)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, seen: Seen | None = None
    ) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, cos, sin, seen=seen)
        return self.norm(x)


Added = Callable[[torch.Tensor, torch.Tensor, nn.Module], tuple[torch.Tensor, torch.Tensor]]
"""(what a half of a layer returns, the residual, the norm behind it) -> (the norm of their sum, the sum)."""


def chained(
    model: nn.Module,
    x: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    seen: Seen | None,
    added: Added,
) -> torch.Tensor:
    """A decoder's forward in which every sum is made together with the norm that reads it."""
    layers: list[Any] = list(model.layers)  # type: ignore[arg-type]
    norms = [*(layer.input_layernorm for layer in layers[1:]), model.norm]
    normed, total = layers[0].input_layernorm(x), x
    for layer, following in zip(layers, norms, strict=True):
        normed, middle = added(layer.self_attn(normed, cos, sin, seen=seen), total, layer.feedforward_innorm)
        beside = middle if layer.whole_expert is None else middle + layer.whole_expert(normed)
        normed, total = added(layer.mlp(normed), beside, following)
        if seen is not None:
            seen += (middle, total)
    return normed


def added_in_fp32(branch: torch.Tensor, residual: torch.Tensor, norm: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """The RMS norm of the sum before it is rounded, as vLLM computes it in torch."""
    wide = branch.float() + residual.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    return scaled.to(branch.dtype) * norm.weight, wide.to(residual.dtype)


class EngineDecoder(Decoder):
    """The layers as vLLM writes them: RMS norms of sums in fp32, which are rounded for the residual only."""

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, seen: Seen | None = None
    ) -> torch.Tensor:
        return chained(self, x, cos, sin, seen, added_in_fp32)
