"""The node kinds of decode attention: over a cache that is sharded along the tokens, and over a cache of the rank's own
heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from ditron_inductor.task.codec import INLINED
from ditron_inductor.task.exchange import GATHERED_PARTS, Exchange
from ditron_inductor.task.node import Node, Output, Shape, Shapes, Sizes, Slots, TaskNode, parted, single
from ditron_inductor.task.policy import STRATEGIES, Policy, check, check_overlap, verify_common

T = TypeVar("T")
HEAD_DIMS = (16, 32, 64, 128, 256)
"""The elements of a head that the kernels of decode attention have blocks for."""


@dataclass(frozen=True)
class FlashDecode(TaskNode):
    """out = attention of one query per sequence over the tokens of all ranks, bit-identical on every rank. q and out
    are [B, Hq, D]. Each rank holds some tokens of every sequence, in caches [B, S, Hkv, D] or (paged) blocks [blocks,
    tokens, Hkv, D]. Scores are q . k * scale; if softcap > 0, they become softcap * tanh(scores / softcap).
    """

    kind: ClassVar[str] = "flash_decode"
    exchange: ClassVar[Exchange] = GATHERED_PARTS
    computes: ClassVar[str] = "decode"
    host_us: ClassVar[Mapping[str, float]] = {"library": 80.0, "tile": 36.0}
    # Attention that is as short as reading its cache has no chunks to overlap.
    strategies: ClassVar[tuple[str, ...]] = ("library", "tile")
    scale: float
    softcap: float
    world_size: int
    group_name: str
    site: str
    policy: Policy = field(metadata=INLINED)
    paged: bool = False

    def slots(self) -> Slots:
        return single(("q", "k", "v", "lengths", *("block_table",) * self.paged))

    def split(self, operands: Sequence[T]) -> tuple[T, T, T, T, T | None]:
        """Returns (query, keys, values, lengths, block table)."""
        q, k, v, lengths, *table = operands
        return q, k, v, lengths, table[0] if table else None

    @property
    def pattern(self) -> str:
        return f"{'paged ' * self.paged}decode attention -> all_gather of parts -> merge"

    def sizes(self, shapes: Shapes) -> Sizes:
        B, heads, D = shapes["q"]
        return Sizes(B * heads, D, 1, "", (B, heads, D))

    @property
    def wire(self) -> str:
        return f"{self.kind} {self.scale:g} {self.softcap:g} {self.paged}"

    def contributed(self, shapes: Shapes) -> Shape | None:
        return None

    def outputs(self, shapes: Shapes) -> list[Output]:
        return [Output(tuple(shapes["q"]))]

    def verify(self) -> None:
        check(0.0 < self.scale < math.inf, self.kind, "scale", self.scale, "a number above 0")
        check(0.0 <= self.softcap < math.inf, self.kind, "softcap", self.softcap, "a number, 0 for none")
        verify_common(self.kind, self.world_size, self.group_name, self.policy)


MASKS = ("all", "lengths", "given", "bias")
"""Which tokens of a cache are attended to: all, the first ones of each sequence, those that a tensor marks, or those
whose scores a tensor does not lower to next to nothing.
"""


@dataclass(frozen=True)
class CachedAttention(Node):
    """out = attention of one query per sequence over a cache that this rank has whole, and over a new token, if it
    `appends` one. Nothing is communicated: no site.

    q and out are [B, Hq, D]; the caches keys and values are [B, Hkv, S, D], in any strides. If they are `paged`, they
    are blocks [blocks, Hkv, P, D], and token t of sequence b is token t % P of the block that block_table, an int32 or
    int64 [B, N], has at [b, t // P]; then S is N P. Blocks are counted from the end if negative. One that the caches do
    not have leaves no number, and by the library it is an error. Head h of q attends to head h // (Hq / Hkv). Scores
    are q . k * scale. With the mask `lengths`, an integer [B] or [1], the first lengths + added tokens of the cache are
    attended to. With the mask `given`, those for which shown, a bool [B, S] or [1, S], is true. With the mask `bias`, a
    float [B, S] or [1, S] is added to the scores. Without any token out is 0. For `given` and `bias`, begin and end,
    int32 [B] or [1], are the bounds of what a sequence sees: tokens in front of begin and from end on are not read (see
    `bounds` in cached_attention.py).

    With sinks, a float [Hq], each head has one more score, which belongs to no token: what a softmax gives to it is
    left out of the sum. A `bias` comes with sinks only: without them a row that sees nothing would be the mean of all.

    If it appends, key and value [B, Hkv, D] are written into the caches at position, an int64 [1] or [B], which counts
    from the end if negative. Blocks are not appended to, because two sequences may have one in common. The text of the
    node says that the caches are written, and the schema of the op does not: an `after_` behind the call does. What the
    cache held at this place is not attended to. The new token is: with the mask `given` if it is shown, with a `bias`
    as all others, and with `lengths`, which are then the position and do not count the token, unless negative.

    If `rotated`, q, and key if there is one, are turned first: x * cos + turn(x) * sin, where turn(x) is (-second half
    of x, first half of x), computed in fp32 and rounded once. cos and sin are [B, W] or [1, W], with W = D, or D / 2 if
    both halves have the same. overlap: as in Policy.
    """

    kind: ClassVar[str] = "cached_attention"
    overlaps: ClassVar[tuple[str, ...]] = ("", "leads")
    computes: ClassVar[str] = "decode"
    strategies: ClassVar[tuple[str, ...]] = ("library", "tile")
    scale: float
    mask: str
    appends: bool = False
    rotated: bool = False
    added: int = 0
    sinks: bool = False
    paged: bool = False
    strategy: str = "auto"
    overlap: str = ""

    @property
    def pattern(self) -> str:
        turned, written = "rotary embedding -> " * self.rotated, "write of the cache -> " * self.appends
        return f"{turned}{written}{'paged ' * self.paged}decode attention{' with sinks' * self.sinks}"

    def verify(self) -> None:
        check(0.0 < self.scale < math.inf, self.kind, "scale", self.scale, "a number above 0")
        check(self.mask in MASKS, self.kind, "mask", self.mask, f"one of {', '.join(MASKS)}")
        right = not self.added or (self.mask == "lengths" and not self.appends)
        check(right, self.kind, "added", self.added, "0, where no lengths are, or where they are the position")
        check(self.sinks or self.mask != "bias", self.kind, "mask", self.mask, "a bias with sinks only")
        check_overlap(self.overlap, self.kind, self.overlaps)
        check(not (self.appends and self.paged), self.kind, "appends", self.appends, "false for blocks")
        check(self.strategy in STRATEGIES, self.kind, "strategy", self.strategy, f"one of {', '.join(STRATEGIES)}")

    def slots(self) -> Slots:
        mask = {"all": (), "lengths": ("lengths",), "given": ("shown", *BOUNDS), "bias": ("bias", *BOUNDS)}[self.mask]
        new = ("position", "key", "value") * self.appends
        caches = ("keys", "values", *("block_table",) * self.paged)
        return single(("q", *caches, *mask, *("sinks",) * self.sinks, *new, *("cos", "sin") * self.rotated))

    def split(self, operands: Sequence[T]) -> tuple[Any, ...]:
        """Returns the operands in the order of `OPERANDS`, None for those that the node does not have."""
        return parted(self, operands, OPERANDS)

    def sizes(self, shapes: Shapes) -> Sizes:
        B, heads, D = shapes["q"]
        return Sizes(B * heads, D, 1, "", (B, heads, D))

    def outputs(self, shapes: Shapes) -> list[Output]:
        return [Output(tuple(shapes["q"]))]


BOUNDS = ("begin", "end")
HIDDEN = -(2.0**123)
"""A bias that is not larger hides a token: beside a sink of any usual size its weight is exactly 0. The lowest numbers
of bfloat16 and float32 are far below it.
"""
OPERANDS = (
    *("q", "keys", "values", "block_table", "lengths", "shown", "bias", *BOUNDS, "sinks"),
    *("position", "key", "value", "cos", "sin"),
)
"""All operands that a `CachedAttention` may have."""
