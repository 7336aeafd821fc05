"""What is measured: cells of an op, a shape and a mode, in named sets."""

from __future__ import annotations

from dataclasses import dataclass

# (hidden size, feed-forward size) of the models that the shapes are taken from.
LLAMA_70B = (8192, 28672)
LLAMA_8B = (4096, 14336)


@dataclass(frozen=True)
class Cell:
    """One op on [M, K] x [K, N] over all ranks' rows; `graph`: timed inside a CUDA graph."""

    op: str
    M: int
    N: int
    K: int
    graph: bool = False
    dtype: str = "bfloat16"

    @property
    def shape(self) -> str:
        """As it stands in the results."""
        return f"M={self.M};N={self.N};K={self.K}"


def anchors(op: str, world_size: int) -> list[Cell]:
    """The shapes of two Llama models in tensor parallelism over `world_size` ranks, prefill and (all-reduce) decode."""
    cells = []
    for hidden, ffn in (LLAMA_70B, LLAMA_8B):
        for tokens in (8192, 4096, 2048):
            if op == "all_gather_matmul":
                # The gate and up projections in one.
                cells.append(Cell(op, tokens, 2 * ffn // world_size, hidden))
            else:
                cells.append(Cell(op, tokens, hidden, ffn // world_size))
    if op == "matmul_all_reduce":
        for hidden, ffn in (LLAMA_70B, LLAMA_8B):
            cells += [Cell(op, tokens, hidden, ffn // world_size, graph=True) for tokens in (1, 16, 64, 128, 256)]
    return cells


def tiny(op: str, world_size: int) -> list[Cell]:
    """A small shape, to try the program itself with, also on a CPU."""
    return [Cell(op, 16 * world_size, 48, 40)]


SETS = {"anchors": anchors, "tiny": tiny}
