"""The handshake: what the ranks of a group tell each other before they run together, and what has to be equal.

It takes place at a group's first use, and at the first use of new options in it. Options or versions that differ are an
error that names them. Capabilities are joined, and the weakest rank decides. If tables differ, rank 0's is used.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ditron_inductor.device.capabilities import Capabilities, RankFacts, combine
from ditron_inductor.device.facts import differing
from ditron_inductor.device.session import Session
from ditron_inductor.errors import DitronDiverged, DitronOptionsMismatch
from ditron_inductor.version import VERSION

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AgreedOptions:
    """The options of a site that all ranks of its group must share, because they decide what runs and how long it
    waits. strategy: one of `nodes.STRATEGIES`. workspace_limit: bytes. timeout_s: seconds, 0.0 for the group's own
    timeout. trials: whether the first calls try several strategies.
    """

    strategy: str
    workspace_limit: int
    timeout_s: float
    trials: bool = False


@dataclass(frozen=True)
class HandshakeResult:
    """The result of a handshake: the group's capabilities, and the table of choices that all ranks use."""

    capabilities: Capabilities
    table: str


def versions() -> dict[str, str]:
    """The versions that decide what two ranks compile and how their kernels talk."""
    import torch
    import triton

    return {"ditron": VERSION, "torch": str(torch.__version__), "triton": str(triton.__version__)}


def shake_hands(
    session: Session, options: AgreedOptions, facts: RankFacts, table: str, timeout_s: float
) -> HandshakeResult:
    """Makes all ranks of a new group agree. Collective. Raises DitronOptionsMismatch and DitronHandshakeError."""
    digest = hashlib.blake2b(table.encode(), digest_size=8).hexdigest()
    offer: dict[str, Any] = {
        "settings": {**_settings(options), **{f"{name} version": value for name, value in versions().items()}},
        "facts": asdict(facts),
        "table_hash": digest,
    }
    if session.group.rank == 0:
        offer["table"] = table
    offers = session.all_gather("agree on options and capabilities", offer, timeout_s)
    _compare(session.group.name, [offer["settings"] for offer in offers])
    different = [rank for rank, offer in enumerate(offers) if offer["table_hash"] != offers[0]["table_hash"]]
    if different:
        logger.warning(
            "group '%s': the tables of measured choices on ranks %s differ from rank 0's, which is used on all ranks",
            session.group.name,
            different,
        )
    return HandshakeResult(combine([RankFacts(**offer["facts"]) for offer in offers]), offers[0]["table"])


def agree_options(
    session: Session, options: AgreedOptions, timeout_s: float, site: str = "new options", sizes: Sequence[int] = ()
) -> list[list[int]]:
    """Reaches an agreement on further options, or on the options and sizes of a further site, in a group that has
    shaken hands. Returns every rank's `sizes`. Collective: the ranks meet here for both reasons, so that a rank with
    other options gets an error that says so. Raises what `shake_hands` raises, and DitronDiverged if the options are
    equal and the sites are not.
    """
    offer = {"settings": _settings(options), "site": site, "sizes": [*sizes]}
    offers = session.all_gather("agree on a site and its options", offer, timeout_s)
    _compare(session.group.name, [offer["settings"] for offer in offers])
    for peer, other in enumerate(offers):
        if other["site"] != site:
            raise DitronDiverged(rank=session.group.rank, site=site, peer=peer, peer_site=other["site"])
    return [other["sizes"] for other in offers]


def _settings(options: AgreedOptions) -> dict[str, Any]:
    return {f"ditron.{name}": value for name, value in asdict(options).items()}


def _compare(group_name: str, settings: Sequence[dict[str, Any]]) -> None:
    differences = differing([{name: repr(value) for name, value in values.items()} for values in settings])
    if differences:
        raise DitronOptionsMismatch(group_name=group_name, differences=differences)
