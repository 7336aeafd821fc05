"""What every `tile` launch needs besides its kernel: a workspace, a tile shape, a grid, and operands as rows."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ditron_inductor.device.workspace import Call, Workspace
from ditron_inductor.lowering.config import Config, select_config

FLAG_CHUNKS = 16
"""Chunks that a launch aims at: fine enough to start early, coarse enough for the flags to cost nothing."""


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """The smallest multiple of b that is at least a."""
    return ceil_div(a, b) * b


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x [.., K] as rows [M, K] with contiguous K; a view where its strides allow, else a copy."""
    # Not -1: a rank with an empty slice of K has rows of no length.
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def dot_precision(dtype: torch.dtype) -> str:
    """`input_precision` of `tl.dot` for operands of `dtype`: fp32 obeys torch.set_float32_matmul_precision."""
    exact = dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    # AMD GPUs have no tf32, and the compiler refuses the word even where it would not matter.
    return "ieee" if exact or torch.version.hip is not None else "tf32"


@dataclass(frozen=True)
class Launch:
    """One call of one site: its workspace and its name, which peers see when something goes wrong."""

    workspace: Workspace
    site_text: str

    @property
    def rank(self) -> int:
        return self.workspace.rank

    @property
    def interpreted(self) -> bool:
        return self.workspace.device.type == "cpu"

    @property
    def num_sms(self) -> int:
        """Of the group's smallest device: tile shapes follow from it, and slots are laid out by tile shapes."""
        return self.workspace.capabilities.num_sms

    def config(self, *, rows: int, columns: int, repeats: int, dtype: torch.dtype) -> Config:
        """Tile shape for `repeats` outputs of `rows` x `columns`; group_m is what one group really has."""
        config = select_config(
            rows=rows,
            columns=columns,
            repeats=repeats,
            dtype=dtype,
            interpreted=self.interpreted,
            num_sms=self.num_sms,
        ).for_arch(self.workspace.capabilities.arch)
        half = ceil_div(ceil_div(rows, config.block_m), 2)
        return replace(config, group_m=min(config.group_m, 1 << (half - 1).bit_length()))

    def constants(self, config: Config, K: int, dtype: torch.dtype) -> dict[str, Any]:
        """The compile-time arguments that every matrix-product kernel takes, and its launch options."""
        return {
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "GROUP_M": config.group_m,
            "EVEN_K": K % config.block_k == 0,
            "PRECISION": dot_precision(dtype),
            "UPCAST": self.interpreted,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        }

    def programs(self, work: int, config: Config) -> int:
        """Grid of a persistent kernel with `work` tickets. Any number is right; this many keep the GPU busy."""
        return max(1, min(work, self.num_sms * config.programs_per_sm))

    def call(self, nbytes: int) -> AbstractContextManager[Call]:
        """The use of one slot with at least `nbytes` of data; see Workspace.call."""
        return self.workspace.call(self.site_text, nbytes)

    @staticmethod
    def shard_block(shard_shape: list[int], dim: int) -> int:
        """`block` of interleaved_row for shards of `shard_shape` [.., K] along `dim`."""
        return math.prod(shard_shape[dim:-1])

    @staticmethod
    def chunk_tiles(tiles: int, max_chunks: int) -> int:
        """Tiles of one chunk, when `tiles` of them share at most `max_chunks` flags."""
        return ceil_div(max(tiles, 1), min(FLAG_CHUNKS, max_chunks))
