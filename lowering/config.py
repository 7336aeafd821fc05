"""Tile shapes of the matrix-product kernels, and which one a problem gets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Config:
    """Tile of a matrix product: `block_m` x `block_n` of the output in steps of `block_k`.

    group_m: block rows that run together (see `grouped`). programs_per_sm: programs of a persistent grid for each SM.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    programs_per_sm: int = 1

    def for_arch(self, arch: str) -> Config:
        """The same tiles with as many stages as `arch` ("sm_90", "gfx942") has shared memory for."""
        return replace(self, num_stages=min(self.num_stages, 2)) if arch.startswith("gfx") else self

    @property
    def options(self) -> dict[str, int]:
        """Of a launch, beside the kernel's arguments."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}

    def validate(self) -> Config:
        """Return self; ValueError naming the field that no kernel could run with."""
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
"""Small tiles, so that small test problems have several tiles and chunks."""

LARGE = Config(block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=4).validate()
MIDDLE = Config(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=4).validate()
NARROW = Config(block_m=64, block_n=128, block_k=64, num_warps=4, num_stages=4, programs_per_sm=2).validate()
DECODE = Config(block_m=16, block_n=64, block_k=256, num_warps=4, num_stages=4).validate()
SMALL = Config(block_m=64, block_n=64, block_k=128, num_warps=4, num_stages=4).validate()
FLAT = Config(block_m=128, block_n=64, block_k=128, num_warps=8, num_stages=3).validate()
FP32 = Config(block_m=64, block_n=128, block_k=32, num_warps=8, num_stages=3).validate()

FEW_ROWS = {
    most: Config(block_m=most, block_n=64, block_k=128, num_warps=4, num_stages=6).validate() for most in (16, 32, 64)
}
"""By most rows, for `matmul_tile_of_few_rows`."""

CONFIGS = (*FEW_ROWS.values(), INTERPRETER, LARGE, MIDDLE, NARROW, DECODE, SMALL, FLAT, FP32)
"""Every tile shape that a kernel is launched with, all of them compiled by the tests."""

RATES = {LARGE: 1.0, MIDDLE: 0.80, NARROW: 0.62}
"""Speed of a GPU full of tiles, as a part of the fastest: measured on 4 H200s, where smaller tiles carry more for what
they compute."""


def select_config(
    *, rows: int, columns: int, repeats: int, dtype: torch.dtype, interpreted: bool, num_sms: int
) -> Config:
    """The tile shape for `repeats` outputs of `rows` x `columns`; equal on all ranks, as it depends on nothing else.

    For many rows the one that is done first, at its rate and with the last wave of tiles partly empty; flat tiles for
    decode.
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


def select_few_rows_config(*, rows: int, dtype: torch.dtype, interpreted: bool) -> Config:
    """The tile shape for at most 64 rows, all in one tile; equal on all ranks."""
    most = min(most for most in FEW_ROWS if most >= rows)
    if interpreted:
        return replace(INTERPRETER, block_m=most)
    # fp32 operands take twice the shared memory.
    return replace(FEW_ROWS[most], block_k=64) if dtype == torch.float32 else FEW_ROWS[most]
