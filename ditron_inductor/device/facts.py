"""The facts that a compiled graph tells the other ranks about its collectives, and the comparison of all ranks' lists.

`GraphFacts` travels as text: in the code of the compiled graph, so that a graph from a cache has it too, and through
the store when the ranks meet (see meetings.py). `compare` is a pure function of what all ranks have said, so all of
them reach the same answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any

SERVED_BY_LIBRARY = "all_reduce", "reduce_scatter", "all_gather"
"""Collectives whose Task nodes, when they run by `library`, issue exactly the collective that a rank without the node
issues. The nodes of all-to-alls are not among them, because they send the same elements in another order.
"""

CUDAGRAPHS = "triton.cudagraphs"
"""The option of Inductor that stands beside Ditron's among the options of a graph, because it decides how sites run.
With Inductor alone ranks may differ in it.
"""

EQUAL_SIZES = "all_reduce", "reduce_scatter", "all_gather"
"""Collectives to which every rank contributes the same number of elements."""


Shape = tuple[int | None, ...]
"""Sizes, of which None is a symbol."""


@dataclass(frozen=True)
class LaunchFacts:
    """One launch of a group: a collective, or a Task node.

    wire: the collective, its reduction and its dtype, as "all_reduce sum bfloat16"; if it is not equal on all ranks,
    the program is wrong. numel: elements that this rank contributes, None if the size is a symbol. device_type: "cpu"
    or "cuda". kind: the Task node that the collective became, empty if it was left alone. local: facts that may be this
    rank's alone (bias, epilogue, number of products), as JSON. site: the node's name. place: a hash of the lines of the
    program that launch it, as this rank knows them. order: how many launches of all groups stand in front of it.
    sizes: those by which a Task node's kernels cut what they send, None for a symbol. The tiles of the peers are cut by
    the same sizes; the collective of the library does not care. shape: that of a collective's first operand on this
    rank, None for a symbol, by which two graphs are told apart whose collectives have as many elements.
    """

    wire: str
    numel: int | None
    device_type: str = ""
    kind: str = ""
    local: str = ""
    site: str = ""
    place: str = ""
    order: int = 0
    sizes: Shape = ()
    shape: Shape = ()


@dataclass(frozen=True)
class GroupFacts:
    """The launches of one group in one graph. before: as Inductor alone would run them; after: as the passes left them.
    world_size: the number of ranks that the graph was compiled for. moved: what the passes moved from one side of a
    collective to the other, or merged, so that other numbers are sent, or in another order; empty if nothing.
    structure: a hash of all ops of the graph before the passes.
    """

    name: str
    world_size: int
    before: tuple[LaunchFacts, ...]
    after: tuple[LaunchFacts, ...]
    moved: str = ""
    structure: str = ""

    @property
    def is_bare(self) -> bool:
        """Whether the passes left the collectives as they were: then this rank waits for nobody."""
        same = [launch.wire for launch in self.before] == [launch.wire for launch in self.after]
        return same and not self.moved and not any(launch.kind for launch in self.after)

    @property
    def form(self) -> tuple[tuple[str, ...], ...]:
        """What the passes made of the collectives: wire facts, kinds, and the graph's hash if anything moved across."""
        launches = tuple((launch.wire, launch.kind) for launch in self.after)
        return (*launches, (self.moved, self.structure)) if self.moved else launches


@dataclass(frozen=True)
class GraphFacts:
    """The groups of one graph, in an order that all ranks share, and the options that it was compiled with, as text by
    name.
    """

    groups: tuple[GroupFacts, ...]
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_bare(self) -> bool:
        return all(group.is_bare for group in self.groups)

    @property
    def replayed(self) -> bool:
        """Whether torch captures the graph in CUDA graphs."""
        return self.options.get(CUDAGRAPHS) == repr(True)

    @property
    def program(self) -> str:
        """A hash of the program's collectives, by the lines that launch them, and of the options. Sizes are not a part
        of it: it is equal for two graphs of one piece of the program that were compiled for different sizes, or with
        different ops beside the collectives.
        """
        groups = [
            [group.name, group.world_size, [[before.wire, before.place] for before in group.before]]
            for group in self.groups
        ]
        return digest(json.dumps([groups, sorted(self.options.items())]))

    @property
    def sizes(self) -> Shape:
        """The numbers of elements of all collectives of the program."""
        return tuple(launch.numel for group in self.groups for launch in group.before)

    @property
    def form(self) -> tuple[tuple[tuple[str, ...], ...], ...]:
        """What the passes made of the graph's collectives, by group."""
        return tuple(group.form for group in self.groups)

    @property
    def key(self) -> str:
        """A hash of the program, of its form, and of all sizes, by which sites find what was agreed."""
        launches = [[(one.sizes, one.shape) for one in (*group.before, *group.after)] for group in self.groups]
        return digest(json.dumps([self.program, self.sizes, self.form, launches]))

    def text(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def parse(text: str) -> GraphFacts:
        value = json.loads(text)
        return GraphFacts(tuple(group_of(group) for group in value["groups"]), value["options"])


@dataclass(frozen=True)
class Verdict:
    """The result of comparing the lists of all ranks of one group. plain: why the graph has to run as Inductor alone
    would run it; empty if it need not. library: by the number of the launch, why its node has to run by the library.
    leader: by the number of the launch, the local facts of rank 0, with which all ranks plan. sizes: by the number of
    the launch, those by which all kernels cut, None where any rank has a symbol. options: names of options that differ,
    with the ranks that hold each value. diverged: the first collective that differs, as (the number of the launch,
    rank, its collective, another rank, its collective).
    """

    plain: str = ""
    library: Mapping[int, str] = field(default_factory=dict)
    leader: Mapping[int, str] = field(default_factory=dict)
    sizes: Mapping[int, Shape] = field(default_factory=dict)
    options: str = ""
    diverged: tuple[int, int, str, int, str] | None = None


def opened(lists: Sequence[Sequence[int | None]]) -> Shape:
    """Returns the first of lists of sizes, one of each rank; None where any rank has a symbol."""
    return tuple(None if None in sizes else sizes[0] for sizes in zip(*lists, strict=True))


def open_shapes(own: Sequence[LaunchFacts], lists: Sequence[Sequence[LaunchFacts]]) -> tuple[Shape | None, ...]:
    """Returns the shape of each collective's operand on this rank; None if any rank has a symbol in its own."""
    return tuple(
        None if any(None in launch.shape for launch in launches) else mine.shape
        for mine, *launches in zip(own, *lists, strict=True)
    )


def digest(text: str) -> str:
    """Returns twelve hex digits of a hash of the text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _launch_of(value: Mapping[str, Any]) -> LaunchFacts:
    return LaunchFacts(**{**value, "sizes": tuple(value["sizes"]), "shape": tuple(value["shape"])})


def group_of(value: Mapping[str, Any]) -> GroupFacts:
    before, after = ([_launch_of(launch) for launch in value[part]] for part in ("before", "after"))
    others = value["moved"], value["structure"]
    return GroupFacts(value["name"], value["world_size"], tuple(before), tuple(after), *others)


def compare(groups: Sequence[GroupFacts], options: Sequence[Mapping[str, str]]) -> Verdict:
    """Returns what follows from the facts of all ranks of a group and from their options, both by rank."""
    different = differing(options)
    mistaken = differing([{name: held[name] for name in held if name != CUDAGRAPHS} for held in options])
    if different and (not mistaken or any(group.is_bare for group in groups)):
        # A rank with nothing to agree on does not wait, and would not hear of an error.
        return Verdict(plain=f"the ranks have different options: {different}")
    if mistaken:
        return Verdict(options=mistaken)
    diverged = _diverged([group.before for group in groups])
    if diverged is not None:
        return Verdict(diverged=diverged)
    for part, name in (("before", "collectives"), ("after", "launches")):
        counts = [len(getattr(group, part)) for group in groups]
        if len(set(counts)) > 1:
            return Verdict(plain=f"the graphs of the ranks have {by_rank(counts)} {name} of the group")
    orders = [[launch.order for launch in group.after] for group in groups]
    if any(order != orders[0] for order in orders):
        # A rank that waits in one group would keep another one waiting in the other.
        return Verdict(plain=f"launches of other groups stand elsewhere between those of the group: {by_rank(orders)}")
    moved = [(group.moved, group.structure) for group in groups]
    if len(set(moved)) > 1 and any(what for what, _ in moved):
        what = by_rank([what or "nothing" for what, _ in moved])
        return Verdict(plain=f"the graphs differ, and the passes moved something across their collectives: {what}")
    library: dict[int, str] = {}
    leader: dict[int, str] = {}
    cut: dict[int, Shape] = {}
    for number, launches in enumerate(zip(*[group.after for group in groups], strict=True)):
        wires = [launch.wire for launch in launches]
        kinds = [launch.kind for launch in launches]
        sizes = [launch.sizes for launch in launches]
        if len(set(wires)) > 1:
            return Verdict(plain=f"the passes made launch {number} of the group {by_rank(wires)}")
        reason = ""
        if len(set(kinds)) > 1:
            reason = f"the ranks fused it differently: {by_rank([kind or 'left alone' for kind in kinds])}"
        elif not all(may_be_equal(first, other) for first, other in combinations(sizes, 2)):
            reason = f"its sizes are {by_rank(['x'.join(map(str, each)) for each in sizes])}"
        if reason:
            if wires[0].split()[0] not in SERVED_BY_LIBRARY:
                return Verdict(plain=reason)
            library[number] = reason
        elif kinds[0]:
            leader[number] = launches[0].local
            cut[number] = opened(sizes)
    return Verdict(library=library, leader=leader, sizes=cut)


def may_be_equal(sizes: Sequence[int | None], others: Sequence[int | None]) -> bool:
    """Returns whether sizes, of which None is a symbol, are as many and may be the same."""
    pairs = zip(sizes, others, strict=False)
    return len(sizes) == len(others) and all(None in (size, other) or size == other for size, other in pairs)


def differing(settings: Sequence[Mapping[str, str]]) -> str:
    """Returns the names whose values differ between ranks, as "x is a on rank 0, b on ranks 1, 2"; or ""."""
    names = dict.fromkeys(name for values in settings for name in values)
    found = []
    for name in names:
        values = [str(setting.get(name)) for setting in settings]
        if len(set(values)) > 1:
            found.append(f"{name} is {by_rank(values)}")
    return "; ".join(found)


def by_rank(values: Sequence[object]) -> str:
    """`a on rank 0, b on ranks 1, 2`."""
    holders: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(str(value), []).append(rank)
    return ", ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in holders.items())


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 0`, `ranks 1, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _diverged(lists: Sequence[Sequence[LaunchFacts]]) -> tuple[int, int, str, int, str] | None:
    """Returns the first difference of two ranks in the collectives that both have: a graph may break on one."""
    for rank, launches in enumerate(lists[1:], 1):
        for number, (first, other) in enumerate(zip(lists[0], launches, strict=False)):
            sizes = {first.numel, other.numel} - {None} if first.wire.startswith(EQUAL_SIZES) else set()
            if first.wire != other.wire or len(sizes) > 1:
                return number, rank, _named(other), 0, _named(first)
    return None


def _named(launch: LaunchFacts) -> str:
    return launch.wire if launch.numel is None else f"{launch.wire} of {launch.numel} elements"
