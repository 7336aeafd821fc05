"""The ranks' side of `python -m benchmarks.ops`: join, run cell after cell within the budget, hand rows to rank 0."""

from __future__ import annotations

import datetime
import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton

import ditron_inductor
import ditron_inductor.errors
from benchmarks.ops import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from benchmarks.ops.contest import LINK_BYTES_PER_S, Contest, Setting, world_group_name
from benchmarks.ops.shapes import SETS, Cell
from benchmarks.records import Row, merge_csv, table
from benchmarks.timing import Clock, Times, capture, interleaved
from tests.tolerances import assert_near

CONTESTS = {
    "all_gather_matmul": all_gather_matmul.contest,
    "matmul_reduce_scatter": matmul_reduce_scatter.contest,
    "matmul_all_reduce": matmul_all_reduce.contest,
}
STRATEGIES = {"ditron": "auto", "ditron:tile": "tile", "ditron:library": "library"}
NAMES = ("gemm", "nccl", "gloo", "async_tp", "symm_mem:one_shot", "symm_mem:two_shot", *STRATEGIES)
GRAPH_CALLS = 10
# Before anything is known about how long a cell takes.
FIRST_CELL_S = 10.0


@dataclass(frozen=True)
class Request:
    """What the command line asked for. `only`: names of contestants, all of them when empty."""

    ops: tuple[str, ...]
    shapes: str
    world_size: int
    device: str
    only: tuple[str, ...]
    graph: str
    budget_s: float
    rounds: int
    out: str
    commit: str


class Run:
    """One run on this rank."""

    def __init__(self, request: Request, device: torch.device, begun: float) -> None:
        self.request = request
        self.begun = begun
        self.setting = Setting(device, dist.get_rank(), dist.get_world_size(), world_group_name())
        self.clock = Clock(device)
        # Words between the ranks travel apart from what is measured.
        self.control = dist.new_group(backend="gloo")
        self.rows: list[Row] = []
        self.notes: list[str] = []

    def say(self, text: str) -> None:
        """Progress, from one rank."""
        if self.setting.rank == 0:
            print(f"[{time.monotonic() - self.begun:6.1f} s] {text}", file=sys.stderr, flush=True)

    def agree(self, value: Any) -> list[Any]:
        """Every rank's value."""
        values: list[Any] = [None] * self.setting.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def cells(self) -> list[Cell]:
        """The cells asked for, as `--graph` wants them."""
        chosen = []
        for op in self.request.ops:
            for cell in SETS[self.request.shapes](op, self.setting.world_size):
                if self.request.graph == "as_listed" or self.setting.device.type != "cuda":
                    chosen.append(cell)
                for graph in {"eager": (False,), "graph": (True,), "both": (False, True)}.get(self.request.graph, ()):
                    chosen.append(Cell(cell.op, cell.M, cell.N, cell.K, graph, cell.dtype))
        return chosen

    def run(self) -> None:
        """All cells; results are written after each, so a run that is cut short keeps what it has."""
        if self.setting.has_symmetric_memory:
            import torch.distributed._symmetric_memory as symm_mem

            # Async TP silently does nothing without this deprecated call.
            symm_mem.enable_symm_mem_for_group(self.setting.group_name)
        longest = FIRST_CELL_S
        for cell in self.cells():
            spent = max(self.agree(time.monotonic() - self.begun))
            if spent + longest > self.request.budget_s:
                self.note(cell, "all", f"skipped: {spent:.0f} s of {self.request.budget_s:.0f} s are spent")
                continue
            self.run_cell(cell)
            longest = max(longest / 2, max(self.agree(time.monotonic() - self.begun)) - spent)
            if self.setting.rank == 0:
                merge_csv(Path(self.request.out), self.rows)

    def note(self, cell: Cell, contestant: str, why: str) -> None:
        """Why something has no number."""
        mode = "graph" if cell.graph else "eager"
        self.notes.append(f"{cell.op} {cell.shape} {cell.dtype} {mode}: {contestant}: {why}")
        self.say(self.notes[-1])

    def run_cell(self, cell: Cell) -> None:
        """Check every contestant, time those that are right, record all of them."""
        self.say(f"{cell.op} {cell.shape} {cell.dtype}{' in a graph' if cell.graph else ''}")
        contest = CONTESTS[cell.op](self.setting, cell, STRATEGIES)
        strategies = {name: value for name, value in contest.contestants.items() if name in self.wanted()}
        contest.contestants = strategies
        assert contest.reference is not None
        wanted = contest.reference()
        ready: dict[str, Callable[[int], object]] = {}
        failed: list[str] = []
        for name in contest.contestants:
            problem = self.prepare(contest, name, wanted, cell.graph, ready)
            if problem:
                self.note(cell, name, problem)
                failed.append(name)
        del wanted
        per_call = GRAPH_CALLS if cell.graph else 1
        times = interleaved(self.clock, ready, per_call, self.request.rounds)
        self.record(cell, contest, times, failed)
        ready.clear()
        del contest
        gc.collect()
        if self.setting.device.type == "cuda":
            torch.cuda.empty_cache()

    def wanted(self) -> tuple[str, ...]:
        """The names of the contestants to run."""
        return self.request.only or NAMES

    def prepare(
        self, contest: Contest, name: str, wanted: torch.Tensor, graph: bool, ready: dict[str, Callable[[int], object]]
    ) -> str:
        """Put a contestant whose result is right, on all ranks, into `ready`; else return what is wrong."""
        call: Callable[[int], object] = contest.contestants[name]
        problem = ""
        try:
            result = contest.contestants[name](0)
            self.clock.synchronize()
            if name != "gemm":
                assert_near(result, wanted, num_partials=contest.num_partials, what=name)
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error).strip()[:300]}"
        problems = [text for text in self.agree(problem) if text]
        if not problems and graph:
            try:
                call = capture(call, GRAPH_CALLS)
            except Exception as error:
                problem = f"capture: {type(error).__name__}: {str(error).strip()[:300]}"
            problems = [text for text in self.agree(problem) if text]
        if problems:
            self.recover(name)
            return problems[0]
        ready[name] = call
        return ""

    def recover(self, name: str) -> None:
        """After a failure of one of our contestants: make the group's workspace usable for the next."""
        if not name.startswith("ditron"):
            return
        try:
            ditron_inductor.reset(dist.group.WORLD)
        except ditron_inductor.errors.DitronError as error:
            self.say(f"reset after {name} failed: {error}")

    def record(self, cell: Cell, contest: Contest, times: dict[str, Times], failed: list[str]) -> None:
        """Rows of all contestants of the cell, without times for those that failed."""
        limit = contest.link_bytes / LINK_BYTES_PER_S * 1e6 if self.setting.device.type == "cuda" else None
        if limit is not None and "gemm" in times:
            limit = max(limit, times["gemm"].p50_us)
        gpu = torch.cuda.get_device_name() if self.setting.device.type == "cuda" else "cpu"
        for name in [*times, *failed]:
            measured = times.get(name)
            self.rows.append(
                Row(
                    bench="gemm_collectives",
                    op=cell.op,
                    contestant=name,
                    shape=cell.shape,
                    dtype=cell.dtype,
                    world=self.setting.world_size,
                    graph=int(cell.graph),
                    p20_us=measured.p20_us if measured else None,
                    p50_us=measured.p50_us if measured else None,
                    p80_us=measured.p80_us if measured else None,
                    skew_pct=measured.skew_pct if measured else None,
                    limit_us=limit,
                    gpu=gpu,
                    torch=torch.__version__,
                    triton=triton.__version__,
                    commit=self.request.commit,
                    date=datetime.date.today().isoformat(),
                )
            )
        self.say("  " + "  ".join(f"{name} {each.p50_us:.1f}" for name, each in times.items()))


def main(request: Request) -> None:
    """Run in a rank whose environment names it (RANK, WORLD_SIZE, MASTER_ADDR, ...); ends the process."""
    begun = time.monotonic()
    rank = int(os.environ["RANK"])
    device = torch.device("cpu")
    if request.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if request.device == "cuda" else "gloo")
    from ditron_inductor.lowering.register import register

    register()
    run = Run(request, device, begun)
    run.run()
    if rank == 0:
        print(table(run.rows, NAMES))
        for note in run.notes:
            print(f"no number: {note}")
    dist.barrier(group=run.control)
    sys.stdout.flush()
    # destroy_process_group can hang where graphs hold collectives of NCCL.
    os._exit(0)
