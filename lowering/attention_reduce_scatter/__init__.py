"""Strategies of `attention_reduce_scatter`: one file each. There is `library` alone."""
