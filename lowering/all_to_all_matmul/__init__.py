"""Strategies of `all_to_all_matmul`: one file each."""
