"""`generate` of mixtures on four ranks, and by our kernels, in the interpreter: it makes the tokens of eager mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from ditron_inductor.lowering.host.launcher import Launcher
from ditron_inductor.task.plan import decisions
from tests.cases import rare
from tests.models.hugging_face import Sizes
from tests.ranks import RankContext, RankPools
from tests.test_serving import (
    LAYERS,
    MIXTURES,
    Generation,
    as_near_as_eager,
    check_fused,
    generated,
    needs_transformers,
)

pytestmark = [needs_transformers, pytest.mark.timeout(300)]
COPIES, GROUPED = "batched_mm", "grouped_mm"
CACHES = ("static", "dynamic")
FORMS = [(name, form) for name, (form, *_) in MIXTURES.items()]

APART = ("qwen3_moe", "deepseek_v3")
"""Models that have plans of both kinds, of which `FORMS` has the other one."""


@pytest.mark.parametrize(
    ("case", "count"),
    [
        *rare(
            # A prompt and a step. The step after it would be another graph, of a length that is a symbol.
            (Generation("qwen3_moe", "hf", "dynamic", COPIES), 2),
            *((Generation(*model, cache, COPIES), 4) for model in FORMS for cache in CACHES),
            *((Generation(name, "ep", "dynamic", GROUPED), 4) for name in ("mixtral", "gpt_oss")),
            *((Generation(name, "ep", cache, COPIES), 4) for name in APART for cache in CACHES),
        ),
    ],
    ids=str,
)
def test_on_four_ranks(rank_pools: RankPools, case: Generation, count: int) -> None:
    check_fused(case, rank_pools.get("cpu", 4).run(generated, case, count, timeout=250.0))


@pytest.mark.parametrize(
    "case",
    rare(*(Generation(name, "ep", cache, how) for name in APART for cache in CACHES for how in (COPIES, GROUPED))),
    ids=str,
)
def test_experts_as_a_whole_on_two_ranks(rank_pools: RankPools, case: Generation) -> None:
    # The sites are those of experts that are cut.
    check_fused(case, rank_pools.get("cpu", 2, label="accelerate").run(generated, case, timeout=250.0))


Run = Callable[..., dict[str, int]]


def by_kernels(ctx: RankContext, run: Run, *arguments: Any) -> tuple[dict[str, int], Counter[str], set[str]]:
    """(What `run` says was fused, the launches by kernel, the strategies by which the sites ran)."""
    launches: Counter[str] = Counter()
    launch = Launcher._launch_by_jit

    def counted(launcher: Launcher, *given: Any) -> None:
        launches[launcher.kernel.__name__] += 1
        launch(launcher, *given)

    decisions._last.clear()
    with mock.patch.object(Launcher, "_launch_by_jit", counted):
        fused = run(ctx, *arguments)
    return fused, launches, {choice.strategy for _, choice in decisions._last.values()}


def tiled(*case: str) -> Generation:
    return Generation(*case, strategy="tile")


@pytest.mark.parametrize(
    ("case", "world_size"),
    [
        (tiled("mixtral", "ep", "static", COPIES), 4),
        *rare(
            *((tiled(*model, "static", COPIES), 4) for model in FORMS),
            *((tiled(*model, "dynamic", COPIES), 2) for model in FORMS),
        ),
    ],
    ids=str,
)
def test_by_kernels(rank_pools: RankPools, case: Generation, world_size: int) -> None:
    pool = rank_pools.get("cpu", world_size, label="accelerate" if world_size == 2 else "")
    found = pool.run(by_kernels, generated, case, 3, timeout=250.0)
    check_fused(case, [fused for fused, *_ in found])
    # Of three tokens the first one comes of the prompt.
    calls = 2 if case.cache == "static" else 3
    for _, launches, strategies in found:
        assert strategies == {"tile"} and launches["expert_projections_kernel"] == 2 * LAYERS * calls


@pytest.mark.parametrize(
    "case", rare(*(tiled(*model, "static", how) for model in FORMS for how in (COPIES, GROUPED))), ids=str
)
def test_by_kernels_in_bfloat16(rank_pools: RankPools, case: Generation) -> None:
    # Of float32 the models multiply in an op of their own in place of grouped matmuls.
    pool = rank_pools.get("cpu", 2, label="accelerate")
    found = pool.run(by_kernels, as_near_as_eager, case, Sizes(dtype=torch.bfloat16), 4, timeout=250.0)
    for _, launches, strategies in found:
        assert strategies == {"tile"} and launches["expert_projections_kernel"] == 2 * LAYERS * 3
