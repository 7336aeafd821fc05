"""matmul_reduce_scatter, strategy `chunked`: library products for one owner after the other, then one reduction.

Problem. Every rank holds a [M, K] and b [K, N] of its own slice of K; rank r wants the r-th chunk of rows of the sum.
There may be several products a_i @ b_i that are added up, and a row that is added to them: the library adds, chunk by
chunk.
Algorithm. The main stream multiplies the rows of rank + 1 first and the own ones last. The products go straight into
the own slot, where their owners read them; a small kernel behind each tells them. Meanwhile the side stream copies the
partial products for this rank from its peers, that of rank - 1 first, in the order in which they are made. The last
product hides the last copy. One kernel adds up the W partials in rank order, in fp32, and rounds once; an
epilogue is computed by it too. What an epilogue makes of the products themselves is a launch behind each of them, in
its place.
Signal protocol. See lowering/transfers.py. A flag for each part of an owner's rows, from row PIECE_ROWS on.
Where the scattered dimension lies inside others, such as that of the sequences of a batch, the product for an owner is
one batched product.
Limits. The scattered dimension is not the last one, and the group's size divides it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ditron_inductor.device.lanes import Transfer
from ditron_inductor.device.workspace import Call
from ditron_inductor.lowering import schedules
from ditron_inductor.lowering.chunked_exchange import (
    ChunkedExchange,
    Kernels,
    Operands,
    PieceGroup,
    exchange_in_turns,
    shaped,
)
from ditron_inductor.lowering.epilogues import Arrangement, Preparer, arrange, preparer_of
from ditron_inductor.lowering.host.launch import Launch, round_up, rows_of
from ditron_inductor.lowering.host.launcher import Bound
from ditron_inductor.lowering.schedules import Reduction
from ditron_inductor.lowering.transfers import PIECE_ROWS
from ditron_inductor.task.nodes import MatmulReduceScatter


@dataclass(frozen=True, eq=False)
class Geometry:
    """Sizes that all ranks share.

    The output is [rows, N], its rows `outer` runs of the product's; `cut` says how an owner's rows are cut and grouped;
    `stride` elements lie between two owners' partials in the slot, of `nbytes`. arrangement, preparer: of the epilogue.
    """

    rows: int
    N: int
    outer: int
    cut: Reduction
    stride: int
    nbytes: int
    kernels: Kernels = field(repr=False)
    arrangement: Arrangement = field(repr=False)
    preparer: Preparer | None = field(repr=False)


def geometry(node: MatmulReduceScatter, launch: Launch, a: torch.Tensor, columns: int, k: int) -> Geometry:
    """a [.., W*S, .., K] with W*S at `scatter_dim`; columns: N; k: the largest K on any rank. See Geometry."""
    world, itemsize = node.world_size, a.element_size()
    rows = math.prod(a.shape[:-1]) // world
    outer = math.prod(a.shape[: node.scatter_dim])
    if outer == 1:
        cut = schedules.scatter_schedule(world, rows, columns, launch.num_sms)
    else:
        cut = Reduction(1, tuple((first, 1) for first in range(world - 1)))
    stride = round_up(rows * columns, 128)
    return Geometry(
        rows=rows,
        N=columns,
        outer=outer,
        cut=cut,
        stride=stride,
        nbytes=(world - 1) * stride * itemsize,
        kernels=Kernels(launch),
        arrangement=arrange(node.parsed, 1),
        preparer=preparer_of(node, a.device),
    )


def matmul_reduce_scatter(
    node: MatmulReduceScatter,
    launch: Launch,
    sizes: Geometry,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    extras: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    """a_i [.., W*S, .., K_i] with W*S at `scatter_dim`, b_i [K_i, N], bias [N] or [M, 1], extras as the node's epilogue
    reads them; returns the outputs [.., S, .., N]. See the module.
    """
    first = a[0]
    shape = [*first.shape[:-1], sizes.N]
    shape[node.scatter_dim] //= node.world_size
    outs = sizes.arrangement.new_outputs_of_sum(first, shape)
    # Never empty: an epilogue that wants nothing gets what it does not look at.
    x = tuple(extra.contiguous() for extra in extras) or (outs[0],)
    partials = first.new_empty(node.world_size * sizes.rows, sizes.N)
    with launch.call(nbytes=sizes.nbytes) as call:
        plan = call.kept(sizes, lambda call: _plan(node, launch, sizes, call, first))
        added = bias if bias is None or bias.dim() == 1 else plan.rows_of(bias)
        whole, preparer = (node.world_size * sizes.rows, sizes.N), sizes.preparer
        pre = None if preparer is None else preparer.runs(extras, *whole, plan.rows_of)
        operands = Operands([plan.rows_of(rows_of(one)) for one in a], b, added, pre)
        plan.open(call.stream)
        with call.fork() as lane:
            with exchange_in_turns(lane, plan.groups, operands, partials.data_ptr()):
                operands.multiply(plan.own, shaped(partials[plan.own_rows], plan.own_shape))
        plan.reduce(call.stream, partials, x, tuple(outs))
    return outs


@dataclass(frozen=True)
class _Plan:
    """What calls with one slot have in common: launches, copies, and where rows are.

    lengths: of the runs of rows of a that are multiplied as one, in their order; None where an owner's rows do not lie
    together, and the runs are the owners', `apart`. own: the place of the own run, whose product has `own_shape` and is
    rows `own_rows` of the partials.
    """

    open: Bound
    groups: list[PieceGroup]
    reduce: Bound
    lengths: list[int] | None
    apart: tuple[int, int, int]
    own: int
    own_rows: slice
    own_shape: tuple[int, ...]

    def rows_of(self, a: torch.Tensor) -> Sequence[torch.Tensor]:
        """The runs of a [M, K]: [length, K], or [outer, rows / outer, K]."""
        if self.lengths is not None:
            return a.split_with_sizes(self.lengths)
        return a.unflatten(0, self.apart).unbind(1)


def _plan(node: MatmulReduceScatter, launch: Launch, sizes: Geometry, call: Call, a: torch.Tensor) -> _Plan:
    world, rank, rows, N, parts = node.world_size, launch.rank, sizes.rows, sizes.N, sizes.cut.parts
    exchange = ChunkedExchange(sizes.kernels, call)
    slot, itemsize = call.data(rank, a.dtype), a.element_size()
    pitch = N * itemsize
    plain = sizes.outer == 1
    own_shape = (rows, N) if plain else (sizes.outer, rows // sizes.outer, N)
    found = [products(first, count, rank, world, sizes) for first, count in sizes.cut.groups]
    runs = [(begin, end) for of_group in found for begin, end, _ in of_group]
    lengths, place_of = schedules.partition([(rank * rows, (rank + 1) * rows), *runs])
    groups = []
    for (first, count), of_group in zip(sizes.cut.groups, found, strict=True):
        targets = []
        for begin, end, element in of_group:
            product = slot[element : element + (end - begin) * N]
            place, shape = (place_of[begin], (end - begin, N)) if plain else (begin // rows, own_shape)
            targets.append((place, product.view(shape)))
        transfers = []
        for source, begin, end in arrivals(first, count, rank, world, sizes):
            theirs = call.data(source, a.dtype).data_ptr() + (rank - source - 1) % world * sizes.stride * itemsize
            target = (source * rows + begin) * pitch
            transfers.append(Transfer(target, theirs + begin * pitch, (end - begin) * pitch))
        publish = exchange.publish(first, count, parts, PIECE_ROWS.value)
        groups.append(PieceGroup(targets, publish, exchange.wait(first, count, parts, PIECE_ROWS.value), transfers))
    return _Plan(
        open=exchange.open(),
        groups=groups,
        reduce=exchange.reduce(
            rows, N, stride=rows * N, average=node.reduce_op == "avg", arrangement=sizes.arrangement
        ),
        lengths=lengths if plain else None,
        apart=(sizes.outer, world, rows // sizes.outer),
        own=place_of[rank * rows] if plain else rank,
        own_rows=slice(rank * rows, (rank + 1) * rows),
        own_shape=own_shape,
    )


def piece_rows(piece: int, sizes: Geometry) -> tuple[int, int, int]:
    """(steps from this rank to the other one, first row, last row) of a piece."""
    begin, end = schedules.cut(sizes.rows, sizes.cut.parts)[piece % sizes.cut.parts]
    return piece // sizes.cut.parts + 1, begin, end


def products(first: int, count: int, rank: int, world_size: int, sizes: Geometry) -> list[tuple[int, int, int]]:
    """(first row, last row, element of the own slot) of the products of a group, joined where both lie together.

    Rows are counted owner by owner, whether they lie together in a or not; of rows that do not, nothing is joined.
    """
    found = []
    for piece in range(first, first + count):
        step, begin, end = piece_rows(piece, sizes)
        base = (rank + step) % world_size * sizes.rows
        found.append((base + begin, base + end, (step - 1) * sizes.stride + begin * sizes.N))
    return schedules.joined(found, sizes.N) if sizes.outer == 1 else found


def arrivals(first: int, count: int, rank: int, world_size: int, sizes: Geometry) -> Iterator[tuple[int, int, int]]:
    """(source, first row, last row) of the copies that a group of pieces needs, those of one source joined."""
    found: list[tuple[int, int, int]] = []
    for piece in range(first, first + count):
        step, begin, end = piece_rows(piece, sizes)
        source = (rank - step) % world_size
        if found and found[-1][0] == source:
            found[-1] = source, found[-1][1], end
        else:
            found.append((source, begin, end))
    yield from found
