"""matmul_all_reduce, strategy `chunked`: a reduce-scatter and an all-gather in parts, behind library products.

Problem. Every rank holds a [M, K] and b [K, N] of its own slice of K, and every rank wants the whole sum. Several
products a_i @ b_i may be added up, and a row to them; the library adds them, chunk by chunk. Algorithm. One kernel
reduces small products (see all_reduce_kernel.py). The rows of larger products are cut into parts, and each part into
one run of rows for every rank, its owner. The main stream multiplies part by part into this rank's slot; within a part,
the rows of rank + 1 come first and the rank's own rows last. The side stream copies the peers' partial products of this
rank's rows, adds them up in rank order in fp32, rounds once, and stores the result in the output and in this rank's
slot. From there the peers copy it into their outputs while the next part is multiplied. So all ranks have the bits of
the owner's sum. An epilogue is a kernel at the end, on every rank: its extra tensors may differ between ranks, so the
owner cannot compute it for the others. The part of an epilogue that comes before the reduction is a launch behind each
product. Signal protocol. See lowering/transfers.py. Flag row PIECE_ROWS + part publishes the partial products of a part
for their owner. Flag row RESULT_ROWS + part publishes the owner's results, which are not written before the slot is
free either. Limits. None on M, N and K. Runs may be empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ditron_inductor.device.lanes import Lane, Transfer
from ditron_inductor.device.workspace import Call
from ditron_inductor.lowering import schedules
from ditron_inductor.lowering.all_reduce import all_reduce_kernel
from ditron_inductor.lowering.chunked_exchange import ChunkedExchange, Kernels, Operands, PieceGroup
from ditron_inductor.lowering.epilogues import Finisher, Preparer, finisher_of_sum, preparer_of
from ditron_inductor.lowering.host.launch import Launch, ceil_div, round_up, rows_of
from ditron_inductor.lowering.host.launcher import Bound
from ditron_inductor.lowering.transfers import PIECE_ROWS, RESULT_ROWS
from ditron_inductor.task.nodes import ReducedSum


@dataclass(frozen=True, eq=False)
class Parts:
    """The layout of a call, from sizes that all ranks share: the output [M, N] has `parts` parts, each with `length`
    rows for every rank. groups: (first, count) of the steps from this rank whose products are computed as one. stride:
    the elements from one partial product in the slot to the next. results: the element where the results begin.
    finisher, preparer: the parts of the epilogue behind and before the reduction, or None.
    """

    M: int
    N: int
    parts: int
    length: int
    groups: tuple[tuple[int, int], ...]
    stride: int
    results: int
    nbytes: int
    kernels: Kernels = field(repr=False)
    finisher: Finisher | None = field(repr=False)
    preparer: Preparer | None = field(repr=False)

    def run(self, part: int, owner: int, world_size: int) -> tuple[int, int]:
        """Returns the rows (first, last), without `last`, of the output that `owner` adds up in a part."""
        first = (part * world_size + owner) * self.length
        return min(first, self.M), min(first + self.length, self.M)


Geometry = Parts | all_reduce_kernel.Geometry


def geometry(node: ReducedSum, launch: Launch, a: torch.Tensor, columns: int, k: int) -> Geometry:
    """Returns the Geometry for a [.., K]. columns: N. k: the largest K on any rank."""
    if all_reduce_kernel.fits(launch, math.prod(a.shape[:-1]) * columns, a.element_size()):
        return all_reduce_kernel.geometry(node, launch, a, columns)
    return parts_geometry(node, launch, a, columns, k)


def parts_geometry(node: ReducedSum, launch: Launch, a: torch.Tensor, columns: int, k: int) -> Parts:
    """Returns the Parts, however small the product is; see `geometry`."""
    world, itemsize, num_sms = node.world_size, a.element_size(), launch.num_sms
    M = math.prod(a.shape[:-1])
    parts = schedules.all_reduce_parts(world, M, columns, k, itemsize, num_sms)
    length = ceil_div(M, parts * world)
    cut = schedules.scatter_schedule(world, length, columns, num_sms, most_parts=1)
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
        finisher=finisher_of_sum(node, a),
        preparer=preparer_of(node, a.device),
    )


def reduced_sum(
    node: ReducedSum,
    launch: Launch,
    sizes: Geometry,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    extras: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    """Returns the outputs [.., N] for a_i [.., K_i], b_i [K_i, N], bias [N] and the epilogue's extra tensors."""
    if isinstance(sizes, all_reduce_kernel.Geometry):
        return all_reduce_kernel.reduced_sum(node, launch, sizes, a, b, bias, extras)
    first = a[0]
    out = first.new_empty([*first.shape[:-1], sizes.N])
    whole = out if out.dim() == 2 else out.view(sizes.M, sizes.N)
    partials = first.new_empty(sizes.parts * node.world_size * sizes.length, sizes.N)
    with launch.call(nbytes=sizes.nbytes) as call:
        plan = call.kept(sizes, lambda call: _plan(node, launch, sizes, call, first))
        pre = None
        if sizes.preparer is not None:
            pre = sizes.preparer.runs(extras, sizes.M, sizes.N, lambda x: x.split_with_sizes(plan.lengths))
        operands = Operands([rows_of(left).split_with_sizes(plan.lengths) for left in a], b, bias, pre)
        result, arrived = out.data_ptr(), partials.data_ptr()
        plan.open(call.stream)
        with call.fork() as lane:
            before = None
            for part in plan.parts:
                for group in part.groups:
                    group.receive(lane, group.send(lane, operands), arrived)
                if part.own is not None:
                    operands.multiply(part.own, partials[part.own_partial])
                lane.follow(lane.here())
                if before is not None:
                    before.gather(lane, result)
                part.reduce(lane.side, partials[part.partials], (out,), (whole[part.rows],))
                before = part
            assert before is not None
            before.gather(lane, result)
        outs = [out] if sizes.finisher is None else sizes.finisher.finish_sum(out, extras)
        plan.close(call.stream, tuple(outs))
    return outs


@dataclass(frozen=True)
class _Part:
    """What the calls that use one slot have in common in one part.

    Attributes:
        own: the index of the run of this rank's own rows, None if it has none.
        own_partial, partials: the places, in the tensor of partial products, of the own product and of all of the part.
        rows: this rank's rows of the output.
        wait, results: the wait for the peers' results, and the copies of them into the output.
    """

    groups: list[PieceGroup]
    own: int | None
    own_partial: slice
    partials: slice
    rows: slice
    reduce: Bound
    wait: Bound
    results: list[Transfer]

    def gather(self, lane: Lane, out: int) -> None:
        """Copies the peers' results into the output at the address `out`."""
        self.wait(lane.side)
        lane.copy(self.results, out)


@dataclass(frozen=True)
class _Plan:
    """What the calls that use one slot have in common. `lengths` has the rows of each run that is multiplied as one."""

    open: Bound
    parts: list[_Part]
    close: Bound
    lengths: list[int]


def _plan(node: ReducedSum, launch: Launch, sizes: Parts, call: Call, a: torch.Tensor) -> _Plan:
    world, rank = node.world_size, launch.rank
    exchange = ChunkedExchange(sizes.kernels, call)
    found = [[products(part, *group, rank, world, sizes) for group in sizes.groups] for part in range(sizes.parts)]
    runs = [(begin, end) for part in found for of_group in part for begin, end, _ in of_group]
    own_runs = [sizes.run(part, rank, world) for part in range(sizes.parts)]
    lengths, place_of = schedules.partition([*own_runs, *runs])
    parts = []
    for part, (first, last) in enumerate(own_runs):
        groups = [
            _group(part, group, of_group, place_of, exchange, call, a.dtype, rank, world, sizes)
            for group, of_group in zip(sizes.groups, found[part], strict=True)
        ]
        base, own = part * world * sizes.length, (part * world + rank) * sizes.length
        result = sizes.results + part * sizes.stride
        reduce = exchange.reduce(
            last - first,
            sizes.N,
            stride=sizes.length * sizes.N,
            average=node.reduce_op == "avg",
            result=result,
            row=RESULT_ROWS.value + part,
        )
        results = []
        for step in range(1, world):
            owner = (rank + step) % world
            begin, end = sizes.run(part, owner, world)
            results.append(_transfer(call, owner, a.dtype, result, begin, end - begin, sizes))
        parts.append(
            _Part(
                groups=groups,
                own=place_of[first] if first < last else None,
                own_partial=slice(own, own + last - first),
                partials=slice(base, base + world * sizes.length),
                rows=slice(first, last),
                reduce=reduce,
                wait=exchange.wait_all(RESULT_ROWS.value + part),
                results=[transfer for transfer in results if transfer.nbytes > 0],
            )
        )
    close = exchange.close((sizes.M * sizes.N,) * node.num_outputs)
    return _Plan(open=exchange.open(), parts=parts, close=close, lengths=lengths)


def _group(
    part: int,
    group: tuple[int, int],
    of_group: list[tuple[int, int, int]],
    place_of: dict[int, int],
    exchange: ChunkedExchange,
    call: Call,
    dtype: torch.dtype,
    rank: int,
    world: int,
    sizes: Parts,
) -> PieceGroup:
    """Returns the products `of_group` for their owners, with the copies of the peers' products of this rank's rows."""
    slot = call.data(rank, dtype)
    targets = [
        (place_of[begin], slot[place : place + (end - begin) * sizes.N].view(end - begin, sizes.N))
        for begin, end, place in of_group
        if begin < end
    ]
    begin, end = sizes.run(part, rank, world)
    first, count = group
    transfers = []
    for step in range(first + 1, first + count + 1):
        source = (rank - step) % world
        place = (part * (world - 1) + step - 1) * sizes.stride
        to_row = (part * world + source) * sizes.length
        transfers.append(_transfer(call, source, dtype, place, to_row, end - begin, sizes))
    row = PIECE_ROWS.value + part
    publish, wait = exchange.publish(first, count, 1, row), exchange.wait(first, count, 1, row)
    return PieceGroup(targets, publish, wait, [transfer for transfer in transfers if transfer.nbytes > 0])


def _transfer(call: Call, source: int, dtype: torch.dtype, place: int, row: int, rows: int, sizes: Parts) -> Transfer:
    """Returns the copy of `rows` rows from element `place` of a peer's slot to row `row` of a tensor."""
    pitch = sizes.N * dtype.itemsize
    return Transfer(row * pitch, call.data(source, dtype).data_ptr() + place * dtype.itemsize, rows * pitch)


def products(part: int, first: int, count: int, rank: int, world_size: int, sizes: Parts) -> list[tuple[int, int, int]]:
    """Returns (first row, last row, element of the slot) of a group's products; adjacent ones are joined."""
    steps = range(first + 1, first + count + 1)
    places = [(part * (world_size - 1) + step - 1) * sizes.stride for step in steps]
    runs = [sizes.run(part, (rank + step) % world_size, world_size) for step in steps]
    return schedules.joined(((*run, place) for run, place in zip(runs, places, strict=True)), sizes.N)
