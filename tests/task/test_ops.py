"""The ops: schemas, tags, and fake implementations that say shapes without guarding dynamic ones."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import expecttest
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ditron_inductor.task import ops
from ditron_inductor.task.nodes import Norm

SITE = (4, "0", "r/0", "auto", 1 << 30, 0.0)


@pytest.fixture(autouse=True)
def fake_mode() -> Iterator[FakeTensorMode]:
    ops.define()
    with FakeTensorMode() as mode:
        yield mode


def shapes(outputs: object) -> list[list[int]]:
    assert isinstance(outputs, (list, tuple))
    return [list(output.shape) for output in outputs]


def test_golden_schemas() -> None:
    schemas = [str(ops.overload(name)._schema) for name in ops.SCHEMAS]
    lines = "\n".join(textwrap.fill(schema, 100, subsequent_indent="  ") for schema in schemas) + "\n"
    expecttest.assert_expected_inline(
        lines,
        """\
ditron::all_gather_matmul(Tensor[] operands, str node, Tensor? token) -> Tensor[]
ditron::matmul_reduce_scatter(Tensor[] operands, str node, Tensor? token) -> Tensor[]
ditron::matmul_all_reduce(Tensor[] operands, str node, Tensor? token) -> Tensor[]
ditron::matmul_all_gather(Tensor[] operands, str node, Tensor? token) -> Tensor[]
ditron::all_reduce_rms_norm(Tensor[] operands, str node, Tensor? token) -> Tensor[]
ditron::matmul_all_reduce_rms_norm(Tensor[] operands, str node, Tensor? token) -> Tensor[]
ditron::matmul_all_to_all(Tensor[] operands, str node, Tensor? token) -> Tensor[]
ditron::all_to_all_matmul(Tensor[] operands, str node, Tensor? token) -> Tensor[]
ditron::flash_decode(Tensor[] operands, str node, Tensor? token) -> Tensor[]
ditron::all_gather_attention(Tensor[] operands, str node, Tensor? token) -> Tensor[]
ditron::attention_reduce_scatter(Tensor[] operands, str node, Tensor? token) -> Tensor[]
ditron::projections(Tensor[] operands, str node, Tensor? token) -> Tensor[]
ditron::after(Tensor(a) x, Tensor token) -> Tensor(a)
ditron::after_(Tensor(a!) x, Tensor token) -> ()
ditron::token_of(Tensor x) -> Tensor
ditron::meet(str key) -> ()
ditron::own_chunk(Tensor x, int dim, int world_size, str group_name) -> Tensor
ditron::replicated(Tensor(a) x, Tensor[] same, str group_name, str site, str names, str constants)
  -> Tensor(a)
""",
    )


def test_define_twice_is_once() -> None:
    assert ops.define() is ops.define()


@pytest.mark.parametrize("name", list(ops.SCHEMAS))
def test_inputs_keep_their_strides(name: str) -> None:
    assert torch.Tag.needs_fixed_stride_order in ops.overload(name).tags


@pytest.mark.parametrize("return_gathered", [False, True])
@pytest.mark.parametrize(("shape", "dim"), [((8, 16), 0), ((2, 8, 16), 0), ((2, 8, 16), 1), ((2, 3, 8, 16), 2)])
def test_all_gather_matmul(shape: tuple[int, ...], dim: int, return_gathered: bool) -> None:
    shard, weights = torch.empty(shape), [torch.empty(16, 24), torch.empty(40, 16).t()]
    gathered = list(shape)
    gathered[dim] *= 4
    rows = torch.Size(gathered[:-1]).numel()
    outputs = torch.ops.ditron.all_gather_matmul(shard, weights, None, dim, return_gathered, *SITE)
    assert shapes(outputs) == [[rows, 24], [rows, 40], *([gathered] if return_gathered else []), [1]]
    assert all(output.is_contiguous() for output in outputs)
    assert outputs[-1].dtype == torch.uint8


def test_all_gather_matmul_with_an_epilogue() -> None:
    x, weights = torch.empty(2, 8, 16, dtype=torch.bfloat16), [torch.empty(16, 24, dtype=torch.bfloat16)] * 2
    text = "mm0 * mm1; cast(mm1, fp32); mm0 + row(x0)"
    outputs = torch.ops.ditron.all_gather_matmul(x, weights, None, 1, True, *SITE, [torch.empty(24)], text)
    assert shapes(outputs) == [[64, 24], [64, 24], [64, 24], [2, 32, 16], [1]]
    assert [one.dtype for one in outputs[:3]] == [torch.bfloat16, torch.float32, torch.bfloat16]


@pytest.mark.parametrize(("shape", "dim"), [((32, 16), 0), ((2, 32, 16), 1), ((4, 32, 16), 0)])
def test_matmul_reduce_scatter(shape: tuple[int, ...], dim: int) -> None:
    expected = [*shape[:-1], 24]
    expected[dim] //= 4
    outputs = torch.ops.ditron.matmul_reduce_scatter(
        [torch.empty(shape, dtype=torch.bfloat16), torch.empty((*shape[:-1], 5), dtype=torch.bfloat16)],
        [torch.empty(16, 24, dtype=torch.bfloat16), torch.empty(5, 24, dtype=torch.bfloat16)],
        torch.empty(24, dtype=torch.bfloat16),
        None,
        dim,
        "sum",
        *SITE,
    )
    assert shapes(outputs) == [expected, [1]]
    assert outputs[0].dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(32, 16), (2, 32, 16)])
def test_matmul_all_reduce(shape: tuple[int, ...]) -> None:
    operands = [torch.empty(shape)], [torch.empty(16, 24)], torch.empty(24)
    outputs = torch.ops.ditron.matmul_all_reduce(*operands, None, "avg", *SITE)
    assert shapes(outputs) == [[*shape[:-1], 24], [1]]


def test_reductions_with_a_norm() -> None:
    norms = (None, "sum", *ops.norm_args(Norm("rms", 1e-6, round_first=True)))
    norm = (*norms, *ops.norm_args(None), "", *SITE)
    saving = (*norms, *ops.norm_args(Norm("layer")), "reduced+post_mean+rstd+scaled+other", *SITE)
    x, row = torch.empty(2, 3, 24, dtype=torch.bfloat16), torch.empty(24, dtype=torch.bfloat16)
    extras = (None, None, None, None, x.view(6, 24), row, None, None, None)
    outputs = torch.ops.ditron.all_reduce_rms_norm(x, *extras, *norm)
    assert shapes(outputs) == [[2, 3, 24], [2, 3, 24], [1]] and outputs[1].dtype == torch.bfloat16
    outputs = torch.ops.ditron.matmul_all_reduce_rms_norm(
        [torch.empty(2, 3, 16)], [torch.empty(16, 24)], None, row, row, None, None, None, row, row, None, None, *norm
    )
    assert shapes(outputs) == [[2, 3, 24], [2, 3, 24], [1]]
    outputs = torch.ops.ditron.all_reduce_rms_norm(x, None, None, row, row, x, None, None, row, row, *saving)
    assert shapes(outputs) == [[2, 3, 24], [2, 3, 24], [2, 3, 24], [2, 3, 1], [2, 3, 1], [2, 3, 24], [2, 3, 24], [1]]
    assert [one.dtype for one in outputs[2:-1]] == [torch.bfloat16, *[torch.float32] * 3, torch.bfloat16]


@pytest.mark.parametrize(("shape", "dim"), [((32, 16), 0), ((32, 16), 1), ((2, 32, 16), 1), ((2, 32, 16), 2)])
def test_matmul_all_gather(shape: tuple[int, ...], dim: int) -> None:
    expected = [*shape[:-1], 24]
    expected[dim] *= 4
    for bias in (None, torch.empty(24)):
        operands = [torch.empty(shape)], [torch.empty(16, 24)], bias, None
        assert shapes(torch.ops.ditron.matmul_all_gather(*operands, dim, *SITE)) == [expected, [1]]


def test_a_token_orders_without_changing_anything() -> None:
    x = torch.empty(8, 16)
    _, token = torch.ops.ditron.matmul_all_reduce([x], [torch.empty(16, 24)], None, None, "sum", *SITE)
    torch.ops.ditron.matmul_all_reduce([x], [torch.empty(16, 24)], None, token, "sum", *SITE)
    assert torch.ops.ditron.after(x, token).shape == x.shape
    assert torch.ops.ditron.token_of(x).shape == (1,)


def test_dynamic_shapes_add_no_guard() -> None:
    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 3)
    x = mode.from_tensor(torch.empty(2, 8, 16, device="meta").to("cpu"), symbolic_context=context)
    with mode:
        weight = x.new_empty(x.shape[2], 24)
        before = len(shape_env.guards)
        outputs = torch.ops.ditron.all_gather_matmul(x, [weight], None, 1, True, *SITE)
        torch.ops.ditron.matmul_all_reduce([x, x], [weight, weight], weight[0], None, "sum", *SITE)
        torch.ops.ditron.matmul_reduce_scatter([x], [weight], None, None, 1, "sum", *SITE)
        torch.ops.ditron.matmul_all_gather([x], [weight], None, None, 2, *SITE)
    assert len(shape_env.guards) == before
    assert outputs[1].shape[1] == 4 * x.shape[1]
