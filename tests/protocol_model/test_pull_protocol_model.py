"""The signal protocol where peers pull: launches that write into their own slot only, among those that push."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.protocol_model import Call, Protection, Reset, Scenario, explore
from tests.protocol_model.test_protocol_model import (
    GATHER,
    PULL_GATHER,
    PULL_REDUCE,
    PULL_SCATTER,
    REDUCE,
    SCATTER,
    check_breaks_without,
    diverged,
    fails_then_resets,
    in_both_grains,
    in_one_slot,
    long_graph,
    names_rank_0,
    one_slot,
    same,
    twice_replayed,
)

KINDS = [PULL_GATHER, PULL_SCATTER, PULL_REDUCE]
OTHERS = ["pull_pieces", "pull_columns"]
"""Rows and columns that go to their ranks: their reads are those of the former."""
P = Protection


HEALTHY = {
    **{f"{kind}-w2-p{p}": replace(same(2, *[Call(kind, "A")] * 4), programs=p) for kind in KINDS for p in (1, 2)},
    **{f"{kind}-w3-p1": same(3, *[Call(kind, "A")] * 3) for kind in KINDS},
    **{f"{kind}-w3-p2": replace(same(3, *[Call(kind, "A", slot=0)] * 2), programs=2) for kind in KINDS[:2]},
    **{f"{kind}-fine-w2-p2": replace(in_one_slot(2, kind, kind, kind), programs=2, fine=True) for kind in KINDS},
    **{f"{kind}-w2-p2": replace(same(2, *[Call(kind, "A")] * 4), programs=2) for kind in OTHERS},
    **{f"{kind}-w3-p1": same(3, *[Call(kind, "A", slot=0)] * 2) for kind in OTHERS},
    **{f"{kind}-fine-w2-p2": replace(in_one_slot(2, kind, GATHER, kind), programs=2, fine=True) for kind in OTHERS},
    # Whoever pushes comes after those who pull, and the other way round: others may still read there.
    "gathers-w3": in_one_slot(3, PULL_GATHER, GATHER, PULL_GATHER),
    "scatters-w3": in_one_slot(3, SCATTER, PULL_SCATTER, SCATTER),
    "pull-then-push-w2-p2": in_one_slot(2, PULL_GATHER, SCATTER, PULL_SCATTER, REDUCE, programs=2),
    "pull-then-reduce-w3": in_one_slot(3, PULL_REDUCE, REDUCE, PULL_GATHER),
    "layer-w2-p2": replace(in_one_slot(2, PULL_GATHER, SCATTER, GATHER, PULL_SCATTER), programs=2),
    "replayed-w2-p2": replace(same(2, *twice_replayed(PULL_GATHER, PULL_SCATTER)), programs=2),
    "replayed-w3": same(3, *twice_replayed(GATHER, PULL_SCATTER)),
    "long-graph-w2-p2": replace(same(2, *long_graph(PULL_GATHER, PULL_REDUCE)), programs=2),
    "wrap-w2": replace(in_one_slot(2, PULL_GATHER, PULL_REDUCE, PULL_SCATTER, PULL_GATHER), start=6, modulus=8),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_holds(name: str) -> None:
    found = explore(HEALTHY[name])
    assert found.violation is None, found.trace
    assert found.endings == {(None,) * HEALTHY[name].world}


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
@pytest.mark.parametrize("world", [2, 3])
def test_rank_that_never_arrives_or_dies(kind: str, world: int) -> None:
    call = Call(kind, "A", may_fail=True)
    absent = Scenario(scripts=((), *((call,) * 3,) * (world - 1)))
    mortal = replace(same(world, call, call), mortal=0, fine=world == 2)
    for scenario in (absent, mortal):
        found = explore(scenario)
        assert found.violation is None, found.trace
        assert {record[0] for ending in found.endings for record in ending if record} == {"timeout"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world", "programs"), [(2, 1), (2, 2), (3, 1)])
def test_rank_that_runs_another_site(kind: str, world: int, programs: int) -> None:
    found = explore(diverged(kind, world, programs, calls=3 if world == 2 else 1))
    assert found.violation is None, found.trace
    assert found.endings and all(names_rank_0(ending) for ending in found.endings)


@pytest.mark.parametrize("other", [GATHER, SCATTER, REDUCE, *KINDS])
@pytest.mark.parametrize("kind", KINDS)
def test_rank_in_another_kernel(kind: str, other: str) -> None:
    scripts = [
        (Call(GATHER, "A", may_fail=True), Call(k, site, may_fail=True), Call(PULL_GATHER, "D", may_fail=True))
        for k, site in ((kind, "B"), (other, "C"))
    ]
    for programs in (1, 2):
        found = explore(Scenario(scripts=tuple(scripts), programs=programs))
        assert found.violation is None, found.trace
        assert all(any(record and record[0] == "diverged" for record in ending) for ending in found.endings)


@pytest.mark.parametrize("programs", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_waits_that_give_up_early(kind: str, programs: int) -> None:
    """Slots are overwritten without credit, or their readers are too slow: nothing wrong is used."""
    found = explore(one_slot(kind, Reset(), Call(SCATTER, "B"), Call(kind, "A"), programs=programs))
    assert found.violation is None, found.trace
    assert (None, None) in found.endings and any(any(ending) for ending in found.endings)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_waits_that_give_up_early(kind: str) -> None:
    found = explore(one_slot(kind, Reset(), Call(kind, "B"), programs=2))
    assert found.violation is None, found.trace
    assert (None, None) in found.endings and any(any(ending) for ending in found.endings)


@pytest.mark.parametrize("first", KINDS)
def test_a_reader_whose_source_did_not_wait(first: str) -> None:
    """A slow reader hears that what it has read was overwritten, by a rank that failed then or had failed before."""
    script = (Call(first, "A", slot=0, may_fail=True), Call(PULL_SCATTER, "B", slot=0, may_fail=True))
    found = explore(replace(same(2, *script, *script), impatient=True))
    assert found.violation is None, found.trace
    assert any(record and record[0] == "revoked" for ending in found.endings for record in ending)
    quick = explore(replace(same(2, *script), impatient=True, fine=True))
    assert quick.violation is None, quick.trace


def test_failure_half_way_then_reset() -> None:
    for first, second in ((PULL_GATHER, PULL_SCATTER), (PULL_REDUCE, GATHER)):
        found = explore(replace(fails_then_resets(first, second, 2), impatient=True, programs=2))
        assert found.violation is None, found.trace
        assert found.endings and all(any(ending) for ending in found.endings)


# Without the protection, the exploration must find a violation that says the text.
BROKEN = [
    (P.CREDITS, in_one_slot(2, PULL_GATHER, PULL_GATHER), ""),
    (P.CREDITS, in_one_slot(3, PULL_SCATTER, PULL_SCATTER), ""),
    (P.ALL_CREDITS, in_one_slot(3, GATHER, PULL_GATHER), ""),
    (P.ALL_CREDITS, in_one_slot(3, PULL_SCATTER, SCATTER), "pulls ('B'"),
    (P.CREDIT_AFTER_USE, in_one_slot(2, PULL_GATHER, PULL_GATHER), ""),
    (P.CREDIT_BY_NEXT, in_one_slot(2, PULL_GATHER, PULL_GATHER, programs=2), ""),
    (P.SETTLE_FIRST, in_one_slot(2, PULL_GATHER, PULL_SCATTER), "waits for credit"),
    (P.SETTLE_ALWAYS, in_one_slot(2, PULL_SCATTER, PULL_GATHER), "waits for await"),
    (P.RESET_DUE, one_slot(PULL_GATHER, Reset(), *[Call(PULL_GATHER, "B", slot=0)] * 2), ""),
    (P.DATA_BEFORE_FLAG, in_one_slot(2, PULL_REDUCE), "pulls None"),
    (P.RELEASE, in_one_slot(2, PULL_SCATTER), "at the last moment"),
    (P.RANK_ORDER, in_one_slot(2, PULL_SCATTER), "not the same bits"),
    (P.SITE_HASH, Scenario(scripts=((Call(PULL_GATHER, "A"),), (Call(PULL_GATHER, "B"),))), "pulls ('A'"),
    (P.REVOKE, one_slot(PULL_REDUCE), "pulls ('A', 1"),
    (P.CHECKED, one_slot(PULL_SCATTER), "pulls ('A', 1"),
    (P.CREDITS, in_one_slot(2, "pull_pieces", "pull_pieces"), ""),
    (P.REVOKE, one_slot("pull_columns"), "pulls ('A', 1"),
    (P.DATA_BEFORE_FLAG, in_one_slot(2, "pull_pieces"), "pulls None"),
    (P.DEVICE_EPOCH, same(2, *twice_replayed(PULL_GATHER, PULL_GATHER)), ""),
]


@in_both_grains(BROKEN)
def test_breaks_without(missing: Protection, scenario: Scenario, text: str, fine: bool) -> None:
    check_breaks_without(missing, scenario, text, fine)
