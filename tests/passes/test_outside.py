"""What a report says of what stands beside a node and did not become a part of it, and the pictures around sites."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ditron_inductor.options import Options
from ditron_inductor.passes.attention import cached_attention
from ditron_inductor.passes.finish.near import DEPTH, MOST_NODES
from ditron_inductor.passes.finish.outside import TEXTS
from ditron_inductor.pipeline import DitronPipeline
from ditron_inductor.task.site_records import SiteRecord, collect_sites
from tests.passes.graphs import all_gather, all_reduce, assert_no_new_guards, traced

pytestmark = pytest.mark.usefixtures("group")
A, B, R = torch.empty(8, 16), torch.empty(16, 32), torch.empty(8, 32)
X, W = torch.empty(8, 32), torch.empty(32, 16)


def norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def records(fn: Callable[..., Any], *args: torch.Tensor, options: Options | None = None) -> tuple[SiteRecord, ...]:
    with collect_sites() as sink:
        DitronPipeline(options or Options())(traced(fn, *args).graph)
    return sink.graphs[0].sites


def outside(fn: Callable[..., Any], *args: torch.Tensor, options: Options | None = None) -> list[tuple[str, str, str]]:
    """What stays outside of the one node, why, and the op that shows it."""
    (record,) = records(fn, *args, options=options)
    assert record.matched and all(one.text for one in record.outside)
    return [(one.what, one.code, one.node.op) for one in record.outside]


def test_what_became_a_part_of_the_node_has_no_note() -> None:
    assert outside(lambda a, b: all_reduce(a @ b), A, B) == []
    assert outside(lambda a, b, r: all_reduce(a @ b) + r, A, B, R) == []
    assert outside(lambda a, b, r, w: norm(all_reduce(a @ b) + r) @ w, A, B, R, W) == []


def test_a_norm_behind_the_node() -> None:
    def consumed(a: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return norm(all_reduce(a @ b) + r).sin()

    assert outside(consumed, A, B, R) == [("norm behind", "norm_consumer", "aten.rsqrt.default")]
    only = Options(fusions=("matmul_all_reduce",))
    found = outside(lambda a, b, r, w: norm(all_reduce(a @ b) + r) @ w, A, B, R, W, options=only)
    assert found == [("norm behind", "disabled", "aten.rsqrt.default")]


def test_a_norm_whose_reader_became_an_epilogue_later() -> None:
    def gated(a: torch.Tensor, b: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = norm(all_reduce(a @ b))
        return all_reduce(h @ w) * h

    first, second = records(gated, A, B, torch.empty(32, 32))
    assert [(one.what, one.code) for one in first.outside] == [("norm behind", "norm_consumer")]
    assert second.outside == ()


def test_a_norm_in_front_of_the_node() -> None:
    few = [("norm in front", "few_rows", "aten.rsqrt.default")]
    assert outside(lambda x, w: all_gather(norm(x)) @ w, X, W) == few
    chunked = Options(strategy="chunked")
    assert outside(lambda x, w: all_gather(norm(x)) @ w, X, W, options=chunked) == []

    def used_elsewhere(x: torch.Tensor, w: torch.Tensor) -> Any:
        h = norm(x)
        return all_gather(h) @ w, h.sum()

    used = [("norm in front", "intermediate_used", "aten.rsqrt.default")]
    assert outside(used_elsewhere, X, W, options=chunked) == used


def test_an_epilogue_that_the_compiler_computes_with_its_reader() -> None:
    (record,) = records(lambda a, b: (all_reduce(a @ b).relu()).sum(-1), A, B)
    (one,) = record.outside
    assert (one.what, one.code, one.node.op) == ("epilogue", "computed_with_its_reader", "aten.relu.default")
    assert one.text.endswith(": sum_1 (aten.sum.dim_IntList, [8] float32)")


def test_an_epilogue_without_a_text() -> None:
    found = outside(lambda a, b: all_reduce(a @ b).sin(), A, B)
    assert found == [("epilogue", "no_text", "aten.sin.default")]


def test_every_code_has_a_sentence_for_a_reader() -> None:
    assert all(len(text) > 20 and not text.endswith(".") for text in TEXTS.values())


def test_a_picture_has_what_is_near_and_nothing_that_only_orders_launches() -> None:
    def chain(a: torch.Tensor, b: torch.Tensor, w: torch.Tensor) -> Any:
        y = all_reduce(a @ b)
        z = all_reduce(y.sin() @ w)
        return all_reduce(z.sin()), z

    first, second, alone = records(chain, A, B, W)
    for record in (first, second, alone):
        names = [near.node.name for near in record.near]
        assert record.node in names and len(names) <= 2 * MOST_NODES + 2
        known: set[str] = set()
        for near in record.near:
            assert known.issuperset(near.inputs), "in the order of the graph"
            known.add(near.node.name)
        ops = [near.node.op for near in record.near]
        assert not any(word in op for op in ops for word in ("getitem", "wait", "token", "after", "where", "ne.Scalar"))
    by_name = {near.node.name: near for near in second.near}
    assert [by_name[name].node.op for name in by_name[second.node].inputs] == ["aten.sin.default", "placeholder"]
    assert first.node in by_name and DEPTH >= 2
    readers = [near.node.op for near in second.near if second.node in near.inputs]
    assert readers == ["aten.sin.default", "the graph's output"]


def experts(x: torch.Tensor, scores: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, halved: bool) -> Any:
    """The experts of a decode step. halved: two slots of a token may have one expert."""
    ids = scores.topk(2)[1].reshape(-1)
    rows = all_reduce(x @ out).repeat_interleave(2, 0).unsqueeze(-1)
    return (
        norm(all_reduce(torch.bmm(weight[ids // 2 if halved else ids], rows).squeeze(-1).view(-1, 2, 16).sum(1)))
        @ out.t()
    )


def test_experts_whose_weights_are_copied() -> None:
    given = torch.empty(3, 32), torch.empty(3, 4), torch.empty(4, 16, 16), torch.empty(32, 16)
    found = [("experts in front", "experts_form", "aten.bmm.default")]
    # Without weights the sum is none that the norm's node takes.
    summed = [("experts in front", "experts_sum", "aten.sum.dim_IntList")]

    def notes(halved: bool, options: Options | None = None) -> list[list[tuple[str, str, str]]]:
        sites = records(functools.partial(experts, halved=halved), *given, options=options)
        return [[(one.what, one.code, one.node.op) for one in site.outside] for site in sites if site.matched]

    assert notes(halved=False) == [[], summed]
    assert notes(halved=True) == [[], [*found, *summed]]
    # Whoever wants none of these calls needs no note.
    assert notes(halved=True, options=Options(fusions=("matmul_all_reduce", "all_reduce_rms_norm"))) == [[], []]


def attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, w: torch.Tensor, *, how: str) -> Any:
    """The attention of a decode step, in front of its projection."""
    bias = torch.arange(12, dtype=q.dtype).view(1, 1, 1, 12)
    if how.startswith("written"):
        scores = q @ keys.transpose(-1, -2)
        scores = scores.div(30).tanh().mul(30) if how == "written, capped" else scores
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        weights = weights / weights.sum(-1, keepdim=True) if how == "written, by its maximum" else scores.softmax(-1)
        out = weights @ values
    else:
        out = F.scaled_dot_product_attention(q, keys, values, bias if how == "bias" else None)
    return all_reduce(out.reshape(2, -1) @ w)


@pytest.mark.parametrize(
    ("how", "heads", "op"),
    [
        ("plain", 16, None),
        ("plain", 24, "aten._scaled_dot_product_flash_attention_for_cpu.default"),
        ("bias", 16, "aten._scaled_dot_product_flash_attention_for_cpu.default"),
        ("written", 16, "aten._softmax.default"),
        ("written, by its maximum", 16, "aten.amax.default"),
        ("written, capped", 16, "aten._softmax.default"),
    ],
)
def test_attention_of_a_decode_step_that_is_no_call(
    monkeypatch: pytest.MonkeyPatch, how: str, heads: int, op: str | None
) -> None:
    monkeypatch.setattr(cached_attention, "GPUS", ("cpu",))
    given = [torch.empty(2, 4, tokens, heads, dtype=torch.bfloat16) for tokens in (1, 12, 12)]
    given.append(torch.empty(4 * heads, 8, dtype=torch.bfloat16))
    run = functools.partial(attention, how=how)
    assert outside(run, *given) == ([] if op is None else [("attention in front", "attention_form", op)])
    assert outside(run, *given, options=Options(fusions=("matmul_all_reduce",))) == []
    assert outside(run, *given, options=Options(strategy="library")) == [], "nothing is a call of ours then"
    prompt = [torch.empty(2, 4, 12, heads, dtype=torch.bfloat16) for _ in range(3)]
    wide = torch.empty(4 * heads * 12, 8, dtype=torch.bfloat16)
    assert outside(run, *prompt, wide) == [], "a prompt has no such call"


def test_a_maximum_of_everything_is_no_attention() -> None:
    assert outside(lambda a, b: all_reduce(a @ b).relu() / a.abs().amax(), A, B)[1:] == []


def test_nothing_is_said_of_attention_on_a_cpu() -> None:
    given = [torch.empty(2, 4, tokens, 24) for tokens in (1, 12, 12)]
    assert outside(functools.partial(attention, how="plain"), *given, torch.empty(96, 8)) == []


def test_nothing_is_asked_of_a_length_that_is_not_known() -> None:
    def weights(x: torch.Tensor) -> torch.Tensor:
        return x.nonzero().float()[None, None].softmax(-1)

    module = traced(weights, torch.ones(3, 2), dynamic=True)
    with assert_no_new_guards(module):
        assert cached_attention.left_alone(module.graph, ("cpu",)) == []
