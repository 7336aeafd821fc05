"""Tile shapes of the sum over the experts of a few tokens, and the choice of one for a problem."""

from __future__ import annotations

from dataclasses import replace

import torch

from ditron_inductor.lowering.config import FEW_ROWS, INTERPRETER, Config

EXPERT_SUMS = {
    64: Config(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=5).validate(),
    32: Config(block_m=16, block_n=32, block_k=256, num_warps=4, num_stages=4, programs_per_sm=2).validate(),
    16: Config(block_m=16, block_n=16, block_k=256, num_warps=4, num_stages=6, programs_per_sm=2).validate(),
}
"""The tile shapes for the sum over the experts of few tokens, by columns; the rows are as many as FEW_ROWS has. One
program reads these columns of all experts.
"""
FILLED = 0.8
"""The programs for each SM that keep the memory of a GPU busy."""
MOST_STAGES, SHARED_BYTES = 8, 200 << 10
"""The most steps of K under way at once, and what they may take of an SM's shared memory."""


def select_expert_sum_config(
    *, rows: int, columns: int, depth: int, dtype: torch.dtype, interpreted: bool, num_sms: int
) -> Config:
    """Returns the tile shape for the sum over the experts of at most 64 tokens: the widest one with which most SMs have
    a program. depth: K of this rank, which decides no layout.
    """
    most = min(most for most in FEW_ROWS if most >= rows)
    if interpreted:
        return replace(INTERPRETER, block_m=most)
    width = next((width for width in EXPERT_SUMS if columns >= FILLED * num_sms * width), min(EXPERT_SUMS))
    few = most == min(FEW_ROWS)
    found = EXPERT_SUMS[width if few else max(width, 32)]
    # What K does not fill of its last step is not under way.
    sizes = [size for size in (256, 128, 64) if size <= (found.block_k if few else 128)]
    block_k = next((size for size in sizes if depth % size == 0), min(sizes[0], 128))
    itemsize = 2
    if dtype == torch.float32:
        block_k, itemsize = block_k // 2, 4
    step_bytes = (most + found.block_n) * block_k * itemsize
    stages = found.num_stages * found.block_k // block_k
    stages = min(stages, MOST_STAGES, SHARED_BYTES // found.programs_per_sm // step_bytes)
    # More warps hold the places of more tokens.
    warps = found.num_warps * (1 if most <= 32 else 2)
    return replace(found, block_m=most, block_k=block_k, num_stages=stages, num_warps=warps)
