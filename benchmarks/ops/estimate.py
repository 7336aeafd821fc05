"""Rough costs of a cell before it is measured: for the bar, for the budget, and for how many calls a graph holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.ops.contest import wanted
from benchmarks.ops.request import Request
from benchmarks.ops.shapes import Cell
from benchmarks.timing import SAMPLE_US
from ditron_inductor.task.exchange import GATHERED_OPERAND, REDUCED_PRODUCT, SCATTERED_PRODUCT
from ditron_inductor.task.nodes import TASKS, ULYSSES_KINDS

FLOPS = 650e12
MEMORY_BYTES_PER_S = 4e12
LINK_BYTES_PER_S = 250e9
FIXED_US = 20.0
GRAPH_US = 1500.0
MAX_GRAPH_CALLS = 20
# Before it is measured, a cell needs operands, an expected result, and every contestant its first call.
CELL_S = 1.0
CONTESTANT_S = 0.15
# What a sample costs beside its calls: the alignment, the wait for its end.
SAMPLE_EXTRA_MS = 0.3
ELSEWHERE = {
    GATHERED_OPERAND: ("symm_mem",),
    SCATTERED_PRODUCT: ("symm_mem",),
    REDUCED_PRODUCT: ("async_tp",),
}
"""The contestants that an exchange does not have."""
# Most cells settle before all their rounds are over.
SETTLED_SHARE = 0.7


def call_us(cell: Cell, world_size: int) -> float:
    """Returns the time of one call, in microseconds, as NCCL and cuBLAS on an H200 would take it."""
    if cell.op in ULYSSES_KINDS:
        cell = replace(cell, M=cell.M // world_size)
    compute = 2.0 * cell.M * cell.N * cell.K / FLOPS
    memory = 2.0 * (cell.M * cell.K + cell.K * cell.N + cell.M * cell.N) / MEMORY_BYTES_PER_S
    exchange = TASKS[cell.op].exchange
    width = cell.K if exchange.of == "operand" else cell.N
    transfer = exchange.rounds * 2.0 * cell.M * width * (world_size - 1) / world_size / LINK_BYTES_PER_S
    if exchange.is_whole:
        # A rank's own columns are as wide as those of each peer, and all of them are copied to their place.
        transfer = transfer * world_size + 4.0 * cell.M * cell.N * world_size / MEMORY_BYTES_PER_S
    return FIXED_US + 1e6 * (max(compute, memory) + transfer)


def graph_calls(cell: Cell, world_size: int) -> int:
    """Calls in one captured graph: even, since two slots of a workspace take turns, and few where each takes long."""
    return 2 * max(1, min(MAX_GRAPH_CALLS // 2, round(GRAPH_US / call_us(cell, world_size) / 2)))


def cells_seconds(request: Request, cells: Sequence[Cell], world_size: int) -> list[float]:
    """Seconds of each cell on GPUs, without the compilation of kernels."""
    names = [name for name in wanted(request) if name != "gloo"]
    return [_cell_seconds(request, cell, world_size, names) for cell in cells]


def _cell_seconds(request: Request, cell: Cell, world_size: int, names: Sequence[str]) -> float:
    elsewhere = ELSEWHERE.get(TASKS[cell.op].exchange, ("async_tp", "symm_mem"))
    number = sum(not name.startswith(elsewhere) for name in names)
    call_ms = call_us(cell, world_size) / 1e3
    if cell.graph:
        call_ms *= graph_calls(cell, world_size)
    sample_ms = max(SAMPLE_US / 1e3, call_ms) + call_ms + SAMPLE_EXTRA_MS
    samples = number * (1 + request.repeats * (1 + SETTLED_SHARE * request.rounds))
    return CELL_S + number * CONTESTANT_S + samples * sample_ms / 1e3
