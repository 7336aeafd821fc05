"""The reductions of what experts return: near the fp64 reference by each strategy, whatever the routing."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from benchmarks.tolerances import assert_near
from ditron_inductor import reset
from ditron_inductor.errors import DitronTimeout
from ditron_inductor.task.nodes import CombineExpertsAllReduce, CombineExpertsReduceScatter, ReducedExperts
from tests.lowering.calls import Site
from tests.lowering.test_combine_experts import Case, operands, wanted
from tests.rank_process import RankContext
from tests.ranks import RankPool

BF16 = torch.bfloat16
Kind = type[ReducedExperts]
WHOLE, SCATTERED = CombineExpertsAllReduce, CombineExpertsReduceScatter
CPU = (
    Case(21, 3, 5, 96, added=True, scale_dtype=BF16),
    # Two parts, whose last run is shorter.
    Case(45, 2, 4, 64),
    Case(5, 2, 8, 40, routing="one", dtype=torch.float16),
    # Fewer tokens than ranks: some own none.
    Case(1, 2, 4, 32, added=True, dtype=torch.float32),
)
CUDA = (
    Case(1000, 4, 32, 2880, added=True, scale_dtype=BF16),
    Case(2048, 8, 128, 2048),
    Case(333, 2, 8, 4096, routing="one", dtype=torch.float16),
    Case(1, 2, 8, 1024, added=True),
    Case(4097, 2, 8, 1032),
)
CPU_SCATTERED = (
    # Three runs for each rank.
    Case(24, 3, 5, 96, added=True, scale_dtype=BF16),
    Case(44, 2, 4, 64),
    Case(12, 2, 8, 40, routing="one", dtype=torch.float16),
    Case(4, 2, 4, 32, added=True, dtype=torch.float32),
)
CUDA_SCATTERED = (
    Case(1020, 4, 32, 2880, added=True, scale_dtype=BF16),
    Case(2048, 8, 128, 2048),
    Case(336, 2, 8, 4096, routing="one", dtype=torch.float16),
    Case(4, 2, 8, 1024, added=True),
    Case(4092, 2, 8, 1032),
)
CASES = {WHOLE: {"cpu": CPU, "cuda": CUDA}, SCATTERED: {"cpu": CPU_SCATTERED, "cuda": CUDA_SCATTERED}}


def given_to(ctx: RankContext, case: Case, seed: int = 0) -> dict[str, torch.Tensor]:
    """The operands of this rank: each has its own products and its own routing."""
    names = ("products", "places", "scale", "added")
    found = operands(case, ctx.device, 100 * seed + ctx.rank)
    return {name: tensor for name, tensor in zip(names, found, strict=True) if tensor is not None}


def reduced(ctx: RankContext, kind: Kind, case: Case, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The result in fp64, of sums that are rounded before they are sent."""
    own = wanted(case, given["products"], given["places"], given["scale"], given.get("added"))
    total = own.to(case.dtype).double()
    dist.all_reduce(total)
    total = total / ctx.world_size if case.routing == "one" else total
    if kind is WHOLE:
        return total
    return total.unflatten(0, (outer_of(case), ctx.world_size, -1))[:, ctx.rank].flatten(0, 1)


def outer_of(case: Case) -> int:
    """The runs that a rank's tokens are."""
    return 3 if case.tokens % 12 == 0 else 1


def fields_of(kind: Kind, case: Case) -> dict[str, object]:
    reduce_op = "avg" if case.routing == "one" else "sum"
    found: dict[str, object] = {"reduce_op": reduce_op, "top_k": case.top_k, "has_added": case.added}
    return found if kind is WHOLE else found | {"outer": outer_of(case)}


def call(
    ctx: RankContext, kind: Kind, case: Case, strategy: str, given: dict[str, torch.Tensor], name: str = ""
) -> torch.Tensor:
    site = Site(name=f"experts/{kind.kind}/{case}:{strategy}{name}", strategy=strategy)
    (out,) = site.call(ctx, kind, fields_of(kind, case), **given)
    return out


def near_the_reference(ctx: RankContext, kind: Kind, case: Case, strategy: str) -> None:
    for seed in range(3):
        given = given_to(ctx, case, seed)
        out = call(ctx, kind, case, strategy, given)
        assert_near(out, reduced(ctx, kind, case, given), num_partials=ctx.world_size)
        if kind is WHOLE:
            of_all = [torch.empty_like(out) for _ in range(ctx.world_size)]
            dist.all_gather(of_all, out)
            assert all(torch.equal(other, out) for other in of_all), "equal bits on all ranks"


@pytest.mark.parametrize("strategy", ["chunked", "library"])
@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("kind", [WHOLE, SCATTERED], ids=lambda kind: kind.kind)
def test_near_the_reference(pool: RankPool, kind: Kind, index: int, strategy: str) -> None:
    if index >= len(CASES[kind][pool.device_type]):
        pytest.skip("a case of GPUs")
    pool.run(near_the_reference, kind, CASES[kind][pool.device_type][index], strategy)


def other_layouts(ctx: RankContext, kind: Kind) -> None:
    """One rank has products of which the kernel cannot read the rows. It takes part all the same."""
    case = CASES[kind][ctx.device.type][1]
    given = given_to(ctx, case)
    if ctx.rank == 1:
        given["products"] = given["products"].mT.contiguous().mT
    out = call(ctx, kind, case, "chunked", given, name=" across")
    assert_near(out, reduced(ctx, kind, case, given), num_partials=ctx.world_size)


@pytest.mark.parametrize("kind", [WHOLE, SCATTERED], ids=lambda kind: kind.kind)
def test_a_rank_with_another_layout_takes_part(pool: RankPool, kind: Kind) -> None:
    pool.run(other_layouts, kind)


def late_and_often(ctx: RankContext, kind: Kind, late: int) -> None:
    """Calls back to back, one rank of which begins each of the first ones late, without a wait in between."""
    case = CASES[kind][ctx.device.type][0]
    inputs = [given_to(ctx, case, seed) for seed in range(2)]
    expected = [reduced(ctx, kind, case, given) for given in inputs]
    dist.barrier()
    outs = []
    for number in range(12 if ctx.device.type == "cpu" else 200):
        if ctx.rank == late and number < 3:
            time.sleep(0.05)
        outs.append(call(ctx, kind, case, "chunked", inputs[number % 2], name=" often"))
    for number, out in enumerate(outs):
        assert_near(out, expected[number % 2], num_partials=ctx.world_size)


@pytest.mark.parametrize("kind", [WHOLE, SCATTERED], ids=lambda kind: kind.kind)
def test_a_late_rank_and_calls_back_to_back(pool: RankPool, kind: Kind) -> None:
    pool.run(late_and_often, kind, 1)


def one_rank_does_not_come(ctx: RankContext) -> str:
    """The error of rank 0 while its peers do nothing. After a reset all go on."""
    case = CASES[WHOLE][ctx.device.type][1]
    given = given_to(ctx, case)
    site = Site(name="experts/alone", strategy="chunked", timeout_s=2.0)
    fields = fields_of(WHOLE, case)
    site.call(ctx, WHOLE, fields, **given)
    dist.barrier()
    message = ""
    if ctx.rank == 0:
        with pytest.raises(DitronTimeout) as error:
            # On a GPU the next call raises.
            for _ in range(20):
                site.call(ctx, WHOLE, fields, **given)
                time.sleep(1.0)
        message = str(error.value)
    dist.barrier()
    reset()
    (out,) = site.call(ctx, WHOLE, fields, **given)
    assert_near(out, reduced(ctx, WHOLE, case, given), num_partials=ctx.world_size)
    return message


def test_a_rank_that_does_not_come_is_named(fragile_pool: RankPool) -> None:
    message, *_ = fragile_pool.run(one_rank_does_not_come)
    assert "combine_experts_all_reduce" in message or "experts/alone" in message
    assert "rank" in message


def captured(ctx: RankContext, kind: Kind) -> None:
    case = CASES[kind][ctx.device.type][1]
    given = given_to(ctx, case)
    call(ctx, kind, case, "chunked", given, name=" captured")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(ctx, kind, case, "chunked", given, name=" captured")
    for seed in range(1, 4):
        for name, value in given_to(ctx, case, seed).items():
            given[name].copy_(value)
        graph.replay()
        assert_near(out, reduced(ctx, kind, case, given), num_partials=ctx.world_size)


@pytest.mark.parametrize("kind", [WHOLE, SCATTERED], ids=lambda kind: kind.kind)
def test_a_replay_takes_other_routing(gpu_pool: RankPool, kind: Kind) -> None:
    gpu_pool.run(captured, kind)
