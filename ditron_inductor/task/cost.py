"""A first cost model: predicted microseconds of a site by each strategy, from sizes and a GPU's few numbers alone.

With F the rate of the matmul, B of the links, H of the memory, all on one rank of W:

    matmul        = max(2 M N K / F, bytes touched / H) + launch
    library       = matmul + collective            collective = latency + bytes received / B
    tile          = max(matmul', transfer) + the part of the shorter one that nothing hides + partials / H + signals

matmul' is the Triton kernel, a little slower than the library's. Of the shorter of the two, one chunk of W is
exposed: a gather cannot start before the first chunk, a scatter does not end before the last one. An all-reduce
in one kernel sends its partial results like a scatter, and its results like a gather.

Numbers are for bf16 and fp16 where not said otherwise, measured on 4 ranks without NVLink multicast (the rows in
benchmarks/results/gemm_collectives.csv). They order the strategies; they do not predict a run within a few per
cent, so the plan asks for a clear win (`GAIN`) before it leaves the library.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ditron_inductor.task.nodes import AllGatherMatmul, MatmulAllReduce, MatmulReduceScatter

MICRO = 1e6
GAIN = 0.945
"""`tile` has to be predicted below this part of `library`: the model's own error must not cost anybody time."""


MEAN_ERROR_BOUND = 0.20
"""The model's mean error on the results in benchmarks/results; `model_error` reports it, a test checks it."""


@dataclass(frozen=True)
class Hardware:
    """What the model knows of a GPU and its links. Rates are what one rank reaches, not data sheet peaks.

    signal_us: what a round of signals costs a `tile` launch, queues of tiles and the host's part included.
    tile_efficiency: speed of the Triton matmul without TMA loads, in that of the library's.
    """

    name: str
    matmul_flops: float
    matmul_flops_fp32: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    all_reduce_bytes_per_s: float
    collective_us: float
    signal_us: float
    launch_us: float
    tile_efficiency: float


H200 = Hardware(
    name="H200",
    matmul_flops=720e12,
    matmul_flops_fp32=300e12,
    memory_bytes_per_s=4.2e12,
    link_bytes_per_s=270e9,
    all_reduce_bytes_per_s=325e9,
    collective_us=15.0,
    signal_us=15.0,
    launch_us=4.0,
    tile_efficiency=0.80,
)
# The same chip with less memory bandwidth.
H100 = Hardware(
    name="H100",
    matmul_flops=700e12,
    matmul_flops_fp32=290e12,
    memory_bytes_per_s=3.0e12,
    link_bytes_per_s=270e9,
    all_reduce_bytes_per_s=325e9,
    collective_us=15.0,
    signal_us=15.0,
    launch_us=4.0,
    tile_efficiency=0.80,
)
# For a GPU that nobody has measured: close enough to order the strategies, cautious about our own kernel.
UNKNOWN = Hardware(
    name="",
    matmul_flops=300e12,
    matmul_flops_fp32=60e12,
    memory_bytes_per_s=2.0e12,
    link_bytes_per_s=150e9,
    all_reduce_bytes_per_s=150e9,
    collective_us=20.0,
    signal_us=20.0,
    launch_us=5.0,
    tile_efficiency=0.70,
)
KNOWN: tuple[Hardware, ...] = (H200, H100)


@dataclass(frozen=True)
class Problem:
    """One rank's share of a site: it multiplies [m, k] by [k, n]; m counts the rows of the whole gathered or
    unscattered tensor.
    """

    kind: str
    m: int
    n: int
    k: int
    itemsize: int
    world_size: int


def hardware(device_name: str) -> Hardware:
    """The numbers of a GPU by the name that its driver gives it."""
    for one in KNOWN:
        if one.name in device_name:
            return one
    return UNKNOWN


def predict(problem: Problem, on: Hardware) -> dict[str, float]:
    """Predicted microseconds of one call, by strategy."""
    return {
        "library": _library_us(problem, on),
        "chunked": _chunked_us(problem, on),
        "tile": _tile_us(problem, on),
    }


def received_bytes(problem: Problem) -> float:
    """What one rank receives from its peers in one call."""
    peers = problem.world_size - 1
    if problem.kind == AllGatherMatmul.kind:
        return problem.m * problem.k * problem.itemsize * peers / problem.world_size
    scattered = problem.m * problem.n * problem.itemsize * peers / problem.world_size
    if problem.kind == MatmulReduceScatter.kind:
        return scattered
    assert problem.kind == MatmulAllReduce.kind, f"not a kind: {problem.kind}"
    return 2 * scattered


def _library_us(problem: Problem, on: Hardware) -> float:
    rate = on.all_reduce_bytes_per_s if problem.kind == MatmulAllReduce.kind else on.link_bytes_per_s
    collective = on.collective_us + received_bytes(problem) / rate * MICRO
    return _matmul_us(problem, on, efficiency=1.0) + collective


def _tile_us(problem: Problem, on: Hardware) -> float:
    matmul = _matmul_us(problem, on, efficiency=on.tile_efficiency * _fill(problem))
    transfer = received_bytes(problem) / on.link_bytes_per_s * MICRO
    exposed = min(matmul, transfer) / problem.world_size
    rounds = 2 if problem.kind == MatmulAllReduce.kind else 1
    # Partial results are written and read again, and so are the results of an all-reduce.
    passes = 0 if problem.kind == AllGatherMatmul.kind else 2 * rounds
    memory = passes * problem.m * problem.n * problem.itemsize / on.memory_bytes_per_s * MICRO
    return max(matmul, transfer) + exposed + memory + rounds * on.signal_us


def _chunked_us(problem: Problem, on: Hardware) -> float:
    matmul = _matmul_us(problem, on, efficiency=1.0) + (problem.world_size - 1) * on.launch_us
    transfer = received_bytes(problem) / on.link_bytes_per_s * MICRO
    rounds = 2 if problem.kind == MatmulAllReduce.kind else 1
    passes = 0 if problem.kind == AllGatherMatmul.kind else 2 * rounds
    memory = passes * problem.m * problem.n * problem.itemsize / on.memory_bytes_per_s * MICRO
    signals = rounds * problem.world_size * on.signal_us
    return max(matmul, transfer) + min(matmul, transfer) / problem.world_size + memory + signals


def _matmul_us(problem: Problem, on: Hardware, *, efficiency: float) -> float:
    rate = on.matmul_flops_fp32 if problem.itemsize == 4 else on.matmul_flops
    compute = 2.0 * problem.m * problem.n * problem.k / (rate * efficiency)
    elements = problem.m * problem.k + problem.k * problem.n + problem.m * problem.n
    memory = elements * problem.itemsize / on.memory_bytes_per_s
    return max(compute, memory) * MICRO + on.launch_us


def _fill(problem: Problem) -> float:
    """How much of the tiles that the kernel computes is needed: edges that do not fill a 128 x 128 tile are lost."""
    padded = 128 * math.ceil(problem.m / 128) * 128 * math.ceil(problem.n / 128)
    return problem.m * problem.n / padded if padded else 1.0
