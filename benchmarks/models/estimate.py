"""How long a cell takes, roughly: to begin with, for the bar and the budget, which learn from the cells that pass."""

from __future__ import annotations

from benchmarks.models.architecture import Architecture
from benchmarks.models.request import LIMIT, TUNED, Request
from benchmarks.models.zoo import Cell
from benchmarks.timing import MIN_ROUNDS, SAMPLE_US, WARMUP

FLOPS = 3.5e14
BYTES_PER_S = 3e12
START_S = 20.0
"""Until the ranks are there."""
FIRST_S, LAYER_S = 2.5, 0.8
"""Of a compilation, with Triton's kernels on disk; a step's graph and each layer in it."""
TUNED_S = 60.0
"""What max-autotune takes longer, to time its kernels."""
REFERENCE = 30.0
"""Steps that one in fp32 takes as long as, without tensor cores, with its parts on their way to the host."""
CPU_CALL_S = 6.0
"""Of a contestant on the CPU device, Inductor's C++ among it."""


def step_s(cell: Cell, arch: Architecture, world_size: int) -> float:
    """One step of a cell's model: what its matmuls and attention take, or reading weights and caches."""
    own_tokens: float = cell.batch * cell.tokens
    if cell.form == "cp":
        own_tokens /= world_size
    scores = cell.layers * 2 * arch.heads * arch.head_dim * cell.batch * cell.tokens * cell.tokens / world_size
    flops = 2 * own_tokens * own_weights(cell, arch, world_size) + scores
    seconds = max(flops / FLOPS, bytes_read(cell, arch, world_size) / BYTES_PER_S)
    return seconds * (3.0 if cell.phase == "training" else 1.0)


def own_weights(cell: Cell, arch: Architecture, world_size: int) -> float:
    """Elements of the weights of all layers that a rank holds."""
    attention, feed_forward = arch.layer_weights()
    of_attention = attention / (1 if cell.form in ("cp", "kv") else world_size)
    of_feed_forward = feed_forward / (1 if cell.form == "cp" else world_size) + arch.whole_weights
    return cell.layers * (of_attention + of_feed_forward)


def bytes_read(cell: Cell, arch: Architecture, world_size: int) -> float:
    """Bytes of the weights and of the KV cache of a rank, in two bytes each element. A step reads each of them."""
    cached = 2 * cell.layers * cell.batch * cell.cache * arch.kv_heads * arch.head_dim / world_size
    return 2 * (own_weights(cell, arch, world_size) + cached)


def cell_s(request: Request, cell: Cell, world_size: int) -> float:
    """All contestants of a cell: compiled, checked, timed."""
    arch = request.architectures[cell.model]
    names = [name for name in request.contestants if not cell.left_out(name, arch)] + [LIMIT] * request.limit
    if request.device == "cpu":
        return CPU_CALL_S * len(names)
    # Two graphs: of training forward and backward, of a forward the one that is timed and the one with all parts.
    # What one of the tuned contestants has found in benchmarks, the other one takes from Inductor's cache.
    tuned = TUNED_S * any(name in TUNED for name in names)
    compiled = (len(names) - 1) * 2.0 * (FIRST_S + LAYER_S * cell.layers) + tuned
    step = step_s(cell, arch, world_size)
    # Each sample is as long as SAMPLE_US or a step, and has a step in front of it.
    sample = max(SAMPLE_US * 1e-6, step) + step
    rounds = (MIN_ROUNDS + request.rounds) / 2 * request.repeats
    return 1.0 + REFERENCE * step + compiled + len(names) * (sample * rounds + (2 * WARMUP + 6) * step)
