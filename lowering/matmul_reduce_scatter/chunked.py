"""matmul_reduce_scatter, strategy `chunked`: library products for one owner after the other, then one reduction.

Problem. Every rank holds a [M, K] and b [K, N] of its own slice of K; rank r wants the r-th chunk of rows of the sum.
Algorithm. The main stream multiplies the rows of rank + 1 first and the own ones last. The products go straight into
the own slot, where their owners read them; a small kernel behind each tells them. Meanwhile the side stream copies the
partial products for this rank from its peers, that of rank - 1 first, in the order in which they are made. The last
product hides the last copy. One kernel adds up the W partials in rank order, in fp32, and rounds once.
Signal protocol. See lowering/transfers.py. A flag for each part of an owner's rows, from row PIECE_ROWS on.
Limits. The scattered dimension is not the last one, and the group's size divides it. Where it lies inside others, their
sizes multiply to MAX_OUTER at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ditron_inductor.lowering import schedules
from ditron_inductor.lowering.exchange import Exchange, Kernels, multiply
from ditron_inductor.lowering.launch import Launch, round_up, rows_of
from ditron_inductor.lowering.schedules import Reduction
from ditron_inductor.lowering.transfers import PIECE_ROWS, identity
from ditron_inductor.task.nodes import MatmulReduceScatter

MAX_OUTER = 8


def obstacle(node: MatmulReduceScatter, shape: Sequence[int]) -> str:
    """Why the strategy cannot run a left operand of `shape` [.., W*S, .., K], or an empty string; for all ranks."""
    outer = math.prod(shape[: node.scatter_dim])
    if outer > MAX_OUTER:
        return f"the scattered dimension lies inside {outer} slices, and more than {MAX_OUTER} make small products"
    return ""


@dataclass(frozen=True)
class Geometry:
    """Sizes that all ranks share.

    The output is [rows, N], its rows `outer` runs of the product's; `cut` says how an owner's rows are cut and grouped;
    `stride` elements lie between two owners' partials in the slot, of `nbytes`.
    """

    rows: int
    N: int
    outer: int
    cut: Reduction
    stride: int
    nbytes: int
    kernels: Kernels = field(compare=False, repr=False)


def geometry(node: MatmulReduceScatter, launch: Launch, a: torch.Tensor, columns: int, k: int) -> Geometry:
    """a [.., W*S, .., K] with W*S at `scatter_dim`; columns: N; k: the largest K on any rank. See Geometry."""
    world, itemsize = node.world_size, a.element_size()
    rows = math.prod(a.shape[:-1]) // world
    outer = math.prod(a.shape[: node.scatter_dim])
    if outer == 1:
        cut = schedules.scatter_schedule(world, rows, columns, k, itemsize, launch.num_sms)
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
    )


def matmul_reduce_scatter(
    node: MatmulReduceScatter,
    launch: Launch,
    sizes: Geometry,
    a: torch.Tensor,
    b: torch.Tensor,
    epilogue: Any = identity,
    extras: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """a [.., W*S, .., K] with W*S at `scatter_dim`, b [K, N]; returns [.., S, .., N]. See the module.

    epilogue: applied to the sum before it is rounded; see `transfers.identity`.
    """
    world, rank, rows, N, parts = node.world_size, launch.rank, sizes.rows, sizes.N, sizes.cut.parts
    shape = [*a.shape[:-1], N]
    shape[node.scatter_dim] //= world
    out = a.new_empty(shape)
    partials = a.new_empty(world, rows, N)
    a_rows = rows_of(a)
    with launch.call(nbytes=sizes.nbytes) as call:
        exchange = Exchange(sizes.kernels, call)
        slot = call.data(rank, a.dtype)
        exchange.open()
        with call.fork() as lane:
            # In turns on two streams: a product begins while the last tiles of the one before it run.
            for turn, (first, count) in enumerate(sizes.cut.groups):
                with lane.beside() if turn % 2 == 1 else nullcontext():
                    for left, product in products(a_rows, slot, first, count, rank, world, sizes):
                        multiply(left, b, product)
                    done = lane.here()
                    exchange.publish(first, count, parts, PIECE_ROWS.value)
                # Not behind the telling: the wait is to have its SM before the next product takes them all.
                lane.follow(done)
                with lane.side():
                    exchange.wait(first, count, parts, PIECE_ROWS.value)
                    for source, begin, end in arrivals(first, count, rank, world, sizes):
                        place = (rank - source - 1) % world * sizes.stride
                        theirs = call.data(source, a.dtype)[place + begin * N : place + end * N]
                        partials[source, begin:end].view(-1).copy_(theirs)
            with lane.beside() if len(sizes.cut.groups) % 2 == 1 else nullcontext():
                multiply(owned(a_rows, rank, world, sizes), b, split(partials[rank], sizes))
        exchange.reduce(partials, out.view(rows, N), average=node.reduce_op == "avg", epilogue=epilogue, extras=extras)
    return out


def owned(a_rows: torch.Tensor, owner: int, world_size: int, sizes: Geometry) -> torch.Tensor:
    """The rows of a [M, K] whose products `owner` adds up: [rows, K]; where they lie apart [outer, rows / outer, K]."""
    if sizes.outer == 1:
        return a_rows[owner * sizes.rows : (owner + 1) * sizes.rows]
    return a_rows.unflatten(0, (sizes.outer, world_size, sizes.rows // sizes.outer))[:, owner]


def split(x: torch.Tensor, sizes: Geometry) -> torch.Tensor:
    """x [rows, N], contiguous, in the form of `owned`."""
    return x if sizes.outer == 1 else x.view(sizes.outer, sizes.rows // sizes.outer, sizes.N)


def piece_rows(piece: int, sizes: Geometry) -> tuple[int, int, int]:
    """(steps from this rank to the other one, first row, last row) of a piece."""
    begin, end = schedules.cut(sizes.rows, sizes.cut.parts)[piece % sizes.cut.parts]
    return piece // sizes.cut.parts + 1, begin, end


def products(
    a_rows: torch.Tensor, slot: torch.Tensor, first: int, count: int, rank: int, world_size: int, sizes: Geometry
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(rows of a, where in the own slot their product goes) for a group of pieces, joined where both lie together."""
    if sizes.outer > 1:
        for piece in range(first, first + count):
            place = piece * sizes.stride
            target = slot[place : place + sizes.rows * sizes.N]
            yield owned(a_rows, (rank + 1 + piece) % world_size, world_size, sizes), split(target, sizes)
        return
    pieces = []
    for piece in range(first, first + count):
        step, begin, end = piece_rows(piece, sizes)
        base = (rank + step) % world_size * sizes.rows
        pieces.append((base + begin, base + end, (step - 1) * sizes.stride + begin * sizes.N))
    for begin, end, place in schedules.joined(pieces, sizes.N):
        yield a_rows[begin:end], slot[place : place + (end - begin) * sizes.N].view(end - begin, sizes.N)


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
