"""The structures, the layout and the launch that all `tile` kernels of a sum of products share.

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
from ditron_inductor.lowering.epilogues import PLAIN_SUM, Arrangement, Functions, extras_or
from ditron_inductor.lowering.host.kind import Tile
from ditron_inductor.lowering.host.launch import Launch, longest_first, terms_of
from ditron_inductor.lowering.host.launcher import Arguments


class Sizes(NamedTuple):
    """The rows M and columns N of a Geometry, the argument `block` of `interleaved_row`, and the Terms of the sum."""

    M: Any
    N: Any
    block: Any
    terms: Any


class How(NamedTuple):
    """Values that are known at compile time. WORLD is the number of ranks. TILES: see `matmul.Tiles`. HAS_BIAS is the
    number of dimensions of the bias, 0 without one. COUNTED: several tiles share a flag. AVERAGE: a reduction takes the
    mean and not the sum. PRE_IN_SLICES: see `Arrangement`. INTERLEAVED: the rows of the owners of a reduce-scatter are
    interleaved. EARLY: a reduce-scatter publishes tiles in the middle of a product. COPY_COLUMNS: the columns that are
    copied at once when few rows are gathered. NORMS, ROW: the norm that follows a sum of few rows, or None, and a power
    of two that is at least N.
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
    NORMS: Any = None
    ROW: Any = 16


@dataclass(frozen=True)
class Geometry:
    """The layout of a call, from sizes that all ranks share. One rank computes M rows and N columns for another rank,
    in `tiles` tiles of shape `config`, of which `chunk_tiles` share a flag. The launch has `programs` programs and a
    slot of at least `nbytes` bytes. `arrangement` is the epilogue.
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
    """Returns the Geometry of a kernel whose K loops carry finished tiles to peers. Each rank computes `computed`
    tiles. `tiles` of them are for one peer and share at most `flags` flags. The slot has room for `places` received
    tiles and for `boxes` outboxes of each program.
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
    """Returns the strategy `few` for products of M rows and N columns if fits(launch, M, N), else `many`."""

    def geometry(node: Any, launch: Launch, a: torch.Tensor, columns: int) -> Geometry:
        chosen = few if fits(launch, math.prod(a.shape[:-1]), columns) else many
        found: Geometry = chosen.geometry(node, launch, a, columns)
        return found

    def run(node: Any, launch: Launch, sizes: Geometry, *operands: Any) -> Any:
        chosen = few if fits(launch, sizes.M, sizes.N) else many
        return chosen.run(node, launch, sizes, *operands)

    return Tile(geometry, run)


class SumCall:
    """A call with operands a_i, b_i and a bias, in the order in which a kernel takes them: the longest K first."""

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
    def operands(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the sum as kernels take them, see `matmul.parts_of`."""
        bias = self.lefts[0] if self.bias is None else self.bias.contiguous()
        return (*self.lefts, *self.rights, bias)

    @property
    def terms(self) -> Terms:
        return terms_of(self.lefts, self.rights)

    def sizes_with(self, block: int) -> Sizes:
        """Returns the Sizes of a kernel with this argument `block` of `interleaved_row`."""
        return Sizes(self.sizes.M, self.sizes.N, block, self.terms)

    def how(self, *, few_rows: bool = False) -> How:
        """Returns the How of a kernel. few_rows: the kernel computes all rows in one tile."""
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
        """Returns the Arguments of a launch: `values`, and what every kernel takes besides."""
        values |= {"rank": self.launch.rank, **self.sizes.config.options}
        return Arguments(self.sizes.programs, values)

    def run(self, kernel: Any, arguments: Callable[[], Arguments], out: torch.Tensor) -> torch.Tensor:
        """Launches a kernel with one output, and returns `out`."""
        self.launch.run(kernel, self.sizes.nbytes, arguments, {"operands": self.operands, "out": out})
        return out

    def reduce(
        self,
        kernel: Any,
        arguments: Callable[[], Arguments],
        extras: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        **others: Any,
    ) -> None:
        """Launches a kernel of a reduction with the functions of its epilogue. extras: the tensors that the epilogue
        reads. others: further tensors of the kernel, by name.
        """
        arrangement = self.sizes.arrangement

        def with_functions() -> Arguments:
            chosen = arguments()
            functions = Functions(arrangement.pre, arrangement.function)
            return replace(chosen, values=chosen.values | {"functions": functions})

        tensors = {
            "operands": self.operands,
            "extras": extras_or(outs[0], extras),
            "outs": tuple(outs),
            **others,
        }
        self.launch.run(kernel, self.sizes.nbytes, with_functions, tensors)
