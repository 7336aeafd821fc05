"""Exhaustive exploration: every interleaving of a scenario, each state visited once."""

from __future__ import annotations

from dataclasses import dataclass

from tests.protocol_model.launch import Without
from tests.protocol_model.machine import Machine
from tests.protocol_model.state import Scenario, State, Violation

Ending = tuple[tuple[str, int, int] | None, ...]


@dataclass(frozen=True)
class Exploration:
    """What an exploration found.

    `violation` is the broken invariant or None, `trace` the steps that lead to it, `endings` the first failure record
    (kind, call, peer) of every rank, or None, for each way in which the scenario can end.
    """

    states: int
    violation: str | None
    trace: tuple[str, ...]
    endings: frozenset[Ending]


def explore(scenario: Scenario, without: Without = frozenset(), limit: int = 1_000_000) -> Exploration:
    """Visit every state that `scenario` can reach without the given protections, depth first.

    Stops at the first violation. Raises MemoryError when there are more than `limit` states.
    """
    machine = Machine(scenario, without)
    first = machine.initial()
    parents: dict[State, tuple[State, str] | None] = {first: None}
    stack = [first]
    endings: set[Ending] = set()
    while stack:
        state = stack.pop()
        try:
            steps, blocked = machine.steps(state)
            if not steps:
                steps = [machine.programs.expire(state, me, index) for me, index in blocked]
            if not steps and not all(machine.done(state, me) for me in range(machine.world)):
                raise Violation("no progress: no rank can take a step")
        except Violation as violation:
            return Exploration(len(parents), str(violation), _trace(parents, state), frozenset(endings))
        if not steps:
            endings.add(tuple(rank.record for rank in state))
        for label, after in steps:
            if after not in parents:
                parents[after] = (state, label)
                stack.append(after)
        if len(parents) > limit:
            raise MemoryError(f"more than {limit} states")
    return Exploration(len(parents), None, (), frozenset(endings))


def _trace(parents: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    labels = []
    link = parents[state]
    while link is not None:
        state, label = link
        labels.append(label)
        link = parents[state]
    return tuple(reversed(labels))
