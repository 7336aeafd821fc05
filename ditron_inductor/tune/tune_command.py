"""Measures the strategies at a user's own shapes, and writes the table by which later runs choose.

    python -m ditron_inductor tune --model llama-8b --ranks 4         # one process per GPU of this machine
    ditron_inductor.tune(model)(tokens)                               # on all ranks: the sites of a function that ran

Times are the maximum over the ranks, and the strategies of a shape are timed in turns. Nothing here imports torch
before it is used.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ditron_inductor.errors import DitronError, InvalidOptionValue
from ditron_inductor.options import Options
from ditron_inductor.report.matmul_shapes import MODELS, TOKENS, MatmulShape, given_shapes, model_shapes
from ditron_inductor.task.dtypes import PRECISIONS
from ditron_inductor.task.nodes import KINDS
from ditron_inductor.tools.doctor import require
from ditron_inductor.tools.processes import Rank, device_for, failures_text, run_ranks
from ditron_inductor.version import VERSION

if TYPE_CHECKING:
    from ditron_inductor.report.explain import Report
    from ditron_inductor.task.problem import Problem
    from ditron_inductor.task.table import Entry, Table

GRAPHS = {"eager": (False,), "graph": (True,), "both": (False, True)}
# The interpreter takes seconds for what a GPU does in microseconds.
CPU_ROUNDS = 3
WAIT_S = 60.0


@dataclass(frozen=True)
class TuneRequest:
    """The measurements that the ranks make. Rank 0 writes the table to `path` after every shape."""

    shapes: tuple[MatmulShape, ...]
    dtype: str
    graphs: tuple[bool, ...]
    rounds: int
    path: str
    workspace_limit: int


def tune(
    fn: Callable[..., Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    backward: bool = True,
    path: str | None = None,
) -> Callable[..., Report]:
    """``tune(fn)(*args, **kwargs)`` runs ``fn`` once with Ditron, times the strategies at every fused site, and adds
    the times to a table. Returns the report of ``explain(fn, measure=True)``. It is collective: all ranks of the groups
    in ``fn`` have to call it. Rank 0 of the default group writes the table to ``path``; the default is the file that
    the option ``ditron.table`` names. Groups that are first used later take the new table; groups that this process has
    used keep theirs. Sites are timed inside CUDA graphs if ``mode`` uses them.
    """
    parsed, _ = Options.parse(options)
    target = writable(path or parsed.table)

    def run(*args: Any, **kwargs: Any) -> Report:
        import torch.distributed as dist

        from ditron_inductor.report.explain import explain, uses_graphs

        report = explain(fn, mode=mode, options=options, backward=backward, measure=True)(*args, **kwargs)
        if dist.get_rank() == 0:
            add_entries(target, report_entries(report, graph=uses_graphs(mode)))
        return report

    return functools.update_wrapper(run, fn, assigned=("__doc__",), updated=())


def report_entries(report: Report, *, graph: bool) -> list[Entry]:
    """Returns the measured sites of a report as lines of a table."""
    entries = []
    for site in report.sites:
        request, us = site.request, {} if site.measured is None else site.measured.us
        if request is not None and "library" in us:
            captured = int(graph and request.device_type == "cuda")
            entries.append(entry_of_times(request.problem, us, request.device_name, graph=captured))
    return entries


def entry_of_times(problem: Problem, us: Mapping[str, float], gpu: str, *, graph: int) -> Entry:
    """Returns a line of a table. us: microseconds by strategy, `library` among them for all others to compare with."""
    from ditron_inductor.task.table import Entry

    return Entry(
        gpu=gpu,
        world=problem.world_size,
        dtype=problem.precision.operand.name,
        op=problem.kind,
        m=problem.m,
        n=problem.n,
        k=problem.k,
        graph=graph,
        library_us=us["library"],
        chunked_us=us.get("chunked"),
        tile_us=us.get("tile"),
        commit=f"v{VERSION}",
        date=datetime.date.today().isoformat(),
        slices=problem.slices,
    )


def writable(option: str | None) -> Path:
    """Returns the file for a value of the option `ditron.table`. Raises InvalidOptionValue if there is none."""
    from ditron_inductor import user_table

    path = user_table.path_of(option)
    if path is None:
        raise InvalidOptionValue(key="ditron.table", value=option, allowed="the path of a table to write, or None")
    return path


def add_entries(path: Path, entries: Iterable[Entry]) -> Table:
    """Puts entries into the table at `path`, in place of older entries of the same shapes, and returns the new table.
    The file is replaced as a whole: a run that reads it meanwhile sees the old one. Raises InvalidTable.
    """
    from ditron_inductor import user_table
    from ditron_inductor.task.table import Table

    old = Table.parse(user_table.text_of(path, str(path)), str(path)) if path.exists() else Table()
    merged = old.merged(entries)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(merged.text(), encoding="utf-8")
    beside.replace(path)
    return merged


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to measure")
    what.add_argument("--model", nargs="+", choices=sorted(MODELS), default=[], help="the sites of a model's layer")
    what.add_argument("--op", nargs="+", choices=KINDS, default=list(KINDS), help="all by default")
    what.add_argument(
        "--m", nargs="+", type=int, default=list(TOKENS), help=f"rows (default {' '.join(map(str, TOKENS))})"
    )
    what.add_argument("--n", nargs="+", type=int, default=[], help="columns of one rank's weights; goes with --k")
    what.add_argument("--k", nargs="+", type=int, default=[], help="contracted size on one rank; goes with --n")
    dtypes = [row.operand.name for row in PRECISIONS]
    what.add_argument("--dtype", choices=dtypes, help="bfloat16 by default, on the CPU float32")
    what.add_argument("--graph", choices=GRAPHS, default="both", help="eager mode, CUDA graphs, or both (default)")
    how = parser.add_argument_group("how")
    how.add_argument("--ranks", type=int, default=0, help="rank processes to start; one per GPU by default")
    how.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="cpu tries the command only")
    how.add_argument("--rounds", type=int, default=0, help="times that each strategy is timed")
    how.add_argument("--table", help="where to write; by default what DITRON_TABLE names, else the user's cache folder")
    how.add_argument("--limit", type=float, default=3600.0, help="seconds before it gives up (default 3600)")
    other = parser.add_argument_group("without measuring")
    other.add_argument("--from-results", nargs="+", metavar="CSV", help="make the table from a benchmark's results")
    other.add_argument("--model-error", action="store_true", help="compare the cost model with measured times instead")
    other.add_argument("--markdown", action="store_true", help="the comparison as a table for a page")


def main(arguments: argparse.Namespace) -> int:
    """Runs the command and returns its exit code. Raises MissingDependency."""
    try:
        if arguments.from_results or arguments.model_error:
            return convert(arguments)
        return _measure(arguments)
    except (DitronError, ValueError, OSError) as error:
        print(f"tune: {error}", file=sys.stderr)
        return 2


def convert(arguments: argparse.Namespace) -> int:
    """Runs `--from-results` and `--model-error`, which start no process and measure nothing."""
    from ditron_inductor.task.model_error import report_text
    from ditron_inductor.task.results import read_results
    from ditron_inductor.task.table import Table, shipped
    from ditron_inductor.user_table import text_of

    table = shipped()
    if arguments.from_results:
        texts = {path: text_of(Path(path), path) for path in arguments.from_results}
        table = Table(entry for path, text in texts.items() for entry in read_results(text, path))
    if arguments.model_error:
        print(report_text(table.entries, "github" if arguments.markdown else "simple"))
    elif arguments.table:
        # Replace the whole file, so that it holds only what the results hold.
        Path(arguments.table).write_text(table.text())
        print(f"tune: {len(table.entries)} lines in {arguments.table}")
    else:
        sys.stdout.write(table.text())
    return 0


def _measure(arguments: argparse.Namespace) -> int:
    require("python", "torch", "triton", "tabulate", "tqdm", needed_for="tune")
    import torch

    ranks = arguments.ranks or max(2, torch.cuda.device_count())
    device_type, problem = device_for(ranks, arguments.device)
    if problem:
        print(f"tune: {problem}", file=sys.stderr)
        return 2
    shapes: list[MatmulShape] = []
    for model in arguments.model:
        shapes += model_shapes(model, arguments.op, arguments.m, ranks)
    if arguments.n or arguments.k or not arguments.model:
        shapes += given_shapes(arguments.op, arguments.m, arguments.n, arguments.k, ranks)
    if not shapes:
        print(
            "tune: nothing to measure: give --model, or --n and --k, and rows that divide over the ranks",
            file=sys.stderr,
        )
        return 2
    options = Options.current()
    path = writable(arguments.table or options.table)
    request = TuneRequest(
        # Measure the largest shape first, so that the workspace grows only once, before any graph holds it.
        shapes=tuple(sorted(dict.fromkeys(shapes), key=lambda shape: -shape.m * max(shape.n, shape.k))),
        dtype=arguments.dtype or ("float32" if device_type == "cpu" else "bfloat16"),
        graphs=GRAPHS[arguments.graph] if device_type == "cuda" else (False,),
        rounds=arguments.rounds or (CPU_ROUNDS if device_type == "cpu" else 0),
        path=str(path),
        workspace_limit=options.workspace_limit,
    )
    add_entries(path, [])  # a file that is no table, or cannot be written, is found before anything is measured
    codes = run_ranks(rank_main, request, world_size=ranks, device_type=device_type, limit_s=arguments.limit)
    if any(code != 0 for code in codes):
        print(f"tune: failed on {failures_text(codes)}; what was measured is in {path}", file=sys.stderr)
        return 1
    default = arguments.table is None
    use = "later runs load it" if default else f"DITRON_TABLE={path} or the option ditron.table makes a run load it"
    print(f"tune: written to {path}: {use}")
    return 0


def rank_main(rank: Rank, request: TuneRequest) -> bool:
    """Runs one rank of the command: it measures everything, and rank 0 writes and prints."""
    import torch
    import torch.distributed as dist
    from tqdm import tqdm

    from ditron_inductor import runtime
    from ditron_inductor.report.measure import SiteShape, measure
    from ditron_inductor.report.timing import ROUNDS
    from ditron_inductor.task.problem import Problem
    from ditron_inductor.task.torch_dtypes import precision_of

    # What runs the ops, without the compiler.
    runtime.prepare()
    device = rank.join()
    world = dist.group.WORLD
    assert world is not None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    names: list[Any] = [None] * rank.world_size
    dist.all_gather_object(names, name)
    gpu = " | ".join(sorted(set(names)))
    dtype = getattr(torch, request.dtype)
    entries: list[Entry] = []
    notes: list[str] = []
    steps = [(shape, graph) for shape in request.shapes for graph in request.graphs]
    with tqdm(steps, unit="shape", disable=rank.rank != 0, smoothing=0.1) as bar:
        for shape, graph in bar:
            site = SiteShape.of_matmul(shape.op, shape.m, shape.n, shape.k, dtype, rank.world_size)
            bar.set_description(f"{site.text}{' graph' if graph else ''}")
            timings = measure(
                site,
                group_name=world.group_name,
                device=device,
                graph=graph,
                rounds=request.rounds or ROUNDS,
                workspace_limit=request.workspace_limit,
                timeout_s=WAIT_S,
            )
            found = []
            if "library" in timings.us:
                problem = Problem(shape.op, shape.m, shape.n, shape.k, precision_of(dtype), rank.world_size)
                found.append(entry_of_times(problem, timings.us, gpu, graph=int(graph)))
            entries += found
            notes += [f"{site.text}{' graph' if graph else ''}: {note}" for note in timings.notes]
            if rank.rank == 0:
                add_entries(Path(request.path), found)
    if rank.rank == 0:
        print(summary(entries, notes))
    return bool(entries)


def summary(entries: Sequence[Entry], notes: Sequence[str]) -> str:
    """Returns a table for people: the fastest strategy of each line, and its gain over the library."""
    from tabulate import tabulate

    lines = []
    for entry in entries:
        best = min(entry.us, key=lambda name: entry.us[name])
        gain = f"{entry.library_us / entry.us[best]:.2f}x"
        mode = "graph" if entry.graph else "eager"
        times = (entry.library_us, entry.chunked_us, entry.tile_us)
        lines.append((entry.op, entry.m, entry.n, entry.k, mode, *times, best, gain))
    headers = ("op", "m", "n", "k", "mode", "library us", "chunked us", "tile us", "fastest", "gain")
    text = tabulate(lines, headers=headers, floatfmt=".1f", missingval="-")
    return "\n".join([text, *(f"no time: {note}" for note in dict.fromkeys(notes))])
