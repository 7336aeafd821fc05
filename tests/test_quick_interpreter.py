"""The quick interpreter replaces and looks up what the plain one does, once."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

from ditron_inductor import quick_interpreter
from ditron_inductor.quick_interpreter import looked_up_once, patched_once, patient

TL = types.ModuleType("tl")
CORE = types.ModuleType("tl.core")
TL.core = CORE  # type: ignore[attr-defined]


class Scope:
    """What `restore` was called on."""

    restored: list[str]

    def __init__(self, name: str = "nothing") -> None:
        self.name = name

    def restore(self) -> None:
        self.restored.append(self.name)


def device_function(name: str, **seen: Any) -> Any:
    """A function whose globals are `seen`."""
    return types.FunctionType((lambda: None).__code__, {"other": types, **seen}, name)


def test_a_launch_replaces_each_module_once() -> None:
    patched: list[str] = []
    Scope.restored = []

    def patch(fn: Any) -> Scope:
        patched.append(fn.__name__)
        return Scope(fn.__name__)

    patch_once = patched_once(patch, Scope, TL)
    kernel, helper = device_function("kernel", tl=TL), device_function("helper", tl=TL)
    standard, elsewhere = device_function("standard", core=CORE), device_function("elsewhere")
    for launch in (1, 2):
        opened = patch_once(kernel)
        for fn in (helper, standard, helper, standard):
            patch_once(fn)
        # The plain function says what is wrong with one that sees neither.
        patch_once(elsewhere)
        assert patched == ["kernel", "standard", "elsewhere"] * launch
        opened.restore()
        assert Scope.restored == ["kernel"] * launch


def test_scalars_are_looked_up_once() -> None:
    class Scalar:
        scalar: Any = property(lambda self: self)

    class Block:
        def __init__(self, scalar: Any) -> None:
            self.scalar = scalar

    class Pointer(Scalar):
        __hash__ = None  # type: ignore[assignment]

    calls: list[Any] = []

    def look_up(found: Any) -> int:
        calls.append(found)
        return len(calls)

    look_up_once = looked_up_once(look_up, Scalar)
    scalar, pointer = Scalar(), Pointer()
    assert [look_up_once(one) for one in (scalar, Block(scalar), scalar)] == [1, 1, 1]
    assert [look_up_once(one) for one in (pointer, Block(pointer), 7)] == [2, 3, 4]


def test_a_wait_sleeps_from_its_second_look_on(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(quick_interpreter.time, "sleep", lambda seconds: events.append("sleep"))
    look = patient(lambda *arguments: events.append("look"), "acquire")
    here, there = (types.SimpleNamespace(data=np.array([address, 0])) for address in (64, 128))
    for pointer, order in ((here, "acquire"), (here, "relaxed"), (here, "acquire"), (there, "acquire")):
        look(None, "add", pointer, 0, True, order, "sys")
    assert events == ["look", "look", "sleep", "look", "look"]
