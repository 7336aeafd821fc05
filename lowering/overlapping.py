"""Which launches overlap with others on which device, see core/overlap.py."""

from __future__ import annotations

from typing import Any

from ditron_inductor.core.overlap import APART, FOLLOWS
from ditron_inductor.task.policy import OVERLAPS


def overlap_for(arch: str, rows: int, wanted: str) -> int:
    """Returns how a launch for so many rows overlaps with others on `arch` ("sm_90", "gfx942", "interpreter"), where a
    call is to overlap as `wanted`, one of OVERLAPS. Launches of several rows are apart: they have a program or two for
    each SM, and those that begin early share the SMs that are free first, while others stay empty. On an H200 the down
    projection of 70B with 32 rows takes 22 us more so.
    """
    major = arch.removeprefix("sm_")[:-1] if arch.startswith("sm_") else ""
    able = rows == 1 and major.isdigit() and int(major) >= 9
    return OVERLAPS.index(wanted) if able else int(APART.value)


def launch_options(overlap: int) -> dict[str, Any]:
    """Returns the options of such a launch."""
    return {"launch_pdl": True} if overlap == FOLLOWS.value else {}
