"""Tensor parallel layers as serving engines write them: one kernel for an all-reduce and the norm behind it."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.models.architecture import Architecture, Decoder, Seen, chained
from benchmarks.models.experts import FEW_TOKENS, Experts
from benchmarks.rivals.one_shot_norm import OneShotNorm, of_world


@torch.library.custom_op("ditron_benchmarks::one_shot_norm", mutates_args=())
def one_shot_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, total) of the sum of x over the ranks of the default group. x is copied to where all of them read."""
    kernel = of_world(x.device)
    shared = kernel.operand(tuple(x.shape), x.dtype)
    shared.copy_(x)
    return kernel(shared, residual.contiguous(), weight, eps)


@one_shot_norm.register_fake
def _(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    empty = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)
    return empty(residual), empty(residual)


def refusal(arch: Architecture, form: str, phase: str, tokens: int) -> str:
    """Why a cell is not for this form, empty where it is. tokens: of all sequences."""
    if form != "ar" or phase == "training":
        return "the kernel of an all-reduce with its norm is for forwards with all-reduces"
    if arch.norm != "rms" or arch.bias or arch.sandwich:
        return "the kernel of an all-reduce with its norm has an RMS norm right behind it, without a bias"
    return OneShotNorm.refusal(tokens, arch.hidden, torch.bfloat16.itemsize)


def fused_refusal(arch: Architecture, phase: str) -> str:
    """Why a cell is not for experts in the kernel of serving engines, empty where it is."""
    if not arch.experts:
        return "it is for tokens and the weights of their experts, and this model has none"
    return "the kernel for experts has no backward" if phase == "training" else ""


def grouped_refusal(arch: Architecture, form: str, phase: str, tokens: int) -> str:
    """Why a cell is not for this form with grouped matmuls for few tokens too, empty where it is."""
    if not arch.experts:
        return "it multiplies tokens with the weights of their experts, and this model has none"
    if tokens > FEW_TOKENS:
        return "so many tokens are multiplied in groups by all contestants"
    return refusal(arch, form, phase, tokens)


class ByHand(nn.Module):
    """The layers of a `Decoder` in the form `ar`, whose weights it shares.

    copies: few tokens are multiplied with copies of their experts' weights, as in the model itself. fused: experts in
    the kernel of serving engines.
    """

    def __init__(self, model: Decoder, copies: bool = True, fused: bool = False) -> None:
        super().__init__()
        shared: dict[int, Any] = {id(one): nn.Parameter(_local(one)) for one in model.parameters()}
        own = copy.deepcopy(model, shared)
        for part in own.modules():
            # Those that make DTensors of operands, and reduce results.
            part._forward_pre_hooks.clear()
            part._forward_hooks.clear()
            if isinstance(part, Experts):
                # The kernel adds up what the ranks return.
                part.mesh, part.fused = None, fused
                if not copies:
                    part.few = 0
        self.layers, self.norm = own.layers, own.norm

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, seen: Seen | None = None
    ) -> torch.Tensor:
        return chained(self, x, cos, sin, seen, _reduced)


def _reduced(partial: torch.Tensor, residual: torch.Tensor, norm: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    found: tuple[torch.Tensor, torch.Tensor] = one_shot_norm(partial, residual, norm.weight, norm.eps)  # type: ignore[arg-type]
    return found


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.detach().to_local() if isinstance(x, DTensor) else x.detach()
