"""Some forms are worth rewriting only if a fusion follows. They are tried on a copy of the graph, and rewritten if one
does.

    a collective of several tensors             -> single collectives, see `split_coalesced`
    a batched matmul with one matrix for all    -> a matmul, see `fold_batches`
    a gather, then a narrowing cast             -> the cast, then the gather, see `move_casts`
    a gather, then views that hide its rows     -> the views, then the gather, see `move_views`
    a factor or transpose, then a reduction     -> the reduction, then the factor or transpose, see `move_across`
    a dimension moved to the front, scattered   -> scattered where it stands, see `move_dims`

A graph without such a form is not copied. On the copy all forms are rewritten, and the fusions run. In the graph itself
only the forms whose node a fusion took are rewritten. The others stay as they were, and get the reason that the fusions
found.

The fusions decide by facts that are equal on all ranks, and so does this pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.forms import move_across, move_casts, move_dims, move_views
from ditron_inductor.passes.fuse.fusions import FUSIONS
from ditron_inductor.passes.graph import rewriting
from ditron_inductor.passes.graph.collectives import is_collective
from ditron_inductor.passes.graph.reasons import LEFT_ALONE, TRIED, Reason, ReasonCode
from ditron_inductor.passes.normalize import fold_batches, split_coalesced
from ditron_inductor.passes.normalize.share_gathers import share_gathers

# In the order in which they are rewritten: the finder of each after the rewrite of those before it.
GATHER_FORMS: tuple[tuple[Any, Callable[[fx.Node], Any]], ...] = (
    (move_casts, move_casts.find_narrowed),
    (move_views, move_views.find_moved),
)
REDUCTION_FORMS: tuple[tuple[Any, Callable[[fx.Node], Any]], ...] = (
    (move_dims, move_dims.find_moved),
    (move_across, move_across.find_moved),
)


def try_forms(graph: fx.Graph, *, options: Options) -> int:
    """Rewrites every form that a fusion then takes, and returns how many."""
    coalesced = [match for node in graph.nodes if (match := split_coalesced.find_coalesced(node)) is not None]
    folded = [node for node in graph.nodes if fold_batches.find_folded(node) is not None]
    starts = [node for node in graph.nodes if node.op == "call_function" and is_collective(node)]
    across = [node for node in starts if any(find(node) is not None for _, find in REDUCTION_FORMS)]
    if not coalesced and not across and not any(map(_gathers_otherwise, starts)) and not (folded and starts):
        return 0
    copy, twins = rewriting.copied(graph)
    matmuls = [_fold(copy, twins[node]) for node in folded]
    # The gathers of the copy, by what they are in the graph: a node, or a member of one.
    copies: dict[tuple[fx.Node, int | None], fx.Node] = {(node, None): twins[node] for node in starts}
    for match in coalesced:
        del copies[match.node, None]
        singles = _split(copy, twins[match.node])
        copies |= {(match.node, index): single for index, single in singles.items()}
    moved = {key: forms for key, node in copies.items() if (forms := _gathers_otherwise(node))}
    for key, forms in moved.items():
        copies[key] = _rewritten(copy, copies[key], forms)
    for node in across:
        _move(copy, twins[node])
    for fusion in FUSIONS:
        fusion(copy, options=options)
    remaining = set(copy.nodes)
    count = 0
    for bmm, mm in zip(folded, matmuls, strict=True):
        if mm not in remaining:
            _fold(graph, bmm)
            count += 1
    for node in across:
        if twins[node] not in remaining:
            _move(graph, node)
            count += 1
    for node in starts:
        tried = copies.get((node, None))
        if tried is not None and tried in remaining and folded and LEFT_ALONE in tried.meta:
            node.meta[TRIED] = tried.meta[LEFT_ALONE]
    taken = {key for key, node in copies.items() if node not in remaining}
    originals = {key: key[0] for key in taken if key[1] is None}
    for match in coalesced:
        members = {key: node for key, node in copies.items() if key[0] is match.node}
        alone = [node.meta[LEFT_ALONE] for node in members.values() if node in remaining]
        if alone:
            match.node.meta[LEFT_ALONE] = _strongest(alone)
        indices = [key[1] for key in members if key in taken and key[1] is not None]
        if indices:
            originals |= {(match.node, index): single for index, single in _split(graph, match.node, indices).items()}
            count += 1
    for key, forms in moved.items():
        if key in taken:
            _rewritten(graph, originals[key], forms)
            count += 1
    if coalesced:  # one collective may have gathered a tensor twice
        share_gathers(graph, options=options)
    return count


def _gathers_otherwise(node: fx.Node) -> tuple[Any, ...]:
    """Returns the other forms that a gather could have, as modules with a finder and a rewrite."""
    return tuple(form for form, find in GATHER_FORMS if find(node) is not None)


def _rewritten(graph: fx.Graph, node: fx.Node, forms: tuple[Any, ...]) -> fx.Node:
    """Rewrites the gather `node` into all these forms, and returns it."""
    for form, find in GATHER_FORMS:
        if form in forms:
            match = find(node)
            assert match is not None
            node = form.rewrite(graph, match)
    return node


def _fold(graph: fx.Graph, node: fx.Node) -> fx.Node:
    match = fold_batches.find_folded(node)
    assert match is not None
    return fold_batches.rewrite(graph, match)


def _move(graph: fx.Graph, node: fx.Node) -> None:
    for form, find in REDUCTION_FORMS:
        match = find(node)
        if match is not None:
            form.rewrite(graph, match)


def _split(graph: fx.Graph, node: fx.Node, taken: list[int] | None = None) -> dict[int, fx.Node]:
    """Splits off the members `taken`, or all members whose result is used."""
    match = split_coalesced.find_coalesced(node)
    assert match is not None
    if taken is None:
        taken = [index for index, result in enumerate(match.results) if result is not None]
    return split_coalesced.rewrite(graph, match, taken)


def _strongest(reasons: list[Reason]) -> Reason:
    """The first reason that names a matmul, if any does."""
    named = [reason for reason in reasons if reason.code != ReasonCode.NO_MATMUL.value]
    return (named or reasons)[0]
