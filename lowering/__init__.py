"""From Task node to kernel: a folder for each node kind, a file for each strategy, and what several kinds share."""

from __future__ import annotations

if __name__ != "ditron_inductor.lowering":
    raise ImportError("use ditron_inductor.lowering: the bare name would make a second module with its own state")
