"""The experts of a layer as serving engines run them in Triton: a *fused MoE* kernel over sorted slots.

A slot is a token's use of one expert. Slots are sorted by expert and padded to blocks of rows; a grouped matmul has a
program for each block of one expert and each tile of columns, reads the rows of its slots where they are, and writes
each result where its slot is. A layer is: the sort, gate and up, the activation, down with the weight of each slot, and
the sum over the slots of a token. The launches that are pointwise or sums are the compiler's. The tiles are tuned for
each size of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

FEW_SLOTS = 512
"""So many are sorted by one program."""
ROWS = (16, 64, 128)
"""The blocks of rows, for more and more slots of each expert."""


def _config(columns: int, step: int, group: int, warps: int, stages: int) -> triton.Config:
    return triton.Config({"COLUMNS": columns, "STEP": step, "GROUP": group}, num_warps=warps, num_stages=stages)


CONFIGS = {
    16: [_config(64, 128, 1, 4, 4), _config(32, 256, 1, 4, 4), _config(128, 64, 1, 4, 5), _config(32, 128, 1, 4, 6),
         _config(64, 256, 1, 8, 3)],
    64: [_config(128, 64, 8, 4, 4), _config(256, 64, 8, 8, 3), _config(128, 64, 1, 4, 4), _config(64, 128, 8, 4, 3)],
    128: [_config(128, 64, 8, 8, 3), _config(256, 64, 8, 8, 3), _config(128, 64, 16, 4, 4), _config(256, 64, 1, 8, 3),
          _config(128, 64, 32, 8, 4)],
}  # fmt: skip
"""What a call is tuned over, by its blocks of rows. GROUP: how many blocks take their turns in each tile of columns."""


def rows_of_blocks(slots: int, experts: int) -> int:
    """How many rows a block has: few experts with many slots each fill long blocks."""
    return next((rows for rows in ROWS if slots <= rows * experts), ROWS[-1])


def most_blocks(slots: int, experts: int, rows: int) -> int:
    """Each expert has at most one block that is not full."""
    return min(slots, experts + slots // rows)


@triton.jit
def sort_slots(experts, order, blocks, S, E, most, SLOTS: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """Writes order [most * BLOCK], the slots by expert, each expert's padded to blocks with S, and blocks [most], the
    experts of these blocks, or -1 behind the last one.
    """
    slots = tl.arange(0, SLOTS)
    taken = tl.load(experts + slots, mask=slots < S, other=E).to(tl.int32)
    names = tl.arange(0, EXPERTS)
    counts = tl.sum((taken[:, None] == names[None, :]).to(tl.int32), 0)
    padded = (counts + BLOCK - 1) // BLOCK * BLOCK
    ends = tl.cumsum(padded, 0)
    starts = ends - padded
    places = tl.arange(0, SLOTS * BLOCK)
    tl.store(order + places, S, mask=places < most * BLOCK)
    numbers = tl.arange(0, SLOTS)
    of_block = tl.sum((ends[None, :] <= (numbers * BLOCK)[:, None]).to(tl.int32), 1)
    used = numbers * BLOCK < tl.max(ends, 0)
    tl.store(blocks + numbers, tl.where(used & (of_block < E), of_block, -1), mask=numbers < most)
    tl.debug_barrier()
    before = tl.sum(((taken[:, None] == taken[None, :]) & (slots[None, :] < slots[:, None])).to(tl.int32), 1)
    start = tl.sum(tl.where(taken[:, None] == names[None, :], starts[None, :], 0), 1)
    tl.store(order + start + before, slots, mask=slots < S)


@torch.library.custom_op("ditron_benchmarks::sorted_slots", mutates_args=())
def _sorted_few(experts: torch.Tensor, E: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    S = experts.numel()
    most = most_blocks(S, E, rows)
    order = torch.empty(most * rows, dtype=torch.int32, device=experts.device)
    blocks = torch.empty(most, dtype=torch.int32, device=experts.device)
    powers = {"SLOTS": triton.next_power_of_2(S), "EXPERTS": triton.next_power_of_2(E)}
    sort_slots[(1,)](experts, order, blocks, S, E, most, BLOCK=rows, num_warps=8, **powers)
    return order, blocks


@_sorted_few.register_fake
def _(experts: torch.Tensor, E: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    most = most_blocks(experts.numel(), E, rows)
    return experts.new_empty(most * rows, dtype=torch.int32), experts.new_empty(most, dtype=torch.int32)


def sorted_slots(experts: torch.Tensor, E: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(order, blocks) of the experts of all slots, as in `sort_slots`: in one program for a few of them."""
    S = experts.numel()
    if S <= FEW_SLOTS:
        return _sorted_few(experts, E, rows)
    most, device = most_blocks(S, E, rows), experts.device
    ids, slots = experts.sort()
    counts = torch.zeros(E, dtype=torch.int64, device=device).scatter_add(0, ids, torch.ones_like(ids))
    padded = (counts + rows - 1) // rows * rows
    ends = padded.cumsum(0)
    places = (ends - padded - counts.cumsum(0) + counts)[ids] + torch.arange(S, device=device)
    order = torch.full((most * rows,), S, dtype=torch.int32, device=device).index_copy(0, places, slots.int())
    begins = torch.arange(most, device=device) * rows
    return order, torch.where(begins < ends[-1], torch.searchsorted(ends, begins, right=True), -1).int()


def _of_rows(configs: list[triton.Config], given: dict[str, Any], **more: Any) -> list[triton.Config]:
    return CONFIGS[{**given, **more}["BLOCK"]]


@triton.autotune(
    # Without a GPU nothing can be tuned: a single config is taken as it is.
    [one for some in CONFIGS.values() for one in some] if torch.cuda.is_available() else CONFIGS[16][:1],
    key=["sizes", "strides", "BLOCK"],
    prune_configs_by={"early_config_prune": _of_rows} if torch.cuda.is_available() else None,
)
@triton.jit
def sorted_matmul_kernel(
    x, weight, bias_and_scale, out, slots_and_experts, sizes, strides, FLAGS: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out[s] = (x[s // top_k] @ weight[e] + bias[e]) * scale[s] for each slot s of expert e. slots_and_experts: (order,
    blocks). sizes: (S, N, K, blocks). strides: of an expert, a column and a step of weight. FLAGS: (top_k, whether
    there is a bias, whether there is a scale).
    """
    S, N, K, count = sizes
    of_expert, of_column, of_step = strides
    order, blocks = slots_and_experts
    bias, scale = bias_and_scale
    TOP_K: tl.constexpr = FLAGS[0]
    BIASED: tl.constexpr = FLAGS[1]
    SCALED: tl.constexpr = FLAGS[2]
    tiles = tl.cdiv(N, COLUMNS)
    first = tl.program_id(0) // (GROUP * tiles) * GROUP
    turn = tl.program_id(0) % (GROUP * tiles)
    members = tl.minimum(count - first, GROUP)
    block, column = first + turn % members, turn // members * COLUMNS
    expert = tl.load(blocks + block)
    if expert < 0:
        return
    slots = tl.load(order + block * BLOCK + tl.arange(0, BLOCK))
    inside = slots < S
    columns = column + tl.arange(0, COLUMNS)
    steps = tl.arange(0, STEP)
    a = x + (slots // TOP_K).to(tl.int64)[:, None] * K + steps[None, :]
    b = weight + expert.to(tl.int64) * of_expert + columns.to(tl.int64)[None, :] * of_column + steps[:, None] * of_step
    acc = tl.zeros((BLOCK, COLUMNS), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, STEP)):
        in_k = steps < K - k * STEP
        left = tl.load(a, mask=inside[:, None] & in_k[None, :], other=0.0)
        right = tl.load(b, mask=(columns < N)[None, :] & in_k[:, None], other=0.0)
        acc = tl.dot(left, right, acc)
        a += STEP
        b += STEP * of_step
    if BIASED:
        acc += tl.load(bias + expert * N + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if SCALED:
        acc = acc * tl.load(scale + slots, mask=inside, other=0.0).to(tl.float32)[:, None]
    at = slots.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside[:, None] & (columns < N)[None, :])


@torch.library.custom_op("ditron_benchmarks::sorted_matmul", mutates_args=())
def sorted_matmul(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None,
    order: torch.Tensor, blocks: torch.Tensor, slots: int,
) -> torch.Tensor:  # fmt: skip
    """Returns out [slots, N] of x [slots / top_k, K], weight [E, K, N] with any strides, bias [E, N], scale [slots]."""
    _, K, N = weight.shape
    out = x.new_empty(slots, N)
    sizes, rows = (slots, N, K, blocks.numel()), order.numel() // blocks.numel()
    strides = weight.stride(0), weight.stride(2), weight.stride(1)
    flags = (slots // x.shape[0], bias is not None, scale is not None)

    def grid(meta: dict[str, int]) -> tuple[int]:
        return (blocks.numel() * triton.cdiv(N, meta["COLUMNS"]),)

    given = tuple(x if one is None else one for one in (bias, scale))
    sorted_matmul_kernel[grid](x.contiguous(), weight, given, out, (order, blocks), sizes, strides, flags, BLOCK=rows)
    return out


@sorted_matmul.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None,
    order: torch.Tensor, blocks: torch.Tensor, slots: int,
) -> torch.Tensor:  # fmt: skip
    return x.new_empty(slots, weight.shape[2])


Biases = tuple[torch.Tensor, torch.Tensor] | None
"""Of gate and up [E, 2F], and of down [E, D]."""


def fused_experts(
    x: torch.Tensor, experts: torch.Tensor, scale: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    activated: Callable[[torch.Tensor], torch.Tensor], biases: Biases = None,
) -> torch.Tensor:  # fmt: skip
    """Returns the sum over the experts of each token, of x [T, D], experts and scale [T, k], gate_up [E, D, 2F] and
    down [E, F, D] with any strides. activated: makes rows [.., F] of products [.., 2F].
    """
    ids, S, (T, top_k) = experts.flatten(), experts.numel(), experts.shape
    order, blocks = sorted_slots(ids, gate_up.shape[0], rows_of_blocks(S, gate_up.shape[0]))
    first, second = (None, None) if biases is None else biases
    hidden = activated(sorted_matmul(x, gate_up, first, None, order, blocks, S))
    terms = sorted_matmul(hidden, down, second, scale.flatten(), order, blocks, S)
    return terms.view(T, top_k, -1).sum(1)
