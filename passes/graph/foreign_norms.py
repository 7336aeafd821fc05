"""Norms that are one op of another library: what such an op computes, in the ops of Inductor's decompositions.

    vllm_ir.rms_norm(x, weight, eps)              norm(x)
    vllm_ir.fused_add_rms_norm(x, y, weight, eps) norm(x + y) before the sum is rounded, and the rounded sum
    _C.rms_norm, functionalised                   norm(x)
    _C.fused_add_rms_norm, functionalised         norm(x + y), and the sum, which is rounded first

The compiler does not know what such an op computes, and neither does a pass that reads norms (see `norm_forms`). Each
op of the table `FORMS` has a definition here, and `open_norm` puts that in the place of a call. An op is opened only
where a fusion takes the norm: `open_where` tries it on a copy of the graph. All other calls stay, for their own library
to run with kernels of its own.

`vllm_ir` ops are defined by an implementation in torch, which widens both terms to fp32, adds them, and normalises the
sum. The result is rounded to the dtype of the weight, multiplied, and rounded to the dtype of x. Versions of vLLM
differ in the dtype of the result, and in the rounding, if the weight has another dtype than x: then only the form with
16-bit rows, a weight in fp32 and a 16-bit result is opened. The `_C` ops are CUDA kernels that change their operands,
so a functional graph has them inside of `auto_functionalized`. They add in the dtype of the rows, round the sum, and
round what is scaled before it is multiplied by the weight.

It must not open
* a call with other arguments than those of the table, or a norm of a part of each row (`variance_size`);
* a call of a `_C` op on another device than a GPU, for which the op has another kernel;
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
from torch._higher_order_ops.auto_functionalize import auto_functionalized

from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.task.torch_dtypes import ACTIVATION_DTYPES

aten = torch.ops.aten
CONVERT = torch.ops.prims.convert_element_type.default


@dataclass(frozen=True)
class Form:
    """An op that normalises rows: the names of its arguments, and which of them are x, the residual, weight and eps.

    results: what the op returns at each place, `normed` or `total`; None is the place of a result that is alone.
    absent: arguments that must not be given. mutates: the op changes its operands, on a GPU. unrounded: the norm is
    that of the sum before it is rounded.
    """

    arguments: tuple[str, ...]
    x: str
    residual: str
    results: Mapping[int | None, str]
    weight: str = "weight"
    eps: str = "epsilon"
    absent: tuple[str, ...] = ()
    mutates: bool = False
    unrounded: bool = False


FORMS: Mapping[str, Form] = {
    "vllm_ir::rms_norm": Form(
        ("x", "weight", "epsilon", "variance_size"), "x", "", {None: "normed"}, absent=("variance_size",)
    ),
    "vllm_ir::fused_add_rms_norm": Form(
        ("x", "x_residual", "weight", "epsilon", "variance_size"),
        "x",
        "x_residual",
        {0: "normed", 1: "total"},
        absent=("variance_size",),
        unrounded=True,
    ),
    "_C::rms_norm": Form(("result", "input", "weight", "epsilon"), "input", "", {1: "normed"}, mutates=True),
    "_C::fused_add_rms_norm": Form(
        ("input", "residual", "weight", "epsilon"), "input", "residual", {1: "normed", 2: "total"}, mutates=True
    ),
}


@dataclass(frozen=True)
class ForeignNorm:
    """A call of an op of `FORMS`, its operands, and the nodes that read its results, by what these are."""

    call: fx.Node
    form: Form
    x: fx.Node
    residual: fx.Node | None
    weight: fx.Node | None
    eps: float
    results: Mapping[str, Sequence[fx.Node]]


def find_foreign_norm(call: fx.Node) -> ForeignNorm | None:
    """Proves that a call computes what the definition of its op says, as drawn above."""
    found = _form_and_arguments(call)
    if found is None:
        return None
    form, bound = found
    x, residual, weight = bound[form.x], bound.get(form.residual), bound[form.weight]
    eps, results = bound[form.eps], _results(call, form)
    if results is None or not isinstance(eps, float) or any(bound[name] is not None for name in form.absent):
        return None
    value, normed = proofs.tensor(x), _value(call, form, "normed")
    if value is None or normed is None or not proofs.row_major(value) or not proofs.row_major(normed):
        return None
    if value.ndim == 0 or value.dtype not in ACTIVATION_DTYPES or (form.mutates and value.device.type != "cuda"):
        return None
    same = [normed]
    if form.residual:
        others = proofs.tensor(residual), _value(call, form, "total")
        if any(other is None or not proofs.row_major(other) for other in others):
            return None
        same += [other for other in others if other is not None]
    if any(other.dtype != value.dtype or not proofs.same_shape(other.shape, value.shape) for other in same):
        return None
    if weight is not None and not _weighs(weight, value, form):
        return None
    return ForeignNorm(call, form, x, residual, weight, eps, results)


def _form_and_arguments(call: fx.Node) -> tuple[Form, dict[str, Any]] | None:
    """The form of an op, and the arguments of a call by name, if it is one of a functional graph."""
    target, functionalised = call.target, call.target is auto_functionalized
    op = call.args[0] if functionalised and call.args else target
    if call.op != "call_function" or not isinstance(op, torch._ops.OpOverload) or op._overloadname != "default":
        return None
    form = FORMS.get(op._schema.name)
    if form is None or form.mutates != functionalised or op._schema.is_mutable != functionalised:
        return None
    if tuple(argument.name for argument in op._schema.arguments) != form.arguments:
        return None
    if not functionalised:
        return form, proofs.arguments(call)
    return (form, dict(call.kwargs)) if set(call.kwargs) == set(form.arguments) else None


def _results(call: fx.Node, form: Form) -> dict[str, list[fx.Node]] | None:
    """The nodes that are the results of a call, by what they are; None if it is read in another way."""
    if None in form.results:
        return {form.results[None]: [call]}
    found: dict[str, list[fx.Node]] = {name: [] for name in form.results.values()}
    for user in call.users:
        place = user.args[1] if user.target is getitem else None
        if not isinstance(place, int) or place not in form.results:
            return None
        found[form.results[place]].append(user)
    return found


def _value(call: fx.Node, form: Form, name: str) -> torch.Tensor | None:
    """The fake value of a result."""
    (place,) = (place for place, result in form.results.items() if result == name)
    value = call.meta.get("val")
    value = value if place is None or not isinstance(value, (list, tuple)) else value[place]
    return value if isinstance(value, torch.Tensor) else None


def _weighs(weight: object, rows: torch.Tensor, form: Form) -> bool:
    """Returns whether a weight has a dtype of which all versions of the op make the same."""
    value = proofs.tensor(weight)
    if value is None or value.ndim != 1 or not proofs.known_equal(value.shape[0], rows.shape[-1]):
        return False
    return value.dtype == rows.dtype or (value.dtype == torch.float32 and not form.mutates)


def open_norm(graph: fx.Graph, norm: ForeignNorm) -> fx.Node:
    """Puts the definition of an op in the place of its call, and returns the inverse deviation in it."""
    with graph.inserting_before(norm.call):
        ops = _Ops(graph, norm.call, norm.x.meta["val"])
        dtype = ops.like.dtype
        x = norm.x
        total = x
        if norm.residual is not None and norm.form.unrounded:
            x = ops.same(aten.add.Tensor, tuple(ops.converted(term, torch.float32) for term in (x, norm.residual)))
            total = ops.converted(x, dtype)
        elif norm.residual is not None:
            x = total = ops.same(aten.add.Tensor, (x, norm.residual))
        wide = ops.converted(x, torch.float32)
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
        """`node` in this dtype."""
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
