"""all_gather_matmul, strategy `chunked`: library products on the shards, each as soon as its shard is copied.

Problem. It is that of tile.py. Algorithm. A small kernel puts the rank's own shard into the rank's own slot, where the
peers read it. The main stream multiplies the own shard directly from the input, or from the slot if a norm computes the
shard (norms/stage_norm.py). Meanwhile the side stream copies the other shards into the gathered tensor, beginning with
that of rank + 1. The products follow, each with as many rows as lowering/schedules.py puts together. Narrow weights are
multiplied with all rows at once when the last rows have arrived. The library adds a bias in its products. Any other
epilogue is one launch behind the products of each run of rows, beside the next products, or one launch at the end. If
the gathered dimension lies inside others, such as that of the sequences of a batch, a shard is one copy of several
runs, and one batched product for each weight. Signal protocol. See lowering/transfers.py. There is one flag for each
source, in row PIECE_ROWS: its whole shard is in its slot. The slot is written only with the credits of all peers, so it
is never revoked. Limits. K is the last dimension of the shard.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ditron_inductor.device.lanes import HERE, Transfer
from ditron_inductor.device.workspace import Call
from ditron_inductor.lowering import schedules
from ditron_inductor.lowering.chunked_exchange import ChunkedExchange, Kernels, for_batches, multiply, shaped
from ditron_inductor.lowering.epilogues import Finisher
from ditron_inductor.lowering.host.launch import Launch, round_up
from ditron_inductor.lowering.host.launcher import Bound
from ditron_inductor.lowering.norms.rows import all_outputs, pointers, shard_extras
from ditron_inductor.lowering.schedules import Gathering, Piece
from ditron_inductor.lowering.transfers import PIECE_ROWS
from ditron_inductor.task.epilogue import products
from ditron_inductor.task.nodes import AllGatherMatmul
from ditron_inductor.task.schema import norm_output

RUN_ELEMENTS = 4 << 20
"""If a shard's product with the widest weight has at least this many elements, an epilogue is computed run by run,
beside the products that follow. For smaller products one launch at the end takes less time.
"""


@dataclass(frozen=True, eq=False)
class Geometry:
    """The layout of a call, from sizes that all ranks share: a shard has `rows` rows, in `outer` runs that do not lie
    together in the gathered tensor. `schedule` is this rank's Gathering, as a function of the widths of its weights.
    """

    rows: int
    K: int
    outer: int
    nbytes: int
    schedule: Callable[[tuple[int, ...]], Gathering] = field(repr=False)
    kernels: Kernels = field(repr=False)


def geometry(node: AllGatherMatmul, launch: Launch, shard: torch.Tensor, columns: int, k: int) -> Geometry:
    """Returns the Geometry. k: K. It does not depend on `columns`, since weights may be wider on some ranks."""
    rows, itemsize = math.prod(shard.shape[:-1]), shard.element_size()
    outer = math.prod(shard.shape[: node.gather_dim])

    def schedule(widths: tuple[int, ...]) -> Gathering:
        sizes = node.world_size, launch.rank, rows, widths, k, itemsize, launch.num_sms
        return schedules.gather_schedule(*sizes, apart=outer > 1)

    return Geometry(
        rows=rows,
        K=k,
        outer=outer,
        nbytes=round_up(rows * k * itemsize, 256),
        schedule=schedule,
        kernels=Kernels(launch),
    )


def all_gather_matmul(
    node: AllGatherMatmul,
    launch: Launch,
    sizes: Geometry,
    shard: torch.Tensor,
    weights: Sequence[torch.Tensor],
    extras: Sequence[torch.Tensor] = (),
    given: tuple[torch.Tensor | None, ...] = (),
) -> list[torch.Tensor]:
    """Runs a call (see the module). shard [.., S, .., K] with S at `gather_dim`, weights [K, N_i]. extras, given: the
    extra tensors of the epilogue and of the prologue. Returns the outputs [rows, N_i], then the gathered tensor [..,
    W*S, .., K] if the node returns it, then what the prologue returns.
    """
    shape = shard.shape
    shard = shard.contiguous()
    all_rows = node.world_size * sizes.rows
    mm = [shard.new_empty(all_rows, weight.shape[1]) for weight in weights]
    # The copies go here even if the node does not return it. The own part may then stay empty.
    gathered = shard.new_empty(all_rows, sizes.K)
    returned = [] if node.prologue is None else [norm_output(shard, shape, name) for name in node.prologue.returned]
    with launch.call(nbytes=sizes.nbytes) as call:
        plan = call.kept(sizes, lambda call: _plan(node, launch, sizes, call, shard, weights, extras))
        lefts = plan.rows_of(gathered)
        biases = plan.biases(extras, len(weights))
        rights = weights if plan.lengths is not None else [for_batches(weight, sizes.outer) for weight in weights]
        parts = [(rights[i], plan.rows_of(mm[i]), biases[i]) for i in range(len(weights)) if i not in plan.whole]
        ends = RunEnds(plan, mm, extras) if plan.ends_in_runs else None
        with call.fork() as lane:
            copy = lefts[plan.own] if plan.copied else shard
            if node.prologue is None:
                plan.stage(lane.main, (shard,), (copy,))
                left = shaped(shard, plan.shard_shape)
            else:
                outputs = (copy, *([] if "residual" in node.prologue.extras else [shard]), *returned)
                loaded = pointers(shard_extras(given), shard)
                plan.stage(lane.main, shard, loaded, all_outputs(node.prologue, outputs))
                left = plan.staged
            if plan.has_own and not plan.copied:
                lefts[plan.own].copy_(left)
            own_staged = lane.here() if plan.whole else None
            # Wait once for all shards, and before the first product, which may leave no SM free.
            plan.wait_all(lane.side)
            for weight, out, bias in parts:
                multiply(left, weight, out[plan.own], bias)
            if ends is not None:
                ends.make(plan.own)
            arrived = []
            base = gathered.data_ptr()
            for _, transfers in plan.groups:
                lane.copy(transfers, base)
                arrived.append(lane.mark())
            # Products alternate between two streams: the first tiles of one fill the SMs that the last tiles of the
            # product before leave free.
            for turn, ((places, _), mark) in enumerate(zip(plan.groups, arrived, strict=True)):
                with lane.beside() if turn % 2 == 0 else HERE:
                    lane.wait(mark)
                    for place in places:
                        for weight, out, bias in parts:
                            multiply(lefts[place], weight, out[place], bias)
                        if ends is not None:
                            ends.make(place)
            for turn, i in enumerate(plan.whole, start=len(plan.groups)):
                with lane.beside() if turn % 2 == 0 else HERE:
                    lane.wait(own_staged)
                    lane.wait(arrived[-1])
                    multiply(gathered, weights[i], mm[i], biases[i])
        made = None if ends is None else ends.outs
        outs = mm if plan.finisher is None else plan.finisher.finish(mm, extras, made)
        plan.close(call.stream, (*outs, gathered) if node.return_gathered else tuple(outs))
    if node.return_gathered:
        dim = node.gather_dim
        whole = (*shape[:dim], node.world_size * shape[dim], *shape[dim + 1 :])
        outs.append(shaped(gathered, whole))
    return [*outs, *returned]


@dataclass(frozen=True)
class _Plan:
    """What the calls that use one slot have in common: launches, copies, and the places of rows.

    Attributes:
        lengths: the rows of each run that is multiplied as one, in the order of the gathered tensor; None if the rows
        of
            a shard do not lie together, and then each rank's rows are one run.
        apart: (outer, W, rows / outer), the shape of all rows if `lengths` is None.
        own: the index of the run of this rank's own rows.
        has_own: whether the gathered tensor needs the own rows.
        copied: whether `stage` puts the own rows there.
        finisher: computes the node's epilogue, run by run if `ends_in_runs`.
        groups: the runs to multiply, and the copies that bring them.
        whole: the weights that are multiplied with all rows at once.
        staged: the own shard in this rank's slot, in `shard_shape`.
    """

    stage: Bound
    wait_all: Bound
    close: Bound
    shard_shape: tuple[int, ...]
    lengths: list[int] | None
    apart: tuple[int, int, int]
    own: int
    has_own: bool
    copied: bool
    finisher: Finisher | None
    ends_in_runs: bool
    groups: list[tuple[list[int], list[Transfer]]]
    whole: tuple[int, ...]
    staged: torch.Tensor

    def rows_of(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Returns the runs of x [rows, C]: each [length, C], or [outer, rows / outer, C]."""
        if self.lengths is not None:
            return x.split_with_sizes(self.lengths)
        return x.view(*self.apart, x.shape[1]).unbind(1)

    def biases(self, extras: Sequence[torch.Tensor], num_weights: int) -> Sequence[torch.Tensor | None]:
        """Returns, for each weight, the bias that the library adds to its product, or None."""
        if self.finisher is None or not self.finisher.biases:
            return [None] * num_weights
        found = self.finisher.biases
        return [extras[found[i]].view(-1) if i in found else None for i in range(num_weights)]


class RunEnds:
    """Computes an epilogue run by run, into `outs`."""

    def __init__(self, plan: _Plan, mm: Sequence[torch.Tensor], extras: Sequence[torch.Tensor]) -> None:
        assert plan.finisher is not None
        self._finisher = plan.finisher
        self._extras = extras
        self.outs = plan.finisher.new_outputs(mm)
        self._mm = [plan.rows_of(product) for product in mm]
        self._outs = [plan.rows_of(out) for out in self.outs]

    def make(self, place: int) -> None:
        """Computes the outputs of the run `place`, whose products are there."""
        mm, outs = ([runs[place] for runs in of_all] for of_all in (self._mm, self._outs))
        self._finisher.make(mm, self._extras, outs)


def _plan(
    node: AllGatherMatmul,
    launch: Launch,
    sizes: Geometry,
    call: Call,
    shard: torch.Tensor,
    weights: Sequence[torch.Tensor],
    extras: Sequence[torch.Tensor],
) -> _Plan:
    world, rank, rows, K, outer = node.world_size, launch.rank, sizes.rows, sizes.K, sizes.outer
    exchange = ChunkedExchange(sizes.kernels, call)
    plain = outer == 1
    schedule = sizes.schedule(tuple(weight.shape[1] for weight in weights))
    # The bytes of a row, and of a run of rows that lie together in the shard and in the gathered tensor.
    pitch = K * shard.element_size()
    run = rows // outer * pitch
    transfers = []
    for group in schedule.groups:
        found: list[Transfer] = []
        for piece in together(group):
            source = (rank + piece.step) % world
            staged = call.data(source, shard.dtype).data_ptr()
            if plain:
                first = (source * rows + piece.first) * pitch
                found.append(Transfer(first, staged + piece.first * pitch, (piece.last - piece.first) * pitch))
            else:
                found.append(Transfer(source * run, staged, run, outer, world * run))
        transfers.append(found)
    runs = [schedules.runs(group, rank, world, rows) for group in schedule.groups]
    lengths, place = schedules.partition([(rank * rows, (rank + 1) * rows), *itertools.chain(*runs)])
    if plain:
        places = [[place[first] for first, _ in of_group] for of_group in runs]
    else:
        places = [[(rank + piece.step) % world for piece in group] for group in schedule.groups]
    has_own = node.return_gathered or bool(schedule.whole)
    copied = has_own and plain
    epilogue = node.parsed
    sources = range(len(weights)) if epilogue is None else [min(products(output)) for output in epilogue.outputs]
    numels = [world * rows * weights[source].shape[1] for source in sources]
    finisher = None if epilogue is None else Finisher(epilogue, shard, extras, apart=not plain)
    columns = max(weight.shape[1] for weight in weights)
    shard_shape = (rows, K) if plain else (outer, rows // outer, K)
    if node.prologue is None:
        stage = exchange.stage(rows * K, copied=copied)
    else:
        stage = exchange.stage_norm(rows, K, node.prologue, copied=copied)
    return _Plan(
        stage=stage,
        wait_all=exchange.wait_all(PIECE_ROWS.value),
        close=exchange.close((*numels, world * rows * K) if node.return_gathered else tuple(numels)),
        shard_shape=shard_shape,
        lengths=lengths if plain else None,
        apart=(outer, world, rows // outer),
        own=place[rank * rows] if plain else rank,
        has_own=has_own,
        copied=copied,
        finisher=finisher,
        ends_in_runs=finisher is not None and finisher.makes_runs(schedule.whole) and rows * columns >= RUN_ELEMENTS,
        groups=list(zip(places, transfers, strict=True)),
        whole=schedule.whole,
        staged=call.data(rank, shard.dtype)[: rows * K].view(shard_shape),
    )


def together(group: Sequence[Piece]) -> Iterator[Piece]:
    """Returns the pieces of a group with pieces of the same shard joined, so that each is one copy."""
    for step, pieces in itertools.groupby(group, key=lambda piece: piece.step):
        of_step = list(pieces)
        yield Piece(step, of_step[0].first, of_step[-1].last)
