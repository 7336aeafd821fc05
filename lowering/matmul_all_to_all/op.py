"""How `matmul_all_to_all` runs: its strategies, and the library's matmuls and collective."""

from __future__ import annotations

from ditron_inductor.lowering.host.kind import Chunked, Lowering, Tile, by_reference
from ditron_inductor.lowering.matmul_all_to_all import chunked, tile
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import MatmulAllToAll

LOWERING = Lowering(
    MatmulAllToAll,
    by_reference(reference.matmul_all_to_all),
    Tile(tile.geometry, tile.matmul_all_to_all),
    Chunked(chunked.geometry, chunked.matmul_all_to_all),
)
