"""Which ranks have not begun the call in which a wait expired.

The record of an expired wait names one rank, which may itself wait for another: the owner of a sum waits for the
partial results of a rank that stopped, and the readers of the sum wait for the owner as long. So the host looks at the
credits, once, after the failure. Every launch, of any kind, first gives all peers the credit of the use before it. Who
has given fewer credits than others has not come as far as they have.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch

from ditron_inductor.core import layout as words
from ditron_inductor.device import slot_layout
from ditron_inductor.device.groups import Group
from ditron_inductor.device.lanes import HIGH_PRIORITY
from ditron_inductor.device.ring import Generation

PATIENCE_S = 1.0
PAUSE_S = 1.0e-3


def not_begun(credits: Sequence[Sequence[int]], rank: int, slot: int, epoch: int) -> list[int]:
    """Returns ranks that have not begun the launch which is use `epoch` of `slot`, or failed before it. A rank that is
    not returned may be one too, for instance if no peer has begun.

    credits: for each slot the epochs of the credits that the ranks have given to `rank`, which waits in this launch.
    """
    # Who has given the credit of this use is in a later launch. The others are in this launch or before it.
    given = {
        peer: sum(of_slot[peer] for of_slot in credits)
        for peer, last in enumerate(credits[slot])
        if peer != rank and slot_layout.is_behind(last, epoch)
    }
    return [
        peer
        for peer, count in given.items()
        # The sum counts launches. And the credit of the slot's last use is given in this launch at the latest.
        if any(slot_layout.is_behind(count, other) for other in given.values())
        or slot_layout.is_behind(credits[slot][peer], epoch - 1)
    ]


class Look:
    """Reads what the peers have written for this rank, after a failure, on a device that may never become idle."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # This is made before anything fails: to pin memory may wait for a kernel of another library that never ends.
        shape = [1 + slot_layout.NUM_SLOTS, slot_layout.MAX_WORLD]
        self._found = torch.zeros(shape, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")

    def not_begun(self, rings: Iterable[Generation], group: Group, slot: int, epoch: int) -> list[int]:
        """Returns the result of `not_begun` for the ring in which a wait failed, and nothing if it cannot be read."""
        try:
            for ring in rings:
                found = self._read(ring)
                if found is not None and found[0][words.POISON.value] != 0:
                    credits = [[slot_layout.unpack(word)[1] for word in row[: group.world_size]] for row in found[1:]]
                    return not_begun(credits, group.rank, slot, epoch)
        except RuntimeError:
            # The device itself has failed, which must not hide the error that is about to be raised.
            pass
        return []

    def _read(self, ring: Generation) -> list[list[int]] | None:
        """Returns the first control words and the credits of each slot, or None if they do not come soon."""
        rows = [ring.ctl[: slot_layout.MAX_WORLD], *(ring.credits(slot) for slot in range(slot_layout.NUM_SLOTS))]
        if self._device.type != "cuda":
            return [row.tolist() for row in rows]
        if torch.cuda.is_current_stream_capturing():
            return None
        # On a stream of its own: what is queued on the current one may wait for the peer for ever.
        stream = torch.cuda.Stream(self._device, priority=HIGH_PRIORITY)
        with torch.cuda.stream(stream):
            for place, row in zip(self._found, rows, strict=True):
                place.copy_(row, non_blocking=True)
            done = stream.record_event()
        end = time.monotonic() + PATIENCE_S
        while not done.query():
            if time.monotonic() > end:
                return None
            time.sleep(PAUSE_S)
        return self._found.tolist()


assert words.POISON.value < slot_layout.MAX_WORLD <= words.SLOT_CTL.value
