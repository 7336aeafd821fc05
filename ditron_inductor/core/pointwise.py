"""Elementwise functions in fp32 from which epilogues are generated, by torch's formulas; NaN stays NaN."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def neg(x):
    return -x


@triton.jit
def relu(x):
    return tl.where(x < 0.0, 0.0, x)


@triton.jit
def square(x):
    return x * x


@triton.jit
def minimum(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def maximum(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def exp(x):
    return tl.exp(x)


@triton.jit
def erf(x):
    return tl.erf(x)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    # Near 0 the quotient loses the digits that 1 - e cancels; there its series is exact to fp32.
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    s = x * x
    near = x * (1.0 + s * (-1.0 / 3.0 + s * (2.0 / 15.0 + s * (-17.0 / 315.0 + s * (62.0 / 2835.0)))))
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0.0, -far, far))


@triton.jit
def gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_tanh(x):
    # 1 + tanh(y) = 2 sigmoid(2 y)
    return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
