"""Epilogues of matmul_reduce_scatter and matmul_all_reduce, before and behind the reduction, every strategy: near the
fp64 value of their text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from benchmarks.tolerances import TOLERANCES
from ditron_inductor.lowering.register import register
from ditron_inductor.task import reference, schema
from ditron_inductor.task.epilogue import KINDS, Epilogue, extras_of, parse
from ditron_inductor.task.epilogue_torch import evaluate, extra_shape
from ditron_inductor.task.nodes import MatmulAllReduce, MatmulReduceScatter
from ditron_inductor.task.torch_dtypes import TORCH_DTYPES
from tests.lowering import calls
from tests.lowering.calls import Site
from tests.rank_process import RankContext
from tests.ranks import RankPool

ROUNDINGS = 4
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STRATEGIES = ("tile", "chunked", "library")


@dataclass(frozen=True)
class Case:
    """What an epilogue makes of sum_i a_i @ b_i + bias, reduced: a_i [.., depths[i]], b_i [depths[i], n].

    scatter_dim: the dimension that is scattered, where `rows`, the leading sizes, has what one rank keeps of it; None
    for an all-reduce. alike: all ranks have the same extra tensors.
    """

    epilogue: str
    rows: tuple[int, ...]
    n: int = 40
    scatter_dim: int | None = None
    depths: tuple[int, ...] = (24,)
    bias: bool = False
    dtype: torch.dtype = BF16
    reduce_op: str = "sum"
    alike: bool = False

    def __str__(self) -> str:
        kind = "reduce" if self.scatter_dim is None else f"scatter{self.scatter_dim}"
        sizes = f"{'x'.join(map(str, self.rows))}x{self.n}"
        return f"{kind}-{self.epilogue.replace(' ', '')}-{sizes}-{str(self.dtype)[6:]}-{self.reduce_op}"


EVERY_KIND = " + ".join(["mm0", *(f"{kind}(x{i})" for i, kind in enumerate(KINDS))])
PRE = "pre: cast(mm0 * column(x0), {}) + row(x1) * full(x2) + scalar(x3)"
BEHIND_PRE = "silu(mm0 + row(x4)); mm0"
RESIDUAL = "full(x0) + mm0"
SAVED = "silu(cast(mm0 + row(x0), bf16)); cast(mm0 + row(x0), bf16); mm0"
CASES = (
    Case(EVERY_KIND, (40,), scatter_dim=0, dtype=FP32),
    Case(f"{PRE.format('bf16')}; {BEHIND_PRE}", (2, 17), scatter_dim=1, bias=True, depths=(24, 8)),
    Case("pre: mm0 * column(x0); cast(mm0 * 0.5, fp32); relu(mm0)", (33,), 23, 0, dtype=FP16, reduce_op="avg"),
    # One shot; in `chunked` one kernel.
    Case(f"{PRE.format('fp16')}; mm0", (5,), dtype=FP16, depths=(24, 40), bias=True),
    Case(RESIDUAL, (1, 3), 8, reduce_op="avg"),
    # Two shots; in `chunked` one kernel, and parts.
    Case(f"{PRE.format('bf16')}; {BEHIND_PRE}", (70,), 12, bias=True),
    Case(RESIDUAL, (70,), 12, alike=True),
    Case(f"gelu_tanh({EVERY_KIND}); mm0", (70,), 50, dtype=FP32, alike=True),
    Case(f"{PRE.format('fp32')}; mm0", (2, 70), 50, dtype=FP32, alike=True),
)


def _check(ctx: RankContext, case: Case, strategy: str) -> None:
    register()
    site = Site(strategy=strategy, name=f"finished/0:{strategy}")
    epilogue, rows = parse(case.epilogue), list(case.rows)
    if case.scatter_dim is not None:
        rows[case.scatter_dim] *= ctx.world_size
    a = [calls.operand(ctx, [*rows, k], case.dtype) for k in case.depths]
    b = [calls.operand(ctx, [k, case.n], case.dtype, scale=sum(case.depths) ** -0.5) for k in case.depths]
    bias = calls.operand(ctx, [case.n], case.dtype) if case.bias else None
    flat = (torch.Size(case.rows).numel(), case.n)
    whole = (torch.Size(rows).numel(), case.n)
    before = set(extras_of(() if epilogue.pre is None else (epilogue.pre,)))
    shapes = [extra_shape(extra.kind, whole if extra in before else flat) for extra in epilogue.extras()]
    extras = [calls.operand(ctx, shape, case.dtype) for shape in shapes]
    if case.alike:
        extras = [torch.linspace(-1.0, 1.0, one.numel()).view(one.shape).to(one) for one in extras]

    def sent() -> torch.Tensor:
        """What this rank reduces, in fp64."""
        product = reference.sum_of_products(*([one.double() for one in part] for part in (a, b)))
        product = product if bias is None else product + bias.double()
        if epilogue.pre is None:
            return product
        return evaluate(Epilogue((epilogue.pre,)), [product.flatten(0, -2)], extras)[0].view(product.shape)

    fields: dict[str, Any] = {"num_products": len(a), "has_bias": bias is not None}
    fields |= {"num_extras": len(extras), "epilogue": case.epilogue}
    if case.scatter_dim is None:
        node = site.node(ctx, MatmulAllReduce, reduce_op=case.reduce_op, **fields)
        total = reference.all_reduce_(sent(), reduce_op=case.reduce_op, **site.group(ctx))
    else:
        sizes: dict[str, Any] = {"scatter_dim": case.scatter_dim, "reduce_op": case.reduce_op}
        node = site.node(ctx, MatmulReduceScatter, **sizes, **fields)
        total = reference.reduce_scatter(sent(), **sizes, **site.group(ctx))
    *outputs, token = schema.call(node, a=a, b=b, bias=bias, extras=extras)
    assert token.dtype == torch.uint8 and len(outputs) == len(epilogue.outputs)
    expected = evaluate(epilogue, [total.flatten(0, -2)], extras)
    for output, want, dtype in zip(outputs, expected, epilogue.dtypes(), strict=True):
        assert output.dtype == TORCH_DTYPES.get(dtype, case.dtype) and output.shape == total.shape
        assert output.is_contiguous()
        rtol, atol = (ROUNDINGS * ctx.world_size * one for one in TOLERANCES[case.dtype])
        torch.testing.assert_close(output.double(), want.view(total.shape), rtol=rtol, atol=atol)
        if case.alike and case.scatter_dim is None:
            calls.assert_replicated(ctx, output)


def _check_all(ctx: RankContext, cases: tuple[Case, ...], strategy: str) -> None:
    for case in cases:
        _check(ctx, case, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_matches_the_text(pool: RankPool, strategy: str) -> None:
    few = pool.device_type == "cpu" and pool.world_size > 2
    pool.run(_check_all, CASES[1::4] if few else CASES, strategy)


def _rounded(ctx: RankContext) -> None:
    """The sum is rounded before it is added to: by every strategy, as without fusion."""
    register()
    a = torch.ones(2 * ctx.world_size, 16, dtype=BF16, device=ctx.device)
    b = torch.full((16, 32), 1.0 + 2.0**-7, dtype=BF16, device=ctx.device)
    # 16 W (1 + 2**-7) + 2**-3 W: the sum, which bf16 holds, has no room for more.
    whole = (a @ b * ctx.world_size).double()[0, 0].item()
    extra = torch.full((1, 32), 2.0**-9, dtype=BF16, device=ctx.device)
    for strategy in STRATEGIES:
        site = Site(strategy=strategy, name=f"finished/1:{strategy}")
        fields = {"reduce_op": "sum", "num_extras": 1, "epilogue": "cast(mm0 + row(x0), fp32)"}
        operands = {"a": [a], "b": [b], "extras": [extra]}
        (scattered,) = site.call(ctx, MatmulReduceScatter, {**fields, "scatter_dim": 0}, **operands)
        (reduced,) = site.call(ctx, MatmulAllReduce, fields, **operands)
        for out in (scattered, reduced):
            assert torch.equal(out, torch.full_like(out, whole + 2.0**-9)), strategy


def test_what_is_rounded_is_the_sum(pool: RankPool) -> None:
    if pool.world_size == 2:
        pool.run(_rounded)


GPU_CASES = (
    Case(RESIDUAL, (1024,), 4096, 0, (3584,)),
    Case(SAVED, (2, 513), 1030, 1, (2048, 512), bias=True, reduce_op="avg"),
    Case(RESIDUAL, (2048,), 4096, depths=(3584,), alike=True),
    Case(EVERY_KIND, (777,), 640, depths=(1024,), dtype=FP32, alike=True),
    Case(SAVED, (16,), 8192, depths=(1024,), bias=True),
    Case(f"pre: mm0 * column(x0); {BEHIND_PRE.replace('x4', 'x1')}", (1024,), 4096, 0, (3584,)),
    Case(f"{PRE.format('bf16')}; mm0", (2, 513), 1030, 1, (2048, 512), bias=True),
    Case(f"{PRE.format('bf16')}; mm0", (2048,), 4096, depths=(3584,), alike=True),
    Case("pre: mm0 * column(x0); mm0", (16,), 8192, depths=(1024,), bias=True),
    Case(f"gelu({RESIDUAL})", (256,), 8192, depths=(3584,), alike=True),
)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("large_case", GPU_CASES, ids=str)
def test_matches_the_text_at_size(gpu_pool: RankPool, large_case: Case, strategy: str) -> None:
    gpu_pool.run(_check, large_case, strategy)
