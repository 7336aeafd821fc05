"""The decode attention kernels for GPUs that are not there: every wait, release and barrier, pipelined wide loads."""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from triton.compiler import ASTSource

from ditron_inductor.lowering.decode_attention.decode_config import (
    CONFIGS,
    DecodeConfig,
    deal,
    merged_splits,
    select_config,
)
from ditron_inductor.lowering.decode_attention.split_attention import How, Sizes, Strides, Tensors
from ditron_inductor.lowering.flash_decode import decode_in_band
from ditron_inductor.lowering.flash_decode.decode_in_band import flash_decode_in_band_kernel
from ditron_inductor.lowering.flash_decode.local_decode import local_attention_kernel, merge_ranks_kernel
from ditron_inductor.lowering.flash_decode.tile import Sending, flash_decode_kernel
from tests.cases import rare
from tests.lowering.assembly import Listing, dialect_of, machine_code, resources
from tests.lowering.cross_compile import POINTERS, TARGETS, all_aligned, compile_for

SHARED_BYTES = {"sm_90": 227 << 10, "gfx942": 64 << 10}
OUT = "out"
NUM_STRIDES = {"q": 2, "k": 3, "v": 3}
OTHERS = {"parts": "*fp32", "counters": "*i32"}
ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Case:
    """A kernel for heads of `head_dim` elements, `group` of which share a key head. trace: the clock of its time
    stamps, if any.
    """

    target: str
    head_dim: int
    group: int = 4
    dtype: str = "bf16"
    page: int = 0
    shared_flags: bool = False
    attended: bool = False
    one_each: bool = False
    crowded: bool = False
    trace: int = 0

    def __str__(self) -> str:
        paged = f"-paged{self.page}" if self.page else ""
        forms = "-shared" * self.shared_flags + "-attended" * self.attended + "-one" * self.one_each
        forms += "-crowded" * self.crowded
        return f"{self.target}-{self.group}x{self.head_dim}-{self.dtype}{paged}{forms}"

    @property
    def config(self) -> DecodeConfig:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self.dtype]
        config = select_config(
            head_dim=self.head_dim, dtype=dtype, crowded=self.crowded, interpreted=False
        )
        return config.for_arch(self.target)


CASES = (
    Case("sm_90", 128, one_each=True),
    Case("sm_90", 128, group=8),
    Case("sm_90", 256, group=8, dtype="fp16", page=16, shared_flags=True),
    Case("gfx942", 128, shared_flags=True),
)
MORE_CASES = (
    Case("sm_90", 64, group=1, dtype="fp32"),
    Case("sm_90", 128, one_each=True, crowded=True),
    Case("gfx942", 128, one_each=True),
)
ON_NVIDIA = [
    *(case for case in CASES if case.target == "sm_90"),
    *rare(*(case for case in MORE_CASES if case.target == "sm_90")),
]


@functools.cache
def compiled(kernel: Any, case: Case) -> Any:
    """The kernel for 4 ranks."""
    heads, config = deal(8, 8 * case.group, 8), case.config
    threads = config.num_warps * TARGETS[case.target].warp_size
    sending: Any = Sending(4, 2 if case.shared_flags else 1, threads, case.attended, case.one_each)
    if kernel is flash_decode_in_band_kernel:
        sending = decode_in_band.InBandSending(4, threads)
    constants: dict[str, Any] = {
        "WORLD": 4,
        "HOW": How(
            ROWS=heads.rows,
            BLOCK_ROWS=heads.block_rows,
            MERGED_ROWS=heads.merged_rows,
            PARTS=heads.parts,
            HEAD_DIM=case.head_dim,
            MERGED_SPLITS=merged_splits(heads, case.head_dim, 1 if case.attended else 16, False),
            BLOCK_N=config.block_n,
            LEAST_BLOCKS=config.least_blocks,
            PAGE=case.page,
            FAR=False,
            SCALE=0.125,
            SOFTCAP=0.0,
            PRECISION="tf32" if case.dtype == "fp32" else "ieee",
            UPCAST=False,
        ),
        "SENDING": sending,
        "TRACE": case.trace,
    }
    signature: dict[str, Any] = {}
    known: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for place, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name], known[place,] = "constexpr", constants[name]
        elif name in ("tensors", "pointers", "sizes"):
            strides = Strides(*(("i32",) * count for count in NUM_STRIDES.values()), "i32")
            out = "*fp32" if kernel is local_attention_kernel else f"*{case.dtype}"
            structures = {
                "tensors": Tensors(*(f"*{case.dtype}",) * 3, "*i32", "*i32", out, "*fp32"),
                "pointers": POINTERS,
                "sizes": Sizes("i32", "i32", "i32" if kernel is flash_decode_kernel else "constexpr", strides),
            }
            signature[name] = structures[name]
            attributes |= all_aligned(place, signature[name])
            if name == "sizes" and kernel is not flash_decode_kernel:
                known[place, 2] = None
        else:
            signature[name] = f"*{case.dtype}" if name == OUT else OTHERS.get(name, "i32")
            if not parameter.do_not_specialize:
                attributes[place,] = ALIGNED
    source = ASTSource(kernel, signature, known, attributes)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return compile_for(case.target, source, options)


def assembly(kernel: Any, case: Case) -> str:
    text: str = compiled(kernel, case).asm["ptx" if case.target.startswith("sm_") else "amdgcn"]
    return text


ATTENDED = (Case("sm_90", 128, attended=True, one_each=True), Case("gfx942", 128, shared_flags=True, attended=True))


@pytest.mark.parametrize("case", [*CASES, *ATTENDED, *rare(*MORE_CASES)], ids=str)
def test_waits_and_releases_are_there(case: Case) -> None:
    listing, dialect = Listing(assembly(flash_decode_kernel, case)), dialect_of(case.target)
    releases = listing.places(dialect.release)
    # Of credits and of parts; a wait is two reads, the first one and the one in the loop.
    assert len(listing.places(dialect.acquire)) >= 4
    # The parts, and the credits that are due, before a wait for credits and after it.
    assert len(releases) >= 3
    for place in releases:
        assert listing.has_barrier_before(place, dialect.barrier, dialect.store), (place, listing.lines[place])
    # A program's part of a head lies in memory before another one counts it.
    assert compiled(flash_decode_kernel, case).metadata.shared <= SHARED_BYTES[case.target]


@pytest.mark.parametrize("case", ON_NVIDIA, ids=str)
def test_caches_are_read_16_bytes_at_a_time_in_a_pipeline(case: Case) -> None:
    text = assembly(flash_decode_kernel, case)
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global.*?0x([0-9a-f]+)", text)
    # Keys and values, of the first steps and of the loop.
    assert copies.count("10") >= 2 * case.config.num_stages
    needed = resources(text)
    # A few words where there is a loop over tickets around all.
    assert needed.spilled_bytes <= (0 if case.one_each else 16)
    threads = 32 * case.config.num_warps
    assert needed.registers * threads * case.config.programs_per_sm <= 65536
    assert compiled(flash_decode_kernel, case).metadata.shared * case.config.programs_per_sm <= SHARED_BYTES["sm_90"]


each_in_band = pytest.mark.parametrize("case", [Case("sm_90", 128), *rare(Case("sm_90", 128, group=8))], ids=str)


@each_in_band
def test_a_part_in_band_is_its_own_signal(case: Case) -> None:
    """Between the stores to the peers and the result there is a loop of volatile reads, and nothing that orders."""
    listing = Listing(assembly(flash_decode_in_band_kernel, case))
    first, last = listing.loops(r"ld\.volatile\.global")[0]
    polled = [line for line in listing.lines[first:last] if "ld.volatile.global" in line]
    # The parts of three peers, 16 bytes at a time, and their signs.
    assert sum(".v4.b32" in line for line in polled) >= 3 and any(".b64" in line for line in polled)
    ordered = re.compile(r"\b(fence|membar)\b|atom\S*\.(release|acquire|acq_rel)\S*sys")
    sent = max(place for place in listing.places(r"\bst\.global\.v4\.b32") if place < first)
    assert not any(ordered.search(line) for line in listing.lines[sent:last])
    needed = resources(assembly(flash_decode_in_band_kernel, case))
    assert needed.registers * 32 * case.config.num_warps * case.config.programs_per_sm <= 65536
    assert compiled(flash_decode_in_band_kernel, case).metadata.shared * case.config.programs_per_sm <= 227 << 10


def test_the_same_source_on_amd() -> None:
    """Where it is not chosen, as nobody has seen it run."""
    text = assembly(flash_decode_in_band_kernel, Case("gfx942", 128))
    assert re.search(r"global_load_dword\S*.* sc0 sc1", text) and "v_mfma_" in text


@pytest.mark.parametrize("kernel", [flash_decode_in_band_kernel, local_attention_kernel], ids=["in_band", "local"])
@each_in_band
def test_products_do_not_wait_for_each_other(kernel: Any, case: Case) -> None:
    """Scores of a block are two sums or more, taken in turns: one after the other, they took 15 % longer."""
    lines = [line for line in machine_code(assembly(kernel, case)) if "HMMA" in line]
    registers = [re.findall(r"\bR(?:\d+|Z)\b", line) for line in lines]
    waiting = sum(one[0] == other[-1] for one, other in itertools.pairwise(registers))
    assert len(lines) >= 32 and waiting <= len(lines) // 16, f"{waiting} of {len(lines)} products add to the one before"


@pytest.mark.parametrize("group", [4, 8])
def test_threads_merge_what_they_have_loaded(group: int) -> None:
    """Parts are merged without a barrier, and all of a round are under way together."""
    case = Case("sm_90", 128, group, one_each=group == 4)
    for kernel in (flash_decode_kernel, local_attention_kernel):
        listing = Listing(assembly(kernel, case))
        loops = listing.loops(r"ld\.global\.v4")
        rounds = [listing.lines[first:last] for first, last in loops]
        (merging,) = [lines for lines in rounds if sum("ld.global.v4" in line for line in lines) >= 16]
        assert not any(re.search(r"bar\.sync|\.shared", line) for line in merging)
        loads = [place for place, line in enumerate(merging) if "ld.global" in line]
        assert not any("ex2" in line for line in merging[: loads[-1]])


def test_the_kernels_without_an_exchange() -> None:
    assert resources(assembly(local_attention_kernel, CASES[0])).spilled_bytes == 0
    assert resources(assembly(merge_ranks_kernel, CASES[0])).spilled_bytes == 0


@pytest.mark.parametrize("field", ["block_n", "num_warps", "num_stages"])
def test_configs(field: str) -> None:
    for config in CONFIGS:
        with pytest.raises(ValueError, match=field):
            replace(config.validate(), **{field: 0}).validate()
