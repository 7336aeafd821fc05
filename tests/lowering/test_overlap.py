"""Launches that begin before the one in front of them has ended: that they wait, and what they read before that."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.tolerances import assert_near
from ditron_inductor.core.matmul import Tiles
from ditron_inductor.core.overlap import APART, FOLLOWS, LEADS
from ditron_inductor.lowering import overlapping
from ditron_inductor.lowering.config import DIVIDED, ROW
from ditron_inductor.lowering.overlapping import launch_options, overlap_for
from ditron_inductor.lowering.projections import projections_kernel
from ditron_inductor.lowering.tiles import tiles_of
from ditron_inductor.task.nodes import Projections
from tests.lowering.cross_compile import Case, compile_case
from tests.lowering.test_divided_product import compiled_product
from tests.rank_process import RankContext
from tests.ranks import RankPools

SWIGLU = "cast(silu(mm0), bf16) * mm1"
LOAD = re.compile(r"\bld\.global\S*")


@pytest.mark.parametrize(
    ("arch", "rows", "leads", "follows"),
    [
        ("sm_90", 1, LEADS, FOLLOWS),
        ("sm_100", 1, LEADS, FOLLOWS),
        ("sm_120", 1, LEADS, FOLLOWS),
        ("sm_90", 2, APART, APART),
        ("sm_89", 1, APART, APART),
        ("gfx942", 1, APART, APART),
        ("interpreter", 1, APART, APART),
    ],
)
def test_a_single_row_overlaps_since_hopper(arch: str, rows: int, leads: Any, follows: Any) -> None:
    assert overlap_for(arch, rows, "leads") == leads.value
    assert overlap_for(arch, rows, "follows") == follows.value
    assert overlap_for(arch, rows, "") == APART.value
    assert launch_options(leads.value) == {}
    assert launch_options(follows.value) == ({"launch_pdl": True} if follows is FOLLOWS else {})


def test_nothing_overlaps_where_the_driver_cannot_capture_it() -> None:
    with mock.patch.object(torch.cuda, "is_available", lambda: True):
        for version, wanted in ((12020, APART), (12030, FOLLOWS), (13000, FOLLOWS)):
            with mock.patch.object(overlapping.driver, "version", lambda version=version: version):
                assert overlap_for("sm_90", 1, "follows") == wanted.value


@pytest.mark.parametrize(("k", "steps"), [(4096, 8), (2047, 4), (1023, 2), (512, 2), (511, 1), (255, 0)])
def test_steps_ahead_are_whole(k: int, steps: int) -> None:
    x = torch.empty(1, k, device="meta")
    assert tiles_of(x, ROW, FOLLOWS.value, k).AHEAD == steps
    assert tiles_of(x, ROW, LEADS.value, k).AHEAD == tiles_of(x, DIVIDED[16], FOLLOWS.value, k).AHEAD == 0
    # The last part of a product may have fewer elements.
    assert tiles_of(x, ROW, FOLLOWS.value, 100).AHEAD == 0


def of_divided(overlap: int) -> str:
    """The PTX of a product in parts of one row."""
    text: str = compiled_product("sm_90", DIVIDED[1], overlap).asm["ptx"]
    return text


def of_projections(epilogue: str = "") -> str:
    return compile_case(Case("projections", "sm_90", ROW, "bf16", epilogue=epilogue, follows=True)).assembly


KERNELS: dict[str, Callable[[], str]] = {
    "divided": lambda: of_divided(FOLLOWS.value),
    "projections": of_projections,
    "pair": lambda: of_projections(SWIGLU),
}


@pytest.mark.parametrize("name", list(KERNELS))
def test_weights_alone_are_read_before_the_wait(name: str) -> None:
    """Loads of weights have a hint to the caches, and those of rows have none."""
    before, waits, after = KERNELS[name]().partition("griddepcontrol.wait")
    assert waits and before.count("griddepcontrol.launch_dependents") == 1
    early = LOAD.findall(before)
    assert len(early) >= 2 and all("evict_first" in load and "v4" in load for load in early), early
    assert any("evict_first" not in load for load in LOAD.findall(after))
    assert not re.search(r"\b(st|atom|red)\.(\w+\.)*global", before)


def test_a_launch_that_leads_does_not_wait() -> None:
    text = of_divided(LEADS.value)
    assert "griddepcontrol.launch_dependents" in text and "griddepcontrol.wait" not in text
    assert "griddepcontrol" not in of_divided(APART.value)


def _loaded_ahead(ctx: RankContext, k: int, epilogue: str) -> list[int]:
    """Compares products of a row with the reference; returns how many steps were loaded ahead."""
    generator = torch.Generator().manual_seed(k)

    def draw(rows: int) -> torch.Tensor:
        return (torch.randn(rows, k, generator=generator) * k**-0.25).to(torch.bfloat16)

    x, weights, ahead = draw(1), [draw(33).t(), draw(33).t()], []

    def noted(*given: Any) -> Tiles:
        ahead.append(tiles_of(*given).AHEAD)
        return tiles_of(*given)

    with mock.patch.object(projections_kernel, "tiles_of", noted):
        outs = projections_kernel.prepare(Projections(2, epilogue=epilogue), x, weights, [], "tile")(x, weights, [])
    products = [x.double() @ weight.double() for weight in weights]
    wanted = [torch.nn.functional.silu(products[0]) * products[1]] if epilogue else products
    for out, value in zip(outs, wanted, strict=True):
        assert_near(out, value, num_partials=3 if epilogue else 1)
    return ahead


@pytest.mark.parametrize("epilogue", ["", SWIGLU])
@pytest.mark.parametrize(("k", "steps"), [(31, 0), (32, 1), (70, 2), (128, 2), (200, 2)])
def test_what_is_loaded_ahead_is_added_up(rank_pools: RankPools, k: int, steps: int, epilogue: str) -> None:
    assert rank_pools.get("cpu", 1).run(_loaded_ahead, k, epilogue) == [[steps]]


@pytest.mark.gpu
def test_rows_are_read_when_they_are_there() -> None:
    """In a graph, each product of a long chain is the row of the next one."""
    device, k, calls = torch.device("cuda", 0), 4096, 12
    generator = torch.Generator(device).manual_seed(0)
    weights = [(torch.randn(k, k, device=device, generator=generator) * k**-0.5).bfloat16() for _ in range(calls)]
    x = torch.randn(1, k, device=device, generator=generator).bfloat16()

    def chain() -> list[torch.Tensor]:
        rows = [x]
        for number, weight in enumerate(weights):
            # In a graph the first launch that follows has no launch in front of it, and the last one has a copy there.
            node = Projections(1, strategy="tile", overlap="follows")
            if number == calls - 1:
                rows[-1] = rows[-1].clone()
            rows += projections_kernel.projections(node, [rows[-1], weight.t()])
        return rows[1:]

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = chain()
    for _ in range(300):
        x.normal_(generator=generator)
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        row = x
        for out, weight in zip(outs, weights, strict=True):
            assert_near(out, row.double() @ weight.double().t())
            row = out
