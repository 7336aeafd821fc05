"""FX graph in, FX graph with Task nodes out: one pass, one file."""

from __future__ import annotations

if __name__ != "ditron_inductor.passes":
    raise ImportError("use ditron_inductor.passes: as 'passes' the folder would be a second module with its own state")
