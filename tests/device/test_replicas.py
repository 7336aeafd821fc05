"""Comparing what every rank should have alike, and taking one's own part of it."""

from __future__ import annotations

import math

import pytest
import torch

from ditron_inductor.device.replicas import Replicas, near, own_chunk, samples
from ditron_inductor.errors import DitronNotReplicated
from tests.ranks import RankContext, RankPools


def compare(ctx: RankContext, by: float) -> str:
    """The error of a comparison of two tensors, of which the second one is `by` more on rank 1; empty without one."""
    replicas = Replicas()
    same = [torch.arange(6), torch.linspace(0, 1, 40).view(5, 8) + by * ctx.rank]
    return error_of(replicas, same, ctx, "\na.py:3")


def error_of(
    replicas: Replicas, same: list[torch.Tensor], ctx: RankContext, names: str = "", constants: str = ""
) -> str:
    try:
        alias = replicas.compared(same[-1], same, ctx.group_name, "site", names, constants)
    except DitronNotReplicated as error:
        return str(error)
    assert alias.data_ptr() == same[-1].data_ptr()
    return ""


def compare_again(ctx: RankContext) -> list[str]:
    """Errors of the calls of a site, whose tensor differs at the second one, which is repeated. What follows compares
    nothing: one rank alone may make it.
    """
    replicas, x = Replicas(), torch.zeros(3)
    found = [error_of(replicas, [x], ctx), error_of(replicas, [x + ctx.rank], ctx), error_of(replicas, [x], ctx)]
    if ctx.rank == 0:
        found.append(error_of(replicas, [x], ctx))
    return found


def compare_once(ctx: RankContext) -> None:
    """Of a graph that torch captures, rank 0 runs a site once more alone, while the other one replays it."""
    replicas, x = Replicas(), torch.zeros(3)
    for _ in range(1 + (ctx.rank == 0)):
        replicas.compared(x, [x], ctx.group_name, "site", again=False)
    with pytest.raises(DitronNotReplicated):
        replicas.compared(x, [x + ctx.rank], ctx.group_name, "another site", again=False)


def compare_constants(ctx: RankContext) -> str:
    lines = ("07", "add(_, 1)", f"mul(_, {ctx.rank})")
    return error_of(Replicas(), [torch.zeros(3)], ctx, constants="\n".join(lines))


def one_element(ctx: RankContext) -> list[str]:
    """Errors where one element differs that is no sample."""
    found = []
    for like in (torch.zeros(100), torch.zeros(100, dtype=torch.bool), torch.zeros(100, dtype=torch.int64)):
        like[7] = ctx.rank
        found.append(error_of(Replicas(), [like], ctx))
    return found


def chunks(ctx: RankContext) -> list[float]:
    x = torch.arange(8.0).view(2, 4)
    own = own_chunk(x, 1, ctx.world_size, ctx.group_name)
    assert own.is_contiguous()
    assert torch.equal(own, x.chunk(ctx.world_size, 1)[ctx.rank])
    return own.flatten().tolist()


def test_ranks_compare(rank_pools: RankPools) -> None:
    pool = rank_pools.get("cpu", 2)
    assert pool.run(compare, 0.0) == ["", ""]
    assert pool.run(compare, 1.0e-7) == ["", ""]
    for message in pool.run(compare, 0.1):
        assert "rank 1 of group" in message and "float32[5, 8], read at a.py:3, than rank 0" in message
        assert "'ditron.sequence_parallel' = 'off'" in message


def test_ranks_compare_again(rank_pools: RankPools) -> None:
    first, second = rank_pools.get("cpu", 2).run(compare_again)
    assert [bool(text) for text in first] == [False, True, False, False]
    assert second == first[:3]


def test_ranks_compare_once_what_torch_captures(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 2).run(compare_once)


def test_ranks_compare_constants(rank_pools: RankPools) -> None:
    for message in rank_pools.get("cpu", 2).run(compare_constants):
        assert "has another constant, mul(_, 1) and not mul(_, 0), than rank 0 at site" in message


def test_ranks_compare_all_elements(rank_pools: RankPools) -> None:
    assert all(all(found) for found in rank_pools.get("cpu", 2).run(one_element))


def test_own_chunk(rank_pools: RankPools) -> None:
    assert rank_pools.get("cpu", 2).run(chunks) == [[0, 1, 4, 5], [2, 3, 6, 7]]


@pytest.mark.parametrize("shape", [(), (1,), (5,), (16,), (100,), (7, 11), (0, 3)])
def test_samples(shape: tuple[int, ...]) -> None:
    x = torch.arange(math.prod(shape)).view(shape)
    found = samples(x)
    assert len(found) == min(16, x.numel())
    assert len(set(found)) == len(found) and set(found) <= set(x.flatten().tolist())
    assert samples(x.t() if x.ndim == 2 else x) or not x.numel()


def test_near() -> None:
    nan = math.nan
    assert near([1.0, nan, math.inf], [1.0, nan, math.inf], torch.float32)
    assert not near([1.0], [nan], torch.float32)
    assert not near([1.0], [1.0, 2.0], torch.float32)
    assert near([1.0, 8.0], [1.06, 8.0], torch.bfloat16)
    assert not near([1.0, 8.0], [1.06, 8.0], torch.float32)
    assert not near([3], [4], torch.int64)


def counts_apart(ctx: RankContext) -> list[str]:
    """Errors of the calls of a site after a reset, in front of which one rank had made a call more."""
    import torch.distributed as dist

    from ditron_inductor.device.replicas import replicas
    from ditron_inductor.device.reset import reset

    x = torch.zeros(3)
    found = [error_of(replicas, [x], ctx)]
    # As if an exception had kept the other rank from the next calls.
    (key,) = replicas._calls[dist.group.WORLD]
    replicas._calls[dist.group.WORLD][key] += ctx.rank
    reset()
    return [*found, *[error_of(replicas, [x], ctx) for _ in range(3)]]


def test_a_reset_begins_the_comparisons_anew(rank_pools: RankPools) -> None:
    assert rank_pools.get("cpu", 2, label="replicas").run(counts_apart, timeout=60.0) == [[""] * 4] * 2
