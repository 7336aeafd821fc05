"""The option `ditron.strict`: a graph in which a collective beside a matmul could be fused, and is not, is an error.

No node changes. `ReasonCode.changeable` decides which reasons count. A fusion that the option `ditron.fusions` excludes
does not count. The reasons are equal on all ranks, so either all ranks raise or none does. A graph that raises is not
put into a cache.
"""

from __future__ import annotations

from torch import fx

from ditron_inductor.errors import DitronNotFused
from ditron_inductor.options import Options
from ditron_inductor.passes.graph.culprits import describe
from ditron_inductor.passes.graph.launches import is_task
from ditron_inductor.passes.graph.reasons import LEFT_ALONE, Reason, ReasonCode
from ditron_inductor.task.nodes import FUSIONS
from ditron_inductor.task.site_records import stopped_text

OF_EXPERTS = frozenset(
    {ReasonCode.DYNAMIC_TOKENS, ReasonCode.EXPERTS_SUM, ReasonCode.EXPERT_BIAS, ReasonCode.EXPERT_ENDS}
)


def find_not_fused(graph: fx.Graph, options: Options) -> list[fx.Node]:
    """The collectives that were left alone for a reason that a user could change."""
    left = [node for node in graph.nodes if LEFT_ALONE in node.meta and not _has_its_norm(node)]
    return [node for node in left if _counts(node.meta[LEFT_ALONE], options)]


def _has_its_norm(node: fx.Node) -> bool:
    """Returns whether a reduction of what experts return went into a node with its norm, as with few tokens it does."""
    return is_task(node) and ReasonCode(node.meta[LEFT_ALONE].code) in OF_EXPERTS


def _counts(reason: Reason, options: Options) -> bool:
    disabled = reason.pattern in FUSIONS and reason.pattern not in options.fusions
    return ReasonCode(reason.code).changeable and not disabled


def require_fusions(graph: fx.Graph, *, options: Options) -> int:
    """Raises `DitronNotFused` if asked to and a site is left alone for a reason that a user can change. Returns 0."""
    found = find_not_fused(graph, options) if options.strict else []
    if found:
        raise DitronNotFused(count=len(found), sites="".join(f"\n{_text(node)}" for node in found))
    return 0


def _text(node: fx.Node) -> str:
    reason: Reason = node.meta[LEFT_ALONE]
    stopped = stopped_text(node.name, describe(node).line, reason.code, reason.culprit)
    return f"{stopped}\n    {reason.text}"
