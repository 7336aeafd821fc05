"""The ranks' side of `python -m benchmarks.models`: build, compile, check (`gate`), time, hand rows to rank 0.

Rows and facts are written after every cell. Before each part of a cell rank 0 notes in the journal what comes next:
when the ranks die or hang there, the parent (`supervise`) knows what to leave out, and starts new ones for the rest.
"""

from __future__ import annotations

import datetime
import faulthandler
import gc
import json
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.models import alone, forms
from benchmarks.models.architecture import Architecture, Decoder
from benchmarks.models.contestants import COMPILERS, Compiler, Step, in_form, step_of
from benchmarks.models.estimate import cell_s
from benchmarks.models.facts import ALL, Fact, merge_facts, path_of
from benchmarks.models.gate import WIDER, Gate, Parts, collected, copied, parts_step
from benchmarks.models.request import CONTESTANTS, LIMIT, OURS, TUNED, Request
from benchmarks.models.zoo import Cell
from benchmarks.progress import Progress
from benchmarks.records import Row, merge_csv, read_csv
from benchmarks.rivals.registered import IN_GRAPHS
from benchmarks.session import Session
from benchmarks.timing import interleaved, median_of_runs, synchronize
from benchmarks.trying import TRYING, trying
from benchmarks.turns import Turns
from ditron_inductor.device.registry import workspaces
from ditron_inductor.report.explain import without_caches
from ditron_inductor.report.timing import Call, captured
from ditron_inductor.task import trial
from ditron_inductor.task.site_records import SiteSink, collect_sites

DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}
GRAPH_CALLS = 4
STEPS = 4
"""Of a sample outside CUDA graphs, at least, one after the other as where a model trains or serves: the host may be
ahead by more than a kernel.
"""
TIMING = "timing"
TIMING_SHARE = 0.5
"""Of a cell's limit, at most, for its rounds."""
MIB = float(1 << 20)


class Run(Session):
    """One run on this rank. compilers: by contestant, instead of the usual ones."""

    def __init__(
        self, request: Request, device: torch.device, begun: float, compilers: Mapping[str, Compiler] = COMPILERS
    ) -> None:
        super().__init__(device, begun)
        self.request = request
        self.compilers = compilers
        self.dtype = DTYPE[device.type]
        self.rows: list[Row] = []
        self.facts: list[Fact] = []
        self.mesh = init_device_mesh(device.type, (self.world_size,))
        self._built: tuple[tuple[Any, ...], Decoder] | None = None
        self._turns = Turns(request.turns) if request.turns else None

    def run(self) -> None:
        """All cells; results are written after each, so a run that is cut short keeps what it has."""
        request, cells = self.request, self.request.cells
        progress = Progress([cell_s(request, cell, self.world_size) for cell in cells])
        present = self.agree(self._present() if self.rank == 0 else None)[0]
        for number, cell in enumerate(cells):
            before = self.seconds()
            measured = all(cell.shape in present.get((cell.phase, mode), ()) for mode in self.modes(cell))
            if number < request.first or measured:
                progress.finish(number, None)
                continue
            self.say(f"{progress.text()}: {cell.text}")
            why = self.barred(number, "") or self.too_late(progress.expected(number), before)
            if why:
                self.skip(cell, why)
                progress.finish(number, None)
                continue
            self.note_journal(number, "")
            self.limit(request.cell_limit_s)
            self.take_turn(alone=False)
            self.run_cell(number, cell)
            self.take_turn(alone=None)
            self.limit(None)
            self.write()
            progress.finish(number, self.seconds() - before)
        self.note_journal(len(cells), "")

    def take_turn(self, *, alone: bool | None) -> None:
        """Waits until the machine is this run's alone, or is shared by runs that do not time; None: leaves it. Without
        `Request.turns` there is nothing to wait for. A cell has its time from its latest turn on. Collective.
        """
        if self._turns is None:
            return
        synchronize(self.clock)
        self.limit(None)
        self.agree(None)
        if self.rank == 0 and alone is None:
            self._turns.leave()
        elif self.rank == 0:
            self._turns.take(alone=bool(alone))
        self.agree(None)
        self.limit(None if alone is None else self.request.cell_limit_s)

    def too_late(self, expected_s: float, spent_s: float) -> str:
        """Why a cell is not begun, equal on all ranks; empty where there is time for it."""
        if spent_s + expected_s <= self.request.budget_s:
            return ""
        left = max(0.0, self.request.budget_s - spent_s)
        return f"skipped: about {expected_s:.0f} s, and {left:.0f} s of {self.request.budget_s:.0f} s are left"

    def barred(self, number: int, contestant: str) -> str:
        """Why a contestant, or with none all of a cell, is not run again; empty where it is."""
        found = (one for one in self.request.barred if one.cell in (number, None) and one.contestant == contestant)
        return next((one.why for one in found), "")

    def _present(self) -> dict[tuple[str, bool], set[str]]:
        """By op and mode, the shapes that the results have of this machine and commit, if those are to be left out.
        Where limits are wanted, those with one.
        """
        found: dict[tuple[str, bool], set[str]] = {}
        if self.request.missing:
            example = self.row(
                bench="models",
                op="",
                contestant="",
                shape="",
                dtype=self._dtype_name,
                graph=False,
                measured=None,
                limit_us=None,
                commit=self.request.commit,
            )
            for row in read_csv(Path(self.request.out)):
                same = ("gpu", "world", "dtype", "torch", "commit")
                complete = row.limit_us is not None or not self.request.limit
                if complete and all(getattr(row, name) == getattr(example, name) for name in same):
                    found.setdefault((row.op, bool(row.graph)), set()).add(row.shape)
        return found

    @property
    def _dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def limit(self, seconds: float | None) -> None:
        """End this process after so many seconds, with a word about where it was; None: no longer."""
        if not self.request.journal:
            return
        if seconds is None:
            faulthandler.cancel_dump_traceback_later()
        else:
            faulthandler.dump_traceback_later(seconds, exit=True)

    def note_journal(self, number: int, what: str) -> None:
        """What comes next, for the parent."""
        if self.rank == 0 and self.request.journal:
            with Path(self.request.journal).open("a") as file:
                file.write(json.dumps([number, what]) + "\n")

    def write(self) -> None:
        """Everything so far."""
        if self.rank == 0 and self.request.out:
            merge_csv(Path(self.request.out), self.rows)
            merge_facts(path_of(Path(self.request.out)), self.facts)

    def skip(self, cell: Cell, why: str) -> None:
        """A cell that is not begun."""
        self.say(f"    {why}")
        self.facts.append(self.fact(cell, ALL, why=why))
        self.write()

    def fact(
        self,
        cell: Cell,
        contestant: str,
        *,
        compile_s: float | None = None,
        peak_mib: float | None = None,
        workspace_mib: float | None = None,
        fused: str = "",
        why: str = "",
        graph: bool = False,
    ) -> Fact:
        """What belongs to a contestant here and today. graph: inside a CUDA graph, as some phases are anyway."""
        gpu = torch.cuda.get_device_name() if self.clock.device.type == "cuda" else "cpu"
        measured = (compile_s, peak_mib, workspace_mib)
        words = (fused, why, self.request.commit, datetime.date.today().isoformat())
        place = (cell.phase, cell.shape, self._dtype_name, self.world_size, int(graph or self.captures(cell)), gpu)
        return Fact(*place, contestant, *measured, *words)

    def model(self, cell: Cell) -> Decoder:
        """The cell's model, cut over the ranks, with the same random weights in every run."""
        key = (cell.model, cell.layers, cell.form, (cell.batch, cell.cache) if cell.cache else ())
        if self._built is None or self._built[0] != key:
            self._built = None
            self.free()
            self._built = key, self.made(lambda: forms.build(self.architecture(cell), cell, self.mesh))
        return self._built[1]

    def made(self, build: Callable[[], Decoder]) -> Decoder:
        """A model on this rank's device, in this run's dtype."""
        with self.phases.phase("models"), self.clock.device:
            before = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            try:
                return build()
            finally:
                torch.set_default_dtype(before)

    def architecture(self, cell: Cell) -> Architecture:
        return self.request.architectures[cell.model]

    def free(self) -> None:
        """Give back memory that nothing holds any more."""
        gc.collect()
        if self.clock.device.type == "cuda":
            torch.cuda.empty_cache()

    def run_cell(self, number: int, cell: Cell) -> None:
        """Check every contestant, time those that are right, record all of them."""
        torch._dynamo.reset()
        # All contestants compile the same code, some of them more than once.
        torch._dynamo.config.recompile_limit = 4 * len(CONTESTANTS)
        self.free()
        begun = time.monotonic()
        operands, problem = self.attempt("models", lambda: (self.model(cell), self.inputs(cell)))
        if problem or operands is None:
            self.skip(cell, problem)
            return
        model, given = operands
        gate, problem = self.attempt("reference", lambda: self.gate(cell, model, given))
        problem = problem or self.first_problem(gate.of_eager())
        if problem:
            self.skip(cell, f"eager: {problem}")
            return
        self.free()
        ready: dict[str, Call] = {}
        failed: list[str] = []
        for name in self.order(number):
            self.take_turn(alone=name in TUNED)
            barred = self.barred(number, name)
            why = cell.left_out(name, self.architecture(cell)) or barred
            if why:
                self.facts.append(self.fact(cell, name, why=why))
                failed += [name] * (why == barred)
                continue
            self.note_journal(number, name)
            problem = self.prepare(cell, name, model, given, gate, ready)
            if problem:
                failed.append(name)
                self.say(f"    {name}: {problem}")
                self.after_failure(name)
        if self.request.limit and (why := self.barred(number, LIMIT)):
            self.facts.append(self.fact(cell, LIMIT, why=why))
        elif self.request.limit:
            self.note_journal(number, LIMIT)
            self.prepare_limit(cell, given, ready)
        for name in list(ready):
            problem = self.settled(ready[name])
            if problem:
                del ready[name]
                self.fail(cell, name, problem, failed)
        self.note_journal(number, TIMING)
        self.take_turn(alone=True)
        if self._turns is not None:
            begun = time.monotonic()
        most_s = TIMING_SHARE * (self.request.cell_limit_s - (time.monotonic() - begun))
        self.time(cell, gate, ready, failed, self.captures(cell), most_s)
        if len(self.modes(cell)) > 1:
            self.time(cell, gate, *self.replays(number, cell, ready, gate), True, most_s)

    def time(
        self, cell: Cell, gate: Gate, ready: Mapping[str, Call], failed: list[str], graph: bool, most_s: float
    ) -> None:
        """Record the times of what is `ready` and still right after the timing, and that others have `failed`. graph:
        each call is GRAPH_CALLS steps.
        """
        runs = []
        for _ in range(self.request.repeats if ready else 0):
            with self.phases.phase(TIMING):
                per_call, least_calls = (GRAPH_CALLS, 1) if graph else (1, STEPS)
                ordered, rounds = self.ordered(ready), self.request.rounds
                runs.append(interleaved(self.clock, ordered, per_call, rounds, most_s, least_calls))
        times = median_of_runs(runs) if runs else {}
        for name in [name for name in times if name != LIMIT]:
            problem = self.problem_afterwards(gate, ready[name])
            if problem:
                self.say(f"    {name}: {problem}")
                del times[name]
                self.fail(cell, name, problem, failed, graph)
        self.rows += self.rows_of(
            {name: times.get(name) for name in CONTESTANTS if name in times or name in failed},
            bench="models",
            op=cell.phase,
            shape=cell.shape,
            dtype=self._dtype_name,
            graph=graph,
            limit_us=times[LIMIT].p50_us if LIMIT in times else None,
            commit=self.request.commit,
        )
        where = "    in graphs: " if graph != self.captures(cell) else "    "
        self.say(where + "  ".join(f"{name} {each.p50_us:.0f}" for name, each in times.items()) + " us")

    def fail(self, cell: Cell, name: str, problem: str, failed: list[str], graph: bool = False) -> None:
        """Notes that a contestant has no time, and why, beside what is known of it. Raises as `after_failure` does."""
        why = self.fact(cell, name, graph=graph, why=problem)
        for place, known in enumerate(self.facts):
            if (known.cell, known.contestant) == (why.cell, name):
                self.facts[place] = replace(known, why=problem)
                break
        else:
            self.facts.append(why)
        failed.append(name)
        self.after_failure(name)

    def problem_afterwards(self, gate: Gate, call: Call) -> str:
        """What is wrong with a call after it was timed among the others: it may have lost memory that it reads."""
        got, problem = self.attempt("checks", lambda: call(0))
        problem = problem or self.first_problem(gate.problem(got))
        return problem and f"after the timing: {problem}"

    def replays(
        self, number: int, cell: Cell, ready: Mapping[str, Call], gate: Gate
    ) -> tuple[dict[str, Call], list[str]]:
        """The steps inside CUDA graphs, of those that are right there, and who has none."""
        found: dict[str, Call] = {}
        failed: list[str] = []
        for name, call in ready.items():
            if name == "registered":
                self.facts.append(self.fact(cell, name, graph=True, why=IN_GRAPHS))
                continue
            self.note_journal(number, name)
            replay, got, problem = self.capture(call)
            if not problem and name != LIMIT:
                problem = self.first_problem(gate.problem(got))
            if problem:
                self.fail(cell, name, problem, failed, graph=True)
            else:
                found[name] = replay
        self.note_journal(number, TIMING)
        return found, failed

    def capture(self, call: Call) -> tuple[Any, Any, str]:
        """A replay of GRAPH_CALLS calls, what it computes, and what went wrong."""
        replay, problem = self.attempt("captures", lambda: captured(call, GRAPH_CALLS))
        if problem or replay is None:
            return None, None, f"cannot be captured: {problem}"
        got, problem = self.attempt("captures", lambda: replay(0))
        return replay, got, problem

    def order(self, number: int) -> list[str]:
        """Contestants in turn: whoever compiles first finds fewest kernels in Triton's cache on disk."""
        names = [name for name in CONTESTANTS if name in self.request.contestants]
        eager, others = [name for name in names if name == "eager"], [name for name in names if name != "eager"]
        return eager + others if number % 2 == 0 else eager + others[::-1]

    def ordered(self, ready: Mapping[str, Call]) -> dict[str, Call]:
        return {name: ready[name] for name in (*CONTESTANTS, LIMIT) if name in ready}

    def captures(self, cell: Cell) -> bool:
        return cell.graph and self.clock.device.type == "cuda"

    def modes(self, cell: Cell) -> tuple[bool, ...]:
        """Whether a cell is timed inside a CUDA graph, outside, or first outside and then inside."""
        on_gpu = self.clock.device.type == "cuda"
        as_well = self.request.graph and cell.phase == "prefill" and on_gpu
        return (False, True) if as_well else (self.captures(cell),)

    def after_failure(self, name: str) -> None:
        """Make the next contestant's start a fresh one. Raises where the device itself has failed: then only new
        processes help.
        """
        self.free()
        if self.clock.device.type == "cuda":
            torch.cuda.synchronize()
        if name in OURS:
            self.recover(name)

    def prepare(
        self,
        cell: Cell,
        name: str,
        model: Decoder,
        given: tuple[Any, ...],
        gate: Gate,
        ready: dict[str, Call],
    ) -> str:
        """Compile a contestant and put it into `ready` if it is right on all ranks, else return what is wrong."""
        begun = time.monotonic()
        step, problem = self.attempt(
            f"compiler: {name}", lambda: step_of(cell.phase, name, self.compilers[name], model, given)
        )
        if problem or step is None:
            self.facts.append(self.fact(cell, name, why=problem))
            return problem
        with trying(name):
            with without_caches(), collect_sites() as sink:
                got, problem = self.attempt(f"first call: {name}", step)
            (seconds,) = self.clock.largest([time.monotonic() - begun])
            text = sites_text(sink) if name in OURS else ""
            if text:
                self.say(f"    fused: {text}")
            if not problem and name in TRYING:
                # A capture takes what was decided before it, and no trial is to be timed.
                self.take_turn(alone=True)
                _, problem = self.attempt("trials", lambda: make_steps(step, trial.ALL_CALLS))
                self.tell_trials()
        self.take_turn(alone=False)
        call: Call = lambda index: step()  # noqa: E731
        peak: float | None = None
        if not problem:
            peak, problem = self.peak_mib(step)
        if self.captures(cell) and not problem:
            call, got, problem = self.capture(call)
        if not problem and got is not None:
            with self.phases.phase("checks"):
                problem = self.first_problem(gate.problem(got))
        del got
        if not problem and cell.phase != "training":
            problem = self.problem_of_parts(cell, gate, self.checked(cell, name, self.compilers[name], model, given))
        if not problem:
            ready[name] = call
        workspace = self.workspace_mib() if name in OURS else None
        compile_s = seconds if name != "eager" and self._turns is None else None
        facts = {"compile_s": compile_s, "peak_mib": peak, "workspace_mib": workspace}
        self.facts.append(self.fact(cell, name, **facts, fused=text, why=problem))
        return problem

    def problem_of_parts(self, cell: Cell, gate: Gate, checked: Step) -> str:
        """What is wrong with a step that returns all parts; where the cell is timed in a graph, also in its replay."""
        parts, problem = self.attempt("checks", checked)
        problem = problem or self.first_problem(gate.problem(parts))
        if self.captures(cell) and not problem:
            _, parts, problem = self.capture(lambda index: checked())
            problem = problem or self.first_problem(gate.problem(parts))
            problem = problem and f"in a replay: {problem}"
        return problem

    def prepare_limit(self, cell: Cell, given: tuple[Any, ...], ready: dict[str, Call]) -> None:
        """Put into `ready` a rank's share alone, through Inductor. Nothing is compared with it."""
        arch = self.architecture(cell)
        step, problem = self.attempt("models", lambda: self.alone(arch, cell, given))
        if not problem and step is not None:
            _, problem = self.attempt(f"first call: {LIMIT}", step)
        call: Call = lambda index: step()  # noqa: E731
        if self.captures(cell) and not problem:
            call, _, problem = self.capture(call)
        if problem:
            self.say(f"    {LIMIT}: {problem}")
            self.facts.append(self.fact(cell, LIMIT, why=problem))
        else:
            ready[LIMIT] = call

    def alone(self, arch: Architecture, cell: Cell, given: tuple[Any, ...]) -> Step:
        """A step of a rank's share."""
        model = self.made(lambda: alone.build(arch, cell, self.world_size, self.rank))
        return step_of(cell.phase, LIMIT, self.compilers["inductor"], model, given)

    def settled(self, call: Call) -> str:
        """What is wrong with a further call, now that all are compiled: a compilation would be timed with it."""
        with torch._dynamo.config.patch(error_on_recompile=True):
            return self.attempt("further calls", lambda: call(0))[1]

    def peak_mib(self, step: Step) -> tuple[float | None, str]:
        """Most memory of a step of any rank, and what went wrong in it. None without a GPU."""
        if self.clock.device.type != "cuda":
            return None, ""
        torch.cuda.reset_peak_memory_stats()
        _, problem = self.attempt("memory", step)
        (peak,) = self.clock.largest([torch.cuda.max_memory_allocated() / MIB])
        return peak, problem

    def workspace_mib(self) -> float:
        """What Ditron holds of this group."""
        assert dist.group.WORLD is not None
        return sum(shared.nbytes() for shared in workspaces.of_group(dist.group.WORLD)) / MIB

    def gate(self, cell: Cell, model: Decoder, given: tuple[Any, ...]) -> Gate:
        """What the contestants are compared with."""
        wider = WIDER[self.dtype]
        # It is cut before it is widened: all weights of many experts in a wider dtype would not fit beside the model.
        wide = self.made(lambda: forms.build(self.architecture(cell), cell, self.mesh)).to(wider)
        wide = copied(wide, model)
        operands = tuple(one.to(wider) if one is not None else None for one in given)
        wanted = collected(self.checked(cell, "reference", lambda part: part, wide, operands))
        del wide
        eager = self.checked(cell, "eager", self.compilers["eager"], model, given)()
        return Gate(wanted, eager, self.dtype, self.agree)

    def checked(self, cell: Cell, name: str, compiler: Compiler, model: Decoder, given: tuple[Any, ...]) -> Step:
        """A step that computes all that is compared: of a forward every part of every layer."""
        if cell.phase == "training":
            return step_of(cell.phase, name, compiler, model, given)
        return parts_step(in_form(name, compiler, Parts(model)), given)

    def inputs(self, cell: Cell) -> tuple[Any, ...]:
        """Returns the inputs of this rank; see `forms.inputs`."""
        arch, device = self.architecture(cell), self.clock.device
        return forms.inputs(arch, cell, self.rank, self.world_size, device, self.dtype)


def make_steps(step: Step, times: int) -> None:
    """Makes so many steps, and keeps none of their results: they would count as memory of the next step."""
    for _ in range(times):
        step()


def sites_text(sink: SiteSink) -> str:
    """Sites by kind, those that were left alone with their reason's code."""
    sites = [site for graph in sink.graphs for site in graph.sites]
    fused = Counter(site.kind for site in sites if site.matched)
    alone = Counter(f"{site.kind} left alone ({site.reason_code})" for site in sites if not site.matched)
    return ", ".join(f"{count} {kind}" for kind, count in (fused + alone).items()) or "nothing"


def main(request: Request, device: torch.device, begun: float, compilers: Mapping[str, Compiler] = COMPILERS) -> bool:
    """Run as a rank of the default group, on `device`; see benchmarks.ops.run.main."""
    # 2.13 has new names for collectives that 2.11 has not.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*all_gather_tensor")
    if device.type == "cuda":
        import torch.distributed._symmetric_memory as symm_mem

        assert dist.group.WORLD is not None
        # Async TP silently does nothing without this deprecated call.
        symm_mem.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    run = Run(request, device, begun, compilers)
    run.phases.add("start", run.seconds())
    run.run()
    if run.rank == 0:
        print(f"\nwhere the time went, on rank 0 ({request.budget_s:.0f} s allowed)\n{run.phases.table()}", flush=True)
    dist.barrier(group=run.control)
    return True
