"""combine_experts_all_reduce, strategy `chunked`: the sums of some tokens are reduced while the next ones are made.

Problem. Every rank holds what its share of each expert returns, sorted by expert, and all ranks want the weighted sum
over experts and ranks for each token. Algorithm. That of an all-reduce in parts (see lowering/all_reduce/chunked.py),
whose parts are runs of tokens. In the place of a matmul, the kernel of expert_sums adds up the slots of a run's
tokens, straight into this rank's slot. The grouped matmul in front is not cut: on fewer rows or columns the library's
is slower. (Parts of the columns took 1.06 to 2.97 times as long as the whole, see docs/deleted.md.) Signal protocol.
That of lowering/all_reduce/chunked.py. Limits. Those of that kernel on the layout; other operands are summed by the
library, run by run. None on the routing, which only the device knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ditron_inductor.lowering.all_reduce.chunked import Parts, cut_into, reduce_in_parts
from ditron_inductor.lowering.expert_sums.runs import SlotSums, Summers, side_by_side
from ditron_inductor.lowering.host.launch import Launch
from ditron_inductor.task.nodes import CombineExpertsAllReduce

MOST_PARTS = 2
"""The host takes longer for each part than a GPU does for a part of a few megabytes."""
PART_BYTES = 4 << 20
INTERPRETED_PART_BYTES = 1 << 10
"""The fewest bytes of a part."""


@dataclass(frozen=True, eq=False)
class Geometry:
    """The layout of a call, and what sums its runs of tokens."""

    parts: Parts
    sums: Summers = field(repr=False)

    @property
    def nbytes(self) -> int:
        return self.parts.nbytes


def geometry(node: CombineExpertsAllReduce, launch: Launch, products: torch.Tensor, columns: int, k: int) -> Geometry:
    """Returns the Geometry for products [S, N]. columns: N. k: unused."""
    M = products.shape[0] // node.top_k
    least = INTERPRETED_PART_BYTES if launch.interpreted else PART_BYTES
    parts = max(1, min(MOST_PARTS, M * columns * products.element_size() // least))
    return Geometry(cut_into(parts, node, launch, M, columns, products.dtype), Summers(node))


def combine_experts_all_reduce(
    node: CombineExpertsAllReduce,
    launch: Launch,
    sizes: Geometry,
    *operands: torch.Tensor,
) -> list[torch.Tensor]:
    """Returns the output [T, N]; see the node for the operands."""
    out = operands[0].new_empty(sizes.parts.M, sizes.parts.N)

    def sums_of(runs: Sequence[int]) -> SlotSums:
        return sizes.sums.of(lambda: side_by_side(runs), *operands)

    return reduce_in_parts(node, launch, sizes.parts, out, sums_of, lambda: [out])
