"""Forms that are worth another one only if a fusion follows: tried on a copy of the graph, kept where one did.

    a collective of several tensors    -> single collectives, see `split_coalesced`

A graph without such a form is not copied. On the copy all of them are rewritten and the fusions run; in the graph those
are rewritten whose node a fusion took. The others stay as they were, and get the reason that the fusions found.

The fusions decide by facts that are equal on all ranks, so this does too.
"""

from __future__ import annotations

from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes import split_coalesced
from ditron_inductor.passes.all_gather_matmul import all_gather_matmul
from ditron_inductor.passes.matmul_all_reduce import matmul_all_reduce
from ditron_inductor.passes.matmul_reduce_scatter import matmul_reduce_scatter
from ditron_inductor.passes.reasons import LEFT_ALONE, Reason, ReasonCode

FUSIONS = (all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce)


def try_forms(graph: fx.Graph, *, options: Options) -> int:
    """Rewrites every form that a fusion takes then; returns how many."""
    coalesced = [match for node in graph.nodes if (match := split_coalesced.find_coalesced(node)) is not None]
    if not coalesced:
        return 0
    copy, twins = _copied(graph)
    singles = [_split_all(copy, twins[match.node]) for match in coalesced]
    for fusion in FUSIONS:
        fusion(copy, options=options)
    remaining = set(copy.nodes)
    count = 0
    for match, tried in zip(coalesced, singles, strict=True):
        taken = [index for index, single in tried.items() if single not in remaining]
        alone = [single.meta[LEFT_ALONE] for single in tried.values() if single in remaining]
        if alone:
            match.node.meta[LEFT_ALONE] = _strongest(alone)
        if taken:
            split_coalesced.rewrite(graph, match, taken)
            count += 1
    return count


def _copied(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of the graph, and its nodes by those of the original."""
    copy, twins = fx.Graph(), dict[fx.Node, fx.Node]()
    copy.output(copy.graph_copy(graph, twins))
    return copy, twins


def _split_all(graph: fx.Graph, node: fx.Node) -> dict[int, fx.Node]:
    match = split_coalesced.find_coalesced(node)
    assert match is not None
    taken = [index for index, result in enumerate(match.results) if result is not None]
    return split_coalesced.rewrite(graph, match, taken)


def _strongest(reasons: list[Reason]) -> Reason:
    """The first reason that names a matmul, if any does."""
    named = [reason for reason in reasons if reason.code != ReasonCode.NO_MATMUL.value]
    return (named or reasons)[0]
