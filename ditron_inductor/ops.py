"""Functions for serving stacks, which call a distributed kernel directly, so that no graph is needed in which it would
be found.

They run eagerly, inside CUDA graphs, and inside a function that is compiled with ``backend="ditron"`` or another
backend. All ranks of the group make the same calls in the same order, as with any collective. If torch captures a
function of another backend in CUDA graphs, all ranks have to run, capture and replay it alike. They raise the errors of
compiled sites (docs/errors.md). Waits are bounded, so nothing hangs.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from ditron_inductor.errors import InvalidOperands
from ditron_inductor.expert_parallel import experts as experts
from ditron_inductor.lowering.all_gather_attention.function import all_gather_attention as all_gather_attention
from ditron_inductor.lowering.register import register
from ditron_inductor.options import Options
from ditron_inductor.task import flash_decode as task
from ditron_inductor.task.nodes import FlashDecode, Policy
from ditron_inductor.task.schema import overload

__all__ = ["all_gather_attention", "experts", "flash_decode"]

register()
_FLASH_DECODE = overload(task.OP)
DEFAULTS = Options.current()
"""The options when this module is imported. A function that is being compiled cannot read the environment."""


def flash_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    *,
    group: dist.ProcessGroup | str | None = None,
    block_table: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    options: Options | None = None,
    site: str = "ops",
) -> torch.Tensor:
    """Attention of one new token per sequence over a KV cache that is sharded over the ranks along the sequence.

    out[b, h] = sum_t softmax_t(cap(q[b, h] . k_t * scale)) v_t over the tokens t of all ranks. One rank's cache holds
    the new token's own key and value already. cap(s) = softcap * tanh(s / softcap), or s if softcap is 0.

    q: [B, Hq, D], the same on all ranks; bfloat16, float16 or float32.
    k_cache, v_cache: this rank's tokens, of the dtype of q. A dense cache is [B, S, Hkv, D]; give a cache in the layout
        [B, Hkv, S, D] as ``cache.transpose(1, 2)``. A paged cache, with a block_table, is [blocks, tokens, Hkv, D]. S
        and the number of blocks may differ from rank to rank. Hkv divides Hq. If the D elements of a head are not
        contiguous, each call copies the cache.
    lengths: int32 [B] on the device, the number of valid tokens of each sequence on *this* rank, which may be 0. They
        are read when the kernel runs, so a replayed CUDA graph reads the present values. Tokens beyond are never used.
    group: a process group or its name, of 2 ranks at least; None is the default group.
    block_table: int32 [B, most blocks]: block_table[b, i] is the block with tokens i * tokens, .. of sequence b.
    scale: 1 / sqrt(D) by default. softcap: 0 for none.
    options: only strategy, workspace_limit and timeout_s are used, and they have to be the same on all ranks. The
        default is `ditron_inductor.config` when this module was imported.
    site: a name for error messages, the same on all ranks.

    Returns [B, Hq, D], contiguous, of the dtype of q, bit-identical on every rank; zeros for a sequence that has no
    tokens anywhere. Nothing is differentiable. D 16, 32, 64, 128 and 256 run by our kernels, others by torch.

    Raises InvalidOperands (ValueError) naming the tensor, InvalidTaskNode (ValueError) naming scale or softcap,
    StrategyUnavailable, and what a compiled site raises.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k_cache, v_cache)):
        raise InvalidOperands(
            op=task.OP,
            tensor="q, k_cache or v_cache",
            found="part of a graph of gradients",
            expected="differentiable here: call it under torch.no_grad()",
        )
    name, world_size = _named(group)
    chosen = DEFAULTS if options is None else options
    node = _text(
        1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
        float(softcap),
        world_size,
        name,
        site,
        (chosen.strategy, chosen.workspace_limit, chosen.timeout_arg, chosen.trials),
        block_table is not None,
    )
    operands = [q, k_cache, v_cache, lengths]
    out: torch.Tensor = _FLASH_DECODE(operands if block_table is None else [*operands, block_table], node, None)[0]
    return out


# A function that is being compiled takes the text as it is.
@torch._dynamo.assume_constant_result
def _text(
    scale: float,
    softcap: float,
    world_size: int,
    group_name: str,
    site: str,
    policy: tuple[str, int, float, bool],
    paged: bool,
) -> str:
    return FlashDecode(scale, softcap, world_size, group_name, site, Policy(*policy), paged).text()


def _named(group: dist.ProcessGroup | str | None) -> tuple[str, int]:
    """Returns (the name of a group, its size)."""
    if isinstance(group, str):
        return group, dist.distributed_c10d._resolve_process_group(group).size()  # type: ignore[arg-type]
    found: dist.ProcessGroup | None = dist.group.WORLD if group is None else group
    if found is None:
        raise ValueError(f"{task.OP}: no group is given, and torch.distributed is not initialised")
    return str(found.group_name), found.size()
