"""`python -m benchmarks.ops.flash_decode`: decode attention over a cache that is sharded along the sequence.

    flash_decode    out = attention of B queries over T tokens in all, T / W of each sequence on every rank

Contestants, all of a shape in one interleaved run:

    nccl        the best local split-KV attention, NCCL's all-gather of its parts, and one kernel that merges them: the
                fastest of `nccl:ours` (our kernel), `nccl:flash` and `nccl:cudnn` (torch's, their parts packed and
                merged by Inductor's kernels)
    ditron, ditron:tile, ditron:library     the op, as its trial chooses, and forced
    local:ours, local:flash, local:cudnn    the local attention alone: no contest, but what the rest is built on
    local:128x4..   with --tune, ours with other blocks, stages, warps, programs for each SM and rounds of them
    read        a kernel that reads the local cache and does nothing with it: the limit of all of them

All sequences are as long as the cache, which torch's kernels need; these get copies in the layout that is best for
them. Caches change from call to call, so many that none stays in the GPU's cache. A contestant is timed only if its
result is right on all ranks. Rows go into benchmarks/results/attention.csv.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from benchmarks.launch import measure_on_ranks, num_ranks
from benchmarks.ops import command
from benchmarks.records import ATTENTION, Row, by_cell, head_commit, merge_csv

if TYPE_CHECKING:
    import torch

    from benchmarks.session import Session
    from ditron_inductor.lowering.flash_decode.local_decode import DecodeOperands, LocalAttention

MODULE = "benchmarks.ops.flash_decode"
OP = "flash_decode"
ITEMSIZE = 2
ROTATED_BYTES = 256 << 20
MOST_BYTES = 36 << 30
"""Of a rank's cache; larger cells are left out."""
MOST_COPIES = 16
GRAPH_US, MOST_GRAPH_CALLS = 3000.0, 20
"""What a graph should take, and calls in it."""
READ_BYTES_PER_S = 4.2e12
"""To begin with, for an estimate."""
SHARPNESS = 4.0
"""Of the scores: so that a few tokens outweigh the others, and a wrong one is seen."""
CHECKED_SEQUENCES = 2
SLOWER = 1.02
"""What ours may be slower than the baseline."""
GAINS = {65536: 1.4, 262144: 1.15}
"""By tokens in all: of ours over the baseline on 4 ranks, for one sequence."""
HBM_TOKENS = 1 << 20
LEAST_HBM_RATE = 0.85
"""Of the rate of `read`, with so many tokens on each rank."""


@dataclass(frozen=True)
class Cell:
    """B sequences of T tokens over all ranks."""

    B: int
    T: int
    Hq: int = 32
    Hkv: int = 8
    D: int = 128
    graph: bool = False

    @property
    def shape(self) -> str:
        return f"B={self.B};T={self.T};Hq={self.Hq};Hkv={self.Hkv};D={self.D}"

    def local_bytes(self, world_size: int) -> int:
        """Returns the bytes of the keys and values of a rank."""
        return 2 * self.B * (self.T // world_size) * self.Hkv * self.D * ITEMSIZE


TUNED = (
    (32, 4, 4, 2, 1), (32, 6, 4, 2, 1), (32, 4, 4, 3, 1), (64, 2, 4, 2, 1), (64, 3, 4, 2, 1), (64, 4, 4, 1, 1),
    (64, 6, 4, 1, 1), (64, 3, 8, 2, 1), (64, 4, 8, 2, 1), (128, 2, 4, 1, 1), (128, 3, 4, 1, 1), (128, 4, 4, 1, 1),
    (128, 3, 8, 1, 1), (64, 4, 4, 2, 2), (64, 4, 4, 2, 4), (128, 3, 4, 1, 4),
)  # fmt: skip
"""(block_n, num_stages, num_warps, programs_per_sm, least_rounds) for heads of 128 elements; there is one program for
each SM, but for many heads.
"""
HEADS = ((32, 8), (64, 8))
"""Of an 8B and of a 70B Llama."""
TOKENS = (16384, 65536, 262144, 1048576)
BATCHES = (1, 8, 32, 64)

SETS: dict[str, Callable[[int], list[Cell]]] = {
    "decode": lambda world: [Cell(b, t, *heads) for heads in HEADS for b in BATCHES for t in TOKENS],
    "hbm": lambda world: [Cell(1, world * HBM_TOKENS), Cell(1, world * HBM_TOKENS, 64, 8)],
    "few": lambda world: [Cell(1, 16384), Cell(1, 65536), Cell(1, 262144), Cell(8, 65536), Cell(64, 16384)],
    "dims": lambda world: [Cell(b, 65536, 16, 8, d) for d in (64, 256) for b in (1, 32)],
    "tiny": lambda world: [Cell(1, 48 * world, 4, 2, 16)],
}


@dataclass(frozen=True)
class Request:
    """The request of one run. only: the contestants that run, or empty for all of them."""

    cells: tuple[Cell, ...]
    device: str
    rounds: int
    out: str
    commit: str
    only: tuple[str, ...]
    tune: bool


@dataclass(frozen=True, eq=False)
class Problem:
    """Operands of a cell on this rank: caches [B, T / W, Hkv, D], several of them in turns."""

    q: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    lengths: torch.Tensor
    scale: float

    @functools.cached_property
    def heads_first(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies as [B, Hkv, T / W, D]: cuDNN is many times slower with the strides of the others."""
        pairs = zip(self.keys, self.values, strict=True)
        return [(k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()) for k, v in pairs]


def make_problem(cell: Cell, session: Session) -> Problem:
    import torch

    device, local = session.clock.device, cell.T // session.world_size
    dtype = torch.bfloat16
    same = torch.Generator(device).manual_seed(0)
    own = torch.Generator(device).manual_seed(1 + session.rank)
    copies = max(1, min(MOST_COPIES, math.ceil(ROTATED_BYTES / cell.local_bytes(session.world_size))))

    def draw() -> torch.Tensor:
        return torch.empty(cell.B, local, cell.Hkv, cell.D, dtype=dtype, device=device).normal_(generator=own)

    q = torch.randn(cell.B, cell.Hq, cell.D, device=device, generator=same).mul_(SHARPNESS).to(dtype)
    return Problem(
        q,
        [draw() for _ in range(copies)],
        [draw() for _ in range(copies)],
        torch.full([cell.B], local, dtype=torch.int32, device=device),
        cell.D**-0.5,
    )


def torch_attention(problem: Problem, which: str) -> Any:
    """(o, lse) of the i-th local cache by one of torch's kernels. For flash, heads that share keys are rows of a query;
    cuDNN knows of shared keys.
    """
    import torch

    B, Hq, D = problem.q.shape
    Hkv = problem.keys[0].shape[2]
    rows, heads = problem.q.view(B, Hkv, Hq // Hkv, D), problem.q.view(B, Hq, 1, D)
    caches = problem.heads_first
    aten, scale = torch.ops.aten, problem.scale

    def attend(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = caches[i % len(caches)]
        if which == "flash":
            found = aten._scaled_dot_product_flash_attention(rows, k, v, 0.0, False, False, scale=scale)
        else:
            found = aten._scaled_dot_product_cudnn_attention(heads, k, v, None, True, 0.0, False, False, scale=scale)
        return found[0], found[1]

    return attend


def contestants(session: Session, problem: Problem, group_name: str, tune: bool) -> dict[str, Any]:
    """Calls by name: of those in the contest, which return [B, Hq, D], and of the others."""
    import torch
    import torch.distributed as dist

    from benchmarks.ops.contest import TIMEOUT_S, WORKSPACE_LIMIT, in_turns
    from benchmarks.ops.read import Reader
    from ditron_inductor.lowering.decode_attention.decode_config import DecodeConfig
    from ditron_inductor.lowering.flash_decode.local_decode import DecodeOperands, make_local, shape_of
    from ditron_inductor.lowering.host.local_calls import facts_of
    from ditron_inductor.task import flash_decode as reference
    from ditron_inductor.task.nodes import FlashDecode, Policy

    q, world_size = problem.q, session.world_size
    count = len(problem.keys)
    on_gpu = q.device.type == "cuda"
    found: dict[str, Any] = {}
    if on_gpu:
        facts = facts_of(q.device)
        node = FlashDecode(problem.scale, 0.0, world_size, group_name, "", Policy())
        pairs = zip(problem.keys, problem.values, strict=True)
        given = [DecodeOperands(q, k, v, problem.lengths, None) for k, v in pairs]
        local = make_local(shape_of(node, given[0], facts.num_sms), q.device, facts.arch)
        # Kept, as the library's strategy must not: calls of this program never run at the same time.
        counters = torch.zeros(local.shape.heads.heads, dtype=torch.int32, device=q.device)
        parts = torch.empty(world_size * local.area, dtype=torch.float32, device=q.device)

        def by_ours(i: int) -> torch.Tensor:
            dist.all_gather_into_tensor(parts, local.part(given[i % count], counters))
            return local.merged(parts, world_size, q)

        found["nccl:ours"] = by_ours
        found["local:ours"] = functools.partial(_part, local, given, counters)
        for each in TUNED if tune else ():
            block_n, num_stages, num_warps, programs_per_sm, least_rounds = each
            config = DecodeConfig(
                block_n, num_warps, num_stages, programs_per_sm=programs_per_sm, least_rounds=least_rounds
            ).validate()
            other = make_local(local.shape, q.device, facts.arch, config)
            found[f"local:{'x'.join(map(str, each))}"] = functools.partial(_part, other, given, counters)
        for which in ("flash", "cudnn"):
            attend = torch_attention(problem, which)
            found[f"local:{which}"] = attend
            found[f"nccl:{which}"] = _gathered(attend, q, world_size)
        found["read"] = Reader(list(zip(problem.keys, problem.values, strict=True)))
    else:

        def by_torch(i: int) -> torch.Tensor:
            k, v = problem.keys[i % count], problem.values[i % count]
            group = {"world_size": world_size, "group_name": group_name}
            return reference.flash_decode(q, k, v, problem.lengths, scale=problem.scale, **group)

        found["gloo"] = by_torch

    caches = zip(problem.keys, problem.values, strict=True)
    of_calls = [{"q": q, "k": k, "v": v, "lengths": problem.lengths} for k, v in caches]

    def ours(strategy: str) -> Any:
        site, policy = f"benchmark/0:{OP}:{strategy}", Policy(strategy, WORKSPACE_LIMIT, TIMEOUT_S, strategy == "auto")
        return in_turns(FlashDecode(problem.scale, 0.0, world_size, group_name, site, policy), of_calls, 0)

    return found | {"ditron": ours("auto")} | {f"ditron:{name}": ours(name) for name in ("tile", "library")}


def _part(local: LocalAttention, given: Sequence[DecodeOperands], counters: torch.Tensor, i: int) -> torch.Tensor:
    return local.part(given[i % len(given)], counters)


def _gathered(attend: Any, q: torch.Tensor, world_size: int) -> Any:
    """The all-gather of the parts of torch's attention, with Inductor's kernels before and after it."""
    import torch
    import torch.distributed as dist

    B, Hq, D = q.shape

    def pack(o: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        return torch.cat([o.reshape(B, Hq, D).float(), lse.reshape(B, Hq, 1)], dim=-1)

    def merge(parts: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(parts[..., D], dim=0)
        return (weights[..., None] * parts[..., :D]).sum(0).to(q.dtype)

    packed, merged = torch.compile(pack, dynamic=False), torch.compile(merge, dynamic=False)
    parts = torch.empty(world_size, B, Hq, D + 1, dtype=torch.float32, device=q.device)

    def call(i: int) -> torch.Tensor:
        o, lse = attend(i)
        dist.all_gather_into_tensor(parts, packed(o, lse))
        result: torch.Tensor = merged(parts)
        return result

    return call


def expected(session: Session, problem: Problem, group_name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(some of the sequences, their attention of the 0-th operands in fp32). Collective."""
    import torch

    from ditron_inductor.task import flash_decode as reference

    B = problem.q.shape[0]
    sequences = torch.linspace(0, B - 1, min(B, CHECKED_SEQUENCES), device=problem.q.device).long()
    group = {"world_size": session.world_size, "group_name": group_name}
    rows = []
    for one in sequences.tolist():
        given = (problem.q, problem.keys[0], problem.values[0], problem.lengths)
        q, k, v, lengths = (x[one : one + 1] for x in given)
        rows.append(reference.flash_decode(q.float(), k, v, lengths, scale=problem.scale, **group))
    return sequences, torch.cat(rows)


def right_calls(session: Session, request: Request, cell: Cell, group_name: str) -> dict[str, Any]:
    """The contestants of a shape whose results are right."""
    import torch

    from benchmarks.tolerances import assert_near

    torch._dynamo.reset()
    problem = make_problem(cell, session)
    calls = contestants(session, problem, group_name, request.tune)
    sequences, wanted = expected(session, problem, group_name)
    if session.clock.device.type == "cuda":
        torch.cuda.empty_cache()

    def checked(name: str) -> Any:
        call = session.after_trial(name, calls[name])
        got = call(0)
        if not name.startswith(("local", "read")):
            assert_near(got[sequences], wanted, num_partials=2, what=name)
        return call

    return session.right([name for name in calls if not request.only or name in request.only], checked)


def run_cell(session: Session, request: Request, cell: Cell, calls: Mapping[str, Any]) -> list[Row]:
    """Times of the contestants, as rows."""
    import torch.distributed as dist

    from benchmarks.timing import interleaved

    estimate_us = 10.0 + cell.local_bytes(session.world_size) / READ_BYTES_PER_S * 1e6
    graph_calls = max(1, min(MOST_GRAPH_CALLS, round(GRAPH_US / estimate_us)))
    ready = session.replays(calls, graph_calls) if cell.graph else calls
    times = interleaved(session.clock, ready, graph_calls if cell.graph else 1, request.rounds)
    baselines = sorted((name for name in times if name.startswith("nccl:")), key=lambda name: times[name].p50_us)
    if baselines:
        times["nccl"] = times[baselines[0]]
    dist.barrier()
    limit_us = times["read"].p50_us if "read" in times else None
    return session.rows_of(
        times, bench="attention", op=OP, shape=cell.shape, graph=cell.graph, limit_us=limit_us, commit=request.commit
    )


def verdict(rows: Sequence[Row]) -> str:
    """Says whether the rows of one cell reach the targets of this op. The text is empty without a baseline."""
    us = {row.contestant: row.p50_us for row in rows if row.p50_us}
    if "ditron" not in us or "nccl" not in us:
        return ""
    sizes = rows[0].sizes
    tokens, world = int(sizes["T"]), rows[0].world
    gain = us["nccl"] / us["ditron"]
    holds = us["ditron"] <= SLOWER * us["nccl"]
    if rows[0].graph and world == 4 and int(sizes["B"]) == 1:
        holds &= gain >= GAINS.get(tokens, 0.0)
    if rows[0].graph and "read" in us and tokens >= world * HBM_TOKENS:
        holds &= us["read"] / us["ditron"] >= LEAST_HBM_RATE
    return f"{gain:.2f} {'PASS' if holds else 'FAIL'}"


def table(rows: Sequence[Row]) -> str:
    """Microseconds, one line for each cell; the gain is that of `ditron` over `nccl`, HBM the rate in `ditron`."""
    names = list(dict.fromkeys(row.contestant for row in rows))
    lines = []
    for group in by_cell(rows):
        us = {row.contestant: row.p50_us for row in group if row.p50_us}
        sizes = {name: int(size) for name, size in group[0].sizes.items()}
        rate = Cell(**sizes).local_bytes(group[0].world) / us["ditron"] / 1e6 if "ditron" in us else 0.0
        mode = "graph" if group[0].graph else "eager"
        times = [f"{us[name]:.1f}" if name in us else "-" for name in names]
        lines.append([group[0].shape, mode, *times, verdict(group), f"{rate:.2f} TB/s"])
    return tabulate(lines, ["shape", "mode", *names, "gain", "HBM"], disable_numparse=True)


def measure(session: Session, request: Request) -> list[Row]:
    """All cells, on one rank."""
    group_name = session.group_name
    rows: list[Row] = []
    shape, calls = "", dict[str, Any]()
    for cell in request.cells:
        if cell.shape != shape:
            # The caches of the cell before, first.
            calls = {}
            shape, calls = cell.shape, right_calls(session, request, cell, group_name)
        found = run_cell(session, request, cell, calls)
        rows += found
        if session.rank == 0:
            print(table(found), flush=True)
            if request.out:
                merge_csv(Path(request.out), rows)
    if session.rank == 0:
        print(table(rows), flush=True)
    return rows


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = command.parser(MODULE, SETS, ["decode", "hbm"], world=2, limit_s=600.0)
    command.add_graph(result, "graph")
    result.add_argument("--batch", nargs="+", type=int, default=[], help="only so many sequences")
    result.add_argument("--only", nargs="+", default=[], help="contestants")
    result.add_argument("--tune", action="store_true", help="ours in other blocks too")
    return result


def request_of(options: argparse.Namespace) -> Request:
    """The command line as the ranks get it."""
    shapes = [cell for name in options.shapes for cell in SETS[name](options.world)]
    shapes = [cell for cell in shapes if not options.batch or cell.B in options.batch]
    shapes = [cell for cell in shapes if cell.local_bytes(options.world) <= MOST_BYTES]
    # Both modes of a shape one after the other.
    cells = tuple(replace(cell, graph=graph) for cell in shapes for graph in command.modes(options))
    out, commit = command.out_of(options, ATTENTION), options.commit or head_commit()
    return Request(cells, options.device, options.rounds, out, commit, tuple(options.only), options.tune)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    options = parser().parse_args(arguments)
    options.world = num_ranks(MODULE, options.world, options.device)
    if not options.world:
        return 2
    return measure_on_ranks(MODULE, request_of(options), options.world, options.device, options.limit)


if __name__ == "__main__":
    sys.exit(main())
