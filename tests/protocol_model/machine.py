"""The steps of all ranks: what each host, and each resident program of its running launch, can do next."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from tests.protocol_model.early import focused, is_early, unfocused
from tests.protocol_model.launch import IN_BAND, OVERLAPPING, ZERO_COPY, Protection, Without
from tests.protocol_model.programs import Programs, Step
from tests.protocol_model.state import (
    SLOTS,
    Call,
    Capture,
    Grow,
    Launch,
    Meet,
    Poisoned,
    Program,
    Raised,
    Rank,
    Reset,
    Scenario,
    State,
    Violation,
    Word,
    put,
)

COLLECTIVE = (Reset, Grow, Meet)


class Machine:
    """The steps of one scenario without the given protections; raises Violation where an invariant breaks."""

    def __init__(self, scenario: Scenario, without: Without = frozenset()) -> None:
        self.scenario, self.without, self.world = scenario, without, scenario.world
        self.programs = Programs(scenario, without)

    def initial(self) -> State:
        """Zeroed memory, as after a reset, with all epochs at the scenario's start."""
        first = Rank((), (), (), (), (), (0,) * self.world, (), memory=self.programs.early.first_memory())
        return (self._zeroed(first, self.scenario.start),) * self.world

    def done(self, state: State, me: int) -> bool:
        """Whether `me` takes no further step."""
        return state[me].dead or state[me].event == len(self.scenario.scripts[me])

    def steps(self, state: State, ranks: Collection[int] | None = None) -> tuple[list[Step], list[tuple[int, int]]]:
        """The steps of `ranks`, or all, from `state`, labelled, and the blocked waits as (rank, program).

        A step that no other rank can observe or disturb (a launch begins, a tile for the own rank) is taken alone. So
        is what only touches the own memory, unless a protection is missing that keeps the launches of a rank apart.
        """
        fine = self.scenario.fine
        eager = not fine and not OVERLAPPING & self.without
        found: list[Step] = []
        blocked: list[tuple[int, int]] = []
        for me, rank in enumerate(state):
            if self.done(state, me) or (ranks is not None and me not in ranks):
                continue
            if rank.launch is None:
                host = list(self._host(state, me, rank))
                if not fine and len(host) == 1 and not isinstance(self.scenario.scripts[me][rank.event], COLLECTIVE):
                    return host, []
                found += host
                continue
            early = list(self._early(state, me, rank))
            if eager and early and not self.programs.call(state, me).may_fail:
                return early[:1], []
            found += early
            for index in range(len(rank.launch.programs)):
                step = self.programs.run(state, me, index)
                if step is None and rank.poisoned:
                    found.append(self.programs.expire(state, me, index))
                elif step is None:
                    blocked.append((me, index))
                elif not fine and self.programs.is_local(state, me, index):
                    return [step], []
                else:
                    found.append(step)
        mortal = self.scenario.mortal
        if mortal is not None and not self.done(state, mortal):
            dead = state[mortal]._replace(dead=True, launch=None, behind=())
            found.append((f"rank {mortal} dies", put(state, mortal, dead)))
        if self.scenario.impatient:
            may_fail = [(me, index) for me, index in blocked if self.programs.call(state, me).may_fail]
            found += [self.programs.expire(state, me, index) for me, index in may_fail]
        return found, blocked

    def _early(self, state: State, me: int, rank: Rank) -> Iterator[Step]:
        """Programs of `me` that can begin, and the steps of those that have begun behind the launch that is running.

        With all protections the latter have nothing to do but to load weights. Both can be taken as soon as possible:
        nobody observes it, and the later weights are loaded, the more of them are complete.
        """
        yield from self.programs.early.begins(state, me)
        for depth, launch in enumerate(rank.behind, 1):
            view = focused(state, me, depth)
            for index in range(len(launch.programs)):
                step = self.programs.run(view, me, index)
                if step is not None:
                    yield f"call {view[me].event} of {step[0]}", unfocused(step[1], me)

    def _zeroed(self, rank: Rank, epoch: int) -> Rank:
        words = SLOTS * self.programs.regions * self.world
        keep = Protection.RESET_COUNTERS in self.without
        return rank._replace(
            flags=(Word(None, epoch),) * words,
            credits=(Word(None, epoch),) * (SLOTS * self.world),
            early=(None,) * words,
            late=(None,) * words,
            epochs=(epoch,) * SLOTS,
            arrived=rank.arrived if keep else (0,) * self.world,
            used=(-1,) * SLOTS,
            due=rank.due if Protection.RESET_DUE in self.without else None,
            uses=0,
            band=(None,) * (self.programs.areas * self.world),
            signs=(Word(None, 0),) * (self.programs.areas * self.world),
            poisoned=False,
        )

    def _host(self, state: State, me: int, rank: Rank) -> Iterator[Step]:
        event = self.scenario.scripts[me][rank.event]
        if isinstance(event, Reset):
            yield from self._reset(state, me, rank)
        elif isinstance(event, Grow):
            yield from [self._skip(state, me, rank)] if rank.poisoned else self._grow(state, me, rank)
        elif isinstance(event, Meet):
            yield from self._meet(state, me, rank, event)
        elif isinstance(event, Poisoned):
            record = rank.record or ("timeout", rank.event, me)
            rank = rank._replace(event=rank.event + 1, poisoned=True, record=record)
            yield f"rank {me} is poisoned", put(state, me, rank)
        elif isinstance(event, Raised):
            yield self._skip(state, me, rank)
        elif isinstance(event, Capture):
            counted = event.calls if Protection.CAPTURES_APART in self.without else 0
            rank = rank._replace(event=rank.event + 1, calls=rank.calls + counted)
            yield f"rank {me} captures {event.calls} calls", put(state, me, rank)
        elif dict(rank.met).get(event.site) is False:
            yield f"rank {me} runs {event.site} by the library", put(state, me, rank._replace(event=rank.event + 1))
        elif rank.poisoned and not event.may_fail:
            raise Violation(f"rank {me} is poisoned at call {rank.event}, which has no reason to fail")
        else:
            if rank.poisoned:
                # The host sees the record at this call, or has enqueued the call before.
                yield self._skip(state, me, rank)
            yield self._launch(state, me, rank, event)

    def _launch(self, state: State, me: int, rank: Rank, event: Call) -> Step:
        if is_early(event.kind):
            launch = self.programs.early.launch(state, me, event)
            label = f"rank {me} launches {event.kind} {event.site}: call {rank.event}, slot {launch.slot}"
            return label, put(state, me, rank._replace(launch=launch))
        slot = rank.calls % SLOTS if event.slot is None else event.slot
        epoch = (rank.epochs[slot] + 1) % self.scenario.modulus
        if Protection.DEVICE_EPOCH in self.without and event.baked is not None:
            epoch = event.baked
        helpless = rank.poisoned and Protection.ALIVE not in self.without
        if helpless and Protection.WITHHELD_CREDITS in self.without:
            state = self.programs.settle_all(state, me, rank.due)
        if helpless and event.kind not in ZERO_COPY:
            # Outputs are NaN; only the epoch goes on.
            rank = rank._replace(event=rank.event + 1, calls=rank.calls + (event.slot is None))
            rank = rank._replace(epochs=put(rank.epochs, slot, epoch), due=(slot, epoch))
            rank = rank._replace(uses=rank.uses + (event.kind == IN_BAND))
            return f"rank {me} returns NaN", put(state, me, rank)
        taken = min(self.scenario.programs, len(self.programs.items[event.kind, me]))
        launch = Launch(epoch, slot, taken, tuple(Program(i) for i in range(taken)), due=rank.due)
        if event.kind == IN_BAND:
            launch = launch._replace(use=rank.uses + 1)
        if (event.may_fail and taken > 1) or helpless:
            # When a program starts matters: another one may have failed before.
            launch = launch._replace(next_item=0, programs=(Program(-1),) * taken)
        state = self.programs.count(put(state, me, rank._replace(launch=launch)), me)
        if Protection.CREDIT_AFTER_USE in self.without:
            for peer in range(self.world):
                if peer != me:
                    state = self.programs.give(state, me, peer, (slot, epoch))
        return f"rank {me} launches {event.site}: call {rank.event}, slot {slot}, epoch {epoch}", state

    def _skip(self, state: State, me: int, rank: Rank) -> Step:
        """The rank raises and goes on with its next Reset."""
        script = self.scenario.scripts[me]
        there = next((i for i in range(rank.event, len(script)) if isinstance(script[i], Reset)), len(script))
        return f"rank {me} raises", put(state, me, rank._replace(event=there))

    def _reset(self, state: State, me: int, rank: Rank) -> Iterator[Step]:
        """The own device is idle. Phase 0 enters a barrier; 1 zeroes the own memory and enters another; 2 leaves it."""
        barrier = {1: Protection.RESET_BARRIER_BEFORE, 2: Protection.RESET_BARRIER_AFTER}.get(rank.phase)
        if barrier and barrier not in self.without and any(peer.barriers < rank.barriers for peer in state):
            return
        if rank.phase == 2:
            yield f"rank {me} leaves reset", put(state, me, rank._replace(phase=0, event=rank.event + 1))
            return
        label = f"rank {me} enters reset"
        if rank.phase == 1:
            label = f"rank {me} zeroes its memory"
            rank = self._zeroed(rank, 0)
            rank = rank if Protection.RESET_COUNT in self.without else rank._replace(calls=0)
        yield label, put(state, me, rank._replace(phase=rank.phase + 1, barriers=rank.barriers + 1))

    def _grow(self, state: State, me: int, rank: Rank) -> Iterator[Step]:
        """The own device is idle. As a reset, but of new memory, and calls are counted on."""
        if rank.phase > 0 and any(peer.barriers < rank.barriers for peer in state):
            if rank.phase == 1 or Protection.GROWTH_BARRIER not in self.without:
                return
        if rank.phase == 2:
            yield f"rank {me} leaves growth", put(state, me, rank._replace(phase=0, event=rank.event + 1))
            return
        label = f"rank {me} enters growth"
        if rank.phase == 1:
            label = f"rank {me} zeroes its new memory"
            rank = self._zeroed(rank, 0)
        yield label, put(state, me, rank._replace(phase=rank.phase + 1, barriers=rank.barriers + 1))

    def _meet(self, state: State, me: int, rank: Rank, event: Meet) -> Iterator[Step]:
        """Phase 0 tells the others; in phase 1 the first rank that knows what all have, or has waited long enough,
        stores the verdict, if there is none yet, and every rank takes what is there.
        """
        if rank.phase == 0:
            posts = (*rank.posts, (event.site, event.has_node))
            yield f"rank {me} comes to meet for {event.site}", put(state, me, rank._replace(phase=1, posts=posts))
            return
        known = dict(state[0].verdicts).get(event.site)
        told = [dict(peer.posts).get(event.site) for peer in state]
        if known is not None:
            yield self._learn(state, me, event, known)
        elif None not in told:
            yield self._learn(self._store(state, event, all(told)), me, event, all(told))
        else:
            alone = Protection.ONE_VERDICT in self.without
            yield self._learn(state if alone else self._store(state, event, False), me, event, False)

    def _store(self, state: State, event: Meet, fused: bool) -> State:
        return put(state, 0, state[0]._replace(verdicts=(*state[0].verdicts, (event.site, fused))))

    def _learn(self, state: State, me: int, event: Meet, fused: bool) -> Step:
        rank = state[me]
        rank = rank._replace(phase=0, event=rank.event + 1, met=(*rank.met, (event.site, fused)))
        return f"rank {me} {'fuses' if fused else 'leaves'} {event.site}", put(state, me, rank)
