"""Compiles a distributed kernel for a GPU that is not there, specialised as its launcher would on aligned operands."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ditron_inductor.core.matmul import Terms, Tiles, Widths
from ditron_inductor.core.overlap import FOLLOWS
from ditron_inductor.core.signals import Pointers
from ditron_inductor.lowering import sums
from ditron_inductor.lowering.all_gather_matmul.tile import all_gather_matmul_kernel
from ditron_inductor.lowering.all_to_all_matmul.tile import all_to_all_matmul_kernel
from ditron_inductor.lowering.config import Config
from ditron_inductor.lowering.epilogues import Arrangement, Functions, arrange
from ditron_inductor.lowering.expert_projections.experts_kernel import (
    expert_projections_kernel,
    ordered_projections_kernel,
)
from ditron_inductor.lowering.expert_projections.slot_order import BLOCK, CHUNK, slot_order_kernel
from ditron_inductor.lowering.grouped_projections.grouped_kernel import grouped_projections_kernel
from ditron_inductor.lowering.matmul_all_gather import few_rows, many_rows
from ditron_inductor.lowering.matmul_all_reduce import one_shot, two_shot
from ditron_inductor.lowering.matmul_all_to_all.tile import matmul_all_to_all_kernel
from ditron_inductor.lowering.matmul_reduce_scatter.tile import matmul_reduce_scatter_kernel
from ditron_inductor.lowering.norms.rows import HAS_RESIDUAL, HAS_WEIGHT, Norms
from ditron_inductor.lowering.overlapping import launch_options
from ditron_inductor.lowering.projections.projections_kernel import projections_kernel
from ditron_inductor.lowering.tiles import pair_of
from ditron_inductor.task.epilogue import parse
from ditron_inductor.task.nodes import EXTRAS, SAVED
from tests.lowering.assembly import Listing

KERNELS: dict[str, Any] = {
    "all_gather_matmul": all_gather_matmul_kernel,
    "matmul_reduce_scatter": matmul_reduce_scatter_kernel,
    "two_shot": two_shot.matmul_all_reduce_kernel,
    "one_shot": one_shot.matmul_all_reduce_kernel,
    "gathered": many_rows.matmul_all_gather_kernel,
    "gathered_few": few_rows.matmul_all_gather_kernel,
    "scattered_columns": matmul_all_to_all_kernel,
    "scattered_rows": all_to_all_matmul_kernel,
}
LOCAL_KERNELS: dict[str, Any] = {
    "projections": projections_kernel,
    "experts": expert_projections_kernel,
    "ordered": ordered_projections_kernel,
    "order": slot_order_kernel,
    "grouped": grouped_projections_kernel,
}
"""They send nothing: no waits, no signals."""
CLOCKS = r"globaltimer|%clock|%smid|s_memrealtime|s_memtime|HW_REG_HW_ID"
"""What a kernel reads that notes when it did what, and where."""
OF_WEIGHTS = ("all_gather_matmul", "projections", "experts", "ordered", "grouped")
"""Kernels of several products that are not added up."""
OF_FEW_ROWS = ("one_shot", "gathered_few", "projections", "experts", "ordered", "grouped")
TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
FAMILIES = [
    pytest.param(target, marks=() if target in ("sm_90", "gfx942") else pytest.mark.all_cases) for target in TARGETS
]
"""For kernels whose waits and moves the compilers of one family treat alike: one GPU of each."""
NUM_WEIGHTS = 2
TENSORS = ("shard", "gathered", "bias", "out", "x", "weight", "received")
TUPLES_OF_TENSORS = ("weights", "extras", "outs", "operands")
TUPLES = (*TUPLES_OF_TENSORS, "columns")
"""One element for each weight, or product; `outs` one for each output."""
POINTERS = Pointers("*i64", "*i64", "*i32", "i32", "i32")


@dataclass(frozen=True)
class Case:
    """A kernel for `target` in tiles of `config`.

    descriptors: loads operands by TMA. even_k: K needs no mask. early: publishes in the middle of a product. products:
    that a reduction adds up; biased: a row too. epilogue: of the products of two gathered weights, or of a reduced sum.
    norm: ends with a norm. trace: the clock of its time stamps, if any. elsewhere: experts whose weights have
    contiguous columns, with slots of other ranks' experts. interleaved: of which one weight has two products in turns.
    follows: a launch that begins before the one in front of it has ended.
    """

    kernel: str
    target: str
    config: Config
    dtype: str
    descriptors: bool = False
    even_k: bool = True
    early: bool = False
    products: int = 1
    biased: bool = False
    epilogue: str = ""
    norm: bool = False
    trace: int = 0
    elsewhere: bool = False
    interleaved: bool = False
    follows: bool = False

    def __str__(self) -> str:
        tile = self.fitted
        sizes = f"{tile.block_m}x{tile.block_n}x{tile.block_k}w{tile.num_warps}"
        ways = "descriptors" if self.descriptors else "pointers" if self.even_k else "ragged"
        return f"{self.kernel}-{self.target}-{sizes}-{self.dtype}-{ways}{'-early' if self.early else ''}{self.terms}"

    @property
    def terms(self) -> str:
        """What is added up, if it is more than one product, and what follows."""
        added = (f"-{self.products}" if self.products > 1 else "") + ("-biased" if self.biased else "")
        added += (f"-traced{self.trace}" if self.trace else "") + ("-follows" if self.follows else "")
        return added + ("-norm" if self.norm else "") + (f"-{self.epilogue.replace(' ', '')}" if self.epilogue else "")

    @property
    def length(self) -> int:
        """Of the kernel's tuples."""
        if self.interleaved:
            return 1
        return NUM_WEIGHTS if self.kernel in OF_WEIGHTS else self.products

    @property
    def num_extras(self) -> int:
        """Of the tuple of extra tensors, which is never empty."""
        return max(1, len(parse(self.epilogue).extras()) if self.epilogue else 0)

    @property
    def fitted(self) -> Config:
        """The tiles as the launcher takes them on this GPU."""
        config = self.config.for_arch(self.target)
        # The other kernel of several weights halves the steps instead.
        together = self.arrangement.together if self.kernel == "all_gather_matmul" else 1
        return replace(config, block_n=config.block_n // together) if together > 1 else config

    @property
    def arrangement(self) -> Arrangement:
        return arrange(parse(self.epilogue) if self.epilogue else None, NUM_WEIGHTS if self.kernel in OF_WEIGHTS else 1)

    @property
    def carrying_loops(self) -> list[bool]:
        """For each K loop in order, whether it takes finished data to peers."""
        if self.kernel == "all_gather_matmul":
            return [self.descriptors] * len(self.arrangement.groups)
        if self.kernel == "scattered_rows":
            # Of the own piece, and of what peers have sent.
            return [False, False]
        further = [False] * (self.products - 1)
        if self.kernel == "matmul_reduce_scatter" and self.descriptors and self.early:
            return [True, False, *further]
        return [self.kernel not in OF_FEW_ROWS, *further]


@dataclass(frozen=True)
class Compiled:
    """What the compiler made: the GPU's assembly, the IR before it, and the shared memory that a program takes."""

    assembly: str
    ttgir: str
    shared_bytes: int

    @functools.cached_property
    def listing(self) -> Listing:
        return Listing(self.assembly)


def without_assembler(*call: Any) -> tuple[str, str] | None:
    """A hook of Triton's compiler, which does not assemble PTX then: `assembly.resources` does. Without arguments, what
    is added to the names in Triton's cache.
    """
    if not call:
        return "without assembler", "without assembler"
    stages: dict[str, Any] = call[1]
    stages["cubin"] = lambda ptx, metadata: b""
    return None


def compile_for(target: str, source: ASTSource, options: dict[str, int]) -> Any:
    """The kernel for a GPU of TARGETS. PTX is not assembled: tests have that done for sm_90, and read the report."""
    with triton.knobs.runtime.scope(), triton.knobs.cache.scope():
        if target.startswith("sm_"):
            triton.knobs.runtime.add_stages_inspection_hook = without_assembler
            # A launch must not find what is not assembled.
            triton.knobs.cache.dir = str(Path(triton.knobs.cache.dir) / "without_assembler")
        return triton.compile(source, target=TARGETS[target], options=options)


def all_aligned(place: int, kind: Any) -> dict[tuple[int, ...], Any]:
    """Attributes of a parameter that is a structure of these types, each of which is a multiple of 16. The
    slot and the site among Pointers are none.
    """
    if isinstance(kind, tuple):
        kind = kind[:3] if isinstance(kind, Pointers) else kind
        inner = [all_aligned(i, one) for i, one in enumerate(kind)]
        return {(place, *path): value for one in inner for path, value in one.items()}
    return {} if kind in ("constexpr", "fp32") else {(place,): [["tt.divisibility", 16]]}


@functools.cache
def compile_case(case: Case) -> Compiled:
    """The kernel for 4 ranks and, where it takes several weights side by side, two of them.

    Second operands have contiguous K, as a linear layer holds them, where they are loaded by descriptors and for a few
    rows; else contiguous N.
    """
    fn = (KERNELS | LOCAL_KERNELS)[case.kernel]
    fits = case.fitted
    threads = fits.num_warps * TARGETS[case.target].warp_size
    k_major = case.descriptors or (case.kernel in OF_FEW_ROWS and not case.elsewhere)
    precision = "tf32" if case.dtype == "fp32" and case.target.startswith("sm_") else "ieee"
    tile = Tiles(
        BLOCK_M=fits.block_m,
        BLOCK_N=fits.block_n,
        BLOCK_K=fits.block_k,
        GROUP_M=fits.group_m,
        DESCRIPTORS=case.descriptors,
        K_MAJOR=(1 << case.length) - 1 if k_major else 0,
        EVEN_K=case.even_k,
        PRECISION=precision,
        UPCAST=False,
        THREADS=threads,
        PIECE=4 * threads,
        OVERLAP=FOLLOWS.value if case.follows else 0,
        AHEAD=2 if case.follows else 0,
    )
    constants: dict[str, Any] = {
        "WORLD": 4,
        "HAS_BIAS": case.biased,
        "RETURN_GATHERED": True,
        "RETURN_RECEIVED": True,
        "AVERAGE": True,
        "COUNTED": True,
        "PRE_IN_SLICES": case.arrangement.pre_in_slices,
        "EARLY": case.early,
        "INTERLEAVED": not case.descriptors and case.kernel != "two_shot",
        "TILES": tile,
        "PAIR": tile._replace(BLOCK_N=2 * fits.block_n) if case.interleaved else pair_of(tile),
        "BLOCK_M": fits.block_m,
        "BLOCK_N": fits.block_n,
        "BLOCK_K": fits.block_k,
        "GROUP_M": fits.group_m,
        "EVEN_K": case.even_k,
        "PRECISION": precision,
        "UPCAST": False,
        "SEND_BLOCK": 8192,
        "SEND_STEPS": 8,
        "GROUPS": case.arrangement.packed_groups,
        "EPILOGUE": case.arrangement.function,
        "ROW": 8192,
        "NORMS": Norms(HAS_RESIDUAL.value | HAS_WEIGHT.value, 1e-6, 1e-6) if case.norm else None,
        **({} if case.norm else {"given": None}),
        "TRACE": case.trace,
        "COPY_COLUMNS": 128,
        "TOP_K": 8,
        "RANKS": 8,
        "SLOTS": 64,
        "EXPERTS": 128,
        "APART": 8,
        "BY_TOKEN": True,
        "BY_SLOT": True,
        "HAS_ABSENT": case.elsewhere,
        "BLOCK": BLOCK,
        "CHUNK": CHUNK,
    }
    aligned = [["tt.divisibility", 16]]
    signature: dict[str, Any] = {}
    known: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    structures = {"terms": Terms, "widths": Widths, "pointers": POINTERS}
    one_of = ("strides_bk", "stride_bk") if k_major else ("strides_bn", "stride_bn")

    def structure_of(name: str) -> Any:
        """The kernel's own, or that of all sums of products."""
        return getattr(sys.modules[fn.fn.__module__], name, None) or getattr(sums, name)

    def structure(name: str, path: tuple[int, ...]) -> Any:
        """The types of a structure; known and aligned members are noted."""
        if name == "pointers":
            kinds: Any = POINTERS
        else:
            members = structures.get(name) or structure_of(name.capitalize())
            kinds = members(*[member(field, (*path, i)) for i, field in enumerate(members._fields)])
        return kinds

    def member(name: str, path: tuple[int, ...]) -> Any:
        if name in ("terms", "widths"):
            return structure(name, path)
        count = case.length if name in (*Terms._fields, *Widths._fields, "strides_be") else 0
        places = [(*path, i) for i in range(count)] if count else [path]
        if name in one_of:
            known.update(dict.fromkeys(places, 1))
        else:
            attributes.update(dict.fromkeys(places, aligned))
        kind = "constexpr" if name in one_of else f"*{case.dtype}" if name in TENSORS else "i32"
        return (kind,) * count if count else kind

    for place, parameter in enumerate(fn.params):
        name = parameter.name
        assert name in (*constants, "HOW") or not parameter.is_constexpr, name
        if name in constants:
            signature[name], known[place,] = "constexpr", constants[name]
        elif name == "stride_gc":
            signature[name], known[place,] = "constexpr", 1
        elif name == "strides_fn":
            signature[name] = ("constexpr",) * case.length
            known |= {(place, i): 1 for i in range(case.length)}
        elif name == "HOW":
            members = structure_of("How")
            signature[name], known[place,] = "constexpr", members(*[constants[one] for one in members._fields])
        elif name in ("pointers", "terms", "widths", "tensors", "sizes"):
            signature[name] = structure(name, (place,))
            if name == "pointers":
                attributes |= all_aligned(place, POINTERS)
        elif name == ("stride_bk" if k_major else "stride_bn"):
            signature[name], known[place,] = "constexpr", 1
        elif name == "experts":
            signature[name], attributes[place,] = "*i64", aligned
        elif name == "order":
            signature[name], attributes[place,] = "*i32", aligned
        elif name == "slots":
            signature[name] = ("*i64", "*i32")
            attributes |= {(place, i): aligned for i in range(2)}
        elif name == "functions":
            signature[name] = Functions("constexpr", "constexpr")
            known |= {(place, 0): case.arrangement.pre, (place, 1): case.arrangement.function}
        elif name == "given":
            signature[name] = (f"*{case.dtype}",) * len(EXTRAS)
            attributes |= {(place, i): aligned for i in range(len(signature[name]))}
        elif name in TUPLES:
            outs = len(case.arrangement.outputs) + (len(("normed", "total", *SAVED)) if case.norm else 0)
            counts = {"outs": outs, "extras": case.num_extras, "operands": 2 * case.length + 1}
            count = counts.get(name, case.length)
            signature[name] = (f"*{case.dtype}" if name in TUPLES_OF_TENSORS else "i32",) * count
            attributes |= {(place, i): aligned for i in range(count)}
        else:
            signature[name] = f"*{case.dtype}" if name in TENSORS else "i32"
            if not parameter.do_not_specialize:
                attributes[place,] = aligned
    source = ASTSource(fn, signature, known, attributes)
    options = {"num_warps": fits.num_warps, "num_stages": fits.num_stages, **launch_options(tile.OVERLAP)}
    compiled = compile_for(case.target, source, options)
    assembly = compiled.asm["ptx" if case.target.startswith("sm_") else "amdgcn"]
    return Compiled(assembly, compiled.asm["ttgir"], compiled.metadata.shared)
