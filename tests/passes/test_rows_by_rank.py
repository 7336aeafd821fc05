"""Rows between a gather and a scatter of several sequences keep the order of the ranks, if nothing needs another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from torch.nn.functional import silu

from ditron_inductor import pipeline
from ditron_inductor.options import Options
from ditron_inductor.passes.forms.rows_by_rank import rows_by_rank
from ditron_inductor.passes.normalize.normalize_collectives import normalize_collectives
from ditron_inductor.task.verify import task_calls
from tests.passes.graphs import (
    WORLD_SIZE,
    assert_no_new_guards,
    compiled_graphs,
    gather_dim,
    rewritten,
    run_ranks,
    scatter_dim,
    text,
    traced,
)

pytestmark = pytest.mark.usefixtures("group")

Tensor = torch.Tensor
B, S, D, F = 3, 2, 16, 24
WHOLE = S * WORLD_SIZE
X, UP, GATE, DOWN = torch.empty(B, S, D), torch.empty(D, F), torch.empty(D, F), torch.empty(F, D)
BIAS = torch.empty(F)
OPERANDS = (X, UP, GATE, DOWN, BIAS)


def gathered(x: Tensor) -> Tensor:
    return gather_dim(x, 1)


def scattered(y: Tensor) -> Tensor:
    return scatter_dim(y, 1)


def layer(x: Tensor, up: Tensor, gate: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    whole = gathered(x)
    return scattered((silu(whole @ gate) * (whole @ up)) @ down) + x


def test_golden() -> None:
    count, _, module = rewritten(
        rows_by_rank, lambda x, up, down: scattered(torch.relu(gathered(x) @ up) @ down), X, UP, DOWN
    )
    assert count == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [3, 2, 16]
up_1 [16, 24]
down_1 [24, 16]
all_gather_into_tensor [12, 2, 16] = _c10d_functional.all_gather_into_tensor(x_1, 4, '0')
wait_tensor [12, 2, 16] = _c10d_functional.wait_tensor(all_gather_into_tensor)
reshape_default [3, 8, 16] = aten.reshape(wait_tensor, [3, 8, 16])
view [24, 16] = aten.reshape(reshape_default, [24, 16])
mm [24, 24] = aten.mm(view, up_1)
_unsafe_view [3, 8, 24] = aten._unsafe_view(mm, [3, 8, 24])
relu [3, 8, 24] = aten.relu(_unsafe_view)
view_1 [24, 24] = aten.view(relu, [24, 24])
mm_1 [24, 16] = aten.mm(view_1, down_1)
_unsafe_view_1 [3, 8, 16] = aten.reshape(mm_1, [3, 8, 16])
reshape_default_1 [12, 2, 16] = aten.reshape(_unsafe_view_1, [12, 2, 16])
reduce_scatter_tensor [3, 2, 16] = _c10d_functional.reduce_scatter_tensor(reshape_default_1, 'sum', 4, '0')
wait_tensor_1 [3, 2, 16] = _c10d_functional.wait_tensor(reduce_scatter_tensor)
return wait_tensor_1
""",
    )


def centred(x: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, -1, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + 1e-5)


def in_four_dims(x: Tensor, up: Tensor, gate: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    """Tokens in the third dimension."""
    whole = gather_dim(x.view(B, 1, S, D).repeat(1, 2, 1, 1), 2)
    return scatter_dim((whole @ up) @ down, 2)


def in_heads(x: Tensor, up: Tensor, gate: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    """A norm of each head, and heads that are put in another order, behind the rows."""
    heads = (gathered(x) @ up).view(B, WHOLE, 4, F // 4)
    normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + 1e-5)
    return scattered(normed.transpose(2, 3).reshape(B, WHOLE, F) @ down)


def of_pieces(x: Tensor, up: Tensor, gate: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    one, two = (gathered(x) @ torch.cat([up, gate], 1)).chunk(2, -1)
    return scattered(torch.cat([silu(one)[..., : F // 2], two[..., F // 2 :]], -1) @ down)


def twice(x: Tensor, up: Tensor, gate: Tensor, down: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """One gather with two scatters, and what it makes with a third."""
    first = scattered(gathered(x) @ up @ down)
    whole = gathered(first + x)
    return scattered(silu(whole @ up) @ down), scattered(whole.float() * 2)


FIRES: dict[str, tuple[Callable[..., Any], int]] = {
    "gate and up": (layer, 1),
    "biases": (lambda x, up, gate, down, bias: scattered((gathered(x) @ up + bias) @ down), 1),
    "addmm": (
        lambda x, up, gate, down, bias: scattered(
            torch.addmm(bias, gathered(x).view(-1, D), up).view(B, WHOLE, F) @ down
        ),
        1,
    ),
    "norm": (lambda x, up, gate, down, bias: scattered(centred(gathered(x)) @ up @ down), 1),
    "norm of products": (lambda x, up, gate, down, bias: scattered((centred(gathered(x) @ up) * bias) @ down), 1),
    "casts": (lambda x, up, gate, down, bias: scattered((gathered(x).double() @ up.double()).float() @ down), 1),
    "nothing in between": (lambda x, *rest: scattered(gathered(x)), 1),
    "four dimensions": (in_four_dims, 1),
    "heads": (in_heads, 1),
    "pieces": (of_pieces, 1),
    "twice": (twice, 2),
}


@pytest.mark.parametrize("name", FIRES, ids=lambda name: name.replace(" ", "_"))
def test_computes_the_same(name: str) -> None:
    fn, wanted = FIRES[name]
    count, before, after = rewritten(rows_by_rank, fn, *OPERANDS)
    assert count == wanted and rows_by_rank(after.graph, options=Options()) == 0
    regroupings = text(before.graph).count("aten.cat") - text(after.graph).count("aten.cat")
    assert regroupings >= 2 * wanted
    drawn = torch.Generator().manual_seed(0)
    shared = [torch.randn(one.shape, generator=drawn) for one in OPERANDS[1:]]
    inputs = [[torch.randn(X.shape, generator=drawn), *shared] for _ in range(WORLD_SIZE)]
    for got, value in zip(run_ranks(after, inputs), run_ranks(before, inputs), strict=True):
        torch.testing.assert_close(got, value)


def places(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape) / 7


NEVER: dict[str, Callable[..., Any]] = {
    "tokens are mixed": lambda x, up, gate, down, bias: scattered(torch.softmax(gathered(x) @ up, 1) @ down),
    "a sum of all rows": lambda x, up, gate, down, bias: scattered((y := gathered(x) @ up) * y.sum((0, 1)) @ down),
    # These have as many rows afterwards as before.
    "sums that look like rows": lambda x, up, gate, down, bias: scattered(
        (y := gathered(x) @ up) * y.view(B, WHOLE, B, WHOLE).sum((0, 1)).unsqueeze(-1) @ down
    ),
    "one sequence that looks like all": lambda x, up, gate, down, bias: scattered(
        (gathered(x) @ up)[:1].view(B, WHOLE, F // B) @ down[: F // B]
    ),
    "columns that look like rows": lambda x, up, gate, down, bias: scattered(
        ((gathered(x) @ up).view(B * WHOLE, F).t() @ down).view(B, WHOLE, D)
    ),
    "tokens are added up": lambda x, up, gate, down, bias: scattered(gathered(x).cumsum(1) @ up @ down),
    "places": lambda x, up, gate, down, bias: scattered((gathered(x) + places(WHOLE, D)) @ up @ down),
    "sequences": lambda x, up, gate, down, bias: scattered((gathered(x) + places(B, 1, 1)) @ up @ down),
    "rows of others": lambda x, up, gate, down, bias: scattered(
        gathered(x) @ up @ down + bias[:D] * torch.ones(B, WHOLE, 1)
    ),
    "tokens are turned": lambda x, up, gate, down, bias: scattered(gathered(x).flip(1) @ up @ down),
    "some tokens": lambda x, up, gate, down, bias: scattered(gathered(x)[:, :WORLD_SIZE] @ up @ down),
    "sequences as tokens": lambda x, up, gate, down, bias: scatter_dim(
        (gathered(x) @ up @ down).transpose(0, 1).contiguous(), 0
    ),
    "rows that are columns": lambda x, up, gate, down, bias: (
        scattered((y := gathered(x)) @ up @ down),
        y.view(-1, D).t() @ torch.ones(B * WHOLE, 2),
    ),
    "returned": lambda x, up, gate, down, bias: ((y := gathered(x) @ up), scattered(y @ down)),
    "the gathered one is returned": lambda x, up, gate, down, bias: ((y := gathered(x)), scattered(y @ up @ down)),
    "nothing is scattered": lambda x, up, gate, down, bias: gathered(x) @ up,
    "scattered columns": lambda x, up, gate, down, bias: scatter_dim(gathered(x) @ up @ down, 2),
    "scattered sequences": lambda x, up, gate, down, bias: scatter_dim(
        (gathered(x) @ up @ down).repeat(WORLD_SIZE, 1, 1), 0
    ),
    "dropped at random": lambda x, up, gate, down, bias: scattered(
        torch.nn.functional.dropout(gathered(x) @ up, 0.5) @ down
    ),
    "one sequence": lambda x, up, gate, down, bias: scattered(gathered(x[:1]) @ up @ down),
    "columns are gathered": lambda x, up, gate, down, bias: scatter_dim(gather_dim(x, 2) * 2, 2),
    "a batched product": lambda x, up, gate, down, bias: scattered(torch.bmm(gathered(x), up.expand(B, D, F)) @ down),
}


@pytest.mark.parametrize("name", NEVER, ids=lambda name: name.replace(" ", "_"))
def test_where_the_order_of_rows_matters_it_stays(name: str) -> None:
    count, before, after = rewritten(rows_by_rank, NEVER[name], *OPERANDS)
    assert count == 0 and text(before.graph) == text(after.graph)


def test_it_is_left_out_with_all_fusions() -> None:
    module = traced(layer, *OPERANDS)
    normalize_collectives(module.graph, options=Options())
    assert rows_by_rank(module.graph, options=Options(fusions=())) == 0


def test_a_size_that_is_not_known() -> None:
    module = traced(layer, *OPERANDS, dynamic=True)
    normalize_collectives(module.graph, options=Options())
    with assert_no_new_guards(module):
        assert rows_by_rank(module.graph, options=Options()) == 0


def test_both_sites_have_one_run_of_rows_for_each_rank() -> None:
    bf16 = [one.bfloat16() for one in OPERANDS]
    with torch.no_grad():
        (module,) = compiled_graphs(layer, *bf16)
    pipeline.run(module.graph, Options())
    gather, scatter = (task for _, task in task_calls(module.graph))
    assert (gather.kind, gather.gather_dim, scatter.kind, scatter.scatter_dim) == (
        "all_gather_matmul", 0, "matmul_reduce_scatter", 0,
    )  # fmt: skip


def test_training_keeps_the_order_of_tokens() -> None:
    """What is gathered is kept for the backward."""
    x, *weights = (one.bfloat16().requires_grad_() for one in OPERANDS)
    graphs = compiled_graphs(layer, x, *weights)
    assert len(graphs) == 2
    assert sum(rows_by_rank(module.graph, options=Options()) for module in graphs) == 0
