"""An executable model of the signal protocol, explored exhaustively (docs/protocol.md explains the protocol).

explore(Scenario(scripts=...))                                 no violation: the rules hold
explore(scenario, frozenset({Protection.CREDITS})).violation   what goes wrong without one of them
"""

from __future__ import annotations

from tests.protocol_model.explore import Ending, Exploration, explore
from tests.protocol_model.launch import Protection
from tests.protocol_model.state import Call, Capture, Event, Grow, Meet, Raised, Reset, Scenario

__all__ = [
    "Call",
    "Capture",
    "Ending",
    "Event",
    "Exploration",
    "Grow",
    "Meet",
    "Protection",
    "Raised",
    "Reset",
    "Scenario",
    "explore",
]
