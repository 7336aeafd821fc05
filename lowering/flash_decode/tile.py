"""flash_decode, strategy `tile`: attention over the local tokens, the exchange and the merging in one launch, or two.

Problem. While an answer is generated, every rank holds some tokens of the KV cache, and all ranks need the attention of
the new tokens over all of them. It takes as long as reading the local keys and values does. What follows is small, and
its time is that of launches and rounds of signals that follow each other. Algorithm. Split-KV: a ticket is a part of
the local tokens of one piece of heads (see split_attention.py), so all SMs read even for one sequence. The program of
the last split of a head merges the splits, and puts the rank's part, o and lse in fp32, into the slot of every rank,
including its own. A program merges the ranks' parts of a head after it has sent its next head, or if it has no further
ticket. All ranks merge the same values in rank order, so they get equal bits. Lengths are read on the device, and the
splits follow them in a replayed CUDA graph. A rank without tokens sends 0 and -inf. If there are not more tickets than
programs, there is no loop over tickets, and the loop over tokens has all registers. Otherwise, if the local tokens are
many, the registers that the loop leaves to the exchange cost more than a launch. Then the kernel of local_decode.py
computes the rank's parts, and this kernel (ATTENDED) begins with merging the single split of each. Peers cannot tell
the difference, so every rank chooses by the size of its own cache. Signal protocol. Flag row `head // PER_FLAG` has one
word for each source, written by the program that sends the flag's last head. Before its first push a program waits for
the credits of all peers. A program that waits for a head has finished all tickets that it took, and every rank takes
the tickets of a head before those of later heads. So the first head that some rank has not sent is being computed by
programs that wait for none: one resident program is enough. After a failure a head's part is not sent, and its result
is NaN. Limits. There is a local counter for each head and flag; see `obstacle`. For a few sequences see
decode_in_band.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ditron_inductor.core.layout import COUNTERS, REVOKED_ROW, TILE_TICKET
from ditron_inductor.core.signals import (
    all_heaps,
    arrive,
    ask_to_send,
    close,
    data,
    granted,
    healthy,
    last_use,
    leave,
    publish_to,
    request_ticket,
    settle,
    use_of,
    words_of,
)
from ditron_inductor.core.timed import timed_may_send, timed_wait_all
from ditron_inductor.core.trace import SEND, SUM, TILE, event, now
from ditron_inductor.lowering.decode_attention.decode_config import INTERPRETED_PROGRAMS
from ditron_inductor.lowering.decode_attention.split_attention import (
    Tensors,
    attend_ticket,
    merge_ranks,
    merge_splits,
    part_offsets,
    work_of,
)
from ditron_inductor.lowering.flash_decode import decode_in_band
from ditron_inductor.lowering.flash_decode.local_decode import DecodeOperands, LocalAttention, Shape, make_local
from ditron_inductor.lowering.host.launch import Launch, ceil_div, round_up
from ditron_inductor.lowering.host.launcher import Arguments
from ditron_inductor.task.nodes import FlashDecode

FUSED_TOKENS = 3072
INTERPRETED_FUSED_TOKENS = 198
"""Up to this many tokens of all heads together for each SM, one launch with a loop over tickets is faster than two."""


@triton.jit
def all_slots(use, WORLD: tl.constexpr):
    """Returns pointers to the parts in the slots of all ranks, from this rank on."""
    slots = (data(use, use.rank, tl.float32),)
    for i in tl.static_range(1, WORLD):
        slots = slots + (data(use, (use.rank + i) % WORLD, tl.float32),)  # type: ignore[assignment]
    return slots


class Sending(NamedTuple):
    """Values of the exchange that are known at compile time: the number of ranks, the heads of a flag, and the threads
    of a program. ATTENDED: `partials` has the rank's parts, with one split each. ONE_EACH: every program has one
    ticket.
    """

    WORLD: Any
    PER_FLAG: Any
    THREADS: Any
    ATTENDED: Any
    ONE_EACH: Any


@triton.jit
def send_ticket(
    use, ticket, first_length, asked, due, ok, work, strides, area,
    HOW: tl.constexpr, SENDING: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """Attends to one split and, if it is the last of its head, sends the head. Returns (the flag that was completed, or
    -1; ok). ok: whether this program may send, -1 before its first head.
    """
    WORLD: tl.constexpr = SENDING.WORLD
    began = now(TRACE)
    current = tl.full((), -1, tl.int32)
    if SENDING.ATTENDED:
        head, used, last = ticket, tl.full((), 1, tl.int32), tl.full((), 1, tl.int32)
    else:
        head, used, last = attend_ticket(ticket, first_length, work, strides, HOW)
    if last != 0:
        # These are loaded together with the parts, because the registers are needed while tokens are read.
        heaps = all_heaps(use, SENDING.WORLD)
        slots = all_slots(use, SENDING.WORLD)
        o, lse = merge_splits(work.partials, work.counts, head, used, HOW)
        if ok < 0:
            ok = timed_may_send(asked, due, use, ticket, SENDING.WORLD, SENDING.THREADS, TRACE)
        sending = now(TRACE)
        if ok != 0:
            at, inside, lse_at, there = part_offsets(head, work.counts.heads, HOW)
            for i in tl.static_range(WORLD):
                parts = slots[i] + use.rank * area.to(tl.int64)
                tl.store(parts + at, o, mask=inside)
                tl.store(parts + lse_at, lse, mask=there)
        current = head // SENDING.PER_FLAG
        if SENDING.PER_FLAG > 1:
            others = tl.minimum(SENDING.PER_FLAG, work.counts.heads - current * SENDING.PER_FLAG)
            if arrive(work.counters + work.counts.heads + current, others):
                # If another program has not sent its head, the workspace is poisoned.
                ok = ok & healthy(use)
            else:
                current = tl.full((), -1, tl.int32)
        if (current >= 0) & (ok != 0):
            # The heads' parts lie in every peer's slot.
            publish_to(heaps, use, current, SENDING.WORLD)
        event(use, sending, head, use.rank, SEND, TRACE)
    if ticket == 0:
        settle(tl.where(healthy(use) != 0, due, 0), use, SENDING.WORLD)
    event(use, began, ticket, use.rank, TILE, TRACE)
    return current, ok


@triton.jit
def merge_flag(use, flag, ok, out, heads, area, HOW: tl.constexpr, SENDING: tl.constexpr, TRACE: tl.constexpr):
    """Waits for the peers' parts of the heads of a flag that this program has sent, and merges them."""
    began = now(TRACE)
    own = data(use, use.rank, tl.float32)
    # Acquire: the peers' parts are visible. The own parts were acquired before, or stored before a barrier.
    whole = ok & timed_wait_all(use, flag, SENDING.WORLD, TRACE)
    for index in range(0, SENDING.PER_FLAG):
        head = flag * SENDING.PER_FLAG + index
        if head < heads:
            merge_ranks(own, out, head, heads, area, whole, SENDING.WORLD, HOW)
    event(use, began, flag, use.rank, SUM, TRACE)


@triton.jit(do_not_specialize=["heads", "kv_heads", "splits", "rank"])
def flash_decode_kernel(
    tensors, pointers, rank, heads, kv_heads, splits, sizes, HOW: tl.constexpr, SENDING: tl.constexpr,
    TRACE: tl.constexpr = 0,
):  # fmt: skip
    """See the module, and split_attention.py for the operands. out is [heads * ROWS, HEAD_DIM], contiguous."""
    # Ask for all before the first answer is needed: one by one, the loads would take as long as a signal.
    words = words_of(pointers, rank)
    request = request_ticket(words, TILE_TICKET, SENDING.THREADS, True)
    use = use_of(words)
    due = last_use(use)
    first_length = tl.load(tensors.lengths)
    # This comes last, because it needs an address that is loaded.
    asked = ask_to_send(use, SENDING.WORLD, SENDING.THREADS)
    ticket = granted(request, SENDING.THREADS)
    tickets = heads * splits
    work = work_of(tensors, pointers.counters, heads, kv_heads, splits, sizes)
    # `ok` says whether this program may send; it is -1 until the answers have been read.
    ok = tl.full((), -1, tl.int32)
    if SENDING.ONE_EACH:
        current, ok = send_ticket(
            use, ticket, first_length, asked, due, ok, work, sizes.strides, sizes.area, HOW, SENDING, TRACE
        )
        # This comes before the wait.
        left = leave(use, ticket, due, SENDING.THREADS, True)
        if current >= 0:
            merge_flag(use, current, ok, tensors.out, heads, sizes.area, HOW, SENDING, TRACE)
    else:
        # `pending` is the flag that was sent last, whose heads are not merged yet.
        pending = tl.full((), -1, tl.int32)
        left = request
        if ticket >= tickets:
            left = leave(use, ticket, due, SENDING.THREADS, True)
        while (ticket < tickets) | (pending >= 0):
            current = tl.full((), -1, tl.int32)
            if ticket < tickets:
                request = request_ticket(use, TILE_TICKET, SENDING.THREADS, True)
                current, ok = send_ticket(
                    use, ticket, first_length, asked, due, ok, work, sizes.strides, sizes.area, HOW, SENDING, TRACE
                )
                ticket = granted(request, SENDING.THREADS)
                if ticket >= tickets:
                    # This comes before the last wait.
                    left = leave(use, ticket, due, SENDING.THREADS, True)
            if (pending >= 0) & ((current >= 0) | (ticket >= tickets)):
                merge_flag(use, pending, ok, tensors.out, heads, sizes.area, HOW, SENDING, TRACE)
                pending = tl.full((), -1, tl.int32)
            pending = tl.where(current >= 0, current, pending)
    close(granted(left, SENDING.THREADS), use)


@dataclass(frozen=True)
class Geometry:
    """The layout of a call, equal on all ranks: the elements of a rank's parts, the heads of a flag, the bytes of the
    slot, and whether everything is sent in band.
    """

    area: int
    per_flag: int
    nbytes: int
    in_band: bool
    local: LocalAttention = field(repr=False)


def obstacle(shape: Shape) -> str:
    """Returns why the kernel cannot run for operands of this shape, or ''."""
    if shape.problem:
        return shape.problem
    most = COUNTERS.value // 2
    heads = shape.heads.heads
    return "" if heads <= most else f"{heads} heads of all sequences are more than {most}"


def in_two_launches(shape: Shape, splits: int, programs: int, interpreted: bool) -> bool:
    """Returns whether the attention gets a launch of its own: there are more tickets than programs, and many tokens."""
    heads, most = shape.heads.heads, INTERPRETED_FUSED_TOKENS if interpreted else FUSED_TOKENS
    return heads * splits > programs and heads * shape.capacity > most * shape.num_sms


def geometry(node: FlashDecode, launch: Launch, shape: Shape) -> Geometry:
    """Returns the Geometry. It does not depend on the capacity of a cache, which may differ between ranks."""
    area = round_up(shape.rows * (shape.head_dim + 1), 16)
    per_flag = launch.chunk_tiles(shape.heads.heads, REVOKED_ROW.value)
    workspace = launch.workspace
    local = make_local(shape, workspace.device, workspace.capabilities.arch)
    sent = decode_in_band.fits(shape, launch, node.world_size)
    nbytes = 0 if sent else 4 * node.world_size * area
    return Geometry(area=area, per_flag=per_flag, nbytes=nbytes, in_band=sent, local=local)


def flash_decode(
    node: FlashDecode, launch: Launch, sizes: Geometry, shape: Shape, given: DecodeOperands
) -> torch.Tensor:
    """Returns the attention [B, Hq, D]; see the module."""
    if sizes.in_band:
        return decode_in_band.flash_decode(node, launch, sizes.local, shape, given)
    config = sizes.local.config
    # These are the programs of this device, because how a rank cuts its cache does not concern the others.
    programs = INTERPRETED_PROGRAMS if launch.interpreted else config.programs(shape.heads.heads, shape.num_sms)
    attended = in_two_launches(shape, sizes.local.splits, programs, launch.interpreted)
    splits = 1 if attended else sizes.local.splits
    tickets = shape.heads.heads * splits
    out = torch.empty_like(given.q, memory_format=torch.contiguous_format)

    def arguments() -> Arguments:
        values: dict[str, Any] = {
            **shape.constants(config, splits, launch.interpreted, sizes.area),
            "rank": launch.rank,
            "SENDING": Sending(
                WORLD=node.world_size,
                PER_FLAG=sizes.per_flag,
                THREADS=launch.threads(config.num_warps),
                ATTENDED=attended,
                ONE_EACH=tickets <= programs,
            ),
        }
        return Arguments(programs=min(tickets, programs), values=values)

    if not attended:
        partials = shape.new_partials(given.q, splits)
        tensors = {"tensors": Tensors(**given.tensors(), out=out, partials=partials)}
        launch.run(flash_decode_kernel, sizes.nbytes, arguments, tensors)
        return out
    with launch.call(sizes.nbytes) as call:
        # This is within the use of the slot, whose counters are zeros and belong to this call.
        partials = sizes.local.part(given, call.counters)
        tensors = {"tensors": Tensors(**given.tensors(), out=out, partials=partials)}
        launch.run_within(call, flash_decode_kernel, arguments, tensors)
    return out


assert COUNTERS.value // 2 + ceil_div(COUNTERS.value // 2, REVOKED_ROW.value) <= COUNTERS.value
