"""Times the strategies of one site on all ranks of its group: what `tune` writes down and `explain` shows on request.

It is collective. The operands are random, with several sets in turns, so that no weight stays in a cache. The first
result of each strategy is compared with that of `library`, because a wrong result must not win.
"""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from ditron_inductor.device import groups
from ditron_inductor.device.reset import reset
from ditron_inductor.errors import StrategyUnavailable
from ditron_inductor.report.timing import GRAPH_CALLS, ROUNDS, Call, Clock, captured, interleaved
from ditron_inductor.task import schema
from ditron_inductor.task.node import Shapes, Sizes
from ditron_inductor.task.nodes import TASKS, Policy

WEIGHTS = ("weights", "weight", "b")
"""The names of operands that are weights."""
Result = TypeVar("Result")
_UNAVAILABLE = "it cannot run here: "

ROTATED_BYTES = 256 << 20
MAX_ROTATED = 4
# Largest difference from `library`, relative to its largest value: both round, a wrong tile is off by all of it.
TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.02, torch.float32: 0.01}


@dataclass(frozen=True)
class SiteShape:
    """One call of a node on this rank: the shapes of its operands by name, and their dtype."""

    node: Any
    shapes: Shapes
    dtype: torch.dtype

    @staticmethod
    def of_matmul(op: str, m: int, n: int, k: int, dtype: torch.dtype, world_size: int) -> SiteShape:
        """The simplest call whose matmul is [m, k] @ [k, n]. ValueError where m rows do not divide over the ranks."""
        return SiteShape(*TASKS[op].plain(m, n, k, world_size), dtype)

    @property
    def sizes(self) -> Sizes:
        """m, n and k of the call."""
        found: Sizes = self.node.sizes(self.shapes)
        return found

    @property
    def text(self) -> str:
        """`matmul_all_reduce m=16 n=8192 k=7168 bfloat16`."""
        sizes = self.sizes
        return f"{self.node.kind} m={sizes.m} n={sizes.n} k={sizes.k} {str(self.dtype).removeprefix('torch.')}"


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
    """Times `strategies`, by default all, inside a CUDA graph if `graph`. All ranks give the same arguments."""
    strategies = strategies or shape.node.strategies
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
    """Returns one function per strategy, which calls the op on the i-th operands and returns its first output."""
    sizes = [size for given in shape.shapes.values() for size in (given if isinstance(given, list) else [given])]
    nbytes = sum(math.prod(size) for size in sizes) * shape.dtype.itemsize
    copies = max(1, min(MAX_ROTATED, math.ceil(ROTATED_BYTES / max(nbytes, 1))))
    generator = torch.Generator(device).manual_seed(1 + groups.find(group_name).rank())

    def draw(name: str, size: tuple[int, ...]) -> torch.Tensor:
        if name not in WEIGHTS:
            return torch.randn(size, generator=generator, device=device).to(shape.dtype)
        # Make the weight with contiguous K, as nn.Linear holds it.
        deep, wide = size
        weight = torch.randn(wide, deep, generator=generator, device=device).to(shape.dtype)
        return weight.div_(math.sqrt(max(shape.sizes.k, 1))).t()

    def operands() -> dict[str, Any]:
        return {
            name: [draw(name, size) for size in given] if isinstance(given, list) else draw(name, given)
            for name, given in shape.shapes.items()
        }

    drawn = [operands() for _ in range(copies)]

    def call(strategy: str) -> Callable[[int], torch.Tensor]:
        policy = Policy(strategy, workspace_limit, timeout_s)
        node = replace(shape.node, group_name=group_name, site=f"measure/0:{shape.node.kind}", policy=policy)
        op, arguments = schema.overload(node.kind), [schema.arguments(node, **operands) for operands in drawn]
        return lambda i: op(*arguments[i % copies])[0]

    return {strategy: call(strategy) for strategy in strategies}


def attempt(act: Callable[[], Result], device: torch.device) -> tuple[Result | None, str]:
    """Returns (result, "") or (None, what went wrong), whatever it was: the ranks have to tell each other."""
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
    """Returns whether no rank has a problem. Otherwise notes one, and makes the group usable again."""
    problems = [text for text in clock.agree(problem) if text]
    if not problems:
        return True
    notes.append(f"{name}: {problems[0]}")
    if name != "library" and not all(text.startswith(_UNAVAILABLE) for text in problems):
        reset(group_name)
    return False


def _difference(got: torch.Tensor, wanted: torch.Tensor) -> str:
    """Returns what is wrong with a result; empty if nothing is."""
    scale = float(wanted.float().abs().max())
    error = float((got.float() - wanted.float()).abs().max()) / max(scale, 1e-30)
    # Comparisons with NaN are false, so a NaN has to be counted as a failure.
    right = error <= TOLERANCE.get(wanted.dtype, 0.0)
    return "" if right else f"its result differs from library's by {error:.1e} of the largest value"
