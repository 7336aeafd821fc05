"""Times the strategies of one site on all ranks of its group: what `tune` writes down and `explain` shows on request.

Collective. The operands are random, several sets of them in turns so that no weight stays in a cache; the first result
of each strategy is compared with that of `library`, since a wrong result must not win.
"""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from ditron_inductor.device import groups
from ditron_inductor.device.reset import reset
from ditron_inductor.errors import StrategyUnavailable
from ditron_inductor.task.epilogue import extras_of, parse, products
from ditron_inductor.task.epilogue_torch import extra_shape
from ditron_inductor.task.nodes import (
    NODES,
    AllGatherMatmul,
    AllToAllMatmul,
    MatmulAllGather,
    MatmulAllReduce,
    MatmulAllToAll,
    MatmulReduceScatter,
)
from ditron_inductor.tune.timing import GRAPH_CALLS, ROUNDS, Call, Clock, captured, interleaved
from ditron_inductor.tune.tune_shapes import divides

Result = TypeVar("Result")
_UNAVAILABLE = "it cannot run here: "

ROTATED_BYTES = 256 << 20
MAX_ROTATED = 4
# Largest difference from `library`, relative to its largest value: both round, a wrong tile is off by all of it.
TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.02, torch.float32: 0.01}


@dataclass(frozen=True)
class SiteShape:
    """One call of one op on this rank.

    rows: shape of the left operand [.., K], the shard for an all-gather. columns: of each weight [K, N_i]. dim: the
    gathered or scattered dimension, 0 for an all-reduce. depths: of a reduction's products, K_i that add up to K; empty
    for one. bias: whether a reduction adds a row. epilogue: its text, see task/epilogue.py. parts: of the columns that
    an all-to-all exchanges. m, n, k: as in a `PlanRequest`.
    """

    op: str
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    dim: int
    dtype: torch.dtype
    world_size: int
    depths: tuple[int, ...] = ()
    bias: bool = False
    epilogue: str = ""
    parts: int = 1

    @staticmethod
    def of_matmul(op: str, m: int, n: int, k: int, dtype: torch.dtype, world_size: int) -> SiteShape:
        """The plainest call whose matmul is [m, k] @ [k, n]. ValueError where m rows do not divide over the ranks."""
        if not divides(op, m, world_size):
            raise ValueError(f"{op}: {m} rows do not divide over {world_size} ranks")
        rows = m // world_size if op == AllGatherMatmul.kind else m
        # A product is gathered by columns, as a column-parallel layer's is.
        return SiteShape(op, (rows, k), (n,), int(op == MatmulAllGather.kind), dtype, world_size)

    @property
    def m(self) -> int:
        gathered = self.world_size if self.op == AllGatherMatmul.kind else 1
        scattered = self.world_size if self.op == AllToAllMatmul.kind else 1
        return gathered * math.prod(self.rows[:-1]) // scattered

    @property
    def n(self) -> int:
        return sum(self.columns)

    @property
    def k(self) -> int:
        return self.rows[-1] * (self.world_size if self.op == AllToAllMatmul.kind else 1)

    @property
    def out_rows(self) -> int:
        """Of the output, all dimensions but the last as one."""
        return self.m // self.world_size if self.op == MatmulReduceScatter.kind else self.m

    def extras(self) -> list[tuple[int, int]]:
        """The shapes of the epilogue's extra tensors."""
        if not self.epilogue:
            return []
        shapes: dict[int, tuple[int, int]] = {}
        epilogue = parse(self.epilogue)
        parts = [(output, self.out_rows) for output in epilogue.outputs]
        parts += [] if epilogue.pre is None else [(epilogue.pre, self.m)]
        for part, rows in parts:
            wide = self.columns[min(products(part))]
            for one in extras_of([part]):
                shapes[one.index] = extra_shape(one.kind, (rows, wide))
        return [shapes[index] for index in sorted(shapes)]

    @property
    def text(self) -> str:
        """`matmul_all_reduce m=16 n=8192 k=7168 bfloat16`."""
        return f"{self.op} m={self.m} n={self.n} k={self.k} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Timings:
    """Microseconds by strategy, the maximum over ranks, equal on all of them. notes: why a strategy has no time."""

    us: dict[str, float]
    notes: tuple[str, ...]


def measure(
    shape: SiteShape,
    *,
    group_name: str,
    device: torch.device,
    strategies: Sequence[str] = (),
    graph: bool = False,
    rounds: int = ROUNDS,
    workspace_limit: int,
    timeout_s: float,
) -> Timings:
    """Time `strategies`, all that there are without any, at `shape`, inside a CUDA graph if `graph`. All ranks of the
    group give the same arguments.
    """
    strategies = strategies or NODES[shape.op].strategies
    clock = Clock(device, groups.find(group_name))
    calls = _calls(shape, group_name, device, strategies, workspace_limit, timeout_s)
    ready: dict[str, Call] = {}
    replay: Call | None
    notes: list[str] = []
    wanted: torch.Tensor | None = None
    for name, call in calls.items():
        result, problem = attempt(functools.partial(call, 0), device)
        if result is not None and wanted is not None:
            problem = _difference(result, wanted)
        if not _settle(clock, name, problem, notes, group_name):
            continue
        replay = call
        if graph:
            replay, problem = attempt(functools.partial(captured, call), device)
            if not _settle(clock, name, problem, notes, group_name):
                continue
        assert replay is not None
        ready[name] = replay
        wanted = result if name == "library" else wanted
    per_call = GRAPH_CALLS if graph else 1
    times = {name: us / per_call for name, us in interleaved(clock, ready, rounds).items()}
    ready.clear()
    calls.clear()
    del wanted
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return Timings(times, tuple(notes))


def _calls(
    shape: SiteShape,
    group_name: str,
    device: torch.device,
    strategies: Sequence[str],
    workspace_limit: int,
    timeout_s: float,
) -> dict[str, Callable[[int], torch.Tensor]]:
    """One function per strategy that calls the op on the i-th operands and returns its first output."""
    nbytes = (math.prod(shape.rows) + shape.k * shape.n) * shape.dtype.itemsize
    copies = max(1, min(MAX_ROTATED, math.ceil(ROTATED_BYTES / nbytes)))
    generator = torch.Generator(device).manual_seed(1 + groups.find(group_name).rank())

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device).to(shape.dtype)

    def weight(deep: int, wide: int) -> torch.Tensor:
        # With contiguous K, as nn.Linear holds it.
        return draw(wide, deep).div_(math.sqrt(shape.k)).t()

    gathers = shape.op == AllGatherMatmul.kind
    depths = shape.depths or (shape.rows[-1],)
    left = [[draw(*shape.rows[:-1], deep) for deep in depths] for _ in range(copies)]
    sizes = [(deep, shape.n) for deep in depths]
    if gathers or shape.op == AllToAllMatmul.kind:
        sizes = [(shape.k, wide) for wide in shape.columns]
    right = [[weight(*size) for size in sizes] for _ in range(copies)]
    bias = draw(shape.n) if shape.bias else None
    behind = ([draw(*size) for size in shape.extras()], shape.epilogue) if shape.epilogue else ()

    def call(strategy: str) -> Callable[[int], torch.Tensor]:
        site = (shape.world_size, group_name, f"measure/0:{shape.op}", strategy, workspace_limit, timeout_s)
        ops = torch.ops.ditron
        if gathers:
            return lambda i: ops.all_gather_matmul(
                left[i % copies][0], right[i % copies], None, shape.dim, False, *site, *behind
            )[0]
        if shape.op == MatmulReduceScatter.kind:
            return lambda i: ops.matmul_reduce_scatter(
                left[i % copies], right[i % copies], bias, None, shape.dim, "sum", *site, *behind
            )[0]
        if shape.op == MatmulAllGather.kind:
            return lambda i: ops.matmul_all_gather(left[i % copies], right[i % copies], bias, None, shape.dim, *site)[0]
        if shape.op == MatmulAllToAll.kind:
            exchange = shape.dim, shape.parts
            return lambda i: ops.matmul_all_to_all(left[i % copies], right[i % copies], bias, None, *exchange, *site)[0]
        if shape.op == AllToAllMatmul.kind:
            exchange = shape.dim, shape.parts
            return lambda i: ops.all_to_all_matmul(
                left[i % copies][0], right[i % copies][0], None, *exchange, False, *site
            )[0]
        assert shape.op == MatmulAllReduce.kind, f"not a kind: {shape.op}"
        return lambda i: ops.matmul_all_reduce(left[i % copies], right[i % copies], bias, None, "sum", *site, *behind)[
            0
        ]

    return {strategy: call(strategy) for strategy in strategies}


def attempt(act: Callable[[], Result], device: torch.device) -> tuple[Result | None, str]:
    """The result and no problem, or None and what went wrong: whatever it is, the ranks have to talk about it."""
    try:
        result = act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except StrategyUnavailable as error:
        return None, f"{_UNAVAILABLE}{error.fields['reason']}"
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error).strip()[:300]}"
    return result, ""


def _settle(clock: Clock, name: str, problem: str, notes: list[str], group_name: str) -> bool:
    """Whether no rank has a problem. Else one is noted, and after a failure half way the group made usable again."""
    problems = [text for text in clock.agree(problem) if text]
    if not problems:
        return True
    notes.append(f"{name}: {problems[0]}")
    if name != "library" and not all(text.startswith(_UNAVAILABLE) for text in problems):
        reset(group_name)
    return False


def _difference(got: torch.Tensor, wanted: torch.Tensor) -> str:
    """What is wrong with a result, or nothing."""
    scale = float(wanted.float().abs().max())
    error = float((got.float() - wanted.float()).abs().max()) / max(scale, 1e-30)
    # A NaN compares as small with everything; it has to lose.
    right = error <= TOLERANCE.get(wanted.dtype, 0.0)
    return "" if right else f"its result differs from library's by {error:.1e} of the largest value"
