"""The blocks of the decode attention kernels, and the number of splits into which a cache is cut."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ditron_inductor.lowering.host.launch import ceil_div

MOST_ROWS = 64
"""The most query heads of one program. If more of them share a key head, several programs read the key head."""
LEAST_ROWS = 16
"""The fewest rows of a matrix product."""
MERGED_ELEMENTS = 8192
"""The elements of partial results that a program loads at once, so that all loads are under way together."""
SMALL_PART = 1024
"""Twice as many elements fit in registers if a partial result has at most this many."""
MERGED_SPLITS, INTERPRETED_MERGED_SPLITS = 16, 2
"""The most partial results that are loaded at once. The loads are unrolled."""
START_BLOCKS = 2
"""The time that a split takes besides its blocks, in blocks: its start, and the way of its result through memory."""
SATURATING = 0.9
"""This fraction of all programs reads as fast as all of them, because memory is the limit."""


@dataclass(frozen=True)
class DecodeConfig:
    """The blocks of a kernel: `block_n` tokens in one step, `num_stages` steps under way, and at least `least_blocks`
    steps in a split. programs_per_sm: the programs of a persistent grid for each SM if there are more heads than SMs.
    Then one program reads while the other exchanges. With fewer heads, one program that reads longer is faster than two
    whose results have to be merged. least_rounds: the fewest splits for each program of the grid. With more splits,
    programs wait less for the slowest one.
    """

    block_n: int
    num_warps: int
    num_stages: int
    least_blocks: int = 2
    programs_per_sm: int = 2
    least_rounds: int = 1

    def programs(self, heads: int, num_sms: int) -> int:
        """Returns how many programs run together for `heads` pieces of heads."""
        return num_sms * (self.programs_per_sm if heads > num_sms else 1)

    def for_arch(self, arch: str) -> DecodeConfig:
        """Returns these blocks with as many stages as `arch` ("sm_90", "gfx942") has shared memory for."""
        return replace(self, num_stages=min(self.num_stages, 2)) if arch.startswith("gfx") else self

    def validate(self) -> DecodeConfig:
        """Returns this Config. Raises ValueError, with the name of the field, if no kernel can run with it."""
        if self.block_n < 16 or self.block_n & (self.block_n - 1):
            raise ValueError(f"Config.block_n = {self.block_n}: a power of two of at least 16 is needed (tl.dot)")
        if self.num_warps not in (1, 2, 4, 8):
            raise ValueError(f"Config.num_warps = {self.num_warps}: a power of two up to 8 is needed")
        if min(self.num_stages, self.least_blocks, self.programs_per_sm, self.least_rounds) < 1:
            raise ValueError("Config: num_stages, least_blocks, programs_per_sm and least_rounds are at least 1")
        return self


INTERPRETER = DecodeConfig(block_n=16, num_warps=4, num_stages=1, least_blocks=1).validate()
"""The blocks are small, so that small test problems have several splits."""
INTERPRETED_PROGRAMS = 4
INTERPRETED_SPLITS = 12
"""The number of programs for which caches are cut in the interpreter."""

BY_HEAD_DIM = {
    most: DecodeConfig(block_n=block_n, num_warps=4, num_stages=4).validate()
    for most, block_n in ((64, 128), (128, 64), (256, 32))
}
"""The blocks by the largest head size that fits. Two programs of an SM have 192 KB in shared memory."""
WIDE = {
    most: DecodeConfig(block_n=block_n, num_warps=4, num_stages=3).validate()
    for most, block_n in ((64, 64), (128, 32), (256, 16))
}
"""The blocks for fp32, by the largest head size that fits."""

CROWDED = {128: DecodeConfig(block_n=128, num_warps=4, num_stages=2).validate()}
"""These replace the blocks of BY_HEAD_DIM if more programs than SMs read long caches. Memory is faster if each of them
has fewer bytes under way, in larger pieces.
"""
CROWDED_TOKENS = 15000
"""Caches are long if all heads together have more tokens for each SM than this."""

CONFIGS = (*BY_HEAD_DIM.values(), *WIDE.values(), *CROWDED.values(), INTERPRETER)
"""All blocks that kernels are launched with. The tests compile every one."""


def select_config(*, head_dim: int, dtype: torch.dtype, crowded: bool = False, interpreted: bool) -> DecodeConfig:
    """Returns the blocks for heads of `head_dim` elements. crowded: there are more heads than SMs, and long caches."""
    if interpreted:
        return INTERPRETER
    known = WIDE if dtype == torch.float32 else BY_HEAD_DIM
    if crowded and known is BY_HEAD_DIM and head_dim in CROWDED:
        return CROWDED[head_dim]
    return known[min(most for most in known if most >= head_dim)]


@dataclass(frozen=True)
class Heads:
    """How query heads are divided among programs: `heads` pieces of `rows` query heads, `parts` for each key head."""

    heads: int
    rows: int
    parts: int

    @property
    def block_rows(self) -> int:
        """The rows of a program's matrix products."""
        return max(LEAST_ROWS, self.merged_rows)

    @property
    def merged_rows(self) -> int:
        """The rows of a program where nothing is multiplied, a power of two."""
        return 1 << (self.rows - 1).bit_length()


def deal(batch: int, query_heads: int, kv_heads: int) -> Heads:
    """Divides the query heads into as few pieces as possible of at most MOST_ROWS heads that share a key head."""
    group = query_heads // kv_heads
    parts = next(parts for parts in range(1, group + 1) if group % parts == 0 and group // parts <= MOST_ROWS)
    return Heads(batch * kv_heads * parts, group // parts, parts)


def merged_splits(heads: Heads, head_dim: int, splits: int, interpreted: bool) -> int:
    """Returns how many partial results, of `splits`, a program loads at once, a power of two."""
    size = heads.merged_rows * head_dim
    room = MERGED_ELEMENTS // size * (2 if size <= SMALL_PART else 1)
    most = INTERPRETED_MERGED_SPLITS if interpreted else MERGED_SPLITS
    needed = 1 << (splits - 1).bit_length()
    return max(1, min(most, needed, room))


def count_splits(heads: int, capacity: int, programs: int, config: DecodeConfig) -> int:
    """Returns into how many splits the cache of every piece of heads is cut, for `programs` programs that run together.
    capacity: the tokens that a cache has room for. Only the device knows how many there are. With fewer tokens the
    splits are shorter, and there are fewer splits if they would be shorter than `least_blocks`.
    """
    blocks = ceil_div(max(capacity, 1), config.block_n)
    most = max(1, min(ceil_div(blocks, config.least_blocks), ceil_div(4 * programs, heads)))

    def steps(splits: int) -> float:
        rounds, more = divmod(heads * splits, programs)
        busy = rounds + (max(SATURATING, more / programs) if more else 0.0)
        return busy * ceil_div(blocks, splits) + ceil_div(heads * splits, programs) * START_BLOCKS

    least = min(most, (config.least_rounds - 1) * programs // heads + 1)
    return min(range(least, most + 1), key=steps)


def are_far(pages: int, page: int, head_dim: int, *strides: tuple[int, ...]) -> bool:
    """Returns whether an element of such caches is 2^31 elements or more behind the first one of its head. page: the
    tokens of a page, or, of one dense cache, those that are loaded together. strides: of each cache, those of its pages
    and of its tokens.
    """
    return any((pages - 1) * apart + (page - 1) * token + head_dim > 1 << 31 for apart, token in strides)
