"""One line is logged about what was fused, when the first graph that holds collectives is compiled.

    ditron: 2 of 3 collectives of the first graph fused (1 all_gather_matmul, 1 matmul_reduce_scatter), left alone: ..

It is a warning of the logger `ditron_inductor.passes.finish.summary`, because warnings are shown even if logging is not
configured; torch's own hints are warnings too. The line comes once per process, on rank 0 only. For later graphs, such
as backward graphs, the totals are logged at debug level. A graph from a cache runs no pass and is not counted. The
option `ditron.summary` turns the line off.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter

import torch.distributed as dist
from torch import fx

from ditron_inductor.passes.graph.launches import is_task, launches_collective
from ditron_inductor.passes.graph.reasons import LEFT_ALONE

log = logging.getLogger(__name__)


class Summary:
    """Counts the collectives in the graphs of a process: those that were fused, by kind, and those left alone, by
    reason.

    The counts are used for the text of the log only. Backward graphs are compiled by threads of their own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._graphs = 0
        self._fused: Counter[str] = Counter()
        self._left: Counter[str] = Counter()

    def add(self, graph: fx.Graph) -> None:
        """Counts the sites of a rewritten graph, and logs the totals: the first time as a warning."""
        fused = Counter(_name(node) for node in graph.nodes if is_task(node))
        left = Counter(_reason(node) for node in graph.nodes if launches_collective(node))
        if not fused and not left:
            return
        with self._lock:
            self._graphs += 1
            self._fused += fused
            self._left += left
            level = logging.WARNING if self._graphs == 1 else logging.DEBUG
            text = self.text()
        if not dist.is_initialized() or dist.get_rank() == 0:
            log.log(level, "%s", text)

    def text(self) -> str:
        """Returns the line that is logged."""
        fused, left = self._fused.total(), self._left.total()
        graphs = "the first graph" if self._graphs == 1 else f"{self._graphs} graphs"
        text = f"ditron: {fused} of {fused + left} collectives of {graphs} fused"
        text += f" ({_counts_text(self._fused)})" if fused else ""
        if left:
            text += f", left alone: {_counts_text(self._left)}; ditron_inductor.explain(model)(*inputs) says where"
        return text


def _counts_text(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


def _name(node: fx.Node) -> str:
    return str(node.target).split(".")[1]


def _reason(node: fx.Node) -> str:
    return str(node.meta[LEFT_ALONE].code) if LEFT_ALONE in node.meta else "no_pattern"


summary = Summary()
"""The summary of this process."""
