"""The dtypes that our kernels take: one table for passes, plan, cost model and kernels.

A new precision, such as FP8 operands with a bfloat16 result, is a row of `PRECISIONS`. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dtype:
    """A dtype by its name in torch, by its name in the text of an epilogue, and the bytes of an element."""

    name: str
    short: str
    itemsize: int


BFLOAT16 = Dtype("bfloat16", "bf16", 2)
FLOAT16 = Dtype("float16", "fp16", 2)
FLOAT32 = Dtype("float32", "fp32", 4)


@dataclass(frozen=True)
class Precision:
    """The dtypes of operands, results and sums in registers. flops: the field of `cost.Hardware` with their rate."""

    operand: Dtype
    result: Dtype
    accumulator: Dtype
    flops: str


PRECISIONS: tuple[Precision, ...] = (
    Precision(BFLOAT16, BFLOAT16, FLOAT32, "matmul_flops"),
    Precision(FLOAT16, FLOAT16, FLOAT32, "matmul_flops"),
    Precision(FLOAT32, FLOAT32, FLOAT32, "matmul_flops_fp32"),
)
"""Every product that a kernel of ours computes."""
ACTIVATIONS: tuple[Dtype, ...] = tuple(dict.fromkeys(row.result for row in PRECISIONS))
"""The dtypes of results, and so of what is added to them, normalised, or attended to."""


def precision(operand: str) -> Precision | None:
    """Returns the row of the table for operands whose product has their dtype, by its name in torch, or None."""
    for row in PRECISIONS:
        if row.operand.name == row.result.name == operand:
            return row
    return None
