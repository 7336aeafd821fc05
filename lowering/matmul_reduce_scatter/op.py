"""Declares how `matmul_reduce_scatter` runs."""

from __future__ import annotations

from ditron_inductor.lowering.epilogues import by_reference_with_epilogue
from ditron_inductor.lowering.host.kind import Chunked, Lowering, Tile
from ditron_inductor.lowering.matmul_reduce_scatter import chunked, tile
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import MatmulReduceScatter

LOWERING = Lowering(
    MatmulReduceScatter,
    by_reference_with_epilogue(reference.matmul_reduce_scatter),
    Tile(tile.geometry, tile.matmul_reduce_scatter),
    Chunked(chunked.geometry, chunked.matmul_reduce_scatter),
)
