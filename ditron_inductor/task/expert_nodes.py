"""The node kinds of a mixture of experts: the choice of its experts, its matmuls for few tokens, the sum of what the
experts return, and the reduction of that sum over the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from ditron_inductor.task.codec import INLINED
from ditron_inductor.task.exchange import REDUCED_PRODUCT, SCATTERED_PRODUCT, Exchange
from ditron_inductor.task.matmul_nodes import REDUCE_OPS, LocalProducts
from ditron_inductor.task.node import Node, Output, Shape, Shapes, Sizes, Slots, TaskNode, parted, single
from ditron_inductor.task.policy import STRATEGIES, Policy, check, verify_common

T = TypeVar("T")


class ProductsOfExperts(LocalProducts):
    """A node that multiplies rows by the weights [E, K, N_i] of the experts that they are for. If `interleaved`, there
    are two products and one weight [E, K, 2 N]. Its even columns are weight_0, its odd ones weight_1.
    """

    of_experts: ClassVar[bool] = True
    interleaved: bool

    @property
    def has_zeros(self) -> bool:
        """Whether the rows of slots whose expert is elsewhere, by the operand `experts`, are 0 in all outputs."""
        return False

    def verify(self) -> None:
        right = not self.interleaved or self.num_weights == 2
        check(right, self.kind, "num_weights", self.num_weights, "2, as these are the columns of one weight in turns")
        super().verify()

    @property
    def num_stored(self) -> int:
        """The number of operands that are weights."""
        return 1 if self.interleaved else self.num_weights

    def widths(self, weights: Sequence[Shape]) -> list[Any]:
        """Returns the numbers of columns of the products, from the shapes of the weights."""
        return [weights[0][2] // 2] * 2 if self.interleaved else [shape[2] for shape in weights]


@dataclass(frozen=True)
class ExpertProjections(ProductsOfExperts):
    """out_i[s] = x[row of s] @ weight_i[experts[s]] for every slot s and every weight i, or what an epilogue makes of
    that. A slot is a token's use of one expert; each of the T tokens has `top_k` of them. No site. experts is int64 [T
    * top_k], token by token, and the experts of one token differ. x is [T, K] if `by_token`: all slots of a token have
    its row. Otherwise x is [T * top_k, K], with a row for each slot. weight_i is [E, K, N_i], a matrix for each of E
    experts, and out_i [T * top_k, N_i].

    If `has_absent`, slots may also name E or more, as under expert parallelism those of other ranks' experts do. Such a
    slot has zeros in all outputs, whatever the epilogue is.
    """

    kind: ClassVar[str] = "expert_projections"
    top_k: int
    by_token: bool
    num_weights: int
    num_extras: int = 0
    epilogue: str = ""
    strategy: str = "auto"
    has_absent: bool = False
    interleaved: bool = False

    @property
    def has_zeros(self) -> bool:
        return self.has_absent

    def verify(self) -> None:
        check(self.top_k >= 1, self.kind, "top_k", self.top_k, "at least one expert for each token")
        super().verify()

    def slots(self) -> Slots:
        return (("x", None), ("experts", None), ("weights", self.num_stored), *self.extra_slots())

    def sizes(self, shapes: Shapes) -> Sizes:
        S, K = shapes["experts"][0], shapes["x"][1]
        return Sizes(S, sum(shape[2] for shape in shapes["weights"]), K, "n", (S, K))

    def outputs(self, shapes: Shapes) -> list[Output]:
        return self.made([(shapes["experts"][0], width) for width in self.widths(shapes["weights"])])

    def split(self, operands: Sequence[T]) -> tuple[T, T, Sequence[T], Sequence[T]]:
        """Returns (x, experts, weights, extra tensors)."""
        end = 2 + self.num_stored
        return operands[0], operands[1], operands[2:end], operands[end:]


@dataclass(frozen=True)
class GroupedProjections(ProductsOfExperts):
    """out_i[s] = x[rows[s]] @ weight_i[expert of s] for every slot s and every weight i, or what an epilogue makes of
    that. A slot is a token's use of one expert. No site. x is [T, K], rows int64 [S], and weight_i [E, K, N_i], a
    matrix for each of E experts. The slots are sorted by expert: ends is int32 [E], and those of expert e end before
    slot ends[e]. out_i is [S, N_i]; what it holds behind the last end is not defined. A negative row counts from the
    end.
    """

    kind: ClassVar[str] = "grouped_projections"
    num_weights: int
    num_extras: int = 0
    epilogue: str = ""
    strategy: str = "auto"
    interleaved: bool = False

    def slots(self) -> Slots:
        return (("x", None), ("rows", None), ("ends", None), ("weights", self.num_stored), *self.extra_slots())

    def sizes(self, shapes: Shapes) -> Sizes:
        S, K = shapes["rows"][0], shapes["x"][1]
        return Sizes(S, sum(shape[2] for shape in shapes["weights"]), K, "n", (S, K))

    def outputs(self, shapes: Shapes) -> list[Output]:
        return self.made([(shapes["rows"][0], width) for width in self.widths(shapes["weights"])])

    def split(self, operands: Sequence[T]) -> tuple[T, T, T, Sequence[T], Sequence[T]]:
        """Returns (x, rows, ends, weights, extra tensors)."""
        x, rows, ends, *others = operands
        return x, rows, ends, others[: self.num_stored], others[self.num_stored :]


SCORES = ("softmax", "logits")
"""What experts are chosen by: the softmax of a token's logits in fp32, or the logits."""


@dataclass(frozen=True)
class ChooseExperts(Node):
    """(values, experts), both [T, top_k]: the largest `scores` of each token and the places of these, the largest one
    first, of equal ones the left one, and 0.0 before -0.0. Nothing is communicated: no site.

    The logits [T, E] are x [T, K] @ router [K, E], plus a bias [E] if there is one, rounded to the dtype of x. A NaN is
    the largest score. values has fp32 for `softmax`, else the dtype of x. If `normalised`, they are divided by their
    sum over a token's experts, in fp32. experts is int64.
    """

    kind: ClassVar[str] = "choose_experts"
    top_k: int
    scores: str
    normalised: bool = False
    has_bias: bool = False
    strategy: str = "auto"

    @property
    def pattern(self) -> str:
        logits = "router's logits" + " with biases" * self.has_bias
        chosen = f"the {self.top_k} largest" + " by their sum" * self.normalised
        return f"{logits} -> softmax -> {chosen}" if self.scores == "softmax" else f"{logits} -> {chosen}"

    def verify(self) -> None:
        check(self.top_k >= 1, self.kind, "top_k", self.top_k, "at least one expert for each token")
        check(self.scores in SCORES, self.kind, "scores", self.scores, f"one of {', '.join(SCORES)}")
        right = not self.normalised or self.scores == "softmax"
        check(right, self.kind, "normalised", self.normalised, "False, as only a softmax is positive")
        check(self.strategy in STRATEGIES, self.kind, "strategy", self.strategy, f"one of {', '.join(STRATEGIES)}")

    def slots(self) -> Slots:
        return single(("x", "router", *("bias",) * self.has_bias))

    def sizes(self, shapes: Shapes) -> Sizes:
        T, K = shapes["x"]
        return Sizes(T, shapes["router"][1], K, "n", (T, K))

    def outputs(self, shapes: Shapes) -> list[Output]:
        shape = shapes["x"][0], self.top_k
        return [Output(shape, "fp32" if self.scores == "softmax" else ""), Output(shape, "int64")]

    def split(self, operands: Sequence[T]) -> tuple[Any, ...]:
        """Returns (x, router, bias or None)."""
        return parted(self, operands, ("x", "router", "bias"))


MOST_EXPERT_TOKENS = 64
"""The most tokens of `ExpertProjections` whose rows, of any expert, are in one tile of its kernel."""

MOST_ORDERED_TOKENS = 511
"""The most tokens of `ExpertProjections` by a kernel. More than MOST_EXPERT_TOKENS are ordered by expert first."""


MOST_SLOTS_OF_AN_EXPERT = 32
"""The most slots of an expert, in the mean, for which calls were measured to be faster than torch's sort and grouped
matmuls. Two H200s, two layers of Mixtral 8x7B in CUDA graphs: 0.885 against 1.004 ms with 32 slots, and 1.239 against
1.183 ms with 64.
"""


def most_expert_tokens(strategy: str, top_k: int, num_experts: int) -> int:
    """Returns the most tokens whose grouped matmuls the passes make an `ExpertProjections` of. The strategy `tile`
    takes all that its kernel takes.
    """
    if strategy == "tile":
        return MOST_ORDERED_TOKENS
    few = MOST_SLOTS_OF_AN_EXPERT * num_experts // top_k
    return min(max(few, MOST_EXPERT_TOKENS), MOST_ORDERED_TOKENS)


@dataclass(frozen=True)
class CombineExperts(Node):
    """out[t] = added[t] + sum_j scale[s] * products[s] with s = places[t * top_k + j]. j counts the `top_k` experts
    that token t takes. A slot is a token's use of one expert; there are S = T * top_k of them. Nothing is communicated:
    no site.

    products [S, N] is what the experts return, sorted in any way. places is int64 [S], token by token; a negative place
    counts from the end. If `in_order`, the products lie token by token, and there are no places. scale is a
    floating-point [S]. absent, a bool [S] if there is one, marks slots whose products count as 0: under expert
    parallelism those of other ranks' experts. added [T, N], if there is one, is what an expert returns that all tokens
    use, in the dtype of products, as out [T, N] is. The sum is made in fp32 and rounded once.

    If the experts have biases, products[s] + bias[experts[s]], rounded to its dtype, stands in the place of
    products[s]. bias [E, N] has the dtype of products, and experts is int64 [S]; both count from the end if negative.
    """

    kind: ClassVar[str] = "combine_experts"
    top_k: int
    has_added: bool = False
    has_absent: bool = False
    has_bias: bool = False
    strategy: str = "auto"
    in_order: bool = False

    @property
    def pattern(self) -> str:
        of_ranks = "of a rank's" if self.has_absent else "of"
        experts = f"{self.top_k} experts" + " with biases" * self.has_bias
        return f"weighted sum {of_ranks} {experts}" + " + all tokens' expert" * self.has_added

    def verify(self) -> None:
        check(self.top_k >= 1, self.kind, "top_k", self.top_k, "at least one expert for each token")
        check(self.strategy in STRATEGIES, self.kind, "strategy", self.strategy, f"one of {', '.join(STRATEGIES)}")

    def slots(self) -> Slots:
        return single(("products", *summed_slots(self), *BIASED * self.has_bias))

    def sizes(self, shapes: Shapes) -> Sizes:
        return Sizes(*self._summed(shapes), self.top_k, "n", shapes["products"])

    def outputs(self, shapes: Shapes) -> list[Output]:
        return [Output(self._summed(shapes))]

    def split(self, operands: Sequence[T]) -> tuple[Any, ...]:
        """Returns (products, places or None, scale, absent or None, added or None, bias or None, experts or None)."""
        return parted(self, operands, ("products", *SUMMED, *BIASED))

    def _summed(self, shapes: Shapes) -> tuple[Any, Any]:
        """Returns (T, N), the shape of the sum."""
        return shapes["products"][0] // self.top_k, shapes["products"][1]


SUMMED = ("places", "scale", "absent", "added")
"""The operands of a sum of slots, beside the products."""
SECOND = ("second_x", "second_weight")
"""The operands of the second one of two products that are added."""
BIASED = ("bias", "experts")
"""The operands by which a sum of slots adds biases to the products."""


def summed_slots(node: CombineExperts | ReducedExperts) -> tuple[str, ...]:
    """Returns the names of those of SUMMED that a node has."""
    places = () if isinstance(node, CombineExperts) and node.in_order else ("places",)
    return (*places, "scale", *("absent",) * node.has_absent, *("added",) * node.has_added)


class ReducedExperts(TaskNode):
    """The sum that `CombineExperts` describes, of products = x @ weight[expert of the slot], reduced over the ranks. x
    [S, K] is sorted by expert; weight is [E, K, N]. ends is int32 [E]: the slots of expert e end before slot ends[e]. A
    rank has its own slice of K, and its routing may differ from that of its peers. If `has_second`, products = x @
    weight[expert] + second_x @ second_weight[expert], with second operands of the same shapes and dtypes, as the
    gradients of rows that two weights multiply have it. If there is a bias [E, N], in the dtype of x, the bias of its
    expert is added to each product, and the sum is rounded, as the product was before. The products [S, N], with their
    biases, are a second output if `returns_products`, as a backward reads them.
    """

    # No table has times of it.
    computes: ClassVar[str] = "experts"
    host_us: ClassVar[Mapping[str, float]] = {"library": 120.0, "tile": 40.0}
    strategies: ClassVar[tuple[str, ...]] = ("library", "tile")
    reduce_op: str
    top_k: int
    has_added: bool
    has_absent: bool
    has_bias: bool
    returns_products: bool
    has_second: bool

    @property
    def scatters(self) -> bool:
        """Whether a rank gets its own tokens only."""
        return self.exchange == SCATTERED_PRODUCT

    @property
    def num_products(self) -> int:
        """The matmuls whose products are added."""
        return 1 + self.has_second

    @property
    def runs(self) -> int:
        """Returns in how many runs the tokens of a rank lie."""
        return 1

    @property
    def sums(self) -> CombineExperts:
        """The sum of the products as a node of its own. Products that are returned have their biases already."""
        return CombineExperts(self.top_k, self.has_added, self.has_absent, self.has_bias and not self.returns_products)

    @property
    def grouped_pattern(self) -> str:
        """The products and their sum as text."""
        details = ", biases" * self.has_bias + ", products used" * self.returns_products
        matmuls = "sum of 2 grouped matmuls" if self.has_second else "grouped matmul"
        return f"{matmuls}{details} -> {CombineExperts(self.top_k, self.has_added, self.has_absent).pattern}"

    def verify(self) -> None:
        self.sums.verify()
        check(self.reduce_op in REDUCE_OPS, self.kind, "reduce_op", self.reduce_op, f"one of {', '.join(REDUCE_OPS)}")
        verify_common(self.kind, self.world_size, self.group_name, self.policy)

    def slots(self) -> Slots:
        optional = (*SECOND * self.has_second, *("bias",) * self.has_bias)
        return single(("x", "weight", "ends", *optional, *summed_slots(self)))

    def summed(self, shapes: Shapes) -> tuple[Any, Any]:
        """Returns (T, N), the shape of the sum."""
        return shapes["places"][0] // self.top_k, shapes["weight"][2]

    def kept(self, shapes: Shapes) -> list[Output]:
        """Returns the products as outputs."""
        return [Output((shapes["x"][0], shapes["weight"][2]))] * self.returns_products

    def contributed(self, shapes: Shapes) -> tuple[Any, ...]:
        return self.summed(shapes)

    def sizes(self, shapes: Shapes) -> Sizes:
        # As many operations, and the bytes of the reduction.
        K = self.num_products * self.top_k * shapes["x"][1]
        return Sizes(*self.summed(shapes), K, "k", self.contributed(shapes))

    def split(self, operands: Sequence[T]) -> tuple[Any, ...]:
        """Returns (x, weight, ends, (second_x, second_weight), bias, places, scale, absent, added), and None for what
        there is not.
        """
        x, weight, ends, *others = parted(self, operands, ("x", "weight", "ends", *SECOND, "bias", *SUMMED))
        second, others = tuple(others[: len(SECOND)]), others[len(SECOND) :]
        return x, weight, ends, second if self.has_second else None, *others


@dataclass(frozen=True)
class GroupedMatmulAllReduce(ReducedExperts):
    """out = all_reduce(the sum [T, N] that `ReducedExperts` describes), bit-identical on every rank."""

    kind: ClassVar[str] = "grouped_matmul_all_reduce"
    exchange: ClassVar[Exchange] = REDUCED_PRODUCT
    reduce_op: str
    top_k: int
    world_size: int
    group_name: str
    site: str
    policy: Policy = field(metadata=INLINED)
    has_added: bool = False
    has_absent: bool = False
    has_bias: bool = False
    returns_products: bool = False
    has_second: bool = False

    @property
    def pattern(self) -> str:
        return f"{self.grouped_pattern} -> all_reduce({self.reduce_op})"

    def outputs(self, shapes: Shapes) -> list[Output]:
        return [Output(self.summed(shapes)), *self.kept(shapes)]


@dataclass(frozen=True)
class GroupedMatmulReduceScatter(ReducedExperts):
    """out = rank r's rows of the reduction of the sum [T, N] that `ReducedExperts` describes. The rows of a rank are
    the r-th of W equal chunks of each of `outer` equal runs, such as the sequences of a batch; out is [T / W, N].
    """

    kind: ClassVar[str] = "grouped_matmul_reduce_scatter"
    exchange: ClassVar[Exchange] = SCATTERED_PRODUCT
    reduce_op: str
    top_k: int
    world_size: int
    group_name: str
    site: str
    policy: Policy = field(metadata=INLINED)
    has_added: bool = False
    has_absent: bool = False
    has_bias: bool = False
    returns_products: bool = False
    outer: int = 1
    has_second: bool = False

    @property
    def pattern(self) -> str:
        return f"{self.grouped_pattern} -> reduce_scatter({self.reduce_op})"

    def verify(self) -> None:
        super().verify()
        check(self.outer >= 1, self.kind, "outer", self.outer, "at least one run of rows")

    def contributed(self, shapes: Shapes) -> tuple[Any, ...]:
        T, N = self.summed(shapes)
        return self.outer, T // self.outer, N

    def slices(self, shape: Sequence[int]) -> int:
        return self.outer

    @property
    def runs(self) -> int:
        return self.outer

    def outputs(self, shapes: Shapes) -> list[Output]:
        T, N = self.summed(shapes)
        return [Output((T // self.world_size, N)), *self.kept(shapes)]
