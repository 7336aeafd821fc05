"""Whether a contestant's result is right, cheaply enough to ask for every one of them.

    every value   against the library's result, within twice the tolerance (each of both may be off by one of it)
    some rows     against an fp32 reference, within the tolerance: of every shard its first, its last and some between

The fp32 product of all rows would take many times longer than all measurements of the cell.
"""

from __future__ import annotations

import torch

from benchmarks.ops.contest import Contest
from benchmarks.tolerances import TOLERANCES, assert_near

BLOCK_ELEMENTS = 1 << 26
"""Values that are compared at a time: as float32, so that checking takes little memory beside the operands."""


class Check:
    """The expected result of a contest on its 0-th operands. Making one is collective."""

    def __init__(self, contest: Contest) -> None:
        self._num_partials = contest.num_partials
        # Cloned: the library's contestant writes into the same tensor at every call.
        self._all = contest.library(0).clone()
        self._rows, self._sample = contest.sample()

    def problem(self, result: object) -> str:
        """Returns what is wrong with the result of this rank; an empty text if nothing is."""
        if not isinstance(result, torch.Tensor):
            return f"returned {type(result).__name__}, not a tensor"
        if result.shape != self._all.shape or result.dtype != self._all.dtype:
            return f"returned {tuple(result.shape)} {result.dtype}, not {tuple(self._all.shape)} {self._all.dtype}"
        try:
            assert_near(result[self._rows], self._sample, num_partials=self._num_partials, what="sampled rows")
        except AssertionError as error:
            return str(error).strip()
        wrong = self._far_from_library(result)
        return f"{wrong} of {result.numel()} values are far from the library's" if wrong else ""

    def _far_from_library(self, result: torch.Tensor) -> int:
        rtol, atol = TOLERANCES[result.dtype]
        wrong = torch.zeros((), dtype=torch.int64, device=result.device)
        step = max(1, BLOCK_ELEMENTS // result.shape[1])
        for begin in range(0, len(result), step):
            got, wanted = result[begin : begin + step].float(), self._all[begin : begin + step].float()
            bound = wanted.abs().mul_(2 * rtol).add_(2 * atol * self._num_partials)
            # Not `>`: a NaN is far from everything.
            wrong += (~(got.sub_(wanted).abs_() <= bound)).sum()
        return int(wrong.item())
