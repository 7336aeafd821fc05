"""The host's side of lowering/transfers.py: the kernels around the products and copies of a call, by their meaning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ditron_inductor.device.streams import current_handle
from ditron_inductor.device.workspace import Call
from ditron_inductor.lowering import transfers
from ditron_inductor.lowering.launch import Launch, ceil_div
from ditron_inductor.lowering.launcher import Arguments, Launcher

BLOCK = 8192
REDUCE_BLOCK = 4096
"""Elements that a program copies or fills in one step, and that it adds up."""
COPY_WARPS = 8
PROGRAMS_PER_SM = 2
INTERPRETED_BLOCK = 1024
INTERPRETED_PROGRAMS = 2
FILL_PROGRAMS = 8
"""Programs that end a use of the slot: few, as they do nothing but after a failure."""

PIECES = ("first", "count", "parts", "row")


class Kernels:
    """The kernels at one site with operands of one form, which its calls have in common.

    Each call of a kernel has the same sizes, but for pieces and rows; `reduce` has a launcher for each number of rows.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.device_index: int = launch.workspace.device.index or 0
        self._launchers: dict[object, Launcher] = {}

    def launcher(self, key: object, kernel: Any, numbers: tuple[str, ...], words: tuple[str, ...]) -> Launcher:
        """The launcher kept under `key`."""
        found = self._launchers.get(key)
        if found is None:
            workspace = self.launch.workspace
            found = Launcher(
                kernel,
                workspace.device,
                numbers=("slot", "site", *numbers),
                words=words,
                allocator=workspace.shared.scratch,
            )
            self._launchers[key] = found
        return found


class Exchange:
    """The kernels of one call. Each is launched on the current stream."""

    def __init__(self, kernels: Kernels, call: Call) -> None:
        launch = kernels.launch
        self._kernels = kernels
        self._call = call
        self._world = launch.workspace.world_size
        self._rank = launch.rank
        self._interpreted = launch.interpreted
        self._num_sms = launch.num_sms

    def stage(self, shard: torch.Tensor, copy: torch.Tensor | None) -> None:
        """Put the contiguous `shard` into the own slot, and into `copy`, for all peers to read."""

        def arguments() -> Arguments:
            numel, block = shard.numel(), self._block(BLOCK)
            values = {"numel": numel, "COPY": copy is not None, "BLOCK": block}
            return self._arguments(self._programs(numel, block), COPY_WARPS, values)

        tensors = {"shard": shard, "copy": shard if copy is None else copy}
        self._launch("stage", transfers.stage, arguments, tensors=tensors, counted=True)

    def open(self) -> None:
        """Make sure that products may be written into the own slot."""
        self._launch("open", transfers.open_slot, self._alone)

    def publish(self, first: int, count: int, parts: int, row: int) -> None:
        """Tell their readers that pieces of the own slot are complete; see `transfers.publish_pieces`."""
        self._launch("publish", transfers.publish_pieces, self._alone, PIECES, (first, count, parts, row))

    def wait(self, first: int, count: int, parts: int, row: int) -> None:
        """Wait for pieces in the peers' slots; see `transfers.await_pieces`."""
        self._launch("wait", transfers.await_pieces, self._alone, PIECES, (first, count, parts, row))

    def wait_all(self, row: int) -> None:
        """Wait for the flag `row` of every peer."""
        self._launch("wait all", transfers.await_all, self._alone, ("row",), (row,))

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

        def arguments() -> Arguments:
            numel, block = out.numel(), self._block(REDUCE_BLOCK)
            values = {
                "numel": numel,
                "N": out.shape[-1],
                "stride": partials.stride(0),
                "result": result or 0,
                "AVERAGE": average,
                "SHARE": result is not None,
                "EPILOGUE": epilogue,
                "BLOCK": block,
            }
            return self._arguments(self._programs(numel, block), COPY_WARPS, values)

        # Never empty: an epilogue that wants nothing gets what it does not look at.
        tensors = {"partials": partials, "out": out, "extras": tuple(extras) or (out,)}
        key = "reduce", out.shape[0], result, epilogue
        self._launch(key, transfers.reduce_partials, arguments, ("row",), (row,), tensors, counted=True)

    def close(self, outs: Sequence[torch.Tensor]) -> None:
        """End the call; after a failure its contiguous outputs are NaN."""

        def arguments() -> Arguments:
            numels = tuple(out.numel() for out in outs)
            values = {"numels": numels, "NUM_OUTS": len(outs), "BLOCK": self._block(BLOCK)}
            programs = INTERPRETED_PROGRAMS if self._interpreted else FILL_PROGRAMS
            return self._arguments(programs, COPY_WARPS, values)

        self._launch("close", transfers.close_slot, arguments, tensors={"outs": tuple(outs)})

    def _alone(self) -> Arguments:
        """One program of one warp."""
        return self._arguments(1, 1, {})

    def _arguments(self, programs: int, num_warps: int, values: dict[str, Any]) -> Arguments:
        return Arguments(programs, {**values, "rank": self._rank, "WORLD": self._world, "num_warps": num_warps})

    def _launch(
        self,
        key: object,
        kernel: Any,
        arguments: Callable[[], Arguments],
        names: tuple[str, ...] = (),
        numbers: tuple[int, ...] = (),
        tensors: Mapping[str, Any] | None = None,
        *,
        counted: bool = False,
    ) -> None:
        call = self._call
        words = (call.table, call.ctl, call.counters) if counted else (call.table, call.ctl)
        launcher = self._kernels.launcher(key, kernel, names, ("table", "ctl", "counters")[: len(words)])
        stream = 0 if self._interpreted else current_handle(self._kernels.device_index)
        launcher(stream, arguments, (call.slot, call.site, *numbers), words, tensors or {})

    def _block(self, block: int) -> int:
        return INTERPRETED_BLOCK if self._interpreted else block

    def _programs(self, numel: int, block: int) -> int:
        most = INTERPRETED_PROGRAMS if self._interpreted else PROGRAMS_PER_SM * self._num_sms
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
