"""Binds `combine_experts` to its kernel."""

from __future__ import annotations

from ditron_inductor.lowering.expert_sums.combine_kernel import prepare
from ditron_inductor.lowering.host.local_calls import LocalCalls
from ditron_inductor.task.nodes import CombineExperts

combine_experts: LocalCalls[CombineExperts] = LocalCalls(prepare)
"""Returns [the sums [T, N]], contiguous. operands: as `CombineExperts` describes them."""
