"""The claims of docs/when_it_pays.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.comparison import Comparison, comparisons
from benchmarks.ops import targets
from benchmarks.prose.claims import Claim, ends, percent, span
from benchmarks.prose.picked import gains, older
from benchmarks.records import Row, newest

WORLD = 4
"""Ranks of the tables of single kernels."""


def single_kernels(rows: Sequence[Row], models: Sequence[Row]) -> list[Claim]:
    """Returns the claims of docs/when_it_pays.md. models: the rows of all runs."""
    cells = [cell for cell in comparisons(rows) if cell.world == WORLD and cell.gpu != "cpu"]
    anchors = [cell for cell in cells if targets.is_anchor(cell)]
    eager, graph = ({op: _best(anchors, op, mode) for op in LIMITED} for mode in (0, 1))
    shapes = [cell.shape for cell in anchors if cell.op == "matmul_reduce_scatter" and not cell.graph][:5]
    captured = [cell for cell in cells if cell.graph and cell.shape in shapes]
    gather, scatter = LIMITED
    (timed,) = (cell for cell in anchors if (cell.op, cell.shape) == (scatter, TIMED_INSIDE))
    tile = timed.ratio("limit", "ditron:tile")
    small = [cell for cell in anchors if cell.op == "matmul_all_reduce" and cell.graph and 64 <= cell.M <= 256]
    behind = [cell.ratio("ditron", "symm_mem:two_shot") for cell in small]
    slow, *_ = older(models, world=2, form="sp", batch=1, tokens=2048, model="qwen3-32b")
    host = tuple(f"{(slow.us(name) or 0.0) / 1e3:.2f}" for name in ("ditron", "inductor", "async_tp"))
    return [
        Claim("`all_gather_matmul`: {}, {}, {}, {}, {}, {} and, in a graph, {}", eager[gather] + graph[gather]),
        Claim("`matmul_reduce_scatter`: {}, {}, {}, {}, {}, {} and, in a graph, {}", eager[scatter] + graph[scatter]),
        Claim("the first five are {}, {}, {}, {} and {}", _best(captured, scatter, 1)),
        Claim("(the product alone in Triton) and {}", (f"{tile:.2f}",)),
        Claim("({} to {} % longer)", tuple(map(percent, ends(behind)))),
        Claim("took {} ms, against {} ms by Inductor and {} ms by async TP", host),
    ]


TIMED_INSIDE = "2048 x 8192 x 7168"
"""The reduce-scatter whose kernel was timed part by part."""
LIMITED = ("all_gather_matmul", "matmul_reduce_scatter")


def _best(cells: Iterable[Comparison], op: str, graph: int) -> tuple[str, ...]:
    those = [cell for cell in cells if (cell.op, cell.graph) == (op, graph)]
    ratios = (cell.ratio("limit", ("ditron:tile", "ditron:chunked")) for cell in those)
    return tuple(f"{ratio:.2f}" for ratio in ratios if ratio)


def beside_attention(attention: Sequence[Row]) -> list[Claim]:
    """Returns the claims of docs/when_it_pays.md on four GPUs."""
    causal = [row for row in newest(attention) if row.op == "all_gather_attention" and _plain(row) and row.world == 4]
    both = [row for row in newest(attention) if row.op in ("matmul_all_to_all", "all_to_all_matmul") and row.world == 4]
    return [
        Claim("All-to-alls with their matmuls are {} to {} times as fast", span(gains(both, "nccl"))),
        Claim("is {} to {} times as fast as torch's ring attention", span(gains(causal, "ring"))),
        Claim("and {} to {} times as fast as a gather followed by", span(gains(causal, "sdpa:blocks"))),
    ]


def _plain(row: Row) -> bool:
    """Causal, without a window or a soft cap."""
    return row.sizes["mask"] == "causal_offset" and not {"window", "softcap"} & set(row.sizes)
