"""unroll_topk: which topk is unrolled, what stands in its place, and that it chooses what topk chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from torch import fx
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ditron_inductor.options import Options
from ditron_inductor.passes.finish.unroll_topk import (
    INTEGERS,
    MOST_CHOSEN,
    MOST_VALUES,
    find_topk,
    rewrite,
    unroll_topk,
)
from ditron_inductor.pipeline import DitronPipeline
from ditron_inductor.report.explain import without_caches
from tests.passes.graphs import assert_no_new_guards, compiled_graphs, text, traced

aten = torch.ops.aten
ANYWHERE = ("cpu", "cuda")


def chosen(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest values and their places; of equal values the left ones, as torch chooses them on GPUs."""
    values, places = torch.sort(x, dim=-1, descending=True, stable=True)
    return values[..., :k], places[..., :k]


def unroll_anywhere(graph: fx.Graph, *, options: Options) -> int:
    """The pass, on the CPU device too."""
    found = [match for node in graph.nodes if (match := find_topk(node, ANYWHERE)) is not None]
    for match in found:
        rewrite(graph, match)
    return len(found)


def on_a_gpu(fn: Callable[..., Any], x: Any, dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    """`fn` of a tensor of this shape, as a graph on a GPU that need not be there."""
    with FakeTensorMode():
        return make_fx(fn)(torch.empty(x, dtype=dtype, device="cuda"))


def unrolled(fn: Callable[..., Any], x: Any, dtype: torch.dtype = torch.float32) -> int:
    module = on_a_gpu(fn, x, dtype)
    count = unroll_topk(module.graph, options=Options())
    module.graph.lint()
    assert len(module.graph.find_nodes(op="call_function", target=aten.topk.default)) == (not count)
    return count


def test_golden() -> None:
    module = on_a_gpu(lambda x: torch.topk(x.softmax(-1), 2), (3, 8), torch.bfloat16)
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
convert_element_type_default [3, 8] = prims.convert_element_type(where_self, torch.int32)
iota_default [8] = prims.iota(8, start=0, step=1, dtype=torch.int64, device=device(type='cuda', index=0), requires_grad=False)
full_default_1 [] = aten.full([], -2147483648, dtype=torch.int32, layout=torch.strided, device=device(type='cuda', index=0), pin_memory=False)
amax_default [3, 1] = aten.amax(convert_element_type_default, [-1], True)
argmax_default [3, 1] = aten.argmax(convert_element_type_default, -1, True)
eq_tensor [3, 8] = aten.eq.Tensor(iota_default, argmax_default)
where_self_1 [3, 8] = aten.where.self(eq_tensor, full_default_1, convert_element_type_default)
amax_default_1 [3, 1] = aten.amax(where_self_1, [-1], True)
argmax_default_1 [3, 1] = aten.argmax(where_self_1, -1, True)
cat_default [3, 2] = aten.cat([amax_default, amax_default_1], -1)
convert_element_type_default_1 [3, 2] = prims.convert_element_type(cat_default, torch.int16)
__rshift___scalar_1 [3, 2] = aten.__rshift__.Scalar(convert_element_type_default_1, 15)
bitwise_and_scalar_1 [3, 2] = aten.bitwise_and.Scalar(__rshift___scalar_1, 32767)
bitwise_xor_tensor_1 [3, 2] = aten.bitwise_xor.Tensor(convert_element_type_default_1, bitwise_and_scalar_1)
view_dtype_1 [3, 2] = aten.view.dtype(bitwise_xor_tensor_1, torch.bfloat16)
cat_default_1 [3, 2] = aten.cat([argmax_default, argmax_default_1], -1)
return (view_dtype_1, cat_default_1)
""",
    )


def test_places_alone() -> None:
    """What only values need is not computed."""
    module = on_a_gpu(lambda x: torch.topk(x, 2)[1], (3, 8))
    assert unroll_topk(module.graph, options=Options()) == 1
    assert not module.graph.find_nodes(op="call_function", target=aten.amax.default)


def specials(dtype: torch.dtype) -> torch.Tensor:
    """Rows with many equal values, with NaNs of both signs, with infinities, and with nothing else than -inf."""
    torch.manual_seed(0)
    x = torch.randn(64, 24)
    x[:16] = torch.randint(0, 3, (16, 24)).float()
    x[1] = -torch.inf
    x[2, 1:] = -torch.inf
    x[3, 4], x[3, 9], x[4] = torch.nan, -torch.nan, torch.nan
    x[5, 3], x[5, 7], x[5, 8] = torch.inf, torch.nan, torch.inf
    x[6] = x[6].round() * 1e-42
    x[7] = -x[7]
    return x.to(dtype)


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("k", [1, 2, 8, 16])
def test_chooses_what_topk_chooses(dtype: torch.dtype, k: int) -> None:
    x = specials(dtype)
    module = traced(lambda x: torch.topk(x, k), x)
    assert unroll_anywhere(module.graph, options=Options()) == 1
    module.recompile()
    _check(module(x), x, k)


def _check(found: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor, k: int) -> None:
    """The places are those of a stable sort, and the values those at the places, bit for bit."""
    values, places = found
    assert values.dtype == x.dtype and values.is_contiguous() and places.is_contiguous()
    torch.testing.assert_close(places, chosen(x, k)[1], rtol=0, atol=0)
    wanted = x.gather(-1, places)
    torch.testing.assert_close(values, wanted, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(values.signbit() | values.isnan(), wanted.signbit() | wanted.isnan())
    torch.testing.assert_close(values, torch.topk(x, k)[0], rtol=0, atol=0, equal_nan=True)


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` by Inductor with this pass alone, on the CPU device too."""
    ours = DitronPipeline(Options(), passes=(unroll_anywhere,))

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        return compile_fx(gm, inputs, config_patches={"post_grad_custom_pre_pass": ours})

    return torch.compile(fn, backend=backend, dynamic=False)


def _sums_are_read_as_stored(device: str) -> None:
    """A sum of bf16 is rounded before it is compared, although Inductor has more digits of it in a register."""
    torch.manual_seed(1)
    x, y = (torch.randn(64, 40, device=device).to(torch.bfloat16) for _ in range(2))
    with without_caches():
        found = compiled(lambda x, y: torch.topk(x + y * 0.01, 4))(x, y)
    _check(found, x + y * 0.01, 4)


def test_sums_are_read_as_stored() -> None:
    _sums_are_read_as_stored("cpu")


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
    (module,) = compiled_graphs(lambda x: torch.topk(x.softmax(-1), 2)[0] * 2, x)
    with assert_no_new_guards(module):
        assert unroll_anywhere(module.graph, options=Options()) == 1
    module = traced(lambda x: torch.topk(x, 2), torch.randn(3, 8), dynamic=True)
    with assert_no_new_guards(module):
        assert unroll_anywhere(module.graph, options=Options()) == 0


def router(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As in Qwen3 with 24 experts, of which 4 are chosen."""
    weights, places = torch.topk(logits.float().softmax(-1), 4)
    return weights / weights.sum(-1, keepdim=True), places


def groups(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As in DeepSeek V3 with 24 experts in 4 groups, of which 2 are chosen, and in these 4 experts."""
    scores = logits.float().sigmoid()
    best = torch.topk(scores.view(-1, 4, 6), 2)[0].sum(-1)
    taken = torch.zeros_like(best).scatter_(1, torch.topk(best, 2, sorted=False)[1], 1)
    inside = taken.bool().repeat_interleave(6, dim=-1)
    places = torch.topk(scores.masked_fill(~inside, -torch.inf), 4, sorted=False)[1]
    return scores.gather(1, places), places


def _by_inductor(device: str) -> None:
    torch.manual_seed(2)
    for fn in (router, groups):
        for rows in (1, 5, 300):
            logits = torch.randn(rows, 24, device=device).to(torch.bfloat16)
            with without_caches():
                weights, places = compiled(fn)(logits)
            wanted, wanted_places = fn(logits)
            # torch leaves the order of equal values open, and on the CPU device also which of them are chosen.
            torch.testing.assert_close(weights.sort(-1)[0], wanted.sort(-1)[0])
            if device == "cuda":
                assert torch.equal(places.sort(-1)[0], wanted_places.sort(-1)[0])


def test_by_inductor() -> None:
    _by_inductor("cpu")


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """Compiled by Inductor: as topk itself, which chooses equal values from the left too."""
    _sums_are_read_as_stored("cuda")
    _by_inductor("cuda")
    for dtype in INTEGERS:
        x = specials(dtype).cuda()
        for k in (1, 2, 8, 16):
            with without_caches():
                found = compiled(lambda x, k=k: torch.topk(x, k))(x)
            _check(found, x, k)
            assert torch.equal(found[1].sort(-1)[0], torch.topk(x, k)[1].sort(-1)[0]), (dtype, k)
