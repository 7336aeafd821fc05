"""matmul_all_to_all, strategy `chunked`: library products for one rank after the other, which its copy engine fetches.

Problem. It is that of tile.py.
Algorithm. The main stream multiplies by the columns for rank + 1 first and by the rank's own columns last. The products
go into the rank's own slot, and a small kernel behind each tells its reader. Meanwhile the side stream copies what the
peers have computed for this rank into the output, in the order in which they compute it: rank - 1 first. The own
product hides the last copy. With one peer the rows are cut in two, because the own product hides only the last copy.
Signal protocol. See lowering/transfers.py. There is a flag for each run of rows, from row PIECE_ROWS on.
Limits. The gathered dimension is not the last one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ditron_inductor.device.lanes import Transfer
from ditron_inductor.device.workspace import Call
from ditron_inductor.lowering import schedules
from ditron_inductor.lowering.chunked_exchange import ChunkedExchange, Kernels, PieceGroup, exchange_in_turns, multiply
from ditron_inductor.lowering.host.launch import Launch, round_up, rows_of
from ditron_inductor.lowering.host.launcher import Bound
from ditron_inductor.lowering.transfers import PIECE_ROWS
from ditron_inductor.task.nodes import MatmulAllToAll
from ditron_inductor.task.ulysses import gathered_shape


@dataclass(frozen=True, eq=False)
class Geometry:
    """The layout of a call, from sizes that all ranks share: a rank has M rows, in `outer` runs that do not lie
    together in the output, and C columns in each run of columns. `cuts` are the runs of rows that are multiplied as
    one. Each reader has `stride` elements of the slot.
    """

    M: int
    C: int
    outer: int
    cuts: tuple[tuple[int, int], ...]
    stride: int
    nbytes: int
    kernels: Kernels = field(repr=False)


def geometry(node: MatmulAllToAll, launch: Launch, a: torch.Tensor, columns: int, k: int) -> Geometry:
    """Returns the Geometry for a [.., S, .., K] with S at `gather_dim`. columns: N."""
    world = node.world_size
    M = math.prod(a.shape[:-1])
    outer = math.prod(a.shape[: node.gather_dim])
    parts = schedules.scatter_schedule(world, M, columns // world, launch.num_sms).parts if outer == 1 else 1
    stride = round_up(M * (columns // world), 128)
    return Geometry(
        M=M,
        C=columns // (node.parts * world),
        outer=outer,
        cuts=tuple(schedules.cut(M, parts)),
        stride=stride,
        nbytes=(world - 1) * stride * a.element_size(),
        kernels=Kernels(launch),
    )


@dataclass(frozen=True)
class _Columns:
    """The operands of sum_i a_i @ b_i + bias. Each product takes a run of rows and the columns for one rank."""

    lefts: Sequence[torch.Tensor]
    rights: Sequence[torch.Tensor]
    bias: torch.Tensor | None
    parts: int
    C: int
    world_size: int
    cuts: tuple[tuple[int, int], ...]

    def multiply(self, place: int, out: torch.Tensor) -> None:
        """Computes out [rows, parts * C]: rank `place // len(cuts)`'s columns of run `place % len(cuts)`."""
        reader, (first, last) = place // len(self.cuts), self.cuts[place % len(self.cuts)]
        for part in range(self.parts):
            begin = (part * self.world_size + reader) * self.C
            target = out[:, part * self.C : (part + 1) * self.C]
            added = None if self.bias is None else self.bias[begin : begin + self.C]
            for left, right in zip(self.lefts, self.rights, strict=True):
                multiply(left[first:last], right[:, begin : begin + self.C], target, added)
                added = target


def matmul_all_to_all(
    node: MatmulAllToAll,
    launch: Launch,
    sizes: Geometry,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns [.., W*S, .., N / W] for a_i [.., S, .., K_i] with S at `gather_dim`, b_i [K_i, N], bias [N]."""
    world, M, width = node.world_size, sizes.M, node.parts * sizes.C
    out = a[0].new_empty(gathered_shape(a[0].shape, b[0].shape[1], node.gather_dim, world))
    columns = _Columns([rows_of(left) for left in a], b, bias, node.parts, sizes.C, world, sizes.cuts)
    # The rank's own rows lie together in the output only if `outer` is 1.
    apart = out.view(sizes.outer, world, M // sizes.outer, width)[:, launch.rank]
    own = apart.view(M, width) if sizes.outer == 1 else out.new_empty(M, width)
    with launch.call(nbytes=sizes.nbytes) as call:
        plan = call.kept(sizes, lambda call: _plan(node, launch, sizes, call, a[0]))
        plan.open(call.stream)
        with call.fork() as lane:
            with exchange_in_turns(lane, plan.groups, columns, out.data_ptr()):
                for cut, (first, last) in enumerate(sizes.cuts):
                    columns.multiply(launch.rank * len(sizes.cuts) + cut, own[first:last])
                if sizes.outer > 1:
                    apart.copy_(own.view(apart.shape))
        plan.close(call.stream, (out,))
    return out


@dataclass(frozen=True)
class _Plan:
    """What the calls that use one slot have in common: the launches and copies."""

    open: Bound
    groups: list[PieceGroup]
    close: Bound


def _plan(node: MatmulAllToAll, launch: Launch, sizes: Geometry, call: Call, a: torch.Tensor) -> _Plan:
    world, rank, M, outer, cuts = node.world_size, launch.rank, sizes.M, sizes.outer, sizes.cuts
    width, itemsize = node.parts * sizes.C, a.element_size()
    exchange = ChunkedExchange(sizes.kernels, call)
    slot, pitch = call.data(rank, a.dtype), width * itemsize
    groups = []
    for piece in range((world - 1) * len(cuts)):
        step, (first, last) = piece // len(cuts), cuts[piece % len(cuts)]
        reader, source = (rank + 1 + step) % world, (rank - 1 - step) % world
        begin = step * sizes.stride + first * width
        product = slot[begin : begin + (last - first) * width].view(last - first, width)
        theirs = call.data(source, a.dtype).data_ptr() + begin * itemsize
        transfer = Transfer((source * M + first) * pitch, theirs, (last - first) * pitch)
        if outer > 1:
            run = M // outer * pitch
            transfer = Transfer(source * run, theirs, run, outer, world * run)
        publish = exchange.publish(piece, 1, len(cuts), PIECE_ROWS.value)
        wait = exchange.wait(piece, 1, len(cuts), PIECE_ROWS.value)
        groups.append(PieceGroup([(reader * len(cuts) + piece % len(cuts), product)], publish, wait, [transfer]))
    return _Plan(open=exchange.open(), groups=groups, close=exchange.close((world * M * width,)))
