"""Triton's interpreter, rounding as a GPU does, without repeated work, which is more than half of what ranks compute.

Results in bf16 are rounded to the nearest number, where the original cuts bits off: errors that no GPU makes, and that
add up in a model.

A rank that waits polls the same words again and again. Here it sleeps between two polls, so that the rank it waits for
gets the core. Three kinds of work are repeated in the original. Every launch searches all of `triton.language` for what
it has to replace, and so does every call of a device function inside a kernel. Every sum and product of integers is
computed a second time in 64 bits and compared with the limits of its type, for an assertion that is off. The numpy type
of every value is looked up in a dict that is made for it. All this applies only to processes of our own: ranks that a
command or a test starts for itself.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

NEEDED = ("_patch_lang", "_LangPatchScope", "_get_np_dtype", "_convert_float", "interpreter_builder")
PAUSE_S = 1.0e-3
pause_s = 0.0
"""The time that a wait of this process sleeps between two polls, in seconds."""


def make_quick() -> None:
    """Makes this process's interpreter quicker, and rounding as a GPU does, once, before the first launch, if its form
    is a known one.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    if all(hasattr(interpreter, name) for name in NEEDED):
        module: Any = interpreter
        module._patch_lang = patched_once(module._patch_lang, module._LangPatchScope, module.tl)
        module._get_np_dtype = looked_up_once(module._get_np_dtype, module.tl.dtype)
        module._convert_float = rounding(module._convert_float, module.tl, module._ir.ROUNDING_MODE.RTZ)
        module.interpreter_builder.options = without_overflow_checks(module.interpreter_builder.options)
        builder = module.InterpreterBuilder
        builder.create_atomic_rmw = patient(builder.create_atomic_rmw, module._ir.MEM_SEMANTIC.ACQUIRE)
        builder.create_masked_load = patient_load(builder.create_masked_load)
        global pause_s
        pause_s = PAUSE_S


def rounding(convert: Callable[..., Any], tl: Any, towards_zero: object) -> Callable[..., Any]:
    """Wraps `convert`, between types of floating-point numbers. Between fp32 and bf16 it takes few passes over the
    bits, and rounds to the nearest number, of two equally near ones to the even one, unless `towards_zero` is given.
    """

    def convert_rounding(given: Any, source: Any, target: Any, mode: object) -> Any:
        if source == tl.bfloat16 and target == tl.float32:
            return given.astype(np.uint32) << 16
        if source != tl.float32 or target != tl.bfloat16 or mode == towards_zero:
            return convert(given, source, target, mode)
        bits = given.view(np.uint32)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return np.where(np.isnan(given), 0x7FFF, nearest).astype(np.uint16)

    return convert_rounding


def without_overflow_checks(options: Any) -> Any:
    """Returns `options` of the interpreter's builder that skip what only assertions read, if assertions are off."""
    return options if options.debug else dataclasses.replace(options, sanitize_overflow=False)


def patient(update: Callable[..., Any], acquire: object) -> Callable[..., Any]:
    """Wraps `update`, an atomic operation of the builder, to sleep before it acquires from the same address again."""
    last = b""

    def update_patiently(self: Any, op: Any, pointer: Any, value: Any, mask: Any, order: Any, scope: Any) -> Any:
        nonlocal last
        if order == acquire:
            words = pointer.data.tobytes()
            if words == last:
                time.sleep(PAUSE_S)
            last = words
        return update(self, op, pointer, value, mask, order, scope)

    return update_patiently


def patient_load(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `load`, a masked load of the builder: it sleeps before a volatile load from an address that has been loaded
    since its last sleep. So a wait that polls several places sleeps once for each round. Whether a load is volatile
    comes last in all versions of Triton, or by its name.
    """
    seen: set[bytes] = set()

    def load_patiently(self: Any, ptrs: Any, *rest: Any, **named: Any) -> Any:
        if named.get("is_volatile", rest[-1]):
            words = ptrs.data.tobytes()
            if words in seen:
                time.sleep(PAUSE_S)
                seen.clear()
            seen.add(words)
        return load(self, ptrs, *rest, **named)

    return load_patiently


def looked_up_once(look_up: Callable[[Any], Any], scalar_type: type) -> Callable[[Any], Any]:
    """Wraps `look_up` so that it keeps what it found for scalars and blocks of scalars; pointers have no hash."""
    of_scalar = functools.cache(look_up)

    def look_up_once(found: Any) -> Any:
        scalar = getattr(found, "scalar", None)
        return of_scalar(scalar) if type(scalar) is scalar_type else look_up(found)

    return look_up_once


def patched_once(patch: Callable[[Any], Any], make_scope: Callable[[], Any], tl: Any) -> Callable[[Any], Any]:
    """Wraps `patch` to do nothing if an open scope holds all that it would replace, and to search only once."""
    done: set[str] = set()
    # What `patch` replaced, and by what, for the modules that a function sees and those that were replaced before.
    known: dict[tuple[frozenset[str], frozenset[str]], list[tuple[Any, str, Any]]] = {}

    @functools.cache
    def modules_seen_by(fn: Any) -> frozenset[str]:
        found = (value for value in fn.__globals__.values() if inspect.ismodule(value))
        return frozenset(value.__name__ for value in found if value in (tl, tl.core))

    def patch_once(fn: Any) -> Any:
        wanted = modules_seen_by(fn)
        if wanted and wanted <= done:
            return make_scope()
        key = wanted, frozenset(done)
        if key in known:
            scope = make_scope()
            for owner, name, value in known[key]:
                scope.set_attr(owner, name, value)
        else:
            scope = patch(fn)
            known[key] = [(owner, name, getattr(owner, name)) for owner, name, _ in scope._changes]
        done.update(wanted)
        restore = scope.restore

        def restore_all() -> None:
            # The launch has ended, so what its device functions replaced without a scope has to be replaced again.
            done.clear()
            restore()

        scope.restore = restore_all
        return scope

    return patch_once
