"""Forms that are worth another one only if a fusion follows: tried on a copy of the graph, kept where one did.

    a collective of several tensors             -> single collectives, see `split_coalesced`
    a batched matmul with one matrix for all    -> a matmul, see `fold_batches`
    a gather, then a narrowing cast             -> the cast, then the gather, see `move_casts`
    a factor or transpose, then a reduction     -> the reduction, then the factor or transpose, see `move_across`

A graph without such a form is not copied. On the copy all of them are rewritten and the fusions run; in the graph those
are rewritten whose node a fusion took. The others stay as they were, and get the reason that the fusions found.

The fusions decide by facts that are equal on all ranks, so this does too.
"""

from __future__ import annotations

from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes import fold_batches, move_across, move_casts, rewriting, split_coalesced
from ditron_inductor.passes.all_gather_matmul import all_gather_matmul
from ditron_inductor.passes.collectives import is_collective
from ditron_inductor.passes.matmul_all_reduce import matmul_all_reduce
from ditron_inductor.passes.matmul_reduce_scatter import matmul_reduce_scatter
from ditron_inductor.passes.reasons import LEFT_ALONE, TRIED, Reason, ReasonCode
from ditron_inductor.passes.share_gathers import share_gathers

FUSIONS = (all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce)


def try_forms(graph: fx.Graph, *, options: Options) -> int:
    """Rewrites every form that a fusion takes then; returns how many."""
    coalesced = [match for node in graph.nodes if (match := split_coalesced.find_coalesced(node)) is not None]
    folded = [node for node in graph.nodes if fold_batches.find_folded(node) is not None]
    starts = [node for node in graph.nodes if node.op == "call_function" and is_collective(node)]
    narrowed = [node for node in starts if move_casts.find_narrowed(node) is not None]
    moved = [node for node in starts if move_across.find_moved(node) is not None]
    if not coalesced and not narrowed and not moved and not (folded and starts):
        return 0
    copy, twins = rewriting.copied(graph)
    matmuls = [_fold(copy, twins[node]) for node in folded]
    for node in narrowed:
        _narrow(copy, twins[node])
    for node in moved:
        _move(copy, twins[node])
    singles = [_split(copy, twins[match.node]) for match in coalesced]
    for fusion in FUSIONS:
        fusion(copy, options=options)
    remaining = set(copy.nodes)
    count = 0
    for bmm, mm in zip(folded, matmuls, strict=True):
        if mm not in remaining:
            _fold(graph, bmm)
            count += 1
    for node in narrowed:
        if twins[node] not in remaining:
            _narrow(graph, node)
            count += 1
    for node in moved:
        if twins[node] not in remaining:
            _move(graph, node)
            count += 1
    for node in starts:
        if folded and twins[node] in remaining and LEFT_ALONE in twins[node].meta:
            node.meta[TRIED] = twins[node].meta[LEFT_ALONE]
    for match, tried in zip(coalesced, singles, strict=True):
        taken = [index for index, single in tried.items() if single not in remaining]
        alone = [single.meta[LEFT_ALONE] for single in tried.values() if single in remaining]
        if alone:
            match.node.meta[LEFT_ALONE] = _strongest(alone)
        if taken:
            _split(graph, match.node, taken)
            count += 1
    if singles:  # one collective may have gathered a tensor twice
        share_gathers(graph, options=options)
    return count


def _fold(graph: fx.Graph, node: fx.Node) -> fx.Node:
    match = fold_batches.find_folded(node)
    assert match is not None
    return fold_batches.rewrite(graph, match)


def _narrow(graph: fx.Graph, node: fx.Node) -> None:
    match = move_casts.find_narrowed(node)
    assert match is not None
    move_casts.rewrite(graph, match)


def _move(graph: fx.Graph, node: fx.Node) -> None:
    match = move_across.find_moved(node)
    assert match is not None
    move_across.rewrite(graph, match)


def _split(graph: fx.Graph, node: fx.Node, taken: list[int] | None = None) -> dict[int, fx.Node]:
    """Splits off the members `taken`, or all whose result somebody takes."""
    match = split_coalesced.find_coalesced(node)
    assert match is not None
    if taken is None:
        taken = [index for index, result in enumerate(match.results) if result is not None]
    return split_coalesced.rewrite(graph, match, taken)


def _strongest(reasons: list[Reason]) -> Reason:
    """The first reason that names a matmul, if any does."""
    named = [reason for reason in reasons if reason.code != ReasonCode.NO_MATMUL.value]
    return (named or reasons)[0]
