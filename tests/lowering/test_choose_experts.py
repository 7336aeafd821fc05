"""choose_experts: what the kernels choose is what a stable sort of the scores chooses, whatever the logits are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._dynamo.utils import counters
from triton.compiler import ASTSource

from ditron_inductor.lowering.choose_experts import choose_kernel as lowering
from ditron_inductor.lowering.choose_experts.choose_kernel import choose_experts
from ditron_inductor.passes.fuse import choose_experts as choose_pass
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import ChooseExperts
from tests.cases import rare
from tests.lowering.assembly import NVIDIA, Listing, resources
from tests.lowering.cross_compile import compile_for
from tests.rank_process import RankContext
from tests.ranks import RankPool, RankPools


@dataclass(frozen=True)
class Case:
    """Tokens [T, K] and a router of E experts, of which each token takes k."""

    T: int
    K: int
    E: int
    k: int
    scores: str = "softmax"
    normalised: bool = True
    biased: bool = False
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        flags = "-normalised" * self.normalised + "-biased" * self.biased
        return f"{self.T}x{self.K}-{self.k}of{self.E}-{self.scores}{flags}-{str(self.dtype)[6:]}"

    @property
    def node(self) -> ChooseExperts:
        return ChooseExperts(self.k, self.scores, self.normalised, self.biased, strategy="tile")


CASES = (
    Case(1, 96, 8, 2),
    Case(5, 200, 24, 6),
    Case(17, 64, 130, 10, normalised=False, biased=True),
    Case(3, 70, 33, 1, scores="logits", normalised=False, biased=True),
    Case(4, 64, 16, 16, scores="logits", normalised=False, dtype=torch.float16),
)
GPU_CASES = (
    Case(1, 2048, 128, 8),
    Case(32, 4096, 128, 8),
    Case(64, 4096, 8, 2),
    Case(8, 2880, 128, 4, scores="logits", normalised=False, biased=True),
    Case(3, 2048, 512, 10, dtype=torch.float16),
)


def operands(case: Case, device: torch.device, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(x, router, bias or None), for logits of order one."""
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(n, case.K, generator=generator) for n in (case.T, case.E))
    bias = torch.randn(case.E, generator=generator) if case.biased else None
    x, w = x.to(device, case.dtype), (w / case.K**0.5).to(device, case.dtype)
    return x, w.t(), None if bias is None else bias.to(device, case.dtype)


def check(case: Case, found: list[torch.Tensor], given: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]) -> None:
    """The chosen scores are the largest ones, near those of fp32 logits, and belong to the places."""
    values, experts = found
    x, router, bias = given
    logits = x.double() @ router.double() + (0 if bias is None else bias.double())
    scores = logits.softmax(-1) if case.scores == "softmax" else logits
    tolerance = 2 * torch.finfo(case.dtype).eps * float(logits.abs().max() + 1)
    chosen = scores.gather(1, experts)
    # A rounded logit may exchange neighbours, whose scores differ as little.
    bound = tolerance * (1.0 if case.scores == "logits" else float(scores.max()))
    assert float((chosen - scores.sort(-1, descending=True)[0][:, : case.k]).abs().max()) <= 2 * bound
    wanted = chosen / chosen.sum(-1, keepdim=True) if case.normalised else chosen
    assert values.dtype == (torch.float32 if case.scores == "softmax" else case.dtype)
    assert float((values.double() - wanted).abs().max()) <= 2 * tolerance
    assert all(len(set(row)) == case.k for row in experts.tolist())


def _near(ctx: RankContext, case: Case) -> None:
    given = operands(case, ctx.device)
    check(case, choose_experts(case.node, [one for one in given if one is not None]), given)


@pytest.mark.parametrize("case", [CASES[1], CASES[2], CASES[3], *rare(CASES[0], CASES[4])], ids=str)
def test_near_the_reference_in_the_interpreter(rank_pools: RankPools, case: Case) -> None:
    rank_pools.get("cpu", 2).run(_near, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, *GPU_CASES], ids=str)
def test_near_the_reference_on_a_gpu(rank_pools: RankPools, case: Case) -> None:
    rank_pools.get("cuda", 1).run(_near, case, timeout=100)


SPECIAL = {
    "equal": [1.0, 2.0, 2.0, 1.0, 2.0, 0.0],
    "zeros of both signs": [-0.0, 0.0, -0.0, -1.0, 0.0, -2.0],
    "one is no number": [1.0, 5.0, float("nan"), 2.0, 0.5, 4.0],
    "another is no number": [1.0, -5.0, 2.0, -float("nan"), float("nan"), 4.0],
    "none is a number": [float("nan")] * 6,
    "infinite": [1.0, float("inf"), -float("inf"), float("inf"), 2.0, 0.0],
    "nothing": [-float("inf")] * 6,
    "far apart": [0.0, -300.0, 300.0, -200.0, -300.0, 100.0],
}


def _special(ctx: RankContext, scores: str, normalised: bool) -> None:
    """Logits as they are: a router that is the identity, and one token for each of SPECIAL."""
    x = torch.zeros(len(SPECIAL), 6, device=ctx.device, dtype=torch.bfloat16)
    bias = torch.zeros(6, device=ctx.device, dtype=torch.bfloat16)
    node = ChooseExperts(4, scores, normalised, True, strategy="tile")
    for index, row in enumerate(SPECIAL.values()):
        # Through the bias, since a product with an infinite number is none.
        bias.copy_(torch.tensor(row))
        given = x[index : index + 1], torch.zeros(6, 6, device=ctx.device, dtype=torch.bfloat16).t(), bias
        (values, experts), wanted = choose_experts(node, list(given)), reference.chosen(4, scores, normalised, *given)
        torch.testing.assert_close(experts, wanted[1], rtol=0, atol=0)
        torch.testing.assert_close(values, wanted[0], equal_nan=True, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("scores", "normalised"), [("softmax", False), ("softmax", True), ("logits", False)])
def test_special_scores_are_chosen_as_by_a_sort(rank_pools: RankPools, scores: str, normalised: bool) -> None:
    rank_pools.get("cpu", 2).run(_special, scores, normalised)


@pytest.mark.gpu
@pytest.mark.parametrize(("scores", "normalised"), [("softmax", False), ("softmax", True), ("logits", False)])
def test_special_scores_on_a_gpu(rank_pools: RankPools, scores: str, normalised: bool) -> None:
    rank_pools.get("cuda", 1).run(_special, scores, normalised, timeout=100)


def _rounded(ctx: RankContext) -> None:
    """256 and 257 are the same bf16, so the left one is chosen."""
    x = torch.tensor([[256.0, 1.0]], device=ctx.device, dtype=torch.bfloat16)
    router = torch.tensor([[1.0, 0.0], [1.0, 1.0]], device=ctx.device, dtype=torch.bfloat16).t()
    _, experts = choose_experts(ChooseExperts(1, "logits", strategy="tile"), [x, router])
    assert experts.tolist() == [[0]]


def _zeros(ctx: RankContext) -> None:
    """A product that is too small for fp16 becomes -0.0, which is less than 0.0."""
    x = torch.tensor([[1.0]], device=ctx.device, dtype=torch.float16)
    router = torch.tensor([[-1.0], [0.0], [-1.0]], device=ctx.device, dtype=torch.float16).t()
    given = x * torch.finfo(torch.float16).tiny / 1024, router * 1e-4
    node = ChooseExperts(3, "logits", strategy="tile")
    (values, experts), wanted = choose_experts(node, list(given)), reference.chosen(3, "logits", False, *given, None)
    assert experts.tolist() == wanted[1].tolist() == [[1, 0, 2]]
    assert values.signbit().tolist() == wanted[0].signbit().tolist() == [[False, True, True]]


def test_zeros_without_a_sign_are_larger(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 2).run(_zeros)


def test_logits_are_rounded(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 2).run(_rounded)


def _by_the_library(ctx: RankContext) -> None:
    case = Case(4, 32, 8, 2)
    x, router, bias = operands(case, ctx.device)
    for given in (
        (x[:0], router, bias),
        (x.t().contiguous().t(), router, bias),
        (x, router.contiguous(), bias),
        (x.float(), router.float(), bias),
        (x.repeat(20, 1), router, bias),
    ):
        values, experts = choose_experts(case.node, [one for one in given if one is not None])
        wanted = reference.chosen(2, "softmax", True, *given)
        assert torch.equal(values, wanted[0]) and torch.equal(experts, wanted[1])
    with_gaps = torch.randn(2 * case.E, device=ctx.device).bfloat16()[::2]
    node = replace(case.node, has_bias=True)
    values, experts = choose_experts(node, [x, router, with_gaps])
    wanted = reference.chosen(2, "softmax", True, x, router, with_gaps)
    assert torch.equal(values, wanted[0]) and torch.equal(experts, wanted[1])


def test_other_forms_go_to_the_library(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 2).run(_by_the_library)


def _replayed(ctx: RankContext) -> None:
    case = GPU_CASES[0]
    given = operands(case, ctx.device)
    tensors = [one for one in given if one is not None]
    choose_experts(case.node, tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = choose_experts(case.node, tensors)
    for seed in range(1, 4):
        for tensor, other in zip(tensors, operands(case, ctx.device, seed), strict=False):
            tensor.copy_(other)
        graph.replay()
        check(case, found, given)


@pytest.mark.gpu
def test_in_a_graph_it_follows_its_operands(rank_pools: RankPools) -> None:
    rank_pools.get("cuda", 1).run(_replayed, timeout=100)


def _route(ctx: RankContext, most_tokens: int) -> int:
    """A compiled router behind a reduction chooses what it chooses in eager mode. Returns how many calls there are."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    x, v, w = (torch.randn(shape, device=ctx.device).bfloat16() / 8 for shape in ((3, 64), (64, 64), (16, 64)))

    def layer(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = funcol.all_reduce(x @ v, "sum", dist.group.WORLD) @ w.t()
        values, experts = torch.topk(logits.float().softmax(-1), 4)
        return values / values.sum(-1, keepdim=True), experts

    bounds = choose_pass.ChoiceBounds(("cpu", "cuda"), most_tokens)
    with torch.no_grad(), mock.patch.object(choose_pass, "ChoiceBounds", lambda: bounds):
        compiled = torch.compile(layer, backend="ditron", fullgraph=True, options={"ditron.strategy": "tile"})
        (values, experts), wanted = compiled(x), layer(x)
    torch.testing.assert_close(experts, wanted[1])
    torch.testing.assert_close(values, wanted[0], rtol=1e-2, atol=1e-3)
    return counters["ditron"]["choose_experts"]


@pytest.mark.parametrize("most_tokens", [3, 2])
def test_a_compiled_router(rank_pools: RankPools, most_tokens: int) -> None:
    assert set(rank_pools.get("cpu", 2).run(_route, most_tokens)) == {int(most_tokens == 3)}


def test_a_compiled_router_on_gpus(gpu_pool: RankPool) -> None:
    assert set(gpu_pool.run(_route, 64, timeout=100)) == {1}


def _compiled(target: str, how: lowering.How) -> Any:
    kernel = lowering.choose_kernel
    kinds: dict[str, Any] = {
        "parts": "*fp32",
        "bias": "*bf16",
        "values": "*fp32" if how.SOFTMAX else "*bf16",
        "experts": "*i64",
        "sizes": lowering.Sizes("i32", "i32"),
        "HOW": "constexpr",
    }
    signature = {name: kinds[name] for name in kernel.arg_names}
    places = {name: place for place, name in enumerate(kernel.arg_names)}
    return compile_for(target, ASTSource(kernel, signature, {(places["HOW"],): how}), {"num_warps": lowering.WARPS})


HOWS = (lowering.How(128, 8, 128, 8, 16, True, True, False), lowering.How(512, 10, 512, 16, 4, False, False, True))


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_it_compiles_for_nvidia(how: lowering.How) -> None:
    """All steps of a choice are in registers."""
    ptx = _compiled("sm_90", how).asm["ptx"]
    assert resources(ptx).spilled_bytes == 0
    assert not Listing(ptx).loops(NVIDIA.dot)


def test_it_compiles_for_amd() -> None:
    assert "s_endpgm" in _compiled("gfx942", HOWS[0]).asm["amdgcn"]
