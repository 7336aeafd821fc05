"""What a rank could decide alone in front of our passes, and does not: see docs/rank_decisions.md."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.fx_passes import pad_mm
from torch.distributed import _functional_collectives as functional

from benchmarks.tolerances import assert_near
from ditron_inductor.backend import ditron
from ditron_inductor.report.explain import without_caches
from tests.ranks import RankContext, RankPool, RankPools


def both_gathered(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    group = dist.group.WORLD
    return functional.all_gather_tensor(w, 0, group) @ functional.all_gather_tensor(x, 0, group).t()


def run_with_another_clock(ctx: RankContext) -> dict[str, int]:
    """Inductor's benchmark of padding, which it makes on GPUs only, favours it on rank 0 and nowhere else."""
    torch._dynamo.reset()
    counters.clear()
    given = [torch.randn(shape) / 8 for shape in ((17, 19), (21, 19))]
    with (
        mock.patch.object(pad_mm, "check_device", lambda *tensors: True),
        mock.patch.object(pad_mm, "has_triton", lambda: True),
        mock.patch.object(pad_mm, "_should_pad", lambda *arguments: ctx.rank == 0),
        inductor_config.patch(shape_padding=True),
        without_caches(),
    ):
        compiled = torch.compile(both_gathered, backend=ditron, options={"shape_padding": True})
        assert_near(compiled(*given), both_gathered(*(one.double() for one in given)), what="both gathered")
    return dict(counters["ditron"])


@pytest.mark.skipif(not hasattr(pad_mm, "_should_pad"), reason="this torch decides about padding elsewhere")
def test_ranks_compile_one_graph_whatever_their_clocks_say(rank_pools: RankPools) -> None:
    first, second = rank_pools.get("cpu", 2).run(run_with_another_clock, timeout=100.0)
    assert first == second
    assert first["all_gather_matmul"] == 1


def run_unaligned_on_gpus(ctx: RankContext) -> dict[str, int]:
    """Sizes as those by which ranks parted, and a matmul of a graph without a site, large enough to be padded."""
    torch._dynamo.reset()
    counters.clear()
    with without_caches():
        shapes = ((191, 192), (149, 192))
        given = [torch.randn(shape, dtype=torch.bfloat16, device=ctx.device) / 14 for shape in shapes]
        compiled = torch.compile(both_gathered, backend=ditron)
        assert_near(compiled(*given), both_gathered(*(one.double() for one in given)), what="both gathered")
        x, w = (
            torch.randn(shape, dtype=torch.bfloat16, device=ctx.device) / 64 for shape in ((2047, 4097), (1023, 4097))
        )
        linear = torch.compile(torch.nn.functional.linear, backend=ditron)
        assert_near(linear(x, w), x.double() @ w.double().t(), what="padded")
    return dict(counters["ditron"])


@pytest.mark.gpu
def test_unaligned_sizes_on_gpus(gpu_pool: RankPool) -> None:
    for counted in gpu_pool.run(run_unaligned_on_gpus, timeout=200.0):
        assert counted["all_gather_matmul"] == 1
        assert counted["pad_products"] == 1
