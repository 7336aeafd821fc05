"""A small Llama with context parallelism through `backend="ditron"`: forward and training."""

from __future__ import annotations

from collections import Counter

import pytest

from ditron_inductor.task.nodes import ATTENTION_KINDS
from tests.cases import rare
from tests.models.context_parallel import ALIBI, check, layers_of
from tests.ranks import RankPools

FORWARD, BACKWARD = ATTENTION_KINDS


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("mask", "window", "form", "strategy", "batch"),
    [
        ("zigzag", 9, "function", "tile", 1),
        *rare(
            ("causal_offset", 0, "generated", "chunked", 1),
            ("causal_offset", 15, "graph", "chunked", 2),
            ("zigzag", 0, "graph", "tile", 1),
            ("causal_offset", 9, "flex", "chunked", 1),
            (ALIBI, 0, "generated", "chunked", 1),
            (ALIBI, 0, "graph", "chunked", 2),
            (ALIBI, 0, "function", "library", 1),
        ),
    ],
)
def test_a_sharded_llama_is_the_whole_one(
    rank_pools: RankPools, mask: str, window: int, form: str, strategy: str, batch: int
) -> None:
    # A graph without gradients too, where that costs little.
    forwards, layers = 1 if form == "generated" else 2, layers_of(form)
    for fused in rank_pools.get("cpu", 2).run(check, mask, window, form, strategy, batch, 24, timeout=280):
        assert fused == Counter({FORWARD: forwards * layers, BACKWARD: layers})
