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

# This is not in the function, because Dynamo traces the function.
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
    """Returns softmax(cap(scale * q @ K^T), masked) @ V, where K and V are the keys and values of all ranks of the
    group in rank order.

    q is [B, Hq, Sq, D]. k and v are [B, Hkv, S, D], those of this rank, with the same S on every rank; Hkv divides Hq.
    Strides are free. The result is [B, Hq, Sq, D] with the memory of a contiguous [B, Sq, Hq, D]. Gradients are those
    of the whole function; those of k and v are summed over the ranks. All ranks of the group have to make the call,
    with the same mask and window.

    Args:
        group: the process group; None means the default group.
        mask: what a rank's queries see, in a sequence that is sharded over the ranks
            `full`: everything;
            `causal_offset`: what is not after them; rank r holds the r-th of W equal parts;
            `zigzag`: the same, but rank r holds the chunks r and 2 W - 1 - r of 2 W, so that all ranks have equal work;
            `causal`: query i of each rank sees key j of all keys if j <= i, like `is_causal` of torch;
            `given`: what the bias says.
        window: the number of keys that a query sees at most: the last of those that the mask shows, including the key
            at its own position. 0 means all; so does a window as long as the sequence. Not allowed with `full` and
            `given`. With `causal_offset`, a rank does not send keys to ranks that do not see them.
        scale: the scale of the scores; None means 1 / sqrt(D).
        softcap: 0 for none, otherwise cap(s) = softcap * tanh(s / softcap).
        strategy: `library`, `chunked` or `tile`, or `auto` for the strategy that the plan expects to be fastest.
        bias: only with the mask `given`: a tensor that broadcasts to [B, Hq, Sq, W * S], for this rank's queries and
        the
            keys of all ranks in rank order. A bias of bfloat16, float16 or float32 is added to the scores behind the
            soft cap, on GPUs in the dtype of q. A bias of bool hides keys where it is False. A query that sees nothing
            gets zeros. A bias has no gradient, and `tile` does not support it.

    Raises ValueError for operands that do not fit, and for a bias that requires a gradient; InvalidTaskNode for an
    unknown mask, window or strategy; and what the calls of a workspace raise (docs/errors.md).
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


# Dynamo takes the texts as constants, and does not trace how they are made.
@torch._dynamo.assume_constant_result
def _texts(
    mask: str, window: int, scale: float, softcap: float, world_size: int, group_name: str, strategy: str, trained: bool
) -> tuple[str, str]:
    """Returns the texts of the nodes of the forward and of the backward."""
    common = Mask(mask, window), scale, softcap, world_size, group_name, "", Policy(strategy)
    return AllGatherAttention(*common, trained).text(), AttentionReduceScatter(*common).text()


class _Attention(torch.autograd.Function):
    """The function with its gradient. The forward saves the gathered keys and values, as autograd does."""

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
