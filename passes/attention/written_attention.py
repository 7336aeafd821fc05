"""Attention that a program writes out beside gathered keys and values: proved by the algebra of softmaxes.

    q, gathered k -> views -> bmm = scores -> * scale -> (soft cap) -> (mask) -> softmax -> bmm <- views <- gathered v

In any way to write it: the maximum subtracted or not, the quotient before the second matmul or behind it, in fp32 or in
the dtype, heads grouped or repeated, by `matmul` or `einsum`, scaled behind the first matmul or in front of it, with 0
for rows that see nothing; so scaled dot-product attention by torch's own operations is one as well. Of a chain of
`softmax_algebra` from the scores x

    a tanh of c x                          gives scores of its own, and a soft cap: b tanh(c x) has the cap b
    a mask that is added, or chosen        shows some of the scores, see `masks`; behind the soft cap, and once; where
                                           nothing is proved of it, it is handed on

and what comes out has to be sum(exp(c x) v) / sum(exp(c x)). The dimensions of queries, keys and values are followed
from tensors of the graph, those of keys and values from the gathered ones, and play the roles [B, H, S, D]. Casts
count as nothing, as the node keeps scores and sums in fp32. Where the program has NaN, since a row sees nothing, the
node has 0.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch._inductor import inductor_prims

from ditron_inductor.passes.attention import mask_values, masks
from ditron_inductor.passes.attention.attention_calls import (
    FOLLOWED,
    AttentionCall,
    Kernel,
    WrittenOut,
    source_of,
    unexpanded,
)
from ditron_inductor.passes.attention.mask_values import TRUE, Selection
from ditron_inductor.passes.attention.roots import Root, chain_to, moved, widens
from ditron_inductor.passes.attention.shown_masks import Shown, read_mask
from ditron_inductor.passes.attention.softmax_algebra import (
    Algebra,
    Atoms,
    Axes,
    Symbol,
    Unknown,
    Value,
    static_shape,
)
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.collectives import is_collective
from ditron_inductor.passes.graph.reasons import ReasonCode, Refusal, Refused, refused
from ditron_inductor.task.attention_masks import GIVEN, MAX_HEAD_DIM, Mask

aten = torch.ops.aten

MOVES = (proofs.ORDER_KEEPING | proofs.TRANSPOSES) - {aten.clone.default}
EXPONENTIALS: frozenset[object] = frozenset({aten.exp.default, aten._softmax.default})
NEGATIONS = (aten.logical_not.default, aten.bitwise_not.default)
RANDOM: frozenset[object] = frozenset({inductor_prims.random, aten.rand.default, aten.native_dropout.default})
MOST_BETWEEN = 256
"""Nodes between the two matmuls: casts, softmax and a short mask are a tenth of that."""
MOST_BEHIND = 4
"""Nodes between the second matmul and the quotient, if that comes last."""
DIGITS = 12
"""Of scales, which are products of numbers in the graph."""


@dataclass(frozen=True)
class Written:
    """The second matmul and what its weights are computed from, up to the next matmuls; the gathered tensors that it
    and these read.
    """

    node: fx.Node
    above: tuple[fx.Node, ...]
    gathered: tuple[fx.Node, ...]


def find_written(graph: fx.Graph, gathered: Collection[fx.Node]) -> list[Written]:
    """What looks like attention that is written out, of any of the `gathered` tensors."""
    found = []
    for node in graph.find_nodes(op="call_function", target=aten.bmm.default):
        weights, values = node.args
        assert isinstance(weights, fx.Node) and isinstance(values, fx.Node)
        above = _above(weights)
        if not any(one.target in EXPONENTIALS for one in above):
            continue
        products = [one for one in above if one.target is aten.bmm.default]
        operands = [values, *(one for product in products for one in product.all_input_nodes)]
        read = tuple(end for end in map(_end, operands) if end in gathered)
        if read:
            found.append(Written(node, tuple(above), read))
    return found


def _above(weights: fx.Node) -> list[fx.Node]:
    """What the weights are computed from, up to the next matmuls, these included."""
    found: dict[fx.Node, None] = {}
    left = [weights]
    while left and len(found) < MOST_BETWEEN:
        node = left.pop(0)
        if node in found or node.op != "call_function" or is_collective(node):
            continue
        found[node] = None
        if node.target not in proofs.MATMULS:
            left += node.all_input_nodes
    return list(found)


def _end(node: fx.Node) -> fx.Node:
    """What a node is a view or a repetition of, or the same in a wider dtype."""
    while node.op == "call_function" and isinstance(node.args[0], fx.Node):
        if node.target in (aten.expand.default, aten.repeat.default) or widens(node):
            node = node.args[0]
        elif node.target in FOLLOWED:
            node = source_of(node)
        else:
            break
    return node


@dataclass(frozen=True)
class WrittenScores:
    """What x of an attention is: products of queries and keys over `dim`, indexed by the tokens `atom`; the last of the
    queries and of the keys is the operand of the product, the others what that is a view of.

    inside: 0, or a tanh of so many times the product. mask: what is shown, to rows of the atoms `rows`; hidden is what
    gets a finite number where x counts `hidden_at` times, 0 for -inf. given: the tensor of a mask.
    """

    queries: tuple[Root, ...]
    keys: tuple[Root, ...]
    atom: int
    dim: tuple[int, ...]
    inside: float = 0.0
    mask: Shown | None = None
    rows: tuple[int, ...] = ()
    hidden_at: float = 0.0
    given: Given | None = None


@dataclass(frozen=True)
class Given:
    """A mask as a tensor, which is added to scores with these axes, or is true where they are shown, or (hides) not."""

    tensor: fx.Node
    axes: Axes
    hides: bool


ALL = Shown(Mask("full"))
BY_TENSOR = Shown(Mask(GIVEN))


class _Refused(Exception):
    """The proof ends here, for this reason."""

    def __init__(self, why: Refusal) -> None:
        self.why = why


class Proof:
    """The seeds of the algebra, and what it makes of them."""

    def __init__(self, written: Written, gathered: Collection[fx.Node]) -> None:
        self.written = written
        self.atoms = Atoms()
        self.algebra = Algebra(self.atoms, self._seed)
        self._gathered = gathered
        # What is computed from the scores.
        self.scored = {one for one in written.above if one.target is aten.bmm.default}
        for one in sorted(written.above):
            if self.scored.intersection(one.all_input_nodes):
                self.scored.add(one)

    def _seed(self, node: fx.Node) -> Value | None:
        if node is self.written.node:
            return self._weighted(node)
        if node.target is aten.bmm.default:
            return self._scores(node)
        if node not in self.scored:
            return None
        if node.target is aten.tanh.default:
            return self._capped(node)
        if node.target is aten.add.Tensor:
            return self._biased(node)
        return self._hidden(node) if node.target is aten.where.self else None

    def _scores(self, node: fx.Node) -> Value:
        left, right = node.args
        assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
        queries = chain_to(self.atoms, left, scaled=True)
        keys = chain_to(self.atoms, right, self._gathered, scaled=True)
        (batch, rows, dim), (key_batch, key_dim, tokens) = queries[-1].axes, keys[-1].axes
        if len(tokens) != 1 or not self.atoms.bind(key_batch, batch) or not self.atoms.bind(key_dim, dim):
            raise Unknown(node)
        origin = WrittenScores(queries, keys, tokens[0], dim)
        factor = queries[-1].factor * keys[-1].factor
        return Value((batch, rows, tokens), {("x", origin): factor}, is_log=True)

    def _weighted(self, node: fx.Node) -> Value:
        """Weights times values, summed up."""
        left, right = node.args
        assert isinstance(right, fx.Node)
        weights = self.algebra.value(left)
        values = chain_to(self.atoms, right, self._gathered)
        batch, tokens, wide = values[-1].axes
        axes = self.atoms.of(weights.axes)
        if not self.atoms.bind(batch, axes[0]) or not self.atoms.bind(tokens, axes[2]):
            raise Unknown(node)
        weighted = Value(weights.axes, {**weights.power, ("v", values): 1.0}, weights.is_log)
        total = self.algebra.total(weighted, [2], node, keepdim=True)
        return replace(total, axes=(*total.axes[:2], wide))

    def _origin(self, value: Value, node: fx.Node) -> tuple[WrittenScores, float]:
        """(what the scores are, how often they count) of scores that nothing hides."""
        ((symbol, count),) = value.power.items() if len(value.power) == 1 else (((), 0.0),)
        if not value.is_log or not symbol or symbol[0] != "x" or symbol[1].mask is not None:
            raise Unknown(node)
        return symbol[1], count

    def _capped(self, node: fx.Node) -> Value:
        value = self.algebra.value(node.args[0])
        origin, count = self._origin(value, node)
        if origin.inside:
            raise Unknown(node)
        return replace(value, power={("x", replace(origin, inside=count)): 1.0})

    def _biased(self, node: fx.Node) -> Value | None:
        scores, bias = node.args
        if bias in self.scored:
            scores, bias = bias, scores
        tensor = proofs.tensor(bias)
        if bias in self.scored or tensor is None or proofs.arguments(node)["alpha"] != 1:
            return None
        # A truth would be added as 0 or 1.
        return self._masked(node, scores, bias) if tensor.is_floating_point() else None

    def _hidden(self, node: fx.Node) -> Value | None:
        """Scores, and the least number where the condition says so; None if that is not what `node` is."""
        condition, yes, no = node.args
        if condition in self.scored:
            return self._guarded(node)
        scores, number = (yes, no) if yes in self.scored else (no, yes)
        if number in self.scored or scores not in self.scored:
            return None
        lowest, tensor = _number(node, number), proofs.tensor(node)
        if lowest is None or tensor is None or not mask_values.hides(lowest, tensor.dtype):
            return None
        return self._masked(node, scores, condition, hides=scores is no, lowest=lowest)

    def _guarded(self, node: fx.Node) -> Value | None:
        """Weights, and 0 for a row whose scores are all -inf; None if that is not what `node` is."""
        condition, zero, weights = node.args
        test = _all_hidden(condition)
        if test is None or weights not in self.scored or _number(node, zero) != 0.0:
            return None
        scores, dim = test
        tested, value = self.algebra.value(scores), self.algebra.value(weights)
        x = [symbol for symbol in value.power if symbol[0] == "x"]
        if value.is_log or not tested.is_log or len(x) != 1 or list(tested.power) != x:
            return None
        return value if self.atoms.of(tested.axes)[dim] == self.atoms.flat((x[0][1].atom,)) else None

    def _masked(
        self, node: fx.Node, scores: object, given: object, hides: bool = False, lowest: float | None = None
    ) -> Value:
        """The scores of which a mask, or a bias, `given` shows a part, elsewhere `lowest`, or what the bias has."""
        value = self.algebra.value(scores)
        origin, count = self._origin(value, node)
        shape = static_shape(node)
        axes = self.atoms.of(value.axes)
        assert isinstance(given, fx.Node) and isinstance(scores, fx.Node)
        if shape != static_shape(scores) or len(axes) < 2 or axes[-1] != self.atoms.flat((origin.atom,)):
            raise Unknown(node)
        try:
            mask = read_mask(given, *shape[-2:], hides=hides, lowest=lowest)
        except masks.UnknownMask as unknown:
            if lowest not in (None, -math.inf):
                # Beside it scores count for little, and not for nothing, in a row that sees nothing.
                raise _Refused(ReasonCode.ATTENTION_MASK.at(unknown.node)) from None
            mask = BY_TENSOR
        if mask == ALL:
            return value
        hidden_at, tensor = 0.0 if lowest == -math.inf else count, Given(given, axes, hides)
        shown = replace(origin, mask=mask, rows=axes[-2], hidden_at=hidden_at, given=tensor)
        return replace(value, power={("x", shown): count})

    def result(self) -> tuple[fx.Node, Value]:
        """The weighted mean of the values: what the second matmul gives, or a quotient behind it. Raises Unknown."""
        node: fx.Node | None = self.written.node
        for _ in range(MOST_BEHIND):
            if node is None:
                break
            value = self.algebra.value(node)
            total = next((symbol for symbol in value.power if symbol[0] == "Z"), None)
            if not value.is_log and total is not None and len(value.power) == 2 and value.power[total] == -1.0:
                output = next((symbol for symbol in value.power if symbol[0] == "N"), None)
                if output is not None and value.power[output] == 1.0 and output[1:3] == total[1:]:
                    last = _last_view(node)
                    return last, self.algebra.value(last)
            node = proofs.sole_user(node)
        raise Unknown(self.written.node)

    def code(self) -> ReasonCode:
        """What is said where the algebra knows no more."""
        if any(one.target in RANDOM for one in self.written.above):
            return ReasonCode.ATTENTION_DROPOUT
        try:
            for one in self.written.above:
                if one.target is aten.tanh.default:
                    self.algebra.value(one)
        except (Unknown, _Refused):
            return ReasonCode.ATTENTION_SOFTCAP
        return ReasonCode.ATTENTION_WRITTEN_OUT

    def between(self, result: fx.Node) -> tuple[fx.Node, ...]:
        """The nodes from the scores to the result, without it."""
        found = {one for one in self.scored if one.target is aten.bmm.default}
        node = min(found)
        while node is not result:
            node = node.next
            if found.intersection(node.all_input_nodes):
                found.add(node)
        needed, left = set[fx.Node](), [result]
        while left:
            for one in left.pop().all_input_nodes:
                if one in found and one not in needed:
                    needed.add(one)
                    left.append(one)
        return tuple(sorted(needed))


def prove(graph: fx.Graph, written: Written, gathered: Collection[fx.Node]) -> AttentionCall | Refused:
    """The attention [B, H, S, D] that is written out, or why it is not proved. Inserts views in front of its result,
    if keys and values do not have these dimensions in this order: whoever does not take them erases them.
    """
    proof = Proof(written, gathered)
    try:
        node, value = proof.result()
        return _read(graph, proof, node, value)
    except _Refused as refused:
        return refused.why
    except Unknown as unknown:
        tensor = proofs.tensor(unknown.node)
        dynamic = tensor is not None and not all(isinstance(size, int) for size in tensor.shape)
        return (ReasonCode.SHAPE_UNPROVEN if dynamic else proof.code()).at(unknown.node)


def _read(graph: fx.Graph, proof: Proof, node: fx.Node, value: Value) -> AttentionCall:
    atoms = proof.atoms
    output: Symbol = next(symbol for symbol in value.power if symbol[0] == "N")
    _, count, origin, values = output
    assert isinstance(origin, WrittenScores)
    if origin.hidden_at not in (0.0, count):
        raise Unknown(node)
    queries, keys = origin.queries, origin.keys
    batch, rows, dim = atoms.of(queries[-1].axes)
    tokens, wide = atoms.flat((origin.atom,)), atoms.flat(values[-1].axes[2])
    shared = _shared(atoms, keys)
    sequence = atoms.flat(origin.rows) if origin.mask is not None else rows
    group = tuple(atom for atom in (*batch, *rows) if atom not in (*shared, *sequence))
    given = sorted(_flat(atoms, queries[0]))
    alike = _shared(atoms, values) == shared and len(tokens) == 1
    if not alike or given != sorted((*shared, *group, *sequence, *dim)) or not set(sequence) <= set(rows):
        raise Unknown(node)
    split = _batches(atoms, keys, shared, tokens, dim)
    of_batch, of_heads = shared[:split], shared[split:]
    whole = of_batch, of_heads + group, sequence
    with graph.inserting_before(node):
        q = _placed(graph, atoms, queries, (*whole, dim))
        k = _placed(graph, atoms, keys, (of_batch, of_heads, tokens, dim))
        v = _placed(graph, atoms, values, (of_batch, of_heads, tokens, wide))
    found = [proofs.tensor(one) for one in (q, k, v)]
    rejected = proofs.rejected_dtypes(found)
    if rejected is not None:
        raise _Refused(rejected.at(node))
    if not proofs.wanted_in(node, q.meta["val"].dtype):
        raise _Refused(ReasonCode.CAST_BETWEEN.at(node))
    if q.meta["val"].shape[3] > MAX_HEAD_DIM:
        raise _Refused(ReasonCode.ATTENTION_HEAD_DIM.at(node))
    result = moved(atoms, (*whole, wide), value.axes)
    if result is None:
        raise Unknown(node)
    views = tuple(one.node for chain in (keys, values) for one in chain[1:] if one.node not in (k, v))
    softcap = _rounded(count) if origin.inside else 0.0
    attention = AttentionCall(
        node,
        Kernel(square=False),
        q,
        k,
        v,
        origin.mask or ALL,
        _rounded(count * (origin.inside or 1.0)),
        softcap,
        WrittenOut(proof.between(node), views, result),
        None if origin.given is None else _operand(graph, atoms, origin.given, (*whole, tokens), node),
    )
    if origin.given is None or origin.mask != BY_TENSOR:
        return attention
    biased = attention.with_bias()
    if refused(biased):
        raise _Refused(biased.at(origin.given.tensor))
    return biased


def _operand(graph: fx.Graph, atoms: Atoms, given: Given, wanted: Axes, node: fx.Node) -> fx.Node | None:
    """A mask as the bias of our op, whose scores have the `wanted` axes; None where it has others. Inserts its negation
    in front of `node`, if that is what is wanted.
    """
    tensor = unexpanded(given.tensor)
    shape = static_shape(tensor)
    # The same for all batches and heads, in whatever order they stand.
    alike = len(shape) <= len(wanted) and all(size == 1 for size in shape[:-2])
    axes = [atoms.flat(axis) for axis in given.axes]
    if axes[-2:] != [atoms.flat(axis) for axis in wanted[2:]]:
        return None
    if not alike and axes != [atoms.flat(axis) for axis in wanted]:
        return None
    if not given.hides:
        return tensor
    with graph.inserting_before(node):
        return rewriting.computed(graph, aten.logical_not.default, (tensor,), tensor)


def _number(node: fx.Node, argument: object) -> float | None:
    """What an operand of `node` holds everywhere."""
    try:
        value = masks.Masks().operand(node, argument)
    except masks.UnknownMask:
        return None
    return value.yes if isinstance(value, Selection) and value.truth == TRUE else None


def _all_hidden(node: object) -> tuple[object, int] | None:
    """(scores, dimension) of a node that says, with the dimension kept, where all of them are -inf."""
    if not isinstance(node, fx.Node) or node.target not in NEGATIONS:
        return None
    found = node.args[0]
    if not isinstance(found, fx.Node) or found.target is not aten.any.dim:
        return None
    bound = proofs.arguments(found)
    inner = bound["self"]
    if not bound["keepdim"] or inner.target not in NEGATIONS:
        return None
    equal = inner.args[0]
    if not isinstance(equal, fx.Node) or equal.target is not aten.eq.Scalar or equal.args[1] != -math.inf:
        return None
    return equal.args[0], bound["dim"]


def _last_view(node: fx.Node) -> fx.Node:
    """The last of a chain of views from `node` on, none of which is used otherwise; copies are what a program wants."""
    user = proofs.sole_user(node)
    while user is not None and user.target in MOVES:
        node, user = user, proofs.sole_user(user)
    return node


def _flat(atoms: Atoms, root: Root) -> list[int]:
    return [atom for axis in atoms.of(root.axes) for atom in axis]


def _shared(atoms: Atoms, chain: Sequence[Root]) -> tuple[int, ...]:
    """Batch and heads of keys or values, without those that only repeat them. Raises Unknown."""
    batch, *others = atoms.of(chain[-1].axes)
    own = _flat(atoms, chain[0])
    found = tuple(atom for atom in batch if atom in own)
    if sorted(own) != sorted((*found, *others[0], *others[1])):
        raise Unknown(chain[0].node)
    return found


def _batches(
    atoms: Atoms, keys: Sequence[Root], shared: tuple[int, ...], tokens: tuple[int, ...], dim: tuple[int, ...]
) -> int:
    """How many of the `shared` atoms are batches: what keys in the graph have so, or else their first dimension."""
    for root in keys:
        axes = atoms.of(root.axes)
        if len(axes) == 4 and axes[2:] == (tokens, dim) and axes[0] + axes[1] == shared:
            return len(axes[0])
    first = atoms.of(keys[0].axes)[0]
    return len(first) if len(keys[0].axes) > 3 and shared[: len(first)] == first else 0


def _placed(graph: fx.Graph, atoms: Atoms, chain: Sequence[Root], wanted: Axes) -> fx.Node:
    """What has these dimensions: one of the views in the graph, or views that are inserted. Raises Unknown."""
    dtype = chain[0].node.meta["val"].dtype
    for root in chain:
        same = root.factor == 1.0 and root.node.meta["val"].dtype == dtype
        if same and atoms.of(root.axes) == atoms.of(wanted):
            return root.node
    views = moved(atoms, chain[0].axes, wanted)
    if views is None:
        raise Unknown(chain[0].node)
    return views.insert(graph, chain[0].node)


def _rounded(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")
