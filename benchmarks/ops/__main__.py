"""`python -m benchmarks.ops`: the fused ops against NCCL + cuBLAS and torch's own, on the GPUs of this machine.

Starts one process per GPU, unless it runs under `torch.distributed.run` already. The tables go to stdout, progress to
stderr, rows into benchmarks/results/gemm_collectives.csv, or attention.csv for the pair around an attention. `--list`
says what would run and about how long it takes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tabulate import tabulate

from benchmarks.comparison import OPS
from benchmarks.launch import command, num_ranks
from benchmarks.ops.request import Request
from benchmarks.ops.shapes import GRAPH_MODES, SETS, Selection
from benchmarks.records import head_commit, results_of
from ditron_inductor.task.nodes import KINDS

# The start of the ranks: imports, NCCL, the first kernels.
START_S = 30.0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog="python -m benchmarks.ops", description=__doc__.partition("\n")[0])
    result.add_argument("--ops", nargs="+", choices=OPS, default=list(KINDS))
    result.add_argument("--shapes", nargs="+", choices=sorted(SETS), default=["anchors"], help="named sets of shapes")
    result.add_argument("--m", nargs="+", type=int, default=[], help="only shapes with these M")
    result.add_argument("--models", nargs="+", default=[], help="only shapes of these: llama-405b, attention, ...")
    result.add_argument("--world", type=int, default=0, help="ranks; all GPUs by default")
    result.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the program, not speed")
    result.add_argument("--only", nargs="+", default=[], help="contestants; all by default")
    result.add_argument("--skip", nargs="+", default=[], help="contestants to leave out")
    result.add_argument(
        "--graph",
        choices=("as_listed", *GRAPH_MODES),
        default="as_listed",
        help="inside CUDA graphs or not; as listed: what every set says for its shapes",
    )
    result.add_argument("--budget", type=float, default=600.0, help="seconds; cells that do not fit are skipped")
    result.add_argument("--rounds", type=_at_least(2), default=20, help="most samples of each contestant in a run")
    result.add_argument("--repeats", type=_at_least(1), default=1, help="runs of each cell, whose median is recorded")
    result.add_argument("--out", default=None, help="CSV to merge the rows into, '' for none; the committed results")
    result.add_argument("--commit", default="", help="what stands in the column commit; git's HEAD by default")
    result.add_argument("--list", action="store_true", help="print the cells and estimated seconds, and end")
    return result


def _at_least(smallest: int) -> type:
    def parse(text: str) -> int:
        if int(text) < smallest:
            raise argparse.ArgumentTypeError(f"{text} is less than {smallest}")
        return int(text)

    return parse  # type: ignore[return-value]


def request_of(options: argparse.Namespace) -> Request:
    """The command line as the ranks get it."""
    out = options.out
    if out is None:
        # Some contestants alone would replace complete cells of the committed results.
        complete = not options.only and not options.skip and options.device == "cuda"
        out = str(results_of(options.ops)) if complete else ""
    return Request(
        selection=Selection(
            ops=tuple(options.ops),
            sets=tuple(options.shapes),
            graph=options.graph,
            rows=tuple(options.m),
            sources=tuple(options.models),
        ),
        device=options.device,
        only=tuple(options.only),
        skip=tuple(options.skip),
        budget_s=options.budget,
        rounds=options.rounds,
        repeats=options.repeats,
        out=out,
        commit=options.commit or head_commit(),
    )


def listing(request: Request, world_size: int) -> str:
    """The cells in their order, with estimated seconds."""
    from benchmarks.ops.estimate import cells_seconds

    cells = request.selection.cells(world_size, request.device)
    seconds = cells_seconds(request, cells, world_size)
    lines = [
        (cell.op, cell.shape, "graph" if cell.graph else "eager", cell.source, f"{each:.1f}")
        for cell, each in zip(cells, seconds, strict=True)
    ]
    table = tabulate(lines, ["op", "shape", "mode", "source", "s"], disable_numparse=True)
    total = f"{len(cells)} cells, about {START_S:.0f} s + {sum(seconds):.0f} s, and the compilation of our kernels"
    return f"{table}\n{total}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    options = parser().parse_args(arguments)
    request = request_of(options)
    if not options.list:
        return command("benchmarks.ops.run", request, options.world)
    world_size = num_ranks("benchmarks.ops", options.world, options.device)
    if not world_size:
        return 2
    print(listing(request, world_size))
    return 0


if __name__ == "__main__":
    sys.exit(main())
