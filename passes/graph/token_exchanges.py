"""Proofs that an all-to-all sends whole rows, and that these are tokens on their way to their experts, or back.

    rows -> all_to_all -> index by a routing -> _grouped_mm, and back       grouped matmuls have the rows
    index(x, [order of a sort]) -> all_to_all, and back                     the rows are sorted
    all_to_all, searchsorted(counts, rows)                                  the rows that come are told apart by counts
    the gradient of one of these                                            it sends the gradients of the same rows

Where sizes are read from the device, a graph ends between an exchange and the experts. What picks the rows that are
sent, or what names those that come, is in its graph then. Its gradient may be alone in the graph of the backward: only
the joint graph shows of which exchange it is the gradient, so `normalize/mark_exchanges.py` marks it there.

Whether the sizes are equal says nothing. A routing may give every rank as much, and may do so on one rank alone. Only
counts without a number of ranks in them prove nothing then: documents in a sequence are counted like that too.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import getitem
from typing import Any

import torch
from torch import fx

from ditron_inductor.passes.graph import proofs
from ditron_inductor.passes.graph.all_to_all import read_all_to_all
from ditron_inductor.passes.graph.collectives import ALL_TO_ALL
from ditron_inductor.passes.graph.other_matmuls import other_matmul
from ditron_inductor.passes.graph.reasons import ReasonCode
from ditron_inductor.passes.graph.routes import MOVES, PICKS, ROUTES, SCALES, downwards, is_one
from ditron_inductor.passes.graph.sorts import is_order, sorted_slots

aten = torch.ops.aten
TOKENS = "ditron_tokens"
"""The mark of an all-to-all that sends gradients of rows, which the joint graph proved to be tokens."""
SEQUENCE = "seq_nr"
"""Torch's own mark in a joint graph: the ops of a function and those of its gradient have one number."""
NUMBERS: frozenset[object] = frozenset(
    {torch.ops.prims.iota.default, aten.arange.default, aten.arange.start, aten.arange.start_step}
)
"""Ops that make numbers in a row."""
WAYS: frozenset[object] = MOVES | proofs.CASTS | {aten.select.int}
"""Ops between an all-to-all and what multiplies its rows. One picks the slots of one expert."""
OF_A_DIM: frozenset[object] = proofs.CUTS | PICKS | {aten.cat.default, aten.select.int, aten.sum.dim_IntList}
"""Ops that cut, put together, pick or add up along some dimensions."""


def shows_tokens(exchange: fx.Node) -> fx.Node | None:
    """Returns what shows that a collective is an all-to-all of tokens to their experts, or back, perhaps itself; None
    if nothing does.
    """
    if exchange.target is not ALL_TO_ALL:
        return None
    for matmul, rows in _beside(exchange, WAYS | SCALES | ROUTES):
        # What has more dimensions is weights, or gradients of them.
        if other_matmul(matmul) is ReasonCode.GROUPED_MATMUL and proofs.fake(rows).ndim == 2:
            return matmul
    return exchange if exchange.meta.get(TOKENS) == exchange.name else _sorts_rows(exchange)


def matmul_of_rows(exchange: fx.Node) -> fx.Node | None:
    """Returns a matmul that has the rows of an all-to-all as its own rows, or whose rows it sends; None without one."""
    if exchange.target is not ALL_TO_ALL:
        return None
    for matmul, rows in _beside(exchange, WAYS):
        first = next((matmul.args[at] for at in _FIRST.get(matmul.target, ())), None)
        if matmul.target in proofs.MATMULS and rows in (matmul, first):
            return matmul
    return None


_FIRST: dict[object, tuple[int, ...]] = {
    **dict.fromkeys((aten.mm.default, aten.mm.dtype, aten.bmm.default), (0,)),
    **dict.fromkeys((aten.addmm.default, aten.baddbmm.default), (1,)),
}
"""The place of the operand whose rows are those of the product."""


def may_be_gradient(exchange: fx.Node, of: fx.Node) -> bool:
    """Returns whether an all-to-all of a backward is numbered as a part of the gradient of another one, in a joint
    graph, and sends back what that one has sent.
    """
    number = exchange.meta.get(SEQUENCE)
    if number is None or number != of.meta.get(SEQUENCE):
        return False
    back, there = proofs.arguments(exchange), proofs.arguments(of)
    reverse = {"input_split_sizes": "output_split_sizes", "output_split_sizes": "input_split_sizes"}
    return all(back[name] == there[reverse.get(name, name)] for name in (*reverse, "group_name"))


def _beside(exchange: fx.Node, ops: frozenset[object]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yields (an op that is none of `ops`, those rows that it takes or makes), for all rows that an all-to-all brings,
    and then for those that it sends, as far as the ops keep whole what was a row of it.
    """
    width = proofs.fake(exchange).shape[-1]

    def takers(node: fx.Node) -> Iterator[fx.Node]:
        return (user for user in node.users if is_one(user, ops) and _keeps(user) and _is_wide(user, width))

    def makers(node: fx.Node) -> Iterator[fx.Node]:
        through = is_one(node, ops) and _keeps(node)
        return (source for source in node.all_input_nodes if through and _is_wide(source, width))

    for rows in proofs.reached([exchange], takers):
        yield from ((user, rows) for user in rows.users if not is_one(user, ops))
    for rows in proofs.reached([proofs.operand(exchange)], makers):
        maker = proofs.operand(rows) if rows.target is getitem else rows
        if not is_one(maker, ops):
            yield maker, rows


def _is_wide(node: fx.Node, width: object) -> bool:
    """Returns whether a node has rows of so many elements, or is the pieces of what may have them."""
    value = proofs.tensor(node)
    if value is None:
        return node.target in proofs.CUTS
    return value.dtype.is_floating_point and value.ndim > 0 and proofs.known_equal(value.shape[-1], width)


def _keeps(node: fx.Node) -> bool:
    """Returns whether an op leaves the last dimension where it is, and neither cuts it, picks from it nor adds it up.
    A view that leaves its size leaves the rows.
    """
    if node.target in proofs.TRANSPOSES:
        return proofs.permutation(node)[-1] == proofs.fake(node).ndim - 1
    if not is_one(node, OF_A_DIM):
        return True
    bound = proofs.arguments(node)
    whole = proofs.fake(node.all_input_nodes[0])
    if "indices" in bound:
        numbers = [proofs.tensor(one) for one in bound["indices"]]
        return sum(one.ndim if one is not None and one.dtype is torch.bool else 1 for one in numbers) < whole.ndim
    dims = _listed(bound.get("dim", ()))
    return dims != (None,) and all(dim % whole.ndim != whole.ndim - 1 for dim in dims)


def _listed(argument: Any) -> tuple[Any, ...]:
    return tuple(argument) if isinstance(argument, (list, tuple)) else (argument,)


def _sorts_rows(exchange: fx.Node) -> fx.Node | None:
    """Returns what shows that an all-to-all sends rows in the order of a sort, brings them back to where they were, or
    brings rows of which others' counts say what they are; None if nothing does.
    """
    received = proofs.fake(exchange)
    if received.ndim != 2 or not received.dtype.is_floating_point:
        return None
    source = proofs.views_up(proofs.operand(exchange))[-1]
    picked = proofs.indexed_rows(source)
    if picked is not None and _is_of_sort(picked[1]) and _is_wide(source, received.shape[-1]):
        return source
    for user, _ in _beside(exchange, MOVES):
        numbers = user.args[1] if user.target in (aten.index.Tensor, aten.index_put.default) else None
        if isinstance(numbers, (list, tuple)) and len(numbers) == 1 and _is_of_sort(numbers[0]):
            return user
    unequal = read_all_to_all(exchange) is ReasonCode.UNEQUAL_SPLITS
    num_ranks = len(proofs.arguments(exchange)["output_split_sizes"])
    for search in exchange.graph.find_nodes(op="call_function", target=aten.searchsorted.Tensor):
        bound = proofs.arguments(search)
        summed, numbers = (proofs.views_up(bound[name])[-1] for name in ("sorted_sequence", "self"))
        counted = summed.target is aten.cumsum.default and numbers.target in NUMBERS
        if counted and proofs.same_shape(tuple(proofs.fake(numbers).shape), (received.shape[0],)):
            if unequal or _names_experts(search, num_ranks):
                return search
    return None


def _is_of_sort(rows: object) -> bool:
    """Returns whether numbers of rows are the indices of a sort, or their quotients."""
    if not isinstance(rows, fx.Node):
        return False
    source = proofs.views_up(rows)[-1]
    return is_order(source) or sorted_slots(source) is not None


def _names_experts(search: fx.Node, num_ranks: int) -> bool:
    """Returns whether what is found picks from the numbers of a rank's experts, once more for each rank that sends."""
    for user in downwards(search, proofs.MAY_KEEP_ORDER | {aten.clamp.default, aten.clamp_max.default}):
        table = user.args[0] if user.target is aten.index.Tensor else None
        if isinstance(table, fx.Node) and table.target is aten.repeat.default:
            numbers, repeats = table.args
            if isinstance(numbers, fx.Node) and numbers.target in NUMBERS and repeats == [num_ranks]:
                return True
    return False
