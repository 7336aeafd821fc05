"""A batched matmul whose batches share one matrix becomes a matmul of all rows.

Before, where the second operand is one matrix, expanded or repeated over the batches, or there is one batch only:

    a [B, M, K], expand(w [K, N]) [B, K, N] -> bmm [B, M, N]

After:

    a -> reshape [B*M, K], w -> mm [B*M, N] -> reshape [B, M, N]

`torch.einsum` writes its products in this way (one batch with all rows), and so do `torch.matmul` of two 3-D tensors
and `bmm` with an expanded weight. The backward has the same form with the matrix transposed. If the graph has the
matrix in two dimensions already, that node is used.

The batches are a dimension of the product, whose sizes are equal on all ranks. `try_forms` does this for a matmul that
a fusion then takes. Otherwise the bmm stays in the graph.

It must not fire when
* the batches have different matrices (a true batch), or the matrix is expanded in another dimension too;
* something is added (`baddbmm`);
* it is the weighted sum of what experts return for one token, which other passes take (see graph/slot_readings.py);
* a dynamic size of the result stands in no node of the graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.sizes import shape_in_graph
from ditron_inductor.passes.graph.slot_readings import weighs_products

aten = torch.ops.aten

GROWN: frozenset[object] = frozenset({aten.expand.default, aten.repeat.default})


@dataclass(frozen=True)
class Match:
    """A bmm of `lhs [B, M, K]` with the same matrix in every batch. The matrix is `source`, in two dimensions or with
    leading ones, and transposed if `transposed`. `lhs_sizes` and `out_sizes` are the reshapes' arguments: ints, nodes
    of the graph, and -1 at most once.
    """

    bmm: fx.Node
    lhs: fx.Node
    source: fx.Node
    transposed: bool
    lhs_sizes: tuple[Any, ...]
    out_sizes: tuple[Any, ...]


def find_folded(node: fx.Node) -> Match | None:
    """Proves that the batches of a bmm share one matrix; None if they do not, or the node is no bmm."""
    if node.op != "call_function" or node.target is not aten.bmm.default:
        return None
    lhs, rhs = node.args
    out, left = proofs.tensor(node), proofs.tensor(lhs)
    if not isinstance(lhs, fx.Node) or not isinstance(rhs, fx.Node) or out is None or left is None:
        return None
    transposed = False
    source = _shared_matrix(rhs)
    if source is None and rhs.target in proofs.TRANSPOSES and proofs.permutation(rhs) == [0, 2, 1]:
        source, transposed = _shared_matrix(rhs.args[0]), True
    if source is None or weighs_products(node):
        return None
    lhs_sizes = shape_in_graph(node, (left.shape[0] * left.shape[1], left.shape[2]))
    out_sizes = shape_in_graph(node, out.shape)
    if lhs_sizes is None or out_sizes is None:
        return None
    return Match(node, lhs, source, transposed, tuple(lhs_sizes), tuple(out_sizes))


def _shared_matrix(node: Any) -> fx.Node | None:
    """The matrix that every batch of `node` is: a node of two dimensions, or of more that are 1 in front; or None."""
    value = proofs.tensor(node)
    if value is None or value.ndim != 3:
        return None
    matrix = value.shape[1:]
    if proofs.known_equal(value.shape[0], 1):
        return proofs.view_in_shape(node, matrix) or node  # type: ignore[no-any-return]
    for view in proofs.views_up(node):
        if view.target not in GROWN or proofs.keeps_order(view):
            continue
        grown, source = proofs.tensor(view), view.args[0]
        given = proofs.tensor(source)
        assert isinstance(source, fx.Node)
        if grown is None or given is None or given.ndim < 2:
            return None
        # The last two dimensions are the matrix before and after, so the ones in front are the batches.
        whole = proofs.same_shape(grown.shape[-2:], matrix) and proofs.same_shape(given.shape[-2:], matrix)
        if not whole or not all(proofs.known_equal(size, 1) for size in given.shape[:-2]):
            return None
        return proofs.view_in_shape(source, matrix) or source
    return None


def rewrite(graph: fx.Graph, match: Match) -> fx.Node:
    """Replaces the bmm by an mm behind and before a reshape, and returns the mm."""
    bmm = match.bmm
    left, out = bmm.args[0].meta["val"], bmm.meta["val"]  # type: ignore[union-attr]
    rows, columns = left.shape[0] * left.shape[1], out.shape[2]
    with graph.inserting_before(bmm):
        matrix = _matrix(graph, match)
        lhs = proofs.view_in_shape(match.lhs, (rows, left.shape[2]))
        if lhs is None:
            args = (match.lhs, list(match.lhs_sizes))
            lhs = rewriting.call(graph, aten.reshape.default, args, match.lhs, *_folded(left))
        mm = rewriting.call(graph, aten.mm.default, (lhs, matrix), bmm, (rows, columns), (columns, 1))
        strides = (out.shape[1] * columns, columns, 1)
        result = rewriting.call(graph, aten.reshape.default, (mm, list(match.out_sizes)), bmm, out.shape, strides)
    bmm.replace_all_uses_with(result)
    chain = proofs.views_up(bmm.args[1])  # type: ignore[arg-type]
    if match.transposed:
        chain += proofs.views_up(chain[0].args[0])  # type: ignore[arg-type]
    rewriting.erase_unused(graph, [bmm, *(view for view in chain if view.op == "call_function")])
    return mm


def _matrix(graph: fx.Graph, match: Match) -> fx.Node:
    """Returns the matrix in two dimensions: the source, squeezed and transposed if necessary, by views."""
    matrix = match.source
    while (value := matrix.meta["val"]).ndim > 2:
        matrix = rewriting.call(graph, aten.squeeze.dim, (matrix, 0), matrix, value.shape[1:], value.stride()[1:])
    if match.transposed:
        shape, strides = value.shape, value.stride()
        matrix = rewriting.call(graph, aten.permute.default, (matrix, [1, 0]), matrix, shape[::-1], strides[::-1])
    return matrix


def _folded(left: torch.Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns the shape and strides of `left [B, M, K]` as `[B*M, K]`: of a view if possible, else of a copy."""
    shape = (left.shape[0] * left.shape[1], left.shape[2])
    single = proofs.known_equal(left.shape[0], 1)
    is_view = single or proofs.known_equal(left.stride(0), left.shape[1] * left.stride(1))
    return shape, (left.stride(1), left.stride(2)) if is_view else (left.shape[2], 1)
