"""Benchmarks: interleaved contestants, the maximum over ranks, long-form CSV. See README.md in this folder."""
