"""Compiles a distributed kernel for a GPU that is not there, specialised as its launcher would on aligned operands."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ditron_inductor.lowering.all_gather_matmul.tile import all_gather_matmul_kernel
from ditron_inductor.lowering.config import Config
from ditron_inductor.lowering.matmul_all_reduce import one_shot, two_shot
from ditron_inductor.lowering.matmul_reduce_scatter.tile import matmul_reduce_scatter_kernel

KERNELS: dict[str, Any] = {
    "all_gather_matmul": all_gather_matmul_kernel,
    "matmul_reduce_scatter": matmul_reduce_scatter_kernel,
    "matmul_all_reduce_one_shot": one_shot.matmul_all_reduce_kernel,
    "matmul_all_reduce_two_shot": two_shot.matmul_all_reduce_kernel,
}
TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
TENSORS = ("shard", "gathered", "a", "b", "out")
PAIRS = ("weights", "outs", "columns", "strides_bk", "strides_bn")
WORDS = {"table": "*i64", "ctl": "*i64", "counters": "*i32"}
UNSPECIALISED = ("M", "rows", "rank", "slot", "site", "senders", "num_chunks", "chunk_tiles", "part_tiles", "num_parts")


@dataclass(frozen=True)
class Compiled:
    """What the compiler made: the GPU's assembly, the IR before it, and the shared memory that a program takes."""

    assembly: str
    ttgir: str
    shared_bytes: int


@functools.cache
def compile_kernel(
    kernel: str, target: str, config: Config, dtype: str, *, even_k: bool = True, descriptors: bool = False
) -> Compiled:
    """`kernel` for 4 ranks and, where it takes several weights, two of them; second operands with contiguous N, or
    with contiguous K where they are loaded by descriptors."""
    fn = KERNELS[kernel]
    fits = config.for_arch(target)
    constants: dict[str, Any] = {
        "WORLD": 4,
        "NUM_WEIGHTS": 2,
        "RETURN_GATHERED": True,
        "AVERAGE": True,
        "COUNTED": True,
        "DESCRIPTORS": descriptors,
        "OUT_DESCRIPTORS": descriptors,
        "INTERLEAVED": not descriptors,
        "K_MAJOR": 3 if descriptors else 0,
        "THREADS": fits.num_warps * 32,
        "PIECE": fits.num_warps * 128,
        "BLOCK_M": fits.block_m,
        "BLOCK_N": fits.block_n,
        "BLOCK_K": fits.block_k,
        "GROUP_M": fits.group_m,
        "EVEN_K": even_k,
        "PRECISION": "tf32" if dtype == "fp32" and target.startswith("sm_") else "ieee",
        "UPCAST": False,
        "SEND_BLOCK": 8192,
        "SEND_STEPS": 8,
        "stride_bk" if descriptors else "stride_bn": 1,
    }
    aligned = [["tt.divisibility", 16]]
    signature: dict[str, Any] = {}
    known: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for place, name in enumerate(fn.arg_names):
        if name in constants:
            signature[name], known[place,] = "constexpr", constants[name]
        elif name == ("strides_bk" if descriptors else "strides_bn"):
            signature[name] = ("constexpr", "constexpr")
            known |= {(place, 0): 1, (place, 1): 1}
        elif name in PAIRS:
            signature[name] = (f"*{dtype}" if name in ("weights", "outs") else "i32",) * 2
            attributes |= {(place, 0): aligned, (place, 1): aligned}
        else:
            signature[name] = f"*{dtype}" if name in TENSORS else WORDS.get(name, "i32")
            if name not in UNSPECIALISED:
                attributes[place,] = aligned
    source = ASTSource(fn, signature, known, attributes)
    options = {"num_warps": fits.num_warps, "num_stages": fits.num_stages}
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    assembly = compiled.asm["ptx" if target.startswith("sm_") else "amdgcn"]
    return Compiled(assembly, compiled.asm["ttgir"], compiled.metadata.shared)
