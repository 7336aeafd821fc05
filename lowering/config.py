"""Tile shapes of the matrix-product kernels, and the choice of a tile shape for a problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Config:
    """A tile of a matrix product: `block_m` x `block_n` elements of the output, computed in steps of `block_k`.
    `group_m` is the number of block rows whose tiles run together (see `order.grouped`). `programs_per_sm` is the
    number of programs that a persistent grid has for each SM.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    programs_per_sm: int = 1

    def for_arch(self, arch: str) -> Config:
        """Returns these tiles with as many stages as `arch` ("sm_90", "gfx942") has shared memory for."""
        return replace(self, num_stages=min(self.num_stages, 2)) if arch.startswith("gfx") else self

    @property
    def options(self) -> dict[str, int]:
        """The options that a launch takes besides the kernel's arguments."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}

    def validate(self) -> Config:
        """Returns this Config. Raises ValueError, with the name of the field, if no kernel can run with it."""
        for field in ("block_m", "block_n", "block_k"):
            size = getattr(self, field)
            if size < 16 or size & (size - 1):
                raise ValueError(f"Config.{field} = {size}: a power of two of at least 16 is needed (tl.dot)")
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"Config.num_warps = {self.num_warps}: a power of two up to 16 is needed")
        if self.num_stages < 1 or min(self.group_m, self.programs_per_sm) < 1:
            raise ValueError("Config: num_stages, group_m and programs_per_sm are at least 1")
        return self


INTERPRETER = Config(block_m=32, block_n=32, block_k=32, num_warps=4, num_stages=1, group_m=2).validate()
"""The tiles are small, so that small test problems have several tiles and chunks."""

LARGE = Config(block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=4).validate()
MIDDLE = Config(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=4).validate()
NARROW = Config(block_m=64, block_n=128, block_k=64, num_warps=4, num_stages=4, programs_per_sm=2).validate()
DECODE = Config(block_m=16, block_n=64, block_k=256, num_warps=4, num_stages=4).validate()
SMALL = Config(block_m=64, block_n=64, block_k=128, num_warps=4, num_stages=4).validate()
FLAT = Config(block_m=128, block_n=64, block_k=128, num_warps=8, num_stages=3).validate()
SHORT = Config(block_m=128, block_n=128, block_k=64, num_warps=4, num_stages=3, programs_per_sm=2).validate()
FP32 = Config(block_m=64, block_n=128, block_k=32, num_warps=8, num_stages=3).validate()

SHORT_K = 512
"""The largest K for SHORT. On two H100s LARGE is as fast for K = 768, and faster above."""

FEW_ROWS = {
    most: Config(block_m=most, block_n=64, block_k=128, num_warps=4, num_stages=6).validate() for most in (16, 32, 64)
}
"""The tile shapes of `matmul_tile_of_few_rows`, by the largest number of rows that fits."""

ROW = Config(block_m=1, block_n=1, block_k=256, num_warps=1, num_stages=1)
"""The tile shape of a single row, which needs no `tl.dot` (core/matmul_row.py). A tile has one column, so it is for
kernels that have no signal for each tile. A thread loads 16 bytes in each of four short steps, which are under way
together. It was the fastest of 25 shapes on an H200, see docs/kernels/projections.md.
"""

MANY_ROWS = Config(block_m=128, block_n=64, block_k=128, num_warps=8, num_stages=4).validate()
PROJECTIONS = {1: ROW, **FEW_ROWS, 128: MANY_ROWS}
PAIRS = {**PROJECTIONS} | {most: replace(FEW_ROWS[most], block_k=256, num_stages=4) for most in (16, 32)}
"""The tile shapes of `projections`, by the rows of a tile, and those of weights that are multiplied in pairs."""

DIVIDED = {1: replace(ROW, block_k=1024, num_warps=4), **FEW_ROWS}
DIVIDED |= {most: replace(FEW_ROWS[most], num_stages=4) for most in (16, 32)}
"""The tile shapes of products that are divided among programs, by the largest number of rows that fits. On an H100 the
output projection of 70B takes 28.3 us with 32 rows, and 31.8 with six stages; others differ by 1 %. With one row a
layer of GPT-OSS takes 36.3 us on an H200, and 38.4 in the shape of ROW; others differ by 0.6 %.
"""

EXPERTS = {most: replace(config, num_stages=4) for most, config in FEW_ROWS.items()}
PAIRED_EXPERTS = {**EXPERTS, 16: Config(block_m=16, block_n=16, block_k=256, num_warps=1, num_stages=4).validate()}
"""The tile shapes for the weights of experts that few tokens take, by the largest number of tokens that fits, for one
weight and for two that are multiplied together. An expert is narrow on one rank, so a GPU needs many programs.
"""

CONFIGS = (*FEW_ROWS.values(), INTERPRETER, LARGE, MIDDLE, NARROW, DECODE, SMALL, FLAT, FP32)
"""All tile shapes of kernels that communicate. The tests compile every one, and SHORT and those of experts apart."""

RATES = {LARGE: 1.0, MIDDLE: 0.80, NARROW: 0.62}
"""The speed of a GPU that is full of such tiles, relative to the fastest shape, measured on 4 H200s. Smaller tiles are
slower because they carry more data to peers for each operation.
"""


def select_config(
    *, rows: int, columns: int, repeats: int, dtype: torch.dtype, interpreted: bool, num_sms: int
) -> Config:
    """Returns the tile shape for `repeats` outputs [rows, columns]. All arguments, and so the result, are equal on all
    ranks. With many rows it is the shape that ends first, given its rate and a last wave of tiles that is partly empty.
    With the few rows of decoding the tiles are flat.
    """
    if interpreted:
        return INTERPRETER
    if dtype == torch.float32:
        return FP32
    if rows <= 16:
        return DECODE
    if rows <= 64:
        return SMALL
    if repeats * rows <= 128:
        return FLAT

    def time(config: Config) -> float:
        tiles = repeats * -(-rows // config.block_m) * -(-columns // config.block_n)
        waves = -(-tiles // (num_sms * config.programs_per_sm)) * config.programs_per_sm
        return waves * config.block_m * config.block_n / RATES[config]

    return min(RATES, key=time)


def select_few_rows_config(
    *, rows: int, dtype: torch.dtype, interpreted: bool, shapes: Mapping[int, Config] = FEW_ROWS
) -> Config:
    """Returns the tile shape for a tile of few rows. It is equal on all ranks. shapes: any by rows, such as
    FEW_ROWS or those for the weights of experts, by the largest number of rows that fits.
    """
    most = min(most for most in shapes if most >= rows)
    if interpreted:
        return replace(INTERPRETER, block_m=most)
    # fp32 operands need twice as much shared memory, which a single row does not use.
    return replace(shapes[most], block_k=64) if dtype == torch.float32 and most > 1 else shapes[most]


def select_projections_config(
    *, rows: int, columns: Sequence[int], paired: bool, dtype: torch.dtype, interpreted: bool, num_sms: int
) -> Config:
    """Returns the tile shape for products of at most 128 rows with weights of so many columns. Tiles of several rows
    have the fewest with which all programs still run at once, so that each of them loads the least. paired: two weights
    are multiplied together.
    """

    def programs(most: int) -> int:
        return sum(-(-n // PROJECTIONS[most].block_n) for n in columns) * -(-rows // most)

    most = next(most for most in sorted(PROJECTIONS) if most >= rows or most > 1 and programs(most) <= num_sms)
    shapes = PAIRS if paired else PROJECTIONS
    return select_few_rows_config(rows=most, dtype=dtype, interpreted=interpreted, shapes=shapes)


def select_grouped_config(*, k: int, dtype: torch.dtype, interpreted: bool) -> Config:
    """Returns the tile shape for the matmuls of many tokens with the weights [k, N] of their experts. If `k` is small,
    programs begin and end tiles so often that two on an SM are faster: one multiplies while the other does that, or
    adds up.
    """
    if interpreted:
        return INTERPRETER
    if dtype == torch.float32:
        return FP32
    return SHORT if k <= SHORT_K else LARGE
