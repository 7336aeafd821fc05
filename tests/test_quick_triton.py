"""What is quicker in ranks of tests computes what Triton's interpreter computes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import triton.language.core as core
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, interpreter_semantic

from tests.quick_triton import by_shifts, with_plain_operands

ORDINARY = [0x0000, 0x8000, 0x3F80, 0xBF81, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0x0080]
SUBNORMAL = [0x0001, 0x807F]


@pytest.mark.parametrize("more", [[], SUBNORMAL], ids=["ordinary", "subnormal"])
def test_casts_give_the_same_bits(more: list[int]) -> None:
    plain, quick = InterpreterBuilder.cast_impl, by_shifts(InterpreterBuilder.cast_impl, core, TensorHandle)
    narrow = np.array([ORDINARY + more], dtype=np.uint16)
    drawn = np.random.default_rng(0).integers(0, 1 << 16, (len(ORDINARY + more), 1), dtype=np.uint32)
    wide = ((narrow.astype(np.uint32) << 16) | drawn * bool(more)).view(np.float32)
    for values, source, target in ((narrow, core.bfloat16, core.float32), (wide, core.float32, core.bfloat16)):
        results = [cast(None, TensorHandle(values, source), target) for cast in (plain, quick)]
        assert results[0].dtype == results[1].dtype and results[0].data.dtype == results[1].data.dtype
        assert results[0].data.tobytes() == results[1].data.tobytes()
        assert results[0].data.shape == results[1].data.shape == values.shape


def test_operands_get_the_same_type() -> None:
    plain = TritonSemantic.binary_op_type_checking_impl
    quick = with_plain_operands(plain, core)
    kinds = [core.int1, core.int32, core.int64, core.uint32, core.float16, core.bfloat16, core.float32]
    scalars = [interpreter_semantic.scalar_constant(2, kind) for kind in kinds if kind is not core.bfloat16]
    address = TensorHandle(np.array([64], dtype=np.uint64), core.pointer_type(core.float32))
    scalars.append(core.tensor(address, core.pointer_type(core.float32)))
    blocks = [interpreter_semantic.splat(scalar, [4]) for scalar in scalars]
    for lhs, rhs in itertools.product([*scalars, *blocks, 2, -1, 2.5], repeat=2):
        for allow, div_or_mod in ((False, False), (True, False), (False, True)):
            results: list[list[tuple[str, bytes]]] = []
            for check in (plain, quick):
                try:
                    pair = check(interpreter_semantic, lhs, rhs, allow, allow, div_or_mod=div_or_mod)
                    results.append([(str(one.type), one.handle.data.tobytes()) for one in pair])
                except Exception as error:
                    results.append([(type(error).__name__, b"")])
            assert results[0] == results[1], (lhs, rhs, allow, div_or_mod)
