"""A rank's share of the layers without communication: the time that is left if all of a collective is hidden.

Weights are as large as a rank's, and every product and attention has the sizes that it has among the ranks. What a rank
would receive it makes of its own: a gathered sequence is its part repeated, which writes as much as a gather does; of
sums it takes its own partial results. The numbers are therefore wrong, and nobody compares them with anything.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from benchmarks.models import forms
from benchmarks.models.architecture import Architecture, Decoder
from benchmarks.models.forms import ContextAttention, ShardedCache
from benchmarks.models.zoo import Cell


class AloneContextAttention(ContextAttention):
    """To as many keys as there are on all ranks in front of this one's, all of them its own."""

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        return x.expand(self.group.size(), *x.shape[1:])


class AloneCachedAttention(ShardedCache):
    """To the part of the cache that is here."""

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(self.group.size(), 1, 1)


class Repeated(nn.Module):
    """A half of a layer between a gather along the sequence and a scatter, with neither."""

    def __init__(self, part: nn.Module, world_size: int) -> None:
        super().__init__()
        self.part = part
        self.world_size = world_size

    def forward(self, x: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        found: torch.Tensor = self.part(x.repeat(1, self.world_size, 1), *rest, **named)
        return found.narrow(1, 0, x.shape[1])


def build(arch: Architecture, cell: Cell, world_size: int, rank: int) -> Decoder:
    """The cell's layers as one rank of `world_size` has them, with random weights on the default device.

    Takes the same inputs as `forms.build` of the cell.
    """
    arch = share(arch, cell.form, world_size)
    model = forms.decoder(arch, cell, world_size, rank, AloneContextAttention, AloneCachedAttention)
    if cell.form == "sp":
        for layer in model.layers:
            layer.self_attn = Repeated(layer.self_attn, world_size)
            layer.mlp = Repeated(layer.mlp, world_size)
    return model


def share(arch: Architecture, form: str, world_size: int) -> Architecture:
    """Sizes of a rank's weights."""
    if form == "cp":
        return arch
    cut = replace(arch, inner=arch.inner // world_size)
    if form == "kv":
        return cut
    return replace(cut, heads=arch.heads // world_size, kv_heads=arch.kv_heads // world_size)
