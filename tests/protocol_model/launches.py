"""One launch on all ranks as steps of the model: what belongs to which flag row, and what a program had seen before it.

A byte belongs to the row that its writer published first, of a phase, behind the store, and that its reader had waited
for before the load, of two phases the one waited for last. What a program knows is what it has looked at itself, and
what kernels before it have.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ditron_inductor.core import layout as words
from tests.protocol_model.launch import PULLED, PULLED_RESULT, PULLS, RESULT
from tests.protocol_model.recorder import Event

KINDS = {
    "all_gather_matmul.tile": "all_gather_matmul",
    "all_gather_attention.tile": "all_gather_attention",
    "all_to_all_matmul.tile": "all_to_all_matmul",
    "flash_decode.tile": "flash_decode",
    "matmul_all_gather.few_rows": "few_rows",
    "matmul_all_gather.many_rows": "matmul_all_gather",
    "matmul_all_reduce.one_shot": "one_shot",
    "matmul_all_reduce.two_shot": "matmul_all_reduce",
    "matmul_all_to_all.tile": "matmul_all_to_all",
    "matmul_reduce_scatter.tile": "matmul_reduce_scatter",
    "all_reduce_rms_norm.slices": "in_slices",
    "all_reduce_rms_norm.norm_in_band": "in_band",
    "flash_decode.decode_in_band": "in_band",
}
"""The model's kind by the module of the kernel."""

SHOTS = ("all_reduce.all_reduce_kernel", "all_reduce_rms_norm.norm_kernel")
"""Kernels that run in one shot or in two."""

OF_EXPERTS = {
    "grouped_matmul_all_reduce": "reduced_experts",
    "grouped_matmul_reduce_scatter": "scattered_experts",
}
"""The model's kind by the node's, which the name of a site ends with, for launches of `expert_sums.reduced_kernel`."""

PULLING = {
    "all_gather_attention": "pull_gather",
    "all_gather_matmul": "pull_gather",
    "all_to_all_matmul": "pull_pieces",
    "matmul_all_reduce": "pull_reduce",
    "matmul_all_reduce_rms_norm": "pull_reduce",
    "matmul_all_to_all": "pull_columns",
    "matmul_reduce_scatter": "pull_scatter",
}
"""The model's kind by the node's, which the name of a site ends with, for launches of `transfers`."""

BY_READER = ("pull_scatter", "pull_reduce", "pull_columns", "pull_pieces")
"""Kinds whose slots have a part for each reader."""

TWO_PHASES = {"pull_reduce": 16, "reduced_experts": 2}
"""From which row on flags are of results, where that is not the same as in kernels that push: of experts' reductions
this is the number of chunks, which is two in all recordings.
"""


class Op(NamedTuple):
    """A step of a launch: `{}` of the label stands for the region. row: the flag row, -1 where it is of none."""

    time: int
    label: str
    row: int = -1


@dataclass
class Use:
    """One launch of one rank; place: in its script."""

    begin: Event
    events: list[Event] = field(default_factory=list)
    failed: bool = False
    place: int = -1

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
                return PULLING[self._node_kind()]
            if name == "expert_sums.reduced_kernel":
                return OF_EXPERTS[self._node_kind()]
        raise KeyError(f"no kind of the model for {modules} at site {self.begin.text}")

    def _node_kind(self) -> str:
        return self.begin.text.partition(":")[2].partition(" ")[0].partition("[")[0]

    def _is_causal(self) -> bool:
        return ":causal" in self.begin.text


def region_of(kind: str, row: int) -> int:
    return RESULT if row >= TWO_PHASES.get(kind, words.RESULT_ROW.value) else 0


class Launched:
    """One launch on all ranks that came to it."""

    def __init__(self, uses: dict[int, Use], world: int) -> None:
        self.uses, self.world = uses, world
        self.kinds = {rank: self._kind(use) for rank, use in uses.items()}
        # By the owner of the memory: for each byte the store that came last, as a number in `stores`.
        self.stores: list[tuple[int, int]] = []
        self.rows_of: dict[tuple[int, int], dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        self.bad: set[tuple[int, int]] = set()
        self._ops: dict[int, list[Op]] = {}
        self._match()

    def rows(self) -> list[list[int]]:
        """The rows of each phase that anybody has published."""
        found: set[tuple[int, int]] = set()
        for rank, use in self.uses.items():
            for event in use.events:
                if event.name == "publish" and event.row < words.REVOKED_ROW.value:
                    found.add((region_of(self.kinds[rank], event.row), event.row))
        phases = sorted({region for region, _ in found})
        return [sorted(row for region, row in found if region == phase) for phase in phases]

    def ops(self, me: int) -> list[Op]:
        """The steps of a rank, in order."""
        if me not in self._ops:
            self._ops[me] = self._found(me)
        return self._ops[me]

    def _found(self, me: int) -> list[Op]:
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
            if use.begin.epoch and event.name in ("read", "revoked"):
                # Outputs are NaN, whatever is loaded.
                continue
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
            elif event.name == "close" and use.begin.epoch:
                continue
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
                            told.setdefault(region_of(self.kinds[rank], row), row)
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
                    part = me if kind in BY_READER and region_of(kind, row) != RESULT else source
                    region = PULLED_RESULT if region_of(kind, row) == RESULT else PULLED
                    label = f"pull {region} {part} {source}" if pulls else f"read {{}} {source}"
                    found.append(Op(event.time, label, row))
            return found
        if event.peer == me and not pulls:
            return []
        readers = dict(rows)
        # What nobody reads belongs to what is published next; so does what a rank that failed would have read.
        absent = [peer for peer in range(self.world) if peer not in self.uses or self.uses[peer].failed]
        for peer in [*(peer for peer in absent if pulls), *([event.peer] if not pulls else [])]:
            ahead = [row for when, row in self._published(me)[peer] if when > place]
            if peer != me and peer not in readers and (ahead or not pulls):
                readers[peer] = set(ahead[:1])
        found = []
        for reader, of_reader in sorted(readers.items()):
            for row in sorted(of_reader):
                result = region_of(kind, row) == RESULT
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
