"""The signal protocol, explored exhaustively: it holds with all of its rules, and breaks without any one of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.cases import rare
from tests.protocol_model import (
    Call,
    Capture,
    Ending,
    Event,
    Protection,
    Raised,
    Reset,
    Scenario,
    explore,
)
from tests.protocol_model.launch import OVERLAPPING

GATHER, SCATTER, REDUCE, PUSH = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "push"
KINDS = [GATHER, SCATTER, REDUCE, PUSH]
ONE_SHOT, TWO_SHOTS, IN_SLICES, IN_BAND = "one_shot", "two_shots", "in_slices", "in_band"
SHOTS = (ONE_SHOT, TWO_SHOTS, IN_SLICES, IN_BAND)
PRODUCT, FEW_ROWS = "matmul_all_gather", "few_rows"
"""Those of small products, whose programs send, wait and add in one work item."""
DECODE, ATTENTION, CAUSAL = "flash_decode", "all_gather_attention", "causal_attention"
TO_HEADS, TO_ROWS = "matmul_all_to_all", "all_to_all_matmul"
EXPERTS = ["reduced_experts", "scattered_experts"]
PULL_GATHER, PULL_SCATTER, PULL_REDUCE = "pull_gather", "pull_scatter", "pull_reduce"
P = Protection


def same(world: int, *script: Event) -> Scenario:
    """Every rank runs `script`."""
    return Scenario(scripts=(script,) * world)


def twice_replayed(first: str, second: str, captures: tuple[int, ...] = (1,)) -> tuple[Event, ...]:
    """Eager, then a graph captured at slot 1 and replayed twice, so that slot 1 is used twice in a row, then eager."""
    replay = Call(second, "B", slot=1, baked=1)
    return (Call(first, "A"), *map(Capture, captures), replay, replay, Call(first, "A"))


def captured_alone(world: int) -> Scenario:
    """The last rank captures its graph twice."""
    once, twice = (twice_replayed(GATHER, REDUCE, captures) for captures in ((1, 0), (1, 1)))
    return Scenario(scripts=(*(once,) * (world - 1), twice))


def long_graph(first: str, second: str) -> tuple[Event, ...]:
    """A graph of two sites on slots 1 and 0, replayed twice between eager calls."""
    graph = (Call(first, "A", slot=1, baked=1), Call(second, "B", slot=0, baked=2))
    return (Call(second, "B"), Capture(2), *graph, *graph, Call(first, "A"))


def fails_then_resets(first: str, second: str, world: int) -> Scenario:
    """The last rank raises before its second call; the others run on into their time limits; then all reset."""
    failing = (Call(first, "A", may_fail=True), Call(second, "B", may_fail=True), Call(first, "A", may_fail=True))
    healthy = (Reset(), Call(first, "A"), Call(second, "B"), Call(first, "A"))
    raising = (failing[0], Raised(), failing[2], *healthy)
    return Scenario(scripts=(*((*failing, *healthy),) * (world - 1), raising))


def in_one_slot(world: int, *kinds: str, programs: int = 1) -> Scenario:
    """Calls of kinds in the same slot: the credits that a launch needs are given by the same launch of its peers."""
    script = [Call(kind, "AB"[place % 2], slot=0) for place, kind in enumerate(kinds)]
    return replace(same(world, *script), programs=programs)


def one_slot(kind: str, *after: Event, calls: int = 2, world: int = 2, programs: int = 1) -> Scenario:
    """The same slot again and again, and waits that give up at any moment: for some tiles the credit is too late."""
    script = (*[Call(kind, "A", slot=0, may_fail=True)] * calls, *after)
    return replace(same(world, *script), programs=programs, impatient=True)


def diverged(kind: str, world: int, programs: int = 1, calls: int = 1) -> Scenario:
    """Rank 0 runs other sites than the other ranks."""
    mine = tuple(Call(kind, site, may_fail=True) for site in ("A", "B", "A")[:calls])
    other = tuple(Call(kind, site, may_fail=True) for site in ("B", "A", "A")[:calls])
    return Scenario(scripts=(other, *(mine,) * (world - 1)), programs=programs)


def alternating(first: str, second: str, calls: int) -> tuple[Event, ...]:
    """Two sites in turn, so each keeps to a slot."""
    return (Call(first, "A"), Call(second, "B")) * (calls // 2)


HEALTHY = {
    **{f"{kind}-w2-p{p}": replace(same(2, *[Call(kind, "A")] * 4), programs=p) for kind in KINDS for p in (1, 2)},
    **{f"{kind}-w3-p1": same(3, *[Call(kind, "A")] * 3) for kind in KINDS},
    **{f"{kind}-w3-p2": replace(same(3, *[Call(kind, "A")] * 3), programs=2) for kind in (GATHER, PUSH)},
    "reduce-scatter-w3-p2": replace(same(3, Call(SCATTER, "A")), programs=2),
    "all-reduce-w3-p2-one-slot": replace(same(3, *[Call(REDUCE, "A", slot=0)] * 2), programs=2),
    **{f"{k}-w2-p2": replace(same(2, *[Call(k, "A")] * 4), programs=2) for k in (ONE_SHOT, TWO_SHOTS, IN_SLICES)},
    **{f"{k}-w3-p1": same(3, *[Call(k, "A")] * 3) for k in (ONE_SHOT, TWO_SHOTS, IN_SLICES)},
    **{f"{k}-w2-p2": replace(same(2, *[Call(k, "A")] * 4), programs=2) for k in (PRODUCT, FEW_ROWS)},
    **{f"{k}-w3-p1": same(3, *[Call(k, "A", slot=0)] * 3) for k in (PRODUCT, FEW_ROWS)},
    **{f"{k}-w2-p2": replace(same(2, *[Call(k, "A")] * 4), programs=2) for k in (TO_HEADS, TO_ROWS)},
    **{f"{k}-w3-p1": same(3, *[Call(k, "A", slot=0)] * 3) for k in (TO_HEADS, TO_ROWS)},
    **{f"{k}-w2-p2": replace(same(2, *[Call(k, "A")] * 4), programs=2) for k in (DECODE, ATTENTION, CAUSAL)},
    **{f"{k}-w3-p1": same(3, *[Call(k, "A", slot=0)] * 3) for k in (DECODE, ATTENTION, CAUSAL)},
    **{f"{k}-w2-p2": replace(same(2, *[Call(k, "A")] * 4), programs=2) for k in EXPERTS},
    **{f"{k}-w3-p1": same(3, *[Call(k, "A", slot=0)] * 3) for k in EXPERTS},
    **{f"fine-{k}": replace(same(2, *[Call(k, "A")] * 3), fine=True) for k in (DECODE, CAUSAL, *EXPERTS)},
    "experts-among-others-w2": replace(same(2, *twice_replayed(EXPERTS[0], REDUCE)), programs=2),
    "decode-among-others-w2": replace(same(2, *twice_replayed(DECODE, REDUCE)), programs=2),
    "masked-attention-among-others-w3": same(3, *alternating(CAUSAL, GATHER, 4)),
    "both-around-attention-w2": replace(same(2, *twice_replayed(TO_HEADS, TO_ROWS)), programs=2),
    "products-among-others-w2": same(2, *twice_replayed(PRODUCT, REDUCE)),
    "shots-among-others-w2": replace(same(2, *alternating(TWO_SHOTS, PULL_REDUCE, 6)), programs=2),
    "shots-among-others-w3": same(3, Call(PULL_GATHER, "B", slot=0), *[Call(TWO_SHOTS, "A", slot=0)] * 2),
    "shots-replayed-w2": replace(same(2, *twice_replayed(ONE_SHOT, TWO_SHOTS)), programs=2),
    "fine-shots": replace(same(2, *twice_replayed(TWO_SHOTS, ONE_SHOT)), programs=2, fine=True),
    "in-band-w2-p2": replace(same(2, *[Call(IN_BAND, "A")] * 6), programs=2),
    "in-band-w3-p1": replace(same(3, *[Call(IN_BAND, "A", slot=0)] * 4), areas=3),
    "in-band-replayed-w2": replace(same(2, *twice_replayed(IN_BAND, SCATTER)), programs=2),
    "in-band-in-a-graph-w3": same(3, *twice_replayed(GATHER, IN_BAND)),
    # Rank 0 runs ahead in what does not wait, in the same slot and the other one.
    "in-band-among-others-w2": replace(
        same(2, *[Call(IN_BAND, "A", slot=0), Call(PUSH, "B", slot=0), Call(PUSH, "B", slot=1)] * 2), programs=2
    ),
    "fine-in-band": replace(same(2, *[Call(IN_BAND, "A")] * 5), fine=True),
    "two-sites-w2-p1": same(2, *alternating(GATHER, SCATTER, 6)),
    "two-sites-w2-p2": replace(same(2, *alternating(SCATTER, REDUCE, 4)), programs=2),
    "two-sites-w3-p1": same(3, *alternating(GATHER, SCATTER, 4)),
    "two-sites-push-w3": same(3, *alternating(PUSH, REDUCE, 4)),
    "replayed-w2-p1": same(2, *twice_replayed(REDUCE, GATHER)),
    "replayed-w2-p2": replace(same(2, *twice_replayed(GATHER, SCATTER)), programs=2),
    "replayed-w3-p1": same(3, *twice_replayed(GATHER, REDUCE)),
    "captured-alone-w2": captured_alone(2),
    "captured-alone-w3": captured_alone(3),
    "replayed-w3-p2": replace(same(3, *twice_replayed(PUSH, GATHER)), programs=2),
    "long-graph-w2-p2": replace(same(2, *long_graph(GATHER, REDUCE)), programs=2),
    "long-graph-w3-p1": same(3, *long_graph(GATHER, REDUCE)),
    "wrap-w2": replace(same(2, *alternating(GATHER, REDUCE, 8)), start=6, modulus=8),
    "wrap-w3": replace(same(3, *[Call(GATHER, "A", slot=0)] * 4), start=6, modulus=8),
    **{f"fine-{kind}": replace(same(2, *[Call(kind, "A")] * 3), fine=True) for kind in KINDS},
    "fine-p2": replace(same(2, *twice_replayed(GATHER, REDUCE)), programs=2, fine=True),
}


MANY_STATES = ("reduce-scatter-w3-p2", "in-band-w3-p1")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.all_cases] * (name in MANY_STATES)) for name in HEALTHY]
)
def test_holds(name: str) -> None:
    found = explore(HEALTHY[name])
    assert found.violation is None, found.trace
    assert found.endings == {(None,) * HEALTHY[name].world}


@pytest.mark.parametrize("impatient", [False, True], ids=["patient", "impatient"])
@pytest.mark.parametrize(
    ("first", "second", "world", "programs"),
    [(GATHER, SCATTER, 2, 1), (GATHER, SCATTER, 2, 2), (REDUCE, GATHER, 2, 2), (GATHER, PUSH, 3, 1)],
)
def test_failure_half_way_then_reset(first: str, second: str, world: int, programs: int, impatient: bool) -> None:
    """No wrong data before the reset, whoever gives up when; every call after it succeeds."""
    scenario = replace(fails_then_resets(first, second, world), impatient=impatient, programs=programs)
    found = explore(scenario)
    assert found.violation is None, found.trace
    assert found.endings and all(any(ending) for ending in found.endings)


@pytest.mark.parametrize("kind", [*KINDS, *SHOTS, PRODUCT, FEW_ROWS, TO_HEADS, TO_ROWS, DECODE, ATTENTION, *EXPERTS])
@pytest.mark.parametrize("world", [2, 3])
def test_rank_that_never_arrives(kind: str, world: int) -> None:
    call = Call(kind, "A", may_fail=True)
    scenario = Scenario(scripts=((), *((call,) * 3,) * (world - 1)))
    found = explore(scenario)
    assert found.violation is None, found.trace
    for ending in found.endings:
        assert any(record is not None and record[0] == "timeout" and record[2] == 0 for record in ending)


@pytest.mark.parametrize("kind", [*KINDS, ONE_SHOT, TWO_SHOTS, IN_BAND, PRODUCT, FEW_ROWS, DECODE, *EXPERTS])
@pytest.mark.parametrize("world", [2, 3])
def test_rank_that_dies_at_any_moment(kind: str, world: int) -> None:
    scenario = replace(same(world, *[Call(kind, "A", may_fail=True)] * 2), mortal=0, fine=world == 2)
    found = explore(scenario)
    assert found.violation is None, found.trace
    assert {record[0] for ending in found.endings for record in ending if record} == {"timeout"}


def names_rank_0(ending: Ending) -> bool:
    """Whether every rank names the divergence in its first call, and none but rank 0 an innocent peer."""
    first, *others = ending
    told = first is not None and first[:2] == ("diverged", 0)
    return told and all(record == ("diverged", 0, 0) for record in others)


# Among three ranks in two programs these have the most states.
SLOW = {(3, SCATTER, 2), (3, REDUCE, 2), (3, IN_BAND, 2)}


@pytest.mark.parametrize(
    ("world", "kind", "programs"),
    [
        pytest.param(*case, marks=[pytest.mark.all_cases] * (case in SLOW))
        for case in itertools.product([2, 3], [GATHER, SCATTER, REDUCE, *SHOTS, *EXPERTS], [1, 2])
    ],
)
def test_rank_that_runs_another_site(kind: str, world: int, programs: int) -> None:
    """Every rank names it, since what the failed launches have pushed completely is published all the same."""
    calls = 3 if programs == 1 or world == 2 else 1
    found = explore(diverged(kind, world, programs, calls))
    assert found.violation is None, found.trace
    assert found.endings and all(names_rank_0(ending) for ending in found.endings)


@pytest.mark.parametrize("kind", [GATHER, SCATTER, REDUCE])
@pytest.mark.parametrize("world", [2, 3])
def test_another_site_and_waits_that_give_up_early(kind: str, world: int) -> None:
    """Every rank fails in its first call, and a rank that waits long enough names the divergence."""
    found = explore(replace(diverged(kind, world, calls=3), impatient=True))
    assert found.violation is None, found.trace
    for ending in found.endings:
        assert all(record is not None and record[1] == 0 for record in ending)
        assert any(record is not None and record[0] == "diverged" for record in ending)


def test_without_complete_chunks_an_innocent_rank_is_named() -> None:
    found = explore(diverged(GATHER, 3, programs=2), frozenset({P.COMPLETE_CHUNKS}))
    assert found.violation is None, found.trace
    assert any(ending[2] == ("timeout", 0, 1) for ending in found.endings)


@pytest.mark.parametrize(
    ("kind", "programs"),
    [
        *((kind, 1) for kind in (GATHER, SCATTER, REDUCE, ONE_SHOT, TWO_SHOTS, IN_SLICES, IN_BAND, DECODE, CAUSAL)),
        *((kind, programs) for kind in EXPERTS for programs in (1, 2)),
        *((kind, 2) for kind in (GATHER, SCATTER, TWO_SHOTS, IN_BAND, CAUSAL)),
        *rare(*((kind, 2) for kind in (REDUCE, ONE_SHOT, IN_SLICES, DECODE))),
    ],
)
def test_waits_that_give_up_early(kind: str, programs: int) -> None:
    """Some tiles of a chunk get their credit, others do not: what is read is right, and after the reset all is well."""
    after = (Reset(), Call(SCATTER, "B"), Call(kind, "A"))
    found = explore(one_slot(kind, *after, programs=programs))
    assert found.violation is None, found.trace
    assert any(any(ending) for ending in found.endings) and (None, None) in found.endings


@pytest.mark.parametrize("kind", [GATHER, SCATTER, REDUCE])
def test_failures_end_alike_in_both_grains(kind: str) -> None:
    for scenario in (one_slot(kind), replace(diverged(kind, 2, calls=3), impatient=True)):
        fine = explore(replace(scenario, fine=True))
        assert fine.violation is None, fine.trace
        assert fine.endings == explore(scenario).endings


def test_waits_that_give_up_early_among_three() -> None:
    found = explore(one_slot(GATHER, world=3))
    assert found.violation is None, found.trace


def sender_goes_on(without: frozenset[Protection]) -> bool:
    """Whether rank 0, who waits for nobody's data, can end well although rank 1 failed two uses of a slot before."""
    found = explore(replace(same(2, *[Call(PUSH, "A", may_fail=True)] * 4), impatient=True), without)
    assert found.violation is None, found.trace
    return any(sender is None and receiver is not None and receiver[1] < 2 for sender, receiver in found.endings)


def test_failed_launch_stops_its_senders() -> None:
    assert not sender_goes_on(frozenset())
    assert sender_goes_on(frozenset({P.WITHHELD_CREDITS}))


@pytest.mark.parametrize("other", [GATHER, SCATTER, REDUCE, IN_BAND])
@pytest.mark.parametrize("kind", [GATHER, SCATTER, REDUCE, IN_BAND])
def test_rank_in_another_kernel(kind: str, other: str) -> None:
    """Sites share flags and slots whatever their kind: it is noticed, and no rank takes data of another site."""
    before, after = Call(GATHER, "A", may_fail=True), Call(GATHER, "D", may_fail=True)
    scripts = [(before, Call(k, site, may_fail=True), after) for k, site in ((kind, "B"), (other, "C"))]
    for programs in (1, 2):
        found = explore(Scenario(scripts=tuple(scripts), programs=programs))
        assert found.violation is None, found.trace
        assert all(any(record and record[0] == "diverged" for record in ending) for ending in found.endings)


def test_graph_replayed_once_more_on_one_rank() -> None:
    call = Call(GATHER, "B", slot=1, may_fail=True)
    found = explore(Scenario(scripts=((call,) * 3, (call,) * 2)))
    assert found.violation is None, found.trace
    assert found.endings == {(("timeout", 2, 1), None)}


@pytest.mark.parametrize("programs", [1, 2])
def test_three_areas_in_band_are_enough(programs: int) -> None:
    """The memory has four. Words that are to be zero are not yet in one of two, when it is written again."""
    for areas in (2, 3):
        calls = (Call(IN_BAND, "A", slot=0), Call(IN_BAND, "B"), *[Call(IN_BAND, "A")] * 3)
        found = explore(replace(same(2, *calls), areas=areas, programs=programs))
        assert ("in band of rank" in (found.violation or "")) == (areas == 2), found.violation


@pytest.mark.parametrize("impatient", [False, True], ids=["patient", "impatient"])
def test_failure_in_band_then_reset(impatient: bool) -> None:
    found = explore(replace(fails_then_resets(IN_BAND, IN_BAND, 2), impatient=impatient, programs=2))
    assert found.violation is None, found.trace
    assert found.endings and all(any(ending) for ending in found.endings)


ONE_CALL = same(2, Call(GATHER, "A"))
ONE_MISSING = Scenario(scripts=((), *((Call(REDUCE, "A", may_fail=True),),) * 2))
SAME_SLOT = same(2, *twice_replayed(GATHER, GATHER))

# Without the protection, the exploration of the scenario must find a violation that says the text.
BROKEN = [
    (P.CREDITS, SAME_SLOT, "overwrites slot 1"),
    (P.CREDITS, same(2, *[Call(PUSH, "A")] * 3), "overwrites slot 0"),
    (P.ALL_CREDITS, same(3, Call(PULL_GATHER, "A", slot=0), Call(GATHER, "B", slot=0)), "pulls ('B'"),
    (P.REVOKE, one_slot(PULL_SCATTER), "pulls ('A', 1"),
    (P.CHECKED, one_slot(PULL_REDUCE), "pulls ('A', 1"),
    (P.CREDIT_AFTER_USE, SAME_SLOT, "overwrites slot 1"),
    (P.CREDIT_BY_NEXT, in_one_slot(3, GATHER, GATHER, programs=2), "overwrites slot 0"),
    (P.CREDIT_BY_NEXT, in_one_slot(2, ONE_SHOT, ONE_SHOT, programs=2), "overwrites slot 0"),
    (P.SETTLE_FIRST, SAME_SLOT, "waits for credit"),
    (P.SETTLE_FIRST, in_one_slot(3, TWO_SHOTS, SCATTER, programs=2), "waits for credit"),
    (P.SETTLE_ALWAYS, SAME_SLOT, "waits for await"),
    (P.SETTLE_ALWAYS, same(2, *[Call(PUSH, "A")] * 3), "waits for credit"),
    (P.SETTLE_BEFORE_FLAGS, in_one_slot(2, TWO_SHOTS, TWO_SHOTS), "waits for await"),
    (P.SETTLE_BEFORE_FLAGS, in_one_slot(3, PUSH, PUSH), "waits for credit"),
    (P.DUE_BEFORE_COUNT, in_one_slot(2, TWO_SHOTS, TWO_SHOTS), "overwrites slot 0"),
    (P.DUE_BEFORE_COUNT, in_one_slot(2, GATHER, GATHER, programs=2), "overwrites slot 0"),
    (P.LAST_OUT, in_one_slot(3, GATHER, GATHER, programs=2), "overwrites slot 0"),
    (P.LAST_OUT, in_one_slot(2, ONE_SHOT, ONE_SHOT, programs=2), "overwrites slot 0"),
    (P.DATA_BEFORE_FLAG, ONE_CALL, "reads None"),
    (P.RELEASE, ONE_CALL, "at the last moment"),
    (P.ARRIVE_RELEASE, replace(same(2, Call(SCATTER, "A")), programs=2), "at the last moment"),
    (P.EPOCH, same(2, Call(REDUCE, "B", slot=0), Call(GATHER, "A", slot=0), Call(REDUCE, "B", slot=0)), "another use"),
    (P.WRAP_SAFE, replace(same(2, *[Call(GATHER, "A")] * 4), start=6, modulus=8), "another use"),
    (P.DEVICE_EPOCH, SAME_SLOT, "overwrites slot 1"),
    (P.SENDS_FIRST, ONE_CALL, "no progress"),
    (P.SENDS_FIRST, replace(same(3, Call(GATHER, "A")), programs=2), "no progress"),
    (P.SENDS_FIRST, same(2, Call(TWO_SHOTS, "A")), "no progress"),
    (P.SENDS_FIRST, same(2, Call(IN_SLICES, "A")), "no progress"),
    (P.SENDS_FIRST, same(2, Call(EXPERTS[1], "A")), "no progress"),
    (P.CREDITS, same(2, *[Call(EXPERTS[1], "A", slot=0)] * 3), "overwrites slot 0"),
    (P.CREDITS, same(2, Call(GATHER, "B", slot=0), Call(TWO_SHOTS, "A", slot=0)), "overwrites slot 0"),
    (P.SITE_HASH, Scenario(scripts=((Call(GATHER, "A"),), (Call(GATHER, "B"),))), "reads"),
    (P.CLEARED, same(2, *[Call(IN_BAND, "A")] * 5), "in band of rank"),
    (P.SIGNED, Scenario(scripts=((Call(IN_BAND, "A"),), (Call(IN_BAND, "B"),))), "in band from rank"),
    (P.SENDS_FIRST, same(2, Call(IN_BAND, "A")), "no progress"),
    (P.CREDITS, same(3, *[Call(CAUSAL, "A", slot=0)] * 2), "overwrites slot 0"),
    (P.CREDITS, in_one_slot(2, DECODE, DECODE), "overwrites slot 0"),
    (P.SENDS_FIRST, same(2, Call(DECODE, "A")), "no progress"),
    (P.SENDS_FIRST, same(2, Call(ATTENTION, "A")), "no progress"),
    (P.RANK_ORDER, same(2, Call(DECODE, "A")), "not the same bits"),
    (P.ONE_WRITER, same(3, Call(GATHER, "A")), ""),
    (P.RANK_ORDER, same(2, Call(REDUCE, "A")), "not the same bits"),
    (P.WAIT_RESULT, ONE_MISSING, "reads"),
    (P.PIECE_COUNT, one_slot(SCATTER), "reads"),
    (P.PIECE_COUNT, one_slot(GATHER, programs=2), "reads"),
    (P.RESULT_OK, ONE_MISSING, "reads"),
    (P.ALIVE, one_slot(SCATTER, Call(SCATTER, "A", slot=1, may_fail=True)), "reads"),
    (P.RESET_BARRIER_BEFORE, fails_then_resets(GATHER, GATHER, 2), "reads"),
    (P.RESET_BARRIER_AFTER, fails_then_resets(GATHER, GATHER, 2), "no progress"),
    (P.CAPTURES_APART, captured_alone(2), "no progress"),
    (P.CAPTURES_APART, captured_alone(3), "no progress"),
    (P.RESET_COUNT, fails_then_resets(GATHER, SCATTER, 2), "no progress"),
    (P.RESET_COUNTERS, one_slot(SCATTER, Reset(), Call(SCATTER, "B")), "reads"),
    (P.RESET_DUE, one_slot(GATHER, Reset(), *[Call(GATHER, "B", slot=0)] * 2), "overwrites slot 0"),
]

# Taken away in a test of their own: nothing wrong is read, but a failure is not told as it should be.
TOLD = {P.COMPLETE_CHUNKS, P.WITHHELD_CREDITS}

OF_THE_HOST = {P.GROWTH_BARRIER, P.ONE_VERDICT}
"""See test_host_events.py, and test_early_launches.py for OVERLAPPING."""


def in_both_grains(broken: Sequence[tuple[Protection, Scenario, str]]) -> Callable[[Any], Any]:
    """Gives a test each protection that is taken away, in a scenario, with a part of what is found, in both grains."""
    names = ("missing", "scenario", "text")
    cases = pytest.mark.parametrize(names, broken, ids=lambda value: getattr(value, "name", ""))
    grains = pytest.mark.parametrize("fine", [False, True], ids=["groups", "fine"])
    return lambda test: grains(cases(test))


def check_breaks_without(missing: Protection, scenario: Scenario, text: str, fine: bool) -> None:
    """Without the protection the exploration finds a violation that has this text, and its trace."""
    found = explore(replace(scenario, fine=fine), frozenset({missing}))
    assert found.violation is not None
    assert text in found.violation
    assert found.trace


@in_both_grains(BROKEN)
def test_breaks_without(missing: Protection, scenario: Scenario, text: str, fine: bool) -> None:
    check_breaks_without(missing, scenario, text, fine)


def test_limit_of_wrap_safe_comparison() -> None:
    """A word that was not written for half of all epochs looks new again, and fails: why epochs have 40 bits."""
    lagging = (Call(REDUCE, "B", slot=1), *[Call(GATHER, "A", slot=1)] * 4, Call(REDUCE, "B", slot=1))
    assert "another use" in (explore(replace(same(2, *lagging), modulus=8)).violation or "")
    assert explore(replace(same(2, *lagging), modulus=16)).violation is None


def test_every_protection_is_needed() -> None:
    assert {missing for missing, _, _ in BROKEN} | TOLD | OF_THE_HOST | OVERLAPPING == set(Protection)
