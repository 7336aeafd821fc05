"""The ops of the Task level: schema, tags and fake implementation of each node kind.

`define()` declares them; the implementations are bound by `ditron_inductor.lowering.host.register`. Schemas in words:

`all_gather_matmul(shard, weights, token, ...) -> [out_0, .., out_{n-1}, (gathered,) (total, <saved>,) token]`
    shard [.., S, .., K] with S at gather_dim (never the last dimension), weights [K, N_i] with any strides.
    out_i [rows, N_i] contiguous, rows = the gathered tensor's dimensions but the last, flattened. With an epilogue the
    outputs are those that its text names, made of the products and of the extra tensors (see task/epilogue.py).
    gathered [.., W*S, .., K], contiguous, present if and only if return_gathered. With a norm (`norm` is not empty) the
    first operand is x, and the shard is norm(total), total = x + residual, with the weight and the shift, as in
    `all_reduce_rms_norm`; total is returned where there is a residual, then what `saved` names.
`matmul_reduce_scatter(a, b, bias, token, ..., extras, epilogue) -> [out, .., token]`
    a_i [.., W*S, .., K_i] with W*S at scatter_dim (never the last dimension), alike but for K_i; b_i [K_i, N]; bias a
    row [N], None, or of matrices a column [W*S, 1], added on every rank before the reduction; out [.., S, .., N]
    contiguous. With an epilogue the outputs are those that its text names, made of out as `mm0` and of the extra
    tensors, each in its shape.
`matmul_all_reduce(a, b, bias, token, ..., extras, epilogue) -> [out, .., token]`
    a_i [.., K_i], alike but for K_i; b_i [K_i, N]; bias [N] or None; out [.., N] contiguous, bit-identical on every
    rank. Epilogues as above.
`all_reduce_rms_norm(x, <extras>, token, ...) -> [normed, total, <saved>, token]`
    x [.., N]. <extras>, the names of `nodes.EXTRAS`: residual as many elements, in any shape whose rows are N long; the
    others N elements; each of them None where there is none. total = post(all_reduce(x) + bias + second_bias) +
    residual and normed = norm(total): shape and dtype of x, contiguous, bit-identical on every rank. See `nodes.Norm`
    for the arguments `norm` (`none`: no normed) to `round_first`, and `post` (empty: no post) to `post_round_first`.
    saved: names of `nodes.SAVED`, joined by `+`: returned too, contiguous; mean and rstd fp32 [.., 1], scaled fp32;
    other is norm(total) with other_weight and other_shift.
`matmul_all_reduce_rms_norm(a, b, product_bias, <extras>, token, ...) -> [normed, total, <saved>, token]`
    the same for x = sum_i a_i @ b_i + product_bias, or what an epilogue's `pre:` makes of that, as `matmul_all_reduce`.
`matmul_all_gather(a, b, bias, token, ...) -> (out, token)`
    a_i [.., K_i], alike but for K_i; b_i [K_i, N]; bias [N] or None; out is the sum [.., N] with gather_dim W times as
    long, contiguous.
`flash_decode(q, k, v, lengths, block_table, token, scale, softcap, ...) -> (out, token)`
    see task/flash_decode.py.
`all_gather_contract(shard, factors, token, ...) -> [out_0, .., out_{n-1}, (gathered,) token]`
    shard [.., S, ..] with S at gather_dim, factors [K, N_i] with any strides, [N_i, K] if not gathered_first; K is the
    gathered tensor's last dimension if gather_dim is that, else all of its dimensions but the last, flattened. out_i
    [C, N_i], or [N_i, C], contiguous, C the gathered tensor's other dimensions. gathered [.., W*S, ..], contiguous,
    present if and only if return_gathered.
`matmul_all_to_all(a, b, bias, token, gather_dim, parts, ...) -> (out, token)`
    a_i [.., S, .., K_i] with S at gather_dim (never the last dimension), alike but for K_i; b_i [K_i, N] with N a
    multiple of parts * W; bias [N] or None; out [.., W*S, .., N / W] contiguous. See task/ulysses.py.
`all_to_all_matmul(x, weight, token, scatter_dim, parts, return_received, ...) -> [out, (received,) token]`
    x [.., W*S, .., C] with W*S at scatter_dim (never the last dimension), C a multiple of parts; weight [W*C, N]; out
    [rows, N] contiguous, rows = received's dimensions but the last, flattened. received [.., S, .., W*C], contiguous,
    present if and only if return_received. See task/ulysses.py.
`after(x, token) -> x`
    an alias of x that is ordered after token: puts a collective that was not fused into the order of its group.
`after_(x, token)`
    the same for a collective that writes into x: x itself, declared as written, so that its memory has one owner.
`token_of(x) -> token`
    a token ordered after the op that made x.
`meet(key)`
    marks a graph whose ranks compare it when it first runs, see device/meetings.py. It computes nothing.
`own_chunk(x, dim, world_size, group_name) -> chunk`
    this rank's of the world_size equal chunks of x along dim, a copy; found by the rank at run time.
`replicated(x, same, group_name, site, names, constants) -> x`
    an alias of x; now and then the ranks compare samples of `same` and the `constants`, and raise where they differ.
    names: where the program reads each of `same`. Both are texts with a line for each.
`all_gather_attention`, `attention_reduce_scatter`
    see task/attention_ops.py.
`projections(x, weights, strategy, extras, epilogue) -> [out_0, .., out_{n-1}]`
    x [M, K] contiguous, weights [K, N_i], out_i = x @ weight_i [M, N_i] contiguous, or what the epilogue makes of them.
    No site and no token: nothing is communicated.

A token is `uint8[1]` and never read: it is only a dependency, which keeps the sites of a group in graph order
through every reordering of the compiler. The first site of a chain gets None.

Every op of a site also carries what it needs at run time: `world_size`, `group_name`, `site` (its stable name),
and the policy `strategy`, `workspace_limit` (bytes), `timeout_s` (seconds, 0.0 for the group's own timeout).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.library import Library

from ditron_inductor.task import attention_ops, ulysses
from ditron_inductor.task.epilogue import parse, products
from ditron_inductor.task.epilogue_torch import out_dtypes
from ditron_inductor.task.flash_decode import ARGUMENTS as FLASH_DECODE_ARGUMENTS
from ditron_inductor.task.nodes import (
    AS_SUM,
    ATTENTION_KINDS,
    EXTRAS,
    NORM_KINDS,
    SHARD_EXTRAS,
    ULYSSES_KINDS,
    AllGatherContract,
    AllGatherMatmul,
    AllReduceRmsNorm,
    Contraction,
    FlashDecode,
    MatmulAllGather,
    MatmulAllReduce,
    MatmulAllReduceRmsNorm,
    MatmulReduceScatter,
    Norm,
    Policy,
    Projections,
    ShardNorm,
    TaskNode,
    norm_returns,
)
from ditron_inductor.task.schemas import SITE

NAMESPACE = "ditron"

_PRODUCTS = "Tensor[] a, Tensor[] b, Tensor? bias, Tensor? token"
_EPILOGUE = "Tensor[]? extras=None, str epilogue=''"
_PROLOGUE = (
    f"{', '.join(f'Tensor? {name}=None' for name in SHARD_EXTRAS)}, "
    "str norm='', float eps=0.0, bool plus_one=False, bool round_first=False, str saved=''"
)
_NORM = (
    f"{', '.join(f'Tensor? {name}' for name in EXTRAS)}, Tensor? token, str reduce_op, "
    "str norm, float eps, bool plus_one, bool round_first, "
    f"str post, float post_eps, bool post_plus_one, bool post_round_first, str saved, {SITE}"
)
SCHEMAS: dict[str, str] = {
    AllGatherMatmul.kind: (
        f"(Tensor shard, Tensor[] weights, Tensor? token, int gather_dim, bool return_gathered, {SITE}, "
        f"{_EPILOGUE}, {_PROLOGUE}) -> Tensor[]"
    ),
    MatmulReduceScatter.kind: f"({_PRODUCTS}, int scatter_dim, str reduce_op, {SITE}, {_EPILOGUE}) -> Tensor[]",
    MatmulAllReduce.kind: f"({_PRODUCTS}, str reduce_op, {SITE}, {_EPILOGUE}) -> Tensor[]",
    AllReduceRmsNorm.kind: f"(Tensor x, {_NORM}) -> Tensor[]",
    MatmulAllReduceRmsNorm.kind: f"(Tensor[] a, Tensor[] b, Tensor? product_bias, {_NORM}, {_EPILOGUE}) -> Tensor[]",
    MatmulAllGather.kind: f"({_PRODUCTS}, int gather_dim, {SITE}) -> (Tensor, Tensor)",
    FlashDecode.kind: f"({FLASH_DECODE_ARGUMENTS}, {SITE}) -> (Tensor, Tensor)",
    **attention_ops.schemas(),
    AllGatherContract.kind: (
        "(Tensor shard, Tensor[] factors, Tensor? token, int gather_dim, bool gathered_first, bool return_gathered, "
        f"{SITE}) -> Tensor[]"
    ),
    **ulysses.schemas(),
    "after": "(Tensor(a) x, Tensor token) -> Tensor(a)",
    "after_": "(Tensor(a!) x, Tensor token) -> ()",
    "token_of": "(Tensor x) -> Tensor",
    "meet": "(str key) -> ()",
    "own_chunk": "(Tensor x, int dim, int world_size, str group_name) -> Tensor",
    "replicated": "(Tensor(a) x, Tensor[] same, str group_name, str site, str names, str constants) -> Tensor(a)",
    Projections.kind: f"(Tensor x, Tensor[] weights, str strategy, {_EPILOGUE}) -> Tensor[]",
}


@functools.cache
def define() -> Library:
    """Declares the ops and their fake implementations, once; further calls return the same library."""
    library: Any = Library(NAMESPACE, "DEF")
    tags = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)
    for name, schema in SCHEMAS.items():
        library.define(name + schema, tags=tags)
    fakes: dict[str, Callable[..., object]] = {
        AllGatherMatmul.kind: _fake_all_gather_matmul,
        MatmulReduceScatter.kind: _fake_matmul_reduce_scatter,
        MatmulAllReduce.kind: _fake_matmul_all_reduce,
        AllReduceRmsNorm.kind: _fake_all_reduce_rms_norm,
        MatmulAllReduceRmsNorm.kind: _fake_matmul_all_reduce_rms_norm,
        MatmulAllGather.kind: _fake_matmul_all_gather,
        FlashDecode.kind: _fake_flash_decode,
        **attention_ops.fakes(new_token),
        AllGatherContract.kind: _fake_all_gather_contract,
        **ulysses.fakes(new_token),
        "after": _fake_after,
        "after_": do_nothing,
        "token_of": new_token,
        "meet": meet_nobody,
        "own_chunk": _fake_own_chunk,
        "replicated": _fake_replicated,
        Projections.kind: _fake_projections,
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    declared: Library = library
    return declared


def overload(kind: str) -> torch._ops.OpOverload:
    """The op of a node kind (or `after`, `after_`, `token_of`), declared if it was not."""
    define()
    op: torch._ops.OpOverload = getattr(torch.ops.ditron, kind).default
    return op


def new_token(x: torch.Tensor) -> torch.Tensor:
    """A token on the device of x."""
    return torch.empty(1, dtype=torch.uint8, device=x.device)


def do_nothing(x: torch.Tensor, token: torch.Tensor) -> None:
    """`after_`: only its place among the ops that use x matters."""


def meet_nobody(key: str) -> None:
    """`meet`: the meeting of a graph is in the code that Inductor writes, see lowering/host/meeting_kernel.py."""


def site_args(node: TaskNode) -> tuple[int, str, str, str, int, float]:
    """The trailing arguments that the ops of all kinds share, in schema order."""
    policy = node.policy
    return (
        node.world_size,
        node.group_name,
        node.site,
        policy.strategy,
        policy.workspace_limit,
        policy.timeout_s,
    )


NormArgs = tuple[str, float, bool, bool]


def norm_args(norm: Norm | None) -> NormArgs:
    """The arguments of a norm, in schema order."""
    return ("", 0.0, False, False) if norm is None else (norm.form, norm.eps, norm.plus_one, norm.round_first)


def saved_names(saved: str) -> tuple[str, ...]:
    """The names that the argument `saved` holds."""
    return tuple(saved.split("+")) if saved else ()


def norms_of(args: Sequence[Any]) -> tuple[Norm, Norm | None, tuple[str, ...]]:
    """(norm, post, saved) of the arguments `norm` to `saved`."""
    return Norm(*args[:4]), Norm(*args[4:8]) if args[4] else None, saved_names(args[8])


def shard_norm_args(prologue: ShardNorm) -> tuple[object, ...]:
    """The arguments of a prologue behind its tensors, in schema order."""
    return (*norm_args(prologue.norm), "+".join(prologue.saved))


SHARD_NORM_DEFAULTS: tuple[Any, ...] = ("", 0.0, False, False, "")


def shard_norm_of(given: Sequence[object], args: Sequence[Any]) -> ShardNorm | None:
    """The prologue of a call. given: the arguments `SHARD_EXTRAS`; args: those from `norm` on, up to the last given."""
    if not args or not args[0]:
        return None
    extras = tuple(name for name, one in zip(SHARD_EXTRAS, given, strict=True) if one is not None)
    *norm, saved = (*args, *SHARD_NORM_DEFAULTS[len(args) :])
    return ShardNorm(Norm(*norm), extras, saved_names(saved))


NUM_NORM_ARGS = 9
"""Those that `norms_of` reads."""


def argument_of(target: object, args: Sequence[object], name: str) -> Any:
    """The argument `name` of a call of one of our ops, all of whose arguments are positional."""
    assert isinstance(target, torch._ops.OpOverload)
    return args[[argument.name for argument in target._schema.arguments].index(name)]


def node_from_call(target: object, args: Sequence[object]) -> TaskNode:
    """The node that a call of one of the Task ops (all arguments positional) stands for.

    Raises AssertionError for any other target: only our own passes write these calls.
    """
    op = target
    assert isinstance(op, torch._ops.OpOverload) and op.namespace == NAMESPACE, f"not an op of ours: {target}"
    kind = op._opname
    arguments = op._schema.arguments
    least = sum(not argument.has_default_value() for argument in arguments)
    assert least <= len(args) <= len(arguments), f"{kind} takes {least} positional arguments or more, got {len(args)}"
    value = {argument.name: argument.default_value for argument in arguments}
    value.update(zip((argument.name for argument in arguments), args, strict=False))

    def as_int(name: str) -> int:
        item = value[name]
        assert isinstance(item, int), f"{kind}: {name} is not an int: {item!r}"
        return item

    def as_list(name: str) -> Sequence[object]:
        items = value[name]
        assert isinstance(items, (list, tuple)), f"{kind}: {name} is not a list: {items!r}"
        return items

    timeout_s = value["timeout_s"]
    assert isinstance(timeout_s, (int, float)), f"{kind}: timeout_s is not a number: {timeout_s!r}"
    policy = Policy(str(value["strategy"]), as_int("workspace_limit"), float(timeout_s))
    world_size, group_name, site = as_int("world_size"), str(value["group_name"]), str(value["site"])
    num_extras = len(as_list("extras")) if value.get("extras") is not None else 0
    epilogue = str(value.get("epilogue", ""))
    if kind == AllGatherMatmul.kind:
        return AllGatherMatmul(
            gather_dim=as_int("gather_dim"),
            world_size=world_size,
            group_name=group_name,
            return_gathered=bool(value["return_gathered"]),
            site=site,
            policy=policy,
            num_weights=len(as_list("weights")),
            num_extras=num_extras,
            epilogue=epilogue,
            prologue=shard_norm_of(
                [value[name] for name in SHARD_EXTRAS],
                [value[name] for name in ("norm", "eps", "plus_one", "round_first", "saved")],
            ),
        )
    if kind in ULYSSES_KINDS:
        node: TaskNode = ulysses.node_of(kind, value, world_size, group_name, site, policy)
        return node
    if kind == FlashDecode.kind:
        scale, softcap = value["scale"], value["softcap"]
        assert isinstance(scale, (int, float)) and isinstance(softcap, (int, float)), f"{kind}: {scale!r}, {softcap!r}"
        paged = value["block_table"] is not None
        return FlashDecode(float(scale), float(softcap), world_size, group_name, site, policy, paged)
    if kind in ATTENTION_KINDS:
        attention: TaskNode = attention_ops.node_of(kind, value, (world_size, group_name, site), policy)
        return attention
    if kind == AllGatherContract.kind:
        return AllGatherContract(
            gather_dim=as_int("gather_dim"),
            gathered_first=bool(value["gathered_first"]),
            world_size=world_size,
            group_name=group_name,
            return_gathered=bool(value["return_gathered"]),
            site=site,
            policy=policy,
            num_factors=len(as_list("factors")),
        )
    with_norm: dict[str, Any] = {}
    if kind in NORM_KINDS:
        given = list(value.values())[list(value).index("norm") :]
        norm, post, saved = norms_of(given[:NUM_NORM_ARGS])
        extras = tuple(name for name in EXTRAS if value[name] is not None)
        with_norm = dict(reduce_op=str(value["reduce_op"]), norm=norm, extras=extras, post=post, saved=saved)
        with_norm |= dict(world_size=world_size, group_name=group_name, site=site, policy=policy)
    if kind == AllReduceRmsNorm.kind:
        return AllReduceRmsNorm(**with_norm)
    num_products = len(as_list("a"))
    has_bias = value["product_bias" if kind in NORM_KINDS else "bias"] is not None
    assert num_products == len(as_list("b")), f"{kind}: {num_products} first operands, {len(as_list('b'))} second ones"
    if kind == MatmulReduceScatter.kind:
        return MatmulReduceScatter(
            scatter_dim=as_int("scatter_dim"),
            reduce_op=str(value["reduce_op"]),
            world_size=world_size,
            group_name=group_name,
            site=site,
            policy=policy,
            num_products=num_products,
            has_bias=has_bias,
            num_extras=num_extras,
            epilogue=epilogue,
        )
    if kind == MatmulAllReduceRmsNorm.kind:
        with_norm |= dict(num_products=num_products, has_bias=has_bias, num_extras=num_extras, epilogue=epilogue)
        return MatmulAllReduceRmsNorm(**with_norm)
    if kind == MatmulAllGather.kind:
        return MatmulAllGather(
            gather_dim=as_int("gather_dim"),
            world_size=world_size,
            group_name=group_name,
            site=site,
            policy=policy,
            num_products=num_products,
            has_bias=has_bias,
        )
    assert kind == MatmulAllReduce.kind, f"not a site: {kind}"
    return MatmulAllReduce(
        reduce_op=str(value["reduce_op"]),
        world_size=world_size,
        group_name=group_name,
        site=site,
        policy=policy,
        num_products=num_products,
        has_bias=has_bias,
        num_extras=num_extras,
        epilogue=epilogue,
    )


def _fake_all_gather_matmul(
    shard: torch.Tensor,
    weights: Sequence[torch.Tensor],
    token: torch.Tensor | None,
    gather_dim: int,
    return_gathered: bool,
    world_size: int,
    group_name: str,
    site: str,
    strategy: str,
    workspace_limit: int,
    timeout_s: float,
    extras: Sequence[torch.Tensor] | None = None,
    epilogue: str = "",
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    *norm: Any,
) -> list[torch.Tensor]:
    gathered_shape = list(shard.shape)
    gathered_shape[gather_dim] = gathered_shape[gather_dim] * world_size
    rows = math.prod(gathered_shape[:-1])
    outputs = _after_epilogue([shard.new_empty([rows, weight.shape[1]]) for weight in weights], epilogue)
    if return_gathered:
        outputs.append(shard.new_empty(gathered_shape))
    prologue = shard_norm_of((residual, weight, shift), norm)
    if prologue is not None:
        outputs += [norm_output(shard, shard.shape, name) for name in prologue.returned]
    outputs.append(new_token(shard))
    return outputs


def _fake_all_gather_contract(
    shard: torch.Tensor,
    factors: Sequence[torch.Tensor],
    token: torch.Tensor | None,
    gather_dim: int,
    gathered_first: bool,
    return_gathered: bool,
    world_size: int,
    *others: Any,
) -> list[torch.Tensor]:
    kept = Contraction.of(shard.shape, gather_dim).kept
    shapes = ([kept, one.shape[1]] if gathered_first else [one.shape[0], kept] for one in factors)
    outputs = [shard.new_empty(shape) for shape in shapes]
    if return_gathered:
        gathered_shape = list(shard.shape)
        gathered_shape[gather_dim] = gathered_shape[gather_dim] * world_size
        outputs.append(shard.new_empty(gathered_shape))
    return [*outputs, new_token(shard)]


def _sum_shape(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> list[int]:
    """The shape of sum_i a_i @ b_i."""
    return [*a[0].shape[:-1], b[0].shape[1]]


def _fake_matmul_reduce_scatter(
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    token: torch.Tensor | None,
    scatter_dim: int,
    reduce_op: str,
    world_size: int,
    group_name: str,
    site: str,
    strategy: str,
    workspace_limit: int,
    timeout_s: float,
    extras: Sequence[torch.Tensor] | None = None,
    epilogue: str = "",
) -> list[torch.Tensor]:
    shape = _sum_shape(a, b)
    shape[scatter_dim] = shape[scatter_dim] // world_size
    return [*_after_epilogue([a[0].new_empty(shape)], epilogue), new_token(a[0])]


def _fake_matmul_all_reduce(
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    token: torch.Tensor | None,
    reduce_op: str,
    world_size: int,
    group_name: str,
    site: str,
    strategy: str,
    workspace_limit: int,
    timeout_s: float,
    extras: Sequence[torch.Tensor] | None = None,
    epilogue: str = "",
) -> list[torch.Tensor]:
    return [*_after_epilogue([a[0].new_empty(_sum_shape(a, b))], epilogue), new_token(a[0])]


def _fake_matmul_all_gather(
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    token: torch.Tensor | None,
    gather_dim: int,
    world_size: int,
    *others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = _sum_shape(a, b)
    shape[gather_dim] = shape[gather_dim] * world_size
    return a[0].new_empty(shape), new_token(a[0])


def _fake_all_reduce_rms_norm(x: torch.Tensor, *others: Any) -> list[torch.Tensor]:
    return [*norm_outputs(x, list(x.shape), others), new_token(x)]


def _fake_matmul_all_reduce_rms_norm(
    a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], bias: torch.Tensor | None, *others: Any
) -> list[torch.Tensor]:
    return [*norm_outputs(a[0], _sum_shape(a, b), others), new_token(a[0])]


def norm_outputs(x: torch.Tensor, shape: Sequence[Any], others: Sequence[Any]) -> list[torch.Tensor]:
    """Memory for what is returned, for sums of this shape [.., N] beside x. others: the arguments behind the operands,
    where the extras, the token and the reduction stand before the norms.
    """
    norm, _, saved = norms_of(others[len(EXTRAS) + 2 :])
    return [norm_output(x, shape, name) for name in norm_returns(norm, saved)]


def norm_output(x: torch.Tensor, shape: Sequence[Any], name: str) -> torch.Tensor:
    """Memory for one of them."""
    if name in AS_SUM:
        return x.new_empty(shape)
    return x.new_empty(shape if name == "scaled" else [*shape[:-1], 1], dtype=torch.float32)


def _fake_flash_decode(q: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), new_token(q)


def _fake_projections(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    strategy: str,
    extras: Sequence[torch.Tensor] | None = None,
    epilogue: str = "",
) -> list[torch.Tensor]:
    return _after_epilogue([x.new_empty([x.shape[0], weight.shape[1]]) for weight in weights], epilogue)


def _after_epilogue(given: list[torch.Tensor], epilogue: str) -> list[torch.Tensor]:
    """The fake outputs of products with these."""
    if not epilogue:
        return given
    parsed = parse(epilogue)
    return [
        torch.empty_like(given[min(products(output))], dtype=dtype)
        for output, dtype in zip(parsed.outputs, out_dtypes(parsed, given[0].dtype), strict=True)
    ]


def _fake_after(x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    aliased: torch.Tensor = torch.ops.aten.alias.default(x)
    return aliased


def _fake_own_chunk(x: torch.Tensor, dim: int, world_size: int, group_name: str) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] = shape[dim] // world_size
    return x.new_empty(shape)


def _fake_replicated(x: torch.Tensor, *_: Any) -> torch.Tensor:
    aliased: torch.Tensor = torch.ops.aten.alias.default(x)
    return aliased
