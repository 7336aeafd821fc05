"""Launches that overlap with the launch in front of them (programmatic dependent launch of NVIDIA GPUs since Hopper).

A launch that follows begins once all programs of the launch in front of it have begun, as far as there is room. It may
load weights then. Before it reads or writes anything else, each of its programs waits for the end of that launch. So it
ends behind it, and whatever stands in front of a launch has ended when its programs have waited. The pass
`overlap_launches` decides which launches may follow. A wait has to stand in front of the loops of a kernel, because the
compiler moves loads of a loop in front of a wait that stands in it (triton issue 11905).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

APART, LEADS, FOLLOWS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""How a launch overlaps with others, in the order of OVERLAPS: not at all; it lets the next one begin; or it may begin
early itself, and lets the next one begin.
"""


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
