"""A cost model: the predicted microseconds of a site by each strategy, from its sizes and a few numbers of the GPU.

The model decides only if no table has measured times, and then the plan asks for a clear win (`GAIN`). For one rank of
W let F be the rate of the matmul, H of the memory, B of the links (with a value for each collective) and C of copies
between GPUs. P = 2 M N bytes / H is the time of a pass over partial results, or over a gathered product.

    matmul        = max(2 M N K / F, bytes read and written / H) + launch
    collective    = latency + protocol + bytes received / B
    library       = matmul + collective [+ passes P] [+ epilogue]
    chunked       = overlapped(matmul / chunk efficiency, bytes received / C) + passes P + W chunk costs [+ epilogue]
    tile          = overlapped(matmul / tile efficiency, bytes received / B) + passes P + signals
    epilogue      = bytes that a kernel of its own reads and writes / H + launch
    overlapped    = the longer time + the shorter time / chunks, because a gather cannot begin before the first chunk,
                    nor a scatter end before the last one; there are W chunks, but at least MIN_CHUNKS

* `protocol` is the additional time of a collective of megabytes, for which the library changes its protocol.
* Two ranks have the links between them to themselves, and copy faster (`pair_gain`).
* An epilogue that `tile` computes in registers takes no time, except PAIR_COST if it combines two products. The last
  kernel of chunked reductions computes it for nothing too, except for all-reduces in parts.
* An all-reduce sends partial results like a scatter and results like a gather: two rounds of passes and signals.
* `matmul_all_gather` copies the product out of the slots (W - 1 passes), and its `library` copies what it has gathered
  into columns (W passes and a launch). It receives whole products, at the rate of an all-reduce.
* An all-to-all is as fast as a reduce-scatter. `library` copies what it moves once, so that it lies together, and so
  does our kernel of `matmul_all_to_all`, out of its slot.
* If the gathered or scattered dimension lies inside others, as in a batch of sequences, the library copies what it
  moves once more, and `chunked` multiplies slice by slice, where rows that do not fill SLICE_ROWS are lost.
* Attention is an equivalent matmul (`attention_sizes`) at the speed of the library's or of our kernel. `chunked` reads
  the results of its parts once more. If the library's fastest kernel computes the parts, they are as fast as the blocks
  that `library` computes. The backward has only `library`.
* A norm behind an all-reduce without a product (n columns, k = 1) has a launch, and passes over what it reads and
  writes, in place of the matmul. Our kernel needs no further launch, and one or two rounds of signals, whichever is
  faster.
* For `flash_decode` (m query heads of n elements, k = 1) only the time behind the attention is compared: launches, a
  round of signals or a collective, and the parts that each rank receives.

The numbers of the H200, and those of the H100 for two ranks, are fitted to benchmarks/results/gemm_collectives.csv
(bf16, no NVLink multicast) by `python -m benchmarks.plan`. `python -m ditron_inductor tune --model-error` shows the
model's error.
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
"""A strategy has to be predicted to take less than this fraction of `library`, to allow for the model's error."""
SAME_KERNELS_GAIN = 0.983
"""This fraction holds instead if both strategies call the same kernels: only the predicted transfer has an error."""
MEAN_ERROR_BOUND = 0.20
"""The largest mean error of the model on benchmarks/results that a test allows. `model_error` reports the error."""
MIN_CHUNKS = 4
"""The fewest chunks. On two GPUs a rank's part is cut into several."""
PROTOCOL_BYTES = 4e6
"""At this size of a collective, half of `protocol_us` counts."""
SMALL_BYTES = 16 << 20
SMALL_ALL_REDUCE = 0.86
"""Up to SMALL_BYTES `chunked` replaces the library's all-reduce by one kernel of ours, and takes this fraction of the
time of `library`. It was 0.67 to 0.97 on 2 and 4 H200s.
"""
EPILOGUE_HOST_US = 12.0
"""The host's time for the launch of an epilogue's kernel."""
PRODUCT_HOST_US = 12.0
"""The host's time for one more matmul of the library in a call."""
IN_BAND_US = 2.5
"""`chunked` takes this much less time if a norm's kernel that sends in band replaces the kernel of a small all-reduce.
It was 2.1 to 3.1 (M = 1 to 16, N = 4096 and 8192, benchmarks/results/norm.csv), and up to 1 MB 2.2 to 4.0.
"""
SMALL_HOST_US = 55.0
"""The host's time for a small all-reduce by `chunked`. A large one runs in parts, with many launches each."""

PAIR_COST = 1.9
"""The time that an epilogue of two products takes in `tile`, in passes over the memory that it saves. Its tile has two
accumulators of half the columns each, and too few registers. It was 1.4 to 2.4 on H200s, for 2048 to 8192 rows, with
and without products that are stored too.
"""
ATTENTION_SPEED = 0.82
"""The speed of the library's attention relative to its matmul: 600 TFLOP/s on an H200."""
ATTENTION_TILE = 0.62
"""The speed of our attention relative to the library's. It was 0.63 to 0.69 on an H200."""
BACKWARD_WORK = 2.5
"""The operations of the backward of attention relative to those of the forward."""

BIASED_PARTS = 0.95
"""The speed of attention with a bias in parts relative to one call. It was 0.89 to 0.97 on two H200s."""
BIAS_PASSES = 5
"""The passes over a bias before it is cut: to find the largest value of each row, and to subtract it."""

MANY_ROWS = 1024
FEWER_EFFICIENCY = 0.5
"""The speed of `tile` with fewer rows than these relative to others: large tiles are too few, small ones reread rows,
and those of up to 64 rows read the weight at half the speed of the memory (two H100s: 86 us where the library takes 50,
and 312 us where it takes 174).
"""
SLICE_ROWS = 64
"""The rows of a small tile of the library's batched product. Not fitted: no batch was in the measurements."""
FEW_ROWS = {GATHERED_PRODUCT: 64, REDUCED_PRODUCT: 32}
WIDE_COLUMNS, WIDE_ROWS = 16384, 512
"""FEWER_EFFICIENCY does not hold for a reduced or gathered product with at most FEW_ROWS, for which there are kernels
that read the weight once, nor for a gathered product with at least WIDE_COLUMNS and WIDE_ROWS, such as logits, where
there are enough tiles. With 256 rows of logits `tile` took 809 us on two H100s, where 512 rows took 994.
"""


@dataclass(frozen=True)
class Hardware:
    """The numbers of a GPU and its links. Rates are those that one rank reaches, not those of a data sheet.

    The `flops` are those of a matmul. Rates: of the memory, of the library's collectives, and of the copy engines when
    all ranks copy. pair_gain: a factor for the rates of links and copies between two ranks. collective_us, protocol_us:
    the `latency` and `protocol` of the module. signal_us: a round of signals of `tile`, including its queues and the
    host's part. chunk_us: the copy, the signal and the launches of a chunk. The efficiencies are the speed of the
    matmul in our kernel, and cut into chunks, relative to the library's.
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
    matmul_flops=728e12,
    matmul_flops_fp32=290e12,
    memory_bytes_per_s=2.85e12,
    gather_bytes_per_s=261e9,
    scatter_bytes_per_s=267e9,
    all_reduce_bytes_per_s=386e9,
    copy_bytes_per_s=664e9,
    pair_gain=0.694,
    collective_us=11.8,
    protocol_us=22.0,
    launch_us=1.04,
    signal_us=3.35,
    chunk_us=26.4,
    tile_efficiency=0.97,
    chunk_efficiency=1.0,
)
# These numbers are for GPUs that have not been measured. They are cautious about our own kernels.
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
    """Returns the numbers of the GPU to which its driver gives this name."""
    return next((known for known in KNOWN if known.name in device_name), UNKNOWN)


def exchange_of(problem: Problem) -> Exchange:
    return TASKS[problem.kind].exchange


def computes(problem: Problem) -> str:
    """Returns what the problem's kind computes; see `Node`."""
    return TASKS[problem.kind].computes


def predict(problem: Problem, on: Hardware) -> dict[str, float]:
    """Returns the predicted microseconds of one call, by strategy; of an eager call at least the host's time."""
    problem = problem.as_expected()
    if computes(problem) == "norm":
        device = {"library": _norm_library_us(problem, on), "tile": _norm_tile_us(problem, on)}
    elif computes(problem) == "decode":
        # Attention itself is left out: all strategies compute it alike, and the lengths are not known here.
        sent_us = received_bytes(problem) / _link_rate(problem, on) * MICRO
        device = {
            "library": 2 * on.launch_us + collective_us(problem, on),
            "tile": on.launch_us + on.signal_us + sent_us,
        }
    else:
        device_us = {"library": _library_us, "chunked": _chunked_us, "tile": _tile_us}
        strategies = TASKS[problem.kind].strategies
        device = {name: device_us[name](problem, on) + beside_us(problem, on, name) for name in strategies}
    if problem.captured:
        return device
    return {strategy: max(us, host_us(problem, strategy)) for strategy, us in device.items()}


def least_gain(problem: Problem, strategy: str) -> float:
    """Returns the fraction of the predicted time of `library` below which a strategy has to be predicted."""
    return SAME_KERNELS_GAIN if strategy == "chunked" and _has_same_kernels(problem) else GAIN


def _has_same_kernels(problem: Problem) -> bool:
    """Returns whether `chunked` and `library` call the same kernel: attention by the library's fastest one."""
    fastest = problem.library_speed == 1.0 and not problem.bias_bytes
    return computes(problem) == "attention" and fastest


def host_us(problem: Problem, strategy: str) -> float:
    """Returns the microseconds of the host for one eager call."""
    if strategy == "chunked" and _is_small_all_reduce(problem):
        return SMALL_HOST_US
    kernels = _has_epilogue_kernel(problem, strategy) + _has_pre_kernel(problem, strategy)
    products = problem.more_products if strategy == "chunked" else 0
    return TASKS[problem.kind].host_us[strategy] + EPILOGUE_HOST_US * kernels + PRODUCT_HOST_US * products


def beside_us(problem: Problem, on: Hardware, strategy: str) -> float:
    """Returns the microseconds on the GPU of the epilogue, less those that a norm saves that sends in band."""
    saved = IN_BAND_US if problem.in_band and strategy == "chunked" else 0.0
    return _epilogue_us(problem, on, strategy) - saved


def _epilogue_us(problem: Problem, on: Hardware, strategy: str) -> float:
    if strategy == "tile":
        return PAIR_COST * problem.pair_bytes / on.memory_bytes_per_s * MICRO
    parts = [problem.epilogue_bytes] if _has_epilogue_kernel(problem, strategy) else []
    parts += [problem.pre_bytes] if _has_pre_kernel(problem, strategy) else []
    return sum(nbytes / on.memory_bytes_per_s * MICRO + on.launch_us for nbytes in parts)


def _has_pre_kernel(problem: Problem, strategy: str) -> bool:
    return problem.pre_bytes > 0 and strategy != "tile"


def _has_epilogue_kernel(problem: Problem, strategy: str) -> bool:
    if problem.epilogue_bytes == 0 or strategy == "tile":
        return False
    ends_with_it = exchange_of(problem) == SCATTERED_PRODUCT or _is_small_all_reduce(problem)
    return strategy == "library" or not ends_with_it


def _is_small_all_reduce(problem: Problem) -> bool:
    reduces = computes(problem) == "matmul" and exchange_of(problem) == REDUCED_PRODUCT
    return reduces and problem.m * problem.n * problem.result_bytes <= SMALL_BYTES


def received_bytes(problem: Problem) -> int:
    """Returns the bytes that one rank receives from its peers in one call."""
    return exchange_of(problem).received_bytes(problem)


NORM_PASSES = 4
"""The passes over the sum: it and the residual are read, and it and its norm are written."""


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
    """Returns the time of the library's collective alone."""
    nbytes = received_bytes(problem)
    protocol = on.protocol_us * nbytes / (nbytes + PROTOCOL_BYTES)
    return on.collective_us + protocol + nbytes / _link_rate(problem, on) * MICRO


def product_us(problem: Problem, on: Hardware) -> float:
    """Returns the time of the library's matmul or attention alone."""
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
        # The results of the parts are read again: [rows, heads * head size] for each source. k counts keys and values.
        parts = problem.world_size * problem.n * problem.k / 2
        read = parts * problem.operand_bytes + BIAS_PASSES * problem.bias_bytes
        passes_us = read / on.memory_bytes_per_s * MICRO
    transfer = received_bytes(problem) / rate * MICRO
    chunks_us = exchange_of(problem).rounds * problem.world_size * on.chunk_us
    return _overlapped(matmul, transfer, _chunks(problem)) + passes_us + chunks_us


def _tile_us(problem: Problem, on: Hardware) -> float:
    attends = computes(problem) == "attention"
    efficiency = ATTENTION_TILE if attends else on.tile_efficiency * _fill(problem)
    matmul = _matmul_us(problem, on, efficiency=efficiency)
    exchange = exchange_of(problem)
    fast = problem.m <= FEW_ROWS.get(exchange, 0)
    fast = fast or (exchange == GATHERED_PRODUCT and problem.n >= WIDE_COLUMNS and problem.m >= WIDE_ROWS)
    if not attends and problem.m < MANY_ROWS and not fast:
        matmul /= FEWER_EFFICIENCY
    transfer = received_bytes(problem) / _link_rate(problem, on) * MICRO
    overlapped = _overlapped(matmul, transfer, _chunks(problem))
    return overlapped + _partials_us(problem, on) + exchange.rounds * on.signal_us


def _overlapped(matmul: float, transfer: float, chunks: int) -> float:
    return max(matmul, transfer) + min(matmul, transfer) / chunks


def _chunks(problem: Problem) -> int:
    return max(problem.world_size, MIN_CHUNKS)


def _partials_us(problem: Problem, on: Hardware) -> float:
    """Returns the time to write and read again partial results, the results of an all-reduce, or gathered products."""
    exchange = exchange_of(problem)
    if exchange.of == "operand":
        return 0.0
    if exchange == EXCHANGED_PRODUCT:
        return _moved_us(problem, on)
    return _passes_us(problem, on, problem.world_size - 1 if exchange.is_whole else exchange.rounds)


def _moved_us(problem: Problem, on: Hardware) -> float:
    """Returns the time to copy once what is moved, so that it lies together for each rank, or to its place."""
    width = problem.n if exchange_of(problem).of == "product" else problem.k
    return 2.0 * problem.m * width * problem.result_bytes / on.memory_bytes_per_s * MICRO


def _passes_us(problem: Problem, on: Hardware, passes: int) -> float:
    """Returns the time of `passes` passes; see P of the module."""
    return passes * 2.0 * problem.m * problem.n * problem.result_bytes / on.memory_bytes_per_s * MICRO


def _link_rate(problem: Problem, on: Hardware) -> float:
    rate: float = getattr(on, exchange_of(problem).rate)
    return rate * _pair_gain(problem, on)


def _pair_gain(problem: Problem, on: Hardware) -> float:
    return on.pair_gain if problem.world_size == 2 else 1.0


def _matmul_us(problem: Problem, on: Hardware, *, efficiency: float) -> float:
    rate: float = getattr(on, problem.precision.flops)
    if computes(problem) in ("attention", "attention_backward"):
        efficiency *= ATTENTION_SPEED / (BACKWARD_WORK if computes(problem) == "attention_backward" else 1.0)
    compute = 2.0 * problem.m * problem.n * problem.k / (rate * efficiency)
    operands = (problem.m * problem.k + problem.k * problem.n) * problem.operand_bytes
    memory = (operands + problem.m * problem.n * problem.result_bytes) / on.memory_bytes_per_s
    return max(compute, memory) * MICRO + on.launch_us


def _slice_fill(problem: Problem) -> float:
    """Returns the fraction of what `chunked` computes that is needed, since it multiplies slice by slice."""
    if problem.slices == 1:
        return 1.0
    rows = problem.m / (problem.world_size * problem.slices)
    return rows / (SLICE_ROWS * math.ceil(rows / SLICE_ROWS))


def _fill(problem: Problem) -> float:
    """Returns the fraction of the computed tiles that is needed: tiles of 128 x 128 at the edges are not full."""
    padded = 128 * math.ceil(problem.m / 128) * 128 * math.ceil(problem.n / 128)
    return problem.m * problem.n / padded if padded else 1.0
