"""The feed-forward of a mixture of experts as `transformers` writes it, with routing that no rounding changes.

A token is computed by its `top_k` experts, and the results are weighted by the router and added up. Few tokens are
multiplied with copies of their experts' weights (`batched_mm`), many by torch's grouped matmul over slots that are
sorted by expert (`grouped_mm`). A slot is a token's use of one expert.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional as F

FEW_TOKENS = 64
"""Up to so many tokens the weights are copied, as `generate` does where it decodes."""
DRAWN = 1 << 20
"""The drawn scores, which are used again for further tokens."""
NEGLIGIBLE = 1e-6


class Experts(nn.Module):
    """The experts of all tokens, on the part of each expert's width that this rank holds.

    scores: drawn scores that choose the experts, to which the router's own are added, made negligible. So a model in a
    wider dtype chooses the same experts. The router is multiplied all the same. None: the router chooses. mesh: the
    ranks over which results are added up, None if there are no others. layout: of the results, which are whole, or of
    which a rank gets its own part of the sequence. plain: every expert in a plain matmul, as in the model that all
    results are compared with.
    """

    scores: torch.Tensor | None

    def __init__(self, hidden: int, inner: int, experts: int, top_k: int, shared: int = 0) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(hidden, experts, bias=False)
        # The gates of all columns, then what they open.
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.uniform_(weight, -(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)
        # An expert that all tokens take.
        self.shared_gate_up_proj = nn.Linear(hidden, 2 * shared, bias=False) if shared else None
        self.shared_down_proj = nn.Linear(shared, hidden, bias=False) if shared else None
        scores = torch.empty(DRAWN // experts, experts, dtype=torch.float32).normal_()
        self.register_buffer("scores", scores, persistent=False)
        self.mesh: DeviceMesh | None = None
        self.layout: Placement = Replicate()
        self.plain = False

    def cut(self, mesh: DeviceMesh, scatters: bool) -> None:
        """Keeps this rank's part of the width of each expert."""
        world_size, rank = mesh.size(), mesh.get_local_rank()

        def gates(weight: torch.Tensor) -> nn.Parameter:
            return nn.Parameter(weight.detach().unflatten(-2, (2, world_size, -1))[..., rank, :, :].flatten(-3, -2))

        def downs(weight: torch.Tensor) -> nn.Parameter:
            return nn.Parameter(weight.detach().chunk(world_size, -1)[rank].clone())

        self.gate_up_proj, self.down_proj = gates(self.gate_up_proj), downs(self.down_proj)
        if self.shared_gate_up_proj is not None and self.shared_down_proj is not None:
            self.shared_gate_up_proj.weight = gates(self.shared_gate_up_proj.weight)
            self.shared_down_proj.weight = downs(self.shared_down_proj.weight)
        self.mesh, self.layout = mesh, Shard(1) if scatters else Replicate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = self._entering(x)
        rows = whole.flatten(0, 1)
        logits = self.router(rows).float()
        if self.scores is not None:
            drawn = self.scores.repeat(-(-rows.shape[0] // self.scores.shape[0]), 1)[: rows.shape[0]]
            logits = logits * NEGLIGIBLE + drawn
        weights, chosen = torch.softmax(logits, -1).topk(self.top_k)
        weights = (weights / weights.sum(-1, keepdim=True)).to(rows.dtype)
        if self.plain:
            total = self._by_expert(rows, weights, chosen)
        elif rows.shape[0] <= FEW_TOKENS or rows.dtype != torch.bfloat16:
            total = self._with_copies(rows, weights, chosen)
        else:
            total = self._sorted(rows, weights, chosen)
        if self.shared_gate_up_proj is not None and self.shared_down_proj is not None:
            total = total + self.shared_down_proj(self._activated(self.shared_gate_up_proj(rows)))
        total = total.view(whole.shape)
        if self.mesh is None:
            return total
        return DTensor.from_local(total, self.mesh, [Partial()]).redistribute(placements=[self.layout]).to_local()

    def _entering(self, x: torch.Tensor) -> torch.Tensor:
        """All rows. What a rank's part of the experts makes of the gradient is added up over the ranks."""
        if self.mesh is None:
            return x
        given = x if isinstance(x, DTensor) else DTensor.from_local(x, self.mesh, [Replicate()])
        return given.to_local(grad_placements=[Partial()])

    def _activated(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, -1)
        return F.silu(gate) * up

    def _with_copies(self, rows: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        ids = chosen.flatten()
        repeated = rows.unsqueeze(1).expand(-1, self.top_k, -1).reshape(-1, rows.shape[1])
        both = torch.bmm(self.gate_up_proj[ids], repeated.unsqueeze(-1)).squeeze(-1)
        found = torch.bmm(self.down_proj[ids], self._activated(both).unsqueeze(-1)).squeeze(-1)
        scaled = found * weights.reshape(-1, 1)
        return scaled.view(-1, self.top_k, rows.shape[1]).sum(1).to(rows.dtype)

    def _sorted(self, rows: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        ids, order = chosen.flatten().sort()
        # A histogram on the CPU takes floating-point numbers only.
        counted, last = ids.float() if ids.device.type == "cpu" else ids.int(), self.router.out_features - 1
        ends = torch.histc(counted, bins=last + 1, min=0, max=last).cumsum(0, dtype=torch.int32)
        both = torch._grouped_mm(rows[order // self.top_k], self.gate_up_proj.mT, offs=ends)
        found = torch._grouped_mm(self._activated(both), self.down_proj.mT, offs=ends)
        scaled = found * weights.flatten()[order].unsqueeze(-1)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        return scaled[places].view(-1, self.top_k, rows.shape[1]).sum(1).to(rows.dtype)

    def _by_expert(self, rows: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(rows)
        for expert in range(self.router.out_features):
            tokens, place = (chosen == expert).nonzero(as_tuple=True)
            both = rows[tokens] @ self.gate_up_proj[expert].mT
            found = self._activated(both) @ self.down_proj[expert].mT
            total = total.index_add(0, tokens, found * weights[tokens, place].unsqueeze(-1))
        return total
