"""Attention with sinks and windows, which the benchmark of whole models has for GPT-OSS."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch

from benchmarks.models.attention import SinkAttention
from benchmarks.models.zoo import MODELS, TINY, Cell
from tests.ranks import RankContext, RankPools

HEADS, TOKENS = 4, 7


def operands(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """q, k and v, with two heads for each head of keys."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, TOKENS, 8, dtype=dtype, generator=generator) for heads in (HEADS, 2, 2)]


def written_out(core: SinkAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The result with one row of scores at a time."""
    found = torch.empty_like(q)
    for head in range(HEADS):
        for row in range(TOKENS):
            first = max(0, row + 1 - (core.window or TOKENS))
            keys, values = (one[:, head // 2, first : row + 1] for one in (k, v))
            weights = (keys @ q[:, head, row, :, None]).squeeze(-1).mul(0.3).exp()
            whole = weights.sum(-1, keepdim=True) + core.sinks[head].detach().exp()
            found[:, head, row] = ((weights / whole)[..., None] * values).sum(1)
    return found


@pytest.mark.parametrize("window", [0, 3])
def test_sinks_take_weight_and_windows_hide(window: int) -> None:
    core = SinkAttention(HEADS, TOKENS, window, 0.3).double()
    with torch.no_grad():
        core.sinks.add_(torch.arange(HEADS) * 0.5)
        with mock.patch("benchmarks.models.attention.QUERIES", 2):
            torch.testing.assert_close(core(*operands()), written_out(core, *operands()))


@pytest.mark.parametrize("window", [0, 3])
def test_flex_attention_computes_the_same(window: int) -> None:
    core, given = SinkAttention(HEADS, TOKENS, window, 0.3), operands(torch.float32)
    core.mask = core.mask_of(torch.device("cpu"))
    # Inductor has no such kernel for the CPU, and eager mode has plain operations.
    compiled = torch.compile(core, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        with mock.patch.object(SinkAttention, "by_flex", side_effect=SinkAttention.by_flex, autospec=True) as by_flex:
            wanted = core(*given)
            assert not by_flex.called
        torch.testing.assert_close(compiled(*given), wanted)


@pytest.mark.parametrize("window", [0, 3])
def test_it_is_the_attention_of_transformers(window: int) -> None:
    theirs = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss", reason="needs the extra 'models'")
    core, (q, k, v) = SinkAttention(HEADS, TOKENS, window, 0.3), operands(torch.float32)
    rows, columns = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)
    mask = torch.zeros(TOKENS, TOKENS).masked_fill(
        (columns > rows) | (columns <= rows - (window or TOKENS)), float("-inf")
    )
    module = torch.nn.Module()
    module.sinks, module.num_key_value_groups = core.sinks, 2
    with torch.no_grad():
        found, _ = theirs.eager_attention_forward(module, q, k, v, mask[None, None], 0.3)
        torch.testing.assert_close(core(q, k, v), found.transpose(1, 2))


def _cut(ctx: RankContext) -> None:
    """A layer with a window, and one without, are what they are as a whole, with their gradients of the sinks."""
    from torch.distributed.device_mesh import init_device_mesh

    from benchmarks.models import forms

    mesh = init_device_mesh("cpu", (ctx.world_size,))
    arch, cell = MODELS["gpt-oss-120b-sinks"].like(TINY), Cell("gpt-oss-120b-sinks", 2, "ar", "prefill", 1, 24)
    whole = forms.decoder(arch, cell, 1, 0, forms.ContextAttention, forms.ShardedCache)
    assert [layer.self_attn.core.window for layer in whole.layers] == [arch.window, 0] and 0 < arch.window < 24  # type: ignore[union-attr]
    part = forms.cut(copy.deepcopy(whole), "ar", mesh)
    given = forms.inputs(arch, cell, 0, 1, torch.device("cpu"), torch.float32)
    weight = torch.randn_like(given[0])
    for model in (whole, part):
        model(*given).backward(weight)
    torch.testing.assert_close(part(*given), whole(*given), atol=1e-4, rtol=1e-4)
    for mine, right in zip(part.layers, whole.layers, strict=True):
        own = right.self_attn.core.sinks.grad.chunk(ctx.world_size)[ctx.rank]  # type: ignore[union-attr]
        torch.testing.assert_close(mine.self_attn.core.sinks.grad, own, atol=1e-4, rtol=1e-3)  # type: ignore[union-attr]


def test_heads_keep_their_sinks_on_their_ranks(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 2).run(_cut)


def test_what_has_no_sinks_is_refused() -> None:
    from torch.distributed.device_mesh import DeviceMesh

    from benchmarks.models import forms

    arch = MODELS["gpt-oss-120b-sinks"].like(TINY)
    with pytest.raises(ValueError, match="has sinks, and the attention of kv has none"):
        forms.build(arch, Cell("tiny", 1, "kv", "decode", 1, 1, 32), mock.create_autospec(DeviceMesh))
