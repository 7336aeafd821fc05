"""Makes Triton's interpreter quicker in ranks of tests, which spend most of their time in it.

Every value of a kernel has a type, and every operation makes its result's type anew: a list of constants for the shape,
their product, a name. Which shapes there are is soon known. What an argument is inside `constexpr` is asked of numbers
and tensors too, millions of times, and types are mostly compared with themselves. The operands of most operations have
one type and one shape, or one is a number, and need no search for what they have in common. A cast between bfloat16 and
float32 is a shift of bits, but for subnormal numbers. Values do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def make_triton_quick() -> None:
    """Does so in this process, for as long as it lives."""
    import triton.language.core as core
    from triton.language.semantic import TritonSemantic
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    core._unwrap_if_constexpr = unwrapped(core._unwrap_if_constexpr, core)
    core.block_type.__init__ = with_known_shape(core.block_type.__init__)
    core.tensor.__init__ = with_shape_of_type(core.tensor.__init__)
    for kind in (core.dtype, core.pointer_type, core.block_type):
        kind.__eq__ = equal_to_itself(kind.__eq__)
    semantic: Any = TritonSemantic
    semantic.binary_op_type_checking_impl = with_plain_operands(semantic.binary_op_type_checking_impl, core)
    builder: Any = InterpreterBuilder
    builder.cast_impl = by_shifts(builder.cast_impl, core, TensorHandle)


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


def with_plain_operands(check: Callable[..., Any], core: Any) -> Callable[..., Any]:
    """Wraps the search for the common type of two operands: most have it already."""
    plain, wide = (core.int32, core.int64, core.float32), (core.float16, core.bfloat16)

    def check_quickly(
        self: Any, lhs: Any, rhs: Any, allow_lhs: bool = False, allow_rhs: bool = False, arithmetic: bool = True,
        div_or_mod: bool = False,
    ) -> Any:  # fmt: skip
        if type(lhs) is core.tensor:
            scalar = lhs.dtype
            if type(rhs) is core.tensor:
                other = rhs.dtype
                if type(scalar) is core.dtype:
                    known = scalar == other and not (div_or_mod and scalar in wide)
                else:
                    # A pointer and an offset.
                    known = allow_lhs and type(other) is core.dtype and other.is_int()
                if known:
                    return (lhs, rhs) if lhs.shape is rhs.shape else self.broadcast_impl_value(lhs, rhs)
            elif type(rhs) is int and arithmetic and -(2**31) <= rhs < 2**31 and scalar in plain:
                return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, dtype=scalar))
        return check(self, lhs, rhs, allow_lhs, allow_rhs, arithmetic, div_or_mod)

    return check_quickly


def by_shifts(cast: Callable[..., Any], core: Any, handle_type: Any) -> Callable[..., Any]:
    """Wraps casts of the interpreter's builder, which cut bits off; it has its own way with subnormal numbers."""
    exponent, fraction = {16: 0x7F80, 32: 0x7F800000}, {16: 0x007F, 32: 0x007FFFFF}

    def has_subnormal(bits: Any, width: int) -> bool:
        return bool((((bits & exponent[width]) == 0) & ((bits & fraction[width]) != 0)).any())

    def cast_quickly(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if source == core.bfloat16 and target == core.float32 and not has_subnormal(src.data, 16):
            return handle_type((src.data.astype(np.uint32) << 16).view(np.float32), target)
        if source == core.float32 and target == core.bfloat16:
            bits = src.data.view(np.uint32)
            if not has_subnormal(bits, 32):
                return handle_type((bits >> 16).astype(np.uint16), target)
        return cast(self, src, dst_type)

    return cast_quickly
