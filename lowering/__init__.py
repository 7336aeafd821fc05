"""From Task node to kernel: one folder a node kind, one file a strategy; beside them what several kinds share."""

from __future__ import annotations

if __name__ != "ditron_inductor.lowering":
    raise ImportError("use ditron_inductor.lowering: the bare name would make a second module with its own state")
