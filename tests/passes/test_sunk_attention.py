"""Attention with a sink for each head, as GPT-OSS has it, becomes one call too, and nothing that only looks like it."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch

from ditron_inductor.passes.attention.softmax_algebra import Algebra
from ditron_inductor.passes.attention.sunk_attention import read_sunk
from ditron_inductor.task import schema
from ditron_inductor.task.nodes import CachedAttention
from tests.passes.graphs import graph_on
from tests.passes.test_cached_attention import (
    HKV,
    HQ,
    SCALE,
    B,
    D,
    S,
    Step,
    Tensors,
    check_bounds,
    check_form,
    decoded,
    graph_of,
    turned,
    written,
)

pytestmark = pytest.mark.usefixtures("group")

Scores = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Returns weights [B, HQ, 1, S] for scores of that shape and sinks [HQ]."""


def lowered(given: Tensors) -> torch.Tensor:
    """The mask [B, 1, 1, S] as transformers adds it."""
    return torch.where(given["shown"], 0.0, torch.finfo(torch.float32).min)[:, None, None]


def sinks_of(given: Tensors) -> torch.Tensor:
    return given["cos"][0, :HQ] * 2


def repeated(cache: torch.Tensor) -> torch.Tensor:
    return cache[:, :, None].expand(B, HKV, HQ // HKV, S, D).reshape(B, HQ, S, D)


def with_maximum(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """As transformers writes it."""
    both = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(B, -1, 1, -1)], -1)
    both = both - both.max(-1, keepdim=True).values
    return both.softmax(-1)[..., :-1]


def by_quotient(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    both = torch.cat([scores, sinks.view(HQ, 1, 1).expand(B, HQ, 1, 1)], 3).exp()
    return (both / both.sum(-1, keepdim=True))[..., :S]


def sunk(
    weights: Scores, mask: Callable[[Tensors], torch.Tensor] | None = lowered,
    sinks: Callable[[Tensors], torch.Tensor] = sinks_of, factor: float = 1.0,
) -> Step:  # fmt: skip
    """A decode step with sinks. factor: of the scores after the mask was added."""

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Tensors) -> torch.Tensor:
        angles = given["cos"][:, : D // 2], given["sin"][:, : D // 2]
        keys, values = written(turned(k, *angles), v, given)
        scores = turned(q, *angles) @ repeated(keys).transpose(2, 3) * SCALE
        if mask is not None:
            scores = scores + mask(given)
        return weights(scores * factor, sinks(given)) @ repeated(values)

    return step


TASK = CachedAttention(SCALE, "bias", appends=True, rotated=True, sinks=True)
FORMS: dict[str, tuple[Step, CachedAttention]] = {
    "transformers": (sunk(with_maximum), TASK),
    "a quotient": (sunk(by_quotient), TASK),
    "no mask": (sunk(with_maximum, None), CachedAttention(SCALE, "all", appends=True, rotated=True, sinks=True)),
    "a mask for all": (sunk(with_maximum, lambda given: lowered(given)[:1]), TASK),
    "sinks in another order": (sunk(with_maximum, sinks=lambda given: sinks_of(given).flip(0)), TASK),
}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.replace(" ", "_"))
def test_every_form(form: str) -> None:
    check_form(*FORMS[form])


def _to(caches: Callable[[torch.Tensor, torch.Tensor, Tensors], list[torch.Tensor]]) -> Step:
    """A decode step with sinks to keys and values [B, HKV, S, D], which are made of new ones."""

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Tensors) -> torch.Tensor:
        keys, values = map(repeated, caches(k, v, given))
        scores = q @ keys.transpose(2, 3) * SCALE + lowered(given)
        return with_maximum(scores, sinks_of(given)) @ values

    return step


def _tokens_first(k: torch.Tensor, v: torch.Tensor, given: Tensors) -> list[torch.Tensor]:
    for name, new in (("keys", k), ("values", v)):
        given[name].index_copy_(1, given["position"], new.transpose(1, 2))
    return [given[name].transpose(1, 2) for name in ("keys", "values")]


def _in_blocks(k: torch.Tensor, v: torch.Tensor, given: Tensors) -> list[torch.Tensor]:
    table = ((torch.arange(6) * 5 + given["position"]) % 6).view(B, 3)
    blocks = (given[name].view(6, 4, HKV, D) for name in ("keys", "values"))
    return [one[table].flatten(1, 2).transpose(1, 2) for one in blocks]


def test_where_keys_and_values_stand() -> None:
    check_form(_to(_tokens_first), CachedAttention(SCALE, "bias", appends=True, sinks=True), tokens_first=True)
    check_form(_to(_in_blocks), CachedAttention(SCALE, "bias", sinks=True, paged=True))


def _first_column(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    both = torch.cat([scores, sinks.view(1, HQ, 1, 1).expand(B, HQ, 1, 1)], -1)
    return both.softmax(-1)[..., 1:]


def _sinks_in_front(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    both = torch.cat([sinks.view(1, HQ, 1, 1).expand(B, HQ, 1, 1), scores], -1)
    return both.softmax(-1)[..., 1:]


def _of_sequences(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    both = torch.cat([scores, sinks[:B].view(B, 1, 1, 1).expand(B, HQ, 1, 1)], -1)
    return both.softmax(-1)[..., :-1]


def _crossed(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    across = sinks.view(HKV, HQ // HKV).t().reshape(1, HQ, 1, 1)
    both = torch.cat([scores, across.expand(B, HQ, 1, 1)], -1)
    return both.softmax(-1)[..., :-1]


def _scaled_together(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    both = torch.cat([scores, sinks.view(1, HQ, 1, 1).expand(B, HQ, 1, 1)], -1)
    return (both * 0.5).softmax(-1)[..., :-1]


def _flat(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Sinks of [1, B * HQ] heads."""
    both = torch.cat([scores.reshape(1, B * HQ, 1, S), sinks.repeat(B).view(1, B * HQ, 1, 1)], -1)
    return both.softmax(-1)[..., :-1].view(B, HQ, 1, S)


def _turned_over(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Sinks of sequences, where the dimension of heads would be."""
    both = torch.cat([scores.transpose(0, 1), sinks[:B].view(1, B, 1, 1).expand(HQ, B, 1, 1)], -1)
    return both.softmax(-1)[..., :-1].transpose(0, 1)


def _biased_heads(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """A bias of each head of each sequence."""
    bias = (scores[..., :1].detach() * 0 + sinks.view(1, HQ, 1, 1)).reshape(B * HQ, 1, 1, 1).expand(B * HQ, 1, 1, S)
    return with_maximum((scores.reshape(B * HQ, 1, 1, S) + bias.contiguous()).view(B, HQ, 1, S), sinks)


NEVER: dict[str, Step] = {
    "sinks of all rows": sunk(_flat),
    "sinks of sequences in place of heads": sunk(_turned_over),
    "a bias of each row": sunk(_biased_heads, None),
    "another column is left out": sunk(_first_column),
    "sinks in front": sunk(_sinks_in_front),
    "sinks of sequences": sunk(_of_sequences),
    "sinks of other heads": sunk(_crossed),
    "sinks that are scaled": sunk(_scaled_together),
    "a mask that is scaled": sunk(with_maximum, factor=0.5),
    "a mask for each head": sunk(with_maximum, lambda given: lowered(given).repeat(1, HQ, 1, 1) * sinks_of(given)[:, None, None]),
    "no sinks": sunk(lambda scores, sinks: scores.softmax(-1)),
}


@pytest.mark.parametrize("name", NEVER, ids=lambda name: name.replace(" ", "_"))
def test_it_must_not_fire(name: str) -> None:
    assert decoded(graph_of(NEVER[name])) == []


def test_the_bounds_of_a_bias() -> None:
    form, task = next(one for one in FORMS.values() if one[1].mask == "bias")
    module = graph_of(form)
    assert decoded(module) == [task]
    (call,) = module.graph.find_nodes(op="call_function", target=schema.overload(CachedAttention.kind))
    check_bounds(module, schema.operands_of(call)[3:6])


def test_reading_takes_no_longer_for_each_sum() -> None:
    """A product that is no attention, behind a long chain of sums: every node is read once, or a few times."""

    def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(24):
            x = x + torch.tanh(x)
        return torch.bmm(x, w)

    (bmm,) = graph_on(chain, (2, 4, 16), (2, 16, 8), device="cpu").graph.find_nodes(
        op="call_function", target=torch.ops.aten.bmm.default
    )
    with mock.patch.object(Algebra, "_read", autospec=True, side_effect=Algebra._read) as reads:
        assert read_sunk(bmm) is None
    assert 0 < reads.call_count < 200
