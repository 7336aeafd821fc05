"""Strategies of `attention_reduce_scatter`: one file each."""
