"""How a sum of products is reduced over the ranks, in chunks or by one kernel, whatever stands behind it."""
