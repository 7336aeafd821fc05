"""experts_all_reduce, strategy `tile`: the second matmul, the sum for each token and the all-reduce in one launch.

The kernel is that of matmul_all_reduce/one_shot.py, with the tile of core/experts.py in place of a matmul's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from ditron_inductor.core.experts import Routing
from ditron_inductor.lowering import sums
from ditron_inductor.lowering.config import select_expert_sum_config
from ditron_inductor.lowering.epilogues import arrange
from ditron_inductor.lowering.host.launch import Launch
from ditron_inductor.lowering.matmul_all_reduce import one_shot
from ditron_inductor.task.nodes import ExpertsAllReduce, ExpertsAllReduceRmsNorm


def geometry(node: ExpertsAllReduce, launch: Launch, x: torch.Tensor, columns: int) -> sums.Geometry:
    """Returns the Geometry for x [S, K]. columns: N."""
    rows = x.shape[0] // node.top_k
    config = select_expert_sum_config(
        rows=rows, columns=columns, depth=x.shape[1], dtype=x.dtype, interpreted=launch.interpreted,
        num_sms=launch.num_sms,
    )  # fmt: skip
    return one_shot.geometry_of(node, launch, x.dtype, config, (rows, columns), arrange(node.parsed, 1))


class ExpertsCall(sums.SumCall):
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
        super().__init__(node, launch, sizes, [x], [matrices[0]], None)
        self.stride_be = matrices.stride(0)
        self._slots = experts.contiguous(), factors.contiguous()
        self._num_experts = matrices.shape[0]

    @property
    def shape(self) -> list[int]:
        return [self.sizes.M, self.sizes.N]

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        return (*super().operands, *self._slots)

    def how(self, *, few_rows: bool = False) -> sums.How:
        top_k = self.node.top_k
        routing = Routing(
            TOP_K=top_k,
            EXPERTS=triton.next_power_of_2(self._num_experts),
            RANKS=triton.next_power_of_2(top_k),
            SLOTS=triton.next_power_of_2(self.sizes.M * top_k),
            SINGLE=self.sizes.M == 1,
        )
        return super().how(few_rows=few_rows)._replace(ROUTING=routing)

    def reduced(self, extras: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns [the reduced sums]. extras: what is added to the sums of a rank."""
        return one_shot.reduced(self, [one.contiguous() for one in extras])

    def reduced_and_normed(
        self, given: tuple[torch.Tensor | None, ...], extras: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Returns the outputs of a node with a norm, by one launch. given: see nodes.EXTRAS."""
        return one_shot.reduced_and_normed(self, given, [one.contiguous() for one in extras])


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
    return ExpertsCall(node, launch, sizes, x, matrices, experts, factors).reduced(extras)
