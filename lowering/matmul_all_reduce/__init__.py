"""Strategies of `matmul_all_reduce`: one file each."""
