"""`python -m benchmarks.models`: layers of real models through Ditron, Inductor, async TP and eager.

Starts one process per GPU, unless it runs under `torch.distributed.run` already. Tables go to stdout, progress to
stderr, rows into benchmarks/results/models.csv. `--device cpu` runs a tiny model: that it works, nothing about speed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.launch import command
from benchmarks.models.request import CONTESTANTS, Request
from benchmarks.models.zoo import FORMS, MODELS, PHASES, cells
from benchmarks.records import MODELS as RESULTS
from benchmarks.records import head_commit


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__.partition("\n")[0])
    result.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["llama3-8b", "llama3-70b"])
    result.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    result.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="all-reduces, sequence parallel")
    result.add_argument("--layers", type=int, default=0, help="layers of each model; a few by default")
    result.add_argument("--batches", nargs="+", type=int, default=[], help="only cells with these batch sizes")
    result.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    result.add_argument("--world", type=int, default=0, help="ranks; all GPUs by default")
    result.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the program, not speed")
    result.add_argument("--budget", type=float, default=600.0, help="seconds; cells that do not fit are skipped")
    result.add_argument("--rounds", type=int, default=10, help="most samples of each contestant in a run")
    result.add_argument("--repeats", type=int, default=1, help="runs of each cell, whose median is recorded")
    result.add_argument("--out", default=None, help="CSV to merge the rows into, '' for none; the committed results")
    result.add_argument("--commit", default="", help="what stands in the column commit; git's HEAD by default")
    return result


def request_of(options: argparse.Namespace) -> Request:
    """The command line as the ranks get it. On the CPU the tiny model alone."""
    on_gpu = options.device == "cuda"
    complete = on_gpu and options.contestants == list(CONTESTANTS)
    models = options.models if on_gpu else ["tiny"]
    return Request(
        cells=tuple(cells(models, options.phases, options.forms, options.layers, options.batches)),
        device=options.device,
        # Async TP needs GPUs.
        contestants=tuple(name for name in options.contestants if on_gpu or name != "async_tp"),
        budget_s=options.budget,
        rounds=options.rounds,
        repeats=options.repeats,
        out=options.out if options.out is not None else str(RESULTS) if complete else "",
        commit=options.commit or head_commit(),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    options = parser().parse_args(arguments)
    return command("benchmarks.models.run", request_of(options), options.world)


if __name__ == "__main__":
    sys.exit(main())
