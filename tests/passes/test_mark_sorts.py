"""mark_sorts: what a backward knows of the indices that the forward sorted."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.graph.sorts import QUOTIENT, SORTED, sorted_slots
from ditron_inductor.passes.normalize.mark_sorts import mark_sorts
from tests.passes.graphs import compiled_graphs
from tests.passes.test_combine_experts import OPERANDS, scattered

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("group")


def test_inputs_are_known_by_their_marks() -> None:
    graph = fx.Graph()
    order, other, rows = (graph.placeholder(name) for name in ("order", "other", "rows"))
    divided = graph.call_function(aten.div.Tensor_mode, (order, 4), {"rounding_mode": "floor"})
    assert sorted_slots(rows) is None and sorted_slots(divided) is None
    order.meta[SORTED], other.meta[SORTED] = "order", "other"
    assert sorted_slots(divided) == (order, 4)
    rows.meta[QUOTIENT] = "rows", "other", 2
    assert sorted_slots(rows) == (other, 2)
    rows.meta[QUOTIENT] = "rows", "getitem_1", 2
    assert sorted_slots(rows) is None, "the indices are no input of this graph"
    # Under another name it could be taken from Inductor's cache for an input that is no index of a sort.
    rows.meta[QUOTIENT], order.meta[SORTED] = ("div", "other", 2), "getitem"
    assert sorted_slots(rows) is None and sorted_slots(divided) is None


@pytest.mark.parametrize(("mode", "k"), [("trunc", 4), ("floor", 0), (None, 4)])
def test_other_quotients_are_not_of_slots(mode: str | None, k: int) -> None:
    graph = fx.Graph()
    order = graph.placeholder("order")
    order.meta[SORTED] = "order"
    found = sorted_slots(graph.call_function(aten.div.Tensor_mode, (order, k), {"rounding_mode": mode}))
    assert found == ((order, k) if mode and k else None)


def test_sorts_of_a_joint_graph_are_marked() -> None:
    (module,) = compiled_graphs(scattered, *OPERANDS)
    assert mark_sorts(module.graph, options=Options()) == 2
    (order,) = [node for node in module.graph.nodes if SORTED in node.meta]
    (rows,) = [node for node in module.graph.nodes if QUOTIENT in node.meta]
    assert rows.meta[QUOTIENT] == (rows.name, order.name, 8) and order.meta[SORTED] == order.name
    assert order.name.startswith("ditron_sorted_") and rows.name == f"ditron_quotient_8_of_{order.name}_"
