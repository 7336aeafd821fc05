"""Predicts whether row-wise work between all-reduces is faster sharded, by a pure function of sizes and shipped
numbers.

    replicated = each product with its all-reduce + each matmul of a result             + row-wise passes
    sharded    = each product with its reduce-scatter + each gather with its matmuls    + row-wise passes / W

Each term is that of the fastest strategy that the cost model predicts. If one kernel reduces and normalises (up to
`NORM_BYTES`), the launch of the norm is not counted, and neither is the writing and reading of the sum in
between. A gather without matmuls counts as the library's collective, and so does a reduction without a product. With
few rows the second round of launches and signals costs more than it saves.
"""

from __future__ import annotations

from dataclasses import dataclass

from ditron_inductor.task import cost
from ditron_inductor.task.dtypes import Precision
from ditron_inductor.task.exchange import GATHERED_OPERAND, REDUCED_PRODUCT, SCATTERED_PRODUCT
from ditron_inductor.task.nodes import matmul_of
from ditron_inductor.task.problem import Problem

GAIN = 0.98
"""The sharded form is chosen below this part of the replicated form's predicted time on every known GPU."""
NORM_BYTES = 8 << 20
"""The most bytes of a sum that one kernel reduces and normalises faster than two."""
NORM_LAUNCH = 0.7
"""The part of a launch that a norm in the kernel of its reduction saves over a norm behind it. 2.1 us of 3 us are
measured (the median of `ditron:split` minus `ditron` in benchmarks/results/norm.csv, 12 shapes of up to 1 MB).
"""
PASSES = 3
"""The number of tensors that row-wise work reads and writes for one reduction: its result, and the residual twice."""


@dataclass(frozen=True)
class Reduced:
    """The product [m, k] @ [k, n], reduced over the ranks. k is 0 if what is reduced is not a matmul. has_norm: the
    replicated form has one node for it and the norm behind it.
    """

    n: int
    k: int
    has_norm: bool = False


@dataclass(frozen=True)
class GatheredRows:
    """A tensor [m, k] that leaves the region, times weights of n columns together; n is 0 where no matmul is fused."""

    n: int
    k: int


@dataclass(frozen=True)
class RegionWork:
    """A region: m rows in all."""

    m: int
    reduced: tuple[Reduced, ...]
    gathered: tuple[GatheredRows, ...]
    precision: Precision
    world_size: int


def predict(work: RegionWork, on: cost.Hardware) -> tuple[float, float]:
    """Microseconds of the replicated and of the sharded form."""
    gather, scatter, reduce = map(matmul_of, (GATHERED_OPERAND, SCATTERED_PRODUCT, REDUCED_PRODUCT))
    replicated = sharded = 0.0
    for product in work.reduced:
        gained = _norm_gain_us(work, product, on)
        replicated += _best_us(work, reduce, product.n, product.k, product.k > 0, on) - gained
        sharded += _best_us(work, scatter, product.n, product.k, product.k > 0, on)
    for each in work.gathered:
        if each.n:
            replicated += cost.product_us(_problem(work, gather, each.n, each.k), on)
        sharded += _best_us(work, gather, each.n, each.k, each.n > 0, on)
    elements = sum(PASSES * work.m * product.n for product in work.reduced)
    elements += sum(work.m * each.k for each in work.gathered)
    row_wise = elements * work.precision.result.itemsize / on.memory_bytes_per_s * cost.MICRO
    return replicated + row_wise, sharded + row_wise / work.world_size


def pays(work: RegionWork) -> bool:
    """Returns whether the sharded form is predicted to gain on every known GPU: all ranks come to one answer."""
    return all(sharded <= GAIN * replicated for replicated, sharded in (predict(work, on) for on in cost.KNOWN))


def _norm_gain_us(work: RegionWork, reduced: Reduced, on: cost.Hardware) -> float:
    """Returns the microseconds that one node for a reduction and its norm saves over two kernels."""
    nbytes = work.m * reduced.n * work.precision.result.itemsize
    if not reduced.has_norm or nbytes > NORM_BYTES:
        return 0.0
    return NORM_LAUNCH * on.launch_us + 2 * nbytes / on.memory_bytes_per_s * cost.MICRO


def _best_us(work: RegionWork, kind: str, n: int, k: int, has_matmul: bool, on: cost.Hardware) -> float:
    problem = _problem(work, kind, n, k)
    return min(cost.predict(problem, on).values()) if has_matmul else cost.collective_us(problem, on)


def _problem(work: RegionWork, kind: str, n: int, k: int) -> Problem:
    return Problem(kind, work.m, n, k, work.precision, work.world_size)
