"""The node kinds of the Task level: frozen dataclasses that know their fields, their legality and their text.

A node holds everything that a site needs at run time, except its tensors: a cached graph skips every pass, so
nothing may be looked up elsewhere. `verify()` raises `InvalidTaskNode` naming the field. `text()` is one line
that never changes for equal nodes: tests and `explain` compare and print it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from ditron_inductor.errors import InvalidEpilogue, InvalidTaskNode
from ditron_inductor.task.all_gather_attention import AllGatherAttention, AttentionReduceScatter
from ditron_inductor.task.codec import INLINED
from ditron_inductor.task.epilogue import Epilogue, parse
from ditron_inductor.task.node import Node, Slots, single
from ditron_inductor.task.policy import STRATEGIES as STRATEGIES
from ditron_inductor.task.policy import Policy as Policy
from ditron_inductor.task.policy import check, verify_common
from ditron_inductor.task.ulysses import AllToAllMatmul, MatmulAllToAll

T = TypeVar("T")
REDUCE_OPS: tuple[str, ...] = ("sum", "avg")
MAX_PRODUCTS = 8
"""Of one reduction: each of them is a loop of its own in a kernel."""


class WithEpilogue(Node):
    """A node whose outputs are products, or what an epilogue makes of them."""

    kind: ClassVar[str]
    reduces: ClassVar[bool] = False
    num_extras: int
    epilogue: str

    @property
    def num_operands(self) -> int:
        """How many products an epilogue can name: of a reduction one, the reduced sum."""
        return 1

    @property
    def parsed(self) -> Epilogue | None:
        """The epilogue, or None where the outputs are the products. Raises `InvalidTaskNode`."""
        if not self.epilogue:
            return None
        try:
            parsed = parse(self.epilogue)
            parsed.verify(self.num_operands, self.num_extras, reduces=self.reduces)
        except InvalidEpilogue as error:
            raise InvalidTaskNode(node=self.kind, field="epilogue", problem=f"is wrong: {error}") from error
        return parsed

    @property
    def num_outputs(self) -> int:
        """Without the gathered tensor and the token."""
        parsed = self.parsed
        return self.num_operands if parsed is None else len(parsed.outputs)

    def verify_epilogue(self) -> None:
        """Raises `InvalidTaskNode`."""
        check(self.num_operands >= 1, self.kind, "num_weights", self.num_operands, "at least one weight")
        unused = 0 if self.parsed is not None else self.num_extras
        check(unused == 0, self.kind, "num_extras", self.num_extras, "0, as there is no epilogue")

    def _extra_slots(self) -> Slots:
        return (("extras", self.num_extras),) if self.num_extras else ()


@dataclass(frozen=True)
class Projections(WithEpilogue):
    """out_i = x @ weight_i, for every weight i, or what an epilogue makes of them. Nothing is communicated: no site.

    x is [M, K], each out_i [M, N_i].
    """

    kind: ClassVar[str] = "projections"
    num_weights: int
    num_extras: int = 0
    epilogue: str = ""
    strategy: str = "auto"

    @property
    def num_operands(self) -> int:
        return self.num_weights

    def verify(self) -> None:
        self.verify_epilogue()
        check(self.strategy in STRATEGIES, self.kind, "strategy", self.strategy, f"one of {', '.join(STRATEGIES)}")

    def slots(self) -> Slots:
        return (("x", None), ("weights", self.num_weights), *self._extra_slots())

    def split(self, operands: Sequence[T]) -> tuple[T, Sequence[T], Sequence[T]]:
        """(x, weights, extra tensors)."""
        end = 1 + self.num_weights
        return operands[0], operands[1:end], operands[end:]


@dataclass(frozen=True)
class AllGatherMatmul(WithEpilogue):
    """out_i = all_gather(shard, gather_dim) @ weight_i, for every weight i; one gather feeds them all.

    shard is [.., S, .., K] with S at `gather_dim`, never the last dimension; the gathered tensor is [.., W*S,
    .., K] and each out_i is [rows, N_i] with all dimensions but the last one flattened into rows.

    With an epilogue, the text of task/epilogue.py, the outputs are what it makes of these products and of `num_extras`
    more tensors. With a prologue the shard is what that makes of the first operand.
    """

    kind: ClassVar[str] = "all_gather_matmul"
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

    @property
    def num_operands(self) -> int:
        return self.num_weights

    def slots(self) -> Slots:
        prologue = () if self.prologue is None else single(self.prologue.extras)
        return (("shard", None), ("weights", self.num_weights), *self._extra_slots(), *prologue)

    def split(self, operands: Sequence[T]) -> tuple[T, Sequence[T], Sequence[T], Sequence[T | None]]:
        """(shard, weights, extra tensors, those of the norm in front: see `SHARD_EXTRAS`)."""
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
class MatmulReduceScatter(WithEpilogue):
    """out = reduce_scatter(sum_i a_i @ b_i + bias): rank r keeps the r-th of W equal chunks of `scatter_dim`.

    a_i is [.., W*S, .., K_i], b_i is [K_i, N], out is [.., S, .., N]; `scatter_dim` is never the last dimension. bias,
    where there is one, is a row [N], or of matrices a column [W*S, 1]; every rank adds its own before the reduction.

    With an epilogue the outputs are what it makes of `mm0`, which is out, rounded, and of `num_extras` more tensors;
    with a part `pre:` what is reduced is what that makes of the sum of products.
    """

    kind: ClassVar[str] = "matmul_reduce_scatter"
    reduces: ClassVar[bool] = True
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

    def slots(self) -> Slots:
        return (*_product_slots(self.num_products, self.has_bias), *self._extra_slots())

    def split(self, operands: Sequence[T]) -> tuple[Sequence[T], Sequence[T], T | None, Sequence[T]]:
        """(first operands, second ones, bias, extra tensors)."""
        return split_products(self.num_products, self.has_bias, operands)

    def verify(self) -> None:
        check(self.scatter_dim >= 0, self.kind, "scatter_dim", self.scatter_dim, "a dimension, 0 or more")
        _verify_reduction(self.kind, self.reduce_op, self.num_products)
        self.verify_epilogue()
        verify_common(self.kind, self.world_size, self.group_name, self.policy)


@dataclass(frozen=True)
class MatmulAllReduce(WithEpilogue):
    """out = all_reduce(sum_i a_i @ b_i + bias), bit-identical on every rank.

    a_i is [.., K_i], b_i is [K_i, N], out is [.., N]. bias, where there is one, is a row [N]; every rank adds its own
    before the reduction.

    With an epilogue the outputs are what it makes of `mm0`, which is out, rounded, and of `num_extras` more tensors:
    bit-identical wherever these are. With a part `pre:` what is reduced is what that makes of the sum of products.
    """

    kind: ClassVar[str] = "matmul_all_reduce"
    reduces: ClassVar[bool] = True
    reduce_op: str
    world_size: int
    group_name: str
    site: str
    policy: Policy = field(metadata=INLINED)
    num_products: int = 1
    has_bias: bool = False
    num_extras: int = 0
    epilogue: str = ""

    def slots(self) -> Slots:
        return (*_product_slots(self.num_products, self.has_bias), *self._extra_slots())

    def split(self, operands: Sequence[T]) -> tuple[Sequence[T], Sequence[T], T | None, Sequence[T]]:
        """(first operands, second ones, bias, extra tensors)."""
        return split_products(self.num_products, self.has_bias, operands)

    def verify(self) -> None:
        _verify_reduction(self.kind, self.reduce_op, self.num_products)
        self.verify_epilogue()
        verify_common(self.kind, self.world_size, self.group_name, self.policy)


@dataclass(frozen=True)
class Norm:
    """A normalisation of rows [.., N], computed in fp32: scaled = (x - mean) / sqrt(variance + eps), as a `layer` norm
    does, or x / sqrt(mean of x * x + eps) (`rms`); then scaled * weight + shift.

    plus_one: the weight counts as 1 + weight. round_first: scaled is rounded to the dtype of x first, as in Llama. The
    form `none` stands for no norm at all, behind a reduction whose rows have one of their own, `post`.
    """

    form: str = "rms"
    eps: float = 1e-6
    plus_one: bool = False
    round_first: bool = False

    def verify(self, kind: str) -> None:
        check(self.form in NORMS, kind, "norm", self.form, f"one of {', '.join(NORMS)}")
        check(0.0 <= self.eps < math.inf, kind, "eps", self.eps, "a number, 0 or more")


NO_NORM = "none"
NORMS: tuple[str, ...] = ("rms", "layer", NO_NORM)
MOST_PROJECTED_ROWS = 64
"""Of the tensor of `Projections`: as many as one tile of its kernel has."""
MOST_NORM_COLUMNS = 16384
"""Of rows that are normalised in the registers of one program."""
EXTRAS: tuple[str, ...] = (
    *("bias", "second_bias", "post_weight", "post_shift", "residual", "weight", "shift", "other_weight", "other_shift"),
)
"""The tensors that a reduction with a norm may have besides its operands, in the order of its arguments."""
SAVED: tuple[str, ...] = ("reduced", "post_mean", "post_rstd", "mean", "rstd", "scaled", "other")
"""What it may return too, for a backward, or as the norm with the other weight and shift; in the order of its outputs.
"""
AS_SUM: tuple[str, ...] = ("normed", "total", "reduced", "other")
"""Of its outputs, those with the shape and the dtype of the sum."""
SHARD_EXTRAS: tuple[str, ...] = ("residual", "weight", "shift")
SHARD_SAVED: tuple[str, ...] = ("mean", "rstd", "scaled")
"""Those of `EXTRAS` and of `SAVED` that the norm in front of a gather may have."""


@dataclass(frozen=True)
class ShardNorm:
    """What makes the shard of a gather of x: total = x + residual, rounded to the dtype of x, and shard = norm(total).

    extras: which of `SHARD_EXTRAS` there are; with a residual the total is an output too. saved: which of `SHARD_SAVED`
    are outputs, as of a reduction with a norm.
    """

    norm: Norm
    extras: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    post: ClassVar[Norm | None] = None

    @property
    def returned(self) -> tuple[str, ...]:
        """The names of the node's outputs that are not made of the gathered tensor."""
        return (*("total",) * ("residual" in self.extras), *self.saved)

    def verify(self, kind: str) -> None:
        self.norm.verify(kind)
        check(self.norm.form != NO_NORM, kind, "norm", self.norm.form, "a norm")
        _verify_names(kind, "extras", self.extras, SHARD_EXTRAS)
        _verify_names(kind, "saved", self.saved, SHARD_SAVED)


@dataclass(frozen=True)
class _ReductionWithNorm(Node):
    """What the two nodes with a norm have in common.

    extras: which of `EXTRAS` there are. post: a norm of the reduced rows alone, before the residual is added;
    then there may be none behind (`NO_NORM`), nor an output of it. saved: which of `SAVED` are outputs too; `other` is
    the same norm of the same rows, with a weight and a shift of its own.
    """

    kind: ClassVar[str]
    reduce_op: str
    norm: Norm
    extras: tuple[str, ...]
    world_size: int
    group_name: str
    site: str
    policy: Policy = field(metadata=INLINED)
    post: Norm | None = None
    saved: tuple[str, ...] = ()

    def verify(self) -> None:
        check(self.reduce_op in REDUCE_OPS, self.kind, "reduce_op", self.reduce_op, f"one of {', '.join(REDUCE_OPS)}")
        self.norm.verify(self.kind)
        if self.post is not None:
            self.post.verify(self.kind)
            check(self.post.form != NO_NORM, self.kind, "post", self.post.form, "a norm")
        if self.norm.form == NO_NORM:
            check(self.post is not None, self.kind, "norm", self.norm.form, "a norm, as there is none before it")
            of_norm = {"weight", "shift", "other_weight", "other_shift", "mean", "rstd", "scaled", "other"}
            behind = of_norm & {*self.extras, *self.saved}
            check(not behind, self.kind, "norm", self.norm.form, f"a norm, as there are {', '.join(sorted(behind))}")
        for name, names, known in (("extras", self.extras, EXTRAS), ("saved", self.saved, SAVED)):
            _verify_names(self.kind, name, names, known)
            no_post = self.post is not None or not any(one.startswith("post_") for one in names)
            check(no_post, self.kind, name, names, "without names of a norm before the residual, as there is none")
        given = {"other_weight", "other_shift"} & {*self.extras}
        no_other = not given or "other" in self.saved
        check(no_other, self.kind, "extras", self.extras, "without those of another norm, as it is not returned")
        verify_common(self.kind, self.world_size, self.group_name, self.policy)

    @property
    def returned(self) -> tuple[str, ...]:
        """The names of the outputs, without the token."""
        return norm_returns(self.norm, self.saved)


@dataclass(frozen=True)
class AllReduceRmsNorm(_ReductionWithNorm):
    """reduced = all_reduce(x, reduce_op), total = post(reduced + bias + second_bias) + residual, normed = norm(total);
    all bit-identical on every rank.

    x and these outputs are [.., N], the residual has as many elements, biases, weights and shifts have N. Every sum,
    and the result of `post`, is rounded to the dtype of x. What else is saved is fp32: mean and rstd, 1 / sqrt(variance
    + eps), [.., 1], and scaled, [.., N], see `Norm`; with `post_` in front those of `post`.
    """

    kind: ClassVar[str] = "all_reduce_rms_norm"
    # What is reduced as it is has no product to be cut.
    strategies = "library", "tile"

    def slots(self) -> Slots:
        return (("x", None), *single(self.extras))

    def split(self, operands: Sequence[T]) -> tuple[T, Sequence[T | None]]:
        """(x, the other tensors: see `EXTRAS`)."""
        return operands[0], by_names(EXTRAS, self.extras, operands[1:])


@dataclass(frozen=True)
class MatmulAllReduceRmsNorm(_ReductionWithNorm):
    """As `AllReduceRmsNorm` with x = sum_i a_i @ b_i + product_bias: what `MatmulAllReduce` reduces. has_bias: whether
    there is that row, which every rank adds before the reduction. num_extras, epilogue: of an epilogue that has a part
    before the reduction only.
    """

    kind: ClassVar[str] = "matmul_all_reduce_rms_norm"
    num_products: int = 1
    has_bias: bool = False
    num_extras: int = 0
    epilogue: str = ""

    def slots(self) -> Slots:
        products = _product_slots(self.num_products, self.has_bias, "product_bias")
        return (*products, *single(self.extras), *self.reduction._extra_slots())

    def split(
        self, operands: Sequence[T]
    ) -> tuple[Sequence[T], Sequence[T], T | None, Sequence[T | None], Sequence[T]]:
        """(first operands, second ones, their bias, those of the norm: see `EXTRAS`, extra tensors)."""
        a, b, bias, behind = split_products(self.num_products, self.has_bias, operands)
        count = len(self.extras)
        return a, b, bias, by_names(EXTRAS, self.extras, behind[:count]), behind[count:]

    @functools.cached_property
    def reduction(self) -> MatmulAllReduce:
        """The node without its norm."""
        return MatmulAllReduce(
            self.reduce_op,
            self.world_size,
            self.group_name,
            self.site,
            self.policy,
            num_products=self.num_products,
            has_bias=self.has_bias,
            num_extras=self.num_extras,
            epilogue=self.epilogue,
        )

    def verify(self) -> None:
        super().verify()
        self.reduction.verify()
        parsed = self.reduction.parsed
        fits = parsed is None or parsed.behind is None
        check(fits, self.kind, "epilogue", self.epilogue, "one without a part behind the reduction")


@dataclass(frozen=True)
class MatmulAllGather(Node):
    """out = all_gather(sum_i a_i @ b_i + bias, gather_dim): what all ranks compute, in rank order, along `gather_dim`.

    a_i is [.., K_i], b_i is [K_i, N], bias is a row [N] where there is one; the sum [.., N] has the same shape on every
    rank, and `gather_dim` is any of its dimensions.
    """

    kind: ClassVar[str] = "matmul_all_gather"
    # By `chunked` it was never the fastest: docs/deleted.md.
    strategies = "library", "tile"
    gather_dim: int
    world_size: int
    group_name: str
    site: str
    policy: Policy = field(metadata=INLINED)
    num_products: int = 1
    has_bias: bool = False

    def slots(self) -> Slots:
        return _product_slots(self.num_products, self.has_bias)

    def split(self, operands: Sequence[T]) -> tuple[Sequence[T], Sequence[T], T | None]:
        """(first operands, second ones, bias)."""
        return split_products(self.num_products, self.has_bias, operands)[:3]

    def verify(self) -> None:
        check(self.gather_dim >= 0, self.kind, "gather_dim", self.gather_dim, "a dimension, 0 or more")
        _verify_products(self.kind, self.num_products)
        verify_common(self.kind, self.world_size, self.group_name, self.policy)


@dataclass(frozen=True)
class FlashDecode(Node):
    """out = attention of one query per sequence over the tokens of all ranks, bit-identical on every rank.

    q and out are [B, Hq, D]; each rank holds some tokens of every sequence: caches [B, S, Hkv, D], or (paged) blocks
    [blocks, tokens, Hkv, D]. Scores are q . k * scale, then (softcap > 0) softcap * tanh(scores / softcap).
    """

    kind: ClassVar[str] = "flash_decode"
    # Attention that is as short as reading its cache has no chunks to overlap.
    strategies = "library", "tile"
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
        """(query, keys, values, lengths, block table)."""
        q, k, v, lengths, *table = operands
        return q, k, v, lengths, table[0] if table else None

    def verify(self) -> None:
        check(0.0 < self.scale < math.inf, self.kind, "scale", self.scale, "a number above 0")
        check(0.0 <= self.softcap < math.inf, self.kind, "softcap", self.softcap, "a number, 0 for none")
        verify_common(self.kind, self.world_size, self.group_name, self.policy)


MatmulNode = AllGatherMatmul | MatmulReduceScatter | MatmulAllReduce | MatmulAllGather
NormNode = AllReduceRmsNorm | MatmulAllReduceRmsNorm
UlyssesNode = MatmulAllToAll | AllToAllMatmul
AttentionNode = AllGatherAttention | AttentionReduceScatter
TaskNode = MatmulNode | NormNode | UlyssesNode | FlashDecode | AttentionNode
KINDS: tuple[str, ...] = (
    AllGatherMatmul.kind,
    MatmulReduceScatter.kind,
    MatmulAllReduce.kind,
    MatmulAllGather.kind,
)
"""The fusions of a collective with matmuls alone: what tables and benchmarks of matmuls know."""
NORM_KINDS: tuple[str, ...] = (AllReduceRmsNorm.kind, MatmulAllReduceRmsNorm.kind)
ULYSSES_KINDS: tuple[str, ...] = (MatmulAllToAll.kind, AllToAllMatmul.kind)
ATTENTION_KINDS: tuple[str, ...] = (AllGatherAttention.kind, AttentionReduceScatter.kind)
PLANNED_KINDS: tuple[str, ...] = (*KINDS, AllReduceRmsNorm.kind, *ULYSSES_KINDS, *ATTENTION_KINDS)
"""Those with times of their own in tables. With a matmul, a norm costs all strategies the same."""
TASK_KINDS: tuple[str, ...] = (*KINDS, *NORM_KINDS, *ULYSSES_KINDS, FlashDecode.kind, *ATTENTION_KINDS)
"""All of them."""
DELETED_KINDS: dict[str, str] = {
    "all_gather_contract": "deleted, as it was no faster than the library: 0.995 of its speed, the mean of 12 rows",
}
"""Kinds that there were, and what became of them, for whoever still asks for one; see docs/deleted.md."""
NODES: dict[str, type[Node]] = {
    node.kind: node
    for node in (
        AllGatherMatmul,
        MatmulReduceScatter,
        MatmulAllReduce,
        MatmulAllGather,
        AllReduceRmsNorm,
        MatmulAllReduceRmsNorm,
        MatmulAllToAll,
        AllToAllMatmul,
        FlashDecode,
        AllGatherAttention,
        AttentionReduceScatter,
        Projections,
    )
}
"""The declarations by kind: of all Task nodes, and of `projections`, which is no site."""
COMPILED_BY_US = "ditron_compiled_by_us"
"""Key of a graph node's `meta`: our passes are part of what compiles it, hence of the key under which it is cached."""


def norm_returns(norm: Norm, saved: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the outputs of a reduction with this norm, without the token."""
    return (*("normed",) * (norm.form != NO_NORM), "total", *saved)


def by_names(known: Sequence[str], given: Sequence[str], operands: Sequence[T]) -> tuple[T | None, ...]:
    """The operands of the names that are given, in the places of all known names; None in the other places."""
    found = dict(zip(given, operands, strict=True))
    return tuple(found.get(name) for name in known)


def _product_slots(num_products: int, has_bias: bool, bias: str = "bias") -> Slots:
    """The operands of a sum of products."""
    return (("a", num_products), ("b", num_products), *((bias, None),) * has_bias)


def split_products(
    num_products: int, has_bias: bool, operands: Sequence[T]
) -> tuple[Sequence[T], Sequence[T], T | None, Sequence[T]]:
    """(first operands, second ones, bias, what stands behind them) of a sum of products."""
    products = 2 * num_products
    bias = operands[products] if has_bias else None
    return operands[:num_products], operands[num_products:products], bias, operands[products + has_bias :]


def _verify_names(kind: str, field: str, names: tuple[str, ...], known: tuple[str, ...]) -> None:
    in_order = names == tuple(name for name in known if name in names)
    check(in_order, kind, field, names, f"names out of {', '.join(known)}, in this order")


def _verify_reduction(kind: str, reduce_op: str, num_products: int) -> None:
    check(reduce_op in REDUCE_OPS, kind, "reduce_op", reduce_op, f"one of {', '.join(REDUCE_OPS)}")
    _verify_products(kind, num_products)


def _verify_products(kind: str, num_products: int) -> None:
    within = 1 <= num_products <= MAX_PRODUCTS
    check(within, kind, "num_products", num_products, f"at least one matmul, and at most {MAX_PRODUCTS}")
