"""The quick interpreter replaces and looks up what the plain one does, once."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from ditron_inductor.core import quick_interpreter
from ditron_inductor.core.quick_interpreter import looked_up_once, patched_once, patient, patient_load, rounding

TL = types.ModuleType("tl")
CORE = types.ModuleType("tl.core")
TL.core = CORE  # type: ignore[attr-defined]


class Scope:
    """As the interpreter's: what it replaced, until `restore`."""

    def __init__(self) -> None:
        self._changes: list[tuple[Any, str, Any]] = []

    def set_attr(self, owner: Any, name: str, value: Any) -> None:
        self._changes.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def restore(self) -> None:
        while self._changes:
            setattr(*self._changes.pop())


def device_function(name: str, **seen: Any) -> Any:
    """A function whose globals are `seen`."""
    return types.FunctionType((lambda: None).__code__, {"other": types, **seen}, name)


def test_a_launch_replaces_each_module_once_and_looks_for_it_in_the_first_launch_only() -> None:
    looked: list[str] = []
    TL.load = CORE.load = "triton's"  # type: ignore[attr-defined]

    def patch(fn: Any) -> Scope:
        seen = [module for module in (TL, CORE) if module in fn.__globals__.values()]
        assert seen, "triton.language must be visible"
        looked.append(fn.__name__)
        scope = Scope()
        for module in seen:
            scope.set_attr(module, "load", "interpreted")
        return scope

    patch_once = patched_once(patch, Scope, TL)
    kernel, helper = device_function("kernel", tl=TL), device_function("helper", tl=TL)
    standard, elsewhere = device_function("standard", core=CORE), device_function("elsewhere")
    for launch in (1, 2):
        opened = patch_once(kernel)
        assert (TL.load, CORE.load) == ("interpreted", "triton's" if launch == 1 else "interpreted")
        for fn in (helper, standard, helper, standard):
            patch_once(fn)
        # The plain function says what is wrong with one that sees neither.
        with pytest.raises(AssertionError, match="must be visible"):
            patch_once(elsewhere)
        assert looked == ["kernel", "standard"]
        assert TL.load == CORE.load == "interpreted"
        opened.restore()
        assert TL.load == "triton's"


def test_floats_are_rounded_as_torch_does() -> None:
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    tl, modes = interpreter.tl, interpreter._ir.ROUNDING_MODE
    convert = rounding(interpreter._convert_float, tl, modes.RTZ)
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    # Numbers that lie between two others, the largest, infinity, and numbers that are none.
    halfway, largest = [0x3F808000, 0x3F818000, 0x3F808001], [0x7F7FFFFF, 0x7F800000, 0xFF800000]
    edges = [*halfway, *largest, 0x7F800001, 0xFFFFFFFF, 1, 0, 1 << 31]
    values = np.concatenate((bits, np.array(edges, dtype=np.uint32))).view(np.float32)
    exact = torch.from_numpy(values).bfloat16()
    found = torch.from_numpy(convert(values, tl.float32, tl.bfloat16, None).view(np.int16)).view(torch.bfloat16)
    torch.testing.assert_close(found, exact, rtol=0, atol=0, equal_nan=True)
    back = convert(exact.view(torch.int16).numpy().view(np.uint16), tl.bfloat16, tl.float32, None).view(np.float32)
    torch.testing.assert_close(torch.from_numpy(back), exact.float(), rtol=0, atol=0, equal_nan=True)
    one = np.array([1.99999], dtype=np.float32)
    assert convert(one, tl.float32, tl.bfloat16, None) == 0x4000
    assert convert(one, tl.float32, tl.bfloat16, modes.RTZ) == 0x3FFF


@pytest.mark.parametrize("debug", [False, True])
def test_overflows_are_looked_for_where_assertions_are_on(debug: bool) -> None:
    @dataclass(frozen=True)
    class Options:
        debug: bool
        sanitize_overflow: bool = True

    assert quick_interpreter.without_overflow_checks(Options(debug)) == Options(debug, sanitize_overflow=debug)


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


def test_a_wait_that_looks_at_several_places_sleeps_once_for_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(quick_interpreter.time, "sleep", lambda seconds: events.append("sleep"))
    load = patient_load(lambda self, pointers, *arguments: events.append(str(pointers.data[0])))
    places = [types.SimpleNamespace(data=np.array([address, 0])) for address in (1, 2)]
    for is_volatile in (False, False, True, True, True):
        for place in places:
            load(None, place, True, 0, "", "", is_volatile)
    assert events == [*"121212", "sleep", *"12", "sleep", *"12"]
