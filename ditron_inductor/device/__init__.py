"""The Device level: memory that peers can reach, signals and epochs, and the limits on waiting for them.

``workspaces.get(group_name, device, options)`` returns a workspace, and ``with workspace.call(site, nbytes)`` is one
use of it.
"""

from __future__ import annotations

from ditron_inductor.device.capabilities import Capabilities, probe
from ditron_inductor.device.handshake import AgreedOptions
from ditron_inductor.device.registry import Registry, workspaces
from ditron_inductor.device.reset import reset
from ditron_inductor.device.workspace import Call, Workspace

__all__ = ["AgreedOptions", "Call", "Capabilities", "Registry", "Workspace", "probe", "reset", "workspaces"]
