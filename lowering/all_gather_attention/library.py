"""all_gather_attention, strategy `library`: the library's all-gather of keys and values, then its attention.

The mask is cut into as few blocks as possible that the library's kernels know: full blocks and causal squares. Their
results are merged by the logarithms of their sums. FlashAttention, which knows windows, computes the blocks that a
window cuts. On the CPU device torch's own operations compute everything, with the mask.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ditron_inductor.lowering.attention import local_attention
from ditron_inductor.lowering.attention.block_parts import as_sent, canonical, joined, with_rows
from ditron_inductor.lowering.attention.merge import Merge, in_order
from ditron_inductor.task import reference_attention
from ditron_inductor.task.attention_masks import GIVEN, blocks
from ditron_inductor.task.nodes import AllGatherAttention
from ditron_inductor.task.watch import communicate

Outputs = list[torch.Tensor]


def gather(k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Returns the keys and the values [B, H, S, D] of all ranks, each as a contiguous [W, B, S, H, D]."""
    own = [as_sent(k), as_sent(v)]
    gathered = [x.new_empty(group.size(), *x.shape) for x in own]
    communicate(_gather_both, [x.flatten(0, 1) for x in gathered], own, group)
    return gathered


def _gather_both(gathered: list[torch.Tensor], own: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Gathers each tensor [B, ..] of `own` from all ranks, in rank order, into its tensor [W * B, ..] of `gathered`."""
    if group._get_backend(own[0].device).name() == "nccl":
        # NCCL gathers both in one launch on the current stream. Gloo can do that with CPU memory only.
        options = distributed_c10d.AllgatherOptions()
        options.asyncOp = False
        work = group.allgather_into_tensor_coalesced(gathered, own, options)
        # There is no work object if the collective ran on the current stream.
        if work is not None:
            work.wait()
    else:
        for out, x in zip(gathered, own, strict=True):
            dist.all_gather_into_tensor(out, x, group=group)


def make(node: AllGatherAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[..., Outputs]:
    """Returns a function (q, k, v, perhaps a bias) -> [out, lse, (gathered k, v)] for operands of this form."""
    group: dist.ProcessGroup = distributed_c10d._resolve_process_group(node.group_name)  # type: ignore[arg-type]
    sizes = node.mask, group.rank(), node.world_size, q.shape[2], k.shape[2]
    run = local_attention.choose(q, k, v, node.softcap, biased=node.mask.kind == GIVEN)

    def by_math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None) -> Outputs:
        gathered = gather(k, v, group)
        keys, values = canonical(gathered[0]), canonical(gathered[1])
        seen = reference_attention.visible(*sizes, q.device)
        bias, anchors = run.anchored(bias, q.dtype, whole=True)
        out, lse = reference_attention.attend(
            q, keys, values, seen=seen, scale=node.scale, softcap=node.softcap, bias=bias
        )
        lse = lse.float()
        outputs = [in_order(out.to(q.dtype)), lse if anchors is None else lse + anchors]
        return [*outputs, keys, values] if node.return_gathered else outputs

    spans = joined(sorted(blocks(*sizes), key=lambda block: block.source))
    merge = Merge(q, [span.rows for span in spans])

    def by_blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None) -> Outputs:
        q, gathered, length = with_rows(q), gather(k, v, group), k.shape[2]
        bias, anchors = run.anchored(bias, q.dtype, whole=True)
        partials = []
        for span in spans:
            keys, values = span.of(gathered[0]), span.of(gathered[1])
            partials.append(run.forward(span.queries(q), keys, values, span.seen(bias, length), node.scale))
        out, lse = merge(torch.cuda.current_stream(q.device).cuda_stream, partials)
        lse = lse if anchors is None else lse + anchors
        return [out, lse, *map(canonical, gathered)] if node.return_gathered else [out, lse]

    return by_blocks if q.is_cuda else by_math
