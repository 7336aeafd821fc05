"""Launches whose arguments are structures: the same compiled kernel as the JIT would run, the same addresses.

Without a GPU, as in test_launcher.py: the keys are Triton's own.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel, make_backend
from triton.runtime.jit import create_function_from_signature

from ditron_inductor.core.layout import NUM_SLOTS
from ditron_inductor.core.signals import FIRST_SLOT, Pointers
from ditron_inductor.lowering.host import launcher as launcher_module
from ditron_inductor.lowering.host.launcher import Arguments, Bound, Launcher

DEVICE = torch.device("cuda", 0)
STREAM = 77


class Tensors(NamedTuple):
    x: Any
    out: Any


class Sizes(NamedTuple):
    rows: Any
    strides: Any


class How(NamedTuple):
    BLOCK: int
    MODE: str


@triton.jit(do_not_specialize=["row"])
def kernel(tensors, pointers, sizes, row, HOW: tl.constexpr):
    pass


class Compiled(CompiledKernel):
    """A compiled kernel that writes down what it is launched with."""

    def __init__(self, launches: list[Any]) -> None:
        self.module = None
        self.function = self.packed_metadata = "anything"
        self.metadata = SimpleNamespace(global_scratch_size=0)
        self._run = lambda *args: launches.append(args[9:])


class Jit:
    """Stands in for `kernel.run`."""

    def __init__(self) -> None:
        self.backend = make_backend(GPUTarget("cuda", 90, 32))
        self.binder = create_function_from_signature(kernel.signature, kernel.params, self.backend)
        self.compiled: dict[str, Compiled] = {}
        self.launches: list[Any] = []

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        _, specialization, _ = self.binder(**kwargs, debug=False, instrumentation_mode="")
        return self.compiled.setdefault(str(specialization), Compiled(self.launches))


@pytest.fixture
def jit(monkeypatch: pytest.MonkeyPatch) -> Any:
    stand_in = Jit()
    monkeypatch.setattr(kernel, "run", stand_in.run, raising=False)
    monkeypatch.setattr(kernel, "device_caches", {0: ({}, {}, None, stand_in.backend, stand_in.binder)})
    launcher_module.internals.cache_clear()
    yield stand_in
    launcher_module.internals.cache_clear()


def words(count: int = 8) -> torch.Tensor:
    """Aligned to 16 bytes."""
    whole = torch.zeros(count + 2, dtype=torch.int64)
    return whole[whole.data_ptr() % 16 // 8 :][:count]


def no_scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    raise AssertionError("no kernel here needs scratch memory")


SIZES, HOW = Sizes(48, (16, 1)), How(64, "plain")
SITE = 12345
MEMORY = words(), words(), words()


def pointers(slot: int) -> Pointers:
    return Pointers(*MEMORY, slot + FIRST_SLOT.value, SITE)


def addresses(slot: int) -> tuple[int, ...]:
    return *[one.data_ptr() for one in MEMORY], slot + FIRST_SLOT.value, SITE



def arguments() -> Arguments:
    return Arguments(programs=3, values={"sizes": SIZES, "HOW": HOW})


def make() -> Launcher:
    return Launcher(kernel, DEVICE, numbers=("row",), words=("pointers",), allocator=no_scratch)


def test_structures_are_passed_as_tuples_of_addresses(jit: Jit) -> None:
    launcher = make()
    for slot, row in ((0, 5), (1, 1), (0, 16)):
        tensors = Tensors(words(), words())
        launcher(STREAM, arguments, (row,), (pointers(slot),), {"tensors": tensors})
        if row != 5:
            expected = (tensors.x.data_ptr(), tensors.out.data_ptr()), addresses(slot), SIZES, row, HOW
            assert jit.launches[-1] == expected
    # Whatever the slot, and the row, which is 1, and a multiple of 16.
    assert len(jit.launches) == 2 and len(jit.compiled) == 1


def test_the_alignment_of_a_member_decides(jit: Jit) -> None:
    launcher = make()
    aligned, shifted = Tensors(words(), words()), Tensors(words(), words()[1:])
    for tensors in (aligned, shifted, aligned, shifted):
        launcher(STREAM, arguments, (5,), (pointers(0),), {"tensors": tensors})
    assert len(jit.compiled) == len(launcher.ready) == 2 and len(jit.launches) == 2


def test_a_bound_launch_fills_in_structures(jit: Jit) -> None:
    launcher, tensors = make(), Tensors(words(), words())
    launcher(STREAM, arguments, (5,), (pointers(1),), {"tensors": tensors})
    Bound(launcher, arguments, (5,), (pointers(1),), ("tensors",))(STREAM, tensors)
    assert jit.launches == [((tensors.x.data_ptr(), tensors.out.data_ptr()), addresses(1), SIZES, 5, HOW)]


def test_members_are_specialised_on_whatever_a_kernel_asks_for() -> None:
    """Why the rank is a parameter of its own, and slots are not counted from 0: where this changes, that can go."""
    backend = type(make_backend(GPUTarget("cuda", 90, 32)))
    kinds, keys = native_specialize_impl(backend, Sizes(1, 16), False, False, False)
    assert kinds == ("constexpr", "i32") and keys[0] == 1
    assert native_specialize_impl(backend, 1, False, False, False)[0] == "i32"
    for slot in range(NUM_SLOTS.value):
        kinds, keys = native_specialize_impl(backend, pointers(slot), False, False, False)
        assert kinds[3:] == ("i32", "i32") and not any(keys[3:])
