"""Matmuls that no fusion takes yet, known by name: FP8, grouped and quantised ones.

By name and not by overload: versions of torch have different ones, and torchao, which has its own, may be missing.
"""

from __future__ import annotations

import torch
from torch import fx

from ditron_inductor.passes.graph.reasons import ReasonCode

MATMULS: dict[str, ReasonCode] = {
    "aten::_scaled_mm": ReasonCode.FP8_MATMUL,
    "aten::_scaled_mm_v2": ReasonCode.FP8_MATMUL,
    "aten::_grouped_mm": ReasonCode.GROUPED_MATMUL,
    "aten::_scaled_grouped_mm": ReasonCode.GROUPED_MATMUL,
    "aten::_scaled_grouped_mm_v2": ReasonCode.GROUPED_MATMUL,
    # Those of `transformers` in fp32, which torch's own does not take.
    "transformers::grouped_mm_fallback": ReasonCode.GROUPED_MATMUL,
    "transformers::grouped_mm_fallback_backward": ReasonCode.GROUPED_MATMUL,
    "aten::_int_mm": ReasonCode.QUANTIZED_MATMUL,
    "aten::_weight_int8pack_mm": ReasonCode.QUANTIZED_MATMUL,
    "aten::_weight_int4pack_mm": ReasonCode.QUANTIZED_MATMUL,
    "aten::_weight_int4pack_mm_for_cpu": ReasonCode.QUANTIZED_MATMUL,
    "aten::_weight_int4pack_mm_with_scales_and_zeros": ReasonCode.QUANTIZED_MATMUL,
    "aten::_dyn_quant_matmul_4bit": ReasonCode.QUANTIZED_MATMUL,
    "aten::_mixed_dtypes_linear": ReasonCode.QUANTIZED_MATMUL,
}
# Where PyTorch and torchao keep the ops that stand for integers and their scales.
QUANTIZERS = ("quantized_decomposed", "torchao")


def other_matmul(node: fx.Node) -> ReasonCode | None:
    """Returns the kind of a matmul that no fusion takes yet, as a reason. None for any other node."""
    return MATMULS.get(_name(node))


def quantizes(node: fx.Node) -> bool:
    """Returns whether a node makes integers out of a tensor, by an op of its own."""
    namespace, _, name = _name(node).partition("::")
    return namespace in QUANTIZERS and name.startswith("quantize")


def dequantizes(node: fx.Node) -> bool:
    """Returns whether a node makes a tensor out of integers and scales, by an op of its own."""
    namespace, _, name = _name(node).partition("::")
    return namespace in QUANTIZERS and name.startswith("dequantize")


def _name(node: fx.Node) -> str:
    """Returns the name of an op without its overload, such as `aten::mm`; empty if the node is not a call of an op."""
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""
