"""Random programs compute the same before and after all passes: hundreds of graphs, all ranks in this process.

A failure prints the smallest program that hypothesis finds for it, and its graph before and after.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import fx
from torch._inductor.fx_passes import post_grad
from torch.fx.experimental.proxy_tensor import make_fx

from ditron_inductor import pipeline
from ditron_inductor.options import Options
from ditron_inductor.passes import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter, proofs
from ditron_inductor.passes.reasons import ReasonCode
from ditron_inductor.task.nodes import KINDS
from tests.passes.graphs import WORLD_SIZE, fake_group, group_name, run_ranks, text
from tests.passes.programs import Program, make_program, seeded
from tests.tolerances import relative_error

EXAMPLES = 400
GROUP_SIZES = {"world": 4, "row": 2, "column": 2}
MEMBERS = {"world": [[0, 1, 2, 3]], "row": [[0, 1], [2, 3]], "column": [[0, 2], [1, 3]]}
REDUCE_OPS = ("sum", "sum", "sum", "avg", "max")
# Rounding of bfloat16; where no value has that dtype, everything is exact.
TOLERANCE = 2.0e-2


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[str, tuple[str, int]]]:
    """Name and size of the groups of a mesh of four ranks, as rank 0 sees them."""
    with fake_group(WORLD_SIZE):
        made = {name: dist.new_group(MEMBERS[name][0]).group_name for name in ("row", "column")}
        yield {name: (str(made.get(name, group_name())), size) for name, size in GROUP_SIZES.items()}


def traced(fn: Callable[..., Any], args: Sequence[torch.Tensor], dynamic: bool) -> fx.GraphModule:
    """The graph that Inductor would hand to the passes: without mutations but of inputs, views as reshapes."""
    functional = torch.func.functionalize(fn, remove="mutations")
    module = make_fx(functional, tracing_mode="symbolic" if dynamic else "fake")(*args)
    module.graph.eliminate_dead_code()
    post_grad.view_to_reshape(module)
    return module


def run_all(
    module: fx.GraphModule, program: Program, groups: dict[str, tuple[str, int]]
) -> list[torch.Tensor]:
    """The outputs of all ranks, and their inputs afterwards."""
    inputs = [program.arguments(seed=rank) for rank in range(WORLD_SIZE)]
    outputs = run_ranks(module, inputs, {groups[name][0]: ranks for name, ranks in MEMBERS.items()})
    return [value for values in (*outputs, *inputs) for value in values]


def check(program: Program, groups: dict[str, tuple[str, int]], dynamic: bool = False) -> Counter[str]:
    """AssertionError unless the passes keep what the program computes and writes; how many sites of each kind."""
    module = traced(program.function(groups), program.arguments(0), dynamic)
    before, wanted = text(module.graph), run_all(module, program, groups)
    try:
        pipeline.run(module.graph, Options())
        module.recompile()
        got = run_all(module, program, groups)
        for one, other in zip(got, wanted, strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype
            assert relative_error(one, other) < TOLERANCE, f"got {one}\nnot {other}"
    except Exception as error:
        raise AssertionError(f"{error}\n{program}\n\nbefore:\n{before}\nafter:\n{text(module.graph)}") from error
    return Counter(node.target._opname for node in module.graph.nodes if getattr(node.target, "_opname", "") in KINDS)


@st.composite
def programs(draw: st.DrawFn, max_steps: int = 10) -> Program:
    return make_program(lambda n: draw(st.integers(0, n - 1)), GROUP_SIZES, reduce_ops=REDUCE_OPS, max_steps=max_steps)


def check_many(groups: dict[str, tuple[str, int]], max_examples: int, dynamic: bool) -> tuple[int, Counter[str]]:
    """Checks that many programs; how many there were, and how many had a site of each kind, or of any."""
    seen: Counter[str] = Counter()

    without_coverage = (Phase.generate, Phase.shrink)

    @settings(max_examples=max_examples, derandomize=True, deadline=None, database=None,
              suppress_health_check=list(HealthCheck), phases=without_coverage)  # fmt: skip
    @given(program=programs())
    def checked(program: Program) -> None:
        kinds = check(program, groups, dynamic)
        seen.update({**dict.fromkeys(kinds, 1), "programs": 1, "fused": bool(kinds)})

    checked()
    return seen.pop("programs"), seen


def test_programs(groups: dict[str, tuple[str, int]]) -> None:
    count, seen = check_many(groups, EXAMPLES, dynamic=False)
    print(count, seen)
    assert seen["fused"] >= 0.2 * count, seen
    assert all(seen[kind] >= 0.03 * count for kind in KINDS), seen
