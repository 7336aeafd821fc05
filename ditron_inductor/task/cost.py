"""A cost model: predicted microseconds of a site by each strategy, from sizes and a GPU's few numbers alone.

With F the rate of the matmul, H of the memory, B of the links (one for each collective), C of copies between GPUs, all
on one rank of W; `transfer` is bytes received / rate; P = 2 M N bytes / H for each pass over partial results, or over
the parts of a gathered product that are put in their place:

    matmul        = max(2 M N K / F, bytes touched / H) + launch
    library       = matmul + collective [+ passes P]  collective = latency + protocol + bytes received / B
    chunked       = overlapped(matmul / chunk efficiency, transfer at C) + passes P + W chunk costs
    tile          = overlapped(matmul / tile efficiency, transfer at B) + passes P + signals
    epilogue      = bytes that a kernel of its own reads and writes / H + launch, added to library and chunked; tile
                    computes it in registers, for nothing but PAIR_COST where it joins two products, and so does the
                    last kernel of chunked reductions, but for all-reduces in parts
    overlapped    = the longer one + a chunk's share of the shorter one: a gather cannot start before the first chunk, a
                    scatter does not end before the last one; W chunks, and at least MIN_CHUNKS

Where the gathered or scattered dimension lies inside others, as in a batch of sequences, the library copies what it
moves once more, and `chunked` multiplies slice by slice: rows that do not fill SLICE_ROWS are lost.

`protocol` is what a collective of some megabytes costs over one of some kilobytes: the library changes its protocol
there. Two ranks have the links of one pair to themselves, and copy faster (`pair_gain`). An all-reduce sends its
partial results like a scatter, and its results like a gather: two rounds of passes and signals. The product of a
`matmul_all_gather` is copied out of the slots (W - 1 passes), and `library` copies what it gathered into columns (W
passes and a launch). It receives whole products, and as fast as an all-reduce does.

An all-to-all is as fast as a reduce-scatter; `library` copies what it moves once, so that it lies together, and so does
our kernel behind a product (`matmul_all_to_all`), out of its slot.

Attention is the matmul that `attention_sizes` makes of it, at the speed of the library's or of our kernel; `chunked`
reads what its parts return once more. Its parts are as fast as the blocks that `library` calls where these are the
library's fastest kernel's. The backward has `library` alone.

A norm behind an all-reduce without a product (n columns, k = 1) has, in place of the matmul, a launch and passes over
what it reads and writes; in our kernel, `tile`, no launch more and one round of signals or two, whichever is faster.

`flash_decode` (m query heads of n elements, k = 1) has no matmul here: what is compared is what follows the attention,
launches, a round of signals or a collective, and the parts that each rank receives.

The numbers of the H200 are fitted to benchmarks/results/gemm_collectives.csv (bf16, no NVLink multicast) by
`python -m benchmarks.plan`; `python -m ditron_inductor tune --model-error` shows the model's error.
The model decides only where no table of measured times does, and the plan asks for a clear win (`GAIN`) then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ditron_inductor.task.exchange import (
    EXCHANGED_PRODUCT,
    GATHERED_PRODUCT,
    REDUCED_PRODUCT,
    SCATTERED_PRODUCT,
    Exchange,
)
from ditron_inductor.task.nodes import TASKS
from ditron_inductor.task.problem import Problem

MICRO = 1e6
GAIN = 0.945
"""A strategy has to be predicted below this part of `library`: the model's own error must not cost anybody time."""
SAME_KERNELS_GAIN = 0.983
"""The same where both call the same kernels, and the model errs about the transfer only."""
MEAN_ERROR_BOUND = 0.20
"""The model's mean error on the results in benchmarks/results; `model_error` reports it, a test checks it."""
MIN_CHUNKS = 4
"""On two GPUs a rank's part is cut further."""
PROTOCOL_BYTES = 4e6
"""Half of `protocol_us` is due at this size."""
SMALL_BYTES = 8 << 20
SMALL_ALL_REDUCE = 0.86
"""Up to so many bytes `chunked` is one kernel of ours in the place of the library's all-reduce; on 2 and 4 H200s it
took 0.67 to 0.97 of the library's time.
"""
EPILOGUE_HOST_US = 12.0
"""Of the launch of its kernel."""
PRODUCT_HOST_US = 12.0
"""Of one more matmul of the library in a call."""
IN_BAND_US = 2.5
"""What `chunked` takes less where a norm's kernel sends in band in the place of that of a small all-reduce: 2.1 to 3.1
were measured (M = 1 to 16, N = 4096 and 8192, benchmarks/results/norm.csv).
"""
SMALL_HOST_US = 55.0
"""Of a small all-reduce by `chunked`; a large one runs in parts, with many launches each."""

PAIR_COST = 1.9
"""What an epilogue of two products costs `tile`, in passes over the memory that it saves: two accumulators of half the
columns each, and registers that do not suffice. 1.4 to 2.4 on H200s, 2048 to 8192 rows, with and without products that
are stored too.
"""
ATTENTION_SPEED = 0.82
"""Of the library's attention, in that of its matmul: 600 TFLOP/s on an H200."""
ATTENTION_TILE = 0.62
"""Speed of our attention in that of the library's: 0.63 to 0.69 on an H200."""
BACKWARD_WORK = 2.5
"""Operations of the backward of attention in those of the forward."""

BIASED_PARTS = 0.95
"""Speed of attention with a bias in parts, in that of one call: 0.89 to 0.97 on two H200s."""
BIAS_PASSES = 5
"""Over a bias, before it can be cut: the largest one of each row, and what it leaves."""

MIDDLE_ROWS = range(33, 1024)
MIDDLE_EFFICIENCY = 0.5
"""Speed of `tile` with so many rows, in that with others: large tiles are too few, small ones read the rows again."""
SLICE_ROWS = 64
"""The rows of a small tile of the library's batched product. Not fitted: no batch was in the measurements."""
FEW_ROWS = 64
WIDE_COLUMNS = 16384
"""Up to so many rows a gathered product has tiles that read the weight once; from so many columns on, as those of
logits, it has enough large ones.
"""


@dataclass(frozen=True)
class Hardware:
    """What the model knows of a GPU and its links. Rates are what one rank reaches, not data sheet peaks.

    matmul_flops, matmul_flops_fp32: FLOP/s. memory_bytes_per_s; gather_, scatter_, all_reduce_bytes_per_s: of the
    library's collectives; copy_bytes_per_s: of the copy engines, all ranks at once. pair_gain: factor on link and copy
    rates of two ranks. collective_us, protocol_us: see the module. launch_us: of a kernel. signal_us: a round of
    signals of a `tile` launch, its queues and the host's part included. chunk_us: a chunk's copy, signal and launches.
    tile_efficiency, chunk_efficiency: speed of the matmul in the kernel, and cut into chunks, in that of the library's.
    """

    name: str
    matmul_flops: float
    matmul_flops_fp32: float
    memory_bytes_per_s: float
    gather_bytes_per_s: float
    scatter_bytes_per_s: float
    all_reduce_bytes_per_s: float
    copy_bytes_per_s: float
    pair_gain: float
    collective_us: float
    protocol_us: float
    launch_us: float
    signal_us: float
    chunk_us: float
    tile_efficiency: float
    chunk_efficiency: float


H200 = Hardware(
    name="H200",
    matmul_flops=727e12,
    matmul_flops_fp32=300e12,
    memory_bytes_per_s=4.77e12,
    gather_bytes_per_s=187e9,
    scatter_bytes_per_s=275e9,
    all_reduce_bytes_per_s=334e9,
    copy_bytes_per_s=664e9,
    pair_gain=0.694,
    collective_us=13.8,
    protocol_us=14.6,
    launch_us=2.97,
    signal_us=4.7,
    chunk_us=12.0,
    tile_efficiency=0.927,
    chunk_efficiency=0.971,
)
# The same chip with less memory bandwidth.
H100 = Hardware(
    name="H100",
    matmul_flops=700e12,
    matmul_flops_fp32=290e12,
    memory_bytes_per_s=3e12,
    gather_bytes_per_s=290e9,
    scatter_bytes_per_s=270e9,
    all_reduce_bytes_per_s=340e9,
    copy_bytes_per_s=230e9,
    pair_gain=1.4,
    collective_us=13.0,
    protocol_us=20.0,
    launch_us=4.0,
    signal_us=15.0,
    chunk_us=12.0,
    tile_efficiency=0.8,
    chunk_efficiency=0.95,
)
# For a GPU that nobody has measured: close enough to order the strategies, cautious about our own kernels.
UNKNOWN = Hardware(
    name="",
    matmul_flops=300e12,
    matmul_flops_fp32=60e12,
    memory_bytes_per_s=2.0e12,
    gather_bytes_per_s=150e9,
    scatter_bytes_per_s=150e9,
    all_reduce_bytes_per_s=150e9,
    copy_bytes_per_s=120e9,
    pair_gain=1.0,
    collective_us=20.0,
    protocol_us=10.0,
    launch_us=5.0,
    signal_us=20.0,
    chunk_us=20.0,
    tile_efficiency=0.7,
    chunk_efficiency=0.9,
)
KNOWN: tuple[Hardware, ...] = (H200, H100)


def hardware(device_name: str) -> Hardware:
    """The numbers of a GPU by the name that its driver gives it."""
    for one in KNOWN:
        if one.name in device_name:
            return one
    return UNKNOWN


def exchange_of(problem: Problem) -> Exchange:
    """The collective of the problem's kind."""
    exchange = TASKS[problem.kind].exchange
    return exchange


def computes(problem: Problem) -> str:
    """What the problem's kind computes, see `Node`."""
    return TASKS[problem.kind].computes


def predict(problem: Problem, on: Hardware) -> dict[str, float]:
    """Predicted microseconds of one call, by strategy."""
    problem = problem.as_expected()
    if computes(problem) == "norm":
        device = {"library": _norm_library_us(problem, on), "tile": _norm_tile_us(problem, on)}
    elif computes(problem) == "decode":
        device = {"library": _decode_library_us(problem, on), "tile": _decode_tile_us(problem, on)}
    else:
        device = _matmul_kinds_us(problem, on)
    if problem.captured:
        return device
    return {strategy: max(us, host_us(problem, strategy)) for strategy, us in device.items()}


def least_gain(problem: Problem, strategy: str) -> float:
    """Below which part of `library` a strategy has to be predicted."""
    return SAME_KERNELS_GAIN if strategy == "chunked" and _has_same_kernels(problem) else GAIN


def _has_same_kernels(problem: Problem) -> bool:
    """Whether `chunked` and `library` make the same calls: of attention by the library's fastest kernel."""
    fastest = problem.library_speed == 1.0 and not problem.bias_bytes
    return computes(problem) == "attention" and fastest


def _matmul_kinds_us(problem: Problem, on: Hardware) -> dict[str, float]:
    device_us = {"library": _library_us, "chunked": _chunked_us, "tile": _tile_us}
    strategies = TASKS[problem.kind].strategies
    return {name: device_us[name](problem, on) + beside_us(problem, on, name) for name in strategies}


def host_us(problem: Problem, strategy: str) -> float:
    """Microseconds of the host for one eager call."""
    if strategy == "chunked" and _is_small_all_reduce(problem):
        return SMALL_HOST_US
    kernels = _has_epilogue_kernel(problem, strategy) + _has_pre_kernel(problem, strategy)
    products = problem.more_products if strategy == "chunked" else 0
    return TASKS[problem.kind].host_us[strategy] + EPILOGUE_HOST_US * kernels + PRODUCT_HOST_US * products


def beside_us(problem: Problem, on: Hardware, strategy: str) -> float:
    """Microseconds on the GPU of the epilogue, and of what a norm makes of the reduction."""
    saved = IN_BAND_US if problem.in_band and strategy == "chunked" else 0.0
    return _epilogue_us(problem, on, strategy) - saved


def _epilogue_us(problem: Problem, on: Hardware, strategy: str) -> float:
    if strategy == "tile":
        return PAIR_COST * problem.pair_bytes / on.memory_bytes_per_s * MICRO
    parts = [problem.epilogue_bytes] if _has_epilogue_kernel(problem, strategy) else []
    parts += [problem.pre_bytes] if _has_pre_kernel(problem, strategy) else []
    return sum(nbytes / on.memory_bytes_per_s * MICRO + on.launch_us for nbytes in parts)


def _has_pre_kernel(problem: Problem, strategy: str) -> bool:
    """Whether what an epilogue does before the reduction is a launch of its own, or one for each chunk."""
    return problem.pre_bytes > 0 and strategy != "tile"


def _has_epilogue_kernel(problem: Problem, strategy: str) -> bool:
    """Whether the epilogue is a launch of its own."""
    if problem.epilogue_bytes == 0 or strategy == "tile":
        return False
    ends_with_it = exchange_of(problem) == SCATTERED_PRODUCT or _is_small_all_reduce(problem)
    return strategy == "library" or not ends_with_it


def _is_small_all_reduce(problem: Problem) -> bool:
    reduces = computes(problem) == "matmul" and exchange_of(problem) == REDUCED_PRODUCT
    return reduces and problem.m * problem.n * problem.result_bytes <= SMALL_BYTES


def received_bytes(problem: Problem) -> int:
    """What one rank receives from its peers in one call."""
    return exchange_of(problem).received_bytes(problem)


def _decode_library_us(problem: Problem, on: Hardware) -> float:
    """Two kernels and a collective. Attention itself, the same for all strategies, is left out: nobody here knows how
    long the sequences are.
    """
    return 2 * on.launch_us + collective_us(problem, on)


def _decode_tile_us(problem: Problem, on: Hardware) -> float:
    return on.launch_us + on.signal_us + received_bytes(problem) / _link_rate(problem, on) * MICRO


NORM_PASSES = 4
"""Over the sum: it is read with the residual, and written with its norm."""


def _norm_library_us(problem: Problem, on: Hardware) -> float:
    return collective_us(problem, on) + on.launch_us + _norm_passes_us(problem, on)


def _norm_tile_us(problem: Problem, on: Hardware) -> float:
    nbytes = problem.m * problem.n * problem.result_bytes
    one_shot = (problem.world_size - 1) * nbytes / _link_rate(problem, on) * MICRO
    two_shots = received_bytes(problem) / _link_rate(problem, on) * MICRO + on.signal_us
    return on.launch_us + on.signal_us + min(one_shot, two_shots) + _norm_passes_us(problem, on)


def _norm_passes_us(problem: Problem, on: Hardware) -> float:
    return NORM_PASSES * problem.m * problem.n * problem.result_bytes / on.memory_bytes_per_s * MICRO


def collective_us(problem: Problem, on: Hardware) -> float:
    """The library's collective alone."""
    nbytes = received_bytes(problem)
    protocol = on.protocol_us * nbytes / (nbytes + PROTOCOL_BYTES)
    return on.collective_us + protocol + nbytes / _link_rate(problem, on) * MICRO


def product_us(problem: Problem, on: Hardware) -> float:
    """The library's matmul or attention alone."""
    return _matmul_us(problem, on, efficiency=problem.library_speed)


def _library_us(problem: Problem, on: Hardware) -> float:
    exchange, columns = exchange_of(problem), 0.0
    if exchange == GATHERED_PRODUCT:
        columns = on.launch_us + _passes_us(problem, on, problem.world_size)
    if exchange.wire == "all_to_all" or problem.slices > 1:
        columns = on.launch_us + _moved_us(problem, on)
    return product_us(problem, on) + collective_us(problem, on) + columns


def _chunked_us(problem: Problem, on: Hardware) -> float:
    if _is_small_all_reduce(problem):
        return SMALL_ALL_REDUCE * _library_us(problem, on)
    parts_speed = BIASED_PARTS if problem.bias_bytes else 1.0
    parts_speed *= 1.0 if _has_same_kernels(problem) else on.chunk_efficiency
    parts_speed *= _slice_fill(problem)
    matmul = _matmul_us(problem, on, efficiency=parts_speed * problem.library_speed)
    rate = on.copy_bytes_per_s * _pair_gain(problem, on)
    passes_us = _partials_us(problem, on)
    if computes(problem) == "attention":
        # What the parts return is read again, one [rows, heads * head size] for each source; k has keys and values.
        parts = problem.world_size * problem.n * problem.k / 2
        read = parts * problem.operand_bytes + BIAS_PASSES * problem.bias_bytes
        passes_us = read / on.memory_bytes_per_s * MICRO
    transfer = received_bytes(problem) / rate * MICRO
    chunks_us = exchange_of(problem).rounds * problem.world_size * on.chunk_us
    return _overlapped(matmul, transfer, _chunks(problem)) + passes_us + chunks_us


def _tile_us(problem: Problem, on: Hardware) -> float:
    if computes(problem) == "attention":
        attention = _matmul_us(problem, on, efficiency=ATTENTION_TILE)
        transfer = received_bytes(problem) / _link_rate(problem, on) * MICRO
        return _overlapped(attention, transfer, _chunks(problem)) + on.signal_us
    matmul = _matmul_us(problem, on, efficiency=on.tile_efficiency * _fill(problem))
    fast = problem.m <= FEW_ROWS or problem.n >= WIDE_COLUMNS
    if problem.m in MIDDLE_ROWS and not (fast and exchange_of(problem) == GATHERED_PRODUCT):
        matmul /= MIDDLE_EFFICIENCY
    transfer = received_bytes(problem) / _link_rate(problem, on) * MICRO
    overlapped = _overlapped(matmul, transfer, _chunks(problem))
    return overlapped + _partials_us(problem, on) + exchange_of(problem).rounds * on.signal_us


def _overlapped(matmul: float, transfer: float, chunks: int) -> float:
    return max(matmul, transfer) + min(matmul, transfer) / chunks


def _chunks(problem: Problem) -> int:
    return max(problem.world_size, MIN_CHUNKS)


def _partials_us(problem: Problem, on: Hardware) -> float:
    """Partial results are written and read again, and so are the results of an all-reduce, and gathered products."""
    exchange = exchange_of(problem)
    if exchange.of == "operand":
        return 0.0
    if exchange == EXCHANGED_PRODUCT:
        return _moved_us(problem, on)
    return _passes_us(problem, on, problem.world_size - 1 if exchange.is_whole else exchange.rounds)


def _moved_us(problem: Problem, on: Hardware) -> float:
    """What is moved is read and written once, to lie together for each rank, or to be put in its place."""
    width = problem.n if exchange_of(problem).of == "product" else problem.k
    return 2.0 * problem.m * width * problem.result_bytes / on.memory_bytes_per_s * MICRO


def _passes_us(problem: Problem, on: Hardware, passes: int) -> float:
    """P of the module, `passes` times."""
    return passes * 2.0 * problem.m * problem.n * problem.result_bytes / on.memory_bytes_per_s * MICRO


def _link_rate(problem: Problem, on: Hardware) -> float:
    rate: float = getattr(on, exchange_of(problem).rate)
    return rate * _pair_gain(problem, on)


def _is_attention(problem: Problem) -> bool:
    return computes(problem) in ("attention", "attention_backward")


def _pair_gain(problem: Problem, on: Hardware) -> float:
    return on.pair_gain if problem.world_size == 2 else 1.0


def _matmul_us(problem: Problem, on: Hardware, *, efficiency: float) -> float:
    rate: float = getattr(on, problem.precision.flops)
    if _is_attention(problem):
        efficiency *= ATTENTION_SPEED / (BACKWARD_WORK if computes(problem) == "attention_backward" else 1.0)
    compute = 2.0 * problem.m * problem.n * problem.k / (rate * efficiency)
    operands = (problem.m * problem.k + problem.k * problem.n) * problem.operand_bytes
    memory = (operands + problem.m * problem.n * problem.result_bytes) / on.memory_bytes_per_s
    return max(compute, memory) * MICRO + on.launch_us


def _slice_fill(problem: Problem) -> float:
    """How much is needed of what `chunked` computes: of one slice of a rank's rows after the other."""
    if problem.slices == 1:
        return 1.0
    rows = problem.m / (problem.world_size * problem.slices)
    return rows / (SLICE_ROWS * math.ceil(rows / SLICE_ROWS))


def _fill(problem: Problem) -> float:
    """How much of the tiles that the kernel computes is needed: edges that do not fill a 128 x 128 tile are lost."""
    padded = 128 * math.ceil(problem.m / 128) * 128 * math.ceil(problem.n / 128)
    return problem.m * problem.n / padded if padded else 1.0
