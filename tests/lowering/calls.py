"""Calls of the public ops inside a rank: seeded operands of any layout, the ops with defaults, the fp64 reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ditron_inductor.lowering.register import register
from ditron_inductor.task import reference, schema
from ditron_inductor.task.node import Node
from ditron_inductor.task.nodes import (
    EXTRAS,
    AllGatherMatmul,
    AllReduceRmsNorm,
    AllToAllMatmul,
    MatmulAllGather,
    MatmulAllReduce,
    MatmulAllReduceRmsNorm,
    MatmulAllToAll,
    MatmulReduceScatter,
    Norm,
    Policy,
)
from tests.rank_process import RankContext

WORKSPACE_LIMIT = 1 << 29
TIMEOUT_S = 30.0
Kind = TypeVar("Kind", bound=Node)


@dataclass(frozen=True)
class Site:
    """What a call carries besides tensors. `group_name` "" stands for the default group."""

    name: str = "test/0:site"
    strategy: str = "tile"
    timeout_s: float = TIMEOUT_S
    workspace_limit: int = WORKSPACE_LIMIT
    group_name: str = ""
    world_size: int = 0
    trials: bool = False
    overlap: str = ""

    def node(self, ctx: RankContext, kind: type[Kind], **fields: Any) -> Kind:
        """The node of this site, with the fields of its kind."""
        limits = self.workspace_limit, self.timeout_s
        policy = Policy(self.strategy, *limits, trials=self.trials, overlap=self.overlap)
        return kind(**self.group(ctx), site=self.name, policy=policy, **fields)

    def call(
        self, ctx: RankContext, kind: type[Node], fields: Mapping[str, Any], **operands: Any
    ) -> list[torch.Tensor]:
        """What the op of this site's node returns, the token excepted."""
        register()
        return schema.call(self.node(ctx, kind, **fields), **operands)[:-1]

    def group(self, ctx: RankContext) -> dict[str, Any]:
        """The keyword arguments of the reference functions."""
        return {"world_size": self.world_size or ctx.world_size, "group_name": self.group_name or ctx.group_name}


def operand(
    ctx: RankContext, shape: Sequence[int], dtype: torch.dtype, *, layout: str = "row", scale: float = 1.0
) -> torch.Tensor:
    """A random tensor of `shape` in a layout.

    `row` is contiguous, `column` has its last two dimensions transposed, `padded` has rows one element longer than it
    shows, and `offset` is the same without the first element instead of the last.
    """
    shape = list(shape)
    if layout == "column":
        base = torch.randn([*shape[:-2], shape[-1], shape[-2]], device=ctx.device).transpose(-1, -2)
    elif layout == "row":
        base = torch.randn(shape, device=ctx.device)
    else:
        assert layout in ("padded", "offset"), layout
        base = torch.randn([*shape[:-1], shape[-1] + 1], device=ctx.device)
    # Both keep the strides.
    x = (base * scale).to(dtype)
    if layout == "padded":
        x = x[..., :-1]
    elif layout == "offset":
        x = x[..., 1:]
    assert list(x.shape) == shape
    return x


def weight(ctx: RankContext, k: int, n: int, dtype: torch.dtype, layout: str = "row") -> torch.Tensor:
    """A weight [k, n] whose products with unit-variance rows have unit variance."""
    return operand(ctx, [k, n], dtype, layout=layout, scale=1.0 / math.sqrt(max(k, 1)))


def all_gather_matmul(
    ctx: RankContext,
    site: Site,
    shard: torch.Tensor,
    weights: Sequence[torch.Tensor],
    gather_dim: int = 0,
    return_gathered: bool = False,
    token: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """[out_0, .., (gathered,) token] of the op."""
    register()
    fields = {"gather_dim": gather_dim, "return_gathered": return_gathered, "num_weights": len(weights)}
    return schema.call(site.node(ctx, AllGatherMatmul, **fields), token, shard=shard, weights=list(weights))


Operands = torch.Tensor | Sequence[torch.Tensor]
"""Of one product, or of several."""


def listed(operands: Operands) -> list[torch.Tensor]:
    """The operands of all products."""
    return [operands] if isinstance(operands, torch.Tensor) else list(operands)


def matmul_reduce_scatter(
    ctx: RankContext,
    site: Site,
    a: Operands,
    b: Operands,
    scatter_dim: int = 0,
    reduce_op: str = "sum",
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The op's result without its token."""
    fields = {"scatter_dim": scatter_dim, "reduce_op": reduce_op}
    return _sum(ctx, site, MatmulReduceScatter, fields, a, b, bias)


def matmul_all_reduce(
    ctx: RankContext,
    site: Site,
    a: Operands,
    b: Operands,
    reduce_op: str = "sum",
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The op's result without its token."""
    return _sum(ctx, site, MatmulAllReduce, {"reduce_op": reduce_op}, a, b, bias)


def matmul_all_gather(
    ctx: RankContext,
    site: Site,
    a: Operands,
    b: Operands,
    bias: torch.Tensor | None = None,
    gather_dim: int = -1,
) -> torch.Tensor:
    """The op's result without its token."""
    return _sum(ctx, site, MatmulAllGather, {"gather_dim": gather_dim % listed(a)[0].dim()}, a, b, bias)


def matmul_all_to_all(
    ctx: RankContext,
    site: Site,
    a: Operands,
    b: Operands,
    bias: torch.Tensor | None = None,
    gather_dim: int = 0,
    parts: int = 1,
) -> torch.Tensor:
    """The op's result without its token."""
    return _sum(ctx, site, MatmulAllToAll, {"gather_dim": gather_dim, "parts": parts}, a, b, bias)


def _sum(
    ctx: RankContext,
    site: Site,
    kind: type[Node],
    fields: Mapping[str, Any],
    a: Operands,
    b: Operands,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """The result of a node that communicates a sum of products."""
    fields = {**fields, "num_products": len(listed(a)), "has_bias": bias is not None}
    return site.call(ctx, kind, fields, a=listed(a), b=listed(b), bias=bias)[0]


def all_to_all_matmul(
    ctx: RankContext,
    site: Site,
    x: torch.Tensor,
    weight: torch.Tensor,
    scatter_dim: int = 0,
    parts: int = 1,
    return_received: bool = True,
) -> list[torch.Tensor]:
    """[out, (received)] of the op."""
    fields = {"scatter_dim": scatter_dim, "parts": parts, "return_received": return_received}
    return site.call(ctx, AllToAllMatmul, fields, x=x, weight=weight)


def reference_all_gather_matmul(
    ctx: RankContext, site: Site, shard: torch.Tensor, weights: Sequence[torch.Tensor], gather_dim: int = 0
) -> list[torch.Tensor]:
    """The outputs in fp64, then the gathered tensor in the shard's own dtype, bit for bit."""
    outputs = reference.all_gather_matmul(
        shard.double(), [w.double() for w in weights], gather_dim=gather_dim, return_gathered=False, **site.group(ctx)
    )
    return [*outputs, reference.all_gather(shard, gather_dim=gather_dim, **site.group(ctx))]


def reference_matmul_reduce_scatter(
    ctx: RankContext,
    site: Site,
    a: Operands,
    b: Operands,
    scatter_dim: int = 0,
    reduce_op: str = "sum",
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The result in fp64."""
    return reference.matmul_reduce_scatter(
        *_doubled(a, b, bias), scatter_dim=scatter_dim, reduce_op=reduce_op, **site.group(ctx)
    )


def reference_matmul_all_reduce(
    ctx: RankContext,
    site: Site,
    a: Operands,
    b: Operands,
    reduce_op: str = "sum",
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The result in fp64."""
    return reference.matmul_all_reduce(*_doubled(a, b, bias), reduce_op=reduce_op, **site.group(ctx))


def _doubled(
    a: Operands, b: Operands, bias: torch.Tensor | None
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor | None]:
    lefts, rights = [one.double() for one in listed(a)], [one.double() for one in listed(b)]
    return lefts, rights, None if bias is None else bias.double()


def reference_matmul_all_gather(
    ctx: RankContext,
    site: Site,
    a: Operands,
    b: Operands,
    bias: torch.Tensor | None = None,
    gather_dim: int = -1,
) -> torch.Tensor:
    """The result in fp64."""
    dim = gather_dim % listed(a)[0].dim()
    return reference.matmul_all_gather(*_doubled(a, b, bias), gather_dim=dim, **site.group(ctx))


def reference_matmul_all_to_all(
    ctx: RankContext,
    site: Site,
    a: Operands,
    b: Operands,
    bias: torch.Tensor | None = None,
    gather_dim: int = 0,
    parts: int = 1,
) -> torch.Tensor:
    """The result in fp64."""
    doubled = _doubled(a, b, bias)
    return reference.matmul_all_to_all(*doubled, gather_dim=gather_dim, parts=parts, **site.group(ctx))


def reference_all_to_all_matmul(
    ctx: RankContext, site: Site, x: torch.Tensor, weight: torch.Tensor, scatter_dim: int = 0, parts: int = 1
) -> list[torch.Tensor]:
    """The output in fp64, then what was received in the dtype of x, bit for bit."""
    how: dict[str, Any] = {"scatter_dim": scatter_dim, "parts": parts, **site.group(ctx)}
    (out,) = reference.all_to_all_matmul(x.double(), weight.double(), return_received=False, **how)
    return [out, reference.exchange_rows(x, **how)]


def assert_replicated(ctx: RankContext, x: torch.Tensor, site: Site | None = None) -> None:
    """AssertionError unless the bytes of x are the same on every rank of the site's group."""
    name = (site or Site()).group_name or ctx.group_name
    group = dist.distributed_c10d._resolve_process_group(name)
    ours = x.contiguous().view(-1).view(torch.uint8)
    everyone = [torch.empty_like(ours) for _ in range(group.size())]
    dist.all_gather(everyone, ours, group=group)
    different = [rank for rank, theirs in enumerate(everyone) if not torch.equal(theirs, everyone[0])]
    assert not different, f"ranks {different} hold other bytes than rank 0"


def all_reduce_rms_norm(
    ctx: RankContext,
    site: Site,
    operands: Sequence[torch.Tensor],
    extras: Sequence[torch.Tensor | None],
    norm: Norm,
    reduce_op: str = "sum",
    post: Norm | None = None,
    saved: Sequence[str] = (),
    scales: torch.Tensor | None = None,
    factor: float = 1.0,
) -> list[torch.Tensor]:
    """[normed, total, and what is saved] of the op; operands: x, or a and b, whose product x is, each row of it times
    one of `scales`. extras: see `nodes.EXTRAS`. factor: of the reduced rows.
    """
    given = {name: value for name, value in zip(EXTRAS, extras, strict=True) if value is not None}
    fields = {"reduce_op": reduce_op, "norm": norm, "extras": tuple(given), "post": post, "saved": tuple(saved)}
    fields |= {"factor": factor}
    if len(operands) == 1:
        return site.call(ctx, AllReduceRmsNorm, fields, x=operands[0], **given)
    a, b = operands
    if scales is not None:
        fields |= {"num_extras": 1, "epilogue": "pre: mm0 * column(x0); mm0"}
        given["extras"] = [scales]
    return site.call(ctx, MatmulAllReduceRmsNorm, fields, a=[a], b=[b], **given)
