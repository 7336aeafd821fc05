"""The bytes that a site writes to memory and the next kernel reads again. The locality tax is estimated from them.

Each intermediate counts with one write and one read. Tensors that a site reads or writes in any case (operands,
weights, outputs) are not intermediates. The partial results or parts that peers write into this rank's memory are
intermediates of the fused kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ditron_inductor.task.exchange import (
    EXCHANGED_OPERAND,
    EXCHANGED_PRODUCT,
    GATHERED_PRODUCT,
    REDUCED_PRODUCT,
    SCATTERED_PRODUCT,
)
from ditron_inductor.task.nodes import TASKS, ReductionWithNorm
from ditron_inductor.task.site_records import SiteRecord


@dataclass(frozen=True)
class Intermediates:
    """Bytes of one call, written and read. beside: without fusion, by the kernels before and behind the collective.
    inside: without fusion, by the collective itself, whose time they are a part of. fused: by `tile` or `chunked`.
    """

    beside: int
    inside: int
    fused: int


def intermediates(record: SiteRecord) -> Intermediates | None:
    """Returns the intermediates of a fused site; None if its sizes are not known, or its kind has no estimate."""
    if None in (record.m, record.n, record.k, record.itemsize, record.world_size, record.bytes_moved):
        return None
    assert record.m is not None and record.n is not None and record.itemsize is not None
    assert record.world_size is not None and record.bytes_moved is not None
    world = record.world_size
    product = record.m * record.n * record.itemsize
    received = product * (world - 1) // world
    copies = _copies(record)
    # An epilogue reads each product (or sum) that the library's kernels have written before it.
    finished = 2 * product if getattr(record.task, "epilogue", "") else 0
    declared = TASKS[record.kind]
    exchange, computes = declared.exchange, declared.computes
    if computes == "decode":
        return None
    if exchange == EXCHANGED_OPERAND:
        exchanged = record.m * (record.k or 0) * record.itemsize
        return Intermediates(3 * exchanged, exchanged, 2 * exchanged * (world - 1) // world)
    if exchange.of == "operand":
        # The parts of all ranks are in memory: gathered before they are used or, in a backward, yet to be reduced.
        gathered = record.bytes_moved * world // max(world - 1, 1)
        return Intermediates(gathered + copies * gathered + finished, gathered, 2 * record.bytes_moved)
    if exchange == SCATTERED_PRODUCT:
        return Intermediates(product + copies * product + finished // world, product, 2 * received)
    if issubclass(declared, ReductionWithNorm):
        # The reduced sum is written by the collective and read by the norm.
        own = 0 if computes == "norm" else product
        return Intermediates(own + product, own + product, 2 * received)
    if exchange == REDUCED_PRODUCT:
        return Intermediates(product + finished, product, 2 * received)
    if exchange == GATHERED_PRODUCT:
        return Intermediates(product + copies * product * world, product, 0)
    assert exchange == EXCHANGED_PRODUCT, record.kind
    # The tensor is brought into the order of the ranks, which costs another write and read.
    return Intermediates(3 * product, product, 0)


def _copies(record: SiteRecord) -> int:
    """Returns the passes over memory of the library's copy that brings a gathered tensor, or one that is scattered,
    into the order of the ranks: a write and a read, if a dimension of several elements stands in front of the dimension
    that is cut.
    """
    task, operands = record.task, record.operands
    if task is None or operands is None:
        return 0
    dim = getattr(task, "gather_dim", getattr(task, "scatter_dim", 0))
    first = next(iter(operands.values()))
    shape = first[0] if isinstance(first, list) else first
    return 2 if math.prod(shape[:dim]) > 1 else 0
