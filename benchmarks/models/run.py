"""The ranks' side of `python -m benchmarks.models`: build, compile, check against eager, time, hand rows to rank 0."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.models.request import CONTESTANTS, Request
from benchmarks.models.tables import report
from benchmarks.models.zoo import MODELS, Cell
from benchmarks.progress import Progress
from benchmarks.records import Row, merge_csv
from benchmarks.session import Session
from benchmarks.timing import interleaved, median_of_runs
from ditron_inductor.backend import ditron
from ditron_inductor.demo_model import Llama, tensor_parallel
from ditron_inductor.explain import without_caches
from ditron_inductor.task.nodes import KINDS
from ditron_inductor.timing import Call, captured
from tests.tolerances import MODEL_TOLERANCES, relative_error

DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}
GRAPH_CALLS = 4


class Run(Session):
    """One run on this rank."""

    def __init__(self, request: Request, device: torch.device, begun: float) -> None:
        super().__init__(device, begun)
        self.request = request
        self.dtype = DTYPE[device.type]
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self.facts: dict[tuple[str, str], dict[str, Any]] = {}
        self._built: tuple[tuple[str, int, str], nn.Module] | None = None

    def run(self) -> None:
        """All cells; results are written after each, so a run that is cut short keeps what it has."""
        cells = self.request.cells
        progress = Progress([1.0] * len(cells))
        for number, cell in enumerate(cells):
            before = self.seconds()
            self.say(f"{progress.text()}: {cell.text}")
            # The first cell says how long one takes.
            if number and before + progress.expected(number) > self.request.budget_s:
                self.note(cell, "all", f"skipped: {before:.0f} s of {self.request.budget_s:.0f} s are spent")
                progress.finish(number, None)
                continue
            self.run_cell(cell)
            if self.rank == 0 and self.request.out:
                merge_csv(Path(self.request.out), self.rows)
            progress.finish(number, self.seconds() - before)

    def note(self, cell: Cell, contestant: str, why: str) -> None:
        """Why something has no number."""
        self.notes.append(f"{cell.text}: {contestant}: {why}")
        self.say(f"    {contestant}: {why}")

    def model(self, cell: Cell) -> nn.Module:
        """The cell's model, cut over the ranks, with the same random weights in every run."""
        key = cell.model, cell.layers, cell.form
        if self._built is None or self._built[0] != key:
            self._built = None
            if self.clock.device.type == "cuda":
                torch.cuda.empty_cache()
            torch.manual_seed(1)
            mesh = init_device_mesh(self.clock.device.type, (self.world_size,))
            with self.phases.phase("models"), self.clock.device:
                before = torch.get_default_dtype()
                torch.set_default_dtype(self.dtype)
                try:
                    model = Llama(MODELS[cell.model](cell.layers))
                    tensor_parallel(model, mesh, sequence_parallel=cell.form == "sp")
                finally:
                    torch.set_default_dtype(before)
            self._built = key, model
        return self._built[1]

    def run_cell(self, cell: Cell) -> None:
        """Check every contestant against eager, time those that are right, record all of them."""
        torch._dynamo.reset()
        model = self.model(cell)
        x = self.inputs(cell)
        step = _training if cell.phase == "training" else _forward
        eager = step(model, x, cell.tokens)
        wanted = {name: value.clone() for name, value in eager().items()}
        ready: dict[str, Call] = {}
        failed: dict[str, str] = {}
        for name in self.request.contestants:
            if name == "async_tp" and cell.form == "ar":
                continue
            problem = self.prepare(cell, name, model, x, wanted, ready)
            if problem:
                failed[name] = problem
                self.note(cell, name, problem)
        runs = []
        for _ in range(self.request.repeats):
            with self.phases.phase("timing"):
                runs.append(interleaved(self.clock, ready, GRAPH_CALLS if cell.graph else 1, self.request.rounds))
        times = median_of_runs(runs)
        for name in (name for name in CONTESTANTS if name in times or name in failed):
            self.rows.append(
                self.row(
                    bench="models",
                    op=cell.phase,
                    contestant=name,
                    shape=cell.shape,
                    dtype=str(self.dtype).removeprefix("torch."),
                    graph=cell.graph,
                    measured=times.get(name),
                    limit_us=None,
                    commit=self.request.commit,
                )
            )
        self.say("    " + "  ".join(f"{name} {each.p50_us:.0f}" for name, each in times.items()) + " us")

    def prepare(
        self,
        cell: Cell,
        name: str,
        model: nn.Module,
        x: torch.Tensor,
        wanted: dict[str, torch.Tensor],
        ready: dict[str, Call],
    ) -> str:
        """Compile a contestant and put it into `ready` if it is right on all ranks, else return what is wrong."""
        step = _training if cell.phase == "training" else _forward
        torch._dynamo.utils.counters.clear()
        begun = time.monotonic()
        call = step(_compiled(name, model), x, cell.tokens)
        with without_caches():
            got, problem = self.attempt(f"compilation: {name}", call)
        seconds = time.monotonic() - begun
        if problem:
            return problem
        graph_calls: Call = lambda index: call()  # noqa: E731
        if cell.graph and self.clock.device.type == "cuda":
            replay, problem = self.attempt("captures", lambda: captured(graph_calls, GRAPH_CALLS))
            if problem:
                return f"cannot be captured: {problem}"
            got, problem = self.attempt("captures", lambda: replay(0))
            graph_calls = replay
        with self.phases.phase("checks"):
            problem = problem or self.first_problem(_difference(got, wanted, self.dtype))
        if not problem:
            ready[name] = graph_calls
        fused = Counter({kind: torch._dynamo.utils.counters["ditron"][kind] for kind in KINDS})
        self.facts[cell.text, name] = {"seconds": seconds, "fused": +fused}
        if name == "ditron":
            self.say(f"    fused: {', '.join(f'{count} {kind}' for kind, count in (+fused).items()) or 'nothing'}")
        return problem

    def inputs(self, cell: Cell) -> torch.Tensor:
        """Random hidden states: this rank's part of the sequence, or all of it without sequence parallelism."""
        dim = MODELS[cell.model](cell.layers).dim
        torch.manual_seed(2)
        x = torch.randn(cell.batch, cell.tokens, dim).to(self.clock.device, self.dtype)
        return x.chunk(self.world_size, dim=1)[self.rank].contiguous() if cell.form == "sp" else x


def _compiled(name: str, model: nn.Module) -> Callable[..., Any]:
    if name == "eager":
        return model
    if name == "ditron":
        return torch.compile(model, backend=ditron, fullgraph=True)
    options = {"_micro_pipeline_tp": True} if name == "async_tp" else {}
    return torch.compile(model, fullgraph=True, options=options)


def _forward(call: Callable[..., Any], x: torch.Tensor, tokens: int) -> Callable[[], dict[str, torch.Tensor]]:
    def step() -> dict[str, torch.Tensor]:
        with torch.no_grad():
            return {"output": call(x, tokens)}

    return step


def _training(call: Callable[..., Any], x: torch.Tensor, tokens: int) -> Callable[[], dict[str, torch.Tensor]]:
    leaf = x.detach().clone().requires_grad_()
    weight = torch.linspace(-1, 1, x.numel(), device=x.device).view(x.shape).to(x.dtype)

    def step() -> dict[str, torch.Tensor]:
        leaf.grad = None
        out = call(leaf, tokens)
        out.backward(weight)
        assert leaf.grad is not None
        return {"output": out.detach(), "input's gradient": leaf.grad}

    return step


def _difference(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], dtype: torch.dtype) -> str:
    errors = {name: relative_error(got[name], wanted[name]) for name in wanted}
    wrong = [f"{name} by {error:.1e}" for name, error in errors.items() if not error <= MODEL_TOLERANCES[dtype]]
    return f"differs from eager: {', '.join(wrong)}" if wrong else ""


def main(request: Request, device: torch.device, begun: float) -> bool:
    """Run as a rank of the default group, on `device`; see benchmarks.ops.run.main."""
    # 2.13 has new names for collectives that 2.11 has not.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    if device.type == "cuda":
        import torch.distributed._symmetric_memory as symm_mem

        assert dist.group.WORLD is not None
        # Async TP silently does nothing without this deprecated call.
        symm_mem.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    run = Run(request, device, begun)
    run.run()
    if run.rank == 0:
        print(report(run.rows, run.notes, run.facts, run.phases.table()), flush=True)
    dist.barrier(group=run.control)
    return True
