"""The Tiles of kernels that multiply and communicate nothing."""

from __future__ import annotations

import torch

from ditron_inductor.core.matmul import Tiles
from ditron_inductor.lowering.config import Config
from ditron_inductor.lowering.host.launch import dot_precision

LEAST_STEP = 16
"""The least elements of K in a step (`tl.dot`)."""


def tiles_of(x: torch.Tensor, config: Config) -> Tiles:
    """Returns the Tiles for rows of x [.., K]."""
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
        UPCAST=x.device.type == "cpu",
        THREADS=0,
        PIECE=0,
    )


def pair_of(tile: Tiles) -> Tiles:
    """Returns the Tiles of two weights that are multiplied together."""
    if tile.BLOCK_M == 1:
        # One row is multiplied by one weight after the other.
        return tile
    return tile._replace(BLOCK_K=max(tile.BLOCK_K // 2, LEAST_STEP))
