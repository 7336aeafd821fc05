"""Nothing is read that was not written: slots are full of NaN before a call, and so are outputs when allocated."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ditron_inductor.device import layout, workspaces
from tests.lowering.calls import Site
from tests.lowering.problems import TILE_KINDS, Problem, Size
from tests.rank_process import RankContext
from tests.ranks import RankPool

# Tiles at the edge are partly empty, and so are the chunks of the last rank.
ODD = {"cpu": Size(35, 41, 37), "cuda": Size(333, 555, 777)}


def _fill_slots(ctx: RankContext) -> None:
    """0xFF, a NaN in every floating-point type, into all data of this rank's slots, while no rank runs a kernel."""

    def all_ranks_idle() -> None:
        if ctx.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    all_ranks_idle()
    found = workspaces.of_group(dist.distributed_c10d._resolve_process_group(ctx.group_name))
    rings = [generation for shared in found for generation in shared.generations]
    assert rings, "the group has no workspace to poison"
    for ring in rings:
        ring.heap.local[layout.HEADER_BYTES :].fill_(0xFF)
    all_ranks_idle()


def _poisoned(ctx: RankContext, kind: str) -> None:
    problem = Problem(ctx, kind, ODD[ctx.device.type], site=Site(name=f"poison/0:{kind}"))
    problem.check(problem())
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(8, dtype=torch.bfloat16, device=ctx.device).isnan().all()
        for _ in range(layout.NUM_SLOTS):
            _fill_slots(ctx)
            problem.check(problem())
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kind", TILE_KINDS)
def test_poisoned_buffers(pool: RankPool, kind: str) -> None:
    pool.run(_poisoned, kind)
