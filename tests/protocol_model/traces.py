"""Recorded events of all ranks as steps of the model (recorder.py records them, follow.py takes the steps).

    refusals(events)      [] if what the ranks did is a path of the model, else where it is not

What a kernel does with many chunks, tiles and pieces the model does with one of each: a trace is looked at once for
every flag row, with what belongs to that row alone. Which row a byte belongs to follows from what the ranks did: it is
the first one that its writer published to the reader behind the store, and that the reader had waited for before the
load. A load of what a peer has stored without such a row is no step of the model, nor is a store for which the program
has not seen the credits of all peers.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence

from tests.protocol_model.follow import Taken, follow
from tests.protocol_model.launch import PULLED, PULLED_RESULT, RESULT
from tests.protocol_model.launches import Launched, Op, Use, region_of
from tests.protocol_model.recorder import Event
from tests.protocol_model.state import Call, Capture, Grow, Poisoned, Raised, Reset, Scenario
from tests.protocol_model.state import Event as Act


def refusals(traces: Sequence[Sequence[Event]], *, replayed: bool = False) -> list[str]:
    """Why what the ranks did is no path of the model, for each group of ranks; [] if it is one.

    replayed: calls take the slots that they are given, as those of a captured graph do, not one after the other.
    """
    found = []
    groups = sorted({event.group for trace in traces for event in trace if event.name == "begin"})
    for group in groups:
        of_group = [[event for event in trace if event.group == group] for trace in traces]
        members = [trace for trace in of_group if trace]
        ranks = [next(event.peer for event in trace if event.name == "begin") for trace in members]
        ordered = [trace for _, trace in sorted(zip(ranks, members, strict=True), key=lambda pair: pair[0])]
        found += [f"group {group}: {text}" for text in _Group(ordered, replayed).refusals()]
    return found


class _Group:
    """The traces of one group, by rank."""

    def __init__(self, traces: list[list[Event]], replayed: bool) -> None:
        self.replayed = replayed
        self.world = len(traces)
        self.scripts: list[list[Act]] = []
        self.steps: list[list[Taken | Use]] = []
        self.problems: list[str] = []
        for rank, trace in enumerate(traces):
            script, steps = self._read(rank, trace)
            self.scripts.append(script)
            self.steps.append(steps)
        self.scripts = _aligned(self.scripts)

    def refusals(self) -> list[str]:
        launches = [Launched(there, self.world) for there in self._together()]
        rows = [launch.rows() for launch in launches]
        if self.problems:
            return self.problems
        scenario = Scenario(scripts=tuple(map(tuple, self.scripts)), modulus=1 << 20, tiles=1)
        found = []
        for which in range(max((len(one) for of_launch in rows for one in of_launch), default=1)):
            chosen = [{one[which % len(one)] for one in of_launch if one} for of_launch in rows]
            taken = tuple(self._taken(rank, launches, chosen) for rank in range(self.world))
            refusal = follow(scenario, taken)
            if refusal is not None:
                found.append(f"flag row {which}: {refusal}")
        return found

    def _together(self) -> list[dict[int, Use]]:
        """The uses of all ranks that are one launch, by their place in the scripts."""
        found: dict[int, dict[int, Use]] = defaultdict(dict)
        for rank, steps in enumerate(self.steps):
            places = [place for place, act in enumerate(self.scripts[rank]) if isinstance(act, Call)]
            uses = [step for step in steps if isinstance(step, Use)]
            for place, use in zip(places, uses, strict=True):
                use.place = place
                found[place][rank] = use
        return [found[place] for place in sorted(found)]

    def _read(self, rank: int, trace: list[Event]) -> tuple[list[Act], list[Taken | Use]]:
        """The script of a rank, and its steps."""
        script: list[Act] = []
        steps: list[Taken | Use] = []
        use: Use | None = None
        meetings: set[str] = set()
        come: set[str] = set()
        collective = ""
        for event in trace:
            if event.name == "begin":
                self._raise(script, steps, use)
                use = Use(event)
                steps.append(use)
                if event.epoch and not any(isinstance(act, Poisoned) for act in script[-2:]):
                    script.append(Poisoned())
                script.append(Call("", str(event.site), slot=event.slot if self.replayed else None))
            elif event.name in ("come", "met", "zero"):
                come |= {event.text} if event.name == "come" else set()
                begun = {"reset the group: end all kernels": "reset"}.get(event.text, "")
                begun = "growth" if event.text.startswith("make room for") else begun
                if event.name == "come" and begun:
                    self._raise(script, steps, use)
                    use, collective = None, begun
                    meetings = set()
                    script.append(Reset() if begun == "reset" else Grow())
                    steps.append(Taken(event.time, f"enters {begun}"))
                elif event.name == "met":
                    if event.text not in come:
                        self.problems.append(f"rank {rank} has met the others to {event.text} without coming")
                    meetings.add(begun or event.text)
                    if event.text.startswith(("reset the group: begin again", "begin to use the memory for")):
                        steps.append(Taken(event.time, f"leaves {collective}"))
                elif event.name == "zero":
                    if collective not in meetings:
                        self.problems.append(f"rank {rank} zeroes its memory before it has met the others")
                    own = "its memory" if collective == "reset" else "its new memory"
                    kept = f" without {event.text}" if event.text else ""
                    steps.append(Taken(event.time, f"zeroes {own}{kept}"))
            elif use is not None:
                use.events.append(event)
                use.failed |= event.name == "fail"
                if event.name == "end":
                    finished, use = use, None
                    assert finished is not None
        kinds = iter([step for step in steps if isinstance(step, Use)])
        failed = any(step.failed or step.begin.epoch for step in steps if isinstance(step, Use)) or any(
            isinstance(act, Raised) for act in script
        )
        return [self._call(act, next(kinds), failed) if isinstance(act, Call) else act for act in script], steps

    def _raise(self, script: list[Act], steps: list[Taken | Use], use: Use | None) -> None:
        """A use that did not come to its end, or failed: the rank raises behind it."""
        last = [step for step in steps if isinstance(step, Use)][-1:]
        if script and isinstance(script[-1], Call) and (use is not None or any(one.failed for one in last)):
            script.append(Raised())

    def _call(self, act: Call, use: Use, may_fail: bool) -> Call:
        try:
            return act._replace(kind=use.kind(), may_fail=may_fail)
        except KeyError as missing:
            self.problems.append(str(missing))
            return act._replace(kind="push")

    def _taken(self, rank: int, launches: list[Launched], chosen: list[set[int]]) -> tuple[Taken, ...]:
        """The steps of a rank with one row of each phase of every launch."""
        found: list[Taken] = []
        mine = [(launch, rows) for launch, rows in zip(launches, chosen, strict=True) if rank in launch.uses]
        of_launch = iter(mine)
        for step in self.steps[rank]:
            if isinstance(step, Taken):
                found.append(step)
                continue
            label = f"launches {step.begin.site}: call {step.place}, slot {step.begin.slot}, epoch {step.epoch}"
            found.append(Taken(step.begin.time, "returns NaN" if step.begin.epoch else label))
            launch, rows = next(of_launch)
            taken = _of_rows(launch.kinds[rank], launch.ops(rank), rows)
            found += _in_order(taken, rank, self.world)
        return tuple(found)


def _aligned(scripts: list[list[Act]]) -> list[list[Act]]:
    """Scripts in which each reset and growth has one place on all ranks: those that failed made fewer calls before."""
    parts: list[list[list[Act]]] = []
    for script in scripts:
        parts.append([[]])
        for act in script:
            if isinstance(act, (Reset, Grow)):
                parts[-1].append([])
            parts[-1][-1].append(act)
    lengths = [max(map(len, of_place)) for of_place in itertools.zip_longest(*parts, fillvalue=[])]
    return [
        [act for part, length in zip(of_rank, lengths, strict=False) for act in _filled(part, length)]
        for of_rank in parts
    ]


def _filled(part: list[Act], length: int) -> list[Act]:
    return [*part, *[Capture(0)] * (length - len(part))]


def _of_rows(kind: str, ops: Iterable[Op], rows: set[int]) -> list[Taken]:
    """The steps that belong to these rows, each once: again only where it comes behind the flag that covers it."""
    found: list[Taken] = []
    done: set[str] = set()
    for op in ops:
        if op.row >= 0 and op.row not in rows:
            continue
        label = op.label.format(region_of(kind, op.row))
        name, _, rest = label.partition(" ")
        if name == "publish":
            # A store to the same place is a new step now.
            peer, region = rest.split()[:2]
            fills = {f"fill {PULLED if int(region) != RESULT else PULLED_RESULT} {part}" for part in range(16)}
            done -= {f"write {peer} {region}", *fills}
        elif label in done:
            continue
        done.add(label)
        found.append(Taken(op.time, label))
    return found


PEER = {"write": 1, "publish": 1, "sign": 1, "drop": 1, "fill": 2, "read": 2}
"""Steps whose order among peers is free, one behind the other, and the word of their labels that is the peer."""


def _in_order(taken: list[Taken], rank: int, world: int) -> list[Taken]:
    """Stores to several peers, one behind the other, in the model's order: rank + 1, ..; flags and copies likewise.

    Loads that are added up are no copies: they have to come in the order of ranks.
    """
    found: list[Taken] = []
    for (name, is_free), run in itertools.groupby(taken, key=_sort_of):
        steps = list(run)
        labels = [one.label for one in steps]
        if is_free:
            labels.sort(key=lambda label, name=name: (int(label.split()[PEER[name]]) - rank - 1) % world)  # type: ignore[misc]
        found += [Taken(one.time, label) for one, label in zip(steps, labels, strict=True)]
    return found


def _sort_of(step: Taken) -> tuple[str, bool]:
    """The name of a step, and whether it may change places with others of that name."""
    name, *rest = step.label.split()
    is_copy = name != "read" or rest[:1] == [str(RESULT)]
    return name, name in PEER and is_copy and all(word.isdigit() for word in rest)
