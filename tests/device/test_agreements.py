"""What goes on for the groups of a graph whose collectives have the sizes of before."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from ditron_inductor.device import agreements
from ditron_inductor.device.agreements import Agreement, Agreements, Form
from ditron_inductor.device.facts import GraphFacts, GroupFacts, LaunchFacts

WIRE, KIND = "all_reduce sum float32", "matmul_all_reduce"


def group(name: str, rows: int | None, columns: int = 8) -> GroupFacts:
    numel = None if rows is None else rows * columns
    launch = LaunchFacts(WIRE, numel, shape=(rows, columns), kind=KIND)
    return GroupFacts(name, 2, (launch,), (launch,))


def graph(replica: int | None, across: int = 16, columns: int = 8) -> GraphFacts:
    """A graph with one reduction of a replica's tokens, and one across replicas."""
    return GraphFacts((group("replica", replica, columns), group("across", across)))


def fused(leader: str = "") -> tuple[Form, ...]:
    return (Form(WIRE, KIND, leader=leader),)


def agreed(leader: str = "", **more: object) -> Agreement:
    return Agreement(forms={"replica": fused(leader), "across": fused()}, **more)  # type: ignore[arg-type]


@pytest.fixture
def known() -> Iterator[Agreements]:
    class ProcessGroup:
        pass

    found = {name: ProcessGroup() for name in ("replica", "across")}
    here = mock.patch.object(agreements.groups, "find", found.__getitem__)
    with here, mock.patch.object(agreements.groups, "resolve", return_value=mock.Mock(rank=0)):
        yield Agreements()


def going_on(known: Agreements, facts: GraphFacts) -> set[str]:
    return set(known.kept(facts))


def test_groups_of_the_sizes_of_before_may_go_on(known: Agreements) -> None:
    assert known.kept(graph(4)) == {}
    known.keep(graph(4), agreed())
    assert known.kept(graph(6))["across"].forms == {"across": fused()} and going_on(known, graph(6)) == {"across"}
    assert going_on(known, graph(6, across=32)) == set()


def test_as_many_elements_of_another_shape_do_not(known: Agreements) -> None:
    known.keep(graph(4), agreed())
    assert going_on(known, graph(8, columns=4)) == {"across"}


def test_it_has_to_be_the_same_for_all_sizes(known: Agreements) -> None:
    known.keep(graph(4), agreed())
    known.keep(graph(6), agreed("another"))
    assert going_on(known, graph(8)) == {"across"}
    known.keep(graph(8), Agreement(forms={"replica": fused(), "across": fused("another")}))
    assert going_on(known, graph(10)) == set()


def test_nothing_goes_on_where_a_graph_ran_plain(known: Agreements) -> None:
    known.keep(graph(4), agreed())
    known.keep(graph(6), Agreement(plain="a reason"))
    assert going_on(known, graph(8)) == set()


def test_nothing_goes_on_that_the_graph_cannot_follow(known: Agreements) -> None:
    known.keep(graph(4), agreed(moved={"across": ("a factor", "of another graph")}))
    assert going_on(known, graph(6)) == set()


def test_a_symbol_is_of_any_size(known: Agreements) -> None:
    known.keep(graph(None), agreed(sizes={"replica": (None,)}, shapes={"replica": (None,)}))
    assert going_on(known, graph(6)) == {"replica", "across"}
