"""Attention that is written out beside gathered keys and values: fused where it is proved, with a soft cap or without,
else left alone with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from ditron_inductor.options import Options
from ditron_inductor.passes.graph.reasons import LEFT_ALONE
from ditron_inductor.passes.normalize.normalize_collectives import normalize_collectives
from ditron_inductor.passes.normalize.share_gathers import share_gathers
from ditron_inductor.pipeline import run
from ditron_inductor.task.attention_masks import Mask
from tests.passes.graphs import WORLD_SIZE, compiled_graphs, gather_dim, only_task, reasons, run_ranks, text, twin
from tests.passes.test_all_gather_attention import fuse_attention, of_all_ranks, operands, repeated, sequence_first

pytestmark = pytest.mark.usefixtures("group")
S, SCALE = 8, 0.25
Form = Callable[..., Any]


def gathered(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [B, Hkv, W*S, D]."""
    return gather_dim(k, 1).transpose(1, 2), gather_dim(v, 1).transpose(1, 2)


def scores_of(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Of q [B, S, H, D] and keys [B, Hkv, W*S, D]."""
    return q.transpose(1, 2) @ repeated(k).mT * SCALE


def ahead(offset: int = 0) -> torch.Tensor:
    return torch.arange(S)[:, None] + offset - torch.arange(WORLD_SIZE * S)


def cap(scores: torch.Tensor, softcap: float = 0.5) -> torch.Tensor:
    return softcap * torch.tanh(scores / softcap)


def hugging_face(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Gemma 2's `eager_attention_forward`, of the third rank, with a window."""
    keys, values = gathered(k, v)
    weights = torch.matmul(q.transpose(1, 2), repeated(keys).transpose(2, 3)) * SCALE
    weights = torch.tanh(weights / 0.5) * 0.5
    seen = (ahead(2 * S) >= 0) & (ahead(2 * S) < 11)
    mask = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, torch.finfo(q.dtype).min)
    weights = weights + mask[None, None]
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    weights = F.dropout(weights, p=0.0, training=False)
    return torch.matmul(weights, repeated(values)).transpose(1, 2).contiguous()


def filled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Without a cap."""
    keys, values = gathered(k, v)
    return scores_of(q, keys).masked_fill(ahead() < 0, -math.inf).softmax(-1) @ repeated(values)


def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Heads are grouped, not repeated, and none of it is transposed by hand."""
    keys, values = gather_dim(k, 1), gather_dim(v, 1)
    scores = torch.einsum("bsghd,btgd->bghst", q.unflatten(2, (2, 2)), keys) / 4.0
    weights = torch.where(ahead(S) >= 0, cap(scores), -math.inf).softmax(-1)
    return torch.einsum("bghst,btgd->bsghd", weights, values).flatten(2)


def quotient_last(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    keys, values = gathered(k, v)
    scores = cap(scores_of(q, keys))
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (weights @ repeated(values)) / weights.sum(-1, keepdim=True)


def other_factors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """30 tanh(s / 50) is the cap 30 on s * 0.6."""
    keys, values = gathered(k, v)
    return (torch.tanh(scores_of(q, keys) / 50) * 30).softmax(-1) @ repeated(values)


def by_math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Torch's own operations: both operands are scaled, and rows that see nothing get 0."""
    with sdpa_kernel(SDPBackend.MATH):
        return sequence_first(q, k, v, is_causal=True)


def one_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """All queries share it; keys and values come in one gather."""
    keys, values = gather_dim(torch.stack((k, v))[:, :, :, :1].contiguous(), 2).transpose(2, 3)
    return cap(q.transpose(1, 2) @ keys.mT).softmax(-1) @ values


def one_projection(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Heads are split off behind the gather; the result goes on as rows."""
    both = gather_dim(torch.cat((k.flatten(2), v.flatten(2)), 2), 1)
    keys, values = (one.unflatten(2, k.shape[2:]).transpose(1, 2) for one in both.chunk(2, 2))
    out = cap(scores_of(q, keys)).softmax(-1) @ repeated(values)
    return out.transpose(1, 2).reshape(-1, q.shape[2] * q.shape[3])


def keys_returned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = gathered(k, v)
    return cap(scores_of(q, keys)).softmax(-1) @ repeated(values), keys.clone()


def heads_in_turn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Query heads 0 and 2 share a head of keys."""
    keys, values = (one.repeat(1, 2, 1, 1) for one in gathered(k, v))
    return cap(q.transpose(1, 2) @ keys.mT * SCALE).softmax(-1) @ values


FORMS: dict[Form, tuple[Mask, float, float, bool]] = {
    hugging_face: (Mask("causal", 11, 16), 0.25, 0.5, False),
    filled: (Mask("causal"), 0.25, 0.0, False),
    grouped: (Mask("causal", 0, 8), 0.25, 0.5, False),
    quotient_last: (Mask("full"), 0.25, 0.5, False),
    other_factors: (Mask("full"), 0.15, 30.0, False),
    by_math: (Mask("causal"), 0.25, 0.0, False),
    heads_in_turn: (Mask("full"), 0.25, 0.5, False),
    one_head: (Mask("full"), 1.0, 0.5, False),
    one_projection: (Mask("full"), 0.25, 0.5, False),
    keys_returned: (Mask("full"), 0.25, 0.5, True),
}
"""Of the call: mask, scale, soft cap, whether it returns what it gathers."""


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_forms_are_fused_and_right(form: Form) -> None:
    given = operands(B=2)
    (after,) = compiled_graphs(form, *given)
    before = twin(after)
    assert fuse_attention(after) == 1, reasons(after)
    after.graph.eliminate_dead_code()
    left = text(after.graph)
    task, _ = only_task(after)
    assert (task.mask, task.scale, task.softcap, task.return_gathered) == FORMS[form]
    assert not any(op in left for op in ("all_gather_into_tensor", "bmm", "exp.", "tanh"))
    inputs = of_all_ranks(tuple(node.meta["val"] for node in after.graph.nodes if node.op == "placeholder"))
    torch.testing.assert_close(run_ranks(after, inputs), run_ranks(before, inputs))


def test_graphs_before_and_after() -> None:
    (module,) = compiled_graphs(hugging_face, *(one.bfloat16() for one in operands(B=2)))
    for prepare in (normalize_collectives, share_gathers):
        prepare(module.graph, options=Options())
    assert_expected_inline(
        text(module.graph),
        """\
arg0_1 [2, 8, 2, 16]
arg1_1 [2, 8, 2, 16]
arg2_1 [2, 8, 4, 16]
all_gather_into_tensor [8, 8, 2, 16] = _c10d_functional.all_gather_into_tensor(arg0_1, 4, '0')
wait_tensor [8, 8, 2, 16] = _c10d_functional.wait_tensor(all_gather_into_tensor)
split = aten.split.Tensor(wait_tensor, 2)
getitem [2, 8, 2, 16] = split[0]
getitem_1 [2, 8, 2, 16] = split[1]
getitem_2 [2, 8, 2, 16] = split[2]
getitem_3 [2, 8, 2, 16] = split[3]
all_gather_into_tensor_1 [8, 8, 2, 16] = _c10d_functional.all_gather_into_tensor(arg1_1, 4, '0')
wait_tensor_1 [8, 8, 2, 16] = _c10d_functional.wait_tensor(all_gather_into_tensor_1)
split_1 = aten.split.Tensor(wait_tensor_1, 2)
getitem_4 [2, 8, 2, 16] = split_1[0]
getitem_5 [2, 8, 2, 16] = split_1[1]
getitem_6 [2, 8, 2, 16] = split_1[2]
getitem_7 [2, 8, 2, 16] = split_1[3]
permute_2 [2, 4, 8, 16] = aten.permute(arg2_1, [0, 2, 1, 3])
expand_1 [2, 4, 8, 16] = aten.expand(permute_2, [2, 4, 8, 16])
clone_1 [2, 4, 8, 16] = aten.clone(expand_1, memory_format=torch.contiguous_format)
view_1 [8, 8, 16] = aten.reshape(clone_1, [8, 8, 16])
cat [2, 32, 2, 16] = aten.cat([getitem, getitem_1, getitem_2, getitem_3], 1)
permute [2, 2, 32, 16] = aten.permute(cat, [0, 2, 1, 3])
unsqueeze [2, 2, 1, 32, 16] = aten.unsqueeze(permute, 2)
expand [2, 2, 2, 32, 16] = aten.expand(unsqueeze, [2, 2, 2, 32, 16])
clone [2, 2, 2, 32, 16] = aten.clone(expand, memory_format=torch.contiguous_format)
view [2, 4, 32, 16] = aten.reshape(clone, [2, 4, 32, 16])
permute_3 [2, 4, 16, 32] = aten.permute(view, [0, 1, 3, 2])
expand_2 [2, 4, 16, 32] = aten.expand(permute_3, [2, 4, 16, 32])
view_2 [8, 16, 32] = aten.reshape(expand_2, [8, 16, 32])
bmm [8, 8, 32] = aten.bmm(view_1, view_2)
view_3 [2, 4, 8, 32] = aten.reshape(bmm, [2, 4, 8, 32])
mul [2, 4, 8, 32] = aten.mul.Tensor(view_3, 0.25)
div [2, 4, 8, 32] = aten.div.Tensor(mul, 0.5)
tanh [2, 4, 8, 32] = aten.tanh(div)
mul_1 [2, 4, 8, 32] = aten.mul.Tensor(tanh, 0.5)
iota [8] = prims.iota(8, start=0, step=1, dtype=torch.int64, device=device(type='cpu'), requires_grad=False)
unsqueeze_1 [8, 1] = aten.unsqueeze(iota, 1)
add [8, 1] = aten.add.Tensor(unsqueeze_1, 16)
iota_1 [32] = prims.iota(32, start=0, step=1, dtype=torch.int64, device=device(type='cpu'), requires_grad=False)
sub [8, 32] = aten.sub.Tensor(add, iota_1)
ge [8, 32] = aten.ge.Scalar(sub, 0)
iota_2 [8] = prims.iota(8, start=0, step=1, dtype=torch.int64, device=device(type='cpu'), requires_grad=False)
unsqueeze_2 [8, 1] = aten.unsqueeze(iota_2, 1)
add_1 [8, 1] = aten.add.Tensor(unsqueeze_2, 16)
iota_3 [32] = prims.iota(32, start=0, step=1, dtype=torch.int64, device=device(type='cpu'), requires_grad=False)
sub_1 [8, 32] = aten.sub.Tensor(add_1, iota_3)
lt [8, 32] = aten.lt.Scalar(sub_1, 11)
bitwise_and [8, 32] = aten.bitwise_and.Tensor(ge, lt)
bitwise_not [8, 32] = aten.bitwise_not(bitwise_and)
full_default_1 [] = aten.full([], -3.3895313892515355e+38, dtype=torch.bfloat16, layout=torch.strided, device=device(type='cpu'), pin_memory=False)
full_default [8, 32] = aten.full([8, 32], 0, dtype=torch.bfloat16, layout=torch.strided, device=device(type='cpu'), pin_memory=False)
where [8, 32] = aten.where.self(bitwise_not, full_default_1, full_default)
unsqueeze_3 [1, 8, 32] = aten.unsqueeze(where, 0)
unsqueeze_4 [1, 1, 8, 32] = aten.unsqueeze(unsqueeze_3, 1)
add_2 [2, 4, 8, 32] = aten.add.Tensor(mul_1, unsqueeze_4)
convert_element_type_2 [2, 4, 8, 32] = prims.convert_element_type(add_2, torch.float32)
amax [2, 4, 8, 1] = aten.amax(convert_element_type_2, [-1], True)
sub_2 [2, 4, 8, 32] = aten.sub.Tensor(convert_element_type_2, amax)
exp [2, 4, 8, 32] = aten.exp(sub_2)
sum_1 [2, 4, 8, 1] = aten.sum.dim_IntList(exp, [-1], True)
div_1 [2, 4, 8, 32] = aten.div.Tensor(exp, sum_1)
convert_element_type_3 [2, 4, 8, 32] = prims.convert_element_type(div_1, torch.bfloat16)
expand_4 [2, 4, 8, 32] = aten.expand(convert_element_type_3, [2, 4, 8, 32])
view_5 [8, 8, 32] = aten.reshape(expand_4, [8, 8, 32])
cat_1 [2, 32, 2, 16] = aten.cat([getitem_4, getitem_5, getitem_6, getitem_7], 1)
permute_1 [2, 2, 32, 16] = aten.permute(cat_1, [0, 2, 1, 3])
unsqueeze_5 [2, 2, 1, 32, 16] = aten.unsqueeze(permute_1, 2)
expand_3 [2, 2, 2, 32, 16] = aten.expand(unsqueeze_5, [2, 2, 2, 32, 16])
clone_3 [2, 2, 2, 32, 16] = aten.clone(expand_3, memory_format=torch.contiguous_format)
view_4 [2, 4, 32, 16] = aten.reshape(clone_3, [2, 4, 32, 16])
expand_5 [2, 4, 32, 16] = aten.expand(view_4, [2, 4, 32, 16])
view_6 [8, 32, 16] = aten.reshape(expand_5, [8, 32, 16])
bmm_1 [8, 8, 16] = aten.bmm(view_5, view_6)
view_7 [2, 4, 8, 16] = aten.reshape(bmm_1, [2, 4, 8, 16])
permute_4 [2, 8, 4, 16] = aten.permute(view_7, [0, 2, 1, 3])
clone_4 [2, 8, 4, 16] = aten.clone(permute_4, memory_format=torch.contiguous_format)
return (clone_4,)
""",
    )
    assert fuse_attention(module) == 1
    module.graph.eliminate_dead_code()
    assert_expected_inline(
        text(module.graph),
        """\
arg0_1 [2, 8, 2, 16]
arg1_1 [2, 8, 2, 16]
arg2_1 [2, 8, 4, 16]
permute_2 [2, 4, 8, 16] = aten.permute(arg2_1, [0, 2, 1, 3])
permute_default [2, 2, 8, 16] = aten.permute(arg0_1, [0, 2, 1, 3])
permute_default_1 [2, 2, 8, 16] = aten.permute(arg1_1, [0, 2, 1, 3])
all_gather_attention = ditron.all_gather_attention([permute_2, permute_default, permute_default_1], "mask=(kind=causal window=11 offset=16) scale=0.25 softcap=0.5 world_size=4 group_name=0 site='' trials", None)
getitem_8 [2, 4, 8, 16] = all_gather_attention[0]
permute_default_2 [2, 8, 4, 16] = aten.permute(getitem_8, [0, 2, 1, 3])
clone_4 [2, 8, 4, 16] = aten.clone(permute_default_2, memory_format=torch.contiguous_format)
return (clone_4,)
""",
    )
    (module,) = compiled_graphs(grouped, *operands())
    assert fuse_attention(module) == 1
    module.graph.eliminate_dead_code()
    assert_expected_inline(
        text(module.graph),
        """\
arg0_1 [1, 8, 2, 16]
arg1_1 [1, 8, 2, 16]
arg2_1 [1, 8, 4, 16]
permute_default [1, 4, 8, 16] = aten.permute(arg2_1, [0, 2, 1, 3])
permute_default_3 [1, 2, 8, 16] = aten.permute(arg0_1, [0, 2, 1, 3])
permute_default_4 [1, 2, 8, 16] = aten.permute(arg1_1, [0, 2, 1, 3])
all_gather_attention = ditron.all_gather_attention([permute_default, permute_default_3, permute_default_4], "mask=(kind=causal offset=8) scale=0.25 softcap=0.5 world_size=4 group_name=0 site='' trials", None)
getitem_8 [1, 4, 8, 16] = all_gather_attention[0]
reshape_default [2, 2, 8, 16] = aten.reshape(getitem_8, [2, 2, 8, 16])
permute_default_5 [8, 2, 2, 16] = aten.permute(reshape_default, [2, 0, 1, 3])
reshape_default_1 [1, 8, 2, 2, 16] = aten.reshape(permute_default_5, [1, 8, 2, 2, 16])
clone_2 [1, 8, 2, 2, 16] = aten.clone(reshape_default_1, memory_format=torch.contiguous_format)
view_9 [1, 8, 64] = aten.reshape(clone_2, [1, 8, 64])
return (view_9,)
""",
    )


def wide(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Both products in fp32, rounded at the end."""
    keys, values = (repeated(one).float() for one in gathered(k, v))
    return (cap(q.transpose(1, 2).float() @ keys.mT).softmax(-1) @ values).transpose(1, 2).to(q.dtype)


@pytest.mark.parametrize("form", [hugging_face, wide, by_math], ids=lambda form: form.__name__)
def test_low_precision_rounds_less(form: Form) -> None:
    given = tuple(one.bfloat16() for one in operands(B=2))
    (before,), (after,), (exact,) = (compiled_graphs(form, *each) for each in (given, given, operands(B=2)))
    assert fuse_attention(after) == 1, reasons(after)
    inputs = [
        [one.bfloat16() for one in each]
        for each in of_all_ranks(tuple(node.meta["val"] for node in after.graph.nodes if node.op == "placeholder"))
    ]
    wanted = run_ranks(exact, [[one.float() for one in each] for each in inputs])
    errors = []
    for module in (after, before):
        found = run_ranks(module, inputs)
        errors.append(max((one[0].float() - two[0]).abs().max() for one, two in zip(found, wanted, strict=True)))
    assert errors[0] <= 1.1 * errors[1] and errors[0] < 0.02


def cap_from_tensor(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    keys, values = gathered(k, v)
    return cap(scores_of(q, keys), q.amax()).softmax(-1) @ repeated(values)  # type: ignore[arg-type]


def capped_twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    keys, values = gathered(k, v)
    return cap(cap(scores_of(q, keys), 0.7)).softmax(-1) @ repeated(values)


def masked_in_front(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The cap shows again what the mask hides."""
    keys, values = gathered(k, v)
    return cap(scores_of(q, keys).masked_fill(ahead() < 0, -math.inf)).softmax(-1) @ repeated(values)


def over_queries(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    keys, values = gathered(k, v)
    return cap(scores_of(q, keys)).softmax(-2) @ repeated(values)


def weights_returned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = gathered(k, v)
    weights = cap(scores_of(q, keys)).softmax(-1)
    return weights @ repeated(values), weights


def dropped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    keys, values = gathered(k, v)
    return F.dropout(cap(scores_of(q, keys)).softmax(-1), 0.1) @ repeated(values)


def hidden_by_a_number(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A row that sees nothing sees everything, by its scores."""
    keys, values = gathered(k, v)
    seen = (ahead() >= 0) | (torch.arange(WORLD_SIZE * S) < 3)
    return cap(scores_of(q, keys)).masked_fill(~seen, -1e30).softmax(-1) @ repeated(values)


def heads_in_groups(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A bias of five dimensions."""
    keys, values = (one[:, :, None] for one in gathered(k, v))
    scores = cap(q.transpose(1, 2).unflatten(1, (2, 2)) @ keys.mT * SCALE)
    slopes = q.sum((0, 1, 3)).view(1, 2, 2, 1, 1)
    return ((scores + slopes * torch.arange(WORLD_SIZE * S)).softmax(-1) @ values).flatten(1, 2)


def with_a_truth_added(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """1 for what is seen."""
    keys, values = gathered(k, v)
    return (cap(scores_of(q, keys)) + (ahead() >= 0)).softmax(-1) @ repeated(values)


def hidden_by_little(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A finite number that is scaled down hides nothing that can be proved."""
    keys, values = gathered(k, v)
    scores = scores_of(q, keys).masked_fill(ahead() < 0, torch.finfo(torch.float32).min)
    return (scores * 1e-38).softmax(-1) @ repeated(values)


def guarded_otherwise(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """0 for rows whose first scores are negative."""
    keys, values = gathered(k, v)
    scores = cap(scores_of(q, keys))
    return torch.where((scores < 0).all(-1, keepdim=True), 0.0, scores.softmax(-1)) @ repeated(values)


def keys_used_too(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All heads of them, which the call does not have."""
    keys, values = gathered(k, v)
    return cap(scores_of(q, keys)).softmax(-1) @ repeated(values), repeated(keys)


def other_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Heads of values are repeated in another order than those of keys."""
    keys, values = gathered(k, v)
    values = values[:, None].expand(-1, 2, -1, -1, -1).reshape(values.shape[0], 4, -1, values.shape[3])
    return cap(scores_of(q, keys)).softmax(-1) @ values


def parts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    keys, values = (one[:, :, :-1] for one in gathered(k, v))
    return cap(scores_of(q, keys)).softmax(-1) @ repeated(values)


LEFT: dict[Form, str] = {
    cap_from_tensor: "attention_softcap",
    capped_twice: "attention_softcap",
    masked_in_front: "attention_softcap",
    over_queries: "attention_written_out",
    weights_returned: "attention_weights_used",
    dropped: "attention_dropout",
    hidden_by_a_number: "attention_mask",
    heads_in_groups: "attention_mask",
    with_a_truth_added: "attention_written_out",
    hidden_by_little: "attention_written_out",
    guarded_otherwise: "attention_written_out",
    keys_used_too: "intermediate_used",
    other_heads: "attention_written_out",
    parts: "attention_parts",
}


@pytest.mark.parametrize("form", LEFT, ids=lambda form: form.__name__)
def test_left_alone(form: Form) -> None:
    (module,) = compiled_graphs(form, *operands(B=2))
    run(module.graph, Options())
    assert set(reasons(module)) == {LEFT[form]} and len(reasons(module)) == 2, text(module.graph)
    names = {node.name for node in module.graph.nodes}
    assert all(node.meta[LEFT_ALONE].culprit.name in names for node in module.graph.nodes if LEFT_ALONE in node.meta)
    assert "ditron" not in text(module.graph)


@pytest.mark.parametrize("form", [quotient_last, filled, hugging_face], ids=lambda form: form.__name__)
@pytest.mark.parametrize("D", [256, 264])
def test_large_heads(form: Form, D: int) -> None:
    """No kernel takes more than 256 elements: there Inductor's own code is faster."""
    (module,) = compiled_graphs(form, *operands(D=D))
    before = text(module.graph).count("permute")
    assert fuse_attention(module) == (D == 256)
    if D > 256:
        assert set(reasons(module)) == {"attention_head_dim"} and before == text(module.graph).count("permute")


def test_gradients_are_left_alone() -> None:
    forward, backward = compiled_graphs(hugging_face, *(one.requires_grad_() for one in operands(B=2)))
    for module in (forward, backward):
        run(module.graph, Options())
        assert "ditron" not in text(module.graph)
    assert reasons(forward) == ["attention_weights_used"] * 2
    assert len(reasons(backward)) == 2


def test_a_checkpointed_forward_is_fused_and_right() -> None:
    """Its backward computes the scores again, from the shards."""

    def form(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = checkpoint(hugging_face, q, k, v, use_reentrant=False)
        assert isinstance(out, torch.Tensor)
        return out.sin()

    given = tuple(one.requires_grad_() for one in operands(B=2))
    after = compiled_graphs(form, *given)
    before = [twin(one) for one in after]
    assert [fuse_attention(module) for module in after] == [1, 0]
    assert set(reasons(after[1])) == {"attention_written_out"}
    inputs = of_all_ranks(tuple(node.meta["val"] for node in after[0].graph.nodes if node.op == "placeholder"))
    torch.testing.assert_close(run_ranks(after[0], inputs), run_ranks(before[0], inputs))


def test_a_dynamic_length_is_left_alone() -> None:
    given = operands(B=2)
    for one in given:
        torch._dynamo.mark_dynamic(one, 1)
    (module,) = compiled_graphs(quotient_last, *given)
    assert fuse_attention(module) == 0 and set(reasons(module)) == {"shape_unproven"}


def test_the_option_switches_it_off() -> None:
    (module,) = compiled_graphs(quotient_last, *operands())
    before = text(module.graph)
    assert fuse_attention(module, Options(fusions=("all_gather_matmul",))) == 0
    assert set(reasons(module)) == {"disabled"} and before.count("permute") == text(module.graph).count("permute")
