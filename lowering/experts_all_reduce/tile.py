"""experts_all_reduce, strategy `tile`: the second matmul, the sum for each token and the all-reduce in one launch.

The kernel is that of matmul_all_reduce/one_shot.py, with the tile of core/experts.py in place of a matmul's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from ditron_inductor.core.experts import Routing
from ditron_inductor.lowering import sums
from ditron_inductor.lowering.epilogues import arrange
from ditron_inductor.lowering.experts_all_reduce.expert_sum_config import select_expert_sum_config
from ditron_inductor.lowering.host.launch import Launch
from ditron_inductor.lowering.matmul_all_reduce import one_shot
from ditron_inductor.task.nodes import ExpertsAllReduce, ExpertsAllReduceRmsNorm

LEAST_COUNTED = 64
"""A program counts at least so many experts: one in each thread of a warp."""


def geometry(node: ExpertsAllReduce, launch: Launch, x: torch.Tensor, columns: int) -> sums.Geometry:
    """Returns the Geometry for x [S, K]. columns: N."""
    rows = x.shape[0] // node.top_k
    config = select_expert_sum_config(
        rows=rows, columns=columns, depth=x.shape[1], dtype=x.dtype, interpreted=launch.interpreted,
        num_sms=launch.num_sms,
    )  # fmt: skip
    return one_shot.geometry_of(node, launch, x.dtype, config, (rows, columns), arrange(node.parsed, 1))


class ExpertsCall(one_shot.OneShot):
    """A call with x [S, K], matrices [E, K, N], experts and factors [S]. `node` may have a norm."""

    def __init__(
        self,
        node: ExpertsAllReduce | ExpertsAllReduceRmsNorm,
        launch: Launch,
        sizes: sums.Geometry,
        x: torch.Tensor,
        matrices: torch.Tensor,
        experts: torch.Tensor,
        factors: torch.Tensor,
    ) -> None:
        super().__init__(node, launch, sizes, [x], [matrices[0]])
        self.shape = [sizes.M, sizes.N]
        self.stride_be = matrices.stride(0)
        self.routing = Routing(
            TOP_K=node.top_k,
            EXPERTS=max(triton.next_power_of_2(matrices.shape[0]), LEAST_COUNTED),
            RANKS=triton.next_power_of_2(node.top_k),
            SLOTS=triton.next_power_of_2(sizes.M * node.top_k),
            SINGLE=sizes.M == 1,
        )
        self._slots = experts.contiguous(), factors.contiguous()

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        return (*super().operands, *self._slots)


def experts_all_reduce(
    node: ExpertsAllReduce,
    launch: Launch,
    sizes: sums.Geometry,
    x: torch.Tensor,
    matrices: torch.Tensor,
    experts: torch.Tensor,
    factors: torch.Tensor,
    extras: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    """Returns [the reduced sums [T, N]], with equal bits on all ranks. extras: what is added to the sums of a rank."""
    call = ExpertsCall(node, launch, sizes, x, matrices, experts, factors)
    return call.reduced([one.contiguous() for one in extras])
