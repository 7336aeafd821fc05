"""Keys and values of all ranks as they lie in memory, and the calls of the library's attention on parts of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ditron_inductor.lowering.attention.local_attention import ShownBlock
from ditron_inductor.task.attention_masks import Block

ALIGNMENT = 16
"""The bytes that the library's kernels read at once."""


@dataclass(frozen=True)
class Span:
    """One call of the library: rows of the queries, and the keys first_key .. last_key - 1 of each of `count` ranks
    from `source` on. For `causal` and `lower` see `Block`; a Span of several ranks has neither.
    """

    source: int
    count: int
    first_row: int
    last_row: int
    first_key: int
    last_key: int
    causal: bool
    lower: int | None = None

    def seen(self, bias: torch.Tensor | None, keys: int) -> ShownBlock:
        """Returns what its rows see of its keys. bias: None, or the bias of all rows and of all keys, of which each
        rank has `keys`. A mask with a bias has one block of all rows for each source.
        """
        return ShownBlock(self.causal, self.lower, None if bias is None else self._along(bias, bias.ndim - 1, keys))

    @property
    def rows(self) -> tuple[int, int]:
        return self.first_row, self.last_row

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """Returns its rows of q [B, H, Sq, D], or of lse [B, H, Sq]."""
        return q if self.rows == (0, q.shape[2]) else q[:, :, self.first_row : self.last_row]

    def of(self, gathered: torch.Tensor) -> torch.Tensor:
        """Returns its keys out of the gathered ones [W, B, S, H, D], as [B, H, keys, D]."""
        _, B, _, H, D = gathered.shape
        if self.count == 1:
            return self.of_own(gathered[self.source])
        part = gathered[self.source : self.source + self.count, :, self.first_key : self.last_key]
        # This is a view if the batch is 1 and all keys are taken.
        return part.transpose(0, 1).reshape(B, -1, H, D).transpose(1, 2)

    def of_own(self, own: torch.Tensor) -> torch.Tensor:
        """Returns its keys out of those of one rank [B, S, H, D], as [B, H, keys, D]."""
        whole = (self.first_key, self.last_key) == (0, own.shape[1])
        return (own if whole else own[:, self.first_key : self.last_key]).transpose(1, 2)

    def among(self, x: torch.Tensor, keys: int) -> torch.Tensor:
        """Returns a view of its keys in x [B, H, W * keys, D]: all keys of every source, or those of one."""
        return self._along(x, 2, keys)

    def _along(self, x: torch.Tensor, dim: int, keys: int) -> torch.Tensor:
        """Returns its keys along a dimension of size W * keys; all of x if that is missing or broadcast."""
        if dim < 0 or x.shape[dim] == 1:
            return x
        first = self.source * keys
        return x.narrow(dim, first + self.first_key, (self.count - 1) * keys + self.last_key - self.first_key)


def single(block: Block) -> Span:
    places = block.first_row, block.last_row, block.first_key, block.last_key
    return Span(block.source, 1, *places, block.causal, block.lower)


def joined(blocks: Sequence[Block], whole: int | None = None) -> list[Span]:
    """Returns the calls for the blocks, in the order of the blocks' first appearance. Blocks of neighbouring sources
    with the same rows and the same keys are one call; with `whole`, only if they have all keys, which are `whole` keys.
    """
    found: list[Span] = []
    for block in blocks:
        span = single(block)
        for place, other in enumerate(found):
            alike = (other.rows, other.first_key, other.last_key) == (span.rows, span.first_key, span.last_key)
            masked = any(part.causal or part.lower is not None for part in (other, span))
            if alike and not masked and whole in (None, block.keys):
                if span.source == other.source - 1:
                    found[place] = _longer(other, span.source)
                    break
                if span.source == other.source + other.count:
                    found[place] = _longer(other, other.source)
                    break
        else:
            found.append(span)
    return found


def _longer(span: Span, source: int) -> Span:
    return Span(source, span.count + 1, span.first_row, span.last_row, span.first_key, span.last_key, causal=False)


def with_rows(q: torch.Tensor) -> torch.Tensor:
    """Returns q [B, H, S, D] with contiguous D, as kernels need it."""
    return q if q.stride(3) == 1 else q.contiguous()


def stacked(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Returns keys and values [B, H, S, D] as one contiguous tensor [2, B, S, H, D], for the kernel of `tile`."""
    return torch.stack((k.transpose(1, 2), v.transpose(1, 2)))


def as_sent(x: torch.Tensor) -> torch.Tensor:
    """Returns keys or values [B, H, S, D] as a contiguous [B, S, H, D], which the peers read. Its address is a multiple
    of ALIGNMENT. It is a view if x is the result of a projection, and otherwise a copy.
    """
    rows = x.transpose(1, 2).contiguous()
    return rows if rows.data_ptr() % ALIGNMENT == 0 else rows.clone()


def canonical(gathered: torch.Tensor) -> torch.Tensor:
    """Returns [W, B, S, H, D] as [B, H, W*S, D] with the memory of a contiguous [B, W*S, H, D]; a view if B is 1."""
    W, B, S, H, D = gathered.shape
    return gathered.transpose(0, 1).reshape(B, W * S, H, D).transpose(1, 2)
