"""The log in which a rank tells its peers which compiled graphs it is about to run, one for each group."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from ditron_inductor.device import groups
from ditron_inductor.device.facts import GraphFacts, GroupFacts, group_of, ranks_text

NOBODY = ""
"""The uid of the entry of a bare graph, which has no register."""


@dataclass(frozen=True)
class LogEntry:
    """One line of a rank's log. uid: the name of its register, empty for a bare graph. idle: whether the rank's device
    had nothing left to do. attempt: how often the rank has posted these facts, this time included. facts, options: see
    facts.py.
    """

    uid: str
    position: int
    idle: bool
    attempt: int
    facts: GroupFacts
    options: Mapping[str, str]


@dataclass(frozen=True)
class Elsewhere:
    """Why a peer does not come. for_good: whether it will not come the next time either."""

    reason: str
    for_good: bool


class GroupLog:
    """The entries that one process has written and read in the logs of one group."""

    def __init__(self, group: groups.Group, life: str) -> None:
        self.group = group
        self.life = life
        self.store = group.store
        self._written = 0
        self._read = [0] * group.world_size
        self._inside = [0] * group.world_size
        # How much further than this rank a peer counts at the same point of the program.
        self._ahead = [0] * group.world_size
        self._bare: dict[tuple[int, str], LogEntry] = {}
        self._posted: Counter[str] = Counter()

    def post(self, uid: str, position: int, facts: GroupFacts, options: Mapping[str, str], idle: bool) -> LogEntry:
        """Appends an entry to this rank's log."""
        value = {"uid": uid, "position": position, "idle": idle, "options": options}
        value["facts"] = json.loads(GraphFacts((facts,)).text())
        key = GraphFacts((facts,), options).key
        self._posted[key] += 1
        value["attempt"] = attempt = self._posted[key]
        self.store.set(self._place(self.group.rank, self._written), json.dumps(value))
        self._written += 1
        return LogEntry(uid, position, idle, attempt, facts, options)

    def find(self, own: LogEntry, peer: int, waits: Callable[[str], bool]) -> LogEntry | Elsewhere | None:
        """Returns the peer's entry at the position of `own`, or why there will be none, or None if it is not there yet.
        An entry of an earlier position is skipped. A bare entry is remembered, because its rank posts it only once.
        waits: whether the owner of a register waits for this rank.
        """
        while True:
            found = self._look(peer)
            if found is None:
                if own.position >= self._inside[peer]:
                    return None
                return Elsewhere(f"{ranks_text([peer])} is inside a graph that began earlier", True)
            if own.idle and found.position != own.position:
                entry = self._beside(own, peer, waits)
                if entry is not None:
                    return entry
            if found.position > own.position:
                if own.idle and not waits(found.uid):
                    # An entry of long ago, if its rank has only counted more. It may come yet.
                    return self.bare(own, peer)
                passed = Elsewhere(f"{ranks_text([peer])} ran this part outside of a compiled graph", False)
                return self.bare(own, peer) or passed
            self._consume(peer, found)
            if own.idle and found.uid == NOBODY and program_of(found.facts) != program_of(own.facts):
                # If ranks count differently, it is an entry of long ago.
                continue
            if found.position == own.position:
                # If ranks count differently, two different calls of one graph must not be paired.
                if found.uid == NOBODY or found.attempt == own.attempt:
                    return found
                return Elsewhere(f"{ranks_text([peer])} has come {found.attempt} times, not {own.attempt}", False)
            self.runs_plain(peer, found.position + len(found.facts.before))

    def _beside(self, own: LogEntry, peer: int, waits: Callable[[str], bool]) -> LogEntry | None:
        """Returns the peer's entry for the same collectives if both ranks wait with nothing left to do: then all that
        one of them has launched was launched by both, whatever they have counted. None if there is no such entry.
        """
        passed: list[LogEntry] = []
        while (entry := self._look(peer, len(passed))) is not None:
            if entry.idle and waits(entry.uid):
                if entry.attempt != own.attempt or program_of(entry.facts) != program_of(own.facts):
                    return None
                for one in (*passed, entry):
                    self._consume(peer, one)
                self._ahead[peer] += entry.position - own.position
                self._inside[peer] = min(self._inside[peer], own.position)
                return replace(entry, position=own.position)
            passed.append(entry)
        return None

    def _consume(self, peer: int, entry: LogEntry) -> None:
        """Goes on to the peer's next entry."""
        self._read[peer] += 1
        if entry.uid == NOBODY:
            self._bare[peer, program_of(entry.facts)] = entry

    def bare(self, own: LogEntry, peer: int) -> LogEntry | None:
        """Returns the entry that the peer posted for a bare graph with the same collectives; None if it never did."""
        return self._bare.get((peer, program_of(own.facts)))

    def runs_plain(self, peer: int, position: int) -> None:
        """Notes that up to a position the peer is in a graph whose collectives are all the library's."""
        self._inside[peer] = max(self._inside[peer], position)

    def stopped(self, position: int) -> None:
        """Notes that no peer is in a graph that goes on behind a position."""
        self._inside = [min(inside, position) for inside in self._inside]

    def _look(self, peer: int, further: int = 0) -> LogEntry | None:
        """Returns the peer's next entry, or one that is further on; None if it is not there yet."""
        key = self._place(peer, self._read[peer] + further)
        if not self.store.check([key]):
            return None
        value = json.loads(self.store.get(key))
        facts = group_of(value["facts"]["groups"][0])
        position = value["position"] - self._ahead[peer]
        return LogEntry(value["uid"], position, value["idle"], value["attempt"], facts, value["options"])

    def _place(self, rank: int, index: int) -> str:
        return f"meetings/{self.life}/{rank}/{index}"


def program_of(facts: GroupFacts) -> str:
    """Returns the group's collectives and the lines that launch them, equal on all ranks of one program."""
    return json.dumps([[launch.wire, launch.place] for launch in facts.before])


def position_of(group: groups.Group, facts: GroupFacts) -> int:
    """Returns the number of collectives that the group's library has launched so far for the device of the graph, which
    all ranks count in the same way; 0 if the library does not count.
    """
    process_group = group.process_group()
    launches = facts.before or facts.after
    if process_group is None:
        return 0
    try:
        backend = process_group._get_backend(torch.device(launches[0].device_type or "cpu"))
        return int(backend._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except (RuntimeError, AttributeError):
        return 0
