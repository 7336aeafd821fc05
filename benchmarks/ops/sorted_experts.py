"""The experts of a decode step as serving engines run them in Triton, a rival of `expert_projections`.

Slots are sorted by expert and padded to blocks of rows; a grouped matmul has a program for each block of one expert and
each tile of columns. A layer is five launches: the sort, gate and up, silu(gate) * up, down with the weight of each
slot, and the sum over the slots of a token. The launches that are pointwise or sums are Inductor's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

BLOCK_M = 16


@dataclass(frozen=True)
class Tile:
    """The columns and the step of a program, and its warps and stages."""

    columns: int
    step: int
    warps: int
    stages: int


TILES = (Tile(64, 128, 4, 4), Tile(32, 256, 4, 4), Tile(128, 64, 4, 5), Tile(32, 128, 4, 6), Tile(64, 256, 8, 3))
"""What a call is tuned over, for each of the two matmuls."""


@triton.jit
def sort_slots(experts, order, blocks, S, E, most, SLOTS: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """Writes order [most * BLOCK], the slots by expert, each expert's padded to blocks with S, and blocks [most], the
    experts of these blocks, or -1 behind the last one.
    """
    slots = tl.arange(0, SLOTS)
    taken = tl.load(experts + slots, mask=slots < S, other=E).to(tl.int32)
    names = tl.arange(0, EXPERTS)
    counts = tl.sum((taken[:, None] == names[None, :]).to(tl.int32), 0)
    padded = (counts + BLOCK - 1) // BLOCK * BLOCK
    ends = tl.cumsum(padded, 0)
    starts = ends - padded
    places = tl.arange(0, SLOTS * BLOCK)
    tl.store(order + places, S, mask=places < most * BLOCK)
    numbers = tl.arange(0, SLOTS)
    of_block = tl.sum((ends[None, :] <= (numbers * BLOCK)[:, None]).to(tl.int32), 1)
    used = numbers * BLOCK < tl.max(ends, 0)
    tl.store(blocks + numbers, tl.where(used & (of_block < E), of_block, -1), mask=numbers < most)
    tl.debug_barrier()
    before = tl.sum(((taken[:, None] == taken[None, :]) & (slots[None, :] < slots[:, None])).to(tl.int32), 1)
    start = tl.sum(tl.where(taken[:, None] == names[None, :], starts[None, :], 0), 1)
    tl.store(order + start + before, slots, mask=slots < S)


@triton.jit
def grouped_matmul(
    x, weight, scale, out, order, blocks, sizes, SCALED: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """out[s] = x[s // TOP_K] @ weight[expert of s].T, times scale[s] if SCALED. sizes: (S, N, K)."""
    S, N, K = sizes
    tiles = tl.cdiv(N, COLUMNS)
    block, column = tl.program_id(0) // tiles, tl.program_id(0) % tiles * COLUMNS
    expert = tl.load(blocks + block)
    if expert < 0:
        return
    slots = tl.load(order + block * BLOCK + tl.arange(0, BLOCK))
    inside = slots < S
    columns = column + tl.arange(0, COLUMNS)
    steps = tl.arange(0, STEP)
    a = x + (slots // TOP_K).to(tl.int64)[:, None] * K + steps[None, :]
    b = weight + expert.to(tl.int64) * N * K + columns.to(tl.int64)[None, :] * K + steps[:, None]
    acc = tl.zeros((BLOCK, COLUMNS), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, STEP)):
        in_k = steps < K - k * STEP
        left = tl.load(a, mask=inside[:, None] & in_k[None, :], other=0.0)
        right = tl.load(b, mask=(columns < N)[None, :] & in_k[:, None], other=0.0)
        acc = tl.dot(left, right, acc)
        a += STEP
        b += STEP
    if SCALED:
        acc = acc * tl.load(scale + slots, mask=inside, other=0.0).to(tl.float32)[:, None]
    at = slots.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside[:, None] & (columns < N)[None, :])


@torch.compile(dynamic=False)
def _activated(product: torch.Tensor) -> torch.Tensor:
    gate, up = product.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@torch.compile(dynamic=False)
def _summed(terms: torch.Tensor, top_k: int) -> torch.Tensor:
    return terms.view(-1, top_k, terms.shape[-1]).sum(1)


@dataclass(frozen=True)
class SortedExperts:
    """A layer's call with these tiles of the two matmuls."""

    first: Tile
    second: Tile

    def __call__(
        self, x: torch.Tensor, experts: torch.Tensor, scale: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
    ) -> torch.Tensor:
        """Returns the sum over the experts of each token, of x [T, D], experts and scale [T, k], gate_up [E, 2F, D] and
        down [E, D, F].
        """
        S, top_k, E = experts.numel(), experts.shape[1], gate_up.shape[0]
        # Each expert has at most one block that is not full.
        most = min(S, E + S // BLOCK_M)
        order = torch.empty(most * BLOCK_M, dtype=torch.int32, device=x.device)
        blocks = torch.empty(most, dtype=torch.int32, device=x.device)
        powers = {"SLOTS": triton.next_power_of_2(S), "EXPERTS": triton.next_power_of_2(E)}
        sort_slots[(1,)](experts, order, blocks, S, E, most, BLOCK=BLOCK_M, num_warps=8, **powers)
        wide = x.new_empty(S, gate_up.shape[1])
        self._matmul(self.first, x, gate_up, None, wide, (order, blocks), top_k)
        terms = x.new_empty(S, down.shape[1])
        self._matmul(self.second, _activated(wide), down, scale, terms, (order, blocks), 1)
        return _summed(terms, top_k)

    def _matmul(
        self, tile: Tile, x: Any, weight: torch.Tensor, scale: Any, out: torch.Tensor, sorted_by: Any, top_k: int
    ) -> None:
        order, blocks = sorted_by
        N, K = weight.shape[1:]
        grid = (blocks.numel() * triton.cdiv(N, tile.columns),)
        grouped_matmul[grid](
            x, weight, x if scale is None else scale, out, order, blocks, (out.shape[0], N, K),
            SCALED=scale is not None, TOP_K=top_k, BLOCK=BLOCK_M, COLUMNS=tile.columns, STEP=tile.step,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
