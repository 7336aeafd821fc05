"""Strategies of `matmul_all_to_all`: one file each."""
