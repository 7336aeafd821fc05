"""matmul_reduce_scatter: what it fuses, into which graph, and every guard that keeps it from fusing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch

from ditron_inductor.options import Options
from ditron_inductor.passes.fuse.matmul_reduce_scatter import Match, find_matmul_reduce_scatter, matmul_reduce_scatter
from ditron_inductor.passes.graph.collectives import REDUCE_SCATTER, collectives
from tests.passes.graphs import (
    all_gather,
    assert_no_new_guards,
    assert_same_on_all_ranks,
    fuse,
    only_task,
    reasons,
    reduce_scatter,
    scatter_dim,
    text,
    traced,
)

pytestmark = pytest.mark.usefixtures("group")

aten = torch.ops.aten
A = torch.empty(32, 16)
A3 = torch.empty(2, 32, 16)
B = torch.empty(16, 24)


def inner(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return scatter_dim(a @ b, 1)


def test_finder_reads_the_product_and_the_scatter() -> None:
    module = traced(lambda a, b: scatter_dim(a @ b, 1, "avg"), A3, B)
    (node,) = collectives(module.graph, REDUCE_SCATTER)
    match = find_matmul_reduce_scatter(node)
    assert isinstance(match, Match)
    assert (match.scatter_dim, match.collective.reduce_op) == (1, "avg")
    ((lhs, sizes),) = match.lefts
    assert lhs.op == "placeholder" and sizes is None


def test_golden_dim_0() -> None:
    module = traced(lambda a, b: reduce_scatter(a @ b), A, B)
    fuse(module)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
a_1 [32, 16]
b_1 [16, 24]
matmul_reduce_scatter = ditron.matmul_reduce_scatter([a_1, b_1], "scatter_dim=0 reduce_op=sum world_size=4 group_name=0 site='' trials", None)
getitem [8, 24] = matmul_reduce_scatter[0]
return getitem
""",
    )


def test_golden_inner_dim_between_pointwise_ops() -> None:
    module = traced(lambda a, b: scatter_dim(torch.relu(a) @ b.t(), 1, "avg") + 1, A3, torch.empty(24, 16))
    fuse(module)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
a_1 [2, 32, 16]
b_1 [24, 16]
relu [2, 32, 16] = aten.relu(a_1)
t [16, 24] = aten.t(b_1)
matmul_reduce_scatter = ditron.matmul_reduce_scatter([relu, t], "scatter_dim=1 reduce_op=avg world_size=4 group_name=0 site='' trials", None)
getitem_4 [2, 8, 24] = matmul_reduce_scatter[0]
add [2, 8, 24] = aten.add.Tensor(getitem_4, 1)
return add
""",
    )


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("batch", [1, 4])
def test_fuses_every_scatter_dim_but_the_last(op: str, dim: int, batch: int) -> None:
    a = torch.empty(batch if dim else 4 * batch, 32, 16)
    after = assert_same_on_all_ranks(lambda a, b: scatter_dim(a @ b, dim, op), a, B, fused=1)
    assert not list(collectives(after.graph, REDUCE_SCATTER))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fuses_half_precision(dtype: torch.dtype) -> None:
    module = traced(inner, A3.to(dtype), B.to(dtype))
    assert fuse(module) == 1


def test_fuses_an_inner_dim_of_four_dimensions() -> None:
    assert_same_on_all_ranks(lambda a, b: scatter_dim(a @ b, 2), torch.empty(2, 3, 8, 16), B, fused=1)


@pytest.mark.parametrize("form", ["split_with_sizes", "slice"])
def test_reads_every_form_of_chunks(form: str) -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = a @ b
        if form == "split_with_sizes":
            parts = list(aten.split_with_sizes(product, [8, 8, 8, 8], 1))
        else:
            parts = [aten.slice(product, 1, start, start + 8) for start in (0, 8, 16, 24)]
        return reduce_scatter(torch.cat(parts))

    assert_same_on_all_ranks(fn, A3, B, fused=1)


def test_a_new_reshape_where_the_operand_is_two_dimensional() -> None:
    after = assert_same_on_all_ranks(lambda a, b: scatter_dim((a @ b).view(2, 16, 24), 1), A, B, fused=1)
    assert "rows [2, 16, 16] = aten.reshape(a_1, [2, 16, 16])" in text(after.graph)


def test_dynamic_shapes_are_fused_without_a_guard() -> None:
    module = traced(inner, A3, B, dynamic=True)
    with assert_no_new_guards(module):
        assert fuse(module) == 1


def test_dynamic_shapes_in_slices_of_a_known_length() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        rows = a.shape[1]
        product = (torch.cat([a, a, a, a], 1).relu().view(-1, 16) @ b).view(a.shape[0], 4 * rows, c.shape[0])
        return reduce_scatter(torch.cat(torch.split(product, rows, 1)))

    module = traced(fn, torch.empty(3, 8, 16), B, torch.empty(24), dynamic=True)
    with assert_no_new_guards(module):
        assert fuse(module) == 1
    task, given = only_task(module, "matmul_reduce_scatter")
    assert given == {"a": ["relu"], "b": ["b_1"]} and (task.scatter_dim, task.reduce_op) == (1, "sum")


def test_is_idempotent() -> None:
    module = traced(inner, A3, B)
    fuse(module)
    before = text(module.graph)
    assert matmul_reduce_scatter(module.graph, options=Options()) == 0
    assert text(module.graph) == before


def test_meta_is_copied_except_eager_input_vals() -> None:
    module = traced(inner, A3, B)
    for node in module.graph.nodes:
        node.meta |= {"eager_input_vals": ((), {}), "recompute": "kept"}
    fuse(module)
    new = [node for node in module.graph.nodes if "ditron" in str(node.target) or node.name.startswith("getitem")]
    assert len(new) == 2
    for node in new:
        assert "eager_input_vals" not in node.meta and node.meta["recompute"] == "kept"


def chunks(order: list[int], dim: int = 1) -> Callable[..., torch.Tensor]:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        parts = torch.chunk(a @ b, 4, dim)
        return reduce_scatter(torch.cat([parts[index] for index in order]))

    return fn


def product_used(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return reduce_scatter(product := a @ b), product.sin()


def view_used(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return scatter_dim(view := (a @ b).view(2, 16, 24), 1), view.sin()


def chunk_used(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    parts = torch.chunk(a @ b, 4, 1)
    return reduce_scatter(torch.cat(parts)), parts[2].sin()


def cat_used(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    whole = torch.cat(torch.chunk(a @ b, 4, 1))
    return reduce_scatter(whole), whole.sin()


def padded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a0, a1, a2, a3 = torch.split(a @ b, [8, 8, 8, 6], 1)
    return scatter_dim(torch.cat([a0, a1, a2, aten.constant_pad_nd(a3, [0, 0, 0, 2])], 1), 1)


def gathered_too(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return reduce_scatter(all_gather(a) @ b)


GUARDS: list[Any] = [
    pytest.param("chunks_permuted", chunks([1, 0, 2, 3]), (A3, B), id="permuted"),
    pytest.param("chunks_permuted", chunks([3, 2, 1, 0]), (A3, B), id="reversed"),
    pytest.param("chunks_permuted", chunks([0, 0, 2, 3]), (A3, B), id="repeated"),
    pytest.param("chunks_partial", chunks([0, 1, 2, 3, 3, 2, 1, 0]), (A3, B), id="too_many"),
    pytest.param("chunks_partial", lambda a, b: reduce_scatter((a @ b)[:28]), (A, B), id="part", marks=[]),
    pytest.param("layout", lambda a, b: scatter_dim((a @ b).view(32, 3, 8), 2), (A, B), id="last_dim_of_heads"),
    pytest.param("layout", lambda a, b: reduce_scatter((a @ b).view(32, 4, 6)), (A, B), id="heads"),
    pytest.param("layout", lambda a, b: reduce_scatter((a @ b).t().contiguous()), (A, B), id="transposed"),
    pytest.param("layout", lambda a, b: reduce_scatter((a @ b).view(-1)), (A, B), id="flat"),
    pytest.param("intermediate_used", product_used, (A, B), id="product_used"),
    pytest.param("intermediate_used", view_used, (A, B), id="view_used"),
    pytest.param("intermediate_used", chunk_used, (A3, B), id="chunk_used"),
    pytest.param("intermediate_used", cat_used, (A3, B), id="cat_used"),
    pytest.param("uneven_shards", padded, (torch.empty(2, 30, 16), B), id="padded"),
    pytest.param("cast_between", lambda a, b: reduce_scatter((a @ b).bfloat16()), (A, B), id="cast"),
    pytest.param(
        "batched_matmul",
        lambda a, b: reduce_scatter(torch.bmm(a, b)),
        (torch.empty(4, 3, 16), torch.empty(4, 16, 5)),
        id="bmm",
    ),
    pytest.param("pointwise_between", lambda a, b: reduce_scatter((a @ b) / 4), (A, B), id="pointwise"),
    pytest.param("reduce_op", lambda a, b: reduce_scatter(a @ b, "max"), (A, B), id="max"),
    pytest.param("dtype", lambda a, b: reduce_scatter(a @ b), (A.double(), B.double()), id="dtype"),
    pytest.param("no_matmul", lambda a: reduce_scatter(a.relu()), (A,), id="no_matmul"),
    pytest.param("no_matmul", lambda a: reduce_scatter(a), (A,), id="input"),
]


@pytest.mark.parametrize(("code", "fn", "args"), GUARDS)
def test_guard(code: str, fn: Callable[..., Any], args: tuple[torch.Tensor, ...]) -> None:
    module = traced(fn, *args)
    before = text(module.graph)
    assert matmul_reduce_scatter(module.graph, options=Options()) == 0
    assert text(module.graph) == before
    assert reasons(module) == [code]


def test_a_matmul_is_fused_once() -> None:
    module = traced(gathered_too, torch.empty(8, 16), B)
    assert fuse(module) == 1
    assert reasons(module) == ["already_fused"]


def test_disabled_by_option() -> None:
    module = traced(inner, A3, B)
    assert fuse(module, Options(fusions=("matmul_all_reduce",))) == 0
    assert reasons(module) == ["disabled"]
