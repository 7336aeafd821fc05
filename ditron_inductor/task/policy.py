"""The policy that every node of the Task level has, and the checks of the fields that all kinds share."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ditron_inductor.errors import InvalidTaskNode

KEY_MARK = "@"
"""In a site's name the key of its graph stands behind this mark. Only the graphs of this rank have to share the key."""
NUMBERED = re.compile(r"[0-9a-f]{8}/(\d+):")
STRATEGIES: tuple[str, ...] = ("auto", "library", "chunked", "tile")
OVERLAPS: tuple[str, ...] = ("", "leads", "follows")
"""How the launches of a call overlap with others: not at all; they let the next one begin early; or they may begin
early as well. See passes/finish/overlap_launches.py.
"""


def shared_site(site: str) -> str:
    """Returns the part of a site's name that is the same on all ranks."""
    return site.partition(KEY_MARK)[0]


def number_of(site: str) -> int | None:
    """Returns the number of a compiled graph's site (see passes/finish/name_sites.py), equal on all ranks; None for a
    call outside of compiled graphs.
    """
    found = NUMBERED.match(site)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class Policy:
    """The options that every site carries at run time.

    strategy: `auto`, or the one that the user forced. workspace_limit: bytes of symmetric memory that the site may use.
    timeout_s: seconds before a wait gives up; 0.0 for the group's own timeout. With `auto`, trials: whether the first
    calls try several strategies; strict: whether an obstacle that leaves `library` only is an error. replayed: whether
    torch captures the graph (`triton.cudagraphs`). Each rank then runs, captures or replays it as its own memory asks
    for, so every call runs as it would inside a CUDA graph. overlap: of OVERLAPS.
    """

    strategy: str = "auto"
    workspace_limit: int = 1 << 30
    timeout_s: float = 0.0
    trials: bool = False
    strict: bool = False
    replayed: bool = False
    overlap: str = ""

    def verify(self, kind: str) -> None:
        check(self.strategy in STRATEGIES, kind, "strategy", self.strategy, f"one of {', '.join(STRATEGIES)}")
        check(self.workspace_limit >= 0, kind, "workspace_limit", self.workspace_limit, "a number of bytes, 0 or more")
        check_overlap(self.overlap, kind)
        check(self.timeout_s >= 0.0, kind, "timeout_s", self.timeout_s, "seconds, or 0 for the group's own timeout")


def check(holds: bool, kind: str, field: str, value: object, expected: str) -> None:
    if not holds:
        raise InvalidTaskNode(node=kind, field=field, problem=f"is {value!r}, not {expected}")


def check_overlap(overlap: str, kind: str, able: tuple[str, ...] = OVERLAPS) -> None:
    """able: the `overlaps` of the kind."""
    check(overlap in able, kind, "overlap", overlap, f"one of {', '.join(map(repr, able))}")


def verify_common(kind: str, world_size: int, group_name: str, policy: Policy) -> None:
    check(world_size >= 2, kind, "world_size", world_size, "at least 2 ranks")
    check(bool(group_name), kind, "group_name", group_name, "the name of a process group")
    policy.verify(kind)
