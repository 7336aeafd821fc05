"""Masks of which nothing is proved, and biases: attention to gathered keys has them as a tensor, on every rank."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from ditron_inductor.errors import GraphVerificationError
from ditron_inductor.options import Options
from ditron_inductor.passes.finish.name_sites import name_sites
from ditron_inductor.task import schema
from ditron_inductor.task.attention_masks import Mask
from ditron_inductor.task.verify import verify_graph
from tests.cases import rare
from tests.passes.graphs import (
    WORLD_SIZE,
    compiled_graphs,
    gather_dim,
    only_task,
    reasons,
    run_ranks,
    scatter_dim,
    text,
    twin,
)
from tests.passes.test_all_gather_attention import fuse_attention, masked, operands, repeated, sdpa, sequence_first

pytestmark = pytest.mark.usefixtures("group")
S = 8
KEYS = WORLD_SIZE * S
Tensor = torch.Tensor


def with_prefix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, and the first keys of all are seen by all."""
    seen = torch.arange(S)[:, None] >= torch.arange(KEYS)
    return sequence_first(q, k, v, attn_mask=seen | (torch.arange(KEYS) < 3))


def from_an_input(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    seen = torch.arange(S)[:, None] >= torch.arange(KEYS)
    return sequence_first(q, k, v, attn_mask=seen & (k[0, 0, 0, 0] > 0))


def alibi(q: Tensor, k: Tensor, v: Tensor, rank: int = 1) -> Tensor:
    """With a slope for each head."""
    ahead = torch.arange(S)[:, None] + rank * S - torch.arange(KEYS)
    slopes = 2.0 ** -torch.arange(1.0, q.shape[2] + 1)
    bias = torch.where(ahead >= 0, -slopes[:, None, None] * ahead, -math.inf)
    return sequence_first(q, k, v, attn_mask=bias[None])


def padded(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """The keys of each sequence that are there, an input bool [B, W * S]."""
    return sequence_first(q, k, v, attn_mask=seen[:, None, None, :])


def added(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return sequence_first(q, k, v, attn_mask=bias)


def written_out(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """With a soft cap, as Hugging Face's `eager` has it."""
    keys, values = (repeated(gather_dim(one, 1).transpose(1, 2)) for one in (k, v))
    scores = torch.tanh(q.transpose(1, 2) @ keys.mT / 2.0) * 0.5
    return (scores + bias).softmax(-1) @ values


def hidden(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    keys, values = (repeated(gather_dim(one, 1).transpose(1, 2)) for one in (k, v))
    return (q.transpose(1, 2) @ keys.mT).masked_fill(bias > 1.5, -math.inf).softmax(-1) @ values


def by_math(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return sequence_first(q, k, v, attn_mask=bias)


def some_keys(B: int) -> Tensor:
    return torch.arange(KEYS) < torch.arange(KEYS - B, KEYS)[:, None]


FORMS: dict[str, tuple[Callable[..., Tensor], Sequence[Tensor]]] = {
    "prefix": (with_prefix, ()),
    "input": (from_an_input, ()),
    "alibi": (alibi, ()),
    "padding": (padded, (some_keys(2),)),
    "all pairs": (added, (torch.randn(2, 4, S, KEYS),)),
    "heads": (added, (torch.randn(1, 4, 1, KEYS),)),
    "rows": (added, (torch.randn(S, 1),)),
    "written out": (written_out, (torch.randn(2, 1, S, KEYS),)),
    "written out, of heads": (written_out, (torch.randn(2, 4, 1, KEYS),)),
    "hidden": (hidden, (torch.randn(S, KEYS),)),
    "by math": (by_math, (torch.randn(2, 1, S, KEYS),)),
}


def inputs_of(module: fx.GraphModule) -> list[list[Tensor]]:
    """Of all ranks."""
    generator = torch.Generator().manual_seed(0)

    def draw(value: Tensor) -> Tensor:
        if value.dtype == torch.bool:
            # Each row sees something.
            return (torch.randn(value.shape, generator=generator) > 0).index_fill(-1, torch.tensor([3]), True)
        # The logarithms of sums of the queries and keys in these tests are smaller.
        of_sums = value.ndim == 3 and tuple(value.shape[1:]) == (4, S)
        return torch.randn(value.shape, generator=generator) + 9.0 * of_sums

    values = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    return [[draw(value) for value in values] for _ in range(WORLD_SIZE)]


def call_of(module: fx.GraphModule) -> fx.Node:
    (call,) = [node for node in module.graph.nodes if "ditron" in str(node.target)]
    return call


def bias_of(module: fx.GraphModule) -> fx.Node:
    bias = schema.operand(call_of(module), "bias")
    assert isinstance(bias, fx.Node)
    return bias


@pytest.mark.parametrize("name", FORMS)
def test_forms_are_fused_and_right(name: str) -> None:
    form, biases = FORMS[name]
    given = *operands(B=2), *biases
    (after,) = compiled_graphs(form, *given)
    before = twin(after)
    assert fuse_attention(after) == 1, (reasons(after), text(after.graph))
    assert only_task(after)[0].mask == Mask("given") and "all_gather_into" not in text(after.graph)
    # Nothing is repeated for it.
    assert math.prod(bias_of(after).meta["val"].shape) <= max([S * 4 * KEYS, *(one.numel() for one in biases)])
    inputs = inputs_of(after)
    torch.testing.assert_close(run_ranks(after, inputs), run_ranks(before, inputs))


@pytest.mark.parametrize("name", ["prefix", "input", "alibi", *rare("padding", "heads"), "all pairs"])
def test_training_is_fused_and_right(name: str) -> None:
    form, biases = FORMS[name]
    given = *(one.requires_grad_() for one in operands(B=2)), *biases
    after = compiled_graphs(form, *given)
    before = [twin(one) for one in after]
    assert [fuse_attention(graph) for graph in after] == [1, 1]
    for old, new in zip(before, after, strict=True):
        assert only_task(new)[0].mask == Mask("given")
        inputs = inputs_of(new)
        torch.testing.assert_close(run_ranks(new, inputs), run_ranks(old, inputs))


def in_order(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """`padded`, with operands in this order in every version of the compiler."""
    q = q.transpose(1, 2)
    keys, values = gather_dim(k, 1).transpose(1, 2), gather_dim(v, 1).transpose(1, 2)
    return F.scaled_dot_product_attention(q, keys, values, seen[:, None, None, :], enable_gqa=True)


def test_a_forward_and_a_backward() -> None:
    given = *(one.requires_grad_() for one in operands(B=2)), some_keys(2)
    forward, backward = compiled_graphs(in_order, *given)
    assert fuse_attention(forward) == 1 and fuse_attention(backward) == 1
    assert_expected_inline(
        text(forward.graph),
        """\
primals_1 [2, 8, 4, 16]
primals_2 [2, 8, 2, 16]
primals_3 [2, 8, 2, 16]
primals_4 [2, 32]
permute [2, 4, 8, 16] = aten.permute(primals_1, [0, 2, 1, 3])
unsqueeze [2, 1, 32] = aten.unsqueeze(primals_4, 1)
unsqueeze_1 [2, 1, 1, 32] = aten.unsqueeze(unsqueeze, 2)
full_default [] = aten.full([], -inf, dtype=torch.float32, layout=torch.strided, device=device(type='cpu'), pin_memory=False)
full_default_1 [] = aten.full([], 0.0, dtype=torch.float32, layout=torch.strided, device=device(type='cpu'), pin_memory=False)
where [2, 1, 1, 32] = aten.where.self(unsqueeze_1, full_default_1, full_default)
permute_default [2, 2, 8, 16] = aten.permute(primals_2, [0, 2, 1, 3])
permute_default_1 [2, 2, 8, 16] = aten.permute(primals_3, [0, 2, 1, 3])
all_gather_attention = ditron.all_gather_attention([permute, permute_default, permute_default_1, where], "mask=(kind=given) scale=0.25 softcap=0.0 world_size=4 group_name=0 site='' trials return_gathered", None)
getitem_10 [2, 4, 8, 16] = all_gather_attention[0]
getitem_11 [2, 4, 8] = all_gather_attention[1]
eq_scalar [2, 4, 8] = aten.eq.Scalar(getitem_11, -inf)
full_default_2 [2, 4, 8] = aten.full([2, 4, 8], 0, dtype=torch.float32, layout=torch.strided, device=device(type='cpu'), pin_memory=False)
where_self [2, 4, 8] = aten.where.self(eq_scalar, full_default_2, getitem_11)
getitem_12 [2, 2, 32, 16] = all_gather_attention[2]
getitem_13 [2, 2, 32, 16] = all_gather_attention[3]
return (getitem_10, permute, getitem_12, getitem_13, where, getitem_10, where_self)
""",
    )
    assert_expected_inline(
        text(backward.graph),
        """\
permute [2, 4, 8, 16]
permute_1 [2, 2, 32, 16]
permute_2 [2, 2, 32, 16]
where [2, 1, 1, 32]
getitem_8 [2, 4, 8, 16]
getitem_9 [2, 4, 8]
tangents_1 [2, 4, 8, 16]
attention_reduce_scatter = ditron.attention_reduce_scatter([tangents_1, permute, permute_1, permute_2, getitem_8, getitem_9, where], "mask=(kind=given) scale=0.25 softcap=0.0 world_size=4 group_name=0 site='' trials", None)
getitem [2, 4, 8, 16] = attention_reduce_scatter[0]
getitem_13 [2, 2, 8, 16] = attention_reduce_scatter[1]
permute_default [2, 8, 2, 16] = aten.permute(getitem_13, [0, 2, 1, 3])
getitem_14 [2, 2, 8, 16] = attention_reduce_scatter[2]
permute_default_1 [2, 8, 2, 16] = aten.permute(getitem_14, [0, 2, 1, 3])
permute_5 [2, 8, 4, 16] = aten.permute(getitem, [0, 2, 1, 3])
return (permute_5, permute_default, permute_default_1, None)
""",
    )


def test_all_ranks_have_one_site_and_another_than_for_a_mask_that_is_proved() -> None:
    """ALiBi's graphs differ in the rank's positions. A rank that proves what the others do not is told apart."""
    found = []
    for form in (*(functools.partial(alibi, rank=rank) for rank in (0, 2, 3)), functools.partial(masked, 2)):
        (module,) = compiled_graphs(form, *operands())
        assert fuse_attention(module) == 1
        name_sites(module.graph, options=Options())
        found += re.findall(r"\w+/\d+:all_gather_attention", text(module.graph))
    assert len(found) == 4 and len(set(found[:3])) == 1 and len(set(found)) == 2


def test_a_dynamic_length() -> None:
    """A mask that is causal is proved on no rank: the first one is at 0 * S, which is a number."""
    sites = set()
    for rank in (0, 2):
        q, k, _ = operands(B=2)
        for one in (q, k):
            torch._dynamo.mark_dynamic(one, 1)
        (module,) = compiled_graphs(lambda q, k, rank=rank: masked(rank, q, k, k + 1), q, k)
        assert fuse_attention(module) == 1, reasons(module)
        assert only_task(module)[0].mask == Mask("given")
        name_sites(module.graph, options=Options())
        sites |= set(re.findall(r"\w+/\d+:all_gather_attention", text(module.graph)))
    assert len(sites) == 1


def test_rows_that_see_nothing() -> None:
    """Their logarithms are 0 for a backward that is left alone, and their result is 0."""
    given = *(one.requires_grad_() for one in operands()), torch.zeros(S, KEYS)
    (after, _) = compiled_graphs(added, *given)
    assert fuse_attention(after) == 1
    inputs = inputs_of(after)
    for one in inputs:
        one[[tuple(x.shape) for x in one].index((S, KEYS))][2:4] = -math.inf
    for found in run_ranks(after, inputs):
        assert all(torch.isfinite(one).all() for one in found if tuple(one.shape) != (S, KEYS))
        assert any((one[:, 2:4] == 0.0).all() for one in found if one.ndim == 3)


def of_the_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys, values = gather_dim(k, 1).transpose(1, 2), gather_dim(v, 1).transpose(1, 2)
    return sdpa(q, keys, values, attn_mask=(keys[:, :1].sum(-1) > 0).unsqueeze(1))


def test_a_bias_from_the_gathered_keys_is_left_alone() -> None:
    (module,) = compiled_graphs(of_the_keys, *operands())
    assert fuse_attention(module) == 0 and set(reasons(module)) == {"intermediate_used"}


Cuda = Callable[..., list[Tensor]]


def on_a_gpu(form: Cuda, *shapes: tuple[int, ...]) -> fx.GraphModule:
    with FakeTensorMode():
        module = make_fx(form)(*(torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes))
    module.graph.eliminate_dead_code()
    return module


def efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> list[Tensor]:
    keys, values = gather_dim(k, 2), gather_dim(v, 2)
    # As torch pads it for the kernel, if its rows are no multiples of 16 bytes.
    padding = torch.nn.functional.pad(bias, (0, 4))
    bias = torch.ops.aten.slice.Tensor(padding, -1, 0, KEYS).expand(*q.shape[:3], KEYS)
    return list(torch.ops.aten._scaled_dot_product_efficient_attention(q, keys, values, bias, True)[:2])


def efficient_backward(wanted: bool, grad: Tensor, q: Tensor, k: Tensor, bias: Tensor) -> list[Tensor]:
    backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    seed, lse = torch.empty((), dtype=torch.int64, device="cuda"), torch.empty(2, 4, 32, device="cuda")
    given = grad, q, k, k, bias.expand(*q.shape[:3], KEYS), grad, lse, seed, seed, 0.0
    found = backward(*given, [True, True, True, wanted])
    return [found[0], *(scatter_dim(one, 2) for one in found[1:3]), *([found[3]] if wanted else [])]


def cudnn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> list[Tensor]:
    keys, values = gather_dim(k, 2), gather_dim(v, 2)
    return list(torch.ops.aten._scaled_dot_product_cudnn_attention(q, keys, values, bias, True)[:2])


OWN, WHOLE = (2, 4, S, 64), (2, 4, KEYS, 64)


@pytest.mark.parametrize("form", [efficient, cudnn], ids=lambda form: form.__name__)
def test_kernels_of_gpus(form: Cuda) -> None:
    module = on_a_gpu(form, OWN, OWN, OWN, (2, 1, 1, KEYS))
    assert fuse_attention(module) == 1, reasons(module)
    # What is given is not what is repeated.
    assert bias_of(module).meta["val"].shape == (2, 1, 1, KEYS)


def test_backward_of_the_memory_efficient_kernel() -> None:
    shapes = OWN, OWN, WHOLE, (1, 4, S, KEYS)
    module = on_a_gpu(functools.partial(efficient_backward, False), *shapes)
    assert fuse_attention(module) == 1, reasons(module)
    assert bias_of(module).meta["val"].shape == (1, 4, S, KEYS)
    module = on_a_gpu(functools.partial(efficient_backward, True), *shapes)
    assert fuse_attention(module) == 0 and set(reasons(module)) == {"attention_bias_gradient"}


def test_sizes_and_dtypes_that_do_not_fit_are_left_alone() -> None:
    for shape, dtype in (((S, KEYS - 1), torch.float32), ((S, KEYS), torch.float64), ((1, 1, 1, S, KEYS), torch.bool)):
        (module,) = compiled_graphs(added, *operands(), torch.randn(S, KEYS))
        (bias,) = [node for node in module.graph.nodes if node.op == "placeholder" and node.meta["val"].ndim == 2]
        bias.meta["val"] = bias.meta["val"].new_empty(shape, dtype=dtype)
        assert fuse_attention(module) == 0 and set(reasons(module)) == {"attention_mask"}, reasons(module)


def test_a_call_without_its_bias_is_not_legal() -> None:
    def broken(change: Callable[[fx.Node, fx.Node], Any]) -> str:
        (module,) = compiled_graphs(added, *operands(), torch.randn(S, KEYS))
        assert fuse_attention(module) == 1
        name_sites(module.graph, options=Options())
        verify_graph(module.graph)
        call = call_of(module)
        change(call, bias_of(module))
        with pytest.raises(GraphVerificationError) as raised:
            verify_graph(module.graph)
        return str(raised.value)

    def of_shape(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[fx.Node, fx.Node], Any]:
        return lambda call, bias: bias.meta.update(val=bias.meta["val"].new_empty(shape, dtype=dtype))

    def without_bias(call: fx.Node, bias: fx.Node) -> None:
        call.update_arg(schema.OPERANDS, [one for one in schema.operands_of(call) if one is not bias])

    def with_another_mask(call: fx.Node, bias: fx.Node) -> None:
        task = schema.node_from_call(call.target, call.args)
        call.update_arg(schema.NODE, replace(task, mask=Mask("full")).text())

    assert "has 3 operands, and its node has 4" in broken(without_bias)
    assert "has 4 operands, and its node has 3" in broken(with_another_mask)
    assert "no tensor of queries and keys" in broken(of_shape(S, KEYS + 1))
    assert "torch.int64" in broken(of_shape(S, KEYS, dtype=torch.int64))
