"""The sizes of one call of a site, by which the plan and the cost model know what it computes and moves."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ditron_inductor.task.dtypes import Precision


@dataclass(frozen=True)
class Problem:
    """One rank's share of a call: it multiplies [m, k] by [k, n]. Every field is equal on all ranks.

    Attributes:
        kind: the node kind whose strategies are compared.
        m, n, k: m counts the rows of the whole gathered or unscattered tensor, n the columns of all weights. These are
            the largest sizes that the host knows; memory is laid out for them.
        precision: the dtypes of operands and results.
        captured: whether the call is inside a CUDA graph, where the host's time does not count.
        epilogue_bytes: the bytes that a kernel of its own would read and write for the epilogue; 0 without an epilogue.
        pre_bytes: the same for the part of the epilogue before the reduction.
        library_speed: the speed of the library's kernel that this attention needs, relative to its fastest kernel.
        more_products: the number of matmuls that `chunked` computes beyond those of one weight, in plain matmuls.
        in_band: whether `chunked` ends with a norm kernel that sends in band.
        pair_bytes: the bytes that an epilogue of two products reads of them and writes, including these products if
            they are outputs; 0 without such an epilogue.
        bias_bytes: the bytes of a bias of attention.
        slices: the number of slices that the gathered or scattered dimension lies inside, as that of the sequences of a
            batch does. Each slice has m / slices of the rows.
        expected_m: the expected number of the m rows, if only the device counts them, as it does for routed tokens;
            None if the host knows that there are m. Times are predicted for this number.
    """

    kind: str
    m: int
    n: int
    k: int
    precision: Precision
    world_size: int
    captured: bool = True
    epilogue_bytes: int = 0
    pre_bytes: int = 0
    library_speed: float = 1.0
    more_products: int = 0
    in_band: bool = False
    pair_bytes: int = 0
    bias_bytes: int = 0
    slices: int = 1
    expected_m: int | None = None

    def as_expected(self) -> Problem:
        return self if self.expected_m is None else replace(self, m=self.expected_m, expected_m=None)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return 0 in (self.m, self.n, self.k)

    @property
    def operand_bytes(self) -> int:
        return self.precision.operand.itemsize

    @property
    def result_bytes(self) -> int:
        return self.precision.result.itemsize


@dataclass(frozen=True)
class Requirement:
    """The bytes of symmetric memory that a group needs for a strategy. reason: why it cannot run at all, or ""."""

    nbytes: int = 0
    reason: str = ""


NOTHING = Requirement()
"""The requirement of a strategy that is not asked about."""
