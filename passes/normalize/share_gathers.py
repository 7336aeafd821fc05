"""Equal gathers of one tensor become one.

    x -> all_gather -> wait -> split .. cat -> a            x -> all_gather -> wait -> split .. cat -> a
    x -> all_gather -> wait -> split .. cat -> b                                                    -> b

Inference graphs hold one gather for each consumer. Gathers are equal if they gather the same node over the same group
along the same dimension. The result is exact: the same bits are sent once. The matmuls behind the gathers are fused
with the one that remains.

Whether two gathers read the same node depends on the side of the shard, which may differ between ranks. If a dimension
does not divide, DTensor pads the last rank's shard separately for each gather. Then this rank alone would gather two
tensors, and the others one. But such a gather is cut afterwards on every rank. So a gather is shared only if all its
views and chunks together take the whole of it, which means that no rank pads.

It must not fire when
* a part of the gathered tensor is taken: chunks that are not all put together again, or a slice;
* both results are returned, as they are or through views: the caller would get one piece of memory twice;
* the tensor is written to between the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.collectives import ALL_GATHER, Collective, collectives, read_collective
from ditron_inductor.passes.graph.gathered import cats_of_pieces
from ditron_inductor.passes.graph.reasons import refused

aten = torch.ops.aten
PIECES: frozenset[object] = frozenset(
    {aten.select.int, aten.diagonal.default, aten.unbind.int, aten.as_strided.default}
)
"""Further ops that take a part of a tensor."""


@dataclass(frozen=True)
class Match:
    """A gather of which all is used: `gathered` holds the tensor along `dim`; `steps` lead there from the gather."""

    collective: Collective
    gathered: fx.Node
    dim: int
    steps: tuple[fx.Node, ...]


def find_whole_gather(node: fx.Node) -> Match | None:
    """Proves that nothing takes only a part of what `node` gathers, so that no rank padded its shard, or None."""
    collective = read_collective(node)
    if refused(collective):
        return None
    wait = collective.wait
    match = Match(collective, wait, 0, (node, wait))
    users = list(wait.users)
    if users and all(_is_piece(user) for user in users):
        chunks = _put_together(collective)
        if chunks is None:
            return None
        match = Match(collective, chunks.result, chunks.cat_dim, (node, wait, *chunks.between, chunks.result))
    return match if not any(_is_piece(user) for view in aliases(match.gathered) for user in view.users) else None


def _is_piece(node: fx.Node) -> bool:
    """Returns whether a node takes a part of a tensor, as far as is known."""
    return node.target in proofs.SLICES | PIECES and not proofs.keeps_order(node)


def _put_together(collective: Collective) -> proofs.Regrouped | None:
    """The chunks of a gather along an inner dimension, if they are all put together, once, and used by nothing else."""
    cats = cats_of_pieces(collective.wait)
    if len(cats) != 1:
        return None
    chunks = proofs.regrouped(cats[0], collective.world_size)
    if refused(chunks) or chunks.source is not collective.wait or chunks.split_dim != 0:
        return None
    return chunks if all(user in chunks.between for user in collective.wait.users) else None


def aliases(node: fx.Node) -> Iterator[fx.Node]:
    """`node` and what may be a view of it, of any kind."""
    return proofs.reached([node], lambda alias: [user for user in alias.users if user.target in proofs.MAY_KEEP_ORDER])


def can_replace(match: Match, first: Match) -> bool:
    """Returns whether the result of the equal gather `first` may stand for that of `match`."""
    if proofs.is_returned(match.gathered) and proofs.is_returned(first.gathered):
        return False
    return not _written_between(first.collective, match.collective)


def _written_between(first: Collective, second: Collective) -> bool:
    """Returns whether an op between the two gathers writes into the memory of their operand."""
    begin, end = sorted((first.node, second.node))
    return any(begin < writer < end for writer in proofs.writers(first.operand))


def share_gathers(graph: fx.Graph, *, options: Options) -> int:
    """Replaces several equal gathers by one, and returns how many were removed."""
    if not options.fusions:
        return 0
    count = 0
    kept: dict[tuple[fx.Node, int, str], list[Match]] = {}
    matches = [match for node in collectives(graph, ALL_GATHER) if (match := find_whole_gather(node)) is not None]
    for match in sorted(matches, key=lambda found: found.gathered):
        # Read the operand again: a gather of a gather may have been found before the inner gathers became one.
        operand = proofs.operand(match.collective.node)
        firsts = kept.setdefault((operand, match.dim, match.collective.group_name), [])
        first = next((earlier for earlier in firsts if can_replace(match, earlier)), None)
        if first is None:
            firsts.append(match)
            continue
        match.gathered.replace_all_uses_with(first.gathered)
        rewriting.erase_unused(graph, match.steps)
        count += 1
    return count
