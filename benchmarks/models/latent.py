"""Latent attention, as DeepSeek V3 has it and `transformers` writes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from ditron_inductor.tools.demo_model import rotate

if TYPE_CHECKING:
    from benchmarks.models.architecture import Architecture, Seen


class LatentAttention(nn.Module):
    """Attention whose queries, and whose keys and values, are made of short rows, the *latents*, on this rank's heads.

    A head's query and key are a part that a projection of the latents makes, `head_dim` long as the values are, and a
    part with rotary positions. The latter part of the keys is the same in all heads. The latents are on every rank.
    mesh: the ranks that the heads are divided among, None if there are no others.
    """

    def __init__(self, arch: Architecture, core: nn.Module) -> None:
        super().__init__()
        self.sizes = arch.head_dim, arch.rotary_dim
        self.latent = arch.key_latent
        self.q_a_proj = arch.linear(arch.hidden, arch.query_latent)
        self.q_a_layernorm = arch.make_norm(arch.query_latent)
        self.q_b_proj = arch.linear(arch.query_latent, arch.heads * sum(self.sizes))
        self.kv_a_proj = arch.linear(arch.hidden, arch.key_latent + arch.rotary_dim)
        self.kv_a_layernorm = arch.make_norm(arch.key_latent)
        self.kv_b_proj = arch.linear(arch.key_latent, arch.heads * 2 * arch.head_dim)
        self.o_proj = arch.linear(arch.heads * arch.head_dim, arch.hidden)
        self.core = core
        self.mesh: DeviceMesh | None = None

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, seen: Seen | None = None
    ) -> torch.Tensor:
        assert cos is not None and sin is not None
        # Its gradient is whole on every rank: the projections of the latents, and the rotary part, add up theirs.
        x = x.to_local() if isinstance(x, DTensor) else x
        of_values = self.sizes[0]
        queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (-1, sum(self.sizes)))
        q, q_rotary = queries.transpose(1, 2).split(self.sizes, -1)
        latents, k_rotary = self.kv_a_proj(x).split((self.latent, self.sizes[1]), -1)
        both = self.kv_b_proj(self.kv_a_layernorm(latents)).unflatten(-1, (-1, 2 * of_values))
        k, v = both.transpose(1, 2).split(of_values, -1)
        if self.mesh is not None:
            k_rotary = DTensor.from_local(k_rotary, self.mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        k_rotary = rotate(k_rotary.unsqueeze(1), cos, sin).expand(-1, k.shape[1], -1, -1)
        found = self.core(torch.cat((q, rotate(q_rotary, cos, sin)), -1), torch.cat((k, k_rotary), -1), v)
        if seen is not None:
            seen.append(found)
        return self.o_proj(found.transpose(1, 2).flatten(2))

    @torch.no_grad()
    def sharpen(self, factor: float) -> None:
        """Multiplies the scores of fresh weights by a factor."""
        for parameter in self.q_b_proj.parameters():
            parameter.mul_(factor)
