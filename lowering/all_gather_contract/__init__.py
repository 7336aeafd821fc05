"""Strategies of `all_gather_contract`: one file each."""
