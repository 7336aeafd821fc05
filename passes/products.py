"""The matmul that a reduction reduces: read upwards from the collective's operand, proved, or named as what it
is instead.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from operator import getitem

import torch
from torch import fx

from ditron_inductor.passes import proofs
from ditron_inductor.passes.reasons import ReasonCode, Refused
from ditron_inductor.task import ops
from ditron_inductor.task.nodes import KINDS

aten = torch.ops.aten


@dataclass(frozen=True)
class Product:
    """`views` of `mm`, each used only by the next: [outermost, .., innermost]; empty if the matmul is used as it is."""

    mm: fx.Node
    views: tuple[fx.Node, ...]

    @property
    def lhs(self) -> fx.Node:
        node = self.mm.args[0]
        assert isinstance(node, fx.Node)
        return node

    @property
    def rhs(self) -> fx.Node:
        node = self.mm.args[1]
        assert isinstance(node, fx.Node)
        return node


def find_product(node: fx.Node, users: Collection[fx.Node]) -> Product | Refused:
    """Proves that `node` is a matmul behind order-keeping views, none of which is used otherwise; or says what it is.

    `users` are the nodes that may use `node` itself.
    """
    chain = proofs.views_up(node)
    mm = chain[-1]
    code = proofs.proved_mm(mm)
    if code is not None:
        return classify(mm).at(mm)
    if any(proofs.sole_user(one) is None for one in chain[1:]) or any(user not in users for user in node.users):
        return ReasonCode.INTERMEDIATE_USED.at(proofs.other_user(chain, {*users, *chain}) or node)
    return Product(mm, tuple(chain[:-1]))


def classify(node: fx.Node) -> ReasonCode:
    """Why `node`, which is no order-keeping view, is not a matmul that a reduction can be fused with."""
    code = proofs.proved_mm(node)
    if code is ReasonCode.BIAS:
        return ReasonCode.SUM_OF_MATMULS if _is_product(node.args[0]) else ReasonCode.BIAS
    if code is not ReasonCode.NO_MATMUL and code is not None:
        return code
    if node.target is aten.constant_pad_nd.default or _has_padded_part(node):
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


def _has_padded_part(node: fx.Node) -> bool:
    return node.target is aten.cat.default and any(proofs.padded(part) for part in node.all_input_nodes)


def _is_product(node: object) -> bool:
    """Whether a node is a matmul of any kind, a sum that holds one, or a matmul that was fused, behind views."""
    if not isinstance(node, fx.Node):
        return False
    top = proofs.views_up(node)[-1]
    if top.target is aten.add.Tensor:
        return any(_is_product(source) for source in top.all_input_nodes)
    return proofs.is_matmul(top) or _is_task_output(top)


def _is_task_output(node: fx.Node) -> bool:
    if node.target is not getitem or not isinstance(node.args[0], fx.Node):
        return False
    return any(node.args[0].target is ops.overload(kind) for kind in KINDS)
