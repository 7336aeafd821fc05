"""The send queue of the `tile` kernels that push their operand to the peers before they multiply."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ditron_inductor.core.layout import MAX_WORLD
from ditron_inductor.core.signals import arrive, data, publish, take_send, wait_credits
from ditron_inductor.core.trace import SEND, event, now
from ditron_inductor.lowering.host.launch import Launch

SEND_BLOCK = 8192
"""The elements that a program copies in one step. SEND_STEPS such steps copy one piece of the send queue."""
SEND_STEPS = 8
SENDERS = 16
"""The number of programs that begin with the send queue: enough to fill the links, and too few to slow the matmul."""
INTERPRETED_SEND_BLOCK = 512


def send_queue(launch: Launch) -> dict[str, int]:
    """Returns the fields of a kernel's HOW that describe the send queue."""
    if launch.interpreted:
        return {"SEND_BLOCK": INTERPRETED_SEND_BLOCK, "SEND_STEPS": 1}
    return {"SEND_BLOCK": SEND_BLOCK, "SEND_STEPS": SEND_STEPS}


class QueuedPiece(NamedTuple):
    """A piece of the send queue: the rank `target` that gets it, the number of its chunk, and pointers to its `count`
    elements, `source` on this rank and `place` in the slot of the target.
    """

    target: Any
    chunk: Any
    source: Any
    place: Any
    count: Any


@triton.jit
def push_piece(use, counters, piece, pieces, HOW: tl.constexpr, TRACE: tl.constexpr):
    """Pushes one of the `pieces` of its chunk after all peers' credits. Returns the next ticket of the send queue."""
    began = now(TRACE)
    if wait_credits(use, HOW.WORLD) != 0:
        for i in range(HOW.SEND_STEPS):
            offsets = i * HOW.SEND_BLOCK + tl.arange(0, HOW.SEND_BLOCK)
            inside = offsets < piece.count
            tl.store(piece.place + offsets, tl.load(piece.source + offsets, mask=inside), mask=inside)
        sent_piece(use, counters, piece.target, piece.chunk, pieces)
    event(use, began, piece.chunk, piece.target, SEND, TRACE)
    return take_send(use)


@triton.jit
def sent_piece(use, counters, target, chunk, pieces):
    """Counts a piece that was sent. The last piece of a chunk publishes the chunk."""
    # Nobody calls this for a piece without its credits, so a chunk that lacks a piece is never published.
    if arrive(counters + chunk * MAX_WORLD + target, pieces):
        # Every piece of the chunk lies in the target's slot, so the target's tiles of this chunk may start.
        publish(use, target, chunk)


@triton.jit
def shard_of(use, shard, source, slot_stride):
    """Returns a pointer to the rows of rank `source`: in `shard` for this rank, in this rank's slot for a peer."""
    received = data(use, use.rank, shard.dtype.element_ty) + source.to(tl.int64) * slot_stride
    # The alignment hint of `data` is true of `shard` too where descriptors are used. Nothing else needs it.
    return tl.where(source == use.rank, shard, received)
