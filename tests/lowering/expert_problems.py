"""Calls of the reductions behind a decode step's experts: their operands, and what they have to return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.tolerances import assert_near
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import EXTRAS, ExpertsAllReduce, ExpertsAllReduceRmsNorm, Norm
from tests.lowering import calls
from tests.lowering.calls import Site
from tests.rank_process import RankContext

NORM = Norm("rms", 1e-6)
FORMS = {"alone": ExpertsAllReduce, "normed": ExpertsAllReduceRmsNorm}


@dataclass(frozen=True)
class Case:
    """`tokens` that take `top_k` of `experts`, whose weights are [k, n].

    routing: `random`; `one`, where all tokens take the same experts; `same`, where all ranks route alike. columns:
    whether K of the weights is contiguous, as in nn.Linear. added: whether something is added to a rank's sums.
    """

    tokens: int
    top_k: int
    experts: int
    k: int
    n: int
    dtype: torch.dtype = torch.bfloat16
    scale_dtype: torch.dtype = torch.float32
    routing: str = "random"
    columns: bool = True
    added: bool = False

    def __str__(self) -> str:
        name = f"{self.tokens}x{self.top_k}of{self.experts}-{self.k}-{self.n}-{str(self.dtype)[6:]}-{self.routing}"
        return name + "-added" * self.added + "-rows" * (not self.columns)


def given_to(ctx: RankContext, case: Case, form: str, seed: int = 0) -> dict[str, Any]:
    """The operands of this rank: each has its own rows, weights and, unless it is `same`, routing."""
    own = torch.Generator().manual_seed(100 * seed + ctx.rank)
    shared = torch.Generator().manual_seed(10_000 + seed)
    S = case.tokens * case.top_k

    def draw(*shape: int, scale: float = 1.0, by: torch.Generator = own) -> torch.Tensor:
        return (torch.randn(shape, generator=by) * scale).to(ctx.device, case.dtype)

    scores = torch.rand(case.tokens, case.experts, generator=shared if case.routing == "same" else own)
    if case.routing == "one":
        scores = scores[:1].expand_as(scores)
    weights, ids = scores.topk(case.top_k)
    shape = (case.experts, case.n, case.k) if case.columns else (case.experts, case.k, case.n)
    matrices = draw(*shape, scale=case.k**-0.5)
    given = {
        "x": draw(S, case.k, scale=0.5),
        "matrices": matrices.mT if case.columns else matrices,
        "experts": ids.reshape(-1).to(ctx.device),
        # Weights of the experts of a token add up to about 1.
        "factors": (weights / weights.sum(-1, keepdim=True)).reshape(-1).to(ctx.device, case.scale_dtype),
        # Small, so that a partial sum that is rounded the other way is within the tolerance.
        **({"added": draw(case.tokens, case.n, scale=0.25)} if case.added else {}),
    }
    if form == "normed":
        # The same on all ranks, as these rows are when they come from a reduction.
        given |= {"residual": draw(case.tokens, case.n, by=shared), "weight": draw(case.n, scale=0.3, by=shared)}
    return given


def sums_of(case: Case, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """What this rank reduces, in fp64 of products that are rounded, and rounded itself."""
    pairs = zip(given["x"], given["experts"], strict=True)
    products = torch.stack([row.double() @ given["matrices"][expert].double() for row, expert in pairs])
    terms = products.to(case.dtype).double() * given["factors"].double().unsqueeze(1)
    total = terms.view(case.tokens, case.top_k, case.n).sum(1)
    return (total + given["added"].double() if case.added else total).to(case.dtype)


def wanted(ctx: RankContext, case: Case, form: str, given: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    total = sums_of(case, given).double()
    dist.all_reduce(total)
    if reduce_op_of(case) == "avg":
        total = total / ctx.world_size
    if form == "alone":
        return (total,)
    extras = [given[name].double() if name in given else None for name in EXTRAS]
    return reference.add_norm(total, extras, NORM)


def reduce_op_of(case: Case) -> str:
    return "avg" if case.routing == "one" else "sum"


def call(
    ctx: RankContext, case: Case, form: str, strategy: str, given: dict[str, Any], name: str = "", **options: Any
) -> list[torch.Tensor]:
    fields: dict[str, Any] = {"reduce_op": reduce_op_of(case), "top_k": case.top_k, "has_added": case.added}
    if form == "normed":
        fields |= {"norm": NORM, "extras": ("residual", "weight")}
    site = Site(name=f"decode/{form}/{case}:{strategy}{name}", strategy=strategy, **options)
    return site.call(ctx, FORMS[form], fields, **given)


def assert_right(
    ctx: RankContext, case: Case, form: str, given: Mapping[str, torch.Tensor], outs: list[torch.Tensor]
) -> None:
    for out, want in zip(outs, wanted(ctx, case, form, given), strict=True):
        assert_near(out, want, num_partials=ctx.world_size, what=str(case))
        calls.assert_replicated(ctx, out, Site())


class ExpertsProblem:
    """A call with fixed operands, as `Problem` is for other kinds."""

    def __init__(self, ctx: RankContext, case: Case, form: str, name: str = "") -> None:
        self.ctx, self.case, self.form, self.name = ctx, case, form, name
        self.given = given_to(ctx, case, form)

    def __call__(self) -> list[torch.Tensor]:
        return call(self.ctx, self.case, self.form, "tile", self.given, self.name)

    def check(self, outputs: list[torch.Tensor], what: str = "") -> None:
        """AssertionError unless the outputs are right, and equal on all ranks. Collective."""
        assert_right(self.ctx, self.case, self.form, self.given, outputs)
