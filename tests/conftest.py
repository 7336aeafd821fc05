"""Fixtures: pools of rank processes, and the places (device and world size) that distributed tests run at.

A test that takes `pool` runs once per place: on the CPU device with 2 and 4 ranks, and, marked `gpu`, on CUDA with as
many. `gpu_pool` is for tests that only make sense there. `python -m pytest -m gpu` runs the GPU half alone; one GPU is
enough for 2 ranks, for correctness; 4 ranks want 4 GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import RankPool, RankPools

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Place:
    """Where a distributed test runs."""

    device_type: str
    world_size: int

    def __str__(self) -> str:
        return f"{self.device_type}{self.world_size}"


CPU_PLACES: list[Any] = [pytest.param(Place("cpu", world_size), id=f"cpu{world_size}") for world_size in (2, 4)]
GPU_PLACES: list[Any] = [
    pytest.param(Place("cuda", world_size), id=f"cuda{world_size}", marks=pytest.mark.gpu) for world_size in (2, 4)
]

# What is left of a parameter at a thin place, by the parameter's name: the indices of its values that still run.
THINNED: dict[str, Callable[[int], bool]] = {
    "case": lambda index: index % 3 == 0,
    "strategy": lambda index: index == 0,
    "late_rank": lambda index: index == 0,
}


def is_thin(place: Place) -> bool:
    """Whether a place runs a sample: four ranks that poll on two cores are slow, and 2 of 4 GPUs repeat the 4."""
    return place == Place("cpu", 4) or (place == Place("cuda", 2) and torch.cuda.device_count() >= 4)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # Pass and task tests hold no GPU test and import test tools that a GPU machine need not have.
    if config.option.markexpr == "gpu" and collection_path in (HERE / "passes", HERE / "task"):
        return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    num_gpus = torch.cuda.device_count()
    dropped = []
    # The values of a test's parameter in order; pytest itself numbers them over all parameters together.
    values: dict[tuple[object, str], list[object]] = {}
    for item in items:
        spec = getattr(item, "callspec", None)
        places = [value for value in spec.params.values() if isinstance(value, Place)] if spec else []
        if any(is_thin(place) for place in places):
            assert spec is not None and isinstance(item, pytest.Function)
            kept = True
            for name, keep in THINNED.items():
                if name in spec.params:
                    known = values.setdefault((item.function, name), [])
                    if spec.params[name] not in known:
                        known.append(spec.params[name])
                    kept &= keep(known.index(spec.params[name]))
            if not kept:
                dropped.append(item)
        if item.get_closest_marker("gpu") is None:
            continue
        wanted = max([place.world_size for place in places], default=1)
        if num_gpus == 0:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        elif wanted > max(2, num_gpus):
            item.add_marker(pytest.mark.skip(reason=f"needs {wanted} GPUs, {num_gpus} here"))
    config.hook.pytest_deselected(items=dropped)
    items[:] = [item for item in items if item not in set(dropped)]


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[RankPools]:
    """The session's pools of rank processes: `rank_pools.get("cpu", 2).run(fn, ...)`."""
    pools = RankPools()
    yield pools
    pools.close()


# Session scope makes pytest run the tests of one place together.
@pytest.fixture(scope="session", params=CPU_PLACES + GPU_PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    """The place of this run of the test."""
    return request.param


@pytest.fixture
def pool(rank_pools: RankPools, place: Place) -> RankPool:
    """The live ranks of the place."""
    return rank_pools.get(place.device_type, place.world_size)


@pytest.fixture(scope="session", params=GPU_PLACES)
def gpu_place(request: pytest.FixtureRequest) -> Place:
    """As `place`, for tests that run on GPUs only."""
    return request.param


@pytest.fixture
def gpu_pool(rank_pools: RankPools, gpu_place: Place) -> RankPool:
    """The live ranks of the GPU place."""
    return rank_pools.get(gpu_place.device_type, gpu_place.world_size)
