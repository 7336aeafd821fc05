"""matmul_all_gather: what it fuses, into which graph, and every guard that keeps it from fusing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from ditron_inductor.options import Options
from ditron_inductor.passes.fuse.matmul_all_gather import Match, find_matmul_all_gather, matmul_all_gather
from ditron_inductor.passes.graph.collectives import ALL_GATHER, collectives
from tests.passes import graphs
from tests.passes.graphs import (
    all_gather,
    assert_no_new_guards,
    assert_same_on_all_ranks,
    compiled_graphs,
    fuse,
    gather_dim,
    only_task,
    reasons,
    text,
    traced,
)

pytestmark = pytest.mark.usefixtures("group")

aten = torch.ops.aten
X = torch.empty(6, 16)
X3 = torch.empty(2, 3, 16)
W = torch.empty(16, 8)
B = torch.empty(8)


def columns(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return gather_dim(x @ w, x.ndim - 1)


def moved(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The products gathered along `dim` by a view with the ranks as a dimension, a permute and a reshape."""
    whole = all_gather(x).view(4, *x.shape).movedim(0, dim)
    return whole.reshape(*x.shape[:dim], 4 * x.shape[dim], *x.shape[dim + 1 :])


def test_finder_reads_the_product_and_its_gather() -> None:
    module = traced(columns, X3, W)
    (node,) = collectives(module.graph, ALL_GATHER)
    match = find_matmul_all_gather(node)
    assert isinstance(match, Match)
    assert (match.gathered.dim, match.gathered.shape) == (2, (2, 3, 8))
    assert [(lhs.name, sizes) for lhs, sizes in match.lefts] == [("x_1", None)]
    assert match.gathered.result.target is aten.cat.default and match.product.biases == ()


def test_golden_last_dim() -> None:
    module = traced(columns, X3, W)
    assert fuse(module) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [2, 3, 16]
w_1 [16, 8]
matmul_all_gather = ditron.matmul_all_gather([x_1, w_1], "gather_dim=2 world_size=4 group_name=0 site='' trials", None)
getitem_4 [2, 3, 32] = matmul_all_gather[0]
return getitem_4
""",
    )


def test_golden_permute_and_bias() -> None:
    module = traced(lambda x, w, b: moved(torch.addmm(b, x, w), 1), X, W, B)
    assert fuse(module) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [6, 16]
w_1 [16, 8]
b_1 [8]
matmul_all_gather = ditron.matmul_all_gather([x_1, w_1, b_1], "gather_dim=1 world_size=4 group_name=0 site='' trials has_bias", None)
getitem [6, 32] = matmul_all_gather[0]
reshape_default [6, 4, 8] = aten.reshape(getitem, [6, 4, 8])
clone [6, 4, 8] = aten.clone(reshape_default, memory_format=torch.contiguous_format)
_unsafe_view [6, 32] = aten.reshape(clone, [6, 32])
return _unsafe_view
""",
    )


def test_golden_one_row() -> None:
    """Its columns lie one after the other however it is gathered."""
    module = traced(lambda x, w: all_gather((x @ w).view(1, 1, 8)).view(1, 1, 32).relu(), X[:1], W)
    assert fuse(module) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [1, 16]
w_1 [16, 8]
rows [1, 1, 16] = aten.reshape(x_1, [1, 1, 16])
matmul_all_gather = ditron.matmul_all_gather([rows, w_1], "gather_dim=0 world_size=4 group_name=0 site='' trials", None)
getitem [4, 1, 8] = matmul_all_gather[0]
view_1 [1, 1, 32] = aten.reshape(getitem, [1, 1, 32])
relu [1, 1, 32] = aten.relu(view_1)
return relu
""",
    )


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("form", [gather_dim, moved])
def test_fuses_every_dim(dim: int, batch: int, form: Callable[..., torch.Tensor]) -> None:
    after = assert_same_on_all_ranks(lambda x, w: form(x @ w, dim), torch.empty(batch, 3, 16), W, fused=1)
    assert not list(collectives(after.graph, ALL_GATHER))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fuses_half_precision(dtype: torch.dtype) -> None:
    assert_same_on_all_ranks(columns, X.to(dtype), W.to(dtype), fused=1)


@pytest.mark.parametrize("shape", [(6, 16), (2, 3, 16), (1, 3, 16), (1, 1, 16)])
def test_fuses_a_bias(shape: tuple[int, ...]) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = torch.addmm(b, x.reshape(-1, 16), w).view(*shape[:-1], 8)
        return gather_dim(product, len(shape) - 1)

    after = assert_same_on_all_ranks(fn, torch.empty(shape), W, B, fused=1)
    task, given = only_task(after, "matmul_all_gather")
    assert task.has_bias and given["b"] == ["w_1"] and given["bias"] == "b_1"


def test_fuses_a_sum_of_matmuls() -> None:
    after = assert_same_on_all_ranks(
        lambda x, w, v, b: gather_dim(x @ w + b + torch.relu(x) @ v, 1), X, W, W.clone(), B, fused=1
    )
    task, given = only_task(after, "matmul_all_gather")
    assert given == {"a": ["x_1", "relu"], "b": ["w_1", "v_1"], "bias": "b_1"}
    assert (task.gather_dim, task.world_size) == (1, 4)


def gathered_list(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    product = x @ w
    parts = [torch.empty_like(product) for _ in range(4)]
    dist.all_gather(parts, product)
    return torch.cat(parts, -1)


def unbound(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    product = x @ w
    return torch.cat(all_gather(product).view(4, *product.shape).unbind(0), -1)


@pytest.mark.parametrize("shape", [(2, 3, 16), (1, 1, 16)])
@pytest.mark.parametrize("form", [gathered_list, unbound])
def test_fuses_what_users_write(form: Callable[..., torch.Tensor], shape: tuple[int, ...]) -> None:
    (module,) = compiled_graphs(form, torch.empty(shape), W)
    assert fuse(module) == 1, text(module.graph)


@pytest.mark.parametrize(
    ("shape", "width", "bias"), [((2, 3, 16), 32, False), ((1, 5, 16), 32, True), ((2, 3, 16), 30, True)]
)
def test_column_parallel_layers_of_dtensor(shape: tuple[int, ...], width: int, bias: bool) -> None:
    """Where the columns do not divide, the last rank pads its part, and all ranks cut."""
    model = torch.nn.Sequential(torch.nn.Linear(16, width, bias=bias))
    parallelize_module(
        model, init_device_mesh("cpu", (4,)), {"0": ColwiseParallel(output_layouts=Replicate(), use_local_output=True)}
    )
    forward, *backward = compiled_graphs(model, torch.empty(shape))
    assert fuse(forward) == (width == 32) and all(fuse(one) == 0 for one in backward)
    assert reasons(forward) == ([] if width == 32 else ["uneven_shards"])


def test_dynamic_shapes_stay_dynamic() -> None:
    for fn in (columns, lambda x, w: moved(x @ w, 2), lambda x, w: all_gather(x @ w)):
        module = traced(fn, X3, W, dynamic=True)
        with assert_no_new_guards(module):
            assert fuse(module) == 1, text(module.graph)


def test_a_gather_that_feeds_a_matmul_is_its() -> None:
    after = assert_same_on_all_ranks(lambda x, w, v: all_gather(x @ w) @ v, X, W, torch.empty(8, 5), fused=1)
    assert "all_gather_matmul" in text(after.graph) and "matmul_all_gather" not in text(after.graph)


def test_a_gather_along_the_last_dim_that_feeds_a_matmul() -> None:
    """No `all_gather_matmul` takes it."""
    after = assert_same_on_all_ranks(lambda x, w, v: columns(x, w) @ v, X, W, torch.empty(32, 5), fused=1)
    assert "matmul_all_gather" in text(after.graph)


def test_a_permute_of_something_else_stays_behind_the_gather() -> None:
    after = assert_same_on_all_ranks(
        lambda x, w: all_gather(x @ w).view(2, 12, 8).transpose(0, 1).reshape(12, 16), X, W, fused=1
    )
    task, given = only_task(after, "matmul_all_gather")
    assert (task.gather_dim, task.world_size, task.has_bias) == (0, 4, False) and "bias" not in given
    assert "transpose" in text(after.graph)


def test_whoever_sees_the_layout_of_a_permute_keeps_it() -> None:
    after = assert_same_on_all_ranks(lambda x, w: all_gather(x @ w).view(4, 6, 8).movedim(0, 1), X, W, fused=1)
    task, given = only_task(after, "matmul_all_gather")
    assert (task.gather_dim, task.world_size, task.has_bias) == (0, 4, False) and "bias" not in given


@pytest.mark.parametrize("end", [28, 20])
def test_a_cut_that_is_no_padding(end: int) -> None:
    """A vocabulary is padded by more than the last rank's part of a shard, or the cut stands along another dimension."""
    assert_same_on_all_ranks(lambda x, w: columns(x, w)[:, :end].contiguous(), X, W, fused=1)
    assert_same_on_all_ranks(lambda x, w: columns(x, w)[:5].contiguous(), X, W, fused=1)


def test_idempotent() -> None:
    module = traced(columns, X, W)
    assert fuse(module) == 1
    assert matmul_all_gather(module.graph, options=Options()) == 0


def test_disabled() -> None:
    module = traced(columns, X, W)
    assert fuse(module, Options(fusions=("all_gather_matmul",))) == 0
    assert reasons(module) == ["disabled"]


def chunks(order: list[int]) -> Callable[..., torch.Tensor]:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        parts = all_gather(x @ w).chunk(4)
        return torch.cat([parts[index] for index in order], 1)

    return fn


def picked(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return columns(x, w).index_select(1, torch.arange(30))


NEGATIVES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], str]] = {
    "permuted": (chunks([1, 0, 2, 3]), (X, W), "chunks_permuted"),
    "repeated": (chunks([0, 1, 2, 2]), (X, W), "chunks_permuted"),
    "partial": (chunks([0, 1, 2]), (X, W), "chunks_partial"),
    "product used": (lambda x, w: (y := x @ w, gather_dim(y, 1)), (X, W), "intermediate_used"),
    "view used": (lambda x, w: ((y := (x @ w)).view(2, 24), gather_dim(y.view(2, 3, 8), 2)), (X, W), "intermediate_used"),
    "gathered used": (lambda x, w: (g := all_gather(x @ w), torch.cat(g.chunk(4), 1)), (X, W), "intermediate_used"),
    "product with a bias used": (
        lambda x, w, b: (y := torch.addmm(b, x, w), gather_dim(y, 1)), (X, W, B), "intermediate_used"),
    "cast": (lambda x, w: gather_dim((x @ w).bfloat16(), 1), (X, W), "cast_between"),
    "pointwise": (lambda x, w: gather_dim((x @ w).relu(), 1), (X, W), "pointwise_between"),
    "transposed": (lambda x, w: gather_dim((x @ w).t().contiguous(), 1), (X, W), "layout"),
    "heads": (lambda x, w: gather_dim((x @ w).view(6, 2, 4), 1), (X, W), "layout"),
    "no row is added": (lambda x, w: gather_dim(torch.addmm(x[:, :8], x, w), 1), (X, W), "bias"),
    "scaled": (lambda x, w, b: gather_dim(torch.addmm(b, x, w, alpha=2), 1), (X, W, B), "pointwise_between"),
    "added to itself": (lambda x, w: gather_dim((y := x @ w) + y, 1), (X, W), "intermediate_used"),
    "batched": (lambda x, w: gather_dim(torch.bmm(x, w), 2), (X3, torch.empty(2, 16, 8)), "batched_matmul"),
    "dtype": (lambda x, w: gather_dim(x @ w, 1), (X.double(), W.double()), "dtype"),
    "padding cut": (lambda x, w: columns(x, w)[..., :30].clone(), (X3, W), "uneven_shards"),
    "padded rows cut": (lambda x, w: all_gather(x @ w)[:22].clone(), (X, W), "uneven_shards"),
    "padding of one row cut": (lambda x, w: all_gather(x @ w).view(1, 32)[:, :31].clone(), (X[:1], W), "uneven_shards"),
    "padding of moved ranks cut": (lambda x, w: moved(x @ w, 1)[:, :30].clone(), (X, W), "uneven_shards"),
    "padding left out": (picked, (X, W), "uneven_shards"),
    "padded": (lambda x, w: gather_dim(torch.nn.functional.pad(x @ w, (0, 2)), 1), (X, W), "uneven_shards"),
    "no matmul": (lambda x: gather_dim(x, 1), (X,), "no_matmul"),
    "fused already": (lambda x, w: gather_dim(all_gather(x) @ w, 1), (X, W), "already_fused"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEGATIVES)
def test_does_not_fire(name: str) -> None:
    fn, args, code = NEGATIVES[name]
    module = traced(fn, *args)
    fuse(module)
    assert reasons(module) == [code]
    assert "matmul_all_gather" not in text(module.graph)


def test_a_reason_that_says_more_is_kept() -> None:
    module = traced(lambda x, w: gather_dim(x, 1).view(12, 32) @ w, X, torch.empty(32, 8))
    assert fuse(module) == 0
    assert reasons(module) == ["no_gain"]


def test_several_gathers_in_order() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return columns(x, w), graphs.all_reduce(x @ w), all_gather(x @ w)

    after = assert_same_on_all_ranks(fn, X, W, fused=3)
    kinds = [node.name.rstrip("_1") for node in after.graph.nodes if node.name.startswith("matmul")]
    assert kinds == ["matmul_all_gather", "matmul_all_reduce", "matmul_all_gather"]
