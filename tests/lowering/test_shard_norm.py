"""all_gather_matmul with a norm in front, every strategy: outputs near the reference, the sum bit for bit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from benchmarks.tolerances import assert_near
from ditron_inductor.lowering.register import register
from ditron_inductor.task import reference, schema
from ditron_inductor.task.codec import encode
from ditron_inductor.task.nodes import AllGatherMatmul, Norm, ShardNorm
from tests.lowering import calls
from tests.lowering.calls import Site
from tests.lowering.problems import ODD, Problem, chunked_problems
from tests.lowering.stress import call_late_and_poisoned
from tests.rank_process import RankContext
from tests.ranks import RankPool

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LLAMA = Norm("rms", 1e-6, round_first=True)
GEMMA = Norm("rms", 1e-6, plus_one=True)
LAYER = Norm("layer", 1e-5)


@dataclass(frozen=True)
class Case:
    """x [.., K], normalised and gathered along gather_dim, times weights of these widths."""

    shape: tuple[int, ...]
    prologue: ShardNorm
    gather_dim: int = 0
    # In bfloat16 the interpreter cuts off where a GPU, and eager, round.
    dtype: torch.dtype = FP16
    return_gathered: bool = True
    layout: str = "row"

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        flags = f"{'' if self.return_gathered else '-nogather'}{'-padded' * (self.layout == 'padded')}"
        return f"{shape}@{self.gather_dim}-{encode(self.prologue)}-{str(self.dtype)[6:]}{flags}".replace(" ", "")


CASES = (
    Case((20, 40), ShardNorm(LLAMA, ("residual", "weight")), return_gathered=False),
    Case((67, 48), ShardNorm(LLAMA, ("weight",)), dtype=FP32, return_gathered=False),
    # Inner gather dimensions, a batch; what is saved for a backward.
    Case((2, 9, 24), ShardNorm(LAYER, ("residual", "weight", "shift"), ("mean", "rstd", "scaled")), gather_dim=1),
    Case((2, 9, 24), ShardNorm(LAYER, (), ("rstd",)), gather_dim=1, dtype=FP32, return_gathered=False),
    # Nothing is a multiple of anything.
    Case((35, 41), ShardNorm(GEMMA, ("residual",)), layout="padded"),
    # The norm is that of the sum before it is rounded.
    Case((1, 7, 100), ShardNorm(replace(LLAMA, unrounded=True), ("residual",), ("scaled",)), gather_dim=1),
)


def _check(ctx: RankContext, case: Case, strategy: str) -> None:
    register()
    prologue, K = case.prologue, case.shape[-1]
    site = Site(strategy=strategy, name=f"test/0:{strategy}")
    x = calls.operand(ctx, case.shape, case.dtype, layout=case.layout)
    drawn = {
        "residual": calls.operand(ctx, case.shape, case.dtype),
        "weight": calls.operand(ctx, [K], case.dtype),
        "shift": calls.operand(ctx, [K], case.dtype),
    }
    given = [one if name in prologue.extras else None for name, one in drawn.items()]
    normed = {name: drawn[name] for name in prologue.extras}
    weights = [calls.weight(ctx, K, n, case.dtype, "column") for n in (24, 37)]
    before = [one.clone() for one in (x, *drawn.values())]
    node = site.node(
        ctx,
        AllGatherMatmul,
        gather_dim=case.gather_dim,
        return_gathered=True,
        num_weights=len(weights),
        prologue=prologue,
    )
    # The last of three calls has the slot that the first one had.
    kept = node, node, replace(node, return_gathered=case.return_gathered)
    first, _, last = [schema.call(one, shard=x, weights=weights, **normed) for one in kept]
    *outputs, token = last
    assert token.dtype == torch.uint8
    shard, returned = reference.norm_shard(x, given, prologue)
    gathered = first[len(weights)]
    # A value inside may be rounded the other way, and the result then too.
    (wanted_rows,) = calls.reference_all_gather_matmul(ctx, site, shard, [], case.gather_dim)
    assert_near(gathered, wanted_rows, num_partials=3, what="gathered")
    # Products of what the op has gathered: one rounding of that is many of theirs.
    wanted = [gathered.flatten(0, -2).double() @ weight.double() for weight in weights]
    wanted += [gathered] if case.return_gathered else []
    assert len(outputs) == len(wanted) + len(returned)
    for index, (got, want) in enumerate(zip(outputs, [*wanted, *returned], strict=True)):
        assert got.is_contiguous() and got.shape == want.shape
        assert got.dtype == (want.dtype if index >= len(weights) else case.dtype)
        assert_near(got, want, what=f"output {index}")
    if case.return_gathered:
        assert torch.equal(outputs[len(weights)], gathered)
    if "residual" in prologue.extras:
        total = outputs[len(wanted)]
        torch.testing.assert_close(total, x + drawn["residual"], rtol=0, atol=0, msg=lambda m: f"the sum: {m}")
    for one, other in zip((x, *drawn.values()), before, strict=True):
        assert torch.equal(one, other), "an input changed"


@pytest.mark.parametrize("strategy", ["tile", "chunked", "library"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(pool: RankPool, case: Case, strategy: str) -> None:
    pool.run(_check, case, strategy)


class NormedGather(Problem):
    """Of x + 1 with a norm: products, the gathered tensor, the sum."""

    PROLOGUE = ShardNorm(LLAMA, ("residual", "weight"))

    def __init__(self, ctx: RankContext, name: str, strategy: str) -> None:
        site = Site(name=f"{name}/0:{strategy}", strategy=strategy)
        super().__init__(ctx, "all_gather_matmul", ODD[ctx.device.type], site=site, dtype=FP16)
        self.given = torch.ones_like(self.left), torch.full_like(self.left[0], 0.5), None

    def __call__(self) -> list[torch.Tensor]:
        fields = {"gather_dim": 0, "return_gathered": True, "num_weights": len(self.weights)}
        residual, weight, _ = self.given
        return self.site.call(
            self.ctx,
            AllGatherMatmul,
            {**fields, "prologue": self.PROLOGUE},
            shard=self.left,
            weights=self.weights,
            residual=residual,
            weight=weight,
        )

    def check(self, outputs: list[torch.Tensor], what: str = "") -> None:
        *products, gathered, total = outputs
        shard, (wanted,) = reference.norm_shard(self.left, self.given, self.PROLOGUE)
        assert torch.equal(total, wanted), what
        rows = reference.all_gather(shard, gather_dim=0, **self.site.group(self.ctx))
        assert_near(gathered, rows, num_partials=3, what=f"{what} gathered")
        for product, weight in zip(products, self.weights, strict=True):
            assert_near(product, gathered.double() @ weight.double(), what=f"{what} product")


def _stress(ctx: RankContext) -> None:
    """Beside a plain gather, with ranks that are late, and slots that hold NaN."""
    register()
    problems = [NormedGather(ctx, "normed", strategy) for strategy in ("chunked", "tile")]
    problems += chunked_problems(ctx, ["all_gather_matmul"], "plain")
    call_late_and_poisoned(ctx, problems)


def test_late_ranks_and_poisoned_slots(pool: RankPool) -> None:
    if pool.device_type == "cpu" and pool.world_size > 2:
        pytest.skip("two ranks show it")
    pool.run(_stress, timeout=100)


GPU_CASES = (
    Case((512, 4096), ShardNorm(LLAMA, ("residual", "weight")), dtype=BF16, return_gathered=False),
    Case((2, 513, 8192), ShardNorm(LAYER, ("residual", "weight", "shift"), ("mean", "rstd")), 1, BF16),
    Case((333, 1111), ShardNorm(GEMMA, ("weight",))),
)


@pytest.mark.parametrize("strategy", ["tile", "chunked", "library"])
@pytest.mark.parametrize("large_case", GPU_CASES, ids=str)
def test_matches_reference_at_size(gpu_pool: RankPool, large_case: Case, strategy: str) -> None:
    gpu_pool.run(_check, large_case, strategy)
