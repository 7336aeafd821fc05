"""`python -m benchmarks.models`: layers of real models through Ditron, Inductor, async TP and eager.

Starts one process per GPU, unless it runs under `torch.distributed.run` already. Progress goes to stderr, tables to
stdout, rows into benchmarks/results/models.csv as they come, and beside it a page, models.html, and charts.
`--device cpu` runs tiny models on the interpreter: that everything works, nothing about speed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.launch import num_ranks, rank_process
from benchmarks.models import configs, pages
from benchmarks.models.architecture import Architecture
from benchmarks.models.estimate import START_S, cell_s
from benchmarks.models.request import CONTESTANTS, Request
from benchmarks.models.supervise import MODULE, supervise
from benchmarks.models.zoo import FORMS, MODELS, PHASES, TINY, Cell, Selection, quick, tiny
from benchmarks.records import MODELS as RESULTS
from benchmarks.records import head_commit

PROGRAM = "benchmarks.models"
CELL_LIMIT_S = 300.0
BUDGET_S, QUICK_BUDGET_S, QUICK_ROUNDS = 500.0, 235.0, 7
QUICK_CONTESTANTS = ("eager", "inductor", "async_tp", "ditron")
ON_GPUS = ("max_autotune", "max_autotune_select", "overlap", "registered", "auto_select", "async_tp")
"""Contestants that need GPUs, or differ from another one there only."""
OWN = "config"
"""The name of a model that `--config` reads, in front of its folder's."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=__doc__.partition("\n")[0])
    result.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    result.add_argument("--config", default="", help="a folder with the config.json of a model, instead of --models")
    result.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    result.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="how layers are cut over ranks")
    result.add_argument("--layers", type=int, default=0, help="layers of each model; a few by default")
    result.add_argument("--batches", nargs="+", type=int, default=[], help="only cells with these batch sizes")
    result.add_argument("--tokens", nargs="+", type=int, default=[], help="only cells with so many tokens at once")
    result.add_argument(
        "--batched", action="store_true", help="prefill of many short sequences instead, of even and of odd lengths"
    )
    result.add_argument("--full", action="store_true", help="all sizes, not the most important ones of each model")
    result.add_argument("--graph", action="store_true", help="prefill inside CUDA graphs too, as decode always is")
    result.add_argument(
        "--limit", action="store_true", help="what a rank's share alone takes too, without communication"
    )
    result.add_argument("--quick", action="store_true", help="ten cells of all phases in four minutes")
    result.add_argument(
        "--missing", action="store_true", help="only cells that --out has not of this commit and machine"
    )
    result.add_argument("--list", action="store_true", help="what would run, and about how long; run nothing")
    result.add_argument(
        "--contestants", nargs="+", choices=CONTESTANTS, default=[], help="all by default; with --quick the usual ones"
    )
    result.add_argument("--world", type=int, default=0, help="ranks; all GPUs by default")
    result.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the program, not speed")
    result.add_argument(
        "--budget", type=float, help=f"seconds, {BUDGET_S:.0f} by default; cells that do not fit are skipped"
    )
    result.add_argument(
        "--cell-limit", type=float, default=CELL_LIMIT_S, help="seconds of a cell, after which its ranks end"
    )
    result.add_argument("--rounds", type=int, default=10, help="most samples of each contestant in a run")
    result.add_argument("--repeats", type=int, default=1, help="runs of each cell, whose median is recorded")
    result.add_argument("--out", default=None, help="CSV to merge the rows into, '' for none; the committed results")
    result.add_argument("--merge", nargs="+", type=Path, default=[], help="only merge these files, and their facts")
    result.add_argument(
        "--turns",
        default="",
        metavar="FOLDER",
        help="take turns with other runs on these GPUs that name this folder: each times alone; no times of compiling",
    )
    result.add_argument("--commit", default="", help="what stands in the column commit; git's HEAD by default")
    return result


def request_of(options: argparse.Namespace) -> Request:
    """The command line as the ranks get it. On the CPU every model is as small as can be.

    Raises ValueError for a configuration that cannot be read, or too few samples.
    """
    if options.rounds < 2:
        raise ValueError(f"--rounds {options.rounds} is less than 2")
    on_gpu = options.device == "cuda"
    architectures: dict[str, Architecture] = dict(MODELS)
    models = tuple(options.models)
    if options.config:
        models = (f"{OWN}-{Path(options.config).resolve().name}",)
        architectures = {models[0]: configs.read(options.config)}
    names = options.contestants or list(QUICK_CONTESTANTS if options.quick else CONTESTANTS)
    complete = on_gpu and not options.contestants and not options.config
    return Request(
        cells=tuple(cells_of(options, models)),
        device=options.device,
        architectures=architectures if on_gpu else {name: one.like(TINY) for name, one in architectures.items()},
        contestants=tuple(name for name in names if on_gpu or name not in ON_GPUS),
        budget_s=options.budget or (QUICK_BUDGET_S if options.quick else BUDGET_S),
        cell_limit_s=options.cell_limit,
        rounds=min(options.rounds, QUICK_ROUNDS) if options.quick else options.rounds,
        repeats=options.repeats,
        out=options.out if options.out is not None else str(RESULTS) if complete else "",
        commit=options.commit or head_commit(),
        missing=options.missing,
        graph=options.graph,
        limit=options.limit,
        turns=options.turns,
    )


def cells_of(options: argparse.Namespace, models: tuple[str, ...]) -> list[Cell]:
    """What is measured."""
    selection = Selection(
        models=models,
        phases=tuple(options.phases),
        forms=tuple(options.forms),
        layers=options.layers,
        batches=tuple(options.batches),
        tokens=tuple(options.tokens),
        full=options.full,
        batched=options.batched,
    )
    found = selection.cells()
    if options.quick:
        asked = (set(models), set(options.phases), set(options.forms))
        found = [cell for cell in quick() if all(one in of for one, of in zip(_kind(cell), asked, strict=True))]
    return tiny(found) if options.device == "cpu" else found


def _kind(cell: Cell) -> tuple[str, str, str]:
    return cell.model, cell.phase, cell.form


def listing(request: Request, world_size: int) -> str:
    """Every cell and about how long it takes."""
    seconds = [cell_s(request, cell, world_size) for cell in request.cells]
    lines = [f"{each:6.0f} s  {cell.text}" for each, cell in zip(seconds, request.cells, strict=True)]
    total = START_S + sum(seconds)
    return "\n".join([*lines, f"{len(lines)} cells, about {total:.0f} s; --budget is {request.budget_s:.0f} s"])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    options = parser().parse_args(arguments)
    try:
        request = request_of(options)
    except ValueError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    if options.merge:
        results = Path(request.out or RESULTS)
        try:
            pages.merge(results, options.merge)
        except ValueError as error:
            print(f"{PROGRAM}: {error}", file=sys.stderr)
            return 2
        print("\n".join(str(path) for path in pages.write(results)))
        return 0
    if not request.cells:
        print(f"{PROGRAM}: no cell has these models, phases, forms, batches and tokens", file=sys.stderr)
        return 2
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    world_size = int(os.environ["WORLD_SIZE"]) if launched else num_ranks(PROGRAM, options.world, options.device)
    if not world_size:
        return 2
    if options.list:
        print(listing(request, world_size))
        return 0
    with tempfile.TemporaryDirectory(prefix="ditron-models-") as folder:
        kept = request if request.out else replace(request, out=str(Path(folder) / "models.csv"))
        code = int(not rank_process(MODULE, kept)) if launched else supervise(kept, world_size)
        if os.environ.get("RANK", "0") == "0":
            pages.finish(kept, world_size, with_page=bool(request.out))
    if launched:
        sys.stdout.flush()
        # Not the interpreter's own end: torch would destroy the process group, which can hang.
        os._exit(code)
    if not request.out:
        print("rows are printed only; --out takes a file for them", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
