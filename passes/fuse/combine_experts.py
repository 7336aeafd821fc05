"""What a mixture's experts return -> weighted sum for each token becomes `ditron::combine_experts`.

Before, with T tokens that take k experts each, in S = T * k slots sorted by expert, as `transformers` writes it:

    _grouped_mm(..) [S, N] -> [add(.., index(bias [E, N], [experts [S]]))] -> [where(absent [S, 1], 0, ..)]
    -> mul(.., unsqueeze(scale [S], -1)) -> [where(absent [S, 1], 0, ..), if there is none before]
    -> index(.., [places [S]]) -> reshape [T, k, N] -> sum over k -> [cast] -> [add(.., added)]

or, as DeepSeek's own code has it, with the factors behind the index, or with the rows written to their slots instead:

    _grouped_mm(..) [S, N] -> [add] -> [where] -> index(.., [places]), or index_put(.., [order], ..)
    -> reshape [T, k, N] -> [cast] -> mul(.., weights [T, k, 1]) -> [cast] -> sum over k -> [cast] -> [add(.., added)]

and as TorchTitan writes it, also with `index_add` and `index_put`:

    _grouped_mm(..) [S, N] -> [add] -> [where] -> [cast] -> mul(.., reshape(scale [S], [-1, 1])) -> [cast]
    -> scatter_add(added or zeros [T, N], 0, expand(order [S] // k), ..) -> [cast]   order: the indices of a sort

The sum over k may be written otherwise, as a matmul with the weights or slot by slot (see graph/slot_readings.py), and
a number may stand behind it (see graph/slot_sums.py), which the scale is multiplied by.

The backward of `x[order // k]` is the second form without a scale. Where two weights multiply these rows, the products
of two grouped matmuls are added first.

After:

    _grouped_mm(..), places, reshape(scale) [S], [absent], [added], [bias, experts] -> ditron.combine_experts
    -> getitem 0 [T, N]

In the first form Inductor writes the scaled terms of all slots, in fp32 where the scale is in fp32, before it reads
them by their places. Only sums of few terms are unrolled, which makes one kernel of all of it, as fast as the node's.
In the second form the rows are added by atomic operations, or after another sort. The node reads each product once and
writes only the sums (see lowering/expert_sums/combine_kernel.py). Whatever made `places` and `scale`, each token
gets the sum of the slots that they name. In the second form `order` has each of 0 to S - 1 once, because it is the
indices of a sort. So `order // k` is each token k times, and the places are the inverse of `order`. What is rounded on
the way to the sum is not rounded in the node, which adds in fp32. A collective behind the sum is fused or left alone as
it was before.

Nothing is communicated, so ranks need not agree on it. It must not fire when
* the graph holds no Task node with a collective: it is left to Inductor, as for `projections`;
* Inductor unrolls the sum, in the first form, or the graph does, or there are few tokens, in the second one;
* anything between the grouped matmul and the sum is used elsewhere, except for the masked products, which then stay;
* the slots of a token are not side by side behind the index, or the rows are not as many as the slots;
* the places are those of no sort, in the second form, or where factors are behind the index: tokens may then have any
  number of slots, or one slot several factors. In a backward they are those of the forward's sort, see
  normalize/mark_sorts.py;
* there is no scale, as in a backward, and the number of slots is dynamic;
* the sum has another dtype than the products, or the result has other strides than row-major ones;
* something writes into an operand, which the call would read later.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config

from ditron_inductor.options import Options
from ditron_inductor.passes.graph import proofs, rewriting, sizes
from ditron_inductor.passes.graph.all_to_all import written
from ditron_inductor.passes.graph.launches import takes_local
from ditron_inductor.passes.graph.slot_readings import Reading, casts, readings
from ditron_inductor.passes.graph.slot_sums import (
    DETERMINISTIC,
    SCATTERS,
    Ending,
    added_at,
    ending_of,
    rows_of,
    slots_of,
    times,
)
from ditron_inductor.passes.graph.sorts import is_order, is_permutation, is_written
from ditron_inductor.task.nodes import CombineExperts
from ditron_inductor.task.torch_dtypes import ACTIVATION_DTYPES

aten = torch.ops.aten
LEAST_SCATTERED = 512
"""The tokens from which on the node is faster than atomic additions, as it was measured (docs/kernels)."""


@dataclass(frozen=True)
class SlotBias:
    """A sum of products and of the biases of their experts, `rows` of a table. table: [E, N]. experts: [S]."""

    total: fx.Node
    grouped: fx.Node
    rows: fx.Node
    table: fx.Node
    experts: fx.Node


@dataclass(frozen=True)
class ScaledProducts:
    """The scaled products of all slots. second: another grouped matmul, and the sum of its products and those of
    `grouped`, or None. bias: what is added to the products, or None. scale: [S, 1], or None if there is none. absent:
    bool [S, 1], the slots that count as 0, or None. late: they do so whatever their scale is. masked: the products with
    0 in the absent slots, if they are masked before they are scaled, or None. steps: the nodes from behind `summed` to
    the terms.
    """

    grouped: fx.Node
    second: tuple[fx.Node, fx.Node] | None
    bias: SlotBias | None
    scale: fx.Node | None
    absent: fx.Node | None
    late: bool
    masked: fx.Node | None
    steps: tuple[fx.Node, ...]

    @property
    def summed(self) -> fx.Node:
        """The sum of the products, with their biases."""
        if self.second is not None:
            return self.second[1]
        return self.grouped if self.bias is None else self.bias.total


@dataclass(frozen=True)
class Match:
    """A weighted sum of slots. index: [S], the places of the slots of the tokens, or, if `sorts`, the slot at each
    place. weights: T * k factors, what the slots of each token are multiplied by, or None if the products have a scale.
    total: the sum, in any shape of T * N elements. ending: what follows it, up to the node that is replaced. steps: the
    nodes from behind the matmul to that one.
    """

    terms: ScaledProducts
    index: fx.Node
    sorts: bool
    weights: fx.Node | None
    top_k: int
    total: fx.Node
    ending: Ending
    steps: tuple[fx.Node, ...]

    @property
    def added(self) -> fx.Node | None:
        """What is added to the sum, in any shape of T * N elements."""
        return self.ending.added

    @property
    def result(self) -> fx.Node:
        return self.ending.result


def find_combine_experts(node: fx.Node, *, whenever: bool = False) -> Match | None:
    """Proves that `node` is the sum of the slots of each token, in one of the two forms; None if it is not. whenever:
    also if Inductor's own kernel is as fast as the node's.
    """
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    name = node.target._schema.name
    if name in SCATTERS and node.target._overloadname == "default" and not is_written(node):
        return _scattered(node, 0 if whenever or name == DETERMINISTIC else LEAST_SCATTERED, single=whenever)
    # A sum that is written out is one kernel of Inductor's.
    read = readings(node) if whenever or node.target is not aten.add.Tensor else ()
    found = (_sum_of_indexed(reading) for reading in read if whenever or _pays(reading))
    return next((match for match in found if match is not None), None)


def _pays(reading: Reading) -> bool:
    """Returns whether Inductor makes more than one kernel of a sum and of what is in front of it."""
    return not reading.unrolled and reading.top_k >= inductor_config.unroll_reductions_threshold


def _sum_of_indexed(reading: Reading) -> Match | None:
    """Proves the first form."""
    *views, taken = proofs.views_up(reading.rows)
    by_slot, weights = _by_slot(taken), reading.weights
    terms = None if by_slot is None else _terms(by_slot[0])
    if by_slot is None or terms is None:
        return None
    _, index, sorts = by_slot
    if not _fits(terms, index, *reading.sizes, weights):
        return None
    if weights is not None and not sorts and not is_permutation(index):
        return None
    ending = ending_of(reading.total, proofs.fake(terms.grouped).dtype, reading.base)
    steps = (*terms.steps, taken, *views, *reading.steps, reading.total)
    return _checked(Match(terms, index, sorts, weights, reading.top_k, reading.total, ending, steps))


def _by_slot(taken: fx.Node) -> tuple[fx.Node, fx.Node, bool] | None:
    """Returns (the rows by place, `index` and `sorts` of a Match) if `taken` has rows in the order of their slots."""
    sorts = is_written(taken)
    if taken.target is aten.index.Tensor:
        rows, indices = taken.args[:2]
    elif taken.target is aten.gather.default and taken.args[1] == 0:
        rows, indices = taken.args[0], [rows_of(taken.args[2])]
    elif sorts:
        bound = proofs.arguments(taken)
        rows, indices = bound["values"], bound["indices"]
    else:
        return None
    if not isinstance(rows, fx.Node) or not isinstance(indices, (list, tuple)) or len(indices) != 1:
        return None
    (index,) = indices
    if not isinstance(index, fx.Node):
        return None
    # All rows are written, each once.
    whole = not sorts or (is_order(index) and proofs.alike(taken, rows))
    return (rows, index, sorts) if whole else None


def _scattered(total: fx.Node, least: int, *, single: bool) -> Match | None:
    """Proves the second form, with `least` tokens or more. single: also for one slot of each token, without k."""
    bound, shape = proofs.arguments(total), proofs.fake(total).shape
    base, index = bound.get("self", bound.get("out")), added_at(total)
    source = bound.get("source", bound.get("src", bound.get("values")))
    assert isinstance(base, fx.Node) and isinstance(source, fx.Node)
    if not isinstance(index, fx.Node) or len(shape) != 2:
        return None
    terms, order = _terms(source), slots_of(index, single=single)
    if terms is None or order is None or bound.get("dim", 0) != 0 or bound.get("alpha", 1) != 1:
        return None
    if least and not proofs.known(shape[0] >= least):
        return None
    # The token of each row, or of each element.
    per_row = "indices" in bound or "alpha" in bound
    expected = proofs.fake(terms.grouped).shape[: 1 if per_row else 2]
    fits = proofs.same_shape(tuple(proofs.fake(index).shape), tuple(expected))
    if not fits or not _fits(terms, order[0], shape[0], order[1], shape[1]):
        return None
    ending = ending_of(total, proofs.fake(terms.grouped).dtype, None if proofs.is_full(base, 0) else base)
    return _checked(Match(terms, order[0], True, None, order[1], total, ending, (*terms.steps, total)))


def _terms(node: fx.Node) -> ScaledProducts | None:
    """Reads `node` as products of a grouped matmul, perhaps with factors, which may be cast before and behind that, and
    set to 0 before or behind it in the rows of a mask.
    """
    masked = proofs.operand(node) if casts(node) else node
    late, scaled = _unmasked(masked)
    factors = [factor for factor in scaled.args if isinstance(factor, fx.Node)]
    multiplied = scaled.target is aten.mul.Tensor and len(factors) == 2
    for factor, scale in (factors, factors[::-1]) if multiplied else ((scaled, None),):
        kept = proofs.operand(factor) if casts(factor) else factor
        absent, summed = _unmasked(kept) if late is None else (late, kept)
        bias, two = _biased(summed), _two_products(summed)
        grouped = bias.grouped if bias is not None else summed if two is None else two[0]
        if grouped.target is proofs.GROUPED:
            behind = tuple(dict.fromkeys((kept, factor, scaled, masked, node)))
            steps = tuple(step for step in behind if step is not summed)
            second = None if two is None else (two[1], summed)
            early = None if absent is late else kept
            return ScaledProducts(grouped, second, bias, scale, absent, late is not None, early, steps)
    return None


def _two_products(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Reads `node` as the sum, in their dtype, of the products of two grouped matmuls; None if it is not."""
    added = _added(node)
    if added is None or added[0] is added[1] or any(one.target is not proofs.GROUPED for one in added):
        return None
    return added


def _added(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Returns the two tensors whose sum `node` is, if they have its shape and dtype."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return None
    first, second = node.args
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return None
    same = proofs.alike(node, first) and proofs.alike(node, second)
    return (first, second) if same and len({proofs.fake(one).dtype for one in (node, first, second)}) == 1 else None


def _biased(node: fx.Node) -> SlotBias | None:
    """Reads `node` as a sum, in their dtype, of products of a grouped matmul and of a row of a table for each of them;
    None if it is not.
    """
    added = _added(node)
    for products, rows in () if added is None else (added, added[::-1]):
        indexed = proofs.indexed_rows(rows)
        if indexed is not None and products.target is proofs.GROUPED:
            return SlotBias(node, products, rows, *indexed)
    return None


def _unmasked(node: fx.Node) -> tuple[fx.Node | None, fx.Node]:
    """Returns (a mask of rows [S, 1], what `node` has in the other rows) if `node` is 0 in the rows of a mask, or
    (None, `node`).
    """
    if node.target is not aten.where.self:
        return None, node
    mask, zero, kept = node.args
    value = proofs.tensor(mask)
    if value is None or not isinstance(kept, fx.Node) or not proofs.is_full(zero, 0) or not proofs.alike(node, kept):
        return None, node
    of_rows = value.ndim == 2 and proofs.known_equal(value.shape[1], 1) and value.dtype == torch.bool
    same = of_rows and proofs.fake(node).dtype == proofs.fake(kept).dtype
    return (mask, kept) if same and isinstance(mask, fx.Node) else (None, node)


def _fits(terms: ScaledProducts, slots: fx.Node, T: Any, top_k: int, N: Any, weights: fx.Node | None = None) -> bool:
    """Returns whether the operands of a sum of `top_k` terms for T tokens are those of their slots."""
    place, S = proofs.fake(slots), T * top_k
    expected = [(place, (S,)), (proofs.fake(terms.grouped), (S, N))]
    if weights is not None:
        known = terms.scale is None and proofs.fake(weights).dtype in ACTIVATION_DTYPES
    elif terms.scale is None:
        # A scale of ones is made of as many.
        known = isinstance(S, int)
    else:
        factor = proofs.tensor(terms.scale)
        known = factor is not None and factor.dtype in ACTIVATION_DTYPES
        expected += [] if factor is None else [(factor, (S, 1))]
    if not known or place.dtype != torch.int64:
        return False
    expected += [] if terms.absent is None else [(proofs.fake(terms.absent), (S, 1))]
    return all(proofs.same_shape(tuple(value.shape), of_slots) for value, of_slots in expected)


def _checked(found: Match) -> Match | None:
    """Returns the match if nothing else reads its steps, and its result is what the node returns. Anything may read the
    masked products, which then stay beside the node.
    """
    terms, total, value = found.terms, found.total, proofs.fake(found.result)
    inner = [step for step in found.steps if step not in (terms.masked, total)]
    biases = () if terms.bias is None else (terms.bias.table, terms.bias.experts)
    optional = (terms.scale, found.weights, terms.absent, terms.masked, found.added, *biases)
    operands = [terms.grouped, terms.summed, found.index, *[one for one in optional if one is not None]]
    wrong = (
        proofs.other_user(inner, {*inner, total}) is not None
        or value.dtype != proofs.fake(terms.grouped).dtype
        or not proofs.row_major(value)
        or written(operands) is not None
        or sizes.in_graph(total.graph, found.result, proofs.fake(terms.grouped).shape[1]) is None
        or sizes.shape_in_graph(found.result, proofs.fake(total).shape) is None
    )
    return None if wrong else replace(found, steps=(*found.steps, *found.ending.steps))


def _inverse(graph: fx.Graph, order: fx.Node) -> fx.Node:
    """Inserts the place of each slot, from the slot at each place [S]."""
    value = proofs.fake(order)
    length = _length(graph, order)
    return _put(graph, order, rewriting.integers(graph, order, length, value.dtype), length)


def _length(graph: fx.Graph, vector: fx.Node) -> Any:
    (S,) = proofs.fake(vector).shape
    return S if isinstance(S, int) else sizes.made(graph, aten.sym_size.int, (vector, 0), S)


def _put(graph: fx.Graph, places: fx.Node, values: fx.Node, length: Any) -> fx.Node:
    """Inserts a vector that has `values` [S] at `places` [S], which are each of 0 to S - 1 once. length: S, as an
    argument of an op.
    """
    value = proofs.fake(values)
    empty = rewriting.call(graph, aten.empty.memory_format, ([length],), values, value.shape)
    empty.kwargs = {"dtype": value.dtype, "device": value.device}
    return rewriting.call(graph, aten.index_put.default, (empty, [places], values), values, value.shape)


def operands_of(graph: fx.Graph, match: Match) -> tuple[dict[str, fx.Node], torch.Tensor]:
    """Inserts what makes the operands of the node of a sum. Returns them, but for the products and their biases, and a
    fake of the sum [T, N].
    """
    terms = match.terms
    like = proofs.fake(terms.grouped)
    (S,), N = proofs.fake(match.index).shape, like.shape[1]
    shape = (S // match.top_k, N)
    if match.weights is not None:
        by_slot = rewriting.call(graph, aten.reshape.default, (match.weights, [-1]), match.weights, (S,))
        # A place has the factor of its slot.
        if match.sorts:
            scale = rewriting.call(graph, aten.index.Tensor, (by_slot, [match.index]), by_slot, (S,))
        else:
            scale = _put(graph, match.index, by_slot, _length(graph, match.index))
    elif terms.scale is None:
        scale = rewriting.full(graph, terms.grouped, (S,), 1.0, like.dtype)
    else:
        scale = terms.scale
        if terms.late:
            # The node multiplies what is absent by its scale, which need not be finite.
            zero = rewriting.full(graph, scale, (), 0.0, proofs.fake(scale).dtype)
            scale = rewriting.call(graph, aten.where.self, (terms.absent, zero, scale), scale, (S, 1))
        scale = rewriting.call(graph, aten.reshape.default, (scale, [-1]), scale, (S,))
    places = _inverse(graph, match.index) if match.sorts else match.index
    operands = {"places": places, "scale": scale}
    if terms.absent is not None:
        operands["absent"] = rewriting.call(graph, aten.reshape.default, (terms.absent, [-1]), terms.absent, (S,))
    if match.added is not None:
        rows = (match.added, [-1, sizes.in_graph(graph, match.result, N)])
        operands["added"] = rewriting.call(graph, aten.reshape.default, rows, match.added, shape)
    operands["scale"] = times(graph, operands["scale"], match.ending.factor)
    return operands, rewriting.fake_like(like, shape, rewriting.contiguous_strides(shape))


def rewrite(graph: fx.Graph, match: Match, options: Options) -> None:
    """Replaces a sum by one op call."""
    result = match.result
    terms = match.terms
    # Where something else reads products with their biases, they are made anyhow.
    bias = terms.bias if terms.bias is not None and len(terms.summed.users) == 1 else None
    has = {"has_added": match.added is not None, "has_absent": terms.absent is not None, "has_bias": bias is not None}
    task = CombineExperts(match.top_k, **has, strategy=options.strategy)
    with graph.inserting_before(result):
        operands, made = operands_of(graph, match)
        operands["products"] = terms.summed if bias is None else terms.grouped
        if bias is not None:
            operands |= {"bias": bias.table, "experts": bias.experts}
        call = rewriting.call_task(graph, task, operands, result, [made])
        output = rewriting.output(graph, call, 0, result)
        whole = proofs.fake(match.total).shape
        if not proofs.same_shape(tuple(whole), tuple(made.shape)):
            args = (output, sizes.shape_in_graph(result, whole))
            output = rewriting.call(graph, aten.reshape.default, args, result, whole)
        for view in match.ending.views:
            output = rewriting.call(
                graph, view.target, (output, *view.args[1:]), view, proofs.fake(view).shape, proofs.fake(view).stride()
            )
    result.replace_all_uses_with(output)
    rewriting.erase_unused(graph, [*match.steps, *(() if bias is None else (bias.total, bias.rows))])


def combine_experts(graph: fx.Graph, *, options: Options) -> int:
    """Makes one call of each weighted sum of what experts return, and returns how many."""
    if not takes_local(graph, CombineExperts.kind, options):
        return 0
    made = 0
    # One after the other: what is added to a sum may be another one.
    for total in list(graph.nodes):
        match = find_combine_experts(total)
        if match is not None:
            rewrite(graph, match, options)
            made += 1
    return made
