"""The weighted sum of what its experts return for each token, in one pass over the slots.

Problem. The products [S, N] of a grouped matmul lie sorted by expert, and a token has `top_k` of them. Indexing them
and adding up the result writes and reads a tensor of the size of all slots, in fp32 where the weights are in fp32.
Algorithm. A program has a block of tokens and a block of columns. It reads the places of the tokens' slots, their
factors and their rows, adds in fp32, and rounds once. So each product is read once, and only the sums are written.
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
from ditron_inductor.lowering.host.local_calls import facts_of
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import CombineExperts

BLOCK, WARPS = 1024, 4
"""The columns of a program's block, and the warps of a program."""
LOADS = 16
"""The rows of products that a program has under way at once."""
Runner = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], list[torch.Tensor]]
"""A function of (products, places, scale, added or None)."""


class Slots(NamedTuple):
    """The slots of all tokens: pointers to the products [S, N], to `places` and `scale` [S], and to what is added, [T,
    N]; T, N, and the elements from row to row of the products and of what is added.
    """

    products: Any
    places: Any
    scale: Any
    added: Any
    T: Any
    N: Any
    pitch: Any
    added_pitch: Any


class Sizes(NamedTuple):
    """The numbers in `Slots`."""

    T: Any
    N: Any
    pitch: Any
    added_pitch: Any


class How(NamedTuple):
    """What is known at compile time: the experts of a token, whether something is added, and the block."""

    TOP_K: Any
    HAS_ADDED: Any
    ROWS: Any
    BLOCK: Any


@triton.jit
def summed_slots(slots, tokens, columns, HOW: tl.constexpr):
    """Returns a tuple with the sum [BLOCK] of the Slots of each of `tokens`, a tuple of numbers, in fp32. The numbers
    of a token and of its slots are the same for all threads, so no thread waits for another one.
    """
    TOP_K: tl.constexpr = HOW.TOP_K
    BLOCK: tl.constexpr = HOW.BLOCK
    NUM: tl.constexpr = len(tokens)
    inside = columns < slots.N
    S = slots.T * TOP_K
    places = ()
    products = ()
    factors = ()
    # All loads are issued before the first product is waited for.
    for i in tl.static_range(NUM * TOP_K):
        place = tl.load(slots.places + tokens[i // TOP_K].to(tl.int64) * TOP_K + i % TOP_K)
        places = places + (tl.where(place < 0, place + S, place),)  # type: ignore[assignment]
    for i in tl.static_range(NUM * TOP_K):
        # What lies outside is not read, and its sum is no number.
        there = (places[i] >= 0) & (places[i] < S)
        product = tl.load(slots.products + places[i] * slots.pitch + columns, mask=inside & there, other=0.0)
        factor = tl.load(slots.scale + places[i], mask=there, other=float("nan"))
        products = products + (product,)  # type: ignore[assignment]
        factors = factors + (factor,)  # type: ignore[assignment]
    sums = ()
    for t in tl.static_range(NUM):
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for j in tl.static_range(TOP_K):
            total += products[t * TOP_K + j].to(tl.float32) * factors[t * TOP_K + j].to(tl.float32)
        if HOW.HAS_ADDED:
            row = slots.added + tokens[t].to(tl.int64) * slots.added_pitch
            total += tl.load(row + columns, mask=inside, other=0.0).to(tl.float32)
        sums = sums + (total,)  # type: ignore[assignment]
    return sums


@triton.jit
def combine_kernel(products, places, scale, added, out, sizes, HOW: tl.constexpr):
    """See the module and the node. products: [S, N]. places, scale: [S]. added, out: [T, N]."""
    slots = Slots(products, places, scale, added, sizes.T, sizes.N, sizes.pitch, sizes.added_pitch)
    ROWS: tl.constexpr = HOW.ROWS
    BLOCK: tl.constexpr = HOW.BLOCK
    across = tl.cdiv(sizes.N, BLOCK)
    block = tl.program_id(0)
    columns = block % across * BLOCK + tl.arange(0, BLOCK)
    first = block // across * ROWS
    tokens = ()
    for i in tl.static_range(ROWS):
        tokens = tokens + (tl.minimum(first + i, sizes.T - 1),)  # type: ignore[assignment]
    sums = summed_slots(slots, tokens, columns, HOW)
    for i in tl.static_range(ROWS):
        # The last token is perhaps computed more than once.
        row = out + tokens[i].to(tl.int64) * sizes.N
        tl.store(row + columns, sums[i].to(out.dtype.element_ty), mask=columns < sizes.N)


def lie_in_rows(places: torch.Tensor, scale: torch.Tensor, *rows: torch.Tensor | None) -> bool:
    """Returns whether kernels can read operands of these forms: rows have contiguous columns."""
    lies = all(one.stride(1) == 1 for one in rows if one is not None)
    return lies and places.is_contiguous() and scale.is_contiguous()


def prepare(
    node: CombineExperts,
    products: torch.Tensor,
    places: torch.Tensor,
    scale: torch.Tensor,
    added: torch.Tensor | None,
    strategy: str,
) -> Runner:
    """Returns what computes the sums for operands of these forms: the kernel if it can run, and otherwise the library.
    In the interpreter, which is slow, the kernel runs only if `tile` is forced.
    """
    if products.device.type == "cpu" and strategy != "tile":
        return by_library(node)
    lies = lie_in_rows(places, scale, products, added)
    if not lies or products.numel() == 0 or facts_of(products.device).tile_problem:
        return by_library(node)
    N = products.shape[1]
    T = places.shape[0] // node.top_k
    sizes = Sizes(T, N, products.stride(0), (products if added is None else added).stride(0))
    rows = max(1, LOADS // node.top_k)
    how = How(node.top_k, node.has_added, rows, min(BLOCK, triton.next_power_of_2(N)))
    arguments = Arguments(ceil_div(T, rows) * ceil_div(N, how.BLOCK), {"sizes": sizes, "HOW": how, "num_warps": WARPS})
    launcher = local_launcher(combine_kernel, products.device)

    def run(
        products: torch.Tensor, places: torch.Tensor, scale: torch.Tensor, added: torch.Tensor | None
    ) -> list[torch.Tensor]:
        out = products.new_empty(T, N)
        rest = products if added is None else added
        tensors = {"products": products, "places": places, "scale": scale, "added": rest, "out": out}
        launcher(handle_for(products), lambda: arguments, (), (), tensors)
        return [out]

    return run


def by_library(node: CombineExperts) -> Runner:
    """Returns what indexes the products and adds them up."""
    return lambda products, places, scale, added: [reference.combined(products, places, scale, added, node.top_k)]
