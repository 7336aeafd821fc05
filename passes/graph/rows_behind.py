"""Masks of rows that no grouped matmul reads, and masks of no rows.

    ids [S], sorted -> ge(E) -> unsqueeze [S, 1], the mask of slots elsewhere
    where(mask, 0, rows [S, ..]) -> ops by row -> _grouped_mm(.., ends of ids)      =>      rows -> ops by row -> ..

With expert parallelism the slots of other ranks' experts have ids of E and more, so they are the last ones when slots
are sorted, behind the last end. A grouped matmul reads no row behind it. So a mask in front of it changes nothing, if
nothing else reads what it makes than ops by row, and if the rows of these are read by such matmuls only.

Where a rank has all experts, no id is E or more, and the mask changes nothing whoever reads it. Some releases of
`transformers` write it there too.

A call of experts that may be elsewhere has zeros in the rows of such slots, whatever its epilogue makes of them. So a
mask of these slots behind it may be a part of it, but what is computed of the zeros may not: see `rows_before_mask`.
"""

from __future__ import annotations

import torch
from torch import fx

from ditron_inductor.passes.graph import expert_rows, proofs, rewriting
from ditron_inductor.passes.graph.slots_elsewhere import are_read_by_row
from ditron_inductor.task import schema
from ditron_inductor.task.nodes import ProductsOfExperts

aten = torch.ops.aten


def masked(node: fx.Node) -> tuple[fx.Node, fx.Node, int] | None:
    """Returns (rows [S, ..], ids [S], E) if `node` has zeros where the id of a row is E or more, and else the rows, in
    their dtype.
    """
    if node.target is not aten.where.self or not proofs.is_full(node.args[1], 0):
        return None
    mask, _, rows = node.args
    if not isinstance(mask, fx.Node) or not isinstance(rows, fx.Node) or not proofs.alike(rows, node):
        return None
    if proofs.fake(rows).dtype != proofs.fake(node).dtype:
        return None
    value, shape = proofs.fake(mask), proofs.fake(node).shape
    compared = proofs.views_up(mask)[-1]
    if compared.target is not aten.ge.Scalar or not isinstance(compared.args[1], int) or len(shape) != 2:
        return None
    by_row = proofs.same_shape(tuple(value.shape), (shape[0], 1)) and proofs.fake(compared).ndim == 1
    return (rows, proofs.operand(compared), compared.args[1]) if by_row else None


def ends_before(user: fx.Node, rows: fx.Node, ids: fx.Node, num_experts: int) -> bool:
    """Returns whether `user` is a grouped matmul of `rows` that reads none whose id is `num_experts` or more."""
    if user.target is not proofs.GROUPED:
        return False
    bound = proofs.arguments(user)
    reads = [name for name, value in bound.items() if value is rows]
    return reads == ["self"] and expert_rows.are_experts_of_rows(ids, bound["offs"], num_experts)


def changes_nothing(node: fx.Node, ids: fx.Node, num_experts: int) -> bool:
    """Returns whether `node` masks no rows, or nothing reads those that it masks."""
    if expert_rows.range_of(ids).most < num_experts:
        return True
    return are_read_by_row(node, lambda user, read: ends_before(user, read, ids, num_experts))


def rows_before_mask(node: fx.Node, call: fx.Node) -> fx.Node | None:
    """Returns the rows that `node` masks where the slots of `call` are elsewhere, in whose outputs these rows are 0;
    None if it masks others or nothing.
    """
    match, task = masked(node), schema.node_of(call)
    if match is None or not isinstance(task, ProductsOfExperts) or not task.has_zeros:
        return None
    rows, ids, num_experts = match
    experts, weights = schema.operand(call, "experts"), schema.operand(call, "weights")
    of_call = proofs.views_up(ids)[-1] is proofs.views_up(experts)[-1] and proofs.alike(ids, experts)
    return rows if of_call and proofs.fake(weights[0]).shape[0] == num_experts else None


def drop_masks(graph: fx.Graph) -> None:
    """Removes the masks that change nothing."""
    for node in list(graph.find_nodes(op="call_function", target=aten.where.self)):
        match = masked(node)
        if match is not None and changes_nothing(node, *match[1:]):
            node.replace_all_uses_with(match[0])
            rewriting.erase_unused(graph, [node])
