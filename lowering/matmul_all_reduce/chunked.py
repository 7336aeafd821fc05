"""matmul_all_reduce, strategy `chunked`: a reduce-scatter and an all-gather in parts, behind library products.

Problem. Every rank holds a [M, K] and b [K, N] of its own slice of K, and every rank wants the whole sum.
Algorithm. Small products are added up by one kernel, see all_reduce_kernel.py. Of others the rows are cut into parts,
and each part into one run of rows for every rank, its owner. The main stream multiplies part by part, in each the rows
of rank + 1 first and the own ones last, straight into the own slot. The side stream copies the partial products for
this rank from its peers, adds them up in rank order, in fp32, rounds once, and stores the result in the output and in
the own slot. From there the peers copy it to their outputs, while the next part is being multiplied. So every rank has
the bits of the owner's one addition.
Signal protocol. See lowering/transfers.py. Flag row PIECE_ROWS + part: the partial products of a part for its owner;
RESULT_ROWS + part: the owner's results, which are not written before the slot is free either.
Limits. None on M, N, K; runs may be empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ditron_inductor.device.lanes import Lane
from ditron_inductor.device.workspace import Call
from ditron_inductor.lowering import schedules
from ditron_inductor.lowering.exchange import Exchange, Kernels, multiply
from ditron_inductor.lowering.launch import Launch, ceil_div, round_up, rows_of
from ditron_inductor.lowering.matmul_all_reduce import all_reduce_kernel
from ditron_inductor.lowering.transfers import PIECE_ROWS, RESULT_ROWS, identity
from ditron_inductor.task.nodes import MatmulAllReduce


def obstacle(node: MatmulAllReduce, shape: Sequence[int]) -> str:
    """Why the strategy cannot run a left operand of `shape` [.., K]: always empty, nothing is in its way."""
    return ""


@dataclass(frozen=True)
class Parts:
    """Sizes that all ranks share: the output [M, N], `parts` of it with `length` rows for each rank.

    groups: (first, count) of the steps from the own rank whose products are made as one. `stride` elements lie between
    two partials in the slot; the results begin at element `results`.
    """

    M: int
    N: int
    parts: int
    length: int
    groups: tuple[tuple[int, int], ...]
    stride: int
    results: int
    nbytes: int
    kernels: Kernels = field(compare=False, repr=False)

    def run(self, part: int, owner: int, world_size: int) -> tuple[int, int]:
        """(first row, last row) of the output that `owner` adds up in a part."""
        first = (part * world_size + owner) * self.length
        return min(first, self.M), min(first + self.length, self.M)


Geometry = Parts | all_reduce_kernel.Geometry


def geometry(node: MatmulAllReduce, launch: Launch, a: torch.Tensor, columns: int, k: int) -> Geometry:
    """a [.., K]; columns: N; k: the largest K on any rank. Equal on all ranks."""
    if all_reduce_kernel.fits(launch, math.prod(a.shape[:-1]) * columns, a.element_size()):
        return all_reduce_kernel.geometry(node, launch, a, columns)
    return parts_geometry(node, launch, a, columns, k)


def parts_geometry(node: MatmulAllReduce, launch: Launch, a: torch.Tensor, columns: int, k: int) -> Parts:
    """As `geometry`, whatever the size. See Parts."""
    world, itemsize, num_sms = node.world_size, a.element_size(), launch.num_sms
    M = math.prod(a.shape[:-1])
    parts = schedules.all_reduce_parts(world, M, columns, k, itemsize, num_sms)
    length = ceil_div(M, parts * world)
    cut = schedules.scatter_schedule(world, length, columns, k, itemsize, num_sms, most_parts=1)
    stride = round_up(length * columns, 128)
    results = parts * (world - 1) * stride
    return Parts(
        M=M,
        N=columns,
        parts=parts,
        length=length,
        groups=cut.groups,
        stride=stride,
        results=results,
        nbytes=(results + parts * stride) * itemsize,
        kernels=Kernels(launch),
    )


def matmul_all_reduce(
    node: MatmulAllReduce,
    launch: Launch,
    sizes: Geometry,
    a: torch.Tensor,
    b: torch.Tensor,
    epilogue: Any = identity,
    extras: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """a [.., K], b [K, N]; returns [.., N]. See the module.

    epilogue: of products in parts, applied to the sum before it is rounded, by the owner; see `transfers.identity`. Its
    rows are the owner's.
    """
    if isinstance(sizes, all_reduce_kernel.Geometry):
        assert epilogue is identity
        return all_reduce_kernel.matmul_all_reduce(node, launch, sizes, a, b)
    world, rank = node.world_size, launch.rank
    out = a.new_empty([*a.shape[:-1], sizes.N])
    whole = out.view(sizes.M, sizes.N)
    partials = a.new_empty(sizes.parts, world, sizes.length, sizes.N)
    a_rows = rows_of(a)
    with launch.call(nbytes=sizes.nbytes) as call:
        exchange = Exchange(sizes.kernels, call)
        exchange.open()
        with call.fork() as lane:
            for part in range(sizes.parts):
                _scatter(exchange, lane, call, a_rows, b, partials[part], part, rank, world, sizes)
                if part > 0:
                    _gather(exchange, lane, call, whole, part - 1, rank, world, sizes)
                with lane.side():
                    first, last = sizes.run(part, rank, world)
                    exchange.reduce(
                        partials[part],
                        whole[first:last],
                        average=node.reduce_op == "avg",
                        epilogue=epilogue,
                        extras=extras,
                        result=sizes.results + part * sizes.stride,
                        row=RESULT_ROWS.value + part,
                    )
            _gather(exchange, lane, call, whole, sizes.parts - 1, rank, world, sizes)
        exchange.close([out])
    return out


def _scatter(
    exchange: Exchange,
    lane: Lane,
    call: Call,
    a_rows: torch.Tensor,
    b: torch.Tensor,
    partials: torch.Tensor,
    part: int,
    rank: int,
    world: int,
    sizes: Parts,
) -> None:
    """Multiply the rows of a part, and copy the peers' products of the own rows to partials [W, length, N]."""
    slot = call.data(rank, a_rows.dtype)
    for first, count in sizes.groups:
        for begin, end, place in products(part, first, count, rank, world, sizes):
            target = slot[place : place + (end - begin) * sizes.N].view(end - begin, sizes.N)
            multiply(a_rows[begin:end], b, target)
        done = lane.here()
        exchange.publish(first, count, 1, PIECE_ROWS.value + part)
        # Not behind the telling: the wait is to have its SM before the next product takes them all.
        lane.follow(done)
        with lane.side():
            exchange.wait(first, count, 1, PIECE_ROWS.value + part)
            begin, end = sizes.run(part, rank, world)
            for step in range(first + 1, first + count + 1):
                source = (rank - step) % world
                place = (part * (world - 1) + step - 1) * sizes.stride
                theirs = call.data(source, a_rows.dtype)[place : place + (end - begin) * sizes.N]
                partials[source, : end - begin].view(-1).copy_(theirs)
    begin, end = sizes.run(part, rank, world)
    multiply(a_rows[begin:end], b, partials[rank, : end - begin])
    lane.follow(lane.here())


def _gather(
    exchange: Exchange, lane: Lane, call: Call, whole: torch.Tensor, part: int, rank: int, world: int, sizes: Parts
) -> None:
    """Copy the results of a part from the peers to the output `whole` [M, N]."""
    place = sizes.results + part * sizes.stride
    with lane.side():
        exchange.wait_all(RESULT_ROWS.value + part)
        for step in range(1, world):
            owner = (rank + step) % world
            begin, end = sizes.run(part, owner, world)
            whole[begin:end].view(-1).copy_(call.data(owner, whole.dtype)[place : place + (end - begin) * sizes.N])


def products(
    part: int, first: int, count: int, rank: int, world_size: int, sizes: Parts
) -> list[tuple[int, int, int]]:
    """(first row, last row, element of the own slot) of the products of a group, joined where both lie together."""
    steps = range(first + 1, first + count + 1)
    places = [(part * (world_size - 1) + step - 1) * sizes.stride for step in steps]
    runs = [sizes.run(part, (rank + step) % world_size, world_size) for step in steps]
    return schedules.joined(((*run, place) for run, place in zip(runs, places, strict=True)), sizes.N)
