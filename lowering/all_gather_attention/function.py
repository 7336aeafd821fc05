"""`ditron_inductor.ops.all_gather_attention`: the node as a function that has a gradient."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from ditron_inductor.lowering.register import register
from ditron_inductor.task.attention_masks import GIVEN, LONGEST_WINDOW, Mask
from ditron_inductor.task.nodes import AllGatherAttention, AttentionReduceScatter
from ditron_inductor.task.policy import Policy

# Here and not in the function, which a compiler traces.
register()


def all_gather_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    mask: str = "causal_offset",
    window: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    strategy: str = "auto",
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(cap(scale * q @ K^T), masked) @ V, where K and V are the keys and values of all ranks of the group in
    rank order.

    q [B, Hq, Sq, D]; k and v [B, Hkv, S, D] of this rank, as many on every rank; Hkv divides Hq. Any strides. Returns
    [B, Hq, Sq, D] with the memory of a contiguous [B, Sq, Hq, D]. Gradients of q, k and v are those of the whole: those
    of k and v are summed over the ranks. A collective call: all ranks of the group make it, with one mask and window.

    Args:
        group: the default group without one.
        mask: what a rank's queries see, in a sequence that is sharded over the ranks
            `full`: everything;
            `causal_offset`: what is not after them; rank r holds the r-th of W equal parts;
            `zigzag`: the same, where rank r holds the chunks r and 2 W - 1 - r of 2 W, which is the same work on all
            ranks;
            `causal`: key j of all where j <= i, the number of the query on its rank, as `is_causal` of torch;
            `given`: what the bias says.
        window: of the keys that a query would see it sees the last ones only, so many, that at its own position among
            them; 0 for all, and so is any as long as the sequence. Not beside `full` and `given`. Ranks whose keys
            nobody sees send none.
        scale: 1 / sqrt(D) without one.
        softcap: 0 for none, else cap(s) = softcap * tanh(s / softcap).
        strategy: `library`, `chunked` or `tile`, or `auto` for what the plan expects to be fastest.
        bias: beside `given`, and no other mask: a tensor that can be broadcast to [B, Hq, Sq, W * S], what this rank's
            queries make of the keys of all ranks, in rank order. Of bfloat16, float16 or float32, which is added to
            the scores behind the soft cap, on GPUs as the dtype of q; or of bool, which hides keys where it is False.
            A query that sees nothing gets zeros. A bias has no gradient. `tile` has none.

    Raises ValueError for operands that do not fit, and for a bias that wants a gradient; InvalidTaskNode for a mask,
    window or strategy that there is not; and what the calls of a workspace raise (docs/errors.md).
    """
    group = group if group is not None else dist.group.WORLD
    if group is None:
        raise ValueError("all_gather_attention needs a process group: call torch.distributed.init_process_group first")
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    if group.size() == 1:
        raise ValueError("all_gather_attention needs a group of at least 2 ranks; use scaled_dot_product_attention")
    if bias is not None and bias.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "all_gather_attention: bias wants a gradient, which is not computed; detach it, or attend to keys that are "
            "gathered by scaled_dot_product_attention"
        )
    if (mask == GIVEN) != (bias is not None):
        found = "no bias" if bias is None else "a bias"
        raise ValueError(
            f"all_gather_attention: {found} beside the mask '{mask}'; '{GIVEN}' has one, and no other mask"
        )
    seen = mask, min(window, LONGEST_WINDOW), scale, softcap
    site = group.size(), group.group_name, strategy
    out: torch.Tensor = _Attention.apply(q, k, v, bias, seen, site)  # type: ignore[no-untyped-call]
    return out


# A function that is being compiled takes the texts as they are.
@torch._dynamo.assume_constant_result
def _texts(
    mask: str, window: int, scale: float, softcap: float, world_size: int, group_name: str, strategy: str, trained: bool
) -> tuple[str, str]:
    """The nodes of the forward and of the backward."""
    common = Mask(mask, window), scale, softcap, world_size, group_name, "", Policy(strategy)
    return AllGatherAttention(*common, trained).text(), AttentionReduceScatter(*common).text()


class _Attention(torch.autograd.Function):
    """The forward keeps the gathered keys and values for the backward, as autograd does with those of a collective."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        seen: tuple[str, int, float, float],
        site: tuple[int, str, str],
    ) -> torch.Tensor:
        trained = any(ctx.needs_input_grad[:3])
        forward, ctx.backward_node = _texts(*seen, *site, trained)
        operands = [q, k, v] if bias is None else [q, k, v, bias]
        found = torch.ops.ditron.all_gather_attention.default(operands, forward, None)
        if trained:
            ctx.save_for_backward(q, found[2], found[3], found[0], found[1], bias)
        result: torch.Tensor = found[0]
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, keys, values, out, lse, bias = ctx.saved_tensors
        operands = [grads[0], q, keys, values, out, lse, *(() if bias is None else (bias,))]
        found = torch.ops.ditron.attention_reduce_scatter.default(operands, ctx.backward_node, None)
        return found[0], found[1], found[2], None, None, None
