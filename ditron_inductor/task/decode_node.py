"""The node kind of decode attention over a cache that is sharded along the tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from ditron_inductor.task.codec import INLINED
from ditron_inductor.task.exchange import GATHERED_PARTS, Exchange
from ditron_inductor.task.node import Output, Shape, Shapes, Sizes, Slots, TaskNode, single
from ditron_inductor.task.policy import Policy, check, verify_common

T = TypeVar("T")


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
