"""What was deleted since it did not pay, and what stays though it is level: the tables of docs/deleted.md.

The rows that say so stay in the results.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from benchmarks.comparison import fastest_ratio
from benchmarks.records import ATTENTION, GEMM_COLLECTIVES, MOE, NORM, Row, grouped, read_csv, runs

ROUTED = "580d7af6"
"""The commit at which `ditron` had the pass `route_shards`, and `ditron:gathered` had not."""


@dataclass(frozen=True)
class Verdict:
    """`what`, which was measured as `below`, against what runs without it, measured as `above`: contestants, of several
    the fastest in each cell. A name that ends in a colon stands for all that begin with it.

    results: the file, op: of its rows, of_cell: which of their cells count. so: what follows from it.
    """

    what: str
    results: Path
    op: str
    above: tuple[str, ...]
    below: tuple[str, ...]
    against: str
    so: str
    of_cell: Callable[[Row], bool] = lambda row: True

    def ratios(self) -> list[float]:
        """Time of `above` / time of `below` in the newest run of each cell that has both. Below 1 what runs without it
        is faster.
        """
        rows = [row for row in read_csv(self.results) if row.op == self.op and self.of_cell(row)]
        found = []
        for of_cell in grouped(rows).values():
            both = [ratio for run in runs(of_cell) if (ratio := fastest_ratio(run, self.above, self.below)) is not None]
            found += both[-1:]
        return found

    def mean(self) -> float:
        """Returns the geometric mean of the ratios."""
        return statistics.geometric_mean(self.ratios())

    def line(self) -> list[str]:
        """Returns the line of the table."""
        ratios = self.ratios()
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        return [self.what, self.against, f"{self.mean():.3f}", str(len(ratios)), spread, self.so]


DELETED = (
    Verdict(
        "`all_gather_contract`: a gather and matmuls that contract what it gathers",
        GEMM_COLLECTIVES,
        "all_gather_contract",
        ("nccl",),
        ("ditron",),
        "NCCL + cuBLAS",
        "such a gather is left alone, with the reason `no_gain`",
    ),
    Verdict(
        "the same by the fastest of its three strategies in each row, as a table with these rows would choose",
        GEMM_COLLECTIVES,
        "all_gather_contract",
        ("nccl",),
        ("ditron:tile", "ditron:chunked", "ditron:library"),
        "NCCL + cuBLAS",
        "too little for a pass and two kernels",
    ),
    Verdict(
        "`matmul_all_gather` by `chunked`",
        GEMM_COLLECTIVES,
        "matmul_all_gather",
        ("ditron:tile",),
        ("ditron:chunked",),
        "`tile`",
        "`tile`; where its slots are beyond the limit of the workspace, `library`",
    ),
    Verdict(
        "`attention_reduce_scatter` by `chunked`, causal",
        ATTENTION,
        "attention_reduce_scatter",
        ("ditron:library",),
        ("ditron:chunked",),
        "`library`",
        "`library` alone",
        lambda row: row.sizes["mask"] == "causal_offset",
    ),
    Verdict(
        "the same with a bias",
        ATTENTION,
        "attention_reduce_scatter",
        ("ditron:library",),
        ("ditron:chunked",),
        "`library`",
        "`library` alone",
        lambda row: row.sizes["mask"] == "given",
    ),
    Verdict(
        "gate and up in one weight, in training: two products, that an epilogue could combine them and return both",
        NORM,
        "swiglu",
        ("ditron:split",),
        ("ditron",),
        "the products by the op, then Inductor's kernel",
        "one product, and Inductor's kernel",
        lambda row: row.sizes["kind"] == "training",
    ),
    Verdict(
        "`route_shards`: a router multiplies the rank's own tokens, and all tokens are gathered while they are routed; "
        "in CUDA graphs",
        MOE,
        "gathered_experts",
        ("ditron:gathered",),
        ("ditron",),
        "the router beside its gather",
        "too little for a second exchange, and for the comparison of the routers that it needs",
        lambda row: row.commit == ROUTED and bool(row.graph),
    ),
    Verdict(
        "the same without CUDA graphs",
        MOE,
        "gathered_experts",
        ("ditron:gathered",),
        ("ditron",),
        "the router beside its gather",
        "the host launches two collectives more, and waits",
        lambda row: row.commit == ROUTED and not row.graph,
    ),
    Verdict(
        "the second matmul of experts, its sum for each token and the all-reduce, in two parts of the columns",
        MOE,
        "grouped_matmul_all_reduce",
        ("ditron:library",),
        ("ditron:chunked",),
        "the same as a whole",
        "the sum alone is a node, [combine_experts](kernels/combine_experts.md)",
    ),
    Verdict(
        "the sum of experts for each token and its all-reduce, in runs of tokens, behind a whole matmul",
        MOE,
        "combine_experts_all_reduce",
        ("ditron:library",),
        ("ditron:chunked",),
        "one after the other",
        "matmul, sum and reduction in one launch: [grouped_matmul_all_reduce](kernels/grouped_matmul_all_reduce.md)",
    ),
    Verdict(
        "the same with a reduce-scatter",
        MOE,
        "combine_experts_reduce_scatter",
        ("ditron:library",),
        ("ditron:chunked",),
        "one after the other",
        "too little for kernels of its own",
    ),
    Verdict(
        "`experts_all_reduce_rms_norm`: in a decode step the second matmul of experts, its sum, all-reduce and norm",
        MOE,
        "experts_all_reduce_rms_norm",
        ("ditron:apart",),
        ("ditron:tile",),
        "one call for each part",
        "[expert_projections](kernels/expert_projections.md), Inductor's sum, and the reduction with its norm",
    ),
    Verdict(
        "gate, up, silu and down of a decode step in one launch, with a hand-over of the whole grid between them; the "
        "fastest of 11 tiles",
        NORM,
        "mlp_launches",
        ("two:",),
        # Columns of a program and K of a step in both parts, warps, stages, programs of an SM, and the weights of a
        # column that it loads before the hand-over.
        ("one:",),
        "two launches in a CUDA graph, the fastest of 3 tiles and cuBLAS",
        "two launches: a graph starts the second one as fast as programs meet, whether or not they load weights ahead",
    ),
)

KEPT = (
    Verdict(
        "`attention_reduce_scatter` as a fusion, causal",
        ATTENTION,
        "attention_reduce_scatter",
        ("sdpa",),
        ("ditron:library",),
        "torch's backward, two reduce-scatters",
        "stays: blocks of the mask are faster than the kernel that knows all of it",
        lambda row: row.sizes["mask"] == "causal_offset",
    ),
    Verdict(
        "the same with a bias",
        ATTENTION,
        "attention_reduce_scatter",
        ("sdpa",),
        ("ditron:library",),
        "torch's backward, two reduce-scatters",
        "stays: the gradient of our function for serving, with a bias, is the same node",
        lambda row: row.sizes["mask"] == "given",
    ),
    Verdict(
        "an epilogue of two products behind a gather (SwiGLU), 2048 to 8192 rows",
        NORM,
        "swiglu",
        ("ditron:split",),
        ("ditron",),
        "the products by the op, then Inductor's kernel",
        "stays: a rule by rows would be more code than it saves, and with few rows a launch goes",
    ),
)


def table(verdicts: Sequence[Verdict]) -> str:
    """Returns a table with a line for each of them."""
    headers = ["what", "against", "ratio", "rows", "from .. to", "so"]
    return tabulate([one.line() for one in verdicts], headers, "github", disable_numparse=True)


def part() -> str:
    """Returns the text between the markers of the page."""
    return f"{table(DELETED)}\n\nKept, and measured the same way:\n\n{table(KEPT)}"
