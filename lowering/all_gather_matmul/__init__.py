"""Strategies of `all_gather_matmul`: one file each."""
