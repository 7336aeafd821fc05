"""The reductions of what experts return: near the fp64 reference by each strategy, whatever the routing."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.tolerances import assert_near
from ditron_inductor import reset
from ditron_inductor.core.layout import MAX_CHUNKS
from ditron_inductor.errors import DitronTimeout
from ditron_inductor.lowering.expert_sums.reduced_kernel import geometry
from ditron_inductor.task.nodes import GroupedMatmulAllReduce, GroupedMatmulReduceScatter, Policy, ReducedExperts
from tests.lowering.calls import Site
from tests.lowering.test_combine_experts import Case, routed, wanted
from tests.rank_process import RankContext
from tests.ranks import RankPool

BF16 = torch.bfloat16
Kind = type[ReducedExperts]
WHOLE, SCATTERED = GroupedMatmulAllReduce, GroupedMatmulReduceScatter


@dataclass(frozen=True)
class Layer(Case):
    """A Case whose products are those of rows of `k` elements. columns: whether the weights lie column by column, as
    nn.Linear holds them, or row by row. apart: the elements between the matrices of two experts. second: another
    product is added.
    """

    k: int = 40
    columns: bool = True
    apart: int = 0
    second: bool = False

    def __str__(self) -> str:
        facts = "-rows" * (not self.columns) + "-apart" * (self.apart > 0) + "-second" * self.second
        return f"{super().__str__()}-k{self.k}{facts}"


CPU = (
    Layer(21, 3, 5, 96, added=True, scale_dtype=BF16),
    # Two chunks, and rows that blocks do not divide.
    Layer(45, 2, 4, 72, k=64, columns=False),
    Layer(5, 2, 8, 40, routing="one"),
    # Fewer tokens than ranks: some own none.
    Layer(1, 2, 4, 32, added=True, k=8),
    # Each expert has several tiles.
    Layer(72, 2, 2, 72, k=16, columns=False),
    Layer(21, 3, 4, 96, absent=True, added=True),
    Layer(21, 3, 5, 96, biased=True, scale_dtype=BF16, columns=False),
    Layer(40, 2, 8, 72, absent=True, biased=True, added=True),
    # Distances that no 16 bytes divide, so the copy unit cannot load the weights.
    Layer(9, 2, 8, 40, routing="one", biased=True, apart=4),
    Layer(21, 3, 4, 96, routing="elsewhere", absent=True, added=True),
    Layer(45, 2, 4, 72, k=40, columns=False, second=True),
)
CUDA = (
    Layer(1000, 4, 32, 2880, added=True, scale_dtype=BF16, k=360),
    Layer(2048, 8, 128, 2048, k=384),
    Layer(333, 2, 8, 4096, routing="one", k=512, columns=False),
    Layer(1, 2, 8, 1024, added=True, k=128),
    Layer(4097, 2, 8, 1032, k=200),
    Layer(1000, 4, 32, 2048, absent=True, added=True, k=768),
    Layer(1000, 4, 32, 2880, biased=True, scale_dtype=BF16, k=1440, columns=False),
    Layer(1000, 4, 16, 2880, absent=True, biased=True, added=True, k=2880, columns=False),
    Layer(333, 2, 8, 1032, routing="one", biased=True, k=512),
    Layer(1000, 4, 32, 2048, routing="elsewhere", absent=True, added=True, k=768),
    Layer(1000, 4, 32, 2048, k=384, second=True),
)
CPU_SCATTERED = (
    # Three runs for each rank.
    Layer(24, 3, 5, 96, added=True, scale_dtype=BF16),
    Layer(44, 2, 4, 72, k=64, columns=False),
    Layer(12, 2, 8, 40, routing="one"),
    Layer(4, 2, 4, 32, added=True, k=8),
    Layer(80, 2, 2, 72, k=16, columns=False),
    Layer(24, 3, 4, 96, absent=True),
    Layer(24, 3, 5, 96, biased=True, scale_dtype=BF16, columns=False),
    Layer(40, 2, 8, 72, absent=True, biased=True),
    Layer(12, 2, 8, 40, routing="one", biased=True),
    Layer(24, 3, 4, 96, routing="elsewhere", absent=True),
    Layer(44, 2, 4, 72, apart=4, second=True),
)
CUDA_SCATTERED = (
    Layer(1020, 4, 32, 2880, added=True, scale_dtype=BF16, k=360),
    Layer(2048, 8, 128, 2048, k=384),
    Layer(336, 2, 8, 4096, routing="one", k=512, columns=False),
    Layer(4, 2, 8, 1024, added=True, k=128),
    Layer(4092, 2, 8, 1032, k=200),
    Layer(1020, 4, 32, 2048, absent=True, k=768),
    Layer(1020, 4, 32, 2880, biased=True, scale_dtype=BF16, k=1440, columns=False),
    Layer(1020, 4, 16, 2880, absent=True, biased=True, k=2880, columns=False),
    Layer(336, 2, 8, 1032, routing="one", biased=True, k=512),
    Layer(1020, 4, 32, 2048, routing="elsewhere", absent=True, k=768),
    Layer(1020, 4, 32, 2880, added=True, k=720, columns=False, second=True),
)
# Calls of a test, each with a routing of its own; more calls, which take the same slots again, follow each other below.
SEEDS = {"cpu": 2, "cuda": 3}
CASES = {WHOLE: {"cpu": CPU, "cuda": CUDA}, SCATTERED: {"cpu": CPU_SCATTERED, "cuda": CUDA_SCATTERED}}


def given_to(ctx: RankContext, case: Layer, seed: int = 0) -> dict[str, torch.Tensor]:
    """The operands of this rank: each has its own rows and weights, and its own routing."""
    generator = torch.Generator().manual_seed(100 * seed + ctx.rank)

    def draw(*shape: int) -> torch.Tensor:
        """Values whose rows are longer than they show."""
        whole = torch.randn(*shape[:-1], shape[-1] + 8, generator=generator) / 4
        return whole.to(ctx.device, case.dtype)[..., : shape[-1]]

    def weights() -> torch.Tensor:
        shape = (case.experts, case.n, case.k) if case.columns else (case.experts, case.k, case.n)
        lying = torch.randn(case.experts, case.k * case.n + case.apart, generator=generator) / case.k**0.5
        weight = lying.to(ctx.device, case.dtype)[:, : case.k * case.n].view(shape)
        return weight.mT if case.columns else weight

    scale, ids, order = routed(case, generator)
    rows = case.tokens * case.top_k
    return {
        "x": draw(rows, case.k),
        "weight": weights(),
        # Rows of another length lie apart.
        **({"second_x": draw(rows, case.k + 8)[:, : case.k], "second_weight": weights()} if case.second else {}),
        "ends": ids.bincount(minlength=case.experts)[: case.experts].cumsum(0).int().to(ctx.device),
        "places": order.argsort().to(ctx.device),
        "scale": scale.to(ctx.device, case.scale_dtype),
        **({"absent": (ids >= case.experts).to(ctx.device)} if case.absent else {}),
        **({"added": draw(case.tokens, case.n)} if case.added else {}),
        **({"bias": draw(case.experts, case.n)} if case.biased else {}),
    }


def products_of(case: Layer, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The products of all slots, in fp64 and rounded, with the biases of their experts, and rounded again."""
    x, weight, ends = (given[name] for name in ("x", "weight", "ends"))
    made = torch.zeros(len(x), case.n, dtype=torch.float64, device=x.device)
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        made[begin:end] = x[begin:end].double() @ weight[expert].double()
        if case.second:
            made[begin:end] += given["second_x"][begin:end].double() @ given["second_weight"][expert].double()
        if case.biased:
            made[begin:end] = made[begin:end].to(case.dtype) + given["bias"][expert]
        begin = end
    return made.to(case.dtype)


def reduced(ctx: RankContext, kind: Kind, case: Layer, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The result in fp64, of sums that are rounded before they are sent."""
    optional = given.get("absent"), given.get("added")
    own = wanted(case, products_of(case, given), given["places"], given["scale"], *optional)
    total = own.to(case.dtype).double()
    dist.all_reduce(total)
    total = total / ctx.world_size if case.routing == "one" else total
    if kind is WHOLE:
        return total
    return total.unflatten(0, (outer_of(case), ctx.world_size, -1))[:, ctx.rank].flatten(0, 1)


def outer_of(case: Layer) -> int:
    """The runs that a rank's tokens are."""
    return 3 if case.tokens % 12 == 0 else 1


def fields_of(kind: Kind, case: Layer) -> dict[str, object]:
    reduce_op = "avg" if case.routing == "one" else "sum"
    optional = {"has_added": case.added, "has_absent": case.absent, "has_bias": case.biased}
    optional["has_second"] = case.second
    found: dict[str, object] = {"reduce_op": reduce_op, "top_k": case.top_k, **optional}
    return found if kind is WHOLE else found | {"outer": outer_of(case)}


def call(
    ctx: RankContext, kind: Kind, case: Layer, strategy: str, given: dict[str, torch.Tensor], name: str = ""
) -> torch.Tensor:
    site = Site(name=f"experts/{kind.kind}/{case}:{strategy}{name}", strategy=strategy)
    (out,) = site.call(ctx, kind, fields_of(kind, case), **given)
    return out


def near_the_reference(ctx: RankContext, kind: Kind, case: Layer, strategy: str) -> None:
    for seed in range(SEEDS[ctx.device.type]):
        given = given_to(ctx, case, seed)
        out = call(ctx, kind, case, strategy, given)
        assert_near(out, reduced(ctx, kind, case, given), num_partials=ctx.world_size)
        if kind is WHOLE:
            of_all = [torch.empty_like(out) for _ in range(ctx.world_size)]
            dist.all_gather(of_all, out)
            assert all(torch.equal(other, out) for other in of_all), "equal bits on all ranks"


@pytest.mark.parametrize("strategy", ["tile", "library"])
@pytest.mark.parametrize("layer", range(len(CPU)))
@pytest.mark.parametrize("kind", [WHOLE, SCATTERED], ids=lambda kind: kind.kind)
def test_near_the_reference(pool: RankPool, kind: Kind, layer: int, strategy: str) -> None:
    pool.run(near_the_reference, kind, CASES[kind][pool.device_type][layer], strategy)


def with_products(ctx: RankContext, kind: Kind, strategy: str, layer: int) -> None:
    """The products are returned too, in calls that are repeated."""
    case = CASES[kind][ctx.device.type][layer]
    fields = fields_of(kind, case) | {"returns_products": True}
    site = Site(name=f"experts/{kind.kind}/{layer}:{strategy} kept", strategy=strategy)
    for seed in range(SEEDS[ctx.device.type]):
        given = given_to(ctx, case, seed)
        out, products = site.call(ctx, kind, fields, **given)
        assert_near(out, reduced(ctx, kind, case, given), num_partials=ctx.world_size)
        here = ~given["absent"] if case.absent else slice(None)
        assert_near(products[here], products_of(case, given)[here].double())


@pytest.mark.parametrize("strategy", ["tile", "library"])
@pytest.mark.parametrize("layer", [0, 6, 7], ids=["plain", "biased", "absent"])
@pytest.mark.parametrize("kind", [WHOLE, SCATTERED], ids=lambda kind: kind.kind)
def test_products_may_be_returned(pool: RankPool, kind: Kind, strategy: str, layer: int) -> None:
    pool.run(with_products, kind, strategy, layer)


def other_layouts(ctx: RankContext, kind: Kind) -> None:
    """One rank has operands that the kernel cannot read as they lie. It takes part all the same."""
    case = CASES[kind][ctx.device.type][1]
    given = given_to(ctx, case)
    if ctx.rank == 1:
        given["x"] = given["x"].mT.contiguous().mT
        given["ends"] = given["ends"].repeat_interleave(2)[::2]
    out = call(ctx, kind, case, "tile", given, name=" across")
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
    for number in range(5 if ctx.device.type == "cpu" else 200):
        if ctx.rank == late and number < 3:
            time.sleep(0.05)
        outs.append(call(ctx, kind, case, "tile", inputs[number % 2], name=" often"))
    for number, out in enumerate(outs):
        assert_near(out, expected[number % 2], num_partials=ctx.world_size)


@pytest.mark.parametrize("kind", [WHOLE, SCATTERED], ids=lambda kind: kind.kind)
def test_a_late_rank_and_calls_back_to_back(pool: RankPool, kind: Kind) -> None:
    pool.run(late_and_often, kind, 1)


def one_rank_does_not_come(ctx: RankContext) -> str:
    """The error of rank 0 while its peers do nothing. After a reset all go on."""
    case = CASES[WHOLE][ctx.device.type][1]
    given = given_to(ctx, case)
    site = Site(name="experts/alone", strategy="tile", timeout_s=2.0)
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
    assert "grouped_matmul_all_reduce" in message or "experts/alone" in message
    assert "rank" in message


def captured(ctx: RankContext, kind: Kind) -> None:
    case = CASES[kind][ctx.device.type][1]
    given = given_to(ctx, case)
    call(ctx, kind, case, "tile", given, name=" captured")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(ctx, kind, case, "tile", given, name=" captured")
    for seed in range(1, 4):
        for name, value in given_to(ctx, case, seed).items():
            given[name].copy_(value)
        graph.replay()
        assert_near(out, reduced(ctx, kind, case, given), num_partials=ctx.world_size)


@pytest.mark.parametrize("kind", [WHOLE, SCATTERED], ids=lambda kind: kind.kind)
def test_a_replay_takes_other_routing(gpu_pool: RankPool, kind: Kind) -> None:
    gpu_pool.run(captured, kind)


@pytest.mark.parametrize(("kind", "rows"), [(WHOLE, 2), (SCATTERED, 1)])
def test_chunks_have_flags(kind: Kind, rows: int) -> None:
    """Of wide sums the chunks are wider."""
    made: Any = kind
    node = made("sum", 1, 2, "", "", Policy("tile"))
    launch: Any = SimpleNamespace(
        interpreted=True, workspace=SimpleNamespace(capabilities=SimpleNamespace(arch="interpreter"))
    )
    for columns, block in ((1, 64), (64 * 512, 64), (64 * 512 * 4, 128 * rows), (64 * 512 * 4 + 1, 256 * rows)):
        found = geometry(node, launch, torch.empty(4, 8), columns)
        assert found.block == block and rows * -(-columns // found.block) <= MAX_CHUNKS.value
