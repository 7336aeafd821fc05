"""attention_reduce_scatter, strategy `library`: the library's backward of attention, then its reduce-scatter.

The mask is cut into as few blocks as possible that the library's kernels know. With the logarithms of the sums over
*all* keys, the gradients of each block's keys are exact, and those of the queries are added up. On the CPU device
torch's own operations compute everything, with the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ditron_inductor.lowering.attention import local_attention
from ditron_inductor.lowering.attention.block_parts import Span, joined, with_rows
from ditron_inductor.lowering.attention.local_attention import Given
from ditron_inductor.lowering.attention.merge import Merge, in_order
from ditron_inductor.task import reference_attention
from ditron_inductor.task.attention_masks import GIVEN, blocks
from ditron_inductor.task.nodes import AttentionReduceScatter
from ditron_inductor.task.watch import communicate

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def gradients(
    run: local_attention.Local,
    span: Span,
    operands: Given,
    keys: int,
    scale: float,
    bias: torch.Tensor | None = None,
) -> Outputs:
    """Returns the gradients of one call's rows, keys and values. keys: of a rank. bias: of all keys."""
    grad_out, q, k, v, out, lse = operands
    rows, seen = span.queries, span.seen(bias, keys)
    given = rows(grad_out), rows(q), span.among(k, keys), span.among(v, keys), rows(out), rows(lse).contiguous()
    return run.backward(given, seen, scale)


def lowered(run: local_attention.Local, given: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Returns (the anchored bias or None, the lse that belongs to it); see `Local.anchored`."""
    q, lse, bias = given[1], given[5], given[6] if len(given) > 6 else None
    bias, anchors = run.anchored(bias, q.dtype, whole=True)
    return bias, lse if anchors is None else lse - anchors


def make(node: AttentionReduceScatter, operands: Given) -> Callable[..., Outputs]:
    """Returns a function (*Given, perhaps a bias) -> (grad_q, grad_k, grad_v) for operands of this form."""
    _, q, k, v, _, _ = operands
    group: dist.ProcessGroup = distributed_c10d._resolve_process_group(node.group_name)  # type: ignore[arg-type]
    world, keys = node.world_size, k.shape[2] // node.world_size
    sizes = node.mask, group.rank(), world, q.shape[2], keys
    run = local_attention.choose(q, k[:, :, :keys], v[:, :, :keys], node.softcap, biased=node.mask.kind == GIVEN)
    spans = joined(sorted(blocks(*sizes), key=lambda block: block.source), whole=keys)
    merge = Merge(q, [span.rows for span in spans])

    def by_math(*given: torch.Tensor) -> Outputs:
        grad_out, q, k, v, out, lse = given[:6]
        bias, lse = lowered(run, given)
        seen = reference_attention.visible(*sizes, q.device)
        found = reference_attention.attend_backward(
            grad_out, q, k, v, out, lse, seen=seen, scale=node.scale, softcap=node.softcap, bias=bias
        )
        grad_k, grad_v = scattered(torch.stack([_by_source(grad, world) for grad in found[1:]], 1).to(k.dtype))
        return in_order(found[0].to(q.dtype)), grad_k, grad_v

    def scattered(parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns this rank's sums over the ranks, of keys and of values [B, H, S, D], for parts [W, 2, B, S, H, D]."""
        mine = parts.new_empty(parts.shape[1:])
        communicate(dist.reduce_scatter_tensor, mine, parts.flatten(0, 1), group=group)
        # One of them is copied, because outputs of an op must not share memory.
        return mine[0].transpose(1, 2), mine[1].clone().transpose(1, 2)

    def by_blocks(*given: torch.Tensor) -> Outputs:
        grad_out, q, k, v, out = (with_rows(x) for x in given[:5])
        bias, lse = lowered(run, given)
        operands = grad_out, q, k, v, out, lse
        B, heads, _, D = k.shape
        # These are zeros, because the mask may hide some keys from all queries.
        parts = k.new_zeros(world, 2, B, keys, heads, D)
        partials = []
        for span in spans:
            grad_q, *grads = gradients(run, span, operands, keys, node.scale, bias)
            partials.append(grad_q)
            for which, grad in enumerate(grads):
                mine = parts[span.source : span.source + span.count, which, :, span.first_key : span.last_key]
                mine += _by_source(grad, span.count)
        return merge.add(torch.cuda.current_stream(q.device).cuda_stream, partials, q), *scattered(parts)

    return by_blocks if q.is_cuda else by_math


def _by_source(x: torch.Tensor, count: int) -> torch.Tensor:
    """Returns x [B, H, count * S, D] as [count, B, S, H, D]."""
    return x.unflatten(2, (count, -1)).permute(2, 0, 3, 1, 4)
