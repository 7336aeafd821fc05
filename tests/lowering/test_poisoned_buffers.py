"""The kernels read nothing that was not written."""

from __future__ import annotations

import pytest

from tests.lowering.calls import Site
from tests.lowering.problems import ODD, TILE_KINDS
from tests.lowering.stress import call_in_poisoned_slots
from tests.ranks import RankPool


@pytest.mark.parametrize("kind", TILE_KINDS)
def test_poisoned_buffers(pool: RankPool, kind: str) -> None:
    pool.run(call_in_poisoned_slots, kind, ODD[pool.device_type], Site(name=f"poison/0:{kind}"))
