"""Binds `combine_experts` to its kernel."""

from __future__ import annotations

from ditron_inductor.lowering.expert_sums.combine_kernel import sums_of_slots as combine_experts

__all__ = ["combine_experts"]
