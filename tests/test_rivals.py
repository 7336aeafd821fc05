"""The rivals that the benchmarks write themselves: that they are right, and refuse what they cannot run."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from benchmarks.rivals.one_shot_norm import MOST_BYTES, MOST_COLUMNS, MOST_PROGRAMS, OneShotNorm
from benchmarks.tolerances import assert_near
from tests.rank_process import RankContext
from tests.ranks import RankPools

EPS = 1e-5


def _one_shot_norm(ctx: RankContext, shapes: list[tuple[int, int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    assert dist.group.WORLD is not None
    kernel = OneShotNorm(dist.group.WORLD, ctx.device, 1 << 16)
    same = torch.Generator().manual_seed(0)
    own = torch.Generator().manual_seed(1 + dist.get_rank())
    found = []
    for number, (rows, columns) in enumerate(shapes):
        residual, weight = torch.randn(rows, columns, generator=same), torch.randn(columns, generator=same)
        x = kernel.operand((rows, columns), torch.float32)
        x.copy_(torch.randn(rows, columns, generator=own))
        summed = x.clone()
        dist.all_reduce(summed)
        total = summed.double() + residual.double()
        normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * weight.double()
        # x may be written again as soon as a call has ended.
        got = kernel(x, residual, weight, EPS)
        x.fill_(float("nan"))
        assert_near(got[1], total, num_partials=dist.get_world_size(), what=f"total of call {number}")
        assert_near(got[0], normed, num_partials=dist.get_world_size(), what=f"norm of call {number}")
        found.append(got)
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_an_all_reduce_with_its_norm_is_right_and_equal_on_all_ranks(rank_pools: RankPools, world_size: int) -> None:
    shapes = [(3, 40), (1, 64), (MOST_PROGRAMS + 3, 8), (3, 40)]
    first, *others = rank_pools.get("cpu", world_size).run(_one_shot_norm, shapes, timeout=90)
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert all(torch.equal(*pair) for pair in zip(mine, theirs, strict=True))


def test_what_one_shot_is_not_for_is_refused() -> None:
    assert OneShotNorm.refusal(128, 8192, 2) == ""
    assert "not for more than 8 MiB" in OneShotNorm.refusal(MOST_BYTES // 16384 + 1, 8192, 2)
    assert "not for more than 16384 columns" in OneShotNorm.refusal(1, MOST_COLUMNS + 1, 2)


def _models(ctx: RankContext) -> tuple[set[tuple[str, str]], dict[tuple[str, str], str]]:
    import time

    from benchmarks.models.request import Request
    from benchmarks.models.run import Run
    from benchmarks.models.zoo import MODELS, TINY, Selection, tiny

    cells = tiny(Selection(models=("llama3-8b", "gemma3-27b"), phases=("prefill",), forms=("ar", "sp")).cells())
    names = ("eager", "registered", "symm_mem", "one_shot_norm")
    architectures = {name: MODELS[name].like(TINY) for name in MODELS}
    run = Run(Request(tuple(cells), "cpu", architectures, names, rounds=2), ctx.device, time.monotonic())
    run.run()
    timed = {(row.sizes["model"] + " " + row.sizes["form"], row.contestant) for row in run.rows if row.p50_us}
    place = {fact: f"{fact.sizes['model']} {fact.sizes['form']}" for fact in run.facts}
    return timed, {(place[fact], fact.contestant): fact.why for fact in run.facts if fact.why}


def test_rivals_of_whole_models_are_right_or_say_why_not(rank_pools: RankPools) -> None:
    timed, reasons = rank_pools.get("cpu", 2).run(_models, timeout=200)[0]
    always = {(place, "eager") for place in ("llama3-8b ar", "llama3-8b sp", "gemma3-27b ar", "gemma3-27b sp")}
    reduced = {("llama3-8b ar", "symm_mem"), ("gemma3-27b ar", "symm_mem"), ("llama3-8b ar", "one_shot_norm")}
    assert timed == always | reduced, reasons
    assert all("which needs GPUs" in why for (_, name), why in reasons.items() if name == "registered")
    assert "this form has none" in reasons["llama3-8b sp", "symm_mem"]
    assert "forwards with all-reduces" in reasons["llama3-8b sp", "one_shot_norm"]
    assert "an RMS norm right behind it" in reasons["gemma3-27b ar", "one_shot_norm"]
