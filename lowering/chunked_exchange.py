"""The host's side of lowering/transfers.py: the launches around the products and copies of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton

from ditron_inductor.device.lanes import HERE, Lane, Transfer
from ditron_inductor.device.workspace import Call
from ditron_inductor.lowering import transfers
from ditron_inductor.lowering.epilogues import PLAIN_SUM, Arrangement, Runs
from ditron_inductor.lowering.host.launch import WORDS, Launch, ceil_div, pointers_of
from ditron_inductor.lowering.host.launcher import Arguments, Bound, Launcher
from ditron_inductor.lowering.host.tracing import takes_part
from ditron_inductor.lowering.norms.rows import block_of, constants_of, warps_of
from ditron_inductor.lowering.norms.stage_norm import How, stage_norm
from ditron_inductor.task.nodes import ShardNorm

BLOCK = 8192
REDUCE_BLOCK = 4096
"""The elements that a program copies or fills in one step (BLOCK), or adds up in one step (REDUCE_BLOCK)."""
COPY_WARPS = 8
PROGRAMS_PER_SM = 2
NORM_WARPS_PER_SM = 32
"""The warps on an SM that normalise rows: as many as have registers, because each waits for sums of its own."""
INTERPRETED_BLOCK = 1024
INTERPRETED_PROGRAMS = 2
FILL_PROGRAMS = 8
"""The programs that end a use of the slot. They are few, because they have work only after a failure."""
BIASED_BATCHES = 4
BIASED_OPERATIONS = 8e9
"""Products with a bias are computed one by one if there are at most this many batches, and each product has at least
this many operations. With more batches, or smaller ones, the launches would take longer than the bias.
"""

PIECES = ("first", "count", "parts", "row")


class Kernels:
    """The kernels that the calls of one site with operands of one form have in common. There is a launcher for each
    kernel, and for `reduce` one for each number of rows, because all else about the sizes of a launcher's calls is
    fixed except pieces and flag rows. Launches with time stamps have launchers of their own.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.launchers: dict[object, Launcher] = {}

    def launcher(self, key: object, kernel: Any, numbers: tuple[str, ...]) -> Launcher:
        """Returns the launcher that is kept under `key`; makes it if there is none."""
        found = self.launchers.get(key)
        if found is None:
            workspace = self.launch.workspace
            found = Launcher(
                kernel,
                workspace.device,
                numbers=numbers,
                words=WORDS,
                allocator=workspace.shared.scratch,
            )
            self.launchers[key] = found
        return found


class ChunkedExchange:
    """The kernels of the calls that use one slot. Each method returns a launch, which may be kept for all these calls:
    a function of the stream's handle, and of the tensors with which the method's description begins.
    """

    def __init__(self, kernels: Kernels, call: Call) -> None:
        launch = kernels.launch
        self._kernels = kernels
        self._words = (pointers_of(call.generation, call.slot, call.site),)
        self._world = launch.workspace.world_size
        self._rank = launch.rank
        self._interpreted = launch.interpreted
        self._num_sms = launch.num_sms

    def stage(self, numel: int, *, copied: bool, count: int = 1) -> Bound:
        """(shards, copies): copies `shards`, a tuple of `count` contiguous tensors of `numel` elements, one behind the
        other into this rank's slot, for all peers to read. copied: copies them into the tuple `copies` too. Otherwise
        `copies` is any tuple of such tensors, for instance the shards.
        """

        def arguments() -> Arguments:
            # A step copies this many elements of all shards together.
            block = self._block(BLOCK // triton.next_power_of_2(count))
            values = {"numel": numel, "COPY": copied, "BLOCK": block}
            return self._arguments(self._programs(numel, block), COPY_WARPS, values)

        return self._bound("stage", transfers.stage, arguments, tensors=("shards", "copies"))

    def stage_norm(self, rows: int, columns: int, prologue: ShardNorm, *, copied: bool) -> Bound:
        """(x, given, outputs): does what `stage` does, with norm(x) of x [rows, columns]; see `stage_norm.stage_norm`.
        copied: stores the norm as the first of `outputs` too.
        """

        def arguments() -> Arguments:
            block = block_of(columns)
            tile = max(1, self._block(REDUCE_BLOCK) // block)
            warps = warps_of(tile * block)
            values = {
                "M": rows,
                "N": columns,
                "rank": self._rank,
                "HOW": How(self._world, copied, tile, block),
                **constants_of(prologue, stores_reduced=False),
                "num_warps": warps,
            }
            return Arguments(self._programs(rows, tile, NORM_WARPS_PER_SM // warps), values)

        tensors = ("x", "given", "outputs")
        return self._bound("stage norm", stage_norm, arguments, tensors=tensors)

    def open(self) -> Bound:
        """Waits until products may be written into this rank's slot; see `transfers.open_slot`."""
        return self._bound("open", transfers.open_slot, self._alone)

    def publish(self, first: int, count: int, parts: int, row: int) -> Bound:
        """Tells their readers that pieces in this rank's slot are complete; see `transfers.publish_pieces`."""
        return self._bound("publish", transfers.publish_pieces, self._alone, PIECES, (first, count, parts, row))

    def wait(self, first: int, count: int, parts: int, row: int) -> Bound:
        """Waits for pieces in the peers' slots; see `transfers.await_pieces`."""
        return self._bound("wait", transfers.await_pieces, self._alone, PIECES, (first, count, parts, row))

    def wait_all(self, row: int) -> Bound:
        """Waits for the flag `row` of every peer."""
        return self._bound("wait all", transfers.await_all, self._alone, ("row",), (row,))

    def reduce(
        self,
        rows: int,
        columns: int,
        *,
        stride: int,
        average: bool,
        arrangement: Arrangement = PLAIN_SUM,
        result: int | None = None,
        row: int = 0,
    ) -> Bound:
        """(partials, extras, outs): adds up the partials [W, rows, columns], which lie `stride` elements apart, and
        computes the outputs [rows, columns]; see `transfers.reduce_partials`. `extras` must not be empty. result: the
        element of this rank's slot where the sum is stored too, with flag row `row`; None if the launch ends the use of
        the slot.
        """

        def arguments() -> Arguments:
            numel, block = rows * columns, self._block(REDUCE_BLOCK)
            values = {
                "sizes": transfers.Partials(numel, columns, stride, result or 0),
                "rank": self._rank,
                "HOW": transfers.How(self._world, average, result is not None, block),
                "EPILOGUE": arrangement.function,
                "num_warps": COPY_WARPS,
            }
            return Arguments(self._programs(numel, block), values)

        key = "reduce", rows, result, arrangement.function
        tensors = ("partials", "extras", "outs")
        return self._bound(key, transfers.reduce_partials, arguments, ("row",), (row,), tensors)

    def close(self, numels: tuple[int, ...]) -> Bound:
        """(outs): ends the call. After a failure it fills `outs`, contiguous tensors of `numels` elements, with NaN."""

        def arguments() -> Arguments:
            values = {"numels": numels, "BLOCK": self._block(BLOCK)}
            programs = INTERPRETED_PROGRAMS if self._interpreted else FILL_PROGRAMS
            return self._arguments(programs, COPY_WARPS, values)

        return self._bound("close", transfers.close_slot, arguments, tensors=("outs",))

    def _alone(self) -> Arguments:
        """Returns the Arguments of a launch of one program of one warp."""
        return self._arguments(1, 1, {})

    def _arguments(self, programs: int, num_warps: int, values: dict[str, Any]) -> Arguments:
        return Arguments(programs, {**values, "rank": self._rank, "WORLD": self._world, "num_warps": num_warps})

    def _bound(
        self,
        key: object,
        kernel: Any,
        arguments: Callable[[], Arguments],
        names: tuple[str, ...] = (),
        numbers: tuple[int, ...] = (),
        tensors: tuple[str, ...] = (),
    ) -> Bound:
        kernels, words = self._kernels, self._words

        def with_clock() -> Bound:
            clock, timed = kernels.launch.timed(kernel, arguments)
            launcher = kernels.launcher((key, clock), kernel, names)
            return Bound(launcher, timed, numbers, words, tensors)

        launcher = kernels.launcher(key, kernel, names)
        return Bound(launcher, arguments, numbers, words, tensors, with_clock if takes_part(kernel) else None)

    def _block(self, block: int) -> int:
        return INTERPRETED_BLOCK if self._interpreted else block

    def _programs(self, numel: int, block: int, per_sm: int = PROGRAMS_PER_SM) -> int:
        most = INTERPRETED_PROGRAMS if self._interpreted else per_sm * self._num_sms
        return max(1, min(ceil_div(numel, block), most))


@dataclass(frozen=True)
class Operands:
    """The operands of sum_i a_i @ b_i + bias, with the a_i cut into runs of rows. lefts[i][place]: a run of a_i, [m,
    K_i], or [outer, m, K_i] if its rows do not lie together. rights: the b_i [K_i, N]. bias: [N], or a column [m, 1]
    for each run, or None. pre: prepares the sum before it is sent, or None.
    """

    lefts: Sequence[Sequence[torch.Tensor]]
    rights: Sequence[torch.Tensor]
    bias: torch.Tensor | Sequence[torch.Tensor] | None
    pre: Runs | None = None

    def multiply(self, place: int, out: torch.Tensor) -> None:
        """Computes the run `place` of the sum into `out`: each product is added and rounded, then `pre` runs."""
        added = self.bias if self.bias is None or isinstance(self.bias, torch.Tensor) else self.bias[place]
        for runs, right in zip(self.lefts, self.rights, strict=True):
            multiply(runs[place], right, out, added)
            added = out
        if self.pre is not None:
            self.pre.prepare(place, out)


class Products(Protocol):
    """Products that are computed one by one, by their number."""

    def multiply(self, place: int, out: torch.Tensor) -> None:
        """Computes the product number `place` into `out`, by the library."""
        ...


@dataclass(frozen=True)
class PieceGroup:
    """Pieces of a product that are multiplied together, and the peers' pieces that are received with them. products:
    (number of the product, its place in this rank's slot). transfers: the copies of the peers' pieces.
    """

    products: list[tuple[int, torch.Tensor]]
    publish: Bound
    wait: Bound
    transfers: list[Transfer]

    def send(self, lane: Lane, operands: Products) -> torch.cuda.Event | None:
        """Multiplies, and tells the readers. Returns a mark of the end of the products."""
        for place, product in self.products:
            operands.multiply(place, product)
        done = lane.here()
        self.publish(lane.main)
        return done

    def receive(self, lane: Lane, done: torch.cuda.Event | None, partials: int) -> None:
        """Copies the peers' pieces to the tensor at the address `partials`. done: the result of `send`."""
        # It does not follow the publishing launch: the waiting kernel needs an SM before the next product takes all.
        lane.follow(done)
        self.wait(lane.side)
        lane.copy(self.transfers, partials)


def exchange_in_turns(
    lane: Lane, groups: Sequence[PieceGroup], operands: Products, target: int
) -> AbstractContextManager[object]:
    """Multiplies and sends all groups, and receives the peers' pieces at the address `target`. Returns the stream, as a
    context manager, on which the caller should compute the rank's own product. The groups alternate between two
    streams, so a product begins while the last tiles of the product before it run.
    """
    for turn, group in enumerate(groups):
        with lane.beside() if turn % 2 == 1 else HERE:
            done = group.send(lane, operands)
        group.receive(lane, done, target)
    return lane.beside() if len(groups) % 2 == 1 else HERE


def shaped(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns the contiguous x in another shape, or x itself if it has that shape."""
    return x if x.shape == shape else x.view(shape)


def for_batches(b: torch.Tensor, outer: int) -> torch.Tensor:
    """Returns b [K, N] as `multiply` needs it for a [outer, m, K]. A caller with many products does this only once."""
    return b if b.dim() == 3 else b.expand(outer, *b.shape)


def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, added: torch.Tensor | None = None) -> None:
    """Computes out = a @ b + added by the library.

    a is [m, K] and out [m, N], or both have one more leading dimension. b is [K, N], or the result of `for_batches`.
    added: a row [N], a column [m, 1] if a is [m, K], `out` itself, or None. Strides are free, but the rows of `out` are
    contiguous.

    A product of two dimensions adds a row while it stores its tiles. For a batch of products the library would first
    write the row to all of `out` and then read it again, so a few large products of a batch are computed one by one.
    """
    if out.numel() == 0:
        return
    if a.dim() == 2:
        if added is None:
            torch.mm(a, b, out=out)
        else:
            torch.addmm(added, a, b, out=out)
        return
    batches = for_batches(b, a.shape[0])
    if added is not None and added.dim() == 1 and _one_by_one(a, out):
        for left, right, target in zip(a, batches, out, strict=True):
            torch.addmm(added, left, right, out=target)
    elif added is None:
        torch.bmm(a, batches, out=out)
    else:
        torch.baddbmm(added, a, batches, out=out)


def _one_by_one(a: torch.Tensor, out: torch.Tensor) -> bool:
    """Returns whether the products of a batch should be computed one by one, because they have a bias."""
    return a.shape[0] <= BIASED_BATCHES and 2.0 * out[0].numel() * a.shape[2] >= BIASED_OPERATIONS
