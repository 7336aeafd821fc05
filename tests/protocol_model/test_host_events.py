"""What the host does in the model of the protocol: growth, meetings, and ranks that are in two groups."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.protocol_model import Call, Capture, Grow, Meet, Protection, Reset, Scenario, explore
from tests.protocol_model.groups import Member, explore_groups
from tests.protocol_model.test_protocol_model import GATHER, PUSH, REDUCE, SCATTER, same, twice_replayed

ELSEWHERE = Capture(0)
"""A call of no concern here."""

GROWING = (Call(GATHER, "A"), Call(PUSH, "A"), Grow(), Call(SCATTER, "B"), Call(GATHER, "A"))


@pytest.mark.parametrize(("world", "programs"), [(2, 1), (2, 2), (3, 1)])
def test_growth_between_calls(world: int, programs: int) -> None:
    found = explore(replace(same(world, *GROWING), programs=programs))
    assert found.violation is None, found.trace
    assert found.endings == {(None,) * world}


def test_growth_twice_and_in_the_finest_grain() -> None:
    found = explore(replace(same(2, Grow(), Call(GATHER, "A"), *GROWING), fine=True))
    assert found.violation is None, found.trace


def test_growth_after_a_failure() -> None:
    """A rank that has failed raises where it would grow; behind the reset all of them do."""
    call = Call(GATHER, "A", may_fail=True)
    scripts = (
        (call, Grow(), Reset(), Grow(), Call(GATHER, "B")),
        (ELSEWHERE, ELSEWHERE, Reset(), Grow(), Call(GATHER, "B")),
    )
    found = explore(Scenario(scripts=scripts))
    assert found.violation is None, found.trace
    assert found.endings == {(("timeout", 0, 1), None)}


MEETING = (Meet("A"), Call(GATHER, "A"), Meet("B"), Call(PUSH, "B"), Call(GATHER, "A"), Call(SCATTER, "B"))


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_meet_agree(world: int) -> None:
    """Whoever waits long enough closes a meeting, at any moment: all fuse a site then, or none does."""
    found = explore(same(world, *MEETING))
    assert found.violation is None, found.trace


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_without_a_node_or_that_does_not_come(world: int) -> None:
    others = (Meet("A"), Call(REDUCE, "A"), Call(GATHER, "B"))
    for alone in ((Meet("A", False), Call(REDUCE, "A")), (ELSEWHERE, ELSEWHERE)):
        found = explore(Scenario(scripts=((*alone, others[-1]), *(others,) * (world - 1))))
        assert found.violation is None, found.trace


BROKEN = [
    (Protection.GROWTH_BARRIER, same(2, *GROWING), "no progress"),
    (Protection.GROWTH_BARRIER, same(3, *GROWING), "no progress"),
    (Protection.ONE_VERDICT, same(2, *MEETING), "no progress"),
    (Protection.ONE_VERDICT, same(3, *MEETING), "no progress"),
]


@pytest.mark.parametrize("fine", [False, True], ids=["groups", "fine"])
@pytest.mark.parametrize(("missing", "scenario", "text"), BROKEN, ids=lambda value: getattr(value, "name", ""))
def test_breaks_without(missing: Protection, scenario: Scenario, text: str, fine: bool) -> None:
    found = explore(replace(scenario, fine=fine), frozenset({missing}))
    assert found.violation is not None and text in found.violation
    assert found.trace


def two_groups(*kinds: str) -> tuple[Member, Member]:
    """Processes 0 and 1, and 1 and 2, each with calls of these kinds."""
    calls = [Call(kind, "A") for kind in kinds]
    return Member(same(2, *calls), (0, 1)), Member(same(2, *calls), (1, 2))


def test_two_groups_of_one_rank_in_one_order() -> None:
    for order in ((0, 1, 0, 1, 0, 1), (1, 1, 0, 0, 1, 0)):
        first, second = [0] * 3, [1] * 3
        assert explore_groups(two_groups(GATHER, SCATTER, GATHER), (first, order, second)) is None


def test_two_groups_of_the_same_ranks() -> None:
    calls = [Call(GATHER, "A"), Call(REDUCE, "B")]
    groups = Member(same(2, *calls), (0, 1)), Member(same(2, *calls), (1, 0))
    assert explore_groups(groups, ((0, 1, 1, 0),) * 2) is None
    violation = explore_groups(groups, ((0, 1, 1, 0), (1, 0, 0, 1)))
    assert violation is not None and "no progress" in violation


def test_a_captured_graph_keeps_the_ring_that_calls_have_left() -> None:
    """Rings have words of their own, as groups have: a graph on the old one, and calls on the new one."""
    ring = Scenario(scripts=(twice_replayed(GATHER, REDUCE),) * 2)
    grown = same(2, *[Call(SCATTER, "A")] * 2)
    order = (0, 0, 1, 0, 0, 1, 0)
    assert explore_groups((Member(ring, (0, 1)), Member(grown, (0, 1))), (order,) * 2) is None
