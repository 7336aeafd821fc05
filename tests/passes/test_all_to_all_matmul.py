"""all_to_all_matmul: what it fuses, into which graph, and every guard that keeps it from fusing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch

from ditron_inductor.options import Options
from ditron_inductor.passes.fuse.all_to_all_matmul import Match, find_all_to_all_matmul
from ditron_inductor.passes.graph.collectives import ALL_TO_ALL, collectives
from tests.passes.exchanges import (
    TO_HEADS,
    TO_ROWS,
    Form,
    rows_batch_first,
    rows_sequence_first,
)
from tests.passes.graphs import (
    all_to_all,
    assert_same_on_all_ranks,
    compiled_graphs,
    fuse,
    reasons,
    text,
    traced,
)

pytestmark = pytest.mark.usefixtures("group")

aten = torch.ops.aten
X = torch.empty(2, 12, 2, 5)
W = torch.empty(40, 16)
B = torch.empty(16)


def projected(form: Form) -> Callable[..., torch.Tensor]:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return form(x).flatten(-2) @ w

    return fn


def test_finder_reads_what_comes_and_its_matmul() -> None:
    module = traced(projected(rows_batch_first), X, W)
    (node,) = collectives(module.graph, ALL_TO_ALL)
    match = find_all_to_all_matmul(node)
    assert isinstance(match, Match)
    assert (match.first, match.second, match.parts, match.return_received) == (1, 6, 1, False)


def test_golden_sequence_first() -> None:
    module = traced(projected(rows_sequence_first), X, W)
    assert fuse(module) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [2, 12, 2, 5]
w_1 [40, 16]
view [2, 4, 3, 2, 5] = aten.reshape(x_1, [2, 4, 3, 2, 5])
reshape_default [2, 12, 10] = aten.reshape(view, [2, -1, 10])
all_to_all_matmul = ditron.all_to_all_matmul([reshape_default, w_1], "scatter_dim=1 parts=1 world_size=4 group_name=0 site='' trials", None)
getitem [6, 16] = all_to_all_matmul[0]
_unsafe_view [2, 3, 16] = aten._unsafe_view(getitem, [2, 3, 16])
return _unsafe_view
""",
    )


def test_golden_received_and_bias() -> None:
    """As in training: what came is kept for the weight's gradient."""

    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
        rows = rows_batch_first(x).view(6, 40)
        return torch.addmm(b, rows, w), rows.t() @ rows

    module = traced(fn, X, W, B)
    assert fuse(module) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [2, 12, 2, 5]
w_1 [40, 16]
b_1 [16]
view [2, 4, 3, 2, 5] = aten.reshape(x_1, [2, 4, 3, 2, 5])
transpose [4, 2, 3, 2, 5] = aten.transpose.int(view, 0, 1)
clone [4, 2, 3, 2, 5] = aten.clone(transpose, memory_format=torch.contiguous_format)
reshape_default [24, 10] = aten.reshape(clone, [-1, 10])
all_to_all_matmul = ditron.all_to_all_matmul([reshape_default, w_1], "scatter_dim=0 parts=1 return_received world_size=4 group_name=0 site='' trials", None)
getitem [6, 16] = all_to_all_matmul[0]
getitem_1 [6, 40] = all_to_all_matmul[1]
biased [6, 16] = aten.add.Tensor(getitem, b_1)
t [40, 6] = aten.t(getitem_1)
mm [40, 40] = aten.mm(t, getitem_1)
return (biased, mm)
""",
    )


def test_golden_parts() -> None:
    """The gradients of queries, keys and values side by side, of one sequence."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        came = all_to_all(x.view(4, 6, 3, 2, 5))
        return came.permute(1, 2, 0, 3, 4).reshape(6, 120) @ w

    module = traced(fn, torch.empty(24, 3, 2, 5), torch.empty(120, 16))
    assert fuse(module) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [24, 3, 2, 5]
w_1 [120, 16]
view [4, 6, 3, 2, 5] = aten.reshape(x_1, [4, 6, 3, 2, 5])
reshape_default [24, 30] = aten.reshape(view, [-1, 30])
all_to_all_matmul = ditron.all_to_all_matmul([reshape_default, w_1], "scatter_dim=0 parts=3 world_size=4 group_name=0 site='' trials", None)
getitem [6, 16] = all_to_all_matmul[0]
return getitem
""",
    )


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("form", TO_ROWS, ids=lambda form: form.__name__)
def test_fuses_every_form(form: Form, batch: int) -> None:
    after = assert_same_on_all_ranks(projected(form), torch.empty(batch, 12, 2, 5), W, fused=1)
    assert "all_to_all_single" not in text(after.graph) and "alltoall" not in text(after.graph)


def test_reads_an_attention_output() -> None:
    """[B, h, S, D]: one copy puts the heads of a row together, as it did before."""
    after = assert_same_on_all_ranks(
        lambda x, w: rows_sequence_first(x.transpose(1, 2).contiguous()).flatten(-2) @ w,
        torch.empty(2, 2, 12, 5),
        W,
        fused=1,
    )
    assert text(after.graph).count("aten.clone(") == 1


# shard_dim_alltoall has no backward of its own.
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("to_heads", TO_HEADS[:-1], ids=lambda form: form.__name__)
def test_fuses_both_sides_of_an_attention_and_their_gradients(to_heads: Form, dynamic: bool) -> None:
    """Forward and backward of one projection, an op on the heads, and a second projection."""

    def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads = to_heads((x @ w).view(2, x.shape[1], 8, 5))
        return rows_sequence_first(heads.sin()).flatten(-2) @ v

    arguments = [torch.randn(shape, requires_grad=True) for shape in ((2, 3, 16), (16, 40), (40, 16))]
    if dynamic:
        torch._dynamo.mark_dynamic(arguments[0], 1)
    graphs = compiled_graphs(fn, *arguments)
    assert len(graphs) == 2
    assert [fuse(graph) for graph in graphs] == [2, 2]
    assert all(not reasons(graph) for graph in graphs)


def half(x: torch.Tensor) -> torch.Tensor:
    return rows_batch_first(x).flatten(-2)[:, :, :20]


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "no matmul": (lambda x, w: rows_batch_first(x).relu(), "no_matmul"),
    "cast": (lambda x, w: rows_batch_first(x).flatten(-2).half().view(6, 40) @ w.half(), "cast_between"),
    "part": (lambda x, w: half(x).reshape(6, 20) @ w[:20], "chunks_partial"),
    "second operand": (lambda x, w: w.t()[:, :6] @ rows_batch_first(x).view(6, 40), "rows_contracted"),
    "rows of ranks": (lambda x, w: all_to_all(x.transpose(0, 1).reshape(12, 20)) @ w[:20], "rows_exchanged"),
    "gradient alone": (lambda x, w: rows_batch_first(x).view(6, 40).t() @ w[:6], "rows_contracted"),
    "used before": (
        lambda x, w: (lambda came: (came.relu(), came.permute(1, 2, 0, 3, 4).reshape(6, 40) @ w))(
            all_to_all(x.view(2, 4, 3, 2, 5).transpose(0, 1).contiguous())
        ),
        "intermediate_used",
    ),
    "dependent weight": (
        lambda x, w: (lambda rows: rows @ (w * rows.sum()))(rows_batch_first(x).view(6, 40)),
        "operand_depends",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_leaves_alone(name: str) -> None:
    fn, code = REFUSED[name]
    module = traced(fn, X, W)
    before = text(module.graph)
    assert fuse(module) == 0, before
    assert reasons(module) == [code]


def test_can_be_turned_off() -> None:
    module = traced(projected(rows_batch_first), X, W)
    assert fuse(module, Options(fusions=("matmul_reduce_scatter",))) == 0
    assert reasons(module) == ["disabled"]
