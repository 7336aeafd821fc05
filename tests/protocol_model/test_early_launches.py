"""Launches that begin before the launch in front of them has ended: with their waits the rules hold as without overlap,
and the exploration finds what goes wrong where one does not wait, waits too late, or lets others begin too soon.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import pytest

from tests.protocol_model import Call, Capture, Event, Protection, Raised, Reset, Scenario, explore
from tests.protocol_model.launch import OVERLAPPING
from tests.protocol_model.machine import Machine
from tests.protocol_model.state import State
from tests.protocol_model.test_protocol_model import GATHER, SCATTER, check_breaks_without, in_both_grains, same

P = Protection
LEADS, FOLLOWS, APART = (Call(f"in_band:{overlap}", "A") for overlap in ("leads", "follows", "apart"))
PRODUCT, PRODUCT_LEADS, INPUTS = Call("product:follows", ""), Call("product:leads", ""), Call("inputs:follows", "")
CACHED = Call("cached:leads", "")
LAYER = (PRODUCT, CACHED, PRODUCT, FOLLOWS, PRODUCT, PRODUCT, FOLLOWS)
"""A layer of a decode step, behind its first norm."""

UPDATE_LEADS, UPDATE_APART = Call("update:leads", ""), Call("update:apart", "")


def early(world: int, *script: Event, room: int = 3, parts: int = 1) -> Scenario:
    """Every rank runs `script`, with room for so many programs. parts: those of a row and of the weights."""
    return replace(same(world, *script), programs=room, tiles=parts)


def failing(*script: Call) -> tuple[Call, ...]:
    return tuple(call._replace(may_fail=True) for call in script)


def in_slot_1(*script: Call) -> tuple[Call, ...]:
    """As in a graph that was captured when this was the slot of its only site."""
    return tuple(call._replace(slot=1) for call in script)


RING = (LEADS, *[FOLLOWS] * 6)
"""More uses in band than there are areas, in two slots."""

HEALTHY = {
    **{f"ring-w2-room{room}": early(2, *RING, room=room) for room in (2, 3, 6)},
    "epochs-wrap-w2": replace(early(2, *RING), start=6, modulus=8),
    "in-band-w3-room2": early(3, LEADS, FOLLOWS, room=2),
    "in-band-w3-room2-more": early(3, LEADS, FOLLOWS, FOLLOWS, room=2),
    "layers-w2": early(2, PRODUCT_LEADS, LEADS, *LAYER, *LAYER, room=4, parts=2),
    "inputs-w2": early(2, LEADS, INPUTS, FOLLOWS, INPUTS, PRODUCT, FOLLOWS, room=6, parts=2),
    "among-slots-w2": early(2, Call(GATHER, "B"), LEADS, FOLLOWS, PRODUCT, FOLLOWS, Call(SCATTER, "B"), *[FOLLOWS] * 2),
    "replayed-w2": early(
        2, Call(GATHER, "B"), Capture(1), *in_slot_1(LEADS, PRODUCT, FOLLOWS) * 2, Call(GATHER, "B"), FOLLOWS
    ),
    # Which launches overlap each rank decides for itself.
    "on-one-rank-w2": Scenario(scripts=(RING, (APART,) * len(RING)), programs=3, tiles=1),
    "fine-products": replace(early(1, PRODUCT_LEADS, PRODUCT, INPUTS, PRODUCT, room=4, parts=2), fine=True),
    "fine-product-w2": replace(early(2, LEADS, PRODUCT, room=2), fine=True),
    "fine-in-band-w2": replace(early(2, LEADS, FOLLOWS, room=2), fine=True),
}
MANY_STATES = ("in-band-w3-room2", "in-band-w3-room2-more", "fine-product-w2", "fine-in-band-w2")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.all_cases] * (name in MANY_STATES)) for name in HEALTHY]
)
def test_holds(name: str) -> None:
    found = explore(HEALTHY[name])
    assert found.violation is None, found.trace
    assert found.endings == {(None,) * HEALTHY[name].world}


def test_three_areas_in_band_are_enough_for_launches_that_overlap() -> None:
    """As for launches that do not, because what begins early touches no area before all in front of it has ended."""
    for areas in (2, 3):
        found = explore(replace(early(2, LEADS, *[FOLLOWS] * 4), areas=areas))
        assert ("in band of rank" in (found.violation or "")) == (areas == 2), found.violation


def reached(machine: Machine, ranks: Collection[int]) -> Iterator[State]:
    """Every state to which steps of `ranks` alone lead, while the others have not started."""
    first = machine.initial()
    seen, stack = {first}, [first]
    while stack:
        state = stack.pop()
        yield state
        for _, after in machine.steps(state, ranks)[0]:
            if after not in seen:
                seen.add(after)
                stack.append(after)


def has_passed_its_wait(machine: Machine, state: State, me: int) -> bool:
    """Whether a program of `me` has, in a launch with another one in flight in front of it."""
    for place, launch in enumerate(state[me].behind):
        call = machine.scenario.scripts[me][state[me].event + place + 1]
        assert isinstance(call, Call)
        items = machine.programs.items[call.kind, me]
        if launch.ended or any(program.op > items[program.item].index(("last",)) for program in launch.programs):
            return True
    return False


@pytest.mark.parametrize("middle", [FOLLOWS, PRODUCT, INPUTS], ids=lambda call: call.kind)
def test_no_launch_passes_its_wait_before_all_in_front_of_it_have_ended(middle: Call) -> None:
    """The third launch waits for the second one only, and does not pass before the first one has ended."""
    machine = Machine(early(2, LEADS, middle, FOLLOWS, room=5))
    in_flight = set()
    for state in reached(machine, (0, 1)):
        for me, rank in enumerate(state):
            in_flight.add(len(rank.behind))
            assert not has_passed_its_wait(machine, state, me)
    assert in_flight == {0, 1, 2}


def test_a_rank_that_starts_late() -> None:
    """Until it comes, launches of the other rank begin behind the first one, and nothing of theirs is seen."""
    machine = Machine(early(2, LEADS, FOLLOWS, PRODUCT, FOLLOWS, room=6))
    first, _ = machine.initial()
    ends = [state for state in reached(machine, [0]) if not machine.steps(state, [0])[0]]
    assert ends
    for rank, late in ends:
        assert rank.event == 0 and len(rank.behind) == 3
        assert {data for data in late.band if data is not None} == {("A", 0, 0)}
        assert {sign.epoch for sign in late.signs} == {0, 1}
        assert rank.memory == first.memory


@pytest.mark.parametrize("world", [2, 3])
def test_rank_that_never_arrives(world: int) -> None:
    script = failing(LEADS, FOLLOWS, PRODUCT, FOLLOWS)
    found = explore(Scenario(scripts=((), *(script,) * (world - 1)), programs=3, tiles=1))
    assert found.violation is None, found.trace
    assert found.endings == {(None, *(("timeout", 0, 0),) * (world - 1))}


def test_rank_that_dies_at_any_moment() -> None:
    found = explore(replace(early(2, *failing(LEADS, FOLLOWS)), mortal=0))
    assert found.violation is None, found.trace
    assert found.endings == {(None, None), (None, ("timeout", 0, 0)), (None, ("timeout", 1, 0))}


def test_rank_that_runs_another_site() -> None:
    """No rank takes data of the other site, and at least one names it: a program that waits may fail before the one
    that signs has looked whether the workspace is healthy.
    """
    mine = failing(LEADS, FOLLOWS)
    found = explore(Scenario(scripts=(mine, tuple(call._replace(site="B") for call in mine)), programs=3, tiles=1))
    assert found.violation is None, found.trace
    for ending in found.endings:
        assert all(record is not None and record[1] == 0 for record in ending)
        assert any(record is not None and record[0] == "diverged" for record in ending)


@pytest.mark.parametrize("impatient", [False, True], ids=["patient", "impatient"])
def test_failure_half_way_then_reset(impatient: bool) -> None:
    """What had begun before the launch in front of it failed does nothing, and after the reset all is well."""
    script, healthy = failing(LEADS, FOLLOWS), (Reset(), LEADS, FOLLOWS)
    scripts = ((*script, *healthy), (script[0], Raised(), *healthy))
    found = explore(Scenario(scripts=scripts, programs=3, tiles=1, impatient=impatient))
    assert found.violation is None, found.trace
    assert found.endings and all(any(ending) for ending in found.endings)


def test_waits_that_give_up_early() -> None:
    found = explore(replace(early(2, *failing(LEADS, PRODUCT, FOLLOWS), Reset(), LEADS, room=2), impatient=True))
    assert found.violation is None, found.trace
    assert (None, None) in found.endings and any(any(ending) for ending in found.endings)


# The last launches read weights before they wait. The first one writes them.
COMPLETE = [
    (UPDATE_APART, PRODUCT, FOLLOWS),
    (UPDATE_LEADS, LEADS, PRODUCT, FOLLOWS),
    (UPDATE_LEADS, LEADS, INPUTS, PRODUCT, FOLLOWS),
    (UPDATE_LEADS, FOLLOWS, FOLLOWS),
]
INCOMPLETE = [
    (UPDATE_LEADS, PRODUCT),
    (UPDATE_LEADS, FOLLOWS, PRODUCT),
    (UPDATE_LEADS, FOLLOWS, FOLLOWS, PRODUCT),
]


@pytest.mark.parametrize("script", [*COMPLETE, *INCOMPLETE], ids=lambda script: "-".join(call.kind for call in script))
def test_weights_are_complete_behind_an_ordinary_launch(script: tuple[Call, ...]) -> None:
    """Launches that all let the next one begin may run at once, and the first of them may write what the last one reads
    ahead. So the pass has a norm in front, whose launch is ordinary.
    """
    found = explore(early(2, *script, room=8, parts=2))
    if script in COMPLETE:
        assert found.violation is None, found.trace
    else:
        assert "reads the weights" in (found.violation or "")


# Without the protection, the exploration of the scenario must find a violation that says the text.
BROKEN = [
    (P.WAIT_FOR_LAST, early(2, LEADS, FOLLOWS), "reads the row of calls (-1,)"),
    (P.WAIT_FOR_LAST, early(2, PRODUCT_LEADS, PRODUCT, parts=2), "reads the row of calls (0, -1)"),
    (P.WAIT_FOR_LAST, early(3, *RING), "reads the row"),
    (P.EVERY_PROGRAM_WAITS, early(2, LEADS, FOLLOWS), "reads the row"),
    # The third launch waits for the second one, which has ended while the first one has not.
    (P.EVERY_LAUNCH_WAITS, early(2, LEADS, INPUTS, FOLLOWS), "call 2: reads the row of calls (-1,) and not of 0"),
    (P.EVERY_LAUNCH_WAITS, early(2, PRODUCT_LEADS, INPUTS, PRODUCT), "call 2: reads the row"),
    # A number of the use in band that is too old: in other words, the launch goes into the area of the one in front.
    (P.WORDS_BEHIND_WAIT, early(2, LEADS, FOLLOWS), "overwrites ('A', 0, "),
    (P.WORDS_BEHIND_WAIT, early(2, LEADS, FOLLOWS, room=6), "call 1 of A: reads ('A', 0, "),
    (P.WORDS_BEHIND_WAIT, early(2, LEADS, FOLLOWS, room=2), "no progress"),
    (P.WORDS_BEHIND_WAIT, replace(early(2, *RING), start=6, modulus=8), "in band of rank"),
    (P.ROW_BEHIND_WAIT, early(2, LEADS, PRODUCT, parts=2), "reads the row of calls (-1, -1)"),
    (P.ROW_BEHIND_WAIT, early(2, LEADS, FOLLOWS), "reads the row"),
    # Programs that wait have all the room, and those for which they wait have none.
    (P.ALL_BEGUN, early(2, LEADS, FOLLOWS), "no progress"),
    (P.ALL_BEGUN, early(2, LEADS, PRODUCT, room=2, parts=2), "no progress"),
]


@in_both_grains(BROKEN)
def test_breaks_without(missing: Protection, scenario: Scenario, text: str, fine: bool) -> None:
    check_breaks_without(missing, scenario, text, fine)


def test_every_protection_of_them_is_needed() -> None:
    assert {missing for missing, _, _ in BROKEN} == OVERLAPPING
