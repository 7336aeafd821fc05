"""all_gather_matmul, strategy `chunked`: library products on the shards, each started when the copy engine has it.

Problem. Every rank holds a shard of the activations, rows [S, K] once flattened, and its own weights [K, N_i].
Algorithm. A small kernel puts the own shard into the own slot, where its peers read it. The main stream multiplies the
own shard straight from the input. Meanwhile the side stream copies the other shards, that of rank + 1 first, into the
gathered tensor; the main stream follows, product by product, each on as many rows as came together
(lowering/schedules.py).
Signal protocol. See lowering/transfers.py. One flag for each source, in row PIECE_ROWS: its whole shard is staged. The
slot is only written with the credits of all peers, so nothing is ever revoked.
Limits. K is the last dimension of the shard. Where the gathered dimension lies inside others, their sizes multiply to
MAX_OUTER at most: so many copies, and a batched product, for each shard.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from ditron_inductor.lowering import schedules
from ditron_inductor.lowering.exchange import Exchange, Kernels, multiply
from ditron_inductor.lowering.launch import Launch, round_up
from ditron_inductor.lowering.schedules import Piece
from ditron_inductor.lowering.transfers import PIECE_ROWS
from ditron_inductor.task.nodes import AllGatherMatmul

MAX_OUTER = 8


def obstacle(node: AllGatherMatmul, shape: Sequence[int]) -> str:
    """Why the strategy cannot run a shard of `shape` [.., S, .., K], or an empty string. Equal on all ranks."""
    outer = math.prod(shape[: node.gather_dim])
    if outer > MAX_OUTER:
        return f"the gathered dimension lies inside {outer} slices, and more than {MAX_OUTER} are too many copies"
    return ""


@dataclass(frozen=True)
class Geometry:
    """Sizes that all ranks share: `rows` of a shard, in `outer` runs that the gathered tensor keeps apart; the slot's
    bytes. And what this rank copies and multiplies together: `groups`, see `schedules.gather_schedule`.
    """

    rows: int
    K: int
    outer: int
    nbytes: int
    groups: tuple[tuple[Piece, ...], ...]
    kernels: Kernels = field(compare=False, repr=False)


def geometry(node: AllGatherMatmul, launch: Launch, shard: torch.Tensor, columns: int, k: int) -> Geometry:
    """See Geometry. columns: of all weights together, the largest on any rank; k: K."""
    world = node.world_size
    rows = math.prod(shard.shape[:-1])
    outer = math.prod(shard.shape[: node.gather_dim])
    if outer == 1:
        itemsize = shard.element_size()
        groups = schedules.gather_schedule(world, launch.rank, rows, (columns,), k, itemsize, launch.num_sms)
    else:
        groups = tuple((Piece(step, 0, rows),) for step in range(1, world))
    return Geometry(
        rows=rows,
        K=k,
        outer=outer,
        nbytes=round_up(rows * k * shard.element_size(), 256),
        groups=groups,
        kernels=Kernels(launch),
    )


def all_gather_matmul(
    node: AllGatherMatmul, launch: Launch, sizes: Geometry, shard: torch.Tensor, weights: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """shard [.., S, .., K] with S at `gather_dim`, weights [K, N_i].

    Returns the products [rows, N_i], then the gathered tensor [.., W*S, .., K] if the node wants it. See the module.
    """
    world, rank, rows, K = node.world_size, launch.rank, sizes.rows, sizes.K
    shape = list(shard.shape)
    shape[node.gather_dim] *= world
    shard = shard.contiguous().view(rows, K)
    outs = [shard.new_empty(world * rows, weight.shape[1]) for weight in weights]
    # Where nobody else wants it, this is where the copies land, and the own part stays empty.
    gathered = shard.new_empty(shape)
    whole = _Whole(gathered, outs, world, sizes)
    with launch.call(nbytes=sizes.nbytes) as call:
        exchange = Exchange(sizes.kernels, call)
        staged = [call.data((rank + step) % world, shard.dtype)[: rows * K].view(rows, K) for step in range(world)]
        with call.fork() as lane:
            exchange.stage(shard, gathered.view(-1, K)[rank * rows :] if node.return_gathered and whole.plain else None)
            if node.return_gathered and not whole.plain:
                whole.rows_of(gathered, rank).copy_(whole.split(shard))
            with lane.side():
                # One wait for all shards, before the first product, which may leave no SM free.
                exchange.wait_all(PIECE_ROWS.value)
            for weight, out in zip(weights, outs, strict=True):
                multiply(whole.split(shard), weight, whole.rows_of(out, rank))
            arrived = []
            with lane.side():
                for group in sizes.groups:
                    for piece in together(group):
                        whole.receive(piece, (rank + piece.step) % world, staged[piece.step])
                    arrived.append(lane.mark())
            # In turns on two streams: the first tiles of one product fill the SMs that the last ones of another leave.
            for turn, (group, mark) in enumerate(zip(sizes.groups, arrived, strict=True)):
                with lane.beside() if turn % 2 == 0 else nullcontext():
                    lane.wait(mark)
                    for a, products in whole.parts_of(group, rank):
                        for weight, out in zip(weights, products, strict=True):
                            multiply(a, weight, out)
        results = [*outs, gathered] if node.return_gathered else outs
        exchange.close(results)
    return results


def together(group: Sequence[Piece]) -> Iterator[Piece]:
    """The pieces of a group with those of one shard joined: a copy each."""
    for step, pieces in itertools.groupby(group, key=lambda piece: piece.step):
        of_step = list(pieces)
        yield Piece(step, of_step[0].first, of_step[-1].last)


class _Whole:
    """The gathered tensor and the products, all rows of all ranks, and where a rank's rows are in them.

    plain: a shard's rows lie together. Else they are `outer` runs, and all views of them have three dimensions.
    """

    def __init__(self, gathered: torch.Tensor, outs: list[torch.Tensor], world_size: int, sizes: Geometry) -> None:
        self.plain = sizes.outer == 1
        self._gathered = gathered.view(-1, sizes.K)
        self._outs = outs
        self._world = world_size
        self._sizes = sizes

    def rows_of(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        """The rows of `rank` in x [.., C]: [rows, C] or [outer, rows / outer, C]."""
        rows, outer, columns = self._sizes.rows, self._sizes.outer, x.shape[-1]
        if self.plain:
            return x.view(self._world * rows, columns)[rank * rows : (rank + 1) * rows]
        return x.view(outer, self._world, rows // outer, columns)[:, rank]

    def split(self, shard: torch.Tensor) -> torch.Tensor:
        """shard [rows, K] in the form of `rows_of`."""
        outer = self._sizes.outer
        return shard if self.plain else shard.view(outer, self._sizes.rows // outer, shard.shape[1])

    def receive(self, piece: Piece, source: int, staged: torch.Tensor) -> None:
        """Copy a piece of a peer's shard [rows, K] to where it belongs, in runs of contiguous memory."""
        if self.plain:
            self.rows_of(self._gathered, source)[piece.first : piece.last].copy_(staged[piece.first : piece.last])
            return
        for target, run in zip(self.rows_of(self._gathered, source), self.split(staged), strict=True):
            target.copy_(run)

    def parts_of(self, group: Sequence[Piece], rank: int) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
        """(left operand, products) of a group: one for each run of rows that lie together."""
        if self.plain:
            for first, last in schedules.runs(group, rank, self._world, self._sizes.rows):
                yield self._gathered[first:last], [out[first:last] for out in self._outs]
            return
        for piece in group:
            source = (rank + piece.step) % self._world
            yield self.rows_of(self._gathered, source), [self.rows_of(out, source) for out in self._outs]
