"""The node kinds of attention to keys and values that are sharded along the sequence: forward, and its backward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from ditron_inductor.task.attention_masks import GIVEN, Mask, attention_sizes
from ditron_inductor.task.codec import INLINED
from ditron_inductor.task.dtypes import FLOAT32
from ditron_inductor.task.exchange import GATHERED_OPERAND, SCATTERED_GRADIENTS, Exchange
from ditron_inductor.task.node import Output, Shape, Shapes, Sizes, Slots, TaskNode, single
from ditron_inductor.task.policy import Policy, check, verify_common

T = TypeVar("T")


@dataclass(frozen=True)
class AttentionNode(TaskNode):
    """What the two nodes have in common. scale: of the products of queries and keys, before the softmax. softcap: 0, or
    what the scores s become is softcap * tanh(s / softcap).
    """

    kind: ClassVar[str]
    takes_gathered: ClassVar[bool] = False
    """Whether its keys and values are those of all ranks."""
    mask: Mask
    scale: float
    softcap: float
    world_size: int
    group_name: str
    site: str
    policy: Policy = field(metadata=INLINED)

    def verify(self) -> None:
        self.mask.verify(self.kind)
        check(math.isfinite(self.scale), self.kind, "scale", self.scale, "a finite number")
        check(0.0 <= self.softcap < math.inf, self.kind, "softcap", self.softcap, "a number, 0 for none")
        verify_common(self.kind, self.world_size, self.group_name, self.policy)

    def split(self, operands: Sequence[T]) -> Sequence[T]:
        """Returns the operands as they are, the bias last."""
        return operands

    @property
    def wire(self) -> str:
        return f"{self.kind} {self.mask.name} {self.scale:g} {self.softcap:g} {getattr(self, 'return_gathered', '')}"

    def contributed(self, shapes: Shapes) -> Shape | None:
        return None

    @property
    def attention_pattern(self) -> str:
        """What its rows see, and what becomes of the scores."""
        return f"{self.mask.name}, softcap={self.softcap:g}" if self.softcap else self.mask.name

    def attention_sizes(self, q: Shape, k: Shape) -> Sizes:
        """The sizes of a matmul with as many operations; q [B, Hq, Sq, D], k [B, Hkv, S, D] of one rank."""
        B, heads, queries, D = q
        m, n, depth = attention_sizes(self.mask, self.world_size, B, heads, queries, D, k[1], k[2])
        return Sizes(m, n, depth, "n", tuple(k))

    def _bias_slots(self) -> Slots:
        return single(("bias",)) if self.mask.kind == GIVEN else ()


@dataclass(frozen=True)
class AllGatherAttention(AttentionNode):
    """out = softmax(cap(scale * q @ all_gather(k)^T), masked) @ all_gather(v), and lse, the logarithms of its sums. q,
    out are [B, Hq, Sq, D], k and v [B, Hkv, S, D] of every rank, gathered along the sequence; Hkv divides Hq, and head
    h attends to head h * Hkv // Hq. lse is [B, Hq, Sq] in fp32. A row that sees nothing has 0 and -inf. With the mask
    `given` a bias is added behind the cap: see task/attention_masks.py. If `return_gathered`, the gathered k and v [B,
    Hkv, W*S, D] are returned too.
    """

    kind: ClassVar[str] = "all_gather_attention"
    exchange: ClassVar[Exchange] = GATHERED_OPERAND
    computes: ClassVar[str] = "attention"
    host_us: ClassVar[Mapping[str, float]] = {"library": 260.0, "chunked": 260.0, "tile": 46.0}
    return_gathered: bool = False

    @property
    def pattern(self) -> str:
        used = ", gathered used" * self.return_gathered
        return f"all_gather(keys, values) -> attention({self.attention_pattern}){used}"

    def slots(self) -> Slots:
        return (*single(("q", "k", "v")), *self._bias_slots())

    def sizes(self, shapes: Shapes) -> Sizes:
        return self.attention_sizes(shapes["q"], shapes["k"])

    def outputs(self, shapes: Shapes) -> list[Output]:
        q = tuple(shapes["q"])
        found = [Output(q, sequence_first=True), Output(q[:-1], FLOAT32.short)]
        for name in ("k", "v") * self.return_gathered:
            B, heads, keys, D = shapes[name]
            found.append(Output((B, heads, keys * self.world_size, D), sequence_first=True))
        return found


@dataclass(frozen=True)
class AttentionReduceScatter(AttentionNode):
    """The backward of `AllGatherAttention`: grad_q, and of grad_k and grad_v, summed over the ranks, this rank's part.
    From grad_out, q, out [B, Hq, Sq, D], the gathered k and v [B, Hkv, W*S, D] and lse; grad_k and grad_v are [B, Hkv,
    S, D]. Of a bias there is no gradient.
    """

    kind: ClassVar[str] = "attention_reduce_scatter"
    exchange: ClassVar[Exchange] = SCATTERED_GRADIENTS
    computes: ClassVar[str] = "attention_backward"
    takes_gathered: ClassVar[bool] = True
    host_us: ClassVar[Mapping[str, float]] = {"library": 300.0}
    # By `chunked` it was slower, and there is no kernel of ours that does all of it: docs/deleted.md.
    strategies: ClassVar[tuple[str, ...]] = ("library",)

    @property
    def pattern(self) -> str:
        return f"attention backward({self.attention_pattern}) -> reduce_scatter(keys, values)"

    def slots(self) -> Slots:
        return (*single(("grad_out", "q", "k", "v", "out", "lse")), *self._bias_slots())

    def sizes(self, shapes: Shapes) -> Sizes:
        B, heads, keys, D = shapes["k"]
        return self.attention_sizes(shapes["q"], (B, heads, keys // self.world_size, D))

    def outputs(self, shapes: Shapes) -> list[Output]:
        found = [Output(tuple(shapes["q"]), sequence_first=True)]
        for name in ("k", "v"):
            B, heads, keys, D = shapes[name]
            found.append(Output((B, heads, keys // self.world_size, D), sequence_first=True))
        return found
