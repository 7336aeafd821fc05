"""The ops: schemas, tags, and fake implementations that say shapes without guarding dynamic ones."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import expecttest
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ditron_inductor.task import schema
from ditron_inductor.task.attention_masks import Mask
from ditron_inductor.task.nodes import (
    NODES,
    AllGatherAttention,
    AllGatherMatmul,
    AllReduceRmsNorm,
    AllToAllMatmul,
    AttentionReduceScatter,
    FlashDecode,
    MatmulAllGather,
    MatmulAllReduce,
    MatmulAllReduceRmsNorm,
    MatmulAllToAll,
    MatmulReduceScatter,
    Norm,
    Policy,
    Projections,
)

SITE = (4, "0", "r/0", Policy())
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def fake_mode() -> Iterator[FakeTensorMode]:
    schema.define()
    with FakeTensorMode() as mode:
        yield mode


def shapes(outputs: object) -> list[list[int]]:
    assert isinstance(outputs, (list, tuple))
    return [list(output.shape) for output in outputs]


def is_token(x: torch.Tensor) -> bool:
    return list(x.shape) == [1] and x.dtype == torch.uint8


def test_golden_schemas() -> None:
    schemas = [str(schema.overload(name)._schema) for name in schema.SCHEMAS if name not in NODES]
    lines = "\n".join(textwrap.fill(schema, 100, subsequent_indent="  ") for schema in schemas) + "\n"
    expecttest.assert_expected_inline(
        lines,
        """\
ditron::after(Tensor(a) x, Tensor token) -> Tensor(a)
ditron::after_(Tensor(a!) x, Tensor token) -> ()
ditron::token_of(Tensor x) -> Tensor
ditron::meet(str key) -> ()
ditron::own_chunk(Tensor x, int dim, int world_size, str group_name) -> Tensor
ditron::replicated(Tensor(a) x, Tensor[] same, str group_name, str site, str names, str constants,
  bool again=True) -> Tensor(a)
""",
    )


def test_all_nodes_have_one_schema() -> None:
    for kind in NODES:
        declared = f"ditron::{kind}(Tensor[] operands, str node, Tensor? token) -> Tensor[]"
        assert str(schema.overload(kind)._schema) == declared
    names = [argument.name for argument in schema.overload(Projections.kind)._schema.arguments]
    assert (names[schema.OPERANDS], names[schema.NODE], names[schema.TOKEN]) == ("operands", "node", "token")


def test_define_twice_is_once() -> None:
    assert schema.define() is schema.define()


@pytest.mark.parametrize("name", list(schema.SCHEMAS))
def test_inputs_keep_their_strides(name: str) -> None:
    assert torch.Tag.needs_fixed_stride_order in schema.overload(name).tags


@pytest.mark.parametrize("return_gathered", [False, True])
@pytest.mark.parametrize(("shape", "dim"), [((8, 16), 0), ((2, 8, 16), 0), ((2, 8, 16), 1), ((2, 3, 8, 16), 2)])
def test_all_gather_matmul(shape: tuple[int, ...], dim: int, return_gathered: bool) -> None:
    shard, weights = torch.empty(shape), [torch.empty(16, 24), torch.empty(40, 16).t()]
    gathered = list(shape)
    gathered[dim] *= 4
    rows = torch.Size(gathered[:-1]).numel()
    node = AllGatherMatmul(dim, 4, "0", return_gathered, "r/0", Policy(), 2)
    outputs = schema.call(node, shard=shard, weights=weights)
    assert shapes(outputs) == [[rows, 24], [rows, 40], *([gathered] if return_gathered else []), [1]]
    assert all(output.is_contiguous() for output in outputs)
    assert is_token(outputs[-1])


def test_all_gather_matmul_with_an_epilogue() -> None:
    x, weights = torch.empty(2, 8, 16, dtype=BF16), [torch.empty(16, 24, dtype=BF16)] * 2
    text = "mm0 * mm1; cast(mm1, fp32); mm0 + row(x0)"
    node = AllGatherMatmul(1, 4, "0", True, "r/0", Policy(), 2, num_extras=1, epilogue=text)
    outputs = schema.call(node, shard=x, weights=weights, extras=[torch.empty(24)])
    assert shapes(outputs) == [[64, 24], [64, 24], [64, 24], [2, 32, 16], [1]]
    assert [one.dtype for one in outputs[:3]] == [BF16, FP32, BF16]


@pytest.mark.parametrize(("shape", "dim"), [((32, 16), 0), ((2, 32, 16), 1), ((4, 32, 16), 0)])
def test_matmul_reduce_scatter(shape: tuple[int, ...], dim: int) -> None:
    expected = [*shape[:-1], 24]
    expected[dim] //= 4
    outputs = schema.call(
        MatmulReduceScatter(dim, "sum", *SITE, num_products=2, has_bias=True),
        a=[torch.empty(shape, dtype=BF16), torch.empty((*shape[:-1], 5), dtype=BF16)],
        b=[torch.empty(16, 24, dtype=BF16), torch.empty(5, 24, dtype=BF16)],
        bias=torch.empty(24, dtype=BF16),
    )
    assert shapes(outputs) == [expected, [1]]
    assert outputs[0].dtype == BF16 and outputs[0].is_contiguous()


@pytest.mark.parametrize("shape", [(32, 16), (2, 32, 16)])
def test_matmul_all_reduce(shape: tuple[int, ...]) -> None:
    node = MatmulAllReduce("avg", *SITE, has_bias=True)
    outputs = schema.call(node, a=[torch.empty(shape)], b=[torch.empty(16, 24)], bias=torch.empty(24))
    assert shapes(outputs) == [[*shape[:-1], 24], [1]]


def test_reductions_with_a_norm() -> None:
    norm = Norm("rms", 1e-6, round_first=True)
    x, row = torch.empty(2, 3, 24, dtype=BF16), torch.empty(24, dtype=BF16)
    outputs = schema.call(
        AllReduceRmsNorm("sum", norm, ("residual", "weight"), *SITE), x=x, residual=x.view(6, 24), weight=row
    )
    assert shapes(outputs) == [[2, 3, 24], [2, 3, 24], [1]] and outputs[1].dtype == BF16
    outputs = schema.call(
        MatmulAllReduceRmsNorm("sum", norm, ("bias", "second_bias", "weight", "shift"), *SITE),
        a=[torch.empty(2, 3, 16)],
        b=[torch.empty(16, 24)],
        **dict.fromkeys(("bias", "second_bias", "weight", "shift"), row),
    )
    assert shapes(outputs) == [[2, 3, 24], [2, 3, 24], [1]]
    extras = ("post_weight", "post_shift", "residual", "other_weight", "other_shift")
    saved = ("reduced", "post_mean", "rstd", "scaled", "other")
    node = AllReduceRmsNorm("sum", norm, extras, *SITE, post=Norm("layer"), saved=saved)
    outputs = schema.call(node, x=x, **{**dict.fromkeys(extras, row), "residual": x})
    assert shapes(outputs) == [[2, 3, 24], [2, 3, 24], [2, 3, 24], [2, 3, 1], [2, 3, 1], [2, 3, 24], [2, 3, 24], [1]]
    assert [one.dtype for one in outputs[2:-1]] == [BF16, FP32, FP32, FP32, BF16]
    assert is_token(outputs[-1])


def test_a_product_of_whose_norm_nothing_is_kept_but_the_total() -> None:
    node = MatmulAllReduceRmsNorm(
        "avg", Norm("none", 0.0), ("residual",), *SITE, post=Norm(), num_products=2, has_bias=True
    )
    a, b = [torch.empty(2, 3, 16)] * 2, [torch.empty(16, 24)] * 2
    outputs = schema.call(node, a=a, b=b, product_bias=torch.empty(24), residual=torch.empty(6, 24))
    assert shapes(outputs) == [[2, 3, 24], [1]]


@pytest.mark.parametrize(("shape", "dim"), [((32, 16), 0), ((32, 16), 1), ((2, 32, 16), 1), ((2, 32, 16), 2)])
def test_matmul_all_gather(shape: tuple[int, ...], dim: int) -> None:
    expected = [*shape[:-1], 24]
    expected[dim] *= 4
    for bias in (None, torch.empty(24)):
        node = MatmulAllGather(dim, *SITE, has_bias=bias is not None)
        outputs = schema.call(node, a=[torch.empty(shape)], b=[torch.empty(16, 24)], bias=bias)
        assert shapes(outputs) == [expected, [1]] and outputs[0].is_contiguous()


def test_projections() -> None:
    x, weights = torch.empty(2, 16, dtype=BF16), [torch.empty(16, 24, dtype=BF16), torch.empty(8, 16, dtype=BF16).t()]
    outputs = schema.call(Projections(2), x=x, weights=weights)
    assert shapes(outputs) == [[2, 24], [2, 8]] and all(one.is_contiguous() for one in outputs)
    node = Projections(2, num_extras=1, epilogue="cast(mm0 + row(x0), fp32); mm1")
    outputs = schema.call(node, x=x, weights=weights, extras=[torch.empty(24)])
    assert shapes(outputs) == [[2, 24], [2, 8]] and [one.dtype for one in outputs] == [FP32, BF16]


def test_products_around_an_all_to_all() -> None:
    a, b = [torch.empty(2, 3, 16)] * 2, [torch.empty(16, 24)] * 2
    node = MatmulAllToAll(1, 3, *SITE, num_products=2, has_bias=True)
    outputs = schema.call(node, a=a, b=b, bias=torch.empty(24))
    assert shapes(outputs) == [[2, 12, 6], [1]] and outputs[0].is_contiguous()
    for returned in (False, True):
        node = AllToAllMatmul(1, 3, returned, *SITE)
        outputs = schema.call(node, x=torch.empty(2, 12, 6), weight=torch.empty(24, 16))
        assert shapes(outputs) == [[6, 16], *([[2, 3, 24]] if returned else []), [1]]
        assert all(one.is_contiguous() for one in outputs)


def test_flash_decode() -> None:
    q, cache = torch.empty(2, 16, 6, dtype=BF16).transpose(1, 2), torch.empty(2, 40, 2, 16, dtype=BF16)
    lengths, table = torch.empty(2, dtype=torch.int32), torch.empty(2, 5, dtype=torch.int32)
    for given in (None, table):
        node = FlashDecode(0.25, 0.0, *SITE, paged=given is not None)
        operands = {} if given is None else {"block_table": given}
        outputs = schema.call(node, q=q, k=cache, v=cache, lengths=lengths, **operands)
        assert shapes(outputs) == [[2, 6, 16], [1]]
        assert outputs[0].dtype == BF16 and outputs[0].is_contiguous()


@pytest.mark.parametrize("mask", ["causal", "given"])
@pytest.mark.parametrize("returned", [False, True])
def test_all_gather_attention(mask: str, returned: bool) -> None:
    q, k = torch.empty(1, 4, 8, 16, dtype=BF16), torch.empty(1, 2, 6, 16, dtype=BF16)
    bias = {"bias": torch.empty(1, 1, 8, 24)} if mask == "given" else {}
    node = AllGatherAttention(Mask(mask), 0.25, 0.0, *SITE, return_gathered=returned)
    out, lse, *gathered, token = schema.call(node, q=q, k=k, v=k, **bias)
    assert shapes([out, lse]) == [[1, 4, 8, 16], [1, 4, 8]] and (out.dtype, lse.dtype) == (BF16, FP32)
    assert shapes(gathered) == [[1, 2, 24, 16]] * (2 * returned)
    # The sequence stands before the heads in memory, as the rest of a layer reads it.
    assert all(one.transpose(1, 2).is_contiguous() for one in (out, *gathered))
    assert is_token(token)


@pytest.mark.parametrize("mask", ["zigzag", "given"])
def test_attention_reduce_scatter(mask: str) -> None:
    q, k = torch.empty(1, 4, 6, 16, dtype=BF16), torch.empty(1, 2, 24, 16, dtype=BF16)
    bias = {"bias": torch.empty(1, 1, 6, 24)} if mask == "given" else {}
    node = AttentionReduceScatter(Mask(mask), 0.25, 0.0, *SITE)
    *gradients, token = schema.call(node, grad_out=q, q=q, k=k, v=k, out=q, lse=torch.empty(1, 4, 6), **bias)
    assert shapes(gradients) == [[1, 4, 6, 16], [1, 2, 6, 16], [1, 2, 6, 16]]
    assert all(one.dtype == BF16 and one.transpose(1, 2).is_contiguous() for one in gradients)
    assert is_token(token)


def test_operands_have_to_fit_the_node() -> None:
    node = MatmulAllReduce("sum", *SITE, has_bias=True)
    x, w, row = torch.empty(8, 16), torch.empty(16, 24), torch.empty(24)
    operands, text, token = schema.arguments(node, a=[x], b=[w], bias=row)
    assert operands == [x, w, row] and token is None and schema.parsed(node.kind, text) == node
    with pytest.raises(AssertionError, match="matmul_all_reduce has no bias"):
        schema.arguments(node, a=[x], b=[w])
    with pytest.raises(AssertionError, match="matmul_all_reduce has 2 a, not 1"):
        schema.arguments(node, a=[x, x], b=[w], bias=row)
    with pytest.raises(AssertionError, match="matmul_all_reduce has no operand residual"):
        schema.arguments(node, a=[x], b=[w], bias=row, residual=x)
    with pytest.raises(AssertionError, match="has 3 operands, not 2"):
        schema.overload(node.kind)([x, w], text, None)


def test_a_token_orders_without_changing_anything() -> None:
    x, w = torch.empty(8, 16), torch.empty(16, 24)
    node = MatmulAllReduce("sum", *SITE)
    _, token = schema.call(node, a=[x], b=[w])
    schema.call(node, token, a=[x], b=[w])
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
        outputs = schema.call(AllGatherMatmul(1, 4, "0", True, "r/0", Policy(), 1), shard=x, weights=[weight])
        reduce = MatmulAllReduce("sum", *SITE, num_products=2, has_bias=True)
        schema.call(reduce, a=[x, x], b=[weight, weight], bias=weight[0])
        schema.call(MatmulReduceScatter(1, "sum", *SITE), a=[x], b=[weight])
        schema.call(MatmulAllGather(2, *SITE), a=[x], b=[weight])
    assert len(shape_env.guards) == before
    assert outputs[1].shape[1] == 4 * x.shape[1]
