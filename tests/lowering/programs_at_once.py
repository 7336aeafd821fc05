"""Programs of a launch that run at once in the interpreter, each in a thread of its own.

Triton's interpreter runs the programs of a launch one after the other. So no program of a rank ever finds another one
half way: what they count together, and hand on to each other, is always complete or not begun. Here they start
together, and rest for a random time before some of their atomic operations and stores, so that others overtake them.
One program of each launch is slow: it rests before all of them.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from ditron_inductor.lowering.host.launch import Launch

SWITCH_S = 1.0e-4
"""How long a thread runs before another one has its turn."""


@contextlib.contextmanager
def programs_at_once(programs: int, seed: int, *, rests: float = 0.03, rest_s: float = 4.0e-3) -> Iterator[None]:
    """Persistent kernels of this process have so many programs, as far as there is work for them, and the programs of
    all launches run at once. rests: the part of the atomic operations and stores before which a program rests, for a
    random time up to rest_s seconds.
    """
    from triton.runtime import interpreter

    module: Any = interpreter
    builder = module.InterpreterBuilder
    here = _Places(random.Random(seed))
    drawn, lock = random.Random(seed), threading.Lock()

    def resting(operation: Callable[..., Any]) -> Callable[..., Any]:
        def after_a_rest(*operands: Any, **named: Any) -> Any:
            with lock:
                length = drawn.random() * rest_s if here.slow or drawn.random() < rests else 0.0
            time.sleep(length)
            return operation(*operands, **named)

        return after_a_rest

    def wanted(_: Launch, work: int, config: object) -> int:
        return max(1, min(work, programs))

    switch_s = sys.getswitchinterval()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Launch, "programs", wanted))
        stack.enter_context(mock.patch.object(module, "GridExecutor", _executor(module, here)))
        stack.enter_context(mock.patch.object(builder, "grid_idx", property(here.get, here.put), create=True))
        for name in ("create_atomic_rmw", "create_masked_store"):
            stack.enter_context(mock.patch.object(builder, name, resting(getattr(builder, name))))
        stack.callback(sys.setswitchinterval, switch_s)
        sys.setswitchinterval(SWITCH_S)
        yield


class _Places:
    """The place in the grid of the program that a thread runs, in the place of an attribute of the builder, and whether
    the program is the slow one. drawn: chooses it.
    """

    def __init__(self, drawn: random.Random) -> None:
        self.of_thread = threading.local()
        self.drawn = drawn

    @property
    def slow(self) -> bool:
        return getattr(self.of_thread, "slow", False)

    def get(self, _: object) -> tuple[int, ...] | None:
        return getattr(self.of_thread, "place", None)

    def put(self, _: object, place: tuple[int, ...] | None) -> None:
        self.of_thread.place = place


def _executor(module: Any, here: _Places) -> type:
    """Triton's executor of a grid. The function that it calls for a program returns at once; for the last program it
    runs all of them.
    """

    class Executor(module.GridExecutor):  # type: ignore[misc]
        def __init__(self, fn: Any, *rest: Any, **named: Any) -> None:
            super().__init__(fn, *rest, **named)
            self.fn = _starting(fn, _Threads(module, here, fn))

    return Executor


class _Threads:
    """The threads of a launch of `fn`."""

    def __init__(self, module: Any, here: _Places, fn: Callable[..., Any]) -> None:
        self.module, self.here, self.fn = module, here, fn
        self.programs: list[tuple[tuple[int, ...], dict[str, Any]]] = []
        self.problems: list[BaseException] = []

    def start(self, arguments: dict[str, Any]) -> None:
        """Keeps the program at this thread's place; at the last place, runs all of them."""
        builder = self.module.interpreter_builder
        place = builder.grid_idx
        self.programs.append((place, arguments))
        if all(index == size - 1 for index, size in zip(place, builder.grid_dim, strict=True)):
            self.run_all()

    def run(self, place: tuple[int, ...], arguments: dict[str, Any], slow: bool) -> None:
        self.here.put(None, place)
        self.here.of_thread.slow = slow
        try:
            self.fn(**arguments)
        except BaseException as error:  # whatever it is, the launch raises it
            self.problems.append(error)

    def run_all(self) -> None:
        module, chosen = self.module, self.here.drawn.randrange(len(self.programs))
        threads = [
            threading.Thread(target=self.run, args=(*program, index == chosen))
            for index, program in enumerate(self.programs)
        ]
        # What device functions replace in Triton's language is replaced for all programs, once.
        modules = {"tl": module.tl, "core": module.tl.core}
        scope = module._patch_lang(types.FunctionType((lambda: None).__code__, modules))
        try:
            with mock.patch.object(module, "_patch_lang", lambda _: module._LangPatchScope()):
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
        finally:
            scope.restore()
        if self.problems:
            raise self.problems[0]


def _starting(fn: Any, threads: _Threads) -> Any:
    """Returns a function with the parameters and the globals of `fn`, which Triton looks at."""
    start = threads.start

    def program(**arguments: Any) -> None:
        start(arguments)

    made: Any = types.FunctionType(program.__code__, fn.__globals__, fn.__name__, None, program.__closure__)
    made.__signature__, made.__annotations__ = inspect.signature(fn), fn.__annotations__
    return made
