"""The sums of experts as their reductions take them: all at once, or run by run in the place of products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from ditron_inductor.lowering.expert_sums.combine_kernel import Combiner, TokenRun, prepare, takes
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import SummedExperts


def then(
    node: SummedExperts, operands: Sequence[torch.Tensor], reduce: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[..., Any]:
    """Returns a function of node.split(operands) that sums all tokens and reduces the sum [T, N] by the library."""
    products, places, scale, added = node.split(operands)
    combine = prepare(node, products, places, scale, added, "library")

    def call(
        products: torch.Tensor, places: torch.Tensor, scale: torch.Tensor, added: torch.Tensor | None
    ) -> torch.Tensor:
        (total,) = combine(products, places, scale, added)
        return reduce(total)

    return call


def side_by_side(lengths: Sequence[int]) -> list[TokenRun]:
    """Returns runs of these numbers of tokens, one behind the other."""
    return [TokenRun(end - count, count) for count, end in zip(lengths, accumulate(lengths), strict=True)]


class Summers:
    """What sums the tokens of each run, for the calls of one geometry, whose operands have one form. The first call
    makes it, since only then the runs are known.
    """

    def __init__(self, node: SummedExperts) -> None:
        self._node = node
        self.top_k = node.top_k
        self.runs: Sequence[TokenRun] = ()
        self.combiners: list[Combiner] = []

    def of(self, runs: Callable[[], Sequence[TokenRun]], *operands: Any) -> SlotSums:
        """Returns the sums of a call. runs: returns the runs by their numbers, the same in every call."""
        if not self.runs:
            self.runs = runs()
            products, _, _, added = operands
            if takes(*operands):
                self.combiners = [Combiner(self._node, products, added, run) for run in self.runs]
        return SlotSums(self, *operands)


@dataclass(frozen=True)
class SlotSums:
    """The sums of the tokens of each run, as `chunked_exchange.Products`."""

    summers: Summers
    products: torch.Tensor
    places: torch.Tensor
    scale: torch.Tensor
    added: torch.Tensor | None

    def multiply(self, place: int, out: torch.Tensor) -> None:
        """Computes the sums of the run number `place` into `out`, contiguous [.., N]."""
        summers = self.summers
        if out.numel() == 0:
            return
        rows = out.view(-1, out.shape[-1])
        if summers.combiners:
            summers.combiners[place](self.products, self.places, self.scale, self.added, rows)
            return
        top_k, done = summers.top_k, 0
        for tokens in summers.runs[place].tokens:
            places = self.places[tokens.start * top_k : tokens.stop * top_k]
            rest = None if self.added is None else self.added[tokens]
            end = done + tokens.stop - tokens.start
            rows[done:end] = reference.combined(self.products, places, self.scale, rest, top_k)
            done = end
