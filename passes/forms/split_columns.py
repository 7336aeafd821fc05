"""A weight of experts that holds gate and up in alternate columns is read once, for two products.

Before, as GPT-OSS stores it:

    x, experts, [weight [E, K, 2F]] -> ditron.expert_projections -> getitem 0 [S, 2F]
      -> [add(.., index(bias [E, 2F], [experts]))] -> slice(1, 0, step=2) [S, F] -> clamp ..
                                                   -> slice(1, 1, step=2) [S, F] -> clamp .. -> mul by that

After:

    x, experts, [weight] -> ditron.expert_projections(interleaved) -> getitem 0 [S, F] -> add(.., index(bias[:, 0::2]))
                                                                   -> getitem 1 [S, F] -> add(.., index(bias[:, 1::2]))

and so for grouped_projections. Then absorb_epilogues makes an epilogue of what follows. It is part of split_weights.py,
which tries it on a copy of the graph and keeps it if one epilogue combines the two products. It must not fire when
* all uses of the product are not every second of its columns, or only one half of them is used;
* the call has several weights or an epilogue.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import fx

from ditron_inductor.passes.absorb.expert_tables import every_second
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.task import schema
from ditron_inductor.task.nodes import SharedOperand

aten = proofs.aten


@dataclass(frozen=True)
class Columns:
    """A product of experts whose uses are its even and odd columns: each a node, and which columns. rows: the sum with
    rows of a table, their node, or None.
    """

    product: fx.Node
    total: fx.Node | None
    rows: fx.Node | None
    parts: tuple[tuple[fx.Node, int], ...]

    @property
    def call(self) -> fx.Node:
        return proofs.operand(self.product)


def find_columns(product: fx.Node) -> Columns | None:
    """Proves that all uses of a product are its even and odd columns; None if they are not."""
    call = product.args[0] if product.args else None
    task = schema.node_of(call) if isinstance(call, fx.Node) else None
    if not isinstance(task, SharedOperand) or not task.of_experts or task.num_weights != 1 or task.epilogue:
        return None
    total, rows = None, None
    user = proofs.sole_user(product)
    if user is not None and user.target is aten.add.Tensor and not user.kwargs and proofs.alike(user, product):
        others = [operand for operand in user.all_input_nodes if operand is not product]
        if len(others) == 1 and proofs.indexed_rows(others[0]) is not None and proofs.alike(others[0], product):
            total, (rows,) = user, others
    parts = list(_parts(product if total is None else total))
    found = {part for _, part in parts}
    return None if found != {0, 1} else Columns(product, total, rows, tuple(cast("list[tuple[fx.Node, int]]", parts)))


def _parts(node: fx.Node) -> Iterator[tuple[fx.Node, int | None]]:
    """Yields the uses of `node` through views with its columns: (a node, which columns), None for other uses."""
    for user in node.users:
        half = every_second(user)
        if half is not None:
            yield user, half[1]
        elif proofs.keeps_order(user) and proofs.known_equal(proofs.fake(user).shape[-1], proofs.fake(node).shape[-1]):
            yield from _parts(user)
        else:
            yield user, None


def rewrite(graph: fx.Graph, match: Columns) -> fx.Node:
    """Replaces the call by one with two products; returns the weight."""
    call = match.call
    value = proofs.fake(match.product)
    shape = (value.shape[0], value.shape[1] // 2)
    task: Any = schema.node_from_call(call.target, call.args)
    operands = schema.operands_from_call(call)
    with graph.inserting_before(call):
        two = [rewriting.fake_like(value, shape, rewriting.contiguous_strides(shape)) for _ in range(2)]
        made = rewriting.call_task(graph, replace(task, num_weights=2, interleaved=True), operands, call, two)
        halves = [rewriting.output(graph, made, half, match.product) for half in range(2)]
    if match.total is not None and match.rows is not None:
        with graph.inserting_before(match.total):
            halves = [_biased(graph, half, number, match.rows, match.total) for number, half in enumerate(halves)]
    for part, number in match.parts:
        with graph.inserting_before(part):
            shaped, wanted = halves[number], proofs.fake(part).shape
            if not proofs.same_shape(tuple(wanted), shape):
                shaped = rewriting.computed(graph, aten.reshape.default, (shaped, [*wanted]), part)
        for view in proofs.views_down(part):
            # Every second column had gaps behind it.
            seen = proofs.fake(view)
            dense = rewriting.contiguous_strides(seen.shape)
            view.meta["val"] = rewriting.fake_like(seen, tuple(seen.shape), dense)
        part.replace_all_uses_with(shaped)
    rewriting.erase_unused(graph, _between(match))
    weight: fx.Node = operands["weights"][0]
    return weight


def _biased(graph: fx.Graph, half: fx.Node, number: int, rows: fx.Node, total: fx.Node) -> fx.Node:
    """Inserts the sum of the even or odd columns of a product and of these columns of the rows of a table."""
    table, indices = rows.args
    assert isinstance(table, fx.Node)
    value = proofs.fake(table)
    columns = (value.shape[0], value.shape[1] // 2)
    every = (table, 1, number, 2**63 - 1, 2)
    strides = (value.stride(0), 2 * value.stride(1))
    part = rewriting.call(graph, aten.slice.Tensor, every, table, columns, strides, name="columns")
    shape = proofs.fake(half).shape
    taken = rewriting.call(graph, aten.index.Tensor, (part, indices), rows, shape)
    return rewriting.call(graph, aten.add.Tensor, (half, taken), total, shape, name="biased")


def _between(match: Columns) -> list[fx.Node]:
    """The nodes from the call to the parts."""
    found = [part for part, _ in match.parts]
    for node in found:
        found += [operand for operand in node.all_input_nodes if operand not in found and _is_behind(operand, match)]
    return [*found, match.call, *([] if match.rows is None else [match.rows])]


def _is_behind(node: fx.Node, match: Columns) -> bool:
    return match.call in (node, *proofs.ancestors(node))


def combines(weight: fx.Node) -> bool:
    """Returns whether one epilogue makes something of the two products of such a call with this weight."""
    for call in weight.users:
        task = schema.node_of(call)
        if isinstance(task, SharedOperand) and task.of_experts and task.num_weights == 2 and task.parsed is not None:
            weights = schema.operand(call, "weights")
            return len(weights) == 1 and len(task.parsed.groups()) == 1
    return False
