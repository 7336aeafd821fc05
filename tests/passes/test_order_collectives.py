"""order_collectives: which launches are chained, how, and that the order survives Inductor without any extra kernel."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compile_fx import compile_fx
from torch._inductor.utils import run_and_get_code
from torch.distributed import _functional_collectives as functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from ditron_inductor.errors import GraphVerificationError
from ditron_inductor.options import Options
from ditron_inductor.passes.finish.order_collectives import find_chain, order_collectives
from ditron_inductor.passes.graph.launches import is_task
from ditron_inductor.task import reference, schema
from ditron_inductor.task.nodes import MatmulAllReduce, Policy
from tests.cases import rare

WORLD_SIZE = 4
LAUNCH = re.compile(r"torch\.ops\.(ditron\.matmul_all_reduce|_c10d_functional\.(?!wait_tensor)\w+)\.default\(")


@pytest.fixture(autouse=True)
def fake_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    torch._dynamo.reset()
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module", autouse=True)
def implementations() -> Iterator[None]:
    """The ops run as plain collectives here: a fake group has no peers to agree with on a workspace."""
    schema.define()
    library: Any = torch.library.Library("ditron", "IMPL")

    def matmul_all_reduce(operands, text, token):  # type: ignore[no-untyped-def]
        node = schema.parsed(MatmulAllReduce.kind, text)
        a, b, bias, _ = node.split(operands)
        where = {"world_size": node.world_size, "group_name": node.group_name}
        return [reference.matmul_all_reduce(a, b, bias, reduce_op=node.reduce_op, **where), schema.new_token(a[0])]

    library.impl("matmul_all_reduce", matmul_all_reduce, "CPU")
    library.impl("after", lambda x, token: torch.ops.aten.alias(x), "CPU")
    library.impl("after_", schema.do_nothing, "CPU")
    library.impl("token_of", schema.new_token, "CPU")
    yield
    library._destroy()


def task(a: torch.Tensor, b: torch.Tensor, *, group: str | None = None, site: str = "") -> torch.Tensor:
    """A Task node as a pass would write it, with no token yet."""
    name = dist.group.WORLD.group_name if group is None else group
    out, _ = torch.ops.ditron.matmul_all_reduce([a, b], node_text(name, site), None)
    return out


# A function that is being compiled takes the text as it is.
@torch._dynamo.assume_constant_result
def node_text(group_name: str, site: str) -> str:
    return MatmulAllReduce("sum", WORLD_SIZE, group_name, site, Policy("library")).text()


def order(graph: fx.Graph) -> int:
    count = order_collectives(graph, options=Options())
    graph.lint()
    return count


def compile_with(
    fn: Callable[..., Any], patches: dict[str, Any] | None = None, *, act: Callable[[fx.Graph], object] = order
) -> Callable[..., Any]:
    """`fn` compiled by Inductor with `act` as its pre-pass; Inductor changes the graph afterwards."""

    def backend(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        config = {"post_grad_custom_pre_pass": act, "fx_graph_cache": False, **(patches or {})}
        return compile_fx(gm, inputs, config_patches=config)

    torch._dynamo.reset()
    return torch.compile(fn, backend=backend)


def empty_kernels() -> AbstractContextManager[object]:
    """In the block Inductor compiles no C++, which takes it a second or more; its kernels then compute nothing."""
    return mock.patch.object(AsyncCompile, "cpp_pybinding", lambda *arguments: lambda *tensors: None)


def code_of(fn: Callable[..., Any], *args: Any, **settings: Any) -> str:
    """The body of the generated wrapper."""
    with empty_kernels():
        _, (code, *_) = run_and_get_code(compile_with(fn, **settings), *args)
    return code[code.index("def call(") : code.index("\ndef get_args")]


def plainly(graph: fx.Graph) -> None:
    """A pre-pass that changes nothing."""


def launches(code: str) -> list[str]:
    return [match.group(1) for match in LAUNCH.finditer(code)]


def kernels(code: str) -> int:
    """How many kernels of Inductor and of libraries the wrapper calls."""
    return len(re.findall(r"(?:cpp_fused_\w+|extern_kernels\.\w+)\(", code))


def all_forms(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    """Every form of a collective, independent of the others, between independent Task nodes."""
    group = dist.group.WORLD
    outputs = [task(x, w)]
    outputs.append(functional.all_reduce(torch.relu(x) * 2, "sum", group))
    outputs.append(task(x + 1, w))
    outputs.append(functional.all_gather_tensor(x * 3, 0, group))
    outputs += functional.all_reduce_coalesced([x + 4, x + 5], "sum", group)
    outputs += functional.all_gather_into_tensor_coalesced([x + 6, x + 7], group)
    outputs.append(functional.reduce_scatter_tensor(x @ w, "sum", 0, group))
    outputs += functional.reduce_scatter_tensor_coalesced([x * 5, x * 6], "sum", [0, 0], group)
    outputs.append(task(x + 2, w))
    outputs.append(functional.all_to_all_single(x * 2, None, None, group))
    outputs.append(functional.all_reduce(x @ w, "sum", group))
    outputs.append(functional.broadcast(x + 8, 0, group))
    outputs.append(functional.all_reduce((x + 9).sum(), "sum", group))
    outputs.append(functional.all_reduce(x, "sum", group))
    return [output * 2 for output in reversed(outputs)]


PATCHES: dict[str, dict[str, Any]] = {
    "default": {},
    "peak_memory": {"reorder_for_peak_memory": True, "reorder_for_locality": True},
    "no_peak_memory": {"reorder_for_peak_memory": False, "reorder_for_locality": True},
    "comm_overlap": {"reorder_for_compute_comm_overlap": True},
}


@pytest.fixture
def xw() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 16, generator=generator), torch.randn(16, 16, generator=generator)


@pytest.mark.parametrize("patches", PATCHES.values(), ids=PATCHES)
def test_generated_code_keeps_graph_order(patches: dict[str, Any], xw: tuple[torch.Tensor, ...]) -> None:
    names: list[str] = []

    def act(graph: fx.Graph) -> None:
        order(graph)
        names.extend(launch.target.name().replace("::", ".") for launch in find_chain(graph))

    code = code_of(all_forms, *xw, patches=patches, act=act)
    assert len(names) == 14
    # Inductor runs some of them in place.
    assert [name.removesuffix("_") for name in launches(code)] == names


def test_without_the_pass_the_order_is_lost(xw: tuple[torch.Tensor, ...]) -> None:
    """The premise: Inductor does move independent launches."""
    names: list[str] = []

    def act(graph: fx.Graph) -> None:
        names.extend(launch.target.name().replace("::", ".") for launch in find_chain(graph))

    code = code_of(all_forms, *xw, patches=PATCHES["peak_memory"], act=act)
    assert sorted(name.removesuffix("_") for name in launches(code)) == sorted(names)
    assert [name.removesuffix("_") for name in launches(code)] != names


Form = Callable[[torch.Tensor, torch.Tensor, Any], Any]
FORMS: dict[str, Form] = {
    "all_reduce_of_pointwise": lambda x, w, group: functional.all_reduce(x * 2, "sum", group),
    "all_reduce_of_matmul": lambda x, w, group: functional.all_reduce(x @ w, "sum", group),
    "all_reduce_of_input": lambda x, w, group: functional.all_reduce(x, "sum", group),
    "all_reduce_of_scalar": lambda x, w, group: functional.all_reduce(x.sum(), "sum", group),
    "all_reduce_of_used_pointwise": lambda x, w, group: (functional.all_reduce(y := x * 2, "sum", group), y),
    "all_reduce_of_used_matmul": lambda x, w, group: (functional.all_reduce(y := x @ w, "sum", group), y.relu()),
    "all_reduce_coalesced": lambda x, w, group: functional.all_reduce_coalesced([x * 2, x * 3], "sum", group),
    "all_gather_of_pointwise": lambda x, w, group: functional.all_gather_tensor(x * 2, 0, group),
    "all_gather_of_input": lambda x, w, group: functional.all_gather_tensor(x, 0, group),
    "all_gather_of_matmul": lambda x, w, group: functional.all_gather_tensor(x @ w, 0, group),
    "all_gather_coalesced": lambda x, w, group: functional.all_gather_into_tensor_coalesced([x * 2, x], group),
    "reduce_scatter_of_matmul": lambda x, w, group: functional.reduce_scatter_tensor(x @ w, "sum", 0, group),
    "reduce_scatter_of_view": lambda x, w, group: functional.reduce_scatter_tensor((x @ w)[:4], "sum", 0, group),
    "all_to_all": lambda x, w, group: functional.all_to_all_single(x * 2, None, None, group),
    "broadcast_of_pointwise": lambda x, w, group: functional.broadcast(x * 2, 0, group),
    "broadcast_of_matmul": lambda x, w, group: functional.broadcast(x @ w, 0, group),
}


@pytest.mark.parametrize("name", [*list(FORMS)[::2], *rare(*list(FORMS)[1::2])])
def test_no_extra_kernel_or_buffer(name: str, xw: tuple[torch.Tensor, ...]) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> Any:
        return task(x, w), FORMS[name](x, w, dist.group.WORLD)

    ordered, plain = code_of(fn, *xw), code_of(fn, *xw, act=plainly)
    assert kernels(ordered) == kernels(plain)
    assert ordered.count("empty_strided") == plain.count("empty_strided")


@pytest.mark.parametrize("dtype", [torch.float32, *rare(torch.bool, torch.complex64)])
def test_values_are_unchanged(dtype: torch.dtype, xw: tuple[torch.Tensor, ...]) -> None:
    """The fake group computes nothing: what goes into a collective comes out, the same with and without the pass."""

    def fn(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        group = dist.group.WORLD
        z = y ^ y if y.dtype is torch.bool else y * 3
        reduced = functional.all_reduce(z, "sum", group)
        coalesced = functional.all_reduce_coalesced([y, z], "sum", group)
        return task(x, w), reduced, *coalesced, z, y.clone(), functional.broadcast(y, 1, group)

    y = (xw[0] * 10).to(dtype)
    y[0, 0] = -0.0
    counts: list[int] = []
    actual = compile_with(fn, act=lambda graph: counts.append(order(graph)))(*xw, y)
    expected = compile_with(fn, act=plainly)(*xw, y)
    assert counts == [3]
    for one, other in zip(actual[1:], expected[1:], strict=True):
        assert torch.equal(one, other)
        if dtype.is_floating_point:
            assert torch.equal(torch.signbit(one), torch.signbit(other))


def trace(fn: Callable[..., Any], check: Callable[[fx.Graph], object], *args: Any) -> None:
    """Calls `check` on the graph that the pre-pass sees."""
    checked: list[object] = []
    with empty_kernels():
        compile_with(fn, act=lambda graph: checked.append(check(graph)))(*args)
    assert len(checked) == 1


def test_graph_without_task_is_untouched(xw: tuple[torch.Tensor, ...]) -> None:
    def check(graph: fx.Graph) -> None:
        before = str(graph)
        assert order(graph) == 0
        assert str(graph) == before

    trace(lambda x: functional.all_reduce(x * 2, "sum", dist.group.WORLD), check, xw[0])


def test_groups_that_share_two_ranks_are_chained(xw: tuple[torch.Tensor, ...]) -> None:
    """Where the ranks of a group are rows and columns, this rank's row shares only this rank with its column."""
    row, column = dist.new_group([0, 1]), dist.new_group([0, 2])

    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = task(x, w, group=row.group_name)
        apart = functional.all_gather_tensor(x, 0, column)
        return first, apart, functional.all_gather_tensor(x, 0, dist.group.WORLD)

    def check(graph: fx.Graph) -> None:
        assert order(graph) == 1
        apart, chained = (node for node in graph.nodes if "all_gather_into_tensor" in str(node.target))
        assert apart.args[0].op == "placeholder"
        assert chained.args[0].target is schema.overload("after")

    trace(fn, check, *xw)


def test_one_chain_across_groups_with_tasks(xw: tuple[torch.Tensor, ...]) -> None:
    other = dist.new_group([0, 1, 2, 3]).group_name

    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return task(x, w), task(x + 1, w, group=other), task(x + 2, w)

    def check(graph: fx.Graph) -> None:
        assert order(graph) == 2
        tokens = [node.args[schema.TOKEN] for node in graph.nodes if node.target is schema.overload("matmul_all_reduce")]
        assert tokens[0] is None and all(token is not None for token in tokens[1:])

    trace(fn, check, *xw)


def test_unnamed_group_is_chained(xw: tuple[torch.Tensor, ...]) -> None:
    """Where the graph holds a group as an object, it may be the group of a Task node."""

    def check(graph: fx.Graph) -> None:
        (gather,) = (node for node in graph.nodes if "all_gather_into_tensor" in str(node.target))
        gather.update_arg(2, gather.args[0])  # stands for the node that holds the group
        assert [is_task(launch) for launch in find_chain(graph)] == [True, False]
        gather.update_arg(2, "no such group")
        assert [is_task(launch) for launch in find_chain(graph)] == [True]
        gather.update_arg(2, dist.group.WORLD.group_name)

    trace(lambda x, w: (task(x, w), functional.all_gather_tensor(x, 0, dist.group.WORLD)), check, *xw)


def test_idempotent(xw: tuple[torch.Tensor, ...]) -> None:
    def check(graph: fx.Graph) -> None:
        assert order(graph) == 13
        before = str(graph)
        assert order(graph) == 0
        assert str(graph) == before

    trace(all_forms, check, *xw)


@pytest.mark.parametrize("last", ["all_reduce", "all_gather", "task"])
def test_idempotent_with_one_link(last: str, xw: tuple[torch.Tensor, ...]) -> None:
    group = dist.group.WORLD

    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = task(x, w)
        if last == "task":
            return first, task(x, w)
        if last == "all_gather":
            return first, functional.all_gather_tensor(x, 0, group)
        return first, functional.all_reduce(x * 2, "sum", group)

    def check(graph: fx.Graph) -> None:
        assert order(graph) == 1
        assert order(graph) == 0

    trace(fn, check, *xw)


def test_dynamic_shapes(xw: tuple[torch.Tensor, ...]) -> None:
    x, w = xw
    names: list[int] = []

    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gathered = functional.all_gather_tensor(x * 3, 0, dist.group.WORLD)
        return task(x, w), functional.all_reduce(x * 2, "sum", dist.group.WORLD), gathered, task(x + 1, w)

    compiled = compile_with(fn, act=lambda graph: names.append(order(graph)))
    torch._dynamo.mark_dynamic(x, 0)
    _, (code, *_) = run_and_get_code(compiled, x, w)
    assert len(launches(code)) == 4
    assert compiled(x.new_ones(12, 16), w)[1].shape == (12, 16)
    assert names == [3]  # one graph for both


def test_collective_without_tensor_input_is_an_error() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(8, 16)
    args = ([x, x], node_text("0", ""), None)
    node = graph.call_function(schema.overload("matmul_all_reduce"), args)
    node.meta["val"] = (torch.ones(8, 16), torch.ones(1))
    gathered = graph.call_function(torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default, ([], 4, "0"))
    gathered.meta["val"] = []
    graph.output((node, gathered))
    with pytest.raises(GraphVerificationError, match="all_gather_into_tensor_coalesced"):
        order(graph)
