"""The steps of resident programs: one memory operation, or a group of them, of one work item.

Grain. `Scenario.fine` takes one memory operation per step. Otherwise a step is a group `wait* access? store*`: a wait
only becomes true (epochs grow), so it can be moved right, to its successor; flags, counts and credits are only ever
waited for, so their stores can be moved left, to their predecessor (Lipton's reduction). Who asks for credits finds
them there, which can be moved right as a wait, or settles, which can be moved left. Tests compare the two grains.
"""

from __future__ import annotations

from itertools import dropwhile, takewhile
from typing import Any

from tests.protocol_model.early import OPS, Early, early_items, is_early, is_in_band
from tests.protocol_model.launch import (
    CHUNK,
    OVERLAPPING,
    PULLED,
    PULLED_RESULT,
    PULLS,
    RESULT,
    REVOKED,
    Item,
    Op,
    Protection,
    Without,
    closing,
    items,
)
from tests.protocol_model.state import (
    Call,
    Launch,
    Program,
    Rank,
    Scenario,
    State,
    Violation,
    Word,
    put,
)

WAITS = ("credit", "await", "watch", "last")
ACCESSES = ("write", "read", "fill", "pull", "check", "drop", "clear")
NAMES = {"timeout": "no progress", "diverged": "another use of the slot", "revoked": "the slot was overwritten"}
Step = tuple[str, State]


class Programs:
    """What the programs of a launch do in one scenario without the given protections."""

    def __init__(self, scenario: Scenario, without: Without) -> None:
        self.scenario, self.without, self.world = scenario, without, scenario.world
        kinds = {event.kind for script in scenario.scripts for event in script if isinstance(event, Call)}
        self.items = {
            (kind, me): (early_items if is_early(kind) else items)(kind, me, self.world, without, scenario.tiles)
            for kind in kinds
            for me in range(self.world)
        }
        self.early = Early(scenario, without, self.items)
        self.own = {
            (kind, me, place, first)
            for (kind, me), programs in self.items.items()
            for place, item in enumerate(programs)
            for first in range(len(item))
            if is_early(kind) and not OVERLAPPING & without and _is_own(item[first:])
        }
        self.closing = {(kind, me): closing(kind, me, self.world, without) for kind, me in self.items}
        self.work = {key: (*work, self.closing[key]) for key, work in self.items.items()}
        # Of each slot: the regions of launches that pull only where there are any.
        self.areas = scenario.areas if any(map(is_in_band, kinds)) else 0
        self.regions = 1 + (PULLED_RESULT if kinds & set(PULLS) else RESULT)

    def call(self, state: State, me: int) -> Call:
        """The call that `me` is running."""
        call = self.scenario.scripts[me][state[me].event]
        assert isinstance(call, Call)
        return call

    def run(self, state: State, me: int, index: int) -> Step | None:
        """The next step of a program, labelled; None when its wait is not over."""
        launch = state[me].launch
        assert launch is not None
        program = launch.programs[index]
        if program.item < 0:
            alive = not state[me].poisoned or Protection.ALIVE in self.without
            program = program._replace(alive=alive)
            return f"rank {me}: a program starts", self._leave_item(self._set(state, me, index, program), me, index)[0]
        work = self.items[self.call(state, me).kind, me]
        if not program.alive and program.item < len(work):
            if ("end",) not in work[program.item]:
                return f"rank {me}: an item does nothing", self._leave_item(state, me, index)[0]
            if program.op == 0:
                start = self._without_work(state, me, work[program.item])
                return f"rank {me}: only its slot is filled", self._set(state, me, index, program._replace(op=start))
        done: list[Op] = []
        accessed = False
        running: int | None = index
        while running is not None:
            index = running
            launch, _, op = self._at(state, me, index)
            if done and (self.scenario.fine or (accessed and op[0] in (*WAITS, *ACCESSES))):
                break
            if op[0] == "ask" and not self._is_wanting(state, me, index):
                # Credits that are there stay there: this too can be moved right.
                done.append(op)
                state = self._set(state, me, index, self._pass_over(state, me, index))
                continue
            if op[0] == "watch" and self._is_elsewhere(state, me, launch, op[1]):
                return self._fail(state, me, index, "diverged")
            if op[0] in WAITS:
                if not self._is_over(state, me, launch, op):
                    return None
                if op[0] == "await" and Protection.SITE_HASH not in self.without:
                    seen = self._seen(state, me, launch, op)
                    if (seen.site, seen.epoch) != (self.call(state, me).site, launch.epoch):
                        return self._fail(state, me, index, "diverged")
            if op[0] == "check" and not state[me].poisoned and self._is_revoked(state, me, op[1]):
                return self._fail(state, me, index, "revoked")
            done.append(op)
            accessed = accessed or op[0] not in WAITS
            state, running = self._perform_and_advance(state, me, index)
        return f"rank {me}: " + ", ".join(" ".join(map(str, op)) for op in done), state

    def is_local(self, state: State, me: int, index: int) -> bool:
        """Whether the program's next step is one that no other rank can observe or disturb: in its own memory."""
        launch = state[me].launch
        assert launch is not None
        if launch.programs[index].item < 0 or not launch.programs[index].alive:
            return False
        call = self.call(state, me)
        if is_early(call.kind):
            place = call.kind, me, launch.programs[index].item, launch.programs[index].op
            return place in self.own and not call.may_fail
        _, program, op = self._at(state, me, index)
        return op[0] == "write" and op[1] == me and not program.pending

    def expire(self, state: State, me: int, index: int) -> Step:
        """The bounded wait of a program ends: after its time, or soon once another wait of the rank has failed."""
        launch, _, op = self._at(state, me, index)
        if op[0] == "ask":
            state = self._set(state, me, index, self._pass_over(state, me, index))
            launch, _, op = self._at(state, me, index)
        # Waits that have been successful: a group of steps begins with the first of them.
        while self._is_over(state, me, launch, op):
            state = self._advance(state, me, index)[0]
            launch, _, op = self._at(state, me, index)
        return self._fail(state, me, index, "timeout")

    def give(self, state: State, me: int, peer: int, use: tuple[int, int]) -> State:
        """Store the credit of a use (slot, epoch) in the memory of `peer`; which site it was does not matter."""
        rank, (slot, epoch) = state[peer], use
        credit = Word(None, epoch, me)
        return put(state, peer, rank._replace(credits=put(rank.credits, slot * self.world + me, credit)))

    def settle_all(self, state: State, me: int, use: tuple[int, int] | None) -> State:
        """Give every peer the credit of the use that is due, if any."""
        for peer in range(self.world):
            if use is not None and peer != me:
                state = self.give(state, me, peer, use)
        return state

    def count(self, state: State, me: int) -> State:
        """Close the use if all programs of the launch are counted, where that is not the last kernel's part."""
        launch = state[me].launch
        assert launch is not None
        if launch.closed:
            return state
        kind = self.call(state, me).kind
        if is_early(kind) or self.closing[kind, me] or launch.next_item < len(self.items[kind, me]):
            return state
        counted = [program.item >= 0 for program in launch.programs]
        if Protection.LAST_OUT in self.without:
            counted = [any(counted) or len(counted) < min(self.scenario.programs, len(self.items[kind, me]))]
        return self._close(state, me) if all(counted) else state

    def due(self, state: State, me: int) -> tuple[int, int] | None:
        """The use whose credits the launch of `me` gives: what its programs read when they start, before they count."""
        rank = state[me]
        assert rank.launch is not None
        late = self.without & {Protection.DUE_BEFORE_COUNT, Protection.LAST_OUT}
        return rank.due if late else rank.launch.due

    def _close(self, state: State, me: int) -> State:
        """Advance the slot's epoch; the credits of this use are due."""
        rank, launch = state[me], state[me].launch
        assert launch is not None
        use, launch = (launch.slot, launch.epoch), launch._replace(closed=True)
        uses = launch.use or rank.uses
        return put(state, me, rank._replace(epochs=put(rank.epochs, *use), due=use, uses=uses, launch=launch))

    def _is_wanting(self, state: State, me: int, index: int) -> bool:
        """Whether a program that asks settles: a credit of its item is missing, and a peer has not got its own yet."""
        launch, program, _ = self._at(state, me, index)
        waits = [op for op in self._item(state, me, program) if op[0] == "credit"]
        if all(self._reached(self._seen(state, me, launch, op).epoch, launch.epoch - 1) for op in waits):
            return False
        return self.settle_all(state, me, self.due(state, me)) != state

    def _pass_over(self, state: State, me: int, index: int) -> Program:
        """The program behind what it would settle if a credit were missing."""
        _, program, _ = self._at(state, me, index)
        ops = [op[0] for op in self._item(state, me, program)]
        return program._replace(op=ops.index("credit", program.op))

    def _at(self, state: State, me: int, index: int) -> tuple[Launch, Program, Op]:
        launch = state[me].launch
        assert launch is not None
        program = launch.programs[index]
        if program.words:
            epoch, use, due = program.words
            launch = launch._replace(epoch=epoch, use=use, due=due)
        return launch, program, self._item(state, me, program)[program.op]

    def _item(self, state: State, me: int, program: Program) -> Item:
        return self.work[self.call(state, me).kind, me][program.item]

    def _is_closing(self, state: State, me: int, program: Program) -> bool:
        return program.item >= len(self.items[self.call(state, me).kind, me])

    def _is_revoked(self, state: State, me: int, source: int) -> bool:
        """Whether `source` has overwritten what it had in its slot for this launch."""
        launch = state[me].launch
        assert launch is not None
        word = state[me].flags[self._flag(launch.slot, REVOKED, source)]
        return word.site is not None and self._reached(word.epoch, launch.epoch + 1)

    def _without_work(self, state: State, me: int, item: Item) -> int:
        """Where an item begins on a poisoned workspace: behind its end, and the telling if all credits are there."""
        launch = state[me].launch
        assert launch is not None
        begin = item.index(("end",)) + 1
        credits = [self._seen(state, me, launch, op).epoch for op in item if op[0] == "credit"]
        if all(self._reached(seen, launch.epoch - 1) for seen in credits):
            begin += sum(op[0] == "revoke" for op in item)
        return begin

    def _seen(self, state: State, me: int, launch: Launch, op: Op) -> Word:
        """The word that the wait `op` polls."""
        if op[0] == "credit":
            return state[me].credits[launch.slot * self.world + op[1]]
        if op[0] == "watch":
            return state[me].signs[self._place(launch.use, op[1])]
        return state[me].flags[self._flag(launch.slot, op[1], op[2])]

    def _is_over(self, state: State, me: int, launch: Launch, op: Op) -> bool:
        """Whether the wait `op` has what it waits for."""
        if op[0] == "last":
            return not state[me].front or state[me].front[-1].ended
        seen = self._seen(state, me, launch, op).epoch
        if op[0] == "watch":
            signed = seen >= launch.use or Protection.SIGNED in self.without
            return signed and state[me].band[self._place(launch.use, op[1])] is not None
        return self._reached(seen, launch.epoch - (op[0] == "credit"))

    def _is_elsewhere(self, state: State, me: int, launch: Launch, source: int) -> bool:
        """Whether `source` has signed as another site, or announces one, or has published what another one has sent."""
        site, sign = self.call(state, me).site, state[me].signs[self._place(launch.use, source)]
        flag = state[me].flags[self._flag(launch.slot, CHUNK, source)]
        signed = sign.epoch >= launch.use and sign.site != site
        told = flag.site not in (None, site) and self._reached(flag.epoch, launch.epoch)
        return (signed or told) and Protection.SIGNED not in self.without

    def _place(self, use: int, source: int) -> int:
        return use % self.scenario.areas * self.world + source

    def _reached(self, seen: int, epoch: int) -> bool:
        if Protection.EPOCH in self.without:
            return (seen - epoch) % 2 == 0
        if Protection.WRAP_SAFE in self.without:
            return seen >= epoch % self.scenario.modulus
        return (seen - epoch) % self.scenario.modulus < self.scenario.modulus // 2

    def _word(self, slot: int, region: int, source: int) -> int:
        return (slot * self.regions + region) * self.world + source

    def _flag(self, slot: int, region: int, source: int) -> int:
        return self._word(slot, region, source if Protection.ONE_WRITER not in self.without else 0)

    # -- operations --------------------------------------------------------------------------------------------------

    def _perform_and_advance(self, state: State, me: int, index: int) -> tuple[State, int | None]:
        """Do the program's operation and go on to its next one; returns where the program runs on, or None."""
        launch, program, op = self._at(state, me, index)
        name = op[0]
        if name == "write":
            state = self._write(state, me, index)
        elif name == "read":
            self._check_read(state, me, launch, op[1], op[2])
            state = self._set(state, me, index, program._replace(read=(*program.read, op[2])))
        elif name == "fill":
            state = self._fill(state, me, index)
        elif name in ("sign", "drop", "clear", "watch"):
            state = self._in_band(state, me, index)
        elif name == "announce":
            peers = [peer for peer in range(self.world) if peer != me]
            credits = [state[me].credits[launch.slot * self.world + peer].epoch for peer in peers]
            if all(self._reached(credit, launch.epoch - 1) for credit in credits):
                for peer in peers:
                    state = self._publish(state, me, launch, peer, CHUNK)
        elif name == "pull":
            state = self._pull(state, me, index)
        elif name in ("own", "add"):
            source = me if name == "own" else op[1]
            state = self._set(state, me, index, program._replace(read=(*program.read, source)))
        elif name == "end" or (name == "check" and state[me].poisoned and not self._is_closing(state, me, program)):
            return self._leave_item(state, me, index)
        elif name == "revoke":
            state = self._publish(self._release(state, me, index), me, launch, op[1], REVOKED)
        elif name == "trust":
            if launch.suspect and not state[me].poisoned:
                raise Violation(launch.suspect)
        elif name == "sum":
            if program.read != tuple(range(self.world)):
                raise Violation(f"rank {me} reduces in the order {program.read}: not the same bits on every rank")
            state = self._set(state, me, index, program._replace(value=program.read))
        elif name == "publish":
            state = self._publish(self._release(state, me, index), me, launch, op[1], op[2])
        elif name == "arrive":
            state = self._arrive(state, me, index)
        elif name == "close":
            state = self._close(state, me)
        elif name in OPS:
            state = self.early.perform(state, me, index, self.call(state, me))
            if not self._at(state, me, index)[1].alive:
                return self._leave_item(state, me, index)
        elif name == "settle":
            use = launch.due if is_early(self.call(state, me).kind) else self.due(state, me)
            state = state if use is None else self.give(state, me, op[1], use)
        return self._advance(state, me, index)

    def _set(self, state: State, me: int, index: int, program: Program) -> State:
        launch = state[me].launch
        assert launch is not None
        launch = launch._replace(programs=put(launch.programs, index, program))
        return put(state, me, state[me]._replace(launch=launch))

    def _write(self, state: State, me: int, index: int) -> State:
        launch, program, (_, to, region) = self._at(state, me, index)
        dst, word = state[to], self._word(launch.slot, region, me)
        if dst.event <= state[me].used[launch.slot] and not (dst.dead or dst.poisoned):
            raise Violation(f"rank {me} overwrites slot {launch.slot} of rank {to} before its last use ended")
        data = (self.call(state, me).site, state[me].event, me, region, program.value)
        # Own tiles lie in no slot: what peers still pull from there is left alone.
        early = dst.early if to == me else self._destroyed(dst, launch.slot, data)
        state = put(state, to, dst._replace(early=put(early, word, data)))
        return self._set(state, me, index, program._replace(pending=(*program.pending, (to, word, data))))

    def _in_band(self, state: State, me: int, index: int) -> State:
        launch, program, op = self._at(state, me, index)
        site, rank = self.call(state, me).site, state[me]
        if op[0] == "sign":
            peer, place = state[op[1]], self._place(launch.use, me)
            return put(state, op[1], peer._replace(signs=put(peer.signs, place, Word(site, launch.use, me))))
        if op[0] == "drop":
            peer, place = state[op[1]], self._place(launch.use, me)
            if peer.band[place] is not None and not (peer.dead or peer.poisoned):
                raise Violation(f"rank {me} overwrites {peer.band[place]} in band of rank {op[1]}")
            return put(state, op[1], peer._replace(band=put(peer.band, place, (site, rank.event, me))))
        if op[0] == "clear":
            first = self._place(launch.use - 1, 0)
            band = (*rank.band[:first], *(None,) * self.world, *rank.band[first + self.world :])
            return put(state, me, rank._replace(band=band))
        found = rank.band[self._place(launch.use, op[1])]
        if found != (site, rank.event, op[1]):
            raise Violation(f"rank {me}, call {rank.event} of {site}: reads {found} in band from rank {op[1]}")
        return self._set(state, me, index, program._replace(read=(*program.read, op[1])))

    def _destroyed(self, rank: Rank, slot: int, data: Any) -> tuple[Any, ...]:
        """`rank.early` when `data` is stored: whatever earlier uses left in the slot to be pulled is in the way."""
        early = rank.early
        for region in (PULLED, PULLED_RESULT)[: max(0, self.regions - PULLED)]:
            for word in (self._word(slot, region, part) for part in range(self.world)):
                if early[word] is not None and early[word][:2] != data[:2]:
                    early = put(early, word, data)
        return early

    def _fill(self, state: State, me: int, index: int) -> State:
        launch, program, (_, region, part) = self._at(state, me, index)
        rank, word = state[me], self._word(launch.slot, region, part)
        data = (self.call(state, me).site, rank.event, me, region, program.value)
        state = put(state, me, rank._replace(early=put(self._destroyed(rank, launch.slot, data), word, data)))
        return self._set(state, me, index, program._replace(pending=(*program.pending, (me, word, data))))

    def _pull(self, state: State, me: int, index: int) -> State:
        """Read a part of the source's slot. Wrong data may still be noticed, before it is trusted."""
        launch, _, (_, region, part, source) = self._at(state, me, index)
        site, event, peer = self.call(state, me).site, state[me].event, state[source]
        value = tuple(range(self.world)) if region == PULLED_RESULT else None
        word = self._word(launch.slot, region, part)
        for moment, data in (("first", peer.early[word]), ("last", peer.late[word])):
            if data != (site, event, source, region, value) and not launch.suspect:
                text = (
                    f"rank {me}, call {event} of {site}: pulls {data} from rank {source} "
                    f"when stores become visible at the {moment} moment"
                )
                launch = launch._replace(suspect=text)
        return put(state, me, state[me]._replace(launch=launch))

    def _check_read(self, state: State, me: int, launch: Launch, region: int, source: int) -> None:
        rank, site, word = state[me], self.call(state, me).site, self._word(launch.slot, region, source)
        value = tuple(range(self.world)) if region == RESULT else None
        for moment, data in (("first", rank.early[word]), ("last", rank.late[word])):
            if data != (site, rank.event, source, region, value):
                raise Violation(
                    f"rank {me}, call {rank.event} of {site}: reads {data} from rank {source} "
                    f"when stores become visible at the {moment} moment"
                )

    def _release(self, state: State, me: int, index: int) -> State:
        """The program's earlier stores become visible before its next one, unless releases are taken away."""
        if Protection.RELEASE in self.without:
            return state
        program = self._at(state, me, index)[1]
        return self._set(self._drain(state, program), me, index, program._replace(pending=()))

    def _drain(self, state: State, program: Program) -> State:
        for to, word, data in program.pending:
            state = put(state, to, state[to]._replace(late=put(state[to].late, word, data)))
        return state

    def _publish(self, state: State, me: int, launch: Launch, to: int, region: int) -> State:
        if state[me].poisoned and Protection.COMPLETE_CHUNKS in self.without:
            return state
        dst, flag = state[to], self._flag(launch.slot, region, me)
        if dst.flags[flag].writer not in (None, me):
            raise Violation(f"ranks {dst.flags[flag].writer} and {me} write the same flag of rank {to}")
        word = Word(self.call(state, me).site, launch.epoch, me)
        return put(state, to, dst._replace(flags=put(dst.flags, flag, word)))

    def _arrive(self, state: State, me: int, index: int) -> State:
        if Protection.ARRIVE_RELEASE not in self.without:
            state = self._release(state, me, index)
        launch, _, (_, to, region) = self._at(state, me, index)
        rank = state[me]
        count = (rank.arrived[to] + 1) % self.scenario.tiles
        state = put(state, me, rank._replace(arrived=put(rank.arrived, to, count)))
        if count > 0:
            return state
        return self._publish(self._release(state, me, index), me, launch, to, region)

    # -- items and the end of a launch -------------------------------------------------------------------------------

    def _advance(self, state: State, me: int, index: int) -> tuple[State, int | None]:
        launch = state[me].launch
        assert launch is not None
        program = launch.programs[index]
        if program.op + 1 < len(self._item(state, me, program)):
            return self.count(self._set(state, me, index, program._replace(op=program.op + 1)), me), index
        return self._leave_item(state, me, index)

    def _leave_item(self, state: State, me: int, index: int) -> tuple[State, int | None]:
        """The program takes the next item, closes the launch, or goes out."""
        call, rank = self.call(state, me), state[me]
        if is_early(call.kind):
            return self.early.end(state, me, index, call), None
        launch = rank.launch
        assert launch is not None
        program = launch.programs[index]
        num_items = len(self.items[call.kind, me])
        rest = (*launch.programs[:index], *launch.programs[index + 1 :])
        if launch.next_item < num_items:
            taken = Program(launch.next_item, pending=program.pending, alive=program.alive)
            launch = launch._replace(next_item=launch.next_item + 1, programs=tuple(sorted((*rest, taken))))
            return self.count(put(state, me, rank._replace(launch=launch)), me), None
        started = min(self.scenario.programs, num_items)
        last = not rest if Protection.LAST_OUT not in self.without else len(rest) == started - 1
        if program.item < num_items and last and self.closing[call.kind, me]:
            return self._set(state, me, index, Program(num_items, pending=program.pending)), index
        state = self._drain(state, program)  # the end of a program makes its stores visible
        launch = launch._replace(programs=rest)
        state = self.count(put(state, me, state[me]._replace(launch=launch)), me)
        if Protection.CREDIT_BY_NEXT in self.without:
            for peer in range(self.world):
                state = self.give(state, me, peer, (launch.slot, launch.epoch)) if peer != me else state
        if rest:
            return state, None
        rank = state[me]
        used, calls = put(rank.used, launch.slot, rank.event), rank.calls + (call.slot is None)
        return put(state, me, rank._replace(launch=None, event=rank.event + 1, calls=calls, used=used)), None

    def _fail(self, state: State, me: int, index: int, kind: str) -> Step:
        """The program's wait fails: a record, if it is the rank's first, and poison; the item ends here."""
        call, rank = self.call(state, me), state[me]
        _, program, op = self._at(state, me, index)
        what = " ".join(map(str, op))
        if not call.may_fail:
            raise Violation(f"{NAMES[kind]}: rank {me}, call {rank.event} waits for {what}")
        record = rank.record or (kind, rank.event, op[2] if op[0] == "await" else op[1])
        state = put(state, me, rank._replace(poisoned=True, record=record))
        label = f"rank {me}: {kind}, waiting for {what}"
        if self._is_closing(state, me, program):
            running: int | None = index
            while running is not None:
                state, running = self._perform_and_advance(state, me, running)
            return label, state
        goes_on = self._goes_on(self.items[call.kind, me][program.item], program.op)
        if goes_on is not None:
            return label, self._set(state, me, index, program._replace(op=goes_on))
        state, last_out = self._leave_item(state, me, index)
        while last_out is not None:
            state, last_out = self._perform_and_advance(state, me, last_out)
        return label, state

    def _goes_on(self, item: Item, failed: int) -> int | None:
        """The operation with which a program goes on after the wait `failed`; None when it leaves the item."""
        if Protection.WAIT_RESULT in self.without:
            return failed + 1
        if ("end",) in item[failed:]:
            return item.index(("end",)) + 1
        if Protection.PIECE_COUNT in self.without and item[failed][0] == "credit":
            return next(i for i, op in enumerate(item) if op[0] in ("arrive", "publish"))
        if Protection.RESULT_OK in self.without:
            return next((i for i, op in enumerate(item) if op[0] == "write" and op[2] == RESULT), None)
        return None


def _is_own(ops: Item) -> bool:
    """Whether the step that begins with the first of `ops` touches only what no other rank does."""
    behind = dropwhile(lambda op: op == ("last",), ops)
    step = [op[0] for op in takewhile(lambda op: op[0] not in (*WAITS, *ACCESSES), behind)]
    return bool(step) and all(name in (*OPS, "own", "sum") for name in step)
