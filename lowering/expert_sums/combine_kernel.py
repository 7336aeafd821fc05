"""combine_experts: the weighted sum of what its experts return for each token, in one pass over the slots.

Problem. The products [S, N] of a grouped matmul lie sorted by expert, and a token has `top_k` of them. Indexing them
and adding up the result writes and reads a tensor of the size of all slots, in fp32 where the weights are in fp32.
Algorithm. A program has a block of tokens and a block of columns. It reads the places of the tokens' slots, their
factors and their rows, adds in fp32, and rounds once. So each product is read once, and only the sums are written. To
a product of experts with biases the bias of its expert is added first, and the sum is rounded as eager rounds it.
Nothing is communicated, and no program waits. Limits. The columns of the operands are contiguous. Anything else is
computed by the library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ditron_inductor.device.streams import handle_for
from ditron_inductor.lowering.host.launch import ceil_div
from ditron_inductor.lowering.host.launcher import Arguments, local_launcher
from ditron_inductor.lowering.host.local_calls import LocalCalls, facts_of
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import CombineExperts

ROWS, BLOCK, WARPS = 4, 512, 4
"""The tokens and columns of a program's block, and the warps of a program."""
Runner = Callable[..., list[torch.Tensor]]
"""A function of (products, places or None, scale, absent, added, bias, experts), of which the last four may be None."""


class Sizes(NamedTuple):
    """The tokens, the columns, the elements from row to row of the products and of what is added, and the experts that
    have a bias.
    """

    T: Any
    N: Any
    pitch: Any
    added_pitch: Any
    E: Any


class How(NamedTuple):
    """What is known at compile time: the experts of a token, whether something is added, whether slots are absent,
    whether the products lie token by token, whether experts have biases, and the block.
    """

    TOP_K: Any
    HAS_ADDED: Any
    HAS_ABSENT: Any
    IN_ORDER: Any
    HAS_BIAS: Any
    ROWS: Any
    BLOCK: Any


@triton.jit
def combine_kernel(products, places, scale, absent, added, bias, experts, out, sizes, HOW: tl.constexpr):
    """See the module and the node. products: [S, N]. places, scale, absent, experts: [S]. added, out: [T, N]. bias:
    [E, N]. What HOW says is not there may be anything.
    """
    TOP_K: tl.constexpr = HOW.TOP_K
    ROWS: tl.constexpr = HOW.ROWS
    BLOCK: tl.constexpr = HOW.BLOCK
    across = tl.cdiv(sizes.N, BLOCK)
    block = tl.program_id(0)
    tokens = (block // across * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = block % across * BLOCK + tl.arange(0, BLOCK)
    exists = tokens < sizes.T
    inside = exists[:, None] & (columns < sizes.N)[None, :]
    S = sizes.T * TOP_K
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for j in tl.static_range(TOP_K):
        if HOW.IN_ORDER:
            place = tokens * TOP_K + j
        else:
            place = tl.load(places + tokens * TOP_K + j, mask=exists, other=0)
            place = tl.where(place < 0, place + S, place)
        # What lies outside is not read, and its sum is no number.
        there = (place >= 0) & (place < S)
        factor = tl.load(scale + place, mask=exists & there, other=float("nan")).to(tl.float32)
        if HOW.HAS_ABSENT:
            # Nor is the product of an absent slot, which counts as 0.
            there = there & (tl.load(absent + place, mask=exists & there, other=0) == 0)
        product = tl.load(
            products + place[:, None] * sizes.pitch + columns[None, :], mask=inside & there[:, None], other=0.0
        )
        if HOW.HAS_BIAS:
            expert = tl.load(experts + place, mask=exists & there, other=0)
            expert = tl.where(expert < 0, expert + sizes.E, expert)
            known = inside & (there & (expert >= 0) & (expert < sizes.E))[:, None]
            row = tl.load(bias + expert[:, None] * sizes.N + columns[None, :], mask=known, other=0.0)
            product = (product.to(tl.float32) + row.to(tl.float32)).to(product.dtype)
        total += product.to(tl.float32) * factor[:, None]
    if HOW.HAS_ADDED:
        more = tl.load(added + tokens[:, None] * sizes.added_pitch + columns[None, :], mask=inside, other=0.0)
        total += more.to(tl.float32)
    tl.store(out + tokens[:, None] * sizes.N + columns[None, :], total.to(out.dtype.element_ty), mask=inside)


def prepare(
    node: CombineExperts,
    products: torch.Tensor,
    places: torch.Tensor | None,
    scale: torch.Tensor,
    absent: torch.Tensor | None,
    added: torch.Tensor | None,
    bias: torch.Tensor | None,
    experts: torch.Tensor | None,
    strategy: str,
) -> Runner:
    """Returns what computes the sums for operands of these forms: the kernel if it can run, and otherwise the library.
    In the interpreter, which is slow, the kernel runs only if `tile` is forced.
    """
    if products.device.type == "cpu" and strategy != "tile":
        return by_library(node)
    rows = [products] if added is None else [products, added]
    whole = [one for one in (places, scale, absent, bias, experts) if one is not None]
    lies = all(one.stride(1) == 1 for one in rows) and all(one.is_contiguous() for one in whole)
    if not lies or products.numel() == 0 or facts_of(products.device).tile_problem:
        return by_library(node)
    N = products.shape[1]
    T = products.shape[0] // node.top_k
    sizes = Sizes(T, N, products.stride(0), rows[-1].stride(0), 0 if bias is None else len(bias))
    has = node.has_added, node.has_absent, places is None, node.has_bias
    how = How(node.top_k, *has, ROWS, min(BLOCK, triton.next_power_of_2(N)))
    arguments = Arguments(ceil_div(T, ROWS) * ceil_div(N, how.BLOCK), {"sizes": sizes, "HOW": how, "num_warps": WARPS})
    launcher = local_launcher(combine_kernel, products.device)

    def run(
        products: torch.Tensor,
        places: torch.Tensor | None,
        scale: torch.Tensor,
        absent: torch.Tensor | None,
        added: torch.Tensor | None,
        bias: torch.Tensor | None = None,
        experts: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        out = products.new_empty(T, N)
        of_slots = scale if places is None else places
        tensors = {
            "products": products,
            "places": of_slots,
            "scale": scale,
            "absent": of_slots if absent is None else absent.view(torch.uint8),
            "added": products if added is None else added,
            "bias": products if bias is None else bias,
            "experts": of_slots if experts is None else experts,
            "out": out,
        }
        launcher(handle_for(products), lambda: arguments, (), (), tensors)
        return [out]

    return run


def by_library(node: CombineExperts) -> Runner:
    """Returns what indexes the products and adds them up."""
    return lambda *operands: [reference.combined(node.top_k, *operands)]


sums_of_slots: LocalCalls[CombineExperts] = LocalCalls(prepare)
"""Returns [the sums [T, N]], contiguous. operands: as `CombineExperts` describes them."""
