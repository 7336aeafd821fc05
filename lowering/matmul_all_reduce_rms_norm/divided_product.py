"""The product of few rows in parts of K, each part in fp32, for a kernel that adds them up.

Problem. A product of few rows takes as long as reading its weight. A weight with few columns, as that of a down
projection, has fewer tiles than the GPU has SMs. The library then divides K among programs and adds up what they have
computed in a second launch. Algorithm. A program computes a tile of 64 columns, or one column of a single row, and of
one part of K (see `product_of_few_rows`), and stores it in fp32. There is no second launch, because the kernel
that reduces the product over the ranks (see all_reduce_rms_norm/norm_in_band.py) adds up the parts when it loads them.
There are as many parts as give each SM one program at most, and one part if there are more tiles than SMs. Nothing is
communicated, and no program waits. Limits. There are few rows of 16-bit elements, K of the weight is contiguous, and
one product is not added to another one or to a bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ditron_inductor.core.matmul import Rows, Tiles, Weight
from ditron_inductor.core.matmul_row import product_of_few_rows
from ditron_inductor.core.overlap import let_next_begin
from ditron_inductor.device.streams import handle_for
from ditron_inductor.lowering.config import DIVIDED, Config, select_few_rows_config
from ditron_inductor.lowering.host.launch import ceil_div, round_up
from ditron_inductor.lowering.host.launcher import Arguments, Launcher, local_launcher
from ditron_inductor.lowering.host.local_calls import facts_of
from ditron_inductor.lowering.overlapping import launch_options, overlap_for
from ditron_inductor.lowering.tiles import tiles_of

MOST_ROWS = max(DIVIDED)
DTYPES = (torch.bfloat16, torch.float16)
INTERPRETED_PROGRAMS = 4
"""The programs among which the interpreter divides a product, so that small test problems have several parts."""


class Depths(NamedTuple):
    """K, and the elements of K in each part but the last."""

    K: Any
    part: Any


class WeightColumns(NamedTuple):
    """The columns N of a weight with contiguous K, and the elements from one column to the next."""

    N: Any
    stride: Any


@triton.jit(do_not_specialize=["M"])
def divided_product_kernel(x, weight, out, M, depths, columns, TILES: tl.constexpr):
    """See the module. x is [M, K], contiguous, weight is [N, K], and out is [parts, M, N]."""
    let_next_begin(TILES.OVERLAP)
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    N = columns.N
    tiles = tl.cdiv(N, BLOCK_N)
    column = tl.program_id(0) % tiles * BLOCK_N
    part = tl.program_id(0) // tiles
    first = part * depths.part
    places = tl.arange(0, BLOCK_M)
    rows = Rows(x + first + places.to(tl.int64) * depths.K, places < M)
    depth = tl.minimum(depths.part, depths.K - first)
    acc = product_of_few_rows(rows, Weight(weight + first, 1, columns.stride), column, N, depth, TILES)
    offs_n = column + tl.arange(0, BLOCK_N)
    at = (part * M + places).to(tl.int64)[:, None] * N + offs_n[None, :]
    tl.store(out + at, acc.T, mask=(places < M)[:, None] & (offs_n < N)[None, :])


@dataclass(frozen=True, eq=False)
class DividedProduct:
    """Products x [M, K] @ weight [K, N] of one form, on one device. parts: how many parts K is cut into."""

    M: int
    N: int
    depths: Depths
    parts: int
    config: Config
    tiles: Tiles
    launcher: Launcher

    def takes(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Returns whether the kernel can read these operands [M, K] and [K, N]."""
        return x.is_contiguous() and weight.stride(0) == 1

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Returns the parts [parts, M, N] in fp32, whose sum is the product."""
        out = x.new_empty([self.parts, self.M, self.N], dtype=torch.float32)

        def arguments() -> Arguments:
            columns = WeightColumns(self.N, weight.stride(1))
            options = {**self.config.options, **launch_options(self.tiles.OVERLAP)}
            values = dict(M=self.M, depths=self.depths, columns=columns, TILES=self.tiles, **options)
            return Arguments(programs=ceil_div(self.N, self.config.block_n) * self.parts, values=values)

        self.launcher(handle_for(x), arguments, (), (), {"x": x, "weight": weight, "out": out})
        return out


def divided_product(x: torch.Tensor, rows: int, columns: int, overlap: str = "") -> DividedProduct | None:
    """Returns the DividedProduct for x [.., K] with so many rows, and a weight with so many columns; None if the
    library is to compute the product. The ranks need not agree on it. overlap: of OVERLAPS.
    """
    if x.dtype not in DTYPES or not 0 < rows <= MOST_ROWS or 0 in (columns, x.shape[-1]):
        return None
    return product_in_parts(x, rows, columns, overlap)


def product_in_parts(x: torch.Tensor, rows: int, columns: int, overlap: str = "") -> DividedProduct:
    """Returns what `divided_product` does where the kernel can run."""
    K = x.shape[-1]
    facts, interpreted = facts_of(x.device), x.device.type == "cpu"
    config = select_few_rows_config(rows=rows, dtype=x.dtype, interpreted=interpreted, shapes=DIVIDED)
    config = config.for_arch(facts.arch)
    programs = INTERPRETED_PROGRAMS if interpreted else facts.num_sms
    part = round_up(ceil_div(K, max(1, programs // ceil_div(columns, config.block_n))), config.block_k)
    parts = ceil_div(K, part)
    tiles = tiles_of(x, config, overlap_for(facts.arch, rows, overlap), K - part * (parts - 1))
    launcher = local_launcher(divided_product_kernel, x.device)
    return DividedProduct(rows, columns, Depths(K, part), parts, config, tiles, launcher)
