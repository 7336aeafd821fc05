"""Signals in band: a word of data shows by itself that it has arrived, without a release, a flag or an acquire.

Memory holds zeros and no word that is sent is zero, so the receiver reads the data until no word is zero. Such data has
areas of its own, which are used in turn, so that no credits are needed. docs/protocol.md says under "In band" how.

If each thread loads a word for itself, the threads may see different values while the word changes. But if the value
decides a branch, all threads have to take the same branch. So such words are loaded into a block with one place for
each thread, in which no word occurs twice, and are added up over the block. (A smaller block, or a scalar, is loaded by
every warp, and the warps may see different values.)

NVIDIA GPUs only: elsewhere it is not known when a store without a release is seen by a peer that waits for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ditron_inductor.core.layout import (
    DIVERGED,
    DUE,
    EPOCH,
    EPOCH_MASK,
    IN_BAND_AREAS,
    IN_BAND_BYTES,
    IN_BAND_DATA,
    IN_BAND_LINES,
    IN_BAND_SITES,
    IN_BAND_USES,
    MAX_WORLD,
    POISON,
    POLL_LIMIT,
    SLOT_WORDS,
    TIMEOUT,
)
from ditron_inductor.core.signals import (
    POISON_PERIOD,
    all_heaps,
    ask_to_send,
    behind,
    close,
    fail,
    healthy,
    leave,
    peer,
    settle,
    slot_ctl,
    with_epoch,
    word,
)

FIRST_LOOK = tl.constexpr(16)
"""The poll in which a wait first checks anything except its words. These polls are shorter than polls of flags."""

LINE = tl.constexpr(32)
"""Words of a line: an area is laid out by whole lines."""

MOST_RANKS = 8
"""The most ranks that send in band. A thread holds the words of all ranks in registers."""


class Asked(NamedTuple):
    """The values that `ask` begins to load, for `answer`."""

    ended: Any
    epochs: Any
    due: Any
    lines: Any
    poison: Any
    limit: Any


class InBand(NamedTuple):
    """What a program knows in band: the number of this use in band, the epoch of its slot, the last use for `settle`,
    how many lines of the area of the use before may not be zero, 1 unless an earlier launch poisoned this workspace,
    and the number of polls of a wait.
    """

    number: Any
    epoch: Any
    due: Any
    lines: Any
    ok: Any
    limit: Any


@triton.jit
def ask(words, THREADS: tl.constexpr):
    """Begins to load what a program in band has to know, for `answer`. Data that is loaded in between costs no time."""
    # Another program of this launch may fail meanwhile; nothing else changes before all have left.
    poison = tl.load(words.ctl + POISON + tl.arange(0, THREADS) * 0)
    return Asked(
        tl.load(words.ctl + IN_BAND_USES),
        tl.load(slot_ctl(words) + EPOCH),
        tl.load(words.ctl + DUE),
        tl.load(words.ctl + IN_BAND_LINES),
        poison,
        tl.load(words.ctl + POLL_LIMIT),
    )


@triton.jit
def answer(asked):
    ok = (tl.sum((asked.poison != 0).to(tl.int32), axis=0) == 0).to(tl.int32)
    return InBand(asked.ended + 1, (asked.epochs + 1) & EPOCH_MASK, asked.due, asked.lines, ok, asked.limit)


@triton.jit
def area(heap, number):
    """Pointer to the 32-bit words of use `number` in `heap`, of `heap_of`; 16-byte aligned."""
    words = heap + (IN_BAND_DATA + (number & (IN_BAND_AREAS - 1)) * IN_BAND_BYTES) // 8
    return tl.multiple_of(words.to(tl.pointer_type(tl.uint32), bitcast=True), 16)


@triton.jit
def heap_of(words, rank):
    """Pointer to the symmetric heap of `rank`."""
    return peer(words.table, rank, 0, tl.int64)


@triton.jit
def heaps_of_peers(words, WORLD: tl.constexpr):
    """Returns the heaps of rank + 1, rank + 2, .., as `heap_of` does for one rank."""
    heaps = ()
    for i in tl.static_range(1, WORLD):
        heaps = heaps + (heap_of(words, (words.rank + i) % WORLD),)  # type: ignore[assignment]
    return heaps


@triton.jit
def encode(words):
    """Returns the words as nonzero uint32, for `decode`. One NaN becomes another, of two halves or of a whole word."""
    flipped = words ^ 0xFFFFFFFF
    return tl.where(flipped == 0, 0x80000000, flipped)


@triton.jit
def decode(words, dtype: tl.constexpr):
    """fp32 elements [R, C] of `dtype` from words [R, C / 2], or [R, C] for fp32: the first is in the lower half."""
    bits = words ^ 0xFFFFFFFF
    if dtype == tl.float32:
        elements = bits.to(tl.float32, bitcast=True)
    else:
        lower, upper = halves(bits, dtype)
        elements = tl.reshape(tl.join(lower, upper), (words.shape[0], 2 * words.shape[1]))
    return elements


@triton.jit
def halves(words, dtype: tl.constexpr):
    """Returns the fp32 values of the elements of `dtype` in the lower and the upper half of words that are not encoded;
    of fp32 the elements and zeros.
    """
    if dtype == tl.float32:
        lower = words.to(tl.float32, bitcast=True)
        upper = tl.zeros(words.shape, dtype=tl.float32)
    elif dtype == tl.bfloat16:
        lower = (words << 16).to(tl.float32, bitcast=True)
        upper = (words & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        lower = (words & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
        upper = (words >> 16).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
    return lower, upper


@triton.jit
def joined(lower, upper, dtype: tl.constexpr):
    """Returns the words of which `halves` returns these values, rounded to `dtype`."""
    if dtype == tl.float32:
        words = lower.to(tl.uint32, bitcast=True)
    else:
        low = lower.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
        words = low | (upper.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32) << 16)
    return words


@triton.jit
def sign(use, number, WORLD: tl.constexpr):
    """Tells every peer the site of what this rank sends in use `number`, in no order: data may arrive first."""
    targets = tl.arange(0, MAX_WORLD)
    words = tl.zeros((MAX_WORLD,), dtype=tl.int64) + word(use.site, number & EPOCH_MASK)
    signs = all_heaps(use, WORLD) + IN_BAND_SITES + (number & (IN_BAND_AREAS - 1)) * MAX_WORLD + use.rank
    tl.store(signs, words, mask=(targets < WORLD) & (targets != use.rank))


@triton.jit
def announce(asked, use, WORLD: tl.constexpr, THREADS: tl.constexpr):
    """Tells the peers the site in flag row 0 of the slot too, if they have all given their credits for it. This is for
    a peer that runs another kernel, which waits for flags, and would not notice that the ranks have diverged. asked: of
    `ask_to_send`. Nobody waits for this, so it does not wait either. It says nothing about data.
    """
    lanes = tl.arange(0, THREADS)
    late = (lanes < WORLD) & (lanes != use.rank) & behind(asked, use.epoch - 1)
    if tl.sum((late | ((lanes == WORLD) & (asked != 0))).to(tl.int32), axis=0) == 0:
        targets = tl.arange(0, MAX_WORLD)
        words = tl.zeros((MAX_WORLD,), dtype=tl.int64) + word(use.site, use.epoch)
        flags = all_heaps(use, WORLD) + use.slot * SLOT_WORDS + use.rank
        tl.store(flags, words, mask=(targets < WORLD) & (targets != use.rank))


@triton.jit
def begin(asked, words, WORLD: tl.constexpr, THREADS: tl.constexpr):
    """Does what one program of a launch does for all: it signs for the others' sends, gives the credits that are due,
    and calls `leave`. asked: the result of `ask`.
    """
    known = answer(asked)
    use = with_epoch(words, known.epoch)
    if known.ok != 0:
        sign(use, known.number, WORLD)
    credits = ask_to_send(use, WORLD, THREADS)
    left = leave(use, known.number + known.lines, known.due, THREADS, True)
    settle(tl.where(known.ok != 0, known.due, 0), use, WORLD)
    if known.ok != 0:
        announce(credits, use, WORLD, THREADS)
    return left


@triton.jit
def clear_before(heap, known, first, step, CHUNK: tl.constexpr):
    """Sets chunks first, first + step, .. of the area of the use before this one back to zero. heap: the rank's own
    heap. known: the result of `answer`. CHUNK: the number of words of a chunk.
    """
    stale = area(heap, known.number + (IN_BAND_AREAS - 1))
    nothing = tl.zeros((CHUNK,), dtype=tl.uint32)
    words = known.lines * LINE
    for chunk in range(first, (words + (CHUNK - 1)) // CHUNK, step):
        places = chunk * CHUNK + tl.arange(0, CHUNK)
        tl.store(stale + places, nothing, mask=places < words)


@triton.jit
def any_zero(words):
    return tl.min(tl.min(words, axis=1), axis=0) == 0


@triton.jit
def is_strange(seen, others, expected, epoch):
    """Returns which of the words `seen`, where `others` is true, are not behind `epoch` and yet are not `expected`."""
    return others & (behind(seen, epoch) == 0) & (seen != expected)


@triton.jit
def wait_in_band(use, known, mine, at, inside, stride, heap, piece, WORLD: tl.constexpr, THREADS: tl.constexpr):
    """Returns (the encoded words [R, C] of all ranks as a tuple, 1), or (anything, 0) after a failure.

    mine: this rank's words, none of which is zero. The words of source s lie at `at` + s * stride of the area. inside:
    which of them exist; where they do not, the result has this rank's words. heap: the rank's own heap. known: the
    result of `answer`. piece: the piece that a failure record names.

    The wait is bounded, like `wait`. On an H200 a poll of 8192 elements takes 2.4 times as long as a poll of a flag.
    Now and then the wait checks whether a peer is at another site; flag row 0 tells whether it is in another kernel.
    """
    # The module says why the block has one place for each thread.
    lanes = tl.arange(0, THREADS)
    others = (lanes < WORLD) & (lanes != use.rank)
    signs = heap + IN_BAND_SITES + (known.number & (IN_BAND_AREAS - 1)) * MAX_WORLD + lanes
    flags = heap + use.slot * SLOT_WORDS + lanes
    own = area(heap, known.number)
    expected = word(use.site, known.number & EPOCH_MASK)
    limit = known.limit
    polls = tl.full((), 0, tl.int64)
    late = tl.full((), 1, tl.int32)
    diverged = tl.full((), 0, tl.int32)
    signed = tl.zeros((THREADS,), dtype=tl.int64)
    words = (mine,) * WORLD
    while (late != 0) & (diverged == 0) & (polls < limit):
        found = ()
        least = mine
        for source in tl.static_range(WORLD):
            # Volatile: the words are read anew each time, at the point where the stores of all ranks become visible.
            sent = tl.load(own + (source * stride + at), mask=inside & (source != use.rank), other=mine, volatile=True)
            least = tl.minimum(least, sent)
            found = found + (sent,)  # type: ignore[assignment]
        words = found
        signed = tl.load(signs, mask=others, other=0, volatile=True)
        unsigned = (others & (signed != expected)).to(tl.int32)
        late = tl.sum(unsigned + any_zero(least).to(tl.int32), axis=0)
        if (late != 0) & (polls % POISON_PERIOD == FIRST_LOOK):
            limit = tl.where(healthy(use) != 0, limit, 0)
            told = tl.load(flags, mask=others, other=0, volatile=True)
            by_sign = is_strange(signed, others, expected, known.number)
            strange = by_sign | is_strange(told, others, word(use.site, use.epoch), use.epoch)
            diverged = tl.sum(strange.to(tl.int32), axis=0)
        polls += 1
    ok = tl.full((), 1, tl.int32)
    if late != 0:
        told = tl.load(flags, mask=others, other=0, volatile=True)
        by_sign = is_strange(signed, others, expected, known.number)
        strange = by_sign | is_strange(told, others, word(use.site, use.epoch), use.epoch)
        lane = tl.min(tl.where(others & behind(signed, known.number), lanes, THREADS), axis=0)
        for i in tl.static_range(WORLD):
            lane = tl.where(any_zero(words[i]), tl.minimum(lane, i), lane)
        diverged = tl.sum(strange.to(tl.int32), axis=0)
        if diverged != 0:
            lane = tl.min(tl.where(strange, lanes, THREADS), axis=0)
        saw = tl.sum(tl.where(lanes == lane, tl.where(by_sign, signed, told), 0), axis=0)
        if diverged != 0:
            fail(use, DIVERGED, lane, piece, saw)
        else:
            fail(use, TIMEOUT, lane, piece, saw)
        ok = tl.full((), 0, tl.int32)
    return words, ok


@triton.jit
def close_in_band(left, use, number, words):
    """Does what `close` does, and ends use `number`, in which `words` words, in whole lines, may have been written."""
    if left == tl.num_programs(0) - 1:
        tl.store(use.ctl + IN_BAND_USES, number)
        tl.store(use.ctl + IN_BAND_LINES, words // LINE)
    close(left, use)
