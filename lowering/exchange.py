"""The host's side of lowering/transfers.py: one call's kernels around its products and copies, by their meaning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ditron_inductor.device.workspace import Call
from ditron_inductor.lowering import transfers
from ditron_inductor.lowering.launch import Launch, ceil_div

BLOCK = 8192
"""Elements that a program copies or fills in one step; REDUCE_BLOCK: adds up."""
REDUCE_BLOCK = 4096
COPY_WARPS = 8
PROGRAMS_PER_SM = 2
INTERPRETED_BLOCK = 1024
INTERPRETED_PROGRAMS = 2
FILL_PROGRAMS = 8
"""Programs that end a use of the slot: few, as they do nothing but after a failure."""

FORWARD, BACKWARD = 1, -1
"""Whether piece i of `await_pieces` comes from rank + 1 + i or from rank - 1 - i."""


class Exchange:
    """The kernels of one call, launched on the current stream."""

    def __init__(self, launch: Launch, call: Call) -> None:
        self._launch = launch
        self._call = call
        self._world = launch.workspace.world_size
        self._words = (call.table, call.ctl)
        self._names = {"rank": launch.rank, "slot": call.slot, "site": call.site, "WORLD": self._world}

    def stage(self, shard: torch.Tensor, copy: torch.Tensor | None) -> None:
        """Put the contiguous `shard` into the own slot, and into `copy`, for all peers to read."""
        numel = shard.numel()
        block = self._block(BLOCK)
        transfers.stage[(self._programs(numel, block),)](
            shard,
            shard if copy is None else copy,
            *self._words,
            self._call.counters,
            numel=numel,
            COPY=copy is not None,
            BLOCK=block,
            num_warps=COPY_WARPS,
            **self._names,
        )

    def open(self) -> None:
        """Make sure that products may be written into the own slot."""
        transfers.open_slot[(1,)](*self._words, num_warps=1, **self._names)

    def publish(self, first: int, count: int, parts: int, row: int) -> None:
        """Tell their readers that pieces of the own slot are complete; see `transfers.publish_pieces`."""
        pieces = {"first": first, "count": count, "parts": parts, "row": row}
        transfers.publish_pieces[(1,)](*self._words, num_warps=1, **pieces, **self._names)

    def wait(self, first: int, count: int, parts: int, row: int, direction: int) -> None:
        """Wait for pieces in the peers' slots; see `transfers.await_pieces`."""
        pieces = {"first": first, "count": count, "parts": parts, "row": row, "step": direction % self._world}
        transfers.await_pieces[(1,)](*self._words, num_warps=1, **pieces, **self._names)

    def reduce(
        self,
        partials: torch.Tensor,
        out: torch.Tensor,
        *,
        average: bool,
        epilogue: Any,
        extras: Sequence[torch.Tensor],
        result: int | None = None,
        row: int = 0,
    ) -> None:
        """out [rows, N] = the epilogue of the sum of partials [W, rows, N]; see `transfers.reduce_partials`.

        result: where in the own slot it goes too, and `row` its flag; without it this ends the call.
        """
        block = self._block(REDUCE_BLOCK)
        transfers.reduce_partials[(self._programs(out.numel(), block),)](
            partials,
            out,
            tuple(extras),
            *self._words,
            self._call.counters,
            numel=out.numel(),
            N=out.shape[-1],
            stride=partials.stride(0),
            result=result or 0,
            row=row,
            AVERAGE=average,
            SHARE=result is not None,
            EPILOGUE=epilogue,
            BLOCK=block,
            num_warps=COPY_WARPS,
            **self._names,
        )

    def close(self, outs: Sequence[torch.Tensor]) -> None:
        """End the call; after a failure its contiguous outputs are NaN."""
        transfers.close_slot[(INTERPRETED_PROGRAMS if self._launch.interpreted else FILL_PROGRAMS,)](
            tuple(outs),
            tuple(out.numel() for out in outs),
            *self._words,
            NUM_OUTS=len(outs),
            BLOCK=self._block(BLOCK),
            num_warps=COPY_WARPS,
            **self._names,
        )

    def _block(self, block: int) -> int:
        return INTERPRETED_BLOCK if self._launch.interpreted else block

    def _programs(self, numel: int, block: int) -> int:
        most = INTERPRETED_PROGRAMS if self._launch.interpreted else PROGRAMS_PER_SM * self._launch.num_sms
        return max(1, min(ceil_div(numel, block), most))


def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """out = a @ b by the library. a [.., m, K], out [.., m, N] with the same leading dimensions, none or one; b [K, N].

    Any strides, with contiguous rows in out: the product is written where it belongs.
    """
    if out.numel() == 0:
        return
    if a.dim() == 2:
        torch.mm(a, b, out=out)
    else:
        torch.bmm(a, b.expand(a.shape[0], *b.shape), out=out)
