"""all_gather_contract, strategy `chunked`: library products on parts of the gathered tensor, each started when the copy
engine has it.

Problem. Every rank holds a shard of G [W*S, C] (the transpose of one where the last dimension is gathered), and its own
factors; the products contract the gathered dimension.
Algorithm. The dimension that the products keep is cut, not the one that they contract: a part is a run of columns of G,
from all ranks, and makes complete rows (or columns) of the outputs. So no product is added to another one: sums are
those of the library, rounded once. A small kernel puts the own shard into the own slot, part by part; the side stream
copies the parts of all shards, those of the first part first; the main stream follows, product by product. Where the
library could not read a part as the ranks' pieces lie, or the gathered tensor is wanted elsewhere too, one more copy
puts it in its place.
Signal protocol. See lowering/transfers.py. One flag for each source, in row PIECE_ROWS: its whole shard is staged. The
slot is only written with the credits of all peers, so nothing is ever revoked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ditron_inductor.device.lanes import HERE, Transfer
from ditron_inductor.device.workspace import Call
from ditron_inductor.lowering import schedules
from ditron_inductor.lowering.exchange import Exchange, Kernels, multiply
from ditron_inductor.lowering.host.launch import Launch, ceil_div, round_up
from ditron_inductor.lowering.host.launcher import Bound
from ditron_inductor.lowering.transfers import PIECE_ROWS
from ditron_inductor.task.nodes import AllGatherContract, Contraction

MOST_PARTS = 4
LEAST_COLUMNS = 256
INTERPRETED_LEAST_COLUMNS = 16
"""Nobody wants parts with fewer columns of G."""
ALIGNED = 8
"""Columns of a part are a multiple of so many, but for the last one: libraries are slow on rows that are not."""


def obstacle(node: AllGatherContract, shape: Sequence[int]) -> str:
    """Why the strategy cannot run a shard of `shape`, or an empty string: it always can."""
    return ""


@dataclass(frozen=True, eq=False)
class Geometry:
    """Sizes that all ranks share: of the contraction, the runs (first, last) of C that are the parts, the slot's bytes.

    direct: the copies land as the library reads them, and as the gathered tensor lies.
    """

    sizes: Contraction
    parts: tuple[tuple[int, int], ...]
    direct: bool
    nbytes: int
    kernels: Kernels = field(repr=False)


def geometry(node: AllGatherContract, launch: Launch, shard: torch.Tensor, columns: int, k: int) -> Geometry:
    """See Geometry. columns: of all factors together, the largest on any rank; k: W*S."""
    sizes = Contraction.of(shard.shape, node.gather_dim)
    parts = cut(sizes.kept, columns, launch.num_sms, INTERPRETED_LEAST_COLUMNS if launch.interpreted else LEAST_COLUMNS)
    together = not sizes.last and sizes.block == sizes.depth
    return Geometry(
        sizes=sizes,
        parts=parts,
        direct=together and (len(parts) == 1 or not node.return_gathered),
        nbytes=round_up(sizes.kept * sizes.depth * shard.element_size(), 256),
        kernels=Kernels(launch),
    )


def cut(kept: int, columns: int, num_sms: int, least: int) -> tuple[tuple[int, int], ...]:
    """The parts (first, last) of `kept` columns of G whose products have so many `columns`.

    As many as MOST_PARTS, if the product of each still has tiles for half of the SMs: two of them share the GPU.
    """
    tile_m, tile_n, _ = schedules.TILES[0]
    parts = MOST_PARTS
    while parts > 1:
        length = ceil_div(kept, parts)
        tiles = ceil_div(length, tile_m) * ceil_div(columns, tile_n)
        if length >= least and (2 * tiles >= num_sms or least < LEAST_COLUMNS):
            break
        parts //= 2
    length = round_up(ceil_div(kept, parts), ALIGNED)
    return tuple((first, min(first + length, kept)) for first in range(0, kept, length))


def all_gather_contract(
    node: AllGatherContract, launch: Launch, sizes: Geometry, shard: torch.Tensor, factors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """shard [.., S, ..] with S at `gather_dim`, factors [W*S, N_i], or [N_i, W*S].

    Returns the outputs [C, N_i], or [N_i, C], then the gathered tensor [.., W*S, ..] if the node wants it. See the
    module.
    """
    world, rank = node.world_size, launch.rank
    kept, depth, last = sizes.sizes.kept, sizes.sizes.depth, sizes.sizes.last
    whole = list(shard.shape)
    whole[node.gather_dim] *= world
    # By parts: [C, S] cut along C, or [S, C].
    own = shard.reshape(kept, depth) if last else shard.reshape(depth, kept)
    pieces = [own[a:b] if last else own[:, a:b] for a, b in sizes.parts]
    staged = own.contiguous() if last or len(pieces) == 1 else torch.cat([piece.reshape(-1) for piece in pieces])
    landing = shard.new_empty(world * kept * depth)
    arrived = landing.split_with_sizes([world * piece.numel() for piece in pieces])
    gathered = landing.view(whole) if sizes.direct and len(pieces) == 1 else landing
    placed = gathered
    if not sizes.direct:
        gathered = shard.new_empty(whole)
        # [C, W, S], or [outer, W, block, C]: where the ranks' pieces belong, by rank.
        runs = (kept, world, depth) if last else (depth // sizes.sizes.block, world, sizes.sizes.block, kept)
        placed = gathered.view(runs).transpose(0, 1)
    shapes = [(kept, one.shape[1]) if node.gathered_first else (one.shape[0], kept) for one in factors]
    outs = [shard.new_empty(shape) for shape in shapes]
    with launch.call(nbytes=sizes.nbytes) as call:
        plan = call.kept(sizes, lambda call: _plan(node, launch, sizes, call, shard, [one.numel() for one in outs]))
        with call.fork() as lane:
            plan.stage(lane.main, (staged,), (staged,))
            # One wait for all shards, before the first product, which may leave no SM free.
            plan.wait_all(lane.side)
            marks = []
            base = landing.data_ptr()
            for transfers in plan.transfers:
                lane.copy(transfers, base)
                marks.append(lane.mark())
            # In turns on two streams: the first tiles of one product fill the SMs that the last ones of another leave.
            for turn, ((a, b), piece, part, mark) in enumerate(zip(sizes.parts, pieces, arrived, marks, strict=True)):
                with lane.beside() if turn % 2 == 1 else HERE:
                    part.view(world, *piece.shape)[rank].copy_(piece)
                    lane.wait(mark)
                    if sizes.direct:
                        G = part.view(world * depth, b - a)
                    else:
                        target = placed[:, a:b] if last else placed[..., a:b]
                        target.copy_(part.view(world, *target.shape[1:]))
                        G = gathered.view(kept, world * depth)[a:b].t() if last else gathered.view(-1, kept)[:, a:b]
                    for out, factor in zip(outs, factors, strict=True):
                        if node.gathered_first:
                            multiply(G.t(), factor, out[a:b])
                        else:
                            multiply(factor, G, out[:, a:b])
        plan.close(call.stream, (*outs, gathered) if node.return_gathered else tuple(outs))
    return [*outs, gathered] if node.return_gathered else outs


@dataclass(frozen=True)
class _Plan:
    """What calls with one slot have in common: launches, and the copies of each part to where it lands."""

    stage: Bound
    wait_all: Bound
    close: Bound
    transfers: list[list[Transfer]]


def _plan(
    node: AllGatherContract, launch: Launch, sizes: Geometry, call: Call, shard: torch.Tensor, numels: Sequence[int]
) -> _Plan:
    """numels: of the outputs."""
    world, rank, depth, kept = node.world_size, launch.rank, sizes.sizes.depth, sizes.sizes.kept
    exchange = Exchange(sizes.kernels, call)
    itemsize = shard.element_size()
    transfers = []
    for first, last in sizes.parts:
        begin, nbytes = first * depth * itemsize, (last - first) * depth * itemsize
        found: list[Transfer] = []
        for step in range(1, world):
            source = (rank + step) % world
            found.append((world * begin + source * nbytes, call.data(source, shard.dtype).data_ptr() + begin, nbytes))
        transfers.append(found)
    whole = (world * kept * depth,) if node.return_gathered else ()
    return _Plan(
        stage=exchange.stage(kept * depth, copied=False),
        wait_all=exchange.wait_all(PIECE_ROWS.value),
        close=exchange.close((*numels, *whole)),
        transfers=transfers,
    )
