"""Every kernel for every GPU family, and in the generated code every wait, barrier and release, and a pipelined K loop.

Runs without a GPU. Compilers are slow: a case that differs from others in nothing that they would trip over runs by
`--all-cases` only. What the checks look for stands in the traps that made them: a signal that overtakes its data has no
other symptom than a wrong number once in a while, and a K loop that waits none but its time.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from ditron_inductor.core.layout import EPOCH_MASK
from ditron_inductor.lowering import config
from ditron_inductor.lowering.config import Config, select_few_rows_config
from ditron_inductor.lowering.matmul_all_gather import few_rows
from tests.cases import rare
from tests.lowering.assembly import AMD, NVIDIA, Listing, dialect_of, machine_code, resources
from tests.lowering.cross_compile import (
    CLOCKS,
    KERNELS,
    NUM_WEIGHTS,
    OF_FEW_ROWS,
    TARGETS,
    Case,
    Compiled,
    compile_case,
)

SHARED_LIMIT = {"sm_90": 232448, "sm_100": 232448, "gfx942": 65536, "gfx950": 163840}
SM_SHARED_BYTES = 233472
"""Of one SM of sm_90, of which every program takes 1024 for itself."""
SM_REGISTERS = 65536

# Reading one kernel: waits for credits and for each phase's flags, releases of flags and credits.
LEAST_WAITS = {kernel: 3 if kernel == "two_shot" else 2 for kernel in KERNELS}
LEAST_RELEASES = LEAST_WAITS

TILES = [
    config.LARGE,
    config.MIDDLE,
    config.NARROW,
    config.FLAT,
    config.SMALL,
    config.DECODE,
]
FEW_ROWS = list(config.FEW_ROWS.values())
FEW_ROWS_FP32 = [select_few_rows_config(rows=rows, dtype=torch.float32, interpreted=False) for rows in config.FEW_ROWS]
MANY_ROWS = ("all_gather_matmul", "matmul_reduce_scatter", "two_shot")


def _few_rows_cases() -> list[Case]:
    return [
        *(Case("one_shot", "sm_90", tile, "bf16") for tile in (FEW_ROWS[0], FEW_ROWS[-1])),
        Case("one_shot", "sm_90", FEW_ROWS_FP32[0], "fp32"),
        *(Case("one_shot", target, FEW_ROWS[0], "bf16", norm=True) for target in ("sm_90", "gfx942")),
        Case("one_shot", "gfx942", FEW_ROWS[0], "bf16"),
    ]


def _many_rows_cases() -> list[Case]:
    """The largest tile, which is the one that could spill, in all kernels, and the smallest one in the first. AMD's
    compiler takes several times as long for a large tile as for a narrow one, which waits and releases in the same way.
    """
    gather, scatter, reduce = MANY_ROWS
    descriptors: list[tuple[str, str, Config, str]] = [
        *((kernel, "sm_90", config.LARGE, "bf16") for kernel in MANY_ROWS),
        (gather, "sm_90", TILES[-1], "bf16"),
        (gather, "sm_90", config.FP32, "fp32"),
    ]
    pointers: list[tuple[str, str, Config, str]] = [
        *((kernel, "gfx942", config.NARROW, "bf16") for kernel in MANY_ROWS),
        (gather, "sm_90", config.LARGE, "bf16"),
    ]
    return [
        *(Case(*form, descriptors=True) for form in descriptors),
        *(Case(*form) for form in pointers),
        *(Case(scatter, target, config.LARGE, "bf16", descriptors=True, early=True) for target in ("sm_90", "sm_100")),
    ]


# Before the reductions and behind them.
SCALED, ADDED = "pre: mm0 * column(x0)", "pre: full(x0) + mm0"
RESIDUAL = f"{SCALED}; full(x1) + mm0"
SAVED = "gelu_tanh(cast(mm0 + row(x1), bf16)); cast(mm0 + row(x1), bf16); mm0"
SUMS = [
    Case("matmul_reduce_scatter", "sm_90", config.LARGE, "bf16", True, True, True, 3, epilogue=f"{SCALED}; mm0"),
    Case("matmul_reduce_scatter", "gfx942", config.NARROW, "bf16", products=2, biased=True, epilogue=RESIDUAL),
    Case("two_shot", "sm_90", config.LARGE, "bf16", descriptors=True, products=3, epilogue=RESIDUAL),
    Case("one_shot", "sm_90", config.FEW_ROWS[16], "bf16", products=3, biased=True, epilogue=f"{SCALED}; {SAVED}"),
    Case("one_shot", "gfx942", config.FEW_ROWS[16], "bf16", epilogue=f"{ADDED}; mm0"),
]


def _gathered_cases() -> list[Case]:
    """What differs from the other kernels: stores to every peer, and copies."""
    return [
        Case("gathered", "sm_90", config.LARGE, "bf16", descriptors=True, biased=True),
        Case("gathered", "gfx942", config.NARROW, "bf16", biased=True),
        *(Case("gathered_few", target, _few_tiles(64), "bf16", biased=True) for target in ("sm_90", "gfx942")),
    ]


def _few_tiles(rows: int) -> Config:
    return few_rows.select_tiles(rows=rows, dtype=torch.bfloat16, interpreted=False)


def _scattered_cases() -> list[Case]:
    return [
        Case("scattered_columns", "sm_90", config.LARGE, "bf16", descriptors=True, biased=True),
        Case("scattered_columns", "gfx942", config.NARROW, "bf16", biased=True),
        Case("scattered_rows", "sm_90", config.LARGE, "bf16", descriptors=True),
        Case("scattered_rows", "gfx942", config.NARROW, "bf16"),
    ]


def _more_cases() -> list[Case]:
    """What repeats: the same code of another kernel in another tile, or by another compiler of the same family."""
    gather, scatter, reduce = MANY_ROWS
    descriptors: list[tuple[str, str, Config, str]] = [
        (gather, "sm_90", config.LARGE, "fp16"),
        *((gather, "sm_90", tile, "bf16") for tile in TILES[1:-1]),
        (gather, "sm_100", config.LARGE, "bf16"),
        (scatter, "sm_90", config.NARROW, "bf16"),
        (scatter, "sm_90", config.SMALL, "bf16"),
        (reduce, "sm_90", config.MIDDLE, "bf16"),
        *((kernel, "sm_90", config.FP32, "fp32") for kernel in (scatter, reduce, "gathered")),
        *((kernel, "sm_100", config.LARGE, "bf16") for kernel in (scatter, reduce)),
    ]
    pointers: list[tuple[str, str, Config, str]] = [
        *((gather, target, config.DECODE, "bf16") for target in ("sm_90", "gfx950")),
        (gather, "gfx950", config.LARGE, "bf16"),
        *((kernel, "gfx942", config.LARGE, "bf16") for kernel in (*MANY_ROWS, "gathered", "scattered_rows")),
        *((gather, target, config.FP32, "fp32") for target in ("sm_90", "gfx942")),
        *((kernel, "sm_90", config.LARGE, "bf16") for kernel in (scatter, reduce, "gathered", "scattered_rows")),
        *((kernel, "gfx950", config.LARGE, "bf16") for kernel in (scatter, reduce)),
        *(("one_shot", "sm_90", tile, "fp32") for tile in FEW_ROWS_FP32[1:]),
        *(("one_shot", "sm_90", tile, "bf16") for tile in FEW_ROWS[1:-1]),
        *(("one_shot", target, FEW_ROWS[-1], "bf16") for target in TARGETS if target != "sm_90"),
        *(("one_shot", target, FEW_ROWS[0], "bf16") for target in ("sm_100", "gfx950")),
        ("gathered_few", "sm_90", _few_tiles(16), "bf16"),
    ]
    return [
        *(Case(*form, descriptors=True) for form in descriptors),
        *(Case(*form) for form in pointers),
        Case(scatter, "sm_90", config.MIDDLE, "bf16", descriptors=True, early=True),
        Case(scatter, "sm_90", config.MIDDLE, "bf16", descriptors=True, epilogue=RESIDUAL),
        Case(scatter, "sm_90", config.LARGE, "bf16", True, biased=True, epilogue=f"{ADDED}; mm0"),
        Case(reduce, "gfx942", config.LARGE, "bf16", epilogue=f"{ADDED}; mm0 + row(x1)"),
    ]


CASES = [
    *_many_rows_cases(),
    *_few_rows_cases(),
    *SUMS,
    *_gathered_cases(),
    *_scattered_cases(),
]
MORE_CASES = _more_cases()


def each(wanted: Callable[[Case], bool] = lambda case: True) -> pytest.MarkDecorator:
    """A test of every case that is wanted."""
    cases = [pytest.param(case, id=str(case)) for case in CASES if wanted(case)]
    more = [pytest.param(case, id=str(case), marks=pytest.mark.all_cases) for case in MORE_CASES if wanted(case)]
    return pytest.mark.parametrize("case", cases + more)


def on_nvidia(case: Case) -> bool:
    return case.target.startswith("sm_")


def by_descriptors(case: Case) -> bool:
    return case.descriptors


@each()
def test_waits_and_releases_are_there(case: Case) -> None:
    listing, dialect = compile_case(case).listing, dialect_of(case.target)
    releases = listing.places(dialect.release)
    # A wait is two reads: the first, and the one in the loop.
    assert len(listing.places(dialect.acquire)) >= 2 * LEAST_WAITS[case.kernel]
    assert len(releases) >= LEAST_RELEASES[case.kernel]
    for place in releases:
        assert listing.has_barrier_before(place, dialect.barrier, dialect.store), (place, listing.lines[place])


@each()
def test_no_bulk_stores_and_no_clocks(case: Case) -> None:
    compiled = compile_case(case)
    # The full wait of a bulk store comes only after a release, so its data may come after the signal.
    assert not re.search(r"cp\.(reduce\.)?async\.bulk\S*\.global\.shared", compiled.assembly)
    assert "async_tma_copy_local_to_global" not in compiled.ttgir
    # Time stamps (core/trace.py) are compiled in on request only.
    assert not re.search(CLOCKS, compiled.assembly)


@each(by_descriptors)
def test_blocks_are_fetched_several_steps_ahead(case: Case) -> None:
    listing = compile_case(case).listing
    loops = listing.loops(NVIDIA.dot)
    fetches = listing.places(r"cp\.async\.bulk\.tensor\.2d\.shared::\w+\.global")
    assert len(loops) == len(case.carrying_loops)
    end = 0
    for first, last in loops:
        assert sum(first < place < last for place in fetches) == 2
        assert sum(end <= place < first for place in fetches) >= 2 * (case.fitted.num_stages - 1)
        loop = "\n".join(listing.lines[first:last])
        if "wgmma.mma_async" in loop:
            # While one product runs, the next one is begun.
            assert "wgmma.wait_group.sync.aligned 1" in loop
            assert "wgmma.wait_group.sync.aligned 0" not in loop
        end = last


@each(lambda case: not case.descriptors)
def test_operands_are_copied_ahead(case: Case) -> None:
    compiled = compile_case(case)
    if case.target.startswith("sm_"):
        listing = Listing(compiled.assembly)
        copies = listing.places(r"cp\.async\.c[ag]\.shared\.global.*(0x10|16)\b")
        end = 0
        for first, last in listing.loops(NVIDIA.dot):
            assert sum(first < place < last for place in copies) >= 2, "operands are not copied 16 bytes at a time"
            assert sum(end <= place < first for place in copies) >= 2 * (case.fitted.num_stages - 1)
            loop = "\n".join(listing.lines[first:last])
            assert re.search(r"cp\.async\.wait_group\s+(0x)?[1-9]", loop), "no copy is in flight during a dot"
            end = last
    else:
        before, loop = _k_loop(compiled.ttgir)
        # Through registers, or straight into shared memory where the GPU can: the first operands before the loop, and
        # in the loop the next ones before the dot.
        fetch = "ttg.async_copy_global_to_local" if "ttg.async_copy_global_to_local" in loop else "tt.load"
        assert loop.index(fetch) < loop.index("tt.dot")
        assert before.count(fetch) >= 2
        assert fetch != "tt.load" or loop.index("tt.dot") < loop.rindex("ttg.local_store")


@each(on_nvidia)
def test_pieces_are_carried_as_they_are(case: Case) -> None:
    listing = compile_case(case).listing
    for (first, last), carries in zip(listing.loops(NVIDIA.dot), case.carrying_loops, strict=True):
        loop = listing.lines[first:last]
        moves = [line for line in loop if re.search(r"\b(ld|st)\.global\.", line)]
        assert not [line for line in loop if re.search(r"\batom\.|\bld\.\S*acquire", line)], "a wait in the K loop"
        assert all(re.search(f"{NVIDIA.wide_load}|{NVIDIA.wide_store}", line) for line in moves)
        assert any(re.search(NVIDIA.wide_load, line) for line in moves) == carries
        assert any(re.search(NVIDIA.wide_store, line) for line in moves) == carries
        # Whatever looks at a piece waits for its load; only the next step's store may.
        loads = [line.partition("[")[0] for line in moves if "ld.global" in line]
        loaded = {name for line in loads for name in re.findall(r"%r\d+", line)}
        for line in loop:
            names = set(re.findall(r"%r\d+", line))
            assert not names & loaded or re.search(r"\b(ld|st)\.global\.|\bmov\.", line), line


@each(lambda case: not on_nvidia(case) and any(case.carrying_loops))
def test_pieces_are_wide_on_amd(case: Case) -> None:
    listing = compile_case(case).listing
    for (first, last), carries in zip(listing.loops(AMD.dot), case.carrying_loops, strict=True):
        loop = "\n".join(listing.lines[first:last])
        assert not carries or (re.search(AMD.wide_load, loop) and re.search(AMD.wide_store, loop))


@each(on_nvidia)
def test_stores_are_wide(case: Case) -> None:
    tile = case.fitted
    itemsize = 4 if case.dtype == "fp32" else 2
    bytes_of_thread = tile.block_m * tile.block_n * itemsize // (tile.num_warps * 32)
    wide = NVIDIA.wide_store if bytes_of_thread >= 16 else r"st\.global\.v2\.b32"
    stores = re.findall(r"\bst\.global\.[\w.]+", compile_case(case).assembly)
    # Single words are the protocol's.
    assert any(re.search(wide, store) for store in stores)
    assert all(re.search(f"{wide}|st.global.b64", store) for store in stores), "a tile is stored in scattered pieces"


@each(lambda case: case.descriptors and case.kernel == "all_gather_matmul")
def test_a_proxy_fence_follows_the_wait(case: Case) -> None:
    """The copy unit reads what a peer wrote by another path than the wait that acquired it."""
    compiled = compile_case(case)
    assert _fences_between_wait_and_loop(compiled) == [True] * NUM_WEIGHTS
    assert len(re.findall(r"fence\.proxy\.async;", compiled.assembly)) >= NUM_WEIGHTS


def test_a_proxy_fence_follows_the_wait_for_a_piece() -> None:
    """The first product is of the own piece, and waits for nothing."""
    case = next(case for case in CASES if case.descriptors and case.kernel == "scattered_rows")
    own, peers = _k_loops(compile_case(case).ttgir)
    between = compile_case(case).ttgir[own.end() : peers.start()]
    assert between.rfind("fence.proxy.async;") > between.rfind("atomic_rmw add, acquire, sys") > 0


@each(lambda case: on_nvidia(case) and case.kernel in OF_FEW_ROWS)
def test_leaving_early_takes_the_epoch_of_every_thread(case: Case) -> None:
    """What is always true of a value can be left out by the compiler, and then nothing waits for its load."""
    listing = compile_case(case).listing
    first = listing.places(rf"and\.b64 .*, {EPOCH_MASK.value}$")[0]
    # The first one asks for a ticket.
    _, left, *_ = listing.places(r"atom\.global\.gpu\.relaxed\.add")
    known = set(re.findall(r"%rd\d+", listing.lines[first]))
    tests = []
    for line in listing.lines[first:left]:
        target, _, sources = line.partition(",")
        if known & set(re.findall(r"%\w+", sources)):
            known |= set(re.findall(r"%\w+", target))
            tests += [line] if line.startswith("setp.") else []
    assert tests


def test_tickets_are_on_their_way_while_the_program_goes_on() -> None:
    """An atomic of a warp at one address is one for all of it, and its result is handed out as soon as it is there."""
    code = machine_code(compile_case(Case("one_shot", "sm_90", config.FEW_ROWS[min(config.FEW_ROWS)], "bf16")).assembly)
    requests = [place for place, line in enumerate(code) if re.search(r"ATOMG?\.E\.ADD\.64\.STRONG\.GPU", line)]
    # The first ticket, the next one, and the end, from two places.
    assert len(requests) == 4
    for place in requests:
        assert not any("SHFL.IDX" in line or "VOTE" in line for line in code[place - 12 : place + 12]), code[place]


@each()
def test_shared_memory_fits(case: Case) -> None:
    assert 0 < compile_case(case).shared_bytes <= SHARED_LIMIT[case.target]


@each(lambda case: case.target == "sm_90")
def test_a_grid_is_resident_without_spills(case: Case) -> None:
    compiled, tile = compile_case(case), case.fitted
    needed = resources(compiled.assembly)
    assert needed.registers * tile.num_warps * 32 * tile.programs_per_sm <= SM_REGISTERS
    assert (compiled.shared_bytes + 1024) * tile.programs_per_sm <= SM_SHARED_BYTES
    if case.descriptors and tile != config.DECODE:
        assert needed.spilled_bytes == 0


@pytest.mark.parametrize(
    ("target", "kernel"),
    [
        ("sm_90", MANY_ROWS[0]),
        ("gfx942", MANY_ROWS[1]),
        *rare(*(("sm_90", kernel) for kernel in MANY_ROWS[1:]), ("sm_100", MANY_ROWS[0]), ("gfx950", MANY_ROWS[2])),
    ],
)
def test_a_ragged_k_compiles(target: str, kernel: str) -> None:
    compiled = compile_case(Case(kernel, target, config.MIDDLE, "fp16", even_k=False))
    assert compiled.shared_bytes <= SHARED_LIMIT[target]


def test_every_tile_shape_is_compiled() -> None:
    assert {case.config for case in [*CASES, *MORE_CASES]} >= set(config.CONFIGS) - {config.INTERPRETER}
    assert {case.kernel for case in CASES} == set(KERNELS)


def test_the_barrier_check_can_fail() -> None:
    end = ["ret;", "$L__1:", "x"]
    good = ["st.global.v4.b32 [a]", "bar.sync 0", "bra.uni $L__1;", "$L__2:", "st.global.b32 [b]", *end]
    bad = ["bar.sync 0", "st.global.v4.b32 [a]", "bra.uni $L__1;", "$L__2:", "bar.sync 0", *end]
    assert Listing("\n".join(good)).has_barrier_before(7, NVIDIA.barrier, NVIDIA.store)
    assert not Listing("\n".join(bad)).has_barrier_before(7, NVIDIA.barrier, NVIDIA.store)


def test_the_fence_check_can_fail() -> None:
    case = next(case for case in CASES if case.descriptors and case.kernel == "all_gather_matmul")
    compiled = compile_case(case)
    without = Compiled("", compiled.ttgir.replace("fence.proxy.async", "nothing"), 0)
    assert not any(_fences_between_wait_and_loop(without))


def _k_loops(ttgir: str) -> list[re.Match[str]]:
    """The innermost loops that hold a dot."""
    dot = re.compile(r"tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma")
    return [loop for loop in re.finditer(r"scf\.for(?:(?!scf\.for).)*?scf\.yield", ttgir, re.S) if dot.search(loop[0])]


def _k_loop(ttgir: str) -> tuple[str, str]:
    """(what stands before it in its tile, the first innermost loop that holds a dot)."""
    loop = _k_loops(ttgir)[0]
    before = ttgir[: loop.start()]
    return before[before.rindex("scf.while") :], loop[0]


def _fences_between_wait_and_loop(compiled: Compiled) -> list[bool]:
    """For each K loop: whether a fence follows the last wait for one flag that stands before it."""
    found, end = [], 0
    for loop in _k_loops(compiled.ttgir):
        before = compiled.ttgir[end : loop.start()]
        waits = [wait.start() for wait in re.finditer(r"atomic_rmw add, acquire, sys.*: \(!tt\.ptr<i64>", before)]
        found.append(before.rfind("fence.proxy.async;") > max(waits))
        end = loop.end()
    return found
