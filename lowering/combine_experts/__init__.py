"""Strategies of `combine_experts`."""
