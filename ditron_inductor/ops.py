"""Functions for programs that call Ditron's fused operations by themselves.

Inside a model that is compiled with `backend="ditron"` they are sites like any other: ordered, named, explained, and
run as the options say. Elsewhere they run at once.
"""

from __future__ import annotations

from ditron_inductor.lowering.all_gather_attention.function import all_gather_attention as all_gather_attention

__all__ = ["all_gather_attention"]
