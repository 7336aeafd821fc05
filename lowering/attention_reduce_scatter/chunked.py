"""attention_reduce_scatter, strategy `chunked`: the library's backward for one owner's keys after the other.

Problem. Every rank has queries, and from the forward the keys and values of all ranks; rank r wants the gradients of
its own keys and values, summed over the ranks.
Algorithm. The main stream computes the gradients of the keys of rank + 1 first and of the own ones last: exact, as the
logarithms of the sums are those over all keys. They go into the own slot, where their owners read them; a small kernel
behind each tells them. Meanwhile the side stream copies the gradients for this rank from its peers, that of rank - 1
first, in the order in which they are made. One kernel adds up the W partials in rank order, in fp32, and rounds
once; another one the gradients of the queries, one from each part.
Signal protocol. See lowering/transfers.py. One flag for each owner, in row PIECE_ROWS. What a mask hides from every
row of a rank is neither computed nor told, and its owner does not wait for it: both follow from the mask and the two
ranks alone.
Limits. Keys and values have the same head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ditron_inductor.device.lanes import Transfer
from ditron_inductor.device.workspace import Call
from ditron_inductor.lowering.all_gather_attention import local
from ditron_inductor.lowering.all_gather_attention.local import Local
from ditron_inductor.lowering.all_gather_attention.merge import Merge
from ditron_inductor.lowering.all_gather_attention.parts import Span, single, with_rows
from ditron_inductor.lowering.attention_reduce_scatter.library import Operands, Outputs, apart, gradients, lowered
from ditron_inductor.lowering.exchange import Exchange, Kernels
from ditron_inductor.lowering.host.launch import Launch, round_up
from ditron_inductor.lowering.host.launcher import Bound
from ditron_inductor.lowering.transfers import PIECE_ROWS
from ditron_inductor.task.all_gather_attention import ALIGNED, GIVEN, AttentionReduceScatter, Mask, blocks


def contributes(mask: Mask, rank: int, owner: int, world_size: int, keys: int) -> bool:
    """Whether `rank` tells `owner` gradients of its keys. Follows from nothing that two ranks may see differently."""
    if mask.kind not in ALIGNED:
        return True
    # As many queries as keys, on every rank.
    return any(block.source == owner for block in blocks(mask, rank, world_size, keys, keys))


@dataclass(frozen=True, eq=False)
class Geometry:
    """What calls with operands of one form share. shape: of an owner's gradients, [2, B, S, Hkv, D], `stride`
    elements from one to the next in the slot of `nbytes`. spans: the calls of the library by owner, the own ones
    last.
    """

    shape: tuple[int, ...]
    keys: int
    stride: int
    nbytes: int
    spans: list[tuple[int, list[Span]]]
    run: Local
    merge: Merge
    kernels: Kernels = field(repr=False)


def geometry(node: AttentionReduceScatter, launch: Launch, operands: Operands) -> Geometry:
    """See Geometry."""
    _, q, k, v, *_ = operands
    world, rank = node.world_size, launch.rank
    B, heads, all_keys, D = k.shape
    keys = all_keys // world
    stride = round_up(2 * B * keys * heads * D, 128)
    found = blocks(node.mask, rank, world, q.shape[2], keys)
    owners = [owner % world for owner in range(rank + 1, rank + world + 1)]
    spans = [(owner, [single(block) for block in found if block.source == owner]) for owner in owners]
    return Geometry(
        shape=(2, B, keys, heads, D),
        keys=keys,
        stride=stride,
        nbytes=(world - 1) * stride * k.element_size(),
        spans=spans,
        run=local.choose(q, k[:, :, :keys], v[:, :, :keys], node.softcap, biased=node.mask.kind == GIVEN),
        merge=Merge(q, [span.rows for _, of_owner in spans for span in of_owner]),
        kernels=Kernels(launch),
    )


def attention_reduce_scatter(
    node: AttentionReduceScatter, launch: Launch, sizes: Geometry, *operands: torch.Tensor
) -> Outputs:
    """grad_out, q [B, Hq, Sq, D], k and v [B, Hkv, W*S, D], out, lse, and a bias [.., Sq, W*S] if the mask has one;
    returns (grad_q, grad_k, grad_v). See the module.
    """
    grad_out, q, k, v, out = (with_rows(one) for one in operands[:5])
    bias, lse = lowered(sizes.run, operands)
    mine = k.new_empty(sizes.shape)
    partials = k.new_empty(node.world_size, *sizes.shape)
    grads_q: list[torch.Tensor] = []

    def compute(spans: list[Span], target: torch.Tensor) -> None:
        """The gradients of an owner's keys, into `target` [2, B, S, Hkv, D]."""
        whole = len(spans) == 1 and (spans[0].first_key, spans[0].last_key) == (0, sizes.keys)
        if not whole:
            target.zero_()
        for span in spans:
            found = gradients(sizes.run, span, (grad_out, q, k, v, out, lse), sizes.keys, node.scale, bias)
            grads_q.append(found[0])
            for which, grad in enumerate(found[1:]):
                rows = grad.transpose(1, 2)
                if whole:
                    target[which].copy_(rows)
                else:
                    target[which, :, span.first_key : span.last_key].add_(rows)

    with launch.call(nbytes=sizes.nbytes) as call:
        plan = call.kept(sizes, lambda call: _plan(node, launch, sizes, call, k))
        base = partials.data_ptr()
        plan.open(call.stream)
        for silent in plan.silent:
            partials[silent].zero_()
        with call.fork() as lane:
            for step, (_, spans) in zip(plan.steps, sizes.spans, strict=False):
                if step.publish is not None:
                    compute(spans, step.target)
                done = lane.here()
                if step.publish is not None:
                    step.publish(lane.main)
                if step.wait is not None:
                    # Not behind the telling: the wait is to have its SM before the next kernel takes them all.
                    lane.follow(done)
                    step.wait(lane.side)
                    lane.copy(step.transfers, base)
            compute(sizes.spans[-1][1], partials[launch.rank])
            grad_q = sizes.merge.add(lane.main, grads_q, q)
        # No epilogue looks at what it gets besides the sum.
        plan.reduce(call.stream, partials, (mine,), (mine,))
    return grad_q, *apart(mine)


@dataclass(frozen=True)
class _Step:
    """One peer's gradients out, into `target` in the own slot, and another peer's in; None where there are none."""

    target: torch.Tensor
    publish: Bound | None
    wait: Bound | None
    transfers: list[Transfer]


@dataclass(frozen=True)
class _Plan:
    """What calls with one slot have in common. silent: the peers that have no gradients for this rank."""

    open: Bound
    steps: list[_Step]
    silent: list[int]
    reduce: Bound


def _plan(node: AttentionReduceScatter, launch: Launch, sizes: Geometry, call: Call, k: torch.Tensor) -> _Plan:
    world, rank = node.world_size, launch.rank
    exchange = Exchange(sizes.kernels, call)
    slot, numel = call.data(rank, k.dtype), partial_numel(sizes)
    nbytes, itemsize = numel * k.element_size(), k.element_size()
    steps, silent = [], []
    for piece in range(world - 1):
        owner, source = (rank + 1 + piece) % world, (rank - 1 - piece) % world
        target = slot[piece * sizes.stride : piece * sizes.stride + numel].view(sizes.shape)
        told, heard = (contributes(node.mask, *pair, world, sizes.keys) for pair in ((rank, owner), (source, rank)))
        theirs = call.data(source, k.dtype).data_ptr() + piece * sizes.stride * itemsize
        if not heard:
            silent.append(source)
        steps.append(
            _Step(
                target=target,
                publish=exchange.publish(piece, 1, 1, PIECE_ROWS.value) if told else None,
                wait=exchange.wait(piece, 1, 1, PIECE_ROWS.value) if heard else None,
                transfers=[(source * nbytes, theirs, nbytes)],
            )
        )
    D = sizes.shape[-1]
    return _Plan(
        open=exchange.open(),
        steps=steps,
        silent=silent,
        reduce=exchange.reduce(numel // D, D, stride=numel, average=False),
    )


def partial_numel(sizes: Geometry) -> int:
    """Elements of one owner's gradients."""
    return torch.Size(sizes.shape).numel()
