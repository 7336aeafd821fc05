"""all_gather_attention, strategy `chunked`: the library's attention to one part of the keys after the other.

Problem. Every rank holds queries, and the keys and values of a part of the sequence. Its queries attend to all keys.
Algorithm. A small kernel puts the rank's own keys and values, one behind the other, into the rank's own slot, where the
peers read them, and into the gathered tensors if the node returns these. The main stream attends to the own keys at
once. Meanwhile the side stream copies those of rank - 1, rank - 2, ... The main stream follows, source by source or
with several neighbouring sources in one call (see `groups`), and skips what the mask hides. Each call returns the
logarithms of its sums, by which one kernel merges all parts in a fixed order. A bias is cut along its keys in the same
way. Before that, large values that whole rows have in common are subtracted from a bias of floats, because otherwise
the logarithms would lose digits (see `local_attention.anchored`). Signal protocol. See lowering/transfers.py. There is
one flag for each source, in row PIECE_ROWS: its keys and values are in its slot. The slot is written only with the
credits of all peers, so it is never revoked. A rank whose mask hides a source neither reads its keys nor waits for it,
and only the credits hold it back. Limits. Keys and values have the same head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ditron_inductor.device.lanes import Transfer
from ditron_inductor.device.workspace import Call
from ditron_inductor.lowering.attention import local_attention
from ditron_inductor.lowering.attention.block_parts import Span, as_sent, canonical, joined, single, with_rows
from ditron_inductor.lowering.attention.local_attention import Local
from ditron_inductor.lowering.attention.merge import Merge, Partial
from ditron_inductor.lowering.chunked_exchange import ChunkedExchange, Kernels
from ditron_inductor.lowering.host.launch import Launch, round_up
from ditron_inductor.lowering.host.launcher import Bound
from ditron_inductor.lowering.transfers import PIECE_ROWS
from ditron_inductor.task.attention_masks import GIVEN, blocks
from ditron_inductor.task.nodes import AllGatherAttention

JOINED_ROWS = 4096
"""From this number of rows of queries for each key head on, one call attends to several neighbouring sources. Attention
to one source then takes longer than the copy of the next source, so a call does not wait long (by the rates of an H200,
230 GB/s and 600 TFLOP/s).
"""


@dataclass(frozen=True, eq=False)
class Geometry:
    """What calls with operands of one form have in common.

    shape: [B, S, Hkv, D], of a rank's keys and of its values. nbytes: of the slot, for both. paired: see `_landing`.
    own, remote: the calls of the library for the own keys, and for each group of sources. spare: the sources that the
    mask hides, and that are copied only because the gathered tensors are returned. numels: the elements of each output.
    run: the library's attention.
    """

    shape: tuple[int, ...]
    nbytes: int
    paired: bool
    own: list[Span]
    remote: list[tuple[list[int], list[Span]]]
    spare: list[int]
    numels: tuple[int, ...]
    run: Local
    merge: Merge
    kernels: Kernels = field(repr=False)


def geometry(node: AllGatherAttention, launch: Launch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Geometry:
    """Returns the Geometry. Only `nbytes` has to be equal on all ranks; it follows from k."""
    world, rank = node.world_size, launch.rank
    found = blocks(node.mask, rank, world, q.shape[2], k.shape[2])
    own = [single(block) for block in found if block.source == rank]
    sources = list(dict.fromkeys(block.source for block in found if block.source != rank))
    rows = q.shape[2] * q.shape[1] // k.shape[1]
    remote = []
    for of_group in groups(sources, joinable=k.shape[0] == 1 and rows >= JOINED_ROWS):
        remote.append((of_group, joined([block for block in found if block.source in of_group])))
    others = [(rank - step) % world for step in range(1, world)]
    spans = [*own, *(span for _, of_group in remote for span in of_group)]
    B, heads, S, D = k.shape
    return Geometry(
        shape=(B, S, heads, D),
        nbytes=round_up(2 * k.numel() * k.element_size(), 256),
        paired=not any(span.count > 1 for span in spans),
        own=own,
        remote=remote,
        spare=[source for source in others if source not in sources] if node.return_gathered else [],
        numels=(q.numel(), q.shape[:-1].numel(), *(2 * [world * k.numel()] if node.return_gathered else [])),
        run=local_attention.choose(q, k, v, node.softcap, biased=node.mask.kind == GIVEN),
        merge=Merge(q, [span.rows for span in spans]),
        kernels=Kernels(launch),
    )


def groups(sources: Sequence[int], *, joinable: bool) -> list[list[int]]:
    """Returns the sources of each call in the order of their copies: one each or, if joinable, 1, 2, 4, .."""
    found: list[list[int]] = []
    left = list(sources)
    size = 1
    while left:
        found.append(left[:size])
        left = left[size:]
        size = 2 * size if joinable else 1
    return found


def all_gather_attention(
    node: AllGatherAttention,
    launch: Launch,
    sizes: Geometry,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Returns [out, lse, (gathered k, v)] for q [B, Hq, Sq, D], k and v [B, Hkv, S, D], bias [.., Sq, W*S]."""
    q, own, length = with_rows(q), (as_sent(k), as_sent(v)), k.shape[2]
    targets, gathered = _landing(node, sizes, k)
    # The own part of the gathered tensors is filled only if these are returned.
    copies = tuple(tensor[launch.rank] for tensor in gathered) if node.return_gathered else own
    starts = [tensor.data_ptr() for tensor in targets]
    run, scale = sizes.run, node.scale
    bias, anchors = run.anchored(bias, q.dtype)
    with launch.call(nbytes=sizes.nbytes) as call:
        plan = call.kept(sizes, lambda call: _plan(node, launch, sizes, call, k))
        partials: list[Partial] = []
        with call.fork() as lane:
            plan.stage(lane.main, own, copies)
            # Wait once for all sources, and before the first attention, which may leave no SM free.
            if plan.wait is not None:
                plan.wait(lane.side)
            arrived = []
            for by_target in plan.transfers:
                for transfers, start in zip(by_target, starts, strict=True):
                    lane.copy(transfers, start)
                arrived.append(lane.mark())
            for span in sizes.own:
                keys, values = span.of_own(own[0]), span.of_own(own[1])
                partials.append(run.forward(span.queries(q), keys, values, span.seen(bias, length), scale))
            for (_, spans), mark in zip(sizes.remote, arrived, strict=False):
                lane.wait(mark)
                for span in spans:
                    keys, values = span.of(gathered[0]), span.of(gathered[1])
                    partials.append(run.forward(span.queries(q), keys, values, span.seen(bias, length), scale))
        out, lse = sizes.merge(call.stream, partials)
        outputs = [out, lse if anchors is None else lse.add_(anchors)]
        if node.return_gathered:
            outputs += map(canonical, gathered)
        # `close` takes contiguous memory, which all outputs have, whatever their strides.
        plan.close(call.stream, tuple(outputs))
    return outputs


def _landing(
    node: AllGatherAttention, sizes: Geometry, like: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns (the targets of the copies; the gathered keys and values in them, each [W, B, S, Hkv, D]). There are two
    targets if the gathered tensors are returned, because outputs of an op must not share memory. Otherwise there is
    one. If `paired`, the keys and values of a source lie together in it, as in the slot, and are one copy. If not, the
    keys of neighbouring sources lie together, for calls with several sources.
    """
    world = node.world_size
    if node.return_gathered:
        both = [like.new_empty(world, *sizes.shape) for _ in range(2)]
        return both, both
    if sizes.paired:
        target = like.new_empty(world, 2, *sizes.shape)
        return [target], [target.select(1, which) for which in range(2)]
    target = like.new_empty(2, world, *sizes.shape)
    return [target], [target[which] for which in range(2)]


@dataclass(frozen=True)
class _Plan:
    """What the calls that use one slot have in common: the launches, and the copies of each group of sources by target
    (see `_landing`). Spare sources are the last group.
    """

    stage: Bound
    wait: Bound | None
    close: Bound
    transfers: list[list[list[Transfer]]]


def _plan(node: AllGatherAttention, launch: Launch, sizes: Geometry, call: Call, k: torch.Tensor) -> _Plan:
    world, rank = node.world_size, launch.rank
    exchange = ChunkedExchange(sizes.kernels, call)
    half = k.numel() * k.element_size()
    groups_of_sources = [sources for sources, _ in sizes.remote]
    if sizes.spare:
        groups_of_sources.append(sizes.spare)

    def transfers(sources: list[int]) -> list[list[Transfer]]:
        staged = [(source, call.data(source, k.dtype).data_ptr()) for source in sources]
        keys = [Transfer(source * half, at, half) for source, at in staged]
        values = [Transfer(source * half, at + half, half) for source, at in staged]
        if node.return_gathered:
            return [keys, values]
        if sizes.paired:
            return [[Transfer(source * 2 * half, at, 2 * half) for source, at in staged]]
        behind = world * half
        return [[*keys, *(value._replace(offset=behind + value.offset) for value in values)]]

    needed = [source for sources in groups_of_sources for source in sources]
    wait: Bound | None
    if needed == [(rank - step) % world for step in range(1, len(needed) + 1)]:
        wait = exchange.wait(0, len(needed), 1, PIECE_ROWS.value) if needed else None
    else:
        wait = exchange.wait_all(PIECE_ROWS.value)
    return _Plan(
        stage=exchange.stage(k.numel(), copied=node.return_gathered, count=2),
        wait=wait,
        close=exchange.close(sizes.numels),
        transfers=[transfers(sources) for sources in groups_of_sources],
    )
