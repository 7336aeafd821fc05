"""Caches in blocks of tokens, as a program in plain torch writes and reads them."""

from __future__ import annotations

import torch


def append(cache: torch.Tensor, new: torch.Tensor, table: torch.Tensor, position: torch.Tensor) -> None:
    """Writes keys or values [B, Hkv, D] into a cache [blocks, P, Hkv, D] whose block table is [B, N], for all sequences
    at one position, an int64 [1].
    """
    page = cache.shape[1]
    blocks = table.gather(1, (position // page).expand(len(table), 1))[:, 0]
    cache[blocks, position % page] = new


def gathered(cache: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Returns the keys or values [B, Hkv, N P, D] that a block table [B, N] finds in a cache [blocks, P, Hkv, D]."""
    return cache[table].flatten(1, 2).transpose(1, 2)
