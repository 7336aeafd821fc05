"""matmul_all_to_all: what it fuses, into which graph, and every guard that keeps it from fusing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch

from ditron_inductor.options import Options
from ditron_inductor.passes.fuse.matmul_all_to_all import Match, find_matmul_all_to_all
from ditron_inductor.passes.graph.collectives import ALL_TO_ALL, collectives
from tests.passes.exchanges import TO_HEADS, Form, heads_batch_first, heads_by_cat, heads_sequence_first
from tests.passes.graphs import (
    all_to_all,
    assert_no_new_guards,
    assert_same_on_all_ranks,
    c10d,
    fuse,
    group_name,
    only_task,
    reasons,
    text,
    traced,
)

pytestmark = pytest.mark.usefixtures("group")

aten = torch.ops.aten
X = torch.empty(2, 3, 16)
W = torch.empty(16, 4 * 2 * 5)
B = torch.empty(40)


def projected(form: Form, heads: int = 8) -> Callable[..., torch.Tensor]:
    return lambda x, w: form((x @ w).view(*x.shape[:-1], heads, -1))


def test_finder_reads_the_product_and_what_comes() -> None:
    module = traced(projected(heads_batch_first), X, W)
    (node,) = collectives(module.graph, ALL_TO_ALL)
    match = find_matmul_all_to_all(node)
    assert isinstance(match, Match)
    assert (match.first, match.second, match.parts, match.order) == (2, 3, 1, None)


def test_golden_sequence_first() -> None:
    module = traced(projected(heads_sequence_first), X, W)
    assert fuse(module) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [2, 3, 16]
w_1 [16, 40]
matmul_all_to_all = ditron.matmul_all_to_all([x_1, w_1], "gather_dim=1 parts=1 world_size=4 group_name=0 site='' trials", None)
getitem [2, 12, 10] = matmul_all_to_all[0]
reshape_default [2, 12, 2, 5] = aten.reshape(getitem, [2, 12, 2, 5])
return reshape_default
""",
    )


def test_golden_parts() -> None:
    """Queries, keys and values side by side, of one sequence."""

    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        qkv = torch.addmm(b, x, w).view(6, 3, 4, 2, 5)
        return all_to_all(qkv.permute(2, 0, 1, 3, 4).contiguous()).view(24, 3, 2, 5)

    module = traced(fn, torch.empty(6, 16), torch.empty(16, 120), torch.empty(120))
    assert fuse(module) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [6, 16]
w_1 [16, 120]
b_1 [120]
matmul_all_to_all = ditron.matmul_all_to_all([x_1, w_1, b_1], "gather_dim=0 parts=3 world_size=4 group_name=0 site='' trials has_bias", None)
getitem [24, 30] = matmul_all_to_all[0]
reshape_default [24, 3, 2, 5] = aten.reshape(getitem, [24, 3, 2, 5])
return reshape_default
""",
    )


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("form", TO_HEADS, ids=lambda form: form.__name__)
def test_fuses_every_form(form: Form, batch: int) -> None:
    after = assert_same_on_all_ranks(projected(form), torch.empty(batch, 3, 16), W, fused=1)
    assert "all_to_all_single" not in text(after.graph) and "alltoall" not in text(after.graph)
    assert "permute" not in text(after.graph), "a copy is left"


def test_fuses_an_order_that_needs_a_copy() -> None:
    """What comes is used as [heads, ranks, rows, ..]."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        sent = (x @ w).view(6, 4, 2, 5).permute(1, 2, 0, 3).contiguous()
        return all_to_all(sent).view(4, 2, 6, 5).transpose(0, 1).contiguous().relu()

    after = assert_same_on_all_ranks(fn, torch.empty(6, 16), W, fused=1)
    assert "permute" in text(after.graph)


def test_fuses_a_sum_of_matmuls() -> None:
    after = assert_same_on_all_ranks(
        lambda x, w, v, b: heads_by_cat((x @ w + b + torch.relu(x) @ v).view(2, 3, 8, 5)), X, W, W.clone(), B, fused=1
    )
    task, given = only_task(after, "matmul_all_to_all")
    assert given["bias"] == "b_1" and (task.gather_dim, task.parts, task.world_size) == (1, 1, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fuses_half_precision(dtype: torch.dtype) -> None:
    assert_same_on_all_ranks(projected(heads_batch_first), X.to(dtype), W.to(dtype), fused=1)


def test_columns_of_unknown_length_are_left_alone_without_a_guard() -> None:
    """A dynamic sequence is fused: see test_all_to_all_matmul.py."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        sent = (x @ w).view(-1, 4, 2, 5).transpose(0, 1).contiguous()
        return all_to_all(sent).view(-1, 2, 5)

    module = traced(fn, torch.empty(6, 16), W, dynamic=True)
    with assert_no_new_guards(module):
        assert fuse(module) == 0
    assert reasons(module) == ["shape_unproven"]


def twice(x: torch.Tensor, w: torch.Tensor) -> Any:
    product = (x @ w).view(2, 3, 8, 5)
    return heads_batch_first(product), product.relu()


def unequal(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    sent = (x @ w).view(6, 40)
    came: torch.Tensor = c10d.wait_tensor(c10d.all_to_all_single(sent, [1, 2, 1, 2], [1, 2, 1, 2], group_name()))
    return came


def scattered_rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return all_to_all((x @ w).view(6, 40)[:4])


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "used twice": (twice, "intermediate_used"),
    "heads that do not divide": (
        lambda x, w: torch.ops._dtensor.shard_dim_alltoall((x @ w[:, :30]).view(2, 3, 6, 5), 1, 2, group_name()),
        "shape_unproven",
    ),
    "unequal splits": (unequal, "unequal_splits"),
    "rows": (lambda x, w: all_to_all(x.view(4, -1)[:, :16] @ w), "rows_exchanged"),
    "relu": (lambda x, w: heads_batch_first((x @ w).relu().view(2, 3, 8, 5)), "pointwise_between"),
    "cast": (lambda x, w: heads_batch_first((x @ w).half().view(2, 3, 8, 5)), "cast_between"),
    "no matmul": (lambda x, w: all_to_all(x.view(4, 24).relu()) + w.sum(), "no_matmul"),
    "permuted chunks": (
        lambda x, w: all_to_all(torch.cat(torch.chunk((x @ w).view(6, 40), 4, 1)[::-1])),
        "chunks_permuted",
    ),
    "a matrix": (lambda x, w: heads_batch_first((x @ w + x.sum(-1, keepdim=True)).view(2, 3, 8, 5)), "bias"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_leaves_alone(name: str) -> None:
    fn, code = REFUSED[name]
    module = traced(fn, X, W)
    before = text(module.graph)
    assert fuse(module) == 0, before
    assert reasons(module) == [code]


def test_can_be_turned_off() -> None:
    module = traced(projected(heads_batch_first), X, W)
    assert fuse(module, Options(fusions=("matmul_reduce_scatter",))) == 0
    assert reasons(module) == ["disabled"]
