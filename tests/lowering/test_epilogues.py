"""Epilogues of all_gather_matmul, every strategy and every function: near the fp64 value of their text."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from benchmarks.tolerances import TOLERANCES
from ditron_inductor.lowering.epilogues import Finisher
from ditron_inductor.lowering.register import register
from ditron_inductor.task import schema
from ditron_inductor.task.epilogue import FUNCTIONS, KINDS, parse, products, walk
from ditron_inductor.task.epilogue_torch import evaluate, extra_shape
from ditron_inductor.task.nodes import AllGatherMatmul
from ditron_inductor.task.torch_dtypes import TORCH_DTYPES
from tests.lowering import calls
from tests.lowering.calls import Site
from tests.rank_process import RankContext
from tests.ranks import RankPool

ROUNDINGS = 3
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """shard [.., K] gathered along gather_dim, times weights given as (N, layout), with an epilogue."""

    epilogue: str
    weights: tuple[tuple[int, str], ...] = ((40, "row"),)
    shard: tuple[int, ...] = (40, 24)
    gather_dim: int = 0
    dtype: torch.dtype = BF16
    return_gathered: bool = False
    repeats: int = 1

    def __str__(self) -> str:
        return f"{self.epilogue.replace(' ', '')}-{'x'.join(map(str, self.shard))}-{str(self.dtype)[6:]}"


PAIR = ((40, "column"), (40, "row"))
CASES = (
    Case("; ".join(f"{name}(mm0)" for name in FUNCTIONS), dtype=FP32, shard=(20, 24)),
    Case("; ".join(f"mm0 * {kind}(x{i})" for i, kind in enumerate(KINDS)), dtype=FP16, gather_dim=1, shard=(2, 9, 24)),
    Case("minimum(maximum(mm0, -0.5), 0.25); maximum(row(x0), mm0)", dtype=FP32, shard=(20, 24)),
    Case("mm0 + row(x0)", return_gathered=True),
    Case("mm0 + row(x0); mm1; mm2 + row(x1)", weights=((33, "row"), (8, "column"), (65, "padded"))),
    Case("mm0 + row(x0)", shard=(2, 9, 24), gather_dim=1),
    Case("cast(silu(mm0), bf16) * mm1", weights=PAIR, return_gathered=True),
    # Descriptors on one side, and what training saves.
    Case("cast(silu(mm0), bf16) * mm1; mm0; mm1", weights=((64, "column"), (64, "column")), shard=(33, 64), repeats=3),
    Case("mm3; cast(gelu(mm2), bf16) * mm0; mm1 * 2.0", weights=((33, "row"), (7, "row"), (33, "row"), (16, "row"))),
    Case("gelu_tanh(cast(mm0 + row(x0), bf16)); cast(mm0 + row(x0), bf16)", shard=(2, 20, 24), gather_dim=1),
    Case("cast(mm0 * scalar(x0), fp32) ; mm0 - full(x1)", shard=(1, 7)),
    Case("mm0 * column(x0) / (2.0 + square(row(x1))) + full(x2)", dtype=FP32, shard=(3, 9, 24), gather_dim=1),
)  # fmt: skip


def _operands(ctx: RankContext, case: Case) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """shard, weights, extras."""
    shard = calls.operand(ctx, case.shard, case.dtype)
    weights = [calls.weight(ctx, case.shard[-1], n, case.dtype, layout) for n, layout in case.weights]
    epilogue = parse(case.epilogue)
    rows = ctx.world_size * shard.numel() // case.shard[-1]
    extras = []
    for extra in epilogue.extras():
        output = next(one for one in epilogue.outputs if extra in walk(one))
        shape = extra_shape(extra.kind, (rows, case.weights[min(products(output))][0]))
        layout = "padded" if extra.kind == "full" else "row"
        extras.append(calls.operand(ctx, shape, case.dtype, layout=layout))
    return shard, weights, extras


def _check(ctx: RankContext, case: Case, strategy: str) -> None:
    register()
    site = Site(strategy=strategy, name=f"epilogue/0:{strategy}")
    shard, weights, extras = _operands(ctx, case)
    epilogue = parse(case.epilogue)
    for _ in range(case.repeats):
        node = site.node(
            ctx,
            AllGatherMatmul,
            gather_dim=case.gather_dim,
            return_gathered=case.return_gathered,
            num_weights=len(weights),
            num_extras=len(extras),
            epilogue=case.epilogue,
        )
        *outputs, token = schema.call(node, shard=shard, weights=weights, extras=extras)
        assert token.dtype == torch.uint8 and len(outputs) == len(epilogue.outputs) + case.return_gathered
        *mm, gathered = calls.reference_all_gather_matmul(ctx, site, shard, weights, case.gather_dim)
        expected = evaluate(epilogue, mm, extras)
        for index, (got, want) in enumerate(zip(outputs, expected, strict=False)):
            assert got.dtype == TORCH_DTYPES.get(epilogue.dtypes()[index], case.dtype) and got.is_contiguous()
            # A value that was rounded several times, in the node's dtype whatever the output's is.
            rtol, atol = TOLERANCES[case.dtype]
            torch.testing.assert_close(got.double(), want, rtol=ROUNDINGS * rtol, atol=ROUNDINGS * atol)
        assert not case.return_gathered or torch.equal(outputs[-1], gathered)


@pytest.mark.parametrize("strategy", ["tile", "chunked", "library"])
def test_matches_the_text(pool: RankPool, strategy: str) -> None:
    # On four CPU ranks what depends on their number: the order of rows.
    few = pool.device_type == "cpu" and pool.world_size > 2
    for case in CASES[-1:] if few else CASES:
        pool.run(_check, case, strategy)


def _check_uneven(ctx: RankContext, strategy: str) -> None:
    columns = 24 * ctx.rank
    _check(ctx, Case("cast(silu(mm0), bf16) * mm1; mm0", ((columns, "row"), (columns, "row"))), strategy)


@pytest.mark.parametrize("strategy", ["tile", "chunked"])
def test_ranks_with_other_widths_and_with_none(pool: RankPool, strategy: str) -> None:
    if pool.world_size == 2:
        pool.run(_check_uneven, strategy)


TINY = 2.0**-12
"""Lost when it is added to 1 in half precision."""
ROUNDED = {
    # What a text reads of a product is what the product is without the text.
    "a product": ("mm0 - row(x0)", TINY, (1.0,)),
    "a cast": ("cast(mm0 + row(x0), fp16) - row(x1)", 0.0, (TINY, 1.0)),
}


def _check_rounded(ctx: RankContext, epilogue: str, second: float, rows: tuple[float, ...], strategy: str) -> None:
    """Products 1 + second of which 1 is left in half precision, as the text asks."""
    register()
    shard = torch.tensor([[1.0, second]] * 20, dtype=FP16, device=ctx.device)
    weight = torch.ones(2, 8, dtype=FP16, device=ctx.device)
    extras = [torch.full((8,), row, dtype=FP16, device=ctx.device) for row in rows]
    site = Site(strategy=strategy, name=f"rounded/0:{strategy}")
    fields = {"gather_dim": 0, "return_gathered": False, "num_weights": 1}
    fields |= {"num_extras": len(extras), "epilogue": epilogue}
    (out,) = site.call(ctx, AllGatherMatmul, fields, shard=shard, weights=[weight], extras=extras)
    assert out.count_nonzero() == 0, (strategy, out)


@pytest.mark.parametrize("what", ROUNDED)
def test_every_rounding_of_the_text_is_made(pool: RankPool, what: str) -> None:
    if pool.world_size == 2:
        for strategy in ("tile", "chunked", "library"):
            pool.run(_check_rounded, *ROUNDED[what], strategy)


GPU_CASES = (
    Case("cast(silu(mm0), bf16) * mm1", ((3584, "column"), (3584, "column")), (1024, 4096)),
    Case("cast(silu(mm0), bf16) * mm1; mm0; mm1", ((1030, "column"), (1030, "row")), (2, 513, 1024), 1),
    Case("gelu(cast(mm0 + row(x0), bf16)); mm1 * full(x1)", ((3584, "column"), (512, "column")), (512, 2048)),
    Case("gelu_tanh(mm0) * column(x0); mm1 + row(x1)", ((640, "column"), (100, "column")), (777, 1024), dtype=FP32),
    Case("tanh(mm0) - erf(mm1)", ((640, "column"), (640, "column")), (16, 1024), dtype=FP16),
)


@pytest.mark.parametrize("strategy", ["tile", "chunked", "library"])
@pytest.mark.parametrize("large_case", GPU_CASES, ids=str)
def test_matches_the_text_at_size(gpu_pool: RankPool, large_case: Case, strategy: str) -> None:
    gpu_pool.run(_check, large_case, strategy)


def _check_kernel(ctx: RankContext) -> None:
    """The elementwise kernel, which on the CPU runs in the interpreter: every function and every kind at once."""
    columns, dtype = 37, FP32
    sources = [f"{name}(mm0 * {kind}(x{i}))" for name in FUNCTIONS for i, kind in enumerate(KINDS)]
    epilogue = parse("; ".join([*sources, "cast(mm1 - mm0, bf16)", "mm2", "mm3 + row(x1)"]))
    mm = [torch.randn(50, columns, device=ctx.device, dtype=dtype) for _ in range(4)]
    extras = [torch.randn(extra_shape(kind, mm[0].shape), device=ctx.device, dtype=dtype) for kind in KINDS]
    finisher = Finisher(epilogue, mm[0], extras)
    assert finisher.biases == {3: 1}
    got = finisher.new_outputs(mm)
    finisher._elementwise(mm, extras, got)
    want = evaluate(epilogue, [one.double() for one in mm], extras)
    for index, one in enumerate(got):
        rtol, atol = TOLERANCES[one.dtype]
        torch.testing.assert_close(one.double(), want[index], rtol=rtol, atol=atol)
    # The product itself, and the one that has its bias already.
    *_, plain, biased = finisher.finish(mm, extras)
    assert plain is mm[2] and biased is mm[3]


def test_the_elementwise_kernel(pool: RankPool) -> None:
    if pool.world_size == 2:
        pool.run(_check_kernel)
