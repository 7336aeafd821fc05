"""Models of `transformers` on 2 ranks of the CPU device: they compute what eager does, and `hugging_face_sites.txt`
says what becomes of each of their collectives.
"""

from __future__ import annotations

import importlib.util

import pytest

from tests.models import hugging_face_table as table
from tests.models.run_hugging_face import Setup, run_model
from tests.ranks import RankPools

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None,
        reason="needs transformers: pip install 'ditron-inductor[models]'",
    ),
]

# Every model and form once; the others, and all of them with two layers, by `--all-cases`.
CHOSEN = [
    Setup("llama", "hf"),
    Setup("llama", "sp", train=True),
    Setup("qwen3", "hf", train=True),
    Setup("gemma3", "sp", train=True),
    Setup("gpt_neox", "tp"),
    Setup("gpt_neox", "hf", train=True),
    Setup("opt", "tp", train=True),
    Setup("opt", "sp", train=True),
    Setup("phi", "hf"),
    Setup("phi", "sp", train=True),
    Setup("phi3", "hf", train=True),
]
EXPECTED = table.read()


def check(rank_pools: RankPools, setup: Setup) -> None:
    """Run the model; AssertionError where ranks differ or its sites are not those of the table."""
    pool = rank_pools.get("cpu", table.WORLD_SIZE)
    by_rank = pool.run(run_model, setup, timeout=180)
    assert all(counts == by_rank[0] for counts in by_rank), f"ranks differ: {by_rank}"
    for direction, counts in by_rank[0].items():
        row = table.key(setup, direction)
        wanted = table.parse(EXPECTED[row], setup.num_layers)
        assert counts == wanted, f"{' '.join(row)}: {dict(counts)}, the table says {dict(wanted)}"


@pytest.mark.parametrize("setup", CHOSEN, ids=str)
def test_model(rank_pools: RankPools, setup: Setup) -> None:
    check(rank_pools, setup)


@pytest.mark.all_cases
@pytest.mark.parametrize("setup", table.cases(2), ids=str)
def test_every_model(rank_pools: RankPools, setup: Setup) -> None:
    check(rank_pools, setup)


@pytest.mark.parametrize("counts", [({"a": 3, "b: c": 1}, {"a": 5, "b: c": 1}), ({"a": 1}, {"a": 2}), ({}, {"a": 1})])
def test_table_text(counts: tuple[dict[str, int], dict[str, int]]) -> None:
    written = table.text(*counts)
    for num_layers, wanted in enumerate(counts, 1):
        assert +table.parse(written, num_layers) == wanted, written
