"""Signals between the ranks of one launch: addresses, bounded waits, releases, tickets and credits.

The protocol (docs/protocol.md) in one paragraph: each use of a slot has an epoch, which the kernel reads from a device
word, so a replayed CUDA graph is right. A sender waits for the receiver's *credit* of the slot's previous epoch, writes
data into the receiver's slot, and *publishes* one flag word (site, epoch). The receiver *waits* for the word and checks
the site. The program that finishes last advances the epoch. The next launch gives the peers their credits, because
nobody reads the slot any more. Work is taken by ticket, and every send comes before every wait that may depend on it.
So one resident program is enough for a launch to complete.

A kernel passes all that it knows of its use of a slot in one value: first `Words`, from the `Pointers` of its launch,
and then `Use`, which has the epoch too. Functions that need no epoch take either of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ditron_inductor.core.layout import (
    CREDIT_ROW,
    DATA_OFFSET,
    DIVERGED,
    DONE,
    DUE,
    EPOCH,
    EPOCH_BITS,
    EPOCH_MASK,
    HEADER_BYTES,
    MAX_WORLD,
    NUM_SLOTS,
    POISON,
    POLL_LIMIT,
    RECORD,
    RECORD_CHUNK,
    RECORD_EXPECTED,
    RECORD_PEER,
    RECORD_RANK,
    RECORD_SEEN,
    RECORD_SLOT,
    SEND_TICKET,
    SLOT_CTL,
    SLOT_CTL_STRIDE,
    SLOT_WORDS,
    STATE,
    TILE_TICKET,
    TIMEOUT,
    WRAP_SHIFT,
)

POISON_PERIOD = tl.constexpr(256)
"""A wait checks once in so many polls whether another program has failed, because then nothing more will come."""

FIRST_LOOK = tl.constexpr(4)
"""The poll before which a wait for all checks this first, so a short wait does not take the time of a poll."""


FIRST_SLOT = tl.constexpr(2)
"""The number in `Pointers` of the first slot."""
assert FIRST_SLOT.value + NUM_SLOTS.value <= 16


class Pointers(NamedTuple):
    """What a launch gets of the protocol: pointers to the heaps of all ranks, to the control words and to local
    counters, and the numbers of the slot and the site. One compiled kernel serves all slots and sites, although Triton
    specialises on numbers in a structure that are 1 or multiples of 16: slots are counted from FIRST_SLOT, and the
    numbers of sites are odd and not 1. The rank cannot be kept from that without arithmetic, so it is a parameter of
    its own, on which kernels do not specialise. (Taken out of another number it would take a register all the time: the
    attention of heads of 256 elements spilled 860 bytes in place of 88.)
    """

    table: Any
    ctl: Any
    counters: Any
    slot: Any
    site: Any


class Words(NamedTuple):
    """What a program knows of the protocol: pointers to all heaps and the control words; its rank, slot and site."""

    table: Any
    ctl: Any
    rank: Any
    slot: Any
    site: Any


class Use(NamedTuple):
    """A use of a slot: `Words`, and its epoch."""

    table: Any
    ctl: Any
    rank: Any
    slot: Any
    site: Any
    epoch: Any


@triton.jit
def words_of(pointers, rank):
    """Returns the Words of a launch of `rank` with these Pointers."""
    return Words(pointers.table, pointers.ctl, rank, pointers.slot - FIRST_SLOT, pointers.site)


@triton.jit
def slot_ctl(use):
    """Pointer to the control words of the slot."""
    return use.ctl + SLOT_CTL + use.slot * SLOT_CTL_STRIDE


@triton.jit
def peer(table, rank, offset, dtype: tl.constexpr):
    """Pointer, in this process, `offset` bytes into the symmetric heap of `rank`; 16-byte aligned when `offset` is."""
    address = tl.load(table + rank) + offset
    # The hint must stand on the pointer: the compiler's alignment analysis does not look through the cast.
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def flag(use, rank, row, source):
    """Pointer to a flag word in the memory of `rank`, who waits for it; `source` is the one rank that writes it."""
    return peer(use.table, rank, 0, tl.int64) + use.slot * SLOT_WORDS + row * MAX_WORLD + source


@triton.jit
def word(site, epoch):
    """The flag word of (site, epoch)."""
    return (site.to(tl.int64) << EPOCH_BITS) | epoch


@triton.jit
def use_of(words):
    """Returns the Use of a launch with these Words. Its epoch is one more than the ended uses of the slot."""
    epoch = tl.load(slot_ctl(words) + EPOCH) + 1
    return with_epoch(words, epoch & EPOCH_MASK)


@triton.jit
def with_epoch(words, epoch):
    return Use(words.table, words.ctl, words.rank, words.slot, words.site, epoch)


@triton.jit
def behind(seen, epoch):
    """Returns whether the epoch in the word `seen` is before `epoch`, modulo 2**EPOCH_BITS."""
    return ((seen - epoch) << WRAP_SHIFT) < 0


@triton.jit
def healthy(use):
    """1 unless an earlier failure poisoned this workspace."""
    # An atomic read, since another program of this launch may be the one that fails.
    return (tl.atomic_add(use.ctl + POISON, 0, sem="relaxed", scope="gpu") == 0).to(tl.int32)


@triton.jit
def fail(use, code: tl.constexpr, source, row, seen):
    """Poisons the workspace and, if this is its first failure, fills the record that the host turns into an error.
    seen: the word that was found in the place of the flag `row` of `source`.
    """
    expected = word(use.site, use.epoch)
    poison = tl.full((), code, tl.int64)
    if tl.atomic_cas(use.ctl + POISON, tl.full((), 0, tl.int64), poison, sem="relaxed", scope="gpu") == 0:
        record = tl.load(use.ctl + RECORD).to(tl.pointer_type(tl.int64))
        tl.store(record + RECORD_RANK, use.rank)
        tl.store(record + RECORD_PEER, source)
        tl.store(record + RECORD_CHUNK, row)
        tl.store(record + RECORD_SLOT, use.slot)
        tl.store(record + RECORD_EXPECTED, expected)
        tl.store(record + RECORD_SEEN, seen)
        # Release: the host, which polls STATE, then sees the whole record.
        tl.debug_barrier()
        tl.atomic_xchg(record + STATE, poison, sem="release", scope="sys")


@triton.jit
def wait(use, row, source):
    """Waits until `source` has published this use in flag `row` of this rank. Returns 1 if it has, and 0 after a
    failure. It acquires at system scope: what `source` wrote before it published is visible to the whole program
    afterwards. The wait is bounded. It expires after POLL_LIMIT polls, and soon after another program of this launch
    has failed. Then `fail` records why, and the caller must not read the data.
    """
    address = flag(use, use.rank, row, source)
    limit = tl.load(use.ctl + POLL_LIMIT)
    seen = tl.atomic_add(address, 0, sem="acquire", scope="sys")
    polls = tl.full((), 0, tl.int64)
    while behind(seen, use.epoch) & (polls < limit):
        if polls % POISON_PERIOD == 0:
            limit = tl.where(healthy(use) != 0, limit, 0)
        seen = tl.atomic_add(address, 0, sem="acquire", scope="sys")
        polls += 1
    ok = tl.full((), 1, tl.int32)
    if behind(seen, use.epoch):
        fail(use, TIMEOUT, source, row, seen)
        ok = tl.full((), 0, tl.int32)
    elif seen != word(use.site, use.epoch):
        fail(use, DIVERGED, source, row, seen)
        ok = tl.full((), 0, tl.int32)
    return ok


@triton.jit
def count_late(seen, others, epoch):
    """Returns how many of the words `seen`, where `others` is true, are behind `epoch`."""
    return tl.sum((others & behind(seen, epoch)).to(tl.int32), axis=0)


@triton.jit
def wait_all(use, row, WORLD: tl.constexpr):
    """Does `wait` for every peer's word in flag `row` in one round of polling, instead of one for each source."""
    return wait_for_words(use, row, WORLD, True, 1, False)


@triton.jit
def wait_rows(use, row, WORLD: tl.constexpr, ROWS: tl.constexpr):
    """Does `wait_all` for ROWS flag rows from `row` on, at once, and for this rank's own words too."""
    return wait_for_words(use, row, WORLD, True, ROWS, True)


@triton.jit
def wait_credits(use, WORLD: tl.constexpr):
    """Waits until every peer has finished with the previous use of the slot, so that the slot may be overwritten on
    every rank. That use may be of any site. The program with the first ticket calls this after `settle`.
    """
    return wait_for_words(with_epoch(use, use.epoch - 1), CREDIT_ROW, WORLD, False, 1, False)


@triton.jit
def wait_for_words(use, row, WORLD: tl.constexpr, CHECK_SITE: tl.constexpr, ROWS: tl.constexpr, OWN: tl.constexpr):
    """Implements `wait_credits`, `wait_all` and `wait_rows`."""
    lanes = tl.arange(0, ROWS * MAX_WORLD)
    sources = lanes % MAX_WORLD
    others = (sources < WORLD) & ((sources != use.rank) | OWN)
    # Compute the addresses once: an acquire empties the cache, so reading the table takes as long as reading the words.
    addresses = flag(use, use.rank, row, 0) + lanes
    nothing = tl.zeros((ROWS * MAX_WORLD,), dtype=tl.int64)
    seen = tl.atomic_add(addresses, nothing, mask=others, sem="acquire", scope="sys")
    late = count_late(seen, others, use.epoch)
    if late != 0:
        limit = tl.load(use.ctl + POLL_LIMIT)
        polls = tl.full((), 0, tl.int64)
        while (late != 0) & (polls < limit):
            if polls % POISON_PERIOD == FIRST_LOOK:
                limit = tl.where(healthy(use) != 0, limit, 0)
            seen = tl.atomic_add(addresses, nothing, mask=others, sem="acquire", scope="sys")
            late = count_late(seen, others, use.epoch)
            polls += 1
    wrong = others & behind(seen, use.epoch)
    if CHECK_SITE:
        wrong = others & (seen != word(use.site, use.epoch))
    ok = tl.full((), 1, tl.int32)
    if tl.sum(wrong.to(tl.int32), axis=0) != 0:
        lane = tl.min(tl.where(wrong, lanes, ROWS * MAX_WORLD), axis=0)
        if late != 0:
            lane = tl.min(tl.where(others & behind(seen, use.epoch), lanes, ROWS * MAX_WORLD), axis=0)
        source = lane % MAX_WORLD
        missed = lane // MAX_WORLD + row
        saw = tl.sum(tl.where(lanes == lane, seen, nothing), axis=0)
        if late != 0:
            fail(use, TIMEOUT, source, missed, saw)
        else:
            fail(use, DIVERGED, source, missed, saw)
        ok = tl.full((), 0, tl.int32)
    return ok


@triton.jit
def proxy_fence(ok):
    """Orders what a wait acquired before later block loads (TMA), which read by another path. NVIDIA only."""
    return tl.inline_asm_elementwise(
        "fence.proxy.async; mov.b32 $0, $1;", "=r,r", [ok], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def publish(use, target, row):
    """Tells `target` that everything that this program wrote for it, and everything that it has acquired, is visible.
    This rank is the only writer of the word, and it stores, never adds. The barrier makes the stores of all warps
    precede the release, which one thread performs. The next use of the slot overwrites the word. For that use `target`
    must have given its credit, so the word has been read by then.
    """
    tl.debug_barrier()
    tl.atomic_xchg(flag(use, target, row, use.rank), word(use.site, use.epoch), sem="release", scope="sys")


@triton.jit
def publish_all(use, row, WORLD: tl.constexpr, OWN: tl.constexpr = False):
    """Does `publish` to all peers, and to this rank if OWN, each by a thread of its own: their releases overlap."""
    publish_to(all_heaps(use, WORLD), use, row, WORLD, OWN)


@triton.jit
def all_heaps(use, WORLD: tl.constexpr):
    """Returns the heaps of all ranks, for `publish_to`. A release waits for this load, so load them early."""
    targets = tl.arange(0, MAX_WORLD)
    return tl.load(use.table + targets, mask=targets < WORLD, other=0).to(tl.pointer_type(tl.int64))


@triton.jit
def publish_to(heaps, use, row, WORLD: tl.constexpr, OWN: tl.constexpr = False):
    """Does what `publish_all` does. heaps: the result of `all_heaps`."""
    targets = tl.arange(0, MAX_WORLD)
    others = (targets < WORLD) & ((targets != use.rank) | OWN)
    words = tl.zeros((MAX_WORLD,), dtype=tl.int64) + word(use.site, use.epoch)
    tl.debug_barrier()
    addresses = heaps + use.slot * SLOT_WORDS + row * MAX_WORLD + use.rank
    tl.atomic_xchg(addresses, words, mask=others, sem="release", scope="sys")


@triton.jit
def arrive(counter, total):
    """Counts a part that this program has finished. Returns True for the last of `total` parts; its program has then
    acquired what all others wrote. The counter is local to the GPU, and it is 0 again when the last part has arrived.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == total - 1
    if last:
        tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
    return last


@triton.jit
def arrive_with(counter, total, parts):
    """Does what `arrive` does for `parts` that this program has finished."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, parts, sem="acq_rel", scope="gpu") == total - parts
    if last:
        tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
    return last


@triton.jit
def take_send(use):
    """Returns the ticket of the next piece of work in the send queue of this launch."""
    return tl.atomic_add(slot_ctl(use) + SEND_TICKET, 1, sem="relaxed", scope="gpu").to(tl.int32)


@triton.jit
def take_tile(use):
    """Returns the ticket of the next piece of work in the tile queue of this launch."""
    return tl.atomic_add(slot_ctl(use) + TILE_TICKET, 1, sem="relaxed", scope="gpu").to(tl.int32)


@triton.jit
def request_ticket(use, QUEUE: tl.constexpr, THREADS: tl.constexpr, wanted):
    """Begins to take the next ticket of QUEUE (SEND_TICKET or TILE_TICKET). `granted` waits for it, and should be
    called after work that hides the latency. The request has a place for each of THREADS threads, so that the result
    stays in the register of the thread that asked. If `wanted` is false, nothing is requested, and the result of
    `granted` has no meaning. A program may hold one tile ticket ahead, because the holder of the first unfinished
    ticket waits for nothing that a later ticket has to do.
    """
    lanes = tl.arange(0, THREADS)
    # Only the first of these addresses is used. Were they all the same, the assembler would make one request of all
    # those of a warp and deal out the answer, for which it waits at once.
    words = slot_ctl(use) + QUEUE + lanes
    ones = tl.full((THREADS,), 1, tl.int64)
    return tl.atomic_add(words, ones, mask=(lanes == 0) & wanted, sem="relaxed", scope="gpu")


@triton.jit
def granted(request, THREADS: tl.constexpr):
    """The ticket that `request_ticket` asked for."""
    return tl.sum(tl.where(tl.arange(0, THREADS) == 0, request.to(tl.int32), 0), axis=0)


@triton.jit
def ask_to_send(use, WORLD: tl.constexpr, THREADS: tl.constexpr):
    """Begins to read the credits of all peers, and the health of the workspace. `may_send` has the answer. Each of the
    words is read by a thread of its own, as in `request_ticket`, so nothing waits for them before `may_send`. There is
    no acquire: credits carry no data, and the stores that they allow stand behind a branch.
    """
    lanes = tl.arange(0, THREADS)
    words = tl.where(lanes == WORLD, use.ctl + POISON + lanes * 0, flag(use, use.rank, CREDIT_ROW, 0) + lanes)
    nothing = tl.zeros((THREADS,), dtype=tl.int64)
    return tl.atomic_add(words, nothing, mask=(lanes <= WORLD) & (lanes != use.rank), sem="relaxed", scope="sys")


@triton.jit
def may_send(asked, due, use, WORLD: tl.constexpr, THREADS: tl.constexpr):
    """Waits until every peer has finished with the previous use of the slot. Returns 1 if they have and the workspace
    is healthy. asked: the result of `ask_to_send`. due: `last_use` if this program has the first ticket, and otherwise
    0; it is for `settle` before a wait.
    """
    lanes = tl.arange(0, THREADS)
    late = (lanes < WORLD) & (lanes != use.rank) & behind(asked, use.epoch - 1)
    ok = tl.full((), 1, tl.int32)
    if tl.sum((late | ((lanes == WORLD) & (asked != 0))).to(tl.int32), axis=0) != 0:
        ok = healthy(use)
        settle(tl.where(ok != 0, due, 0), use, WORLD)
        ok = ok & wait_credits(use, WORLD)
    return ok


@triton.jit
def data(use, rank, dtype: tl.constexpr):
    """Pointer to the data of the slot in the heap of `rank`."""
    return peer(use.table, rank, tl.load(slot_ctl(use) + DATA_OFFSET), dtype)


@triton.jit
def last_use(use):
    """Returns the use that ended last, whose credits are due, or 0. Call it before `finish` or `leave`."""
    return tl.load(use.ctl + DUE)


@triton.jit
def credits_due(use, alive):
    """Returns `last_use` for `settle` if `alive`, and otherwise 0, so that peers stop too after a failure."""
    return tl.where(alive != 0, last_use(use), 0)


@triton.jit
def settle(due, use, WORLD: tl.constexpr):
    """Gives the credits that are due: all kernels of that use have ended, so nobody reads its slot any more. The
    program with the first ticket does this before it waits for anything, because a peer may be waiting for these
    credits. Giving them twice does no harm, because newer credits come only from later launches.
    """
    if due != 0:
        slot = ((due >> EPOCH_BITS) - 1).to(tl.int32)
        publish_all(Use(use.table, use.ctl, use.rank, slot, use.site, due & EPOCH_MASK), CREDIT_ROW, WORLD)


@triton.jit
def finish(use):
    """Ends a program, as its last call; the program that finishes last closes the use (see `close`)."""
    close(tl.atomic_add(slot_ctl(use) + DONE, 1, sem="relaxed", scope="gpu"), use)


@triton.jit
def leave(use, ticket, due, THREADS: tl.constexpr, wanted):
    """Begins to `finish` early, if time is critical: when this program has its last ticket, the epoch and the last use.
    `granted` has the number for `close`. Nothing is requested unless `wanted`.
    """
    # True, but it takes every thread's values to know that: no warp is still reading them when the use is closed. The
    # epoch is added, as the compiler knows that it is not negative.
    known = (tl.arange(0, THREADS) >= 0) & (ticket >= 0) & (due + use.epoch >= 0)
    everywhere = tl.sum(known.to(tl.int32), axis=0) == THREADS
    return request_ticket(use, DONE, THREADS, wanted & everywhere)


@triton.jit
def close(number, use):
    """If this program is the last one, resets the tickets, advances the epoch, and notes that the credits are due.
    number: the number of programs that had left before. They may still be working, and reading the slot. Nothing that
    is written here is read before the next launch, so nothing has to be ordered. The epoch of a failed launch advances
    too, because the next launch finds the poison word and returns NaN.
    """
    if number == tl.num_programs(0) - 1:
        words = slot_ctl(use)
        tl.store(words + DONE, 0)
        tl.store(words + SEND_TICKET, 0)
        tl.store(words + TILE_TICKET, 0)
        tl.store(words + EPOCH, use.epoch)
        tl.store(use.ctl + DUE, ((use.slot + 1).to(tl.int64) << EPOCH_BITS) | use.epoch)


assert HEADER_BYTES.value % 16 == 0
