"""One op in `python -m benchmarks.host`: its node, its operands, and the ways to call it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ditron_inductor.task.nodes import Policy, TaskNode

Call = Callable[[], object]


@dataclass(frozen=True)
class Bench:
    """node: with any strategy. operands: by name. baselines: what a program calls without the op."""

    node: TaskNode
    operands: Mapping[str, Any]
    baselines: Mapping[str, Call] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return self.node.kind

    def forced(self, strategy: str) -> TaskNode:
        """The node with a forced strategy."""
        return replace(self.node, policy=replace(self.node.policy, strategy=strategy))

    def arguments(self, strategy: str) -> tuple[list[Any], str, Any]:
        """Returns the arguments of the op."""
        from ditron_inductor.task import schema

        return schema.arguments(self.forced(strategy), **self.operands)

    def op(self, strategy: str) -> Call:
        """The op with a forced strategy, as a model calls it."""
        from ditron_inductor.task import schema

        op, arguments = schema.overload(self.kind), self.arguments(strategy)
        return lambda: op(*arguments)

    def in_a_graph(self, strategy: str) -> Call:
        """Returns the call that the code of a compiled graph makes, with operands of a form that is fixed: without
        gradients, as graphs run.
        """
        from ditron_inductor.runtime import site_call

        tensors, text, _ = self.arguments(strategy)
        call = site_call(self.kind, True, text)
        return lambda: call(*tensors)


def fields_of_site(kind: str, world_size: int, group_name: str, limits: tuple[int, float]) -> dict[str, Any]:
    """Returns the fields that all nodes have. limits: the most bytes of the workspace, and the most seconds of a wait.
    """
    policy = Policy("auto", *limits)
    return {"world_size": world_size, "group_name": group_name, "site": f"host/0:{kind}", "policy": policy}
