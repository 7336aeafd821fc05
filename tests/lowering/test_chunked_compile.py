"""The kernels around library products and copies, for every GPU family: waits, barriers and releases, wide accesses."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import triton
from triton.compiler import ASTSource

from ditron_inductor.lowering import transfers
from ditron_inductor.lowering.all_reduce.all_reduce_kernel import How, Sizes, all_reduce_kernel
from ditron_inductor.lowering.epilogues import arrange
from ditron_inductor.lowering.expert_sums import combine_kernel as combine
from ditron_inductor.task.epilogue import parse
from tests.cases import rare
from tests.lowering.assembly import Listing, dialect_of
from tests.lowering.cross_compile import FAMILIES, POINTERS, TARGETS, all_aligned

EPILOGUE = "full(x0) + cast(silu(cast(mm0 + row(x1), bf16)), bf16); mm0"
# By kernel: (kernel, warps, compile-time arguments, waits, releases). A wait is two reads: the first and the loop's.
KERNELS: dict[str, tuple[Any, int, dict[str, Any], int, int]] = {
    "stage": (transfers.stage, 8, {"COPY": True, "BLOCK": 8192}, 2, 1),
    "stage_two": (transfers.stage, 8, {"COPY": True, "BLOCK": 4096}, 2, 1),
    "open_slot": (transfers.open_slot, 1, {}, 2, 1),
    "publish_pieces": (transfers.publish_pieces, 1, {}, 0, 1),
    "await_pieces": (transfers.await_pieces, 1, {}, 2, 0),
    "await_all": (transfers.await_all, 1, {}, 2, 0),
    "reduce_partials": (transfers.reduce_partials, 8, {"HOW": transfers.How(4, True, False, 4096)}, 1, 1),
    "reduce_and_share": (transfers.reduce_partials, 8, {"HOW": transfers.How(4, True, True, 4096)}, 1, 1),
    "close_slot": (transfers.close_slot, 8, {"BLOCK": 8192}, 1, 1),
    # It sends nothing: no waits, no releases.
    "combine": (combine.combine_kernel, combine.WARPS, {"HOW": combine.How(8, True, True, False, True, 4, 512)}, 0, 0),
    "one_shot": (all_reduce_kernel, 4, {"HOW": How(4, True, True, 1024, 128)}, 4, 2),
    "two_shots": (all_reduce_kernel, 8, {"HOW": How(4, True, False, 4096, 256)}, 6, 3),
}
TENSORS = ("partials", "x", "products", "added", "bias", "out")
WORDS = {"numel": "i64", "places": "*i64", "scale": "*fp32", "absent": "*u8", "experts": "*i64"}
SIZES = {
    "reduce_partials": transfers.Partials("i64", "i32", "i32", "i32"),
    "all_reduce_kernel": Sizes("i64", "i32"),
    "combine_kernel": combine.Sizes(*("i32",) * 5),
}
TUPLES = ("outs", "shards", "copies", "numels", "extras")
ALIGNED = (*TENSORS, "numel")


@functools.cache
def compiled(name: str, target: str, dtype: str = "bf16", epilogue: str = "", trace: int = 0) -> tuple[str, int]:
    """(the GPU's assembly, bytes of shared memory) of a kernel for 4 ranks, specialised as on aligned operands. trace:
    the clock of its time stamps, if any.
    """
    sums = arrange(parse(epilogue) if epilogue else None, 1)
    kernel, warps, constants, _, _ = KERNELS[name]
    constants = {"WORLD": 4, "TRACE": trace, "EPILOGUE": sums.function} | constants
    counts = {
        "outs": 2 if name == "close_slot" else len(sums.outputs),
        "shards": 1 if name == "stage" else 2,
        "copies": 1 if name == "stage" else 2,
    }
    signature: dict[str, Any] = {}
    known: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for place, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument], known[place,] = "constexpr", constants[argument]
        elif argument in ("pointers", "sizes"):
            signature[argument] = POINTERS if argument == "pointers" else SIZES[kernel.__name__]
            attributes |= all_aligned(place, signature[argument])
        elif argument in TUPLES:
            count = counts.get(argument, 2)
            signature[argument] = ("i64" if argument == "numels" else f"*{dtype}",) * count
            attributes |= {(place, i): [["tt.divisibility", 16]] for i in range(count)}
        else:
            signature[argument] = f"*{dtype}" if argument in TENSORS else WORDS.get(argument, "i32")
            if argument in ALIGNED:
                attributes[place,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, known, attributes)
    binary = triton.compile(source, target=TARGETS[target], options={"num_warps": warps})
    return binary.asm["ptx" if target.startswith("sm_") else "amdgcn"], binary.metadata.shared


@pytest.mark.parametrize("target", FAMILIES)
@pytest.mark.parametrize("name", KERNELS)
def test_waits_and_releases_are_there(name: str, target: str) -> None:
    _, _, _, waits, releases = KERNELS[name]
    listing, dialect = Listing(compiled(name, target)[0]), dialect_of(target)
    assert len(listing.places(dialect.acquire)) >= waits
    places = listing.places(dialect.release)
    assert len(places) >= releases
    if KERNELS[name][1] > 1:
        for place in places:
            assert listing.has_barrier_before(place, dialect.barrier, dialect.store), (place, listing.lines[place])


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("name", ["reduce_partials", "one_shot", "two_shots"])
def test_an_epilogue_moves_wide_pieces_too(name: str, target: str) -> None:
    _, _, _, waits, _ = KERNELS[name]
    text, _ = compiled(name, target, epilogue=EPILOGUE)
    assert len(Listing(text).places(dialect_of(target).acquire)) >= waits
    if target.startswith("sm_"):
        assert "ld.global.v4.b32" in text and "st.global.v4.b32" in text
        assert not re.search(r"st\.global\.(b16|b32)\b", text)


@pytest.mark.parametrize("dtype", ["bf16", *rare("fp32")])
@pytest.mark.parametrize(
    "name", ["stage", "stage_two", "reduce_partials", "reduce_and_share", "combine", "one_shot", "two_shots"]
)
def test_data_moves_in_wide_accesses(name: str, dtype: str) -> None:
    text, _ = compiled(name, "sm_90", dtype)
    assert "ld.global.v4.b32" in text and "st.global.v4.b32" in text
    assert not re.search(r"st\.global\.(b16|b32)\b", text)


@pytest.mark.parametrize("target", FAMILIES)
@pytest.mark.parametrize("name", ["open_slot", "publish_pieces", "await_pieces", "await_all"])
def test_waiting_kernels_leave_room(name: str, target: str) -> None:
    """One warp, and shared memory for words that its threads hand on: they fit beside a product if anything does."""
    assert KERNELS[name][1] == 1
    assert compiled(name, target)[1] <= 256
