"""Attention that a program writes out beside gathered keys and values, proved by the algebra of softmaxes.

    q, gathered k -> views -> bmm = scores -> * scale -> (soft cap) -> (mask) -> softmax -> bmm <- views <- gathered v

docs/attention.md says in which forms it may be written; besides, rows that see nothing may be set to 0. In a chain of
`softmax_algebra` from the scores x

    a tanh of c x                          gives new scores and a soft cap: b tanh(c x) has the cap b
    a mask that is added, or chosen        shows some of the scores (see `masks`). It has to stand behind the soft cap,
                                           and once. If nothing is proved of it, it is passed on.

and the result has to be sum(exp(c x) v) / sum(exp(c x)). The dimensions of queries, keys and values are followed from
tensors of the graph (those of keys and values from the gathered tensors) and have the roles [B, H, S, D]. Casts are
ignored, because the node keeps scores and sums in fp32.
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
from ditron_inductor.passes.attention.softmax_algebra import Algebra, Atoms, Axes, Symbol, Unknown, Value, static_shape
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.collectives import is_collective
from ditron_inductor.passes.graph.reasons import ReasonCode, Refusal, Refused, refused
from ditron_inductor.passes.graph.routes import copies_weights
from ditron_inductor.task.attention_masks import GIVEN, MAX_HEAD_DIM, Mask

aten = torch.ops.aten

MOVES = (proofs.ORDER_KEEPING | proofs.TRANSPOSES) - {aten.clone.default}
EXPONENTIALS: frozenset[object] = frozenset({aten.exp.default, aten._softmax.default})
NEGATIONS = (aten.logical_not.default, aten.bitwise_not.default)
RANDOM: frozenset[object] = frozenset({inductor_prims.random, aten.rand.default, aten.native_dropout.default})
MOST_BETWEEN = 256
"""The most nodes between the two matmuls: casts, softmax and a short mask are a tenth of that."""
MOST_BEHIND = 4
"""The most nodes between the second matmul and the division, if the division comes last."""
DIGITS = 12
"""The digits to which scales are rounded, which are products of numbers in the graph."""


@dataclass(frozen=True)
class Written:
    """The second matmul; the nodes `above` that make its weights; and the gathered tensors that the matmuls read."""

    node: fx.Node
    above: tuple[fx.Node, ...]
    gathered: tuple[fx.Node, ...]


def find_written(graph: fx.Graph, gathered: Collection[fx.Node]) -> list[Written]:
    """Finds nodes that look like attention that is written out, of any of the `gathered` tensors."""
    found = []
    for node in graph.find_nodes(op="call_function", target=aten.bmm.default):
        weights, values = node.args
        assert isinstance(weights, fx.Node) and isinstance(values, fx.Node)
        above = _above(weights)
        if not any(node_above.target in EXPONENTIALS for node_above in above):
            continue
        products = [node_above for node_above in above if node_above.target is aten.bmm.default]
        if any(map(copies_weights, (node, *products))):
            # Of experts, with an exponential in their activation.
            continue
        operands = [values, *(operand for product in products for operand in product.all_input_nodes)]
        read = tuple(end for end in map(_end, operands) if end in gathered)
        if read:
            found.append(Written(node, tuple(above), read))
    return found


def _above(weights: fx.Node) -> list[fx.Node]:
    """Returns the nodes from which the weights are computed, up to the next matmuls, which are included."""
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
    """Returns the tensor of which `node` is a view, a repetition, or a copy in a wider dtype."""
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
    """The scores x of an attention: products of queries and keys over `dim`, indexed by the tokens `atom`. The last
    root of the queries and of the keys is the operand of the product, and the roots before it are what it is a view of.
    inside: 0, or the factor of the product inside a tanh. mask: what is shown, to rows of the atoms `rows`. hidden_at:
    0 if scores are hidden by -inf; if they are hidden by a finite number, the factor of x at that place. given: the
    tensor of the mask.
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
    """A mask with these axes. It is added to scores, or is true where they are shown, or (hides) where they are not."""

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
    """The seeds of the algebra, and the values that it derives from them."""

    def __init__(self, written: Written, gathered: Collection[fx.Node]) -> None:
        self.written = written
        self.atoms = Atoms()
        self.algebra = Algebra(self.atoms, self._seed)
        self._gathered = gathered
        # The nodes that are computed from the scores.
        self.scored = {node for node in written.above if node.target is aten.bmm.default}
        for node in sorted(written.above):
            if self.scored.intersection(node.all_input_nodes):
                self.scored.add(node)

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
        """Returns the value of the sum of weights times values."""
        left, right = node.args
        assert isinstance(right, fx.Node)
        weights = self.algebra.value(left)
        values = chain_to(self.atoms, right, self._gathered)
        return self.algebra.weighted_sum(weights, values, values[-1].axes, node)

    def _origin(self, value: Value, node: fx.Node) -> tuple[WrittenScores, float]:
        """Returns (the scores, their factor) for scores that no mask hides."""
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
        # A tensor of bool would be added as 0 or 1.
        return self._masked(node, scores, bias) if tensor.is_floating_point() else None

    def _hidden(self, node: fx.Node) -> Value | None:
        """Returns the value of scores that a condition replaces by the least number; None for anything else."""
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
        """Returns the value of weights that are 0 in rows whose scores are all -inf; None for anything else."""
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
        """Returns the value of scores of which a mask or a bias, `given`, shows a part. Hidden scores become `lowest`,
        or get what the bias has.
        """
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
                # In a row that sees nothing, scores beside such a number count for little, but not for nothing.
                raise _Refused(ReasonCode.ATTENTION_MASK.at(unknown.node)) from None
            mask = BY_TENSOR
        if mask == ALL:
            return value
        hidden_at, tensor = 0.0 if lowest == -math.inf else count, Given(given, axes, hides)
        shown = replace(origin, mask=mask, rows=axes[-2], hidden_at=hidden_at, given=tensor)
        return replace(value, power={("x", shown): count})

    def result(self) -> tuple[fx.Node, Value]:
        """Returns the weighted mean of the values, a matmul or a division behind it, and its value. Raises Unknown."""
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
        """Returns the reason to report if the algebra proves no more."""
        if any(node.target in RANDOM for node in self.written.above):
            return ReasonCode.ATTENTION_DROPOUT
        try:
            for node in self.written.above:
                if node.target is aten.tanh.default:
                    self.algebra.value(node)
        except (Unknown, _Refused):
            return ReasonCode.ATTENTION_SOFTCAP
        return ReasonCode.ATTENTION_WRITTEN_OUT

    def between(self, result: fx.Node) -> tuple[fx.Node, ...]:
        """Returns the nodes from the scores to the result, without the result."""
        found = {scores for scores in self.scored if scores.target is aten.bmm.default}
        node = min(found)
        while node is not result:
            node = node.next
            if found.intersection(node.all_input_nodes):
                found.add(node)
        _, *needed = proofs.reached([result], lambda node: found.intersection(node.all_input_nodes))
        return tuple(sorted(needed))


def prove(graph: fx.Graph, written: Written, gathered: Collection[fx.Node]) -> AttentionCall | Refused:
    """Returns the attention [B, H, S, D] that is written out, or why it is not proved. If keys and values do not have
    these dimensions in this order, it inserts views in front of the result. A caller that does not use them erases
    them.
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
    found = [proofs.tensor(operand) for operand in (q, k, v)]
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
    views = tuple(root.node for chain in (keys, values) for root in chain[1:] if root.node not in (k, v))
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
    """Returns a mask of the `wanted` axes, or None, as our op's bias, negated in front of `node` if needed."""
    tensor = unexpanded(given.tensor)
    shape = static_shape(tensor)
    # A mask that is the same for all batches and heads fits, whatever their order.
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
    """Returns the number that an operand of `node` holds everywhere; None if there is none."""
    try:
        value = masks.Masks().operand(node, argument)
    except masks.UnknownMask:
        return None
    return value.yes if isinstance(value, Selection) and value.truth == TRUE else None


def _all_hidden(node: object) -> tuple[object, int] | None:
    """Returns (scores, dimension) for a node that says, with the dimension kept, where all scores are -inf."""
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
    """The last of a chain of views from `node` on, none of which is used elsewhere; copies are what a program wants."""
    user = proofs.sole_user(node)
    while user is not None and user.target in MOVES:
        node, user = user, proofs.sole_user(user)
    return node


def _flat(atoms: Atoms, root: Root) -> list[int]:
    return [atom for axis in atoms.of(root.axes) for atom in axis]


def _shared(atoms: Atoms, chain: Sequence[Root]) -> tuple[int, ...]:
    """Returns the atoms of batch and heads of keys or values, without those that only repeat them. Raises Unknown."""
    batch, *others = atoms.of(chain[-1].axes)
    own = _flat(atoms, chain[0])
    found = tuple(atom for atom in batch if atom in own)
    if sorted(own) != sorted((*found, *others[0], *others[1])):
        raise Unknown(chain[0].node)
    return found


def _batches(
    atoms: Atoms, keys: Sequence[Root], shared: tuple[int, ...], tokens: tuple[int, ...], dim: tuple[int, ...]
) -> int:
    """Returns how many of the `shared` atoms are batches: as in the graph's keys, or else in their first dimension."""
    for root in keys:
        axes = atoms.of(root.axes)
        if len(axes) == 4 and axes[2:] == (tokens, dim) and axes[0] + axes[1] == shared:
            return len(axes[0])
    first = atoms.of(keys[0].axes)[0]
    return len(first) if len(keys[0].axes) > 3 and shared[: len(first)] == first else 0


def _placed(graph: fx.Graph, atoms: Atoms, chain: Sequence[Root], wanted: Axes) -> fx.Node:
    """Returns a tensor with these dimensions: a view in the graph, or inserted ones. Raises Unknown."""
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
