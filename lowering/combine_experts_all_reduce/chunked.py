"""combine_experts_all_reduce, strategy `chunked`: the sums of some tokens are reduced while the next ones are made.

Problem. Every rank holds what its share of each expert returns, sorted by expert, and all ranks want the weighted sum
over experts and ranks for each token. Algorithm. That of an all-reduce in parts (see lowering/all_reduce/chunked.py),
whose parts are runs of tokens. In the place of a matmul, the kernel of combine_experts adds up the slots of a run's
tokens, straight into this rank's slot. The grouped matmul in front is not cut: on fewer rows or columns the library's
is slower. (Parts of the columns took 1.06 to 2.97 times as long as the whole, see docs/deleted.md.) Signal protocol.
That of lowering/all_reduce/chunked.py. Limits. Those of combine_experts on the layout; other operands are summed by the
library, run by run. None on the routing, which only the device knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from ditron_inductor.lowering.all_reduce.chunked import Parts, cut_into, reduce_in_parts
from ditron_inductor.lowering.combine_experts.combine_kernel import Combiner, takes
from ditron_inductor.lowering.host.launch import Launch
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import CombineExpertsAllReduce, SummedExperts

MOST_PARTS = 2
"""The host takes longer for each part than a GPU does for a part of a few megabytes."""
PART_BYTES = 4 << 20
INTERPRETED_PART_BYTES = 1 << 10
"""The fewest bytes of a part."""


@dataclass(frozen=True, eq=False)
class Geometry:
    """The layout of a call. sums: what sums the runs of tokens, made by the first call; empty before."""

    parts: Parts
    sums: list[Summers] = field(default_factory=list, repr=False)

    @property
    def nbytes(self) -> int:
        return self.parts.nbytes


def geometry(node: CombineExpertsAllReduce, launch: Launch, products: torch.Tensor, columns: int, k: int) -> Geometry:
    """Returns the Geometry for products [S, N]. columns: N. k: unused."""
    M = products.shape[0] // node.top_k
    least = INTERPRETED_PART_BYTES if launch.interpreted else PART_BYTES
    parts = max(1, min(MOST_PARTS, M * columns * products.element_size() // least))
    return Geometry(cut_into(parts, node, launch, M, columns, products.dtype))


class Summers:
    """What sums the tokens of each run, for operands of these forms. runs: the tokens of each, one behind the other."""

    def __init__(
        self, node: SummedExperts, runs: Sequence[int], products: torch.Tensor, *others: torch.Tensor | None
    ) -> None:
        *_, added = others
        self.top_k = node.top_k
        self.runs = [slice(end - count, end) for count, end in zip(runs, accumulate(runs), strict=True)]
        self.combiners: list[Combiner] = []
        if takes(products, *others):  # type: ignore[arg-type]
            self.combiners = [Combiner(node, products, added, run.start, run.stop - run.start) for run in self.runs]


@dataclass(frozen=True)
class SlotSums:
    """The sums of the tokens of each run, as `chunked_exchange.Products`."""

    summers: Summers
    products: torch.Tensor
    places: torch.Tensor
    scale: torch.Tensor
    added: torch.Tensor | None

    def multiply(self, place: int, out: torch.Tensor) -> None:
        """Computes the sums of the run number `place` into `out`."""
        summers = self.summers
        if out.numel() == 0:
            return
        if summers.combiners:
            summers.combiners[place](self.products, self.places, self.scale, self.added, out)
            return
        run, top_k = summers.runs[place], summers.top_k
        places = self.places[run.start * top_k : run.stop * top_k]
        rest = None if self.added is None else self.added[run]
        out.copy_(reference.combined(self.products, places, self.scale, rest, top_k))


def combine_experts_all_reduce(
    node: CombineExpertsAllReduce,
    launch: Launch,
    sizes: Geometry,
    products: torch.Tensor,
    places: torch.Tensor,
    scale: torch.Tensor,
    added: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Returns the output [T, N]; see the node for the operands."""
    out = products.new_empty(sizes.parts.M, sizes.parts.N)

    def sums_of(runs: Sequence[int]) -> SlotSums:
        if not sizes.sums:
            sizes.sums.append(Summers(node, runs, products, places, scale, added))
        return SlotSums(sizes.sums[0], products, places, scale, added)

    return reduce_in_parts(node, launch, sizes.parts, out, sums_of, lambda: [out])
