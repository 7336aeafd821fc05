"""The figures that three of the ops are to reach, most of them on 4 H200s, and whether rows reach them.

Every target is a ratio of two times of one interleaved run, or (host cost) a time. Most hold for a row, some for the
geometric mean of the six prefill rows of an op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.comparison import OPS, Comparison, geometric_mean, mode
from benchmarks.ops.shapes import GRAPH_ROW, PREFILL, SETS
from ditron_inductor.task.exchange import GATHERED_OPERAND, GATHERED_PRODUCT, SCATTERED_PRODUCT
from ditron_inductor.task.nodes import DELETED_KINDS, ULYSSES_KINDS, matmul_of

SYMM_MEM = ("symm_mem:one_shot", "symm_mem:two_shot")
MEASURED = ("nccl", "registered", "max_autotune", "async_tp")
"""What `auto` must never be slower than, by more than `SLOWER`."""
SLOWER = 1.02
GPU = "H200"
WORLD = 4
SMALL_DECODE = 16
HOST_US = 40.0

# (M, hidden): limit / auto. The last row is that of the CUDA graph.
LIMIT: dict[str, dict[tuple[int, int], float]] = {
    matmul_of(GATHERED_OPERAND): {
        (8192, 8192): 0.92,
        (4096, 8192): 0.90,
        (2048, 8192): 0.88,
        (8192, 4096): 0.88,
        (4096, 4096): 0.85,
        (2048, 4096): 0.75,
    },
    matmul_of(SCATTERED_PRODUCT): {
        (8192, 8192): 0.95,
        (4096, 8192): 0.93,
        (2048, 8192): 0.88,
        (8192, 4096): 0.93,
        (4096, 4096): 0.88,
        (2048, 4096): 0.75,
    },
}
MEAN_OVER_NCCL = {matmul_of(GATHERED_OPERAND): 1.15, matmul_of(SCATTERED_PRODUCT): 1.25}
PREFILL_OVER_NCCL = 1.15
ULYSSES_OVER_NCCL = 1.15


@dataclass(frozen=True)
class Target:
    """`what`, in words, is to be at least (or at most) `bound`; value: what was measured, None if nothing was."""

    what: str
    value: float | None
    bound: float
    at_least: bool

    @property
    def holds(self) -> bool | None:
        if self.value is None:
            return None
        # Compared as they are printed: nobody should see 0.75 >= 0.75 fail.
        value = round(self.value, 3)
        return value >= self.bound if self.at_least else value <= self.bound

    @property
    def text(self) -> str:
        return f"{self.what} {'>=' if self.at_least else '<='} {self.bound:g}"

    @property
    def verdict(self) -> str:
        """PASS, FAIL or `not measured`, with the figure."""
        if self.value is None:
            return "not measured"
        return f"{'PASS' if self.holds else 'FAIL'} {self.value:.3f}"


def is_anchor(cell: Comparison) -> bool:
    """Returns whether the cell is a row of the set `anchors` for its world size. No cell of a deleted op is."""
    if cell.op in DELETED_KINDS:
        return False
    listed = {(one.M, one.N, one.K, int(one.graph)) for one in SETS["anchors"](cell.op, cell.world)}
    return (cell.M, cell.N, cell.K, cell.graph) in listed


def row_targets(cell: Comparison) -> list[Target]:
    """The targets of a row; the first one is that of the op, if it has one."""
    targets = []
    if cell.world == WORLD and GPU in cell.gpu:
        if (cell.M, cell.N, cell.K) == (256, 256, 256) and not cell.graph:
            targets.append(Target("us per call of tile", cell.us("ditron:tile"), HOST_US, at_least=False))
        if is_anchor(cell):
            targets += _of_anchor(cell)
    if is_anchor(cell):
        worst = cell.ratio("ditron", MEASURED)
        targets.append(Target("auto / best of NCCL and async TP", worst, SLOWER, at_least=False))
    return targets


def _of_anchor(cell: Comparison) -> list[Target]:
    row = (cell.M, cell.hidden)
    if cell.op == matmul_of(GATHERED_PRODUCT):
        return []
    if cell.op in ULYSSES_KINDS:
        return [Target("NCCL + cuBLAS / auto", cell.ratio("nccl", "ditron"), ULYSSES_OVER_NCCL, at_least=True)]
    if cell.op in LIMIT:
        if bool(cell.graph) != (row == GRAPH_ROW):
            return []
        return [Target("limit / auto", cell.ratio("limit", "ditron"), LIMIT[cell.op][row], at_least=True)]
    if not cell.graph:
        return [Target("NCCL + cuBLAS / auto", cell.ratio("nccl", "ditron"), PREFILL_OVER_NCCL, at_least=True)]
    bound = 0.85 if cell.M <= SMALL_DECODE else 0.80
    return [
        Target("auto / NCCL + cuBLAS", cell.ratio("ditron", "nccl"), bound, at_least=False),
        Target("auto / better symm_mem", cell.ratio("ditron", SYMM_MEM), 0.92, at_least=False),
    ]


def mean_targets(cells: Sequence[Comparison]) -> list[tuple[str, Target]]:
    """(op, target) for the geometric means over the six eager prefill rows; only for ops that have a row here."""
    found = []
    for op, bound in MEAN_OVER_NCCL.items():
        rows = six_rows(cells, op)
        if not rows:
            continue
        values = [row.ratio("nccl", "ditron") for row in rows]
        value = geometric_mean(values) if len(rows) == 2 * len(PREFILL) else None
        found.append((op, Target("geometric mean of NCCL + cuBLAS / auto", value, bound, at_least=True)))
    return found


def six_rows(cells: Sequence[Comparison], op: str) -> list[Comparison]:
    """The eager prefill anchors of an op, at the world size of the targets."""
    wanted = [cell for cell in cells if cell.op == op and cell.world == WORLD and GPU in cell.gpu]
    return [cell for cell in wanted if not cell.graph and cell.M in PREFILL and is_anchor(cell)]


def column(cells: Sequence[Comparison]) -> dict[int, tuple[str, str]]:
    """For `comparison.ratios_table`: the first target of every row that has one, and whether all of the row's hold."""
    found = {}
    for place, cell in enumerate(cells):
        targets = row_targets(cell)
        if targets:
            known = [target.holds for target in targets if target.holds is not None]
            found[place] = (targets[0].text, ("yes" if all(known) else "NO") if known else "-")
    return found


def summary(cells: Sequence[Comparison]) -> list[tuple[str, str, str, str]]:
    """(op, row, target, verdict) for every target of these cells, means first."""
    lines = [(op, "six rows", target.text, target.verdict) for op, target in mean_targets(cells)]
    for op in OPS:
        for cell in cells:
            if cell.op == op:
                row = f"{cell.shape} {mode(cell)}, {cell.world} ranks"
                lines += [(op, row, target.text, target.verdict) for target in row_targets(cell)]
    return lines
