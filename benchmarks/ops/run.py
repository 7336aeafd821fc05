"""The ranks' side of `python -m benchmarks.ops`: join, run cell after cell within the budget, hand rows to rank 0."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.comparison import comparisons, ratios_table, times_table
from benchmarks.ops import (
    all_gather_matmul,
    all_to_all_matmul,
    matmul_all_gather,
    matmul_all_reduce,
    matmul_all_to_all,
    matmul_reduce_scatter,
    targets,
)
from benchmarks.ops.check import Check
from benchmarks.ops.contest import (
    CONTESTANTS,
    LINK_BYTES_PER_S,
    OURS_ON_GPUS,
    Contest,
    Setting,
    SymmetricBuffer,
    wanted,
    world_group_name,
)
from benchmarks.ops.estimate import cells_seconds, graph_calls
from benchmarks.ops.request import Request
from benchmarks.ops.shapes import Cell
from benchmarks.progress import Progress
from benchmarks.records import Row, merge_csv, results_of
from benchmarks.session import Session
from benchmarks.timing import Times, interleaved, median_of_runs
from benchmarks.trying import TRYING, trying
from ditron_inductor.lowering.register import register
from ditron_inductor.report.timing import Call, captured
from ditron_inductor.task import trial
from ditron_inductor.task.plan import decisions

CONTESTS: dict[str, Callable[[Setting, Cell], Contest]] = {
    module.__name__.rpartition(".")[2]: module.contest
    for module in (
        all_gather_matmul,
        matmul_reduce_scatter,
        matmul_all_reduce,
        matmul_all_gather,
        matmul_all_to_all,
        all_to_all_matmul,
    )
}
"""By node kind, after which the module is named."""
Ready = dict[str, Call]


class Run(Session):
    """One run of the benchmark on this rank."""

    def __init__(self, request: Request, device: torch.device, begun: float) -> None:
        super().__init__(device, begun)
        self.request = request
        self.wanted = wanted(request)
        group_name = world_group_name()
        shared = SymmetricBuffer(group_name)
        self.setting = Setting(device, dist.get_rank(), dist.get_world_size(), group_name, shared)
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self._shape: Cell | None = None
        self._contest: tuple[Contest, Check] | None = None

    def run(self) -> None:
        """All cells; results are written after each, so a run that is cut short keeps what it has."""
        if self.setting.has_symmetric_memory:
            import torch.distributed._symmetric_memory as symm_mem

            # Async TP silently does nothing without this deprecated call.
            symm_mem.enable_symm_mem_for_group(self.setting.group_name)
        cells = self.request.selection.cells(self.setting.world_size, self.setting.device.type)
        progress = Progress(cells_seconds(self.request, cells, self.setting.world_size))
        self.phases.add("start", self.seconds())
        for number, cell in enumerate(cells):
            before = self.seconds()
            self.say(f"{progress.text()}: {cell.text}")
            if before + progress.expected(number) > self.request.budget_s:
                # A smaller cell further down may still fit.
                self.note(cell, "all", f"skipped: {before:.0f} s of {self.request.budget_s:.0f} s are spent")
                progress.finish(number, None)
                continue
            self.run_cell(cell)
            if self.rank == 0 and self.request.out:
                merge_csv(Path(self.request.out), self.rows)
            progress.finish(number, self.seconds() - before)
        self.close()

    def note(self, cell: Cell, contestant: str, why: str) -> None:
        """Why something has no number."""
        self.notes.append(f"{cell.text}: {contestant}: {why}")
        self.say(f"    {contestant}: {why}")

    def of(self, cell: Cell) -> Setting:
        """The place of the contest of a cell."""
        return replace(self.setting, cell=cell.shape)

    def open(self, cell: Cell) -> tuple[Contest, Check]:
        """The contest of the cell's shape and its expected result, made once for both modes."""
        shape = replace(cell, graph=False)
        if self._contest is None or self._shape != shape:
            self.close()
            with self.phases.phase("operands"):
                contest = CONTESTS[cell.op](self.of(cell), cell)
            with self.phases.phase("expected result"):
                self._contest = contest, Check(contest)
            self._shape = shape
        return self._contest

    def close(self) -> None:
        """Free what the last cell took."""
        if self._contest is not None:
            self._contest = None
            gc.collect()
            if self.setting.device.type == "cuda":
                torch.cuda.empty_cache()

    def run_cell(self, cell: Cell) -> None:
        """Check every contestant, time those that are right, check them again, record all of them."""
        contest, check = self.open(cell)
        ready: Ready = {}
        failed = {name: why for name, why in contest.unable.items() if name in self.wanted}
        for name in contest.contestants:
            if name in self.wanted:
                problem = self.prepare(cell, contest, check, name, ready)
                if problem:
                    failed[name] = problem
                    if name in OURS_ON_GPUS:
                        self.recover(name)
        per_call = graph_calls(cell, self.setting.world_size) if cell.graph else 1
        runs = []
        for _ in range(self.request.repeats):
            with self.phases.phase("timing"):
                runs.append(interleaved(self.clock, ready, per_call, self.request.rounds))
        times = median_of_runs(runs)
        with self.phases.phase("checks"):
            for name in list(times):
                problem = self.first_problem("" if name == "gemm" else check.problem(ready[name](0)))
                if problem:
                    failed[name] = f"after the timing: {problem}"
                    del times[name]
        for name, problem in failed.items():
            self.note(cell, name, problem)
        self.record(cell, contest, times, failed)

    def prepare(self, cell: Cell, contest: Contest, check: Check, name: str, ready: Ready) -> str:
        """Put a contestant whose result is right, on all ranks, into `ready`; else return what is wrong."""
        call: Call = contest.contestants[name]
        # Before it is timed or captured, what tries several strategies has decided.
        tries = trial.ALL_CALLS if name in TRYING and self.setting.device.type == "cuda" else 0

        def first_calls() -> torch.Tensor:
            for _ in range(tries):
                call(0)
            return call(0)

        with trying(name):
            result, problem = self.attempt(f"first calls: {name}", first_calls)
        if not problem and cell.graph:
            per_call = graph_calls(cell, self.setting.world_size)
            replay, problem = self.attempt("captures", lambda: captured(call, per_call))
            if problem:
                return f"cannot be captured: {problem}"
            call = replay
            result, problem = self.attempt("captures", lambda: replay(0))
        if problem:
            return problem
        with self.phases.phase("checks"):
            problem = self.first_problem("" if name == "gemm" else check.problem(result))
        if not problem:
            ready[name] = call
        return problem

    def record(self, cell: Cell, contest: Contest, times: dict[str, Times], failed: dict[str, str]) -> None:
        """Rows of all contestants of the cell, without times for those that failed."""
        limit = contest.link_bytes / LINK_BYTES_PER_S * 1e6 if self.setting.device.type == "cuda" else None
        if limit is not None:
            # Without the matmul alone there is no limit.
            limit = max(limit, times["gemm"].p50_us) if "gemm" in times else None
        self.rows += self.rows_of(
            {name: times.get(name) for name in CONTESTANTS if name in times or name in failed},
            bench=results_of((cell.op,)).stem,
            op=cell.op,
            shape=cell.shape,
            dtype=cell.dtype,
            graph=cell.graph,
            limit_us=limit,
            commit=self.request.commit,
        )
        self.say("    " + "  ".join(f"{name} {each.p50_us:.1f}" for name, each in times.items()))
        if not cell.graph:
            self.say("    host us per call: " + "  ".join(f"{name} {each.host_us:.1f}" for name, each in times.items()))
        for name in TRYING:
            last = decisions.last(self.setting.group_name, self.of(cell).site(cell.op, name))
            if name in times and last is not None:
                self.say(f"    {name} ran {last[1].strategy}: {last[1].reason}")


def report(run: Run) -> str:
    """Returns the text that a run prints at its end."""
    cells = comparisons(run.rows)
    parts = ["microseconds per call", times_table(cells), "", "ratios", ratios_table(cells, targets.column(cells))]
    verdicts = targets.summary(cells)
    if verdicts:
        parts += ["", "targets", *(f"{verdict:12} {op}, {row}: {text}" for op, row, text, verdict in verdicts)]
    parts += ["", *(f"no number: {note}" for note in run.notes)]
    parts += ["", f"where the time went, on rank 0 ({run.request.budget_s:.0f} s allowed)", run.phases.table()]
    return "\n".join(parts)


def main(request: Request, device: torch.device, begun: float) -> bool:
    """Run as a rank of the default group, on `device`. begun: when the process started, by the monotonic clock.

    The process is to end without destroy_process_group, which can hang where graphs hold collectives of NCCL.
    """
    # 2.13 has new names for collectives that 2.11 has not.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    register()
    run = Run(request, device, begun)
    run.run()
    if run.setting.rank == 0:
        print(report(run), flush=True)
    dist.barrier(group=run.control)
    return True
