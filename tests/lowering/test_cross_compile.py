"""Every kernel for every GPU family, and in the generated code every wait, barrier and release, and a pipelined K loop.

Runs without a GPU. What the checks look for stands in the traps that made them: a signal that overtakes its data has no
other symptom than a wrong number once in a while.
"""

from __future__ import annotations

import re

import pytest

from ditron_inductor.lowering import config
from tests.lowering.cross_compile import KERNELS, TARGETS, Compiled, compile_kernel

SHARED_LIMIT = {"sm_90": 232448, "sm_100": 232448, "gfx942": 65536, "gfx950": 163840}

NVIDIA_ACQUIRE = re.compile(r"(ld|atom)\.global\.(sys\.acquire|acquire\.sys)\.")
NVIDIA_RELEASE = re.compile(r"atom\.global\.(sys\.release|release\.sys)\.exch\.b64")
NVIDIA_STORE = re.compile(r"\bst\.global\.")
AMD_ACQUIRE = "buffer_inv sc0 sc1"
AMD_RELEASE = re.compile(r"buffer_wbl2 sc0 sc1")
AMD_STORE = re.compile(r"\b(global|flat|buffer)_store_")

# Reading one kernel: waits for credits and for each phase's flags, releases of flags and credits.
LEAST_WAITS = {"all_gather_matmul": 2, "matmul_reduce_scatter": 2, "matmul_all_reduce": 3}
LEAST_RELEASES = {"all_gather_matmul": 2, "matmul_reduce_scatter": 2, "matmul_all_reduce": 3}

CASES = [
    *(("sm_90", tile, "bf16") for tile in (config.LARGE, config.MIDDLE, config.NARROW)),
    *(("sm_90", tile, "bf16") for tile in (config.SMALL, config.FLAT, config.DECODE)),
    ("sm_90", config.LARGE, "fp16"),
    ("sm_90", config.FP32, "fp32"),
    ("sm_100", config.LARGE, "bf16"),
    ("sm_100", config.DECODE, "bf16"),
    ("gfx942", config.LARGE, "bf16"),
    ("gfx942", config.FP32, "fp32"),
    ("gfx950", config.LARGE, "bf16"),
    ("gfx950", config.DECODE, "bf16"),
]


def _compiled(kernel: str, case: tuple[str, config.Config, str]) -> tuple[str, Compiled]:
    target, tile, dtype = case
    return target, compile_kernel(kernel, target, tile, dtype)


def _case_id(case: tuple[str, config.Config, str]) -> str:
    target, tile, dtype = case
    return f"{target}-{tile.block_m}x{tile.block_n}x{tile.block_k}-{dtype}"


@pytest.fixture(params=CASES, ids=_case_id)
def case(request: pytest.FixtureRequest) -> tuple[str, config.Config, str]:
    chosen: tuple[str, config.Config, str] = request.param
    return chosen


@pytest.mark.parametrize("kernel", KERNELS)
def test_waits_and_releases_are_there(kernel: str, case: tuple[str, config.Config, str]) -> None:
    target, compiled = _compiled(kernel, case)
    lines = _instructions(compiled.assembly)
    nvidia = target.startswith("sm_")
    waits = [i for i, line in enumerate(lines) if (NVIDIA_ACQUIRE.search(line) if nvidia else AMD_ACQUIRE in line)]
    releases = [i for i, line in enumerate(lines) if (NVIDIA_RELEASE if nvidia else AMD_RELEASE).search(line)]
    # A wait is two reads: the first, and the one in the loop.
    assert len(waits) >= 2 * LEAST_WAITS[kernel]
    assert len(releases) >= LEAST_RELEASES[kernel]
    barrier, store = ("bar.sync", NVIDIA_STORE) if nvidia else ("s_barrier", AMD_STORE)
    for release in releases:
        assert _barrier_before(lines, release, barrier, store), f"no barrier before {lines[release]!r} ({release})"


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_bulk_store_before_a_release(kernel: str, case: tuple[str, config.Config, str]) -> None:
    _target, compiled = _compiled(kernel, case)
    # The full wait of a bulk store comes only after a release, so its data may come after the signal.
    assert "cp.async.bulk" not in compiled.assembly
    assert "async_tma_copy_local_to_global" not in compiled.ttgir


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_k_loop_is_pipelined(kernel: str, case: tuple[str, config.Config, str]) -> None:
    target, compiled = _compiled(kernel, case)
    fits = case[1].for_arch(target)
    if target.startswith("sm_"):
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global.*?(0x10|16)\b", compiled.assembly)
        assert len(copies) >= 2 * (fits.num_stages - 1), "operands are not copied ahead, 16 bytes at a time"
        assert re.search(r"cp\.async\.wait_group\s+(0x)?[1-9]", compiled.assembly), "no copy is in flight during a dot"
    else:
        before, loop = _k_loop(compiled.ttgir)
        # Through registers, or straight into shared memory where the GPU can: the first operands before the loop, and
        # in the loop the next ones before the dot.
        fetch = "ttg.async_copy_global_to_local" if "ttg.async_copy_global_to_local" in loop else "tt.load"
        assert loop.index(fetch) < loop.index("tt.dot")
        assert before.count(fetch) >= 2
        assert fetch != "tt.load" or loop.index("tt.dot") < loop.rindex("ttg.local_store")


@pytest.mark.parametrize("kernel", KERNELS)
def test_shared_memory_fits(kernel: str, case: tuple[str, config.Config, str]) -> None:
    target, compiled = _compiled(kernel, case)
    assert 0 < compiled.shared_bytes <= SHARED_LIMIT[target]


@pytest.mark.parametrize("kernel", KERNELS)
def test_stores_to_peers_are_wide(kernel: str) -> None:
    compiled = compile_kernel(kernel, "sm_90", config.LARGE, "bf16")
    narrow = re.findall(r"st\.global\.(?:b16|b32)\b", compiled.assembly)
    assert "st.global.v4.b32" in compiled.assembly
    assert not narrow, "a tile is stored in scattered 2 or 4 byte pieces"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("target", TARGETS)
def test_a_ragged_k_compiles(kernel: str, target: str) -> None:
    compiled = compile_kernel(kernel, target, config.MIDDLE, "fp16", even_k=False)
    assert compiled.shared_bytes <= SHARED_LIMIT[target]


def test_the_barrier_check_can_fail() -> None:
    good = ["st.global.v4.b32 [a]", "bar.sync 0", "atom.global.sys.release.exch.b64 x"]
    bad = ["bar.sync 0", "st.global.v4.b32 [a]", "atom.global.sys.release.exch.b64 x"]
    assert _barrier_before(good, 2, "bar.sync", NVIDIA_STORE)
    assert not _barrier_before(bad, 2, "bar.sync", NVIDIA_STORE)
    assert not _barrier_before(bad[1:], 1, "bar.sync", NVIDIA_STORE)


def _instructions(assembly: str) -> list[str]:
    lines = (line.strip() for line in assembly.splitlines())
    return [line for line in lines if line and not line.startswith((".", "//", ";", "$"))]


def _barrier_before(lines: list[str], release: int, barrier: str, store: re.Pattern[str]) -> bool:
    """Whether, reading upwards from a release, a barrier of the whole program comes before any store of data."""
    for line in reversed(lines[:release]):
        if barrier in line:
            return True
        if store.search(line):
            return False
    return False


def _k_loop(ttgir: str) -> tuple[str, str]:
    """(what stands before it in its tile, the innermost loop that holds a dot)."""
    loops = [loop for loop in re.finditer(r"scf\.for.*?scf\.yield", ttgir, re.S) if "tt.dot" in loop.group()]
    loop = min(loops, key=lambda found: len(found.group()))
    before = ttgir[: loop.start()]
    return before[before.rindex("scf.while") :], loop.group()
