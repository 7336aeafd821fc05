"""Proves that an `rsqrt` belongs to an RMS norm or a layer norm, in the form of Inductor's decompositions.

    x -> convert fp32 -> pow 2 -> mean last dim -> + eps -> rsqrt -> * (converted x)                          RMS norm
    x -> convert fp32 -> var_mean last dim -> variance + eps -> rsqrt -> * (converted x - mean)              layer norm
    x -> convert fp32 -> - its mean -> pow 2 -> mean last dim -> + eps -> rsqrt -> * (converted x - mean)    the same

The inverse root may also be `pow -0.5` (Gemma 4), which is read as the `rsqrt` it is. Then follow, each at most once
and in eager's order, a conversion back to the dtype of x, `* weight`, and `+ shift`. In fp32 there are no
conversions. `nn.RMSNorm`, `nn.LayerNorm` and the norms of Llama, Gemma and similar models have this form in torch
2.11 and 2.13. Weights are rows [N] in memory; `1 + weight` in fp32 is understood.

What is converted to fp32 may also be the sum of two tensors, each of which is converted before it is added (vLLM):

    x -> convert fp32, y -> convert fp32 -> + -> pow 2 -> ..
                                            + -> convert back to the dtype of x: the sum that others use
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from ditron_inductor.passes.graph import proofs
from ditron_inductor.passes.graph.collectives import WAIT
from ditron_inductor.passes.graph.reasons import ReasonCode
from ditron_inductor.task import schema
from ditron_inductor.task.nodes import Norm
from ditron_inductor.task.torch_dtypes import ACTIVATION_DTYPES

aten = torch.ops.aten

ADDS: frozenset[object] = frozenset({aten.add.Tensor, aten.add.Scalar})
LAST_OF_NORMS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default, aten.mul.Tensor, aten.add.Tensor)
"""Ops that may follow the inverse deviation, each of them at most once."""


@dataclass(frozen=True)
class FoundNorm:
    """`result` = norm(x), of one shape and dtype. wide: x in fp32, which other nodes may use too. inner: the nodes from
    there to the result, which is the last of them. saved: the inner nodes that other nodes use too, by their names in
    `nodes.SAVED`. terms: None, or the two tensors whose sum before it is rounded is x; then x is `wide`, in fp32, and
    `result` has the dtype of the terms.
    """

    norm: Norm
    x: fx.Node
    wide: fx.Node
    weight: fx.Node | None
    shift: fx.Node | None
    inner: tuple[fx.Node, ...]
    saved: Mapping[str, fx.Node]
    terms: tuple[fx.Node, fx.Node] | None = None

    @property
    def result(self) -> fx.Node:
        return self.inner[-1]

    @property
    def totals(self) -> list[fx.Node]:
        """The nodes that are the rounded x; x itself if it is rounded before it is normalised."""
        return [self.x] if self.terms is None else roundings(self.x)


@dataclass(frozen=True)
class _Statistics:
    """The input of an rsqrt: x in fp32 (`wide`), the `mean` that a layer norm subtracts, and `eps`, if fixed."""

    form: str
    eps: object
    wide: fx.Node
    inner: tuple[fx.Node, ...]
    mean: fx.Node | None


def is_rsqrt(node: fx.Node) -> bool:
    """Returns whether a node is the inverse root of its operand, under either name."""
    return node.target is aten.rsqrt.default or (node.target is aten.pow.Tensor_Scalar and bool(node.args[1] == -0.5))


def normalised(rsqrt: fx.Node) -> fx.Node | None:
    """Returns the tensor that is normalised over its last dimension by `rsqrt`, in a norm proved or not, or None."""
    statistics = _statistics(rsqrt)
    return None if statistics is None else _narrow(statistics.wide)


def find_norm(rsqrt: fx.Node) -> FoundNorm | ReasonCode:
    """Proves that `rsqrt` is in a norm as drawn above, with no other reader but of what `_saved` allows, or why not."""
    found = _read_norms(rsqrt, (None,))
    return found if isinstance(found, ReasonCode) else found[0]


def find_two_norms(rsqrt: fx.Node) -> tuple[FoundNorm, FoundNorm] | None:
    """Finds two norms of one form that share their scaled rows; each has a weight or a shift of its own. The compiler
    leaves two norms in this form where it removes what is computed twice, as in training.
    """
    found = _read_norms(rsqrt, (0, 1))
    if isinstance(found, ReasonCode):
        return None
    first, second = found
    parted = first.result not in second.inner and second.result not in first.inner
    return (first, second) if parted and first.norm == second.norm else None


def _read_norms(rsqrt: fx.Node, branches: Sequence[int | None]) -> tuple[FoundNorm, ...] | ReasonCode:
    """Returns the norms along these branches (see `_Tail`), or the reason why one of them is no norm."""
    statistics = _statistics(rsqrt)
    if statistics is None:
        return ReasonCode.NORM_FORM
    x, eps = _narrow(statistics.wide), statistics.eps
    inner = [*statistics.inner, rsqrt]
    terms = widened_terms(x)
    value = proofs.fake(x if terms is None else terms[0])
    if value.dtype not in ACTIVATION_DTYPES:
        return ReasonCode.DTYPE
    # A number may be a tensor of the graph where everything is dynamic.
    if not isinstance(eps, (int, float)) or not 0.0 <= eps < float("inf"):
        return ReasonCode.NORM_FORM
    scaling = [(user, centred) for user in rsqrt.users if (centred := _centred(user, rsqrt, statistics)) is not None]
    if len(scaling) != 1:
        return ReasonCode.NORM_USED if scaling else ReasonCode.NORM_FORM
    scaled, centred = scaling[0]
    if statistics.mean is not None:
        inner.append(centred)
    tails = [_Tail(scaled, value.dtype, value.shape[-1], branch) for branch in branches]
    for tail in tails:
        tail.follow()
        found = proofs.tensor(tail.nodes[-1])
        if found is None or found.dtype != value.dtype or not proofs.same_shape(found.shape, value.shape):
            return ReasonCode.NORM_FORM
    results = {tail.nodes[-1] for tail in tails}
    names = {"mean": statistics.mean, "rstd": rsqrt, "scaled": scaled}
    known = {name: node for name, node in names.items() if node is not None and node not in results}
    inside = dict.fromkeys([*inner, *(node for tail in tails for node in tail.nodes)])
    saved = _saved(known, inside, results)
    if saved is None:
        return ReasonCode.NORM_USED
    return tuple(
        FoundNorm(
            Norm(statistics.form, float(eps), tail.plus_one, tail.round_first, terms is not None),
            x,
            statistics.wide,
            tail.weight,
            tail.shift,
            (*inner, *tail.nodes),
            saved,
            terms,
        )
        for tail in tails
    )


def rsqrt_before(result: fx.Node) -> fx.Node | None:
    """Returns the inverse deviation of the norm whose result a node may be. Between the two are a conversion, a product
    and a sum with a row, each at most once.
    """
    node, steps = result, 0
    while node.target in LAST_OF_NORMS and steps < len(LAST_OF_NORMS):
        rsqrt = next(filter(is_rsqrt, node.all_input_nodes), None)
        if rsqrt is not None:
            return rsqrt
        sources = [each for each in node.all_input_nodes if each.op == "call_function" and proofs.alike(each, node)]
        if len(sources) != 1:
            return None
        node, steps = sources[0], steps + 1
    return None


def widened_terms(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Returns the two 16-bit tensors of one dtype and of the shape of `node` whose sum in fp32 a node is."""
    if node.target is not aten.add.Tensor or node.kwargs.get("alpha", 1) != 1:
        return None
    left, right = node.args
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node) or left is right:
        return None
    terms = _narrow(left), _narrow(right)
    value, *others = (proofs.tensor(term) for term in (node, *terms))
    if value is None or left in terms or right in terms:
        return None
    fits = all(other is not None and proofs.same_shape(other.shape, value.shape) for other in others)
    return terms if fits and len({other.dtype for other in others if other is not None}) == 1 else None


def roundings(total: fx.Node) -> list[fx.Node]:
    """Returns the users of a sum in fp32 of two tensors that convert it to their dtype."""
    terms = widened_terms(total)
    assert terms is not None
    dtype = terms[0].meta["val"].dtype
    return [user for user in total.users if user.target in proofs.CASTS and _converts(user, dtype)]


def _centred(scaled: fx.Node, rsqrt: fx.Node, statistics: _Statistics) -> fx.Node | None:
    """Returns the tensor that `rsqrt` scales if it is x, or for a layer norm x minus its mean; else None."""
    centred = _other_factor(scaled, rsqrt)
    if centred is None:
        return None
    if statistics.mean is None:
        return centred if centred in (statistics.wide, _narrow(statistics.wide)) else None
    is_difference = centred.target is aten.sub.Tensor and centred.args == (statistics.wide, statistics.mean)
    return centred if is_difference and centred.kwargs.get("alpha", 1) == 1 else None


def _saved(
    names: Mapping[str, fx.Node], inside: Collection[fx.Node], results: Collection[fx.Node]
) -> dict[str, fx.Node] | None:
    """Returns the inner nodes except the results that others use too, by name, if a Task node can return all of them. A
    node can return the mean and the inverse deviation of each row, to users that take one element for each row, and it
    can return scaled rows to the backward. Any other value of whole rows would have to be computed again from these, by
    a kernel of its own.
    """
    saved = dict[str, fx.Node]()
    known = {node: name for name, node in names.items()}
    for node in inside:
        if node in results:
            continue
        others = [user for user in node.users if user not in inside]
        if not others:
            continue
        name = known.get(node)
        if name is None or not all(user.op == "output" or (name != "scaled" and _of_rows(user)) for user in others):
            return None
        # It is computed in fp32, whatever the operands are.
        if not _has_dtype(node, torch.float32):
            return None
        saved[name] = node
    return saved


def _of_rows(node: fx.Node) -> bool:
    """Returns whether a node has one element for each row."""
    value = proofs.tensor(node)
    return value is not None and value.ndim > 0 and proofs.known_equal(value.shape[-1], 1)


class _Tail:
    """The ops that follow the scaled rows [.., N], node by node: conversion, weight, shift. branch: which of two
    readers to follow, 0 or 1, where two nodes read a value that has no weight and no shift yet. None: the walk ends
    there.
    """

    def __init__(self, scaled: fx.Node, dtype: torch.dtype, columns: Any, branch: int | None = None) -> None:
        self.nodes = [scaled]
        self._branch = branch
        self.weight: fx.Node | None = None
        self.shift: fx.Node | None = None
        self.plus_one = False
        self.round_first = False
        self._rounded = dtype == torch.float32
        self._dtype = dtype
        self._columns = columns

    def follow(self) -> None:
        """Takes nodes as long as they belong to the norm."""
        while (user := self._next()) is not None and self._takes(user):
            self.nodes.append(user)

    def _next(self) -> fx.Node | None:
        """Returns the user of the last node. The scaled rows may also be saved for the backward."""
        last = self.nodes[-1]
        users = [user for user in last.users if len(self.nodes) > 1 or user.op != "output"]
        if len(users) == 2 and self._branch is not None and self.weight is None and self.shift is None:
            taken, self._branch = users[self._branch], None
            return taken
        return users[0] if len(users) == 1 else None

    def _takes(self, user: fx.Node) -> bool:
        if user.target in proofs.CASTS:
            fits = not self._rounded and user.args[0] is self.nodes[-1] and _converts(user, self._dtype)
            self._rounded |= fits
            return fits
        # In 16 bits: with a weight the result has been rounded once more, and a shift would be a third time.
        narrow = self._rounded and self._dtype != torch.float32
        if user.target is aten.mul.Tensor and self.weight is None and self.shift is None:
            row, plus_one = self._weight(_other_factor(user, self.nodes[-1]))
            if row is None or (narrow and (plus_one or not _has_dtype(row, self._dtype))):
                return False
            self.weight, self.plus_one, self.round_first = row, plus_one, narrow
            return True
        if user.target is aten.add.Tensor and self.shift is None and not narrow:
            row = self._row(_other_term(user, self.nodes[-1]))
            self.shift = row
            return row is not None
        return False

    def _weight(self, factor: fx.Node | None) -> tuple[fx.Node | None, bool]:
        """Returns (the weight, whether one is added to it) of a factor."""
        if factor is not None and factor.target in ADDS:
            source, addend = factor.args[0], factor.args[1]
            added = isinstance(source, fx.Node) and addend == 1.0 and factor.kwargs.get("alpha", 1) == 1
            # In 16 bits the sum would be rounded.
            if added and _has_dtype(factor, torch.float32):
                return self._row(source), True
            return None, False
        return self._row(factor), False

    def _row(self, node: object) -> fx.Node | None:
        """Returns a row of N elements in memory: `node`, or the source of `node` if it is a widening conversion."""
        if not isinstance(node, fx.Node):
            return None
        node = _narrow(node)
        value, top = proofs.tensor(node), proofs.views_up(node)[-1]
        if value is None or value.dtype not in ACTIVATION_DTYPES:
            return None
        # Anything else would be a kernel of its own.
        in_memory = top.op in ("placeholder", "get_attr") or top.target in (WAIT, schema.overload("replicated"))
        return node if in_memory and proofs.is_row(value, self._columns) else None


def _statistics(rsqrt: fx.Node) -> _Statistics | None:
    summed = rsqrt.args[0]
    if not isinstance(summed, fx.Node) or summed.target not in ADDS or summed.kwargs.get("alpha", 1) != 1:
        return None
    mean, eps = summed.args[0], summed.args[1]
    if not isinstance(mean, fx.Node):
        return None
    if mean.target is aten.mean.dim:
        square = _mean_of(mean)
        centred = _squared(square)
        if square is None or centred is None:
            return None
        if centred.target is aten.sub.Tensor and centred.kwargs.get("alpha", 1) == 1:
            wide, subtracted = centred.args
            if isinstance(wide, fx.Node) and isinstance(subtracted, fx.Node) and _mean_of(subtracted) is wide:
                return _Statistics("layer", eps, wide, (subtracted, centred, square, mean, summed), subtracted)
        return _Statistics("rms", eps, centred, (square, mean, summed), None)
    if mean.target is getitem and mean.args[1] == 0 and isinstance(mean.args[0], fx.Node):
        both = mean.args[0]
        if both.target is not aten.var_mean.correction:
            return None
        bound = proofs.arguments(both)
        wide = bound["self"]
        over_rows = proofs.over_last(bound["dim"], bound["keepdim"], wide)
        others = [user for user in both.users if user.args[1] == 1]
        if bound["correction"] != 0 or not over_rows or len(others) != 1 or not _has_dtype(wide, torch.float32):
            return None
        return _Statistics("layer", eps, wide, (both, mean, others[0], summed), others[0])
    return None


def _mean_of(node: fx.Node) -> fx.Node | None:
    """Returns what a node is the mean of over the last dimension, which it keeps, in the same dtype."""
    if node.target is not aten.mean.dim:
        return None
    bound = proofs.arguments(node)
    source = bound["self"]
    fits = bound["dtype"] is None and proofs.over_last(bound["dim"], bound["keepdim"], source)
    return source if fits and isinstance(source, fx.Node) else None


def _squared(node: object) -> fx.Node | None:
    """Returns x, in fp32, if a node is x * x."""
    if not isinstance(node, fx.Node) or not _has_dtype(node, torch.float32):
        return None
    x = node.args[0] if node.args else None
    power = node.target is aten.pow.Tensor_Scalar and node.args[1] == 2
    product = node.target is aten.mul.Tensor and node.args[0] is node.args[1]
    found = isinstance(x, fx.Node) and (power or product) and _has_dtype(x, torch.float32)
    return x if found and isinstance(x, fx.Node) else None


def _narrow(node: fx.Node) -> fx.Node:
    """Returns the source of `node` if it is a conversion to fp32, and otherwise `node`."""
    source = node.args[0] if node.args else None
    if node.target in proofs.CASTS and _converts(node, torch.float32) and isinstance(source, fx.Node):
        value = proofs.tensor(source)
        if value is not None and value.dtype in (torch.bfloat16, torch.float16):
            return source
    return node


def _converts(node: fx.Node, dtype: torch.dtype) -> bool:
    """Returns whether a conversion is one of the values, not of the bits, to `dtype`."""
    source, result = proofs.tensor(node.args[0]), proofs.tensor(node)
    if node.target is aten.view.dtype or source is None or result is None:
        return False
    return result.dtype == dtype and source.is_floating_point() and source.device == result.device


def _has_dtype(node: fx.Node, dtype: torch.dtype) -> bool:
    value = proofs.tensor(node)
    return value is not None and value.dtype == dtype


def _other_factor(node: fx.Node, factor: fx.Node) -> fx.Node | None:
    """The other operand of a product."""
    if node.target is not aten.mul.Tensor:
        return None
    return _other(node, factor)


def _other_term(node: fx.Node, term: fx.Node) -> fx.Node | None:
    """The other operand of a plain sum."""
    if node.target is not aten.add.Tensor or node.kwargs.get("alpha", 1) != 1:
        return None
    return _other(node, term)


def _other(node: fx.Node, operand: fx.Node) -> fx.Node | None:
    others = [arg for arg in node.args if arg is not operand]
    return others[0] if len(others) == 1 and isinstance(others[0], fx.Node) else None
