"""The fusions in plain collectives and library matmuls, out of place. This is the strategy `library`, and tests compare
the kernels with it.

Each function launches its collective and its matmul one after the other on the current stream, without a workspace. It
works for tensors with any number of dimensions, any process group and any backend.

The collectives are the synchronous ones of `torch.distributed`: on NCCL they run on the current stream itself, while
functional collectives go to a stream of their own, which costs two events for the host and, inside a CUDA graph, 4 us.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ditron_inductor.task import ulysses
from ditron_inductor.task.nodes import EXTRAS, NO_NORM, SHARD_EXTRAS, Norm, ShardNorm, norm_returns
from ditron_inductor.task.watch import communicate

Multiply = Callable[[torch.Tensor, Sequence[torch.Tensor], Sequence[torch.Tensor]], list[torch.Tensor]]
"""A function of rows, weights and extra tensors that returns products with an epilogue."""


def all_gather(shard: torch.Tensor, *, gather_dim: int, world_size: int, group_name: str) -> torch.Tensor:
    """The shards of all ranks in rank order, concatenated: [.., S, ..] -> [.., W*S, ..], contiguous."""
    flat = shard.new_empty(world_size * shard.shape[0], *shard.shape[1:])
    communicate(dist.all_gather_into_tensor, flat, shard.contiguous(), group=_group(group_name))
    leading = shard.shape[:gather_dim]
    if all(size == 1 for size in leading):
        shape = [*leading, world_size * shard.shape[gather_dim], *shard.shape[gather_dim + 1 :]]
        return flat.view(shape)
    return torch.cat(torch.chunk(flat, world_size, dim=0), dim=gather_dim)


def reduce_scatter(
    x: torch.Tensor, *, scatter_dim: int, reduce_op: str, world_size: int, group_name: str
) -> torch.Tensor:
    """Chunk `rank` of the reduction of x: [.., W*S, ..] -> [.., S, ..]. The dimension must divide by W."""
    leading = x.shape[:scatter_dim]
    if all(size == 1 for size in leading):
        rest = x.shape[scatter_dim + 1 :]
        chunk = x.shape[scatter_dim] // world_size
        flat = x.contiguous().view(world_size * chunk, *rest)
    else:
        flat = torch.cat(torch.chunk(x, world_size, dim=scatter_dim), dim=0)
    group = _group(group_name)
    native = reduce_op == "sum" or _averages(group, x.device)
    out = flat.new_empty(flat.shape[0] // world_size, *flat.shape[1:])
    communicate(dist.reduce_scatter_tensor, out, flat, _reduce_op(reduce_op, native), group=group)
    shape = [*leading, x.shape[scatter_dim] // world_size, *x.shape[scatter_dim + 1 :]]
    return out.view(shape) if native else out.view(shape).div_(world_size)


def all_gather_matmul(
    shard: torch.Tensor,
    weights: Sequence[torch.Tensor],
    extras: Sequence[torch.Tensor] = (),
    *,
    gather_dim: int,
    world_size: int,
    group_name: str,
    return_gathered: bool,
    multiply: Multiply | None = None,
) -> list[torch.Tensor]:
    """Returns [gathered @ w for w in weights], each 2-D, followed by the gathered tensor if asked for. See the
    declaration for shapes. multiply: what the outputs are made by, of the rows, where they are not the products.
    """
    gathered = all_gather(shard, gather_dim=gather_dim, world_size=world_size, group_name=group_name)
    rows = gathered.flatten(0, -2)
    outputs = [rows @ weight for weight in weights] if multiply is None else multiply(rows, weights, extras)
    if return_gathered:
        outputs.append(gathered)
    return outputs


def sum_of_products(
    a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns sum_i a_i @ b_i + bias, [.., N], contiguous. a_i is [.., K_i], with shapes that differ only in K_i; b_i
    is [K_i, N]. bias is [N], or [M, 1] for matrices. It uses one buffer: every matmul but the first adds to the buffer,
    and rounds.
    """
    if bias is None and len(a) == 1:
        return torch.matmul(a[0], b[0])
    rows = [tensor.flatten(0, -2) for tensor in a]
    total = rows[0] @ b[0] if bias is None else torch.addmm(bias, rows[0], b[0])
    for left, right in zip(rows[1:], b[1:], strict=True):
        total.addmm_(left, right)
    return total.view(*a[0].shape[:-1], total.shape[1])


def matmul_reduce_scatter(
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    *,
    scatter_dim: int,
    reduce_op: str,
    world_size: int,
    group_name: str,
    prepare: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """reduce_scatter(prepare(sum_i a_i @ b_i + bias)). See the declaration for shapes."""
    total = sum_of_products(a, b, bias)
    total = total if prepare is None else prepare(total.contiguous())
    return reduce_scatter(
        total, scatter_dim=scatter_dim, reduce_op=reduce_op, world_size=world_size, group_name=group_name
    )


def matmul_all_reduce(
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    *,
    reduce_op: str,
    world_size: int,
    group_name: str,
    prepare: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """all_reduce(prepare(sum_i a_i @ b_i + bias)), reduced in place. See the declaration for shapes."""
    total = sum_of_products(a, b, bias)
    total = total if prepare is None else prepare(total.contiguous())
    return all_reduce_(total, reduce_op=reduce_op, world_size=world_size, group_name=group_name)


def all_reduce_(x: torch.Tensor, *, reduce_op: str, world_size: int, group_name: str) -> torch.Tensor:
    """The reduction of the contiguous x over the ranks, in its place."""
    group = _group(group_name)
    native = reduce_op == "sum" or _averages(group, x.device)
    communicate(dist.all_reduce, x, _reduce_op(reduce_op, native), group=group)
    return x if native else x.div_(world_size)


def combined(
    top_k: int,
    products: torch.Tensor,
    places: torch.Tensor | None,
    scale: torch.Tensor,
    absent: torch.Tensor | None,
    added: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    experts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns [T, N], the scaled sum of the slots of each token, with `added`; see `nodes.CombineExperts`."""
    terms = wide(products if bias is None or experts is None else products + bias[experts])
    if places is None:
        places = torch.arange(products.shape[0], device=products.device)
    terms = terms[places]
    if absent is not None:
        terms = terms.masked_fill(absent[places].unsqueeze(1), 0.0)
    terms = terms * wide(scale).view(-1)[places].unsqueeze(1)
    total = terms.view(-1, top_k, terms.shape[1]).sum(1)
    return (total if added is None else total + added).to(products.dtype)


def chosen(
    top_k: int, scores: str, normalised: bool, x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (values, experts) [T, top_k]; see `nodes.ChooseExperts`."""
    logits = x @ router if bias is None else torch.addmm(bias, x, router)
    given = logits.float().softmax(-1) if scores == "softmax" else logits
    # Stable sorts choose among equal values from the left on every device, where topk does on GPUs alone, and zeros
    # without a sign before those with one.
    places = torch.sort((given == 0) & given.signbit(), dim=-1, stable=True)[1]
    order = torch.sort(given.gather(1, places), dim=-1, descending=True, stable=True)[1]
    experts = places.gather(1, order)[:, :top_k].contiguous()
    values = given.gather(1, experts)
    return (values / values.sum(-1, keepdim=True) if normalised else values), experts


def add_norm(
    reduced: torch.Tensor,
    extras: Sequence[torch.Tensor | None],
    norm: Norm,
    post: Norm | None = None,
    saved: Sequence[str] = (),
    factor: float = 1.0,
) -> tuple[torch.Tensor, ...]:
    """Returns (normed if there is a norm, total, what is saved) for reduced rows. extras: see `nodes.EXTRAS`."""
    given = dict(zip(EXTRAS, extras, strict=True))
    values = {"reduced": reduced}
    total = reduced
    for name in ("bias", "second_bias"):
        total = total if (row := given[name]) is None else total + row.view(-1)
    if post is not None:
        total, *statistics = _normalised(total, post, given["post_weight"], given["post_shift"], total.dtype)
        values |= dict(zip(("post_mean", "post_rstd"), statistics, strict=False))
    if factor != 1.0:
        total = total * factor
    if (scale := given["scale"]) is not None:
        total = (wide(total) * wide(scale).view(-1)).to(total.dtype)
    rows = total
    if (residual := given["residual"]) is not None:
        rows = wide(total) + wide(residual).reshape(total.shape)
        total = rows.to(total.dtype)
    values["total"] = total
    if norm.form != NO_NORM:
        x = rows if norm.unrounded else total
        behind = _normalised(x, norm, given["weight"], given["shift"], total.dtype)
        values |= dict(zip(("normed", "mean", "rstd", "scaled"), behind, strict=True))
        if "other" in saved:
            values["other"] = _normalised(x, norm, given["other_weight"], given["other_shift"], total.dtype)[0]
    return tuple(values[name] for name in norm_returns(norm, tuple(saved)))


def norm_shard(
    x: torch.Tensor, extras: Sequence[torch.Tensor | None], prologue: ShardNorm
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Returns (norm(x + residual), what the prologue returns). extras: see `nodes.SHARD_EXTRAS`."""
    given = dict(zip(SHARD_EXTRAS, extras, strict=True))
    all_extras = [given.get(name) for name in EXTRAS]
    shard, total, *saved = add_norm(x, all_extras, prologue.norm, None, prologue.saved)
    return shard, (*((total,) if given["residual"] is not None else ()), *saved)


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in fp32, or in its own dtype if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _normalised(
    x: torch.Tensor, norm: Norm, weight: torch.Tensor | None, shift: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (norm(x) in `dtype`, mean, rstd, scaled), the last three in fp32 or wider."""
    value = wide(x)
    mean = value.mean(-1, keepdim=True)
    if norm.form == "layer":
        value = value - mean
    rstd = torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + norm.eps)
    scaled = result = value * rstd
    if norm.round_first:
        result = result.to(dtype).to(scaled.dtype)
    if weight is not None:
        factor = weight.view(-1).to(scaled.dtype)
        result = result * (factor + 1.0 if norm.plus_one else factor)
    if shift is not None:
        result = result + shift.view(-1).to(scaled.dtype)
    return result.to(dtype), mean, rstd, scaled


def all_reduce_rms_norm(
    x: torch.Tensor,
    extras: Sequence[torch.Tensor | None],
    *,
    norm: Norm,
    reduce_op: str,
    world_size: int,
    group_name: str,
    post: Norm | None = None,
    saved: Sequence[str] = (),
    factor: float = 1.0,
) -> tuple[torch.Tensor, ...]:
    """Returns (normed, total, and what is saved) of all_reduce(x). See the declaration for shapes."""
    own = x.clone(memory_format=torch.contiguous_format)
    reduced = all_reduce_(own, reduce_op=reduce_op, world_size=world_size, group_name=group_name)
    return add_norm(reduced, extras, norm, post, saved, factor)


def matmul_all_gather(
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    *,
    gather_dim: int,
    world_size: int,
    group_name: str,
) -> torch.Tensor:
    """all_gather(sum_i a_i @ b_i + bias). See the declaration for shapes."""
    total = sum_of_products(a, b, bias)
    return all_gather(total, gather_dim=gather_dim, world_size=world_size, group_name=group_name)


def matmul_all_to_all(
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    *,
    gather_dim: int,
    parts: int,
    world_size: int,
    group_name: str,
) -> torch.Tensor:
    """all_to_all(sum_i a_i @ b_i + bias). See the declaration for shapes."""
    total = sum_of_products(a, b, bias)
    return exchange_columns(total, gather_dim=gather_dim, parts=parts, world_size=world_size, group_name=group_name)


def exchange_columns(
    product: torch.Tensor, *, gather_dim: int, parts: int, world_size: int, group_name: str
) -> torch.Tensor:
    """[.., S, .., N] -> [.., W*S, .., N / W], contiguous: see task/ulysses.py."""
    shape = product.shape
    outer, rows = math.prod(shape[:gather_dim]), math.prod(shape[gather_dim:-1])
    columns = shape[-1] // (parts * world_size)
    runs = product.reshape(outer, rows, parts, world_size, columns).permute(3, 0, 1, 2, 4)
    received = _all_to_all(runs, group_name)
    out = received if outer == 1 else received.transpose(0, 1)
    return out.reshape(ulysses.gathered_shape(shape, shape[-1], gather_dim, world_size))


def exchange_rows(x: torch.Tensor, *, scatter_dim: int, parts: int, world_size: int, group_name: str) -> torch.Tensor:
    """[.., W*S, .., C'] -> [.., S, .., W * C'], contiguous: see task/ulysses.py."""
    shape = x.shape
    outer, rows = math.prod(shape[:scatter_dim]), math.prod(shape[scatter_dim:-1]) // world_size
    runs = x.reshape(outer, world_size, rows, parts, shape[-1] // parts).transpose(0, 1)
    received = _all_to_all(runs, group_name)
    return received.permute(1, 2, 3, 0, 4).reshape(ulysses.received_shape(shape, scatter_dim, world_size))


def all_to_all_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    scatter_dim: int,
    parts: int,
    world_size: int,
    group_name: str,
    return_received: bool,
) -> list[torch.Tensor]:
    """Returns [received @ weight], followed by what was received if asked for. See the declaration for shapes."""
    received = exchange_rows(x, scatter_dim=scatter_dim, parts=parts, world_size=world_size, group_name=group_name)
    outputs = [received.flatten(0, -2) @ weight]
    return [*outputs, received] if return_received else outputs


def _all_to_all(runs: torch.Tensor, group_name: str) -> torch.Tensor:
    """Returns what all ranks have for this rank, in rank order: runs [W, ..], one for each rank, becomes [W, ..]."""
    sent = runs.contiguous()
    received = torch.empty_like(sent)
    communicate(dist.all_to_all_single, received, sent, group=_group(group_name))
    return received


def _group(name: str) -> dist.ProcessGroup:
    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def _reduce_op(name: str, native: bool) -> Any:
    return dist.ReduceOp.AVG if native and name == "avg" else dist.ReduceOp.SUM


def _averages(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Returns whether the group's backend averages by itself; gloo does not, and gets a sum and a division."""
    return bool(group._get_backend(device).name() == "nccl")
