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
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ditron_inductor.core import layout as words
from tests.protocol_model.follow import FAILURES, Taken, follow
from tests.protocol_model.launch import PULLED, PULLED_RESULT, PULLS, RESULT
from tests.protocol_model.recorder import Event
from tests.protocol_model.state import Call, Grow, Raised, Reset, Scenario
from tests.protocol_model.state import Event as Act

KINDS = {
    "all_gather_matmul.tile": "all_gather_matmul",
    "all_gather_attention.tile": "all_gather_attention",
    "all_gather_contract.tile": "all_gather_contract",
    "all_to_all_matmul.tile": "all_to_all_matmul",
    "flash_decode.tile": "flash_decode",
    "matmul_all_gather.few_rows": "few_rows",
    "matmul_all_gather.many_rows": "matmul_all_gather",
    "matmul_all_reduce.one_shot": "one_shot",
    "matmul_all_reduce.two_shot": "matmul_all_reduce",
    "matmul_all_to_all.tile": "matmul_all_to_all",
    "matmul_reduce_scatter.tile": "matmul_reduce_scatter",
    "all_reduce_rms_norm.slices": "in_slices",
    "all_reduce_rms_norm.in_band": "in_band",
    "flash_decode.in_band": "in_band",
}
"""The model's kind by the module of the kernel."""

SHOTS = ("matmul_all_reduce.all_reduce_kernel", "all_reduce_rms_norm.kernel")
"""Kernels that run in one shot or in two."""

PULLING = {
    "all_gather_attention": "pull_gather",
    "all_gather_contract": "pull_gather",
    "all_gather_matmul": "pull_gather",
    "all_to_all_matmul": "pull_pieces",
    "attention_reduce_scatter": "pull_scatter",
    "matmul_all_gather": "pull_product",
    "matmul_all_reduce": "pull_reduce",
    "matmul_all_reduce_rms_norm": "pull_reduce",
    "matmul_all_to_all": "pull_columns",
    "matmul_reduce_scatter": "pull_scatter",
}
"""The model's kind by the node's, which the name of a site ends with, for launches of `transfers`."""

BY_READER = ("pull_scatter", "pull_reduce", "pull_columns", "pull_pieces")
"""Kinds whose slots have a part for each reader."""

TWO_PHASES = {"pull_reduce": 16}
"""From which row on flags are of results, where that is not the same as in kernels that push."""


class Op(NamedTuple):
    """A step of a launch: `{}` of the label stands for the region. row: the flag row, -1 where it is of none."""

    time: int
    label: str
    row: int = -1


@dataclass
class Use:
    """One launch of one rank."""

    begin: Event
    events: list[Event] = field(default_factory=list)
    failed: bool = False

    @property
    def epoch(self) -> int:
        """Of the slot, as the first program read it."""
        found = [event.epoch for event in self.events if event.name == "epoch"]
        return found[0] + 1 if found else -1

    def kind(self) -> str:
        """The model's; KeyError where it has none for these kernels."""
        modules = [event.text.rpartition(".")[0] for event in self.events if event.name == "kernel"]
        for module in modules:
            name = ".".join(module.split(".")[-2:])
            if name in KINDS:
                kind = KINDS[name]
                return "causal_attention" if kind == "all_gather_attention" and self._is_causal() else kind
            if name in SHOTS:
                results = any(event.row >= words.RESULT_ROW.value for event in self.events if event.name == "publish"
                              and event.row != words.CREDIT_ROW.value)  # fmt: skip
                return "two_shots" if results else "one_shot"
            if name == "lowering.transfers":
                return PULLING[self.begin.text.partition(":")[2].partition(" ")[0].partition("[")[0]]
        raise KeyError(f"no kind of the model for {modules} at site {self.begin.text}")

    def _is_causal(self) -> bool:
        return ":causal" in self.begin.text


def refusals(traces: Sequence[Sequence[Event]]) -> list[str]:
    """Why what the ranks did is no path of the model, for each group of ranks; [] if it is one."""
    found = []
    groups = sorted({event.group for trace in traces for event in trace if event.name == "begin"})
    for group in groups:
        of_group = [[event for event in trace if event.group == group] for trace in traces]
        members = [trace for trace in of_group if trace]
        ranks = [next(event.peer for event in trace if event.name == "begin") for trace in members]
        ordered = [trace for _, trace in sorted(zip(ranks, members, strict=True), key=lambda pair: pair[0])]
        found += [f"group {group}: {text}" for text in _Group(ordered).refusals()]
    return found


class _Group:
    """The traces of one group, by rank."""

    def __init__(self, traces: list[list[Event]]) -> None:
        self.world = len(traces)
        self.scripts: list[list[Act]] = []
        self.steps: list[list[Taken | Use]] = []
        self.problems: list[str] = []
        for rank, trace in enumerate(traces):
            script, steps = self._read(rank, trace)
            self.scripts.append(script)
            self.steps.append(steps)

    def refusals(self) -> list[str]:
        uses = [[step for step in steps if isinstance(step, Use)] for steps in self.steps]
        most = max((len(of_rank) for of_rank in uses), default=0)
        ops: list[list[list[Op]]] = [[] for _ in range(self.world)]
        rows: list[list[list[int]]] = []
        for place in range(most):
            there = {rank: of_rank[place] for rank, of_rank in enumerate(uses) if place < len(of_rank)}
            launch = _Launch(there, self.world)
            for rank in there:
                ops[rank].append(launch.ops(rank))
            rows.append(launch.rows())
        if self.problems:
            return self.problems
        scenario = Scenario(scripts=tuple(map(tuple, self.scripts)), modulus=1 << 20, tiles=1)
        found = []
        for which in range(max((len(one) for of_launch in rows for one in of_launch), default=1)):
            chosen = [{one[which % len(one)] for one in of_launch if one} for of_launch in rows]
            taken = tuple(self._taken(rank, ops[rank], chosen) for rank in range(self.world))
            refusal = follow(scenario, taken)
            if refusal is not None:
                found.append(f"flag row {which}: {refusal}")
        return found

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
                script.append(Call("", str(event.site)))
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
                    steps.append(Taken(event.time, f"zeroes {own}"))
            elif use is not None:
                use.events.append(event)
                use.failed |= event.name == "fail"
                if event.name == "end":
                    finished, use = use, None
                    assert finished is not None
        kinds = iter([step for step in steps if isinstance(step, Use)])
        failed = any(step.failed for step in steps if isinstance(step, Use)) or any(isinstance(act, Raised) for act in script)
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

    def _taken(self, rank: int, ops: list[list[Op]], chosen: list[set[int]]) -> tuple[Taken, ...]:
        """The steps of a rank with one row of each phase of every launch."""
        found: list[Taken] = []
        launches = 0
        position = -1
        acts = [place for place, act in enumerate(self.scripts[rank]) if isinstance(act, Call)]
        for step in self.steps[rank]:
            if isinstance(step, Taken):
                found.append(step)
                continue
            position = acts[launches]
            label = f"launches {step.begin.site}: call {position}, slot {step.begin.slot}, epoch {step.epoch}"
            found.append(Taken(step.begin.time, label))
            call = self.scripts[rank][position]
            assert isinstance(call, Call)
            taken = _of_rows(call.kind, ops[launches], chosen[launches])
            found += _in_order(taken, rank, self.world)
            launches += 1
        return tuple(found)


def _of_rows(kind: str, ops: Iterable[Op], rows: set[int]) -> list[Taken]:
    """The steps that belong to these rows, each once: again only where it comes behind the flag that covers it."""
    found: list[Taken] = []
    done: set[str] = set()
    for op in ops:
        if op.row >= 0 and op.row not in rows:
            continue
        label = op.label.format(_region(kind, op.row))
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


def _in_order(taken: list[Taken], rank: int, world: int) -> list[Taken]:
    """Stores to several peers, one behind the other, in the model's order: rank + 1, ..; likewise flags."""

    def of_run(run: list[Taken]) -> list[Taken]:
        labels = sorted((one.label for one in run), key=lambda label: (int(label.split()[1]) - rank - 1) % world)
        return [Taken(one.time, label) for one, label in zip(run, labels, strict=True)]

    found: list[Taken] = []
    for name, run in itertools.groupby(taken, key=lambda one: one.label.split()[0]):
        plain = list(run)
        exact = all(len(one.label.split()) == len(plain[0].label.split()) for one in plain)
        found += of_run(plain) if exact and name in ("write", "publish", "sign", "drop") else plain
    return found


def _region(kind: str, row: int) -> int:
    return RESULT if row >= TWO_PHASES.get(kind, words.RESULT_ROW.value) else 0


class _Launch:
    """One launch on all ranks that came to it."""

    def __init__(self, uses: dict[int, Use], world: int) -> None:
        self.uses, self.world = uses, world
        self.kinds = {rank: self._kind(use) for rank, use in uses.items()}
        # By the owner of the memory: for each byte the store that came last, as a number in `stores`.
        self.stores: list[tuple[int, int]] = []
        self.rows_of: dict[tuple[int, int], dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        self.bad: set[tuple[int, int]] = set()
        self._match()

    def rows(self) -> list[list[int]]:
        """The rows of each phase that anybody has published."""
        found: set[tuple[int, int]] = set()
        for rank, use in self.uses.items():
            for event in use.events:
                if event.name == "publish" and event.row < words.REVOKED_ROW.value:
                    found.add((_region(self.kinds[rank], event.row), event.row))
        phases = sorted({region for region, _ in found})
        return [sorted(row for region, row in found if region == phase) for phase in phases]

    def ops(self, me: int) -> list[Op]:
        """The steps of a rank, in order."""
        use, kind = self.uses[me], self.kinds[me]
        right = use.begin.site, use.epoch
        found: list[Op] = []
        in_band = _InBand(self.uses, me)
        epochs = {event.epoch for event in use.events if event.name == "epoch"}
        if len(epochs) > 1:
            found.append(Op(use.begin.time, f"reads the epochs {sorted(epochs)}"))
        looked: dict[int, int] = {}
        pulled = -1
        for place, event in enumerate(use.events):
            when, other = event.time, event.peer != me
            strange = "" if (event.site, event.epoch) == right else " of another use"
            if event.name in ("write", "read"):
                if event.slot != use.begin.slot:
                    found.append(Op(when, f"{event.name} in slot {event.slot}"))
                elif event.name == "read" and kind in PULLS and other:
                    pulled = place
                found += self._access(me, place, event)
            elif event.name == "publish" and event.row == words.CREDIT_ROW.value:
                found.append(Op(when, f"gives {event.slot}.{event.epoch} to {event.peer}"))
            elif event.name == "publish" and event.row == words.REVOKED_ROW.value:
                found.append(Op(when, f"revoke {event.peer}{strange}"))
            elif event.name == "publish":
                if other:
                    found.append(Op(when, f"publish {event.peer} {{}}{strange}", event.row))
            elif event.name == "plain" and (kind != "in_band" or strange):
                found.append(Op(when, f"plain store of a flag{strange}"))
            elif event.name == "revoked":
                looked[event.peer] = place
            elif event.name == "fail":
                found.append(Op(when, event.text))
            elif event.name == "close":
                if (event.slot, event.epoch) != (use.begin.slot, use.epoch):
                    found.append(Op(when, "close of another use"))
                elif kind in PULLS:
                    peers = [peer for peer in range(self.world) if peer != me]
                    blind = any(looked.get(peer, -1) < pulled for peer in peers)
                    found.append(Op(when, "close without a look" if blind else "close"))
            else:
                found += in_band.ops(event)
        if not use.failed:
            found += in_band.unread()
        closed = sum(event.name == "close" for event in use.events)
        ended = any(event.name == "end" for event in use.events)
        if ended and closed != 1:
            found.append(Op(use.begin.time, f"closes its use {closed} times"))
        return found

    def _kind(self, use: Use) -> str:
        try:
            return use.kind()
        except KeyError:
            return ""

    def _match(self) -> None:
        """Find the rows of all loads of what peers have stored, and of these stores."""
        last: dict[int, Any] = {}
        for rank, use in self.uses.items():
            for place, event in enumerate(use.events):
                if event.name == "write":
                    size = int(event.places[-1]) + 1
                    of_owner = last.get(event.peer, np.full(0, -1, np.int64))
                    if of_owner.size < size:
                        of_owner = np.concatenate([of_owner, np.full(size - of_owner.size, -1, np.int64)])
                    of_owner[event.places] = len(self.stores)
                    last[event.peer] = of_owner
                    self.stores.append((rank, place))
        published = {rank: self._published(rank) for rank in self.uses}
        for rank, use in self.uses.items():
            known = _Known(use)
            for place, event in enumerate(use.events):
                known.look(event)
                if event.name != "read" or event.peer not in last:
                    continue
                of_owner = last[event.peer]
                inside = event.places[event.places < of_owner.size]
                found = np.unique(of_owner[inside]).tolist()
                if inside.size < event.places.size or -1 in found:
                    self.bad.add((rank, place))
                for number in found:
                    source, at = self.stores[number] if number >= 0 else (rank, -1)
                    if source == rank:
                        continue
                    rows = known.rows(source, event.program)
                    told = {}
                    for when, row in published[source][rank]:
                        if when > at and row in rows:
                            told.setdefault(_region(self.kinds[rank], row), row)
                    # Of a partial and of a result: what the reader has looked at last.
                    row = max(told.values(), key=lambda row: rows[row], default=-1)
                    if row < 0:
                        self.bad.add((rank, place))
                    else:
                        self.rows_of[rank, place][source].add(row)
                        self.rows_of[source, at][rank].add(row)

    def _published(self, rank: int) -> dict[int, list[tuple[int, int]]]:
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for place, event in enumerate(self.uses[rank].events):
            if event.name == "publish" and event.row < words.REVOKED_ROW.value:
                found[event.peer].append((place, event.row))
        return found

    def _access(self, me: int, place: int, event: Event) -> list[Op]:
        kind, rows = self.kinds[me], self.rows_of.get((me, place), {})
        pulls = kind in PULLS
        if event.name == "read":
            if (me, place) in self.bad:
                # Behind a wait that has failed it is not used.
                failed = any(one.name == "fail" for one in self.uses[me].events[:place])
                return [] if failed else [Op(event.time, "reads what no flag has told of")]
            found = []
            for source, of_source in sorted(rows.items()):
                for row in sorted(of_source):
                    part = me if kind in BY_READER and _region(kind, row) != RESULT else source
                    region = PULLED_RESULT if _region(kind, row) == RESULT else PULLED
                    label = f"pull {region} {part} {source}" if pulls else f"read {{}} {source}"
                    found.append(Op(event.time, label, row))
            return found
        if event.peer == me and not pulls:
            return []
        readers = dict(rows)
        if not readers and not pulls:
            # Nobody reads it: it belongs to what is published next.
            ahead = [row for when, row in self._published(me)[event.peer] if when > place]
            readers = {event.peer: set(ahead[:1])}
        found = []
        for reader, of_reader in sorted(readers.items()):
            for row in sorted(of_reader):
                result = _region(kind, row) == RESULT
                part = reader if kind in BY_READER and not result else me
                label = f"fill {PULLED_RESULT if result else PULLED} {part}" if pulls else f"write {event.peer} {{}}"
                bare = "" if result or self._has_credits(me, place) else " without credit"
                found.append(Op(event.time, label + bare, row))
        return found

    def _has_credits(self, me: int, place: int) -> bool:
        use = self.uses[me]
        known = _Known(use)
        for event in use.events[:place]:
            known.look(event)
        peers = {peer for peer in range(self.world) if peer != me}
        return peers <= known.credits(use.events[place].program)


class _Known:
    """What the programs of a launch have seen: of their own looks, and of those of the kernels before theirs."""

    def __init__(self, use: Use) -> None:
        self.right = use.begin.site, use.epoch
        self.slot = use.begin.slot
        self.flags: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        self.times: dict[tuple[int, int], int] = {}
        self.given: dict[int, list[tuple[int, int]]] = defaultdict(list)

    def look(self, event: Event) -> None:
        if event.slot != self.slot:
            return
        if event.name == "await" and (event.site, event.epoch) == self.right:
            self.flags[event.peer, event.row].append(event.program)
            self.times[event.peer, event.row] = event.time
        elif event.name == "credit" and event.epoch >= self.right[1] - 1:
            self.given[event.peer].append(event.program)

    def rows(self, source: int, program: tuple[int, int]) -> dict[int, int]:
        """The flag rows of `source` that a program knows of, and when somebody looked at them last."""
        known = ((row, by) for (peer, row), by in self.flags.items() if peer == source)
        return {row: self.times[source, row] for row, by in known if self._is_known(by, program)}

    def credits(self, program: tuple[int, int]) -> set[int]:
        """The peers whose credits it knows of."""
        return {peer for peer, by in self.given.items() if self._is_known(by, program)}

    @staticmethod
    def _is_known(by: list[tuple[int, int]], program: tuple[int, int]) -> bool:
        return any(one == program or (one[0] < program[0] or program[1] < 0) for one in by)


class _InBand:
    """The steps of a rank with data in band."""

    def __init__(self, uses: dict[int, Use], me: int) -> None:
        self.me = me
        self.sent: dict[int, Any] = {}
        for rank, use in uses.items():
            to_me = [event.places for event in use.events if event.name == "drop" and event.peer == me]
            if to_me:
                self.sent[rank] = np.concatenate(to_me)
        self.others = [rank for rank in uses if rank != me]
        signs = [event for event in uses[me].events if event.name == "sign"]
        self.use = signs[0].epoch if signs else -1
        self.site = uses[me].begin.site
        self.signed: set[tuple[Any, int]] = set()
        self.there: set[tuple[Any, int]] = set()

    def unread(self) -> list[Op]:
        """Programs that have looked for data, and whose last look did not show all of it with its sign."""
        programs = {program for program, _ in self.there | self.signed}
        whole = self.there & self.signed
        return [
            Op(0, f"uses data in band of {source} without its sign")
            for program, source in sorted((one, source) for one in programs for source in self.others)
            if (program, source) not in whole
        ]

    def ops(self, event: Event) -> list[Op]:
        area = self.use % words.IN_BAND_AREAS.value
        if event.name == "sign":
            wrong = (event.site, event.epoch, event.slot) != (self.site, self.use, area)
            return [Op(event.time, f"sign {event.peer}{' of another use' * wrong}")]
        if event.name == "drop":
            return [Op(event.time, f"drop {event.peer}{' elsewhere' * (event.slot != area)}")]
        if event.name == "clear":
            before = (self.use - 1) % words.IN_BAND_AREAS.value
            return [Op(event.time, f"clear{' elsewhere' * (event.slot != before)}")]
        if event.name == "signed" and event.slot == area:
            if (event.site, event.epoch) == (self.site, self.use):
                self.signed.add((event.program, event.peer))
        elif event.name == "look" and event.peer == self.me and event.slot == area:
            for source, places in self.sent.items():
                if np.intersect1d(places, event.places).size:
                    self.there.add((event.program, source))
        else:
            return []
        done = all((event.program, source) in self.signed & self.there for source in self.others)
        return [Op(event.time, f"watch {source}") for source in sorted(self.others)] if done else []


assert all(name in ("timeout", "diverged", "revoked") for name in FAILURES)
