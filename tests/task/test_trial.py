"""What a trial tries, and what follows from its times."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from ditron_inductor.task import cost, trial
from ditron_inductor.task.dtypes import PRECISIONS
from ditron_inductor.task.plan import Choice, PlanRequest
from ditron_inductor.task.problem import Problem, Requirement
from ditron_inductor.task.trial import Times

PROBLEM = Problem("all_gather_matmul", 4096, 4096, 4096, PRECISIONS[0], 2)
REQUEST = PlanRequest(PROBLEM, "s/0", "auto", 1 << 30, "cuda", "NVIDIA H200")


def planned(strategy: str = "chunked", source: str = "model", **us: float) -> Choice:
    return Choice(strategy, "predicted", us or {"library": 190.0, "chunked": 100.0, "tile": 150.0}, source)


def candidates(request: PlanRequest, choice: Choice) -> tuple[str, ...]:
    """What is tried where the plan picks the same in both modes."""
    return trial.candidates(request, choice, choice)


def test_the_planned_strategy_is_tried_first_and_the_hopeless_are_not() -> None:
    assert candidates(REQUEST, planned()) == ("chunked", "library", "tile")
    slow = planned(library=201.0, chunked=100.0, tile=150.0)
    assert candidates(REQUEST, slow) == ("chunked", "tile")
    assert candidates(REQUEST, planned(library=201.0, chunked=100.0, tile=300.0)) == ()


def test_a_strategy_with_hope_in_one_mode_is_tried() -> None:
    eager = planned("library", library=100.0, chunked=300.0, tile=300.0)
    captured = planned("chunked", library=100.0, chunked=95.0, tile=300.0)
    assert trial.candidates(REQUEST, eager, captured) == ("library", "chunked")
    assert trial.candidates(REQUEST, captured, eager) == ("chunked", "library")


def test_what_cannot_run_is_not_tried() -> None:
    request = replace(REQUEST, tile=Requirement(reason="no"), chunked=Requirement(nbytes=2 << 30))
    assert candidates(replace(request, chunked=Requirement()), planned()) == ("chunked", "library")
    assert candidates(request, planned("library")) == ()


@pytest.mark.parametrize("source", ["forced", "obstacle"])
def test_nothing_is_tried_where_nothing_was_chosen(source: str) -> None:
    assert candidates(REQUEST, planned(source=source)) == ()


def test_every_strategy_has_its_calls_and_the_first_ones_are_not_timed() -> None:
    tried = ("chunked", "tile", "library")
    *steps, end = [trial.strategy_of_call(tried, calls) for calls in range(len(tried) * trial.CALLS + 1)]
    assert end is None
    untimed = [(strategy, False) for strategy in tried for _ in range(trial.UNTIMED)]
    there, back = ([(strategy, True) for strategy in order] for order in (tried, tried[::-1]))
    assert steps == [*untimed, *there, *back, *there, *back, *there]


def test_before_a_look_the_first_strategy_runs() -> None:
    assert {trial.strategy_of_call(("tile", "library"), calls) for calls in (-200, -1, 0, 1)} == {("tile", False)}


def test_what_is_near_the_fastest_is_timed_again() -> None:
    times = {"library": Times(100.0, 20.0), "chunked": Times(108.0, 20.0), "tile": Times(111.0, 20.0)}
    assert trial.second_look("library", times) == ("library", "chunked")
    # A gain of less than two per cent replaces nothing.
    assert trial.second_look("chunked", times | {"library": Times(107.0, 0.0)}) == ("chunked", "library", "tile")
    assert trial.second_look("tile", {"tile": times["tile"], "library": times["library"]}) == ()
    # In CUDA graphs the host does not count.
    slow_launches = {"library": Times(100.0, 20.0), "chunked": Times(109.0, 80.0)}
    assert trial.second_look("library", slow_launches) == ("library", "chunked")
    slow_launches["library"] = Times(99.0, 20.0)
    assert trial.second_look("library", slow_launches) == ()


def test_what_is_timed_once_is_as_much_slower_later_as_the_rest() -> None:
    first = {"library": Times(100.0, 20.0), "tile": Times(104.0, 10.0), "chunked": Times(111.0, 40.0)}
    second = {"library": Times(115.0, 18.0), "tile": Times(125.0, 11.0)}
    both = trial.later(first, second)
    assert both["library"] is second["library"] and both["tile"] is second["tile"]
    assert (both["chunked"].device_us, both["chunked"].host_us) == (pytest.approx(111.0 * 1.15), 40.0)
    assert trial.decide("library", "library", both) == ("library", "library")


def test_a_clock_that_slows_down_favours_nobody() -> None:
    tried, us = ("chunked", "tile"), {"chunked": 1030.0, "tile": 1000.0}
    samples: dict[str, list[float]] = {strategy: [] for strategy in tried}
    for calls in range(len(tried) * trial.CALLS):
        step = trial.strategy_of_call(tried, calls)
        assert step is not None
        strategy, is_timed = step
        if is_timed:
            # By one per cent a call.
            samples[strategy].append(us[strategy] * (1.0 + 0.01 * calls))
    times = {strategy: statistics.median(found) for strategy, found in samples.items()}
    assert trial.fastest("chunked", times) == "tile"
    assert 1.02 < times["chunked"] / times["tile"] < 1.04


def test_launches_that_take_as_long_as_their_kernels_leave_no_time_for_the_rest_of_a_step() -> None:
    times = {"library": Times(833.0, 300.0), "chunked": Times(700.0, 780.0)}
    assert times["chunked"].us < times["library"].us
    assert trial.decide("library", "library", times) == ("library", "chunked")
    times["chunked"] = Times(700.0, 350.0)
    assert trial.decide("library", "library", times) == ("chunked", "chunked")


def test_the_host_counts_in_eager_mode_alone() -> None:
    times = {"library": Times(100.0, 20.0), "chunked": Times(80.0, 10.0), "tile": Times(90.0, 5.0)}
    assert trial.decide("library", "library", times) == ("chunked", "chunked")
    times["chunked"] = Times(80.0, trial.HEAD_START_US)
    assert trial.decide("library", "library", times) == ("tile", "chunked"), "the device did not wait for the host"
    times["chunked"] = Times(80.0, trial.HEAD_START_US + 120.0)
    assert trial.decide("library", "chunked", times) == ("tile", "chunked"), "it has no time of its own in a graph"
    assert trial.decide("library", "library", times) == ("tile", "tile")


def test_a_small_gain_changes_nothing() -> None:
    times = {"library": Times(100.0, 0.0), "tile": Times(98.5, 0.0)}
    assert trial.decide("library", "tile", times) == ("library", "tile")
    times["tile"] = Times(97.5, 0.0)
    assert trial.decide("library", "library", times) == ("tile", "tile")


def test_without_a_time_of_the_planned_strategy_it_stays() -> None:
    assert trial.decide("chunked", "library", {"tile": Times(1.0, 0.0)}) == ("chunked", "library")


def test_the_choice_says_what_was_measured() -> None:
    choice = trial.decided(planned(), "tile", {"chunked": Times(120.0, 562.4), "tile": Times(99.0, 30.0)})
    assert choice.strategy == "tile" and choice.source == "trial"
    assert choice.tried_us == {"chunked": 562.4, "tile": 99.0}
    assert "chunked 120 us (host 562), tile 99 us (host 30)" in choice.reason and "predicted" in choice.reason


def test_what_the_own_table_has_is_not_tried_again() -> None:
    assert candidates(REQUEST, replace(planned(source="table"), settled=True)) == ()
    assert candidates(REQUEST, planned(source="table")) != ()


def test_a_table_gets_the_times_of_the_products_alone() -> None:
    times = {"library": Times(100.0, 20.0), "chunked": Times(80.0, 1200.0), "tile": Times(90.0, 5.0)}
    eager, graph = trial.measured_alone(REQUEST, times)
    assert eager == {"library": 100.0, "chunked": 2400.0, "tile": 90.0}
    assert graph == {"library": 100.0, "tile": 90.0}, "the host may have held the others up"
    # As the table adds it again: an epilogue that is a kernel of its own, but for `tile`.
    with_epilogue = replace(REQUEST, problem=replace(PROBLEM, epilogue_bytes=1 << 24))
    beside = cost.beside_us(with_epilogue.problem, cost.H200, "library")
    assert beside > 1.0
    assert trial.measured_alone(with_epilogue, times)[1] == {"library": 100.0 - beside, "tile": 90.0}
    # The times are of the sizes that stand for these.
    near = replace(REQUEST, problem=replace(PROBLEM, m=4000))
    assert trial.measured_alone(near, times)[1]["tile"] == pytest.approx(90.0 * 4000 / trial.bucket(4000))
    assert trial.measured_alone(REQUEST, {"tile": Times(1.0, 0.0), "chunked": Times(1.0, 0.0)}) == ({}, {})


@pytest.mark.parametrize("size", [0, 1, 7, 16, 17, 1000, 4096, 4097])
def test_a_bucket_is_near(size: int) -> None:
    assert size <= trial.bucket(size) <= size * 9 / 8 + 1
    assert trial.bucket(trial.bucket(size)) == trial.bucket(size)


def test_a_gain_of_less_than_events_can_tell_changes_nothing() -> None:
    """Two events differ by nearly a microsecond around one and the same kernel, and a gain is a difference of two."""
    assert trial.decide("library", "library", {"library": Times(14.0, 1.0), "tile": Times(12.3, 1.0)}) == ("library",) * 2
    assert trial.decide("library", "library", {"library": Times(14.0, 1.0), "tile": Times(11.8, 1.0)}) == ("tile",) * 2
