"""split_trained_weights: gate and up in one weight are two products in training too, and gradients stay what they were."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import expecttest
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx
from torch._inductor import config
from torch.distributed import _functional_collectives as functional

from ditron_inductor.options import Options
from ditron_inductor.passes.forms.split_trained_weights import split_trained_weights
from ditron_inductor.pipeline import run
from tests.passes.graphs import WORLD_SIZE, assert_no_new_guards, compiled_graphs, only_task, run_ranks, text

pytestmark = pytest.mark.usefixtures("group")

BF16 = torch.bfloat16
SHAPES = (2, 8, 16), (48, 16), (16, 24), (48,)
Program = Callable[..., torch.Tensor]


def gather(x: torch.Tensor) -> torch.Tensor:
    gathered: torch.Tensor = functional.all_gather_tensor_autograd(x, 1, dist.group.WORLD)
    return gathered


def scatter(x: torch.Tensor) -> torch.Tensor:
    scattered: torch.Tensor = functional.reduce_scatter_tensor_autograd(x, "sum", 1, dist.group.WORLD)
    return scattered


def plain(x: torch.Tensor, w: torch.Tensor, o: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(gather(x), w).chunk(2, -1)
    return scatter(F.linear(F.silu(gate) * up, o))


def biased(x: torch.Tensor, w: torch.Tensor, o: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """By slices, in the other order, with a bias."""
    both = F.linear(gather(x), w, b)
    return scatter(F.linear(both[..., :24] * F.gelu(both[..., 24:]), o))


def graphs(
    fn: Program, options: Options | None, *, dtype: torch.dtype = BF16, grad: bool = True, dynamic: bool = False
) -> tuple[list[fx.GraphModule], list[int]]:
    """Forward and backward of `fn` as Inductor's passes get them, and how many weights were split; none if no options
    are given. dynamic: the tokens.
    """
    counts: list[int] = []

    def act(graph: fx.Graph) -> None:
        with assert_no_new_guards(graph.owning_module) if dynamic else contextlib.nullcontext():
            counts.append(0 if options is None else split_trained_weights(graph, options=options))
        graph.lint()

    args = [torch.empty(shape, dtype=dtype).requires_grad_(grad) for shape in SHAPES]
    if dynamic:
        torch._dynamo.mark_dynamic(args[0], 1)
    with config.patch(joint_custom_post_pass=act):
        return compiled_graphs(fn, *args), counts


def fused(modules: list[fx.GraphModule]) -> list[fx.GraphModule]:
    for module in modules:
        run(module.graph, Options())
        module.recompile()
    return modules


def test_golden_forward() -> None:
    modules, counts = graphs(plain, Options())
    assert counts == [1]
    # What is saved are the halves, and neither is a copy.
    expecttest.assert_expected_inline(
        text(fused(modules)[0].graph),
        """\
primals_1 [2, 8, 16]
primals_2 [48, 16]
primals_3 [16, 24]
permute [16, 48] = aten.permute(primals_2, [1, 0])
columns [16, 24] = aten.slice.Tensor(permute, 1, 0, 24)
columns_1 [16, 24] = aten.slice.Tensor(permute, 1, 24, 48)
all_gather_matmul_1 = ditron.all_gather_matmul([primals_1, columns, columns_1], "gather_dim=1 world_size=4 group_name=0 return_gathered site=7d6d4625/0:all_gather_matmul num_weights=2 epilogue='cast(silu(mm0), bf16) * mm1; mm0; mm1'", None)
getitem_18 [1] = all_gather_matmul_1[4]
getitem_14 [64, 24] = all_gather_matmul_1[0]
getitem_15 [64, 24] = all_gather_matmul_1[1]
getitem_16 [64, 24] = all_gather_matmul_1[2]
getitem_17 [2, 32, 16] = all_gather_matmul_1[3]
view [64, 16] = aten.reshape(getitem_17, [64, 16])
reshape_default_2 [2, 32, 24] = aten.reshape(getitem_14, [2, 32, 24])
permute_1 [24, 16] = aten.permute(primals_3, [1, 0])
view_2 [64, 24] = aten.reshape(reshape_default_2, [64, 24])
matmul_reduce_scatter = ditron.matmul_reduce_scatter([reshape_default_2, permute_1], 'scatter_dim=1 reduce_op=sum world_size=4 group_name=0 site=7d6d4625/1:matmul_reduce_scatter', getitem_18)
getitem_13 [2, 8, 16] = matmul_reduce_scatter[0]
permute_4 [16, 24] = aten.permute(permute_1, [1, 0])
permute_8 [48, 16] = aten.permute(permute, [1, 0])
return (getitem_13, view, getitem_15, getitem_16, view_2, permute_4, permute_8)
""",
    )


@pytest.mark.parametrize("fn", [plain, biased])
def test_results_and_gradients_stay(fn: Program) -> None:
    """Of all ranks: what one form saves goes into its own backward."""
    found = []
    generator = torch.Generator().manual_seed(0)
    inputs = [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(WORLD_SIZE)]
    tangents = [torch.randn(2, 8, 16, generator=generator) for _ in range(WORLD_SIZE)]
    for options in (None, Options()):
        (forward, backward), counts = graphs(fn, options, dtype=torch.float32)
        assert counts == [0 if options is None else 1]
        if options is not None:
            fused([forward, backward])
        shapes = [node.meta["val"].shape for node in forward.graph.nodes if node.op == "placeholder"]
        outputs = run_ranks(forward, [[given[SHAPES.index(tuple(shape))] for shape in shapes] for given in inputs])
        gradients = run_ranks(backward, [[*out[1:], tangent] for out, tangent in zip(outputs, tangents, strict=True)])
        found.append(([out[0] for out in outputs], gradients))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def of_rows(x: torch.Tensor, w: torch.Tensor, o: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The rows are one dimension, whose size the backward reads of the product."""
    both = gather(x).flatten(0, 1) @ w.t()
    return (F.relu(both[:, :24]) * both[:, 24:]) @ o.t()


@pytest.mark.parametrize(("fn", "expected"), [(plain, "cast(silu(mm0), bf16) * mm1"), (of_rows, "relu(mm0) * mm1")])
def test_dynamic_tokens_stay_dynamic(fn: Program, expected: str) -> None:
    modules, counts = graphs(fn, Options(), dynamic=True)
    assert counts == [1]
    task, _ = only_task(fused(modules)[0], "all_gather_matmul")
    assert task.epilogue.startswith(expected)


def written_behind(x: torch.Tensor, w: torch.Tensor, o: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = biased(x, w, o, b)
    with torch.no_grad():
        b.add_(1.0)
    return out


LEFT: dict[str, Program] = {
    "the bias is written to": written_behind,
    "nothing is combined": lambda x, w, o, b: torch.cat([one @ o.t() for one in F.linear(gather(x), w).chunk(2, -1)]),
    "the product is used as a whole": lambda x, w, o, b: (
        (F.silu((p := F.linear(gather(x), w))[..., :24]) * p[..., 24:]).sum() + p.sum()
    ),
    "a norm follows": lambda x, w, o, b: F.linear(
        F.rms_norm(F.silu((p := F.linear(gather(x), w))[..., :24]) * p[..., 24:], (24,)), o
    ),
    "nothing is gathered": lambda x, w, o, b: F.linear(F.silu((p := F.linear(x, w))[..., :24]) * p[..., 24:], o),
    "three parts": lambda x, w, o, b: F.linear(
        F.silu((p := F.linear(gather(x), w))[..., :16]) * p[..., 16:32] * p[..., 32:], o[:, :16]
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    before, _ = graphs(LEFT[name], None)
    after, counts = graphs(LEFT[name], Options())
    assert counts == [0]
    assert [text(one.graph) for one in after] == [text(one.graph) for one in before]


@pytest.mark.parametrize("options", [Options(strategy="library"), Options(fusions=("matmul_reduce_scatter",))])
def test_left_alone_by_options(options: Options) -> None:
    assert graphs(plain, options)[1] == [0]


def test_inference_is_for_a_later_pass() -> None:
    assert set(graphs(plain, Options(), grad=False)[1]) <= {0}
