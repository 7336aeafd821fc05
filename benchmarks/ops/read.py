"""A kernel that reads memory and does nothing with it: how fast anything that reads can be."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

BLOCK = 4096
PROGRAMS_PER_SM = 4


@triton.jit
def read_kernel(x, out, blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Blocks of BLOCK words of x, by all programs in turns; out: a word of each program."""
    seen = tl.zeros((BLOCK,), dtype=tl.int32)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=4):
        seen = seen | tl.load(x + block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.max(seen, axis=0))


class Reader:
    """A call that reads the i-th of several lists of contiguous tensors."""

    def __init__(self, tensors: Sequence[Sequence[torch.Tensor]]) -> None:
        self._words = [[x.view(torch.int32).view(-1) for x in each] for each in tensors]
        device = tensors[0][0].device
        self._programs = PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
        self._out = torch.empty(self._programs, dtype=torch.int32, device=device)

    def __call__(self, i: int) -> torch.Tensor:
        for words in self._words[i % len(self._words)]:
            read_kernel[(self._programs,)](words, self._out, words.numel() // BLOCK, BLOCK=BLOCK)
        return self._out
