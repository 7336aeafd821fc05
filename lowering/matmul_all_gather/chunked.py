"""matmul_all_gather, strategy `chunked`: library products part by part, which the copy engines of the peers fetch.

Problem. Every rank holds a [M, K], b [K, N] of its own columns (or a of its own rows), and wants the products of all.
Algorithm. The rows are cut into parts. The main stream multiplies one part after the other, straight into the own slot,
where the peers read them; a small kernel behind each tells them. Meanwhile the side stream copies the same part of all
peers. Gathered along the first dimension it goes to its place in the output, where the own product follows at the end;
else to a buffer, and one copy at the end puts all ranks' products side by side, as the library would after its gather.
Signal protocol. See lowering/transfers.py. A flag for each part, from row PIECE_ROWS on, the same to every peer.
Limits. None on M, N, K.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ditron_inductor.device.lanes import HERE
from ditron_inductor.device.workspace import Call
from ditron_inductor.lowering import schedules
from ditron_inductor.lowering.exchange import Exchange, Group, Kernels, Operands
from ditron_inductor.lowering.host.launch import Launch, round_up, rows_of
from ditron_inductor.lowering.host.launcher import Bound
from ditron_inductor.lowering.matmul_all_gather.parts import gathered_like
from ditron_inductor.lowering.transfers import PIECE_ROWS
from ditron_inductor.task.nodes import MatmulAllGather

MOST_PARTS = 4
LEAST_ROWS = 512
"""Of a part: each of them reads the whole weight."""
INTERPRETED_LEAST_ROWS = 16


def obstacle(node: MatmulAllGather, shape: Sequence[int]) -> str:
    """Why the strategy cannot run a left operand of `shape` [.., K]: always empty, nothing is in its way."""
    return ""


@dataclass(frozen=True, eq=False)
class Geometry:
    """Sizes that all ranks share: the product [M, N] of a rank, the parts of its rows, the slot's bytes.

    outer: of so many runs the output has one of each rank after the other; 1 where the ranks' products lie together.
    """

    M: int
    N: int
    outer: int
    parts: int
    nbytes: int
    kernels: Kernels = field(repr=False)


def geometry(node: MatmulAllGather, launch: Launch, a: torch.Tensor, columns: int, k: int) -> Geometry:
    """a [.., K]; columns: N; k: the largest K on any rank. See Geometry."""
    M = math.prod(a.shape[:-1])
    least = INTERPRETED_LEAST_ROWS if launch.interpreted else LEAST_ROWS
    return Geometry(
        M=M,
        N=columns,
        outer=math.prod(a.shape[: node.gather_dim]),
        parts=max(1, min(M // least, MOST_PARTS)),
        nbytes=round_up(M * columns * a.element_size(), 256),
        kernels=Kernels(launch),
    )


def matmul_all_gather(
    node: MatmulAllGather,
    launch: Launch,
    sizes: Geometry,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """a_i [.., K_i], b_i [K_i, N], bias [N]; returns what all ranks compute along the node's dimension. See the
    module.
    """
    out = gathered_like(node, a[0], sizes.N)
    world, run = node.world_size, sizes.M * sizes.N // sizes.outer
    # Where the ranks' products lie together the copies land in the output itself.
    arrived = out if sizes.outer == 1 else out.new_empty(world, sizes.outer, run)
    with launch.call(nbytes=sizes.nbytes) as call:
        plan = call.kept(sizes, lambda call: _plan(node, launch, sizes, call, a[0]))
        operands = Operands([rows_of(one).split_with_sizes(plan.lengths) for one in a], b, bias)
        base = arrived.data_ptr()
        plan.open(call.stream)
        with call.fork() as lane:
            # In turns on two streams: a product begins while the last tiles of the one before it run.
            for turn, group in enumerate(plan.groups):
                with lane.beside() if turn % 2 == 1 else HERE:
                    done = group.send(lane, operands)
                group.receive(lane, done, base)
        if sizes.outer == 1:
            out.view(world, run)[launch.rank].copy_(plan.product.view(run))
        else:
            parts = list(arrived.unbind())
            parts[launch.rank] = plan.product.view(sizes.outer, run)
            torch.cat(parts, 1, out=out.view(sizes.outer, world * run))
        plan.close(call.stream, (out,))
    return out


@dataclass(frozen=True)
class _Plan:
    """What calls with one slot have in common: launches, copies, lengths of the parts, the product in the own slot."""

    open: Bound
    groups: list[Group]
    close: Bound
    lengths: list[int]
    product: torch.Tensor


def _plan(node: MatmulAllGather, launch: Launch, sizes: Geometry, call: Call, a: torch.Tensor) -> _Plan:
    world, rank, N = node.world_size, launch.rank, sizes.N
    exchange = Exchange(sizes.kernels, call)
    product = call.data(rank, a.dtype)[: sizes.M * N].view(sizes.M, N)
    pitch = N * a.element_size()
    runs = schedules.cut(sizes.M, sizes.parts)
    groups = []
    for part, (first, last) in enumerate(runs):
        transfers = []
        for step in range(1, world):
            source = (rank + step) % world
            theirs = call.data(source, a.dtype).data_ptr() + first * pitch
            transfers.append(((source * sizes.M + first) * pitch, theirs, (last - first) * pitch))
        row = PIECE_ROWS.value + part
        groups.append(
            Group(
                products=[(part, product[first:last])],
                publish=exchange.publish(0, world - 1, 1, row),
                wait=exchange.wait(0, world - 1, 1, row),
                transfers=transfers,
            )
        )
    return _Plan(
        open=exchange.open(),
        groups=groups,
        close=exchange.close((world * sizes.M * N,)),
        lengths=[last - first for first, last in runs],
        product=product,
    )
