"""The op by which TorchTitan adds up what its experts return, of TorchTitan itself or defined alike."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable

import torch


def op_of_torchtitan() -> Callable[..., torch.Tensor]:
    """TorchTitan's op, or one with its name and its arguments if it is not installed."""
    with contextlib.suppress(ImportError):
        found: Callable[..., torch.Tensor]
        found = importlib.import_module("torchtitan.ops.scatter_add").deterministic_scatter_add
        return found

    @torch.library.custom_op("torchtitan::deterministic_scatter_add", mutates_args=())
    def deterministic_scatter_add(out: torch.Tensor, index: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
        return out.scatter_add(0, index, src)

    deterministic_scatter_add.register_fake(lambda out, index, src: torch.empty_like(out))
    return deterministic_scatter_add


ADD_OF_TITAN = op_of_torchtitan()
