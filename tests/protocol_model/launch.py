"""What one launch does, as work items in ticket order, and the protections that an exploration may remove.

An item is a tuple of operations on memory; a resident program takes the next item when it has finished one:

    ("ask",)                  look at the credits that the item waits for; if all are there, pass over settling here
    ("settle", peer)          store the credit of the use that is due, if any, in `peer`'s credit[slot of that use][me]
    ("credit", peer)          wait until credit[slot][peer] in own memory says that `peer` ended the slot's previous use
    ("write", dst, region)    plain stores of data into `dst`'s slot
    ("publish", dst, region)  release store of (site, epoch) into `dst`'s flag[slot][region][me]
    ("arrive", dst, region)   count a tile for `dst` in own memory; the last of TILES sets the count to 0 and publishes
    ("await", region, src)    wait for flag[slot][region][src] in own memory, then compare the site
    ("read", region, src)     read the data that `src` wrote into own slot
    ("own",)                  read the own part of a reduction, which lies in no slot
    ("sum",)                  what the item has read becomes the value that its next writes carry

A use is closed, its epoch advanced and its credits due, as soon as the programs are counted. A program counts itself
when it draws no more tickets; it may still settle, wait and read then, as it has read what is due when it started.
Nobody looks at what that changes before the next launch, so this earliest moment stands for all later ones.

Launches in band (core/in_band.py) also have, with a word of data and one that names the site for each source and area,

    ("sign", dst)             store (site, number of this use in band) beside the area of this use in `dst`'s memory
    ("drop", dst)             plain stores of data into that area
    ("announce",)             publish (site, epoch) to all peers, if they have all given their credits of the slot
    ("clear",)                zeros into the own area of the use before
    ("watch", src)            wait until `src` has signed and its data is not zero, then read it

Nothing orders their stores, so the moment at which one is seen stands for that of the store.

Launches that pull (the strategy `chunked`; one launch with two programs is what it queues on two streams) also have

    ("fill", region, part)    plain stores of data into the own slot, where peers read them
    ("pull", region, part, src)   read that part of `src`'s slot
    ("add", src)              add up what has been pulled from there, or the own part
    ("end",)                  the end of the item; what follows is done instead when a wait before it fails
    ("revoke", dst)           tell `dst` that its credit is missing, and that the slot is overwritten even so
    ("check", src)            whether `src` has told so, of the slot that the launch has read from
    ("trust",)                what was pulled is used from here on, so it must have been right
    ("close",)                the use is closed, by the last program out: a kernel of its own

A wait that fails ends its item: nothing after it is done, nothing is counted or published. The program then takes the
next item, so whatever does not depend on the failed wait still reaches the peers.
Self-sends (dst == me) stand for the rank's own tiles: same words in own memory, no credit needed (stream order).
"""

from __future__ import annotations

import itertools
from enum import Enum, auto
from typing import Any

from tests.protocol_model.state import TILES

Op = tuple[Any, ...]  # name, then small integers
Item = tuple[Op, ...]

# Regions of a slot, each with a part per source: a chunk or the first tile, the second tile, reduced rows.
CHUNK, TILE, RESULT = 0, 1, 2
# Data that is pulled, and the words that revoke a slot. Where data is pushed it takes the place of the former.
PULLED, PULLED_RESULT = 3, 4
REVOKED = 3

IN_BAND = "in_band"

ZERO_COPY = ("pull_scatter", "pull_reduce", "pull_columns")
PULLS = ("pull_gather", "pull_pieces", *ZERO_COPY)
"""Of ZERO_COPY data is written into the own slot even when nothing else is done."""


class Protection(Enum):
    """One rule of the protocol that can be taken away; the comment says what is left without it."""

    CREDITS = auto()  # data is written without waiting for the receiver
    ALL_CREDITS = auto()  # a sender waits for the receiver's credit only, not for those who may read from it
    CREDIT_AFTER_USE = auto()  # credits are given when the launch that uses the slot begins
    CREDIT_BY_NEXT = auto()  # credits are given by the first program out of the launch that uses the slot
    SETTLE_FIRST = auto()  # the first item waits for a credit that is missing before it settles
    SETTLE_ALWAYS = auto()  # the first item settles only if a credit is missing
    SETTLE_BEFORE_FLAGS = auto()  # the first item settles when its waits for flags are over
    DUE_BEFORE_COUNT = auto()  # what is due is read when it is settled, when the program may have been counted
    REVOKE = auto()  # a slot is overwritten without credit, and nobody is told
    CHECKED = auto()  # what was pulled is used without a look at whether it was overwritten
    LAST_OUT = auto()  # the first program that counts itself closes the launch
    DATA_BEFORE_FLAG = auto()  # the flag is stored before the data
    RELEASE = auto()  # a flag is a plain store: data may be seen later
    ARRIVE_RELEASE = auto()  # tiles are counted with relaxed atomics
    EPOCH = auto()  # flags and credits are compared by parity
    WRAP_SAFE = auto()  # epochs are compared with >=
    DEVICE_EPOCH = auto()  # a captured launch keeps the epoch of its capture
    SENDS_FIRST = auto()  # items that wait come before items that send
    SITE_HASH = auto()  # the flag's site is not compared
    CLEARED = auto()  # data in band stays where it was when it has been read
    SIGNED = auto()  # data in band is read whoever sent it
    ONE_WRITER = auto()  # all sources share one flag word
    RANK_ORDER = auto()  # a reduction starts at the own rank
    WAIT_RESULT = auto()  # what follows a failed wait is done as if it had succeeded
    PIECE_COUNT = auto()  # a tile without its credit is not written, but counted and published
    RESULT_OK = auto()  # rows that could not be reduced are pushed to the peers
    ALIVE = auto()  # a launch on a poisoned workspace does its work
    COMPLETE_CHUNKS = auto()  # a poisoned rank publishes nothing, however complete
    WITHHELD_CREDITS = auto()  # a poisoned workspace gives its credits
    RESET_BARRIER_BEFORE = auto()  # reset zeroes while peers may still run old launches
    RESET_BARRIER_AFTER = auto()  # reset lets a rank go on while peers have not zeroed yet
    CAPTURES_APART = auto()  # captured calls count among those that the host makes
    RESET_COUNT = auto()  # reset keeps the host's call count
    RESET_COUNTERS = auto()  # reset keeps the tiles that a failed launch has counted
    RESET_DUE = auto()  # reset keeps the use whose credits are due
    GROWTH_BARRIER = auto()  # growth lets a rank go on while peers have not zeroed their new memory yet
    WAIT_FOR_LAST = auto()  # a launch that has begun early does not wait for the one in front of it
    EVERY_PROGRAM_WAITS = auto()  # only the first program of a launch that has begun early waits
    EVERY_LAUNCH_WAITS = auto()  # a launch that needs nothing of the one in front of it does not wait
    WORDS_BEHIND_WAIT = auto()  # a launch reads the words of the protocol before it waits
    ROW_BEHIND_WAIT = auto()  # a launch reads what others have computed before it waits
    ALL_BEGUN = auto()  # the next launch begins when the first program of this one has begun
    ONE_VERDICT = auto()  # a rank that has waited long enough for a meeting decides for itself alone


Without = frozenset[Protection]

OVERLAPPING = {
    Protection.WAIT_FOR_LAST,
    Protection.EVERY_PROGRAM_WAITS,
    Protection.EVERY_LAUNCH_WAITS,
    Protection.WORDS_BEHIND_WAIT,
    Protection.ROW_BEHIND_WAIT,
    Protection.ALL_BEGUN,
}
"""Those of launches that begin early."""


def items(kind: str, me: int, world: int, without: Without, tiles: int = TILES) -> tuple[Item, ...]:
    """The items of rank `me` for one launch of `kind` in ticket order; KeyError for an unknown kind."""
    return tuple(item for phase in phases(kind, me, world, without, tiles) for item in phase)


def phases(kind: str, me: int, world: int, without: Without, tiles: int = TILES) -> tuple[tuple[Item, ...], ...]:
    """The same by phase: where programs are few, what a phase does is done when the next one begins."""
    builder = {
        "all_gather_matmul": _all_gather_matmul,
        "matmul_reduce_scatter": _matmul_reduce_scatter,
        "matmul_all_reduce": _matmul_all_reduce,
        "matmul_all_gather": _matmul_all_gather,
        "matmul_all_to_all": _matmul_all_to_all,
        "all_to_all_matmul": _all_to_all_matmul,
        "few_rows": _few_rows,
        "push": _push,
        "one_shot": _one_shot,
        "two_shots": _two_shots,
        "in_slices": _in_slices,
        "reduced_experts": _reduced_experts,
        "scattered_experts": _scattered_experts,
        IN_BAND: _in_band,
        "pull_gather": _pull_gather,
        "pull_scatter": _pull_scatter,
        "pull_reduce": _pull_reduce,
        "pull_pieces": _pull_pieces,
        "pull_columns": _pull_columns,
        "flash_decode": _flash_decode,
        "all_gather_attention": _all_gather_attention,
        "causal_attention": _causal_attention,
    }[kind]
    others = [(me + i) % world for i in range(1, world)]
    found = builder(me, world, others, tiles, without)
    if Protection.SENDS_FIRST in without:
        found = found[::-1]
    tickets = itertools.count()
    return tuple(
        tuple(_settling(item, next(tickets) == 0, others, without) for item in phase) for phase in found if phase
    )


def closing(kind: str, me: int, world: int, without: Without) -> Item:
    """The last kernel of a launch that pulls, which closes the use; nothing where the programs' counts do."""
    others = [(me + i) % world for i in range(1, world)]
    return (*_checks(others, without), ("trust",), ("close",)) if kind in PULLS else ()


def _settling(item: Item, first: bool, others: list[int], without: Without) -> Item:
    """`item`; the first one settles before it waits for anything, a credit that is missing or a flag.

    If all credits are there it settles behind its sends, the latest moment; a launch that pulls into a slot which is
    filled in any case has no sends in its first kernel. A kernel may settle earlier: its peers only get on sooner.
    """
    if not first:
        return item
    settle = tuple(("settle", p) for p in others)
    names = [op[0] for op in item]
    if Protection.SETTLE_ALWAYS not in without:
        place = len(item)
        if "end" in names:
            place = max((i + 1 for i, name in enumerate(names) if name == "credit"), default=0)
        elif "await" in names and Protection.SETTLE_BEFORE_FLAGS not in without:
            place = names.index("await")
        item = (*item[:place], *settle, *item[place:])
    if "credit" not in names:
        return item
    place = names.index("credit")
    if Protection.SETTLE_FIRST in without:
        place += names.count("credit")
        return (*item[:place], *settle, *item[place:])
    return (*item[:place], ("ask",), *settle, *item[place:])


def _credits(world: int, me: int, dst: int, without: Without) -> Item:
    if Protection.CREDITS in without or dst == me:
        return ()
    if Protection.ALL_CREDITS in without:
        return (("credit", dst),)
    return tuple(("credit", (me + i) % world) for i in range(1, world))


def _checks(others: list[int], without: Without) -> Item:
    return () if Protection.CHECKED in without else tuple(("check", p) for p in others)


def _send(
    me: int, world: int, dst: int, region: int, without: Without, *, credit: bool = True, count: bool = False
) -> Item:
    wait = _credits(world, me, dst, without) if credit else ()
    write: Op = ("write", dst, region)
    flag: Op = ("arrive", dst, CHUNK) if count else ("publish", dst, region)
    return (*wait, flag, write) if Protection.DATA_BEFORE_FLAG in without else (*wait, write, flag)


def _reads(region: int, flag: int, sources: list[int]) -> Item:
    return (*(("await", flag, src) for src in sources), *(("read", region, src) for src in sources))


def _reduction(region: int, me: int, world: int, without: Without, flag: int = CHUNK) -> Item:
    first = me if Protection.RANK_ORDER in without else 0
    return (*_reads(region, flag, [(first + i) % world for i in range(world)]), ("sum",))


def _all_gather_matmul(me: int, world: int, others: list[int], tiles: int, without: Without) -> list[list[Item]]:
    """The own shard goes to every peer, then one compute item per peer's chunk."""
    return [[_send(me, world, p, CHUNK, without) for p in others], [_reads(CHUNK, CHUNK, [p]) for p in others]]


def _matmul_reduce_scatter(me: int, world: int, others: list[int], tiles: int, without: Without) -> list[list[Item]]:
    """TILES tiles per destination, own destination last, counted locally; then one reduction per tile."""
    sends = [_send(me, world, dst, tile, without, count=True) for dst in (*others, me) for tile in range(tiles)]
    return [sends, [_reduction(tile, me, world, without) for tile in range(tiles)]]


def _matmul_all_reduce(me: int, world: int, others: list[int], tiles: int, without: Without) -> list[list[Item]]:
    """Two-shot: partials to the owner, reduced rows to all, then the copies out.

    The second phase waits for no credit: its item has waited for every peer's flag of this epoch, and a peer raises
    that flag only in a launch that begins after its previous use of the slot ended.
    """
    partials = [_send(me, world, dst, CHUNK, without) for dst in (*others, me)]
    results = _send_all(me, world, RESULT, [*others, me], without, credit=False)
    reduce = (*_reduction(CHUNK, me, world, without), *results)
    return [partials, [reduce], [_reads(RESULT, RESULT, [owner]) for owner in (*others, me)]]


def _matmul_all_gather(me: int, world: int, others: list[int], tiles: int, without: Without) -> list[list[Item]]:
    """TILES tiles, each pushed to all peers; then the copies of theirs."""
    sends = [_send_all(me, world, tile, others, without) for tile in range(tiles)]
    return [sends, [_reads(tile, tile, [p]) for tile in range(tiles) for p in others]]


def _matmul_all_to_all(me: int, world: int, others: list[int], tiles: int, without: Without) -> list[list[Item]]:
    """TILES tiles for each peer; then the copies of what they have sent."""
    sends = [_send(me, world, dst, tile, without) for dst in others for tile in range(tiles)]
    return [sends, [_reads(tile, tile, [p]) for p in others for tile in range(tiles)]]


def _all_to_all_matmul(me: int, world: int, others: list[int], tiles: int, without: Without) -> list[list[Item]]:
    """A chunk for every peer; then tiles, each of which waits for all of them, one after the other."""
    sends = [_send(me, world, dst, CHUNK, without) for dst in others]
    return [sends, [tuple(op for p in others for op in _reads(CHUNK, CHUNK, [p])) for _ in range(tiles)]]


def _few_rows(me: int, world: int, others: list[int], tiles: int, without: Without) -> list[list[Item]]:
    """The same of a few rows: a run of tiles is pushed to all peers, and theirs copied, by one program."""
    runs = []
    for run in range(tiles):
        sends, reads = _send_all(me, world, run, others, without), _reads(run, run, others)
        runs.append((*reads, *sends) if Protection.SENDS_FIRST in without else (*sends, *reads))
    return [runs]


def _send_all(me: int, world: int, region: int, targets: list[int], without: Without, *, credit: bool = True) -> Item:
    """To all of `targets`, then the flags of all."""
    wait = _credits(world, me, next(dst for dst in targets if dst != me), without) if credit else ()
    writes = tuple(("write", dst, region) for dst in targets)
    flags = tuple(("publish", dst, region) for dst in targets)
    return (*wait, *flags, *writes) if Protection.DATA_BEFORE_FLAG in without else (*wait, *writes, *flags)


def _one_shot(me: int, world: int, others: list[int], tiles: int, without: Without) -> list[list[Item]]:
    """Pieces, each pushed to all peers and added up by the program that has sent it."""
    return [[_piece(region, me, world, others, without) for region in range(tiles)]]


def _two_shots(me: int, world: int, others: list[int], tiles: int, without: Without) -> list[list[Item]]:
    """A piece of every rank's run: pushed to its owner, the own sum pushed to all, the peers' sums read; one item."""
    sums = _send_all(me, world, RESULT, others, without, credit=False)
    return [[(*_piece(CHUNK, me, world, others, without), *sums, *_reads(RESULT, RESULT, others))]]


def _in_slices(me: int, world: int, others: list[int], tiles: int, without: Without) -> list[list[Item]]:
    """What is one item in `two_shots`, by a queue of sends, one of sums, and, for each tile, the sums that are read."""
    sums = _send_all(me, world, RESULT, others, without, credit=False)
    row = tuple(_reads(RESULT, RESULT, others))
    return [
        [_send_all(me, world, CHUNK, others, without)],
        [(*_own_sum(CHUNK, me, world, without), *sums)],
        [row] * tiles,
    ]


def _scattered_experts(me: int, world: int, others: list[int], tiles: int, without: Without) -> list[list[Item]]:
    """Sums for each peer, and then what the peers have sent, added to the own sums."""
    sends = [_send(me, world, p, CHUNK, without) for p in others]
    return [sends, [_own_sum(CHUNK, me, world, without)]]


def _reduced_experts(me: int, world: int, others: list[int], tiles: int, without: Without) -> list[list[Item]]:
    """The same, whose results go to all peers; then the copies of theirs."""
    sends, [own] = _scattered_experts(me, world, others, tiles, without)
    results = _send_all(me, world, RESULT, others, without, credit=False)
    return [sends, [(*own, *results)], [_reads(RESULT, RESULT, [owner]) for owner in others]]


def _in_band(me: int, world: int, others: list[int], tiles: int, without: Without) -> list[list[Item]]:
    """A program that signs, one that sends, one that clears, and some that each add up what all have sent."""
    clear: list[Item] = [] if Protection.CLEARED in without else [(("clear",),)]
    begin = (*(("sign", p) for p in others), ("announce",))
    send = tuple(("drop", p) for p in others)
    first = me if Protection.RANK_ORDER in without else 0
    sources = [(first + i) % world for i in range(world)]
    reads = (*(("own",) if source == me else ("watch", source) for source in sources), ("sum",))
    return [[begin], [send, *clear], [reads] * tiles]


def _piece(region: int, me: int, world: int, others: list[int], without: Without) -> Item:
    sends, adds = _send_all(me, world, region, others, without), _own_sum(region, me, world, without)
    return (*adds, *sends) if Protection.SENDS_FIRST in without else (*sends, *adds)


def _own_sum(region: int, me: int, world: int, without: Without) -> Item:
    """What the peers have sent is added to the own part, which lies in no slot."""
    first = me if Protection.RANK_ORDER in without else 0
    reads: list[Op] = []
    for source in [(first + i) % world for i in range(world)]:
        reads += [("own",)] if source == me else [("await", region, source), ("read", region, source)]
    return (*reads, ("sum",))


def _flash_decode(me: int, world: int, others: list[int], tiles: int, without: Without) -> list[list[Item]]:
    """Heads: the own part of one goes to all slots, the own one too; its parts are merged when the next one is sent."""
    merges = [_reduction(head, me, world, without, flag=head) for head in range(tiles)]
    sends = [_send_all(me, world, head, [*others, me], without) for head in range(tiles)]
    if Protection.SENDS_FIRST in without:
        return [[(*merge, *send) for send, merge in zip(sends, merges, strict=True)]]
    late = [(*send, *merge) for send, merge in zip(sends[1:], merges[:-1], strict=True)]
    return [[sends[0], *late, merges[-1]]]


def _all_gather_attention(me: int, world: int, others: list[int], tiles: int, without: Without) -> list[list[Item]]:
    """Keys and values, each with its flag, to every peer; then blocks of queries, over those of peer after peer."""
    sends = [_send(me, world, p, region, without) for p in others for region in range(tiles)]
    block = tuple(op for p in reversed(others) for op in _both(p, tiles))
    return [sends, [block] * tiles]


def _causal_attention(me: int, world: int, others: list[int], tiles: int, without: Without) -> list[list[Item]]:
    """The same where only later ranks see the keys: the first rank waits for nobody, nobody waits for the last one."""
    sends = [_send(me, world, p, region, without) for p in others if p > me for region in range(tiles)]
    block = tuple(op for p in reversed(others) if p < me for op in _both(p, tiles))
    return [sends, [block] * tiles if block else []]


def _both(source: int, tiles: int) -> Item:
    """Waits for the keys and the values of `source`, and reads them."""
    return (*(("await", i, source) for i in range(tiles)), *(("read", i, source) for i in range(tiles)))


def _push(me: int, world: int, others: list[int], tiles: int, without: Without) -> list[list[Item]]:
    """Rank 0 sends and waits for nobody (masked chunks, empty splits): only credits hold it back."""
    if me == 0:
        return [[_send(me, world, p, CHUNK, without) for p in others]]
    return [[_reads(CHUNK, CHUNK, [0])]]


def _fill(region: int, part: int, readers: list[int], flag: int, without: Without) -> Item:
    """The own data of a part, and its flag for those who read it."""
    flags = tuple(("publish", p, flag) for p in readers)
    fill: Item = (("fill", region, part),)
    return (*flags, *fill) if Protection.DATA_BEFORE_FLAG in without else (*fill, *flags)


def _pull_gather(me: int, world: int, others: list[int], tiles: int, without: Without) -> list[list[Item]]:
    """The own shard goes to the own slot, if it is free; then one copy per peer."""
    stage = (*_credits(world, me, others[0], without), *_fill(PULLED, me, others, CHUNK, without))
    return [[stage], [(("await", CHUNK, p), ("pull", PULLED, p, p)) for p in others]]


def _pull_scatter(me: int, world: int, others: list[int], tiles: int, without: Without) -> list[list[Item]]:
    """Products for each peer go to the own slot, free or not; then the peers' products are added up."""
    sends = [op for dst in others for op in _fill(PULLED, dst, [dst], CHUNK, without)]
    late = (("end",), *_revocation(others, without), *(("fill", PULLED, dst) for dst in others))
    return [[(*_credits(world, me, others[0], without), *sends, *late)], [_pull_reduction(me, world, others, without)]]


def _pull_pieces(me: int, world: int, others: list[int], tiles: int, without: Without) -> list[list[Item]]:
    """Rows for all peers go to the own slot, if it is free; each copies its own part."""
    parts = tuple(("fill", PULLED, p) for p in others)
    flags = tuple(("publish", p, CHUNK) for p in others)
    stage = (*flags, *parts) if Protection.DATA_BEFORE_FLAG in without else (*parts, *flags)
    return [[(*_credits(world, me, others[0], without), *stage)], _own_parts(me, others)]


def _pull_columns(me: int, world: int, others: list[int], tiles: int, without: Without) -> list[list[Item]]:
    """Products for each peer go to the own slot, free or not; each copies its own."""
    return [_pull_scatter(me, world, others, tiles, without)[0], _own_parts(me, others)]


def _own_parts(me: int, others: list[int]) -> list[Item]:
    return [(("await", CHUNK, p), ("pull", PULLED, me, p)) for p in others]


def _revocation(others: list[int], without: Without) -> Item:
    return () if Protection.REVOKE in without else tuple(("revoke", p) for p in others)


def _pull_reduction(me: int, world: int, others: list[int], without: Without) -> Item:
    first = me if Protection.RANK_ORDER in without else 0
    copies = [op for p in reversed(others) for op in (("await", CHUNK, p), ("pull", PULLED, me, p))]
    adds = [("add", (first + i) % world) for i in range(world)]
    return (*copies, *_checks(others, without), ("trust",), *adds, ("sum",))


def _pull_reduce(me: int, world: int, others: list[int], tiles: int, without: Without) -> list[list[Item]]:
    """As `_pull_scatter`, and the sums go to the own slot, from where every peer copies them."""
    (sends,), (reduction,) = _pull_scatter(me, world, others, tiles, without)
    reduction = (*reduction, *_fill(PULLED_RESULT, me, others, RESULT, without))
    return [[sends], [reduction], [(("await", RESULT, p), ("pull", PULLED_RESULT, p, p)) for p in others]]
