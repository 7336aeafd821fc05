"""Blocks of the decode attention kernels, and into how many splits a cache is cut."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ditron_inductor.lowering.host.launch import ceil_div

MOST_ROWS = 64
"""Query heads that one program carries; of more that share a key head, several programs read it."""
LEAST_ROWS = 16
"""Of a matrix product."""
MERGED_ELEMENTS = 8192
"""Of the partial results that a program loads at once to merge them: all of these loads are under way together."""
SMALL_PART = 1024
"""Elements of a partial result up to which twice as many stay in registers; those of more query heads do not."""
MERGED_SPLITS, INTERPRETED_MERGED_SPLITS = 16, 2
"""Partial results that are loaded at once, at most: the loads are unrolled."""
START_BLOCKS = 2
"""What a split costs beyond its blocks, in blocks: its start, and its partial result on the way through memory."""
SATURATING = 0.9
"""This part of all programs reads as fast as all of them, as memory is the limit."""


@dataclass(frozen=True)
class DecodeConfig:
    """block_n tokens in one step, num_stages of them under way; a split has at least `least_blocks` of them.

    programs_per_sm: programs of a persistent grid for each SM, where there are more heads than SMs. Then one program
    reads while the other exchanges; else one that reads longer is faster than two whose parts have to be merged.
    least_rounds: how often all programs of the grid should get a split, at least; the more, the less they wait for the
    slowest one.
    """

    block_n: int
    num_warps: int
    num_stages: int
    least_blocks: int = 2
    programs_per_sm: int = 2
    least_rounds: int = 1

    def programs(self, heads: int, num_sms: int) -> int:
        """That run together, for so many pieces of heads."""
        return num_sms * (self.programs_per_sm if heads > num_sms else 1)

    def for_arch(self, arch: str) -> DecodeConfig:
        """The same blocks with as many stages as `arch` ("sm_90", "gfx942") has shared memory for."""
        return replace(self, num_stages=min(self.num_stages, 2)) if arch.startswith("gfx") else self

    def validate(self) -> DecodeConfig:
        """Return self; ValueError naming the field that no kernel could run with."""
        if self.block_n < 16 or self.block_n & (self.block_n - 1):
            raise ValueError(f"Config.block_n = {self.block_n}: a power of two of at least 16 is needed (tl.dot)")
        if self.num_warps not in (1, 2, 4, 8):
            raise ValueError(f"Config.num_warps = {self.num_warps}: a power of two up to 8 is needed")
        if min(self.num_stages, self.least_blocks, self.programs_per_sm, self.least_rounds) < 1:
            raise ValueError("Config: num_stages, least_blocks, programs_per_sm and least_rounds are at least 1")
        return self


INTERPRETER = DecodeConfig(block_n=16, num_warps=4, num_stages=1, least_blocks=1).validate()
"""Small blocks, so that small test problems have several splits."""
INTERPRETED_PROGRAMS = 4
INTERPRETED_SPLITS = 12
"""What the splits of the interpreter are cut for."""

BY_HEAD_DIM = {
    most: DecodeConfig(block_n=block_n, num_warps=4, num_stages=4).validate()
    for most, block_n in ((64, 128), (128, 64), (256, 32))
}
"""By most elements of a head: two programs of an SM have 192 KB of keys and values in shared memory together."""
WIDE = {
    most: DecodeConfig(block_n=block_n, num_warps=4, num_stages=3).validate()
    for most, block_n in ((64, 64), (128, 32), (256, 16))
}
"""The same for fp32."""

CROWDED = {128: DecodeConfig(block_n=128, num_warps=4, num_stages=2).validate()}
"""In the place of those of BY_HEAD_DIM where more programs than SMs read long caches: memory is faster for fewer bytes
that each of them has under way, in larger pieces.
"""
CROWDED_TOKENS = 15000
"""Of all heads together, for each SM: from so many on a cache is long."""

CONFIGS = (*BY_HEAD_DIM.values(), *WIDE.values(), *CROWDED.values(), INTERPRETER)
"""Every one that a kernel is launched with, all of them compiled by the tests."""


def select_config(
    *, head_dim: int, dtype: torch.dtype, paged: bool, crowded: bool = False, interpreted: bool
) -> DecodeConfig:
    """The blocks for heads of `head_dim` elements. crowded: there are more heads than SMs, and long caches."""
    if interpreted:
        return INTERPRETER
    known = WIDE if dtype == torch.float32 else BY_HEAD_DIM
    if crowded and not paged and known is BY_HEAD_DIM and head_dim in CROWDED:
        return CROWDED[head_dim]
    config = known[min(most for most in known if most >= head_dim)]
    # Loads by a block table wait for it: with so many stages as many blocks are under way.
    return replace(config, num_stages=2 * config.num_stages - 1) if paged else config


@dataclass(frozen=True)
class Heads:
    """How query heads are dealt to programs: `heads` pieces of `rows` heads, `parts` of them for each key head."""

    heads: int
    rows: int
    parts: int

    @property
    def block_rows(self) -> int:
        """Rows of a program's matrix products."""
        return max(LEAST_ROWS, self.merged_rows)

    @property
    def merged_rows(self) -> int:
        """Rows where nothing is multiplied: a power of two."""
        return 1 << (self.rows - 1).bit_length()


def deal(batch: int, query_heads: int, kv_heads: int) -> Heads:
    """Pieces of at most MOST_ROWS query heads that share a key head, as few as possible."""
    group = query_heads // kv_heads
    parts = next(parts for parts in range(1, group + 1) if group % parts == 0 and group // parts <= MOST_ROWS)
    return Heads(batch * kv_heads * parts, group // parts, parts)


def merged_splits(heads: Heads, head_dim: int, splits: int, interpreted: bool) -> int:
    """Partial results, of `splits`, that a program loads at once: a power of two."""
    size = heads.merged_rows * head_dim
    room = MERGED_ELEMENTS // size * (2 if size <= SMALL_PART else 1)
    most = INTERPRETED_MERGED_SPLITS if interpreted else MERGED_SPLITS
    needed = 1 << (splits - 1).bit_length()
    return max(1, min(most, needed, room))


def count_splits(heads: int, capacity: int, programs: int, config: DecodeConfig) -> int:
    """Into how many splits the cache of every piece of heads is cut, for `programs` that run together.

    capacity: tokens that a cache may hold. How long it really is, only the device knows: with fewer tokens the splits
    are shorter, and when they would be shorter than `least_blocks`, fewer.
    """
    blocks = ceil_div(max(capacity, 1), config.block_n)
    most = max(1, min(ceil_div(blocks, config.least_blocks), ceil_div(4 * programs, heads)))

    def steps(splits: int) -> float:
        rounds, more = divmod(heads * splits, programs)
        busy = rounds + (max(SATURATING, more / programs) if more else 0.0)
        return busy * ceil_div(blocks, splits) + ceil_div(heads * splits, programs) * START_BLOCKS

    least = min(most, (config.least_rounds - 1) * programs // heads + 1)
    return min(range(least, most + 1), key=steps)
