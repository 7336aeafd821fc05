"""Our strategies of each node kind, as functions: what lays out a call, and what runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ditron_inductor.lowering.all_gather_matmul import chunked as gather_chunked
from ditron_inductor.lowering.all_gather_matmul import tile as gather_tile
from ditron_inductor.lowering.all_reduce_rms_norm import kernel as norm_kernel
from ditron_inductor.lowering.all_to_all_matmul import chunked as received_chunked
from ditron_inductor.lowering.all_to_all_matmul import tile as received_tile
from ditron_inductor.lowering.matmul_all_gather import tile as product_tile
from ditron_inductor.lowering.matmul_all_reduce import chunked as reduce_chunked
from ditron_inductor.lowering.matmul_all_reduce import tile as reduce_tile
from ditron_inductor.lowering.matmul_all_reduce_rms_norm import chunked as reduce_norm_chunked
from ditron_inductor.lowering.matmul_all_reduce_rms_norm import tile as reduce_norm_tile
from ditron_inductor.lowering.matmul_all_to_all import chunked as columns_chunked
from ditron_inductor.lowering.matmul_all_to_all import tile as columns_tile
from ditron_inductor.lowering.matmul_reduce_scatter import chunked as scatter_chunked
from ditron_inductor.lowering.matmul_reduce_scatter import tile as scatter_tile
from ditron_inductor.task.nodes import (
    AllGatherMatmul,
    AllReduceRmsNorm,
    AllToAllMatmul,
    MatmulAllGather,
    MatmulAllReduce,
    MatmulAllReduceRmsNorm,
    MatmulAllToAll,
    MatmulReduceScatter,
)

Runner = Callable[..., Any]
"""A function of (node, launch, its own geometry, the op's tensors)."""

TILE: Mapping[str, tuple[Callable[..., Any], Runner]] = {
    AllGatherMatmul.kind: (gather_tile.geometry, gather_tile.all_gather_matmul),
    MatmulReduceScatter.kind: (scatter_tile.geometry, scatter_tile.matmul_reduce_scatter),
    MatmulAllReduce.kind: (reduce_tile.geometry, reduce_tile.matmul_all_reduce),
    AllReduceRmsNorm.kind: (norm_kernel.geometry, norm_kernel.all_reduce_rms_norm),
    MatmulAllReduceRmsNorm.kind: (reduce_norm_tile.geometry, reduce_norm_tile.matmul_all_reduce_rms_norm),
    MatmulAllGather.kind: (product_tile.geometry, product_tile.matmul_all_gather),
    MatmulAllToAll.kind: (columns_tile.geometry, columns_tile.matmul_all_to_all),
    AllToAllMatmul.kind: (received_tile.geometry, received_tile.all_to_all_matmul),
}
CHUNKED: Mapping[str, tuple[Callable[..., str], Callable[..., Any], Runner]] = {
    AllGatherMatmul.kind: (gather_chunked.obstacle, gather_chunked.geometry, gather_chunked.all_gather_matmul),
    MatmulReduceScatter.kind: (
        scatter_chunked.obstacle,
        scatter_chunked.geometry,
        scatter_chunked.matmul_reduce_scatter,
    ),
    MatmulAllReduce.kind: (reduce_chunked.obstacle, reduce_chunked.geometry, reduce_chunked.matmul_all_reduce),
    MatmulAllReduceRmsNorm.kind: (
        reduce_norm_chunked.obstacle,
        reduce_norm_chunked.geometry,
        reduce_norm_chunked.matmul_all_reduce_rms_norm,
    ),
    MatmulAllToAll.kind: (columns_chunked.obstacle, columns_chunked.geometry, columns_chunked.matmul_all_to_all),
    AllToAllMatmul.kind: (received_chunked.obstacle, received_chunked.geometry, received_chunked.all_to_all_matmul),
}
