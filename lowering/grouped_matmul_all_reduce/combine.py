"""The sum of what its experts return for each token, in one pass over the products of all slots.

Problem. The products [S, N] of a grouped matmul lie sorted by expert, and a token has `top_k` of them. Their sum,
scaled, is what a rank contributes to a reduction. Algorithm. A program has a block of tokens and a block of columns. It
reads the places of the tokens' slots, their factors and their rows, adds in fp32, and rounds once. So the products are
read once, and nothing of the size of all slots is written. Nothing is communicated, and no program waits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ditron_inductor.device.streams import handle_for
from ditron_inductor.lowering.host.launch import ceil_div
from ditron_inductor.lowering.host.launcher import Arguments, local_launcher
from ditron_inductor.task.nodes import GroupedMatmulAllReduce

ROWS, BLOCK, WARPS = 4, 512, 4
"""The tokens and columns of a program's block, and the warps of a program."""
PROGRAMS = 1024
"""The most programs, which take blocks in turns: enough to keep the loads of all SMs busy."""
INTERPRETED_PROGRAMS = 2


class Sizes(NamedTuple):
    """The columns of the products, and the elements from row to row of the products and of what is added."""

    N: Any
    pitch: Any
    added_pitch: Any


class How(NamedTuple):
    """What is known at compile time: the experts of a token, whether something is added, and the block."""

    TOP_K: Any
    HAS_ADDED: Any
    ROWS: Any
    BLOCK: Any


@triton.jit(do_not_specialize=["first", "count"])
def combine_kernel(products, places, scale, added, out, sizes, first, count, HOW: tl.constexpr):
    """See the module. products: [S, N]. places: [T * TOP_K]. scale: [S]. added: [T, N]. out: [count, N], contiguous,
    the sums of the tokens from `first` on.
    """
    ROWS: tl.constexpr = HOW.ROWS
    BLOCK: tl.constexpr = HOW.BLOCK
    TOP_K: tl.constexpr = HOW.TOP_K
    across = tl.cdiv(sizes.N, BLOCK)
    for block in range(tl.program_id(0), tl.cdiv(count, ROWS) * across, tl.num_programs(0)):
        rows = block // across * ROWS + tl.arange(0, ROWS)
        columns = block % across * BLOCK + tl.arange(0, BLOCK)
        exists = rows < count
        inside = exists[:, None] & (columns < sizes.N)[None, :]
        tokens = (first + rows).to(tl.int64)
        total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        for j in tl.static_range(TOP_K):
            place = tl.load(places + tokens * TOP_K + j, mask=exists, other=0)
            factor = tl.load(scale + place, mask=exists, other=0.0).to(tl.float32)
            product = tl.load(products + place[:, None] * sizes.pitch + columns[None, :], mask=inside, other=0.0)
            total += product.to(tl.float32) * factor[:, None]
        if HOW.HAS_ADDED:
            more = tl.load(added + tokens[:, None] * sizes.added_pitch + columns[None, :], mask=inside, other=0.0)
            total += more.to(tl.float32)
        tl.store(out + rows.to(tl.int64)[:, None] * sizes.N + columns[None, :], total.to(out.dtype.element_ty), inside)


class Combiner:
    """Sums of tokens for products with `columns` columns."""

    def __init__(self, node: GroupedMatmulAllReduce, columns: int, device: torch.device) -> None:
        self._launcher = local_launcher(combine_kernel, device, numbers=("first", "count"))
        self._how = How(node.top_k, node.has_added, ROWS, min(BLOCK, triton.next_power_of_2(columns)))
        self._columns = columns
        self._interpreted = device.type == "cpu"

    def __call__(
        self,
        products: torch.Tensor,
        places: torch.Tensor,
        scale: torch.Tensor,
        added: torch.Tensor | None,
        first: int,
        out: torch.Tensor,
    ) -> None:
        """Computes the sums of out.shape[0] tokens from `first` on into `out` [count, columns], contiguous."""
        if out.numel() == 0:
            return
        rest = products if added is None else added

        def arguments() -> Arguments:
            most = INTERPRETED_PROGRAMS if self._interpreted else PROGRAMS
            blocks = ceil_div(places.shape[0] // self._how.TOP_K, ROWS) * ceil_div(self._columns, self._how.BLOCK)
            sizes = Sizes(self._columns, products.stride(0), rest.stride(0))
            return Arguments(min(most, blocks), {"sizes": sizes, "HOW": self._how, "num_warps": WARPS})

        tensors = {"products": products, "places": places, "scale": scale, "added": rest, "out": out}
        self._launcher(handle_for(products), arguments, (first, out.shape[0]), (), tensors)
