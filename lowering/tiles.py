"""The Tiles of kernels that multiply and communicate nothing."""

from __future__ import annotations

import torch

from ditron_inductor.core.matmul import Tiles
from ditron_inductor.core.overlap import FOLLOWS
from ditron_inductor.lowering.config import Config
from ditron_inductor.lowering.host.launch import dot_precision

LEAST_STEP = 16
"""The least elements of K in a step (`tl.dot`)."""
MOST_AHEAD, INTERPRETED_AHEAD = 2048, 64
"""The most elements of a column that are loaded before the row of a launch that follows. On an H200, with 3 us for each
all-reduce, a layer of 8B takes 74.5 us if nothing follows, and with 0, 512, 1024, 2048 and 4096 elements 73.5, 72.6,
71.0, 69.4 and 70.3; one of 70B 218.8 and 217.8, 216.1, 216.0, 215.9 and 216.6.
"""


def tiles_of(x: torch.Tensor, config: Config, overlap: int = 0, least_k: int = 0) -> Tiles:
    """Returns the Tiles for rows of x [.., K] in a launch that overlaps so (see core/overlap.py). least_k: the fewest
    elements of K of any program, if these are known. If it follows, a single row's weight is loaded ahead.
    """
    interpreted, ahead = x.device.type == "cpu", 0
    if config.block_m == 1 and (overlap == FOLLOWS.value or interpreted):
        most = min(least_k, INTERPRETED_AHEAD if interpreted else MOST_AHEAD) // config.block_k
        ahead = 1 << (most.bit_length() - 1) if most else 0
    return Tiles(
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=1,
        DESCRIPTORS=False,
        K_MAJOR=0,
        # The steps of two weights are half as wide.
        EVEN_K=x.shape[-1] % max(config.block_k, LEAST_STEP) == 0,
        PRECISION=dot_precision(x.dtype),
        UPCAST=interpreted,
        THREADS=0,
        PIECE=0,
        OVERLAP=overlap,
        AHEAD=ahead,
    )


def pair_of(tile: Tiles) -> Tiles:
    """Returns the Tiles of two weights that are multiplied together."""
    if tile.BLOCK_M == 1:
        # A step has room for the columns of both.
        return tile
    return tile._replace(BLOCK_K=max(tile.BLOCK_K // 2, LEAST_STEP))
