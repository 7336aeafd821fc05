"""matmul_all_to_all, strategy `tile`: out = all_to_all(a @ b + bias), columns scattered, rows gathered, in one launch.

Problem. Every rank holds its rows a [M, K] and b [K, N]. Rank r wants, for all rows of all ranks, its own columns of
the product. The columns are `parts` parts of W runs of C columns each, and rank r gets the r-th run of each part.
Nothing is added up, so every tile has one reader.
Algorithm, signal protocol. See lowering/exchanged_products.py. A tile lies in one run of columns.
Limits. The gathered dimension is not the last one, and the group's size times `parts` divides N.
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
from ditron_inductor.task.nodes import MatmulAllToAll


@triton.jit(do_not_specialize=["rank", "slot", "site", "chunk_tiles"])
def matmul_all_to_all_kernel(
    lefts, rights, ends, pointers, sizes, rank, slot, site, chunk_tiles, HOW: tl.constexpr, TRACE: tl.constexpr = 0,
):  # fmt: skip
    """See `multiply_and_exchange`."""
    multiply_and_exchange(lefts, rights, ends, pointers, sizes, rank, slot, site, chunk_tiles, HOW, TRACE)


def geometry(node: MatmulAllToAll, launch: Launch, a: torch.Tensor, columns: int) -> Geometry:
    """Returns the Geometry for a [.., K]: M rows of a rank, N columns of a run, tiles for one rank."""
    M, N = math.prod(a.shape[:-1]), columns // (node.parts * node.world_size)
    return geometry_of(launch, a, M, N, parts=node.parts, owners=node.world_size)


def matmul_all_to_all(
    node: MatmulAllToAll,
    launch: Launch,
    sizes: Geometry,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns [.., W*S, .., N / W] for a_i [.., S, .., K_i] with S at `gather_dim`, b_i [K_i, N], bias [N]."""
    out = a[0].new_empty(node.exchanged((*a[0].shape[:-1], b[0].shape[1])))
    call = SumCall(node, launch, sizes, a, b, bias)

    def arguments() -> Arguments:
        how = call.how()
        # Blocks of columns begin at multiples of N. The copy unit fails if these are not multiples of 16 bytes.
        aligned = sizes.N * a[0].element_size() % 16 == 0
        tiles = how.TILES._replace(DESCRIPTORS=how.TILES.DESCRIPTORS and aligned)
        block = launch.shard_block([*a[0].shape], node.gather_dim)
        how = how._replace(TILES=tiles, PARTS=node.parts)
        return call.arguments(sizes=call.sizes_with(block), chunk_tiles=sizes.chunk_tiles, HOW=how)

    return call.run(matmul_all_to_all_kernel, arguments, out)
