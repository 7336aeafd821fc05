"""matmul_all_to_all, strategy `chunked`: library products for one rank after the other, which its copy engine fetches.

Problem. Every rank holds its rows a [M, K] and b [K, N]; rank r wants, of all rows of all ranks, its own columns of the
product: of each of `parts` parts the r-th of W runs of C columns.
Algorithm. The main stream multiplies by the columns for rank + 1 first and by the own ones last. The products go
straight into the own slot, where their readers find them; a small kernel behind each tells them. Meanwhile the side
stream copies what the peers have for this rank into the output, that of rank - 1 first, in the order in which they are
made. The own product hides the last copy. With one peer the rows are cut in two, so that it hides no more than half of
the transfer.
Signal protocol. See lowering/transfers.py. A flag for each run of rows, from row PIECE_ROWS on.
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
    """Sizes that all ranks share: rows M of a rank, `outer` runs of which the output keeps apart, C columns in each run
    of columns; `cuts`, the runs of rows that are multiplied as one; `stride` elements of the slot for each reader, its
    bytes.
    """

    M: int
    C: int
    outer: int
    cuts: tuple[tuple[int, int], ...]
    stride: int
    nbytes: int
    kernels: Kernels = field(repr=False)


def geometry(node: MatmulAllToAll, launch: Launch, a: torch.Tensor, columns: int, k: int) -> Geometry:
    """a [.., S, .., K] with S at `gather_dim`; columns: N; k: the largest K on any rank. See Geometry."""
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
    """The operands of sum_i a_i @ b_i + bias, of which each product takes a run of rows and the columns for one
    rank.
    """

    lefts: Sequence[torch.Tensor]
    rights: Sequence[torch.Tensor]
    bias: torch.Tensor | None
    parts: int
    C: int
    world_size: int
    cuts: tuple[tuple[int, int], ...]

    def multiply(self, place: int, out: torch.Tensor) -> None:
        """out [rows, parts * C] = the columns for rank `place // len(cuts)` of the run `place % len(cuts)` of rows."""
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
    """a_i [.., S, .., K_i] with S at `gather_dim`, b_i [K_i, N], bias [N]; returns [.., W*S, .., N / W]. See the
    module.
    """
    world, M, width = node.world_size, sizes.M, node.parts * sizes.C
    out = a[0].new_empty(gathered_shape(a[0].shape, b[0].shape[1], node.gather_dim, world))
    columns = _Columns([rows_of(one) for one in a], b, bias, node.parts, sizes.C, world, sizes.cuts)
    # The own rows, which lie together in the output unless it keeps runs of them apart.
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
    """What calls with one slot have in common: launches and copies."""

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
