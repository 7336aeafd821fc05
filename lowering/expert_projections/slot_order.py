"""The order of slots by their experts, which expert_projections of many tokens reads.

Problem. A sort, a histogram and a running sum are several launches of the library, each of some microseconds.
Algorithm. The place of a slot is the number of slots in front of it, by the expert first and then by the slot. A
program counts these for a few slots by comparing them with all slots. It counts for a few experts too how many slots
belong to experts in front of them. Nothing is communicated, no program waits for another one, and no two write to the
same place. Limits. (E + 1) * S is below 2 ** 31.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from ditron_inductor.device.streams import handle_for
from ditron_inductor.lowering.host.launch import ceil_div
from ditron_inductor.lowering.host.launcher import Arguments, local_launcher

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


def prepare(slots: int, num_experts: int, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns what launches the kernel for the experts of so many slots, and returns what it writes."""
    launcher = local_launcher(slot_order_kernel, device)
    values = {"S": slots, "E": num_experts, "BLOCK": BLOCK, "CHUNK": CHUNK, "num_warps": 4}
    arguments = Arguments(programs=ceil_div(max(slots, num_experts + 2), BLOCK), values=values)

    def run(experts: torch.Tensor) -> torch.Tensor:
        order = experts.new_empty(slots + num_experts + 2, dtype=torch.int32)
        launcher(handle_for(experts), lambda: arguments, (), (), {"experts": experts, "order": order})
        return order

    return run
