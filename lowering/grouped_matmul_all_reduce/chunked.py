"""grouped_matmul_all_reduce, strategy `chunked`: the library's grouped matmul on parts of the columns, each of which is
reduced while the next one is multiplied.

Problem. The rows of a grouped matmul are slots sorted by expert, so a part of its rows is not the sum of any token. Its
columns are independent. Algorithm. The weights are cut into parts of their columns, as views. For each part the main
stream multiplies all slots, adds up the slots of the tokens of one owner after the other into this rank's slot (see
combine.py), and the rest is that of an all-reduce in parts (see lowering/all_reduce/chunked.py), whose results are
copied to their columns of the output. Signal protocol. That of lowering/all_reduce/chunked.py. Limits. None on the
routing, which only the device knows. The columns of a part fill 16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from ditron_inductor.lowering import schedules
from ditron_inductor.lowering.all_reduce import chunked
from ditron_inductor.lowering.all_reduce.chunked import Parts
from ditron_inductor.lowering.chunked_exchange import Kernels
from ditron_inductor.lowering.grouped_matmul_all_reduce.combine import Combiner
from ditron_inductor.lowering.host.launch import Launch, ceil_div, round_up
from ditron_inductor.task import reference
from ditron_inductor.task.nodes import GroupedMatmulAllReduce

PARTS = 2
"""Each part costs the host 180 us, and the library multiplies fewer columns less well."""
LEAST_COLUMNS = 512
ALIGNED = 8
"""The library wants operands whose rows begin at 16 bytes."""


@dataclass(frozen=True, eq=False)
class Geometry:
    """The layout of a call: its exchange, and what adds up the slots of tokens."""

    product: Parts
    combine: Combiner = field(repr=False)

    @property
    def nbytes(self) -> int:
        return self.product.nbytes


def geometry(node: GroupedMatmulAllReduce, launch: Launch, x: torch.Tensor, columns: int, k: int) -> Geometry:
    """Returns the Geometry for x [S, K]. columns: N. k: unused, as the parts depend on N alone."""
    M, world = x.shape[0] // node.top_k, node.world_size
    least = 2 * ALIGNED if launch.interpreted else LEAST_COLUMNS
    parts = PARTS if columns % (ALIGNED * PARTS) == 0 and columns // PARTS >= least else 1
    width, length = columns // parts, ceil_div(M, world)
    stride = round_up(length * width, 128)
    results = parts * (world - 1) * stride
    exchange = Parts(
        M=M,
        N=width,
        parts=parts,
        length=length,
        groups=schedules.scatter_schedule(world, length, width, launch.num_sms, most_parts=1).groups,
        stride=stride,
        results=results,
        nbytes=(results + parts * stride) * x.element_size(),
        kernels=Kernels(launch),
        finisher=None,
        preparer=None,
        in_columns=True,
    )
    return Geometry(exchange, Combiner(node, width, x.device))


@dataclass
class GroupedProducts:
    """What a rank contributes, run by run: the runs are tokens of one owner in one part, in the order of the parts.
    runs: the number of tokens of each.
    """

    sizes: Geometry
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
    runs: Sequence[int]

    def __post_init__(self) -> None:
        self._begins = [0, *accumulate(self.runs)]
        self._part = -1
        self._products: torch.Tensor | None = None

    def multiply(self, place: int, out: torch.Tensor) -> None:
        """Computes the run number `place` into `out`. The first run of a part multiplies all slots."""
        x, weight, ends, places, scale, added = self.operands
        parts = self.sizes.product
        part, first = divmod(self._begins[place], parts.M)
        columns = slice(part * parts.N, (part + 1) * parts.N)
        if part != self._part:
            self._products, self._part = reference.grouped_products(x, weight[:, :, columns], ends), part
        assert self._products is not None
        rest = None if added is None else added[:, columns]
        self.sizes.combine(self._products, places, scale, rest, first, out)


def grouped_matmul_all_reduce(
    node: GroupedMatmulAllReduce,
    launch: Launch,
    sizes: Geometry,
    x: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    places: torch.Tensor,
    scale: torch.Tensor,
    added: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Returns the output [T, N]; see the node for the operands."""
    parts = sizes.product
    out = x.new_empty(parts.M, parts.parts * parts.N)
    operands = (x, weight, ends, places, scale, added)
    chunked.reduce_in_parts(node, launch, parts, x, out, lambda lengths: GroupedProducts(sizes, operands, lengths))
    return [out]
