"""This module finds the matmuls that a reduction reduces. It reads upwards from the operand of the collective, and
returns the proved products or the reason why there is no proof.

    mm(a, b)                                      a product
    add(p, q), addmm(p, a, b)                     the sum of what p and q are, in this order
    add(p, row), add(row, p), addmm(row, a, b)    p plus a bias: a row [N] of the product, or [1, .., 1, N]

All of this may stand behind views that keep the order of elements. The products have one dtype and one shape, and each
tensor in between is used once. If there are several biases, as with parallel attention and MLP blocks, their sum is
computed first; this rounds once more or once less.

The nodes that are found, and the order of the products, are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from ditron_inductor.passes.graph import proofs
from ditron_inductor.passes.graph.reasons import ReasonCode, Refusal, Refused
from ditron_inductor.task import schema
from ditron_inductor.task.epilogue import Epilogue, Expression, Extra, ProductTerm, extras_of, mapped
from ditron_inductor.task.nodes import MAX_PRODUCTS, TASK_KINDS

aten = torch.ops.aten

ADDS: frozenset[object] = frozenset({aten.add.Tensor, aten.addmm.default})


@dataclass(frozen=True)
class Factors:
    """lhs [M, K] @ rhs [K, N]."""

    lhs: fx.Node
    rhs: fx.Node


@dataclass(frozen=True)
class Pre:
    """What is computed from a product before it is reduced: an expression of `mm0` and of these extra tensors."""

    expression: Expression
    extras: tuple[fx.Node, ...]

    def transposed(self) -> Pre | None:
        """Returns the expression for the transposed product; None if a tensor of its shape had to be copied."""
        if any(extra.kind == "full" for extra in extras_of([self.expression])):
            return None
        return Pre(mapped(self.expression, _transposed), self.extras)


def _transposed(operand: Expression) -> Expression:
    if not isinstance(operand, Extra):
        return operand
    return Extra({"row": "column", "column": "row"}.get(operand.kind, operand.kind), operand.index)


@dataclass(frozen=True)
class Product:
    """A sum of one or several products, and perhaps of biases, behind views. mm: the node that computes the first
    product, [M, N]. views: the views between it and the result, [outermost, .., innermost]. steps: all nodes that
    compute the result, including views and adds, without the biases. pre: the pointwise ops before the reduction (see
    `prepare_products`).
    """

    factors: tuple[Factors, ...]
    biases: tuple[fx.Node, ...]
    mm: fx.Node
    views: tuple[fx.Node, ...]
    steps: tuple[fx.Node, ...]
    pre: Pre | None = None

    @property
    def epilogue(self) -> tuple[tuple[fx.Node, ...], str]:
        """The extra tensors and the epilogue of a node with this product; none and "" without a `pre`."""
        if self.pre is None:
            return (), ""
        return self.pre.extras, Epilogue((ProductTerm(0),), self.pre.expression).text()

    @property
    def rights(self) -> list[fx.Node]:
        return [factors.rhs for factors in self.factors]

    @property
    def operand_views(self) -> list[fx.Node]:
        """The views that the first operands are."""
        return [view for factors in self.factors for view in proofs.views_up(factors.lhs)[:-1]]

    @property
    def counts(self) -> dict[str, Any]:
        """The fields of a node with this product."""
        return {"num_products": len(self.factors), "has_bias": bool(self.biases)}

    @property
    def epilogue_fields(self) -> dict[str, Any]:
        """Returns the further fields of a node that may have an epilogue."""
        return {"num_extras": len(self.epilogue[0]), "epilogue": self.epilogue[1]}


FindProduct = Callable[[fx.Node, Collection[fx.Node]], Product | Refused]
"""`find_product`, or a function that finds more products."""


def find_product(node: fx.Node, users: Collection[fx.Node]) -> Product | Refused:
    """Proves that `node` is a sum of products as above, of which nothing is used elsewhere; otherwise returns the
    reason. `users` are the nodes that may use `node` itself.
    """
    product = _read(node)
    if isinstance(product, Refusal):
        return product
    inner = [step for step in product.steps if step is not node]
    # A tensor that is added to itself is used twice by one node.
    twice = len(set(product.steps)) < len(product.steps)
    if twice or any(proofs.sole_user(step) is None for step in inner) or any(user not in users for user in node.users):
        return ReasonCode.INTERMEDIATE_USED.at(proofs.other_user(product.steps, {*users, *product.steps}) or node)
    return product if len(product.factors) <= MAX_PRODUCTS else ReasonCode.SUM_OF_MATMULS.at(node)


def _read(node: fx.Node) -> Product | Refusal:
    chain = proofs.views_up(node)
    views, top = tuple(chain[:-1]), chain[-1]
    if top.target not in ADDS:
        code = proofs.proved_mm(top)
        if code is not None:
            return classify(top).at(top)
        lhs, rhs = top.args
        assert isinstance(lhs, fx.Node) and isinstance(rhs, fx.Node)
        return Product((Factors(lhs, rhs),), (), top, views, tuple(chain))
    total = _read_addmm(top) if top.target is aten.addmm.default else _read_add(top)
    if isinstance(total, Refusal):
        return total
    return Product(total.factors, total.biases, total.mm, (*views, *total.views), (*chain, *total.steps))


def _read_addmm(node: fx.Node) -> Product | Refusal:
    bound, value = proofs.arguments(node), proofs.tensor(node)
    if bound["beta"] != 1 or bound["alpha"] != 1:
        return ReasonCode.POINTWISE_BETWEEN.at(node)
    factors = Factors(bound["mat1"], bound["mat2"])
    code = proofs.rejected_dtypes([value, *map(proofs.tensor, (factors.lhs, factors.rhs))])
    if code is not None:
        return code.at(node)
    # As if it were an mm of its own and an add; the add is what computes it.
    return _sum(node, bound["self"], Product((factors,), (), node, (), ()))


def _read_add(node: fx.Node) -> Product | Refusal:
    bound = proofs.arguments(node)
    left, right = bound["self"], bound["other"]
    terms = [_read(term) if proofs.alike(term, node) else ReasonCode.NO_MATMUL.at(node) for term in (left, right)]
    products = [term for term in terms if isinstance(term, Product)]
    if not products:
        named = [term for term in terms if isinstance(term, Refusal) and term.code is not ReasonCode.NO_MATMUL]
        return named[0] if named else classify(node).at(node)
    if bound["alpha"] != 1:
        return ReasonCode.POINTWISE_BETWEEN.at(node)
    if len(products) == 2:
        return _added(node, *products)
    return _sum(node, right if isinstance(terms[0], Product) else left, products[0])


def _sum(node: fx.Node, other: object, product: Product) -> Product | Refusal:
    """Returns the product that `node` is: `product` plus `other`, which is a row or products in front of it."""
    if proofs.alike(other, node):
        before = _read(other)  # type: ignore[arg-type]
        if isinstance(before, Product):
            return _added(node, before, product)
        if not _is_row(other, node):
            return ReasonCode.BIAS.at(node) if before.code is ReasonCode.NO_MATMUL else before
    if not _is_row(other, node):
        return (ReasonCode.SUM_OF_MATMULS if _is_product(other) else ReasonCode.BIAS).at(node)
    value, rows = proofs.tensor(node), proofs.tensor(product.mm)
    assert isinstance(other, fx.Node) and value is not None and rows is not None
    if not proofs.known_equal(value.shape[-1], rows.shape[-1]):
        return ReasonCode.LAYOUT.at(node)
    return _added(node, Product((), (other,), product.mm, (), ()), product)


def _added(node: fx.Node, left: Product, right: Product) -> Product | Refusal:
    """Returns the product that `node` is, left + right. One of them may be a bias alone."""
    first, other = proofs.fake(left.mm), proofs.fake(right.mm)
    biases = (*left.biases, *right.biases)
    dtypes = {value.dtype for value in (first, other, *map(proofs.tensor, biases)) if value is not None}
    if len(dtypes) > 1:
        return ReasonCode.MIXED_DTYPES.at(node)
    if not proofs.same_shape(first.shape, other.shape):
        return ReasonCode.LAYOUT.at(node)
    path = left if left.factors else right
    factors, steps = (*left.factors, *right.factors), (*left.steps, *right.steps)
    return Product(factors, biases, path.mm, path.views, steps)


def _is_row(operand: object, node: fx.Node) -> bool:
    """Returns whether `one` is added to every row of `node` alike: as long as a row, and 1 in all other dimensions."""
    value, result = proofs.tensor(operand), proofs.tensor(node)
    if value is None or result is None or value.ndim > result.ndim:
        return False
    return proofs.is_row(value, result.shape[-1])


def classify(node: fx.Node) -> ReasonCode:
    """Returns why `node`, not an order-keeping view, is no matmul that can be fused with a reduction."""
    code = proofs.proved_mm(node)
    if code is ReasonCode.BIAS:
        return ReasonCode.SUM_OF_MATMULS if _is_product(node.args[0]) else ReasonCode.BIAS
    if code is not ReasonCode.NO_MATMUL and code is not None:
        return code
    padded = node.target is aten.cat.default and any(proofs.padded(part) for part in node.all_input_nodes)
    if padded or node.target is aten.constant_pad_nd.default:
        return ReasonCode.UNEVEN_SHARDS
    if _is_task_output(node):
        return ReasonCode.ALREADY_FUSED
    behind = [_is_product(source) for source in node.all_input_nodes]
    if node.target is aten.add.Tensor and any(behind):
        return ReasonCode.SUM_OF_MATMULS if all(behind) else ReasonCode.BIAS
    if not any(behind):
        return ReasonCode.NO_MATMUL
    if node.target in proofs.CASTS:
        return ReasonCode.CAST_BETWEEN
    if node.target in proofs.TRANSPOSES:
        return ReasonCode.LAYOUT
    if node.target in proofs.SLICES:
        return ReasonCode.CHUNKS_PARTIAL
    pointwise = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
    return ReasonCode.POINTWISE_BETWEEN if pointwise else ReasonCode.NO_MATMUL


def _is_product(node: object) -> bool:
    """Whether a node is, behind views, a matmul of any kind, a sum that holds one, or a fused one."""
    if not isinstance(node, fx.Node):
        return False
    top = proofs.views_up(node)[-1]
    if top.target is aten.add.Tensor:
        return any(_is_product(source) for source in top.all_input_nodes)
    return proofs.is_matmul(top) or _is_task_output(top)


def _is_task_output(node: fx.Node) -> bool:
    if node.target is not getitem or not isinstance(node.args[0], fx.Node):
        return False
    return any(node.args[0].target is schema.overload(kind) for kind in TASK_KINDS)


Left = tuple[fx.Node, tuple[Any, ...] | None]
"""A first operand in the product's shape but for its last dimension: a node, and sizes to reshape it to, or None."""


def lefts_in_shape(product: Product, shape: tuple[Any, ...]) -> tuple[Left, ...] | None:
    """Returns the first operands for a product in this shape; None if the sizes of one are not proved."""
    lefts = [_lhs_in_shape(factors.lhs, product, shape) for factors in product.factors]
    proved = tuple(left for left in lefts if left is not None)
    return proved if len(proved) == len(lefts) else None


def _lhs_in_shape(operand: fx.Node, product: Product, shape: tuple[Any, ...]) -> Left | None:
    wanted = (*shape[:-1], proofs.fake(operand).shape[-1])
    view = proofs.view_in_shape(operand, wanted)
    if view is not None:
        return view, None
    sizes = sizes_in_graph(product, wanted)
    return None if sizes is None else (operand, sizes)


def sizes_in_graph(product: Product, wanted: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """`wanted` as reshape arguments: ints, nodes of the graph that hold a symbolic size, and -1 at most once."""
    given = [size for view in product.steps if proofs.keeps_order(view) for size in view_sizes(view)]
    sizes = as_arguments(wanted, given)
    return sizes if sizes.count(-1) <= 1 else None


def as_arguments(shape: Sequence[Any], given: Sequence[fx.Node]) -> tuple[Any, ...]:
    """`shape` as arguments of a reshape: ints, those of the `given` nodes that hold a size, and -1 where none does."""
    return tuple(
        length
        if isinstance(length, int)
        else next((n for n in given if proofs.known_equal(proofs.size(n), length)), -1)
        for length in shape
    )


def view_sizes(view: fx.Node) -> list[fx.Node]:
    """The nodes among the sizes that a view is given."""
    sizes = proofs.arguments(view).get("shape") or proofs.arguments(view).get("size") or []
    return [size for size in sizes if isinstance(size, fx.Node)]
