"""pad_products: which products are padded, what stands in their place, and that it computes the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx
from torch.distributed import _functional_collectives as functional

from benchmarks.tolerances import assert_near, relative_error
from ditron_inductor.options import Options
from ditron_inductor.passes.finish.pad_products import find_unaligned, form, pad_by, pad_products
from ditron_inductor.passes.graph.launches import is_task
from ditron_inductor.pipeline import PASSES, DitronPipeline
from ditron_inductor.report.explain import without_caches
from ditron_inductor.task import schema
from ditron_inductor.task.alignment import Rule
from tests.passes.graphs import (
    all_gather,
    all_reduce,
    assert_no_new_guards,
    fuse,
    gather_dim,
    graph_on,
    reduce_scatter,
    text,
    traced,
)
from tests.ranks import RankContext, RankPools

aten = torch.ops.aten
PADS, SLICE, CLONE = aten.constant_pad_nd.default, aten.slice.Tensor, aten.clone.default
ALWAYS = Rule(margin=0.0)
"""Pads wherever it can."""


def count(module: fx.GraphModule, target: Any) -> int:
    return len(module.graph.find_nodes(op="call_function", target=target))


def padded(module: fx.GraphModule) -> int:
    """How many products were padded wherever that is possible."""
    found = pad_by(module.graph, ALWAYS)
    module.graph.lint()
    module.recompile()
    return found


def test_golden_all_sizes() -> None:
    module = graph_on(lambda x, w: (x @ w).relu(), (33, 17), (17, 19))
    assert padded(module) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [33, 17]
w_1 [17, 19]
constant_pad_nd_default [33, 24] = aten.constant_pad_nd(x_1, [0, 7, 0, 0])
constant_pad_nd_default_1 [24, 24] = aten.constant_pad_nd(w_1, [0, 5, 0, 7])
padded_product [33, 24] = aten.mm(constant_pad_nd_default, constant_pad_nd_default_1)
slice_tensor [33, 19] = aten.slice.Tensor(padded_product, 1, 0, 19)
relu [33, 19] = aten.relu(slice_tensor)
return relu
""",
    )


def test_golden_bias_and_columns() -> None:
    module = graph_on(lambda b, x, w: torch.addmm(b, x, w.t()).relu(), (20,), (32, 18), (20, 18))
    assert padded(module) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
b_1 [20]
x_1 [32, 18]
w_1 [20, 18]
t [18, 20] = aten.t(w_1)
constant_pad_nd_default [32, 24] = aten.constant_pad_nd(x_1, [0, 6, 0, 0])
permute_default [20, 18] = aten.permute(t, [1, 0])
constant_pad_nd_default_1 [24, 24] = aten.constant_pad_nd(permute_default, [0, 6, 0, 4])
permute_default_1 [24, 24] = aten.permute(constant_pad_nd_default_1, [1, 0])
constant_pad_nd_default_2 [24] = aten.constant_pad_nd(b_1, [0, 4])
padded_product [32, 24] = aten.addmm(constant_pad_nd_default_2, constant_pad_nd_default, permute_default_1)
slice_tensor [32, 20] = aten.slice.Tensor(padded_product, 1, 0, 20)
relu [32, 20] = aten.relu(slice_tensor)
return relu
""",
    )


def linear(b: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.addmm(b, x, w.t())


FORMS: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "rows": (lambda x, w: x @ w, ((33, 17), (17, 19))),
    "columns of w": (lambda x, w: x @ w.t(), ((33, 17), (19, 17))),
    "columns of x": (lambda x, w: x.t() @ w, ((17, 33), (17, 19))),
    "columns of both": (lambda x, w: x.t() @ w.t(), ((17, 33), (19, 17))),
    "bias": (linear, ((19,), (33, 17), (19, 17))),
    "bias of one": (linear, ((1,), (33, 17), (19, 17))),
    "bias of all": (linear, ((33, 19), (33, 17), (19, 17))),
    "bias of rows": (linear, ((33, 1), (33, 17), (19, 17))),
    "bias beside columns": (
        lambda b, x, w: torch.addmm(b, x.t(), w, beta=2.0, alpha=3.0),
        ((33, 19), (17, 33), (17, 19)),
    ),
    "batches": (torch.bmm, ((3, 33, 17), (3, 17, 19))),
    "batches of columns": (lambda x, w: torch.bmm(x.mT, w.mT), ((3, 17, 33), (3, 19, 17))),
    "batches and bias": (torch.baddbmm, ((3, 33, 19), (3, 33, 17), (3, 17, 19))),
    "batches and a row": (torch.baddbmm, ((19,), (3, 33, 17), (3, 17, 19))),
    "views behind": (lambda x, w: (x @ w).view(3, 11, 19).relu().sum(-1), ((33, 17), (17, 19))),
    "order behind": (lambda x, w: (x @ w).view(-1), ((33, 17), (17, 19))),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values(name: str, dtype: torch.dtype) -> None:
    """The padded graph computes the same, has aligned operands, and is not padded again."""
    fn, shapes = FORMS[name]
    module = graph_on(fn, *shapes, dtype=dtype)
    assert padded(module) == 1 and count(module, PADS) > 0
    for node in module.graph.nodes:
        if node.target in (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default):
            for operand in node.all_input_nodes[-2:]:
                found = form(operand.meta["val"])
                assert found is not None and found.aligned == 16
    torch.manual_seed(0)
    given = [torch.randn(shape, dtype=dtype) / shape[-1] ** 0.5 for shape in shapes]
    assert_near(module(*given), fn(*(one.double() for one in given)), what=name)
    assert padded(module) == 0


def test_compiled() -> None:
    """Inductor makes kernels of what the pass leaves, views and outputs included."""

    def fn(b: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = torch.nn.functional.linear(x.relu(), w, b)
        return hidden, hidden.view(3, 11, 19).relu(), hidden.t().contiguous().view(-1) @ torch.ones(33 * 19)

    def always(graph: fx.Graph, *, options: Options) -> int:
        return pad_by(graph, ALWAYS, ("cpu",))

    seen: list[str] = []

    def also_seen(graph: fx.Graph, *, options: Options) -> int:
        seen.append(str(graph))
        return 0

    patches: dict[str, Any] = {"post_grad_custom_pre_pass": DitronPipeline(Options(), passes=(always, also_seen))}
    torch.manual_seed(0)
    given = [torch.randn(shape) for shape in ((19,), (33, 17), (19, 17))]
    torch._dynamo.reset()
    with torch.compiler.config.patch(force_disable_caches=True):
        compiled = torch.compile(
            fn, backend=lambda gm, inputs: compile_fx(gm, inputs, config_patches=patches), dynamic=False
        )
        got = compiled(*given)
    assert "constant_pad_nd" in seen[0]
    for one, wanted in zip(got, fn(*given), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.all_cases
def test_compiled_forward_and_backward() -> None:
    """What is saved for the backward lies as the forward graph has left it."""
    counted: list[int] = []

    def always(graph: fx.Graph, *, options: Options) -> int:
        counted.append(pad_by(graph, ALWAYS, ("cpu",)))
        return counted[-1]

    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.gelu(torch.nn.functional.linear(x, w, b).view(3, 11, 19)) @ v
        return (hidden @ hidden.mT).softmax(-1) @ hidden

    patches: dict[str, Any] = {"post_grad_custom_pre_pass": DitronPipeline(Options(), passes=(always,))}
    torch.manual_seed(0)
    given = [(torch.randn(shape) / 4).requires_grad_() for shape in ((33, 17), (19, 17), (19,), (19, 21))]
    exact = [one.detach().double().requires_grad_() for one in given]
    torch._dynamo.reset()
    with without_caches():
        compiled = torch.compile(
            fn, backend=lambda gm, inputs: compile_fx(gm, inputs, config_patches=patches), dynamic=False
        )
        got = torch.autograd.grad(compiled(*given).square().sum(), given)
    assert len(counted) == 2 and all(counted)
    for one, wanted in zip(got, torch.autograd.grad(fn(*exact).square().sum(), exact), strict=True):
        assert relative_error(one, wanted) < 1e-5


def test_rows_alone_are_not_padded() -> None:
    """M = 33 lies apart in no operand."""
    module = graph_on(lambda x, w: x @ w, (33, 16), (16, 24))
    assert padded(module) == 0
    assert padded(graph_on(lambda x, w: x.t() @ w, (16, 33), (16, 24))) == 1


def test_the_result_is_a_view_where_that_is_enough() -> None:
    for fn, copies in ((lambda x, w: (x @ w).relu(), 0), (lambda x, w: torch.cumsum(x @ w, 0), 1)):
        module = graph_on(fn, (32, 16), (16, 19))
        assert padded(module) == 1
        assert (count(module, SLICE), count(module, CLONE)) == (1, copies)


def test_one_padded_weight_for_all_that_read_it() -> None:
    module = graph_on(lambda x, y, w: (x @ w).relu() + (y @ w), (32, 16), (32, 16), (16, 19))
    assert padded(module) == 2
    assert count(module, PADS) == 1


def test_no_copy_is_counted_of_what_is_generated() -> None:
    def copied(fn: Callable[..., Any]) -> float:
        (node,) = graph_on(fn, (32, 17), (17, 16)).graph.find_nodes(op="call_function", target=aten.mm.default)
        match = find_unaligned(node)
        assert match is not None
        return match.work.copied_bytes

    weight, x = 2 * 2 * 17 * 16, 2 * 2 * 32 * 17
    assert copied(lambda x, w: x @ w) == weight + x
    assert copied(lambda x, w: x.relu() @ w) == weight
    # Another reader: the operand is written twice.
    assert copied(lambda x, w: (lambda y: (y @ w, y))(x.relu())) == weight + x


LEFT: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "aligned": (lambda x, w: x @ w, ((32, 16), (16, 24))),
    "a vector": (lambda x, w: x @ w, ((1, 17), (17, 19))),
    "empty": (lambda x, w: x @ w, ((0, 17), (17, 19))),
    "another dtype": (lambda x, w: x.double() @ w.double(), ((33, 17), (17, 19))),
    "mixed dtypes": (lambda x, w: torch.mm(x, w, out_dtype=torch.float32), ((33, 17), (17, 19))),
    "columns of wider rows": (lambda x, w: x.narrow(1, 0, 17) @ w, ((32, 19), (17, 16))),
    "neither rows nor columns": (lambda x, w: x.as_strided((32, 17), (34, 2)) @ w, ((32, 34), (17, 16))),
    "begins in between": (lambda x, w: x.view(-1).narrow(0, 1, 512).view(32, 16) @ w, ((33, 16), (16, 16))),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    fn, shapes = LEFT[name]
    assert padded(graph_on(fn, *shapes)) == 0


def test_not_on_other_devices() -> None:
    assert padded(graph_on(lambda x, w: x @ w, (33, 17), (17, 19), device="cpu")) == 0


def test_not_with_dynamic_sizes() -> None:
    for dynamic, found in ((False, 1), (True, 0)):
        module = traced(lambda x, w: x @ w, torch.empty(33, 17), torch.empty(17, 19), dynamic=dynamic)
        with assert_no_new_guards(module) if dynamic else contextlib.nullcontext():
            assert pad_by(module.graph, ALWAYS, ("cpu",)) == found


def test_the_pass_goes_by_its_rule() -> None:
    def passed(*shapes: tuple[int, int]) -> int:
        return pad_products(graph_on(lambda x, w: (x @ w).relu(), *shapes).graph, options=Options())

    assert passed((8192, 4097), (4097, 4095)) == 1
    # Decoding reads the weight once; a copy of it would take longer.
    assert passed((17, 4097), (4097, 4095)) == 0
    assert passed((8192, 4096), (4096, 4096)) == 0


# Products of sites.


def site(fn: Callable[..., Any], *shapes: Any) -> tuple[fx.GraphModule, fx.Node]:
    """A graph of bf16 on a GPU after the fusions, and its only site."""
    module = graph_on(fn, *shapes)
    assert fuse(module) == 1
    (found,) = [node for node in module.graph.nodes if is_task(node)]
    return module, found


@pytest.mark.usefixtures("group")
def test_golden_site() -> None:
    module, _ = site(lambda x, w: all_reduce(x.relu() @ w.t()), (32, 17), (19, 17))
    assert padded(module) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [32, 17]
w_1 [19, 17]
relu [32, 17] = aten.relu(x_1)
t [17, 19] = aten.t(w_1)
constant_pad_nd_default [32, 24] = aten.constant_pad_nd(relu, [0, 7, 0, 0])
permute_default [19, 17] = aten.permute(t, [1, 0])
constant_pad_nd_default_1 [19, 24] = aten.constant_pad_nd(permute_default, [0, 7, 0, 0])
permute_default_1 [24, 19] = aten.permute(constant_pad_nd_default_1, [1, 0])
matmul_all_reduce = ditron.matmul_all_reduce([constant_pad_nd_default, permute_default_1], "reduce_op=sum world_size=4 group_name=0 site='' trials", None)
getitem [32, 19] = matmul_all_reduce[0]
return getitem
""",
    )
    assert padded(module) == 0


SITES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], int]] = {
    "reduce": (lambda x, w: all_reduce(x @ w), ((32, 17), (17, 24)), 1),
    "scatter": (lambda x, w: reduce_scatter(x @ w.t()), ((32, 17), (24, 17)), 1),
    "gather of a product": (lambda x, w: gather_dim(x @ w.t(), 1), ((32, 17), (24, 17)), 1),
    "sum": (lambda x, w, v: all_reduce(x @ w + x.relu() @ v), ((32, 17), (17, 24), (17, 24)), 2),
    "one of a sum": (lambda x, y, w, v: all_reduce(x @ w + y @ v), ((32, 17), (32, 16), (17, 24), (16, 24)), 1),
    "batches of rows": (lambda x, w: all_reduce(x @ w), ((2, 16, 17), (17, 24)), 1),
    # Rows of b would stay where they are.
    "rows of b": (lambda x, w: all_reduce(x @ w), ((32, 17), (17, 19)), 0),
    "columns of a": (lambda x, w: all_reduce(x.t() @ w.t()), ((17, 33), (24, 17)), 0),
    "aligned": (lambda x, w: all_reduce(x @ w), ((33, 16), (16, 24)), 0),
    # What is sent stays as it is.
    "gathered": (lambda x, w: all_gather(x) @ w.t(), ((8, 17), (24, 17)), 0),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", SITES)
def test_sites(name: str) -> None:
    """K grows, and neither what the site returns nor any other argument of it."""
    fn, shapes, found = SITES[name]
    module, node = site(fn, *shapes)
    before, others = schema.operands_from_call(node), node.args[schema.NODE :]
    assert padded(module) == found
    after = schema.operands_from_call(node)
    assert after.keys() == before.keys() and node.args[schema.NODE :] == others
    for key, value in after.items():
        assert key in ("a", "b") or value == before[key]
    for a, b in zip(after.get("a", ()), after.get("b", ()), strict=True):
        assert a.meta["val"].shape[-1] == b.meta["val"].shape[0]
        assert a.meta["val"].shape[-1] == (24 if a not in before["a"] else a.meta["val"].shape[-1])
    assert padded(module) == 0


def run_padded_site(ctx: RankContext) -> dict[str, int]:
    """The pipeline with a pass in it that pads on the CPU, and wherever it can."""
    from ditron_inductor import backend  # noqa: F401  (the ops and their kernels)

    def pad_all(graph: fx.Graph, *, options: Options) -> int:
        return pad_by(graph, ALWAYS, ("cpu",))

    def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        group = dist.group.WORLD
        reduced = functional.all_reduce(x.relu() @ w, "sum", group)
        return reduced, functional.reduce_scatter_tensor(torch.tanh(reduced) @ v.t(), "sum", 0, group)

    passes = tuple(pad_all if one is pad_products else one for one in PASSES)
    patches: dict[str, Any] = {"post_grad_custom_pre_pass": DitronPipeline(Options(), passes=passes)}
    given = [torch.randn(shape) / 4 for shape in ((8, 17), (17, 20), (12, 20))]
    torch._dynamo.reset()
    counters.clear()
    with without_caches():
        compiled = torch.compile(
            fn, backend=lambda gm, inputs: compile_fx(gm, inputs, config_patches=patches), dynamic=False
        )
        for one, wanted in zip(compiled(*given), fn(*(each.double() for each in given)), strict=True):
            assert_near(one, wanted, num_partials=ctx.world_size)
    return dict(counters["ditron"])


def test_padded_sites_on_ranks(rank_pools: RankPools) -> None:
    for counted in rank_pools.get("cpu", 2).run(run_padded_site, timeout=100.0):
        assert counted["matmul_all_reduce"] == 1 and counted["matmul_reduce_scatter"] == 1
        assert counted["pad_all"] == 1
