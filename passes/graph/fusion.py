"""What most fusions have in common: each site is proved, or left alone with a reason."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.graph.collectives import collectives
from ditron_inductor.passes.graph.reasons import LEFT_ALONE, ReasonCode, Refused, leave_alone, refused
from ditron_inductor.task.nodes import TaskNode


@dataclass(frozen=True)
class Fusion:
    """The pass that makes Task nodes of one kind, `node`, of calls of these ops: collectives, or a backward that feeds
    them. It is called as every pass is. find: a function of such a call, which returns a match, or why there is none.
    rewrite: a function of the graph, the match and the options, which replaces the match by one op call and returns
    that. leave: what is done with a call that is left alone.
    """

    node: type[TaskNode]
    ops: tuple[object, ...]
    find: Callable[..., Any]
    rewrite: Callable[[fx.Graph, Any, Options], fx.Node]
    leave: Callable[[fx.Node, str, Refused], None] = leave_alone

    @property
    def __name__(self) -> str:
        return self.node.kind

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        # By name, as functions are pickled: the ops of torch cannot be.
        return _by_name, (self.rewrite.__module__, self.__name__)

    def __call__(self, graph: fx.Graph, *, options: Options) -> int:
        """Fuses every call that matches; returns how many did. The others get a reason."""
        return self.fuse(graph, [node for op in self.ops for node in collectives(graph, op)], options)

    def fuse(self, graph: fx.Graph, nodes: list[fx.Node], options: Options, *given: Any) -> int:
        """Does what a call does, for these nodes alone. given: what `find` takes beside the node."""
        count = 0
        for node in nodes:
            match = self.find(node, *given)
            if not refused(match) and self.node.kind not in options.fusions:
                match = ReasonCode.DISABLED
            if refused(match):
                self.leave(node, self.node.kind, match)
                continue
            node.meta.pop(LEFT_ALONE, None)
            self.rewrite(graph, match, options)
            count += 1
        return count


def _by_name(module: str, name: str) -> Fusion:
    found: Fusion = getattr(importlib.import_module(module), name)
    return found
