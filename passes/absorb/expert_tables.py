"""Tables of experts as operands of an epilogue: `index(table [E, N], [experts])`, such as the biases of experts.

    expert_projections(x, experts, [weight]) [S, N] + index(table [E, N], [experts])      expert(x0), with x0 = table
    .. + index(slice(table [E, 2 N], 1, start, step=2), [experts])                        even(x0) or odd(x0)

The rows that the graph takes have to be those of the experts of the call. For many tokens, grouped_projections has the
ends of the experts in their place (see graph/expert_rows.py). They may be clamped to a range in which all experts lie.
Slots of other ranks' experts have zeros in the outputs of the call, so their rows of the table are never used.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from ditron_inductor.passes.graph import expert_rows, proofs
from ditron_inductor.task import schema
from ditron_inductor.task.nodes import GroupedProjections, SharedOperand

aten = proofs.aten
EVERY_SECOND = ("even", "odd")


def table_of_experts(node: fx.Node, call: fx.Node, width: Any) -> tuple[fx.Node, str] | None:
    """Returns (a table, the kind of extra tensor) if `node` has, for each slot of a call, the row of its expert with
    `width` columns; None if it has not.
    """
    task, indexed = schema.node_of(call), proofs.indexed_rows(node)
    if not isinstance(task, SharedOperand) or not task.of_experts or indexed is None:
        return None
    table, named = indexed
    num_experts = proofs.fake(schema.operand(call, "weights")[0]).shape[0]
    if isinstance(task, GroupedProjections):
        same = expert_rows.are_experts_of_rows(named, schema.operand(call, "ends"), num_experts)
        like = schema.operand(call, "rows")
    else:
        like = schema.operand(call, "experts")
        same = expert_rows.unclamped(named, num_experts) is proofs.views_up(like)[-1]
    if not same or not proofs.alike(named, like):
        return None
    half = every_second(table)
    source, columns = (table, width) if half is None else (half[0], 2 * width)
    value = proofs.fake(source)
    if not proofs.same_shape(tuple(value.shape), (num_experts, columns)) or not proofs.row_major(value):
        return None
    return source, "expert" if half is None else EVERY_SECOND[half[1]]


def every_second(node: fx.Node) -> tuple[fx.Node, int] | None:
    """Returns (a tensor, 0 or 1) if `node` has its even or its odd indices of the last dimension, which is even."""
    if node.target is not aten.slice.Tensor:
        return None
    bound = proofs.arguments(node)
    source = bound["self"]
    whole, part = proofs.fake(source), proofs.fake(node)
    start, step, size = bound["start"] or 0, bound["step"], whole.shape[-1]
    last = bound["dim"] % whole.ndim == whole.ndim - 1
    if not last or step != 2 or start not in (0, 1) or not isinstance(size, int) or size % 2:
        return None
    return (source, start) if proofs.known_equal(part.shape[-1], size // 2) else None
