"""What the commands of single ops' benchmarks have in common: their options, and what follows from these."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from benchmarks.launch import measure_on_ranks, num_ranks
from benchmarks.records import head_commit


def parser(
    module: str, sets: Iterable[str], chosen: list[str], *, world: int, limit_s: float
) -> argparse.ArgumentParser:
    """A command line with the options of all of them. chosen: the sets of shapes that run by default."""
    result = argparse.ArgumentParser(prog=f"python -m {module}")
    result.add_argument("--shapes", nargs="+", choices=sorted(sets), default=chosen)
    add_common(result, world=world, limit_s=limit_s)
    return result


def add_common(result: argparse.ArgumentParser, *, world: int, limit_s: float) -> None:
    """The options that do not depend on what a benchmark calls its shapes."""
    result.add_argument("--world", type=int, default=world, help="ranks; 0 for all GPUs")
    result.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the program, not speed")
    result.add_argument("--rounds", type=int, default=20)
    result.add_argument("--limit", type=float, default=limit_s, help="seconds, after which the ranks are ended")
    result.add_argument("--out", default=None, help="CSV to merge the rows into, '' for none; the committed results")
    result.add_argument("--commit", default="", help="what stands in the column commit; git's HEAD by default")


def add_graph(to: argparse.ArgumentParser, default: str) -> None:
    """The option --graph, for `modes`."""
    to.add_argument("--graph", choices=("eager", "graph", "both"), default=default)


def modes(options: argparse.Namespace) -> tuple[bool, ...]:
    """Returns the modes of the runs of a shape: whether each of them is inside a CUDA graph."""
    if options.device == "cpu":
        return (False,)
    return {"eager": (False,), "graph": (True,), "both": (True, False)}[options.graph]


def out_of(options: argparse.Namespace, results: Path) -> str:
    """Returns the file that rows go into: for GPUs the committed results, unless another file is named."""
    if options.out is not None:
        return str(options.out)
    return str(results) if options.device == "cuda" else ""


def start_alone(module: str, options: argparse.Namespace, results: Path) -> int:
    """The exit code of the command of a benchmark that needs one GPU. results: the committed ones."""
    return _start(module, options, results, options.world or 1)


def start_on_ranks(module: str, options: argparse.Namespace, results: Path) -> int:
    """The exit code of the command of a benchmark that needs several ranks. results: the committed ones."""
    return _start(module, options, results, num_ranks(module, options.world, options.device))


def _start(module: str, options: argparse.Namespace, results: Path, world: int) -> int:
    options.out = out_of(options, results)
    options.commit = options.commit or head_commit()
    return measure_on_ranks(module, options, world, options.device, options.limit) if world else 2
