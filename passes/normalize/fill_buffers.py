"""A fresh buffer that is filled with the pieces of a gathered tensor, one after the other, becomes a cat of them.

Before, what `dist.all_gather(list(buffer.chunk(W)), x)` leaves behind:

    empty [W*S, K] -> slice_scatter(empty, slice(wait, 0, S), 0, S)
      -> slice_scatter(slice_scatter, slice(wait, S, 2*S), S, 2*S) -> ..

After:

    cat([slice(wait, 0, S), slice(wait, S, 2*S), ..])

It must not fire when
* the pieces leave a gap, overlap, or are written in another order than they lie in;
* the buffer is not fresh, not contiguous, or of another dtype, or is read before it is full.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.collectives import WAIT

aten = torch.ops.aten

EMPTIES: frozenset[object] = frozenset(
    {aten.empty.memory_format, aten.empty_strided.default, aten.new_empty.default, aten.empty_like.default}
)
MOVES: frozenset[object] = proofs.MAY_KEEP_ORDER | proofs.SLICES


@dataclass(frozen=True)
class Match:
    """The writes into `buffer`, in order, of `pieces` along `dim`; `reads` are views of it between them, all unused."""

    buffer: fx.Node
    writes: tuple[fx.Node, ...]
    pieces: tuple[fx.Node, ...]
    dim: int
    reads: tuple[fx.Node, ...]


def find_filled(node: fx.Node) -> Match | None:
    """Proves that `node` is the last write into a fresh buffer that is full then; None if it is not."""
    writes: list[fx.Node] = []
    buffer: fx.Node = node
    while buffer.target is aten.slice_scatter.default:
        writes.insert(0, buffer)
        buffer = proofs.arguments(buffer)["self"]
    whole = proofs.tensor(buffer)
    if not writes or buffer.target not in EMPTIES or whole is None or not proofs.row_major(whole):
        return None
    dim, position = proofs.arguments(node)["dim"] % whole.ndim, 0
    pieces: list[fx.Node] = []
    for write in writes:
        bound = proofs.arguments(write)
        piece = bound["src"]
        read, value = proofs.piece(piece), proofs.tensor(piece)
        start = 0 if bound["start"] is None else proofs.size(bound["start"])
        if read is None or value is None or read.source.target is not WAIT or value.dtype != whole.dtype:
            return None
        if bound["dim"] % whole.ndim != dim or bound["step"] != 1 or not proofs.known_equal(start, position):
            return None
        pieces.append(piece)
        position = position + value.shape[dim]
    reads: list[fx.Node] = []
    for base, write in zip([buffer, *writes], writes, strict=False):
        for user in base.users:
            if user is not write and not _is_unused(user, reads):
                return None
    full = proofs.known_equal(position, whole.shape[dim])
    return Match(buffer, tuple(writes), tuple(pieces), dim, tuple(reads)) if full else None


def _is_unused(node: fx.Node, reads: list[fx.Node]) -> bool:
    """Returns whether a node is a view whose elements nobody reads; adds it, and its own views, to `reads`."""
    reads.append(node)
    return node.target in MOVES and all(_is_unused(user, reads) for user in node.users)


def fill_buffers(graph: fx.Graph) -> int:
    """Makes a cat of every buffer that is proved to be filled; returns how many."""
    count = 0
    for node in graph.find_nodes(op="call_function", target=aten.slice_scatter.default):
        match = find_filled(node)
        if match is None:
            continue
        with graph.inserting_before(node):
            cat = graph.call_function(aten.cat.default, (list(match.pieces), match.dim))
        cat.meta.update(rewriting.copied_meta(node))
        node.replace_all_uses_with(cat)
        rewriting.erase_unused(graph, [match.buffer, *match.writes, *match.reads])
        count += 1
    return count
