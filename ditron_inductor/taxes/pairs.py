"""Pairs the sites of the unfused and the fused graph, to which the passes may give other neighbours and names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ditron_inductor.report.explained import ExplainedSite

NORMED = "_rms_norm"
"""The end of the names of kinds with a norm, which is a kernel of its own where absorbing it does not pay."""


def distinct(sites: Iterable[ExplainedSite]) -> list[ExplainedSite]:
    """Returns one site of all that have the same calls: graphs with the same launches have sites of the same names."""
    found = {(site.record.group_name, site.record.site, site.record.m): site for site in sites}
    return list(found.values())


def paired(
    fused: Sequence[ExplainedSite], unfused: Sequence[ExplainedSite]
) -> list[tuple[ExplainedSite, ExplainedSite | None]]:
    """Returns every fused site, in order, with its unfused counterpart, or None if that is not certain. Sites of one
    name are counterparts. The other sites of a kind are paired in their order, if both graphs have as many of them,
    with the same rows.
    """
    by_name = {_name(site): site for site in unfused}
    names = {_name(site) for site in fused}
    counterparts = {_name(site): by_name[_name(site)] for site in fused if _name(site) in by_name}
    for kind in dict.fromkeys(map(_kind, fused)):
        mine = [site for site in fused if _kind(site) == kind and _name(site) not in by_name]
        others = [site for site in unfused if _kind(site) == kind and _name(site) not in names]
        if [site.record.m for site in mine] == [site.record.m for site in others]:
            counterparts |= {_name(site): other for site, other in zip(mine, others, strict=True)}
    return [(site, counterparts.get(_name(site))) for site in fused]


def _name(site: ExplainedSite) -> tuple[str, str, int | None]:
    return site.record.group_name, site.record.site, site.record.m


def _kind(site: ExplainedSite) -> tuple[str, str, str]:
    return site.direction, site.record.group_name, site.record.kind.removesuffix(NORMED)
