"""Launches that overlap with the launch in front of them (programmatic dependent launch of NVIDIA GPUs since Hopper).

A launch that follows begins once all programs of the launch in front of it have begun, as far as there is room. It may
load weights then. Before it reads or writes anything else, each of its programs waits for the end of that launch. So it
ends behind it, and whatever stands in front of a launch has ended when its programs have waited. docs/protocol.md says
which launches may follow.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

APART = tl.constexpr(0)
"""A launch as any other: on devices that cannot do more."""
LEADS = tl.constexpr(1)
"""The launch begins when all in front of it have ended, and lets the next one begin."""
FOLLOWS = tl.constexpr(2)
"""The launch may begin before the one in front of it has ended, and lets the next one begin."""


@triton.jit
def let_next_begin(OVERLAP: tl.constexpr):
    """Lets the programs of the next launch begin once all programs of this one have come here or ended."""
    if OVERLAP != APART:
        gdc_launch_dependents()


@triton.jit
def wait_for_last(OVERLAP: tl.constexpr):
    """Waits for the end of the launch in front of this one, and makes visible what it wrote."""
    if OVERLAP == FOLLOWS:
        gdc_wait()


def overlap_for(arch: str, rows: int, *, follows: bool) -> int:
    """Returns how a launch for so many rows overlaps with others on `arch` ("sm_90", "gfx942", "interpreter"). follows:
    whether it may begin early. Launches of several rows are apart: they have a program or two for each SM, and those
    that begin early share the SMs that are free first, while others stay empty. On an H200 a layer of 8B with 32 rows
    takes 100 us so, instead of 82.
    """
    major = arch.removeprefix("sm_")[:-1] if arch.startswith("sm_") else ""
    able = rows == 1 and major.isdigit() and int(major) >= 9
    return int((FOLLOWS if follows else LEADS).value) if able else int(APART.value)


def launch_options(overlap: int) -> dict[str, Any]:
    """Returns the options of such a launch."""
    return {"launch_pdl": True} if overlap == FOLLOWS.value else {}
