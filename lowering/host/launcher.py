"""Launches of compiled kernels without the work that Triton's JIT repeats in every launch.

`kernel[grid](...)` looks at every argument, builds a text from what it saw, looks up the compiled kernel by this text,
checks global variables, asks the driver about every pointer and calls two hooks. This takes tens of microseconds with
35 arguments, most of which never change. A `Launcher` stands for one kernel at one site. It leaves the first launch of
each specialisation to the JIT, and keeps the compiled kernel and the list of its arguments. Later launches fill in only
what differs: the addresses of the tensors and a few numbers. A `Bound` has fixed numbers and fills in addresses only.

docs/host_path.md says by which facts a compiled kernel is chosen, and which launches the JIT makes. All other arguments
are fixed for a launcher, except numbers that the kernel does not specialise on, which have to fit in 32 bits so that
their type cannot change, and pointers with a fixed dtype and alignment.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from ditron_inductor.device.interpreter_lock import interpreting
from ditron_inductor.device.streams import on_stream
from ditron_inductor.lowering.host.recording import LaunchMade, recording, refuse_to_record
from ditron_inductor.lowering.host.tracing import tracing

logger = logging.getLogger(__name__)

KNOWN_TRITON = ((3, 6), (3, 8))
"""The oldest and the newest version of Triton whose compiled kernels can be launched as below."""

LAUNCH_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl")
"""The options that a launch is given besides the arguments of its kernel."""
SIGNED_32 = 1 << 31

Allocator = Callable[[int, int, int | None], torch.Tensor]


@dataclass(frozen=True)
class Arguments:
    """The part of a launch that does not come with every call: programs, other arguments and options."""

    programs: int
    values: dict[str, Any]


@dataclass(frozen=True)
class Internals:
    """The parts of Triton beyond its public interface that launchers use."""

    runtime: Any
    compilation: Any
    specialize: Callable[..., Any]
    compiled_class: Any
    allocator: contextvars.ContextVar[Any]

    def settings(self) -> tuple[Any, ...] | None:
        """Returns the settings that are options of all compilations; None while hooks see or change these."""
        runtime = self.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        # A chain of hooks, a function, or None.
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            return None
        if getattr(runtime, "add_stages_inspection_hook", None) is not None:
            return None
        return runtime.debug, self.compilation.instrumentation_mode


@functools.cache
def internals() -> Internals | None:
    """Returns Triton's internals; None, with a warning, if they are not known for this version."""
    numbers = re.findall(r"\d+", triton.__version__)
    oldest, newest = (".".join(map(str, version)) for version in KNOWN_TRITON)
    problem = f"{oldest} to {newest} are known"
    if KNOWN_TRITON[0] <= (int(numbers[0]), int(numbers[1])) <= KNOWN_TRITON[1]:
        try:
            from triton import knobs
            from triton._C.libtriton import native_specialize_impl
            from triton.compiler.compiler import CompiledKernel
            from triton.runtime._allocation import _allocator

            found = Internals(knobs.runtime, knobs.compilation, native_specialize_impl, CompiledKernel, _allocator)
            found.settings()
            return found
        except (ImportError, AttributeError) as exc:
            problem = f"{type(exc).__name__}: {exc}"
    logger.warning(
        "Triton %s is launched through its JIT, which costs tens of microseconds for every call (%s)",
        triton.__version__,
        problem,
    )
    return None


@dataclass(frozen=True)
class Ready:
    """A compiled kernel and the list of its arguments, in which those that differ from call to call are missing."""

    run: Callable[..., None]
    function: Any
    metadata: Any
    programs: int
    template: list[Any]
    needs_scratch: bool
    compiled: Any


class Launcher:
    """One kernel at one site, whose operands differ from call to call only in their addresses. numbers: names of the
    int parameters whose values come with every call; the kernel must not specialise on them. words: names of pointers,
    or of structures of pointers and numbers, for all of whose values the JIT compiles the same kernel. allocator:
    allocates scratch memory. `ready` has the kernels that the JIT has compiled so far, by specialisation.
    """

    def __init__(
        self,
        kernel: Any,
        device: torch.device,
        *,
        numbers: tuple[str, ...],
        words: tuple[str, ...],
        allocator: Allocator,
    ) -> None:
        self.kernel = kernel
        self.device = device
        self._numbers = numbers
        self._words = words
        self._allocator = allocator
        self.ready: dict[Any, Ready] = {}
        self.positions: dict[str, int] = {}
        self.flags: dict[str, tuple[bool, bool, bool]] = {}
        # Triton's compiler for NVIDIA or AMD GPUs. It is known from the first launch on.
        self.backend: Any = None
        if isinstance(kernel, JITFunction):
            for position, param in enumerate(kernel.params):
                self.positions[param.name] = position
                align = not param.do_not_specialize_on_alignment
                self.flags[param.name] = (param.is_const, not param.do_not_specialize, align)
            params = [kernel.params[self.positions[name]] for name in numbers]
            eager = [param.name for param in params if not param.do_not_specialize or param.annotation]
            assert not eager, f"{kernel} specialises on {eager}, which differ from call to call"

    def __call__(
        self,
        stream: int,
        arguments: Callable[[], Arguments],
        numbers: tuple[int, ...],
        words: tuple[Any, ...],
        tensors: Mapping[str, Any],
    ) -> None:
        """Launches the kernel on `stream`, the current stream of the device, which is the current device. arguments:
        called before the first launch of each specialisation. Its result may depend only on the specialisations of the
        tensors (dtypes and 16-byte alignment) and on facts that never change at the site. numbers, words: the values of
        the parameters with these names. tensors: the other operands, tensors on the device or tuples of them, with the
        same names in the same order in every call.
        """
        ready = self._ready(tensors)
        if ready is None:
            self._launch_by_jit(arguments, numbers, words, tensors)
            return
        values = self.values(ready, numbers, words)
        positions = self.positions
        for name, x in tensors.items():
            values[positions[name]] = tuple([part.data_ptr() for part in x]) if isinstance(x, tuple) else x.data_ptr()
        here = recording.here()
        if here is not None:
            found = internals()
            settings = None if found is None else found.settings()
            assert settings is not None
            here.launched(LaunchMade(self, ready, settings, dict(tensors)))
        self.start(ready, stream, values)

    def start(self, ready: Ready, stream: int, values: list[Any]) -> None:
        """Launches with these arguments on `stream`, the current stream. No argument is missing."""
        if not ready.needs_scratch:
            ready.run(ready.programs, 1, 1, stream, ready.function, ready.metadata, None, None, None, *values)
            return
        found = internals()
        assert found is not None
        before = found.allocator.set(self._allocator)
        try:
            ready.run(ready.programs, 1, 1, stream, ready.function, ready.metadata, None, None, None, *values)
        finally:
            found.allocator.reset(before)

    def values(self, ready: Ready, numbers: tuple[int, ...], words: tuple[Any, ...]) -> list[Any]:
        """Returns the list of the arguments of a launch, in which only the addresses of tensors are missing."""
        positions = self.positions
        values = ready.template.copy()
        for i, name in enumerate(self._numbers):
            values[positions[name]] = number = numbers[i]
            assert -SIGNED_32 <= number < SIGNED_32, f"{name} = {number} does not fit in 32 bits"
        # Pass addresses, because for every tensor the driver would be asked again.
        for i, name in enumerate(self._words):
            values[positions[name]] = address_of(words[i])
        return values

    def _ready(self, tensors: Mapping[str, Any]) -> Ready | None:
        """Returns the compiled kernel that the JIT would run; None if the JIT has to make this launch."""
        found = internals()
        if found is None or self.backend is None or self.kernel.pre_run_hooks:
            return None
        settings = found.settings()
        return None if settings is None else self.ready.get(self._key(found, settings, tensors))

    def _key(self, found: Internals, settings: tuple[Any, ...], tensors: Mapping[str, Any]) -> tuple[Any, ...]:
        specialize, backend, flags = found.specialize, self.backend, self.flags
        return settings, *[specialize(backend, x, *flags[name]) for name, x in tensors.items()]

    def _launch_by_jit(
        self,
        arguments: Callable[[], Arguments],
        numbers: tuple[int, ...],
        words: tuple[Any, ...],
        tensors: Mapping[str, Any],
    ) -> None:
        """Launches by Triton's JIT, and keeps the compiled kernel."""
        refuse_to_record("a launch by the JIT")
        flat = [word for given in words for word in (given if isinstance(given, tuple) else (given,))]
        assert all(word.data_ptr() % 16 == 0 for word in flat if isinstance(word, torch.Tensor))
        chosen = arguments()
        values = {**chosen.values, **dict(zip(self._numbers, numbers, strict=True))}
        pointers = {**tensors, **dict(zip(self._words, words, strict=True))}
        launch = functools.partial(self.kernel[(chosen.programs,)], **pointers, **values)
        if not isinstance(self.kernel, JITFunction):
            # The interpreter drops arguments that the kernel does not have; on a GPU they are an error.
            unknown = {*pointers, *values} - {*self.kernel.arg_names, *LAUNCH_OPTIONS}
            assert not unknown, f"{self.kernel} has no argument {', '.join(sorted(unknown))}"
            with interpreting(self.kernel):
                launch()
            return

        def with_allocator() -> Any:
            triton.set_allocator(self._allocator)
            return launch()

        # The launch runs in a context of its own, so that the allocator of the caller stays set.
        compiled: Any = contextvars.copy_context().run(with_allocator)
        found = internals()
        settings = None if found is None else found.settings()
        # While hooks change compilations, this may be another kernel than later.
        if found is None or settings is None or not isinstance(compiled, found.compiled_class):
            return
        self.backend = self.kernel.device_caches[self.device.index][3]
        params = self.kernel.params
        self.ready[self._key(found, settings, tensors)] = Ready(
            run=compiled.run,
            function=compiled.function,
            metadata=compiled.packed_metadata,
            programs=chosen.programs,
            # Options are not parameters, and pointers are filled in later.
            template=[None if param.name in pointers else values.get(param.name, param.default) for param in params],
            needs_scratch=bool(getattr(compiled.metadata, "global_scratch_size", 0)),
            compiled=compiled,
        )


def address_of(word: Any) -> Any:
    """Returns the address of a tensor; of a structure, a tuple of its numbers and the addresses of its tensors."""
    if isinstance(word, tuple):
        return tuple([part if isinstance(part, int) else part.data_ptr() for part in word])
    return word.data_ptr()


def local_launcher(kernel: Any, device: torch.device) -> Launcher:
    """Returns the launcher of a kernel that uses no workspace: it has neither the protocol's words nor scratch memory.
    It is called as `launcher(stream, arguments, (), (), tensors)`.
    """
    return Launcher(kernel, device, numbers=(), words=(), allocator=_no_scratch)


def _no_scratch(nbytes: int, alignment: int, stream: int | None) -> torch.Tensor:
    raise AssertionError("the kernel takes no scratch memory")


class Bound:
    """Launches of a launcher that differ in the addresses of tensors only; the numbers and words are fixed. tensors:
    the names of all operands of the kernel, in the order in which they come with every call. arguments: see
    `Launcher.__call__`. The list of arguments is made once for each specialisation. traced: returns a Bound for the
    same launches with time stamps, which run instead while a trace is taken.
    """

    def __init__(
        self,
        launcher: Launcher,
        arguments: Callable[[], Arguments],
        numbers: tuple[int, ...],
        words: tuple[Any, ...],
        tensors: tuple[str, ...] = (),
        traced: Callable[[], Bound] | None = None,
    ) -> None:
        self.kernel = launcher.kernel
        self._traced = traced
        self._launcher = launcher
        self._arguments = arguments
        self._numbers = numbers
        self._words = words
        self._names = tensors
        # In the interpreter, flags and positions are unknown and are not used.
        self._flags = [launcher.flags.get(name, ()) for name in tensors]
        self._places = [launcher.positions.get(name, 0) for name in tensors]
        self._filled: dict[Any, tuple[Ready, list[Any]]] = {}

    def __call__(self, stream: int, *tensors: Any) -> None:
        """Launches on `stream`, which may be any stream of the device. The device is the current one."""
        refuse_to_record("a bound launch")
        if tracing.buffer is not None and self._traced is not None:
            self._traced()(stream, *tensors)
            return
        launcher = self._launcher
        found = internals()
        settings = None
        if found is not None and launcher.backend is not None and not self.kernel.pre_run_hooks:
            settings = found.settings()
        if settings is not None:
            specialize, backend = found.specialize, launcher.backend  # type: ignore[union-attr]
            key = settings, *[specialize(backend, x, *flags) for flags, x in zip(self._flags, tensors, strict=True)]
            filled = self._filled.get(key) or self._fill(key)
            if filled is not None:
                ready, values = filled
                if tensors:
                    values = values.copy()
                    for place, x in zip(self._places, tensors, strict=True):
                        values[place] = tuple([part.data_ptr() for part in x]) if isinstance(x, tuple) else x.data_ptr()
                ready.run(ready.programs, 1, 1, stream, ready.function, ready.metadata, None, None, None, *values)
                return
        with on_stream(stream, launcher.device):
            launcher(stream, self._arguments, self._numbers, self._words, dict(zip(self._names, tensors, strict=True)))

    def _fill(self, key: Any) -> tuple[Ready, list[Any]] | None:
        ready = self._launcher.ready.get(key)
        if ready is None or ready.needs_scratch:
            return None
        self._filled[key] = ready, self._launcher.values(ready, self._numbers, self._words)
        return self._filled[key]
