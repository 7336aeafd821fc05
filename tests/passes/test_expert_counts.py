"""The ends of experts, in the ways in which people count: each that is taken for a count of the ids is one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch.nn.functional import one_hot

from ditron_inductor.passes.graph import expert_rows
from ditron_inductor.passes.graph.expert_rows import Range, range_of
from tests.passes.graphs import compiled_graphs

E, K, T = 5, 2, 40
Ends = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A function of (the sorted ids, the ids)."""


def summed(counts: torch.Tensor) -> torch.Tensor:
    return counts.cumsum(0).to(torch.int32)


def added(ids: torch.Tensor) -> torch.Tensor:
    return torch.zeros(E, dtype=torch.int64).scatter_add(0, ids, torch.ones_like(ids))


COUNTS: dict[str, Ends] = {
    "histc": lambda ids, _: torch.histc(ids.float(), E, 0, E - 1).cumsum(0, dtype=torch.int32),
    "histc as TorchTitan calls it": lambda _, ids: summed(torch.histc(ids.float(), E, 0, E)),
    "histc in fp64": lambda _, ids: summed(torch.histc(ids.double(), E, 0, E - 1)),
    "one-hot": lambda _, ids: summed(one_hot(ids, E).sum(0)),
    "one-hot of the sorted": lambda ids, _: one_hot(ids, E).sum(0).cumsum(0, dtype=torch.int32),
    "equal": lambda _, ids: summed((torch.arange(E) == ids.unsqueeze(-1)).sum(0)),
    "scatter_add": lambda _, ids: added(ids).cumsum(0, dtype=torch.int32),
    "scatter_add of the sorted": lambda ids, _: summed(added(ids)),
    "searched": lambda ids, _: torch.searchsorted(ids, torch.arange(E), right=True).int(),
    "searched by side": lambda ids, _: torch.searchsorted(ids, torch.arange(E), side="right", out_int32=True),
    "searched for the next": lambda ids, _: torch.searchsorted(ids, torch.arange(1, E + 1), out_int32=True),
}
OTHERS: dict[str, Ends] = {
    "not sorted": lambda _, ids: torch.searchsorted(ids, torch.arange(E), right=True).int(),
    "where they begin": lambda ids, _: torch.searchsorted(ids, torch.arange(E), out_int32=True),
    "of two further": lambda ids, _: torch.searchsorted(ids, torch.arange(1, E + 1), right=True).int(),
    "of every second": lambda ids, _: torch.searchsorted(ids, torch.arange(0, 2 * E, 2), right=True).int(),
    "wider bins": lambda _, ids: summed(torch.histc(ids.float(), E, 0, E + 1)),
    "from 1": lambda _, ids: summed(torch.histc(ids.float(), E, 1, E)),
    "other numbers": lambda _, ids: summed((torch.arange(1, E + 1) == ids.unsqueeze(-1)).sum(0)),
    "other ids": lambda _, ids: summed(one_hot((ids + 1) % E, E).sum(0)),
    "counted twice": lambda _, ids: summed(torch.zeros(E, dtype=torch.int64).scatter_add(0, ids, ids * 0 + 2)),
    "added to others": lambda _, ids: summed(torch.ones(E, dtype=torch.int64).scatter_add(0, ids, torch.ones_like(ids))),
    "not summed up": lambda _, ids: one_hot(ids, E).sum(0).int(),
    "summed up in parts": lambda _, ids: one_hot(ids, E).view(2, -1, E).sum(1).cumsum(1)[0].int(),
}


def nodes_of(ends: Ends, by_index: bool = False, marked: bool = False) -> tuple[fx.GraphModule, fx.Node, fx.Node]:
    """(The graph, the node of the experts of the rows, that of their ends). marked: some ids are E."""

    def fn(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids = scores.topk(K)[1].reshape(-1)
        if marked:
            ids = torch.where(ids == 0, E, ids)
        order = ids.argsort()
        rows = (ids[order] if marked else ids.gather(0, order)) if by_index else ids.sort()[0]
        return rows.clone(), ends(rows, ids)

    (module,) = compiled_graphs(fn, torch.empty(T, E))
    (output,) = module.graph.find_nodes(op="output")
    rows, found = output.args[0]
    return module, rows.args[0] if rows.target is torch.ops.aten.clone.default else rows, found


@pytest.mark.parametrize("by_index", [False, True])
@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_the_ids(name: str, by_index: bool) -> None:
    module, rows, ends = nodes_of(COUNTS[name], by_index)
    assert expert_rows.are_experts_of_rows(rows, ends, E)
    generator = torch.Generator().manual_seed(0)
    found, counted = module(torch.randn(T, E, generator=generator))
    assert counted.tolist() == [int((found <= e).sum()) for e in range(E)]


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_count_of_them(name: str) -> None:
    _, rows, ends = nodes_of(OTHERS[name])
    assert not expert_rows.are_experts_of_rows(rows, ends, E)


@pytest.mark.parametrize("by_index", [False, True])
def test_ids_of_other_ranks_are_counted_nowhere(by_index: bool) -> None:
    """But for the bins of TorchTitan, of which the last one has two numbers."""
    for name in ("histc", "equal", "searched", "searched for the next"):
        _, rows, ends = nodes_of(COUNTS[name], by_index, marked=True)
        assert expert_rows.are_experts_of_rows(rows, ends, E), name
    _, rows, ends = nodes_of(COUNTS["histc as TorchTitan calls it"], by_index, marked=True)
    assert not expert_rows.are_experts_of_rows(rows, ends, E)


def test_rows_in_another_order_are_not_sorted() -> None:
    def descending(ids: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return summed(one_hot(ids, E).sum(0))

    def fn(scores: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ids = scores.topk(K)[1].reshape(-1)
        other = scores.reshape(-1)[: len(ids)].argsort()
        backwards = ids.argsort(descending=True)
        return ids[other], ids[backwards], ids.gather(0, other), descending(ids, ids)

    (module,) = compiled_graphs(fn, torch.empty(T, E))
    (output,) = module.graph.find_nodes(op="output")
    *rows, ends = output.args[0]
    assert not any(expert_rows.are_experts_of_rows(one, ends, E) for one in rows)


def test_what_stands_in_for_ids_of_other_ranks_is_in_a_range() -> None:
    def fn(ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        local = ids - 3
        return (
            torch.where((local < 0) | (local >= E), E, local),
            torch.where(torch.logical_or(local <= -1, local > E), E, local),
            torch.where(local >= E, E, local),
            torch.where((ids < 0) | (local >= E), E, local),
        )

    (module,) = compiled_graphs(fn, torch.empty(T, dtype=torch.int64))
    (output,) = module.graph.find_nodes(op="output")
    inf = float("inf")
    assert [range_of(one) for one in output.args[0]] == [Range(0, E), Range(0, E), Range(-inf, E), Range(-inf, E)]
