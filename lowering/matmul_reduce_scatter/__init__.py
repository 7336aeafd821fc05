"""Strategies of `matmul_reduce_scatter`: one file each."""
