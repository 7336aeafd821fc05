"""matmul_all_gather, strategy `tile` for many rows: out = all_gather(a @ b + bias) in one launch.

Problem. Every rank holds a [M, K] and b [K, N] with columns of its own (or a with rows of its own), and wants the
products of all ranks.
Algorithm, signal protocol. See lowering/exchanged_products.py: every tile goes to all ranks.
Limits. None on M, N and K. Tiles at the edges are masked where they are stored in the output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ditron_inductor.lowering.exchanged_products import geometry_of, multiply_and_exchange
from ditron_inductor.lowering.host.launch import Launch
from ditron_inductor.lowering.host.launcher import Arguments
from ditron_inductor.lowering.sums import Geometry, SumCall
from ditron_inductor.task.nodes import MatmulAllGather


@triton.jit(do_not_specialize=["rank", "slot", "site", "chunk_tiles"])
def matmul_all_gather_kernel(
    lefts, rights, ends, pointers, sizes, rank, slot, site, chunk_tiles, HOW: tl.constexpr, TRACE: tl.constexpr = 0,
):  # fmt: skip
    """See `multiply_and_exchange`."""
    multiply_and_exchange(lefts, rights, ends, pointers, sizes, rank, slot, site, chunk_tiles, HOW, TRACE)


def geometry(node: MatmulAllGather, launch: Launch, a: torch.Tensor, columns: int) -> Geometry:
    """Returns the Geometry for a [.., K], with the rows and columns of a rank's product. columns: N."""
    return geometry_of(launch, a, math.prod(a.shape[:-1]), columns, parts=1, owners=1)


def matmul_all_gather(
    node: MatmulAllGather,
    launch: Launch,
    sizes: Geometry,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the gathered products for a_i [.., K_i], b_i [K_i, N] and bias [N]; see the module."""
    shape = (*a[0].shape[:-1], sizes.N)
    call = SumCall(node, launch, sizes, a, b, bias)

    def arguments() -> Arguments:
        block = launch.shard_block([*shape], node.gather_dim)
        how = call.how()._replace(TO_ALL=True)
        return call.arguments(sizes=call.sizes_with(block), chunk_tiles=sizes.chunk_tiles, HOW=how)

    return call.run(matmul_all_gather_kernel, arguments, a[0].new_empty(node.exchanged(shape)))
