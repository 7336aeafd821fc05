"""The kernel of the sums and the norm alone, with which `library`, and `chunked` of large products, end.

Problem. It is that of rows.py for rows that lie in this GPU's memory already. Algorithm. A program has a few whole rows
in registers, so the sum is read once and written once. Signal protocol. There is none. Limits. There are at most
nodes.MOST_NORM_COLUMNS columns. `library` leaves longer rows to torch.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ditron_inductor.device.streams import handle_for
from ditron_inductor.lowering.host.launch import ceil_div
from ditron_inductor.lowering.host.launcher import Arguments, Launcher, local_launcher
from ditron_inductor.lowering.norms.rows import (
    WithNorm,
    all_outputs,
    block_of,
    constants_of,
    extras,
    finish,
    pointers,
    reduced_outputs,
    warps_of,
)
from ditron_inductor.task.nodes import norm_returns

TILE = 4096
"""The elements of a program's tile, unless a row is longer."""

Outputs = tuple[torch.Tensor, ...]
"""(normed, total), followed by what is saved."""


@triton.jit(do_not_specialize=["M"])
def add_norm_kernel(reduced, given, outputs, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr, NORMS: tl.constexpr):
    """Does `finish` for reduced [M, N], contiguous, which may be the total. given, outputs: see `extras`."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    inside = (rows < M) & (cols < N)
    at = rows.to(tl.int64) * N + cols
    value = tl.load(reduced + at, mask=inside, other=0.0)
    loaded = extras(given, at, cols, inside, N, NORMS.FORM)
    finish(value, loaded, outputs, rows, at, inside, M, N, NORMS)


@dataclass(frozen=True)
class AddNorm:
    """The kernel for tensors with `rows` rows of `columns` columns."""

    node: WithNorm
    rows: int
    columns: int
    launcher: Launcher

    def __call__(self, reduced: torch.Tensor, given: tuple[torch.Tensor | None, ...]) -> Outputs:
        """Returns the Outputs for reduced [.., N], contiguous, which becomes one of them (see `reduced_outputs`).
        given: the node's tensors, see `nodes.EXTRAS`.
        """
        outputs = reduced_outputs(self.node, reduced)
        if reduced.numel():
            tensors = {
                "reduced": reduced,
                "given": pointers(given, reduced),
                "outputs": tuple([outputs[place] for place in self._places]),
            }
            self.launcher(handle_for(reduced), self._arguments, (), (), tensors)
        return outputs

    @functools.cached_property
    def _places(self) -> tuple[int, ...]:
        """Returns, for each output of the kernel, its index among the outputs of the node."""
        return all_outputs(self.node, tuple(range(len(norm_returns(self.node.norm, self.node.saved)))))

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
                **constants_of(self.node, stores_reduced=False),
                num_warps=warps_of(rows * block),
            ),
        )


def make_add_norm(node: WithNorm, shape: torch.Size | list[int], device: torch.device) -> AddNorm:
    """Returns the kernel for a node whose outputs have this shape [.., N]."""
    return AddNorm(node, math.prod(shape[:-1]), shape[-1], local_launcher(add_norm_kernel, device))
