"""matmul_reduce_scatter, strategy `chunked`: library products for one owner after the other, then one reduction.

Problem. It is that of tile.py. The library adds several products, and a row, chunk by chunk.
Algorithm. The main stream multiplies the rows of rank + 1 first and the rank's own rows last. The products go into the
rank's own slot, and a small kernel behind each tells its owner. Meanwhile the side stream copies the peers' partial
products for this rank, in the order in which they are computed: that of rank - 1 first. The last product hides the last
copy. One kernel adds up the W partial products in rank order in fp32, rounds once, and computes the epilogue. The part
of an epilogue that comes before the reduction is a launch behind each product. If the scattered dimension lies inside
others, such as that of the sequences of a batch, the product for an owner is one batched product.
Signal protocol. See lowering/transfers.py. There is a flag for each part of an owner's rows, from row PIECE_ROWS on.
Limits. They are those of tile.py.
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
from ditron_inductor.lowering.epilogues import Arrangement, Preparer, arrange, extras_or, preparer_of
from ditron_inductor.lowering.host.launch import Launch, round_up, rows_of
from ditron_inductor.lowering.host.launcher import Bound
from ditron_inductor.lowering.schedules import Reduction
from ditron_inductor.lowering.transfers import PIECE_ROWS
from ditron_inductor.task.nodes import MatmulReduceScatter


@dataclass(frozen=True, eq=False)
class Geometry:
    """The layout of a call, from sizes that all ranks share. The output is [rows, N], and its rows are `outer` runs of
    the product's rows. `cut` is how an owner's rows are cut and grouped. In the slot, the partial product of the next
    owner begins after `stride` elements. `arrangement` is the epilogue, and `preparer` its part before the reduction.
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
    """Returns the Geometry for a [.., W*S, .., K] with W*S at `scatter_dim`. columns: N."""
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
    """Returns the outputs [.., S, .., N] for a_i [.., W*S, .., K_i] with W*S at `scatter_dim`, b_i [K_i, N] and bias
    [N] or [M, 1]; see the module. extras: the extra tensors of the epilogue.
    """
    first = a[0]
    shape = [*first.shape[:-1], sizes.N]
    shape[node.scatter_dim] //= node.world_size
    outs = sizes.arrangement.new_outputs_of_sum(first, shape)
    partials = first.new_empty(node.world_size * sizes.rows, sizes.N)
    with launch.call(nbytes=sizes.nbytes) as call:
        plan = call.kept(sizes, lambda call: _plan(node, launch, sizes, call, first))
        added = bias if bias is None or bias.dim() == 1 else plan.rows_of(bias)
        whole, preparer = (node.world_size * sizes.rows, sizes.N), sizes.preparer
        pre = None if preparer is None else preparer.runs(extras, *whole, plan.rows_of)
        operands = Operands([plan.rows_of(rows_of(left)) for left in a], b, added, pre)
        plan.open(call.stream)
        with call.fork() as lane:
            with exchange_in_turns(lane, plan.groups, operands, partials.data_ptr()):
                operands.multiply(plan.own, shaped(partials[plan.own_rows], plan.own_shape))
        plan.reduce(call.stream, partials, extras_or(outs[0], extras), tuple(outs))
    return outs


@dataclass(frozen=True)
class _Plan:
    """What the calls that use one slot have in common: launches, copies, and the places of rows. `lengths` has the rows
    of each run of `a` that is multiplied as one, in their order. It is None if an owner's rows do not lie together;
    then all rows have the shape `apart`, and the rows of each owner are one run. `own` is the index of this rank's run,
    whose product has the shape `own_shape` and is the rows `own_rows` of the partials.
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
        """Returns the runs of a [M, K]: each [length, K], or [outer, rows / outer, K]."""
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
    """Returns (steps from this rank to the other rank, first row, last row) of a piece, without the last row."""
    begin, end = schedules.cut(sizes.rows, sizes.cut.parts)[piece % sizes.cut.parts]
    return piece // sizes.cut.parts + 1, begin, end


def products(first: int, count: int, rank: int, world_size: int, sizes: Geometry) -> list[tuple[int, int, int]]:
    """Returns (first row, last row, element of this rank's slot) of the products of a group. Products whose rows and
    places both lie together are joined. Rows are numbered owner by owner, even if they do not lie so in a.
    """
    found = []
    for piece in range(first, first + count):
        step, begin, end = piece_rows(piece, sizes)
        base = (rank + step) % world_size * sizes.rows
        found.append((base + begin, base + end, (step - 1) * sizes.stride + begin * sizes.N))
    return schedules.joined(found, sizes.N) if sizes.outer == 1 else found


def arrivals(first: int, count: int, rank: int, world_size: int, sizes: Geometry) -> Iterator[tuple[int, int, int]]:
    """Returns (source, first row, last row) of the copies that a group of pieces needs, one for each source."""
    found: list[tuple[int, int, int]] = []
    for piece in range(first, first + count):
        step, begin, end = piece_rows(piece, sizes)
        source = (rank - step) % world_size
        if found and found[-1][0] == source:
            found[-1] = source, found[-1][1], end
        else:
            found.append((source, begin, end))
    yield from found
