"""Makes Triton's interpreter quicker in ranks of tests, which spend most of their time in it.

Every value of a kernel has a type, and every operation makes its result's type anew: a list of constants for the shape,
their product, a name. Which shapes there are is soon known. What an argument is inside `constexpr` is asked of numbers
and tensors too, millions of times, and types are mostly compared with themselves. Values do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def make_triton_quick() -> None:
    """Does so in this process, for as long as it lives."""
    import triton.language.core as core

    core._unwrap_if_constexpr = unwrapped(core._unwrap_if_constexpr, core)
    core.block_type.__init__ = with_known_shape(core.block_type.__init__)
    core.tensor.__init__ = with_shape_of_type(core.tensor.__init__)
    for kind in (core.dtype, core.pointer_type, core.block_type):
        kind.__eq__ = equal_to_itself(kind.__eq__)


def unwrapped(unwrap: Callable[[Any], Any], core: Any) -> Callable[[Any], Any]:
    """Wraps `unwrap` for lists and tuples, which it takes apart; the others need no look at what they are not."""
    plain = {int, float, bool, str, type(None), core.tensor, core.dtype, core.pointer_type, core.block_type}

    def unwrap_at_once(given: Any) -> Any:
        kind = type(given)
        if kind in plain:
            return given
        return given.value if kind is core.constexpr else unwrap(given)

    return unwrap_at_once


def with_known_shape(init: Callable[..., None]) -> Callable[..., None]:
    """Wraps the constructor of types of blocks, which then share what follows from their shape."""
    known: dict[tuple[int, ...], tuple[Any, int]] = {}

    def init_quickly(self: Any, element_ty: Any, shape: Any) -> None:
        lengths = tuple([getattr(length, "value", length) for length in shape])
        if lengths not in known:
            init(self, element_ty, shape)
            known[lengths] = self.shape, self.numel
        self.element_ty = element_ty
        self.shape, self.numel = known[lengths]
        self.name = f"<{lengths}, {element_ty}>"

    return init_quickly


def with_shape_of_type(init: Callable[..., None]) -> Callable[..., None]:
    """Wraps the constructor of tensors, which then share their shapes."""
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init_quickly(self: Any, handle: Any, type: Any) -> None:
        lengths = tuple(type.shape.values) if type.is_block() else ()
        if lengths not in known:
            init(self, handle, type)
            known[lengths] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[lengths]

    return init_quickly


def equal_to_itself(equal: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """Wraps a comparison of types, which are mostly the same object."""

    def equal_quickly(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    return equal_quickly
