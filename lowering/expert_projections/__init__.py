"""Strategies of `expert_projections`."""
