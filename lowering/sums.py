"""What `tile` kernels of a sum of products have in common: their structures, how a call is laid out, and launched.

    sum_i a_i @ b_i + bias,    a_i [M, K_i], b_i [K_i, N], bias [N]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ditron_inductor.core.layout import MAX_CHUNKS
from ditron_inductor.core.matmul import Terms
from ditron_inductor.lowering.config import Config
from ditron_inductor.lowering.epilogues import PLAIN_SUM, Arrangement
from ditron_inductor.lowering.host.kind import Tile
from ditron_inductor.lowering.host.launch import Launch, longest_first, terms_of
from ditron_inductor.lowering.host.launcher import Arguments


class Ends(NamedTuple):
    """Pointers to the bias [N], or anything, and to the output."""

    bias: Any
    out: Any


class Sizes(NamedTuple):
    """Rows and columns as in Geometry, `block` of `interleaved_row`, and the Terms of the sum."""

    M: Any
    N: Any
    block: Any
    terms: Any


class How(NamedTuple):
    """What is known at compile time: ranks, Tiles, dimensions of the bias, 0 if there is none, whether several tiles
    share a flag; of a reduction a mean or a sum, and PRE_IN_SLICES of an Arrangement. And of a reduce-scatter whether
    the rows of owners are interleaved, and whether tiles are published in the middle of a product; of few rows that are
    gathered the columns that are copied at once.
    """

    WORLD: Any
    TILES: Any
    HAS_BIAS: Any
    COUNTED: Any
    AVERAGE: Any
    PRE_IN_SLICES: Any
    INTERLEAVED: Any = False
    EARLY: Any = False
    COPY_COLUMNS: Any = 0


@dataclass(frozen=True)
class Geometry:
    """Sizes that all ranks share: rows and columns of what one rank makes for another, the tile shape, tiles of that,
    how many of them share a flag, programs, the slot's bytes; and the epilogue.
    """

    M: int
    N: int
    config: Config
    tiles: int
    chunk_tiles: int
    programs: int
    nbytes: int
    arrangement: Arrangement = field(default=PLAIN_SUM, repr=False)


def carrying(
    launch: Launch,
    dtype: torch.dtype,
    config: Config,
    rows_and_columns: tuple[int, int],
    *,
    tiles: int,
    computed: int,
    places: int,
    boxes: int = 1,
    flags: int = MAX_CHUNKS.value,
    arrangement: Arrangement = PLAIN_SUM,
) -> Geometry:
    """The Geometry of a kernel that carries finished tiles, `computed` on each rank, from `boxes` outboxes of a program
    to `places` in a slot; `tiles` of them for one rank share at most `flags` flags.
    """
    programs = launch.programs(computed, config)
    return Geometry(
        *rows_and_columns,
        config=config,
        tiles=tiles,
        chunk_tiles=launch.chunk_tiles(tiles, flags),
        programs=programs,
        nbytes=(places + boxes * programs) * config.block_m * config.block_n * dtype.itemsize,
        arrangement=arrangement,
    )


def few_or_many(fits: Callable[[Launch, int, int], bool], few: Tile, many: Tile) -> Tile:
    """The strategy `few` for products [M, N] of so few rows that they fit, `many` for others; equal on all ranks."""

    def geometry(node: Any, launch: Launch, a: torch.Tensor, columns: int) -> Geometry:
        chosen = few if fits(launch, math.prod(a.shape[:-1]), columns) else many
        found: Geometry = chosen.geometry(node, launch, a, columns)
        return found

    def run(node: Any, launch: Launch, sizes: Geometry, *operands: Any) -> Any:
        chosen = few if fits(launch, sizes.M, sizes.N) else many
        return chosen.run(node, launch, sizes, *operands)

    return Tile(geometry, run)


class SumCall:
    """A call with operands a_i, b_i and a bias, as a kernel takes them: the longest K first."""

    def __init__(
        self,
        node: Any,
        launch: Launch,
        sizes: Geometry,
        a: Sequence[torch.Tensor],
        b: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
    ) -> None:
        self.node, self.launch, self.sizes, self.bias = node, launch, sizes, bias
        self.lefts, self.rights = longest_first(a, b)

    @property
    def terms(self) -> Terms:
        return terms_of(self.lefts, self.rights)

    def sizes_with(self, block: int) -> Sizes:
        """The Sizes of a kernel with this `block` of `interleaved_row`."""
        return Sizes(self.sizes.M, self.sizes.N, block, self.terms)

    def how(self, *, few_rows: bool = False) -> How:
        """few_rows: for a kernel that computes all rows in one tile."""
        tile = self.launch.tile_of_few_rows if few_rows else self.launch.tile_of_sum
        return How(
            WORLD=self.node.world_size,
            TILES=tile(self.sizes.config, self.lefts, self.rights),
            HAS_BIAS=0 if self.bias is None else self.bias.dim(),
            COUNTED=self.sizes.chunk_tiles > 1,
            AVERAGE=getattr(self.node, "reduce_op", "sum") == "avg",
            PRE_IN_SLICES=self.sizes.arrangement.pre_in_slices,
        )

    def arguments(self, **values: Any) -> Arguments:
        """With what every kernel takes besides these values."""
        values |= {"rank": self.launch.rank, **self.sizes.config.options}
        return Arguments(self.sizes.programs, values)

    def run(self, kernel: Any, arguments: Callable[[], Arguments], out: torch.Tensor) -> torch.Tensor:
        """Launch a kernel with Ends; returns out."""
        ends = Ends(out if self.bias is None else self.bias.contiguous(), out)
        tensors = {"lefts": self.lefts, "rights": self.rights, "ends": ends}
        self.launch.run(kernel, self.sizes.nbytes, arguments, tensors)
        return out

    def reduce(
        self,
        kernel: Any,
        arguments: Callable[[], Arguments],
        extras: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        **others: Any,
    ) -> None:
        """Launch a kernel of a reduction, with the functions of its epilogue. extras: as that reads them; others: more
        tensors.
        """
        arrangement = self.sizes.arrangement

        def with_functions() -> Arguments:
            chosen = arguments()
            return replace(chosen, values=chosen.values | {"PRE": arrangement.pre, "EPILOGUE": arrangement.function})

        tensors = {
            "lefts": self.lefts,
            "rights": self.rights,
            "bias": outs[0] if self.bias is None else self.bias.contiguous(),
            # Never empty: without any it gets what it does not look at.
            "extras": tuple(extra.contiguous() for extra in extras) or (outs[0],),
            "outs": tuple(outs),
            **others,
        }
        self.launch.run(kernel, self.sizes.nbytes, with_functions, tensors)
