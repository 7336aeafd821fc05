"""The node kinds of matmuls beside a collective, and of matmuls that share a tensor and communicate nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from ditron_inductor.errors import InvalidEpilogue, InvalidTaskNode
from ditron_inductor.task import ulysses
from ditron_inductor.task.codec import INLINED
from ditron_inductor.task.epilogue import Epilogue, ProductTerm, parse
from ditron_inductor.task.epilogue import products as named
from ditron_inductor.task.epilogue import text as expression_text
from ditron_inductor.task.exchange import (
    EXCHANGED_OPERAND,
    EXCHANGED_PRODUCT,
    GATHERED_OPERAND,
    GATHERED_PRODUCT,
    REDUCED_PRODUCT,
    SCATTERED_PRODUCT,
    Exchange,
)
from ditron_inductor.task.node import Node, Output, Shape, Shapes, Sizes, Slots, TaskNode, single
from ditron_inductor.task.norms import SHARD_EXTRAS, ShardNorm, by_names, norm_outputs
from ditron_inductor.task.policy import OVERLAPS, STRATEGIES, Policy, check, check_overlap, verify_common

T = TypeVar("T")
REDUCE_OPS: tuple[str, ...] = ("sum", "avg")
MAX_PRODUCTS = 8
"""The most products that a node adds up: each of them is a loop of its own in a kernel."""
MOST_SHOWN = 80
"""Characters of an epilogue in a pattern; the text of the node has all of it."""
APART = 2
"""A product of rows that do not lie together takes the host as long as so many others."""
FEW_PROJECTED_ROWS, MOST_PROJECTED_ROWS = 64, 128
"""The most rows of the tensor of `Projections`, with weights of any width, and at all: one tile of its kernel has as
many.
"""
FEWEST_ALONE = 4 << 20
"""The fewest elements of a weight whose product with a single row is not left to the library: routers have fewer
(Mixtral to DeepSeek V3: up to 1.8 Mi), output projections of large models have more.
"""


class WithEpilogue(Node):
    """A node whose outputs are products, or what an epilogue computes from them."""

    kind: ClassVar[str]
    reduces: ClassVar[bool] = False
    of_experts: ClassVar[bool] = False
    num_extras: int
    epilogue: str

    @property
    def num_operands(self) -> int:
        """The number of products that an epilogue can name. In a reduction this is one, the reduced sum."""
        return 1

    @property
    def parsed(self) -> Epilogue | None:
        """The epilogue, or None if the outputs are the products. Raises `InvalidTaskNode`."""
        if not self.epilogue:
            return None
        try:
            parsed = parse(self.epilogue)
            parsed.verify(self.num_operands, self.num_extras, reduces=self.reduces, of_experts=self.of_experts)
        except InvalidEpilogue as error:
            raise InvalidTaskNode(node=self.kind, field="epilogue", problem=f"is wrong: {error}") from error
        return parsed

    @property
    def num_outputs(self) -> int:
        """The number of outputs, without the gathered tensor and the token."""
        parsed = self.parsed
        return self.num_operands if parsed is None else len(parsed.outputs)

    def verify_epilogue(self) -> None:
        """Checks the epilogue. Raises `InvalidTaskNode`."""
        check(self.num_operands >= 1, self.kind, "num_weights", self.num_operands, "at least one weight")
        unused = 0 if self.parsed is not None else self.num_extras
        check(unused == 0, self.kind, "num_extras", self.num_extras, "0, as there is no epilogue")

    def extra_slots(self) -> Slots:
        return (("extras", self.num_extras),) if self.num_extras else ()

    def made(self, products: Sequence[Shape]) -> list[Output]:
        """Returns what the epilogue computes from products of these shapes; without an epilogue, the products."""
        parsed = self.parsed
        if parsed is None:
            return [Output(tuple(shape)) for shape in products]
        pairs = zip(parsed.outputs, parsed.dtypes(), strict=True)
        return [Output(tuple(products[min(named(output))]), dtype) for output, dtype in pairs]

    @property
    def behind_pattern(self) -> str:
        """What is computed from the products, or from their sum, as text."""
        behind = None if self.parsed is None else self.parsed.behind
        outputs = () if behind is None else behind.outputs
        text = "; ".join(expression_text(output) for output in outputs if not isinstance(output, ProductTerm))
        return f" -> {text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 3] + ' ..'}" if text else ""


class SharedOperand(WithEpilogue):
    """A node that multiplies one tensor by several weights, `weights`, or returns what an epilogue makes of that."""

    num_weights: int

    @property
    def num_operands(self) -> int:
        return self.num_weights


class WithPrologue(SharedOperand, TaskNode):
    """A node that may have a norm in front, which makes the tensor that is multiplied and communicated."""

    prologue: ShardNorm | None

    @property
    def form(self) -> str:
        return f"{self.kind} behind a norm" if self.prologue else self.kind

    def normed_columns(self, sizes: Sizes) -> Any:
        return sizes.k if self.prologue else 0


class SummedMatmul(TaskNode):
    """A node that communicates sum_i a_i @ b_i + bias: a_i [.., K_i], alike but for K_i, b_i [K_i, N], bias a row [N].
    Its operands are `a`, `b`, `bias` if there is one, and the extra tensors of an epilogue.
    """

    plain_fields: ClassVar[Mapping[str, Any]] = {}
    """The fields of the simplest node that have no default, but for the fields that all kinds have."""
    takes_column: ClassVar[bool] = False
    """Whether a bias of matrices may also be a column [M, 1]."""
    num_products: int
    has_bias: bool

    def extra_slots(self) -> Slots:
        return ()

    def slots(self) -> Slots:
        return (*product_slots(self.num_products, self.has_bias), *self.extra_slots())

    def split(self, operands: Sequence[T]) -> tuple[Any, ...]:
        """Returns (first operands, second ones, bias), and the extra tensors where the node may have an epilogue."""
        return split_products(self.num_products, self.has_bias, operands)[:3]

    def verify(self) -> None:
        within = 1 <= self.num_products <= MAX_PRODUCTS
        expected = f"at least one matmul, and at most {MAX_PRODUCTS}"
        check(within, self.kind, "num_products", self.num_products, expected)
        verify_common(self.kind, self.world_size, self.group_name, self.policy)

    @classmethod
    def plain(cls, m: int, n: int, k: int, world_size: int) -> tuple[TaskNode, Shapes]:
        # A dataclass as every kind is: what mypy knows of this base are its annotations.
        made: Any = cls
        node: SummedMatmul = made(**cls.plain_fields, world_size=world_size, group_name="", site="", policy=Policy())
        shapes = {"a": [(m, k)], "b": [(k, n)]}
        if any(size * world_size != whole for size, whole in node.cut(shapes)):
            raise ValueError(f"{cls.kind}: {m} rows do not divide over {world_size} ranks")
        return node, shapes

    def cut(self, shapes: Shapes) -> list[tuple[Any, Any]]:
        """Returns [(its size on one rank, its size in the sum)] if a dimension is scattered, and otherwise []."""
        whole = self.sum_shape(shapes)
        pairs = zip(self.exchanged(whole), whole, strict=True)
        return [(size, of_sum) for size, of_sum in pairs if of_sum > size]

    def timed(self, shapes: Shapes) -> tuple[TaskNode, Shapes] | None:
        return self, shapes

    def sum_shape(self, shapes: Shapes) -> Shape:
        """Returns [.., N], the shape of the sum."""
        return (*shapes["a"][0][:-1], shapes["b"][0][1])

    def contributed(self, shapes: Shapes) -> Shape | None:
        return self.sum_shape(shapes)

    def exchanged(self, shape: Shape) -> Shape:
        """The shape of what a rank has of the sums of all ranks, each of this shape."""
        return shape

    def made(self, products: Sequence[Shape]) -> list[Output]:
        """Returns what the node computes from products of these shapes."""
        return [Output(tuple(shape)) for shape in products]

    def sizes(self, shapes: Shapes) -> Sizes:
        *leading, N = self.sum_shape(shapes)
        return Sizes(math.prod(leading), N, sum(shape[0] for shape in shapes["b"]), "k", (*leading, N))

    def outputs(self, shapes: Shapes) -> list[Output]:
        return self.made([self.exchanged(self.sum_shape(shapes))])

    @property
    def sum_pattern(self) -> str:
        """The matmuls, and what is computed from their sum before it is communicated, as text."""
        matmuls = "matmul" if self.num_products == 1 else f"sum of {self.num_products} matmuls"
        parsed = self.parsed if isinstance(self, WithEpilogue) else None
        before = "" if parsed is None or parsed.pre is None else f" -> {expression_text(parsed.pre)}"
        return matmuls + " + bias" * self.has_bias + before


class ReducedSum(WithEpilogue, SummedMatmul):
    """A sum of products that is reduced over the ranks. With an epilogue the outputs are computed from `mm0`, which is
    out after rounding, and `num_extras` more tensors. A part `pre:` is computed from the sum of products, and its
    result is reduced.
    """

    reduces: ClassVar[bool] = True
    reduce_op: str

    def split(self, operands: Sequence[T]) -> tuple[Any, ...]:
        return split_products(self.num_products, self.has_bias, operands)

    def verify(self) -> None:
        check(self.reduce_op in REDUCE_OPS, self.kind, "reduce_op", self.reduce_op, f"one of {', '.join(REDUCE_OPS)}")
        self.verify_epilogue()
        super().verify()


class LocalProducts(SharedOperand):
    """A node that multiplies one tensor by several weights and communicates nothing: no site."""

    strategy: str

    def verify(self) -> None:
        self.verify_epilogue()
        check(self.strategy in STRATEGIES, self.kind, "strategy", self.strategy, f"one of {', '.join(STRATEGIES)}")


@dataclass(frozen=True)
class Projections(LocalProducts):
    """out_i = x @ weight_i, for every weight i, or what an epilogue makes of them. Nothing is communicated: no site. x
    is [M, K], each out_i [M, N_i]. overlap: as in Policy.
    """

    kind: ClassVar[str] = "projections"
    overlaps: ClassVar[tuple[str, ...]] = OVERLAPS
    ahead: ClassVar[str] = "weights"
    num_weights: int
    num_extras: int = 0
    epilogue: str = ""
    strategy: str = "auto"
    overlap: str = ""

    def slots(self) -> Slots:
        return (("x", None), ("weights", self.num_weights), *self.extra_slots())

    def sizes(self, shapes: Shapes) -> Sizes:
        M, K = shapes["x"]
        return Sizes(M, sum(shape[1] for shape in shapes["weights"]), K, "n", (M, K))

    def outputs(self, shapes: Shapes) -> list[Output]:
        return self.made([(shapes["x"][0], shape[1]) for shape in shapes["weights"]])

    def verify(self) -> None:
        super().verify()
        check_overlap(self.overlap, self.kind, self.overlaps)

    def split(self, operands: Sequence[T]) -> tuple[T, Sequence[T], Sequence[T]]:
        """Returns (x, weights, extra tensors)."""
        end = 1 + self.num_weights
        return operands[0], operands[1:end], operands[end:]


@dataclass(frozen=True)
class AllGatherMatmul(WithPrologue):
    """out_i = all_gather(shard, gather_dim) @ weight_i, for every weight i; one gather feeds them all.

    shard is [.., S, .., K] with S at `gather_dim`, never the last dimension; the gathered tensor is [.., W*S, .., K]
    and each out_i is [rows, N_i] with all dimensions but the last one flattened into rows.

    With an epilogue, the text of task/epilogue.py, the outputs are what it makes of these products and of `num_extras`
    more tensors. With a prologue the shard is what that makes of the first operand. Behind these outputs come the
    gathered tensor, if `return_gathered`, and what the prologue returns.
    """

    kind: ClassVar[str] = "all_gather_matmul"
    exchange: ClassVar[Exchange] = GATHERED_OPERAND
    host_us: ClassVar[Mapping[str, float]] = {"library": 75.0, "chunked": 150.0, "tile": 42.0}
    gather_dim: int
    world_size: int
    group_name: str
    return_gathered: bool
    site: str
    policy: Policy = field(metadata=INLINED)
    num_weights: int
    num_extras: int = 0
    epilogue: str = ""
    prologue: ShardNorm | None = None

    def slices(self, shape: Sequence[int]) -> int:
        return math.prod(shape[: self.gather_dim])

    def more_products(self, shape: Sequence[int]) -> int:
        # One for each weight and source; rows that do not lie together take the host as long as so many products.
        apart = self.slices(shape) > 1
        return self.world_size * (self.num_weights * (APART if apart else 1) - 1)

    def slots(self) -> Slots:
        prologue = () if self.prologue is None else single(self.prologue.extras)
        return (("shard", None), ("weights", self.num_weights), *self.extra_slots(), *prologue)

    @property
    def pattern(self) -> str:
        prologue = self.prologue
        norm = ""
        if prologue is not None:
            norm = "x + residual -> " * ("residual" in prologue.extras) + f"{prologue.norm.form} norm -> "
        matmuls = "matmul" if self.num_weights == 1 else f"{self.num_weights} matmuls"
        used = ", gathered used" * self.return_gathered
        return f"{norm}all_gather(dim {self.gather_dim}) -> {matmuls}{self.behind_pattern}{used}"

    @classmethod
    def plain(cls, m: int, n: int, k: int, world_size: int) -> tuple[TaskNode, Shapes]:
        if m % world_size:
            raise ValueError(f"{cls.kind}: {m} rows do not divide over {world_size} ranks")
        node = cls(0, world_size, "", return_gathered=False, site="", policy=Policy(), num_weights=1)
        return node, {"shard": (m // world_size, k), "weights": [(k, n)]}

    def timed(self, shapes: Shapes) -> tuple[TaskNode, Shapes] | None:
        node = replace(self, return_gathered=False, prologue=None)
        return node, {name: shapes[name] for name, _ in node.slots()}

    def sizes(self, shapes: Shapes) -> Sizes:
        shard = shapes["shard"]
        n = sum(shape[1] for shape in shapes["weights"])
        return Sizes(self.world_size * math.prod(shard[:-1]), n, shard[-1], "n", tuple(shard))

    def outputs(self, shapes: Shapes) -> list[Output]:
        gathered = with_size(shapes["shard"], self.gather_dim, lambda size: size * self.world_size)
        rows = math.prod(gathered[:-1])
        found = self.made([(rows, shape[1]) for shape in shapes["weights"]])
        found += [Output(tuple(gathered))] * self.return_gathered
        return found + ([] if self.prologue is None else norm_outputs(self.prologue.returned, shapes["shard"]))

    def split(self, operands: Sequence[T]) -> tuple[T, Sequence[T], Sequence[T], Sequence[T | None]]:
        """Returns (shard, weights, extra tensors, tensors of the norm in front, see `SHARD_EXTRAS`)."""
        weights = 1 + self.num_weights
        extras = weights + self.num_extras
        given: Sequence[T | None] = ()
        if self.prologue is not None:
            given = by_names(SHARD_EXTRAS, self.prologue.extras, operands[extras:])
        return operands[0], operands[1:weights], operands[weights:extras], given

    def verify(self) -> None:
        check(self.gather_dim >= 0, self.kind, "gather_dim", self.gather_dim, "a dimension, 0 or more")
        self.verify_epilogue()
        if self.prologue is not None:
            self.prologue.verify(self.kind)
        verify_common(self.kind, self.world_size, self.group_name, self.policy)


@dataclass(frozen=True)
class MatmulReduceScatter(ReducedSum):
    """out = reduce_scatter(sum_i a_i @ b_i + bias): rank r keeps the r-th of W equal chunks of `scatter_dim`.

    a_i is [.., W*S, .., K_i], b_i is [K_i, N], out is [.., S, .., N]; `scatter_dim` is never the last dimension. A bias
    is a row [N], or for matrices a column [W*S, 1]; every rank adds its own bias before the reduction. For an epilogue
    see `ReducedSum`.
    """

    kind: ClassVar[str] = "matmul_reduce_scatter"
    plain_fields: ClassVar[Mapping[str, Any]] = {"scatter_dim": 0, "reduce_op": "sum"}
    takes_column: ClassVar[bool] = True
    exchange: ClassVar[Exchange] = SCATTERED_PRODUCT
    host_us: ClassVar[Mapping[str, float]] = {"library": 75.0, "chunked": 210.0, "tile": 36.0}
    scatter_dim: int
    reduce_op: str
    world_size: int
    group_name: str
    site: str
    policy: Policy = field(metadata=INLINED)
    num_products: int = 1
    has_bias: bool = False
    num_extras: int = 0
    epilogue: str = ""

    def slices(self, shape: Sequence[int]) -> int:
        return math.prod(shape[: self.scatter_dim])

    @property
    def pattern(self) -> str:
        scattered = f"reduce_scatter({self.reduce_op}, dim {self.scatter_dim})"
        return f"{self.sum_pattern} -> {scattered}{self.behind_pattern}"

    def exchanged(self, shape: Shape) -> Shape:
        return with_size(shape, self.scatter_dim, lambda size: size // self.world_size)

    def verify(self) -> None:
        check(self.scatter_dim >= 0, self.kind, "scatter_dim", self.scatter_dim, "a dimension, 0 or more")
        super().verify()


@dataclass(frozen=True)
class MatmulAllReduce(ReducedSum):
    """out = all_reduce(sum_i a_i @ b_i + bias), bit-identical on every rank.

    a_i is [.., K_i], b_i is [K_i, N], out is [.., N]. A bias is a row [N]; every rank adds its own bias before the
    reduction. For an epilogue see `ReducedSum`; its outputs are bit-identical if its extra tensors are.
    """

    kind: ClassVar[str] = "matmul_all_reduce"
    plain_fields: ClassVar[Mapping[str, Any]] = {"reduce_op": "sum"}
    exchange: ClassVar[Exchange] = REDUCED_PRODUCT
    host_us: ClassVar[Mapping[str, float]] = {"library": 70.0, "chunked": 500.0, "tile": 36.0}
    reduce_op: str
    world_size: int
    group_name: str
    site: str
    policy: Policy = field(metadata=INLINED)
    num_products: int = 1
    has_bias: bool = False
    num_extras: int = 0
    epilogue: str = ""

    @property
    def pattern(self) -> str:
        return f"{self.sum_pattern} -> all_reduce({self.reduce_op}){self.behind_pattern}"

    def sizes(self, shapes: Shapes) -> Sizes:
        found = super().sizes(shapes)
        # Rows are reduced as they are, however many dimensions they have.
        return replace(found, wire=(found.m, found.n))


@dataclass(frozen=True)
class MatmulAllGather(SummedMatmul):
    """out = all_gather(sum_i a_i @ b_i + bias, gather_dim): the sums of all ranks, in rank order, along `gather_dim`.
    a_i is [.., K_i], b_i is [K_i, N], and a bias is a row [N]. The sum [.., N] has the same shape on every rank, and
    `gather_dim` is any of its dimensions.
    """

    kind: ClassVar[str] = "matmul_all_gather"
    # A product is gathered by columns, as a column-parallel layer's is.
    plain_fields: ClassVar[Mapping[str, Any]] = {"gather_dim": 1}
    exchange: ClassVar[Exchange] = GATHERED_PRODUCT
    host_us: ClassVar[Mapping[str, float]] = {"library": 80.0, "tile": 42.0}
    # `chunked` was never the fastest (docs/deleted.md).
    strategies: ClassVar[tuple[str, ...]] = ("library", "tile")
    gather_dim: int
    world_size: int
    group_name: str
    site: str
    policy: Policy = field(metadata=INLINED)
    num_products: int = 1
    has_bias: bool = False

    @property
    def pattern(self) -> str:
        return f"{self.sum_pattern} -> all_gather(dim {self.gather_dim})"

    def exchanged(self, shape: Shape) -> Shape:
        return with_size(shape, self.gather_dim, lambda size: size * self.world_size)

    def verify(self) -> None:
        check(self.gather_dim >= 0, self.kind, "gather_dim", self.gather_dim, "a dimension, 0 or more")
        super().verify()


@dataclass(frozen=True)
class MatmulAllToAll(SummedMatmul):
    """out = all_to_all(sum_i a_i @ b_i + bias): this rank's columns of every rank's product, in rank order. a_i is [..,
    S, .., K_i] with S at `gather_dim`, which is never the last dimension. b_i is [K_i, N], and a bias is a row [N],
    with N = parts * W * C. out is [.., W*S, .., parts * C].
    """

    kind: ClassVar[str] = "matmul_all_to_all"
    plain_fields: ClassVar[Mapping[str, Any]] = {"gather_dim": 0, "parts": 1}
    exchange: ClassVar[Exchange] = EXCHANGED_PRODUCT
    host_us: ClassVar[Mapping[str, float]] = {"library": 90.0, "chunked": 210.0, "tile": 42.0}
    gather_dim: int
    parts: int
    world_size: int
    group_name: str
    site: str
    policy: Policy = field(metadata=INLINED)
    num_products: int = 1
    has_bias: bool = False

    @property
    def pattern(self) -> str:
        return f"{self.sum_pattern} -> all_to_all(columns to dim {self.gather_dim})"

    def exchanged(self, shape: Shape) -> Shape:
        return ulysses.gathered_shape(shape, shape[-1], self.gather_dim, self.world_size)

    def verify(self) -> None:
        check(self.gather_dim >= 0, self.kind, "gather_dim", self.gather_dim, "a dimension, 0 or more")
        check(self.parts >= 1, self.kind, "parts", self.parts, "at least one part")
        super().verify()


@dataclass(frozen=True)
class AllToAllMatmul(TaskNode):
    """out = received @ weight, received = all_to_all(x): of every rank's x, in rank order as columns, this rank's rows.
    x [.., W*S, .., parts * C] with W*S at `scatter_dim`, never the last dimension; received [.., S, .., K] with K =
    parts * W * C, weight [K, N], out [rows, N] with all dimensions of received but the last one flattened into rows.
    received is returned too, if `return_received`.
    """

    kind: ClassVar[str] = "all_to_all_matmul"
    exchange: ClassVar[Exchange] = EXCHANGED_OPERAND
    host_us: ClassVar[Mapping[str, float]] = {"library": 90.0, "chunked": 210.0, "tile": 42.0}
    scatter_dim: int
    parts: int
    return_received: bool
    world_size: int
    group_name: str
    site: str
    policy: Policy = field(metadata=INLINED)

    @property
    def pattern(self) -> str:
        received = ", received used" * self.return_received
        return f"all_to_all(dim {self.scatter_dim} to columns) -> matmul{received}"

    def timed(self, shapes: Shapes) -> tuple[TaskNode, Shapes] | None:
        return replace(self, return_received=False), shapes

    def sizes(self, shapes: Shapes) -> Sizes:
        x = shapes["x"]
        m = math.prod(x[:-1]) // self.world_size
        return Sizes(m, shapes["weight"][1], x[-1] * self.world_size, "n", tuple(x))

    def outputs(self, shapes: Shapes) -> list[Output]:
        received = ulysses.received_shape(shapes["x"], self.scatter_dim, self.world_size)
        product = Output((math.prod(received[:-1]), shapes["weight"][1]))
        return [product, *[Output(tuple(received))] * self.return_received]

    def slots(self) -> Slots:
        return single(("x", "weight"))

    def split(self, operands: Sequence[T]) -> tuple[T, T]:
        """Returns (x, weight)."""
        return operands[0], operands[1]

    def verify(self) -> None:
        check(self.scatter_dim >= 0, self.kind, "scatter_dim", self.scatter_dim, "a dimension, 0 or more")
        check(self.parts >= 1, self.kind, "parts", self.parts, "at least one part")
        verify_common(self.kind, self.world_size, self.group_name, self.policy)


def with_size(shape: Shape, dim: int, change: Callable[[Any], Any]) -> Shape:
    """The shape with another size of one dimension."""
    return tuple(change(size) if index == dim else size for index, size in enumerate(shape))


def product_slots(num_products: int, has_bias: bool, bias: str = "bias") -> Slots:
    return (("a", num_products), ("b", num_products), *((bias, None),) * has_bias)


def split_products(
    num_products: int, has_bias: bool, operands: Sequence[T]
) -> tuple[Sequence[T], Sequence[T], T | None, Sequence[T]]:
    """Returns (first operands, second operands, bias, the operands behind them) of a sum of products."""
    products = 2 * num_products
    bias = operands[products] if has_bias else None
    return operands[:num_products], operands[num_products:products], bias, operands[products + has_bias :]
