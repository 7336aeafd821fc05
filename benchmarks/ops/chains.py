"""What the benchmarks of a gather with what stands around it have in common: options, check, times, rows, table.

Contestants of a chain are calls that return the same tensors, but `gemm`, which has its matmuls alone: with the bytes
on the link it says what the limit is.

    nccl            an all-gather, matmuls, and one kernel of Inductor's for the rest; gloo without a GPU
    ditron:split    the fused op without what stands around it, and the same kernel of Inductor's
    ditron          the op with it, as its trial chooses; ditron:tile, ditron:chunked, ditron:library: forced
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tabulate import tabulate

from benchmarks.launch import measure_on_ranks, num_ranks
from benchmarks.ops import command
from benchmarks.ops.contest import LINK_BYTES_PER_S, OURS, library_of
from benchmarks.records import NORM, Row, by_cell, head_commit, merge_csv
from benchmarks.session import Session
from benchmarks.timing import interleaved
from ditron_inductor.report.matmul_shapes import MODELS, LayerWidths
from ditron_inductor.report.timing import GRAPH_CALLS
from ditron_inductor.task.plan import decisions

LIMIT_S = 480.0
WORKSPACE_LIMIT = 1 << 30
TIMEOUT_S = 30.0
ROTATED_BYTES = 400 << 20
"""So many bytes of weights are used in turns, so that none stay in the cache."""
MAX_ROTATED = 8
TOLERANCE = 4e-2
"""A few roundings apart: Inductor does not round what it holds in registers, and sums of a norm have another order."""

Call = Callable[[int], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Chain:
    """One problem: rows [m / W, k] of every rank are gathered.

    calls: by contestant, each of the i-th operands. site: of `ditron`, for what the plan says.
    """

    op: str
    shape: str
    m: int
    k: int
    calls: dict[str, Call]
    site: str

    def limit_us(self, world: int, gemm_us: float) -> float:
        """The matmuls alone, or what a rank receives of bfloat16, whichever takes longer."""
        received = (world - 1) * self.m // world * self.k * 2
        return max(gemm_us, received / LINK_BYTES_PER_S * 1e6)


def parser(module: str, rows: Sequence[int]) -> argparse.ArgumentParser:
    """The command line of a chain's benchmark. rows: measured by default."""
    result = argparse.ArgumentParser(prog=f"python -m {module}")
    result.add_argument("--m", nargs="+", type=int, default=list(rows), help="rows of all ranks")
    result.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["llama-8b", "llama-70b"])
    result.add_argument("--shrink", type=int, default=1, help="divide all widths by this, to try the program")
    command.add_common(result, world=2, limit_s=LIMIT_S)
    command.add_graph(result, "both")
    return result


def layers(options: argparse.Namespace) -> list[tuple[str, LayerWidths, int]]:
    """(name of a model, its layer, rows) of a run."""
    return [(name, MODELS[name], m) for name in options.models for m in options.m]


def contestants(
    device: torch.device, gemm: Call, baseline: Call, split: Call, fused: Callable[[str, str], Call]
) -> dict[str, Call]:
    """All of a chain, by name. fused: of a name and a strategy; on the CPU kernels take too long for all of them."""
    ours = OURS if device.type == "cuda" else {name: OURS[name] for name in ("ditron", "ditron:library")}
    calls = {"gemm": gemm, library_of(device): baseline, "ditron:split": split}
    return calls | {name: fused(name, strategy) for name, strategy in ours.items()}


def copies_of(device: torch.device, nbytes: int) -> int:
    """Returns how many sets of operands, each of so many bytes, are used in turns."""
    return max(1, min(MAX_ROTATED, math.ceil(ROTATED_BYTES / nbytes))) if device.type == "cuda" else 1


def right_calls(session: Session, chain: Chain) -> dict[str, Call]:
    """The contestants whose results are near those of the library."""
    baseline = library_of(session.clock.device)
    wanted = chain.calls[baseline](0)

    def checked(name: str) -> Call:
        call = session.after_trial(name, chain.calls[name])
        for got, want in zip(call(0), wanted, strict=True):
            torch.testing.assert_close(
                got, want, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text: f"{name} is not near {baseline}: {text}"
            )
        return call

    return {"gemm": chain.calls["gemm"], **session.right((name for name in chain.calls if name != "gemm"), checked)}


def contest(session: Session, options: argparse.Namespace, chain: Chain) -> list[Row]:
    """Rows of all contestants of a chain that are right, in each mode that was asked for."""
    found: list[Row] = []
    calls = right_calls(session, chain)
    for graph in command.modes(options):
        ready = session.replays(calls, GRAPH_CALLS) if graph else calls
        times = interleaved(session.clock, ready, GRAPH_CALLS if graph else 1, options.rounds)
        is_cuda = session.clock.device.type == "cuda" and "gemm" in times
        found += session.rows_of(
            times,
            bench="norm",
            op=chain.op,
            shape=chain.shape,
            graph=graph,
            limit_us=chain.limit_us(session.world_size, times["gemm"].p50_us) if is_cuda else None,
            commit=options.commit,
        )
    last = decisions.last(session.group_name, chain.site)
    session.say(f"{chain.op}, {chain.shape}: it ran by {last[1].strategy}, {last[1].reason}" if last else chain.shape)
    torch.compiler.reset()
    return found


def measure(session: Session, options: argparse.Namespace, chains: Iterable[Chain]) -> list[Row]:
    """All chains, on this rank; rank 0 writes and prints."""
    rows: list[Row] = []
    for chain in chains:
        rows += contest(session, options, chain)
        if session.rank == 0 and options.out:
            merge_csv(Path(options.out), rows)
    if session.rank == 0:
        print(table(rows), flush=True)
    return rows


def table(rows: Sequence[Row]) -> str:
    """Microseconds, one line for each cell, and how much faster than `nccl` and `ditron:split` `ditron` is."""
    names = list(dict.fromkeys(row.contestant for row in rows))
    lines = []
    for group in by_cell(rows):
        us = {row.contestant: row.p50_us for row in group if row.p50_us}
        ours = us.get("ditron")
        ratios = [f"{us[name] / ours:.2f}" if ours and name in us else "-" for name in ("nccl", "ditron:split")]
        mode = "graph" if group[0].graph else "eager"
        times = [f"{us[name]:.1f}" if name in us else "-" for name in names]
        lines.append([group[0].op, group[0].shape, mode, *times, *ratios])
    return tabulate(lines, ["op", "shape", "mode", *names, "over nccl", "over split"], disable_numparse=True)


def start(module: str, options: argparse.Namespace) -> int:
    """The exit code of a chain's command."""
    world = num_ranks(module, options.world, options.device)
    if not world:
        return 2
    uneven = [m for m in options.m if m % world]
    if uneven:
        print(f"{module}: --m {' '.join(map(str, uneven))} does not divide among {world} ranks", file=sys.stderr)
        return 2
    options.out = command.out_of(options, NORM)
    options.commit = options.commit or head_commit()
    return measure_on_ranks(module, options, world, options.device, options.limit)
