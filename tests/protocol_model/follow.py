"""Whether what ranks have done is a path of the model: their steps, taken one after the other by its machine.

A recorded step is the label that the machine gives to it, with the moment at which it was taken. Ranks take turns by
these moments. Every step of the machine that a trace shows must be there, in this order, and no other. What a trace
does not show, the machine may do in between: waits, once what they wait for is there (traces.py looks at whether the
rank has looked), sums, what a rank does in its own memory, and the ends of waits behind a first failure.

All items of a launch are at work at once, one for each program, as on a GPU; but a phase begins when the one before it
has ended, since the interpreter runs one program at a time, and with one program sends come before waits (rule 5).
Launches that pull have two streams, so their copies may come before the last products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from tests.protocol_model.launch import PULLS, phases
from tests.protocol_model.machine import Machine
from tests.protocol_model.programs import Step
from tests.protocol_model.state import Scenario, State, Violation

PROGRAMS = 64
WAITS = ("credit", "await", "own", "add", "sum", "ask", "end", "trust", "check", "announce")
FREE = ("credit", "await", "own", "add", "sum", "end", "trust")
"""Of those: what waits are over stays so, and the rest is of one program alone."""
FAILURES = ("timeout", "diverged", "revoked")


class Taken(NamedTuple):
    """A step that a rank has taken, and when: its label without the rank, `rank 1: write 0 0` is `write 0 0`."""

    time: int
    label: str


@dataclass(frozen=True)
class Refusal:
    """Where a trace is no path of the model: after how many of the rank's steps, what it did, and what was possible."""

    rank: int
    after: int
    taken: str
    possible: tuple[str, ...]

    def __str__(self) -> str:
        return f"rank {self.rank} did '{self.taken}' after {self.after} steps; possible: {', '.join(self.possible)}"


def follow(scenario: Scenario, traces: tuple[tuple[Taken, ...], ...], limit: int = 200_000) -> Refusal | None:
    """None if the ranks can take these steps, and are then at the end of their scripts; else where they cannot."""
    return _Follower(scenario, traces).run(limit)


class _Follower:
    def __init__(self, scenario: Scenario, traces: tuple[tuple[Taken, ...], ...]) -> None:
        self.traces = traces
        self.machine = Machine(replace(scenario, fine=True, programs=PROGRAMS, impatient=True))
        self.phase_of = {
            (kind, me): [place for place, phase in enumerate(of_kind) for _ in phase]
            for kind, me in self.machine.programs.items
            for of_kind in [phases(kind, me, scenario.world, frozenset(), scenario.tiles)]
        }
        # Two streams.
        self.phase_of |= {key: [0] * len(places) for key, places in self.phase_of.items() if key[0] in PULLS}
        self.furthest: tuple[int, Refusal] | None = None

    def run(self, limit: int) -> Refusal | None:
        first = self.machine.initial(), (0,) * len(self.traces)
        seen, stack = {first}, [first]
        while stack:
            state, places = stack.pop()
            ranks = [rank for rank, place in enumerate(places) if place < len(self.traces[rank])]
            me = min(ranks, key=lambda rank: self.traces[rank][places[rank]].time, default=None)
            try:
                if me is None and self._ends(state):
                    return None
                found = list(self._next(state, places, me) if me is not None else self._silent(state, None))
            except Violation as violation:
                self._refuse(places, me, (str(violation),))
                continue
            for after in found:
                if after not in seen:
                    seen.add(after)
                    stack.append(after)
            assert len(seen) < limit, f"more than {limit} states: {self.furthest}"
        assert self.furthest is not None
        return self.furthest[1]

    def _ends(self, state: State) -> bool:
        return all(self.machine.done(state, me) for me in range(self.machine.world))

    def _next(self, state: State, places: tuple[int, ...], me: int) -> Iterator[tuple[State, tuple[int, ...]]]:
        """Where the next step of `me` leads, by itself or behind a step that the trace does not show."""
        taken = self.traces[me][places[me]].label
        after = (*places[:me], places[me] + 1, *places[me + 1 :])
        for label, step in self._steps(state, me):
            if not self._is_silent(state, me, label):
                continue
            yield step, places
            # It changes nothing that other steps look at, so it may as well be taken first. Else both are tried.
            if label.split()[0] in FREE and not self.machine.programs.call(state, me).may_fail:
                return
        if taken.startswith("gives "):
            given = self._give(state, me, taken)
            if given is not None:
                yield given, after
        possible = []
        for label, step in self._steps(state, me):
            possible.append(label)
            if label == taken or (taken in FAILURES and label.startswith(f"{taken}, waiting for")):
                yield step, after
        self._refuse(places, me, tuple(possible))

    def _silent(self, state: State, me: int | None) -> Iterator[tuple[State, tuple[int, ...]]]:
        places = tuple(len(trace) for trace in self.traces)
        for rank in range(self.machine.world) if me is None else [me]:
            for label, step in self._steps(state, rank):
                if self._is_silent(state, rank, label):
                    yield step, places

    def _steps(self, state: State, me: int) -> Iterator[Step]:
        """The steps of `me` that keep to the phases."""
        machine = self.machine
        if machine.done(state, me):
            return
        launch = state[me].launch
        if launch is None:
            for label, after in machine.steps(state, [me])[0]:
                yield label.removeprefix(f"rank {me}").removeprefix(":").strip(), after
            return
        phase_of = [*self.phase_of[machine.programs.call(state, me).kind, me], PROGRAMS]
        items = [program.item if program.item >= 0 else launch.next_item for program in launch.programs]
        present = min(phase_of[item] for item in items)
        may_fail = machine.programs.call(state, me).may_fail
        for index, item in enumerate(items):
            if phase_of[item] > present:
                continue
            step = machine.programs.run(state, me, index)
            if step is None and (state[me].poisoned or may_fail):
                step = machine.programs.expire(state, me, index)
            if step is not None:
                yield step[0].removeprefix(f"rank {me}: ").replace("arrive", "publish"), step[1]

    def _give(self, state: State, me: int, taken: str) -> State | None:
        """The credits of the use that is due may be given at any time of the launch, and more than once."""
        _, use, _, peer = taken.split()
        launch = state[me].launch
        if launch is None or launch.due is None or use != f"{launch.due[0]}.{launch.due[1]}":
            return None
        return self.machine.programs.give(state, me, int(peer), launch.due)

    def _is_silent(self, state: State, me: int, label: str) -> bool:
        name, *rest = label.split()
        launch = state[me].launch
        if launch is None:
            return name == "raises" or label in ("captures 0 calls", "is poisoned")
        numbers = [int(one) for one in rest] if all(one.isdigit() for one in rest) else []
        if name == "settle":
            # Only what the trace has shown to be given.
            use = self.machine.programs.due(state, me)
            return use is None or self.machine.programs.give(state, me, numbers[0], use) == state
        if name == "clear":
            first = (launch.use - 1) % self.machine.scenario.areas * self.machine.world
            return not any(state[me].band[first : first + self.machine.world])
        if name in ("write", "publish") and numbers:
            return numbers[0] == me
        if name == "read":
            return numbers[1] == me
        failed = name.removesuffix(",") in FAILURES
        return (failed and state[me].poisoned) or name in WAITS or label in ("a program starts", "an item does nothing")

    def _refuse(self, places: tuple[int, ...], me: int | None, possible: tuple[str, ...]) -> None:
        if self.furthest is None or sum(places) >= self.furthest[0]:
            rank = -1 if me is None else me
            taken = "the end" if me is None else self.traces[me][places[me]].label
            after = sum(places) if me is None else places[me]
            self.furthest = sum(places), Refusal(rank, after, taken, possible)
