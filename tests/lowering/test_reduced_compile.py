"""The kernel of reductions behind experts, for every GPU family: waits, barriers and releases, registers, loads."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
from triton.compiler import ASTSource

from ditron_inductor.core.matmul import Tiles
from ditron_inductor.lowering.config import FP32, LARGE, NARROW, SHORT, Config
from ditron_inductor.lowering.expert_sums.reduced_kernel import (
    BLOCK,
    LOADS,
    SLOTS,
    How,
    Sizes,
    reduced_experts_kernel,
    rows_under_way,
)
from tests.cases import rare
from tests.lowering.assembly import Listing, dialect_of, resources
from tests.lowering.cross_compile import POINTERS, TARGETS, all_aligned, compile_for

SIZES = Sizes(*("i32",) * len(Sizes._fields))


@dataclass(frozen=True)
class Form:
    """A kernel of 4 ranks for `target`, with 8 of 128 experts for each token."""

    target: str
    gathers: bool
    descriptors: bool
    k_major: bool = True
    dtype: str = "bf16"
    config: Config = LARGE
    trace: int = 0
    absent: bool = False
    biased: bool = False
    second: bool = False

    def __str__(self) -> str:
        size = self.config
        facts = {"gathers": self.gathers, "descriptors": self.descriptors, "k_major": self.k_major}
        facts |= {"absent": self.absent, "biased": self.biased, "second": self.second}
        named = "-".join(name for name, held in facts.items() if held)
        return f"{self.target}-{size.block_m}x{size.block_n}x{size.block_k}-{self.dtype}-{named}"


@functools.cache
def compiled(form: Form) -> str:
    """The GPU's assembly, specialised as on aligned operands."""
    fits = form.config.for_arch(form.target)
    threads = fits.num_warps * TARGETS[form.target].warp_size
    tile = Tiles(
        BLOCK_M=fits.block_m, BLOCK_N=fits.block_n, BLOCK_K=fits.block_k, GROUP_M=1, DESCRIPTORS=form.descriptors,
        K_MAJOR=int(form.k_major), EVEN_K=True, PRECISION="ieee", UPCAST=False, THREADS=threads, PIECE=4 * threads,
    )  # fmt: skip
    rows, tokens = rows_under_way(LOADS, fits, 4 if form.dtype == "fp32" else 2), SLOTS // 8
    copies = min(rows, tokens)
    facts = form.absent, form.biased, form.second
    how = How(4, tile, 128, form.gathers, True, 8, True, *facts, rows // 8, copies, BLOCK, tokens)
    constants: dict[str, Any] = {"HOW": how, "TRACE": form.trace}
    signature: dict[str, Any] = {}
    known: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    routing = "*i32", "*i64", "*fp32", "*u8" if form.absent else "*i64"
    given: dict[str, Any] = {"pointers": POINTERS, "sizes": SIZES, "routing": routing, "rank": "i32"}
    given["x"] = given["weight"] = (f"*{form.dtype}",) * 2
    for place, argument in enumerate(reduced_experts_kernel.arg_names):
        if argument in constants:
            signature[argument], known[place,] = "constexpr", constants[argument]
            continue
        signature[argument] = given.get(argument, f"*{form.dtype}")
        if argument == "sizes" and form.k_major:
            # The stride of contiguous elements is known.
            index = SIZES._fields.index("stride_bk")
            signature[argument] = SIZES._replace(stride_bk="constexpr")
            known[place, index] = 1
        if argument != "rank":
            attributes |= all_aligned(place, signature[argument])
    source = ASTSource(reduced_experts_kernel, signature, known, attributes)
    binary = compile_for(form.target, source, fits.options)
    text: str = binary.asm["ptx" if form.target.startswith("sm_") else "amdgcn"]
    return text


def by_descriptors(gathers: bool, k_major: bool, config: Config) -> Form:
    """A form whose tile has to fit into the registers of Hopper."""
    return Form("sm_90", gathers, True, k_major, config=config, absent=not k_major, biased=not k_major)


SECOND = Form("sm_90", False, True, False, second=True)
FORMS = (by_descriptors(True, False, LARGE), by_descriptors(True, True, SHORT))
ELSEWHERE = Form("gfx942", True, False, config=NARROW, biased=True, second=True)
# A reduce-scatter has less of the same.
MORE_FORMS = (
    SECOND,
    *(by_descriptors(True, k_major, config) for k_major, config in ((True, LARGE), (False, SHORT))),
    *(by_descriptors(False, k_major, config) for k_major in (False, True) for config in (LARGE, SHORT)),
)
MORE_ELSEWHERE = (
    Form("sm_90", True, False, biased=True),
    Form("sm_90", True, True, True, second=True),
    *(Form(target, gathers, False) for target in ("sm_90", "gfx942") for gathers in (False, True)),
    Form("sm_100", True, True),
    Form("gfx950", True, False, biased=True),
)


@pytest.mark.parametrize("form", [*FORMS, ELSEWHERE, *rare(*MORE_FORMS, *MORE_ELSEWHERE)], ids=str)
def test_waits_and_releases_are_there(form: Form) -> None:
    listing, dialect = Listing(compiled(form)), dialect_of(form.target)
    # The products, the peers' sums, the credits and, where all want all, the results: each read twice.
    assert len(listing.places(dialect.acquire)) >= 2 * (4 if form.gathers else 3)
    releases = listing.places(dialect.release)
    assert len(releases) >= (3 if form.gathers else 2)
    for place in releases:
        assert listing.has_barrier_before(place, dialect.barrier, dialect.store), (place, listing.lines[place])


@pytest.mark.parametrize("form", [*FORMS, *rare(*MORE_FORMS)], ids=str)
def test_a_tile_fits_into_registers(form: Form) -> None:
    text = compiled(form)
    used = resources(text)
    assert used.spilled_bytes == 0, used
    assert "wgmma" in text and "cp.async.bulk.tensor" in text


def test_fp32_by_pointers() -> None:
    text = compiled(Form("sm_90", False, False, False, "fp32", FP32))
    assert "cp.async.bulk.tensor" not in text and resources(text).spilled_bytes < 100
