"""combine_experts_reduce_scatter, strategy `chunked`: the sums of one owner's tokens are sent while the next are made.

Problem. Every rank holds what its share of each expert returns, sorted by expert. Rank r wants the weighted sum over
experts and ranks for its own tokens. Algorithm. That of lowering/matmul_reduce_scatter/chunked.py: the tokens of rank +
1 come first, the rank's own tokens last. In the place of a matmul, the kernel of expert_sums adds up the slots of
an owner's tokens, straight into this rank's slot. The grouped matmul in front is not cut. Signal protocol. See
lowering/transfers.py. Limits. Those of that kernel on the layout; other operands are summed by the library, owner
by owner. None on the routing, which only the device knows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ditron_inductor.lowering.expert_sums.combine_kernel import TokenRun
from ditron_inductor.lowering.expert_sums.runs import SlotSums, Summers, side_by_side
from ditron_inductor.lowering.host.launch import Launch
from ditron_inductor.lowering.matmul_reduce_scatter import chunked
from ditron_inductor.task.nodes import CombineExpertsReduceScatter


@dataclass(frozen=True, eq=False)
class Geometry:
    """The layout of a call, and what sums its runs of tokens."""

    cut: chunked.Geometry
    sums: Summers = field(repr=False)

    @property
    def nbytes(self) -> int:
        return self.cut.nbytes


def geometry(
    node: CombineExpertsReduceScatter, launch: Launch, products: torch.Tensor, columns: int, k: int
) -> Geometry:
    """Returns the Geometry for products [S, N]. columns: N. k: unused."""
    rows = products.shape[0] // node.top_k // node.world_size
    return Geometry(chunked.cut(node.world_size, launch, rows, node.outer, columns, products.dtype), Summers(node))


def runs_of(plan: chunked.ScatterPlan) -> list[TokenRun]:
    """Returns the tokens of each run of a plan, by the numbers that the plan gives them."""
    if plan.lengths is not None:
        return side_by_side(plan.lengths)
    outer, world, length = plan.apart
    return [TokenRun(owner * length, length, outer, world * length) for owner in range(world)]


def combine_experts_reduce_scatter(
    node: CombineExpertsReduceScatter,
    launch: Launch,
    sizes: Geometry,
    *operands: torch.Tensor,
) -> list[torch.Tensor]:
    """Returns the output [T / W, N]; see the node for the operands."""
    out = operands[0].new_empty(sizes.cut.rows, sizes.cut.N)

    def sums_of(plan: chunked.ScatterPlan) -> SlotSums:
        return sizes.sums.of(lambda: runs_of(plan), *operands)

    return chunked.scatter(node, launch, sizes.cut, operands[0], sums_of, (out,), [out])
