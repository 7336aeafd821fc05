"""Strategies of `matmul_all_gather`: one file each."""
