"""projections: out_i = x @ weight_i for all weights in one launch, for a few rows (decoding).

Problem. A product of up to 64 rows takes as long as reading its weight. One rank's part of a projection is small: the
library's launch for each has not filled the GPU when it ends, and the next one begins behind it.
Algorithm. One program for each tile of 64 columns of any weight, in one grid; all rows are in one tile, see
`matmul_tile_of_few_rows`. Nothing is communicated, and no program waits.
Limits. A few rows, weights with contiguous K, 16-bit or fp32; anything else is done by the library, one product after
the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence

import torch
import triton
import triton.language as tl

from ditron_inductor.core.matmul import matmul_tile_of_few_rows
from ditron_inductor.device.capabilities import probe
from ditron_inductor.device.scratch import Scratch
from ditron_inductor.device.streams import current_handle
from ditron_inductor.lowering.config import Config, select_few_rows_config
from ditron_inductor.lowering.launch import ceil_div, dot_precision
from ditron_inductor.lowering.launcher import Arguments, Launcher
from ditron_inductor.lowering.prepared import MOST_CALLS, form

MOST_ROWS = 64
"""In one tile."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

Runner = Callable[[torch.Tensor, Sequence[torch.Tensor]], list[torch.Tensor]]


@triton.jit(do_not_specialize=["M"])
def projections_kernel(
    x, weights, outs, M, K, columns, strides_bk, strides_bn,
    NUM_WEIGHTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """See the module. x [M, K] contiguous, M <= BLOCK_M; weights, outs, columns, strides_b*: tuples of NUM_WEIGHTS."""
    tile = tl.program_id(0)
    offs_m = tl.arange(0, BLOCK_M)
    for i in tl.static_range(NUM_WEIGHTS):
        tiles = tl.cdiv(columns[i], BLOCK_N)
        if (tile >= 0) & (tile < tiles):
            acc = matmul_tile_of_few_rows(
                x, K, M, weights[i], strides_bk[i], strides_bn[i], tile * BLOCK_N, columns[i], K,
                BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, PRECISION, UPCAST,
            )  # fmt: skip
            offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            inside = (offs_m < M)[:, None] & (offs_n < columns[i])[None, :]
            to = outs[i] + offs_m[:, None] * columns[i] + offs_n[None, :]
            tl.store(to, acc.to(outs[i].dtype.element_ty), mask=inside)
        # Below 0 in all that follow, for a program whose tile this was.
        tile -= tiles


def by_library(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One product after the other."""
    return [x @ weight for weight in weights]


@functools.cache
def problem_of(device: torch.device) -> str:
    """Why kernels cannot run on a device of this process, or an empty string."""
    return probe(device).tile_problem


def prepare(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> Runner:
    """What computes the products of operands of these forms."""
    M, K = x.shape
    fits = 0 < M <= MOST_ROWS and K > 0 and x.dtype in DTYPES and x.is_contiguous()
    if not fits or any(weight.stride(0) != 1 for weight in weights) or problem_of(x.device):
        return by_library
    interpreted = x.device.type == "cpu"
    config = select_few_rows_config(rows=M, dtype=x.dtype, interpreted=interpreted)
    launcher = Launcher(projections_kernel, x.device, numbers=(), words=(), allocator=Scratch(x.device))
    columns = tuple(weight.shape[1] for weight in weights)
    strides = tuple(weight.stride() for weight in weights)
    arguments = functools.partial(_arguments, M, K, columns, strides, x.dtype, config, interpreted)

    def run(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        outs = [x.new_empty((M, N)) for N in columns]
        stream = 0 if interpreted else current_handle(x.get_device())
        launcher(stream, arguments, (), (), {"x": x, "weights": tuple(weights), "outs": tuple(outs)})
        return outs

    return run


def _arguments(
    M: int,
    K: int,
    columns: tuple[int, ...],
    strides: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    config: Config,
    interpreted: bool,
) -> Arguments:
    return Arguments(
        programs=sum(ceil_div(N, config.block_n) for N in columns),
        values=dict(
            M=M,
            K=K,
            columns=columns,
            strides_bk=tuple(stride[0] for stride in strides),
            strides_bn=tuple(stride[1] for stride in strides),
            NUM_WEIGHTS=len(columns),
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            EVEN_K=K % config.block_k == 0,
            PRECISION=dot_precision(dtype),
            UPCAST=interpreted,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        ),
    )


class PreparedProjections:
    """What was prepared, by the operands' forms."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Runner] = {}

    def find(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> Runner:
        key = torch.get_float32_matmul_precision(), form(x), *[form(weight) for weight in weights]
        run = self._known.get(key)
        if run is None:
            if len(self._known) >= MOST_CALLS:
                self._known.clear()
            run = self._known[key] = prepare(x, weights)
        return run


calls = PreparedProjections()
"""Those of this process."""


def projections(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """[x @ weight for weight in weights]: x [M, K], weights [K, N_i], results [M, N_i] contiguous."""
    return calls.find(x, weights)(x, weights)
