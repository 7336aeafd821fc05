"""all_gather_matmul with an epilogue, and the elementwise kernel, compiled for GPUs that are not there."""

from __future__ import annotations

import re

import pytest
import triton
from triton.compiler import ASTSource

from ditron_inductor.lowering import config
from ditron_inductor.lowering.epilogues import BLOCK, WARPS, Layout, apply_epilogue_kernel, generated
from tests.lowering.assembly import NVIDIA, dialect_of, resources
from tests.lowering.cross_compile import TARGETS, Case, compile_case

SWIGLU = "cast(silu(mm0), bf16) * mm1; mm0; mm1"
GELU = "gelu(cast(mm0 + row(x0), bf16)); mm1 * full(x1)"
MOST_SPILLED = 1024
"""Bytes of a thread that the epilogue may keep in local memory, once for each tile."""
CASES = (
    Case("all_gather_matmul", "sm_90", config.LARGE, "bf16", descriptors=True, epilogue=SWIGLU),
    Case("all_gather_matmul", "sm_90", config.NARROW, "bf16", descriptors=True, epilogue=GELU),
    Case("all_gather_matmul", "gfx942", config.NARROW, "bf16", epilogue=SWIGLU),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_waits_and_releases_are_there(case: Case) -> None:
    compiled, dialect = compile_case(case), dialect_of(case.target)
    listing = compiled.listing
    releases = listing.places(dialect.release)
    assert len(listing.places(dialect.acquire)) >= 4 and len(releases) >= 2
    for place in releases:
        assert listing.has_barrier_before(place, dialect.barrier, dialect.store), (place, listing.lines[place])
    assert compiled.shared_bytes <= (232448 if case.target == "sm_90" else 65536)


@pytest.mark.parametrize("case", [case for case in CASES if case.descriptors], ids=str)
def test_products_of_one_tile_share_a_pipelined_loop(case: Case) -> None:
    compiled = compile_case(case)
    listing, together = compiled.listing, case.arrangement.together
    loops = listing.loops(NVIDIA.dot)
    assert len(loops) == len(case.arrangement.groups)
    for first, last in loops:
        loop = "\n".join(listing.lines[first:last])
        # The rows once, and a block of every weight.
        assert len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.shared::\w+\.global", loop)) == 1 + together
        assert f"wgmma.wait_group.sync.aligned {together}" in loop
        assert "wgmma.wait_group.sync.aligned 0" not in loop
    assert resources(compiled.assembly).spilled_bytes <= MOST_SPILLED


@pytest.mark.parametrize("in_runs", [False, True], ids=["together", "in_runs"])
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_the_elementwise_kernel_moves_wide_pieces(target: str, in_runs: bool) -> None:
    signature = {
        "mm": ("*bf16", "*bf16"), "x": ("*bf16",), "outs": ("*bf16",), "sizes": Layout(*["i32"] * 4),
        **dict.fromkeys(("GROUP", "EPILOGUE", "NUM_PRODUCTS", "NUM_OUTS", "IN_RUNS", "WIDE", "BLOCK"), "constexpr"),
    }  # fmt: skip
    constants = {
        "GROUP": 0, "EPILOGUE": generated("cast(silu(mm0), bf16) * mm1"), "NUM_PRODUCTS": 2, "NUM_OUTS": 1,
        "IN_RUNS": in_runs, "WIDE": False, "BLOCK": BLOCK,
    }  # fmt: skip
    names = list(signature)
    known = {(names.index(name),): value for name, value in constants.items()}
    aligned = [(0, 0), (0, 1), (1, 0), (2, 0), (3, 0), (3, 2), (3, 3)]
    attributes = {place: [["tt.divisibility", 16]] for place in aligned}
    source = ASTSource(apply_epilogue_kernel, signature, known, attributes)
    binary = triton.compile(source, target=TARGETS[target], options={"num_warps": WARPS})
    text = binary.asm["ptx" if target == "sm_90" else "amdgcn"]
    # With 64 threads in a warp 8 bytes are left for each.
    load, store = (NVIDIA.wide_load, NVIDIA.wide_store) if target == "sm_90" else ("load_dwordx2", "store_dwordx2")
    assert len(re.findall(load, text)) >= 2 and re.search(store, text)
