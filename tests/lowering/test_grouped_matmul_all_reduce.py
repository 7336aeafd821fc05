"""grouped_matmul_all_reduce: near the fp64 reference by each strategy, whatever the routing, again and again."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from benchmarks.tolerances import assert_near
from ditron_inductor import reset
from ditron_inductor.errors import DitronTimeout
from ditron_inductor.lowering.grouped_matmul_all_reduce import combine
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import GroupedMatmulAllReduce
from tests.lowering.calls import Site
from tests.rank_process import RankContext
from tests.ranks import RankPool


@dataclass(frozen=True)
class Case:
    """`tokens` that take `top_k` of `experts` with weights [k, n].

    routing: `random`; `one`, where all tokens take the same experts; or `few`, where half of the experts have no slot.
    """

    tokens: int
    top_k: int
    experts: int
    k: int
    n: int
    routing: str = "random"
    added: bool = False
    scale_dtype: torch.dtype = torch.float32
    reduce_op: str = "sum"

    def __str__(self) -> str:
        name = f"{self.tokens}x{self.top_k}of{self.experts}-{self.k}-{self.n}-{self.routing}-{self.reduce_op}"
        return name + f"-{str(self.scale_dtype)[6:]}" + "-added" * self.added


CASES = {
    "cpu": (
        Case(21, 3, 5, 24, 96, routing="few", added=True, scale_dtype=torch.bfloat16),
        Case(24, 2, 4, 32, 64),
        Case(5, 2, 8, 16, 40, routing="one", reduce_op="avg"),
        # Fewer tokens than ranks: some own none.
        Case(1, 2, 4, 16, 32, added=True),
    ),
    "cuda": (
        Case(1000, 4, 32, 1440, 2880, routing="few", added=True, scale_dtype=torch.bfloat16),
        Case(2048, 8, 128, 384, 2048),
        Case(333, 2, 8, 1792, 4096, routing="one", reduce_op="avg"),
        Case(1, 2, 8, 512, 1024, added=True),
        Case(4097, 2, 8, 512, 1032),
    ),
}


def operands(ctx: RankContext, case: Case, seed: int = 0) -> dict[str, torch.Tensor]:
    """Routing is the same on all ranks; rows, weights and what is added are not."""
    shared = torch.Generator().manual_seed(seed)
    own = torch.Generator().manual_seed(100 * seed + ctx.rank + 1)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=own) * scale).to(ctx.device, torch.bfloat16)

    scores = torch.rand(case.tokens, case.experts, generator=shared)
    if case.routing == "one":
        scores = scores[:1].expand_as(scores)
    if case.routing == "few":
        scores = scores[:, : max(case.top_k, case.experts // 2)]
    weights, chosen = scores.topk(case.top_k)
    _, order = chosen.reshape(-1).sort()
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    counts = torch.bincount(chosen.reshape(-1), minlength=case.experts)
    S = case.tokens * case.top_k
    given = {
        "x": draw(S, case.k, scale=0.25),
        "weight": draw(case.experts, case.n, case.k, scale=case.k**-0.5).mT,
        "ends": counts.cumsum(0).to(ctx.device, torch.int32),
        "places": places.to(ctx.device),
        "scale": weights.reshape(-1)[order].to(ctx.device, case.scale_dtype),
    }
    return given | ({"added": draw(case.tokens, case.n, scale=0.25)} if case.added else {})


def wanted(ctx: RankContext, case: Case, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The result in fp64, from products in bf16, as both strategies round them."""
    x, weight, ends = given["x"].double(), given["weight"], given["ends"].tolist()
    begins = [0, *ends[:-1]]
    products = [x[begins[i] : ends[i]] @ weight[i].double() for i in range(case.experts)]
    rounded = torch.cat(products).bfloat16().double()
    added = given["added"].double() if case.added else None
    total = reference.combined(rounded, given["places"], given["scale"].double(), added, case.top_k)
    dist.all_reduce(total)
    return total / ctx.world_size if case.reduce_op == "avg" else total


def call(ctx: RankContext, case: Case, strategy: str, given: dict[str, torch.Tensor], name: str = "") -> torch.Tensor:
    site = Site(name=f"grouped/{list(CASES[ctx.device.type]).index(case)}:{strategy}{name}", strategy=strategy)
    fields = {"reduce_op": case.reduce_op, "top_k": case.top_k, "has_added": case.added}
    (out,) = site.call(ctx, GroupedMatmulAllReduce, fields, **given)
    return out


def near_the_reference(ctx: RankContext, index: int, strategy: str) -> None:
    case = CASES[ctx.device.type][index]
    for seed in range(3):
        given = operands(ctx, case, seed)
        out = call(ctx, case, strategy, given)
        assert_near(out, wanted(ctx, case, given), num_partials=ctx.world_size)
        of_all = [torch.empty_like(out) for _ in range(ctx.world_size)]
        dist.all_gather(of_all, out)
        assert all(torch.equal(other, out) for other in of_all), "equal bits on all ranks"


@pytest.mark.parametrize("strategy", ["chunked", "library"])
@pytest.mark.parametrize("case", range(5))
def test_near_the_reference(pool: RankPool, case: int, strategy: str) -> None:
    if case >= len(CASES[pool.device_type]):
        pytest.skip("a case of GPUs")
    pool.run(near_the_reference, case, strategy)


def late_and_often(ctx: RankContext, late: int) -> None:
    """Calls back to back, one rank of which begins each of the first ones late, without a wait in between."""
    case = CASES[ctx.device.type][0]
    inputs = [operands(ctx, case, seed) for seed in range(2)]
    expected = [wanted(ctx, case, given) for given in inputs]
    dist.barrier()
    outs = []
    for number in range(12 if ctx.device.type == "cpu" else 200):
        if ctx.rank == late and number < 3:
            time.sleep(0.05)
        outs.append(call(ctx, case, "chunked", inputs[number % 2], name=" often"))
    for number, out in enumerate(outs):
        assert_near(out, expected[number % 2], num_partials=ctx.world_size)


def test_a_late_rank_and_calls_back_to_back(pool: RankPool) -> None:
    pool.run(late_and_often, 1)


def one_rank_does_not_come(ctx: RankContext) -> str:
    """The error of rank 0 while its peers do nothing. After a reset all go on."""
    case = CASES[ctx.device.type][1]
    given = operands(ctx, case)
    site = Site(name="grouped/alone", strategy="chunked", timeout_s=2.0)
    fields = {"reduce_op": case.reduce_op, "top_k": case.top_k}
    site.call(ctx, GroupedMatmulAllReduce, fields, **given)
    dist.barrier()
    message = ""
    if ctx.rank == 0:
        with pytest.raises(DitronTimeout) as error:
            # On a GPU the next call raises.
            for _ in range(20):
                site.call(ctx, GroupedMatmulAllReduce, fields, **given)
                time.sleep(1.0)
        message = str(error.value)
    dist.barrier()
    reset()
    (out,) = site.call(ctx, GroupedMatmulAllReduce, fields, **given)
    assert_near(out, wanted(ctx, case, given), num_partials=ctx.world_size)
    return message


def test_a_rank_that_does_not_come_is_named(fragile_pool: RankPool) -> None:
    message, *_ = fragile_pool.run(one_rank_does_not_come)
    assert "grouped_matmul_all_reduce" in message or "grouped/alone" in message
    assert "rank" in message


def captured(ctx: RankContext) -> None:
    case = CASES[ctx.device.type][1]
    given = operands(ctx, case)
    call(ctx, case, "chunked", given, name=" captured")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(ctx, case, "chunked", given, name=" captured")
    for seed in range(1, 4):
        for name, value in operands(ctx, case, seed).items():
            given[name].copy_(value)
        graph.replay()
        assert_near(out, wanted(ctx, case, given), num_partials=ctx.world_size)


def test_a_replay_takes_other_routing(gpu_pool: RankPool) -> None:
    gpu_pool.run(captured)


def sums_of_a_run(ctx: RankContext, first: int) -> None:
    """Some of the tokens, of products whose rows are longer than they show."""
    node = Site().node(ctx, GroupedMatmulAllReduce, reduce_op="sum", top_k=3, has_added=True)
    torch.manual_seed(0)
    products = (torch.randn(24, 50) / 4).to(ctx.device, torch.bfloat16)[:, :40]
    added = (torch.randn(8, 60) / 4).to(ctx.device, torch.bfloat16)[:, 20:]
    places, scale = torch.randperm(24).to(ctx.device), torch.rand(24).to(ctx.device)
    out = torch.full((5, 40), float("nan"), device=ctx.device, dtype=torch.bfloat16)
    combine.Combiner(node, 40, products.device)(products, places, scale, added, first, out)
    expected = reference.combined(products.double(), places, scale.double(), added.double(), 3)
    assert_near(out, expected[first : first + 5])


@pytest.mark.parametrize("first", [0, 3])
def test_sums_of_a_run_of_tokens(pool: RankPool, first: int) -> None:
    pool.run(sums_of_a_run, first)
