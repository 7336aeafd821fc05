"""`python -m benchmarks.ops`: the three fused ops against NCCL + cuBLAS and torch's own, on the GPUs of this machine.

Starts one process per GPU, unless it runs under `torch.distributed.run` already. The table goes to stdout, progress to
stderr, rows into benchmarks/results/gemm_collectives.csv.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.ops.launch import rank_process, start_ranks
from benchmarks.ops.shapes import SETS

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
RESULTS = Path(__file__).parents[1] / "results" / "gemm_collectives.csv"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog="python -m benchmarks.ops", description=__doc__.partition("\n")[0])
    result.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    result.add_argument("--shapes", choices=sorted(SETS), default="anchors", help="the named set of shapes")
    result.add_argument("--world", type=int, default=0, help="ranks; all GPUs by default")
    result.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the program, not the speed"
    )
    result.add_argument("--only", nargs="+", default=[], help="contestants; all by default")
    result.add_argument(
        "--graph",
        choices=("as_listed", "eager", "graph", "both"),
        default="as_listed",
        help="inside CUDA graphs or not; as listed: decode shapes only",
    )
    result.add_argument("--budget", type=float, default=180.0, help="seconds after which no further shape is begun")
    result.add_argument("--rounds", type=int, default=20, help="samples of each contestant")
    result.add_argument("--out", default=str(RESULTS), help="CSV to merge the rows into")
    result.add_argument("--commit", default="", help="what stands in the column commit; git's HEAD by default")
    return result


def head_commit() -> str:
    """The short hash of HEAD, or `unknown` outside a checkout."""
    if shutil.which("git") is None:
        return "unknown"
    answer = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "unknown"


def main() -> int:
    """The command."""
    options = parser().parse_args()
    options.commit = options.commit or head_commit()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank_process(options)
    return start_ranks(options)


if __name__ == "__main__":
    sys.exit(main())
