"""Where keys and values stand for cached_attention: in blocks, at positions of their own, with their tokens first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ditron_inductor.task import schema
from ditron_inductor.task.nodes import CachedAttention
from tests.passes.test_cached_attention import (
    AT,
    HKV,
    HQ,
    SCALE,
    B,
    D,
    S,
    Step,
    Tensors,
    attend,
    check_form,
    decoded,
    graph_of,
    seen,
    turned_whole,
)

pytestmark = pytest.mark.usefixtures("group")

P = 3
"""The tokens of a block."""
BLOCKS, COLUMNS = B * S // P, S // P
Tensor = torch.Tensor
Gather = Callable[[Tensor, Tensor], Tensor]
"""A function of a cache [B, HKV, S, D], whose memory has another form here, and the block table [B, COLUMNS]."""


def places(given: Tensors) -> Tensor:
    """The positions of the new tokens, one for each sequence."""
    return given["lengths"] - 1


def shown(given: Tensors) -> Tensor:
    return (torch.arange(S) <= places(given)[:, None])[:, None, None]


def table_of(given: Tensors) -> Tensor:
    """Each block once, in another order."""
    return ((torch.arange(BLOCKS) * 3 + given["position"]) % BLOCKS).view(B, COLUMNS)


def blocks(cache: Tensor) -> Tensor:
    return cache.view(BLOCKS, P, HKV, D)


def gathered(cache: Tensor, table: Tensor) -> Tensor:
    return blocks(cache)[table].flatten(1, 2).transpose(1, 2)


def gathered_heads_first(cache: Tensor, table: Tensor) -> Tensor:
    return cache.view(BLOCKS, HKV, P, D)[table].transpose(1, 2).reshape(B, HKV, S, D)


def gathered_joined(cache: Tensor, table: Tensor) -> Tensor:
    """Heads and their elements are one dimension."""
    return cache.view(BLOCKS, P, HKV * D)[table].view(B, S, HKV, D).transpose(1, 2)


def gathered_by_a_vector(cache: Tensor, table: Tensor) -> Tensor:
    return blocks(cache).index_select(0, table.flatten().int()).view(B, S, HKV, D).transpose(1, 2)


def gathered_by_tokens(cache: Tensor, table: Tensor) -> Tensor:
    """As if each block had one token."""
    slots = table[:, :, None] * P + torch.arange(P)
    return cache.view(-1, HKV, D)[slots.view(B, S)].transpose(1, 2)


def gathered_and_repeated(cache: Tensor, table: Tensor) -> Tensor:
    return gathered(cache, table)[:, :, None].expand(B, HKV, HQ // HKV, S, D).reshape(B, HQ, S, D)


PAGED: list[Gather] = [
    gathered,
    gathered_heads_first,
    gathered_joined,
    gathered_by_a_vector,
    gathered_by_tokens,
    gathered_and_repeated,
]


def reading(gather: Gather, other: Gather | None = None) -> Step:
    """Attention to keys and values that are gathered so."""

    def form(q: Tensor, k: Tensor, v: Tensor, given: Tensors) -> Tensor:
        table = table_of(given)
        keys, values = gather(given["keys"], table), (other or gather)(given["values"], table)
        return attend(turned_whole(q, given["cos"], given["sin"]), keys, values, shown(given))

    return form


@pytest.mark.parametrize("gather", PAGED, ids=lambda gather: gather.__name__)
def test_blocks_are_read_where_they_are(gather: Gather) -> None:
    check_form(reading(gather), CachedAttention(SCALE, "lengths", rotated=True, added=1, paged=True))


def test_blocks_are_not_copied() -> None:
    module = graph_of(reading(gathered))
    assert len(decoded(module)) == 1
    aten = torch.ops.aten
    assert not module.graph.find_nodes(op="call_function", target=aten.index.Tensor)
    (call,) = module.graph.find_nodes(op="call_function", target=schema.overload(CachedAttention.kind))
    _, keys, values, table, *_ = schema.operands_of(call)
    for cache in (keys, values):
        assert cache.target is aten.permute.default and tuple(cache.meta["val"].shape) == (BLOCKS, HKV, P, D)
        assert cache.args[0].target is aten.reshape.default and cache.args[0].args[0].op == "placeholder"
    assert tuple(table.meta["val"].shape) == (B, COLUMNS)


def written_in_blocks(q: Tensor, k: Tensor, v: Tensor, given: Tensors) -> Tensor:
    """The graph writes them, because two sequences might have a block in common."""
    table, at = table_of(given), places(given)
    caches = []
    for name, new in (("keys", turned_whole(k, given["cos"], given["sin"])), ("values", v)):
        blocks(given[name])[table[torch.arange(B), at // P], at % P] = new[:, :, 0]
        caches.append(gathered(given[name], table))
    return attend(turned_whole(q, given["cos"], given["sin"]), *caches, shown(given))


def test_blocks_are_written_by_the_graph() -> None:
    check_form(written_in_blocks, CachedAttention(SCALE, "lengths", rotated=True, added=1, paged=True))


def test_a_table_is_in_rows() -> None:
    """The kernel loads it so."""

    def across(cache: Tensor, table: Tensor) -> Tensor:
        return gathered(cache, table.view(COLUMNS, B).t())

    module = graph_of(reading(across))
    assert decoded(module)[0].paged
    (call,) = module.graph.find_nodes(op="call_function", target=schema.overload(CachedAttention.kind))
    assert schema.operands_of(call)[3].meta["val"].is_contiguous()
    check_form(reading(across), CachedAttention(SCALE, "lengths", rotated=True, added=1, paged=True))


def interleaved(cache: Tensor, table: Tensor) -> Tensor:
    """The tokens of a block do not follow each other."""
    return blocks(cache)[table].transpose(1, 2).reshape(B, S, HKV, D).transpose(1, 2)


def across(cache: Tensor, table: Tensor) -> Tensor:
    """The sequences are not the rows of the table."""
    return blocks(cache)[table.view(COLUMNS, B)].transpose(0, 1).flatten(1, 2).transpose(1, 2)


def of_other_blocks(cache: Tensor, table: Tensor) -> Tensor:
    return gathered(cache, (table + 1) % BLOCKS)


def copied(cache: Tensor, table: Tensor) -> Tensor:
    """To be read where they are, the blocks would have to be copied."""
    rows = cache.view(HKV * D, BLOCKS * P).t()
    return rows.view(BLOCKS, P, HKV * D)[table].reshape(B, S, HKV, D).transpose(1, 2)


def computed(cache: Tensor, table: Tensor) -> Tensor:
    """Nobody needs other blocks than those that are gathered."""
    return gathered(cache * 0.5, table)


def rounded(cache: Tensor, table: Tensor) -> Tensor:
    return gathered(cache.bfloat16(), table).float()


@pytest.mark.parametrize(
    "other", [interleaved, across, of_other_blocks, gathered_by_tokens], ids=lambda form: form.__name__
)
def test_values_in_another_order_are_gathered_by_the_graph(other: Gather) -> None:
    check_form(reading(gathered, other), CachedAttention(SCALE, "lengths", rotated=True, added=1))


@pytest.mark.parametrize("gather", [interleaved, across, copied, computed, rounded], ids=lambda form: form.__name__)
def test_what_is_no_cache_in_blocks_is_gathered_by_the_graph(gather: Gather) -> None:
    check_form(reading(gather), CachedAttention(SCALE, "lengths", rotated=True, added=1))


def one_position(q: Tensor, k: Tensor, v: Tensor, given: Tensors) -> Tensor:
    """In caches [B, S, HKV, D]."""
    for name, new in (("keys", k), ("values", v)):
        given[name].index_copy_(1, given["position"], new.transpose(1, 2))
    return attend(q, given["keys"].transpose(1, 2), given["values"].transpose(1, 2), seen(given))


def own_positions(q: Tensor, k: Tensor, v: Tensor, given: Tensors) -> Tensor:
    for name, new in (("keys", k), ("values", v)):
        given[name][torch.arange(B), :, places(given)] = new[:, :, 0]
    return attend(q, given["keys"], given["values"], shown(given))


def own_positions_tokens_first(q: Tensor, k: Tensor, v: Tensor, given: Tensors) -> Tensor:
    """By columns of indices, and a mask from outside."""
    turned = turned_whole(k, given["cos"], given["sin"]).transpose(1, 2)
    for name, new in (("keys", turned), ("values", v.transpose(1, 2))):
        given[name][torch.arange(B)[:, None], places(given)[:, None]] = new
    caches = given["keys"].transpose(1, 2), given["values"].transpose(1, 2)
    return attend(turned_whole(q, given["cos"], given["sin"]), *caches, given["shown"][:, None, None])


WRITES: list[tuple[Step, bool, str, bool]] = [
    (one_position, True, "lengths", False),
    (own_positions, False, "lengths", False),
    (own_positions_tokens_first, True, "given", True),
]


@pytest.mark.parametrize("form, tokens_first, mask, rotated", WRITES, ids=lambda one: getattr(one, "__name__", ""))
def test_new_tokens_are_written_by_the_call(form: Step, tokens_first: bool, mask: str, rotated: bool) -> None:
    check_form(form, CachedAttention(SCALE, mask, appends=True, rotated=rotated), tokens_first)


def at(index: Callable[[Tensors], tuple[object, ...]], value: Callable[[Tensor], Tensor]) -> Step:
    """Both caches are written there."""

    def form(q: Tensor, k: Tensor, v: Tensor, given: Tensors) -> Tensor:
        for name, new in (("keys", k), ("values", v)):
            given[name][index(given)] = value(new)
        return attend(q, given["keys"], given["values"], None)

    return form


def swapped(new: Tensor) -> Tensor:
    return new[:, :, 0].flip(0)


ELSEWHERE: dict[str, Step] = {
    "other sequences": at(lambda given: (1 - torch.arange(B), slice(None), places(given)), lambda new: new[:, :, 0]),
    "one sequence": at(lambda given: ((given["position"] - AT).expand(B), slice(None), places(given)), swapped),
    "heads": at(lambda given: (slice(None), torch.arange(HKV), places(given)), lambda new: new[:, :, 0]),
    "every place for each": at(
        lambda given: (torch.arange(B)[:, None], slice(None), places(given)[None]), lambda new: new[:, None, :, 0]
    ),
    "places of whole numbers": at(
        lambda given: (torch.arange(B), slice(None), places(given).int()), lambda new: new[:, :, 0]
    ),
}


@pytest.mark.parametrize("name", ELSEWHERE, ids=lambda name: name.replace(" ", "_"))
def test_what_is_written_elsewhere_is_written_by_the_graph(name: str) -> None:
    check_form(ELSEWHERE[name], CachedAttention(SCALE, "all"))


def _values_elsewhere(q: Tensor, k: Tensor, v: Tensor, given: Tensors) -> Tensor:
    for name, new, place in (("keys", k, places(given)), ("values", v, places(given).flip(0))):
        given[name][torch.arange(B), :, place] = new[:, :, 0]
    return attend(q, given["keys"], given["values"], None)


def _other_lengths(q: Tensor, k: Tensor, v: Tensor, given: Tensors) -> Tensor:
    for name, new in (("keys", k), ("values", v)):
        given[name][torch.arange(B), :, places(given)] = new[:, :, 0]
    mask = (torch.arange(S) <= places(given).flip(0)[:, None])[:, None, None]
    return attend(q, given["keys"], given["values"], mask)


def _no_limit(q: Tensor, k: Tensor, v: Tensor, given: Tensors) -> Tensor:
    """The largest number stands for no limit."""
    for name, new in (("keys", k), ("values", v)):
        given[name][torch.arange(B), :, places(given)] = new[:, :, 0]
    lengths = torch.where(places(given) >= 0, torch.iinfo(torch.int64).max, 0)
    return attend(q, given["keys"], given["values"], (torch.arange(S) <= lengths[:, None])[:, None, None])


def test_lengths_without_a_limit() -> None:
    check_form(_no_limit, CachedAttention(SCALE, "lengths", added=1))


def test_positions_and_lengths_of_other_sequences() -> None:
    check_form(_values_elsewhere, CachedAttention(SCALE, "all"))
    check_form(_other_lengths, CachedAttention(SCALE, "lengths", added=1))
