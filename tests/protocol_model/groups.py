"""Processes that are ranks of several groups: each group has memory of its own, a process does one thing at a time.

The groups of a process share nothing but its time. So the rule is about order alone: all processes make the calls of
all groups in one order that they agree on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.protocol_model.machine import Machine
from tests.protocol_model.state import Scenario, State, Violation


@dataclass(frozen=True)
class Member:
    """A group: what its ranks run, and which process each of them is."""

    scenario: Scenario
    processes: tuple[int, ...]


States = tuple[State, ...]


def explore_groups(groups: Sequence[Member], orders: Sequence[Sequence[int]], limit: int = 200_000) -> str | None:
    """The first broken invariant, or None. orders: of each process, the group of every event that it runs, in order."""
    machines = [Machine(group.scenario) for group in groups]
    first = tuple(machine.initial() for machine in machines)
    seen, stack = {first}, [first]
    while stack:
        states = stack.pop()
        try:
            found = list(_steps(groups, machines, orders, states))
            ended = all(
                machine.done(state, me)
                for machine, state in zip(machines, states, strict=True)
                for me in range(machine.world)
            )
            if not found and not ended:
                raise Violation("no progress: no process can take a step")
        except Violation as violation:
            return str(violation)
        for after in found:
            if after not in seen:
                seen.add(after)
                stack.append(after)
        if len(seen) > limit:
            raise MemoryError(f"more than {limit} states")
    return None


def _steps(
    groups: Sequence[Member], machines: Sequence[Machine], orders: Sequence[Sequence[int]], states: States
) -> list[States]:
    """Where each group's ranks lead whose processes are at an event of that group."""
    present = []
    for process, order in enumerate(orders):
        places = zip(groups, states, strict=True)
        done = sum(state[group.processes.index(process)].event for group, state in places if process in group.processes)
        present.append(order[done] if done < len(order) else -1)
    found = []
    for number, (group, machine) in enumerate(zip(groups, machines, strict=True)):
        ranks = [me for me, process in enumerate(group.processes) if present[process] == number]
        for _, after in machine.steps(states[number], ranks)[0]:
            found.append((*states[:number], after, *states[number + 1 :]))
    return found
