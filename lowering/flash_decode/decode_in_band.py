"""flash_decode, strategy `tile` for a few sequences: attention, exchange and merging in one launch, in band.

Problem. It is that of tile.py. With few sequences, the rounds of signals behind the attention take as long as reading
some caches does. Algorithm. It is that of tile.py, but a rank's part of a head is its own signal (see core/in_band.py).
Every element is sent together with the logarithm of its row, so a thread that waits for both needs nothing from another
thread. The program that sends a head's part waits for the peers' parts and merges them in rank order, so all ranks get
equal bits. Signal protocol. Each program has one task, given by its number, so that it can load tokens while everything
else is requested. Program 0 gives the credits that are due, and signs. Every other program has one ticket (see
split_attention.py) and sets zeros back. A program waits for a head after it has sent this head, so heads are sent in
the order of the programs' numbers, in which they start. The first head that some rank has not sent is computed by
programs that wait for no head. Limits. A head has at most MOST_ELEMENTS, the parts of all ranks at most MOST_BYTES, and
there are at most MOST_RANKS. All devices of the group have to be able to send in band (device/capabilities.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ditron_inductor.core.in_band import (
    MOST_RANKS,
    answer,
    area,
    ask,
    begin,
    clear_before,
    close_in_band,
    decode,
    encode,
    heap_of,
    heaps_of_peers,
    wait_in_band,
)
from ditron_inductor.core.signals import granted, leave, with_epoch, words_of
from ditron_inductor.core.trace import SEND, SUM, TILE, WAIT, event, now
from ditron_inductor.lowering.decode_attention.split_attention import (
    Tensors,
    attend_ticket,
    merge_splits,
    part_offsets,
    work_of,
)
from ditron_inductor.lowering.flash_decode.local_decode import DecodeOperands, LocalAttention, Shape
from ditron_inductor.lowering.host.launch import Launch
from ditron_inductor.lowering.host.launcher import Arguments
from ditron_inductor.task.nodes import FlashDecode

MOST_ELEMENTS = 2048
"""The most elements of a head's part. A program holds those of all ranks, with logarithms, in registers."""
WORDS_PER_ELEMENT = 2
MOST_BYTES = 1 << 20
"""The most bytes that all ranks use of an area. More was not measured."""
INTERPRETED_MOST_BYTES = 4096
"""The same in the interpreter, so that some small problems are not sent in band."""


class InBandSending(NamedTuple):
    """Values of the exchange that are known at compile time: the number of ranks, and the threads of a program."""

    WORLD: Any
    THREADS: Any


@triton.jit
def pairs(o, lse, R: tl.constexpr, D: tl.constexpr):
    """Returns the words [R, 2 * D] of a part: each element of o [R, D] and the logarithm of its row, lse [R]."""
    logarithms = tl.broadcast_to(lse[:, None], (R, D))
    return encode(tl.reshape(tl.join(o, logarithms), (R, 2 * D)).to(tl.uint32, bitcast=True))


@triton.jit
def merge_words(parts, WORLD: tl.constexpr, R: tl.constexpr, D: tl.constexpr):
    """Returns the attention [R, D] merged from `parts`, a tuple of results of `pairs`, in their order."""
    os = ()
    lses = ()
    for source in tl.static_range(WORLD):
        o, lse = tl.split(tl.reshape(decode(parts[source], tl.float32), (R, D, 2)))
        os = os + (o,)  # type: ignore[assignment]
        lses = lses + (lse,)  # type: ignore[assignment]
    most = lses[0]  # type: ignore[misc]
    for source in tl.static_range(1, WORLD):
        most = tl.maximum(most, lses[source])
    known = tl.where(most == float("-inf"), 0.0, most)
    total = tl.zeros((R, D), dtype=tl.float32)
    acc = tl.zeros((R, D), dtype=tl.float32)
    for source in tl.static_range(WORLD):
        weight = tl.exp2(lses[source] - known)
        total += weight
        acc += weight * os[source]
    # The test is not `> 0`, because NaN has to stay NaN.
    return acc * (1.0 / tl.where(total != 0.0, total, 1.0))


@triton.jit(do_not_specialize=["heads", "kv_heads", "splits", "rank"])
def flash_decode_in_band_kernel(
    tensors, pointers, rank, heads, kv_heads, splits, sizes, HOW: tl.constexpr, SENDING: tl.constexpr,
    TRACE: tl.constexpr = 0,
):  # fmt: skip
    """See the module, and split_attention.py for the operands. out is [heads * ROWS, HEAD_DIM], contiguous. There is
    program 0 and a program for each ticket.
    """
    WORLD: tl.constexpr = SENDING.WORLD
    began = now(TRACE)
    program = tl.program_id(0)
    head, used, last = program, program, tl.full((), 0, tl.int32)
    work = work_of(tensors, pointers.counters, heads, kv_heads, splits, sizes)
    if program != 0:
        head, used, last = attend_ticket(program - 1, tl.load(tensors.lengths), work, sizes.strides, HOW)
    # This is requested together with the parts, because the registers are needed while tokens are read.
    words = words_of(pointers, rank)
    asked = ask(words, SENDING.THREADS)
    own, heaps = heap_of(words, rank), heaps_of_peers(words, WORLD)
    known = answer(asked)
    use = with_epoch(words, known.epoch)
    ok = known.ok
    if TRACE:
        if program != 0:
            event(use, began, program - 1, rank, TILE, TRACE)
    stride = heads * (2 * HOW.ROWS * HOW.HEAD_DIM)
    if last != 0:
        o, lse = merge_splits(tensors.partials, work.counts, head, used, HOW)
        mine = pairs(o, lse, HOW.MERGED_ROWS, HOW.HEAD_DIM)
        rows = tl.arange(0, HOW.MERGED_ROWS)[:, None]
        lanes = tl.arange(0, 2 * HOW.HEAD_DIM)[None, :]
        at = (head * HOW.ROWS + rows) * (2 * HOW.HEAD_DIM) + lanes
        there = (rows < HOW.ROWS) & (lanes >= 0)
        sending = now(TRACE)
        if ok != 0:
            for i in tl.static_range(WORLD - 1):
                tl.store(area(heaps[i], known.number) + (rank * stride + at), mine, mask=there)
        left = leave(use, known.number + known.lines, known.due, SENDING.THREADS, True)
        clear_before(own, known, program - 1, tl.num_programs(0) - 1, 4 * SENDING.THREADS)
        event(use, sending, head, rank, SEND, TRACE)
        adding = now(TRACE)
        theirs = (mine,) * WORLD
        if ok != 0:
            theirs, ok = wait_in_band(use, known, mine, at, there, stride, own, head, WORLD, SENDING.THREADS)
        event(use, adding, head, rank, WAIT, TRACE)
        merged = tl.where(ok != 0, merge_words(theirs, WORLD, HOW.MERGED_ROWS, HOW.HEAD_DIM), float("nan"))
        places, inside, _, _ = part_offsets(head, heads, HOW)
        tl.store(tensors.out + places, merged.to(tensors.out.dtype.element_ty), mask=inside)
        event(use, adding, head, rank, SUM, TRACE)
    else:
        if program == 0:
            left = begin(asked, words, WORLD, SENDING.THREADS)
        else:
            left = leave(use, known.number + known.lines, known.due, SENDING.THREADS, True)
            clear_before(own, known, program - 1, tl.num_programs(0) - 1, 4 * SENDING.THREADS)
    close_in_band(granted(left, SENDING.THREADS), use, known.number, WORLD * stride)


def fits(shape: Shape, launch: Launch, world_size: int) -> bool:
    """Returns whether all ranks' parts are few bytes, and a head's in a program. It is equal on all ranks."""
    most_bytes = INTERPRETED_MOST_BYTES if launch.interpreted else MOST_BYTES
    words = WORDS_PER_ELEMENT * shape.rows * shape.head_dim
    return (
        launch.workspace.capabilities.in_band
        and world_size <= MOST_RANKS
        and 4 * world_size * words <= most_bytes
        and shape.heads.merged_rows * shape.head_dim <= MOST_ELEMENTS
    )


def flash_decode(
    node: FlashDecode, launch: Launch, local: LocalAttention, shape: Shape, given: DecodeOperands
) -> torch.Tensor:
    """Returns the attention [B, Hq, D]; see the module."""
    config, splits = local.config, local.splits
    out = torch.empty_like(given.q, memory_format=torch.contiguous_format)

    def arguments() -> Arguments:
        values: dict[str, Any] = {
            **shape.constants(config, splits, launch.interpreted),
            "SENDING": InBandSending(node.world_size, launch.threads(config.num_warps)),
            "rank": launch.rank,
        }
        return Arguments(programs=1 + shape.heads.heads * splits, values=values)

    partials = shape.new_partials(given.q, splits)
    tensors = {"tensors": Tensors(**given.tensors(), out=out, partials=partials)}
    launch.run(flash_decode_in_band_kernel, 0, arguments, tensors)
    return out
