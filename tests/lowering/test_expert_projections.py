"""expert_projections: near the fp64 reference by the kernel and by the library, with and without an epilogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from benchmarks.tolerances import assert_near
from ditron_inductor.lowering.config import FEW_ROWS
from ditron_inductor.lowering.expert_projections import experts_kernel as lowering
from ditron_inductor.lowering.expert_projections import slot_order
from ditron_inductor.task.epilogue import parse
from ditron_inductor.task.epilogue_torch import evaluate, without_tables
from ditron_inductor.task.nodes import MOST_ORDERED_TOKENS, ExpertProjections
from tests.cases import rare
from tests.lowering.assembly import dialect_of, resources
from tests.lowering.cross_compile import NUM_WEIGHTS, compile_case
from tests.lowering.cross_compile import Case as Compilation
from tests.rank_process import RankContext
from tests.ranks import RankPools

SWIGLU = "cast(silu(mm0), bf16) * mm1"
GATE = "cast(minimum(cast(mm0 + even(x0), bf16), 0.5), bf16)"
CLAMPED = f"cast(maximum(cast(mm1 + odd(x1), bf16), -0.5) + 1.0, bf16) * cast({GATE} * sigmoid({GATE} * 1.702), bf16)"
"""As GPT-OSS has it."""


@dataclass(frozen=True)
class Case:
    """`tokens` that take `top_k` of `experts`, whose weights are [k, n] for each of `columns`.

    routing: `random`; `one`, where all tokens take the same experts; `apart`, where as few as possible share one; or
    `elsewhere`, where they take none of these.
    absent: half of the experts that tokens take are elsewhere. across: the columns of the weights are contiguous.
    interleaved: two weights lie column by column in one.
    """

    tokens: int
    top_k: int
    experts: int
    k: int
    columns: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    epilogue: str = ""
    by_token: bool = True
    routing: str = "random"
    absent: bool = False
    across: bool = False
    interleaved: bool = False

    def __str__(self) -> str:
        widths = "-".join(map(str, self.columns))
        name = f"{self.tokens}x{self.top_k}of{self.experts}-{self.k}-{widths}-{str(self.dtype)[6:]}-{self.routing}"
        optional = "-absent" * self.absent + "-across" * self.across + "-interleaved" * self.interleaved
        return name + "-epilogue" * bool(self.epilogue) + "-slots" * (not self.by_token) + optional


CASES = (
    # Fewer slots than experts: a program for each slot.
    Case(1, 2, 8, 64, (32, 16)),
    # One token, whose rows are multiplied without tensor cores.
    Case(1, 3, 8, 41, (33, 17), torch.float16),
    Case(1, 4, 3 + 4, 64, (48, 48), epilogue=SWIGLU, absent=True),
    Case(1, 5, 4 + 5, 48, (20, 20), epilogue="mm0 * column(x0); mm1 + full(x1)", by_token=False),
    Case(1, 2, 4, 32, (24, 24), epilogue=CLAMPED, absent=True, interleaved=True),
    Case(3, 2, 8, 70, (33, 17), torch.float16),
    # More slots than experts, some of which nobody takes.
    Case(17, 3, 7, 41, (40,), torch.float32),
    Case(9, 2, 8, 48, (48, 48), epilogue=SWIGLU),
    Case(5, 4, 6, 33, (50, 50, 17), epilogue=f"{SWIGLU}; mm2 + row(x0)"),
    Case(2, 3, 16, 64, (48, 48), epilogue=SWIGLU, routing="one"),
    Case(64, 2, 4, 32, (16,), routing="one"),
    Case(4, 2, 8, 32, (40,), routing="apart"),
    Case(6, 1, 9, 32, (40,), by_token=False),
    Case(5, 3, 4, 64, (24,), by_token=False),
    Case(4, 2, 8, 40, (20, 20), epilogue="mm0 * column(x0); mm1 + full(x1)", by_token=False),
    # Fewer slots than experts and more, some of them elsewhere.
    Case(3, 2, 8, 70, (33, 17), absent=True),
    Case(9, 3, 4, 48, (48, 48), epilogue=SWIGLU, absent=True, across=True),
    Case(7, 2, 3, 33, (40,), by_token=False, absent=True, across=True),
    Case(1, 2, 4, 32, (16,), routing="one", across=True),
    # Nobody takes an expert of this rank: a program for each slot, and one for each expert.
    Case(1, 2, 4, 32, (16,), routing="elsewhere", absent=True),
    Case(9, 3, 4, 48, (48, 48), epilogue=SWIGLU, routing="elsewhere", absent=True),
    # Biases of experts, and two products in one weight.
    Case(7, 2, 5, 48, (40,), epilogue="mm0 + expert(x0)", by_token=False),
    Case(9, 2, 3, 48, (40, 40), epilogue="mm1 * expert(x0); mm0 + expert(x1)", absent=True),
    Case(3, 2, 8, 64, (40, 40), epilogue=CLAMPED, absent=True, across=True, interleaved=True),
    Case(17, 3, 5, 37, (40, 40), epilogue=CLAMPED, absent=True, across=True, interleaved=True),
    Case(5, 2, 4, 32, (24, 24), epilogue=SWIGLU, interleaved=True),
    # Two products that are not combined: by the library. So are more tokens than any kernel takes.
    Case(5, 2, 4, 32, (24, 24), interleaved=True),
    Case(MOST_ORDERED_TOKENS + 1, 1, 3, 16, (16,)),
    # More tokens than a tile has rows. An expert of all of them has several tiles, and others may have none.
    Case(65, 2, 4, 32, (24, 24), epilogue=CLAMPED, absent=True, interleaved=True),
    Case(65, 2, 4, 32, (16,), absent=True),
    Case(65, 2, 4, 48, (32, 32), epilogue=SWIGLU),
    Case(70, 1, 90, 40, (33,), by_token=False),
    Case(77, 3, 5, 41, (40, 17), torch.float16, routing="one"),
    Case(66, 2, 64, 33, (50, 50, 17), torch.float32, epilogue="mm0 * mm1; mm2 + row(x0)", routing="apart"),
    Case(90, 2, 3, 48, (40, 40), epilogue="mm1 * expert(x0); mm0 + expert(x1)", absent=True, across=True),
    Case(66, 2, 4, 32, (16,), by_token=False, routing="elsewhere", absent=True),
)
MANY = Case(128, 8, 128, 384, (2048,), by_token=False)
LARGE_CASES = (
    Case(1, 8, 128, 2048, (384, 384), epilogue=SWIGLU),
    Case(1, 8, 128, 384, (2048,), by_token=False),
    Case(1, 2, 8, 4096, (7168, 7168), epilogue=SWIGLU),
    Case(1, 2, 8, 7168, (4096,), by_token=False, absent=True),
    Case(32, 8, 128, 2048, (384, 384), epilogue=SWIGLU),
    Case(32, 8, 128, 384, (2048,), by_token=False),
    Case(64, 2, 8, 4096, (7168, 7168), epilogue=SWIGLU),
    Case(16, 2, 8, 7168, (4096,), by_token=False, routing="one"),
    Case(7, 5, 11, 1000, (333, 333), torch.float16),
    Case(9, 4, 32, 512, (384, 40), torch.float32),
    Case(1, 4, 64, 2880, (5760,), absent=True, across=True),
    # One row without tensor cores, at lengths that no step divides, too.
    Case(1, 4, 32, 2880, (2880, 2880), epilogue=CLAMPED, absent=True, interleaved=True),
    Case(1, 4, 32, 2880, (1440, 1440), torch.float16, epilogue=SWIGLU),
    Case(1, 8, 16, 3001, (517,), torch.float16, by_token=False, absent=True),
    Case(1, 2, 8, 2049, (130,), torch.float32),
    Case(1, 4, 64, 2880, (2880, 2880), epilogue=CLAMPED, absent=True, across=True, interleaved=True),
    Case(32, 4, 64, 2880, (2880, 2880), epilogue=CLAMPED, absent=True, across=True, interleaved=True),
    Case(64, 4, 32, 2880, (2880, 2880), epilogue=SWIGLU, across=True),
    Case(32, 4, 64, 2880, (2880,), by_token=False, absent=True, across=True),
    # More tokens than a tile has rows.
    MANY,
    Case(128, 8, 128, 2048, (384, 384), epilogue=SWIGLU),
    Case(65, 2, 8, 4096, (7168, 7168), epilogue=SWIGLU, routing="one"),
    Case(256, 2, 8, 7168, (4096,), by_token=False, absent=True),
    Case(511, 8, 256, 1000, (333, 333), torch.float16),
    Case(200, 4, 32, 512, (384, 40), torch.float32, routing="apart"),
    Case(128, 4, 64, 2880, (2880, 2880), epilogue=CLAMPED, absent=True, across=True, interleaved=True),
)


def operands(
    case: Case, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    S = case.tokens * case.top_k

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device, case.dtype)

    weights = [draw(case.experts, n, case.k, scale=case.k**-0.5).mT for n in case.columns]
    if case.interleaved:
        weights = [torch.stack(weights, -1).flatten(2)]
        weights = weights if case.across else [weights[0].mT.contiguous().mT]
    weights = [weight.contiguous() if case.across else weight for weight in weights]
    extras = [draw(case.columns[-1])] if "row(x0)" in case.epilogue else []
    tables = case.epilogue.count("expert(x") or case.epilogue.count("odd(x") * 2
    extras += [draw(case.experts, case.columns[0] * (1 + case.interleaved), scale=0.5) for _ in range(tables)]
    if "column(x0)" in case.epilogue:
        extras = [draw(S, 1), draw(S, case.columns[1])]
    scores = torch.rand(case.tokens, case.experts * (1 + case.absent), generator=generator)
    if case.routing == "one":
        scores = scores[:1].expand_as(scores)
    if case.routing == "elsewhere":
        assert case.absent
        scores[:, : case.experts] = -1.0
    chosen = scores.topk(case.top_k).indices
    if case.routing == "apart":
        chosen = (torch.arange(S) % case.experts).view(case.tokens, case.top_k)
    # Products are small: a silu and a product of two that are rounded the other way are within the tolerance.
    x = draw(case.tokens if case.by_token else S, case.k, scale=0.5)
    return x, chosen.reshape(-1).clamp(max=case.experts).to(device), weights, extras


def node_of(case: Case, extras: Sequence[torch.Tensor]) -> ExpertProjections:
    numbers = case.top_k, case.by_token, len(case.columns), len(extras)
    return ExpertProjections(*numbers, case.epilogue, has_absent=case.absent, interleaved=case.interleaved)


def wanted(
    case: Case, x: torch.Tensor, experts: torch.Tensor, weights: Sequence[torch.Tensor], extras: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    rows = x.repeat_interleave(case.top_k, 0) if case.by_token else x
    there = experts.clamp(max=case.experts - 1)
    products = [
        torch.stack([row.double() @ weight[expert].double() for row, expert in zip(rows, there, strict=True)])
        for weight in weights
    ]
    if case.interleaved:
        products = [products[0][:, half::2] for half in range(2)]
    if case.epilogue:
        epilogue, rest = without_tables(parse(case.epilogue), extras, there)
        products = evaluate(epilogue, [one.to(case.dtype) for one in products], rest)
    return [product.masked_fill((experts >= case.experts).unsqueeze(1), 0.0) for product in products]


def check(case: Case, device: torch.device) -> None:
    x, experts, weights, extras = operands(case, device)
    node = node_of(case, extras)
    by_kernel = lowering.prepare(node, x, experts, weights, extras, "tile")
    for run in (by_kernel, by_kernel, lowering.by_library(node, x, extras)):
        outs = run(x, experts, weights, extras)
        for out, value in zip(outs, wanted(case, x, experts, weights, extras), strict=True):
            assert_near(out, value, num_partials=3 if case.epilogue else 1, what=str(case))


def _check_in_rank(ctx: RankContext, case: Case) -> None:
    check(case, ctx.device)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_near_the_reference_in_the_interpreter(rank_pools: RankPools, case: Case) -> None:
    rank_pools.get("cpu", 2).run(_check_in_rank, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", (*CASES, *LARGE_CASES), ids=str)
def test_near_the_reference_on_a_gpu(case: Case) -> None:
    check(case, torch.device("cuda", 0))


@pytest.mark.gpu
@pytest.mark.parametrize("case", (LARGE_CASES[1], MANY), ids=str)
def test_in_a_graph_it_follows_its_operands(case: Case) -> None:
    x, experts, weights, extras = operands(case, torch.device("cuda", 0))
    node = node_of(case, extras)
    call = [x, experts, *weights]
    lowering.expert_projections(node, call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = lowering.expert_projections(node, call)
    for seed in range(3):
        torch.manual_seed(seed)
        x.normal_(std=0.5)
        experts.copy_(torch.rand(case.tokens, case.experts, device="cuda").topk(case.top_k).indices.reshape(-1))
        graph.replay()
        (value,) = wanted(case, x, experts, weights, extras)
        assert_near(outs[0], value, num_partials=3)


def test_other_layouts_and_no_tokens_go_to_the_library() -> None:
    case = Case(2, 2, 4, 16, (8, 8))
    x, experts, weights, extras = operands(case, torch.device("cpu"))
    node = node_of(case, extras)
    across = [weights[0].repeat_interleave(2, 1)[:, ::2].repeat_interleave(2, 2)[:, :, ::2], weights[1]]
    assert 1 not in across[0].stride()
    for out, value in zip(
        lowering.prepare(node, x, experts, across, extras, "tile")(x, experts, across, extras),
        wanted(case, x, experts, weights, extras),
        strict=True,
    ):
        assert_near(out, value)
    outs = lowering.prepare(node, x[:0], experts[:0], weights, extras, "tile")(x[:0], experts[:0], weights, extras)
    assert [out.shape for out in outs] == [(0, 8), (0, 8)]


def _order(ctx: RankContext, slots: int, num_experts: int) -> None:
    generator = torch.Generator().manual_seed(slots)
    # One expert more than there are, and beyond that: experts of other ranks.
    experts = torch.randint(num_experts + 3, (slots,), generator=generator).to(ctx.device)
    order = slot_order.prepare(slots, num_experts, ctx.device)(experts)
    taken = experts.clamp(max=num_experts)
    below = [int((taken < number).sum()) for number in range(num_experts + 2)]
    assert order.tolist() == [*taken.argsort(stable=True).tolist(), *below]


SLOTS = ((1, 1), (1, 100), (33, 5), (700, 3), (200, 70))


@pytest.mark.parametrize(("slots", "num_experts"), SLOTS)
def test_slots_are_ordered_by_expert(rank_pools: RankPools, slots: int, num_experts: int) -> None:
    rank_pools.get("cpu", 2).run(_order, slots, num_experts)


@pytest.mark.gpu
@pytest.mark.parametrize(("slots", "num_experts"), (*SLOTS, (4088, 512)))
def test_slots_are_ordered_by_expert_on_a_gpu(rank_pools: RankPools, slots: int, num_experts: int) -> None:
    rank_pools.get("cuda", 2).run(_order, slots, num_experts)


FORMS = {
    "plain": ("", False, False),
    "epilogue": (SWIGLU, False, False),
    "elsewhere": ("", True, False),
    "epilogue-elsewhere": (SWIGLU, True, False),
    "interleaved": (CLAMPED, True, True),
}


# The form with most, for both, and the other one with slots elsewhere.
TARGETS_AND_FORMS = (
    *((target, "interleaved") for target in ("sm_90", "gfx942")),
    ("sm_90", "elsewhere"),
    *rare(*(("sm_90", form) for form in ("plain", "epilogue", "epilogue-elsewhere"))),
    *rare(*(("gfx942", form) for form in FORMS if form != "interleaved")),
)


@pytest.mark.parametrize("kernel", ["experts", "ordered"])
@pytest.mark.parametrize(("target", "form"), TARGETS_AND_FORMS)
def test_compiles_for_gpus(target: str, form: str, kernel: str) -> None:
    epilogue, elsewhere, interleaved = FORMS[form]
    together = bool(epilogue) and kernel == "experts"
    for tile in lowering.shapes_of(together, across=elsewhere, interleaved=interleaved).values():
        how = {"epilogue": epilogue, "elsewhere": elsewhere, "interleaved": interleaved}
        compiled = compile_case(Compilation(kernel, target, tile, "bf16", **how))
        assert len(compiled.listing.loops(dialect_of(target).dot)) >= (1 if epilogue else NUM_WEIGHTS)
        if target == "sm_90":
            # Several steps of K under way at once, and nothing in memory of its own.
            columns = tile.block_n * (1 + interleaved)
            assert compiled.shared_bytes > 2 * tile.block_k * (tile.block_m + columns)
            assert resources(compiled.assembly).spilled_bytes == 0


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_the_order_compiles_for_gpus(target: str) -> None:
    compiled = compile_case(Compilation("order", target, FEW_ROWS[16], "bf16"))
    assert len(compiled.listing.loops(dialect_of(target).store)) == 0
    if target == "sm_90":
        assert resources(compiled.assembly).spilled_bytes == 0
