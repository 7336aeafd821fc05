"""What `tile` kernels share that push their operand before they multiply: pieces of the send queue, where shards
lie.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ditron_inductor.core.layout import MAX_WORLD
from ditron_inductor.core.signals import arrive, data, publish, take_send, wait_credits
from ditron_inductor.core.trace import SEND, event, now
from ditron_inductor.lowering.host.launch import Launch

SEND_BLOCK = 8192
"""Elements that a program copies in one step; SEND_STEPS of them are one piece of the send queue."""
SEND_STEPS = 8
SENDERS = 16
"""Programs that start on the send queue: enough to fill the links, few enough not to be missed by the matmul."""
INTERPRETED_SEND_BLOCK = 512


def send_queue(launch: Launch) -> dict[str, int]:
    """What a kernel's HOW has of the send queue."""
    if launch.interpreted:
        return {"SEND_BLOCK": INTERPRETED_SEND_BLOCK, "SEND_STEPS": 1}
    return {"SEND_BLOCK": SEND_BLOCK, "SEND_STEPS": SEND_STEPS}


class QueuedPiece(NamedTuple):
    """Of the send queue: the peer that gets it, its chunk, and pointers to its `count` elements, here and in the peer's
    slot.
    """

    target: Any
    chunk: Any
    source: Any
    place: Any
    count: Any


@triton.jit
def push_piece(use, counters, piece, pieces, HOW: tl.constexpr, TRACE: tl.constexpr):
    """Push a QueuedPiece, one of `pieces` of its chunk, when the credits of all peers have come.

    Returns the next ticket of the send queue.
    """
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
    """Count a piece that was sent; the last one of a chunk publishes it."""
    # A piece without its credit does not come here, so its chunk is never published.
    if arrive(counters + chunk * MAX_WORLD + target, pieces):
        # Every piece of the chunk lies in the target's slot: its tiles of this chunk may start.
        publish(use, target, chunk)


@triton.jit
def shard_of(use, shard, source, slot_stride):
    """Pointer to the rows of `source`: the own shard where it is, a peer's in this rank's slot."""
    received = data(use, use.rank, shard.dtype.element_ty) + source.to(tl.int64) * slot_stride
    # The hint is true of both only where descriptors are used, which is the only place that needs it.
    return tl.where(source == use.rank, shard, received)
