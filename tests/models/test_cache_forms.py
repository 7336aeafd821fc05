"""Steps of sequences of different lengths, with static and with paged caches: compiled ones do what eager ones do."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import _functional_collectives as functional

from benchmarks.tolerances import MODEL_TOLERANCES, relative_error
from ditron_inductor.passes.attention import cached_attention
from ditron_inductor.task.nodes import CachedAttention
from ditron_inductor.tools.demo_model import rotate
from tests.cases import sampled
from tests.rank_process import RankContext
from tests.ranks import RankPools

HQ, HKV, S, P, HIDDEN = 4, 2, 32, 8, 64
Tensor = torch.Tensor
Write = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Puts new keys, or values, [B, HKV, D] at positions [B] into a cache, perhaps with a block table, and returns it as
[B, HKV, S, D].
"""


def heads_first(cache: Tensor, new: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """[B, HKV, S, D]."""
    cache[torch.arange(len(new), device=cache.device), :, positions] = new
    return cache


def tokens_first(cache: Tensor, new: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """[B, S, HKV, D]."""
    cache[torch.arange(len(new), device=cache.device), positions] = new
    return cache.transpose(1, 2)


def paged(cache: Tensor, new: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """[blocks, P, HKV, D]."""
    cache[table.gather(1, positions[:, None] // P)[:, 0], positions % P] = new
    return cache[table].flatten(1, 2).transpose(1, 2)


def paged_by_slots(cache: Tensor, new: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """[slots, HKV, D]: the table names the block of P slots."""
    slots = (table[:, :, None] * P + torch.arange(P, device=cache.device)).flatten(1)
    cache.index_copy_(0, slots.gather(1, positions[:, None])[:, 0], new)
    return cache[slots].transpose(1, 2)


FORMS: dict[Write, Callable[[int], tuple[int, ...]]] = {
    heads_first: lambda B: (B, HKV, S),
    tokens_first: lambda B: (B, S, HKV),
    paged: lambda B: (B * S // P + 1, P, HKV),
    paged_by_slots: lambda B: (B * S + P, HKV),
}
"""The sizes of a cache for B sequences, without the elements of a head."""

PAGED = ("paged", "paged_by_slots")
MADE = {write.__name__: [(write.__name__ not in PAGED, write.__name__ in PAGED)] for write in FORMS}


def steps(write: Write, B: int, device: torch.device, compiled: bool) -> list[Tensor]:
    """What a layer computes in some steps of B sequences, and what it leaves behind in its caches."""
    D = 64 if device.type == "cuda" else 16
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16 if device.type == "cuda" else None)

    w, qkv = drawn(HIDDEN, HIDDEN) / 8, drawn(HIDDEN, (HQ + 2 * HKV) * D) / 8
    caches = [drawn(*FORMS[write](B), D) for _ in range(2)]
    table = (torch.randperm(B * S // P, generator=generator) + 1).view(B, -1).to(device)

    def layer(x: Tensor, keys: Tensor, values: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden = functional.all_reduce(x @ w, "sum", dist.group.WORLD)
        q, k, v = (
            one.unflatten(-1, (-1, D))[:, :, None] for one in (hidden @ qkv).split([HQ * D, HKV * D, HKV * D], -1)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        both = [write(cache, new[:, :, 0], positions, table) for cache, new in ((keys, k), (values, v))]
        seen = (torch.arange(S, device=x.device) <= positions[:, None])[:, None, None]
        return F.scaled_dot_product_attention(q, *both, seen, enable_gqa=True).flatten(1)

    run = torch.compile(layer, backend="ditron", options={"ditron.strategy": "tile"}) if compiled else layer
    found = []
    for step in range(2):
        positions = torch.tensor([step, 17 + step, S - 2 + step][:B], device=device)
        angles = 6.3 * drawn(B, 1, 1, D // 2)
        found.append(run(drawn(B, HIDDEN), *caches, positions, angles.cos(), angles.sin()))
    return [*found, *caches]


def _same(ctx: RankContext, form: str, B: int) -> list[tuple[bool, bool]]:
    """Returns (whether a call writes the new token, whether its caches are paged), for every call in the graph."""
    torch._dynamo.reset()
    write = next(write for write in FORMS if write.__name__ == form)
    here = mock.patch.object(cached_attention, "GPUS", ("cpu", "cuda"))
    nodes = mock.patch.object(cached_attention, "CachedAttention", wraps=CachedAttention)
    with torch.no_grad(), here, nodes as made:
        wanted, found = (steps(write, B, ctx.device, compiled) for compiled in (False, True))
    for one, other in zip(found, wanted, strict=True):
        assert relative_error(one, other) < (MODEL_TOLERANCES[one.dtype] if one.is_cuda else 1e-4)
    dist.barrier()
    tasks = [CachedAttention(*call.args) for call in made.call_args_list]
    return [(task.appends, task.paged) for task in tasks]


CASES = [(write.__name__, B) for write in FORMS for B in (1, 3)]


@pytest.mark.parametrize("form, B", sampled(CASES))
def test_steps_are_those_of_eager_mode(rank_pools: RankPools, form: str, B: int) -> None:
    assert rank_pools.get("cpu", 2).run(_same, form, B, timeout=200.0) == [MADE[form]] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("form, B", CASES)
def test_steps_are_those_of_eager_mode_on_gpus(rank_pools: RankPools, form: str, B: int) -> None:
    assert rank_pools.get("cuda", 2).run(_same, form, B, timeout=100) == [MADE[form]] * 2
