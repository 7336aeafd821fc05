"""Attention to keys and values that are sharded along the sequence: the two node kinds, and which keys a row sees.

The keys and values of all ranks stand one after the other in rank order. What a row of the queries sees of them is
one of
`MASKS`; the rank is found at run time, so it is never part of a graph:

    full            every key
    causal          key j of all where j <= i, the row's number in this rank's queries: aten's `is_causal`
    causal_offset   key j of all where j <= rank * queries + i: sequence sharded in rank order
    zigzag          causal, where rank r holds the chunks r and 2 W - 1 - r of the sequence's 2 W: the same work on all
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ditron_inductor.task.policy import Policy, check, common_text, verify_common

MASKS: tuple[str, ...] = ("full", "causal", "causal_offset", "zigzag")
ALIGNED: tuple[str, ...] = ("causal_offset", "zigzag")
"""Those for which a rank's queries are at the positions of its keys."""


@dataclass(frozen=True)
class _AttentionNode:
    """What the two nodes have in common. scale: of the products of queries and keys, before the softmax."""

    kind: ClassVar[str]
    mask: str
    scale: float
    world_size: int
    group_name: str
    site: str
    policy: Policy

    def verify(self) -> None:
        check(self.mask in MASKS, self.kind, "mask", self.mask, f"one of {', '.join(MASKS)}")
        check(math.isfinite(self.scale), self.kind, "scale", self.scale, "a finite number")
        verify_common(self.kind, self.world_size, self.group_name, self.policy)

    def text(self) -> str:
        return (
            f"{self.kind}(mask={self.mask}, scale={self.scale:g}{self._own_text()}, "
            f"{common_text(self.world_size, self.group_name, self.site, self.policy)})"
        )

    def _own_text(self) -> str:
        return ""


@dataclass(frozen=True)
class AllGatherAttention(_AttentionNode):
    """out = softmax(scale * q @ all_gather(k)^T, masked) @ all_gather(v), and lse, the logarithms of its sums.

    q, out are [B, Hq, Sq, D], k and v [B, Hkv, S, D] of every rank, gathered along the sequence; Hkv divides Hq, and
    head h attends to head h * Hkv // Hq. lse is [B, Hq, Sq] in fp32.
    """

    kind: ClassVar[str] = "all_gather_attention"
    return_gathered: bool = False

    def _own_text(self) -> str:
        return f", return_gathered={self.return_gathered}"


@dataclass(frozen=True)
class AttentionReduceScatter(_AttentionNode):
    """The backward of `AllGatherAttention`: grad_q, and of grad_k and grad_v, summed over the ranks, this rank's part.

    From grad_out, q, out [B, Hq, Sq, D], the gathered k and v [B, Hkv, W*S, D] and lse; grad_k and grad_v are
    [B, Hkv, S, D].
    """

    kind: ClassVar[str] = "attention_reduce_scatter"


@dataclass(frozen=True)
class Block:
    """Rows first_row .. last_row of the queries and the keys first_key .. last_key of rank `source`, ends excluded:
    all of them see each other, or (causal) row i sees keys up to i, counted from the block's corner. Causal blocks
    are square.
    """

    source: int
    first_row: int
    last_row: int
    first_key: int
    last_key: int
    causal: bool = False

    @property
    def rows(self) -> int:
        return self.last_row - self.first_row

    @property
    def keys(self) -> int:
        return self.last_key - self.first_key

    @property
    def pairs(self) -> float:
        """Of a row and a key that it sees."""
        return self.rows * (self.rows + 1) / 2 if self.causal else float(self.rows * self.keys)


def mask_problem(mask: str, queries: int, keys: int) -> str:
    """Why `queries` rows and `keys` keys of a rank cannot have this mask, or an empty string."""
    if mask in ALIGNED and queries != keys:
        return f"the mask '{mask}' needs as many queries as keys on a rank, not {queries} and {keys}"
    if mask == "zigzag" and queries % 2:
        return f"the mask 'zigzag' needs two equal chunks on a rank, not {queries} rows"
    return ""


def blocks(mask: str, rank: int, world_size: int, queries: int, keys: int) -> list[Block]:
    """What this rank's queries see, source by source: its own keys first, then those of rank - 1, rank - 2, ..."""
    found = []
    for step in range(world_size):
        found += [block for block in _of_source(mask, rank, (rank - step) % world_size, queries, keys) if block.pairs]
    return found


def _of_source(mask: str, rank: int, source: int, queries: int, keys: int) -> Iterator[Block]:
    if mask == "full":
        yield Block(source, 0, queries, 0, keys)
    elif mask == "causal":
        first, last = min(source * keys, queries), min((source + 1) * keys, queries)
        yield Block(source, first, last, 0, last - first, causal=True)
        yield Block(source, last, queries, 0, keys)
    elif source == rank:
        # Of a zigzag too: the second chunk sees all of the first.
        yield Block(source, 0, queries, 0, keys, causal=True)
    elif mask == "causal_offset":
        if source < rank:
            yield Block(source, 0, queries, 0, keys)
    elif source < rank:
        yield Block(source, 0, queries, 0, keys // 2)
    else:
        yield Block(source, queries // 2, queries, 0, keys)


def visible_part(mask: str, world_size: int, queries: int, keys: int) -> float:
    """Of the pairs of a row and a key, those that see each other, on the rank with most of them."""
    everything = world_size * queries * keys
    if everything == 0:
        return 1.0
    pairs = [sum(one.pairs for one in blocks(mask, rank, world_size, queries, keys)) for rank in range(world_size)]
    return max(pairs) / everything


def attention_sizes(
    mask: str, world_size: int, batch: int, heads: int, queries: int, head_dim: int, key_heads: int, keys: int
) -> tuple[int, int, int]:
    """(m, n, k) of the matmul that has as many operations, and gathers as much: `keys` of W ranks, m, with so many
    columns of keys and values, k, each of which n rows of queries see: those of all heads of one key head.
    """
    seen = visible_part(mask, world_size, queries, keys)
    return world_size * batch * keys, math.ceil(seen * queries * heads / max(key_heads, 1)), 2 * key_heads * head_dim
