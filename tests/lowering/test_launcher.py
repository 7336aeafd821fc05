"""The launcher picks the compiled kernel that Triton's JIT would pick, for every call, and passes the same arguments.

Without a GPU: the JIT and the compiled kernels are stand-ins that write down what they get, and the keys are Triton's
own, from its binder and an NVIDIA backend that is asked nothing else.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton._C import libtriton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel, make_backend
from triton.runtime import _allocation
from triton.runtime.jit import create_function_from_signature

from ditron_inductor.device.scratch import Scratch
from ditron_inductor.lowering.host import launcher as launcher_module
from ditron_inductor.lowering.host.launcher import Arguments, Bound, Launcher
from ditron_inductor.lowering.host.tracing import TraceBuffer, tracing

DEVICE = torch.device("cuda", 0)
STREAM = 77
NUMBERS = ("slot", "site")
TABLE = torch.zeros(2, dtype=torch.int64)


@triton.jit(do_not_specialize=["slot", "site", "rank"])
def kernel(x, weights, out, table, rows, columns, rank, slot, site, BLOCK: tl.constexpr, MODE: tl.constexpr = "plain"):
    pass


@triton.jit
def eager_kernel(x, slot, site):
    pass


class Compiled(CompiledKernel):
    """A compiled kernel that belongs to one key of the JIT."""

    def __init__(self, key: str, launches: list[Any], scratch_bytes: int) -> None:
        self.module = None
        self.key = key
        self.function = f"function of {key}"
        self.packed_metadata = f"metadata of {key}"
        self.metadata = SimpleNamespace(global_scratch_size=scratch_bytes)
        self._launches = launches
        self._run = self.launched

    def launched(
        self,
        x: int,
        y: int,
        z: int,
        stream: int,
        function: Any,
        metadata: Any,
        about: Any,
        enter: Any,
        leave: Any,
        *args: Any,
    ) -> None:
        assert (y, z, stream, about, enter, leave) == (1, 1, STREAM, None, None, None)
        assert function == self.function and metadata == self.packed_metadata
        scratch = None
        if self.metadata.global_scratch_size:
            scratch = _allocation._allocator.get()(self.metadata.global_scratch_size * x, 128, stream)
        self._launches.append(("direct", self.key, x, args, scratch))


class Jit:
    """Stands in for `kernel.run`: one compiled kernel for each key that Triton's binder makes of the arguments."""

    def __init__(self) -> None:
        self.backend = make_backend(GPUTarget("cuda", 90, 32))
        self.binder = create_function_from_signature(kernel.signature, kernel.params, self.backend)
        self.compiled: dict[str, Compiled] = {}
        self.launches: list[Any] = []
        self.scratch_bytes = 0
        self.answer: Callable[[Any], Any] = lambda compiled: compiled

    def key(self, **kwargs: Any) -> str:
        kwargs["debug"] = knobs.runtime.debug
        kwargs["instrumentation_mode"] = knobs.compilation.instrumentation_mode
        _, specialization, options = self.binder(**kwargs)
        return str((specialization, options))

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        assert not args and not warmup
        key = self.key(**kwargs)
        found = self.compiled.setdefault(key, Compiled(key, self.launches, self.scratch_bytes))
        scratch = _allocation._allocator.get()(self.scratch_bytes, 128, STREAM) if self.scratch_bytes else None
        self.launches.append(("jit", key, grid[0], kwargs, scratch))
        return self.answer(found)


@pytest.fixture
def jit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Jit]:
    stand_in = Jit()
    monkeypatch.setattr(kernel, "run", stand_in.run, raising=False)
    monkeypatch.setattr(kernel, "device_caches", {0: ({}, {}, None, stand_in.backend, stand_in.binder)})
    launcher_module.internals.cache_clear()
    yield stand_in
    launcher_module.internals.cache_clear()


def no_scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    raise AssertionError("no kernel here needs scratch memory")


class Site:
    """A launcher with its fixed arguments, and how often they were asked for."""

    def __init__(self, jit: Jit, allocator: Any = no_scratch, **changes: Any) -> None:
        self.jit = jit
        self.values = {"rows": 48, "columns": (16, 1), "rank": 1, "BLOCK": 64, "num_warps": 8} | changes
        self.asked = 0
        self.launcher = Launcher(kernel, DEVICE, numbers=NUMBERS, words=("table",), allocator=allocator)

    def arguments(self) -> Arguments:
        self.asked += 1
        return Arguments(programs=132, values=self.values)

    def __call__(self, slot: int = 0, **tensors: Any) -> tuple[str, str]:
        """One launch: by which way, and the key of the kernel that ran. Checks that key, and the arguments."""
        before = len(self.jit.launches)
        self.launcher(STREAM, self.arguments, (slot, 12345), (TABLE,), tensors)
        assert len(self.jit.launches) == before + 1, "one launch for one call"
        way, key, programs, args, _ = self.jit.launches[-1]
        assert programs == 132
        assert key == self.jit.key(**tensors, **self.values, table=TABLE, slot=slot, site=12345), (
            "the JIT would run another kernel"
        )
        if way == "direct":
            expected = {**self.values, "table": TABLE.data_ptr(), "slot": slot, "site": 12345, "MODE": "plain"}
            for name, value in tensors.items():
                expected[name] = tuple(t.data_ptr() for t in value) if isinstance(value, tuple) else value.data_ptr()
            assert args == tuple(expected[param.name] for param in kernel.params)
        return way, key


def operand(dtype: torch.dtype = torch.bfloat16, shift: int = 0) -> torch.Tensor:
    """64 elements, `shift` elements behind a 16-byte boundary."""
    whole = torch.zeros(96, dtype=dtype)
    first = -(whole.data_ptr() // whole.element_size()) % (16 // whole.element_size())
    part = whole[first + shift :][:64]
    assert part.data_ptr() % 16 == shift * part.element_size() % 16
    return part


def operands(**changes: Any) -> dict[str, Any]:
    return {"x": operand(), "weights": (operand(), operand()), "out": operand()} | changes


def test_the_second_launch_is_direct(jit: Jit) -> None:
    site = Site(jit)
    assert [site(slot=i % 2, **operands())[0] for i in range(5)] == ["jit", *["direct"] * 4]
    assert site.asked == 1 and len(jit.compiled) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"x": operand(shift=1)},
        {"out": operand(shift=3)},
        {"weights": (operand(), operand(shift=1))},
        {"weights": (operand(shift=1), operand())},
        {"x": operand(torch.float16)},
        {"out": operand(torch.float32)},
        {"weights": (operand(), operand(torch.float16))},
        {"weights": (operand(),)},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_other_operands_go_to_another_kernel_and_back(jit: Jit, changes: dict[str, Any]) -> None:
    site = Site(jit)
    first, second = site(**operands())[1], site(**operands(**changes))[1]
    assert first != second
    assert site(**operands()) == ("direct", first)
    assert site(**operands(**changes)) == ("direct", second)
    assert site.asked == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 1},
        {"rows": 47},
        {"rows": 1 << 40},
        {"columns": (1, 16)},
        {"BLOCK": 128},
        {"num_warps": 4},
        {"rank": 1 << 40},
    ],
    ids=str,
)
def test_other_numbers_go_to_another_kernel(jit: Jit, changes: dict[str, Any]) -> None:
    one, other = Site(jit), Site(jit, **changes)
    assert one(**operands())[1] != other(**operands())[1]
    assert one(**operands())[0] == other(**operands())[0] == "direct"
    assert len(jit.compiled) == 2


def test_random_calls_agree_with_the_jit(jit: Jit) -> None:
    chance = random.Random(3)
    sites = [Site(jit, rows=rows, rank=rank) for rows in (1, 16, 17) for rank in (0, 1)]

    def some() -> torch.Tensor:
        return operand(chance.choice([torch.bfloat16, torch.float32]), chance.choice([0, 0, 0, 1, 2, 4]))

    ways = [chance.choice(sites)(chance.randrange(2), x=some(), weights=(some(),), out=some())[0] for _ in range(600)]
    # 4 kinds of each operand, for each site; the rest was there already.
    assert ways.count("jit") <= 6 * 4**3 and ways.count("direct") > 200


def test_settings_of_the_compiler_are_part_of_the_key(jit: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(jit)
    plain = site(**operands())[1]
    monkeypatch.setattr(knobs.runtime, "debug", True)
    assert site(**operands()) != ("direct", plain)
    monkeypatch.setattr(knobs.runtime, "debug", False)
    assert site(**operands()) == ("direct", plain)


@pytest.mark.parametrize("which", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("chained", [True, False])
def test_launch_hooks_see_every_launch(jit: Jit, monkeypatch: pytest.MonkeyPatch, which: str, chained: bool) -> None:
    site = Site(jit)
    site(**operands())

    def hook(metadata: Any) -> None:
        pass

    if chained:
        monkeypatch.setattr(getattr(knobs.runtime, which), "calls", [hook])
    else:
        monkeypatch.setattr(knobs.runtime, which, hook)
    assert [site(**operands())[0] for _ in range(2)] == ["jit", "jit"]
    monkeypatch.undo()


def test_other_hooks_send_launches_through_the_jit(jit: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(jit)
    site(**operands())
    monkeypatch.setattr(kernel, "pre_run_hooks", [lambda *args, **kwargs: None])
    assert site(**operands())[0] == "jit"
    monkeypatch.setattr(kernel, "pre_run_hooks", [])
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", lambda *args: ("", ""))
    assert site(**operands())[0] == "jit"
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", None)
    assert site(**operands())[0] == "direct"


@pytest.mark.parametrize("answer", [None, SimpleNamespace(result="not compiled yet")], ids=["hook", "future"])
def test_what_is_no_compiled_kernel_is_not_kept(jit: Jit, answer: Any) -> None:
    jit.answer = lambda compiled: answer
    site = Site(jit)
    assert [site(**operands())[0] for _ in range(3)] == ["jit"] * 3


def test_numbers_of_a_call_must_not_be_specialised_on() -> None:
    with pytest.raises(AssertionError, match="slot"):
        Launcher(eager_kernel, DEVICE, numbers=NUMBERS, words=(), allocator=no_scratch)


def test_numbers_of_a_call_stay_within_32_bits(jit: Jit) -> None:
    site = Site(jit)
    site(**operands())
    with pytest.raises(AssertionError, match="32 bits"):
        site.launcher(STREAM, site.arguments, (0, 1 << 31), (TABLE,), operands())


def test_scratch_memory_comes_from_our_allocator_and_the_users_is_back_afterwards(jit: Jit) -> None:
    jit.scratch_bytes = 384
    sizes = []

    def ours(size: int, alignment: int, stream: int | None) -> str:
        sizes.append(size)
        return "our buffer"

    def users(size: int, alignment: int, stream: int | None) -> Any:
        raise AssertionError("the user's allocator is not ours to use")

    token = _allocation._allocator.set(users)
    try:
        site = Site(jit, allocator=ours)
        assert [site(**operands())[0] for _ in range(3)] == ["jit", "direct", "direct"]
        assert [launch[-1] for launch in jit.launches] == ["our buffer"] * 3
        assert sizes == [384, 384 * 132, 384 * 132]
        assert _allocation._allocator.get() is users

        def broken(*args: Any) -> None:
            raise ValueError("no launch")

        for ready in site.launcher.ready.values():
            object.__setattr__(ready, "run", broken)
        with pytest.raises(ValueError, match="no launch"):
            site(**operands())
        assert _allocation._allocator.get() is users
    finally:
        _allocation._allocator.reset(token)


class Slot:
    """A site's launches with one number each, in the order of `operands`."""

    def __init__(self, site: Site, slot: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.site = site
        self.slot = slot
        self.launch = Bound(site.launcher, site.arguments, (slot, 12345), (TABLE,), tuple(operands()))
        self.streams: list[int] = []
        monkeypatch.setattr(launcher_module, "on_stream", self.on_stream)

    @contextmanager
    def on_stream(self, handle: int, device: torch.device) -> Iterator[None]:
        assert device == DEVICE
        self.streams.append(handle)
        yield

    def __call__(self, **tensors: Any) -> str:
        """One launch: by which way. Checks what `Site` does."""
        before = len(self.site.jit.launches)
        self.launch(STREAM, *tensors.values())
        assert len(self.site.jit.launches) == before + 1, "one launch for one call"
        way, key, programs, args, _ = self.site.jit.launches[-1]
        values = {**self.site.values, "slot": self.slot, "site": 12345}
        assert programs == 132 and key == self.site.jit.key(**tensors, **values, table=TABLE)
        if way == "direct":
            expected = {**values, "table": TABLE.data_ptr(), "MODE": "plain"}
            for name, value in tensors.items():
                expected[name] = tuple(t.data_ptr() for t in value) if isinstance(value, tuple) else value.data_ptr()
            assert args == tuple(expected[param.name] for param in kernel.params)
        return way


def test_bound_launches_share_kernels_and_have_their_own_numbers(jit: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(jit)
    slots = [Slot(site, slot, monkeypatch) for slot in (0, 1)]
    assert [slot(**operands()) for slot in (*slots, *slots)] == ["jit", "direct", "direct", "direct"]
    other = {"x": operand(shift=1), "weights": (operand(shift=3), operand())}
    assert [slot(**operands(**other)) for slot in slots] == ["jit", "direct"]
    assert [slot(**operands()) for slot in slots] == ["direct", "direct"]
    assert site.asked == 2 and len(jit.compiled) == 2


def test_a_bound_launch_by_the_jit_is_on_its_stream(jit: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = Slot(Site(jit), 0, monkeypatch)
    assert [slot(**operands()) for _ in range(2)] == ["jit", "direct"] and slot.streams == [STREAM]
    with monkeypatch.context() as patch:
        patch.setattr(getattr(knobs.runtime, "launch_enter_hook"), "calls", [print])  # noqa: B009
        assert slot(**operands()) == "jit" and slot.streams == [STREAM] * 2
    assert slot(**operands()) == "direct"


def test_a_bound_launch_gives_its_place_to_one_with_time_stamps(jit: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    site, timed = Site(jit), Site(jit, MODE="timed")
    slot, other = Slot(site, 0, monkeypatch), Slot(timed, 0, monkeypatch)
    slot.launch = Bound(site.launcher, site.arguments, (0, 12345), (TABLE,), tuple(operands()), lambda: other.launch)
    assert [slot(**operands()) for _ in range(2)] == ["jit", "direct"]
    with tracing.into(TraceBuffer(torch.device("cpu"), 1)):
        for _ in range(2):
            slot.launch(STREAM, *operands().values())
    assert [(launch[0], "timed" in launch[1]) for launch in jit.launches[2:]] == [("jit", True), ("direct", True)]
    assert slot(**operands()) == "direct" and len(jit.compiled) == 2


def test_a_bound_launch_with_scratch_memory_gets_it(jit: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    jit.scratch_bytes = 384
    slot = Slot(Site(jit, allocator=lambda size, alignment, stream: "our buffer"), 0, monkeypatch)
    assert [slot(**operands()) for _ in range(3)] == ["jit", "direct", "direct"]
    assert [launch[-1] for launch in jit.launches] == ["our buffer"] * 3


def test_what_is_compiled_while_somebody_changes_compilations_is_not_kept(
    jit: Jit, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(jit)
    with monkeypatch.context() as patch:
        patch.setattr(knobs.runtime, "add_stages_inspection_hook", lambda *args: ("", ""))
        assert site(**operands())[0] == "jit"
    assert [site(**operands())[0] for _ in range(2)] == ["jit", "direct"]


def test_an_unknown_triton_is_launched_by_its_jit(
    jit: Jit, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton, "__version__", "4.1.0+git")
    with caplog.at_level(logging.WARNING):
        site = Site(jit)
        assert [site(**operands())[0] for _ in range(3)] == ["jit"] * 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Triton 4.1.0+git is launched through its JIT" in caplog.text


def test_missing_internals_are_named_once(
    jit: Jit, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(libtriton, "native_specialize_impl")
    with caplog.at_level(logging.WARNING):
        site = Site(jit)
        assert [site(**operands())[0] for _ in range(3)] == ["jit"] * 3
    assert len(caplog.records) == 1 and "native_specialize_impl" in caplog.text


def test_this_triton_is_known() -> None:
    assert launcher_module.internals() is not None


@triton.jit(do_not_specialize=["slot", "site"])
def scale(x, out, table, numel, slot, site, BLOCK: tl.constexpr):
    """out = x * site + slot, in x's dtype, for `numel` elements."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < numel
    value = tl.load(x + offsets, mask=inside).to(tl.float32) * site + slot
    tl.store(out + offsets, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["slot", "site"])
def copy_by_descriptor(x, out, table, slot, site, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out = x + slot, block by block through a tensor descriptor that the kernel makes for itself."""
    row = tl.program_id(0) * ROWS
    source = tl.make_tensor_descriptor(x, [ROWS * tl.num_programs(0), COLUMNS], [COLUMNS, 1], [ROWS, COLUMNS])
    offsets = (row + tl.arange(0, ROWS))[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + offsets, source.load([row, 0]) + slot.to(x.dtype.element_ty))


@pytest.mark.gpu
def test_on_a_gpu_every_specialisation_computes_what_it_should() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    table = torch.zeros(2, dtype=torch.int64, device=device)
    stream = torch.cuda.current_stream().cuda_stream
    chance = random.Random(0)
    for numel in (1, 16, 1000):
        launcher = Launcher(scale, device, numbers=NUMBERS, words=("table",), allocator=Scratch(device))
        chosen = Arguments(programs=-(-numel // 128), values={"numel": numel, "BLOCK": 128})

        def arguments(chosen: Arguments = chosen) -> Arguments:
            return chosen

        for index in range(60):
            dtype, shift = chance.choice([torch.float32, torch.bfloat16, torch.float16]), chance.choice([0, 0, 1, 3])
            # Small integers: right to the last bit in every type.
            x = torch.randint(-8, 8, (numel + shift,), device=device).to(dtype)[shift:]
            out = torch.empty(numel + shift, dtype=dtype, device=device)[shift:]
            launcher(stream, arguments, (index % 2, 3), (table,), {"x": x, "out": out})
            assert torch.equal(out, x * 3 + index % 2)
        assert 2 <= len(launcher.ready) <= 6


@pytest.mark.gpu
def test_on_a_gpu_descriptors_lie_in_our_scratch_memory_also_inside_a_graph() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    table = torch.zeros(2, dtype=torch.int64, device=device)
    launcher = Launcher(copy_by_descriptor, device, numbers=NUMBERS, words=("table",), allocator=Scratch(device))
    arguments = Arguments(programs=16, values={"ROWS": 16, "COLUMNS": 64})
    x = torch.randn(256, 64, device=device)
    out = torch.empty_like(x)

    def launch(slot: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        launcher(stream, lambda: arguments, (slot, 5), (table,), {"x": x, "out": out})

    def users(size: int, alignment: int, stream: int | None) -> Any:
        raise AssertionError("the user's allocator is not ours to use")

    token = _allocation._allocator.set(users)
    try:
        for slot in (0, 1, 0, 1):
            launch(slot)
            assert torch.equal(out, x + slot)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            launch(1)
        for _ in range(3):
            x.normal_()
            graph.replay()
            assert torch.equal(out, x + 1)
    finally:
        _allocation._allocator.reset(token)


@pytest.mark.gpu
def test_on_a_gpu_launch_hooks_see_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    table = torch.zeros(2, dtype=torch.int64, device=device)
    launcher = Launcher(scale, device, numbers=NUMBERS, words=("table",), allocator=Scratch(device))
    arguments = Arguments(programs=1, values={"numel": 64, "BLOCK": 128})
    x = torch.ones(64, device=device)
    stream = torch.cuda.current_stream().cuda_stream
    seen: list[str] = []
    hook = lambda metadata: seen.append(metadata.get()["name"])  # noqa: E731
    for index in range(6):
        monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [hook] if index in (2, 3) else [])
        launcher(stream, lambda: arguments, (0, 1), (table,), {"x": x, "out": x})
    assert seen == ["scale", "scale"]
