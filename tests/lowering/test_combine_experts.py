"""combine_experts: near the fp64 reference by the kernel and by the library, whatever the routing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from benchmarks.tolerances import assert_near
from ditron_inductor.lowering.combine_experts.op import combine_experts
from ditron_inductor.lowering.expert_sums import combine_kernel as lowering
from ditron_inductor.task.nodes import CombineExperts
from tests.rank_process import RankContext
from tests.ranks import RankPools


@dataclass(frozen=True)
class Case:
    """`tokens` that take `top_k` of `experts`, whose products have `n` columns. routing: `random`; `one`, where all
    tokens take the same experts; or `elsewhere`, where they take none of these. absent: there are as many experts
    elsewhere, whose slots count as 0. biased: the experts have biases. in_order: the products lie token by token.
    """

    tokens: int
    top_k: int
    experts: int
    n: int
    routing: str = "random"
    added: bool = False
    dtype: torch.dtype = torch.bfloat16
    scale_dtype: torch.dtype = torch.float32
    absent: bool = False
    biased: bool = False
    in_order: bool = False

    def __str__(self) -> str:
        name = f"{self.tokens}x{self.top_k}of{self.experts}-{self.n}-{self.routing}-{str(self.dtype)[6:]}"
        optional = "-added" * self.added + "-absent" * self.absent + "-biased" * self.biased
        return f"{name}-{str(self.scale_dtype)[6:]}{optional}" + "-in_order" * self.in_order


CASES = (
    Case(21, 3, 5, 96, added=True, scale_dtype=torch.bfloat16),
    Case(24, 2, 4, 600),
    Case(5, 2, 8, 40, routing="one", dtype=torch.float16),
    Case(1, 4, 4, 33, added=True, dtype=torch.float32),
    Case(7, 1, 3, 17),
    Case(19, 3, 4, 72, absent=True),
    Case(23, 3, 6, 80, biased=True, scale_dtype=torch.bfloat16),
    Case(19, 3, 4, 72, absent=True, added=True, biased=True),
    Case(9, 3, 7, 56, added=True, in_order=True),
    Case(19, 3, 4, 72, routing="elsewhere", absent=True, added=True, biased=True),
)
LARGE_CASES = (
    Case(1000, 4, 32, 2880, added=True, scale_dtype=torch.bfloat16),
    Case(2048, 8, 128, 2048),
    Case(333, 2, 8, 4096, routing="one"),
    Case(4097, 2, 8, 1032, added=True),
    Case(1500, 8, 64, 2048, added=True, absent=True),
    Case(1500, 4, 32, 2880, absent=True, biased=True),
)
Operands = tuple[torch.Tensor | None, ...]


def routed(case: Case, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(the weight of each slot as the products lie, its expert, its place among the slots of all tokens)."""
    scores = torch.rand(case.tokens, case.experts * (1 + case.absent), generator=generator)
    if case.routing == "elsewhere":
        assert case.absent
        scores[:, : case.experts] = -1.0
    weights, chosen = (scores[:1].expand_as(scores) if case.routing == "one" else scores).topk(case.top_k)
    if case.in_order:
        return weights.reshape(-1), chosen.reshape(-1), torch.arange(chosen.numel())
    ids, order = chosen.reshape(-1).sort()
    return weights.reshape(-1)[order], ids, order


def operands(case: Case, device: torch.device, seed: int = 0) -> Operands:
    """(products, places or None, scale, absent or None, added or None, bias or None, experts or None). The rows of the
    operands are longer than they show. The products of absent slots are no numbers, and their experts are any.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int) -> torch.Tensor:
        return (torch.randn(rows, case.n + 8, generator=generator) / 4).to(device, case.dtype)[:, : case.n]

    scale, ids, order = routed(case, generator)
    added = draw(case.tokens) if case.added else None
    absent = (ids >= case.experts).to(device) if case.absent else None
    products = draw(case.tokens * case.top_k)
    if absent is not None:
        products[absent] = float("nan")
    bias = draw(case.experts).contiguous() if case.biased else None
    # As graphs clamp them, or count from the end.
    experts = torch.where(ids % 3 == 1, ids - case.experts, ids).clamp(max=case.experts - 1).to(device)
    places, scale = order.argsort().to(device), scale.to(device, case.scale_dtype)
    return products, None if case.in_order else places, scale, absent, added, bias, experts if case.biased else None


def node_of(case: Case) -> CombineExperts:
    return CombineExperts(case.top_k, case.added, case.absent, case.biased, in_order=case.in_order)


def wanted(
    case: Case,
    products: torch.Tensor,
    places: torch.Tensor | None,
    scale: torch.Tensor,
    absent: torch.Tensor | None,
    added: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    experts: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sums in fp64, slot by slot."""
    if bias is not None and experts is not None:
        products = products + bias[experts]
    if places is None:
        places = torch.arange(len(products), device=products.device)
    total = torch.zeros(case.tokens, case.n, dtype=torch.float64, device=products.device)
    for j in range(case.top_k):
        taken = places.view(case.tokens, case.top_k)[:, j]
        term = products[taken].double() * scale[taken].double().unsqueeze(1)
        total += term if absent is None else torch.where(absent[taken].unsqueeze(1), 0.0, term)
    return total if added is None else total + added


def check(case: Case, device: torch.device) -> None:
    given = operands(case, device)
    node = node_of(case)
    by_kernel = lowering.prepare(node, *given, "tile")
    for run in (by_kernel, by_kernel, lowering.by_library(node)):
        (out,) = run(*given)
        assert out.dtype == case.dtype and out.is_contiguous()
        assert_near(out, wanted(case, *given), what=str(case))


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
def test_in_a_graph_it_follows_its_operands() -> None:
    case, device = LARGE_CASES[0], torch.device("cuda", 0)
    given = operands(case, device)
    tensors = [one for one in given if one is not None]
    combine_experts(node_of(case), tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (out,) = combine_experts(node_of(case), tensors)
    for seed in range(1, 4):
        for tensor, other in zip(given, operands(case, device, seed), strict=True):
            if tensor is not None and other is not None:
                tensor.copy_(other)
        graph.replay()
        assert_near(out, wanted(case, *given))


def _rounded_biases(ctx: RankContext) -> None:
    """256 + 1 is no bf16: a bias of 1 is lost where eager loses it."""
    case = Case(4, 2, 4, 16, added=True, biased=True)
    products, places, scale, _, added, bias, experts = operands(case, ctx.device)
    assert products is not None and scale is not None and added is not None and bias is not None
    given = products.fill_(256.0), places, scale.fill_(1.0), None, added.fill_(-512.0), bias.fill_(1.0), experts
    for run in (lowering.prepare(node_of(case), *given, "tile"), lowering.by_library(node_of(case))):
        assert not run(*given)[0].any()


def test_a_product_with_its_bias_is_rounded(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 2).run(_rounded_biases)


def _unusual_places(ctx: RankContext) -> None:
    case = Case(6, 2, 4, 40)
    products, places, scale, *rest = operands(case, ctx.device)
    run = lowering.prepare(node_of(case), products, places, scale, *rest, "tile")
    from_the_end = torch.where(places % 2 == 0, places - len(places), places)
    assert torch.equal(run(products, from_the_end, scale, *rest)[0], run(products, places, scale, *rest)[0])
    for outside in (len(places), -len(places) - 1, 1 << 40):
        wrong = places.clone()
        wrong[5] = outside
        (out,) = run(products, wrong, scale, *rest)
        # Token 2 has slots 4 and 5.
        assert out.isnan().any(1).tolist() == [token == 2 for token in range(6)]


def test_places_count_from_the_end_and_never_leave_the_products(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 2).run(_unusual_places)


def test_other_layouts_and_no_tokens_go_to_the_library() -> None:
    case = Case(4, 2, 4, 16)
    products, places, scale, *rest = operands(case, torch.device("cpu"))
    across = products.mT.contiguous().mT
    (out,) = lowering.prepare(node_of(case), across, places, scale, *rest, "tile")(across, places, scale, *rest)
    assert_near(out, wanted(case, products, places, scale, *rest))
    nothing = products[:0], places[:0], scale[:0], *rest
    assert lowering.prepare(node_of(case), *nothing, "tile")(*nothing)[0].shape == (0, 16)
