"""The same kinds of models in plain torch, for machines without `transformers`: named as the plans name their parts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from ditron_inductor.tools.demo_model import rotary_table, rotate

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(frozen=True)
class PlainConfig:
    """Sizes, and what sets one family apart.

    bias: biases and LayerNorm, else neither and RMSNorm. gated: activation(gate) * up. packed: one matmul for
    queries, keys and values. parallel: attention and MLP read the same input and are added; shared: one norm for both.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    max_position_embeddings: int
    activation: str = "silu"
    bias: bool = False
    gated: bool = True
    packed: bool = False
    parallel: bool = False
    shared: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def norm(self) -> nn.Module:
        return nn.LayerNorm(self.hidden_size) if self.bias else nn.RMSNorm(self.hidden_size, eps=1e-6)

    def linear(self, inner: int, outer: int) -> nn.Linear:
        return nn.Linear(inner, outer, bias=self.bias)


class Output(NamedTuple):
    """Logits [batch, sequence, vocabulary], and the loss where labels were given."""

    logits: torch.Tensor
    loss: torch.Tensor | None


class Attention(nn.Module):
    """Causal attention with rotary positions, on the heads that a rank holds."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.config = config
        hidden, kv = config.hidden_size, config.num_key_value_heads * config.head_dim
        if config.packed:
            self.qkv_proj = config.linear(hidden, 3 * hidden)
        else:
            self.q_proj = config.linear(hidden, hidden)
            self.k_proj = config.linear(hidden, kv)
            self.v_proj = config.linear(hidden, kv)
        self.o_proj = config.linear(hidden, hidden)

    def forward(
        self, hidden_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        if self.config.packed:
            q, k, v = self._heads(self.qkv_proj(hidden_states), 3).chunk(3, dim=-1)
        else:
            q, k, v = (self._heads(one(hidden_states)) for one in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor, parts: int = 1) -> torch.Tensor:
        return x.unflatten(-1, (-1, parts * self.config.head_dim)).transpose(1, 2)


class Mlp(nn.Module):
    """down(activation(up(x))), or down(activation(gate(x)) * up(x))."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.up_proj = config.linear(config.hidden_size, config.intermediate_size)
        self.gate_proj = config.linear(config.hidden_size, config.intermediate_size) if config.gated else None
        self.down_proj = config.linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate_proj is None:
            return self.down_proj(self.activation(self.up_proj(x)))
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One layer with pre-normalisation, its two halves one after the other or side by side."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.parallel = config.parallel
        self.input_layernorm = config.norm()
        self.post_attention_layernorm = None if config.shared else config.norm()
        self.self_attn = Attention(config)
        self.mlp = Mlp(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        normed = self.input_layernorm(x)
        attention = self.self_attn(hidden_states=normed, cos=cos, sin=sin, mask=mask)
        if not self.parallel:
            x = x + attention
        if self.post_attention_layernorm is not None:
            normed = self.post_attention_layernorm(x)
        mlp = self.mlp(normed)
        return mlp + attention + x if self.parallel else x + mlp


class Base(nn.Module):
    """Token ids to the last layer's hidden states."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = config.norm()
        cos, sin = rotary_table(config.max_position_embeddings, config.head_dim, 10000.0)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.cos: torch.Tensor
        self.sin: torch.Tensor

    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        length = input_ids.shape[1]
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length], mask)
        return self.norm(x)


class PlainModel(nn.Module):
    """A causal language model; called as those of `transformers` are."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.model = Base(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> Output:
        logits = self.lm_head(self.model(input_ids, attention_mask))
        if labels is None:
            return Output(logits, None)
        return Output(logits, F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()))
