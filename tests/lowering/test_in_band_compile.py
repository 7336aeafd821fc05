"""The kernel that sends in band for GPUs that are not there: what it does between a send and the sum, and what not."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from typing import Any

import pytest
from triton.compiler import ASTSource

from ditron_inductor.core.overlap import FOLLOWS
from ditron_inductor.lowering.all_reduce_rms_norm.norm_in_band import LEAST_CHUNK, How, SentColumns, in_band_kernel
from ditron_inductor.lowering.norms.rows import (
    HAS_BIAS,
    HAS_RESIDUAL,
    HAS_SHIFT,
    HAS_WEIGHT,
    LAYER,
    ROUND_FIRST,
    Norms,
    block_of,
    warps_of,
)
from ditron_inductor.lowering.overlapping import launch_options
from ditron_inductor.task.nodes import EXTRAS, SAVED
from tests.cases import rare
from tests.lowering.assembly import NVIDIA, Listing, machine_code, resources
from tests.lowering.cross_compile import POINTERS, TARGETS, all_aligned, compile_for

SHIFTED = HAS_BIAS.value | HAS_RESIDUAL.value | LAYER.value | HAS_WEIGHT.value | HAS_SHIFT.value
DECODE = HAS_RESIDUAL.value | HAS_WEIGHT.value | ROUND_FIRST.value
VOLATILE = r"\bld\.volatile\.global"
WIDE = VOLATILE + r"\.v4\.b32"


@dataclass(frozen=True)
class Case:
    """Rows of n elements, `rows` in a tile, of `world` ranks. top_k: of how many rows, and of another, each of them is
    the sum, if any. parts: of how many tensors in fp32 it is the sum, if any. trace: the clock of time stamps, if any.
    overlap: as in core/overlap.py.
    """

    target: str
    n: int
    dtype: str = "bf16"
    world: int = 4
    rows: int = 1
    form: int = DECODE
    spilled: int = 32
    trace: int = 0
    top_k: int = 0
    parts: int = 0
    overlap: int = 0

    def __str__(self) -> str:
        slots = f"k{self.top_k}-p{self.parts}-o{self.overlap}"
        return f"{self.target}-{self.rows}x{self.n}-{self.dtype}-w{self.world}-{self.form:x}-{slots}"

    @property
    def words(self) -> int:
        """Of a tile."""
        return self.rows * block_of(self.n) * (4 if self.dtype == "fp32" else 2) // 4

    @property
    def num_warps(self) -> int:
        return warps_of(self.rows * block_of(self.n))


CASES = (
    Case("sm_90", 4096),
    Case("sm_90", 5120, "fp16", form=SHIFTED),
    Case("sm_90", 1024, rows=4, world=2),
    # The words of seven peers are more registers than there are.
    Case("sm_90", 8192, world=8, spilled=512),
    # What the experts of a token return is added up.
    Case("sm_90", 2048, world=2, top_k=8),
    # A product of few rows in parts.
    Case("sm_90", 4096, world=2, parts=2),
)
MORE_CASES = (
    Case("sm_90", 4096, "fp32", world=2),
    Case("sm_90", 8192),
    Case("sm_90", 4096, "fp16", top_k=4),
    Case("sm_90", 4096, "fp32", world=2, top_k=2),
)
each_case = pytest.mark.parametrize("case", [*CASES, *rare(*MORE_CASES)], ids=str)


@functools.cache
def compiled(case: Case) -> Any:
    constants: dict[str, Any] = {
        "HOW": How(
            WORLD=case.world,
            AVERAGE=False,
            ROWS=case.rows,
            BLOCK=block_of(case.n),
            BLOCK_WORDS=case.words // case.rows,
            CHUNK=LEAST_CHUNK,
            THREADS=TARGETS[case.target].warp_size * case.num_warps,
            TOP_K=case.top_k,
            HAS_ADDED=case.top_k > 0,
            PARTS=case.parts,
            OVERLAP=case.overlap,
        ),
        "NORMS": Norms(case.form, 1e-6, 1e-6),
        "TRACE": case.trace,
    }
    signature: dict[str, Any] = {}
    known: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    aligned = [["tt.divisibility", 16]]
    for place, parameter in enumerate(in_band_kernel.params):
        name = parameter.name
        if name in constants:
            signature[name], known[place,] = "constexpr", constants[name]
        elif name in ("pointers", "columns"):
            signature[name] = POINTERS if name == "pointers" else SentColumns("i32", "i32", "i32")
            attributes |= all_aligned(place, signature[name])
        elif name in ("sources", "given", "outputs"):
            count = {"sources": 4, "given": len(EXTRAS), "outputs": 2 + len(SAVED)}[name]
            signature[name] = (f"*{case.dtype}",) * count
            if name == "sources" and case.parts:
                signature[name] = (*signature[name][:-1], "*fp32")
            attributes |= {(place, i): aligned for i in range(count)}
        else:
            signature[name] = "i32"
            if not parameter.do_not_specialize:
                attributes[place,] = aligned
    source = ASTSource(in_band_kernel, signature, known, attributes)
    return compile_for(case.target, source, {"num_warps": case.num_warps, **launch_options(case.overlap)})


def test_a_launch_that_follows_touches_no_memory_before_it_has_waited() -> None:
    text = compiled(Case("sm_90", 4096, world=2, parts=1, overlap=FOLLOWS.value)).asm["ptx"]
    before, waits, _ = text.partition("griddepcontrol.wait")
    assert waits and "griddepcontrol.launch_dependents" in before
    assert not re.search(r"\b(ld|st|atom|red)\.(\w+\.)*global", before)


@each_case
def test_the_wait_reads_the_data_itself(case: Case) -> None:
    """Each look reads all words, 16 bytes at a time, in the loop; no release and no acquire on the way to the sum."""
    listing = Listing(compiled(case).asm["ptx"])
    ((first, last),) = listing.loops(WIDE)
    loop = listing.lines[first:last]
    threads = 32 * case.num_warps
    # A tile of fewer words than that for each thread is read by some of them.
    looks = case.world * max(1, case.words // (4 * threads))
    assert sum(bool(re.search(WIDE, line)) for line in loop) == looks
    assert len(listing.places(WIDE)) == looks
    text = "\n".join(loop)
    assert "release" not in text and "acquire" not in text and "fence" not in text
    assert not re.search(NVIDIA.store, text)
    # None of them is hoisted: the machine reads as often, past its first cache.
    code = machine_code(compiled(case).asm["ptx"])
    assert len([line for line in code if re.search(r"LDG\.E\.128\.STRONG\.SYS", line)]) == looks
    # Between the loop and what it stores there is the sum, and nothing that is ordered.
    behind = next(place for place in listing.places(NVIDIA.wide_store) if place > last)
    order = [line for line in listing.lines[last:behind] if re.search(r"acquire|fence|membar", line)]
    assert not order, order


@each_case
def test_no_two_threads_look_at_the_same_word(case: Case) -> None:
    """They might see different values, and go different ways: a block that is volatile has a place for every thread."""
    looks = re.findall(r"tt\.load .*isVolatile = true.* : tensor<([\dx]+)x!tt", compiled(case).asm["ttgir"])
    sizes = [math.prod(map(int, one.split("x"))) for one in looks]
    # Data of every source, signs, and flags in the wait and behind it.
    assert len(sizes) >= case.world + 3 and min(sizes) >= 32 * case.num_warps, looks


@each_case
def test_only_what_is_about_slots_is_released(case: Case) -> None:
    """Credits, and the record of a failure."""
    listing = Listing(compiled(case).asm["ptx"])
    assert len(listing.places(r"atom\.global\.(\w+\.)*release")) == 2
    assert not listing.places("acquire")


@each_case
def test_accesses_are_wide(case: Case) -> None:
    text = compiled(case).asm["ptx"]
    assert re.search(r"STG\.E\.128 .*, RZ", "\n".join(machine_code(text))), "zeros"
    # No layout is changed on the way, which would take shared memory and barriers; but weights of several rows.
    changed = [line for line in compiled(case).asm["ttgir"].splitlines() if "ttg.convert_layout" in line]
    assert not changed or (case.rows > 1 and all(f"tensor<1x{block_of(case.n)}x" in line for line in changed)), changed
    needed = resources(text)
    assert needed.spilled_bytes <= case.spilled and needed.registers * 32 * case.num_warps <= 65536


@pytest.mark.parametrize("target", ["gfx942", *rare("sm_100")])
def test_it_compiles_elsewhere(target: str) -> None:
    assert compiled(Case(target, 4096)).asm["ttgir"] and compiled(Case(target, 4096, top_k=8)).asm["ttgir"]
