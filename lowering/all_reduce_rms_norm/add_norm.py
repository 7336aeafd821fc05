"""The sums and the norm alone, behind a reduction by anybody: what `library`, and large products, end with.

Problem. As in rows.py, for rows that lie in this GPU's memory already.
Algorithm. One program for a few whole rows, in registers: the sum is read once and written once.
Signal protocol. None.
Limits. At most nodes.MOST_NORM_COLUMNS columns; more are left to torch, in `library`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ditron_inductor.device.streams import handle_for
from ditron_inductor.lowering.all_reduce_rms_norm.rows import block_of, extras, finish, form_of, pointers, warps_of
from ditron_inductor.lowering.launch import ceil_div
from ditron_inductor.lowering.launcher import Arguments, Launcher, local_launcher
from ditron_inductor.task.nodes import NormNode

TILE = 4096
"""Elements of a program's tile, as long as a row is no longer."""

Outputs = tuple[torch.Tensor, torch.Tensor]
"""(normed, total)."""


@triton.jit(do_not_specialize=["M"])
def add_norm_kernel(
    total, bias, residual, weight, shift, normed, M, N,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """total [M, N], contiguous: the reduced rows, then the sums. normed [M, N]."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    inside = (rows < M) & (cols < N)
    at = rows.to(tl.int64) * N + cols
    reduced = tl.load(total + at, mask=inside, other=0.0)
    bias_row, residual_rows, weight_row, shift_row = extras(bias, residual, weight, shift, at, cols, inside, N, FORM)
    finish(reduced, bias_row, residual_rows, weight_row, shift_row, normed, total, at, inside, N, FORM, EPS)


@dataclass(frozen=True)
class AddNorm:
    """The kernel for tensors of one form: `rows` of `columns`."""

    node: NormNode
    rows: int
    columns: int
    launcher: Launcher

    def __call__(self, reduced: torch.Tensor, given: tuple[torch.Tensor | None, ...]) -> Outputs:
        """reduced [.., N], contiguous, becomes the second output. given: the node's tensors, see `nodes.EXTRAS`."""
        normed = torch.empty_like(reduced)
        if reduced.numel():
            tensors = {"total": reduced, **pointers(given, reduced), "normed": normed}
            self.launcher(handle_for(reduced), self._arguments, (), (), tensors)
        return normed, reduced

    def _arguments(self) -> Arguments:
        block = block_of(self.columns)
        rows = max(1, TILE // block)
        return Arguments(
            programs=ceil_div(self.rows, rows),
            values=dict(
                M=self.rows,
                N=self.columns,
                ROWS=rows,
                BLOCK=block,
                FORM=form_of(self.node),
                EPS=self.node.norm.eps,
                num_warps=warps_of(rows * block),
            ),
        )


def make_add_norm(node: NormNode, shape: torch.Size | list[int], device: torch.device) -> AddNorm:
    """The kernel for a node whose outputs have this shape [.., N]."""
    return AddNorm(node, math.prod(shape[:-1]), shape[-1], local_launcher(add_norm_kernel, device))
