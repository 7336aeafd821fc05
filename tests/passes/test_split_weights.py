"""split_weights: gate and up in one weight, as two views of it where an epilogue combines their products, and else not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.absorb.absorb_epilogues import absorb_epilogues
from ditron_inductor.passes.finish.name_sites import name_sites
from ditron_inductor.passes.finish.order_collectives import order_collectives
from ditron_inductor.passes.finish.verify_tasks import verify_tasks
from ditron_inductor.passes.forms.split_weights import split_weights
from ditron_inductor.passes.fuse.projections import projections
from ditron_inductor.task import schema
from tests.passes.graphs import (
    WORLD_SIZE,
    all_reduce,
    assert_no_new_guards,
    compiled_graphs,
    fuse,
    gather_dim,
    run_ranks,
    text,
    traced,
    twin,
)

pytestmark = pytest.mark.usefixtures("group")

BF16 = torch.bfloat16
X, W, OUT = torch.empty(2, 8, 16), torch.empty(48, 16), torch.empty(24, 16)
FEW = torch.empty(2, 1, 16)


def swiglu(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(gather_dim(x, 1), w).chunk(2, -1)
    return F.silu(gate) * up


def decoded(x: torch.Tensor, w: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    both = x @ w.t()
    return all_reduce((F.silu(both[..., :24]) * both[..., 24:]) @ o)


def biased(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(gather_dim(x, 1), w, b).chunk(2, -1)
    return F.silu(gate) * up


def split(module: fx.GraphModule, options: Options | None = None) -> int:
    """How many weights are split; the passes behind run too."""
    fuse(module)
    count = split_weights(module.graph, options=options or Options())
    for each in (projections, absorb_epilogues, order_collectives, name_sites, verify_tasks):
        each(module.graph, options=options or Options())
    module.graph.lint()
    module.recompile()
    return count


def test_golden_gathered() -> None:
    (graph,) = compiled_graphs(swiglu, X.to(BF16), W.to(BF16))
    assert split(graph) == 1
    expecttest.assert_expected_inline(
        text(graph.graph),
        """\
arg0_1 [2, 8, 16]
arg1_1 [48, 16]
permute [16, 48] = aten.permute(arg1_1, [1, 0])
columns [16, 24] = aten.slice.Tensor(permute, 1, 0, 24)
columns_1 [16, 24] = aten.slice.Tensor(permute, 1, 24, 48)
all_gather_matmul_2 = ditron.all_gather_matmul([arg0_1, columns, columns_1], "gather_dim=1 world_size=4 group_name=0 site=be5e4ea9/0:all_gather_matmul trials num_weights=2 epilogue='cast(silu(mm0), bf16) * mm1'", None)
getitem_9 [64, 24] = all_gather_matmul_2[0]
reshape_default_2 [2, 32, 24] = aten.reshape(getitem_9, [2, 32, 24])
return (reshape_default_2,)
""",
    )


def test_golden_decode_step() -> None:
    module = traced(decoded, FEW, W, OUT)
    assert split(module) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [2, 1, 16]
w_1 [48, 16]
o_1 [24, 16]
t [16, 48] = aten.t(w_1)
view [2, 16] = aten.view(x_1, [2, 16])
columns [16, 24] = aten.slice.Tensor(t, 1, 0, 24)
columns_1 [16, 24] = aten.slice.Tensor(t, 1, 24, 48)
projections_1 = ditron.projections([view, columns, columns_1], "num_weights=2 epilogue='silu(mm0) * mm1'", None)
getitem_3 [2, 24] = projections_1[0]
reshape_default_2 [2, 1, 24] = aten.reshape(getitem_3, [2, 1, 24])
view_1 [2, 24] = aten.view(reshape_default_2, [2, 24])
matmul_all_reduce = ditron.matmul_all_reduce([view_1, o_1], 'reduce_op=sum world_size=4 group_name=0 site=016bcfc6/0:matmul_all_reduce trials', None)
getitem [2, 16] = matmul_all_reduce[0]
_unsafe_view_1 [2, 1, 16] = aten.reshape(getitem, [2, 1, 16])
return _unsafe_view_1
""",
    )


def test_golden_biased() -> None:
    (graph,) = compiled_graphs(biased, X.to(BF16), W.to(BF16), torch.empty(48, dtype=BF16))
    assert split(graph) == 1
    expecttest.assert_expected_inline(
        text(graph.graph),
        """\
arg0_1 [2, 8, 16]
arg1_1 [48, 16]
arg2_1 [48]
permute [16, 48] = aten.permute(arg1_1, [1, 0])
columns [16, 24] = aten.slice.Tensor(permute, 1, 0, 24)
columns_1 [16, 24] = aten.slice.Tensor(permute, 1, 24, 48)
columns_2 [24] = aten.slice.Tensor(arg2_1, 0, 0, 24)
columns_3 [24] = aten.slice.Tensor(arg2_1, 0, 24, 48)
all_gather_matmul_2 = ditron.all_gather_matmul([arg0_1, columns, columns_1, columns_2, columns_3], "gather_dim=1 world_size=4 group_name=0 site=be5e4ea9/0:all_gather_matmul trials num_weights=2 num_extras=2 epilogue='cast(silu(cast(mm0 + row(x0), bf16)), bf16) * cast(mm1 + row(x1), bf16)'", None)
getitem_9 [64, 24] = all_gather_matmul_2[0]
reshape_default_2 [2, 32, 24] = aten.reshape(getitem_9, [2, 32, 24])
return (reshape_default_2,)
""",
    )


def test_a_biased_decode_step() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        gate, up = torch.addmm(b, x, w.t()).chunk(2, -1)
        return all_reduce((F.silu(gate) * up) @ o)

    args = torch.randn(2, 16), torch.randn(48, 16), torch.randn(48), torch.randn(24, 16)
    module = traced(fn, *args)
    before = twin(module)
    assert split(module) == 1
    (call,) = module.graph.find_nodes(op="call_function", target=torch.ops.ditron.projections.default)
    assert schema.node_from_call(call.target, call.args).epilogue == "silu(mm0 + row(x0)) * (mm1 + row(x1))"
    inputs = [list(args)] * WORLD_SIZE
    torch.testing.assert_close(run_ranks(module, inputs), run_ranks(before, inputs))


def halves(x: torch.Tensor, w: torch.Tensor) -> Any:
    return F.linear(gather_dim(x, 1), w).split([24, 24], -1)


@pytest.mark.parametrize(
    "fn",
    [
        swiglu,
        lambda x, w: (h := halves(x, w))[1] * F.gelu(h[0]),
        # By slices, of a product whose rows are one dimension.
        lambda x, w: F.relu((p := gather_dim(x, 0).flatten(0, 1) @ w.t())[:, :24]) * p[:, 24:],
        # Beside another weight, of whose product a half is what it is.
        lambda x, w: (F.silu((h := halves(x, w))[0]) * h[1], gather_dim(x, 1) @ w[:8].t()),
    ],
)
def test_splits(fn: Callable[..., Any]) -> None:
    after = traced(fn, X.to(BF16), W.to(BF16))
    before = twin(after)
    assert split(after) == 1
    generator = torch.Generator().manual_seed(0)
    inputs = [[torch.randn(one.shape, generator=generator).to(BF16) for one in (X, W)] for _ in range(WORLD_SIZE)]
    torch.testing.assert_close(run_ranks(after, inputs), run_ranks(before, inputs), rtol=2e-2, atol=2e-2)


def test_a_half_is_the_weight_of_another_product_that_is_split() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = F.linear(gather_dim(x, 0), w).chunk(2, -1)
        first, second = (gather_dim(y, 0) @ gate).chunk(2, -1)
        return F.silu(gate) * up, F.silu(first) * second

    shapes = (8, 16), (48, 16), (4, 32)
    fake = [torch.empty(shape, dtype=BF16) for shape in shapes]
    after = traced(fn, *fake)
    before = twin(after)
    assert split(after) == 2
    generator = torch.Generator().manual_seed(0)
    inputs = [[torch.randn(shape, generator=generator).to(BF16) for shape in shapes] for _ in range(WORLD_SIZE)]
    torch.testing.assert_close(run_ranks(after, inputs), run_ranks(before, inputs), rtol=2e-2, atol=5e-2)


GUARDS: dict[str, Callable[..., Any]] = {
    "nothing is combined": lambda x, w: halves(x, w),
    "three parts": lambda x, w: (h := F.linear(gather_dim(x, 1), w).chunk(3, -1))[0] * h[1] + h[2],
    "parts of other widths": lambda x, w: (h := F.linear(gather_dim(x, 1), w).split([16, 32], -1))[0] * h[1][..., :16],
    "one half only": lambda x, w: F.silu(F.linear(gather_dim(x, 1), w)[..., :24]),
    "parts that overlap": lambda x, w: (p := F.linear(gather_dim(x, 1), w))[..., :24] * p[..., 12:36],
    "the product is used as a whole too": lambda x, w: (
        F.silu((p := F.linear(gather_dim(x, 1), w))[..., :24]) * p[..., 24:],
        p,
    ),
    "halves of the rows": lambda x, w: (h := F.linear(gather_dim(x, 1), w).chunk(2, 1))[0] * h[1],
    "a norm follows": lambda x, w: F.layer_norm(F.silu((h := halves(x, w))[0]) * h[1], (24,)),
    "columns in turns": lambda x, w: (p := F.linear(gather_dim(x, 1), w))[..., ::2] * p[..., 1::2],
}


@pytest.mark.parametrize("name", GUARDS)
def test_leaves_alone(name: str) -> None:
    module = traced(GUARDS[name], X, W)
    fuse(module)
    before = text(module.graph)
    assert split_weights(module.graph, options=Options()) == 0
    assert text(module.graph) == before


def test_the_library_multiplies_once() -> None:
    assert split(traced(swiglu, X, W), Options(strategy="library")) == 0


def test_many_rows_stay_one_matmul() -> None:
    assert split(traced(decoded, torch.empty(2, 64, 16), W, OUT)) == 0


def test_a_graph_without_sites_is_the_compilers() -> None:
    assert split(traced(lambda x, w: F.silu((p := x @ w.t())[..., :24]) * p[..., 24:], FEW, W)) == 0


def test_twice_is_once() -> None:
    module = traced(swiglu, X, W)
    assert split(module) == 1
    assert split_weights(module.graph, options=Options()) == 0


def test_dynamic_tokens_stay_dynamic() -> None:
    module = traced(lambda x: swiglu(x, torch.empty(48, 16)), X, dynamic=True)
    with assert_no_new_guards(module):
        assert split(module) == 1


def test_projections_without_an_epilogue_combine_nothing() -> None:
    """Halves of a product of few rows, one below the other in front of a reduction that is left alone."""

    def fn(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        halves = F.linear(all_reduce(x @ v), w).chunk(2, -1)
        return all_reduce(torch.cat(halves), "max")

    tensors = torch.empty(4, 8), torch.empty(8, 16), W
    for strategy in ("auto", "tile"):
        assert split(traced(fn, *tensors), Options(strategy=strategy)) == 0
