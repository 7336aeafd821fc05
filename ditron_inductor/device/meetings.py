"""The meeting: the ranks compare their compiled graphs before the first collective of each.

Every graph that holds collectives meets its peers once, on the host, when it runs for the first time, through the store
of the process group. docs/meeting.md says why, who meets whom, and how the ranks agree. The result is a `Decision`.

A rank pairs its entry with the entry of the same position in each peer's log. A peer whose newest entry is further on
has passed this point outside of any compiled graph, and will not come, unless both ranks wait and their GPUs have
nothing left to do: then both have launched the same collectives, and have only counted them differently. An entry that
an earlier group of the same name left in the store cannot have seen the present entries.

A graph that the passes left as it was ("bare") only posts its entry, because it runs in the same way whatever the
others decide.
"""

from __future__ import annotations

import json
import time
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ditron_inductor.device import groups
from ditron_inductor.device.agreements import Agreement, Agreements, Decision, decide, forms_of, unfused
from ditron_inductor.device.compilations import compilations
from ditron_inductor.device.facts import GraphFacts, GroupFacts, Verdict, compare, open_shapes, opened, ranks_text
from ditron_inductor.device.idle import counts_on_gpu, is_idle
from ditron_inductor.device.meeting_log import NOBODY, Elsewhere, GroupLog, LogEntry, position_of, program_of
from ditron_inductor.device.registry import FIRST_TIMEOUT_S
from ditron_inductor.errors import DitronDiverged, DitronHandshakeError, DitronOptionsMismatch, DitronStaleGraph

CLOSED = "closed"
CLOSED_FOR_GOOD = "closed for good"
"""What a register holds if its rank, or one that waited for it, runs plain: this time, or at all later calls too."""
FIRST_PAUSE_S = 0.0005
LONGEST_PAUSE_S = 0.02
COMPILING_S = FIRST_TIMEOUT_S
"""How long a rank waits at least if others compile: as long as in the first call of a site."""
GAVE_UP = "a peer gave up waiting"


class Holder:
    """Stands for the workspace of a call that has none, valid as long as what the ranks of the group decided."""

    def __init__(self, meetings: Meetings, process_group: dist.ProcessGroup) -> None:
        self._meetings = meetings
        self._version = meetings.version
        self._name = process_group.group_name
        self._group = weakref.ref(process_group)

    def is_current(self) -> bool:
        return self._version == self._meetings.version and groups.find(self._name) is self._group()

    def agreed(self, what: str) -> None:
        return None


class Meetings:
    """All meetings of a process, and the decisions made in them."""

    def __init__(self) -> None:
        self._logs: WeakKeyDictionary[dist.ProcessGroup, GroupLog] = WeakKeyDictionary()
        self._lives: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()
        self._agreements = Agreements()
        self._sites: WeakKeyDictionary[dist.ProcessGroup, dict[str, tuple[str, str]]] = WeakKeyDictionary()
        self._plain: dict[tuple[str, str], str] = {}
        self.version = 0
        """A counter that grows when something is agreed on, and when agreements are forgotten."""
        self.life = 0
        """A counter that grows when everything is forgotten."""

    def note_plain(self, facts: GraphFacts, reason: str) -> None:
        """Remembers, for reports, why the sites of a graph do not run."""
        for group in facts.groups:
            self._plain.update({(group.name, launch.site): reason for launch in group.after if launch.site})

    def plain_reason(self, group_name: str, site: str) -> str:
        """Returns why a site's graph runs as Inductor alone would run it; empty if it does not."""
        return self._plain.get((group_name, site), "")

    def library_reason(self, group_name: str, site: str) -> str:
        """Returns why a node runs by the library whatever the plan says; empty if the ranks have agreed on the node, or
        have not met because it is not a part of a compiled graph.
        """
        return self._site(group_name, site)[0]

    def leader(self, group_name: str, site: str) -> str:
        """Returns the local facts of rank 0 at a site that all ranks have, as JSON; empty if the ranks have not met."""
        return self._site(group_name, site)[1]

    def _site(self, group_name: str, site: str) -> tuple[str, str]:
        return self._sites.get(groups.find(group_name), {}).get(site, ("", ""))

    def known(self, facts: GraphFacts) -> Decision | None:
        """Returns the decision that follows from what was agreed before, or None. Raises DitronDiverged."""
        agreement = self._agreements.find(facts)
        if agreement is None:
            return None
        self._note_places(facts, agreement)
        return self._noted(decide(facts, agreement))

    def _note_places(self, facts: GraphFacts, agreement: Agreement) -> None:
        """Notes where the peers are in the program while this rank runs the graph."""
        for group in facts.groups if agreement.plain else ():
            log = self._log(group.name)
            for peer, count in agreement.counts.get(group.name, {}).items():
                log.runs_plain(peer, position_of(log.group, group) + count)

    def stopped(self, facts: GraphFacts) -> None:
        """Notes that a graph ends before its first collective on all ranks, as an option of all of them asks for."""
        for group in facts.groups:
            log = self._log(group.name)
            log.stopped(position_of(log.group, group))

    def forget(self, process_group: dist.ProcessGroup, life: str) -> None:
        """Forgets what a group decided, so that its ranks, which met in a session `life`, meet anew for all graphs."""
        self._lives[process_group] = life
        self._logs.pop(process_group, None)
        # A graph of several groups may be kept with any of them.
        self._agreements.forget()
        self._sites = WeakKeyDictionary()
        self._plain = {}
        self.version += 1
        self.life += 1

    def meet(self, facts: GraphFacts, limit_s: float) -> Decision:
        """Reaches an agreement with the peers of a graph that is about to run. Peers that will not come are detected.
        Raises DitronStaleGraph, DitronOptionsMismatch and DitronDiverged, the latter two on all ranks alike, and
        DitronHandshakeError when a store cannot be reached.
        """
        began = time.monotonic()
        check_world_sizes(facts)
        other = self._agreements.find_other(facts)
        kept = self._agreements.kept(facts) if other is None else {}
        # If the peers may run another form of this graph, and wait for it, a bare graph waits too.
        touched = [
            group
            for group in facts.groups
            if other is not None or not group.is_bare or (group.name in kept and kept[group.name].has_nodes)
        ]
        try:
            if not touched:
                for group in facts.groups:
                    log = self._log(group.name)
                    log.post(NOBODY, position_of(log.group, group), group, facts.options, idle=False)
                return Decision()
            meeting = _Meeting([self._log(group.name) for group in touched], touched, facts, limit_s, kept)
            found = meeting.hold(other is None)
        except dist.DistError as exc:
            raise DitronHandshakeError(
                group_name=facts.groups[0].name,
                rank=groups.resolve(facts.groups[0].name).rank,
                seconds=time.monotonic() - began,
                purpose="compare a graph with its peers'",
                missing=f"the store of the group ({str(exc).splitlines()[0]})",
            ) from exc
        if isinstance(found, Decision):
            if other is not None:
                self._agreements.keep(facts, other)
                return self._noted(decide(facts, other))
            if found.final:
                self._agreements.keep(facts, Agreement(plain=found.plain))
            return found
        if meeting.apart and found.plain:
            # What was agreed goes on in some groups, so the whole graph cannot run as Inductor alone would run it.
            found = Agreement(forms={group.name: unfused(group, found.plain) for group in touched})
        for name in meeting.apart:
            found = found.and_of(kept[name])
        self._agreements.keep(facts, found)
        self._note_places(facts, found)
        # Graphs that posted their facts and went on have to follow the agreement from now on.
        self.version += 1
        return self._noted(decide(facts, found))

    def _noted(self, decision: Decision) -> Decision:
        said = {key: (reason, "") for key, reason in decision.library.items()}
        said |= {key: ("", leader) for key, leader in decision.leader.items()}
        for (group_name, site), texts in said.items():
            self._sites.setdefault(groups.find(group_name), {})[site] = texts
        return decision

    def _log(self, group_name: str) -> GroupLog:
        process_group = groups.find(group_name)
        log = self._logs.get(process_group)
        if log is None:
            log = GroupLog(groups.resolve(process_group), self._lives.get(process_group, "first"))
            self._logs[process_group] = log
        return log


class _Meeting:
    """One meeting of one graph. kept: what may go on, by group, if ranks of the group do not come, and run that. apart:
    the groups of which this was assumed in the end; they are not among `logs` then.
    """

    def __init__(
        self,
        logs: Sequence[GroupLog],
        touched: Sequence[GroupFacts],
        facts: GraphFacts,
        limit_s: float,
        kept: Mapping[str, Agreement],
    ) -> None:
        self.logs = logs
        self.kept = kept
        self.apart: list[str] = []
        self._names = [group.name for group in facts.groups]
        self.uid = uuid.uuid4().hex
        self.store = registers(logs[0].group)
        # Only NCCL launches on a device what the peers have to launch too.
        idle = all(counts_on_gpu(log.group) for log in logs) and is_idle(limit_s / 4)
        self.limit_s = limit_s
        self.began = time.monotonic()
        self.deadline = self.began + limit_s
        self.compiled = compilations.counts()[1]
        self.own = [
            log.post(self.uid, position_of(log.group, group), group, facts.options, idle)
            for log, group in zip(logs, touched, strict=True)
        ]

    def hold(self, believe_bare: bool) -> Agreement | Decision:
        """Waits for the peers, compares the graphs, and returns the agreement. If a rank does not come, it returns a
        decision without an agreement. believe_bare: whether to assume that a peer that does not come runs the bare
        graph that it once posted.
        """
        found: list[dict[int, LogEntry]] = [{log.group.rank: own} for log, own in zip(self.logs, self.own, strict=True)]
        decision = self._held(found, believe_bare)
        if isinstance(decision, Decision):
            # For an agreement the same is noted whenever its graph runs.
            for log, seen in zip(self.logs, found, strict=True):
                for peer, entry in seen.items():
                    log.runs_plain(peer, entry.position + len(entry.facts.before))
            return decision
        counts = {
            log.group.name: {peer: len(entry.facts.before) for peer, entry in seen.items()}
            for log, seen in zip(self.logs, found, strict=True)
        }
        lists = {
            log.group.name: (own.facts.before, [entry.facts.before for entry in seen.values()])
            for log, own, seen in zip(self.logs, self.own, found, strict=True)
            if len({len(entry.facts.before) for entry in seen.values()}) == 1
        }
        sizes = {
            name: opened([[launch.numel for launch in before] for before in every])
            for name, (_, every) in lists.items()
        }
        shapes = {name: open_shapes(own, every) for name, (own, every) in lists.items()}
        return replace(decision, counts=counts, sizes=sizes, shapes=shapes)

    def _held(self, found: list[dict[int, LogEntry]], believe_bare: bool) -> Agreement | Decision:
        """Returns what is decided, and fills in the entries of the peers, by group and rank."""
        for _ in self._polls():
            problem = self._collect(found)
            if problem is not None:
                return self._close(problem)
            if not self._missing(found):
                break
        else:
            for log, own, seen in zip(self.logs, self.own, found, strict=True) if believe_bare else ():
                seen |= {rank: entry for rank in self._absent(log, seen) if (entry := log.bare(own, rank)) is not None}
            if self._missing(found) and not self._leave_apart(found):
                return self._close(Elsewhere(self._missing(found), False))
        entries = [[seen[rank] for rank in sorted(seen)] for seen in found]
        verdicts = [compare([entry.facts for entry in ranks], [entry.options for entry in ranks]) for ranks in entries]
        names = [_members(log.group) for log in self.logs]
        errors = [_error(log, verdict) for log, verdict in zip(self.logs, verdicts, strict=True)]
        said = {
            "seen": {name: [entry.uid for entry in ranks] for name, ranks in zip(names, entries, strict=True)},
            "plain": next((verdict.plain for verdict in verdicts if verdict.plain), ""),
            "error": next((error for error in errors if error is not None), None),
            # By number, since the names of a group's counterparts differ between ranks.
            "apart": [self._names.index(name) for name in self.apart],
        }
        text = json.dumps(said)
        if self._write(self.uid, text) != text:
            return self._close(Elsewhere(GAVE_UP, False))
        return self._conclude(said, verdicts)

    def _leave_apart(self, found: list[dict[int, LogEntry]]) -> bool:
        """Takes the groups of which ranks are missing out of the meeting, and returns True, if something goes on in
        each of them, and all ranks of another group have come. Those take as long to see that somebody is missing,
        from when the last of them came.
        """
        whole = [not self._absent(log, seen) for log, seen in zip(self.logs, found, strict=True)]
        missing = [log.group.name for log, come in zip(self.logs, whole, strict=True) if not come]
        if not any(whole) or not all(name in self.kept for name in missing):
            return False
        self.apart = missing
        self.logs = [log for log, come in zip(self.logs, whole, strict=True) if come]
        self.own = [entry for entry, come in zip(self.own, whole, strict=True) if come]
        found[:] = [seen for seen, come in zip(found, whole, strict=True) if come]
        self.deadline = time.monotonic() + 2 * self.limit_s
        return True

    def _collect(self, found: list[dict[int, LogEntry]]) -> Elsewhere | None:
        """Reads the logs of the ranks that are missing. Returns the reason if one of them will not come."""
        if self._read(self.uid) is not None:
            return Elsewhere(GAVE_UP, False)
        for log, own, seen in zip(self.logs, self.own, found, strict=True):
            for peer in self._absent(log, seen):
                entry = log.find(own, peer, self._waits)
                if isinstance(entry, Elsewhere):
                    return entry
                if entry is None:
                    continue
                said = None if entry.uid == NOBODY else self._read(entry.uid)
                closed = said in (CLOSED, CLOSED_FOR_GOOD)
                if closed and program_of(entry.facts) != program_of(own.facts):
                    # The entry is that of an earlier graph, behind which only fused calls have run.
                    continue
                seen[peer] = entry
                if closed:
                    # A peer that does not come again is not waited for again.
                    gave_up = f"{ranks_text([peer])} gave up waiting at this point"
                    return Elsewhere(gave_up, said == CLOSED_FOR_GOOD)
        return None

    def _conclude(self, own: Mapping[str, Any], verdicts: Sequence[Verdict]) -> Agreement | Decision:
        """Reads the registers of all ranks that are connected with this one, and decides by all of them."""
        said = {self.uid: own}
        open_ones = [uid for uids in own["seen"].values() for uid in uids if uid not in (self.uid, NOBODY)]
        while open_ones:
            uid = open_ones.pop()
            if uid in said:
                continue
            text = self._wait_for(uid)
            if text in (CLOSED, CLOSED_FOR_GOOD):
                return Decision(plain=GAVE_UP, final=text == CLOSED_FOR_GOOD)
            said[uid] = json.loads(text)
            for uids in said[uid]["seen"].values():
                open_ones += [other for other in uids if other not in said and other != NOBODY]
        if not _fit(said):
            return Decision(plain="the ranks met others than they were met by", final=False)
        if any(register["apart"] != own["apart"] for register in said.values()):
            return Decision(plain="not all ranks met in the same groups", final=False)
        first = sorted(said)
        for uid in first:
            if said[uid]["error"] is not None:
                kind, fields = said[uid]["error"]
                raise DitronOptionsMismatch(**fields) if kind == "options" else DitronDiverged(**fields)
        plain = next((said[uid]["plain"] for uid in first if said[uid]["plain"]), "")
        forms = {
            log.group.name: forms_of(entry.facts, verdict)
            for log, entry, verdict in zip(self.logs, self.own, verdicts, strict=True)
        }
        moved = {
            log.group.name: (entry.facts.moved, entry.facts.structure)
            for log, entry in zip(self.logs, self.own, strict=True)
            if entry.facts.moved
        }
        return Agreement(plain=plain, forms={} if plain else forms, moved=moved)

    @staticmethod
    def _absent(log: GroupLog, seen: Mapping[int, LogEntry]) -> list[int]:
        return [rank for rank in range(log.group.world_size) if rank not in seen]

    def _missing(self, found: Sequence[Mapping[int, LogEntry]]) -> str:
        """Returns a sentence that names the ranks that have not come; empty if all have."""
        missing = [
            f"{ranks_text(absent)} of group '{log.group.name}'"
            for log, seen in zip(self.logs, found, strict=True)
            if (absent := self._absent(log, seen))
        ]
        waited_s = max(self.limit_s, round(time.monotonic() - self.began))
        return f"{', '.join(missing)} did not bring a compiled graph within {waited_s:g} s" if missing else ""

    def _close(self, why: Elsewhere) -> Decision:
        held = self._write(self.uid, CLOSED_FOR_GOOD if why.for_good else CLOSED)
        return Decision(plain=why.reason, final=held == CLOSED_FOR_GOOD)

    def _wait_for(self, uid: str) -> str:
        """Waits for a register and returns what it ends with: "closed" if its owner does not write to it in time."""
        for _ in self._polls():
            text = self._read(uid)
            if text is not None:
                return text
        return self._write(uid, CLOSED)

    def _polls(self) -> Iterator[None]:
        """Yields with growing pauses until the time is up, at least once."""
        pause_s = FIRST_PAUSE_S
        while True:
            yield
            if time.monotonic() >= self.deadline and not self._has_more_time():
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _has_more_time(self) -> bool:
        """Begins the time anew if a rank compiles, or has compiled in the meantime: it may have been this graph."""
        now, last = time.monotonic(), self.began + COMPILING_S
        compiling, compiled = compilations.counts()
        if now >= last or not (compiling or compiled != self.compiled):
            return False
        self.deadline, self.compiled = min(now + self.limit_s, last), compiled
        return True

    def _waits(self, uid: str) -> bool:
        """Returns whether the owner of a register waits for this rank: it has not written, or has seen this entry."""
        if uid == NOBODY:
            return False
        text = self._read(uid)
        if text in (CLOSED, CLOSED_FOR_GOOD):
            return False
        return text is None or any(self.uid in uids for uids in json.loads(text)["seen"].values())

    def _read(self, uid: str) -> str | None:
        return self.store.get(uid).decode() if self.store.check([uid]) else None

    def _write(self, uid: str, text: str) -> str:
        """Tries to write `text` into a register, and returns what the register holds then."""
        held: str = self.store.compare_set(uid, "", text).decode()
        return held


def check_world_sizes(facts: GraphFacts) -> None:
    """Checks that all groups have the sizes for which the graph was compiled. Raises DitronStaleGraph."""
    for group in facts.groups:
        size = groups.find(group.name).size()
        if size != group.world_size:
            raise DitronStaleGraph(group_name=group.name, compiled=group.world_size, found=size)


def registers(group: groups.Group) -> dist.Store:
    """Returns the store that all groups of a process share, or the group's own store if there is no default group."""
    shared = groups.store_of_job("registers")
    return dist.PrefixStore("registers", group.store) if shared is None else shared


def _members(group: groups.Group) -> str:
    """A name of the group that all of its ranks know it by."""
    return f"{group.name} {','.join(map(str, group.global_ranks))}"


def _fit(said: Mapping[str, Mapping[str, Any]]) -> bool:
    """Returns whether all who met in a group saw the same entries there."""
    seen: dict[str, list[str]] = {}
    for register in said.values():
        for members, uids in register["seen"].items():
            if seen.setdefault(members, uids) != uids:
                return False
    return all(uid in said for uids in seen.values() for uid in uids if uid != NOBODY)


def _error(log: GroupLog, verdict: Verdict) -> list[Any] | None:
    """Returns the error of a verdict in the form in which the ranks exchange it."""
    if verdict.options:
        return ["options", {"group_name": log.group.name, "differences": verdict.options}]
    if verdict.diverged is not None:
        number, rank, own, peer, other = verdict.diverged
        where = f"collective {number} of a graph, "
        return ["diverged", {"rank": rank, "site": where + own, "peer": peer, "peer_site": where + other}]
    return None


meetings = Meetings()
"""The meetings of this process."""
