"""`python -m benchmarks.ops.attention_reduce_scatter`: the backward of attention to keys and values that are sharded.

Of the shapes of `benchmarks.ops.all_gather_attention`, from the gradient of its output, the queries, the gathered keys
and values, the output and its logarithms of sums: the gradients of queries, keys and values, of the last two a rank's
part of their sum over the ranks. Contestants, all of a shape in one run:

    local       the gradients alone, nothing communicated: the limit, with the links
    sdpa        the library's backward, then two reduce-scatters by NCCL: `sdpa:aligned` (FlashAttention, whose causal
                mask is aligned at the end of the keys, and which has windows); without a mask `sdpa:cudnn` or
                `sdpa:flash`, whichever is faster
    sdpa:blocks what our `library` runs: the library's backward by blocks of the mask, then one reduce-scatter
    ditron      the op, which has the strategy `library` alone

For masks that no kernel has, and with a bias, `sdpa` is `sdpa:blocks`.
A contestant is timed only if its gradients are right on all ranks: those of some queries and of some keys of every rank
against an fp32 reference. Rows go into benchmarks/results/attention.csv.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from benchmarks.ops import all_gather_attention as forward
from benchmarks.ops.all_gather_attention import BLOCKS, Cell, Request, request_of
from benchmarks.records import Row

if TYPE_CHECKING:
    import torch

    from benchmarks.session import Session

__all__ = ["main", "measure", "parser", "request_of"]

MODULE = "benchmarks.ops.attention_reduce_scatter"
OP = "attention_reduce_scatter"
MOST_ERROR = 2.0e-2
"""Of a gradient against the fp32 reference, in norm: a few roundings to bfloat16, one of them of the probabilities."""
SLOWER = 1.02
"""What ours may be slower than the baseline."""
SEEN_ROWS = 1024
"""Rows of a mask that are written out at a time."""


@dataclass(frozen=True)
class Problem:
    """Operands of a cell on this rank (grad_out, q, gathered k and v, out, lse), and what is expected, in fp32: of
    `rows` of the queries' gradient and of the same rows of those of keys and values.
    """

    cell: Cell
    operands: tuple[torch.Tensor, ...]
    bias: torch.Tensor | None
    rows: torch.Tensor
    expected: tuple[torch.Tensor, ...]

    @property
    def scale(self) -> float:
        return float(self.cell.head_dim**-0.5)

    def check(self, grads: Sequence[torch.Tensor]) -> None:
        """Raises AssertionError for gradients [1, heads, tokens / W, head_dim] that are not near what is expected;
        `local` has the queries' alone.
        """
        for name, found, expected in zip(("q", "k", "v"), grads, self.expected, strict=False):
            shape = (1, expected.shape[1], self.operands[1].shape[2], self.cell.head_dim)
            assert found.shape == shape and found.dtype == self.operands[1].dtype, (
                f"{name}: {found.shape} {found.dtype}"
            )
            error = float((found[:, :, self.rows].float() - expected).norm() / expected.norm())
            assert error <= MOST_ERROR, f"the gradient of {name} is off by {error:.1e} of its norm"


def make_problem(session: Session, cell: Cell, device: Any, group_name: str) -> Problem:
    """Random operands, in memory [tokens, heads, head_dim] as projections leave them, and the forward's outputs."""
    import torch
    import torch.distributed as dist

    from benchmarks.ops.contest import of_every_shard, sampled_rows
    from ditron_inductor.lowering.all_gather_attention import library
    from ditron_inductor.task.attention_masks import Mask
    from ditron_inductor.task.nodes import AllGatherAttention
    from ditron_inductor.task.policy import Policy
    from ditron_inductor.task.reference_attention import attend_backward, visible

    world, rank = session.world_size, session.rank
    length, scale, mask = cell.tokens // world, cell.head_dim**-0.5, Mask(cell.mask, cell.window)
    generator = torch.Generator(device).manual_seed(1 + rank)

    def draw(heads: int) -> torch.Tensor:
        drawn = torch.randn(1, length, heads, cell.head_dim, generator=generator, device=device)
        return drawn.to(torch.bfloat16).transpose(1, 2)

    q, k, v, grad_out = draw(cell.heads), draw(cell.key_heads), draw(cell.key_heads), draw(cell.heads)
    node = AllGatherAttention(
        mask, scale, cell.softcap, world, group_name, "benchmark", Policy(), return_gathered=True
    )
    bias = cell.bias_of(rank, world, device)
    out, lse, keys, values = library.make(node, q, k, v)(q, k, v, bias)
    rows = sampled_rows(length, device)[:: 1 if length < forward.SAMPLED_ROWS else 2]

    def seen(of: torch.Tensor, columns: torch.Tensor | None = None) -> torch.Tensor | None:
        shown = visible(mask, rank, world, length, length, device, of)
        return shown if shown is None or columns is None else shown[:, columns]

    def added(of: torch.Tensor, columns: torch.Tensor | None = None) -> torch.Tensor | None:
        shown = bias if bias is None else bias[:, :, of]
        return shown if shown is None or columns is None else shown[..., columns]

    scores: dict[str, float] = {"scale": scale, "softcap": cell.softcap}
    of_rows = (one[:, :, rows] for one in (grad_out, q))
    given = out[:, :, rows], lse[:, :, rows]
    grad_q = attend_backward(*of_rows, keys, values, *given, seen=seen(rows), bias=added(rows), **scores)[0]
    columns = of_every_shard(rows, length, world)
    parts = [seen(part, columns) for part in torch.arange(length, device=device).split(SEEN_ROWS)]
    masks = [part for part in parts if part is not None]
    sampled = keys[:, :, columns], values[:, :, columns]
    whole = torch.cat(masks) if masks else None
    more = added(torch.arange(length, device=device), columns)
    grads = torch.stack(attend_backward(grad_out, q, *sampled, out, lse, seen=whole, bias=more, **scores)[1:])
    dist.all_reduce(grads)
    of_keys = grads.unflatten(3, (world, -1))[:, :, :, rank]
    return Problem(cell, (grad_out, q, keys, values, out, lse), bias, rows, (grad_q, *of_keys))


def contestants(session: Session, problem: Problem, group_name: str) -> dict[str, Any]:
    """Calls by name, each of which returns the gradients of queries, keys and values."""
    import torch

    from benchmarks.ops.contest import TIMEOUT_S, WORKSPACE_LIMIT, in_turns
    from ditron_inductor.lowering.attention_reduce_scatter import library
    from ditron_inductor.task import reference_attention
    from ditron_inductor.task.attention_masks import Mask
    from ditron_inductor.task.nodes import AttentionReduceScatter
    from ditron_inductor.task.policy import Policy

    cell, operands, bias, scale = problem.cell, problem.operands, problem.bias, problem.scale
    world, rank, q = session.world_size, session.rank, problem.operands[1]
    node = AttentionReduceScatter(
        Mask(cell.mask, cell.window), scale, cell.softcap, world, group_name, "benchmark", Policy()
    )
    blocks = library.make(node, operands)  # type: ignore[arg-type]
    found: dict[str, Any] = {BLOCKS: lambda i: blocks(*operands, bias)}
    if q.is_cuda:
        group = torch.distributed.distributed_c10d._resolve_process_group(group_name)
        found = {"local": _local(node, problem, rank), **found} | _of_programs(problem, rank, group)
    else:
        seen = reference_attention.visible(node.mask, rank, world, q.shape[2], q.shape[2], q.device)
        given: dict[str, Any] = {"seen": seen, "scale": scale, "softcap": cell.softcap, "bias": bias}
        backward = functools.partial(reference_attention.attend_backward, **given)
        found["local"] = lambda i: (backward(*operands)[0].to(q.dtype),)
    policy = Policy("auto", WORKSPACE_LIMIT, TIMEOUT_S)
    site = replace(node, site=f"benchmark/{cell.shape}:{node.kind}:auto", policy=policy)
    names = ("grad_out", "q", "k", "v", "out", "lse")
    given = dict(zip(names, operands, strict=True)) | {"bias": bias}
    return found | {"ditron": in_turns(site, [given], slice(3))}


def _local(node: Any, problem: Problem, rank: int) -> Any:
    """The fastest kernel on the blocks of the mask; its gradients of keys stay where they are."""
    import torch

    from ditron_inductor.lowering.attention import local_attention
    from ditron_inductor.lowering.attention.block_parts import joined
    from ditron_inductor.lowering.attention.merge import Merge
    from ditron_inductor.lowering.attention_reduce_scatter.library import gradients
    from ditron_inductor.task import attention_masks

    operands, (_, q, k, v, _, _) = problem.operands, problem.operands
    keys = k.shape[2] // node.world_size
    found = attention_masks.blocks(node.mask, rank, node.world_size, q.shape[2], keys)
    spans = joined(sorted(found, key=lambda one: one.source), whole=keys)
    bias, own = problem.bias, (k[:, :, :keys], v[:, :, :keys])
    run = local_attention.choose(q, *own, node.softcap, biased=bias is not None)
    merge = Merge(q, [span.rows for span in spans])

    def call(i: int) -> tuple[torch.Tensor]:
        partials = [gradients(run, span, operands, keys, node.scale, bias)[0] for span in spans]  # type: ignore[arg-type]
        return (merge.add(torch.cuda.current_stream().cuda_stream, partials, q),)

    return call


def _of_programs(problem: Problem, rank: int, group: Any) -> dict[str, Any]:
    """Returns the calls that autograd makes where a program gathers and attends, and none for masks that no kernel has.
    """
    import torch
    import torch.distributed as dist

    from ditron_inductor.lowering.attention import local_attention

    cell, scale, (grad_out, q, k, v, out, lse) = problem.cell, problem.scale, problem.operands

    def scattered(grad: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of a gradient [1, tokens, H, D], this rank's part of it as [1, H, tokens / W, D]."""
        mine = grad.new_empty(q.shape[2], *grad.shape[2:])
        dist.reduce_scatter_tensor(mine, grad.flatten(0, 1).contiguous(), group=group)
        return mine[None].transpose(1, 2)

    def by_kernel(i: int, *, kernel: local_attention.Local) -> tuple[torch.Tensor, ...]:
        grads = kernel.backward((grad_out, q, k, v, out, lse), local_attention.ShownBlock(), scale)
        return grads[0], *(scattered(one.transpose(1, 2)) for one in grads[1:])

    if cell.mask == "full":
        kernels = {"cudnn": local_attention.CUDNN, "flash": local_attention.FLASH}
        return {f"sdpa:{name}": functools.partial(by_kernel, kernel=kernel) for name, kernel in kernels.items()}
    if cell.mask != "causal_offset" or cell.softcap:
        return {}
    keep = (rank + 1) * q.shape[2]
    band = {"window_size_left": cell.window - 1, "window_size_right": 0} if cell.window else {}
    rows = [one.transpose(1, 2) for one in (grad_out, q, k[:, :, :keep], v[:, :, :keep], out)]
    state, unused = (torch.empty(size, dtype=torch.uint64, device=q.device) for size in (2, 0))

    def aligned(i: int) -> tuple[torch.Tensor, ...]:
        grads = torch.ops.aten._flash_attention_backward(
            *rows, lse, None, None, q.shape[2], keep, 0.0, True, state, unused, scale=scale, **band
        )
        # The keys behind are left out.
        pads = (0, 0, 0, 0, 0, k.shape[2] - keep)
        return grads[0].transpose(1, 2), *(scattered(torch.nn.functional.pad(one, pads)) for one in grads[1:3])

    return {"sdpa:aligned": aligned}


def run_cell(session: Session, request: Request, cell: Cell, group_name: str) -> list[Row]:
    """Times of the contestants whose results are right, as rows."""
    problem = make_problem(session, cell, session.clock.device, group_name)
    calls = contestants(session, problem, group_name)
    return forward.timed(session, request, cell, OP, calls, problem.check)


def verdict(rows: Sequence[Row]) -> str:
    """Says whether Ditron is at least as fast as the baseline in the rows of one cell. The text is empty without a
    baseline.
    """
    us = {row.contestant: row.p50_us for row in rows if row.p50_us}
    if "ditron" not in us or "sdpa" not in us:
        return ""
    gain = us["sdpa"] / us["ditron"]
    limit = "" if rows[0].limit_us is None else f", limit/ditron {rows[0].limit_us / us['ditron']:.2f}"
    return f"sdpa/ditron {gain:.2f}{limit} {'PASS' if gain >= 1 / SLOWER else 'FAIL'}"


def measure(session: Session, request: Request) -> list[Row]:
    """All cells, on one rank."""
    return forward.measure_by(session, request, run_cell, verdict)


parser: Callable[[], Any] = functools.partial(forward.parser, MODULE)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return forward.main(arguments, MODULE)


if __name__ == "__main__":
    sys.exit(main())
