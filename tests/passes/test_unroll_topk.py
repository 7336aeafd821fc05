"""unroll_topk: which topk is unrolled, what stands in its place, and that it chooses what topk chooses.

tests/test_routing.py has it compiled by Inductor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from torch._inductor import config

from ditron_inductor.options import Options
from ditron_inductor.passes.finish.unroll_topk import (
    INTEGERS,
    MOST_CHOSEN,
    MOST_VALUES,
    Bounds,
    find_topk,
    unroll_topk,
)
from tests.passes.choices import check, specials, unroll_anywhere, unroll_parts
from tests.passes.graphs import assert_no_new_guards, compiled_graphs, graph_on, text, traced

aten = torch.ops.aten


def unrolled(fn: Callable[..., Any], x: Any, dtype: torch.dtype = torch.float32) -> int:
    module = graph_on(fn, x, dtype=dtype)
    count = unroll_topk(module.graph, options=Options())
    module.graph.lint()
    assert len(module.graph.find_nodes(op="call_function", target=aten.topk.default)) == (not count)
    return count


def test_golden() -> None:
    module = graph_on(lambda x: torch.topk(x.softmax(-1), 2), (3, 8))
    assert unroll_topk(module.graph, options=Options()) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
x_1 [3, 8]
_softmax [3, 8] = aten._softmax(x_1, -1, False)
ne_tensor [3, 8] = aten.ne.Tensor(_softmax, _softmax)
view_dtype [3, 8] = aten.view.dtype(_softmax, torch.int16)
__rshift___scalar [3, 8] = aten.__rshift__.Scalar(view_dtype, 15)
bitwise_and_scalar [3, 8] = aten.bitwise_and.Scalar(__rshift___scalar, 32767)
bitwise_xor_tensor [3, 8] = aten.bitwise_xor.Tensor(view_dtype, bitwise_and_scalar)
full_default [] = aten.full([], 32767, dtype=torch.int16, layout=torch.strided, device=device(type='cuda', index=0), pin_memory=False)
where_self [3, 8] = aten.where.self(ne_tensor, full_default, bitwise_xor_tensor)
iota_default [8] = prims.iota(8, start=7, step=-1, dtype=torch.int32, device=device(type='cuda', index=0), requires_grad=False)
convert_element_type_default [3, 8] = prims.convert_element_type(where_self, torch.int32)
__lshift___scalar [3, 8] = aten.__lshift__.Scalar(convert_element_type_default, 16)
bitwise_or_tensor [3, 8] = aten.bitwise_or.Tensor(__lshift___scalar, iota_default)
full_default_1 [] = aten.full([], -2147483648, dtype=torch.int32, layout=torch.strided, device=device(type='cuda', index=0), pin_memory=False)
amax_default [3, 1] = aten.amax(bitwise_or_tensor, [-1], True)
lt_tensor [3, 8] = aten.lt.Tensor(bitwise_or_tensor, amax_default)
where_self_1 [3, 8] = aten.where.self(lt_tensor, bitwise_or_tensor, full_default_1)
amax_default_1 [3, 1] = aten.amax(where_self_1, [-1], True)
cat_default [3, 2] = aten.cat([amax_default, amax_default_1], -1)
__rshift___scalar_1 [3, 2] = aten.__rshift__.Scalar(cat_default, 16)
convert_element_type_default_1 [3, 2] = prims.convert_element_type(__rshift___scalar_1, torch.int16)
__rshift___scalar_2 [3, 2] = aten.__rshift__.Scalar(convert_element_type_default_1, 15)
bitwise_and_scalar_1 [3, 2] = aten.bitwise_and.Scalar(__rshift___scalar_2, 32767)
bitwise_xor_tensor_1 [3, 2] = aten.bitwise_xor.Tensor(convert_element_type_default_1, bitwise_and_scalar_1)
view_dtype_1 [3, 2] = aten.view.dtype(bitwise_xor_tensor_1, torch.bfloat16)
bitwise_and_scalar_2 [3, 2] = aten.bitwise_and.Scalar(cat_default, 65535)
convert_element_type_default_2 [3, 2] = prims.convert_element_type(bitwise_and_scalar_2, torch.int64)
full_default_2 [] = aten.full([], 7, dtype=torch.int64, layout=torch.strided, device=device(type='cuda', index=0), pin_memory=False)
sub_tensor [3, 2] = aten.sub.Tensor(full_default_2, convert_element_type_default_2)
return (view_dtype_1, sub_tensor)
""",
    )


def test_places_alone() -> None:
    """What only values need is not computed."""
    module = graph_on(lambda x: torch.topk(x, 2)[1], (3, 8), dtype=torch.float32)
    assert unroll_topk(module.graph, options=Options()) == 1
    assert len(module.graph.find_nodes(op="call_function", target=aten.view.dtype)) == 1


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("k", [1, 2, 8, 16])
def test_chooses_what_topk_chooses(dtype: torch.dtype, k: int) -> None:
    _check_choice(unroll_anywhere, specials(dtype), k)


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("k", [1, 4, 16])
def test_chooses_the_same_in_parts(dtype: torch.dtype, k: int) -> None:
    """Of 24 values in 3 parts."""
    _check_choice(unroll_parts, specials(dtype), k)


def _check_choice(unroll: Callable[..., int], x: torch.Tensor, k: int) -> None:
    module = traced(lambda x: torch.topk(x, k), x)
    assert unroll(module.graph, options=Options()) == 1
    module.graph.lint()
    module.recompile()
    check(module(x), x, k)


@pytest.mark.parametrize(
    ("size", "parts"), [(64, 1), (65, 5), (128, 2), (160, 4), (256, 4), (384, 6), (512, 8), (67, 0)]
)
def test_parts(size: int, parts: int) -> None:
    """As few as possible, and none of a prime number."""
    module = graph_on(lambda x: torch.topk(x, 12), (3, size), dtype=torch.float32)
    (node,) = module.graph.find_nodes(op="call_function", target=aten.topk.default)
    match = find_topk(node, Bounds(most_values=512))
    assert (match.parts if match is not None else 0) == parts


@pytest.mark.parametrize(("size", "most"), [(64, 16), (256, 16), (384, 16), (448, 12), (512, 12)])
def test_one_kernel_has_room_for_the_chain(size: int, most: int) -> None:
    assert unrolled(lambda x: torch.topk(x, most), (3, size)) == 1
    assert unrolled(lambda x: torch.topk(x, most + 1), (3, size)) == 0


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("triton.persistent_reductions", False),
        ("triton.multi_kernel", 1),
        ("triton.cooperative_reductions", True),
        ("triton.force_cooperative_reductions", True),
        ("max_fusion_size", 4),
    ],
)
def test_inductor_may_be_told_to_loop(entry: str, value: Any) -> None:
    """Or to make smaller kernels."""
    with config.patch({entry: value}):
        assert unrolled(lambda x: torch.topk(x, 2), (3, 8)) == 0


@pytest.mark.parametrize("unroll", [unroll_anywhere, unroll_parts])
def test_of_the_values_of_another_one(unroll: Callable[..., int]) -> None:
    x = specials(torch.float32)
    module = traced(lambda x: torch.topk(torch.topk(x, 6)[0], 2), x)
    assert unroll(module.graph, options=Options()) == 2
    module.graph.lint()
    module.recompile()
    check(module(x), torch.topk(x, 6)[0], 2)


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], tuple[int, ...], torch.dtype]] = {
    "the smallest": (lambda x: torch.topk(x, 2, largest=False), (3, 8), torch.float32),
    "another dimension": (lambda x: torch.topk(x, 2, dim=0), (3, 8), torch.float32),
    "integers": (lambda x: torch.topk(x, 2), (3, 8), torch.int32),
    "doubles": (lambda x: torch.topk(x, 2), (3, 8), torch.float64),
    "no value": (lambda x: torch.topk(x, 0), (3, 8), torch.float32),
    "many values": (lambda x: torch.topk(x, 2), (3, MOST_VALUES + 1), torch.float32),
    "many chosen": (lambda x: torch.topk(x, MOST_CHOSEN + 1), (3, 64), torch.float32),
    "a scalar": (lambda x: torch.topk(x, 1), (), torch.float32),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    fn, shape, dtype = REFUSED[name]
    assert unrolled(fn, shape, dtype) == 0


@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8), (0, 8), (3, MOST_VALUES)])
def test_fires(shape: tuple[int, ...]) -> None:
    assert unrolled(lambda x: torch.topk(x, 2), shape) == 1
    assert unrolled(lambda x: torch.topk(x, 2, dim=x.ndim - 1, sorted=False), shape) == 1


def test_not_on_the_cpu_device() -> None:
    module = traced(lambda x: torch.topk(x, 2), torch.randn(3, 8))
    assert unroll_topk(module.graph, options=Options()) == 0


def test_dynamic_sizes() -> None:
    """The number of rows may be dynamic, and gets no guard; the number of values must be known."""
    x = torch.randn(3, 8)
    torch._dynamo.mark_dynamic(x, 0)
    for unroll, more in ((unroll_anywhere, 1), (unroll_parts, 3)):
        (module,) = compiled_graphs(lambda x, more=more: torch.topk(x.repeat(1, more).softmax(-1), 2)[0] * 2, x)
        with assert_no_new_guards(module):
            assert unroll(module.graph, options=Options()) == 1
    module = traced(lambda x: torch.topk(x, 2), torch.randn(3, 8), dynamic=True)
    with assert_no_new_guards(module):
        assert unroll_anywhere(module.graph, options=Options()) == 0


@pytest.mark.parametrize("dtype", INTEGERS)
def test_zeros_of_both_signs(dtype: torch.dtype) -> None:
    x = torch.tensor([[-1.0, -0.0, 0.0, -0.0, 0.0]], dtype=dtype)
    module = traced(lambda x: torch.topk(x, 3), x)
    assert unroll_anywhere(module.graph, options=Options()) == 1
    module.recompile()
    values, places = module(x)
    assert places.tolist() == [[2, 4, 1]] and values.signbit().tolist() == [[False, False, True]]
