"""The all-reduce of a sum of products, in chunks or by one kernel, which several node kinds use."""
