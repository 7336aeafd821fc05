"""all_reduce_rms_norm of what the experts of each token return: near the fp64 reference, the same bits on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.tolerances import assert_near
from ditron_inductor.core.layout import IN_BAND_USES
from ditron_inductor.device import workspaces
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import EXTRAS, AllReduceRmsNorm, Norm
from tests.lowering import calls
from tests.lowering.calls import Site
from tests.lowering.stress import delay
from tests.rank_process import RankContext
from tests.ranks import RankPool

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NORM = Norm("rms", 1e-6, round_first=True)


@dataclass(frozen=True)
class Case:
    """T tokens take `top_k` experts each, which return rows of N elements. in_band: whether they are sent in band."""

    T: int
    top_k: int
    N: int
    dtype: torch.dtype = FP16
    factor_dtype: torch.dtype = FP32
    added: bool = False
    reduce_op: str = "sum"
    in_band: bool = True


CPU = (
    Case(1, 3, 34),
    Case(4, 2, 26, factor_dtype=FP16, added=True),
    Case(3, 5, 18, FP32, reduce_op="avg"),
    Case(2, 1, 34, FP32, added=True),
    # Rows in half words, and too many bytes.
    Case(3, 2, 37, added=True, in_band=False),
    Case(7, 3, 64, in_band=False),
)
CUDA = (
    Case(1, 8, 2048, BF16),
    Case(8, 8, 4096, BF16, BF16),
    Case(32, 8, 2048, BF16),
    Case(31, 4, 2880, FP16, added=True),
    Case(5, 10, 1024, FP32, reduce_op="avg", added=True),
    Case(3, 6, 1333, BF16, in_band=False),
    Case(64, 8, 7168, BF16, added=True, in_band=False),
)
CASES = {"cpu": CPU, "cuda": CUDA}


def given_to(ctx: RankContext, case: Case, seed: int = 0) -> dict[str, torch.Tensor]:
    """The operands of a call: the residual and the weight of the norm are those of all ranks."""
    torch.manual_seed(10 * seed)
    residual, weight = torch.randn(case.T, case.N), torch.rand(case.N) + 0.5
    torch.manual_seed(10 * seed + 1 + ctx.rank)
    factors = torch.rand(case.T, case.top_k).softmax(-1).flatten()
    found = {"x": torch.randn(case.T * case.top_k, case.N), "residual": residual, "weight": weight}
    found |= {"added": torch.randn(case.T, case.N)} if case.added else {}
    moved = {name: one.to(ctx.device, case.dtype) for name, one in found.items()}
    return {**moved, "factors": factors.to(ctx.device, case.factor_dtype)}


def call(ctx: RankContext, case: Case, given: dict[str, torch.Tensor], strategy: str, name: str) -> list[torch.Tensor]:
    """Returns [normed, total]."""
    fields: dict[str, Any] = {"reduce_op": case.reduce_op, "norm": NORM, "extras": ("residual", "weight")}
    fields |= {"top_k": case.top_k, "has_added": case.added}
    return Site(f"{name}:{case}".replace("/", " "), strategy).call(ctx, AllReduceRmsNorm, fields, **given)


def wanted(ctx: RankContext, case: Case, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """[normed, total] in fp64. Collective."""
    slots = given["x"].double() * given["factors"].double()[:, None]
    total = slots.view(case.T, case.top_k, case.N).sum(1)
    total = total + given["added"].double() if case.added else total
    dist.all_reduce(total)
    total = total / ctx.world_size if case.reduce_op == "avg" else total
    extras = [given[name].double() if name in ("residual", "weight") else None for name in EXTRAS]
    return list(reference.add_norm(total, extras, Norm("rms", NORM.eps)))


def assert_right(ctx: RankContext, case: Case, found: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for out, want in zip(found, right, strict=True):
        assert out.dtype == case.dtype and out.shape == (case.T, case.N) and out.is_contiguous()
        assert_near(out, want, num_partials=4, what=str(case))
        calls.assert_replicated(ctx, out)


def uses_in_band(ctx: RankContext) -> int:
    (shared,) = workspaces.of_group(dist.distributed_c10d._resolve_process_group(ctx.group_name))
    return int(shared.generations[-1].ctl[IN_BAND_USES.value])


def near_the_reference(ctx: RankContext, case: Case, strategy: str) -> None:
    for seed in range(3):
        given = given_to(ctx, case, seed)
        before = {name: one.clone() for name, one in given.items()}
        assert_right(ctx, case, call(ctx, case, given, strategy, f"near/{strategy}"), wanted(ctx, case, given))
        assert all(torch.equal(one, before[name]) for name, one in given.items()), "an operand changed"
    if strategy == "tile":
        count = uses_in_band(ctx)
        call(ctx, case, given, strategy, f"near/{strategy}")
        assert uses_in_band(ctx) - count == case.in_band, (uses_in_band(ctx), count)


@pytest.mark.parametrize("strategy", ["tile", "library"])
@pytest.mark.parametrize("number", range(len(CUDA)))
def test_near_the_reference(pool: RankPool, number: int, strategy: str) -> None:
    cases = CASES[pool.device_type]
    if number >= len(cases):
        pytest.skip("there are fewer cases here")
    pool.run(near_the_reference, cases[number], strategy)


def other_layouts(ctx: RankContext) -> None:
    """One rank has operands that lie in another way, or begin in the middle of a word. It takes part all the same."""
    case = CASES[ctx.device.type][1]
    given = given_to(ctx, case)
    if ctx.rank == 1:
        given["factors"] = given["factors"].repeat_interleave(2)[::2]
        given["x"] = given["x"].mT.contiguous().mT
    right = wanted(ctx, case, given)
    assert_right(ctx, case, call(ctx, case, given, "tile", "layouts/0"), right)
    if ctx.rank == 0:
        for name in ("x", *("added",) * case.added):
            whole = torch.empty(given[name].numel() + 1, dtype=case.dtype, device=ctx.device)
            given[name] = whole[1:].copy_(given[name].flatten()).view_as(given[name])
    assert_right(ctx, case, call(ctx, case, given, "tile", "layouts/0"), right)


def test_a_rank_with_another_layout_takes_part(pool: RankPool) -> None:
    pool.run(other_layouts)


def plain_peer(ctx: RankContext) -> None:
    """One rank has added up the products before: what is sent is the same."""
    case = CASES[ctx.device.type][0]
    given = given_to(ctx, case)
    right = wanted(ctx, case, given)
    if ctx.rank == 1:
        slots = given["x"].float() * given["factors"].float()[:, None]
        given["x"] = slots.view(case.T, case.top_k, case.N).sum(1).to(case.dtype)
        del given["factors"]
        fields: dict[str, Any] = {"reduce_op": "sum", "norm": NORM, "extras": ("residual", "weight")}
        outs = Site("peer/0", "tile").call(ctx, AllReduceRmsNorm, fields, **given)
    else:
        fields = {"reduce_op": "sum", "norm": NORM, "extras": ("residual", "weight"), "top_k": case.top_k}
        outs = Site("peer/0", "tile").call(ctx, AllReduceRmsNorm, fields, **given)
    assert_right(ctx, case, outs, right)


def test_a_peer_that_has_no_experts_takes_part(pool: RankPool) -> None:
    pool.run(plain_peer)


def late_and_often(ctx: RankContext, number: int) -> None:
    """Calls back to back, one rank of which begins some of them late, without a wait in between."""
    case = CASES[ctx.device.type][number]
    inputs = [given_to(ctx, case, seed) for seed in range(2)]
    right = [wanted(ctx, case, given) for given in inputs]
    dist.barrier()
    outs = []
    for turn in range(7 if ctx.device.type == "cpu" else 300):
        if ctx.rank == 1 and turn < 3:
            delay(ctx, 20.0)
        outs.append(call(ctx, case, inputs[turn % 2], "tile", "often/0"))
    for turn, found in enumerate(outs):
        assert_near(found[0], right[turn % 2][0], num_partials=4)
        assert all(torch.equal(out, first) for out, first in zip(found, outs[turn % 2], strict=True)), "the same bits"


@pytest.mark.parametrize("number", [1, 4])
def test_a_late_rank_and_calls_back_to_back(pool: RankPool, number: int) -> None:
    pool.run(late_and_often, number)


def replayed(ctx: RankContext) -> None:
    """A captured call reads what its operands hold when it is replayed."""
    for number in (0, 2, 3):
        case = CUDA[number]
        held = given_to(ctx, case)
        call(ctx, case, held, "tile", "replayed/0")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [call(ctx, case, held, "tile", "replayed/0") for _ in range(3)][-1]
        for seed in range(1, 40):
            given = given_to(ctx, case, seed)
            for name, one in given.items():
                held[name].copy_(one)
            graph.replay()
            assert_right(ctx, case, outs, wanted(ctx, case, given))


def test_replayed_in_a_graph(gpu_pool: RankPool) -> None:
    gpu_pool.run(replayed)
