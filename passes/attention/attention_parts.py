"""The algebra of softmaxes applied to attention in a graph: the part of a rank, and the merging of the parts.

The chains of `softmax_algebra` begin at seeds. A batched product of queries and keys gives the scores x, indexed by the
tokens. A batched product of exponentials and values multiplies by v and sums. `where` with -inf removes tokens, if its
condition is arange(tokens) < lengths, or, where a cache is divided over ranks, arange(first, first + tokens) < lengths.
A sum with `where(.., 0, -inf)` does so too, written out or as a mask of torch's attention ops. These ops give a
weighted sum and the logarithm of its weights. Dimensions of operands are followed from the tensors in the graph through
views, and where they come out determines their roles.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from operator import getitem

import torch
from torch import fx

from ditron_inductor.passes.attention.roots import VIEWS, Root, chain_to, viewed
from ditron_inductor.passes.attention.softmax_algebra import (
    FLOATS,
    Algebra,
    Atoms,
    Axes,
    Symbol,
    Unknown,
    Value,
    static_shape,
)
from ditron_inductor.passes.graph import proofs
from ditron_inductor.passes.graph.collectives import Collective

aten = torch.ops.aten
prims = torch.ops.prims

MOVES = VIEWS | proofs.SLICES | proofs.CASTS | {aten.select.int, aten.cat.default}
CASTS = proofs.CASTS - {aten.view.dtype}
RANGES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""The dtypes of ranges that are read."""
NEGATIONS = (aten.bitwise_not.default, aten.logical_not.default)
SDPA = (
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
)
HIDING: Mapping[object, tuple[float, ...]] = {
    aten._scaled_dot_product_cudnn_attention.default: (-math.inf, -65536.0),
}
"""The numbers that hide a score where an op adds them. Of a mask of bools torch makes this finite number for cuDNN. It
hides a score as -inf does as long as another one is shown; if none is, all are, and here the result is 0.
"""
MUST_BE_OFF = ("dropout_p", "is_causal", "return_debug_mask")
MASKS = ("attn_bias", "attn_mask")


@dataclass(frozen=True)
class Scores:
    """The scores x of an attention: products of query and keys over `dim`, indexed by the tokens `atom`. lengths: None,
    or (a tensor, its atoms, a number to add to it); then only tokens below this length exist.
    """

    node: fx.Node
    query: Root
    keys: Root
    atom: int
    dim: tuple[int, ...]
    lengths: tuple[fx.Node, Axes, int] | None = None


@dataclass(frozen=True)
class SoftmaxCall:
    """A call of torch's attention ops: query [B, Hq, L, D], key and value [B, Hkv, S, D]. added: to the scores, or
    None.
    """

    node: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    added: fx.Node | None
    scale: float
    sizes: tuple[int, int, int, int, int, int]

    @classmethod
    def read(cls, node: fx.Node) -> SoftmaxCall:
        """Reads a call whose sizes (B, Hkv, Hq / Hkv, L, S, D) are all known. Raises Unknown at one that does more."""
        bound = proofs.arguments(node)
        query, key, value = (bound[name] for name in ("query", "key", "value"))
        (B, H, L, D), (_, heads, S, _) = static_shape(query), static_shape(key)
        alike = static_shape(value) == static_shape(key) == (B, heads, S, D) and heads > 0 and H % heads == 0
        scale = D**-0.5 if bound.get("scale") is None else float(bound["scale"])
        on = any(bound.get(name) for name in MUST_BE_OFF)
        if on or not alike or S == 1 or not 0.0 < scale < math.inf:
            raise Unknown(node)
        added = next((bound[name] for name in MASKS if bound.get(name) is not None), None)
        return cls(node, query, key, value, added, scale, (B, heads, H // heads, L, S, D))

    def mask(self) -> TokenMask | None:
        """Returns the mask of the call; None if there is none, or if it adds other numbers."""
        return read_mask(self.added, HIDING.get(self.node.target, (-math.inf,)))


@dataclass(frozen=True)
class TokenMask:
    """A mask over scores: where `condition` is true, a score is kept if `kept`, and otherwise hidden. views: what is
    done to the condition's dimensions in front of the scores, the last one first.
    """

    condition: fx.Node
    kept: bool
    views: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Ranks:
    """The variables x and v of the merging: the gathered parts, indexed by the rank."""

    atom: int


@dataclass(frozen=True)
class Joined:
    """Outputs and log-sum-exps gathered side by side: the atoms of `both` in one dimension, and the outputs' `wide`."""

    ranks: Ranks
    both: tuple[int, ...]
    wide: tuple[int, ...]


@dataclass(frozen=True)
class GatheredParts:
    """A rank's output and log-sum-exp, and what gathers them: one collective each, or one for both, side by side."""

    output: fx.Node
    logsum: fx.Node
    gathers: tuple[Collective, ...]


def read_mask(added: object, hiding: Collection[float] = (-math.inf,)) -> TokenMask | None:
    """Returns the TokenMask that `added`, to scores, is: 0 for those that are kept and a number of `hiding` for the
    others, in a dtype that has both, behind views and perhaps padded and cut again; None if it is something else.
    """
    views = []
    while isinstance(added, fx.Node):
        inner = proofs.unpadded(added)
        if inner is None and added.target not in VIEWS and added.target not in CASTS:
            break
        if proofs.fake(added).dtype not in FLOATS:
            return None
        if added.target in VIEWS:
            views.append(added)
        added = inner or proofs.operand(added)
    if not isinstance(added, fx.Node) or added.target is not aten.where.self:
        return None
    condition, chosen, other = added.args
    kept = proofs.is_full(chosen, 0) and any(proofs.is_full(other, number) for number in hiding)
    hides = proofs.is_full(other, 0) and any(proofs.is_full(chosen, number) for number in hiding)
    if not isinstance(condition, fx.Node) or not (kept or hides):
        return None
    # The numbers are scalars, which add no dimensions.
    same = proofs.same_shape(tuple(proofs.fake(condition).shape), tuple(proofs.fake(added).shape))
    return TokenMask(condition, kept, tuple(views)) if same else None


def calls_of_parts(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """Returns (call, index) of the outputs of attention ops that views, cuts, casts and cats make `node` of."""
    pending, found = [node], list[tuple[fx.Node, int]]()
    while pending:
        part = pending.pop()
        source = part.args[0] if part.args else None
        if part.target is getitem and isinstance(source, fx.Node) and source.target in SDPA:
            index = part.args[1]
            assert isinstance(index, int)
            found.append((source, index))
        elif part.target in MOVES:
            pending += part.all_input_nodes
    return found


class PartAlgebra:
    """The seeds of the algebra for the part of a rank, and for the merging of two gathered tensors."""

    def __init__(self) -> None:
        self.atoms = Atoms()
        self.algebra = Algebra(self.atoms, self._seed)
        self._gathered: dict[fx.Node, Value] = {}
        self._calls: dict[fx.Node, tuple[Axes, Scores]] = {}

    def gather(self, parts: GatheredParts) -> Ranks:
        """Defines the gathered outputs and log-sum-exps as v and x."""
        self.algebra.seeds_changed()
        ranks = Ranks(self.atoms.atom(parts.gathers[0].world_size))
        places = [self.algebra.value(part).axes for part in (parts.output, parts.logsum)]
        if not all(places):
            raise Unknown(parts.output)
        axes = [((ranks.atom, *place[0]), *place[1:]) for place in places]
        if len(parts.gathers) == 1:
            if self.atoms.of(axes[0][:-1]) != self.atoms.of(axes[1][:-1]):
                raise Unknown(parts.logsum)
            (both,) = self.atoms.new((static_shape(parts.gathers[0].wait)[-1],))
            joined = Joined(ranks, both, self.atoms.flat(axes[0][-1]))
            place = (*axes[0][:-1], both)
            self._gathered[parts.gathers[0].wait] = Value(place, {("b", joined): 1.0}, is_log=False)
            return ranks
        for gather, place, symbol in zip(parts.gathers, axes, (("v", ranks), ("x", ranks)), strict=True):
            self._gathered[gather.wait] = Value(place, {symbol: 1.0}, is_log=symbol[0] == "x")
        return ranks

    def _taken_apart(self, node: fx.Node) -> Value | None:
        """Returns the value of `node` if it is one of two tensors that were gathered side by side, or None."""
        cut = _cut(node)
        if cut is None:
            return None
        source, dim, start, length, kept = cut
        whole = self.algebra.value(source)
        ((symbol, count),) = whole.power.items() if len(whole.power) == 1 else (((), 0.0),)
        if count != 1.0 or not isinstance(symbol[1], Joined):
            return None
        joined, axes = symbol[1], self.atoms.of(whole.axes)
        dim %= len(axes)
        if axes[dim] != self.atoms.flat(joined.both):
            return None
        size = math.prod(self.atoms.size(atom) for atom in joined.wide)
        if (start, length) == (0, size) and kept:
            return Value((*axes[:dim], joined.wide, *axes[dim + 1 :]), {("v", joined.ranks): 1.0}, is_log=False)
        if (start, length) != (size, 1):
            raise Unknown(node)
        return Value((*axes[:dim], *[()] * kept, *axes[dim + 1 :]), {("x", joined.ranks): 1.0}, is_log=True)

    def _seed(self, node: fx.Node) -> Value | None:
        if node in self._gathered:
            return self._gathered[node]
        if node.op != "call_function":
            return None
        if node.target is aten.bmm.default:
            return self._product(node)
        if node.target is aten.where.self:
            return self._masked(node)
        if node.target is aten.add.Tensor and proofs.arguments(node)["alpha"] == 1:
            return self._added(node)
        if node.target is getitem and isinstance(node.args[0], fx.Node) and node.args[0].target in SDPA:
            return self._sdpa(node, node.args[0])
        return self._taken_apart(node) if self._gathered else None

    def _product(self, node: fx.Node) -> Value:
        """Returns the value of a batched product: scores, or their exponentials times values."""
        left, right = node.args
        assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
        try:
            weights = self.algebra.value(left)
        except Unknown:
            return self._scores(node, left, right)
        return self.algebra.weighted_sum(weights, *self._root(right), node)

    def _scores(self, node: fx.Node, left: fx.Node, right: fx.Node) -> Value:
        query, (batch, rows, dim) = self._root(left)
        keys, (key_batch, key_dim, tokens) = self._root(right)
        if len(tokens) != 1 or not self.atoms.bind(key_batch, batch) or not self.atoms.bind(key_dim, dim):
            raise Unknown(node)
        origin = Scores(node, query, keys, tokens[0], dim)
        return Value((batch, rows, tokens), {("x", origin): 1.0}, is_log=True)

    def _root(self, node: fx.Node) -> tuple[Root, Axes]:
        """Returns (the tensor that `node` is a view of, the axes of `node`)."""
        chain = chain_to(self.atoms, node)
        return chain[0], chain[-1].axes

    def _masked(self, node: fx.Node) -> Value | None:
        """Returns the value of scores that are -inf where there is no token; None if `node` is something else."""
        condition, chosen, other = node.args
        kept = not proofs.is_full(chosen, -math.inf)
        if not kept or not proofs.is_full(other, -math.inf):
            chosen = other if not kept else None
        if not isinstance(chosen, fx.Node):
            return None
        assert isinstance(condition, fx.Node)
        return self._shorter(node, chosen, TokenMask(condition, kept, ()))

    def _added(self, node: fx.Node) -> Value | None:
        """Returns the value of scores with a mask added to them; None if `node` is something else."""
        left, right = node.args
        for scores, added in ((left, right), (right, left)):
            mask = read_mask(added)
            if mask is not None and isinstance(scores, fx.Node):
                return self._shorter(node, scores, mask)
        return None

    def _shorter(self, node: fx.Node, source: fx.Node, mask: TokenMask) -> Value:
        """Returns the value of the scores `source` where `mask` hides some. Raises Unknown."""
        scores = self.algebra.value(source)
        ((symbol, count),) = scores.power.items() if len(scores.power) == 1 else (((), 0.0),)
        if not symbol or symbol[0] != "x" or not isinstance(symbol[1], Scores) or symbol[1].lengths is not None:
            raise Unknown(node)
        if static_shape(node) != static_shape(source):
            raise Unknown(node)
        lengths = self.lengths_of(mask, scores.axes, symbol[1].atom)
        return replace(scores, power={("x", replace(symbol[1], lengths=lengths)): count})

    def lengths_of(self, mask: TokenMask, scores: Axes, tokens: int) -> tuple[fx.Node, Axes, int]:
        """Returns the lengths of a mask over scores, as `Scores` has them. Raises Unknown."""
        condition, kept, views = mask.condition, mask.kept, [*mask.views]
        while condition.target in NEGATIONS or condition.target in VIEWS:
            views.append(condition)
            kept ^= condition.target in NEGATIONS
            condition = proofs.operand(condition)
        form = _COMPARISONS.get(condition.target)
        if form is None:
            raise Unknown(condition)
        left, right = condition.args
        assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
        below, including = form
        # Brought to `index < length` or `index <= length` for the tokens that are kept.
        index, length = (left, right) if below else (right, left)
        if not kept:
            index, length, including = length, index, not including
        index_root, index_axes = self._root(index)
        length_root, length_axes = self._root(length)
        value = proofs.tensor(length_root.node)
        first = first_of_range(index_root.node)
        if first is None or value is None or value.is_floating_point() or value.dtype == torch.bool:
            raise Unknown(condition)
        axes = self.algebra.broadcast(condition, index_axes, length_axes)
        for view in reversed(views):
            if view.target is aten.expand.default:
                # What is repeated is left to the op on the elements, which repeats too.
                axes = ((),) * (len(static_shape(view)) - len(axes)) + axes
            elif view.target not in NEGATIONS:
                axes = viewed(self.atoms, view, axes)
        padded = ((),) * (len(scores) - len(axes)) + axes
        for mine, theirs in zip(padded, scores, strict=True):
            if mine and not self.atoms.bind(mine, theirs):
                raise Unknown(condition)
        if self.atoms.of(index_root.axes) != ((tokens,),):
            raise Unknown(condition)
        return length_root.node, length_root.axes, int(including) - first

    def _sdpa(self, node: fx.Node, call: fx.Node) -> Value:
        """Returns the values of the output and the log-sum-exp of torch's own ops."""
        read = SoftmaxCall.read(call)
        B, heads, group, L, S, D = read.sizes
        # One origin for both results. Query heads that share a key head follow one another.
        if call not in self._calls:
            axes = self.atoms.new((*read.sizes, D))
            batch, head, group_axis, rows, tokens, dim, wide = axes
            queries = Root(read.query, (batch, head + group_axis, rows, dim))
            keys = Root(read.key, (batch, head, tokens, dim))
            lengths = None
            if read.added is not None:
                mask = read.mask()
                if mask is None:
                    raise Unknown(call)
                lengths = self.lengths_of(mask, (batch, head + group_axis, rows, tokens), tokens[0])
            self._calls[call] = axes, Scores(call, queries, keys, tokens[0], dim, lengths)
        (batch, head, group_axis, rows, tokens, dim, wide), origin = self._calls[call]
        count = read.scale
        total: Symbol = ("Z", count, origin)
        if node.args[1] == 0:
            values = Root(read.value, (batch, head, tokens, wide))
            power = {("N", count, origin, values): 1.0, total: -1.0}
            return Value((batch, head + group_axis, rows, wide), power, is_log=False)
        shape = static_shape(node)
        if node.args[1] != 1 or shape[:3] != (B, heads * group, L) or math.prod(shape) != B * heads * group * L:
            raise Unknown(node)
        return Value((batch, head + group_axis, rows, *[()] * (len(shape) - 3)), {total: 1.0}, is_log=True)


_COMPARISONS: dict[object, tuple[bool, bool]] = {
    aten.lt.Tensor: (True, False),
    aten.le.Tensor: (True, True),
    aten.gt.Tensor: (False, False),
    aten.ge.Tensor: (False, True),
}
"""(whether the left operand is the smaller one, whether they may be equal)."""


def _cut(node: fx.Node) -> tuple[fx.Node, int, int, int, bool] | None:
    """Returns (source, dimension, start, length, whether the dimension is kept) of a piece of a static tensor."""
    target, source = node.target, node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if target is aten.select.int:
        dim, index = node.args[1:]
        value = proofs.tensor(source)
        if not isinstance(dim, int) or not isinstance(index, int) or value is None:
            return None
        size = value.shape[dim]
        return (source, dim, index % size, 1, False) if isinstance(size, int) else None
    if target is aten.slice.Tensor:
        bound, value, result = proofs.arguments(node), proofs.tensor(source), proofs.tensor(node)
        dim, start = bound["dim"], bound["start"] or 0
        if bound["step"] != 1 or not isinstance(start, int) or value is None or result is None:
            return None
        size, length = value.shape[dim], result.shape[dim]
        if not isinstance(size, int) or not isinstance(length, int):
            return None
        return source, dim, start + size if start < 0 else start, length, True
    if target is getitem and source.target is aten.split_with_sizes.default:
        whole, sizes, *dims = source.args
        index = node.args[1]
        if not isinstance(whole, fx.Node) or not isinstance(sizes, (list, tuple)) or not isinstance(index, int):
            return None
        if not all(isinstance(size, int) for size in sizes):
            return None
        known = [size for size in sizes if isinstance(size, int)]
        dim = dims[0] if dims else 0
        assert isinstance(dim, int)
        return whole, dim, sum(known[:index]), known[index], True
    return None


def first_of_range(node: fx.Node) -> int | None:
    """Returns s if a node is arange(s, s + n), or arange(n) + s, for a known s; None if it is something else, or if
    its dtype does not have all of these numbers.
    """
    value, first = proofs.tensor(node), None
    if node.target is aten.add.Tensor and not node.kwargs:
        counted, more = node.args
        begin = first_of_range(counted) if isinstance(counted, fx.Node) else None
        first = begin + more if begin is not None and type(more) is int else None
    elif node.target is prims.iota.default:
        bound = proofs.arguments(node)
        first = bound["start"] if bound["step"] == 1 and type(bound["start"]) is int else None
    if first is None or value is None or value.dtype not in RANGES:
        return None
    known, limits = value.shape[0], torch.iinfo(value.dtype)
    fits = first == 0 or (isinstance(known, int) and limits.min <= first and first + known - 1 <= limits.max)
    return first if fits else None
