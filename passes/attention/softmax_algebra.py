"""The value of a chain of exponentials, sums and quotients, by algebra: the proof behind `flash_decode`.

There are many ways to write a softmax and its sum: with the maximum subtracted or not, by a quotient or by a logarithm,
with guards against infinities. The compiler's graph shows each of them in its own ops. So values are followed in terms
of a *variable* x that is indexed by one axis (tokens, or ranks), and of elements v that are indexed by it too. Every
value is a product

    exp(sum of coefficients * symbols)            or the logarithm of such a product

The symbols are x, v (in exponents its logarithm is meant), maxima m, which stay opaque, and the sums over the axis of
x: Z = sum exp(c x) and N = sum exp(c x) v. The rules are exact in real numbers:

    exp, log                                      the same symbols, as a product or as its logarithm
    a * b, a / b; log a + log b, log a - log b    coefficients are added or subtracted
    number * log a                                coefficients are multiplied
    max of log a over the axis                    m, a new symbol: whatever it is, it has to cancel
    sum of exp(c x + rest) over the axis          exp(rest) * Z, if rest does not depend on the axis
    sum of exp(c x + rest) * v over the axis      exp(rest) * N
    any op on the elements of values like m       a new symbol m again
    any other op on the elements                  j, which depends on the axis and prevents a sum
    whether j holds for any index, or for all     a new symbol m
    where(m, a, b), equal but for such symbols    the same, with a new symbol m

In the end a softmax-weighted sum is N / Z, however it was written. Casts between floating-point types are ignored,
because they only round. The axes of a tensor are followed too, through views, indices of dimensions of size 1, and cats
of a tensor's chunks, as lists of *atoms* (see `Atoms`). Two values are combined only if their axes are the same, so a
tensor that was permuted or repeated is not mistaken for another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch
from torch import fx

from ditron_inductor.passes.graph import proofs

aten = torch.ops.aten

Symbol = tuple[Any, ...]
"""("x", origin), ("v", origin), ("m", node), ("j", origin of x, node), ("Z", c, origin of x), ("N", c, origin of x,
origin of v); ("b", ..) depends on no axis here; a seed cuts x and v out of it.
"""
Axes = tuple[tuple[int, ...], ...]
"""For every dimension the atoms that it runs over, the slowest first. A dimension of size 1 has none."""

MOST_STEPS = 60
"""The most nodes from a value up to where its chain begins: twice as many as any form needs."""
TESTS = (aten.any.dim, aten.any.dims, aten.all.dim, aten.all.dims)
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Unknown(Exception):
    """The algebra does not know what `node` is."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node


class Atoms:
    """The indices of dimensions. A view that splits one replaces an atom by two; two may turn out the same."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._parts: dict[int, tuple[int, ...]] = {}

    def new(self, shape: Sequence[int]) -> Axes:
        """Returns the axes of a tensor of which nothing is known."""
        return tuple(() if size == 1 else (self.atom(size),) for size in shape)

    def atom(self, size: int) -> int:
        self._sizes.append(size)
        return len(self._sizes) - 1

    def size(self, atom: int) -> int:
        return self._sizes[atom]

    def flat(self, atoms: Sequence[int]) -> tuple[int, ...]:
        """Returns the atoms into which these atoms have been split."""
        found: list[int] = []
        for atom in atoms:
            parts = self._parts.get(atom)
            found += [atom] if parts is None else self.flat(parts)
        return tuple(found)

    def of(self, axes: Axes) -> Axes:
        """Applies `flat` to every dimension."""
        return tuple(self.flat(axis) for axis in axes)

    def take(self, atoms: Sequence[int], size: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Returns (the slowest of the atoms, of `size` together; the others). Splits one if needed and possible."""
        taken, rest = list[int](), list(self.flat(atoms))
        while size > 1 and rest:
            atom = rest.pop(0)
            here = self.size(atom)
            if size % here == 0:
                taken.append(atom)
                size //= here
            elif here % size == 0:
                self._parts[atom] = self.atom(size), self.atom(here // size)
                rest = [*self._parts[atom], *rest]
            else:
                return None
        return (tuple(taken), tuple(rest)) if size == 1 else None

    def reshaped(self, axes: Axes, shape: Sequence[int]) -> Axes | None:
        """Returns the axes of a reshape; None if they cannot be told."""
        rest: tuple[int, ...] = sum(self.of(axes), ())
        found = []
        for size in shape:
            step = self.take(rest, size)
            if step is None:
                return None
            found.append(step[0])
            rest = step[1]
        return None if rest else tuple(found)

    def bind(self, fresh: Sequence[int], known: Sequence[int]) -> bool:
        """Declares the atoms of a new tensor the same as known ones, in order. Returns whether that is possible."""
        left, right = list(self.flat(fresh)), list(self.flat(known))
        while left and right:
            first, other = left[0], right[0]
            if self.size(first) == self.size(other):
                self._parts[left.pop(0)] = (right.pop(0),)
                continue
            larger, smaller = (left, right) if self.size(first) > self.size(other) else (right, left)
            step = self.take(larger[:1], self.size(smaller[0]))
            if step is None:
                return False
            larger[:1] = [*step[0], *step[1]]
        return not left and not right


@dataclass(frozen=True)
class Value:
    """A tensor as the exponential of a sum, or (is_log) as the sum. power: the sum's coefficients, without zeros."""

    axes: Axes
    power: Mapping[Symbol, float]
    is_log: bool

    def is_opaque(self) -> bool:
        """Returns whether it depends on the axis through maxima only."""
        return self.is_log and all(symbol[0] == "m" for symbol in self.power)


def static_shape(node: fx.Node) -> tuple[int, ...]:
    """The sizes of a tensor, all of which are numbers. Raises Unknown."""
    value = proofs.tensor(node)
    if value is None or not all(isinstance(size, int) for size in value.shape):
        raise Unknown(node)
    return tuple(value.shape)


def combined(left: Mapping[Symbol, float], right: Mapping[Symbol, float], factor: float) -> dict[Symbol, float]:
    """left + factor * right."""
    total = dict(left)
    for symbol, count in right.items():
        total[symbol] = total.get(symbol, 0.0) + factor * count
    return {symbol: count for symbol, count in total.items() if count != 0.0}


class Algebra:
    """The values of the nodes of a graph. seed: returns the value of a node that starts a chain, or None."""

    def __init__(self, atoms: Atoms, seed: Callable[[fx.Node], Value | None]) -> None:
        self.atoms = atoms
        self._seed = seed
        self._known: dict[fx.Node, Value] = {}
        # Nodes that nothing is known of, so that two ways to read a node do not take twice the time at each step.
        self._unknown: dict[fx.Node, fx.Node] = {}
        self._depth = 0
        self._was_too_deep = False

    def value(self, node: object) -> Value:
        """Returns the value of a node. Raises Unknown."""
        assert isinstance(node, fx.Node)
        found = self._known.get(node)
        if found is not None:
            return found
        if node in self._unknown:
            raise Unknown(self._unknown[node])
        self._was_too_deep &= self._depth > 0
        if self._depth >= MOST_STEPS:
            self._was_too_deep = True
            raise Unknown(node)
        self._depth += 1
        try:
            found = self._seed(node) or self._read(node)
        except Unknown as unknown:
            # What is too deep here may be read from another node.
            if not self._was_too_deep:
                self._unknown[node] = unknown.node
            raise
        finally:
            self._depth -= 1
        self._known[node] = found
        return found

    def seeds_changed(self) -> None:
        """Has nodes read anew of which nothing was known. To be called when there is a seed more."""
        self._unknown.clear()

    def total(self, value: Value, dims: Sequence[int], node: fx.Node, keepdim: bool) -> Value:
        """Returns the sum over `dims`, which have to be all the dimensions that index x. Raises Unknown at `node`."""
        x = [symbol for symbol in value.power if symbol[0] == "x"]
        v = [symbol for symbol in value.power if symbol[0] == "v"]
        if value.is_log or len(x) != 1 or len(v) > 1 or any(value.power[symbol] != 1.0 for symbol in v):
            raise Unknown(node)
        if any(symbol[0] == "j" for symbol in value.power):
            raise Unknown(node)
        count = value.power[x[0]]
        summed: Symbol = ("N", count, x[0][1], v[0][1]) if v else ("Z", count, x[0][1])
        rest = {symbol: times for symbol, times in value.power.items() if symbol not in (*x, *v)}
        return Value(self._without(value, dims, node, keepdim), combined(rest, {summed: 1.0}, 1.0), False)

    def weighted_sum(self, weights: Value, summed: object, axes: Axes, node: fx.Node) -> Value:
        """Returns the sum of `summed` [batch, tokens, wide] by weights [batch, rows, tokens]. Raises Unknown."""
        batch, tokens, wide = axes
        of_weights = self.atoms.of(weights.axes)
        if not self.atoms.bind(batch, of_weights[0]) or not self.atoms.bind(tokens, of_weights[2]):
            raise Unknown(node)
        weighted = Value(weights.axes, {**weights.power, ("v", summed): 1.0}, weights.is_log)
        total = self.total(weighted, [2], node, keepdim=True)
        return replace(total, axes=(*total.axes[:2], wide))

    def _without(self, value: Value, dims: Sequence[int], node: fx.Node, keepdim: bool) -> Axes:
        """Returns the axes that are left when `dims` are reduced. These have to be exactly the axes of x."""
        axes = self.atoms.of(value.axes)
        dims = [dim % len(axes) for dim in dims]
        x = next((symbol for symbol in value.power if symbol[0] in ("x", "j")), None)
        reduced = sum((axes[dim] for dim in sorted(dims)), ())
        if x is None or reduced != self.atoms.flat((x[1].atom,)):
            raise Unknown(node)
        kept = [(() if dim in dims else axis) for dim, axis in enumerate(axes)]
        return tuple(axis for dim, axis in enumerate(kept) if keepdim or dim not in dims)

    def _read(self, node: fx.Node) -> Value:
        if node.op != "call_function":
            raise Unknown(node)
        if node.target is getitem:
            source, index = node.args
            # Of (values, indices).
            if isinstance(source, fx.Node) and source.target is aten.max.dim and index == 0:
                bound = proofs.arguments(source)
                return self._maximum(node, bound["self"], [bound["dim"]], bound["keepdim"])
            raise Unknown(node)
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            raise Unknown(node)
        bound = proofs.arguments(node)
        if target in proofs.CASTS and target is not aten.view.dtype:
            return self._cast(node)
        if target is aten.permute.default or target is aten.transpose.int:
            value = self.value(node.args[0])
            return Value(tuple(value.axes[dim] for dim in proofs.permutation(node)), value.power, value.is_log)
        if target in proofs.ORDER_KEEPING or (target is aten.expand.default and proofs.keeps_order(node)):
            return self._reshaped(node)
        if target is aten.select.int:
            return self._selected(node)
        if target is aten.cat.default:
            return self._put_together(node)
        if target in TESTS and bound["dim"] is not None:
            dims = bound["dim"] if isinstance(bound["dim"], (list, tuple)) else [bound["dim"]]
            return self._opaque(node, bound["self"], dims, bound["keepdim"])
        if target is aten.sum.dim_IntList and bound["dtype"] in (None, *FLOATS) and bound["dim"]:
            return self.total(self.value(node.args[0]), bound["dim"], node, bound["keepdim"])
        if target is aten.amax.default and bound["dim"]:
            return self._maximum(node, bound["self"], bound["dim"], bound["keepdim"])
        if target in (aten.exp.default, aten.log.default):
            value = self.value(node.args[0])
            if value.is_log is (target is aten.log.default):
                raise Unknown(node)
            return Value(value.axes, value.power, not value.is_log)
        return self._pointwise(node, target, bound)

    def _cast(self, node: fx.Node) -> Value:
        source, result = proofs.tensor(node.args[0]), proofs.tensor(node)
        if source is None or result is None or source.dtype not in FLOATS or result.dtype not in FLOATS:
            raise Unknown(node)
        return self.value(node.args[0])

    def _reshaped(self, node: fx.Node) -> Value:
        value = self.value(node.args[0])
        axes = self.atoms.reshaped(value.axes, static_shape(node))
        if axes is None:
            raise Unknown(node)
        return Value(axes, value.power, value.is_log)

    def _selected(self, node: fx.Node) -> Value:
        """Reads the selection of the only element of a dimension."""
        value, dim = self.value(node.args[0]), node.args[1]
        if not isinstance(dim, int) or value.axes[dim]:
            raise Unknown(node)
        dim %= len(value.axes)
        return Value(value.axes[:dim] + value.axes[dim + 1 :], value.power, value.is_log)

    def _put_together(self, node: fx.Node) -> Value:
        """Reads a cat of all equal chunks of a tensor in order, or of views: a gather along an inner dimension."""
        parts = list(proofs.arguments(node)["tensors"])
        chunks = [proofs.views_up(part)[-1] for part in parts]
        pieces = [proofs.piece(chunk) for chunk in chunks]
        found = [piece for piece in pieces if piece is not None]
        shapes = [(static_shape(chunk), static_shape(part)) for chunk, part in zip(chunks, parts, strict=True)]
        if not found or len(found) < len(pieces) or any(shape != shapes[0] for shape in shapes):
            raise Unknown(node)
        source, dim = found[0].source, found[0].dim
        length, cat_dim = shapes[0][0][dim], proofs.arguments(node)["dim"]
        value = self.value(source)
        places = [(piece.source, piece.dim, piece.start) for piece in found]
        if places != [(source, dim, index * length) for index in range(len(parts))]:
            raise Unknown(node)
        step = self.atoms.take(value.axes[dim], len(parts))
        if step is None or static_shape(source)[dim] != len(parts) * length:
            raise Unknown(node)
        chunk_axes = (*value.axes[:dim], step[1], *value.axes[dim + 1 :])
        axes = self.atoms.reshaped(chunk_axes, shapes[0][1])
        if axes is None:
            raise Unknown(node)
        cat_dim %= len(axes)
        return Value((*axes[:cat_dim], step[0] + axes[cat_dim], *axes[cat_dim + 1 :]), value.power, value.is_log)

    def _maximum(self, node: fx.Node, source: object, dims: Sequence[int], keepdim: bool) -> Value:
        if not self.value(source).is_log:
            raise Unknown(node)
        return self._opaque(node, source, dims, keepdim)

    def _opaque(self, node: fx.Node, source: object, dims: Sequence[int], keepdim: bool) -> Value:
        """Reads an op that reduces the whole axis to an opaque symbol."""
        return Value(self._without(self.value(source), dims, node, keepdim), {("m", node): 1.0}, True)

    def _pointwise(self, node: fx.Node, target: torch._ops.OpOverload, bound: Mapping[str, Any]) -> Value:
        left, right = bound.get("self"), bound.get("other")
        multiplies = target in (aten.mul.Tensor, aten.div.Tensor)
        adds = target in (aten.add.Tensor, aten.sub.Tensor) and bound.get("alpha", 1) == 1
        if multiplies and isinstance(left, fx.Node) and isinstance(right, (int, float)) and right > 0:
            value = self.value(left)
            if value.is_log:
                factor = float(right) if target is aten.mul.Tensor else 1.0 / right
                return Value(value.axes, {symbol: count * factor for symbol, count in value.power.items()}, True)
        if (multiplies or adds) and isinstance(left, fx.Node) and isinstance(right, fx.Node):
            first, other = self.value(left), self.value(right)
            if first.is_log is other.is_log is adds:
                sign = 1.0 if target in (aten.mul.Tensor, aten.add.Tensor) else -1.0
                axes = self.broadcast(node, first.axes, other.axes)
                return Value(axes, combined(first.power, other.power, sign), adds)
        if target is aten.scalar_tensor.default or (target is aten.full.default and not bound["size"]):
            return Value((), {("m", node): 1.0}, True)
        if target is aten.where.self:
            chosen = self._chosen(node)
            if chosen is not None:
                return chosen
        if torch.Tag.pointwise in target.tags:
            values = [self.value(given) for given in node.all_input_nodes]
            if values:
                axes = values[0].axes
                for value in values[1:]:
                    axes = self.broadcast(node, axes, value.axes)
                indexed = [symbol for value in values for symbol in value.power if symbol[0] in ("x", "v", "j")]
                if not indexed and all(value.is_opaque() for value in values):
                    return Value(axes, {("m", node): 1.0}, True)
                if indexed and all(symbol[1] == indexed[0][1] for symbol in indexed):
                    return Value(axes, {("j", indexed[0][1], node): 1.0}, True)
        raise Unknown(node)

    def _chosen(self, node: fx.Node) -> Value | None:
        """Reads a `where` between values that differ only in maxima; returns None for any other `where`."""
        condition, left, right = (self.value(given) for given in node.args)
        rest = [{symbol: count for symbol, count in value.power.items() if symbol[0] != "m"} for value in (left, right)]
        if not condition.is_opaque() or left.is_log is not right.is_log or rest[0] != rest[1]:
            return None
        axes = self.broadcast(node, condition.axes, self.broadcast(node, left.axes, right.axes))
        return Value(axes, combined(rest[0], {("m", node): 1.0}, 1.0), left.is_log)

    def broadcast(self, node: fx.Node, left: Axes, right: Axes) -> Axes:
        """Returns the axes of an elementwise op. Raises Unknown if they differ in a dimension that is not of size 1."""
        count = max(len(left), len(right))
        first, other = (self.atoms.of(((),) * (count - len(axes)) + axes) for axes in (left, right))
        if any(a and b and a != b for a, b in zip(first, other, strict=True)):
            raise Unknown(node)
        return tuple(a or b for a, b in zip(first, other, strict=True))
