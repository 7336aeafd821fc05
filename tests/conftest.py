"""Fixtures and the `gpu` marker: CPU tests run anywhere, GPU tests choose 2 and 4 ranks from the GPUs there are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.ranks import RankPools

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # Pass and task tests hold no GPU test and import test tools that a GPU machine need not have.
    if config.option.markexpr == "gpu" and collection_path in (HERE / "passes", HERE / "task"):
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    num_gpus = torch.cuda.device_count()
    for item in items:
        if item.get_closest_marker("gpu") is None:
            continue
        world_size = getattr(item, "callspec", None) and item.callspec.params.get("world_size", 2)  # type: ignore[attr-defined]
        if num_gpus == 0:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        elif world_size and world_size > max(2, num_gpus):
            item.add_marker(pytest.mark.skip(reason=f"needs {world_size} GPUs, {num_gpus} here"))


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[RankPools]:
    """The session's pools of rank processes: `rank_pools.get("cpu", 2).run(fn, ...)`."""
    pools = RankPools()
    yield pools
    pools.close()
