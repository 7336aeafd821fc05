"""flash_decode: torch's attention ops with heads that share keys, and the query's dimension of size 1, kept or not."""

from __future__ import annotations

from collections.abc import Callable

import expecttest
import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ditron_inductor.options import Options
from ditron_inductor.passes.normalize.normalize_collectives import normalize_collectives
from tests.cases import rare
from tests.passes.decoding import (
    HKV,
    HQ,
    B,
    D,
    S,
    Tensor,
    assert_same,
    by_logarithm,
    by_maximum,
    by_softmax,
    fused,
    gathered,
    graph_of,
)
from tests.passes.graphs import WORLD_SIZE, all_gather, gather_dim, reasons, text

pytestmark = pytest.mark.usefixtures("group")

aten = torch.ops.aten
Parts = tuple[Tensor, Tensor]


def of_torch(q: Tensor, k: Tensor, v: Tensor) -> Parts:
    """q [B, Hq, L, D], caches [B, Hkv, S, D]; o [B, Hq, L, D], lse [B, Hq, L]."""
    o, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[:2]
    return o, lse


def written(q: Tensor, k: Tensor, v: Tensor) -> Parts:
    """The same in matmuls, with lse [B, Hq, 1, 1]."""
    k, v = (x.repeat_interleave(HQ // HKV, 1) for x in (k, v))
    scores = torch.matmul(q, k.transpose(2, 3)) * D**-0.5
    return torch.matmul(torch.softmax(scores, -1), v), torch.logsumexp(scores, -1, keepdim=True)


def kept(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, Hq, 1, D] all the way."""
    o, lse = of_torch(q, k, v)
    return by_logarithm(gathered(o), gathered(lse))


def kept_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o, lse = written(q, k, v)
    return (torch.softmax(gathered(lse), 0) * gathered(o)).sum(0)


def indexed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In front of the gathers."""
    o, lse = of_torch(q, k, v)
    return by_maximum(gathered(o[:, :, 0]), gathered(lse[:, :, -1]))


def indexed_behind(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o, lse = written(q, k, v)
    return by_softmax(gathered(o)[:, :, :, 0], gathered(lse)[..., 0, 0])


def indexed_late(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return kept(q, k, v)[:, :, 0]


def joined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o, lse = of_torch(q, k, v)
    both = gathered(torch.cat([o[:, :, 0], lse], -1))
    return by_softmax(both[..., :D], both[..., D])


def joined_kept(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o, lse = of_torch(q, k, v)
    both = gathered(torch.cat([o, lse[..., None]], -1))
    return by_softmax(both[..., :D], both[..., D])


def joined_indexed_behind(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o, lse = of_torch(q, k, v)
    os, lses = gathered(torch.cat([o, lse[..., None]], -1))[:, :, :, 0].split([D, 1], -1)
    return (torch.softmax(lses, 0) * os).sum(0)


def tokens_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, 1, Hq, D], as decoding layers have it."""
    o, lse = of_torch(q, k, v)
    return by_softmax(gathered(o.transpose(1, 2)), gathered(lse.transpose(1, 2)))


def in_the_place_of_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Gathered along the dimension of size 1."""
    o, lse = (gather_dim(x.contiguous(), 2) for x in of_torch(q, k, v))
    return (torch.softmax(lse, 2)[..., None] * o).sum(2)


def joined_in_the_place_of_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o, lse = of_torch(q, k, v)
    os, lses = gather_dim(torch.cat([o, lse[..., None]], -1), 2).split([D, 1], -1)
    return (torch.softmax(lses, 2) * os).sum(2)


def lists(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`dist.all_gather`, and a stack."""
    found = []
    for part in of_torch(q, k, v):
        buffers = [torch.empty_like(part) for _ in range(WORLD_SIZE)]
        dist.all_gather(buffers, part.contiguous())
        found.append(torch.stack(buffers))
    return by_maximum(*found)


def two_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Without a causal mask rows are more query heads of one key head."""
    o, lse = of_torch(q.view(B, HQ // 2, 2, D), k[:, :1], v[:, :1])
    return by_logarithm(gathered(o), gathered(lse))


def heads_in_turn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads that share keys are not together: the repeated keys are operands."""
    k, v = (x.repeat(1, HQ // HKV, 1, 1) for x in (k, v))
    scores = torch.matmul(q, k.transpose(2, 3))
    o, lse = torch.matmul(torch.softmax(scores, -1), v), torch.logsumexp(scores, -1)
    return by_softmax(gathered(o), gathered(lse))


FORMS: list[Callable[..., Tensor]] = [
    kept, kept_twice, indexed, indexed_behind, indexed_late, joined, joined_kept, joined_indexed_behind, tokens_first,
    in_the_place_of_rows, joined_in_the_place_of_rows, lists, two_rows, heads_in_turn,
]  # fmt: skip


def operands(rows: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, HQ, rows, D), torch.randn(B, HKV, S, D), torch.randn(B, HKV, S, D)


def normalized(form: Callable[..., Tensor], given: tuple[Tensor, ...]) -> fx.GraphModule:
    module = graph_of(form, given)
    normalize_collectives(module.graph, options=Options())
    module.recompile()
    return module


@pytest.mark.parametrize("form", [*FORMS[::2], *rare(*FORMS[1::2])], ids=lambda form: form.__name__)
def test_computes_the_same(form: Callable[..., Tensor]) -> None:
    given = operands()
    before, after = normalized(form, given), normalized(form, given)
    assert fused(after) == 1 and reasons(after) == []
    assert not any("all_gather" in str(node.target) or "scaled_dot" in str(node.target) for node in after.graph.nodes)
    assert_same(before, after, [[given[0], *operands()[1:]] for _ in range(WORLD_SIZE)], 1e-5)


def test_golden_grouped_and_indexed() -> None:
    module = graph_of(joined, operands())
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
arg0_1 [2, 6, 1, 16]
arg1_1 [2, 2, 40, 16]
arg2_1 [2, 2, 40, 16]
_scaled_dot_product_flash_attention_for_cpu = aten._scaled_dot_product_flash_attention_for_cpu(arg0_1, arg1_1, arg2_1)
getitem [2, 6, 1, 16] = _scaled_dot_product_flash_attention_for_cpu[0]
getitem_1 [2, 6, 1] = _scaled_dot_product_flash_attention_for_cpu[1]
select [2, 6, 16] = aten.select.int(getitem, 2, 0)
cat [2, 6, 17] = aten.cat([select, getitem_1], -1)
all_gather_into_tensor [8, 6, 17] = _c10d_functional.all_gather_into_tensor(cat, 4, '0')
wait_tensor [8, 6, 17] = _c10d_functional.wait_tensor(all_gather_into_tensor)
view [4, 2, 6, 17] = aten.reshape(wait_tensor, [4, 2, 6, 17])
select_1 [4, 2, 6] = aten.select.int(view, 3, 16)
clone [4, 2, 6] = aten.clone(select_1, memory_format=torch.contiguous_format)
amax [1, 2, 6] = aten.amax(clone, [0], True)
sub [4, 2, 6] = aten.sub.Tensor(clone, amax)
exp [4, 2, 6] = aten.exp(sub)
sum_1 [1, 2, 6] = aten.sum.dim_IntList(exp, [0], True)
div [4, 2, 6] = aten.div.Tensor(exp, sum_1)
unsqueeze [4, 2, 6, 1] = aten.unsqueeze(div, 3)
slice_1 [4, 2, 6, 16] = aten.slice.Tensor(view, 3, 0, 16)
mul [4, 2, 6, 16] = aten.mul.Tensor(unsqueeze, slice_1)
sum_2 [2, 6, 16] = aten.sum.dim_IntList(mul, [0])
return (sum_2,)
""",
    )
    assert fused(module) == 1
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
arg0_1 [2, 6, 1, 16]
arg1_1 [2, 2, 40, 16]
arg2_1 [2, 2, 40, 16]
reshape_default [2, 6, 16] = aten.reshape(arg0_1, [2, 6, 16])
permute_default [2, 40, 2, 16] = aten.permute(arg1_1, [0, 2, 1, 3])
permute_default_1 [2, 40, 2, 16] = aten.permute(arg2_1, [0, 2, 1, 3])
full_default [2] = aten.full([2], 40, dtype=torch.int32, device=device(type='cpu'), pin_memory=False)
flash_decode = ditron.flash_decode([reshape_default, permute_default, permute_default_1, full_default], "scale=0.25 softcap=0.0 world_size=4 group_name=0 site='' trials", None)
getitem_2 [2, 6, 16] = flash_decode[0]
reshape_default_1 [2, 6, 16] = aten.reshape(getitem_2, [2, 6, 16])
return (reshape_default_1,)
""",
    )


def traced_for_gpus(attend: Callable[[Tensor, Tensor, Tensor], Parts]) -> fx.GraphModule:
    """The graph of a program whose attention is an op that CPUs do not have."""

    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o, lse = attend(q, k, v)
        both = gathered(torch.cat([o[:, :, 0], lse.view(B, HQ, 1)], -1))
        return by_softmax(both[..., :64], both[..., 64]).to(q.dtype)

    with FakeTensorMode():
        heads = [(HQ, 1), (HKV, S), (HKV, S)]
        given = [torch.empty(B, *sizes, 64, dtype=torch.bfloat16) for sizes in heads]
        module = make_fx(form, decomposition_table=select_decomp_table())(*given)
    module.graph.eliminate_dead_code()
    return module


def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Parts:
    o, lse = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, False, False, scale=0.3)[:2]
    return o, lse


def flash(q: Tensor, k: Tensor, v: Tensor) -> Parts:
    o, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=0.3)[:2]
    return o, lse


@pytest.mark.parametrize("attend", [cudnn, flash])
def test_golden_kernels_of_gpus(attend: Callable[..., Parts]) -> None:
    module = traced_for_gpus(attend)
    assert fused(module) == 1
    lines = [line.partition(" = ")[2] for line in text(module.graph).splitlines() if " = " in line]
    expecttest.assert_expected_inline(
        "\n".join(lines[:5]),
        """\
aten.reshape(q_1, [2, 6, 64])
aten.permute(k_1, [0, 2, 1, 3])
aten.permute(v_1, [0, 2, 1, 3])
aten.full([2], 40, dtype=torch.int32, device=device(type='cpu'), pin_memory=False)
ditron.flash_decode([reshape_default, permute_default, permute_default_1, full_default], "scale=0.3 softcap=0.0 world_size=4 group_name=0 site='' trials", None)""",
    )


def _no_sums(q: Tensor, k: Tensor, v: Tensor) -> Parts:
    """The logarithms of other scores than the output's."""
    return cudnn(q, k, v)[0], cudnn(2 * q, k, v)[1]


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Parts:
    o, lse = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False, scale=0.3)[:2]
    return o, lse


def _biased(q: Tensor, k: Tensor, v: Tensor) -> Parts:
    bias = q.new_zeros(B, HQ, 1, S)
    o, lse = aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, False, False, scale=0.3)[:2]
    return o, lse


def _dropped(q: Tensor, k: Tensor, v: Tensor) -> Parts:
    o, lse = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.1, False, False, scale=0.3)[:2]
    return o, lse


def _negative(q: Tensor, k: Tensor, v: Tensor) -> Parts:
    """A node has positive scales only."""
    o, lse = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, False, False, scale=-0.3)[:2]
    return o, lse


@pytest.mark.parametrize("attend", [_no_sums, _causal, _biased, _dropped, _negative])
def test_other_calls_are_left_alone(attend: Callable[..., Parts]) -> None:
    module = traced_for_gpus(attend)
    assert fused(module) == 0 and reasons(module) == ["decode_form"]


def other_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The logarithms are those of heads in another order, as if those that share keys were not together."""
    o, lse = of_torch(q, k, v)
    return by_softmax(gathered(o), gathered(lse.view(B, HKV, -1).transpose(1, 2).reshape(B, HQ, 1)))


def second_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of two queries, of which the first one's output is gathered."""
    o, lse = of_torch(torch.cat([q, -q], 2), k, v)
    return by_softmax(gathered(o[:, :, 0]), gathered(lse[:, :, 0]))


def rows_mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The output of one query, merged by the weights of another."""
    o, lse = of_torch(torch.cat([q, -q], 2), k, v)
    return by_softmax(gathered(o)[:, :, :, 0], gathered(lse)[:, :, :, 1])


def joined_in_turn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Chunks of the gathered tensor, but not all of them."""
    o, lse = of_torch(q, k, v)
    both = all_gather(torch.cat([o, lse[..., None]], -1))
    os, lses = torch.cat(both.chunk(WORLD_SIZE)[1:], 2).split([D, 1], -1)
    return (torch.softmax(lses, 2) * os).sum(2)


def other_order(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Outputs of one rank by the weights of another."""
    o, lse = (all_gather(x.contiguous()) for x in of_torch(q, k, v))
    os, lses = torch.cat(o.chunk(WORLD_SIZE)[::-1], 2), torch.cat(lse.chunk(WORLD_SIZE), 2)
    return (torch.softmax(lses, 2)[..., None] * os).sum(2)


NEGATIVES: dict[Callable[..., Tensor], list[str]] = {
    other_heads: ["decode_merge"] * 2,
    second_row: ["decode_form"] * 2,
    rows_mixed: ["decode_merge"] * 2,
    joined_in_turn: ["decode_merge"],
    other_order: ["decode_merge"] * 2,
}


@pytest.mark.parametrize("form", NEGATIVES, ids=lambda form: form.__name__)
def test_what_only_looks_like_it_is_left_alone(form: Callable[..., Tensor]) -> None:
    module = normalized(form, operands())
    assert fused(module) == 0 and reasons(module) == NEGATIVES[form]
