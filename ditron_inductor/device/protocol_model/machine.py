"""The steps of all ranks: what each host, and each resident program of its running launch, can do next."""

from __future__ import annotations

from collections.abc import Iterator

from ditron_inductor.device.protocol_model.launch import IN_BAND, ZERO_COPY, Protection, Without
from ditron_inductor.device.protocol_model.programs import Programs, Step
from ditron_inductor.device.protocol_model.state import (
    SLOTS,
    Call,
    Capture,
    Launch,
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


class Machine:
    """The steps of one scenario without the given protections; raises Violation where an invariant breaks."""

    def __init__(self, scenario: Scenario, without: Without = frozenset()) -> None:
        self.scenario, self.without, self.world = scenario, without, scenario.world
        self.programs = Programs(scenario, without)

    def initial(self) -> State:
        """Zeroed memory, as after a reset, with all epochs at the scenario's start."""
        return (self._zeroed(Rank((), (), (), (), (), (0,) * self.world, ()), self.scenario.start),) * self.world

    def done(self, state: State, me: int) -> bool:
        """Whether `me` takes no further step."""
        return state[me].dead or state[me].event == len(self.scenario.scripts[me])

    def steps(self, state: State) -> tuple[list[Step], list[tuple[int, int]]]:
        """The steps from `state`, labelled, and the blocked waits as (rank, program).

        A step that no other rank can observe or disturb (a launch begins, a tile for the own rank) is taken alone.
        """
        fine = self.scenario.fine
        found: list[Step] = []
        blocked: list[tuple[int, int]] = []
        for me, rank in enumerate(state):
            if self.done(state, me):
                continue
            if rank.launch is None:
                host = list(self._host(state, me, rank))
                if not fine and len(host) == 1 and not isinstance(self.scenario.scripts[me][rank.event], Reset):
                    return host, []
                found += host
                continue
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
            found.append((f"rank {mortal} dies", put(state, mortal, state[mortal]._replace(dead=True, launch=None))))
        if self.scenario.impatient:
            may_fail = [(me, index) for me, index in blocked if self.programs.call(state, me).may_fail]
            found += [self.programs.expire(state, me, index) for me, index in may_fail]
        return found, blocked

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
        elif isinstance(event, Raised):
            yield self._skip(state, me, rank)
        elif isinstance(event, Capture):
            rank = rank._replace(event=rank.event + 1, calls=rank.calls + event.calls)
            yield f"rank {me} captures {event.calls} calls", put(state, me, rank)
        elif rank.poisoned and not event.may_fail:
            raise Violation(f"rank {me} is poisoned at call {rank.event}, which has no reason to fail")
        else:
            if rank.poisoned:
                # The host sees the record at this call, or has enqueued the call before.
                yield self._skip(state, me, rank)
            yield self._launch(state, me, rank, event)

    def _launch(self, state: State, me: int, rank: Rank, event: Call) -> Step:
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
