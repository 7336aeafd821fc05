"""Triton's interpreter without work that it repeats: more than half of what ranks on the CPU device compute.

A rank that waits looks, and looks again, at the same words: it sleeps between two looks, so that the rank it waits for
gets the core.
Every launch looks through all of `triton.language` for what it has to replace, and so does, inside a kernel, every call
of a device function. Every sum and product of integers is computed once more, in 64 bits, and compared with the limits
of its type, for an assertion that is off. And the numpy type of every value is looked up in a dict made for it. Values
are not touched.
Only in processes that are ours: ranks that a command or a test starts for itself.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import time
from collections.abc import Callable
from typing import Any

NEEDED = ("_patch_lang", "_LangPatchScope", "_get_np_dtype", "interpreter_builder")
PAUSE_S = 1.0e-3
pause_s = 0.0
"""The time that a wait of this process sleeps between two polls, in seconds."""


def make_quick() -> None:
    """Makes the interpreter of this process quicker. It is called once, before the first launch, and does nothing if
    there is no interpreter of a known form.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    if all(hasattr(interpreter, name) for name in NEEDED):
        module: Any = interpreter
        module._patch_lang = patched_once(module._patch_lang, module._LangPatchScope, module.tl)
        module._get_np_dtype = looked_up_once(module._get_np_dtype, module.tl.dtype)
        module.interpreter_builder.options = without_overflow_checks(module.interpreter_builder.options)
        builder = module.InterpreterBuilder
        builder.create_atomic_rmw = patient(builder.create_atomic_rmw, module._ir.MEM_SEMANTIC.ACQUIRE)
        builder.create_masked_load = patient_load(builder.create_masked_load)
        global pause_s
        pause_s = PAUSE_S


def without_overflow_checks(options: Any) -> Any:
    """`options` of the interpreter's builder, which do not compute what only assertions read where those are off."""
    return options if options.debug else dataclasses.replace(options, sanitize_overflow=False)


def patient(update: Callable[..., Any], acquire: object) -> Callable[..., Any]:
    """`update`, a builder's atomic operation, which sleeps before it acquires from where it has just acquired."""
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
    """`load`, a builder's masked one, which sleeps before a volatile load from where there has been one since the last
    time it slept: once for each round of a wait that looks at several places.
    """
    seen: set[bytes] = set()

    def load_patiently(
        self: Any, ptrs: Any, mask: Any, other: Any, cache_modifier: Any, eviction_policy: Any, is_volatile: Any
    ) -> Any:
        if is_volatile:
            words = ptrs.data.tobytes()
            if words in seen:
                time.sleep(PAUSE_S)
                seen.clear()
            seen.add(words)
        return load(self, ptrs, mask, other, cache_modifier, eviction_policy, is_volatile)

    return load_patiently


def looked_up_once(look_up: Callable[[Any], Any], scalar_type: type) -> Callable[[Any], Any]:
    """`look_up`, which keeps what it found for scalars and blocks of them; pointers have no hash."""
    of_scalar = functools.cache(look_up)

    def look_up_once(found: Any) -> Any:
        scalar = getattr(found, "scalar", None)
        return of_scalar(scalar) if type(scalar) is scalar_type else look_up(found)

    return look_up_once


def patched_once(patch: Callable[[Any], Any], make_scope: Callable[[], Any], tl: Any) -> Callable[[Any], Any]:
    """`patch`, which does nothing where a scope that is still open holds all that it would replace, and looks for that
    only once.
    """
    done: set[str] = set()
    # By the modules that a function sees and those that were replaced before: what `patch` replaced, and by what.
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
            # The launch has ended: what its device functions replaced without a scope is to be replaced again.
            done.clear()
            restore()

        scope.restore = restore_all
        return scope

    return patch_once
