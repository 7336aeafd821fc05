"""Strategies of `all_gather_attention`: one file each."""
