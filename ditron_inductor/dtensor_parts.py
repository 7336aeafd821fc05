"""The parts of DTensors, taken out for a compiled graph as fast by torch 2.11 as by the versions after it.

A compiled graph works on this rank's part of each DTensor, and its caller takes these parts out at each call. torch
2.12 writes straight code for that. torch 2.11 goes through each DTensor by a general recursion over subclasses, which
takes the host longer than some captured steps take the GPU. This holds for graphs of every backend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo  # runtime_wrappers cannot be imported before it
from torch._functorch._aot_autograd import runtime_wrappers, subclass_utils
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion

NAME = "runtime_unwrap_tensor_subclasses"
SLOW = "2.11" <= TorchVersion(torch.__version__) < "2.12"
PLAIN = (torch.Tensor, torch.nn.Parameter)


def by(general: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Returns a function that does what `general`, torch's own, does, and calls it only for what is neither a plain
    tensor nor a DTensor of static sizes with a plain part.
    """

    @functools.wraps(general)
    def parts(args: Sequence[Any], *, append_symints: bool, subclass_metas: Sequence[Any] | None = None) -> list[Any]:
        found = []
        for index, arg in enumerate(args):
            kind = type(arg)
            if kind in PLAIN:
                found.append(arg)
                continue
            meta = subclass_metas[index] if subclass_metas is not None else None
            if kind is DTensor and type(arg._local_tensor) in PLAIN and not (append_symints and _has_symints(meta)):
                found.append(arg._local_tensor)
                continue
            metas = None if subclass_metas is None else [meta]
            found += general([arg], append_symints=append_symints, subclass_metas=metas)
        return found

    return parts


def _has_symints(meta: Any) -> bool:
    """Whether torch takes sizes or strides of a tensor as further inputs, which it marks with None."""
    return meta is None or None in meta.outer_size or None in meta.outer_stride


def install() -> None:
    """Puts `by` in the place of the function of torch 2.11; nothing with another version, or when it is there."""
    if SLOW and getattr(runtime_wrappers, NAME) is getattr(subclass_utils, NAME):
        setattr(runtime_wrappers, NAME, by(getattr(subclass_utils, NAME)))
