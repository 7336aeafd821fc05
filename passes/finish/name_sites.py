"""Gives every Task node its site: the name that flags carry, that errors print and that all ranks agree on.

    matmul_all_reduce(.., site="")  ->  matmul_all_reduce(.., site="3f9c01ab/2:matmul_all_reduce")

A site is `region/number:kind`. The region is a hash of the launches of the node's group in this graph, by their wire
facts (see wire_facts.py): kind of collective, reduction, dtype. The number counts these launches, including those that
were left alone. So two ranks have the same names even if only one of them has a bias, an epilogue or a collective
without a matmul. Sizes are not part of the name: one rank may compile a graph with a symbol where another has a number,
and DTensor shards unevenly. Group names are not either, because the ranks of a tensor-parallel group are in different
data-parallel groups.

Behind all passes `add_key` appends `@key` to the names. By this key a site finds what the ranks agreed on for its
graph. It also tells all sites whether torch captures the graph, which is so for the calls of users too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from ditron_inductor.device.facts import GraphFacts, LaunchFacts
from ditron_inductor.options import Options
from ditron_inductor.passes.finish.wire_facts import launches_of
from ditron_inductor.passes.graph import rewriting
from ditron_inductor.passes.graph.launches import is_task
from ditron_inductor.task.policy import KEY_MARK, shared_site
from ditron_inductor.task.schema import node_from_call


def find_sites(graph: fx.Graph) -> tuple[str, list[fx.Node]]:
    """Returns (the region of the group with Task nodes, or a hash of the regions of several; these nodes in order)."""
    regions = [region_of([facts for _, facts in launches]) for launches in _of_tasks(graph)]
    return regions[0] if len(regions) == 1 else _digest(regions), [node for node in graph.nodes if is_task(node)]


def region_of(launches: Sequence[LaunchFacts]) -> str:
    """Returns eight hex digits of a hash of the facts that one group's launches share with those of its other ranks."""
    return _digest([launch.wire for launch in launches])


def name_sites(graph: fx.Graph, *, options: Options) -> int:
    """Names all sites of `graph`, and returns how many names changed."""
    changed = 0
    for launches in _of_tasks(graph):
        region = region_of([facts for _, facts in launches])
        for number, (node, _) in enumerate(launches):
            if not is_task(node):
                continue
            task = node_from_call(node.target, node.args)
            site = f"{region}/{number}:{task.kind}"
            if shared_site(task.site) != site:
                rewriting.change_task(node, replace(task, site=site))
                changed += 1
    return changed


def add_key(graph: fx.Graph, facts: GraphFacts) -> None:
    """Appends the key of the graph, whose facts are given, to the names of its sites, and sets `replayed` of their
    policies.
    """
    key, replayed = facts.key, facts.replayed
    for node in graph.nodes:
        if is_task(node):
            task = node_from_call(node.target, node.args)
            policy = replace(task.policy, replayed=replayed, trials=task.policy.trials and not replayed)
            rewriting.change_task(node, replace(task, site=f"{shared_site(task.site)}{KEY_MARK}{key}", policy=policy))


def _of_tasks(graph: fx.Graph) -> list[list[tuple[fx.Node, LaunchFacts]]]:
    return [launches for launches in launches_of(graph).values() if any(is_task(node) for node, _ in launches)]


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]
