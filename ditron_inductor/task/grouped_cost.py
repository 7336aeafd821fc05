"""Whether the first matmul of the experts of a prompt is faster by a copy of the rows and torch's grouped matmul.

A rank has S slots, uses of an expert by a token, of E experts. A grouped matmul is computed in tiles of slots of one
expert, of which the last one is half empty in the mean. `grouped_projections` has tiles of 128 slots, takes the rows of
x [T, K] where they lie, and so saves the copy of S rows. The matmul of torch (CUTLASS on Hopper) behaves as with tiles
of 256 slots, but multiplies full tiles faster. Both read every weight once, if an expert has few slots. What an
epilogue saves is not counted.
"""

from __future__ import annotations

LIBRARY_FLOPS, KERNEL_FLOPS, BYTES_PER_S = 730e12, 590e12, 3.0e12
"""The rates of torch's grouped matmul and of the kernel, where all tiles are full, and of the copy, on an H100."""
LIBRARY_SLOTS, KERNEL_SLOTS = 256, 128


def library_wins(*, S: int, E: int, K: int, N: int) -> bool:
    """Returns whether the library is predicted to be faster, where the E experts share the slots evenly. Operands have
    16 bits; N: the columns of all weights.
    """
    weight_s = 2 * E * K * N / BYTES_PER_S

    def matmul_s(flops: float, slots: int) -> float:
        return max(2 * (S + E * slots / 2) * K * N / flops, weight_s)

    return matmul_s(LIBRARY_FLOPS, LIBRARY_SLOTS) + 4 * S * K / BYTES_PER_S < matmul_s(KERNEL_FLOPS, KERNEL_SLOTS)
