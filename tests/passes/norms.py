"""Norms as models write them, none of them an op of torch."""

from __future__ import annotations

import torch
from torch import nn

N = 32


class LlamaNorm(nn.Module):
    """As in transformers: rounded before the weight."""

    def __init__(self, dtype: torch.dtype, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(N).to(dtype), requires_grad=False)
        self.eps = eps

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * self.scaled(x.to(torch.float32)).to(x.dtype)


class GemmaNorm(LlamaNorm):
    """As in transformers: the weight is what differs from one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.scaled(x.float()) * (1.0 + self.weight.float())).type_as(x)


class Gemma4Norm(LlamaNorm):
    """The inverse root is a power."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + self.eps, -0.5)
        return (scaled * self.weight.float()).type_as(x)


class OlmoNorm(LlamaNorm):
    """The weight in fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * self.scaled(x.to(torch.float32))).to(x.dtype)


class CohereNorm(LlamaNorm):
    """A layer norm that is written out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        mean = wide.mean(-1, keepdim=True)
        variance = (wide - mean).pow(2).mean(-1, keepdim=True)
        return (self.weight.float() * ((wide - mean) * torch.rsqrt(variance + self.eps))).to(x.dtype)


class OtherMean(LlamaNorm):
    """No layer norm: what is scaled has another mean subtracted."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        variance = (wide - wide.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True)
        return ((wide - wide.mean(1, keepdim=True)) * torch.rsqrt(variance + self.eps)).to(x.dtype)


class OtherDeviation(LlamaNorm):
    """No layer norm either: of the deviation from the mean of a column."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        centred = wide - wide.mean(1, keepdim=True)
        return (centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class T5Norm(LlamaNorm):
    """What is scaled was not converted."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
