"""all_to_all_matmul, strategy `chunked`: library products of the pieces of one rank after the other, added up.

Problem. It is that of tile.py. Algorithm. A small kernel puts x into the rank's own slot, where the peers read it. The
main stream multiplies the own piece [rows, K/W] by its rows of the weight, directly from the input. Meanwhile the side
stream copies the peers' pieces, beginning with that of rank + 1, and the main stream adds their products to the output,
piece by piece. Every partial sum is rounded to the output's dtype, as in a chain of matmuls. If the node returns the
received tensor, one copy at the end puts the pieces side by side. Signal protocol. See lowering/transfers.py. There is
one flag for each source, in row PIECE_ROWS: all of its x is in its slot. The slot is written only with the credits of
all peers, so it is never revoked. Limits. If the scattered dimension lies inside others, x is copied first, so that
each rank's rows lie together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ditron_inductor.device.lanes import Transfer
from ditron_inductor.device.workspace import Call
from ditron_inductor.lowering.all_to_all_matmul.tile import by_rank
from ditron_inductor.lowering.chunked_exchange import ChunkedExchange, Kernels, multiply
from ditron_inductor.lowering.host.launch import Launch, round_up
from ditron_inductor.lowering.host.launcher import Bound
from ditron_inductor.lowering.transfers import PIECE_ROWS
from ditron_inductor.task.nodes import AllToAllMatmul
from ditron_inductor.task.ulysses import received_shape


@dataclass(frozen=True, eq=False)
class Geometry:
    """The layout of a call, equal on all ranks: a rank has `rows` rows, and C columns in each of its runs."""

    rows: int
    C: int
    nbytes: int
    kernels: Kernels = field(repr=False)


def geometry(node: AllToAllMatmul, launch: Launch, x: torch.Tensor, columns: int, k: int) -> Geometry:
    """Returns the Geometry for x [.., W*S, .., parts * C] with W*S at `scatter_dim`."""
    rows = math.prod(x.shape[:-1]) // node.world_size
    nbytes = round_up(node.world_size * rows * x.shape[-1] * x.element_size(), 256)
    return Geometry(rows, x.shape[-1] // node.parts, nbytes, Kernels(launch))


def all_to_all_matmul(
    node: AllToAllMatmul, launch: Launch, sizes: Geometry, x: torch.Tensor, weight: torch.Tensor
) -> list[torch.Tensor]:
    """Returns the output [rows, N] for x [.., W*S, .., parts * C] with W*S at `scatter_dim` and weight [K, N]; then the
    received tensor [.., S, .., K] if the node returns it. See the module.
    """
    world, rank, rows, C, parts = node.world_size, launch.rank, sizes.rows, sizes.C, node.parts
    pieces = by_rank(node, x)
    out = x.new_empty(rows, weight.shape[1])
    received = x.new_empty(received_shape(x.shape, node.scatter_dim, world)) if node.return_received else None
    # The pieces, by the rank that they come from. The own piece may stay empty.
    arrived = x.new_empty(world, rows, parts * C)
    weights = weight.unflatten(0, (parts, world, C))
    outs = (out,) if received is None else (out, received)
    with launch.call(nbytes=sizes.nbytes) as call:
        plan = call.kept(sizes, lambda call: _plan(node, launch, sizes, call, x, [out.numel() for out in outs]))
        with call.fork() as lane:
            plan.stage(lane.main, (pieces,), (pieces,))
            # Wait once for all pieces, and before the first product, which may leave no SM free.
            plan.wait_all(lane.side)
            base = arrived.data_ptr()
            marks = []
            for transfers in plan.transfers:
                lane.copy(transfers, base)
                marks.append(lane.mark())
            own = pieces.view(world, rows, parts * C)[rank]
            _add(own, weights[:, rank], out, None)
            for step, mark in enumerate(marks, 1):
                source = (rank + step) % world
                lane.wait(mark)
                _add(arrived[source], weights[:, source], out, out)
            if received is not None:
                arrived[rank].copy_(own)
                by_source = arrived.view(world, rows, parts, C).permute(1, 2, 0, 3)
                received.view(rows, parts, world, C).copy_(by_source)
        plan.close(call.stream, outs)
    return list(outs)


def _add(piece: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, added: torch.Tensor | None) -> None:
    """Computes out = added + piece [rows, parts * C] @ weights [parts, C, N]. added: `out` itself, or None."""
    C = weights.shape[1]
    for part in range(weights.shape[0]):
        multiply(piece[:, part * C : (part + 1) * C], weights[part], out, added)
        added = out


@dataclass(frozen=True)
class _Plan:
    """What the calls that use one slot have in common: the launches, and the copies from each source in order."""

    stage: Bound
    wait_all: Bound
    transfers: list[list[Transfer]]
    close: Bound


def _plan(
    node: AllToAllMatmul, launch: Launch, sizes: Geometry, call: Call, x: torch.Tensor, numels: Sequence[int]
) -> _Plan:
    """Returns the _Plan. numels: the elements of each output."""
    world, rank = node.world_size, launch.rank
    nbytes = sizes.rows * node.parts * sizes.C * x.element_size()
    exchange = ChunkedExchange(sizes.kernels, call)
    transfers: list[list[Transfer]] = []
    for step in range(1, world):
        source = (rank + step) % world
        theirs = call.data(source, x.dtype).data_ptr() + rank * nbytes
        transfers.append([Transfer(source * nbytes, theirs, nbytes)])
    return _Plan(
        stage=exchange.stage(world * sizes.rows * node.parts * sizes.C, copied=False),
        wait_all=exchange.wait_all(PIECE_ROWS.value),
        transfers=transfers,
        close=exchange.close(tuple(numels)),
    )
