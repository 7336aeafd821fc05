"""Pointwise ops between a matmul and its reduction become the part `pre:` of the node's epilogue.

Before, with any number of order-keeping views in between:

    mm(a, b) -> * scale [M, 1] -> reduce_scatter -> wait

After:

    [a], [b] -> ditron.matmul_reduce_scatter(.., extras=[scale], epilogue="pre: mm0 * column(x0); mm0") -> getitem 0

An all-reduce, and a sum of matmuls as one product, are handled in the same way. Every rank computes what its own graph
says: scales need not be replicated.

It runs behind the passes that fuse reductions of plain products, on reductions that they left alone because of such an
op. In bfloat16 and float32 a scalar factor has been moved behind the reduction before (see `move_across`).

It must not fire when
* an op is not in `expressions.POINTWISE`, or changes the shape by broadcasting;
* two products are combined by anything but a plain sum, or a value on the way is used elsewhere too;
* another operand is neither one element, a row, one for each row nor of the product's shape, or not contiguous;
* what is reduced has another dtype than the product;
* columns are scattered, and an operand has the product's shape: the transposed problem would have to copy it.

These ops are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.absorb.absorb_epilogues import MAX_EXTRAS, MAX_PARTS, is_stored
from ditron_inductor.passes.fuse.fusions import REDUCTIONS
from ditron_inductor.passes.graph import expressions, proofs
from ditron_inductor.passes.graph.collectives import collectives
from ditron_inductor.passes.graph.fusion import Fusion
from ditron_inductor.passes.graph.products import Pre, Product, find_product
from ditron_inductor.passes.graph.reasons import LEFT_ALONE, ReasonCode, Refusal, Refused, refused
from ditron_inductor.task.epilogue import Expression, Extra, ProductTerm, walk

BETWEEN: frozenset[ReasonCode] = frozenset(
    {ReasonCode.POINTWISE_BETWEEN, ReasonCode.CAST_BETWEEN, ReasonCode.BIAS, ReasonCode.NO_MATMUL}
)
"""The reasons of earlier passes for an op that this pass may take; for several in a row there is no matmul."""


def find_prepared(node: fx.Node, users: Collection[fx.Node]) -> Product | Refused:
    """Does what `find_product` does, also for a product with pointwise ops on it before it is reduced."""
    found = find_product(node, users)
    if not refused(found):
        return found
    why = found if isinstance(found, Refusal) else found.at(node)
    return _Reading(node, users, why).product() if why.code in BETWEEN else why


class _Reading:
    """A search from the tensor that is reduced up to the product. why: the reason to return if there is none."""

    def __init__(self, node: fx.Node, users: Collection[fx.Node], why: Refusal) -> None:
        self._node = node
        self._why = why
        self._inside = _upwards(node)
        self._private = self._find_private(set(users))
        self._leaves: dict[fx.Node, Product | None] = {}
        self._values: dict[fx.Node, Expression | None] = {}
        self._found: dict[fx.Node, Product] = {}
        self._extras: dict[tuple[fx.Node, str], int] = {}

    def product(self) -> Product | Refusal:
        if not self._reaches(self._node):
            return self._used_elsewhere()
        expression = self._read(self._node)
        if len(self._found) > 1:
            return ReasonCode.PRODUCTS_COMBINED.at(self._node)
        if expression is None or len(self._extras) > MAX_EXTRAS:
            return self._why
        (leaf, product) = next(iter(self._found.items()))
        value, dtype = proofs.fake(self._node), product.mm.meta["val"].dtype
        if value.dtype != dtype:
            return ReasonCode.CAST_BETWEEN.at(self._node)
        path = self._path(leaf)
        views = (*(step for step in path if proofs.keeps_order(step)), *product.views)
        between = [step for step in self._values if step is not leaf]
        extras = tuple(extra for extra, _ in self._extras)
        pre = Pre(expressions.as_output(expression, dtype, dtype), extras)
        return replace(product, views=views, steps=(*between, *product.steps), pre=pre)

    def _find_private(self, users: set[fx.Node]) -> set[fx.Node]:
        """Nodes whose value serves what is reduced alone."""
        private: set[fx.Node] = set()
        order = {node: index for index, node in enumerate(self._node.graph.nodes)}
        for step in sorted(self._inside, key=lambda node: order[node], reverse=True):
            allowed = users if step is self._node else private
            if all(user in allowed for user in step.users):
                private.add(step)
        return private

    def _leaf(self, node: fx.Node) -> Product | None:
        """The product that a node is."""
        if node not in self._leaves:
            found = find_product(node, node.users) if node in self._private else None
            self._leaves[node] = found if isinstance(found, Product) else None
        return self._leaves[node]

    def _reaches(self, node: fx.Node) -> bool:
        """Returns whether a node is made of a product that serves nothing else."""
        if node not in self._private:
            return False
        if self._leaf(node) is not None:
            return True
        sources = node.all_input_nodes if node in self._inside and _passes(node) else []
        return any(map(self._reaches, sources))

    def _read(self, node: fx.Node) -> Expression | None:
        """The value of a node that is made of the product."""
        if node not in self._values:
            self._values[node] = self._computed(node)
        return self._values[node]

    def _computed(self, node: fx.Node) -> Expression | None:
        product = self._leaf(node)
        if product is not None:
            self._found[node] = product
            return ProductTerm(0)
        if proofs.keeps_order(node):
            return self._read(node.all_input_nodes[0])
        expression = expressions.read_pointwise(node, lambda given: self._operand(given, node))
        return expression if expression is None or sum(1 for _ in walk(expression)) <= MAX_PARTS else None

    def _operand(self, operand: fx.Node, node: fx.Node) -> Expression | None:
        if not self._reaches(operand):
            return self._extra(operand, node)
        same = proofs.same_shape(operand.meta["val"].shape, node.meta["val"].shape)
        return self._read(operand) if same else None

    def _extra(self, operand: fx.Node, node: fx.Node) -> Expression | None:
        """An operand that comes from elsewhere; a conversion of what is in memory as part of the text."""
        source = operand.args[0] if operand.target in expressions.CASTS else None
        if isinstance(source, fx.Node) and is_stored(source):
            converted = expressions.read_pointwise(operand, lambda given: self._extra(given, node))
            if converted is not None:
                return converted
        given, value = proofs.fake(operand), proofs.fake(node)
        if given.device != value.device or not proofs.row_major(given):
            return None
        kind = expressions.spread(given, value, self._width(node))
        return Extra(kind, self._extras.setdefault((operand, kind), len(self._extras))) if kind else None

    def _width(self, node: fx.Node) -> Any:
        """Columns of the product that a node is made of."""
        while (product := self._leaf(node)) is None:
            node = next(source for source in node.all_input_nodes if self._reaches(source))
        return product.mm.meta["val"].shape[-1]

    def _path(self, leaf: fx.Node) -> list[fx.Node]:
        """Returns the nodes from the reduced tensor to the product, without the product."""
        path, node = list[fx.Node](), self._node
        while node is not leaf:
            path.append(node)
            node = next(source for source in node.all_input_nodes if source in self._values)
        return path

    def _used_elsewhere(self) -> Refusal:
        for node in () if self._why.code is ReasonCode.NO_MATMUL else self._inside:
            if node not in self._private and isinstance(find_product(node, node.users), Product):
                other = proofs.other_user([node], self._private)
                return ReasonCode.INTERMEDIATE_USED.at(other or node)
        return self._why


def _passes(node: fx.Node) -> bool:
    return proofs.keeps_order(node) or node.target in expressions.POINTWISE


def _upwards(node: fx.Node) -> set[fx.Node]:
    """Returns the nodes, or some of many, that views and pointwise ops make `node` of, and the first others."""
    found: set[fx.Node] = set()
    pending = [node]
    while pending and len(found) < MAX_PARTS:
        current = pending.pop(0)
        if current not in found:
            found.add(current)
            pending += current.all_input_nodes if _passes(current) else []
    return found


def prepare_products(graph: fx.Graph, *, options: Options) -> int:
    """Fuses every reduction of pointwise ops on a provable product, and returns how many. Others may get a reason."""
    count = 0
    for fusion in REDUCTIONS:
        left = [node for op in fusion.ops for node in collectives(graph, op) if _is_left_by(fusion, node)]
        count += fusion.fuse(graph, left, options, find_prepared)
    return count


def _is_left_by(fusion: Fusion, node: fx.Node) -> bool:
    """Whether the fusion has left a collective alone for a reason that this pass may be able to put right."""
    reason = node.meta.get(LEFT_ALONE)
    return reason is not None and reason.pattern == fusion.node.kind and ReasonCode(reason.code) in BETWEEN
