"""The matmuls of a mixture of experts with few tokens become one `ditron::expert_projections` for each weight.

Before, a decode step that copies the weights of the experts that its T tokens take, `k` each:

    topk -> getitem 1 [T, k] -> reshape [S] -> index(weight [E, N, K], [that]) [S, N, K]
    x [T, K] -> unsqueeze [T, 1, K] -> expand [T, k, K] -> clone -> reshape [S, K] -> unsqueeze [S, K, 1]
    bmm(index, unsqueeze) [S, N, 1] -> squeeze [S, N]

After:

    x, getitem 1 -> reshape [S], [permute(weight) [E, K, N]] -> ditron.expert_projections -> getitem 0 [S, N]

The numbers of experts may also be [T, k], as in programs that write the matmuls as einsums, where the product of each
slot, or the products of all slots of a token with its row, have the matrices in a permuted order:

    getitem 1 [T, k] -> index(weight [E, N, K], [that]) [T, k, N, K] -> permute [T, K, k, N] -> reshape [T, K, k * N]
    x [T, K] -> unsqueeze [T, 1, K] -> bmm(.., that) [T, 1, k * N]

Two such products of the same rows, such as gate and up, are one call with two weights.

Rows that are not repeated, such as what the second matmul of an expert multiplies, are a row for each slot. The factors
of the bmm may also stand the other way round, `bmm(rows [S, 1, K], index [S, K, N])`.

The experts may be clamped to a range in which all of them lie.

Under expert parallelism the experts are clamped ids, of which E says that an expert is elsewhere (see
graph/slots_elsewhere.py). The call gets the ids, and computes nothing for such slots.

Each weight is read once (see lowering/expert_projections/experts_kernel.py). For gate and up in one weight see
split_weights.py.

Nothing is communicated, so ranks need not agree on it. It must not fire when
* the graph holds no Task node with a collective: it is left to Inductor, as for `projections`;
* the experts are not the indices of a `topk` over no more than E values: only then they differ for one token, and all
  of them exist; or those of these indices that are on this rank, if what is computed for the others is never used;
* the number of tokens is dynamic, or more than `MOST_ORDERED_TOKENS`;
* the copied weights have another reader, or the product is not used as [S, N] and has a dynamic size;
* something writes into x, the experts or the weight;
* neither dimension of the matrices is contiguous;
* the dtype is none of bfloat16, float16 and float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.fuse.sorted_experts import sorted_experts
from ditron_inductor.passes.graph import expert_rows, proofs, rewriting, slots_elsewhere
from ditron_inductor.passes.graph.all_to_all import written
from ditron_inductor.passes.graph.launches import takes_local
from ditron_inductor.task.nodes import MOST_ORDERED_TOKENS, ExpertProjections
from ditron_inductor.task.torch_dtypes import OPERAND_DTYPES

aten = torch.ops.aten


@dataclass(frozen=True)
class Match:
    """A bmm whose one factor is a copy of the weights of each slot. rows: [T, K] if `by_token`, else [S, K] or a view
    of that. experts: [S] or [T, k]. weight: [E, .., ..], in which `swapped` says that N stands before K. result: the
    view [S, N] of the product, or the product. top_k: the slots of a token. has_absent: experts may be E, for an expert
    elsewhere.
    """

    bmm: fx.Node
    rows: fx.Node
    experts: fx.Node
    weight: fx.Node
    result: fx.Node
    swapped: bool
    by_token: bool
    top_k: int
    has_absent: bool

    @property
    def sizes(self) -> tuple[int, Any]:
        """(S, N)."""
        return proofs.fake(self.experts).numel(), proofs.fake(self.weight).shape[1 if self.swapped else 2]

    @property
    def copies(self) -> list[fx.Node]:
        """The product, the copies and the views that led to it from the operands of the call."""
        found: list[fx.Node] = []
        left = [self.bmm]
        while left:
            node = left.pop()
            if node not in found and node not in (self.rows, self.experts, self.weight):
                found.append(node)
                left += node.all_input_nodes
        return found


def find_expert_projections(bmm: fx.Node) -> Match | None:
    """Proves that a bmm is one of the slots of few tokens, as drawn above; None if it is not."""
    left, right = bmm.args
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    for factor, rows, transposed in ((left, right, True), (right, left, False)):
        copied, dims, steps = proofs.permuted(factor)
        if copied.target is aten.index.Tensor:
            alone = all(proofs.sole_user(step) is not None for step in (*steps, copied))
            return _of_copies(bmm, _Copies(factor, copied, dims, transposed), rows) if alone else None
    return None


@dataclass(frozen=True)
class _Copies:
    """A factor of a bmm, which is copies of matrices, as index(weight [E, .., ..], [ids [S] or [T, k]]) makes them.
    dims: those of the copies that are not of size 1, in the order in which the factor has them. transposed: the bmm
    contracts the last dimension of the factor, rather than the second one.
    """

    factor: fx.Node
    copied: fx.Node
    dims: list[int]
    transposed: bool

    def swapped(self, S: int, *, by_token: bool) -> bool | None:
        """Returns whether N stands before K in the weight, if each batch multiplies by the matrix of a slot, or, if
        `by_token`, by the matrices of all slots of a token side by side; None if it does not.
        """
        value = proofs.fake(self.copied)
        *slots, first, second = range(value.ndim)
        shape = tuple(proofs.fake(self.factor).shape)
        for swapped, K, N in ((False, first, second), (True, second, first)):
            inner, sizes = (value.shape[K], value.shape[N]), [S]
            order = [*slots, K, N]
            if by_token and len(slots) == 2:
                order = [slots[0], K, slots[1], N]
                inner, sizes = (inner[0], value.shape[slots[1]] * inner[1]), [value.shape[slots[0]]]
            if self.transposed:
                order = [*slots, N, K]
                inner = inner[::-1]
            fits = proofs.same_shape(shape, (*sizes, *inner)) and (not by_token or len(slots) == 2)
            if fits and self.dims == [dim for dim in order if not proofs.known_equal(value.shape[dim], 1)]:
                return swapped
        return None


def _of_copies(bmm: fx.Node, copies: _Copies, rows: fx.Node) -> Match | None:
    weight, indices = copies.copied.args
    if not isinstance(weight, fx.Node) or not isinstance(indices, (list, tuple)) or len(indices) != 1:
        return None
    experts, value, given = indices[0], proofs.tensor(weight), proofs.tensor(rows)
    if not isinstance(experts, fx.Node) or value is None or given is None or value.ndim != 3:
        return None
    ids, chosen, has_absent = _ids(experts, value.shape[0])
    top_k = _slots_of_a_token(ids, chosen, value.shape[0], has_absent)
    S = proofs.fake(experts).numel()
    if top_k is None or not isinstance(S, int) or not 0 < S <= MOST_ORDERED_TOKENS * top_k:
        return None
    by_slot, together = (copies.swapped(S, by_token=by_token) for by_token in (False, True))
    swapped = together if by_slot is None else by_slot
    if swapped is None or value.dtype not in OPERAND_DTYPES or given.dtype != value.dtype:
        return None
    contracted = 2 if swapped else 1
    if not any(proofs.known_equal(stride, 1) for stride in value.stride()[1:]):
        return None
    N, K = value.shape[3 - contracted], value.shape[contracted]
    result = _as_matrix(bmm, S, N)
    if result is None and not _is_of_single_rows(bmm, S, N):
        return None
    if has_absent and (result is None or not slots_elsewhere.are_never_used(result, ids, value.shape[0])):
        return None
    of_tokens = _repeated(proofs.views_up(rows)[-1], S // top_k, top_k)
    if by_slot is None:
        of_tokens = proofs.view_in_shape(rows, (S // top_k, K)) or rows
    x = of_tokens or proofs.view_in_shape(rows, (S, K)) or rows
    if written((x, ids, weight)) is not None:
        # The call would read it later than the copy does.
        return None
    return Match(bmm, x, ids, weight, result or bmm, swapped, of_tokens is not None, top_k, has_absent)


def _ids(experts: fx.Node, num_experts: Any) -> tuple[fx.Node, fx.Node, bool]:
    """Returns (the ids of which `experts` are those on this rank, or `experts` before they were clamped; the choices
    that these are made of; whether some may be on other ranks). Choices among no more than `num_experts` are what they
    were when they are clamped: `_slots_of_a_token` asks for that.
    """
    if not isinstance(num_experts, int):
        return experts, proofs.views_up(experts)[-1], False
    found = slots_elsewhere.ids_of(experts, num_experts)
    if found is not None:
        return *found, True
    chosen = expert_rows.unclamped(experts, num_experts)
    if chosen is None:
        return experts, proofs.views_up(experts)[-1], False
    return expert_rows.before_clamps(experts, chosen) or experts, chosen, False


def _slots_of_a_token(experts: fx.Node, found: fx.Node, num_experts: Any, of_ranks: bool) -> int | None:
    """Returns the experts of a token if `experts` [S] or [T, k] are made of `found`, the indices of a topk over no more
    values than experts, unless they are of several ranks; else None.
    """
    value = proofs.tensor(experts)
    if value is None or value.dtype != torch.int64 or not isinstance(num_experts, int):
        return None
    top_k = expert_rows.taken_of(found, num_experts, of_ranks=of_ranks)
    by_token = value.ndim == 2 and proofs.known_equal(value.shape[1], top_k)
    return top_k if value.ndim == 1 or by_token else None


def _is_of_single_rows(bmm: fx.Node, slots: int, columns: Any) -> bool:
    """Returns whether a product of known sizes has one row of so many columns for each slot."""
    shape = proofs.fake(bmm).shape
    return all(isinstance(size, int) for size in (*shape, columns)) and math.prod(shape) == slots * columns


def _as_matrix(bmm: fx.Node, rows: int, columns: Any) -> fx.Node | None:
    """Returns the view [S, N] through which alone a product [S, N, 1] or [S, 1, N] is used."""
    view = proofs.sole_user(bmm)
    if view is None or not proofs.keeps_order(view):
        return None
    return view if proofs.same_shape(tuple(view.meta["val"].shape), (rows, columns)) else None


def _repeated(source: fx.Node, tokens: int, top_k: int) -> fx.Node | None:
    """Returns x [T, K] if `source` is a copy [T, k, K] of x, with each row k times; else None."""
    copied = source
    if copied.target is aten.clone.default and isinstance(copied.args[0], fx.Node):
        copied = copied.args[0]
    if copied.target is not aten.expand.default or not isinstance(copied.args[0], fx.Node):
        return None
    single, value = proofs.tensor(copied.args[0]), proofs.tensor(copied)
    if single is None or value is None or value.ndim != 3:
        return None
    shape = (tokens, top_k, value.shape[2])
    if not proofs.same_shape(tuple(value.shape), shape) or not proofs.known_equal(single.shape[1], 1):
        return None
    return proofs.view_in_shape(copied.args[0], (tokens, value.shape[2]))


def rewrite(graph: fx.Graph, matches: Sequence[Match], options: Options) -> list[fx.Node]:
    """Replaces products of the same rows by one op call, where the first of them stands, and returns what has them."""
    match, *others = matches
    task = ExpertProjections(
        match.top_k, match.by_token, len(matches), strategy=options.strategy, has_absent=match.has_absent
    )
    for other in others:
        rewriting.hoist(other.weight, match.bmm)
    with graph.inserting_before(match.bmm):
        factors = [operands_of(graph, one) for one in matches]
        experts = rewriting.shaped(graph, match.experts, (match.sizes[0],))
        operands = {"x": factors[0][0], "experts": experts, "weights": [factor for _, factor in factors]}
        values = [proofs.fake(one.result) for one in matches]
        shapes = [(value, one.sizes) for value, one in zip(values, matches, strict=True)]
        products = [rewriting.fake_like(value, size, rewriting.contiguous_strides(size)) for value, size in shapes]
        call = rewriting.call_task(graph, task, operands, match.bmm, products)
        made = [rewriting.output(graph, call, index, one.result) for index, one in enumerate(matches)]
        outputs = [
            rewriting.shaped(graph, product, tuple(value.shape)) for product, value in zip(made, values, strict=True)
        ]
    for one, output in zip(matches, outputs, strict=True):
        one.result.replace_all_uses_with(output)
    rewriting.erase_unused(graph, [node for one in matches for node in (one.result, *one.copies)])
    return outputs


def _pairs(found: Sequence[Match]) -> Iterator[tuple[Match, ...]]:
    """Yields the matches in their order, those of two weights for the same rows, such as gate and up, together."""
    left = list(found)
    while left:
        match = left.pop(0)
        second = next((other for other in left if _go_together(match, other)), None)
        if second is not None:
            left.remove(second)
        yield (match,) if second is None else (match, second)


def _go_together(match: Match, other: Match) -> bool:
    """Returns whether one call computes both products."""
    rows = match.rows is other.rows and (match.by_token, match.experts) == (other.by_token, other.experts)
    first, second = proofs.fake(match.weight), proofs.fake(other.weight)
    alike = first.shape == second.shape and first.stride() == second.stride() and match.swapped == other.swapped
    static = all(isinstance(size, int) for size in (*first.shape, *second.shape))
    return rows and static and alike and first.dtype == second.dtype and rewriting.can_hoist(other.weight, match.bmm)


def operands_of(graph: fx.Graph, match: Match) -> tuple[fx.Node, fx.Node]:
    """Inserts what makes (x, the weight [E, K, N]) of the matmuls of the slots, and returns these."""
    weight: torch.Tensor = match.weight.meta["val"]
    (S, _), K = match.sizes, weight.shape[2 if match.swapped else 1]
    rows, factor = match.rows, match.weight
    tokens = S // match.top_k if match.by_token else S
    if not proofs.same_shape(tuple(rows.meta["val"].shape), (tokens, K)):
        # A symbol is no argument of a node; there are rows.
        columns = K if isinstance(K, int) else -1
        rows = rewriting.computed(graph, aten.reshape.default, (rows, [tokens, columns]), rows)
    if match.swapped:
        factor = rewriting.computed(graph, aten.permute.default, (factor, [0, 2, 1]), factor)
    return rows, factor


def expert_projections(graph: fx.Graph, *, options: Options) -> int:
    """Makes one call of the matmul of all slots with each weight, and returns how many."""
    if not takes_local(graph, ExpertProjections.kind, options):
        return 0
    found = []
    for bmm in graph.find_nodes(op="call_function", target=aten.bmm.default):
        match = find_expert_projections(bmm)
        if match is not None:
            found.append(match)
        elif expert_rows.copies_weights(bmm):
            bmm.meta[expert_rows.COPIED] = True
    outputs: dict[fx.Node, fx.Node] = {}
    calls = list(_pairs(found))
    for matches in calls:
        # The rows may be what another one returned.
        fed = [replace(match, rows=outputs.get(match.rows, match.rows)) for match in matches]
        outputs |= zip([match.result for match in matches], rewrite(graph, fed, options), strict=True)

    def make(top_k: int, by_token: bool, has_absent: bool) -> ExpertProjections:
        return ExpertProjections(top_k, by_token, 1, strategy=options.strategy, has_absent=has_absent)

    return len(calls) + sorted_experts(graph, make, options.strategy)
