"""Row-wise work between all-reduces: divided among the ranks where that pays, and with the same results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from torch import fx
from torch.distributed.device_mesh import init_device_mesh

from ditron_inductor.options import Options
from ditron_inductor.passes.forms.sequence_parallel import sequence_parallel
from ditron_inductor.passes.graph.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from ditron_inductor.passes.graph.norm_forms import FoundNorm, find_norm
from ditron_inductor.passes.graph.row_regions import find_regions
from ditron_inductor.passes.normalize.normalize_collectives import normalize_collectives
from ditron_inductor.tools.demo_model import Llama, LlamaConfig, tensor_parallel
from tests.cases import rare
from tests.passes.graphs import (
    WORLD_SIZE,
    all_reduce,
    assert_no_new_guards,
    c10d,
    compiled_graphs,
    fuse,
    reasons,
    run_ranks,
    scatter_dim,
    text,
    traced,
)

pytestmark = pytest.mark.usefixtures("group")

ON = Options(sequence_parallel="on")
# Heads, residual, two weights that differ between ranks, and a norm's weight.
A, X, V, W, G = (torch.empty(*shape) for shape in ([8, 6], [8, 16], [6, 16], [16, 12], [16]))
ARGS = (A, X, V, W, G)
SAME_ON_ALL_RANKS = (1, 4)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def block(a: torch.Tensor, x: torch.Tensor, v: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> Any:
    """Attention's output, and the first half of an MLP."""
    h = x + all_reduce(a @ v)
    return norm(h, g) @ w


def layer(a: torch.Tensor, x: torch.Tensor, v: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> Any:
    h = x + all_reduce(a @ v)
    h = h + all_reduce((norm(h, g) @ w).relu() @ w.t())
    return norm(h, g) @ w, h


def cut(fn: Callable[..., Any], *args: torch.Tensor, options: Options = ON) -> tuple[int, fx.GraphModule]:
    """How many all-reduces went, and the graph."""
    module = traced(fn, *args)
    normalize_collectives(module.graph, options=options)
    count = sequence_parallel(module.graph, options=options)
    module.graph.lint()
    module.recompile()
    return count, module


def assert_same(fn: Callable[..., Any], module: fx.GraphModule, *args: torch.Tensor) -> None:
    """What all ranks compute with `module` is what they compute with `fn`, and alike on all of them where it was."""
    generator = torch.Generator().manual_seed(0)
    common = [torch.randn(arg.shape, generator=generator) for arg in args]
    inputs = [
        [one if index in SAME_ON_ALL_RANKS else torch.randn(one.shape, generator=generator) for index, one in enumerate(common)]
        for _ in range(WORLD_SIZE)
    ]  # fmt: skip
    wanted, got = run_ranks(traced(fn, *args), inputs), run_ranks(module, inputs)
    torch.testing.assert_close(got, wanted)


def calls(module: fx.GraphModule) -> Counter[str]:
    names = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
    kinds = {str(ALL_REDUCE): "reduce", str(REDUCE_SCATTER): "scatter", str(ALL_GATHER): "gather"}
    ours = {f"ditron.{name}.default": name for name in ("own_chunk", "replicated")}
    return Counter((kinds | ours)[name] for name in names if name in kinds | ours)


def test_golden() -> None:
    _, module = cut(block, *ARGS)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
a_1 [8, 6]
x_1 [8, 16]
v_1 [6, 16]
w_1 [16, 12]
g_1 [16]
replicated_default [16] = ditron.replicated(g_1, [x_1, g_1], '0', 'sequence_parallel/d66f9998', '\\n', '59966e96\\npow.Tensor_Scalar(_, 2)\\nmean.dim(_, [-1], True)\\nadd.Tensor(_, 1e-05)')
mm [8, 16] = aten.mm(a_1, v_1)
reduce_scatter_tensor_default [2, 16] = _c10d_functional.reduce_scatter_tensor(mm, 'sum', 4, '0')
wait_tensor_default [2, 16] = _c10d_functional.wait_tensor(reduce_scatter_tensor_default)
own_chunk_default [2, 16] = ditron.own_chunk(x_1, 0, 4, '0')
add [2, 16] = aten.add.Tensor(own_chunk_default, wait_tensor_default)
pow_1 [2, 16] = aten.pow.Tensor_Scalar(add, 2)
mean [2, 1] = aten.mean.dim(pow_1, [-1], True)
add_1 [2, 1] = aten.add.Tensor(mean, 1e-05)
rsqrt [2, 1] = aten.rsqrt(add_1)
mul [2, 16] = aten.mul.Tensor(add, rsqrt)
mul_1 [2, 16] = aten.mul.Tensor(mul, replicated_default)
all_gather_into_tensor_default [8, 16] = _c10d_functional.all_gather_into_tensor(mul_1, 4, '0')
wait_tensor_default_1 [8, 16] = _c10d_functional.wait_tensor(all_gather_into_tensor_default)
mm_1 [8, 12] = aten.mm(wait_tensor_default_1, w_1)
return mm_1
""",
    )
    assert fuse(module) == 2
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
a_1 [8, 6]
x_1 [8, 16]
v_1 [6, 16]
w_1 [16, 12]
g_1 [16]
replicated_default [16] = ditron.replicated(g_1, [x_1, g_1], '0', 'sequence_parallel/d66f9998', '\\n', '59966e96\\npow.Tensor_Scalar(_, 2)\\nmean.dim(_, [-1], True)\\nadd.Tensor(_, 1e-05)')
matmul_reduce_scatter = ditron.matmul_reduce_scatter([a_1, v_1], "scatter_dim=0 reduce_op=sum world_size=4 group_name=0 site='' trials", None)
getitem_1 [2, 16] = matmul_reduce_scatter[0]
own_chunk_default [2, 16] = ditron.own_chunk(x_1, 0, 4, '0')
add [2, 16] = aten.add.Tensor(own_chunk_default, getitem_1)
pow_1 [2, 16] = aten.pow.Tensor_Scalar(add, 2)
mean [2, 1] = aten.mean.dim(pow_1, [-1], True)
add_1 [2, 1] = aten.add.Tensor(mean, 1e-05)
rsqrt [2, 1] = aten.rsqrt(add_1)
mul [2, 16] = aten.mul.Tensor(add, rsqrt)
mul_1 [2, 16] = aten.mul.Tensor(mul, replicated_default)
all_gather_matmul = ditron.all_gather_matmul([mul_1, w_1], "gather_dim=0 world_size=4 group_name=0 site='' trials num_weights=1", None)
getitem [8, 12] = all_gather_matmul[0]
return getitem
""",
    )


def test_a_norm_reads_its_weight_behind_the_comparison() -> None:
    _, module = cut(block, *ARGS)
    (rsqrt,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.rsqrt.default)
    norm = find_norm(rsqrt)
    assert isinstance(norm, FoundNorm) and norm.weight is not None and norm.weight.name == "replicated_default"


def test_golden_inner_dimension() -> None:
    _, module = cut(lambda x: all_reduce(x.sin()).relu().sum((0, 1)), torch.empty(3, 8, 2))
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [3, 8, 2]
sin [3, 8, 2] = aten.sin(x_1)
split_tensor = aten.split.Tensor(sin, 2, 1)
getitem [3, 2, 2] = split_tensor[0]
getitem_1 [3, 2, 2] = split_tensor[1]
getitem_2 [3, 2, 2] = split_tensor[2]
getitem_3 [3, 2, 2] = split_tensor[3]
cat_default [12, 2, 2] = aten.cat([getitem, getitem_1, getitem_2, getitem_3], 0)
reduce_scatter_tensor_default [3, 2, 2] = _c10d_functional.reduce_scatter_tensor(cat_default, 'sum', 4, '0')
wait_tensor_default [3, 2, 2] = _c10d_functional.wait_tensor(reduce_scatter_tensor_default)
relu [3, 2, 2] = aten.relu(wait_tensor_default)
all_gather_into_tensor_default [12, 2, 2] = _c10d_functional.all_gather_into_tensor(relu, 4, '0')
wait_tensor_default_1 [12, 2, 2] = _c10d_functional.wait_tensor(all_gather_into_tensor_default)
split_tensor_1 = aten.split.Tensor(wait_tensor_default_1, 3, 0)
getitem_4 [3, 2, 2] = split_tensor_1[0]
getitem_5 [3, 2, 2] = split_tensor_1[1]
getitem_6 [3, 2, 2] = split_tensor_1[2]
getitem_7 [3, 2, 2] = split_tensor_1[3]
cat_default_1 [3, 8, 2] = aten.cat([getitem_4, getitem_5, getitem_6, getitem_7], 1)
sum_1 [2] = aten.sum.dim_IntList(cat_default_1, [0, 1])
return sum_1
""",
    )


def test_golden_batch_of_one() -> None:
    _, module = cut(lambda x: all_reduce(x.sin()).relu().sum((0, 1)), torch.empty(1, 8, 2))
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [1, 8, 2]
sin [1, 8, 2] = aten.sin(x_1)
reshape_default [8, 2] = aten.reshape(sin, [8, 2])
reduce_scatter_tensor_default [2, 2] = _c10d_functional.reduce_scatter_tensor(reshape_default, 'sum', 4, '0')
wait_tensor_default [2, 2] = _c10d_functional.wait_tensor(reduce_scatter_tensor_default)
reshape_default_1 [1, 2, 2] = aten.reshape(wait_tensor_default, [1, 2, 2])
relu [1, 2, 2] = aten.relu(reshape_default_1)
reshape_default_2 [2, 2] = aten.reshape(relu, [2, 2])
all_gather_into_tensor_default [8, 2] = _c10d_functional.all_gather_into_tensor(reshape_default_2, 4, '0')
wait_tensor_default_1 [8, 2] = _c10d_functional.wait_tensor(all_gather_into_tensor_default)
reshape_default_3 [1, 8, 2] = aten.reshape(wait_tensor_default_1, [1, 8, 2])
sum_1 [2] = aten.sum.dim_IntList(reshape_default_3, [0, 1])
return sum_1
""",
    )


def layer_norm(a: torch.Tensor, x: torch.Tensor, v: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> Any:
    h = x + all_reduce(a @ v)
    variance, mean = torch.var_mean(h, -1, correction=0, keepdim=True)
    return ((h - mean) * torch.rsqrt(variance + 1e-5) * g + g) @ w


def half(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16)


CUT: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {
    "block": (block, dict(scatter=1, gather=1, own_chunk=1, replicated=1)),
    "layer": (layer, dict(scatter=2, gather=3, own_chunk=1, replicated=1)),
    "layer_norm": (layer_norm, dict(scatter=1, gather=1, own_chunk=1, replicated=1)),
    "bias_behind": (lambda a, x, v, w, g: ((all_reduce(a @ v) + g) * 2 + x) @ w,
                    dict(scatter=1, gather=1, own_chunk=1, replicated=1)),
    "no_inputs": (lambda a, x, v, w, g: all_reduce(a @ v).relu() @ w, dict(scatter=1, gather=1)),
    "average": (lambda a, x, v, w, g: all_reduce(a @ v, "avg").relu() @ w, dict(scatter=1, gather=1)),
    "casts": (lambda a, x, v, w, g: (all_reduce(a @ v).double() * 2).float() @ w,
              dict(scatter=1, gather=1, replicated=1)),
    "result_and_norm": (lambda a, x, v, w, g: ((h := all_reduce(a @ v)).relu() @ w, h), dict(scatter=1, gather=2)),
    "used_twice": (lambda a, x, v, w, g: (norm(h := x + all_reduce(a @ v), g) @ w, x.sin() + h),
                   dict(scatter=1, gather=2, own_chunk=2, replicated=1)),
    "two_regions": (lambda a, x, v, w, g: (all_reduce(a @ v).relu() @ w, all_reduce(v @ w) * 2),
                    dict(scatter=1, gather=1, reduce=1)),
    "only_the_input": (lambda a, x, v, w, g: (all_reduce(a @ v) + x) @ w,
                       dict(scatter=1, gather=1, own_chunk=1, replicated=1)),
    # An all-reduce that reads a member of its own region.
    "reduced_again": (lambda a, x, v, w, g: (h := all_reduce(a @ v)) + all_reduce(h * 0.5),
                      dict(scatter=2, gather=2, replicated=1)),
    "normed_with_reduced_again": (lambda a, x, v, w, g: norm((h := all_reduce(a @ v)) + all_reduce(h.relu()), g) @ w,
                                  dict(scatter=2, gather=2, replicated=1)),
    "result_reduced_again": (lambda a, x, v, w, g: ((h := all_reduce(a @ v)) + all_reduce(h)) @ w,
                             dict(scatter=2, gather=2)),
    "view_reduced_again": (lambda a, x, v, w, g: (h := all_reduce(a @ v)) + all_reduce(h.sin().view(4, 32)).view(8, 16),
                           dict(scatter=2, gather=3, own_chunk=1, replicated=1)),
    "reduced_thrice": (lambda a, x, v, w, g: ((h := all_reduce(a @ v)) + all_reduce((k := all_reduce(h.sin())).cos() * h)
                                              + k) @ w, dict(scatter=3, gather=3)),
    "gathered_and_reduced": (lambda a, x, v, w, g: ((h := all_reduce(a @ v).sin()) + all_reduce(h) + x, h @ w),
                             dict(scatter=2, gather=2, own_chunk=1, replicated=1)),
}  # fmt: skip


@pytest.mark.parametrize("name", CUT)
def test_cut(name: str) -> None:
    fn, expected = CUT[name]
    count, module = cut(fn, *ARGS)
    assert count == expected["scatter"]
    assert calls(module) == Counter(expected)
    assert_same(fn, module, *ARGS)
    assert cut(fn, *ARGS, options=Options(sequence_parallel="off"))[0] == 0


# The region ends there: what follows reads a gathered tensor.
ENDS: dict[str, Callable[..., Any]] = {
    "sum_of_rows": lambda a, x, v, w, g: all_reduce(a @ v).relu().sum(0),
    "softmax_over_rows": lambda a, x, v, w, g: all_reduce(a @ v).relu().softmax(0),
    "no_keepdim": lambda a, x, v, w, g: all_reduce(a @ v).relu().mean(-1),
    "transposed": lambda a, x, v, w, g: all_reduce(a @ v).relu().t().sin(),
    "reshaped": lambda a, x, v, w, g: all_reduce(a @ v).relu().view(2, 64).sin(),
    "last_row": lambda a, x, v, w, g: all_reduce(a @ v).relu()[-1:].sin(),
    "other_rows": lambda a, x, v, w, g: all_reduce(a @ v).relu() + g[:8, None],
    # Neither is the same on all ranks.
    "local_product": lambda a, x, v, w, g: all_reduce(a @ v).relu() + a @ v,
    "scattered": lambda a, x, v, w, g: all_reduce(a @ v).relu() + scatter_dim(torch.cat([x] * 4), 0),
}


@pytest.mark.parametrize("name", [name for name in CUT if "again" in name or "thrice" in name])
def test_more_rows_than_two_parts(name: str) -> None:
    """With the square of the number of ranks as rows, a part of a part has rows too: wrong values would fit."""
    args = (torch.empty(WORLD_SIZE**2, 6), torch.empty(WORLD_SIZE**2, 16), V, W, G)
    fn = CUT[name][0] if "view" not in name else lambda a, x, v, w, g: CUT[name][0](a[:8], x[:8], v, w, g)
    _, module = cut(fn, *args)
    assert_same(fn, module, *args)


@pytest.mark.parametrize("name", ENDS)
def test_ends(name: str) -> None:
    count, module = cut(ENDS[name], *ARGS)
    assert count == 1
    scattered = [node for node in module.graph.nodes if node.target is torch.ops.aten.relu.default]
    assert [list(node.meta["val"].shape) for node in scattered] == [[2, 16]]
    assert calls(module)["gather"] == 1
    if name not in ("other_rows",):
        assert_same(ENDS[name], module, *ARGS)


def test_random_ops_end_a_region() -> None:
    count, module = cut(lambda a, x, v, w, g: torch.bernoulli(all_reduce(a @ v).sigmoid()) @ w, *ARGS)
    (random,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.bernoulli.default)
    assert count == 1 and list(random.meta["val"].shape) == [8, 16]


def other_group(x: torch.Tensor) -> torch.Tensor:
    name = torch.distributed.new_group(list(range(WORLD_SIZE))).group_name
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", name))


def test_another_groups_result_is_not_replicated() -> None:
    _, module = cut(lambda a, x, v, w, g: all_reduce(a @ v).relu() + other_group(a @ v), *ARGS)
    add = module.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)[0]
    assert list(add.meta["val"].shape) == [8, 16]


def test_a_region_that_reads_another_one() -> None:
    """The exit of the first region is gathered before the second one, of another group, reduces it."""
    fn = lambda a, x, v, w, g: other_group(all_reduce(a @ v).relu()).sin() @ w  # noqa: E731
    count, module = cut(fn, *ARGS)
    assert count == 2
    assert_same(fn, module, *ARGS)


def spread(x: torch.Tensor) -> torch.Tensor:
    """Of what each rank has, over all ranks."""
    return (x - all_reduce(x, "avg")) * torch.rsqrt(all_reduce(x * x, "avg") + 1e-5)


LEFT: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "odd_rows": (block, (A[:7], X[:7], V, W, G)),
    "max": (lambda a, v: all_reduce(a @ v, "max").relu(), (A, V)),
    "vector": (lambda g: all_reduce(g).relu(), (G,)),
    "of_its_roots": (spread, (X,)),
    "empty": (lambda a, v: all_reduce(a @ v).relu(), (A[:0], V)),
    "integers": (lambda g: all_reduce(g).abs(), (torch.empty(8, 4, dtype=torch.int64),)),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    fn, args = LEFT[name]
    count, module = cut(fn, *args)
    assert count == 0
    assert set(calls(module)) == {"reduce"}


def test_dynamic_sizes_keep_the_all_reduce() -> None:
    module = traced(block, *ARGS, dynamic=True)
    assert sequence_parallel(module.graph, options=ON) == 0


def test_a_size_beside_a_region_stays_dynamic() -> None:
    """What is read behind the comparison is the smallest input of those that have a known size."""

    def fn(a: torch.Tensor, v: torch.Tensor, beside: torch.Tensor) -> Any:
        return all_reduce(a @ v) * 3, beside.sum()

    beside = torch.empty(3, 2)
    torch._dynamo.mark_dynamic(beside, 0)
    with torch.no_grad():
        (module,) = compiled_graphs(fn, A, V, beside)
    with assert_no_new_guards(module):
        assert sequence_parallel(module.graph, options=ON) == 1
    (compared,) = module.graph.find_nodes(op="call_function", target=torch.ops.ditron.replicated.default)
    assert tuple(compared.args[0].meta["val"].shape) == (8, 6)


def test_nothing_without_fusions() -> None:
    assert cut(block, *ARGS, options=Options(sequence_parallel="on", fusions=()))[0] == 0


def model(batch: int, seq_len: int, requires_grad: bool = False) -> list[fx.GraphModule]:
    config = LlamaConfig(dim=16, num_layers=2, num_heads=4, num_kv_heads=4, hidden_dim=32, max_seq_len=16)
    llama = tensor_parallel(Llama(config), init_device_mesh("cpu", (WORLD_SIZE,)), sequence_parallel=False)
    with torch.set_grad_enabled(requires_grad):
        return compiled_graphs(llama, torch.randn(batch, seq_len, 16, requires_grad=requires_grad))


@pytest.mark.parametrize(("batch", "seq_len"), [(1, 8), *rare((3, 8)), (4, 6)])
def test_llama_in_all_reduce_form(batch: int, seq_len: int) -> None:
    (graph,) = model(batch, seq_len)
    assert fuse(graph, ON) == 7
    # The output is gathered, and no more.
    assert reasons(graph) == ["no_matmul"]


def test_a_backward_graph_is_left_alone() -> None:
    forward, backward = model(4, 4, requires_grad=True)
    assert sequence_parallel(backward.graph, options=ON) == 0
    # What is saved for the backward has to be whole: far too much to gather.
    (region,) = find_regions(forward.graph)
    assert len(region.exits) > 2 * len(region.reductions)


@pytest.mark.parametrize(("rows", "count"), [(8192, 2), (16, 0)])
def test_auto_asks_the_cost_model(rows: int, count: int) -> None:
    shapes = ([rows, 4096 // WORLD_SIZE], [rows, 4096], [1024, 4096], [4096, 3584], [4096])
    with torch._subclasses.FakeTensorMode():
        args = [torch.empty(*shape, dtype=torch.bfloat16, device="cpu") for shape in shapes]
    assert cut(lambda *args: layer(*args)[0], *args, options=Options())[0] == count
    # Tensor parallelism reduces products.
    sums = lambda x, y, z: (all_reduce(x).relu() + all_reduce(y).relu() + all_reduce(z)).sin()  # noqa: E731
    assert cut(sums, *[args[1]] * 3, options=Options())[0] == 0
