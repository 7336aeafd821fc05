"""What the ranks of a group agreed on for a piece of their program, and what follows from it for a graph of this rank.

An `Agreement` is made in a meeting (meetings.py) and holds for every later graph of the same piece of the program and
the same form. A later graph may have another form on this rank alone. For example, it is compiled again because a
statistic is logged here in the hundredth step, or because this rank has nothing to multiply this time. Its peers then
run what was agreed and do not come to a meeting. So this graph runs what was agreed too. Its nodes run by the library
where the agreement has no node. Where the agreement has a node that this graph lacks, the graph is compiled again with
a node that adds nothing (`conform`).

If a graph holds collectives of several groups, some of them may be of other sizes than before, as those of a replica
that has other tokens now, and others of the same. If ranks of the latter do not come, they run what was agreed. Then
what was agreed for these groups goes on, and the other groups meet (`kept`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ditron_inductor.device import groups
from ditron_inductor.device.facts import GraphFacts, GroupFacts, Shape, Verdict, may_be_equal
from ditron_inductor.errors import DitronDiverged


@dataclass(frozen=True)
class Form:
    """What all ranks run at one launch: a Task node of this kind, or the collective if `kind` is empty. library: why
    nodes of other kinds run by the library here. leader: the local facts of rank 0, as JSON. sizes: see LaunchFacts.
    """

    wire: str
    kind: str = ""
    library: str = ""
    leader: str = ""
    sizes: Shape = ()


@dataclass(frozen=True)
class Agreement:
    """What all ranks run: the form of each launch, by group. If `plain` gives a reason, they run what Inductor would
    run. counts: how many collectives the graph of each rank holds, by group and rank. moved: for each group in which
    something was moved across collectives, what all graphs moved, and the hash of their ops. sizes: how many elements
    each collective has, by group, None if it is a symbol on any rank. The graph of that rank serves all sizes, and does
    not come to a meeting when another rank has compiled for a new size. shapes: so too of this rank's operands.
    """

    plain: str = ""
    forms: Mapping[str, tuple[Form, ...]] = field(default_factory=dict)
    counts: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    moved: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    sizes: Mapping[str, Shape] = field(default_factory=dict)
    shapes: Mapping[str, tuple[Shape | None, ...]] = field(default_factory=dict)

    @property
    def has_nodes(self) -> bool:
        """Whether the ranks run any Task node."""
        return any(form.kind for forms in self.forms.values() for form in forms)

    def of(self, group: GroupFacts) -> Agreement:
        """Returns what was agreed on for one group, by a graph with these facts."""
        name = group.name
        moved = {name: self.moved[name]} if name in self.moved else {}
        return Agreement(
            forms={name: self.forms.get(name, unfused(group))},
            moved=moved,
            sizes={name: _sizes_of(group, self)},
            shapes={name: _shapes_of(group, self)},
        )

    def and_of(self, other: Agreement) -> Agreement:
        """Returns what both agreed on, for different groups. Neither is plain."""
        return Agreement(
            forms={**self.forms, **other.forms},
            counts={**self.counts, **other.counts},
            moved={**self.moved, **other.moved},
            sizes={**self.sizes, **other.sizes},
            shapes={**self.shapes, **other.shapes},
        )


@dataclass(frozen=True)
class Decision:
    """What one graph does. plain: why it runs as Inductor alone would run it; empty if it runs as it was rewritten.
    library: by group and site, why a node runs by the library. leader: by group and site, the local facts of rank 0, as
    JSON, with which all ranks plan. conform: the forms for which the graph has to be compiled again, because its own
    forms differ; None if they do not. final: whether the decision holds for all calls; otherwise somebody did not come,
    and the next call tries again.
    """

    plain: str = ""
    library: Mapping[tuple[str, str], str] = field(default_factory=dict)
    leader: Mapping[tuple[str, str], str] = field(default_factory=dict)
    conform: Mapping[str, tuple[Form, ...]] | None = None
    final: bool = True


def forms_of(facts: GroupFacts, verdict: Verdict) -> tuple[Form, ...]:
    """Returns the forms of a group, from its facts on any rank and from the verdict on all ranks."""
    return tuple(
        Form(launch.wire, launch.kind, "", verdict.leader[number], verdict.sizes[number])
        if number in verdict.leader
        else Form(launch.wire, "", verdict.library.get(number, ""))
        for number, launch in enumerate(facts.after)
    )


def unfused(group: GroupFacts, reason: str = "") -> tuple[Form, ...]:
    """Returns the forms of a group in a graph that runs as Inductor alone would run it. reason: why it does."""
    return tuple(Form(launch.wire, library=reason) for launch in group.before)


def decide(facts: GraphFacts, agreement: Agreement) -> Decision:
    """Returns what a graph with these facts does under an agreement. Raises DitronDiverged if it cannot do its part:
    the passes of the others changed the collectives, and something in this graph keeps them as they are.
    """
    if agreement.plain:
        return Decision(plain=agreement.plain)
    library: dict[tuple[str, str], str] = {}
    leader: dict[tuple[str, str], str] = {}
    conform = False
    for group in facts.groups:
        forms = agreement.forms.get(group.name, unfused(group))
        agreed, own = agreement.moved.get(group.name), (group.moved, group.structure)
        if agreed != own and (agreed is not None or group.moved):
            raise _unlike(group, forms)
        wires = [form.wire for form in forms]
        if wires != [launch.wire for launch in group.after]:
            if wires != [launch.wire for launch in group.before]:
                raise _unlike(group, forms)
            conform = True
            continue
        for launch, form in zip(group.after, forms, strict=True):
            if form.kind and not (launch.kind == form.kind and may_be_equal(launch.sizes, form.sizes)):
                conform = True
            elif form.kind:
                leader[group.name, launch.site] = form.leader
            elif launch.kind:
                reason = form.library or "the ranks agreed on the collective alone"
                library[group.name, launch.site] = reason
    return Decision(library=library, leader=leader, conform=agreement.forms if conform else None)


def _unlike(group: GroupFacts, forms: Sequence[Form]) -> DitronDiverged:
    rank = groups.resolve(group.name).rank
    own = ", ".join(launch.wire for launch in group.after)
    agreed = ", ".join(form.wire for form in forms)
    return DitronDiverged(
        rank=rank, site=f"a graph that became {own}", peer="any other", peer_site=f"one that became {agreed}"
    )


def _sizes_of(group: GroupFacts, agreement: Agreement) -> Shape:
    """Returns the sizes for which something was agreed for a group; its own where there were no others."""
    return tuple(agreement.sizes.get(group.name, [launch.numel for launch in group.before]))


def _shapes_of(group: GroupFacts, agreement: Agreement) -> tuple[Shape | None, ...]:
    """Returns the shapes for which something was agreed for a group; its own where there were no others."""
    return tuple(agreement.shapes.get(group.name, [launch.shape for launch in group.before]))


def _has_sizes(group: GroupFacts, other: GroupFacts, agreement: Agreement) -> bool:
    """Returns whether a group's collectives have the sizes for which something was agreed by a graph with `other`."""
    return may_be_equal([launch.numel for launch in group.before], _sizes_of(other, agreement))


def _has_shapes(group: GroupFacts, other: GroupFacts, agreement: Agreement) -> bool:
    """Returns whether a group's collectives have the shapes for which something was agreed by a graph with `other`.
    Eight sequences of 512 tokens are as many elements as 32 of 128, and kernels cut them otherwise.
    """
    pairs = zip([launch.shape for launch in group.before], _shapes_of(other, agreement), strict=True)
    return all(shape is None or may_be_equal(own, shape) for own, shape in pairs)


def _all_have(
    fits: Callable[[GroupFacts, GroupFacts, Agreement], bool], facts: GraphFacts, other: GraphFacts, agreed: Agreement
) -> bool:
    return all(fits(group, before, agreed) for group, before in zip(facts.groups, other.groups, strict=True))


def _can_follow(group: GroupFacts, agreement: Agreement) -> bool:
    try:
        decide(GraphFacts((group,)), agreement)
    except DitronDiverged:
        return False
    return True


class Agreements:
    """All agreements of this process, by the process group that a graph names first."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[dist.ProcessGroup, dict[str, list[tuple[GraphFacts, Agreement]]]]
        self._known = WeakKeyDictionary()

    def find(self, facts: GraphFacts) -> Agreement | None:
        """Returns what was agreed for a graph of this form, whose sizes are equal, or may be, where one is a symbol."""
        for other, agreed in self._of_sizes(facts):
            if other.form == facts.form and _all_have(_has_shapes, facts, other, agreed):
                return agreed
        return None

    def find_other(self, facts: GraphFacts) -> Agreement | None:
        """Returns what was agreed for a graph of this piece of the program, whatever its form, the latest for these
        shapes, or else for others. The peers of this rank may run that, and not know that this rank has another graph.
        """
        found = [(other, agreed) for other, agreed in reversed(self._of_sizes(facts)) if not agreed.plain]
        return min(found, key=lambda pair: not _all_have(_has_shapes, facts, *pair))[1] if found else None

    def kept(self, facts: GraphFacts) -> dict[str, Agreement]:
        """Returns what may go on, by group, where a graph's collectives have the sizes of before in some groups and
        others in other groups. Whenever a group met, one and the same has to have been agreed on for it.
        """
        known = self._of_program(facts)
        if any(agreed.plain for _, agreed in known):
            return {}
        kept: dict[str, Agreement] = {}
        for number, group in enumerate(facts.groups):
            found = [
                agreed.of(other.groups[number])
                for other, agreed in known
                if _has_sizes(group, other.groups[number], agreed) and _has_shapes(group, other.groups[number], agreed)
            ]
            if found and all(one == found[0] for one in found) and _can_follow(group, found[0]):
                kept[group.name] = found[0]
        return kept

    def _of_sizes(self, facts: GraphFacts) -> list[tuple[GraphFacts, Agreement]]:
        return [pair for pair in self._of_program(facts) if _all_have(_has_sizes, facts, *pair)]

    def _of_program(self, facts: GraphFacts) -> list[tuple[GraphFacts, Agreement]]:
        return self._known.get(groups.find(facts.groups[0].name), {}).get(facts.program, [])

    def keep(self, facts: GraphFacts, agreement: Agreement) -> None:
        known = self._known.setdefault(groups.find(facts.groups[0].name), {})
        known.setdefault(facts.program, []).append((facts, agreement))

    def forget(self) -> None:
        """Forgets all agreements, so that the ranks agree anew."""
        self._known = WeakKeyDictionary()
