"""The kernels of whole rows for GPUs that are not there: every wait, release and barrier, wide accesses."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
from triton.compiler import ASTSource

from ditron_inductor.lowering.all_reduce_rms_norm.norm_kernel import (
    all_reduce_rms_norm_kernel,
    slice_warps,
    slice_width,
)
from ditron_inductor.lowering.all_reduce_rms_norm.slices import How, SliceColumns
from ditron_inductor.lowering.norms.add_norm import add_norm_kernel
from ditron_inductor.lowering.norms.rows import (
    HAS_OTHER_SHIFT,
    HAS_OTHER_WEIGHT,
    HAS_POST_WEIGHT,
    HAS_RESIDUAL,
    HAS_SCALE,
    HAS_SECOND_BIAS,
    HAS_SHIFT,
    HAS_WEIGHT,
    LAYER,
    POST,
    POST_ROUND_FIRST,
    ROUND_FIRST,
    SAVES_OTHER,
    SAVES_POST_RSTD,
    SAVES_REDUCED,
    SAVES_RSTD,
    SAVES_SCALED,
    TIMES_FACTOR,
    TOTAL_KNOWN,
    UNROUNDED,
    Norms,
    block_of,
    constants_of,
    warps_of,
)
from ditron_inductor.lowering.norms.stage_norm import How as StageHow
from ditron_inductor.lowering.norms.stage_norm import stage_norm
from ditron_inductor.task.nodes import EXTRAS, SAVED, AllReduceRmsNorm, Norm, Policy
from tests.lowering.assembly import NVIDIA, Listing, dialect_of, machine_code, resources
from tests.lowering.cross_compile import POINTERS as WORKSPACE
from tests.lowering.cross_compile import TARGETS, all_aligned, compile_for

POINTERS = ("x", "reduced")
STRUCTURES = {"pointers": WORKSPACE, "columns": SliceColumns("i32", "i32", "i32")}
TUPLES = {"given": len(EXTRAS), "outputs": 2 + len(SAVED)}
BACKWARD = HAS_SECOND_BIAS.value | POST.value | SAVES_REDUCED.value | SAVES_POST_RSTD.value | SAVES_RSTD.value
BACKWARD |= SAVES_SCALED.value
TWO = HAS_RESIDUAL.value | LAYER.value | HAS_WEIGHT.value | HAS_SHIFT.value | SAVES_RSTD.value
TWO |= HAS_OTHER_WEIGHT.value | HAS_OTHER_SHIFT.value | SAVES_OTHER.value
DECODE = HAS_RESIDUAL.value | HAS_WEIGHT.value | ROUND_FIRST.value
OF_ROWS = SAVES_POST_RSTD.value | SAVES_RSTD.value
LEAST_WAITS = {True: 2, False: 3}


@dataclass(frozen=True)
class Case:
    """Tiles of `rows` rows of n elements, `tiles` of them in a piece; or slices of one row. trace: the clock of its
    time stamps, if any.
    """

    target: str
    one_shot: bool
    n: int
    dtype: str = "bf16"
    rows: int = 1
    tiles: int = 1
    form: int = HAS_RESIDUAL.value | HAS_WEIGHT.value | LAYER.value
    slices: int = 1
    trace: int = 0
    fuses: bool = True
    """Whether the compiler may compute a product and a sum by one operation."""

    def __str__(self) -> str:
        sizes = f"{self.tiles}x{self.rows}x{self.n}" + f"/{self.slices}" * (self.slices > 1)
        return f"{self.target}-{1 if self.one_shot else 2}-{sizes}-{self.dtype}-{self.form:x}" + "x" * (not self.fuses)

    @property
    def num_warps(self) -> int:
        block = block_of(self.n)
        return warps_of(self.rows * block) if self.slices == 1 else slice_warps(block, 4 if self.dtype == "fp32" else 2)


CASES = (
    Case("sm_90", True, 4096),
    Case("sm_90", False, 5120, tiles=2),
    Case("sm_90", True, 1024, "fp32", rows=4),
    Case("gfx942", False, 8192, tiles=2),
    Case("sm_90", True, 4096, form=BACKWARD),
    # Two norms of one sum.
    Case("sm_90", True, 6144, form=TWO),
    Case("gfx942", False, 4096, form=TWO),
    Case("sm_90", False, 8192, form=DECODE | UNROUNDED.value, slices=8),
    Case("gfx942", False, 4096, slices=4),
)
# Compilers are slow: each of these has in two other cases whatever one would trip over.
MORE_CASES = (
    Case("sm_90", False, 4096, form=BACKWARD, slices=4),
    Case("sm_90", True, 4096, form=DECODE | TIMES_FACTOR.value, fuses=False),
    Case("gfx942", True, 4096, form=BACKWARD),
    Case("sm_90", False, 5120, slices=4),
)


def each(*targets: str) -> pytest.MarkDecorator:
    """A test of every case for these GPUs."""
    cases = [pytest.param(case, id=str(case)) for case in CASES if case.target in targets]
    slow = pytest.mark.all_cases
    more = [pytest.param(case, id=str(case), marks=slow) for case in MORE_CASES if case.target in targets]
    return pytest.mark.parametrize("case", cases + more)


@functools.cache
def compiled(kernel: Any, case: Case) -> Any:
    """The kernel for 4 ranks."""
    block = block_of(case.n)
    num_warps = case.num_warps
    constants: dict[str, Any] = {
        "ROWS": case.rows,
        "BLOCK": block,
        "HOW": StageHow(4, True, case.rows, block)
        if kernel is stage_norm
        else How(
            WORLD=4,
            AVERAGE=False,
            ONE_SHOT=case.one_shot,
            ROWS=case.rows,
            TILES=case.tiles,
            BLOCK=block,
            SLICES=case.slices,
            SLICE=block_of(slice_width(case.n, case.slices)),
            THREADS=TARGETS[case.target].warp_size * num_warps,
        ),
        "NORMS": Norms(case.form, 1e-6, 1e-6, 0.22),
        "TRACE": case.trace,
    }
    signature: dict[str, Any] = {}
    known: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for place, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in constants:
            signature[name], known[place,] = "constexpr", constants[name]
            continue
        if name in STRUCTURES:
            signature[name] = STRUCTURES[name]
            attributes |= all_aligned(place, STRUCTURES[name])
            continue
        if name in TUPLES:
            signature[name] = [f"*{case.dtype}"] * TUPLES[name]
            if name == "outputs":
                signature[name][3:8] = ["*fp32"] * 5
            signature[name] = tuple(signature[name])
            attributes |= {(place, i): [["tt.divisibility", 16]] for i in range(TUPLES[name])}
            continue
        signature[name] = f"*{case.dtype}" if name in POINTERS else "i32"
        if not parameter.do_not_specialize:
            attributes[place,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, known, attributes)
    return compile_for(case.target, source, {"num_warps": num_warps, "enable_fp_fusion": case.fuses})


def assembly(kernel: Any, case: Case) -> str:
    text: str = compiled(kernel, case).asm["ptx" if case.target.startswith("sm_") else "amdgcn"]
    return text


@each("sm_90", "gfx942")
def test_waits_and_releases_are_there(case: Case) -> None:
    listing, dialect = Listing(assembly(all_reduce_rms_norm_kernel, case)), dialect_of(case.target)
    releases = listing.places(dialect.release)
    # A wait is two reads: the first, and the one in the loop.
    assert len(listing.places(dialect.acquire)) >= 2 * LEAST_WAITS[case.one_shot]
    assert len(releases) >= LEAST_WAITS[case.one_shot]
    for place in releases:
        assert listing.has_barrier_before(place, dialect.barrier, dialect.store), (place, listing.lines[place])


@each("sm_90")
def test_rows_are_moved_16_bytes_at_a_time(case: Case) -> None:
    text = assembly(all_reduce_rms_norm_kernel, case)
    stores = re.findall(r"\bst\.global\.[\w.]+", text)
    # Single words are the protocol's, and statistics of rows.
    assert any(re.search(NVIDIA.wide_store, store) for store in stores)
    # Of a small slice every thread has 8 bytes, and a warp whole lines.
    wide = f"{NVIDIA.wide_store}|st.global.b64" + r"|st\.global\.v2\.b32" * (case.slices > 1)
    narrow = [store for store in stores if not re.search(wide, store)]
    assert len(narrow) <= (case.tiles + 1) * bin(case.form & OF_ROWS).count("1"), narrow
    needed = resources(text)
    # The assembler gives up a few registers for a third program on an SM.
    assert needed.spilled_bytes <= 80
    # More than one program of an SM hides the waits of the other.
    assert needed.registers * 32 * case.num_warps <= 65536


@pytest.mark.parametrize("case", [CASES[0], Case("sm_90", False, 8192, form=DECODE, slices=8)], ids=str)
def test_no_warp_waits_for_the_ticket_it_asks_for(case: Case) -> None:
    """Requests of a warp for one word become a single one, whose answer is dealt to the threads by a shuffle."""
    code = "\n".join(machine_code(assembly(all_reduce_rms_norm_kernel, case)))
    assert re.search(r"ATOMG\.E\.ADD\.64\.STRONG\.GPU", code) and "SHFL.IDX" not in code


def test_the_norm_alone() -> None:
    text = assembly(add_norm_kernel, CASES[0])
    assert resources(text).spilled_bytes == 0 and re.search(NVIDIA.wide_load, text)
    assert assembly(add_norm_kernel, Case("gfx942", True, 4096))


@pytest.mark.parametrize(
    ("target", "dtype", "form"),
    [
        ("sm_90", "bf16", HAS_SCALE.value),
        ("sm_90", "fp32", TIMES_FACTOR.value),
        ("sm_90", "bf16", POST.value | HAS_POST_WEIGHT.value | POST_ROUND_FIRST.value),
        ("gfx942", "fp16", HAS_SCALE.value),
    ],
)
def test_a_product_is_rounded_before_the_residual_is_added(target: str, dtype: str, form: int) -> None:
    """One operation for both would round once. Without the option the compiler chooses that."""
    case = Case(target, True, 1024, dtype, form=form | HAS_RESIDUAL.value)
    at_once = r"fma\.rn\.(bf16|f16|f32)" if target == "sm_90" else r"v_pk_fma_f(16|32)"
    assert re.search(at_once, assembly(add_norm_kernel, case))
    assert not re.search(at_once, assembly(add_norm_kernel, replace(case, fuses=False)))


def test_which_kernels_round_products_by_themselves() -> None:
    """Those in which one stands in front of a residual."""
    site = 2, "0", "r/0", Policy()
    plain = AllReduceRmsNorm("sum", Norm(), ("residual", "weight"), *site)
    alone = AllReduceRmsNorm("sum", Norm(), ("weight",), *site, factor=0.5)
    scaled = replace(plain, extras=("residual", "scale"))
    products = [replace(plain, factor=0.5), scaled, replace(plain, post=Norm())]
    options = [constants_of(node, stores_reduced=True) for node in (plain, alone, *products)]
    assert ["enable_fp_fusion" in one for one in options] == [False, False, True, True, True]
    assert all(one.get("enable_fp_fusion", False) is False for one in options)


STAGED = (
    Case("sm_90", True, 4096),
    Case("sm_90", True, 8192, form=HAS_WEIGHT.value | TOTAL_KNOWN.value | SAVES_RSTD.value),
    Case("gfx942", True, 4096),
)


@pytest.mark.parametrize("case", STAGED, ids=str)
def test_a_norm_in_the_own_slot(case: Case) -> None:
    """The credits come before the first store of rows, a barrier and a release after the last."""
    listing, dialect = Listing(assembly(stage_norm, case)), dialect_of(case.target)
    waits, releases = listing.places(dialect.acquire), listing.places(dialect.release)
    assert len(waits) >= 2 and releases
    for place in releases:
        assert listing.has_barrier_before(place, dialect.barrier, dialect.store), (place, listing.lines[place])
    if case.target == "sm_90":
        text = assembly(stage_norm, case)
        wide = listing.places(NVIDIA.wide_store)
        # Twice in the gathered tensor and in the slot, and the sum.
        assert len(wide) >= (2 if case.form & TOTAL_KNOWN.value else 3)
        assert min(waits) < min(wide) and max(wide) < max(releases)
        assert resources(text).spilled_bytes <= 64
        assert not re.search(r"st\.global\.(b16|b32)\b", text) or case.form & SAVES_RSTD.value
