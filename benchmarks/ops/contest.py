"""What a contest of one op is: operands, contestants, the reference that each must match, and the bytes on the link."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from benchmarks.ops.shapes import Cell

# Operands change from call to call, so many that no contestant finds them in the cache.
ROTATED_BYTES = 256 << 20
MAX_ROTATED = 4
LINK_BYTES_PER_S = 450e9
WORKSPACE_LIMIT = 4 << 30


@dataclass
class Contest:
    """`contestants[name](i)` makes one call on the i-th operands and returns its result, in a fixed or a new tensor."""

    contestants: dict[str, Callable[[int], torch.Tensor]] = field(default_factory=dict)
    reference: Callable[[], torch.Tensor] | None = None
    num_partials: int = 1
    link_bytes: int = 0
    replicated: bool = False


@dataclass(frozen=True)
class Setting:
    """Where a contest takes place."""

    device: torch.device
    rank: int
    world_size: int
    group_name: str

    @property
    def library(self) -> str:
        """The baseline's name: the collective library of this device."""
        return "nccl" if self.device.type == "cuda" else "gloo"

    @property
    def has_symmetric_memory(self) -> bool:
        """Whether torch's symmetric-memory contestants can run."""
        return self.device.type == "cuda"

    def site_args(self, op: str, strategy: str) -> tuple[int, str, str, str, int, float]:
        """The trailing arguments of our ops."""
        return self.world_size, self.group_name, f"benchmark/0:{op}", strategy, WORKSPACE_LIMIT, 60.0


def dtype_of(cell: Cell) -> torch.dtype:
    """The cell's dtype as torch's."""
    dtype = getattr(torch, cell.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def operands(setting: Setting, cell: Cell, rows: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Random rows [rows, K] and weights [K, N] with contiguous K, as nn.Linear holds them; several of each."""
    generator = torch.Generator(setting.device).manual_seed(1 + setting.rank)
    dtype = dtype_of(cell)
    nbytes = (rows * cell.K + cell.K * cell.N) * dtype.itemsize
    copies = max(1, min(MAX_ROTATED, math.ceil(ROTATED_BYTES / nbytes)))

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=setting.device).mul_(scale).to(dtype)

    left = [draw(rows, cell.K) for _ in range(copies)]
    right = [draw(cell.N, cell.K, scale=1 / math.sqrt(cell.K)).t() for _ in range(copies)]
    return left, right


def world_group_name() -> str:
    """The default group's name."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name
