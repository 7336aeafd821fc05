"""The signal protocol, explored exhaustively: it holds with all of its rules, and breaks without any one of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ditron_inductor.device.protocol_model import Call, Capture, Event, Protection, Raised, Reset, Scenario, explore

GATHER, SCATTER, REDUCE, PUSH = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "push"
KINDS = [GATHER, SCATTER, REDUCE, PUSH]
P = Protection


def same(world: int, *script: Event) -> Scenario:
    """Every rank runs `script`."""
    return Scenario(scripts=(script,) * world)


def twice_replayed(first: str, second: str) -> tuple[Event, ...]:
    """Eager, then a graph captured at slot 1 and replayed twice, so that slot 1 is used twice in a row, then eager."""
    replay = Call(second, "B", slot=1, baked=1)
    return (Call(first, "A"), Capture(1), replay, replay, Call(first, "A"))


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


def alternating(first: str, second: str, calls: int) -> tuple[Event, ...]:
    """Two sites in turn, so each keeps to a slot."""
    return (Call(first, "A"), Call(second, "B")) * (calls // 2)


HEALTHY = {
    **{f"{kind}-w2-p{p}": replace(same(2, *[Call(kind, "A")] * 4), programs=p) for kind in KINDS for p in (1, 2)},
    **{f"{kind}-w3-p1": same(3, *[Call(kind, "A")] * 3) for kind in KINDS},
    **{f"{kind}-w3-p2": replace(same(3, *[Call(kind, "A")] * 3), programs=2) for kind in (GATHER, PUSH)},
    "reduce-scatter-w3-p2": replace(same(3, Call(SCATTER, "A")), programs=2),
    "all-reduce-w3-p2-one-slot": replace(same(3, *[Call(REDUCE, "A", slot=0)] * 2), programs=2),
    "two-sites-w2-p1": same(2, *alternating(GATHER, SCATTER, 6)),
    "two-sites-w2-p2": replace(same(2, *alternating(SCATTER, REDUCE, 4)), programs=2),
    "two-sites-w3-p1": same(3, *alternating(GATHER, SCATTER, 4)),
    "two-sites-push-w3": same(3, *alternating(PUSH, REDUCE, 4)),
    "replayed-w2-p1": same(2, *twice_replayed(REDUCE, GATHER)),
    "replayed-w2-p2": replace(same(2, *twice_replayed(GATHER, SCATTER)), programs=2),
    "replayed-w3-p1": same(3, *twice_replayed(GATHER, REDUCE)),
    "replayed-w3-p2": replace(same(3, *twice_replayed(PUSH, GATHER)), programs=2),
    "long-graph-w2-p2": replace(same(2, *long_graph(GATHER, REDUCE)), programs=2),
    "long-graph-w3-p1": same(3, *long_graph(GATHER, REDUCE)),
    "wrap-w2": replace(same(2, *alternating(GATHER, REDUCE, 8)), start=6, modulus=8),
    "wrap-w3": replace(same(3, *[Call(GATHER, "A", slot=0)] * 4), start=6, modulus=8),
    **{f"fine-{kind}": replace(same(2, *[Call(kind, "A")] * 3), fine=True) for kind in KINDS},
    "fine-p2": replace(same(2, *twice_replayed(GATHER, REDUCE)), programs=2, fine=True),
}


@pytest.mark.parametrize("name", HEALTHY)
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 3])
def test_rank_that_never_arrives(kind: str, world: int) -> None:
    call = Call(kind, "A", may_fail=True)
    scenario = Scenario(scripts=((), *((call,) * 3,) * (world - 1)))
    found = explore(scenario)
    assert found.violation is None, found.trace
    for ending in found.endings:
        assert any(record is not None and record[0] == "timeout" and record[2] == 0 for record in ending)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 3])
def test_rank_that_dies_at_any_moment(kind: str, world: int) -> None:
    scenario = replace(same(world, *[Call(kind, "A", may_fail=True)] * 2), mortal=0, fine=world == 2)
    found = explore(scenario)
    assert found.violation is None, found.trace
    assert {record[0] for ending in found.endings for record in ending if record} == {"timeout"}


@pytest.mark.parametrize("kind", [GATHER, SCATTER, REDUCE])
@pytest.mark.parametrize("world", [2, 3])
def test_rank_that_runs_another_site(kind: str, world: int) -> None:
    mine = (Call(kind, "A", may_fail=True), Call(kind, "B", may_fail=True))
    found = explore(Scenario(scripts=(mine[::-1], *(mine,) * (world - 1))))
    assert found.violation is None, found.trace
    for ending in found.endings:
        assert any(record is not None and record[0] == "diverged" for record in ending)


@pytest.mark.parametrize("other", [GATHER, SCATTER, REDUCE])
@pytest.mark.parametrize("kind", [GATHER, SCATTER, REDUCE])
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


ONE_CALL = same(2, Call(GATHER, "A"))
SAME_SLOT = same(2, *twice_replayed(GATHER, GATHER))

# Without the protection, the exploration of the scenario must find a violation that says the text.
BROKEN = [
    (P.CREDITS, SAME_SLOT, "overwrites slot 1"),
    (P.CREDITS, same(2, *[Call(PUSH, "A")] * 3), "overwrites slot 0"),
    (P.CREDIT_AFTER_USE, SAME_SLOT, "overwrites slot 1"),
    (P.LAST_OUT, replace(same(3, *[Call(GATHER, "A", slot=0)] * 2), programs=2), "overwrites slot 0"),
    (P.DATA_BEFORE_FLAG, ONE_CALL, "reads None"),
    (P.RELEASE, ONE_CALL, "at the last moment"),
    (P.ARRIVE_RELEASE, replace(same(2, Call(SCATTER, "A")), programs=2), "at the last moment"),
    (P.EPOCH, same(2, Call(REDUCE, "B", slot=0), Call(GATHER, "A", slot=0), Call(REDUCE, "B", slot=0)), "reads"),
    (P.WRAP_SAFE, replace(same(2, *[Call(GATHER, "A")] * 4), start=6, modulus=8), "reads"),
    (P.DEVICE_EPOCH, SAME_SLOT, "overwrites slot 1"),
    (P.SENDS_FIRST, ONE_CALL, "no progress"),
    (P.SENDS_FIRST, replace(same(3, Call(GATHER, "A")), programs=2), "no progress"),
    (P.SITE_HASH, Scenario(scripts=((Call(GATHER, "A"),), (Call(GATHER, "B"),))), "reads"),
    (P.ONE_WRITER, same(3, Call(GATHER, "A")), ""),
    (P.RANK_ORDER, same(2, Call(REDUCE, "A")), "not the same bits"),
    (P.POISON, Scenario(scripts=((), *((Call(REDUCE, "A", may_fail=True),),) * 2)), "reads"),
    (P.RESET_BARRIER_BEFORE, fails_then_resets(GATHER, GATHER, 2), "reads"),
    (P.RESET_BARRIER_AFTER, fails_then_resets(GATHER, GATHER, 2), "no progress"),
    (P.RESET_COUNT, fails_then_resets(GATHER, SCATTER, 2), "no progress"),
]


@pytest.mark.parametrize("fine", [False, True], ids=["groups", "fine"])
@pytest.mark.parametrize(("missing", "scenario", "text"), BROKEN, ids=lambda value: getattr(value, "name", ""))
def test_breaks_without(missing: Protection, scenario: Scenario, text: str, fine: bool) -> None:
    found = explore(replace(scenario, fine=fine), frozenset({missing}))
    assert found.violation is not None
    assert text in found.violation
    assert found.trace


def test_limit_of_wrap_safe_comparison() -> None:
    """A word that was not written for half of all epochs looks new again: why epochs have 40 bits."""
    lagging = (Call(REDUCE, "B", slot=1), *[Call(GATHER, "A", slot=1)] * 4, Call(REDUCE, "B", slot=1))
    assert "reads" in (explore(replace(same(2, *lagging), modulus=8)).violation or "")
    assert explore(replace(same(2, *lagging), modulus=16)).violation is None


def test_every_protection_is_needed() -> None:
    assert {missing for missing, _, _ in BROKEN} == set(Protection)
