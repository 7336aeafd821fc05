"""The grouped matmuls of a few tokens' experts become `ditron::expert_projections`, and their slots are not sorted.

Before, with T tokens that take k experts each, in S = T * k slots, as `transformers` writes it (`grouped_mm`):

    topk -> getitem 1 [T, k] -> reshape [S] -> sort -> the sorted ids [S], the slots [S]
    x [T, K] -> index(x, [slots // k]) [S, K] -> _grouped_mm(.., weight [E, K, N], offs=ends [E]) [S, N]
    ends: the sorted ids -> histc -> cumsum
    what the last matmul returns -> index(.., [places]) [S, N]         places: the inverse of the slots

After:

    x, getitem 1 -> reshape [S], [weight] -> ditron.expert_projections -> getitem 0 [S, N]

The call finds the rows of each expert by the ids, in whatever order they are. So the slots stay in theirs, token by
token: the sort, the indices by it and the way back go, and what is behind is what `expert_projections` has for the form
that copies weights. What the graph returns stays a copy, by the numbers 0 .. S - 1.

Nothing is communicated. It must not fire where `expert_projections` must not, nor if
* anything reads what is sorted otherwise than row by row, up to where the order is undone (see graph/place_order.py);
* the ends are not those of the sorted ids;
* a grouped matmul has a bias, or another dtype for its result;
* something writes into what is read by the slots, or back by their places: it would be read later;
* the tensors are not on a GPU, unless the strategy is `tile`: where no kernel runs, the call copies the weights of each
  slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from ditron_inductor.passes.graph import expert_rows, place_order, proofs, rewriting, slots_elsewhere
from ditron_inductor.passes.graph.all_to_all import written
from ditron_inductor.passes.graph.place_order import Kind
from ditron_inductor.passes.graph.rows_behind import drop_masks
from ditron_inductor.passes.graph.sorts import SORTS, sorted_slots
from ditron_inductor.task.node import Node
from ditron_inductor.task.nodes import most_expert_tokens
from ditron_inductor.task.torch_dtypes import OPERAND_DTYPES

aten = torch.ops.aten
GPUS = ("cuda",)
MakeTask = Callable[[int, bool, bool], Node]
"""Makes the Task node of a call, given (the experts of a token, whether there is a row for each token rather than for
each slot, whether ids may be E).
"""
AS_IT_LIES: frozenset[object] = frozenset({aten.as_strided.default, aten.as_strided_copy.default})
"""Ops that read memory by strides of their own."""


@dataclass(frozen=True)
class Match:
    """A sort of slots whose order does not matter. ids: [S], what is sorted. grouped: the grouped matmuls. kinds: those
    of all nodes that have something in the order of the sort. has_absent: ids may be E, for an expert elsewhere.
    """

    sort: fx.Node
    ids: fx.Node
    top_k: int
    grouped: tuple[fx.Node, ...]
    kinds: dict[fx.Node, Kind]
    has_absent: bool

    @property
    def slots(self) -> list[fx.Node]:
        """The nodes that have the slot at each place."""
        return [node for node, kind in self.kinds.items() if kind is Kind.SLOTS]

    @property
    def places(self) -> list[fx.Node]:
        """The nodes that have the place of each slot."""
        return [node for node, kind in self.kinds.items() if kind is Kind.PLACES]


def find_sorted_experts(sort: fx.Node, strategy: str) -> Match | None:
    """Proves that a sort is one of the slots of few tokens, as drawn above; None if it is not."""
    ids = proofs.arguments(sort)["self"]
    value = proofs.tensor(ids)
    if value is None or value.ndim != 1 or value.dtype != torch.int64:
        return None
    kinds = place_order.kinds_of(sort)
    grouped = tuple(node for node in kinds or () if node.target is proofs.GROUPED)
    if kinds is None or not grouped or not all(_is_taken(node) for node in grouped):
        return None
    counts = {proofs.fake(proofs.arguments(node)["mat2"]).shape[0] for node in grouped}
    (num_experts, *others) = counts
    if others or not isinstance(num_experts, int):
        return None
    source = proofs.views_up(ids)[-1]
    elsewhere = slots_elsewhere.choices_behind(source, num_experts)
    top_k = expert_rows.taken_of(elsewhere or source, num_experts, of_ranks=elsewhere is not None)
    S = value.shape[0]
    if top_k is None or not isinstance(S, int) or S % top_k:
        return None
    if not 0 < S <= most_expert_tokens(strategy, top_k, num_experts) * top_k:
        return None
    if not expert_rows.range_of(source).most <= num_experts - (elsewhere is None) or not _are_kept(sort, kinds):
        return None
    return Match(sort, ids, top_k, grouped, kinds, elsewhere is not None)


def _are_kept(sort: fx.Node, kinds: Mapping[fx.Node, Kind]) -> bool:
    """Returns whether nothing writes into the ids, or into what is read by the slots or by their places."""
    indices = [node for node in sort.graph.find_nodes(op="call_function", target=aten.index.Tensor)]
    tables = [node.args[0] for node in indices if any(source in kinds for source in node.all_input_nodes)]
    return written((proofs.operand(sort), *tables)) is None


def _is_taken(grouped: fx.Node) -> bool:
    """Returns whether a grouped matmul has operands that the call takes."""
    bound = proofs.arguments(grouped)
    rows, weight = proofs.fake(bound["self"]), proofs.fake(bound["mat2"])
    plain = bound["bias"] is None and bound["out_dtype"] is None
    copied = proofs.indexed_rows(bound["self"])
    read = (bound["self"], bound["mat2"], *(() if copied is None else copied[:1]))
    few = rows.ndim == 2 and weight.ndim == 3 and rows.dtype == weight.dtype and rows.dtype in OPERAND_DTYPES
    lies = any(proofs.known_equal(stride, 1) for stride in weight.stride()[1:])
    return plain and few and lies and written(read) is None


def rewrite(graph: fx.Graph, match: Match, make: MakeTask) -> int:
    """Puts a call in the place of each matmul, and leaves the slots in their order. Returns how many calls."""
    nodes = list(match.kinds)
    for ends in {proofs.arguments(grouped)["offs"] for grouped in match.grouped}:
        nodes += _between(ends, match.ids)
    for place in match.places:
        # What the places were put into, and what was put there. An input remains one.
        nodes += [made for made in place.all_input_nodes if made.op == "call_function" and not made.all_input_nodes]
    for grouped in match.grouped:
        _call(graph, match, grouped, make)
    for index in graph.find_nodes(op="call_function", target=aten.index.Tensor):
        if _changes_nothing(index, match):
            index.replace_all_uses_with(index.args[0])
            nodes.append(index)
    for user in match.sort.users:
        if user.args[1] == 0:
            user.replace_all_uses_with(match.ids)
    rewriting.erase_unused(graph, nodes)
    left = set(graph.nodes)
    read = [node for node in (*match.slots, *match.places) if node in left and node.users]
    if read:
        with graph.inserting_before(match.sort):
            in_order = rewriting.integers(graph, match.ids, proofs.fake(match.ids).shape[0], torch.int64)
        for node in read:
            node.replace_all_uses_with(in_order)
        rewriting.erase_unused(graph, left.intersection(nodes))
    return len(match.grouped)


def _changes_nothing(index: fx.Node, match: Match) -> bool:
    """Returns whether index(table, [rows]) is the table once slots and places are in the order of the slots. It stays a
    copy where that has other strides, where its memory is read as it lies, and where the graph returns it, since the
    table may be an input, or be returned too.
    """
    table, indices = index.args
    if not isinstance(indices, (list, tuple)) or len(indices) != 1 or indices[0] not in (*match.slots, *match.places):
        return False
    given, value = proofs.tensor(table), proofs.fake(index)
    if given is None or not proofs.same_shape(tuple(given.shape), tuple(value.shape)) or not _lie_alike(given, value):
        return False
    views = proofs.reached([index], lambda view: filter(_is_view, view.users))
    return not any(user.op == "output" or user.target in AS_IT_LIES for view in views for user in view.users)


def _is_view(node: fx.Node) -> bool:
    """Returns whether a node may lie in the memory of what it reads."""
    target = node.target
    return target in rewriting.MOVES or (isinstance(target, torch._ops.OpOverload) and target.is_view)


def _lie_alike(given: torch.Tensor, value: torch.Tensor) -> bool:
    """Returns whether two tensors of one shape have the same strides."""
    strides = zip(given.shape, given.stride(), value.stride(), strict=True)
    return all(proofs.known_equal(size, 1) or proofs.known_equal(one, other) for size, one, other in strides)


def _between(ends: fx.Node, ids: fx.Node) -> list[fx.Node]:
    """Returns what leads from the ids, or from what these are a view of, to `ends`."""
    sources = proofs.views_up(ids)
    return list(proofs.reached([ends], lambda node: [one for one in node.all_input_nodes if one not in sources]))


def _call(graph: fx.Graph, match: Match, grouped: fx.Node, make: MakeTask) -> None:
    """Replaces a grouped matmul by a call, whose rows are those of the tokens if they were copied from there."""
    bound = proofs.arguments(grouped)
    tokens = _tokens_of(bound["self"], match)
    task = make(match.top_k, tokens is not None, match.has_absent)
    operands = {"x": tokens or bound["self"], "experts": match.ids, "weights": [bound["mat2"]]}
    rewriting.replace_by_call(graph, task, operands, grouped)


def _tokens_of(rows: fx.Node, match: Match) -> fx.Node | None:
    """Returns x [T, K], without gaps, if `rows` has the row of x for the token of the slot at each place; else None."""
    indexed = proofs.indexed_rows(rows)
    quotients = None if indexed is None else sorted_slots(indexed[1])
    if indexed is None or quotients is None or quotients[0] not in match.slots or quotients[1] != match.top_k:
        return None
    x = proofs.fake(indexed[0])
    # There may be more rows than tokens that take experts.
    whole = proofs.known_equal(x.shape[0], proofs.fake(match.ids).shape[0] // match.top_k)
    return indexed[0] if whole and proofs.row_major(x) else None


def sorted_experts(graph: fx.Graph, make: MakeTask, strategy: str) -> int:
    """Makes a call of each grouped matmul of the experts of a few tokens, and returns how many. With the strategy
    `tile` it does so on devices other than GPUs too.
    """
    drop_masks(graph)
    count = 0
    for target in SORTS:
        for sort in graph.find_nodes(op="call_function", target=target):
            runs = strategy == "tile" or proofs.fake(proofs.operand(sort)).device.type in GPUS
            match = find_sorted_experts(sort, strategy) if runs else None
            if match is not None:
                count += rewrite(graph, match, make)
    return count
