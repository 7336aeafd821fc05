"""The collectives of node kinds: what is sent, how much of it a rank receives, and at which rate.

A kind declares one `Exchange`. Wire facts, records, the cost model and the tax report read it; none of them knows the
names of kinds.
"""

from __future__ import annotations

from dataclasses import dataclass

from ditron_inductor.task.dtypes import FLOAT32
from ditron_inductor.task.problem import Problem


@dataclass(frozen=True)
class Exchange:
    """What a node sends between the ranks. wire: the collective of the library that sends the same number of bytes. of:
    what is sent: the `operand` [m, k], the `product` [m, n], or the `parts` of an attention. is_whole: each rank
    contributes all of [m, n]; otherwise all ranks together contribute it, and a rank receives the parts of its peers.
    rate: the field of `cost.Hardware` that holds the rate of the links. rounds: how often every element is sent.
    """

    wire: str
    of: str
    rate: str
    rounds: int = 1
    is_whole: bool = False

    def received_bytes(self, problem: Problem) -> int:
        """Returns the bytes that a rank receives in one call. Parts are fp32, with a log-sum-exp for each row."""
        m, n, k = problem.m, problem.n, problem.k
        if self.of == "operand":
            nbytes = m * k * problem.operand_bytes
        elif self.of == "product":
            nbytes = m * n * problem.result_bytes
        else:
            assert self.of == "parts", self.of
            nbytes = m * (n + 1) * FLOAT32.itemsize
        sent = nbytes * (problem.world_size - 1) * self.rounds
        return sent if self.is_whole else sent // problem.world_size


GATHERED_OPERAND = Exchange("all_gather", "operand", "gather_bytes_per_s")
EXCHANGED_OPERAND = Exchange("all_to_all", "operand", "scatter_bytes_per_s")
SCATTERED_PRODUCT = Exchange("reduce_scatter", "product", "scatter_bytes_per_s")
REDUCED_PRODUCT = Exchange("all_reduce", "product", "all_reduce_bytes_per_s", rounds=2)
# Whole products arrive at the rate of an all-reduce.
GATHERED_PRODUCT = Exchange("all_gather", "product", "all_reduce_bytes_per_s", is_whole=True)
EXCHANGED_PRODUCT = Exchange("all_to_all", "product", "scatter_bytes_per_s")
SCATTERED_GRADIENTS = Exchange("reduce_scatter", "operand", "scatter_bytes_per_s")
GATHERED_PARTS = Exchange("all_gather", "parts", "gather_bytes_per_s", is_whole=True)
