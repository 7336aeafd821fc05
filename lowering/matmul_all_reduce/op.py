"""Declares how `matmul_all_reduce` runs."""

from __future__ import annotations

from ditron_inductor.lowering.all_reduce import chunked
from ditron_inductor.lowering.epilogues import by_reference_with_epilogue
from ditron_inductor.lowering.host.kind import Chunked, Lowering, Tile
from ditron_inductor.lowering.matmul_all_reduce import one_shot, two_shot
from ditron_inductor.lowering.sums import few_or_many
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import MatmulAllReduce

TILE = few_or_many(
    one_shot.fits,
    Tile(one_shot.geometry, one_shot.matmul_all_reduce),
    Tile(two_shot.geometry, two_shot.matmul_all_reduce),
)

LOWERING = Lowering(
    MatmulAllReduce,
    by_reference_with_epilogue(reference.matmul_all_reduce),
    TILE,
    Chunked(chunked.geometry, chunked.reduced_sum),
)
