"""Calls of the public ops inside a rank: seeded operands of any layout, the ops with defaults, the fp64 reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ditron_inductor.lowering.host.register import register
from ditron_inductor.task import ops, reference
from ditron_inductor.task.nodes import Norm
from tests.rank_process import RankContext

WORKSPACE_LIMIT = 1 << 29
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Site:
    """What a call carries besides tensors. `group_name` "" stands for the default group."""

    name: str = "test/0:site"
    strategy: str = "tile"
    timeout_s: float = TIMEOUT_S
    workspace_limit: int = WORKSPACE_LIMIT
    group_name: str = ""
    world_size: int = 0

    def args(self, ctx: RankContext) -> tuple[int, str, str, str, int, float]:
        """The trailing arguments of every op."""
        return (
            self.world_size or ctx.world_size,
            self.group_name or ctx.group_name,
            self.name,
            self.strategy,
            self.workspace_limit,
            self.timeout_s,
        )

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
    return torch.ops.ditron.all_gather_matmul(shard, list(weights), token, gather_dim, return_gathered, *site.args(ctx))


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
    register()
    op = torch.ops.ditron.matmul_reduce_scatter
    return op(listed(a), listed(b), bias, None, scatter_dim, reduce_op, *site.args(ctx))[0]


def matmul_all_reduce(
    ctx: RankContext,
    site: Site,
    a: Operands,
    b: Operands,
    reduce_op: str = "sum",
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The op's result without its token."""
    register()
    return torch.ops.ditron.matmul_all_reduce(listed(a), listed(b), bias, None, reduce_op, *site.args(ctx))[0]


def matmul_all_gather(
    ctx: RankContext,
    site: Site,
    a: Operands,
    b: Operands,
    bias: torch.Tensor | None = None,
    gather_dim: int = -1,
) -> torch.Tensor:
    """The op's result without its token."""
    register()
    dim = gather_dim % listed(a)[0].dim()
    return torch.ops.ditron.matmul_all_gather(listed(a), listed(b), bias, None, dim, *site.args(ctx))[0]


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
    register()
    op = torch.ops.ditron.matmul_all_to_all
    return op(listed(a), listed(b), bias, None, gather_dim, parts, *site.args(ctx))[0]


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
    register()
    op = torch.ops.ditron.all_to_all_matmul
    return op(x, weight, None, scatter_dim, parts, return_received, *site.args(ctx))[:-1]


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
) -> list[torch.Tensor]:
    """[normed, total, and what is saved] of the op; operands: x, or a and b, whose product x is, each row of it times
    one of `scales`. extras: see `nodes.EXTRAS`.
    """
    register()
    op, first = torch.ops.ditron.all_reduce_rms_norm, list[Any](operands)
    if len(operands) == 2:
        op, first = torch.ops.ditron.matmul_all_reduce_rms_norm, [[operands[0]], [operands[1]], None]
    norms = *ops.norm_args(norm), *ops.norm_args(post), "+".join(saved)
    before = ([scales], "pre: mm0 * column(x0); mm0") if scales is not None else ()
    outputs: list[torch.Tensor] = op(*first, *extras, None, reduce_op, *norms, *site.args(ctx), *before)
    return outputs[:-1]
