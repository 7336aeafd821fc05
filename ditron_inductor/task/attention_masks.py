"""Which keys a row sees, in attention to keys and values that are sharded along the sequence.

The keys and values of all ranks follow each other in rank order. A mask says which of them a row of the queries sees;
its kind is one of `MASKS`. For a mask that moves with the rank, the rank is found at run time, so it is never a part of
a graph:

    full            every key
    causal          key j of all if j <= offset + i, where i is the row's number on its rank: aten's `is_causal`, or a
                    tensor in this rank's graph that holds the offset
    zigzag_keys     causal, where rank r holds the keys of the chunks r and 2 W - 1 - r of the sequence's 2 W, and its
                    rows stand where a tensor in its graph says
    causal_offset   key j of all if j <= rank * queries + i: the sequence is sharded in rank order
    zigzag          like `zigzag_keys`, where the rows stand at the rank's keys: all ranks have the same work
    given           every key, as far as the ranks know of each other; a tensor, the bias, says the rest

All kinds but `full` and `given` may have a window. Of the keys that a row would see it then sees only the last ones, as
many as the window is long; the key at its own position is one of them.

A bias is broadcast to [B, Hq, Sq, W * S], the keys of all ranks in rank order. A bias of floats is added to the scaled
scores, behind the soft cap. A bias of bool hides keys where it is False, as -inf does. Every rank has its own bias, and
reads it alone: its values decide nothing about transfers.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ditron_inductor.task.policy import check

MASKS: tuple[str, ...] = ("full", "causal", "zigzag_keys", "causal_offset", "zigzag", "given")
ALIGNED: tuple[str, ...] = ("causal_offset", "zigzag")
"""The kinds of masks for which a rank's queries are at the positions of its keys."""
PLACED: tuple[str, ...] = ("causal", "zigzag_keys")
"""The kinds of masks for which the graph of each rank has its own numbers for the positions of its rows."""
GIVEN = "given"
UNPLACED: tuple[str, ...] = ("full", GIVEN)
"""The kinds of masks that show every row every key, so nothing is known of the positions of rows."""
MAX_HEAD_DIM = 256
"""The most elements of a head for our kernel and the library's fast ones. With more, all scores lie in memory."""
JUMP = re.compile(r"([1-9]\d*)([+-][1-9]\d*)")
LONGEST_WINDOW = 2**63 - 1
"""The largest number that an op accepts. There are no positions beyond it, so a longer window makes no difference."""


@dataclass(frozen=True)
class Mask:
    """What rows see; the module lists the kinds. window: the most keys that a row sees, 0 for no limit. offset, jumps:
    the positions of rows, for the kinds in PLACED. Row i stands at offset + i, plus the jumps in front of it: `8+24`
    adds 24 from row 8 on, and several jumps are separated by blanks. They belong to this rank alone. Nothing that the
    ranks have to agree on may depend on them.
    """

    kind: str
    window: int = 0
    offset: int = 0
    jumps: str = ""

    def verify(self, kind: str) -> None:
        check(self.kind in MASKS, kind, "mask", self.kind, f"one of {', '.join(MASKS)}")
        limited = self.window == 0 or (self.window > 0 and self.kind not in UNPLACED)
        check(limited, kind, "window", self.window, "a positive number of keys beside a causal mask, or 0 for all")
        placed = self.kind in PLACED
        check(self.offset == 0 or placed, kind, "offset", self.offset, f"0, but for {', '.join(PLACED)}")
        rows = [row for row, _ in self.row_jumps()]
        known = all(map(JUMP.fullmatch, self.jumps.split())) and rows == sorted(set(rows))
        check(not self.jumps or (placed and known), kind, "jumps", self.jumps, f"`8+24 ..`, for {', '.join(PLACED)}")

    def within(self, places: int) -> Mask:
        """Returns the same mask for rows at positions below `places`, without a window if it hides nothing there."""
        return self if self.window < places else replace(self, window=0)

    @property
    def name(self) -> str:
        """The part of the mask that is the same on all ranks, as text."""
        return f"{self.kind}, window={self.window}" if self.window else self.kind

    def row_jumps(self) -> list[tuple[int, int]]:
        """The jumps of the rows' positions, as (from which row on, by how much)."""
        return [(int(row), int(jump)) for row, jump in JUMP.findall(self.jumps)]

    def positions(self, rank: int, world_size: int, queries: int) -> list[Segment]:
        if self.kind == "zigzag":
            return _zigzag(rank, world_size, queries)
        if self.kind == "causal_offset":
            return [Segment(0, queries, rank * queries)]
        edges = [(0, self.offset), *((row, jump) for row, jump in self.row_jumps() if row < queries), (queries, 0)]
        ahead = itertools.accumulate(jump for _, jump in edges)
        return [
            Segment(row, end - row, row + far) for (row, _), (end, _), far in zip(edges, edges[1:], ahead, strict=False)
        ]

    def key_positions(self, source: int, world_size: int, keys: int) -> list[Segment]:
        if self.kind in ("zigzag", "zigzag_keys"):
            return _zigzag(source, world_size, keys)
        return [Segment(0, keys, source * keys)]

    def place(self, rank: int, world_size: int, queries: int, keys: int) -> int | None:
        """Returns the rank whose keys, in the zig-zag order, are at the positions of this rank's queries."""
        if self.kind == "zigzag":
            return rank
        if self.kind != "zigzag_keys" or queries != keys or queries == 0:
            return None
        place, inside = divmod(self.offset, queries // 2)
        same = inside == 0 and _joined(self.positions(rank, world_size, queries)) == _joined(
            _zigzag(place, world_size, queries)
        )
        return place if same and 0 <= place < world_size else None


@dataclass(frozen=True)
class Segment:
    """`count` rows, or keys, of a rank from `first` on, which stand at the positions from `start` on."""

    first: int
    count: int
    start: int


def _zigzag(rank: int, world_size: int, length: int) -> list[Segment]:
    """The chunks of a rank, of `length` in all."""
    half = length // 2
    return [Segment(0, half, rank * half), Segment(half, half, (2 * world_size - 1 - rank) * half)]


def _joined(segments: list[Segment]) -> list[Segment]:
    """Returns the segments with neighbours joined where no position is skipped."""
    found = segments[:1]
    for segment in segments[1:]:
        last = found[-1]
        if segment.start == last.start + last.count:
            found[-1] = replace(last, count=last.count + segment.count)
        else:
            found.append(segment)
    return found


@dataclass(frozen=True)
class Block:
    """Rows first_row .. last_row of the queries, and keys first_key .. last_key of rank `source`, ends excluded. All
    rows see all keys, or (causal) row i sees keys up to i, counted from the block's corner. Causal blocks are square.
    If lower is not None, row i sees only keys from i + lower on, counted from the corner, and every row sees at least
    one key. There are then no more rows than keys, as windows of FlashAttention require.
    """

    source: int
    first_row: int
    last_row: int
    first_key: int
    last_key: int
    causal: bool = False
    lower: int | None = None

    @property
    def rows(self) -> int:
        return self.last_row - self.first_row

    @property
    def keys(self) -> int:
        return self.last_key - self.first_key

    @property
    def pairs(self) -> float:
        """The number of pairs of a row and a key that it sees."""
        found = self.rows * (self.rows + 1) / 2 if self.causal else float(self.rows * self.keys)
        hidden = 0 if self.lower is None else self.rows - 1 + self.lower
        return found - hidden * (hidden + 1) / 2


def mask_problem(mask: Mask, queries: int, keys: int) -> str:
    """Returns why `queries` rows and `keys` keys of a rank cannot have this mask; empty if they can."""
    if mask.kind in ALIGNED and queries != keys:
        return f"the mask '{mask.kind}' needs as many queries as keys on a rank, not {queries} and {keys}"
    if mask.kind in ("zigzag", "zigzag_keys") and keys % 2:
        return f"the mask '{mask.kind}' needs two equal chunks on a rank, not {keys} keys"
    return ""


def blocks(mask: Mask, rank: int, world_size: int, queries: int, keys: int) -> list[Block]:
    """Returns what this rank's queries see, source by source: its own keys, then those of rank - 1, rank - 2, .."""
    found = []
    for step in range(world_size):
        found += [block for block in _of_source(mask, rank, (rank - step) % world_size, world_size, queries, keys)]
    return [block for block in found if block.rows > 0 and block.keys > 0]


def _of_source(mask: Mask, rank: int, source: int, world_size: int, queries: int, keys: int) -> Iterator[Block]:
    place = mask.place(rank, world_size, queries, keys)
    if mask.kind in UNPLACED:
        yield Block(source, 0, queries, 0, keys)
    elif place is not None and not 0 < mask.window < world_size * keys:
        # These cases need the fewest blocks.
        if source == place:
            # The second chunk sees all of the first.
            yield Block(source, 0, queries, 0, keys, causal=True)
        elif source < place:
            yield Block(source, 0, queries, 0, keys // 2)
        else:
            yield Block(source, queries // 2, queries, 0, keys)
    else:
        for rows in mask.positions(rank, world_size, queries):
            for part in mask.key_positions(source, world_size, keys):
                yield from _between(source, rows, part, mask.window or rows.start + rows.count)


def _between(source: int, rows: Segment, keys: Segment, window: int) -> Iterator[Block]:
    """Yields the causal blocks of these rows and keys."""
    # Row i is this many keys behind the first key.
    ahead = rows.start - keys.start
    begin, end = (min(max(edge - ahead, 0), rows.count) for edge in (0, keys.count))
    own = ahead + begin
    yield from _behind(source, rows, keys, begin, end, own, window)
    if begin < end:
        lower = 1 - window if end - begin > window else None
        first_row, first_key = rows.first + begin, keys.first + own
        yield Block(source, first_row, rows.first + end, first_key, first_key + end - begin, True, lower)
    yield from _behind(source, rows, keys, end, rows.count, keys.count, window)


def _behind(
    source: int, rows: Segment, keys: Segment, begin: int, end: int, count: int, window: int
) -> Iterator[Block]:
    """Yields the blocks of rows begin .. end and the first `count` keys, all in front of them, within the window."""
    # The first key that row 0 sees.
    edge = rows.start - keys.start + 1 - window
    first = max(edge + begin, 0)
    end = min(end, count - edge)
    if begin < end and first < count:
        of_keys = keys.first + first, keys.first + count
        lower = edge + begin - first
        hidden = end - begin - 1 + lower > 0
        if hidden and end - begin > count - first:
            # The first rows see all of these keys.
            begin -= lower
            yield Block(source, rows.first + begin + lower, rows.first + begin, *of_keys)
            lower = 0
        yield Block(source, rows.first + begin, rows.first + end, *of_keys, lower=lower if hidden else None)


def visible_part(mask: Mask, world_size: int, queries: int, keys: int) -> float:
    """Returns the part of all pairs of a row and a key that is visible, on the rank with most such pairs."""
    everything = world_size * queries * keys
    if everything == 0:
        return 1.0
    if mask.kind == "causal":
        # The ranks have to agree, so count as for a rank whose last row is at the last key.
        mask = replace(mask, offset=max(world_size * keys - queries, 0), jumps="")
    elif mask.kind == "zigzag_keys":
        if queries != keys:
            return 1.0
        mask = Mask("zigzag", mask.window)
    pairs = [sum(block.pairs for block in blocks(mask, rank, world_size, queries, keys)) for rank in range(world_size)]
    return max(pairs) / everything


def attention_sizes(
    mask: Mask, world_size: int, batch: int, heads: int, queries: int, head_dim: int, key_heads: int, keys: int
) -> tuple[int, int, int]:
    """Returns (m, n, k) of a matmul with as many operations and as much to gather. m counts the keys of all W ranks, k
    the columns of their keys and values, and n the rows of queries that see each key: those of all heads that share a
    key head.
    """
    seen = visible_part(mask, world_size, queries, keys)
    return world_size * batch * keys, math.ceil(seen * queries * heads / max(key_heads, 1)), 2 * key_heads * head_dim
