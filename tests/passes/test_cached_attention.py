"""cached_attention: which decode steps become one call, what it computes and writes, and what keeps them as they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.attention.cached_attention import attend_within, cached_attention, find_attention
from ditron_inductor.passes.finish.record_sites import record_graph
from ditron_inductor.task import schema
from ditron_inductor.task.cached_attention import bounds
from ditron_inductor.task.nodes import CachedAttention
from tests.passes.graphs import (
    WORLD_SIZE,
    all_reduce,
    compiled_graphs,
    fuse,
    graph_on,
    local_nodes,
    run_ranks,
    text,
    twin,
)

pytestmark = pytest.mark.usefixtures("group")

B, HQ, HKV, S, D, HIDDEN = 2, 4, 2, 12, 16, 8
AT = 5
"""The position of the new token."""
Tensors = dict[str, torch.Tensor]
Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Tensors], Any]
"""A function of q [B, HQ, 1, D], k and v [B, HKV, 1, D] and the other tensors."""


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half by half, as the demo model turns."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def turned_whole(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Whole heads, as transformers turns."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def written(k: torch.Tensor, v: torch.Tensor, given: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    given["keys"].index_copy_(2, given["position"], k)
    given["values"].index_copy_(2, given["position"], v)
    return given["keys"], given["values"]


def seen(given: Tensors) -> torch.Tensor:
    """The mask of all tokens up to the position."""
    return (torch.arange(S) <= given["position"])[None, None, None, :]


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: Any, **how: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True, **how)


def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Tensors) -> torch.Tensor:
    """As the benchmark of `generate` decodes."""
    angles = given["cos"][:, : D // 2], given["sin"][:, : D // 2]
    keys, values = written(turned(k, *angles), v, given)
    return attend(turned(q, *angles), keys, values, seen(given))


def hugging_face(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Tensors) -> torch.Tensor:
    """As transformers decodes: with repeated heads, a mask from outside, and angles for each sequence."""
    cos, sin = (given[name].expand(B, D)[:, None, None] for name in ("cos", "sin"))
    keys, values = written(turned_whole(k, cos, sin), v, given)

    def repeated(cache: torch.Tensor) -> torch.Tensor:
        return cache[:, :, None].expand(B, HKV, HQ // HKV, S, D).reshape(B, HQ, S, D)

    mask = given["shown"][:, None, None]
    return F.scaled_dot_product_attention(turned_whole(q, cos, sin), repeated(keys), repeated(values), mask)


def by_lengths(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Tensors) -> torch.Tensor:
    """To caches that are only read."""
    mask = torch.arange(S)[None, :] < given["lengths"][:, None]
    return attend(q, given["keys"], given["values"], mask[:, None, None], scale=0.5)


def elsewhere(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Tensors) -> Any:
    """The written cache is returned too, so that somebody else reads it."""
    keys, values = written(k, v, given)
    return attend(q, keys, values, seen(given)), keys * 2


def tokens_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Tensors) -> torch.Tensor:
    keys, values = (given[name].view(B, S, HKV, D).transpose(1, 2) for name in ("keys", "values"))
    return attend(q, keys, values, None)


def turned_in_fp32(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Tensors) -> torch.Tensor:
    cos, sin = given["cos"].float(), given["sin"].float()
    keys, values = written(turned_whole(k.float(), cos, sin).to(k.dtype), v, given)
    return attend(turned_whole(q.float(), cos, sin).to(q.dtype), keys, values, ~(torch.arange(S) > given["position"])[None, None, None])


def query_alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Tensors) -> torch.Tensor:
    keys, values = written(k, v, given)
    return attend(turned_whole(q, given["cos"], given["sin"]), keys, values, seen(given))


def other_lengths(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Tensors) -> torch.Tensor:
    """The mask is not that of the position, so the call reads the written cache."""
    keys, values = written(k, v, given)
    mask = torch.arange(S)[None, :] < given["lengths"][:, None]
    return attend(q, keys, values, mask[:, None, None])


def below_the_next(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Tensors) -> torch.Tensor:
    keys, values = written(k, v, given)
    return attend(q, keys, values, (torch.arange(S) < given["position"] + 1)[None, None, None])


def other_angles(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Tensors) -> torch.Tensor:
    """Those of the key are views of the same tables, and belong to the sequences."""
    angles = given["cos"], given["sin"]
    keys, values = written(turned(k, *(one.view(B, 1, 1, D // 2) for one in angles)), v, given)
    return attend(turned_whole(q, *angles), keys, values, seen(given))


def angles_in_fp64(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Tensors) -> torch.Tensor:
    keys, values = written(k, v, given)
    out = turned_whole(q, given["cos"].double(), given["sin"].double()).to(q.dtype)
    return attend(out, keys, values, seen(given))


def turned_and_rounded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Tensors) -> torch.Tensor:
    """The query is rounded before it is turned."""
    keys, values = written(k, v, given)
    rounded = (q * given["cos"]).bfloat16().float() + torch.cat([-q[..., D // 2 :], q[..., : D // 2]], -1) * given["sin"]
    return attend(rounded, keys, values, seen(given))


def graph_of(
    form: Step, dtype: torch.dtype = torch.float32, dynamic: bool = False, tokens_first: bool = False
) -> fx.GraphModule:
    """A decode step behind a fused reduction, as Inductor has it. tokens_first: the caches are [B, S, HKV, D]."""

    def layer(x: torch.Tensor, w: torch.Tensor, qkv: torch.Tensor, *others: torch.Tensor) -> Any:
        given = dict(zip(("keys", "values", "cos", "sin", "position", "lengths", "shown"), others, strict=True))
        q, k, v = (all_reduce(x @ w) @ qkv).split([HQ * D, HKV * D, HKV * D], -1)
        heads = (one.view(-1, 1, one.shape[-1] // D, D).transpose(1, 2) for one in (q, k, v))
        return form(*heads, given)

    sizes = (B, S, HKV, D) if tokens_first else (B, HKV, S, D)
    given = [one.view(sizes) if one.ndim == len(sizes) else one for one in inputs(dtype)]
    with torch.no_grad():
        (module,) = compiled_graphs(layer, *given, dynamic=dynamic)
    return module


def inputs(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    weights = [drawn(B, HIDDEN), drawn(HIDDEN, HIDDEN), drawn(HIDDEN, (HQ + 2 * HKV) * D) / 8]
    caches, angles = [drawn(B, HKV, S, D) for _ in range(2)], drawn(1, D)
    numbers = [torch.tensor([AT]), torch.tensor([3, S])]
    shown = torch.rand(B, S, generator=generator) < 0.5
    shown[:, AT] = True
    return [*weights, *caches, angles.cos(), angles.sin(), *numbers, shown]


def computed(module: fx.GraphModule) -> tuple[list[Any], list[list[torch.Tensor]]]:
    """What all ranks compute, and their inputs behind it. A graph has those that it uses, in the order of their use,
    which for those of one form is that of `inputs`.
    """
    by_rank = [inputs(seed=rank) for rank in range(WORLD_SIZE)]
    given = []
    for of_rank in by_rank:
        left = list(of_rank)
        for node in module.graph.find_nodes(op="placeholder"):
            value = node.meta["val"]
            form = value.ndim, value.numel(), value.dtype
            place = next(i for i, one in enumerate(left) if (one.ndim, one.numel(), one.dtype) == form)
            given.append(left.pop(place).view(value.shape))
    count = len(given) // WORLD_SIZE
    return run_ranks(module, [given[rank * count :][:count] for rank in range(WORLD_SIZE)]), by_rank


def check(before: fx.GraphModule, after: fx.GraphModule) -> None:
    """Both graphs compute the same, and leave the same behind in the caches."""
    torch.testing.assert_close(computed(after), computed(before))


def decoded(module: fx.GraphModule, options: Options | None = None) -> list[CachedAttention]:
    """The calls that the pass makes."""
    return local_nodes(module, CachedAttention.kind, lambda *given: attend_within(*given, ("cpu",)), options)


def check_form(form: Step, task: CachedAttention, tokens_first: bool = False) -> None:
    """It fires as this task, and computes and writes what the graph does."""
    before = graph_of(form, tokens_first=tokens_first)
    after = twin(before)
    assert decoded(after) == [task]
    check(before, after)


def test_golden() -> None:
    module = graph_of(step)
    assert len(decoded(module)) == 1
    assert record_graph(module.graph, Options(), graph_before="", graph_after="").local == ("cached_attention",)
    expecttest.assert_expected_inline(
        text(module.graph),
        """\
arg0_1 [2, 8]
arg1_1 [8, 8]
arg2_1 [8, 128]
arg3_1 [1, 16]
arg4_1 [1, 16]
arg5_1 [2, 2, 12, 16]
arg6_1 [1]
arg7_1 [2, 2, 12, 16]
matmul_all_reduce = ditron.matmul_all_reduce([arg0_1, arg1_1], "reduce_op=sum world_size=4 group_name=0 site='' trials", None)
getitem_8 [2, 8] = matmul_all_reduce[0]
mm_1 [2, 128] = aten.mm(getitem_8, arg2_1)
split_with_sizes = aten.split_with_sizes(mm_1, [64, 32, 32], -1)
getitem [2, 64] = split_with_sizes[0]
getitem_1 [2, 32] = split_with_sizes[1]
getitem_2 [2, 32] = split_with_sizes[2]
view_1 [2, 1, 2, 16] = aten.reshape(getitem_1, [-1, 1, 2, 16])
permute_1 [2, 2, 1, 16] = aten.permute(view_1, [0, 2, 1, 3])
view [2, 1, 4, 16] = aten.reshape(getitem, [-1, 1, 4, 16])
permute [2, 4, 1, 16] = aten.permute(view, [0, 2, 1, 3])
slice_1 [1, 8] = aten.slice.Tensor(arg3_1, 1, 0, 8)
slice_2 [1, 8] = aten.slice.Tensor(arg4_1, 1, 0, 8)
view_2 [2, 1, 2, 16] = aten.reshape(getitem_2, [-1, 1, 2, 16])
permute_2 [2, 2, 1, 16] = aten.permute(view_2, [0, 2, 1, 3])
reshape_default [2, 4, 16] = aten.reshape(permute, [2, -1, 16])
reshape_default_1 [2, 2, 16] = aten.reshape(permute_1, [2, -1, 16])
reshape_default_2 [2, 2, 16] = aten.reshape(permute_2, [2, -1, 16])
cached_attention = ditron.cached_attention([reshape_default, arg5_1, arg7_1, arg6_1, arg6_1, reshape_default_1, reshape_default_2, slice_1, slice_2], 'scale=0.25 mask=lengths appends rotated', None)
getitem_9 [2, 4, 16] = cached_attention[0]
after__default = ditron.after_(arg5_1, getitem_9)
after__default_1 = ditron.after_(arg7_1, getitem_9)
reshape_default_3 [2, 4, 1, 16] = aten.reshape(getitem_9, [2, 4, 1, 16])
return (reshape_default_3,)
""",
    )


SCALE = D**-0.5
FORMS: dict[str, tuple[Step, CachedAttention]] = {
    "half by half": (step, CachedAttention(SCALE, "lengths", appends=True, rotated=True)),
    "hugging face": (hugging_face, CachedAttention(SCALE, "given", appends=True, rotated=True)),
    "in fp32": (turned_in_fp32, CachedAttention(SCALE, "lengths", appends=True, rotated=True)),
    "caches that are read": (by_lengths, CachedAttention(0.5, "lengths")),
    "caches that are read elsewhere": (elsewhere, CachedAttention(SCALE, "lengths", added=1)),
    "tokens first": (tokens_first, CachedAttention(SCALE, "all")),
    "a query that is turned alone": (query_alone, CachedAttention(SCALE, "lengths", appends=True)),
    "the next position": (below_the_next, CachedAttention(SCALE, "lengths", appends=True)),
    "other angles for the key": (other_angles, CachedAttention(SCALE, "lengths", appends=True)),
    "angles in fp64": (angles_in_fp64, CachedAttention(SCALE, "lengths", appends=True)),
    "turned and rounded": (turned_and_rounded, CachedAttention(SCALE, "lengths", appends=True)),
    "another mask than that of the position": (other_lengths, CachedAttention(SCALE, "lengths")),
}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.replace(" ", "_"))
def test_every_form(form: str) -> None:
    check_form(*FORMS[form])


def test_other_dtypes() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert decoded(graph_of(step, dtype)) == decoded(graph_of(turned_in_fp32, dtype)) == [FORMS["in fp32"][1]]


def _turned_by(change: Callable[..., torch.Tensor]) -> Step:
    """A step with another turn, of the query alone."""
    return lambda q, k, v, given: attend(change(q, given["cos"], given["sin"]), given["keys"], given["values"], None)


def test_other_turns_are_left_in_the_graph() -> None:
    """What is no rotary embedding is computed in front of the call."""
    half = D // 2
    turns: list[Callable[..., torch.Tensor]] = [
        lambda x, cos, sin: x * cos + torch.cat([x[..., half:], x[..., :half]], -1) * sin,
        lambda x, cos, sin: x * cos - torch.cat([-x[..., half:], x[..., :half]], -1) * sin,
        lambda x, cos, sin: x * cos + torch.cat([-x[..., 1::2], x[..., ::2]], -1) * sin,
        lambda x, cos, sin: x * cos + torch.cat([-x[..., :half], x[..., half:]], -1) * sin,
        lambda x, cos, sin: x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin + x,
        lambda x, cos, sin: turned(x, cos[:, :half], sin[:, half:]) + turned(x, cos[:, half:], sin[:, :half]),
        lambda x, cos, sin: x * cos * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin,
        lambda x, cos, sin: turned_whole(x, *(angles * angles[0, :HQ].view(HQ, 1, 1) for angles in (cos, sin))),
    ]
    for turn in turns:
        check_form(_turned_by(turn), CachedAttention(SCALE, "all"))


def _returns(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Tensors) -> Any:
    keys, values = (given[name].index_copy(2, given["position"], one) for name, one in (("keys", k), ("values", v)))
    return attend(q, keys, values, seen(given)), keys, values


def _one_cache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Tensors) -> torch.Tensor:
    given["keys"].index_copy_(2, given["position"], k)
    return attend(q, given["keys"], given["keys"], seen(given))


def _read_before(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Tensors) -> Any:
    before = given["keys"].sum(-1)
    keys, values = written(k, v, given)
    return attend(q, keys, values, seen(given)), before


def _at_two_places(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Tensors) -> torch.Tensor:
    given["keys"].index_copy_(2, given["position"], k)
    given["values"].index_copy_(2, given["position"] - 1, v)
    return attend(q, given["keys"], given["values"], seen(given))


@pytest.mark.parametrize("form", [_returns, _one_cache, _read_before, _at_two_places], ids=lambda form: form.__name__)
def test_what_others_need_is_written_by_the_graph(form: Step) -> None:
    before = graph_of(form)
    after = twin(before)
    (task,) = decoded(after)
    assert not task.appends
    check(before, after)


def _of_any_size(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Tensors) -> torch.Tensor:
    mask = torch.arange(given["keys"].shape[2]) <= given["position"]
    return attend(q, given["keys"], given["values"], mask[None, None, None])


def _masked_by(mask: Callable[[Tensors], torch.Tensor]) -> Step:
    return lambda q, k, v, given: attend(q, given["keys"], given["values"], mask(given))


NEVER: dict[str, Step] = {
    "more than one query": lambda q, k, v, given: attend(
        q.expand(B, HQ, 2, D), given["keys"], given["values"], None
    ),
    "causal": lambda q, k, v, given: attend(q, given["keys"], given["values"], None, is_causal=True),
    "numbers that are added": _masked_by(lambda given: given["keys"][:, :1, :, 0].unsqueeze(2)),
    "a finite number that hides": _masked_by(lambda given: torch.where(seen(given), 0.0, -1e4)),
    "a mask for each head": _masked_by(lambda given: given["keys"][:, :, :, 0].repeat(1, 2, 1)[:, :, None] > 0),
    "one token": lambda q, k, v, given: attend(q, k, v, None),
}


@pytest.mark.parametrize("name", NEVER, ids=lambda name: name.replace(" ", "_"))
def test_it_must_not_fire(name: str) -> None:
    assert decoded(graph_of(NEVER[name])) == []


def test_any_sizes_and_double_precision_are_left_alone() -> None:
    assert decoded(graph_of(step, torch.float64)) == []
    assert decoded(graph_of(_of_any_size, dynamic=True)) == []
    assert len(decoded(graph_of(_of_any_size))) == 1


def test_it_is_for_gpus_and_can_be_left_out() -> None:
    module = graph_of(step)
    fuse(module)
    assert cached_attention(module.graph, options=Options()) == 0
    kept = tuple(name for name in Options().fusions if name != "cached_attention")
    assert decoded(graph_of(step), Options(fusions=kept)) == []


def test_a_mask_shows_or_hides() -> None:
    """Bools that say what is hidden are turned around, and numbers of -inf mean the same."""
    forms: list[Callable[[Tensors], torch.Tensor]] = [
        lambda given: ~given["shown"][:, None, None],
        lambda given: torch.where(given["shown"][:1], 0.0, -math.inf)[:, None, None],
        lambda given: torch.where(given["shown"], -math.inf, 0.0)[:, None, None].expand(B, HQ, 1, S),
    ]
    for form in forms:
        check_form(_masked_by(form), CachedAttention(SCALE, "given"))


def test_layers_share_the_bounds_of_a_mask() -> None:
    """Whatever views of it they have; what shows in one layer and hides in another has bounds of its own."""

    def layers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Tensors) -> torch.Tensor:
        keys, values, shown = given["keys"], given["values"], given["shown"]
        hidden = torch.where(shown, -math.inf, 0.0)
        for mask in (shown[:, None, None], shown.view(B, 1, S)[:, None], hidden[:, None, None]):
            q = attend(q, keys, values, mask)
        return q

    before = graph_of(layers)
    after = twin(before)
    assert decoded(after) == [CachedAttention(SCALE, "given")] * 3
    check(before, after)
    calls = after.graph.find_nodes(op="call_function", target=schema.overload(CachedAttention.kind))
    first, second, third = (schema.operands_of(call)[3:6] for call in calls)
    assert first == second and not set(second) & set(third)
    assert len(after.graph.find_nodes(op="call_function", target=torch.ops.aten.amin.default)) == 2
    check_bounds(after, first)
    check_bounds(after, third)


def check_bounds(module: fx.GraphModule, operands: Sequence[fx.Node]) -> None:
    """The graph computes the bounds of a mask that is an operand of a call, in front of them."""
    returned = twin(module)
    nodes = {node.name: node for node in returned.graph.nodes}
    returned.graph.output_node().args = ([nodes[node.name] for node in operands],)
    returned.graph.eliminate_dead_code()
    returned.recompile()
    for mask, *found in computed(returned)[0]:
        torch.testing.assert_close(found, list(bounds(mask)))


CUDNN, EFFICIENT = (
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
)


@pytest.mark.parametrize("hiding", [-math.inf, -65536.0])
@pytest.mark.parametrize("op", [CUDNN, EFFICIENT], ids=["cudnn", "efficient"])
def test_the_number_that_hides_scores_from_cudnn(op: Any, hiding: float) -> None:
    """Torch writes it for a mask of bools, for this op alone."""

    def attend_by(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        seen = torch.arange(S, device=q.device) < lengths.long()[:, None]
        zero, hidden = (torch.full((), number, dtype=q.dtype, device=q.device) for number in (0.0, hiding))
        out: torch.Tensor = op(q, keys, values, torch.where(seen, zero, hidden)[:, None, None], False)[0]
        return out

    graph = graph_on(attend_by, (B, HQ, 1, D), (B, HQ, S, D), (B, HQ, S, D), (B,), device="cpu").graph
    (call,) = graph.find_nodes(op="call_function", target=op)
    match = find_attention(call, ("cpu",))
    assert (match is not None) == (op is CUDNN or hiding == -math.inf)
    assert match is None or (match.attention.choice.shown is not None and match.attention.choice.kept)


@pytest.mark.parametrize("first", [0, 1])
def test_a_mask_whose_rows_torch_pads(first: int) -> None:
    """As torch does on a GPU if a cache's tokens are no multiple of 16: padded behind, and cut to its length again."""

    def attend_padded(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        seen = torch.arange(S, device=q.device) < lengths.long()[:, None]
        zero, hidden = (torch.full((), number, dtype=q.dtype, device=q.device) for number in (0.0, -math.inf))
        mask = torch.where(seen, zero, hidden)[:, None, None].expand(B, HQ, 1, S)
        mask = torch.constant_pad_nd(mask, [0, 4], 0.0)[..., first : first + S]
        out: torch.Tensor = EFFICIENT(q, keys, values, mask, False)[0]
        return out

    graph = graph_on(attend_padded, (B, HQ, 1, D), (B, HQ, S, D), (B, HQ, S, D), (B,), device="cpu").graph
    (call,) = graph.find_nodes(op="call_function", target=EFFICIENT)
    match = find_attention(call, ("cpu",))
    assert (match is not None) == (first == 0)
    assert match is None or match.attention.choice.mask == "given"
