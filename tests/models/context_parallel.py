"""A Llama whose sequence is sharded over the ranks, inside a rank: through Ditron, against all of it on one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.tolerances import MODEL_TOLERANCES, relative_error
from ditron_inductor.backend import ditron
from ditron_inductor.ops import all_gather_attention
from ditron_inductor.report.explain import without_caches
from ditron_inductor.task.site_records import collect_sites
from ditron_inductor.tools.demo_model import Attention, Llama, LlamaConfig, rotate
from tests.models.interpreted import interpreted
from tests.rank_process import RankContext

CONFIG = LlamaConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=32, max_seq_len=64)
ALIBI = "alibi"
"""In the place of a mask: see `alibi`."""


class SequenceAttention(nn.Module):
    """The attention of `inner`, with one of the masks of `ditron_inductor.ops.all_gather_attention`, and its window.

    form: None for the keys of one rank, else of all ranks; `graph` by a gather and torch's attention with a mask made
    of this rank's positions, as the pass finds them; `flex` by a gather and FlexAttention.
    """

    def __init__(self, inner: Attention, mask: str, window: int, form: str | None) -> None:
        super().__init__()
        self.inner = inner
        self.mask = mask
        self.window = window
        self.form = form

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        inner = self.inner
        q, k, v = inner._heads(inner.wq(x)), inner._heads(inner.wk(x)), inner._heads(inner.wv(x))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.form == "flex":
            out = by_flex_attention(q, k, v, self.window)
        elif self.form not in (None, "graph") and self.mask == ALIBI:
            bias = alibi(torch.arange(q.shape[2]) + dist.get_rank() * q.shape[2], q.shape[2] * dist.get_world_size())
            out = all_gather_attention(q, k, v, mask="given", bias=bias)
        elif self.form not in (None, "graph"):
            out = all_gather_attention(q, k, v, mask=self.mask, window=self.window)
        else:
            rows = keys = torch.arange(q.shape[2])
            if self.form == "graph":
                assert dist.group.WORLD is not None
                rank, world_size = dist.get_rank(), dist.get_world_size()
                k, v = (all_gather_tensor_autograd(one, 2, dist.group.WORLD) for one in (k, v))
                parts = [positions(self.mask, k.shape[2], one, world_size) for one in range(world_size)]
                rows, keys = parts[rank], torch.cat(parts)
            ahead = rows[:, None] - keys
            seen = (ahead >= 0) & (ahead < (self.window or k.shape[2]))
            if self.mask == ALIBI:
                seen = alibi(rows, k.shape[2])
            out = scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
        return inner.wo(out.transpose(1, 2).flatten(2))


def alibi(rows: torch.Tensor, keys: int) -> torch.Tensor:
    """What is added to the scores of rows at these positions, [1, heads, rows, keys]: causal, a slope for each head."""
    ahead = rows[:, None] - torch.arange(keys)
    slopes = 2.0 ** -torch.arange(1.0, CONFIG.num_heads + 1)
    return torch.where(ahead >= 0, -slopes[:, None, None] * ahead, -torch.inf)[None]


def by_flex_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """`causal_offset`, in blocks as long as a rank's part."""
    assert dist.group.WORLD is not None
    rows, first = q.shape[2], dist.get_rank() * q.shape[2]
    k, v = (all_gather_tensor_autograd(one, 2, dist.group.WORLD) for one in (k, v))

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i + first >= j) & (i + first - j < window)

    blocks = flex.create_block_mask(seen, None, None, rows, k.shape[2], device="cpu", BLOCK_SIZE=rows)
    out = flex.flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)
    assert isinstance(out, torch.Tensor)
    return out


def layers_of(form: str) -> int:
    """How many layers the model of a form has: one where Inductor generates code, which takes its time, and in the form
    that every run of the tests has.
    """
    return 1 if form in ("generated", "function") else CONFIG.num_layers


def build(mask: str, window: int, form: str | None, num_layers: int) -> Llama:
    """The same weights everywhere."""
    torch.manual_seed(1)
    model = Llama(replace(CONFIG, num_layers=num_layers))
    for layer in model.layers:
        layer.attention = SequenceAttention(layer.attention, mask, window, form)
    return model


def positions(mask: str, length: int, rank: int, world_size: int) -> torch.Tensor:
    """Of this rank's part of a sequence of so many tokens."""
    if mask != "zigzag":
        return torch.arange(length).chunk(world_size)[rank]
    chunks = torch.arange(length).chunk(2 * world_size)
    return torch.cat((chunks[rank], chunks[2 * world_size - 1 - rank]))


def step(model: Llama, call: Any, x: torch.Tensor, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output and all gradients of one step."""
    x = x.clone().requires_grad_()
    out = call(x)
    out.backward(gradient)
    assert x.grad is not None
    values = {"output": out.detach(), "input's gradient": x.grad}
    return values | {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def check(ctx: RankContext, mask: str, window: int, form: str, strategy: str, batch: int, length: int) -> Counter[str]:
    """Forward and training of the sharded model match the whole one; returns the fused sites. form `generated`: by
    Inductor's code, which takes its time, else op by op.
    """
    generated = form == "generated"
    torch._dynamo.reset()
    torch.manual_seed(2)
    x, gradient = torch.randn(batch, length, CONFIG.dim), torch.randn(batch, length, CONFIG.dim)
    whole = build(mask, window, None, layers_of(form))
    wanted = step(whole, whole, x, gradient)
    mine = positions(mask, length, ctx.rank, ctx.world_size)
    model = build(mask, window, form, layers_of(form))
    model.cos, model.sin = model.cos[mine], model.sin[mine]
    options = {"ditron.strategy": strategy}
    # Torch has FlexAttention's backward on CPUs, in plain operations, behind this check.
    unchecked = mock.patch.object(flex, "_validate_device", lambda q, k, v: None)
    with collect_sites() as sink, without_caches(), unchecked:
        if generated:
            call: Any = torch.compile(model, backend=ditron, fullgraph=True, options=options)
        else:
            call = torch.compile(model, backend=interpreted(options), fullgraph=True)
        alone = None
        if not generated:
            with torch.no_grad():
                alone = call(x[:, mine])
        got = step(model, call, x[:, mine], gradient[:, mine])
    for name in wanted:
        value = got[name]
        if name in ("output", "input's gradient"):
            wanted[name] = wanted[name][:, mine]
        else:
            # Every rank has the part of its tokens.
            dist.all_reduce(value)
        assert relative_error(value, wanted[name]) <= MODEL_TOLERANCES[torch.float32], (name, mask, strategy)
    assert alone is None or relative_error(alone, wanted["output"]) <= MODEL_TOLERANCES[torch.float32]
    sites = [site for graph in sink.graphs for site in graph.sites]
    assert all(site.matched for site in sites), [site.reason for site in sites]
    return Counter(site.kind for site in sites)
