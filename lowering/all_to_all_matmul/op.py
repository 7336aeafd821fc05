"""How `all_to_all_matmul` runs: its strategies, and the library's matmuls and collective."""

from __future__ import annotations

from ditron_inductor.lowering.all_to_all_matmul import chunked, tile
from ditron_inductor.lowering.host.kind import Chunked, Lowering, Tile, by_reference
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import AllToAllMatmul

LOWERING = Lowering(
    AllToAllMatmul,
    by_reference(reference.all_to_all_matmul),
    Tile(tile.geometry, tile.all_to_all_matmul),
    Chunked(chunked.geometry, chunked.all_to_all_matmul),
)
