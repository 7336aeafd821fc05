"""Fixtures: pools of rank processes, and the places (device and world size) that distributed tests run at.

A test that takes `pool` runs once per place: on the CPU device with 2 and 4 ranks, and, marked `gpu`, on CUDA with as
many. `gpu_pool` is for tests that only make sense there. `python -m pytest -m gpu` runs the GPU half alone; one GPU is
enough for 2 ranks, for correctness; 4 ranks want 4 GPUs, unless `--share-gpus` is given.
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.quick_torch import make_torch_quick
from tests.rank_process import rarely_collect
from tests.ranks import RankPool, RankPools

# Until tests run, next to nothing of what is made becomes garbage.
gc.disable()
HERE = Path(__file__).parent
# Rank processes inherit all of these. A table that somebody measured here must not decide what the tests run, and a
# graph from a cache has not been through the passes.
os.environ["DITRON_TABLE"] = "shipped"
os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"
# Machines that run tests are busy, and a rank whose peers are slow to compile is to wait for them.
os.environ["DITRON_MEETING_S"] = "90"
# Torch's C++ kernels without vectors compile in half the time, and processes for compiling would import torch first.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# An op whose outputs share memory is an error, as it is for torch where CI=1.
os.environ["TORCHINDUCTOR_ERROR_ON_CUSTOM_OP_ALIASING"] = "1"


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


def every(step: int, first: int = 0) -> Callable[[int], bool]:
    """Keeps every `step`-th value of a parameter."""
    return lambda index: index % step == first


def first_only(index: int) -> bool:
    """Keeps a parameter's first value."""
    return index == 0


def kept_values(place: Place) -> dict[str, Callable[[int], bool]]:
    """Which values of a parameter run at a place, by the parameter's name; `--all-cases` runs all of them.

    On the CPU device ranks that poll take the cores from those that work; on a GPU nearly every case compiles a kernel
    of its own, and where there are 4 GPUs, 2 of them need not repeat everything.
    """
    if place.device_type == "cpu":
        few: dict[str, Callable[[int], bool]] = {"late_rank": first_only, "stopped_kind": every(8)}
        if place.world_size == 2:
            return few | {"case": every(2), "kind": every(2), "layer": every(2)}
        more = {"strategy": first_only, "layer": every(4, 1), "number": every(4, 1)}
        return few | more | {"case": every(8, 1), "kind": every(2, 1)}
    if place.world_size == 2 and torch.cuda.device_count() >= 4:
        return {"case": every(3, 1), "large_case": every(2), "strategy": first_only, "late_rank": first_only}
    return {"case": every(2)}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="run every case at every place, not samples")
    parser.addoption("--share-gpus", action="store_true", help="run 4 ranks on fewer than 4 GPUs too: right, but slow")


class _RanksTogether:
    """With pytest-xdist the files with pools of ranks are in two groups, each of which one worker has, with pools of
    its own: programs, and the parts that run or measure them, which take as long. More ranks at once take the cores
    from each other: with three groups all took 1175 s on two cores, and 1034 s with two. One worker has all tests of a
    compiled kernel, so that it is compiled once. All else runs beside them, test by test.
    """

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        from xdist.scheduler import LoadScopeScheduling

        class Scheduler(LoadScopeScheduling):
            def _split_scope(self, nodeid: str) -> str:
                file = config.rootpath / nodeid.partition("::")[0]
                if file.stem.endswith("_compile"):
                    return f"{file.stem}[{nodeid.partition('[')[2]}"
                if not _has(file, "RankPool"):
                    return nodeid
                whole = file.parent in (HERE / "models", HERE / "stacks")
                whole |= file.parent == HERE and not _has(file, "from benchmarks")
                return "programs" if whole else "parts"

        return Scheduler(config, log)


@functools.cache
def _has(file: Path, text: str) -> bool:
    return text in file.read_text()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_RanksTogether())
    make_torch_quick()


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
        assert isinstance(item, pytest.Function)
        if item.get_closest_marker("all_cases") and not config.option.all_cases:
            dropped.append(item)
            continue
        if spec and places and not config.option.all_cases:
            kept = True
            for name, keep in kept_values(places[0]).items():
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
        elif wanted > max(2, num_gpus) and not config.option.share_gpus:
            item.add_marker(pytest.mark.skip(reason=f"needs {wanted} GPUs, {num_gpus} here"))
    config.hook.pytest_deselected(items=dropped)
    items[:] = [item for item in items if item not in set(dropped)]


def pytest_collection_finish() -> None:
    gc.enable()
    rarely_collect()


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
