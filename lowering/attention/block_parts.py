"""What the strategies share: keys and values of all ranks as they lie in memory, and the calls of the library on
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ditron_inductor.lowering.attention.local_attention import ShownBlock
from ditron_inductor.task.attention_masks import Block

ALIGNMENT = 16
"""Bytes that the library's kernels read at once."""


@dataclass(frozen=True)
class Span:
    """One call of the library: rows of the queries, and the keys of `count` ranks from `source` on. See `Block` for
    causal and lower: only one rank's keys have these.
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
        """What its rows see of its keys. bias: of all keys, of which there are `keys` on a rank; of all rows, as the
        mask that a bias comes with has it.
        """
        return ShownBlock(self.causal, self.lower, None if bias is None else self._along(bias, bias.ndim - 1, keys))

    @property
    def rows(self) -> tuple[int, int]:
        return self.first_row, self.last_row

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """Its rows of q [B, H, Sq, D]; of lse [B, H, Sq] too."""
        return q if self.rows == (0, q.shape[2]) else q[:, :, self.first_row : self.last_row]

    def of(self, gathered: torch.Tensor) -> torch.Tensor:
        """Its keys out of those of all ranks, [W, B, S, H, D], as [B, H, keys, D]."""
        _, B, _, H, D = gathered.shape
        if self.count == 1:
            return self.of_own(gathered[self.source])
        part = gathered[self.source : self.source + self.count, :, self.first_key : self.last_key]
        # A view for one sequence with all its keys.
        return part.transpose(0, 1).reshape(B, -1, H, D).transpose(1, 2)

    def of_own(self, own: torch.Tensor) -> torch.Tensor:
        """Its keys out of one rank's own, [B, S, H, D], as [B, H, keys, D]."""
        whole = (self.first_key, self.last_key) == (0, own.shape[1])
        return (own if whole else own[:, self.first_key : self.last_key]).transpose(1, 2)

    def among(self, x: torch.Tensor, keys: int) -> torch.Tensor:
        """Its keys out of those of all ranks, x [B, H, W * keys, D]: a view. Whole keys of every source, or of one
        only.
        """
        return self._along(x, 2, keys)

    def _along(self, x: torch.Tensor, dim: int, keys: int) -> torch.Tensor:
        """Its keys along a dimension of W * keys, or all of what is the same for every key."""
        if dim < 0 or x.shape[dim] == 1:
            return x
        first = self.source * keys
        return x.narrow(dim, first + self.first_key, (self.count - 1) * keys + self.last_key - self.first_key)


def single(block: Block) -> Span:
    """A block as a call."""
    places = block.first_row, block.last_row, block.first_key, block.last_key
    return Span(block.source, 1, *places, block.causal, block.lower)


def joined(blocks: Sequence[Block], whole: int | None = None) -> list[Span]:
    """The blocks as calls, those of neighbouring sources with the same rows and keys as one. In the order of the
    blocks' first appearance.
    """
    found: list[Span] = []
    for block in blocks:
        span = single(block)
        for place, other in enumerate(found):
            alike = (other.rows, other.first_key, other.last_key) == (span.rows, span.first_key, span.last_key)
            masked = any(one.causal or one.lower is not None for one in (other, span))
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
    """q [B, H, S, D] with contiguous D, as kernels want it."""
    return q if q.stride(3) == 1 else q.contiguous()


def stacked(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Keys and values [B, H, S, D] as one contiguous tensor [2, B, S, H, D]: what the kernel of `tile` reads."""
    return torch.stack((k.transpose(1, 2), v.transpose(1, 2)))


def as_sent(x: torch.Tensor) -> torch.Tensor:
    """Keys or values [B, H, S, D] as a contiguous [B, S, H, D]: what a rank's peers read. A view of what a projection
    returns, else a copy. It starts at a multiple of ALIGNMENT.
    """
    rows = x.transpose(1, 2).contiguous()
    return rows if rows.data_ptr() % ALIGNMENT == 0 else rows.clone()


def canonical(gathered: torch.Tensor) -> torch.Tensor:
    """[W, B, S, H, D] as [B, H, W*S, D] with the memory of a contiguous [B, W*S, H, D]; a view for B = 1."""
    W, B, S, H, D = gathered.shape
    return gathered.transpose(0, 1).reshape(B, W * S, H, D).transpose(1, 2)
