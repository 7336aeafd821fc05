"""An epilogue evaluated by torch, op by op. This runs on the CPU, and tests compare the kernels with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ditron_inductor.task.epilogue import (
    EXPERT_KINDS,
    Binary,
    Cast,
    Epilogue,
    Expression,
    Extra,
    Function,
    Number,
    ProductTerm,
    mapped,
)
from ditron_inductor.task.epilogue import products as product_indices
from ditron_inductor.task.torch_dtypes import TORCH_DTYPES

Tensor = torch.Tensor

_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg,
    "relu": torch.relu,
    "square": torch.square,
    "exp": torch.exp,
    "erf": torch.erf,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
_OPERATORS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "+": torch.add,
    "-": torch.sub,
    "*": torch.mul,
    "/": torch.div,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
}


def out_dtypes(epilogue: Epilogue, dtype: torch.dtype) -> list[torch.dtype]:
    """The dtype of every output of a node of `dtype`."""
    return [TORCH_DTYPES.get(name, dtype) for name in epilogue.dtypes()]


def evaluate(epilogue: Epilogue, products: Sequence[Tensor], extras: Sequence[Tensor]) -> list[Tensor]:
    """Returns the outputs, each [rows, N]. products: by weight, [rows, N_i] in the node's dtype. extras: of any shape
    with as many elements as their kinds need. Products in fp64 give outputs in fp64 with no rounding in between, which
    are the exact values for tests.
    """
    exact = products[0].dtype == torch.float64
    known: dict[Expression, Tensor] = {}
    outputs = []
    for output, dtype in zip(epilogue.outputs, out_dtypes(epilogue, products[0].dtype), strict=True):
        shape = products[min(product_indices(output))].shape
        value = _value(output, products, extras, shape, torch.float64 if exact else torch.float32, known)
        outputs.append(value if exact else value.to(dtype))
    return outputs


def _value(
    expression: Expression,
    products: Sequence[Tensor],
    extras: Sequence[Tensor],
    shape: torch.Size,
    compute: torch.dtype,
    known: dict[Expression, Tensor],
) -> Tensor:
    if expression in known:
        return known[expression]

    def value(part: Expression) -> Tensor:
        return _value(part, products, extras, shape, compute, known)

    match expression:
        case ProductTerm(index):
            result = products[index].to(compute)
        case Extra(kind, index):
            result = extras[index].to(compute).reshape(extra_shape(kind, shape))
        case Number(number):
            result = torch.tensor(number, dtype=compute, device=products[0].device)
        case Function(name, argument):
            result = _FUNCTIONS[name](value(argument))
        case Binary(operator, left, right):
            result = _OPERATORS[operator](value(left), value(right))
        case Cast(argument, dtype):
            result = value(argument)
            if compute == torch.float32:
                result = result.to(TORCH_DTYPES[dtype]).to(compute)
    known[expression] = result
    return result


def without_tables(
    epilogue: Epilogue, extras: Sequence[Tensor], experts: Tensor
) -> tuple[Epilogue, list[Tensor]]:
    """Returns the same epilogue, and its extra tensors, with a row for each row of the outputs in the place of tables
    of experts. experts: of each row.
    """
    kinds = {extra.index: extra.kind for extra in epilogue.extras() if extra.kind in EXPERT_KINDS}
    taken = [_columns(extra, kinds[i])[experts] if i in kinds else extra for i, extra in enumerate(extras)]
    return without_kinds(epilogue), taken


def without_kinds(epilogue: Epilogue) -> Epilogue:
    """Returns the epilogue that reads as a whole what this one reads as tables of experts."""

    def whole(operand: Expression) -> Expression:
        if isinstance(operand, Extra) and operand.kind in EXPERT_KINDS:
            return replace(operand, kind="full")
        return operand

    return replace(epilogue, outputs=tuple(mapped(output, whole) for output in epilogue.outputs))


def _columns(table: Tensor, kind: str) -> Tensor:
    return {"expert": table, "even": table[:, 0::2], "odd": table[:, 1::2]}[kind]


def extra_shape(kind: str, shape: Sequence[Any]) -> tuple[Any, ...]:
    """The shape of an extra tensor of `kind` beside outputs of `shape` [.., N]."""
    *rows, columns = shape
    return {"scalar": (1, 1), "row": (1, columns), "column": (*rows, 1), "full": (*rows, columns)}[kind]
