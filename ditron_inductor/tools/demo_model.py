"""A Llama-shaped transformer and its two tensor-parallel plans, for the demo, the benchmarks and the GPU tests.

Per layer: x + wo(attention(wq(h), wk(h), wv(h))) with h = rms_norm(x), then x + w2(silu(w1(g)) * w3(g)) with g =
rms_norm(x). Attention is causal, grouped-query, with rotary position embedding. Everything is plain torch;
``tensor_parallel`` cuts it with DTensor's own plans.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import scaled_dot_product_attention, silu


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a model. With ``vocab_size`` 0 it has no token embedding and no head: it maps hidden states to
    hidden states. Tensor parallelism over W ranks needs num_heads, num_kv_heads and hidden_dim to divide by W, and
    sequence parallelism the sequence length too. Raises ValueError for sizes that do not fit each other.
    """

    dim: int = 64
    num_layers: int = 1
    num_heads: int = 4
    num_kv_heads: int = 2
    hidden_dim: int = 128
    vocab_size: int = 0
    max_seq_len: int = 4096
    rope_theta: float = 500000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.dim % self.num_heads or (self.dim // self.num_heads) % 2:
            raise ValueError(f"dim {self.dim} has to be an even multiple of num_heads {self.num_heads}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} has to be a multiple of num_kv_heads {self.num_kv_heads}")

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @staticmethod
    def llama_8b(num_layers: int = 32, vocab_size: int = 0, max_seq_len: int = 8192) -> LlamaConfig:
        """The layers of Llama 3 8B; its vocabulary has 128256 entries."""
        return LlamaConfig(4096, num_layers, 32, 8, 14336, vocab_size, max_seq_len)

    @staticmethod
    def llama_70b(num_layers: int = 80, vocab_size: int = 0, max_seq_len: int = 8192) -> LlamaConfig:
        return LlamaConfig(8192, num_layers, 64, 8, 28672, vocab_size, max_seq_len)


class Attention(nn.Module):
    """Causal grouped-query attention on [batch, sequence, dim], by the heads that a rank holds."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = config.num_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = self._heads(self.wq(x)), self._heads(self.wk(x)), self._heads(self.wv(x))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, heads * head_dim] -> [batch, heads, sequence, head_dim]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1(x)) * w3(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden_dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    """One transformer layer with pre-normalisation and two residual connections."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Maps tokens [batch, sequence] to logits [batch, sequence, vocab_size]; without a vocabulary, hidden states to
    hidden states. Under sequence parallelism without a vocabulary, input and output are this rank's part of the
    sequence. ``seq_len`` is the length of the whole sequence if the input holds only a part of it.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim) if config.vocab_size else None
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False) if config.vocab_size else None
        cos, sin = rotary_table(config.max_seq_len, config.head_dim, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.cos: torch.Tensor
        self.sin: torch.Tensor

    def forward(self, x: torch.Tensor, seq_len: int | None = None) -> torch.Tensor:
        seq_len = x.shape[1] if seq_len is None else seq_len
        cos, sin = self.cos[:seq_len], self.sin[:seq_len]
        h = x if self.embedding is None else self.embedding(x)
        for layer in self.layers:
            h = layer(h, cos, sin)
        h = self.norm(h)
        return h if self.head is None else self.head(h)


def rotary_table(seq_len: int, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position * theta^(-2i/head_dim), each [seq_len, head_dim / 2], fp32."""
    frequency = torch.exp(torch.arange(0, head_dim, 2, dtype=torch.float32) * (-math.log(theta) / head_dim))
    angle = torch.outer(torch.arange(seq_len, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (x[i], x[i + head_dim/2]) of x [batch, heads, sequence, head_dim] by their position's angle."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)


def tensor_parallel(model: Llama, mesh: DeviceMesh, *, sequence_parallel: bool) -> Llama:
    """Shards ``model`` in place over the one-dimensional ``mesh`` and returns it. sequence_parallel: norms and
    residuals hold a part of the sequence, so a layer has two all-gathers and two reduce-scatters. Without it they are
    replicated and a layer has two all-reduces. Raises ValueError if the number of heads does not divide by the mesh's
    size.
    """
    ranks = mesh.size()
    config = model.config
    if config.num_heads % ranks or config.num_kv_heads % ranks or config.hidden_dim % ranks:
        raise ValueError(f"{config} does not divide over {ranks} ranks")
    rows = Shard(1) if sequence_parallel else Replicate()
    layer_plan: dict[str, ParallelStyle] = {
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=rows),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=rows),
    }
    if sequence_parallel:
        # The inputs of a layer's two halves are gathered once for all the matmuls that read them.
        layer_plan |= {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
            ),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        }
    for layer in model.layers:
        parallelize_module(layer, mesh, layer_plan)
    plan: dict[str, ParallelStyle] = {}
    if sequence_parallel:
        plan["norm"] = SequenceParallel(use_local_output=config.vocab_size == 0)
    if config.vocab_size:
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=rows)
        plan["head"] = ColwiseParallel(input_layouts=rows, output_layouts=Replicate())
    parallelize_module(model, mesh, plan)
    return model
