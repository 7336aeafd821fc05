"""The order of slots by their experts, which expert_projections of many tokens reads.

Problem. A sort, a histogram and a running sum are several launches of the library, each of some microseconds.
Algorithm. The place of a slot is the number of slots in front of it, by the expert first and then by the slot. A
program counts these for a few slots by comparing them with all slots. It counts for a few experts too how many slots
belong to experts in front of them. Nothing is communicated, no program waits for another one, and no two write to the
same place. Limits. (E + 1) * S is below 2 ** 31.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ditron_inductor.lowering.host.launch import ceil_div
from ditron_inductor.lowering.host.launcher import Arguments

BLOCK, CHUNK = 32, 512
"""The slots, and the experts, of a program, and the slots that it compares these with at once."""


@triton.jit
def slot_order_kernel(experts, order, S, E, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Writes order, int32 [S + E + 2]: the slots by expert, and then for each number from 0 to E + 1 how many slots
    name an expert below it. experts: int64 [S]. Slots that name E or more count as those of E.
    """
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    named = tl.minimum(tl.load(experts + mine, mask=mine < S, other=0), E).to(tl.int32)
    key = named * S + mine
    place = tl.zeros((BLOCK,), dtype=tl.int32)
    below = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, S, CHUNK):
        others = first + tl.arange(0, CHUNK)
        there = others < S
        taken = tl.minimum(tl.load(experts + others, mask=there, other=0), E).to(tl.int32)
        in_front = ((taken * S + others)[None, :] < key[:, None]) & there[None, :]
        place += tl.sum(in_front.to(tl.int32), 1)
        below += tl.sum(((taken[None, :] < mine[:, None]) & there[None, :]).to(tl.int32), 1)
    tl.store(order + place, mine, mask=mine < S)
    tl.store(order + S + mine, below, mask=mine < E + 2)


def size_of(slots: int, experts: int) -> int:
    """Returns the number of elements that are written."""
    return slots + experts + 2


def arguments_of(slots: int, experts: int) -> Arguments:
    """Returns the Arguments of a launch."""
    values: dict[str, Any] = {"S": slots, "E": experts, "BLOCK": BLOCK, "CHUNK": CHUNK, "num_warps": 4}
    return Arguments(programs=ceil_div(max(slots, experts + 2), BLOCK), values=values)


def new_order(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Returns the memory for what a launch writes."""
    return experts.new_empty(size_of(experts.shape[0], num_experts), dtype=torch.int32)
