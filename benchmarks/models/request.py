"""What the command line asked for, as the ranks get it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.models.architecture import Architecture
from benchmarks.models.zoo import Cell
from benchmarks.trying import UNTABLED

OURS: tuple[str, ...] = ("ditron", UNTABLED, "ditron:planned")
"""Ditron by default, without the tables that ship with it, and without the option `ditron.trials`."""
CONTESTANTS: tuple[str, ...] = (
    "eager",
    "inductor",
    "max_autotune",
    "max_autotune_select",
    "overlap",
    "registered",
    "auto_select",
    "symm_mem",
    "one_shot_norm",
    "grouped",
    "fused",
    "one_shot_fused",
    "dispatched",
    "async_tp",
    *OURS,
)
"""In the order of the tables. max_autotune: Inductor with `mode="max-autotune-no-cudagraphs"`. max_autotune_select: the
same with `auto_select`. overlap: Inductor with `reorder_for_compute_comm_overlap`. registered: Inductor, with all
memory in a pool that NCCL has registered. auto_select: Inductor with its own choice of symmetric-memory all-reduces.
symm_mem: torch's one-shot and two-shot all-reduces in the place of every all-reduce. one_shot_norm: layers by hand,
with one kernel for each all-reduce and its norm. grouped: the same, with torch's grouped matmul for the experts of few
tokens too. fused: experts in a tuned Triton kernel as serving engines have it (`rivals/fused_experts.py`).
one_shot_fused: one_shot_norm with them. dispatched: experts whole on one rank each, to which tokens are sent
(`dispatched.py`).
"""
WITHOUT_COPIES = ("grouped", "fused", "one_shot_fused")
"""Those whose experts of few tokens read the weights where they are; the others copy them for each token."""
TUNED = ("max_autotune", "max_autotune_select")
"""Those that time kernels while they compile."""
LIMIT = "limit"
"""No contestant: a rank's share alone, without communication (`alone.py`), through Inductor."""
TITLES = {
    "eager": "eager",
    "inductor": "Inductor",
    "max_autotune": "Inductor, max-autotune",
    "max_autotune_select": "Inductor, max-autotune, auto-select",
    "overlap": "Inductor + overlap",
    "registered": "Inductor, registered buffers",
    "auto_select": "Inductor, auto-select",
    "symm_mem": "Inductor + symm_mem",
    "one_shot_norm": "one-shot + norm",
    "grouped": "one-shot + norm, grouped experts",
    "fused": "Inductor, fused experts in Triton",
    "one_shot_fused": "one-shot + norm, fused experts in Triton",
    "dispatched": "Inductor, tokens sent to experts",
    "async_tp": "Inductor + async TP",
    "ditron": "Ditron",
    UNTABLED: "Ditron, no table",
    "ditron:planned": "Ditron, no trials",
    LIMIT: "limit",
}


@dataclass(frozen=True)
class Barred:
    """A contestant that is not run again in a cell, all of them if it is empty, and why. cell: None for every cell."""

    cell: int | None
    contestant: str
    why: str


@dataclass(frozen=True)
class Request:
    """One run. budget_s: seconds that it may take; cell_limit_s: that one cell may, or its processes are ended.
    rounds: most samples of a contestant in one run of a cell; repeats: runs of a cell, whose median is recorded. out:
    the CSV that rows are merged into. first: the number of the cell to begin with; journal: the file that says what
    the ranks are at. architectures: of all the cells' models. graph: prefill inside CUDA graphs too.
    limit: each cell's limit too. turns: the folder by which runs on the same GPUs take turns, see `benchmarks.turns`.
    """

    cells: tuple[Cell, ...]
    device: str
    architectures: Mapping[str, Architecture] = field(default_factory=dict)
    contestants: tuple[str, ...] = CONTESTANTS
    budget_s: float = 500.0
    cell_limit_s: float = 120.0
    rounds: int = 10
    repeats: int = 1
    out: str = ""
    commit: str = ""
    graph: bool = False
    limit: bool = False
    missing: bool = False
    turns: str = ""
    first: int = 0
    barred: tuple[Barred, ...] = ()
    journal: str = ""
