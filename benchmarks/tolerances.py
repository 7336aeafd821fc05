"""How far a result in a dtype may lie from its fp64 reference: the one table of the suite.

For operands drawn from N(0, 1), the weight scaled by 1/sqrt(K), so that a product's entries are of order 1. The bounds
hold fp32 accumulation and a rounding of every rank's partial product before the reduction, as the library does it.
"""

from __future__ import annotations

import torch

# dtype: (rtol, atol per rank that is reduced over)
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.bfloat16: (1.0e-2, 1.0e-2),
    torch.float16: (1.5e-3, 1.5e-3),
    torch.float32: (1.0e-5, 1.0e-5),
}


def assert_near(got: torch.Tensor, reference: torch.Tensor, *, num_partials: int = 1, what: str = "") -> None:
    """AssertionError unless `got` lies within its dtype's tolerance of the fp64 `reference` (same shape)."""
    assert got.shape == reference.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(reference.shape)}"
    rtol, atol = TOLERANCES[got.dtype]
    torch.testing.assert_close(
        got.double(),
        reference.double(),
        rtol=rtol,
        atol=atol * num_partials,
        msg=lambda text: f"{what} ({got.dtype}): {text}",
    )


# Of a whole model against eager: the norm of the difference over the norm of eager's value.
MODEL_TOLERANCES: dict[torch.dtype, float] = {torch.bfloat16: 2.0e-2, torch.float16: 4.0e-3, torch.float32: 2.0e-5}


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """||got - wanted|| / ||wanted||, infinite where got holds a NaN."""
    wanted = wanted.double()
    error = float((got.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))
    return error if error == error else float("inf")


NARROW_ROUNDING = 1.5
"""Times eager's own error: how far from the model in fp32 another one in a narrow dtype may be, where that is more than
the tolerance. A ReLU that rounding turns on or off changes gradients by several per cent.
"""


def narrow_limit(dtype: torch.dtype, eager: float) -> float:
    """The largest relative error to fp32 of a model in this dtype, where eager mode's own error is `eager`."""
    return max(MODEL_TOLERANCES[dtype], NARROW_ROUNDING * eager)
