"""Launches that may begin before the launch in front of them has ended (ditron_inductor/core/overlap.py).

A kind has the form name:overlap. `apart` is an ordinary launch. `leads` is one too, but it lets the next launch begin
when all of its own programs have begun or ended. `follows` may begin early itself, and lets the next one begin. The
programs of a launch that follows wait for the end of the launch in front of it, and of no other launch. What stands
further in front has ended by then only because the launch in front has waited in the same way.

These launches have no tickets, so an item is a program, which lets the next launch begin when it begins itself. A GPU
has room for `Scenario.programs` of them. Items have operations of launch.py, and

    ("last",)         wait until the launch in front has ended: all of its programs, so that its stores are visible
    ("look",)         read the words of the protocol: epoch, number of the use in band, what is due, poison
    ("weights",)      read the weights
    ("row",)          read the row that the launch in front has stored
    ("residual",)     read the sum that the last launch in band has stored, which stands further in front
    ("count",)        the program counts itself; the one that is counted last closes the use, at its end
    ("store", part)   store a part of the own row, and in band of the sum
    ("update", part)  store a part of the weights

    in_band   norm_in_band.py for one row: a program that signs and settles, one that sends and clears, one that waits
    product   projections and divided products: a program reads a part of the weight, and behind its wait the row
    inputs    a product of inputs of the graph alone, which needs nothing of the launch in front
    cached    attention to a cache, which does not follow
    update    a launch in front of the graph that writes the weights

Rows have memory that is taken in turns of two, and sums too. So what a launch stores takes the place of what the launch
in front of it reads, as with an allocator that frees a result behind the last launch that reads it. Stores in the own
memory are seen at once: later is no different for whoever waits for the end of the launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tests.protocol_model.launch import IN_BAND, Item, Protection, Without, phases
from tests.protocol_model.state import (
    SLOTS,
    Call,
    Event,
    Launch,
    Memory,
    Program,
    Rank,
    Reset,
    Scenario,
    State,
    Violation,
    put,
)

PRODUCT, INPUTS, CACHED, UPDATE = "product", "inputs", "cached", "update"
APART, LEADS, FOLLOWS = "apart", "leads", "follows"
OPS = ("look", "weights", "row", "residual", "count", "store", "update")
TURNS = 2
MISPLACED = {
    "look": Protection.WORDS_BEHIND_WAIT,
    "row": Protection.ROW_BEHIND_WAIT,
    "residual": Protection.ROW_BEHIND_WAIT,
}
"""What is read in front of the wait if the protection is taken away."""

Items = dict[tuple[str, int], tuple[Item, ...]]
"""Of each (kind, rank)."""


def is_early(kind: str) -> bool:
    """Whether `kind` is one of this module."""
    return ":" in kind


def is_in_band(kind: str) -> bool:
    """Whether a launch of `kind` sends in band."""
    return kind.split(":")[0] == IN_BAND


def takes_slot(kind: str) -> bool:
    """Whether a launch of `kind` uses a slot, as all do that communicate."""
    return is_in_band(kind) or not is_early(kind)


def early_items(kind: str, me: int, world: int, without: Without, tiles: int) -> tuple[Item, ...]:
    """The programs of rank `me` for one launch of `kind`, in the order in which they begin; KeyError for an unknown
    kind.
    """
    name, overlap = kind.split(":")
    stores: Item = tuple(("store", part) for part in range(tiles))
    if name == IN_BAND:
        (begin,), (send, *clear), (add,) = phases(IN_BAND, me, world, without, 1)
        signs = (op for op in begin if op[0] != "settle")
        settles = (op for op in begin if op[0] == "settle")
        programs: list[Item] = [
            (("look",), *signs, ("count",), *settles),
            (("look",), ("row",), *send, ("count",), *(op for item in clear for op in item)),
            (("look",), ("row",), ("residual",), ("count",), *add, *stores),
        ]
    else:
        programs = {
            PRODUCT: [(("weights",), ("row",), store) for store in stores],
            INPUTS: [(("weights",),) for _ in stores],
            CACHED: [(("row",), store) for store in stores],
            UPDATE: [(("update", part),) for part in range(tiles)],
        }[name]
    waiting = len(programs) if overlap == FOLLOWS and Protection.WAIT_FOR_LAST not in without else 0
    if name == INPUTS and Protection.EVERY_LAUNCH_WAITS in without:
        waiting = 0
    if Protection.EVERY_PROGRAM_WAITS in without:
        waiting = min(waiting, 1)
    return (*(_waiting(item, without) for item in programs[:waiting]), *programs[waiting:])


def _waiting(item: Item, without: Without) -> Item:
    """`item` with its wait for the last launch, behind what it reads ahead, which should be weights only."""
    ahead = [op for op in item if op[0] == "weights" or MISPLACED.get(op[0]) in without]
    return (*ahead, ("last",), *(op for op in item if op not in ahead))


# -- launches in flight ------------------------------------------------------------------------------------------------


def focused(state: State, me: int, depth: int) -> State:
    """`state` for the programs of the launch of `me` that has `depth` launches in flight in front of it."""
    rank = state[me]
    launches = _in_flight(rank)
    front, behind = launches[:depth], launches[depth + 1 :]
    rank = rank._replace(front=front, launch=launches[depth], behind=behind, event=rank.event + depth)
    return put(state, me, rank)


def unfocused(state: State, me: int) -> State:
    """The inverse of `focused`."""
    rank = state[me]
    launch, *behind = (*rank.front, *_in_flight(rank))
    event = rank.event - len(rank.front)
    return put(state, me, rank._replace(front=(), launch=launch, behind=tuple(behind), event=event))


def _in_flight(rank: Rank) -> tuple[Launch, ...]:
    assert rank.launch is not None
    return rank.launch, *rank.behind


class Expected(NamedTuple):
    """What an event of a script has to find: the events that have stored the row, the sum and the weights, -1 for what
    was there at first, None if anything may be there; and the turns in which it stores its own row and sum.
    """

    row: int | None
    residual: int | None
    weights: int | None
    turn: int
    sum_turn: int


def _expected(script: tuple[Event, ...]) -> tuple[Expected, ...]:
    """Of each event of a script."""
    found = []
    now = Expected(-1, -1, -1, 0, 0)
    for place, event in enumerate(script):
        found.append(now)
        name = event.kind.split(":")[0] if isinstance(event, Call) and is_early(event.kind) else ""
        if isinstance(event, Reset):
            # What has failed has stored nothing, or anything.
            now = now._replace(row=None, residual=None, weights=None)
        if name in (IN_BAND, PRODUCT, CACHED):
            now = now._replace(row=place, turn=(now.turn + 1) % TURNS)
        if name == IN_BAND:
            now = now._replace(residual=place, sum_turn=(now.sum_turn + 1) % TURNS)
        if name == UPDATE:
            now = now._replace(weights=place)
    return tuple(found)


class Early:
    """What the launches of this module do in one scenario without the given protections."""

    def __init__(self, scenario: Scenario, without: Without, items: Items) -> None:
        self.scenario, self.without, self.items = scenario, without, items
        self.expected = tuple(_expected(script) for script in scenario.scripts)

    def first_memory(self) -> Memory:
        """What a rank has before its script begins."""
        nothing = (-1,) * self.scenario.tiles
        return Memory((nothing,) * TURNS, (nothing,) * TURNS, nothing, (0,) * SLOTS)

    def launch(self, state: State, me: int, call: Call) -> Launch:
        """A launch of `call` behind all that are in flight on `me`, of which no program has begun."""
        rank = state[me]
        in_front = 0 if rank.launch is None else len(_in_flight(rank))
        events = self.scenario.scripts[me][rank.event : rank.event + in_front]
        calls = rank.calls + sum(map(_counts, events))
        return Launch(0, calls % SLOTS if call.slot is None else call.slot, 0, ())

    def begins(self, state: State, me: int) -> Iterator[tuple[str, State]]:
        """The programs of `me` that can begin, as steps: the next one of a launch, of which there may be several."""
        rank, script = state[me], self.scenario.scripts[me]
        launches = _in_flight(rank)
        if sum(len(launch.programs) for launch in launches) == self.scenario.programs:
            return
        for depth, event in enumerate(script[rank.event : rank.event + len(launches) + 1]):
            if not isinstance(event, Call) or not is_early(event.kind):
                return
            if depth > 0 and not self._may_follow(script[rank.event + depth - 1], event, launches[depth - 1], me):
                return
            launch = launches[depth] if depth < len(launches) else self.launch(state, me, event)
            if launch.next_item < len(self.items[event.kind, me]):
                programs = (*launch.programs, Program(launch.next_item))
                launch = launch._replace(next_item=launch.next_item + 1, programs=programs)
                first, *behind = (*launches[:depth], launch, *launches[depth + 1 :])
                begun = rank._replace(launch=first, behind=tuple(behind))
                yield f"rank {me}: a program of call {rank.event + depth} begins", put(state, me, begun)

    def _may_follow(self, last: Event, call: Call, launch: Launch, me: int) -> bool:
        """Whether programs of `call` may begin behind `launch`, of the event `last`, although that has not ended."""
        assert isinstance(last, Call)
        begun = launch.next_item == len(self.items[last.kind, me])
        if Protection.ALL_BEGUN in self.without:
            begun = launch.next_item > 0
        return begun and not last.kind.endswith(APART) and call.kind.endswith(FOLLOWS)

    def perform(self, state: State, me: int, index: int, call: Call) -> State:
        """Do an operation of OPS."""
        rank = state[me]
        launch, memory, expected = rank.launch, rank.memory, self.expected[me][rank.event]
        assert launch is not None and memory is not None
        program = launch.programs[index]
        op = self.items[call.kind, me][program.item][program.op]
        if op[0] == "look":
            if rank.poisoned and not call.may_fail:
                raise Violation(f"rank {me} is poisoned at call {rank.event}, which has no reason to fail")
            return self._look(state, me, index)
        if op[0] == "count":
            return self._count(state, me, index, len(self.items[call.kind, me]))
        if op[0] == "weights":
            _check(rank, me, op[0], memory.weights, expected.weights)
        elif op[0] == "row":
            _check(rank, me, op[0], memory.rows[expected.turn - 1], expected.row)
        elif op[0] == "residual":
            _check(rank, me, op[0], memory.sums[expected.sum_turn - 1], expected.residual)
        elif op[0] == "update":
            memory = memory._replace(weights=put(memory.weights, op[1], rank.event))
        else:
            row = put(memory.rows[expected.turn], op[1], rank.event)
            memory = memory._replace(rows=put(memory.rows, expected.turn, row))
            if is_in_band(call.kind):
                total = put(memory.sums[expected.sum_turn], op[1], rank.event)
                memory = memory._replace(sums=put(memory.sums, expected.sum_turn, total))
        return put(state, me, rank._replace(memory=memory))

    def end(self, state: State, me: int, index: int, call: Call) -> State:
        """A program ends, whatever it has done; perhaps it closes the use, and perhaps its launch ends."""
        total = len(self.items[call.kind, me])
        launch = state[me].launch
        assert launch is not None
        if is_in_band(call.kind):
            if launch.programs[index].counted is None:
                state = self._count(state, me, index, total)
            state = self._close(state, me, index)
        rank, launch = state[me], state[me].launch
        assert launch is not None
        rest = (*launch.programs[:index], *launch.programs[index + 1 :])
        launch = launch._replace(programs=rest, ended=not rest and launch.next_item == total)
        rank = rank._replace(launch=launch)
        if launch.ended and takes_slot(call.kind):
            rank = rank._replace(used=put(rank.used, launch.slot, rank.event))
        return put(state, me, rank if rank.front else self._without_ended(rank, me))

    def _without_ended(self, rank: Rank, me: int) -> Rank:
        """`rank` without launches that have ended and have nothing in front of them.

        While one in front is in flight, a launch ends only if it has not waited.
        """
        while rank.launch is not None and rank.launch.ended:
            counts = _counts(self.scenario.scripts[me][rank.event])
            launch, behind = (rank.behind[0], rank.behind[1:]) if rank.behind else (None, ())
            rank = rank._replace(launch=launch, behind=behind, event=rank.event + 1, calls=rank.calls + counts)
        return rank

    def _look(self, state: State, me: int, index: int) -> State:
        """Each program reads the words for itself. Those of the first one are kept for all that find the same."""
        rank, launch = state[me], state[me].launch
        assert launch is not None
        words = (rank.epochs[launch.slot] + 1) % self.scenario.modulus, rank.uses + 1, rank.due
        if launch.use == 0:
            launch = launch._replace(epoch=words[0], use=words[1], due=words[2])
        same = words == (launch.epoch, launch.use, launch.due)
        alive = not rank.poisoned or Protection.ALIVE in self.without
        program = launch.programs[index]._replace(words=() if same else words, alive=alive)
        return _set(put(state, me, rank._replace(launch=launch)), me, index, program)

    def _count(self, state: State, me: int, index: int, total: int) -> State:
        """The slot has one counter, whichever launch its programs are of."""
        rank = state[me]
        launch, memory = rank.launch, rank.memory
        assert launch is not None and memory is not None
        done = memory.done[launch.slot] + 1
        memory = memory._replace(done=put(memory.done, launch.slot, done))
        program = launch.programs[index]._replace(counted=done == total)
        return _set(put(state, me, rank._replace(memory=memory)), me, index, program)

    def _close(self, state: State, me: int, index: int) -> State:
        """Advance the epoch and the number of uses in band if the program was counted last; the credits are due."""
        rank = state[me]
        launch, memory = rank.launch, rank.memory
        assert launch is not None and memory is not None
        program = launch.programs[index]
        if not program.counted:
            return state
        slot, (epoch, use, _) = launch.slot, program.words or (launch.epoch, launch.use, launch.due)
        memory = memory._replace(done=put(memory.done, slot, 0))
        epochs = put(rank.epochs, slot, epoch)
        return put(state, me, rank._replace(epochs=epochs, uses=use, due=(slot, epoch), memory=memory))


def _check(rank: Rank, me: int, what: str, found: tuple[int, ...], expected: int | None) -> None:
    """Raises Violation if something else was stored there. What a failed launch has stored may be anything."""
    if expected is not None and not rank.poisoned and set(found) != {expected}:
        raise Violation(f"rank {me}, call {rank.event}: reads the {what} of calls {found} and not of {expected}")


def _counts(event: Event) -> bool:
    """Whether the host counts the event among the calls that decide the slot."""
    return isinstance(event, Call) and event.slot is None and takes_slot(event.kind)


def _set(state: State, me: int, index: int, program: Program) -> State:
    launch = state[me].launch
    assert launch is not None
    launch = launch._replace(programs=put(launch.programs, index, program))
    return put(state, me, state[me]._replace(launch=launch))
