"""The words that random programs are written in: collectives of named groups, norms, attention, dtypes.

`vocabulary` makes the globals of a program. The same source runs in its own dtypes, compiled or not, and as its own
reference, where every dtype is float64.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.nn import functional as F

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
Group = dist.ProcessGroup


def wait(result: Any) -> torch.Tensor:
    """What a functional collective returns, when it is there: in eager mode it may be on its way."""
    arrived: torch.Tensor = result.wait() if isinstance(result, functional.AsyncCollectiveTensor) else result
    return arrived


class Packed(torch.autograd.Function):
    """x, whose gradient is made contiguous: in eager mode the gradient of a collective takes nothing else."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0].contiguous()


def all_reduce(x: torch.Tensor, group: Group, op: str) -> torch.Tensor:
    return wait(functional.all_reduce(x, op, group))


class Reduced(torch.autograd.Function):
    """A sum over the ranks whose gradient is passed on as it is: the result feeds the same loss on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, op: str) -> torch.Tensor:
        return all_reduce(x, group, op)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None, None


class Copied(torch.autograd.Function):
    """x, whose gradient is summed over the ranks: in front of a layer that is cut by columns."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return all_reduce(grads[0].contiguous(), ctx.group, "sum"), None


def rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), w, 1e-5)


def layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, b, 1e-5)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None = None) -> torch.Tensor:
    """q [B, H, S, D], k, v [B, heads, keys, D], with fewer heads perhaps. seen: bools, which keys are attended to."""
    return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=q.shape[1] != k.shape[1])


def repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    """x [B, heads, keys, D] with every head `times` times in a row."""
    return x[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)


def attention_with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """The same with one more score [H] for each head, of no key, as transformers writes it."""
    k, v = (repeated(one, q.shape[1] // k.shape[1]) for one in (k, v))
    mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, torch.finfo(q.dtype).min)
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5 + mask
    both = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, 1, 1)], -1)
    return (both - both.max(-1, keepdim=True).values).softmax(-1)[..., :-1] @ v


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """A rotary embedding of whole heads."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def turned_by_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The same with angles of half a head."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def vocabulary(
    groups: Mapping[str, Group], rank: int, dtype: str, *, trained: bool, differs: bool, exact: bool = False
) -> dict[str, Any]:
    """The globals of a program on this rank.

    trained: collectives have gradients. differs: the ranks' graphs do, and so may the strides of what collectives get,
    unless it is contiguous. exact: all dtypes are float64.
    """

    def packed(x: torch.Tensor) -> torch.Tensor:
        # Collectives in eager mode take contiguous tensors only, those of compiled graphs any.
        return x if torch.compiler.is_compiling() and not differs else x.contiguous()

    def received(result: Any) -> torch.Tensor:
        if trained and not torch.compiler.is_compiling():
            return Packed.apply(result)
        return wait(result)

    def gather(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
        call = functional.all_gather_tensor_autograd if trained else functional.all_gather_tensor
        return received(call(packed(x), dim, group))

    def scatter(x: torch.Tensor, dim: int, group: Group, op: str = "sum") -> torch.Tensor:
        call = functional.reduce_scatter_tensor_autograd if trained else functional.reduce_scatter_tensor
        return received(call(packed(x), op, dim, group))

    def reduce(x: torch.Tensor, group: Group, op: str = "sum") -> torch.Tensor:
        return Reduced.apply(packed(x), group, op) if trained else all_reduce(packed(x), group, op)

    def copied(x: torch.Tensor, group: Group) -> torch.Tensor:
        return Copied.apply(x, group) if trained else x

    def exchange(x: torch.Tensor, group: Group) -> torch.Tensor:
        call = functional.all_to_all_single_autograd if trained else functional.all_to_all_single
        splits = [x.shape[0] // group.size()] * group.size()
        return received(call(packed(x), splits, splits, group))

    def grouped(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        if not exact:
            return torch._grouped_mm(x, w, ends)
        bounds = [0, *ends.tolist()]
        parts = [x[begin:end] @ one for begin, end, one in zip(bounds[:-1], bounds[1:], w, strict=True)]
        return torch.cat([*parts, x.new_zeros(x.shape[0] - bounds[-1], w.shape[-1])])

    words: dict[str, Any] = {
        one.__name__: one
        for one in (
            *(gather, scatter, reduce, copied, exchange, grouped, rms_norm, layer_norm),
            *(attention, attention_with_sinks, repeated, turned, turned_by_halves),
        )
    }
    own = torch.float64 if exact else DTYPES[dtype]
    words |= {"DT": own, "F32": torch.float64 if exact else torch.float32}
    words |= {f"ME_{name}": group.rank() for name, group in groups.items()}
    return {**words, **groups, "RANK": rank, "torch": torch, "F": F}


def load(source: str, words: Mapping[str, Any], name: str) -> Callable[..., list[torch.Tensor]]:
    """The function `program` of the source, with these globals; tracebacks show its lines."""
    module = dict(words)
    filename = f"<{name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), module)
    program: Callable[..., list[torch.Tensor]] = module["program"]
    return program
