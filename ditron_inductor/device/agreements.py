"""What the ranks of a group agreed on for a piece of their program, and what follows from it for a graph of this rank.

An `Agreement` is made in a meeting (meetings.py) and holds for every later graph of the same piece of the program and
the same form. A later graph may have another form on this rank alone: it is compiled anew when a statistic is logged
here in the hundredth step, or when this rank has nothing to multiply this time. Then its peers run what was agreed and
do not come to the meeting. So the graph runs what was agreed too: its nodes go by the library where the agreement has
none, and where the agreement has a node that this graph lacks, the graph is compiled again with a node that adds
nothing (`conform`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ditron_inductor.device import groups
from ditron_inductor.device.facts import GraphFacts, GroupFacts, Verdict
from ditron_inductor.errors import DitronDiverged


@dataclass(frozen=True)
class Form:
    """What all ranks run at one launch: a Task node of this kind, or the collective where `kind` is empty.

    library: why nodes of other kinds run by the library here. leader: what rank 0 has of its own, as JSON.
    """

    wire: str
    kind: str = ""
    library: str = ""
    leader: str = ""


@dataclass(frozen=True)
class Agreement:
    """What all ranks run: the form of each launch, by group; or, where `plain` says why, what Inductor would run.

    counts: how many collectives the graph of each rank holds, by group and rank.
    """

    plain: str = ""
    forms: Mapping[str, tuple[Form, ...]] = field(default_factory=dict)
    counts: Mapping[str, Mapping[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """What one graph does.

    plain: why it runs as Inductor alone would run it, empty where it runs as it was rewritten. library: by group and
    site, why a node runs by the library. leader: by group and site, what rank 0 has of its own, as JSON: all ranks plan
    with that. conform: the forms that the graph has to be compiled for, because its own are others; None where they are
    not. final: whether it holds for all calls; else somebody did not come, and the next call tries again.
    """

    plain: str = ""
    library: Mapping[tuple[str, str], str] = field(default_factory=dict)
    leader: Mapping[tuple[str, str], str] = field(default_factory=dict)
    conform: Mapping[str, tuple[Form, ...]] | None = None
    final: bool = True


def forms_of(facts: GroupFacts, verdict: Verdict) -> tuple[Form, ...]:
    """The forms of a group from its facts on any rank and from what all ranks said."""
    return tuple(
        Form(launch.wire, launch.kind, "", verdict.leader[number])
        if number in verdict.leader
        else Form(launch.wire, "", verdict.library.get(number, ""))
        for number, launch in enumerate(facts.after)
    )


def decide(facts: GraphFacts, agreement: Agreement) -> Decision:
    """What a graph with these facts does under an agreement.

    Raises DitronDiverged where it cannot do its part: the passes of the others changed the collectives, and this graph
    has something that keeps them as they are.
    """
    if agreement.plain:
        return Decision(plain=agreement.plain)
    library: dict[tuple[str, str], str] = {}
    leader: dict[tuple[str, str], str] = {}
    conform = False
    for group in facts.groups:
        forms = agreement.forms.get(group.name, tuple(Form(launch.wire) for launch in group.before))
        wires = [form.wire for form in forms]
        if wires != [launch.wire for launch in group.after]:
            if wires != [launch.wire for launch in group.before]:
                raise _unlike(group, forms)
            conform = True
            continue
        for launch, form in zip(group.after, forms, strict=True):
            if form.kind and launch.kind != form.kind:
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


def _may_be(sizes: Sequence[int | None], others: Sequence[int | None]) -> bool:
    return all(None in (one, other) or one == other for one, other in zip(sizes, others, strict=True))


class Agreements:
    """All that this process has agreed on, by the process group that a graph names first."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[dist.ProcessGroup, dict[str, list[tuple[GraphFacts, Agreement]]]]
        self._known = WeakKeyDictionary()

    def find(self, facts: GraphFacts) -> Agreement | None:
        """What was agreed for a graph of this form, with these sizes or with some that may be these, since one graph
        has a symbol where another has a number.
        """
        return next((agreed for other, agreed in self._of_program(facts) if other.form == facts.form), None)

    def find_other(self, facts: GraphFacts) -> Agreement | None:
        """What was agreed for a graph of this piece of the program, whatever form it has: the peers of this rank may
        run that, and not know that this rank has another graph.
        """
        return next((agreed for _, agreed in reversed(self._of_program(facts)) if not agreed.plain), None)

    def _of_program(self, facts: GraphFacts) -> list[tuple[GraphFacts, Agreement]]:
        known = self._known.get(groups.find(facts.groups[0].name), {}).get(facts.program, [])
        return [(other, agreed) for other, agreed in known if _may_be(other.sizes, facts.sizes)]

    def keep(self, facts: GraphFacts, agreement: Agreement) -> None:
        """Remember what was agreed for a graph."""
        known = self._known.setdefault(groups.find(facts.groups[0].name), {})
        known.setdefault(facts.program, []).append((facts, agreement))

    def forget(self) -> None:
        """Agree on everything anew."""
        self._known = WeakKeyDictionary()
