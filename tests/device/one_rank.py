"""A workspace of a group of one rank, in the process of the test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ditron_inductor.device.calibrate import PollRates
from ditron_inductor.device.handshake import HandshakeResult
from ditron_inductor.device.session import Session
from ditron_inductor.device.workspace import SharedWorkspace
from tests.device.threads import make_group

LIMIT_S = 20.0
POLLS_PER_S = 10.0


def make_shared(timeout_s: float = LIMIT_S) -> SharedWorkspace:
    """A workspace that has its first ring, on a device of which the polls per second are known."""
    device, rates = torch.device("cpu"), PollRates()
    rates._rates[device] = POLLS_PER_S
    capabilities: Any = SimpleNamespace(tile_available=True)
    session = Session(make_group(dist.HashStore(), 0, 1), "one")
    shared = SharedWorkspace(session, device, HandshakeResult(capabilities, ""), rates, timeout_s)
    shared.make_first_ring(1 << 30, LIMIT_S)
    return shared
