"""`python -m benchmarks.ops.all_reduce_rms_norm`: all-reduce, residual and RMS norm, against NCCL and torch's own.

    all_reduce_rms_norm           normed, total = norm(all_reduce(x) + residual), of x [M, N]
    matmul_all_reduce_rms_norm    the same for x = [M, K] @ [K, N], as when decoding

Contestants, all of a shape in one interleaved run:

    nccl        (matmul,) NCCL's all-reduce in place, the residual sum and the norm as one kernel of Inductor's
    registered  the same in memory that NCCL has registered
    symm_mem    the same with torch's all-reduce in symmetric memory, one-shot or two-shot, whichever is faster
    one_shot_norm   all of it, behind the matmul, in one kernel, as serving engines do (rivals/one_shot_norm.py)
    ditron:split    with a matmul: our matmul_all_reduce, then Inductor's kernel: what there was without this node
    ditron, ditron:tile, ditron:chunked, ditron:library     the op, as its trial chooses, and forced

All write into memory of their own; x is not kept by NCCL and the two-shot kernel, which saves them a copy. A contestant
is timed only if both of its results are right on all ranks. Rows go into benchmarks/results/norm.csv.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from benchmarks.launch import measure_on_ranks, num_ranks
from benchmarks.ops import command
from benchmarks.records import NORM, Row, by_cell, head_commit, merge_csv

if TYPE_CHECKING:
    from benchmarks.session import Session

EPS = 1e-6
ONE_SHOT_MAX_BYTES = 8 << 20
MODULE = "benchmarks.ops.all_reduce_rms_norm"
LINK_BYTES_PER_S = 450e9
GRAPH_CALLS = 20
LEAST_GAIN = 1.6
"""Of ours over NCCL and the norm, inside CUDA graphs, up to GAIN_BYTES."""
GAIN_BYTES = 256 << 10
SLOWER = 1.02
"""What ours may be slower than the better baseline."""

WIDTHS = (4096, 5120, 8192)
BYTES = (10 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
DECODE = ((8192, 7168), (4096, 3584), (5120, 6400))
"""(N, K) of the projections behind attention and feed-forward of a few models, over a few ranks."""
DECODE_ROWS = (1, 4, 16, 64)


@dataclass(frozen=True)
class Cell:
    """K 0: without a matmul."""

    M: int
    N: int
    K: int = 0
    graph: bool = False

    @property
    def op(self) -> str:
        return "matmul_all_reduce_rms_norm" if self.K else "all_reduce_rms_norm"

    @property
    def shape(self) -> str:
        return f"M={self.M};N={self.N}" + (f";K={self.K}" if self.K else "")


def sweep() -> list[Cell]:
    """10 KB to 16 MB of bfloat16, in rows of the widths of a few models."""
    cells = [Cell(max(1, nbytes // (2 * n)), n) for nbytes in BYTES for n in WIDTHS]
    return list(dict.fromkeys(cells))


def decode() -> list[Cell]:
    return [Cell(m, n, k) for n, k in DECODE for m in DECODE_ROWS]


SETS: dict[str, Callable[[], list[Cell]]] = {
    "sweep": sweep,
    "decode": decode,
    "few": lambda: [Cell(m, n) for m, n in ((1, 5120), (4, 8192), (32, 4096), (128, 8192), (2048, 4096))],
    "tiny": lambda: [Cell(3, 40), Cell(3, 40, 24)],
}


@dataclass(frozen=True)
class Request:
    """The request of one run. only: the contestants that run, or empty for all of them."""

    cells: tuple[Cell, ...]
    device: str
    rounds: int
    out: str
    commit: str


def contestants(session: Session, cell: Cell, device: Any, group_name: str, shared: Any) -> tuple[dict[str, Any], Any]:
    """(calls by name, each of which returns (normed, total) of the i-th operands; the expected results)."""
    import torch
    import torch.distributed as dist

    from benchmarks.ops.contest import TIMEOUT_S, WORKSPACE_LIMIT, in_turns, library_of
    from benchmarks.rivals import registered
    from benchmarks.rivals.one_shot_norm import OneShotNorm, of_world
    from ditron_inductor.task import reference
    from ditron_inductor.task.nodes import (
        EXTRAS,
        AllReduceRmsNorm,
        MatmulAllReduceRmsNorm,
        Norm,
        Policy,
    )

    generator = torch.Generator(device).manual_seed(1 + session.rank)
    same = torch.Generator(device).manual_seed(0)
    norm = Norm("rms", EPS, round_first=True)

    def draw(*shape: int, of: Any = generator) -> torch.Tensor:
        return torch.randn(shape, generator=of, device=device).to(torch.bfloat16)

    nbytes = (cell.K + 1) * cell.N * 2
    copies = max(1, min(4, (256 << 20) // nbytes)) if cell.K else 2
    left = [draw(cell.M, cell.K or cell.N) for _ in range(copies)]
    right = [draw(cell.N, cell.K).mul_(cell.K**-0.5).t() for _ in range(copies)] if cell.K else []
    residual, weight = draw(cell.M, cell.N, of=same), draw(cell.N, of=same)
    of_norm = {"residual": residual, "weight": weight}
    extras = tuple(of_norm.get(name) for name in EXTRAS)

    def add_norm(reduced: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.add_norm(reduced, extras, norm)

    inductor_norm: Any = torch.compile(add_norm, dynamic=False) if device.type == "cuda" else add_norm
    buffer = left[0].clone() if not cell.K else draw(cell.M, cell.N)

    def product(i: int, out: torch.Tensor) -> torch.Tensor:
        return torch.mm(left[i % copies], right[i % copies], out=out) if cell.K else out

    def by_nccl(summed: torch.Tensor) -> Any:
        def call(i: int) -> tuple[torch.Tensor, torch.Tensor]:
            reduced = product(i, summed)
            dist.all_reduce(reduced)
            return inductor_norm(reduced)

        return call

    found: dict[str, Any] = {library_of(device): by_nccl(buffer)}
    assert dist.group.WORLD is not None
    if not registered.refusal(dist.group.WORLD, device):
        found["registered"] = by_nccl(registered.of_world(device).calling(buffer.clone)())
    if not OneShotNorm.refusal(cell.M, cell.N, 2):
        kernel = of_world(device)
        operand = kernel.operand((cell.M, cell.N), torch.bfloat16)
        if not cell.K:
            operand.copy_(left[0])
        found["one_shot_norm"] = lambda i: kernel(product(i, operand), residual, weight, EPS)
    if device.type == "cuda":
        found |= _symmetric(cell, shared.get((cell.M, cell.N), torch.bfloat16, device), left[0], product, inductor_norm)

    products = [{"a": [one], "b": [other]} for one, other in zip(left, right, strict=True)] if cell.K else []

    def site(name: str, strategy: str) -> dict[str, Any]:
        group = {"world_size": session.world_size, "group_name": group_name}
        policy = Policy(strategy, WORKSPACE_LIMIT, TIMEOUT_S, trials=strategy == "auto")
        return {"reduce_op": "sum", **group, "site": f"benchmark/{cell.shape}:{name}", "policy": policy}

    def ours(strategy: str) -> Any:
        fields = {"norm": norm, "extras": tuple(of_norm), **site(f"{cell.op}:{strategy}", strategy)}
        outputs = slice(2)
        if cell.K:
            return in_turns(MatmulAllReduceRmsNorm(**fields), [one | of_norm for one in products], outputs)
        return in_turns(AllReduceRmsNorm(**fields), [{"x": left[0], **of_norm}], outputs)

    strategies = ("tile", "chunked", "library") if cell.K else ("tile", "library")
    if cell.K:
        whole = MatmulAllReduceRmsNorm(norm=norm, extras=(), **site("split", "auto"))
        split = in_turns(whole.reduction, products, 0)
        found["ditron:split"] = lambda i: inductor_norm(split(i))
    found |= {"ditron": ours("auto")} | {f"ditron:{strategy}": ours(strategy) for strategy in strategies}
    x = (left[0].double() @ right[0].double()) if cell.K else left[0].double()
    exact = [one if one is None else one.double() for one in extras]
    group = {"reduce_op": "sum", "world_size": session.world_size, "group_name": group_name}
    expected = reference.all_reduce_rms_norm(x, exact, norm=replace(norm, round_first=False), **group)
    return found, expected


def _symmetric(cell: Cell, shared: Any, x: Any, product: Any, normalise: Any) -> dict[str, Any]:
    """torch's all-reduces, which take their operand from symmetric memory."""
    import torch
    import torch.distributed as dist

    assert dist.group.WORLD is not None
    group_name = dist.group.WORLD.group_name
    shared.copy_(x) if not cell.K else None
    ways: dict[str, Any] = {"symm_mem:two_shot": torch.ops.symm_mem.two_shot_all_reduce_.default}
    if cell.M * cell.N * 2 <= ONE_SHOT_MAX_BYTES:
        # First: it leaves its operand as it is.
        ways = {"symm_mem:one_shot": torch.ops.symm_mem.one_shot_all_reduce.default, **ways}

    def bound(way: Any) -> Any:
        return lambda i: normalise(way(product(i, shared), "sum", group_name))

    return {name: bound(way) for name, way in ways.items()}


def right_calls(session: Session, cell: Cell, group_name: str, shared: Any) -> dict[str, Any]:
    """The contestants of a shape whose results are right."""
    import torch

    from benchmarks.tolerances import assert_near

    # A function of the same text is compiled for every shape, more often than the compiler allows.
    torch._dynamo.reset()
    calls, expected = contestants(session, cell, session.clock.device, group_name, shared)

    def checked(name: str) -> Any:
        # The first call, whose operand in place nobody has reduced yet.
        for got, want in zip(calls[name](0), expected, strict=True):
            assert_near(got, want, num_partials=2 * session.world_size, what=name)
        return session.after_trial(name, calls[name])

    return session.right(calls, checked)


def run_cell(session: Session, request: Request, cell: Cell, calls: Mapping[str, Any]) -> list[Row]:
    """Times of the contestants, as rows."""
    import torch.distributed as dist

    from benchmarks.timing import interleaved

    ready = session.replays(calls, GRAPH_CALLS) if cell.graph else calls
    times = interleaved(session.clock, ready, GRAPH_CALLS if cell.graph else 1, request.rounds)
    for way in sorted((name for name in times if name.startswith("symm_mem")), key=lambda name: times[name].p50_us):
        times.setdefault("symm_mem", times[way])
        del times[way]
    received = 2 * (session.world_size - 1) * cell.M * cell.N * 2 / session.world_size
    dist.barrier()
    limit_us = received / LINK_BYTES_PER_S * 1e6 if session.clock.device.type == "cuda" else None
    return session.rows_of(
        times, bench="norm", op=cell.op, shape=cell.shape, graph=cell.graph, limit_us=limit_us, commit=request.commit
    )


def verdict(rows: Sequence[Row]) -> str:
    """Says whether the rows of one cell reach the targets of this op. The text is empty without a baseline."""
    us = {row.contestant: row.p50_us for row in rows if row.p50_us}
    if "ditron" not in us or "nccl" not in us:
        return ""
    sizes = rows[0].sizes
    gain = us["nccl"] / us["ditron"]
    best = min(us[name] for name in ("nccl", "registered", "symm_mem", "one_shot_norm") if name in us)
    needed = rows[0].graph and "K" not in sizes and int(sizes["M"]) * int(sizes["N"]) * 2 <= GAIN_BYTES
    holds = us["ditron"] <= SLOWER * best and (not needed or gain >= LEAST_GAIN)
    return f"{gain:.2f} {'PASS' if holds else 'FAIL'}"


def table(rows: Sequence[Row]) -> str:
    """Microseconds, one line for each cell; the gain is that of `ditron` over `nccl`."""
    names = list(dict.fromkeys(row.contestant for row in rows))
    lines = []
    for group in by_cell(rows):
        us = {row.contestant: f"{row.p50_us:.1f}" for row in group}
        mode = "graph" if group[0].graph else "eager"
        lines.append([group[0].op, group[0].shape, mode, *[us.get(name, "-") for name in names], verdict(group)])
    return tabulate(lines, ["op", "shape", "mode", *names, "gain"], disable_numparse=True)


def measure(session: Session, request: Request) -> list[Row]:
    """All cells, on one rank."""
    from benchmarks.ops.contest import SymmetricBuffer

    group_name = session.group_name
    shared = SymmetricBuffer(group_name)
    rows: list[Row] = []
    shape, calls = "", dict[str, Any]()
    for cell in request.cells:
        if cell.shape != shape:
            shape, calls = cell.shape, right_calls(session, cell, group_name, shared)
        rows += run_cell(session, request, cell, calls)
        if session.rank == 0 and request.out:
            merge_csv(Path(request.out), rows)
    if session.rank == 0:
        print(table(rows), flush=True)
    return rows


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = command.parser(MODULE, SETS, ["sweep", "decode"], world=2, limit_s=600.0)
    command.add_graph(result, "both")
    result.add_argument("--n", nargs="+", type=int, default=[], help="only rows of these widths")
    return result


def request_of(options: argparse.Namespace) -> Request:
    """The command line as the ranks get it."""
    shapes = [cell for name in options.shapes for cell in SETS[name]() if not options.n or cell.N in options.n]
    # Both modes of a shape one after the other.
    cells = tuple(replace(cell, graph=graph) for cell in shapes for graph in command.modes(options))
    out = command.out_of(options, NORM)
    return Request(cells, options.device, options.rounds, out, options.commit or head_commit())


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    options = parser().parse_args(arguments)
    world = num_ranks(MODULE, options.world, options.device)
    if not world:
        return 2
    return measure_on_ranks(MODULE, request_of(options), world, options.device, options.limit)


if __name__ == "__main__":
    sys.exit(main())
