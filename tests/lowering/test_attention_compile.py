"""The kernels of attention for GPUs that are not there: every wait, release and barrier, tensor cores, pipelined
loops."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import triton
from triton.compiler import ASTSource

from ditron_inductor.lowering.all_gather_attention import tile
from ditron_inductor.lowering.attention import merge
from ditron_inductor.lowering.gathers import SEND_BLOCK, SEND_STEPS, SENDERS
from tests.lowering.assembly import Listing, dialect_of, resources
from tests.lowering.cross_compile import POINTERS as WORKSPACE
from tests.lowering.cross_compile import all_aligned, compile_for
from tests.lowering.test_cross_compile import SHARED_LIMIT


@dataclass(frozen=True)
class Case:
    """Heads of D elements in tiles of `config`. trace: the clock of its time stamps, if any."""

    target: str
    D: int
    config: tile.AttentionConfig
    dtype: str = "bf16"
    mask: str = "causal_offset"
    gathered: bool = False
    windowed: bool = False
    jumps: int = 0
    softcap: float = 0.0
    trace: int = 0

    def __str__(self) -> str:
        sizes = f"{self.config.block_m}x{self.config.block_n}x{self.D}"
        more = "-gathered" * self.gathered + "-windowed" * self.windowed + "-jumps" * (self.jumps > 0)
        return f"{self.target}-{sizes}-{self.dtype}-{self.mask}{more}{'-capped' * (self.softcap > 0)}"


CASES = (
    Case("sm_90", 64, tile.CONFIGS[64]),
    Case("sm_90", 128, tile.CONFIGS[128], mask="zigzag", gathered=True),
    Case("sm_90", 256, tile.CONFIGS[256], mask="full"),
    Case("sm_90", 128, tile.FP32[128], "fp32"),
    Case("gfx942", 64, tile.CONFIGS[64], mask="causal", gathered=True, windowed=True, jumps=2),
    Case("sm_90", 128, tile.CONFIGS[128], windowed=True, softcap=30.0),
)
# Compilers are slow: each of these has in another case whatever one would trip over.
MORE_CASES = (
    Case("gfx942", 256, tile.CONFIGS[256], mask="causal", gathered=True),
    Case("sm_90", 128, tile.CONFIGS[128], mask="zigzag_keys", jumps=1),
    Case("gfx942", 128, tile.CONFIGS[128], mask="causal", windowed=True, jumps=2),
    Case("sm_100", 128, tile.CONFIGS[128]),
    Case("sm_90", 128, tile.FEW[128], "fp16"),
    Case("gfx942", 256, tile.CONFIGS[256], softcap=50.0),
    Case("sm_90", 128, tile.CONFIGS[128], windowed=True),
    Case("gfx942", 128, tile.CONFIGS[128], mask="zigzag", windowed=True),
    Case("sm_90", 256, tile.CONFIGS[256], softcap=50.0),
)
each_case = pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=str(case)) for case in CASES),
        *(pytest.param(case, id=str(case), marks=pytest.mark.all_cases) for case in MORE_CASES),
    ],
)


def _compile(
    kernel: Any, constants: dict[str, Any], types: dict[str, Any], target: str, options: dict[str, int]
) -> Any:
    """types: of parameters that are no aligned 32-bit integer, each a word or a tuple of them."""
    signature: dict[str, Any] = {}
    known: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    aligned = [["tt.divisibility", 16]]
    for place, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in constants:
            signature[name], known[place,] = "constexpr", constants[name]
            continue
        kind = signature[name] = types.get(name, "i32")
        if isinstance(kind, tuple):
            attributes |= all_aligned(place, kind)
        elif not parameter.do_not_specialize and kind != "fp32":
            attributes[place,] = aligned
    source = ASTSource(kernel, signature, known, attributes)
    return compile_for(target, source, options)


@functools.cache
def compiled(case: Case) -> Any:
    """The kernel for 4 ranks, 32 heads that share 8."""
    config = case.config.for_arch(case.target)
    constants = {
        "HOW": tile.How(
            WORLD=4,
            MASK=tile.NUMBERS[case.mask].value,
            JUMPS=case.jumps,
            WINDOWED=case.windowed,
            SOFTCAP=case.softcap,
            RETURN_GATHERED=case.gathered,
            HEADS=32,
            KEY_HEADS=8,
            D=case.D,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_D=case.D,
            PRECISION="tf32" if case.dtype == "fp32" and case.target.startswith("sm_") else "ieee",
            UPCAST=False,
            SEND_BLOCK=SEND_BLOCK,
            SEND_STEPS=SEND_STEPS,
            SENDERS=SENDERS,
        ),
        "TRACE": case.trace,
    }
    tensors = tile.Tensors(*[f"*{case.dtype}"] * 6)._replace(lse="*fp32")
    jumps = ("i32",) * max(case.jumps, 1)
    sizes = tile.Sizes("i32", "i32", "i32", jump_rows=jumps, jumps=jumps, scale="fp32")
    types = {"pointers": WORKSPACE, "tensors": tensors, "sizes": sizes}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return _compile(tile.all_gather_attention_kernel, constants, types, case.target, options)


def assembly(compiled: Any) -> str:
    text: str = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
    return text


MOST_SPILLED = 128 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8) else 192
"""Bytes of a thread. Older compilers spill a little more."""


@each_case
def test_waits_and_releases_are_there(case: Case) -> None:
    listing, dialect = Listing(assembly(compiled(case))), dialect_of(case.target)
    releases = listing.places(dialect.release)
    # Credits, then the keys and the values of a source; a wait is two reads: the first, and the one in the loop.
    assert len(listing.places(dialect.acquire)) >= 2 * 3
    # Credits given, keys or values told.
    assert len(releases) >= 2
    for place in releases:
        assert listing.has_barrier_before(place, dialect.barrier, dialect.store), (place, listing.lines[place])


@each_case
def test_products_run_on_tensor_cores_and_fit(case: Case) -> None:
    found = compiled(case)
    text = assembly(found)
    # Tiles of fewer than 64 rows are multiplied by warps, not by groups of them.
    groups = case.target == "sm_90" and case.config.block_m >= 64
    assert ("wgmma.mma_async" if groups else "mma" if case.target.startswith("sm_") else "mfma") in text
    assert found.metadata.shared <= SHARED_LIMIT[case.target]
    if case.target == "sm_90":
        # Keys and values of the next steps are on their way.
        assert "cp.async" in text
        assert resources(text).spilled_bytes <= MOST_SPILLED


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("weighted", [True, False])
def test_the_merge(target: str, weighted: bool) -> None:
    constants = {"HOW": merge.How(32, 128, weighted, merge.MERGE_ROWS, 128)}
    types: dict[str, Any] = {"parts": merge.MergedParts(*(("i32",) * 3,) * 5)}
    types |= {"outs": ("*bf16",) * 3, "lses": ("*fp32",) * 3, "out": "*bf16", "lse": "*fp32"}
    found = _compile(merge.merge_kernel, constants, types, target, {"num_warps": merge.MERGE_WARPS})
    if target == "sm_90":
        assert resources(assembly(found)).spilled_bytes == 0
