"""Norms that are one op of another library: what such an op computes, in the ops of Inductor's decompositions.

    vllm_ir.rms_norm(x, weight, eps)              norm(x)
    vllm_ir.fused_add_rms_norm(x, y, weight, eps) norm(x + y) before the sum is rounded, and the rounded sum

The compiler does not know what such an op computes, and neither does a pass that reads norms (see `norm_forms`). Each
op of the table `NORM_OPS` has a definition here, and `open_norm` puts that in the place of a call. An op is opened only
where a fusion takes the norm: `open_where` tries it on a copy of the graph. All other calls stay, for their own library
to run with kernels of its own.

The `vllm_ir` ops are defined by what vLLM implements in torch: both terms are widened to fp32 and added, and the sum is
normalised. The result is rounded to the dtype of the weight, multiplied, and rounded to the dtype of x. Versions of
vLLM differ in this if the weight has another dtype than x. Of these only the form with 16-bit rows, a weight in fp32
and a 16-bit result is opened, which has one meaning.

vLLM's kernels `_C.rms_norm` and `_C.fused_add_rms_norm`, which graphs of older versions call, are not in the table:
under one schema some versions round before the weight, and others do not.

It must not open
* a call with other arguments than those of the table, or a norm of a part of each row (`variance_size`);
* tensors whose elements are not certain to lie row by row, or that have other dtypes than the ones above;
* a call that somebody reads in a way that is not drawn above.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.task.torch_dtypes import ACTIVATION_DTYPES

aten = torch.ops.aten
CONVERT = torch.ops.prims.convert_element_type.default


@dataclass(frozen=True)
class NormOp:
    """An op that normalises rows x by `weight` and `epsilon`: the names of its arguments. residual: the name of what is
    added to x, if anything is. results: what the op returns at each place, `normed` or `total`; None is the place of a
    result that is alone.
    """

    arguments: tuple[str, ...]
    residual: str
    results: Mapping[int | None, str]


ABSENT = "variance_size"
"""The argument that must not be given."""
NORM_OPS: Mapping[str, NormOp] = {
    "vllm_ir::rms_norm": NormOp(("x", "weight", "epsilon", ABSENT), "", {None: "normed"}),
    "vllm_ir::fused_add_rms_norm": NormOp(
        ("x", "x_residual", "weight", "epsilon", ABSENT), "x_residual", {0: "normed", 1: "total"}
    ),
}


@dataclass(frozen=True)
class ForeignNorm:
    """A call of an op of `NORM_OPS`, its operands, and the nodes that read its results, by what these are."""

    call: fx.Node
    x: fx.Node
    residual: fx.Node | None
    weight: fx.Node | None
    eps: float
    results: Mapping[str, Sequence[fx.Node]]


def find_foreign_norm(call: fx.Node) -> ForeignNorm | None:
    """Proves that a call computes what the definition of its op says, as drawn above."""
    found = _declared_and_arguments(call)
    if found is None:
        return None
    declared, bound = found
    x, residual, weight, eps = bound["x"], bound.get(declared.residual), bound["weight"], bound["epsilon"]
    results = _results(call, declared)
    if results is None or not isinstance(eps, float) or bound[ABSENT] is not None:
        return None
    value, normed = proofs.tensor(x), _value(call, declared, "normed")
    if value is None or normed is None or not proofs.row_major(value) or not proofs.row_major(normed):
        return None
    if value.ndim == 0 or value.dtype not in ACTIVATION_DTYPES:
        return None
    same = [normed]
    if declared.residual:
        others = proofs.tensor(residual), _value(call, declared, "total")
        if any(other is None or not proofs.row_major(other) for other in others):
            return None
        same += [other for other in others if other is not None]
    if any(other.dtype != value.dtype or not proofs.same_shape(other.shape, value.shape) for other in same):
        return None
    if weight is not None and not _weighs(weight, value):
        return None
    return ForeignNorm(call, x, residual, weight, eps, results)


def _declared_and_arguments(call: fx.Node) -> tuple[NormOp, dict[str, Any]] | None:
    """What is declared of an op, and the arguments of a call by name, if it is one of a functional graph."""
    op = call.target
    if call.op != "call_function" or not isinstance(op, torch._ops.OpOverload) or op._overloadname != "default":
        return None
    declared = NORM_OPS.get(op._schema.name)
    if declared is None or op._schema.is_mutable:
        return None
    names = tuple(argument.name for argument in op._schema.arguments)
    return (declared, proofs.arguments(call)) if names == declared.arguments else None


def _results(call: fx.Node, declared: NormOp) -> dict[str, list[fx.Node]] | None:
    """The nodes that are the results of a call, by what they are; None if it is read in another way."""
    if None in declared.results:
        return {declared.results[None]: [call]}
    found: dict[str, list[fx.Node]] = {name: [] for name in declared.results.values()}
    for user in call.users:
        place = user.args[1] if user.target is getitem else None
        if not isinstance(place, int) or place not in declared.results:
            return None
        found[declared.results[place]].append(user)
    return found


def _value(call: fx.Node, declared: NormOp, name: str) -> torch.Tensor | None:
    """The fake value of a result."""
    (place,) = (place for place, result in declared.results.items() if result == name)
    value = call.meta.get("val")
    value = value if place is None or not isinstance(value, (list, tuple)) else value[place]
    return value if isinstance(value, torch.Tensor) else None


def _weighs(weight: object, rows: torch.Tensor) -> bool:
    """Returns whether a weight has a dtype of which all versions of the op make the same."""
    value = proofs.tensor(weight)
    if value is None or value.ndim != 1 or not proofs.known_equal(value.shape[0], rows.shape[-1]):
        return False
    return value.dtype in (rows.dtype, torch.float32)


def open_norm(graph: fx.Graph, norm: ForeignNorm) -> fx.Node:
    """Puts the definition of an op in the place of its call, and returns the inverse deviation in it."""
    with graph.inserting_before(norm.call):
        ops = _Ops(graph, norm.call, norm.x.meta["val"])
        dtype = ops.like.dtype
        wide = ops.converted(norm.x, torch.float32)
        if norm.residual is not None:
            wide = ops.same(aten.add.Tensor, (wide, ops.converted(norm.residual, torch.float32)))
        total = wide if norm.residual is None else ops.converted(wide, dtype)
        square = ops.same(aten.pow.Tensor_Scalar, (wide, 2))
        mean = ops.row(aten.mean.dim, (square, [-1], True))
        rsqrt = ops.row(aten.rsqrt.default, (ops.row(aten.add.Tensor, (mean, norm.eps)),))
        normed = ops.same(aten.mul.Tensor, (wide, rsqrt))
        if norm.weight is not None:
            normed = ops.converted(normed, norm.weight.meta["val"].dtype)
            normed = ops.same(aten.mul.Tensor, (normed, norm.weight))
        normed = ops.converted(normed, dtype)
    made = {"normed": normed, "total": total}
    for name, nodes in norm.results.items():
        for node in nodes:
            node.replace_all_uses_with(made[name])
    rewriting.erase_unused(graph, [norm.call, *(node for nodes in norm.results.values() for node in nodes)])
    return rsqrt


@dataclass(frozen=True)
class _Ops:
    """Inserts ops of fp32, or of the dtype of what they read, on tensors like `like`, with the metadata of `origin`."""

    graph: fx.Graph
    origin: fx.Node
    like: torch.Tensor

    def same(self, target: Any, args: tuple[Any, ...]) -> fx.Node:
        """An op whose result has the shape of `like`."""
        return self._insert(target, args, tuple(self.like.shape), args[0].meta["val"].dtype)

    def row(self, target: Any, args: tuple[Any, ...]) -> fx.Node:
        """An op whose result has one element for each row."""
        return self._insert(target, args, (*self.like.shape[:-1], 1), torch.float32)

    def converted(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        value: torch.Tensor = node.meta["val"]
        if value.dtype == dtype:
            return node
        return self._insert(CONVERT, (node, dtype), tuple(value.shape), dtype)

    def _insert(self, target: Any, args: tuple[Any, ...], shape: tuple[Any, ...], dtype: torch.dtype) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta.update(rewriting.copied_meta(self.origin))
        node.meta["val"] = rewriting.fake_like(self.like, shape, rewriting.contiguous_strides(shape), dtype)
        return node


def foreign_norms(graph: fx.Graph) -> list[ForeignNorm]:
    """The calls of such ops that can be opened, in graph order."""
    return [norm for node in graph.nodes if (norm := find_foreign_norm(node)) is not None]


def open_where(graph: fx.Graph, fuse: Callable[[fx.Graph], Any]) -> None:
    """Opens the norms that `fuse` takes where all of them are open. The others stay as they are."""
    found = foreign_norms(graph)
    if not found:
        return
    copy, twins = rewriting.copied(graph)
    opened = {norm.call: open_norm(copy, _on(copy, twins[norm.call])) for norm in found}
    fuse(copy)
    remaining = set(copy.nodes)
    for norm in found:
        if opened[norm.call] not in remaining:
            open_norm(graph, _on(graph, norm.call))


def _on(graph: fx.Graph, call: fx.Node) -> ForeignNorm:
    """The norm of a call, read again: what it is computed from may have been opened."""
    norm = find_foreign_norm(call)
    assert norm is not None and call.graph is graph
    return norm
