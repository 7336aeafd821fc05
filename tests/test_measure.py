"""measure: a strategy that fails on one rank, or is wrong on one, has no time on any; the others are timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ditron_inductor.errors import StrategyUnavailable
from ditron_inductor.report import measure as module
from ditron_inductor.report.measure import SiteShape, Timings, measure
from ditron_inductor.task.node import Node
from ditron_inductor.task.nodes import (
    KINDS,
    ULYSSES_KINDS,
    AllGatherMatmul,
    AllToAllMatmul,
    MatmulAllGather,
    MatmulAllReduce,
    MatmulAllToAll,
    MatmulReduceScatter,
    Policy,
)
from tests.ranks import RankContext, RankPools

GROUP: dict[str, Any] = {"world_size": 2, "group_name": "", "site": "", "policy": Policy()}
# Three dimensions, gathered or scattered inside, and for the gather two weights.
SUM: dict[str, Any] = {"a": [(2, 8, 16)], "b": [(16, 8)]}
CALLS: dict[str, tuple[Node, dict[str, Any]]] = {
    "all_gather_matmul": (
        AllGatherMatmul(1, **GROUP, return_gathered=False, num_weights=2),
        {"shard": (2, 4, 16), "weights": [(16, 8), (16, 6)]},
    ),
    "matmul_reduce_scatter": (MatmulReduceScatter(1, "sum", **GROUP), SUM),
    "matmul_all_reduce": (MatmulAllReduce("sum", **GROUP), SUM),
    "matmul_all_gather": (MatmulAllGather(1, **GROUP), SUM),
    "matmul_all_to_all": (MatmulAllToAll(1, 1, **GROUP), SUM),
    "all_to_all_matmul": (AllToAllMatmul(1, 1, False, **GROUP), {"x": (2, 8, 16), "weight": (32, 8)}),
}
SHAPES = {op: SiteShape(node, shapes, torch.float32) for op, (node, shapes) in CALLS.items()}


def _measure(ctx: RankContext, fault: str) -> tuple[Timings, int]:
    """Times two made-up strategies beside `library`; `tile` has a fault on the last rank alone."""
    faulty = ctx.rank == ctx.world_size - 1
    calls = 0

    def tile(i: int) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if faulty and fault == "raises":
            raise RuntimeError("half way")
        if fault == "unavailable":
            raise StrategyUnavailable(strategy="tile", site="", reason="no peer access", remedy="")
        return torch.full((4,), float("nan") if faulty and fault == "nan" else 1.5 if faulty else 1.0)

    def made_up(*args: Any) -> dict[str, Callable[[int], torch.Tensor]]:
        return {"library": lambda i: torch.ones(4), "chunked": lambda i: torch.ones(4), "tile": tile}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_calls", made_up)
        timings = measure(
            SiteShape.of_matmul("matmul_all_reduce", 4, 8, 16, torch.float32, ctx.world_size),
            group_name=ctx.group_name,
            device=ctx.device,
            rounds=2,
            workspace_limit=1 << 30,
            timeout_s=30.0,
        )
    return timings, calls


@pytest.mark.parametrize(
    ("fault", "note"),
    [
        ("raises", "tile: RuntimeError: half way"),
        ("unavailable", "tile: it cannot run here: no peer access"),
        ("wrong", "tile: its result differs from library's by 5.0e-01"),
        ("nan", "tile: its result differs from library's by nan"),
    ],
)
def test_a_fault_on_one_rank_is_known_to_all(rank_pools: RankPools, fault: str, note: str) -> None:
    results = rank_pools.get("cpu", 2).run(_measure, fault)
    assert results[0] == results[1]
    timings, calls = results[0]
    assert set(timings.us) == {"library", "chunked"} and calls == 1
    assert len(timings.notes) == 1 and timings.notes[0].startswith(note)


def _real(ctx: RankContext, op: str) -> Timings:
    import ditron_inductor.backend  # noqa: F401  (binds the ops)

    shape = SHAPES[op]
    limits = {"workspace_limit": 1 << 30, "timeout_s": 30.0}
    return measure(shape, group_name=ctx.group_name, device=ctx.device, rounds=1, **limits)  # type: ignore[arg-type]


def _sum(ctx: RankContext) -> Timings:
    import ditron_inductor.backend  # noqa: F401  (binds the ops)

    node = MatmulAllReduce("sum", **GROUP, num_products=2, has_bias=True)
    shape = SiteShape(node, {"a": [(8, 16), (8, 8)], "b": [(16, 8), (8, 8)], "bias": (8,)}, torch.float32)
    limits = {"workspace_limit": 1 << 30, "timeout_s": 30.0}
    return measure(shape, group_name=ctx.group_name, device=ctx.device, rounds=1, **limits)  # type: ignore[arg-type]


def test_a_sum_is_timed_with_its_products(rank_pools: RankPools) -> None:
    first, _ = rank_pools.get("cpu", 2).run(_sum)
    assert {"library", "tile"} <= set(first.us) and not first.notes, first.notes


def _finished(ctx: RankContext, shape: SiteShape) -> tuple[Timings, list[str]]:
    """The times, and the texts with which the op was called."""
    import ditron_inductor.backend  # noqa: F401  (binds the ops)
    from ditron_inductor.lowering import epilogues

    texts = []
    with pytest.MonkeyPatch.context() as patch:
        parse = epilogues.epilogue_torch.evaluate
        patch.setattr(
            epilogues.epilogue_torch, "evaluate", lambda one, *args: texts.append(one.text()) or parse(one, *args)
        )
        limits = {"workspace_limit": 1 << 30, "timeout_s": 30.0}
        timings = measure(shape, group_name=ctx.group_name, device=ctx.device, rounds=1, **limits)  # type: ignore[arg-type]
    return timings, texts


GATED, EVERY_KIND = "cast(silu(mm0), bf16) * mm1 + row(x0); mm1", "full(x0) + mm0 * column(x1) + row(x2) + scalar(x3)"
GATED_NODE = AllGatherMatmul(1, **GROUP, return_gathered=False, num_weights=2, num_extras=1, epilogue=GATED)
FINISHED_NODE = MatmulReduceScatter(1, "sum", **GROUP, num_extras=4, epilogue=EVERY_KIND)
FINISHED = (
    SiteShape(GATED_NODE, {"shard": (2, 4, 16), "weights": [(16, 8), (16, 8)], "extras": [(1, 8)]}, torch.float32),
    SiteShape(
        FINISHED_NODE,
        {"a": [(2, 8, 16)], "b": [(16, 8)], "extras": [(8, 8), (8, 1), (1, 8), (1, 1)]},
        torch.float32,
    ),
)


@pytest.mark.parametrize("shape", FINISHED, ids=lambda shape: shape.node.kind)
def test_an_epilogue_is_timed_with_its_op(rank_pools: RankPools, shape: SiteShape) -> None:
    (timings, texts), _ = rank_pools.get("cpu", 2).run(_finished, shape)
    assert {"library", "tile"} <= set(timings.us) and not timings.notes, timings.notes
    # `library` computes it by torch on the CPU.
    assert shape.node.epilogue.partition(";")[0] in texts[0]


@pytest.mark.parametrize("op", [*KINDS, *ULYSSES_KINDS])
def test_every_op_is_timed_in_the_shape_it_has(rank_pools: RankPools, op: str) -> None:
    first, second = rank_pools.get("cpu", 2).run(_real, op)
    assert first == second
    assert {"library", "tile"} <= set(first.us), first.notes
