"""flash_decode: the ways to write decode attention and its merging, as graphs, and what only looks like it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch.distributed as dist
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as functional
from torch.fx.experimental.proxy_tensor import make_fx

from ditron_inductor.options import Options
from tests.cases import rare
from tests.passes.decoding import (
    HKV,
    HQ,
    B,
    D,
    S,
    Tensor,
    assert_same,
    below,
    by_logarithm,
    by_maximum,
    by_softmax,
    fused,
    gathered,
    graph_of,
    operands,
    parts,
    scores_of,
)
from tests.passes.graphs import WORLD_SIZE, reasons, text, traced, twin

pytestmark = pytest.mark.usefixtures("group")

aten = torch.ops.aten


def masked(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    o, lse = parts(q, k, v, below(lengths))
    return by_softmax(gathered(o), gathered(lse)).to(q.dtype).view(q.shape)


def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o, lse = parts(q, k, v, None)
    return by_maximum(gathered(o), gathered(lse)).to(q.dtype)


def of_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Query heads that share keys as rows; caches [B, S, Hkv, D]."""
    rows, (k, v) = q.view(B, HKV, -1, D), (x.transpose(1, 2) for x in (k, v))
    o, lse = aten._scaled_dot_product_flash_attention_for_cpu(rows, k, v, scale=0.3)[:2]
    return by_logarithm(gathered(o), gathered(lse)).to(q.dtype).view(q.shape)


def heads_first(q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
    """Caches [B, Hkv, S, D], heads repeated, the query scaled, exp(scores - lse), one of the two masks turned round."""
    k, v = (x[:, :, None].expand(B, HKV, HQ // HKV, S, D).reshape(B, HQ, S, D) for x in (k, v))
    scores = torch.matmul((q * D**-0.5)[:, :, None], k.transpose(2, 3))
    hidden = torch.arange(S)[None, :] > position[:, None]
    scores = torch.where(hidden[:, None, None], -math.inf, scores)
    lse = torch.logsumexp(scores, -1)
    o = torch.matmul(torch.exp(scores - lse[..., None]), v)
    return by_maximum(gathered(o), gathered(lse)).view(q.shape)


def joined(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """One gather for both."""
    o, lse = parts(q, k, v, below(lengths))
    both = gathered(torch.cat([o.float(), lse[..., None]], -1))
    return by_maximum(both[..., :D], both[..., D]).to(q.dtype).view(q.shape)


def split(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same, with another way to take them apart."""
    o, lse = parts(q, k, v, None)
    os, lses = gathered(torch.cat([o.float(), lse[..., None]], -1)).split([D, 1], -1)
    return (torch.softmax(lses, 0) * os).sum(0).to(q.dtype)


def added(q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
    """A mask of 0 and -inf, in the dtype of the query, is added to the scores."""
    hidden = torch.where(torch.arange(S)[None, :] > position[:, None], -math.inf, 0.0).to(q.dtype)
    scores = (hidden[:, None, None] + scores_of(q, k, None)).float()
    o = torch.einsum("bhgs,bshd->bhgd", torch.softmax(scores, -1).to(v.dtype), v)
    return by_softmax(gathered(o), gathered(torch.logsumexp(scores, -1))).to(q.dtype).view(q.shape)


def of_torch_with_mask(q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
    """Torch's op with such a mask, of a size for each dimension of the scores."""
    rows, (k, v) = q.view(B, HKV, -1, D), (x.transpose(1, 2) for x in (k, v))
    seen = torch.arange(S)[None, :] <= position[:, None]
    mask = torch.where(seen, 0.0, -math.inf).to(q.dtype)[:, None, None].expand(B, 1, HQ // HKV, S)
    o, lse = aten._scaled_dot_product_flash_attention_for_cpu(rows, k, v, attn_mask=mask, scale=0.3)[:2]
    return by_logarithm(gathered(o), gathered(lse)).to(q.dtype).view(q.shape)


LENGTHS = torch.tensor([7, S], dtype=torch.int32)
FORMS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "masked": (masked, (*operands(), LENGTHS)),
    "whole": (whole, operands(torch.bfloat16)),
    "joined": (joined, (*operands(), LENGTHS)),
    "split": (split, operands()),
    "of_torch": (of_torch, operands(torch.float32)),
    "added": (added, (*operands(torch.float32), LENGTHS - 1)),
    "of_torch_with_mask": (of_torch_with_mask, (*operands(torch.float32), LENGTHS - 1)),
    "heads_first": (heads_first, (*(x.transpose(1, 2) if x.dim() == 4 else x for x in operands(torch.float32)),
                                  LENGTHS.long())),
}  # fmt: skip


@pytest.mark.parametrize("form", [*list(FORMS)[::2], *rare(*list(FORMS)[1::2])])
def test_computes_the_same(form: str) -> None:
    assert_computes_the_same(*FORMS[form])


@pytest.mark.parametrize(
    ("last", "dtype", "more"),
    [(2**40, torch.int64, 0), (2**31 - 1, torch.int32, 1), (255, torch.uint8, 1)],
)
def test_a_length_may_be_as_large_as_its_numbers(last: int, dtype: torch.dtype, more: int) -> None:
    def up_to(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(S) <= lengths[:, None] if more else below(lengths)
        o, lse = parts(q, k, v, mask)
        return by_softmax(gathered(o), gathered(lse)).to(q.dtype).view(q.shape)

    assert_computes_the_same(up_to, (*operands(torch.float32), torch.tensor([7, last], dtype=dtype)))


PLACES: dict[str, Callable[[], Tensor]] = {
    "from a place": lambda: torch.arange(3, 3 + S),
    "moved": lambda: torch.arange(S) + 3,
    "moved twice": lambda: 1 + (torch.arange(1, S + 1) + 1),
}


@pytest.mark.parametrize("including", [False, True])
@pytest.mark.parametrize("name", PLACES, ids=lambda name: name.replace(" ", "_"))
def test_tokens_may_have_places_in_the_whole_cache(name: str, including: bool) -> None:
    """One sequence ends in this part of the cache, the other one behind it."""

    def of_places(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        places = PLACES[name]()
        o, lse = parts(q, k, v, places <= lengths[:, None] if including else places < lengths[:, None])
        return by_softmax(gathered(o), gathered(lse)).to(q.dtype).view(q.shape)

    for lengths in ([3 + S // 2, 3 + S + 5], [4, 3 + S]):
        assert_computes_the_same(of_places, (*operands(torch.float32), torch.tensor(lengths)))


def assert_computes_the_same(fn: Callable[..., Any], args: tuple[Tensor, ...]) -> None:
    after = graph_of(fn, args)
    before = twin(after)
    assert fused(after) == 1 and fused(after) == 0
    assert not any("all_gather" in str(node.target) for node in after.graph.nodes)
    inputs = [[args[0], *(one if not one.is_floating_point() else torch.randn_like(one) for one in args[1:])]
              for _ in range(WORLD_SIZE)]  # fmt: skip
    assert_same(before, after, inputs, 1e-5 if args[0].dtype == torch.float32 else 2e-2)


CHAINS: dict[str, Callable[..., Any]] = {
    "queries": lambda q, k, v: whole(whole(q, k, v), k, v),
    "doubled_queries": lambda q, k, v: whole(whole(q, k, v) * 2, k, v),
    "thrice": lambda q, k, v: whole(whole(whole(q, k, v), k, v), k, v),
    "sum": lambda q, k, v: whole((first := whole(q, k, v)), k, v) + first,
}


@pytest.mark.parametrize("chain", [*list(CHAINS)[::2], *rare(*list(CHAINS)[1::2])])
def test_attention_of_attention(chain: str) -> None:
    """The second one reads what the first one has put in the place of its result."""
    args = operands(torch.float32)
    after = graph_of(CHAINS[chain], args)
    before = twin(after)
    assert fused(after) == (3 if chain == "thrice" else 2)
    inputs = [[args[0], *(torch.randn_like(one) for one in args[1:])] for _ in range(WORLD_SIZE)]
    assert_same(before, after, inputs, 1e-5)


def test_golden_masked() -> None:
    module = graph_of(masked, FORMS["masked"][1])
    assert fused(module) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
arg0_1 [2]
arg1_1 [2, 6, 16]
arg2_1 [2, 40, 2, 16]
arg3_1 [2, 40, 2, 16]
flash_decode = ditron.flash_decode([arg1_1, arg2_1, arg3_1, arg0_1], "scale=0.25 softcap=0.0 world_size=4 group_name=0 site='' trials", None)
getitem [2, 6, 16] = flash_decode[0]
reshape_default [2, 2, 3, 16] = aten.reshape(getitem, [2, 2, 3, 16])
convert_element_type_default [2, 2, 3, 16] = prims.convert_element_type(reshape_default, torch.float32)
convert_element_type_6 [2, 2, 3, 16] = prims.convert_element_type(convert_element_type_default, torch.float16)
view_11 [2, 6, 16] = aten.reshape(convert_element_type_6, [2, 6, 16])
return (view_11,)
""",
    )


def test_golden_of_torch() -> None:
    module = graph_of(of_torch, FORMS["of_torch"][1])
    assert fused(module) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
arg0_1 [2, 6, 16]
arg1_1 [2, 40, 2, 16]
arg2_1 [2, 40, 2, 16]
view [2, 2, 3, 16] = aten.reshape(arg0_1, [2, 2, -1, 16])
permute [2, 2, 40, 16] = aten.permute(arg1_1, [0, 2, 1, 3])
permute_1 [2, 2, 40, 16] = aten.permute(arg2_1, [0, 2, 1, 3])
reshape_default [2, 6, 16] = aten.reshape(view, [2, 6, 16])
permute_default [2, 40, 2, 16] = aten.permute(permute, [0, 2, 1, 3])
permute_default_1 [2, 40, 2, 16] = aten.permute(permute_1, [0, 2, 1, 3])
full_default_1 [2] = aten.full([2], 40, dtype=torch.int32, device=device(type='cpu'), pin_memory=False)
flash_decode = ditron.flash_decode([reshape_default, permute_default, permute_default_1, full_default_1], "scale=0.3 softcap=0.0 world_size=4 group_name=0 site='' trials", None)
getitem_2 [2, 6, 16] = flash_decode[0]
reshape_default_1 [2, 2, 3, 16] = aten.reshape(getitem_2, [2, 2, 3, 16])
view_3 [2, 6, 16] = aten.reshape(reshape_default_1, [2, 6, 16])
return (view_3,)
""",
    )


def test_golden_heads_first() -> None:
    module = graph_of(heads_first, FORMS["heads_first"][1])
    assert fused(module) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
arg0_1 [2, 2, 40, 16]
arg1_1 [2, 2, 40, 16]
arg2_1 [2, 6, 16]
arg3_1 [2]
mul [2, 6, 16] = aten.mul.Tensor(arg2_1, 0.25)
permute_default [2, 40, 2, 16] = aten.permute(arg0_1, [0, 2, 1, 3])
permute_default_1 [2, 40, 2, 16] = aten.permute(arg1_1, [0, 2, 1, 3])
convert_element_type_default [2] = prims.convert_element_type(arg3_1, torch.int64)
clamp_min_default [2] = aten.clamp_min(convert_element_type_default, -1)
clamp_max_default [2] = aten.clamp_max(clamp_min_default, 39)
add_tensor [2] = aten.add.Tensor(clamp_max_default, 1)
convert_element_type_default_1 [2] = prims.convert_element_type(add_tensor, torch.int32)
flash_decode = ditron.flash_decode([mul, permute_default, permute_default_1, convert_element_type_default_1], "scale=1.0 softcap=0.0 world_size=4 group_name=0 site='' trials", None)
getitem_1 [2, 6, 16] = flash_decode[0]
reshape_default [2, 6, 1, 16] = aten.reshape(getitem_1, [2, 6, 1, 16])
view_10 [2, 6, 16] = aten.reshape(reshape_default, [2, 6, 16])
return (view_10,)
""",
    )


def merged_by(merge: Callable[[Tensor, Tensor], Any]) -> Callable[..., Any]:
    """A program whose parts are right."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Any:
        o, lse = parts(q, k, v, None)
        return merge(gathered(o), gathered(lse))

    return fn


def attended_by(attend: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    """A program whose merging is right."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Any:
        o, lse = attend(q, k, v)
        return by_softmax(gathered(o), gathered(lse)).to(q.dtype)

    return fn


def _flipped(os: Tensor, lses: Tensor) -> Tensor:
    return by_softmax(os.flip(0), lses)


def _lse_kept(os: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    return by_softmax(os, lses).half(), torch.logsumexp(lses, 0)


def _transposed(os: Tensor, lses: Tensor) -> Tensor:
    return by_softmax(os, lses).half().transpose(1, 2)


def _other_heads(os: Tensor, lses: Tensor) -> Tensor:
    """A sum over heads, not over ranks."""
    return (torch.softmax(lses, 2)[..., None] * os).sum(2).half()


def _joined_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The column is taken for an output too."""
    o, lse = parts(q, k, v, None)
    both = gathered(torch.cat([o.float(), lse[..., None]], -1))
    return by_softmax(both[..., 1:], both[..., D]).to(q.dtype)


def _other_column(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The logarithms beside the outputs of other sequences, and heads."""
    o, lse = parts(q, k, v, None)
    both = gathered(torch.cat([o.float(), lse.transpose(0, 1)[..., None]], -1))
    return by_softmax(both[..., :D], both[..., D]).to(q.dtype)


@pytest.mark.parametrize(("fn", "code"), [(_joined_twice, "decode_merge"), (_other_column, "decode_form")])
def test_what_was_joined_otherwise_is_left_alone(fn: Callable[..., Any], code: str) -> None:
    module = graph_of(fn, operands())
    assert fused(module) == 0 and reasons(module) == [code]


MERGES: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "mean": (lambda os, lses: os.mean(0).half() + lses.mean(), ["decode_merge"] * 2),
    "base 2": (lambda os, lses: (torch.exp2(lses - lses.amax(0))[..., None] * os).sum(0), ["decode_merge"] * 2),
    "twice the lse": (lambda os, lses: by_softmax(os, 2 * lses).half(), ["decode_merge"] * 2),
    "not divided": (lambda os, lses: (torch.exp(lses)[..., None] * os).sum(0).half(), ["decode_merge"] * 2),
    "order of ranks": (_flipped, ["decode_merge"] * 2),
    "heads": (_other_heads, ["decode_merge"] * 2),
    "lse wanted": (_lse_kept, ["decode_merge"] * 2),
    "some ranks": (lambda os, lses: by_softmax(os[:2], lses[:2]).half(), ["decode_merge"] * 2),
    "fp32 wanted": (lambda os, lses: by_softmax(os, lses), ["cast_between"] * 2),
}


@pytest.mark.parametrize("name", MERGES)
def test_other_merges_are_left_alone(name: str) -> None:
    merge, expected = MERGES[name]
    module = graph_of(merged_by(merge), operands())
    assert fused(module) == 0
    assert reasons(module) == expected


def test_views_behind_the_merging_stay() -> None:
    module = graph_of(merged_by(_transposed), operands())
    assert fused(module) == 1


def _other_scale(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = scores_of(q, k, None)
    return torch.einsum("bhgs,bshd->bhgd", torch.softmax(scores, -1).half(), v), torch.logsumexp(2 * scores, -1)


def _other_mask(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return parts(q, k, v, torch.arange(S)[None, :] % 2 == torch.zeros(B, 1))


def _mask_of_one(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithm is of more tokens than the output."""
    lengths = q[:, 0, 0].int()
    return parts(q, k, v, below(lengths))[0], parts(q, k, v, None)[1]


def _biased(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = scores_of(q, k, None) + k[:, :, :, 0].transpose(1, 2)[:, :, None]
    weights = torch.softmax(scores, -1).half()
    return torch.einsum("bhgs,bshd->bhgd", weights, v), torch.logsumexp(scores, -1)


def _reinterpreted(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """What is a head in memory is half of the tokens."""
    return parts(q, k, v.reshape(B, HKV, S, D).transpose(1, 2), None)


def _turned_round(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Values of other tokens than the keys'."""
    return parts(q, k, v.flip(1), None)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    rows, (k, v) = q.view(B, HKV, -1, D), (x.transpose(1, 2) for x in (k, v))
    return aten._scaled_dot_product_flash_attention_for_cpu(rows, k, v, 0.0, True)[:2]


def _added(*masks: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    """With masks [B, S] that are added to the scores."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = scores_of(q, k, None)
        for mask in masks:
            scores = scores + mask[:, None, None]
        weights = torch.softmax(scores, -1).half()
        return torch.einsum("bhgs,bshd->bhgd", weights, v), torch.logsumexp(scores, -1)

    return attend


def _below(hidden: float, lengths: int = 5) -> Tensor:
    return torch.where(torch.arange(S)[None, :] < torch.full((B, 1), lengths), 0.0, hidden)


def _hidden_twice(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return _added(_below(-math.inf), _below(-math.inf, 7))(q, k, v)


def _call_with_bias(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    rows, (k, v) = q.view(B, HKV, -1, D), (x.transpose(1, 2) for x in (k, v))
    return aten._scaled_dot_product_flash_attention_for_cpu(rows, k, v, attn_mask=k[:, :1, :, 0][:, :, None])[:2]


def _call_with_numbers(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    rows, (k, v) = q.view(B, HKV, -1, D), (x.transpose(1, 2) for x in (k, v))
    mask = _below(-1e4)[:, None, None].half()
    return aten._scaled_dot_product_flash_attention_for_cpu(rows, k, v, attn_mask=mask)[:2]


def _wrapping(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Behind 127 the places begin again."""
    return parts(q, k, v, torch.arange(S, dtype=torch.int8) + 110 < torch.full((B, 1), 120))


PARTS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "places that wrap": (_wrapping, []),
    "numbers that nearly hide": (lambda *given: _added(_below(-1e4))(*given), []),
    "numbers where scores are kept": (lambda *given: _added(_below(-math.inf) + 1.0)(*given), []),
    "integers": (lambda *given: _added(_below(-math.inf).int())(*given), []),
    "two masks": (_hidden_twice, []),
    "a bias of torch's op": (_call_with_bias, ["decode_form"] * 2),
    "numbers of torch's op": (_call_with_numbers, ["decode_form"] * 2),
    "other scale": (_other_scale, []),
    "other mask": (_other_mask, []),
    "other mask for lse": (_mask_of_one, []),
    "bias": (_biased, []),
    "causal": (_causal, ["decode_form"] * 2),
    "reinterpreted": (_reinterpreted, ["decode_form"] * 2),
}


@pytest.mark.parametrize("name", PARTS)
def test_other_attention_is_left_alone(name: str) -> None:
    attend, expected = PARTS[name]
    module = graph_of(attended_by(attend), operands())
    assert fused(module) == 0 and reasons(module) == expected


def test_a_mask_of_a_number_of_tokens_is_added() -> None:
    assert fused(graph_of(attended_by(lambda *given: _added(_below(-math.inf))(*given)), operands())) == 1


def test_values_of_another_order_are_operands() -> None:
    """What turns them round stays in the graph."""
    args = operands()
    module = graph_of(attended_by(_turned_round), args)
    before = twin(module)
    assert fused(module) == 1 and "prims.rev" in text(module.graph)
    assert_same(before, module, [[args[0], *operands()[1:]] for _ in range(WORLD_SIZE)], 2e-2)


def test_a_length_on_another_device_is_left_alone() -> None:
    """Torch compares a number on the host with a range on a GPU."""

    def fn(q: Tensor, k: Tensor, v: Tensor, length: Tensor) -> Tensor:
        shown = torch.arange(S, device=q.device) < length
        scores = torch.einsum("hgd,shd->hgs", q.view(HKV, -1, D), k) * D**-0.5
        scores = torch.where(shown, scores, torch.full((), -math.inf, device=q.device))
        o, lse = torch.einsum("hgs,shd->hgd", torch.softmax(scores, -1), v), torch.logsumexp(scores, -1)
        # On a GPU that is not there nothing can be indexed.
        return (torch.softmax(gathered(lse), 0).unsqueeze(-1) * gathered(o)).sum(0).view(1, HQ, D)

    for device, count in (("cuda", 1), ("cpu", 0)):
        with FakeTensorMode():
            q, k, v = (torch.empty(shape, device="cuda") for shape in ((1, HQ, D), (S, HKV, D), (S, HKV, D)))
            length = torch.empty((), dtype=torch.int64, device=device)
            module = make_fx(fn, decomposition_table=select_decomp_table())(q, k, v, length)
        module.graph.eliminate_dead_code()
        assert fused(module) == count


def test_dynamic_sizes_are_left_alone() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.bmm(q, k.transpose(1, 2)).float()
        o, lse = torch.bmm(torch.softmax(scores, -1).to(v.dtype), v), torch.logsumexp(scores, -1)
        os, lses = (functional.all_gather_tensor(x, 0, dist.group.WORLD) for x in (o, lse))
        return by_softmax(os.view(WORLD_SIZE, *o.shape), lses.view(WORLD_SIZE, *lse.shape)).to(q.dtype)

    args = (torch.randn(4, 3, D).half(), torch.randn(4, S, D).half(), torch.randn(4, S, D).half())
    assert fused(graph_of(fn, args, dynamic=True)) == 0
    # Heads, or sequences, alone.
    module = graph_of(fn, args)
    assert fused(module) == 1 and "[4, 3, 16]" in text(module.graph)


def test_a_deep_graph() -> None:
    """Of a model whose residual stream is gathered."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(600):
            x = torch.relu(x) * y
        return gathered(x).sum(0)

    module = traced(fn, torch.randn(4, 4), torch.randn(4, 4))
    assert fused(module) == 0 and reasons(module) == []


def test_the_option_leaves_it_out() -> None:
    fn, args = FORMS["whole"]
    module = graph_of(fn, args)
    assert fused(module, Options(fusions=())) == 0
    assert reasons(module) == ["disabled"] * 2
