"""The base class of the declarations of all node kinds: their text, and the operands of their calls.

Every kind is called by one schema, `ditron.<kind>(Tensor[] operands, str node, Tensor? token) -> Tensor[]`. The text of
the node says which operand is which: `slots()` names them in their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from ditron_inductor.task.codec import encode
from ditron_inductor.task.exchange import Exchange
from ditron_inductor.task.policy import Policy

T = TypeVar("T")
Slots = tuple[tuple[str, int | None], ...]
"""The names of the operands, in the order of a call: None for a single tensor, a number for a list of so many."""
Shape = Sequence[Any]
"""Sizes, numbers or symbols."""
Shapes = Mapping[str, Any]
"""The shapes of operands by name: one, or a list of them."""


@dataclass(frozen=True)
class Sizes:
    """The product [m, k] @ [k, n] that one rank computes. Attention and norms have the sizes of an equivalent product.
    m counts the rows of the whole gathered or unscattered tensor, n the columns of all weights, and k the contracted
    widths of all products that are added up. local: the one of n and k that may differ between ranks; the other sizes
    are equal on all ranks. wire: the sizes that all ranks must share, by which peers name the site.
    """

    m: Any
    n: Any
    k: Any
    local: str
    wire: tuple[Any, ...]


@dataclass(frozen=True)
class Output:
    """A tensor that a call returns. It is contiguous unless `sequence_first`. dtype: a short name of dtypes.py, or
    int64; any other text means the dtype of the first operand. sequence_first: whether [B, heads, sequence, D] has the
    memory of a contiguous [B, sequence, heads, D].
    """

    shape: tuple[Any, ...]
    dtype: str = ""
    sequence_first: bool = False


@dataclass(frozen=True)
class Node:
    """A declared node kind: a frozen dataclass of everything that a site needs at run time, except its tensors.
    exchange: the collective; None for a kind that does not communicate. computes: `matmul`, `norm`, `attention`,
    `attention_backward`, `decode` or `experts`. host_us: microseconds of the host for one eager call by each strategy,
    measured by `python -m benchmarks.host`. planned_as: the kind whose strategies are chosen for this one, empty for
    its own. overlaps: how its launches can overlap with others, of OVERLAPS. ahead: the name of the operands, weights,
    that a launch which follows loads before what is in front of it has ended; empty for none.
    """

    kind: ClassVar[str]
    exchange: ClassVar[Exchange | None] = None
    computes: ClassVar[str] = "matmul"
    host_us: ClassVar[Mapping[str, float]] = {}
    planned_as: ClassVar[str] = ""
    strategies: ClassVar[tuple[str, ...]] = ("library", "chunked", "tile")
    """The strategies that the kind has. If another one is forced, the last of these runs."""
    overlaps: ClassVar[tuple[str, ...]] = ()
    ahead: ClassVar[str] = ""

    def verify(self) -> None:
        """Checks the fields. Raises `InvalidTaskNode`, which names the wrong field."""
        raise NotImplementedError

    def slots(self) -> Slots:
        """The names of the operands of a call."""
        raise NotImplementedError

    def sizes(self, shapes: Shapes) -> Sizes:
        raise NotImplementedError

    def outputs(self, shapes: Shapes) -> list[Output]:
        """Returns the shapes and dtypes of what a call returns, without the token, from the shapes of its operands."""
        raise NotImplementedError

    @property
    def pattern(self) -> str:
        """The part of the user's program that the node replaces, in one line for a reader."""
        raise NotImplementedError

    @property
    def num_tensors(self) -> int:
        """The number of operands of a call, counting each tensor of a list."""
        return sum(1 if count is None else count for _, count in self.slots())

    def overlapping(self, overlap: str) -> Node:
        """Returns the node with its `overlap`, for a kind that `overlaps`."""
        return replace(self, overlap=overlap)  # type: ignore[call-arg]

    def text(self) -> str:
        """Returns the node as one line of text, which is the same for equal nodes (see codec.py)."""
        return encode(self)

    def flat(self, given: Mapping[str, Any]) -> list[Any]:
        """Returns the operands of a call in its order. given: the operands by name; None or missing if a slot does not
        exist. Raises AssertionError if the node and the operands do not fit.
        """
        names = [name for name, _ in self.slots()]
        left = [name for name, value in given.items() if name not in names and not _is_nothing(value)]
        assert not left, f"{self.kind} has no operand {', '.join(left)}: {self.text()}"
        operands: list[Any] = []
        for name, count in self.slots():
            value = given.get(name, ())
            if count is None:
                assert value is not None and not isinstance(value, (list, tuple)), f"{self.kind} has no {name}"
                operands.append(value)
            else:
                assert len(value) == count, f"{self.kind} has {len(value)} {name}, not {count}"
                operands.extend(value)
        return operands

    def named(self, operands: Sequence[T]) -> dict[str, Any]:
        """The operands of a call by name: a tensor, or a list of tensors."""
        found: dict[str, Any] = {}
        fits = self.num_tensors == len(operands)
        assert fits, f"{self.kind} has {self.num_tensors} operands, not {len(operands)}: {self.text()}"
        place = 0
        for name, count in self.slots():
            if count is None:
                found[name] = operands[place]
                place += 1
            else:
                found[name] = list(operands[place : place + count])
                place += count
        return found


class TaskNode(Node):
    """A node that communicates: a site of a graph."""

    exchange: ClassVar[Exchange]
    world_size: int
    group_name: str
    site: str
    policy: Policy

    def overlapping(self, overlap: str) -> Node:
        return replace(self, policy=replace(self.policy, overlap=overlap))  # type: ignore[call-arg]

    @property
    def wire(self) -> str:
        """What peers name the site by: its collective, or, where it stands for several, how its parts travel."""
        return self.exchange.wire

    @property
    def form(self) -> str:
        """The kind, and whatever else of the node decides which launches its strategies make."""
        return self.kind

    @classmethod
    def plain(cls, m: int, n: int, k: int, world_size: int) -> tuple[TaskNode, Shapes]:
        """The simplest call whose product on one rank is [m, k] @ [k, n]: its node, in the group "", and the shapes of
        its operands. Raises ValueError where m rows do not divide over the ranks.
        """
        raise NotImplementedError

    def timed(self, shapes: Shapes) -> tuple[TaskNode, Shapes] | None:
        """The call that is timed for this one, without what costs all strategies the same, or None."""
        return None

    def contributed(self, shapes: Shapes) -> Shape | None:
        """The shape of what this rank contributes to the collective; None where a node stands for several of them."""
        name, count = self.slots()[0]
        shape: Shape = shapes[name] if count is None else shapes[name][0]
        return shape

    @property
    def without_norm(self) -> TaskNode:
        """The node whose products, and whose epilogue, this one has."""
        return self

    def normed_columns(self, sizes: Sizes) -> Any:
        """Columns of the rows that a kernel of the node normalises, 0 where none does."""
        return 0

    def slices(self, shape: Sequence[int]) -> int:
        """The slices that the gathered or scattered dimension of a first operand lies inside: a batch's sequences."""
        return 1

    def more_products(self, shape: Sequence[int]) -> int:
        """Matmuls that `chunked` makes beyond those of one weight, for a first operand of this shape."""
        return 0


def _is_nothing(value: Any) -> bool:
    """Returns whether this is no operand: None, or no tensor in a list."""
    return value is None or (isinstance(value, (list, tuple)) and not value)


def single(names: Sequence[str]) -> Slots:
    """Slots of one tensor each."""
    return tuple((name, None) for name in names)


def parted(node: Node, operands: Sequence[T], names: Sequence[str]) -> tuple[T | None, ...]:
    """Returns the operands of a node by these names of slots, None for those that it does not have."""
    given = dict(zip((name for name, _ in node.slots()), operands, strict=True))
    return tuple(given.get(name) for name in names)
