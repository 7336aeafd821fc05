"""What `tile` kernels share that push their operand before they multiply: pieces of the send queue, where shards
lie.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ditron_inductor.core.layout import MAX_WORLD
from ditron_inductor.core.signals import arrive, data, publish

SEND_BLOCK = 8192
"""Elements that a program copies in one step; SEND_STEPS of them are one piece of the send queue."""
SEND_STEPS = 8
SENDERS = 16
"""Programs that start on the send queue: enough to fill the links, few enough not to be missed by the matmul."""
INTERPRETED_SEND_BLOCK = 512


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
