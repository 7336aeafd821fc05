"""Sums of reductions: merged into the reduction of a sum, where every rank sees the same sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.forms.merge_reductions import merge_reductions
from ditron_inductor.passes.graph.collectives import ALL_REDUCE, REDUCE_SCATTER
from ditron_inductor.passes.normalize.normalize_collectives import normalize_collectives
from tests.passes.graphs import (
    WORLD_SIZE,
    all_reduce,
    assert_no_new_guards,
    fuse,
    reduce_scatter,
    run_ranks,
    scatter_dim,
    text,
    traced,
)

pytestmark = pytest.mark.usefixtures("group")

# A tensor each: the same one twice would be one argument of the graph.
A, B, X = (torch.empty(8, 16) for _ in range(3))
ARGS = (A, B, X, torch.empty(16))


def merged(fn: Callable[..., Any], *args: torch.Tensor, dynamic: bool = False) -> tuple[int, fx.GraphModule]:
    """How many reductions went, and the graph."""
    module = traced(fn, *args, dynamic=dynamic)
    normalize_collectives(module.graph, options=Options())
    count = merge_reductions(module.graph, options=Options())
    module.graph.lint()
    module.recompile()
    return count, module


def test_golden() -> None:
    def parallel_blocks(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return (all_reduce(a.tanh()) + bias) + (all_reduce(b.tanh()) + bias) + x

    _, module = merged(parallel_blocks, *ARGS)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
a_1 [8, 16]
b_1 [8, 16]
x_1 [8, 16]
bias_1 [16]
tanh [8, 16] = aten.tanh(a_1)
tanh_1 [8, 16] = aten.tanh(b_1)
add_tensor [8, 16] = aten.add.Tensor(tanh, tanh_1)
all_reduce_1 [8, 16] = _c10d_functional.all_reduce(add_tensor, 'sum', '0')
wait_tensor_1 [8, 16] = _c10d_functional.wait_tensor(all_reduce_1)
add_tensor_1 [8, 16] = aten.add.Tensor(wait_tensor_1, bias_1)
add_tensor_2 [8, 16] = aten.add.Tensor(add_tensor_1, bias_1)
add_tensor_3 [8, 16] = aten.add.Tensor(add_tensor_2, x_1)
return add_tensor_3
""",
    )


def test_golden_scatter() -> None:
    a, b = torch.empty(2, 8, 16), torch.empty(2, 8, 16)
    _, module = merged(lambda a, b: scatter_dim(a.tanh(), 1) + scatter_dim(b.sin(), 1), a, b)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
a_1 [2, 8, 16]
b_1 [2, 8, 16]
tanh [2, 8, 16] = aten.tanh(a_1)
sin [2, 8, 16] = aten.sin(b_1)
add_tensor [2, 8, 16] = aten.add.Tensor(tanh, sin)
split_1 = aten.split.Tensor(add_tensor, 2, 1)
getitem_4 [2, 2, 16] = split_1[0]
getitem_5 [2, 2, 16] = split_1[1]
getitem_6 [2, 2, 16] = split_1[2]
getitem_7 [2, 2, 16] = split_1[3]
cat_1 [8, 2, 16] = aten.cat([getitem_4, getitem_5, getitem_6, getitem_7])
reduce_scatter_tensor_1 [2, 2, 16] = _c10d_functional.reduce_scatter_tensor(cat_1, 'sum', 4, '0')
wait_tensor_1 [2, 2, 16] = _c10d_functional.wait_tensor(reduce_scatter_tensor_1)
return wait_tensor_1
""",
    )


MERGED: dict[str, Callable[..., Any]] = {
    "two": lambda a, b, x, bias: all_reduce(a) + all_reduce(b),
    "avg": lambda a, b, x, bias: all_reduce(a, "avg") + all_reduce(b, "avg"),
    "residual_first": lambda a, b, x, bias: x + all_reduce(a) + all_reduce(b),
    "residual_last": lambda a, b, x, bias: x + (all_reduce(b) + (all_reduce(a) + bias)),
    "viewed": lambda a, b, x, bias: all_reduce(a).view(2, 4, 16) + all_reduce(b).view(2, 4, 16),
    "viewed_before": lambda a, b, x, bias: all_reduce(a.view(2, 4, 16)) + all_reduce(b.view(2, 4, 16)),
    "views_of_different_shapes": lambda a, b, x, bias: all_reduce(a.view(-1)).view(8, 16) + all_reduce(b) + x,
    "an_expert_for_all": lambda a, b, x, bias: (
        all_reduce(a.relu()).view(2, 4, 16) + all_reduce((b @ x.T @ x).view(2, 4, 16))
    ),
    "scatter": lambda a, b, x, bias: reduce_scatter(a) + reduce_scatter(b) + bias,
    "scatter_inner": lambda a, b, x, bias: scatter_dim(a.view(1, 8, 16), 1) + scatter_dim(b.view(1, 8, 16), 1),
    "scatter_columns": lambda a, b, x, bias: scatter_dim(a, 1) + scatter_dim(b, 1),
    "one_matmul": lambda a, b, x, bias: all_reduce(a @ b.T @ x) + all_reduce(b),
}


@pytest.mark.parametrize("fn", MERGED.values(), ids=MERGED)
def test_merged(fn: Callable[..., Any]) -> None:
    count, module = merged(fn, *ARGS)
    assert count == 1
    left = [node for node in module.graph.nodes if node.target in (ALL_REDUCE, REDUCE_SCATTER)]
    assert len(left) == 1
    generator = torch.Generator().manual_seed(0)
    inputs = [[torch.randn(arg.shape, generator=generator) for arg in ARGS] for _ in range(WORLD_SIZE)]
    torch.testing.assert_close(run_ranks(module, inputs), run_ranks(traced(fn, *ARGS), inputs))


def test_three_and_two_kinds() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        sums = all_reduce(a) + all_reduce(b) + all_reduce(a * b)
        return sums + all_reduce(a, "avg") + all_reduce(b, "avg")

    count, module = merged(fn, A, B)
    assert count == 3
    assert len(module.graph.find_nodes(op="call_function", target=ALL_REDUCE)) == 2


@pytest.mark.parametrize("reduced", [all_reduce, reduce_scatter])
def test_two_biased_products_are_fused_as_one(reduced: Callable[..., torch.Tensor]) -> None:
    """Parallel blocks of DTensor plans: the sum of the biases belongs to the product."""
    args = (
        torch.empty(8, 6),
        torch.empty(6, 16),
        torch.empty(8, 5),
        torch.empty(5, 16),
        torch.empty(16),
        torch.empty(16),
    )

    def fn(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor, e: torch.Tensor, f: torch.Tensor) -> Any:
        return reduced(torch.addmm(e / 4, a, b)) + reduced(torch.addmm(f / 4, c, d))

    _, module = merged(fn, *args)
    assert fuse(module) == 1
    generator = torch.Generator().manual_seed(0)
    inputs = [[torch.randn(arg.shape, generator=generator) for arg in args] for _ in range(WORLD_SIZE)]
    torch.testing.assert_close(run_ranks(module, inputs), run_ranks(traced(fn, *args), inputs))


def two_sums(a: torch.Tensor, b: torch.Tensor) -> Any:
    one = all_reduce(a) + b
    return one + all_reduce(b), one.sin()


def padded(a: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(a, (0, 0, 0, 4))


LEFT: dict[str, Callable[..., Any]] = {
    "used_otherwise": lambda a, b: ((one := all_reduce(a)) + all_reduce(b), one.sin()),
    "sum_used_otherwise": two_sums,
    "scaled": lambda a, b: torch.add(all_reduce(a), all_reduce(b), alpha=2),
    "subtracted": lambda a, b: all_reduce(a) - all_reduce(b),
    "ops_differ": lambda a, b: all_reduce(a) + all_reduce(b, "avg"),
    "max": lambda a, b: all_reduce(a, "max") + all_reduce(b, "max"),
    "dtypes_differ": lambda a, b: all_reduce(a.bfloat16()) + all_reduce(b),
    "shapes_differ": lambda a, b: all_reduce(a) + all_reduce(b[0]),
    "kinds_differ": lambda a, b: all_reduce(a[:2]) + reduce_scatter(b),
    "dims_differ": lambda a, b: scatter_dim(a.view(4, 4, 8), 0) + scatter_dim(b.view(1, 16, 8), 1),
    # DTensor, where the dimension does not divide: the last rank cuts its result before it adds.
    "padded": lambda a, b: reduce_scatter(padded(a)) + reduce_scatter(padded(b)),
    "padded_inner": lambda a, b: scatter_dim(padded(a)[None], 1) + scatter_dim(padded(b)[None], 1),
    "padded_chunks": lambda a, b: reduce_scatter(torch.cat([padded(a)])) + reduce_scatter(torch.cat([padded(b)])),
}


@pytest.mark.parametrize("fn", LEFT.values(), ids=LEFT)
def test_left_alone(fn: Callable[..., Any]) -> None:
    assert merged(fn, A, B)[0] == 0


def test_fusions_of_both_are_not_lost() -> None:
    """Two matmuls with their reductions stay two, unless the sum of both is fused as one."""
    fn = lambda a, b: all_reduce(a @ b.T) + all_reduce(b @ a.T)  # noqa: E731
    module = traced(fn, A, B)
    assert fuse(module)
    assert not module.graph.find_nodes(op="call_function", target=ALL_REDUCE)


def test_nothing_without_fusions() -> None:
    assert merge_reductions(traced(MERGED["two"], *ARGS).graph, options=Options(fusions=())) == 0


def test_dynamic_shapes() -> None:
    module = traced(MERGED["residual_first"], *ARGS, dynamic=True)
    with assert_no_new_guards(module):
        normalize_collectives(module.graph, options=Options())
        assert merge_reductions(module.graph, options=Options()) == 1
    assert merge_reductions(module.graph, options=Options()) == 0


def test_means_of_whole_numbers_stay_apart() -> None:
    """Each is cut to a whole number."""
    numbers = torch.empty(8, 16, dtype=torch.int64), torch.empty(8, 16, dtype=torch.int64)
    assert merged(lambda a, b: all_reduce(a, "avg") + all_reduce(b, "avg"), *numbers)[0] == 0
    assert merged(lambda a, b: all_reduce(a) + all_reduce(b), *numbers)[0] == 1
