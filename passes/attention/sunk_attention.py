"""Attention of one query for each sequence, written out with a *sink* for each head: one more score, of no token.

GPT-OSS has them, and no attention op of torch takes them, so `transformers` writes

    q, keys -> views, repeated heads -> bmm -> * scale -> + bias [B, 1, 1, S] = scores [B, Hq, 1, S]
    scores, sinks [Hq] -> cat -> (- maximum) -> softmax -> without the last column -> bmm <- views <- values

It is proved by the algebra of `softmax_algebra`, with two more seeds. With a bias b, which it adds, and a sink, which a
cat adds, the variable x becomes

    y = c x + b over the tokens, and the sink over one index more

A softmax over y and a cut of its last column give exp(y) / Z(y) over the tokens alone, so the result has to be
sum(exp(y) v) / Z(y). Dimensions have their roles where atoms of queries, keys, values, sinks and result are the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import fx

from ditron_inductor.passes.attention.attention_parts import PartAlgebra, Scores
from ditron_inductor.passes.attention.roots import Root, chain_to
from ditron_inductor.passes.attention.softmax_algebra import Axes, Symbol, Unknown, Value, static_shape
from ditron_inductor.passes.attention.step_attention import StepAttention, TokenChoice
from ditron_inductor.passes.graph import proofs
from ditron_inductor.task.torch_dtypes import ACTIVATION_DTYPES

aten = torch.ops.aten


@dataclass(frozen=True)
class Shifted:
    """The variable y: factor * scores + bias over the tokens, and the `sinks` over one index more, if there are any.
    atom: the index. sequences, heads: the atoms that bias and sinks have in common with the scores.
    """

    scores: Scores
    factor: float
    atom: int
    bias: fx.Node | None = None
    sequences: tuple[int, ...] = ()
    sinks: fx.Node | None = None
    heads: tuple[int, ...] = ()


@dataclass(frozen=True)
class Kept:
    """The variable y over the tokens alone, where it has a sink."""

    whole: Shifted
    atom: int


class SunkAlgebra(PartAlgebra):
    """The seeds of scores with a bias and with sinks."""

    def __init__(self) -> None:
        super().__init__()
        self._views: dict[Root, tuple[Root, ...]] = {}

    def _root(self, node: fx.Node) -> tuple[Root, Axes]:
        chain = chain_to(self.atoms, node)
        # What is in front of [B, heads, S, D] may divide the tokens, as the blocks of a paged cache do.
        whole = next((one.node for one in chain if len(one.axes) == 4), chain[0].node)
        if whole is not chain[0].node:
            chain = chain_to(self.atoms, node, (whole,))
        self._views[chain[0]] = chain
        return chain[0], chain[-1].axes

    def view(self, root: Root, axes: Axes) -> fx.Node | None:
        """Returns the first tensor with these axes on the way from a root to a product; None if there is none."""
        views = self._views[root]
        return next((one.node for one in views if self.atoms.of(one.axes) == self.atoms.of(axes)), None)

    def _seed(self, node: fx.Node) -> Value | None:
        if node.target is aten.add.Tensor and proofs.arguments(node)["alpha"] == 1:
            found = self._biased(node)
        elif node.target is aten.cat.default:
            found = self._with_sinks(node)
        elif node.target is aten.slice.Tensor:
            found = self._without_sinks(node)
        else:
            found = None
        return found or super()._seed(node)

    def _scores_of(self, node: fx.Node) -> tuple[Value, Shifted] | None:
        """Returns the value of scores [B, Hq, 1, S], and the variable that they are, without sinks."""
        try:
            value = self.algebra.value(node)
        except Unknown:
            return None
        ((symbol, count),) = value.power.items() if len(value.power) == 1 else (((), 0.0),)
        if not value.is_log or not symbol or symbol[0] != "x" or len(value.axes) != 4:
            return None
        origin, atoms = symbol[1], self.atoms
        if isinstance(origin, Scores) and origin.lengths is None:
            origin, count = Shifted(origin, count, origin.atom), 1.0
        right = isinstance(origin, Shifted) and origin.sinks is None and count == 1.0
        return (value, origin) if right and atoms.of(value.axes)[3] == atoms.flat((origin.atom,)) else None

    def _biased(self, node: fx.Node) -> Value | None:
        """Returns the value of scores to which a bias [B, 1, 1, S] or [1, 1, 1, S] is added."""
        for scores, bias in (node.args[:2], node.args[1::-1]):
            if not isinstance(scores, fx.Node) or not isinstance(bias, fx.Node):
                continue
            value = proofs.tensor(bias)
            if value is None or value.dtype not in ACTIVATION_DTYPES or value.ndim != 4:
                continue
            shape = static_shape(scores)
            fits = len(shape) == 4 and shape == static_shape(node)
            fits = fits and tuple(value.shape) in ((shape[0], 1, 1, shape[3]), (1, 1, 1, shape[3]))
            found = self._scores_of(scores) if fits else None
            if found is not None and found[1].bias is None:
                sequences = () if value.shape[0] == 1 else found[0].axes[0]
                biased = replace(found[1], bias=bias, sequences=sequences)
                return replace(found[0], power={("x", biased): 1.0})
        return None

    def _with_sinks(self, node: fx.Node) -> Value | None:
        """Returns the value of scores beside one more for each head."""
        bound = proofs.arguments(node)
        if len(bound["tensors"]) != 2 or bound["dim"] not in (3, -1):
            return None
        scores, sinks = bound["tensors"]
        found = self._scores_of(scores)
        if found is None:
            return None
        chain = chain_to(self.atoms, sinks)
        root, column = chain[0], chain[-1]
        heads = self.atoms.of(found[0].axes)[1]
        value, shape = proofs.fake(root.node), static_shape(scores)
        alike = static_shape(sinks) == (*shape[:3], 1) and tuple(value.shape) == (shape[1],)
        if not alike or value.dtype not in ACTIVATION_DTYPES or not self.atoms.bind(column.axes[1], heads):
            return None
        if self.atoms.of(root.axes) != (self.atoms.flat(heads),):
            return None
        atom = self.atoms.atom(shape[3] + 1)
        origin = replace(found[1], atom=atom, sinks=root.node, heads=heads)
        return Value((*found[0].axes[:3], (atom,)), {("x", origin): 1.0}, is_log=True)

    def _without_sinks(self, node: fx.Node) -> Value | None:
        """Returns the value of the weights of the tokens, without those of the sinks."""
        part = proofs.piece(node)
        if part is None:
            return None
        try:
            value = self.algebra.value(part.source)
        except Unknown:
            return None
        found = [symbol for symbol in value.power if symbol[0] == "x"]
        if value.is_log or len(found) != 1 or not isinstance(found[0][1], Shifted):
            return None
        origin = found[0][1]
        axes, tokens = self.atoms.of(value.axes), self.atoms.flat((origin.scores.atom,))
        size = static_shape(node)[-1]
        last = part.dim == len(axes) - 1 and axes[-1] == self.atoms.flat((origin.atom,))
        if origin.sinks is None or not last or part.start != 0 or size != self.atoms.size(origin.scores.atom):
            return None
        power = {symbol: count for symbol, count in value.power.items() if symbol != found[0]}
        kept: Symbol = ("x", Kept(origin, origin.scores.atom))
        return Value((*axes[:-1], tokens), {**power, kept: value.power[found[0]]}, is_log=False)


def read_sunk(node: fx.Node) -> StepAttention | None:
    """Returns the attention that a matmul is the end of, if it has sinks."""
    if node.target is not aten.bmm.default:
        return None
    attention = SunkAlgebra()
    try:
        value = attention.algebra.value(node)
    except Unknown:
        return None
    outputs = [symbol for symbol in value.power if symbol[0] == "N" and isinstance(symbol[2], Kept)]
    if value.is_log or len(outputs) != 1:
        return None
    _, count, kept, values = outputs[0]
    if value.power != {outputs[0]: 1.0, ("Z", 1.0, kept.whole): -1.0} or count != 1.0:
        return None
    return _with_roles(attention, node, value, kept.whole, values)


def _with_roles(
    attention: SunkAlgebra, node: fx.Node, value: Value, found: Shifted, values: Root
) -> StepAttention | None:
    """Returns the attention if the dimensions of its tensors have their roles."""
    atoms, scores = attention.atoms, found.scores
    both, rows, wide = atoms.of(value.axes)
    heads, tokens, dim = (atoms.flat(part) for part in (found.heads, (scores.atom,), scores.dim))
    batch = both[: len(both) - len(heads)]
    # The heads of queries that are in keys too, which come first.
    of_keys = set(sum(atoms.of(scores.keys.axes), ()))
    shared = tuple(takewhile(lambda atom: atom in of_keys, heads))
    query = attention.view(scores.query, (batch, heads, (), dim))
    keys = attention.view(scores.keys, (batch, shared, tokens, dim))
    elements = attention.view(values, (batch, shared, tokens, wide))
    if query is None or keys is None or elements is None:
        return None
    like = proofs.fake(query)
    if both != batch + heads or rows != () or atoms.flat(found.sequences) not in ((), batch):
        return None
    if proofs.fake(node).dtype != like.dtype or not 0.0 < found.factor < math.inf:
        return None
    (B, Hq, L, D), (_, Hkv, S, _) = static_shape(query), static_shape(keys)
    if S == 1 or static_shape(elements)[3] != D:
        return None
    given = [one for one in (found.bias, found.sinks) if one is not None]
    if any(proofs.fake(one).device != like.device for one in given):
        return None
    choice, sizes = TokenChoice(bias=found.bias), (B, Hkv, Hq // Hkv, L, S, D)
    readers = (scores.node, node)
    return StepAttention(node, readers, query, keys, elements, choice, found.factor, sizes, found.sinks)
