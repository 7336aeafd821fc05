"""A rule that says when a matmul is worth padded operands. It uses sizes, dtype and strides, no clock and no device.

A library's fast kernels read and write rows 16 bytes at a time. If the width of a matrix is not a multiple of 8
elements (4 in fp32), its rows do not begin at multiples of 16 bytes, and the library uses slower kernels: the fewer
bytes all rows are aligned to, the slower. A copy with padded rows costs its bytes and a launch.

The rule compares two times of one product,

    as it is       max(flops / (speed * reached), bytes / bandwidth)
    with padding   max(flops / (speed * reached then), bytes / bandwidth) + bytes copied / bandwidth + launches * launch

and pads if the second time is shorter by `margin`. Its constants are those of one machine, on purpose: a decision by
sizes alone is the same on all ranks, in all runs, and in front of a cache and behind it. They are fitted to `python -m
benchmarks.ops.unaligned`, which prints what they should be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

ALIGNED_BYTES = 16
TENSOR_FLOAT_32 = "tf32"

Speed = torch.dtype | str
"""The kind of arithmetic of a product: the dtype of its operands, or `TENSOR_FLOAT_32`."""


@dataclass(frozen=True)
class ProductWork:
    """One product, or a batch of them, and what its padding would copy. flops: 2 * batch * M * N * K. moved_bytes: the
    bytes of its operands and its result, each counted once. operand_bytes, result_bytes: a power of two up to
    `ALIGNED_BYTES`, to which all rows of both operands, and of the result, are aligned. copied_bytes: the bytes that
    are read and written only because of the padding. launches: the number of such copies. padded_result_bytes:
    result_bytes with padding.
    """

    speed: Speed
    flops: float
    moved_bytes: float
    operand_bytes: int
    result_bytes: int
    copied_bytes: float
    launches: int
    padded_result_bytes: int = ALIGNED_BYTES


def _frozen(values: dict[object, float]) -> Mapping[object, float]:
    return MappingProxyType(values)


@dataclass(frozen=True)
class Rule:
    """The constants of the rule, for a GPU of the class of an H200. flops_per_s: by dtype, the rate of a large aligned
    product. operand: by the bytes to which the rows of the operands are aligned, the part of this rate that is reached;
    result: the same for the result alone. fp32 without TensorFloat-32 has no kernels that need alignment: `plain` is
    its part.
    """

    flops_per_s: Mapping[object, float] = field(
        default_factory=lambda: _frozen(
            {torch.bfloat16: 770e12, torch.float16: 770e12, TENSOR_FLOAT_32: 282e12, torch.float32: 51e12}
        )
    )
    operand: Mapping[object, float] = field(default_factory=lambda: _frozen({2: 0.19, 4: 0.37, 8: 0.37, 16: 1.0}))
    result: Mapping[object, float] = field(default_factory=lambda: _frozen({2: 0.13, 4: 0.35, 8: 0.36, 16: 1.0}))
    plain: float = 0.96
    bytes_per_s: float = 3.5e12
    launch_s: float = 3e-6
    margin: float = 1.1

    def reached(self, work: ProductWork) -> tuple[float, float]:
        """The parts of the speed of aligned sizes that a product reaches: (as it is, with padding)."""
        if work.speed == torch.float32:
            return self.plain, 1.0
        as_it_is = min(self.operand[work.operand_bytes], self.result[work.result_bytes])
        return as_it_is, self.result[work.padded_result_bytes]

    def seconds(self, work: ProductWork) -> tuple[float, float]:
        """The predicted seconds of a product: (as it is, with padding)."""
        read, compute = work.moved_bytes / self.bytes_per_s, work.flops / self.flops_per_s[work.speed]
        copies = work.copied_bytes / self.bytes_per_s + work.launches * self.launch_s
        as_it_is, padded = self.reached(work)
        return max(compute / as_it_is, read), max(compute / padded, read) + copies

    def pays(self, work: ProductWork) -> bool:
        """Returns whether the product is faster with padding, by the margin."""
        as_it_is, padded = self.seconds(work)
        return as_it_is > padded * self.margin


RULE = Rule()
"""The rule by which the pipeline pads."""


def speed_of(dtype: torch.dtype) -> Speed:
    """Returns the kind of arithmetic for operands of a dtype, by torch's settings, which are in cache keys."""
    allowed = torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32"
    return TENSOR_FLOAT_32 if dtype == torch.float32 and allowed else dtype


def multiple(dtype: torch.dtype) -> int:
    """Returns how many elements of a dtype `ALIGNED_BYTES` holds."""
    return ALIGNED_BYTES // dtype.itemsize


def missing(size: int, dtype: torch.dtype) -> int:
    """Returns how many elements are missing up to the next aligned size."""
    return -size % multiple(dtype)


def aligned_bytes(*offsets: int) -> int:
    """The largest power of two up to `ALIGNED_BYTES` that divides all of these numbers of bytes."""
    found = ALIGNED_BYTES
    while any(offset % found for offset in offsets):
        found //= 2
    return found
