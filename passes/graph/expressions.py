"""Reads pointwise ops as expressions of an epilogue, which compute what eager computes and round where eager rounds.

An op works in fp32 and rounds its result to its own dtype; operands that are wider are rounded first, as promotion does
with scalar tensors. Activations arrive decomposed and get their names back, which changes the text and no value by more
than fp32's rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ditron_inductor.passes.graph import proofs
from ditron_inductor.task.epilogue import Binary, Cast, Expression, Function, Number, ProductTerm
from ditron_inductor.task.torch_dtypes import NAMES

aten = torch.ops.aten

FUNCTIONS: dict[object, str] = {
    aten.neg.default: "neg",
    aten.relu.default: "relu",
    aten.square.default: "square",
    aten.exp.default: "exp",
    aten.erf.default: "erf",
    aten.tanh.default: "tanh",
    aten.sigmoid.default: "sigmoid",
    aten.silu.default: "silu",
}
OPERATORS: dict[object, str] = {
    aten.add.Tensor: "+",
    aten.add.Scalar: "+",
    aten.sub.Tensor: "-",
    aten.sub.Scalar: "-",
    aten.mul.Tensor: "*",
    aten.mul.Scalar: "*",
    aten.div.Tensor: "/",
    aten.div.Scalar: "/",
    aten.minimum.default: "minimum",
    aten.maximum.default: "maximum",
}
CLAMPS: frozenset[object] = frozenset({aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default})
CASTS: frozenset[object] = frozenset({torch.ops.prims.convert_element_type.default, aten._to_copy.default})
POWER = aten.pow.Tensor_Scalar
GELU = aten.gelu.default
POINTWISE: frozenset[object] = frozenset({*FUNCTIONS, *OPERATORS, *CLAMPS, *CASTS, POWER, GELU})
EXACT = ("neg", "relu")
"""Functions whose results need no rounding where their arguments needed none."""
HALF, ROOT_HALF, ROOT_2_PI, CUBIC = 0.5, 0.7071067811865476, 0.7978845608028654, 0.044715


def spread(operand: torch.Tensor, value: torch.Tensor, width: Any) -> str:
    """Returns the kind of extra tensor of an operand that is broadcast over a value [.., width]; "" for no kind."""
    ones = [proofs.known_equal(size, 1) for size in operand.shape]
    if all(ones):
        return "scalar"
    if proofs.same_shape(operand.shape, value.shape):
        return "full"
    if not proofs.known_equal(value.shape[-1], width):
        return ""
    if all(ones[:-1]) and proofs.known_equal(operand.shape[-1], width):
        return "row"
    return "column" if ones[-1] and proofs.same_shape(operand.shape[:-1], value.shape[:-1]) else ""


Read = Callable[[fx.Node], Expression | None]


def read_pointwise(node: fx.Node, read: Read) -> Expression | None:
    """Returns the value of a call of one of POINTWISE as an expression; None for a form that has no expression. read:
    returns the expression of a tensor operand.
    """
    value, bound = proofs.tensor(node), proofs.arguments(node)
    if value is None or value.dtype not in NAMES:
        return None
    if node.target in CASTS:
        named = ("self", "a", "dtype", "layout", "device")
        source: Any = bound.get("self", bound.get("a"))
        given = {name for name, argument in bound.items() if name not in named and argument not in (None, False)}
        place = proofs.tensor(source)
        if given or place is None or place.device != value.device:
            return None
        argument = _operand(source, read)
        return None if argument is None else _rounded(argument, place.dtype, value.dtype)
    if node.target in OPERATORS:
        if not proofs.known_equal(bound.get("alpha", 1), 1):
            return None
        left = _operand_as(bound["self"], value.dtype, read)
        right = _operand_as(bound["other"], value.dtype, read)
        if left is None or right is None:
            return None
        return _result(Binary(OPERATORS[node.target], left, right), value.dtype)
    argument = _operand_as(bound["self"], value.dtype, read)
    if node.target in CLAMPS:
        return None if argument is None else _clamped(argument, bound, value.dtype)
    name = FUNCTIONS.get(node.target, "square")
    if node.target is POWER and bound["exponent"] != 2:
        return None
    if node.target is GELU:
        name = {"none": "gelu", "tanh": "gelu_tanh"}[bound["approximate"]]
    return None if argument is None else _result(Function(name, argument), value.dtype)


def _clamped(argument: Expression, bound: dict[str, Any], dtype: torch.dtype) -> Expression | None:
    """Returns the argument clamped to the bounds that are given; None for other bounds than numbers."""
    for name, operator in (("min", "maximum"), ("max", "minimum")):
        if bound.get(name) is None:
            continue
        limit = _operand(bound[name], lambda _: None)
        if limit is None:
            return None
        argument = Binary(operator, argument, limit)
    return _result(argument, dtype)


def _operand(source: object, read: Read) -> Expression | None:
    if isinstance(source, fx.Node):
        value = proofs.tensor(source)
        return read(source) if value is not None and value.dtype in NAMES else None
    # Beside 0.0, which it equals, -0.0 has no text: what is divided by it has the other sign.
    is_number = isinstance(source, (int, float)) and not isinstance(source, bool) and math.isfinite(source)
    if is_number and not (source == 0 and math.copysign(1.0, source) < 0):  # type: ignore[arg-type]
        return Number(float(source))  # type: ignore[arg-type]
    return None


def _operand_as(source: object, dtype: torch.dtype, read: Read) -> Expression | None:
    """The operand of an op with a result of `dtype`, to which promotion brings it first."""
    expression = _operand(source, read)
    if expression is None or not isinstance(source, fx.Node):
        return expression
    return _rounded(expression, proofs.fake(source).dtype, dtype)


def _rounded(expression: Expression, given: torch.dtype, wanted: torch.dtype) -> Expression:
    return expression if wanted in (given, torch.float32) else Cast(expression, NAMES[wanted])


def _result(expression: Expression, dtype: torch.dtype) -> Expression:
    expression = named(expression)
    if dtype == torch.float32 or (isinstance(expression, Function) and expression.name in EXACT):
        return expression
    return Cast(expression, NAMES[dtype])


def named(expression: Expression) -> Expression:
    """Returns an activation that is written out by its name, and any other expression unchanged."""
    match expression:
        case Binary("/", x, Binary("+", Function("exp", Function("neg", y)), Number(1.0))) if x == y:
            return Function("silu", x)
        case Binary("*", x, Function("sigmoid", y)) | Binary("*", Function("sigmoid", y), x) if x == y:
            return Function("silu", x)
        case Binary("*", Binary("*", x, Number(0.5)), Binary("+", Function("erf", inner), Number(1.0))):
            return Function("gelu", x) if inner == Binary("*", x, Number(ROOT_HALF)) else expression
        case Binary("*", Binary("*", x, Number(0.5)), Binary("+", Function("tanh", inner), Number(1.0))):
            cube = Binary("*", Binary("*", x, x), x)
            polynomial = Binary("+", x, Binary("*", cube, Number(CUBIC)))
            return Function("gelu_tanh", x) if inner == Binary("*", polynomial, Number(ROOT_2_PI)) else expression
    return expression


def as_output(expression: Expression, dtype: torch.dtype, of_node: torch.dtype) -> Expression:
    """Returns a value of `dtype` as an output of a node of dtype `of_node`: the expression tells its dtype."""
    if dtype == of_node:
        if not isinstance(expression, Cast):
            return expression
        inner = expression.argument
        # The node rounds to its own dtype anyhow.
        is_last = expression.dtype == NAMES[of_node] and not isinstance(inner, Cast)
        return inner if is_last and not isinstance(inner, ProductTerm) else Cast(expression, NAMES[of_node])
    is_named = isinstance(expression, Cast) and expression.dtype == NAMES[dtype]
    return expression if is_named else Cast(expression, NAMES[dtype])
