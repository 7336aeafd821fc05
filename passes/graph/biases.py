"""Matmuls with and without a bias, read alike: `mm(rows, weight)` and `addmm(bias, rows, weight)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.reasons import ReasonCode

aten = torch.ops.aten


@dataclass(frozen=True)
class Matmul:
    """rows @ weight, plus the row `bias` if there is one. rows, weight: whatever stands there, tensors or not."""

    rows: Any
    weight: Any
    bias: fx.Node | None


def read_matmul(node: fx.Node) -> Matmul | ReasonCode:
    """A 2-D matmul with one dtype that kernels exist for, and at most a row that is added as it is; or why not."""
    if node.target is not aten.addmm.default:
        code = proofs.proved_mm(node)
        return Matmul(node.args[0], node.args[1], None) if code is None else code
    bound = proofs.arguments(node)
    values = [proofs.tensor(tensor_node) for tensor_node in (node, bound["self"], bound["mat1"], bound["mat2"])]
    code = proofs.rejected_dtypes(values)
    if code is not None:
        return code
    result, bias = values[0], values[1]
    assert result is not None and bias is not None
    whole = proofs.known_equal(bound["beta"], 1) and proofs.known_equal(bound["alpha"], 1)
    if not whole or not proofs.is_row(bias, result.shape[1]):
        return ReasonCode.BIAS
    return Matmul(bound["mat1"], bound["mat2"], bound["self"])


def with_bias(product: fx.Node, matmul: fx.Node, *, transposed: bool = False) -> fx.Node:
    """Returns what replaces `matmul`, given its product, or its transpose, given that of the product. If there is a
    bias, an add of it, as a row or as a column, is inserted in front of `matmul`.
    """
    read = read_matmul(matmul)
    assert isinstance(read, Matmul)
    if read.bias is None:
        return product
    graph = matmul.graph
    with graph.inserting_before(matmul):
        bias = rewriting.column(graph, rewriting.row(graph, read.bias)) if transposed else read.bias
        added = graph.create_node("call_function", aten.add.Tensor, (product, bias), name="biased")
    added.meta.update(rewriting.copied_meta(product if transposed else matmul))
    return added
