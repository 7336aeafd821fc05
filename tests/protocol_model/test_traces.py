"""What the kernels and the host really do is a path of the protocol's model, and a trace that is none is refused.

Ranks run programs of calls in Triton's interpreter while recorder.py writes down their accesses to shared memory;
traces.py and follow.py decide whether the model can do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.cases import rare
from tests.lowering.problems import KINDS
from tests.protocol_model import recordings
from tests.protocol_model.recorder import Event
from tests.protocol_model.traces import refusals
from tests.ranks import RankPool, RankPools

Trace = list[Event]


@pytest.fixture(scope="module")
def two(rank_pools: RankPools) -> RankPool:
    """Two ranks."""
    return rank_pools.get("cpu", 2)


@pytest.fixture(scope="module")
def three(rank_pools: RankPools) -> RankPool:
    """Three ranks."""
    return rank_pools.get("cpu", 3)


def kernels(traces: list[Trace]) -> set[str]:
    """The modules of the kernels that rank 0 has launched, below `lowering`."""
    names = (event.text for event in traces[0] if event.name == "kernel")
    return {name.partition("lowering.")[2].rpartition(".")[0] for name in names}


EXPECTED = {
    "tile": {
        "all_gather_matmul.tile",
        "matmul_reduce_scatter.tile",
        "matmul_all_reduce.one_shot",
        "matmul_all_gather.many_rows",
        "matmul_all_gather.few_rows",
        "matmul_all_to_all.tile",
        "all_to_all_matmul.tile",
    },
    "chunked": {"transfers"},
    "two shots": {"matmul_all_reduce.two_shot", "all_reduce.all_reduce_kernel", "transfers"},
    "norms": {"all_reduce_rms_norm.norm_kernel", "all_reduce_rms_norm.norm_in_band"},
    "attention": {"all_gather_attention.tile", "transfers"},
    "decode": {"flash_decode.tile", "flash_decode.decode_in_band"},
    "experts": {"expert_sums.reduced_kernel"},
}
"""The kernels of the protocol that each program launches, at least."""


@pytest.mark.parametrize("name", EXPECTED)
def test_every_kernel_takes_a_path_of_the_model(two: RankPool, name: str) -> None:
    traces = two.run(recordings.run, name)
    assert EXPECTED[name] <= kernels(traces)
    assert refusals(traces) == []


@pytest.mark.parametrize(
    "name", [*rare("tile", "experts"), "chunked", "two shots", "attention", "in band"]
)
def test_three_ranks(three: RankPool, name: str) -> None:
    assert refusals(three.run(recordings.run, name)) == []


def test_a_group_that_begins_grows_and_is_reset(two: RankPool) -> None:
    traces = two.run(recordings.begin_and_grow)
    zeroed = [event.ring for event in traces[0] if event.name == "zero"]
    # The first ring, the larger one, and that one again.
    assert len(zeroed) == 3 and len(set(zeroed)) == 2
    assert refusals(traces) == []


@pytest.mark.parametrize("strategy", ["tile", "chunked"])
def test_a_late_rank(two: RankPool, strategy: str) -> None:
    assert refusals(two.run(recordings.late, strategy)) == []


def test_the_same_slot_again_and_a_late_rank(two: RankPool) -> None:
    """Credits that are missing are waited for."""
    traces = two.run(recordings.replay, "waiting")
    assert {event.slot for event in traces[0] if event.name == "begin"} == {0}
    assert refusals(traces, replayed=True) == []
    assert refusals(traces), "the host gives slots in turn"


def test_calls_on_a_poisoned_workspace(two: RankPool) -> None:
    """They send, publish and give nothing; the reset leaves nothing of what they have counted."""
    traces = two.run(recordings.poison_and_reset)
    assert sum(event.name == "begin" and event.epoch != 0 for event in traces[0]) == len(KINDS)
    assert refusals(traces) == []


@pytest.mark.parametrize("strategy", ["tile", *rare("chunked")])
def test_a_failure_half_way_and_a_reset(rank_pools: RankPools, strategy: str) -> None:
    traces = rank_pools.get("cpu", 2).run(recordings.fail_and_reset, strategy)
    assert [[event.text for event in trace if event.name == "fail"] for trace in traces] == [["timeout"], []]
    assert refusals(traces) == []


def test_a_rank_at_another_site(two: RankPool) -> None:
    traces = two.run(recordings.diverge_and_reset)
    assert [{event.text for event in trace if event.name == "fail"} for trace in traces] == [{"diverged"}] * 2
    assert refusals(traces) == []


def test_a_rank_in_two_groups(three: RankPool) -> None:
    traces = three.run(recordings.in_two_groups)
    groups = [{event.group for event in trace if event.name == "begin"} for trace in traces]
    assert len(groups[1]) == 2 and len(groups[0]) == len(groups[2]) == 1
    assert refusals(traces) == []


# -- traces that no protocol would leave -----------------------------------------------------------------------------

Change = Callable[[Trace], None]


CHANGED = ("gather", "pull", "two shots large", "in band", "experts reduced")


@pytest.fixture(scope="module")
def recorded(two: RankPool) -> dict[str, list[Trace]]:
    """Traces to be changed."""
    return {name: two.run(recordings.run, name, 3) for name in CHANGED}


def place(trace: Trace, name: str, count: int = 0, slot: int | None = None, **fields: object) -> int:
    """Where the `count`-th event with this name and these fields is; from the end if negative."""
    wanted = fields if slot is None else {**fields, "slot": slot}
    found = [
        number
        for number, event in enumerate(trace)
        if event.name == name and all(getattr(event, key) == value for key, value in wanted.items())
    ]
    return found[count]


CREDITS = 1024


@dataclass(frozen=True)
class Mutant:
    """A program, what is done to the events of its rank 0, and what the refusal says."""

    name: str
    program: str
    change: Change
    text: str

    def __str__(self) -> str:
        return f"{self.program}: {self.name}"


def drop(name: str, count: int = -1, **fields: object) -> Change:
    """The event is not there."""

    def change(trace: Trace) -> None:
        del trace[place(trace, name, count, **fields)]

    return change


def drop_all(name: str, **fields: object) -> Change:
    """None of these events is there in the last launch."""

    def change(trace: Trace) -> None:
        first = place(trace, "begin", -1)
        trace[first:] = [
            event
            for event in trace[first:]
            if event.name != name or any(getattr(event, key) != value for key, value in fields.items())
        ]

    return change


def swap(first: str, second: str, count: int = -1, **fields: object) -> Change:
    """The event `second` comes in front of the last `first` before it, and at its time."""

    def change(trace: Trace) -> None:
        later = place(trace, second, count, **fields)
        earlier = max(number for number, event in enumerate(trace[:later]) if event.name == first)
        event = trace.pop(later)
        trace.insert(earlier, event._replace(time=trace[earlier].time - 1))

    return change


def shift(name: str, by: int, count: int = -1, **fields: object) -> Change:
    """The event is of another epoch."""

    def change(trace: Trace) -> None:
        at = place(trace, name, count, **fields)
        trace[at] = trace[at]._replace(epoch=trace[at].epoch + by)

    return change


def give_early(trace: Trace) -> None:
    """The credits of a use are given while it is running: behind its own flag."""
    given = trace.pop(place(trace, "publish", -1, row=CREDITS))
    running = place(trace, "begin", -2)
    at = running + place(trace[running:], "publish", 0, row=0)
    trace.insert(at + 1, given._replace(time=trace[at].time + 1, program=trace[at].program))


MUTANTS = [
    Mutant("without a flag", "gather", drop("publish", row=0), ""),
    Mutant("without its data", "gather", drop_all("write", peer=1), ""),
    Mutant("a piece of the data missing", "gather", drop("write", peer=1), ""),
    Mutant("without waiting for a flag", "gather", drop_all("await"), "reads what no flag has told of"),
    Mutant("without waiting for credits", "gather", drop_all("credit"), "without credit"),
    Mutant("without giving credits", "gather", drop("publish", row=CREDITS), ""),
    Mutant("without an end", "gather", drop("close"), "closes its use 0 times"),
    Mutant("with two ends", "gather", lambda trace: trace.insert((at := place(trace, "close")), trace[at]), "2 times"),
    Mutant("a flag before its data", "gather", swap("write", "publish", row=0), ""),
    Mutant("data before its credits", "gather", swap("epoch", "write", 0, peer=1), "without credit"),
    Mutant("a load before its flag", "gather", swap("await", "read", peer=0), "reads what no flag has told of"),
    Mutant("credits before the use ended", "gather", give_early, "gives"),
    Mutant("a flag of the next epoch", "gather", shift("publish", 1, row=0), "of another use"),
    Mutant("a flag of the last epoch", "gather", shift("publish", -1, row=0), "of another use"),
    Mutant("credits of another use", "gather", shift("publish", 1, row=CREDITS), "gives"),
    Mutant("credits of the use before the last", "gather", shift("credit", -1), "without credit"),
    Mutant("a flag of the last use", "gather", shift("await", -1), "reads what no flag has told of"),
    Mutant("an epoch that was baked in", "gather", shift("epoch", -1), "launches"),
    Mutant("an end of another use", "gather", shift("close", -1), "close of another use"),
    Mutant("another slot", "gather", lambda trace: _other_slot(trace), ""),
    Mutant(
        "a flag without a release", "gather", lambda trace: _rename(trace, "publish", "plain", row=0), "plain store"
    ),
    Mutant("a reset that zeroes nothing", "gather", drop("zero"), "leaves reset"),
    Mutant("a reset without its second meeting", "gather", drop("met", text="reset the group: begin again"), ""),
    Mutant("a reset without its first meeting", "gather", drop("met", text="reset the group: end all kernels"), "met"),
    Mutant("a product in a slot that is not free", "pull", drop_all("credit"), "without credit"),
    Mutant("pieces without a flag", "pull", drop("publish", row=0), ""),
    Mutant("a flag before the product", "pull", swap("write", "publish", row=0), ""),
    Mutant("a copy before its flag", "pull", swap("await", "read", peer=1), ""),
    Mutant("a copy that nobody has looked after", "pull", drop_all("revoked"), "close without a look"),
    Mutant("an end before the copies", "pull", swap("read", "close"), ""),
    Mutant("a sum before the partials", "two shots large", drop_all("await", row=0), "no flag has told"),
    Mutant("a result without a flag", "two shots large", drop("publish", row=512), ""),
    Mutant("a result before the partials", "two shots large", swap("credit", "publish", row=512), ""),
    Mutant("sums of experts before the flag", "experts reduced", drop_all("await", row=0), "no flag has told"),
    Mutant("sums of experts without a flag", "experts reduced", drop("publish", row=0, peer=1), ""),
    Mutant("sums of experts without credits", "experts reduced", drop_all("credit"), "without credit"),
    Mutant("results of experts without a flag", "experts reduced", drop("publish", row=2, peer=1), ""),
    Mutant("results of experts before the flag", "experts reduced", drop_all("await", row=2), "no flag has told"),
    Mutant("data in band without a sign", "in band", drop("sign"), "sign"),
    Mutant("a sign of another use", "in band", shift("sign", 1), "sign"),
    Mutant("data in band that is not waited for", "in band", drop_all("look"), ""),
    Mutant("an area that is not put back to zero", "in band", drop_all("clear"), "clear"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_what_is_no_path_is_refused(recorded: dict[str, list[Trace]], mutant: Mutant) -> None:
    first, *others = recorded[mutant.program]
    assert refusals([first, *others]) == []
    changed = list(first)
    mutant.change(changed)
    found = refusals([changed, *others])
    assert found and mutant.text in "\n".join(found), found


def _other_slot(trace: Trace) -> None:
    """The last launch takes the slot of the one before it."""
    first = place(trace, "begin", -1)
    trace[first:] = [event._replace(slot=1 - event.slot) if event.slot in (0, 1) else event for event in trace[first:]]


def _rename(trace: Trace, name: str, other: str, **fields: object) -> None:
    at = place(trace, name, -1, **fields)
    trace[at] = trace[at]._replace(name=other)
