"""Attention to blocks of keys that lie in this GPU's memory, and the merging of its parts."""
