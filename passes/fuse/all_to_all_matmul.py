"""all_to_all -> mm becomes one `ditron::all_to_all_matmul`: this rank's rows of all ranks' tensors, side by side, times
w.

Before, as behind an attention that has all of the sequence and some of the heads (Ulysses), C columns in a head:

    x [B, W*S, h, C] -> reshape [B, W, S, h, C] -> permute [W, h, S, B, C] -> clone -> all_to_all_single -> wait
      -> reshape [W*h, S, B, C] -> permute [B, S, W*h, C] -> clone -> reshape [B*S, K] -> mm(reshape, w [K, N])

    x [B, W*S, h, C] -> shard_dim_alltoall(gather 2, shard 1) [B, S, W*h, C] -> reshape [B*S, K] -> mm

After:

    x -> reshape [B, W*S, h*C], w [K, N] -> ditron.all_to_all_matmul -> getitem 0 [B*S, N]
                                                                     -> getitem 1 [B, S, K]   only if used elsewhere

The elements may be in any order on their way: views, permutes, copies and cats of equal chunks are followed by axes.
The node reads the last tensor in front of the collective that holds rows and then columns in the order in which the
matmul has them. If each rank has several runs of columns, as with the gradients of queries, keys and values side by
side, they are `parts`. If what is received is used elsewhere too, the node returns it. The most common such user is the
weight's gradient, which is left to the library, because it contracts rows that one rank has. `addmm` with a row as its
bias counts as mm.

It must not fire when
* what is received is used elsewhere before it has the order in which the matmul reads it;
* the splits are not W equal ones, or the ranks' parts make rows of the matmul;
* no node in front of the collective has the order of the matmul;
* the weight depends on what is received, or is computed behind an op that cannot move;
* there is a cast, a bias that is no row, a batched matmul, or a dtype other than bfloat16, float16 and float32;
* it is not certain how views divide symbolic sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.graph import all_to_all, axes, proofs, rewriting
from ditron_inductor.passes.graph.all_to_all import AllToAll, read_all_to_all
from ditron_inductor.passes.graph.axes import Axis, Layout
from ditron_inductor.passes.graph.biases import Matmul, read_matmul, with_bias
from ditron_inductor.passes.graph.collectives import ALL_TO_ALL, SHARD_DIM
from ditron_inductor.passes.graph.fusion import Fusion
from ditron_inductor.passes.graph.reasons import ReasonCode, Refused, leave_unless_known
from ditron_inductor.task.nodes import AllToAllMatmul


@dataclass(frozen=True)
class Match:
    """An all-to-all and the matmul that it feeds. x: the node that the op reads as [first, W * second, parts *
    columns]. received: the node whose place the received tensor takes, [first, second, K] and views of it. first_use:
    the first node that reads elements of it. steps: all nodes from x to the views of what is received.
    """

    collective: AllToAll
    mm: fx.Node
    weight: fx.Node
    x: fx.Node
    first: Any
    second: Any
    parts: int
    received: fx.Node
    first_use: fx.Node
    return_received: bool
    steps: tuple[fx.Node, ...]


@dataclass(frozen=True)
class _Use:
    """A matmul whose first operand is a view of what is received, with this layout."""

    mm: fx.Node
    matmul: Matmul
    layout: Layout


def find_all_to_all_matmul(node: fx.Node) -> Match | Refused:
    """Proves that the all-to-all `node` feeds a matmul as drawn above, or says why not."""
    collective = read_all_to_all(node)
    if isinstance(collective, ReasonCode):
        return collective
    up, down = all_to_all.above(collective), all_to_all.below(collective)
    views = list(proofs.views_down(down.nodes[-1]))
    uses = [user for view in views for user in view.users if user not in views]
    mms = [user for user in uses if user.args and user.args[-2:][0] in views and proofs.is_matmul(user)]
    if not mms:
        return _no_matmul(uses)
    matmul = read_matmul(mms[0])
    if isinstance(matmul, ReasonCode):
        return matmul.at(mms[0])
    if not isinstance(matmul.weight, fx.Node) or matmul.rows is matmul.weight:
        return ReasonCode.OPERAND_DEPENDS.at(mms[0])
    writes = all_to_all.written(up.nodes)
    if writes is not None:
        return ReasonCode.INTERMEDIATE_USED.at(writes)
    value = proofs.fake(up.nodes[0])
    front = list(up.layouts(axes.of_shape(value.shape)))
    exchange = all_to_all.exchanged(collective, front[-1][1]) if len(front) == len(up.nodes) else None
    use = None if exchange is None else _use(down, views, mms[0], matmul, exchange[2])
    if exchange is None or use is None:
        return ReasonCode.SHAPE_UNPROVEN.at(collective.operand)
    ranks, came, _ = exchange
    rows, columns = (list(axes.leaves(dim)) for dim in use.layout)
    if not any(axis is came for axis in columns):
        turned = matmul.rows.target in proofs.TRANSPOSES
        return (ReasonCode.ROWS_CONTRACTED if turned else ReasonCode.ROWS_EXCHANGED).at(use.mm)
    outer, inner = all_to_all.split_at(columns, came)
    parts = all_to_all.concrete(axes.size_of(outer))
    found = _operand(front, ranks, rows, [*outer, *inner])
    if found is None:
        return ReasonCode.LAYOUT.at(collective.operand)
    x, place = found
    first, second = axes.size_of(rows[:place]), axes.size_of(rows[place:])
    kept = axes.size_of([*outer, *inner])
    sizes = all_to_all.rows_and_columns(first, collective.world_size * second, kept)
    if parts is None or sizes is None or all_to_all.sizes_of(down.nodes[-1]) is None:
        return ReasonCode.SHAPE_UNPROVEN.at(collective.operand)
    order = {each: index for index, each in enumerate(node.graph.nodes)}
    first_use = min(uses, key=lambda use: order[use])
    others = [user for user in uses if user is not use.mm]
    code = _unfit(collective, use, first_use, others, down.nodes[-1])
    if code is not None:
        return code
    steps = (*up.nodes[1:], *up.between, node, *down.nodes, *down.between, *views)
    return Match(
        collective,
        use.mm,
        matmul.weight,
        x,
        first,
        second,
        parts,
        down.nodes[-1],
        first_use,
        bool(others),
        tuple(dict.fromkeys(steps)),
    )


def _no_matmul(uses: list[fx.Node]) -> Refused:
    """Returns the reason why no use of what is received is a matmul with it as first operand."""
    for user in uses:
        if proofs.is_matmul(user):
            return ReasonCode.ROWS_CONTRACTED.at(user)
        if user.target in proofs.CASTS and proofs.feeds_matmul(user):
            return ReasonCode.CAST_BETWEEN.at(user)
        if user.target in proofs.SLICES and proofs.feeds_matmul(user):
            return ReasonCode.CHUNKS_PARTIAL.at(user)
        if user.target in proofs.TRANSPOSES and proofs.feeds_matmul(user):
            matrix = user.meta["val"].ndim == 2
            return (ReasonCode.ROWS_CONTRACTED if matrix else ReasonCode.INTERMEDIATE_USED).at(user)
    return ReasonCode.NO_MATMUL


def _use(down: all_to_all.Chain, views: list[fx.Node], mm: fx.Node, matmul: Matmul, came: Layout) -> _Use | None:
    """Returns the matmul with the layout of its first operand, [rows, columns]; None if that is not certain."""
    behind = list(down.layouts(came))
    value = proofs.tensor(matmul.rows)
    if len(behind) < len(down.nodes) or value is None or matmul.rows not in views:
        return None
    layout = axes.reshaped(behind[-1][1], value.shape)
    return None if layout is None else _Use(mm, matmul, layout)


def _operand(
    front: list[tuple[fx.Node, Layout]], ranks: Axis, rows: list[Axis], columns: list[Axis]
) -> tuple[fx.Node, int] | None:
    """Returns (the last node in front that has the matmul's order, the axis that the ranks precede there), or None."""
    for node, layout in reversed(front):
        order = axes.flat(layout)
        before, _ = all_to_all.split_at(order, ranks)
        others = [axis for axis in order if axis is not ranks]
        if len(before) <= len(rows) and all_to_all.same_axes(others, [*rows, *columns]):
            return node, len(before)
    return None


def _unfit(
    collective: AllToAll, use: _Use, first_use: fx.Node, others: list[fx.Node], received: fx.Node
) -> Refused | None:
    """Returns the reason why a matmul whose order is proved cannot be fused; None if it can."""
    weight, value = use.matmul.weight, proofs.fake(received)
    if proofs.depends_on(weight, {collective.wait}):
        return ReasonCode.OPERAND_DEPENDS.at(weight)
    pinned = rewriting.pinned(weight, first_use)
    if pinned is not None:
        return ReasonCode.OPERAND_LATE.at(pinned)
    if others and not proofs.row_major(value):
        return ReasonCode.INTERMEDIATE_USED.at(others[0])
    return None


def rewrite(graph: fx.Graph, match: Match, options: Options) -> fx.Node:
    """Replaces the match by one op call and returns that call."""
    collective, first_use, world_size = match.collective, match.first_use, match.collective.world_size
    rewriting.hoist(match.weight, first_use)
    first, second, value = match.first, match.second, match.x.meta["val"]
    task = AllToAllMatmul(
        scatter_dim=0 if proofs.known_equal(first, 1) else 1,
        parts=match.parts,
        return_received=match.return_received,
        **rewriting.site_fields(world_size, collective.group_name, options),
    )
    depth = match.weight.meta["val"].shape[0]
    received_shape = all_to_all.shape_of(first, second, depth)
    with graph.inserting_before(first_use):
        sizes = all_to_all.rows_and_columns(first, world_size * second, depth // world_size)
        assert sizes is not None
        shape = all_to_all.shape_of(first, world_size * second, depth // world_size)
        x = all_to_all.reshape(graph, match.x, sizes, shape)
        values = [match.mm.meta["val"]]
        if match.return_received:
            values.append(rewriting.fake_like(value, received_shape, rewriting.contiguous_strides(received_shape)))
        values.append(rewriting.new_token(value))
        call = rewriting.call_task(graph, task, {"x": x, "weight": match.weight}, match.mm, values)
        product = rewriting.output(graph, call, 0, match.mm)
        if match.return_received:
            received = rewriting.output(graph, call, 1, match.received)
            sizes = all_to_all.sizes_of(match.received)
            assert sizes is not None
            received = all_to_all.reshape(graph, received, sizes, tuple(match.received.meta["val"].shape))
            match.received.replace_all_uses_with(received)
            # Views of what is received may stand before the call, but all uses stand behind it.
            for view in match.steps:
                if view < call and view is not match.received and proofs.depends_on(view, {received}):
                    first_use.prepend(view)
    match.mm.replace_all_uses_with(with_bias(product, match.mm))
    rewriting.erase_unused(graph, [*match.steps, match.mm])
    return call


all_to_all_matmul = Fusion(AllToAllMatmul, (ALL_TO_ALL, SHARD_DIM), find_all_to_all_matmul, rewrite, leave_unless_known)
"""Fuses every all-to-all that provably feeds a matmul. The others get a reason, or keep one that says more."""
