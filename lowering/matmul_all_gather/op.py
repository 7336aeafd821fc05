"""Declares how `matmul_all_gather` runs."""

from __future__ import annotations

from ditron_inductor.lowering.host.kind import Lowering, Tile, by_reference
from ditron_inductor.lowering.matmul_all_gather import few_rows, many_rows
from ditron_inductor.lowering.sums import few_or_many
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import MatmulAllGather

LOWERING = Lowering(
    MatmulAllGather,
    by_reference(reference.matmul_all_gather),
    few_or_many(
        few_rows.fits,
        Tile(few_rows.geometry, few_rows.matmul_all_gather),
        Tile(many_rows.geometry, many_rows.matmul_all_gather),
    ),
)
