"""The part of a graph around a site, for the pictures of `explain`: what the site is computed from, and what reads it.

Nodes that compute nothing are left out: outputs that are picked from a call, waits, and what only orders launches. A
reader of such a node is drawn as a reader of the node whose value it passes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import getitem

import torch
from torch import fx

from ditron_inductor.passes.graph.collectives import WAIT
from ditron_inductor.passes.graph.culprits import describe
from ditron_inductor.passes.graph.launches import is_task
from ditron_inductor.task.schema import overload
from ditron_inductor.task.site_records import PictureRecord

DEPTH = 3
MOST_NODES = 7
"""How many steps from a site a picture goes, and how many nodes it has on either side of the site."""


def near(site: fx.Node) -> tuple[PictureRecord, ...]:
    """Returns the nodes within DEPTH steps of a site, of many the nearest, in graph order. The graph's output, which
    reads what a backward needs from everywhere, is drawn as a reader of the site alone.
    """
    found = {site, *_within(site, _sources), *_within(site, _readers)}
    records = [
        PictureRecord(describe(node), tuple(given.name for given in _sources(node) if given in found))
        for node in sorted(found)
    ]
    output = site.graph.output_node()
    if site in _sources(output):
        records.append(PictureRecord(describe(output), (site.name,)))
    return tuple(records)


def _within(site: fx.Node, step: Callable[[fx.Node], Iterator[fx.Node]]) -> list[fx.Node]:
    found: dict[fx.Node, None] = {}
    edge = [site]
    for _ in range(DEPTH):
        edge = [other for node in edge for other in step(node) if other not in found]
        found |= dict.fromkeys(edge)
    return list(found)[:MOST_NODES]


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the nodes that are drawn as the operands of a node. The token of a Task node is none of them."""
    given = node.args[0] if is_task(node) else node.all_input_nodes
    assert isinstance(given, (list, tuple))
    drawn = [_drawn(operand) for operand in given if isinstance(operand, fx.Node)]
    yield from dict.fromkeys(operand for operand in drawn if operand is not None)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the nodes that are drawn as readers of a node."""
    for user in node.users:
        drawn = _drawn(user)
        if user.op == "output":
            continue
        if drawn is user:
            yield user
        elif drawn is not None:
            yield from _readers(user)


def _drawn(node: fx.Node) -> fx.Node | None:
    """Returns the node whose value a node is or passes on; None if it only orders launches."""
    while True:
        source = node.args[0] if node.args else None
        if node.target is getitem and isinstance(source, fx.Node):
            if is_task(source) and node.args[1] == len(source.meta["val"]) - 1:
                return None
            node = source
        elif node.target in (WAIT, overload("after")) and isinstance(source, fx.Node):
            node = source
        elif node.target is torch.ops.aten.where.self and node.args[1] is node.args[2]:
            # The form in which an operand of a collective is ordered that is sent from a copy.
            value = node.args[1]
            assert isinstance(value, fx.Node)
            node = value
        elif node.target in (overload("token_of"), overload("after_"), overload("meet")):
            return None
        else:
            return node
