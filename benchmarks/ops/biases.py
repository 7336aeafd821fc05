"""What the benchmarks of attention add to the scores, in the shapes of their set `bias`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DOCUMENTS = 4
"""In the sequence of the mask of documents."""


def documents(rank: int, length: int, tokens: int, heads: int, device: torch.device) -> torch.Tensor:
    """A mask of bool [1, 1, length, tokens]: causal within documents of one length."""
    import torch

    rows, keys = _positions(rank, length, tokens, device)
    each = -(-tokens // DOCUMENTS)
    seen: torch.Tensor = (rows >= keys) & (torch.div(rows, each, rounding_mode="floor") == keys // each)
    return seen[None, None]


def alibi(rank: int, length: int, tokens: int, heads: int, device: torch.device) -> torch.Tensor:
    """A bias of bfloat16 [1, heads, length, tokens]: of every head a multiple of how far a key is behind."""
    import torch

    rows, keys = _positions(rank, length, tokens, device)
    slopes = torch.exp2(-8.0 / heads * torch.arange(1, heads + 1, device=device))
    far = (keys - rows).to(torch.bfloat16).masked_fill_(keys > rows, -torch.inf)
    bias: torch.Tensor = far * slopes.to(torch.bfloat16)[:, None, None]
    return bias[None]


def _positions(rank: int, length: int, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    return rank * length + torch.arange(length, device=device)[:, None], torch.arange(tokens, device=device)


BIASES: dict[str, Callable[[int, int, int, int, torch.device], torch.Tensor]] = {"documents": documents, "alibi": alibi}
"""(rank, its tokens, all tokens, heads, device) -> what a rank adds, by name."""
