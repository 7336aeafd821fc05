"""The table of dtypes in torch's own objects."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ditron_inductor.task.dtypes import ACTIVATIONS, PRECISIONS, Dtype, Precision, precision


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype in torch, as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def _of(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


TORCH_DTYPES: Mapping[str, torch.dtype] = {dtype.short: _of(dtype.name) for dtype in ACTIVATIONS}
"""Dtypes by their names in the text of an epilogue."""
OUTPUT_DTYPES: Mapping[str, torch.dtype] = {**TORCH_DTYPES, "int64": torch.int64}
"""Dtypes by their names in what a node returns: int64 are the places of experts."""
NAMES: Mapping[torch.dtype, str] = {dtype: short for short, dtype in TORCH_DTYPES.items()}
"""The names of dtypes in the text of an epilogue."""
OPERAND_DTYPES: tuple[torch.dtype, ...] = tuple(dict.fromkeys(_of(row.operand.name) for row in PRECISIONS))
"""The dtypes that kernels of ours multiply."""
ACTIVATION_DTYPES: tuple[torch.dtype, ...] = tuple(TORCH_DTYPES.values())
"""The dtypes that kernels of ours return, add, normalise or attend to."""
BIAS_DTYPES: tuple[torch.dtype, ...] = (torch.bool, *ACTIVATION_DTYPES)
"""The dtypes of a bias or a mask of attention."""


def precision_of(dtype: torch.dtype) -> Precision:
    """Returns the precision of a product of operands of this dtype, with a result of the same dtype. If no kernel of
    ours computes such a product, the precision is not in the table.
    """
    name = name_of(dtype)
    other = Dtype(name, name, dtype.itemsize)
    return precision(name) or Precision(other, other, other, "")
