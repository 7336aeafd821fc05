"""Random programs compute the same before and after all passes: hundreds of graphs, all ranks in this process.

A failure prints the smallest program that hypothesis finds for it, and its graph before and after.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import getitem
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import fx
from torch._inductor.fx_passes import post_grad
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.tolerances import relative_error
from ditron_inductor import pipeline
from ditron_inductor.options import Options
from ditron_inductor.passes.fuse import all_gather_matmul, matmul_reduce_scatter
from ditron_inductor.passes.graph import products, proofs, whole_sums
from ditron_inductor.passes.graph.collectives import read_collective
from ditron_inductor.passes.graph.reasons import ReasonCode, Refused
from ditron_inductor.task.nodes import KINDS
from tests.passes.graphs import WORLD_SIZE, fake_group, group_name, run_ranks, text
from tests.passes.make_programs import ALGEBRA, NESTED, make_program, seeded
from tests.passes.programs import Program

# Without `--all-cases` the few.
EXAMPLES, FEW_EXAMPLES = 150, 60
DYNAMIC_EXAMPLES, FEW_DYNAMIC_EXAMPLES = 15, 8
ALGEBRA_EXAMPLES = 40
NESTED_EXAMPLES = 30
GROUP_SIZES = {"world": 4, "row": 2, "column": 2}
MEMBERS = {"world": [[0, 1, 2, 3]], "row": [[0, 1], [2, 3]], "column": [[0, 2], [1, 3]]}
REDUCE_OPS = (*["sum"] * 6, "avg", "avg", "max")
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
    module: fx.GraphModule, program: Program, groups: dict[str, tuple[str, int]], replicated: bool = False
) -> list[torch.Tensor]:
    """The outputs of all ranks, and their inputs afterwards."""
    inputs = [program.arguments(seed=0 if replicated else rank) for rank in range(WORLD_SIZE)]
    outputs = run_ranks(module, inputs, {groups[name][0]: ranks for name, ranks in MEMBERS.items()})
    return [value for values in (*outputs, *inputs) for value in values]


def check(
    program: Program,
    groups: dict[str, tuple[str, int]],
    dynamic: bool = False,
    options: Options | None = None,
    replicated: bool = False,
    rewritten: Counter[str] | None = None,
) -> Counter[str]:
    """AssertionError unless the passes keep what the program computes and writes; how many sites of each kind.

    replicated: all ranks get the same inputs. rewritten: counts what each pass did.
    """
    module = traced(program.function(groups), program.arguments(0), dynamic)
    before, wanted = text(module.graph), run_all(module, program, groups, replicated)
    try:
        counts = pipeline.run(module.graph, options or Options(), pipeline.PASSES)
        if rewritten is not None:
            rewritten.update(counts)
        module.recompile()
        got = run_all(module, program, groups, replicated)
        for one, other in zip(got, wanted, strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype
            assert relative_error(one, other) < TOLERANCE, f"got {one}\nnot {other}"
    except Exception as error:
        raise AssertionError(f"{error}\n{program}\n\nbefore:\n{before}\nafter:\n{text(module.graph)}") from error
    return Counter(node.target._opname for node in module.graph.nodes if getattr(node.target, "_opname", "") in KINDS)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    return make_program(lambda n: draw(st.integers(0, n - 1)), GROUP_SIZES, reduce_ops=REDUCE_OPS)


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


def test_static_sizes(groups: dict[str, tuple[str, int]], pytestconfig: pytest.Config) -> None:
    examples = EXAMPLES if pytestconfig.option.all_cases else FEW_EXAMPLES
    count, seen = check_many(groups, examples, dynamic=False)
    assert seen["fused"] >= 0.2 * count, seen
    assert all(seen[kind] for kind in KINDS), seen


def test_dynamic_sizes(groups: dict[str, tuple[str, int]], pytestconfig: pytest.Config) -> None:
    examples = DYNAMIC_EXAMPLES if pytestconfig.option.all_cases else FEW_DYNAMIC_EXAMPLES
    count, seen = check_many(groups, examples, dynamic=True)
    assert seen["fused"] >= 0.1 * count, seen


def algebraic(seed: int, phrases: Sequence[str] = ALGEBRA) -> Program:
    return make_program(seeded(seed), GROUP_SIZES, reduce_ops=REDUCE_OPS, phrases=phrases)


def test_algebra(groups: dict[str, tuple[str, int]]) -> None:
    rewritten: Counter[str] = Counter()
    for seed in range(ALGEBRA_EXAMPLES):
        check(algebraic(seed), groups, rewritten=rewritten)
    assert min(rewritten[name] for name in ("share_gathers", "merge_reductions")) >= 3, rewritten


def test_sequence_parallel(groups: dict[str, tuple[str, int]]) -> None:
    """Inputs that enter have to be the same on all ranks: here all are."""
    rewritten: Counter[str] = Counter()
    options = Options(sequence_parallel="on")
    for seed in range(ALGEBRA_EXAMPLES):
        check(algebraic(seed), groups, options=options, replicated=True, rewritten=rewritten)
    assert rewritten["sequence_parallel"] >= 20, rewritten


@pytest.mark.parametrize("sequence_parallel", ["auto", "on"])
def test_reductions_of_reductions(groups: dict[str, tuple[str, int]], sequence_parallel: str) -> None:
    """What a pass has found may be changed by what it rewrites before."""
    rewritten: Counter[str] = Counter()
    options = Options(sequence_parallel=sequence_parallel)
    for seed in range(NESTED_EXAMPLES):
        program = algebraic(seed, NESTED)
        check(program, groups, options=options, replicated=sequence_parallel == "on", rewritten=rewritten)
    assert sequence_parallel == "auto" or rewritten["sequence_parallel"] >= NESTED_EXAMPLES, rewritten


# What the check is worth: each of these mistakes has to be found.

Mistake = Callable[[pytest.MonkeyPatch, dict[str, tuple[str, int]]], None]


def chunks_in_any_order(patch: pytest.MonkeyPatch, groups: dict[str, tuple[str, int]]) -> None:
    def regrouped(cat: fx.Node, world_size: int) -> proofs.Regrouped | Refused:
        found = proved(cat, world_size)
        if found is not ReasonCode.CHUNKS_PERMUTED:
            return found
        parts = list(cat.args[0])
        one = proofs.piece(parts[0])
        dim = cat.args[1] if len(cat.args) > 1 else 0
        between = dict.fromkeys([*(part.all_input_nodes[0] for part in parts if part.target is getitem), *parts])
        return proofs.Regrouped(one.source, cat, one.dim, dim, tuple(between))

    proved = proofs.regrouped
    patch.setattr(proofs, "regrouped", regrouped)


def used_intermediates(patch: pytest.MonkeyPatch, groups: dict[str, tuple[str, int]]) -> None:
    patch.setattr(whole_sums, "find_product", lambda node, users: products._read(node))


def lost_biases(patch: pytest.MonkeyPatch, groups: dict[str, tuple[str, int]]) -> None:
    def find_product(node: fx.Node, users: Any) -> products.Product | Refused:
        found = products.find_product(node, users)
        return replace(found, bias=None) if isinstance(found, products.Product) else found

    patch.setattr(matmul_reduce_scatter, "find_product", find_product)


def averages_as_sums(patch: pytest.MonkeyPatch, groups: dict[str, tuple[str, int]]) -> None:
    def read(node: fx.Node) -> Any:
        found = read_collective(node)
        return found if isinstance(found, ReasonCode) else replace(found, reduce_op="sum")

    patch.setattr(matmul_reduce_scatter, "read_collective", read)


def rows_for_columns(patch: pytest.MonkeyPatch, groups: dict[str, tuple[str, int]]) -> None:
    def read(node: fx.Node) -> Any:
        found = read_collective(node)
        wrong = not isinstance(found, ReasonCode) and found.group_name == groups["column"][0]
        return replace(found, group_name=groups["row"][0]) if wrong else found

    patch.setattr(all_gather_matmul, "read_collective", read)


def lost_writes(patch: pytest.MonkeyPatch, groups: dict[str, tuple[str, int]]) -> None:
    def lose(graph: fx.Graph, *, options: Options) -> int:
        writes = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        for node in writes:
            node.replace_all_uses_with(node.args[1])
            graph.erase_node(node)
        return len(writes)

    patch.setattr(pipeline, "PASSES", (*pipeline.PASSES, lose))


@pytest.mark.parametrize(
    "mistake",
    [chunks_in_any_order, used_intermediates, lost_biases, averages_as_sums, rows_for_columns, lost_writes],
)
def test_a_mistake_is_found(
    groups: dict[str, tuple[str, int]], monkeypatch: pytest.MonkeyPatch, mistake: Mistake
) -> None:
    mistake(monkeypatch, groups)
    with pytest.raises(AssertionError, match="before:"):
        for seed in range(EXAMPLES):
            check(make_program(seeded(seed), GROUP_SIZES, reduce_ops=REDUCE_OPS), groups)
