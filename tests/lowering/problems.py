"""One call of an op with fixed operands, to be made again and again: what stress tests repeat and refill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.tolerances import assert_near
from ditron_inductor.lowering import register
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import EXTRAS, NODES, NORM_KINDS, ULYSSES_KINDS, Norm
from ditron_inductor.task.nodes import KINDS as MATMUL_KINDS
from tests.lowering import calls
from tests.lowering.calls import Site
from tests.rank_process import RankContext

FEW_ROWS = "matmul_all_reduce of few rows"
"""An all-reduce that takes one shot."""
FEW_ROWS_GATHERED = "matmul_all_gather of few rows"
"""A gather of a product that is made in one tile of rows."""
KINDS = tuple(kind for kind in MATMUL_KINDS if "tile" in NODES[kind].strategies)
CUT_KINDS = tuple(kind for kind in KINDS if "chunked" in NODES[kind].strategies)
CHUNKED_KINDS = (*CUT_KINDS, *ULYSSES_KINDS)
"""Those that have the strategy of that name: the first ones alone, and all of them."""
TILE_KINDS = (*KINDS, *ULYSSES_KINDS, FEW_ROWS, FEW_ROWS_GATHERED)
"""One for each of the tile kernels of matmuls."""
NORM = Norm("rms", 1e-6)


@dataclass(frozen=True)
class Size:
    """Rows of every rank's shard (or of its part of a replicated result), the inner size, the columns."""

    rows: int
    k: int
    n: int


SMALL = {"cpu": Size(20, 40, 36), "cuda": Size(200, 520, 392)}
# Tiles at the edge are partly empty, and so are the chunks of the last rank.
ODD = {"cpu": Size(35, 41, 37), "cuda": Size(333, 555, 777)}


class Problem:
    """Operands of one op, its call, and the result that it must have. few: the rows of a kind of few rows; 0: from 1 to
    5, by the size.
    """

    def __init__(
        self,
        ctx: RankContext,
        kind: str,
        size: Size,
        *,
        site: Site | None = None,
        dtype: torch.dtype = torch.bfloat16,
        few: int = 0,
    ) -> None:
        self.ctx = ctx
        self.kind = kind.removesuffix(" of few rows")
        self.site = site or Site(name=f"stress/{(*TILE_KINDS, *NORM_KINDS).index(kind)}:{self.kind}")
        world_size = self.site.world_size or ctx.world_size
        rows = size.rows if kind.startswith("all_gather") or kind == "matmul_all_to_all" else size.rows * world_size
        if kind in (FEW_ROWS, FEW_ROWS_GATHERED, *NORM_KINDS):
            rows = few or 1 + size.rows % 5
        if kind in NORM_KINDS:
            # The same on all ranks: what is added to a sum of all.
            given = {"residual": torch.ones(rows, size.n), "weight": torch.full([size.n], 0.5)}
            self.extras = [given[name].to(ctx.device, dtype) if name in given else None for name in EXTRAS]
        self.left = calls.operand(ctx, [rows, size.n if kind == NORM_KINDS[0] else size.k], dtype)
        # A second weight makes one call fill the slot for several outputs.
        widths = [size.n, size.n // 2 + 1] if kind.startswith("all_gather") else [size.n]
        widths = [world_size * size.n] if kind == "matmul_all_to_all" else widths
        deep = size.k * world_size if kind == "all_to_all_matmul" else size.k
        self.weights = [calls.weight(ctx, deep, n, dtype, "column") for n in widths]

    def __call__(self) -> list[torch.Tensor]:
        """The op's outputs: products, for the gather also the gathered tensor."""
        if self.kind == "all_gather_matmul":
            return calls.all_gather_matmul(self.ctx, self.site, self.left, self.weights, 0, True)[:-1]
        if self.kind == "matmul_reduce_scatter":
            return [calls.matmul_reduce_scatter(self.ctx, self.site, self.left, self.weights[0])]
        if self.kind in NORM_KINDS:
            operands = [self.left] if self.kind == NORM_KINDS[0] else [self.left, *self.weights]
            return calls.all_reduce_rms_norm(self.ctx, self.site, operands, self.extras, NORM)
        if self.kind == "matmul_all_to_all":
            return [calls.matmul_all_to_all(self.ctx, self.site, self.left, self.weights[0])]
        if self.kind == "all_to_all_matmul":
            return calls.all_to_all_matmul(self.ctx, self.site, self.left, self.weights[0])
        if self.kind == "matmul_all_gather":
            return [calls.matmul_all_gather(self.ctx, self.site, self.left, self.weights[0])]
        return [calls.matmul_all_reduce(self.ctx, self.site, self.left, self.weights[0])]

    def refill(self) -> None:
        """New random operands in the same memory, as a replayed CUDA graph reads them."""
        self.left.normal_()

    def check(self, outputs: list[torch.Tensor], what: str = "") -> None:
        """AssertionError unless outputs are right; a replicated result is also compared between ranks. Collective."""
        ctx, site, left, weights = self.ctx, self.site, self.left, self.weights
        what = f"{what} {self.kind}"
        if self.kind.startswith("all_gather"):
            *products, gathered = calls.reference_all_gather_matmul(ctx, site, left, weights)
            for got, want in zip(outputs[:-1], products, strict=True):
                assert_near(got, want, what=what)
            assert torch.equal(outputs[-1], gathered), f"{what}: the gathered tensor is not the shards' bits"
            return
        partials = site.world_size or ctx.world_size
        if self.kind == "matmul_all_to_all":
            assert_near(outputs[0], calls.reference_matmul_all_to_all(ctx, site, left, weights[0]), what=what)
            return
        if self.kind == "all_to_all_matmul":
            product, received = calls.reference_all_to_all_matmul(ctx, site, left, weights[0])
            assert_near(outputs[0], product, num_partials=partials, what=what)
            assert torch.equal(outputs[1], received), f"{what}: what came is not the ranks' bits"
            return
        if self.kind in NORM_KINDS:
            x = left.double() if self.kind == NORM_KINDS[0] else left.double() @ weights[0].double()
            extras = [one if one is None else one.double() for one in self.extras]
            wanted = reference.all_reduce_rms_norm(x, extras, norm=NORM, reduce_op="sum", **site.group(ctx))
            for got, want in zip(outputs, wanted, strict=True):
                assert_near(got, want, num_partials=partials, what=what)
                calls.assert_replicated(ctx, got, site)
            return
        if self.kind == "matmul_reduce_scatter":
            want = calls.reference_matmul_reduce_scatter(ctx, site, left, weights[0])
            assert_near(outputs[0], want, num_partials=partials, what=what)
            return
        if self.kind == "matmul_all_gather":
            want = calls.reference_matmul_all_gather(ctx, site, left, weights[0])
            assert_near(outputs[0], want, what=what)
            calls.assert_replicated(ctx, outputs[0], site)
            return
        want = calls.reference_matmul_all_reduce(ctx, site, left, weights[0])
        assert_near(outputs[0], want, num_partials=partials, what=what)
        calls.assert_replicated(ctx, outputs[0], site)


def chunked_problems(ctx: RankContext, kinds: Sequence[str], label: str, size: Size | None = None) -> list[Problem]:
    """A problem of each kind at a site of its own, by the strategy `chunked`; small unless a size is given."""
    size = size or SMALL[ctx.device.type]
    return [
        Problem(ctx, kind, size, site=Site(name=f"{label}/{index}:{kind}", strategy="chunked"))
        for index, kind in enumerate(kinds)
    ]


@contextmanager
def chunked_with(kind: str, geometry: Callable[..., Any]) -> Iterator[None]:
    """Lays out calls of a kind by `chunked` in this way inside the block."""
    (chunked,) = [lowering.chunked for lowering in register.KINDS if lowering.node.kind == kind]
    assert chunked is not None
    kept = chunked.geometry
    object.__setattr__(chunked, "geometry", geometry)
    try:
        yield
    finally:
        object.__setattr__(chunked, "geometry", kept)
