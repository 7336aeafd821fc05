"""The feed-forward of a mixture of experts as `transformers` writes it, with routing that no rounding changes.

A token is computed by its `top_k` experts, and the results are weighted by the router and added up. Few tokens are
multiplied with copies of their experts' weights (`batched_mm`), many by torch's grouped matmul over slots that are
sorted by expert (`grouped_mm`). A slot is a token's use of one expert. Experts with biases are those of GPT-OSS: gate
and up lie in alternate columns of a weight, whose columns are contiguous, and the activation is clamped.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional as F

from benchmarks.rivals.fused_experts import fused_experts

FEW_TOKENS = 64
"""Up to so many tokens the weights are copied, as `generate` does where it decodes."""
DRAWN = 1 << 20
"""The drawn scores, which are used again for further tokens."""
SKEW = 3.0
"""The spread of the experts' popularity in skewed routing, against noise of 1."""
NEGLIGIBLE = 1e-6
LIMIT, ALPHA = 7.0, 1.702
"""Of the clamped activation."""


def activated(both: torch.Tensor, biased: bool) -> torch.Tensor:
    """Returns what gate and up, [.., 2 F] in one tensor, become: [.., F]. biased: see the module."""
    if biased:
        gate, up = both[..., ::2].clamp(max=LIMIT), both[..., 1::2].clamp(-LIMIT, LIMIT)
        return (up + 1) * (gate * torch.sigmoid(gate * ALPHA))
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


class Experts(nn.Module):
    """The experts of all tokens, on the part of each expert's width that this rank holds.

    scores: drawn scores that choose the experts, to which the router's own are added, made negligible. So a model in a
    wider dtype chooses the same experts. The router is multiplied all the same. None: the router chooses. skew: the
    spread of the experts' popularity in these scores, against noise of 1; 0 where all are as popular. mesh: the ranks
    over which results are added up, None if there are no others. layout: of the results, which are whole, or of which a
    rank gets its own part of the sequence. plain: every expert in a plain matmul, as in the model that all results are
    compared with. few: the most tokens that copies of weights are made for. fused: by the kernel of `fused_experts`,
    for any number of tokens, without gradients. biased: experts as GPT-OSS has them, see the module; each rank adds its
    part of the biases of down, as DTensor divides them. shared: the width of an expert that all tokens take; 0 without.
    The gradient of the router's weight is that of this rank's part of the results.
    """

    scores: torch.Tensor | None
    fused = False

    def __init__(
        self,
        hidden: int,
        inner: int,
        experts: int,
        top_k: int,
        shared: int = 0,
        biased: bool = False,
        skew: float = 0.0,
    ) -> None:
        super().__init__()
        self.top_k, self.biased = top_k, biased
        self.router = nn.Linear(hidden, experts, bias=biased)
        # The gates of all columns, then what they open; with biases in turns.
        shapes = ((hidden, 2 * inner), (inner, hidden)) if biased else ((2 * inner, hidden), (hidden, inner))
        self.gate_up_proj, self.down_proj = (nn.Parameter(torch.empty(experts, *shape)) for shape in shapes)
        for weight, depth in ((self.gate_up_proj, hidden), (self.down_proj, inner)):
            nn.init.uniform_(weight, -(depth**-0.5), depth**-0.5)
        if biased:
            self.gate_up_proj_bias = nn.Parameter(torch.empty(experts, 2 * inner).normal_(std=0.1))
            self.down_proj_bias = nn.Parameter(torch.empty(experts, hidden).normal_(std=0.1))
        self.shared_gate_up_proj = nn.Linear(hidden, 2 * shared, bias=False) if shared else None
        self.shared_down_proj = nn.Linear(shared, hidden, bias=False) if shared else None
        scores = torch.empty(DRAWN // experts, experts, dtype=torch.float32).normal_()
        if skew:
            scores += skew * torch.empty(experts, dtype=torch.float32).normal_()
        self.register_buffer("scores", scores, persistent=False)
        self.mesh: DeviceMesh | None = None
        self.layout: Placement = Replicate()
        self.plain = False
        self.few = FEW_TOKENS

    def cut(self, mesh: DeviceMesh, scatters: bool) -> None:
        """Keeps this rank's part of the width of each expert."""
        world_size, rank = mesh.size(), mesh.get_local_rank()
        self.mesh, self.layout = mesh, Shard(1) if scatters else Replicate()
        if self.biased:
            for name, dim in (("gate_up_proj", 2), ("gate_up_proj_bias", 1), ("down_proj", 1)):
                part = getattr(self, name).detach().chunk(world_size, dim)[rank].clone()
                setattr(self, name, nn.Parameter(part))
            self.down_proj_bias = nn.Parameter(self.down_proj_bias.detach() / world_size)
            return

        def gates(weight: torch.Tensor) -> nn.Parameter:
            return nn.Parameter(weight.detach().unflatten(-2, (2, world_size, -1))[..., rank, :, :].flatten(-3, -2))

        def downs(weight: torch.Tensor) -> nn.Parameter:
            return nn.Parameter(weight.detach().chunk(world_size, -1)[rank].clone())

        self.gate_up_proj, self.down_proj = gates(self.gate_up_proj), downs(self.down_proj)
        if self.shared_gate_up_proj is not None and self.shared_down_proj is not None:
            self.shared_gate_up_proj.weight = gates(self.shared_gate_up_proj.weight)
            self.shared_down_proj.weight = downs(self.shared_down_proj.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = self._entering(x)
        rows = whole.flatten(0, 1)
        logits = self.router(rows).float()
        if self.scores is not None:
            logits = logits * NEGLIGIBLE + self._drawn(whole)
        weights, chosen = torch.softmax(logits, -1).topk(self.top_k)
        weights = (weights / weights.sum(-1, keepdim=True)).to(rows.dtype)
        if self.plain:
            total = self._by_expert(rows, weights, chosen)
        elif self.fused:
            total = self._fused(rows, weights, chosen)
        elif rows.shape[0] <= self.few:
            total = self._with_copies(rows, weights, chosen)
        else:
            total = self._sorted(rows, weights, chosen)
        if self.shared_gate_up_proj is not None and self.shared_down_proj is not None:
            total = total + self.shared_down_proj(activated(self.shared_gate_up_proj(rows), self.biased))
        total = total.view(whole.shape)
        if self.mesh is None:
            return total
        return DTensor.from_local(total, self.mesh, [Partial()]).redistribute(placements=[self.layout]).to_local()

    def _drawn(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns the drawn scores of these tokens [B, S, D]."""
        return self._drawn_of(whole.shape[0] * whole.shape[1])

    def _drawn_of(self, tokens: int) -> torch.Tensor:
        """Returns the drawn scores of the first tokens of all sequences."""
        assert self.scores is not None
        return self.scores.repeat(-(-tokens // self.scores.shape[0]), 1)[:tokens]

    def _entering(self, x: torch.Tensor) -> torch.Tensor:
        """All rows. What a rank's part of the experts makes of the gradient is added up over the ranks."""
        if self.mesh is None:
            return x
        given = x if isinstance(x, DTensor) else DTensor.from_local(x, self.mesh, [Replicate()])
        return given.to_local(grad_placements=[Partial()])

    def _fused(self, rows: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        gate_up, down, biases = self.gate_up_proj.mT, self.down_proj.mT, None
        if self.biased:
            gate_up, down = self.gate_up_proj, self.down_proj
            biases = self.gate_up_proj_bias, self.down_proj_bias
        return fused_experts(rows, chosen, weights, gate_up, down, lambda both: activated(both, self.biased), biases)

    def _with_copies(self, rows: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        ids = chosen.flatten()
        repeated = rows.unsqueeze(1).expand(-1, self.top_k, -1).reshape(-1, rows.shape[1])
        both = self._by_copies(repeated, "gate_up_proj", ids)
        found = self._by_copies(activated(both, self.biased), "down_proj", ids)
        scaled = found * weights.reshape(-1, 1)
        return scaled.view(-1, self.top_k, rows.shape[1]).sum(1).to(rows.dtype)

    def _by_copies(self, rows: torch.Tensor, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Returns the products of a row for each slot with copies of the weights of its expert."""
        weights = getattr(self, name)[ids]
        if not self.biased:
            return torch.bmm(weights, rows.unsqueeze(-1)).squeeze(-1)
        return torch.bmm(rows.unsqueeze(1), weights).squeeze(1) + getattr(self, f"{name}_bias")[ids]

    def _by_groups(self, rows: torch.Tensor, name: str, ids: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Returns the products of rows that are sorted by expert."""
        if rows.dtype != torch.bfloat16:
            return self._by_copies(rows, name, ids)
        weight = getattr(self, name)
        if not self.biased:
            return torch._grouped_mm(rows, weight.mT, offs=ends)
        return torch._grouped_mm(rows, weight, offs=ends) + getattr(self, f"{name}_bias")[ids]

    def _by_one(self, rows: torch.Tensor, name: str, expert: int) -> torch.Tensor:
        """Returns the products of rows of one expert."""
        weight = getattr(self, name)[expert]
        return rows @ weight + getattr(self, f"{name}_bias")[expert] if self.biased else rows @ weight.mT

    def _sorted(self, rows: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        ids, order = chosen.flatten().sort()
        # A histogram on the CPU takes floating-point numbers only.
        counted, last = ids.float() if ids.device.type == "cpu" else ids.int(), self.router.out_features - 1
        ends = torch.histc(counted, bins=last + 1, min=0, max=last).cumsum(0, dtype=torch.int32)
        found = self._found(rows[order // self.top_k], ids, ends)
        scaled = found * weights.flatten()[order].unsqueeze(-1)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        return scaled[places].view(-1, self.top_k, rows.shape[1]).sum(1).to(rows.dtype)

    def _found(self, rows: torch.Tensor, ids: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Returns what the experts make of rows that are sorted by expert."""
        both = self._by_groups(rows, "gate_up_proj", ids, ends)
        return self._by_groups(activated(both, self.biased), "down_proj", ids, ends)

    def _by_expert(self, rows: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(rows)
        for expert in range(self.router.out_features):
            tokens, place = (chosen == expert).nonzero(as_tuple=True)
            both = self._by_one(rows[tokens], "gate_up_proj", expert)
            found = self._by_one(activated(both, self.biased), "down_proj", expert)
            total = total.index_add(0, tokens, found * weights[tokens, place].unsqueeze(-1))
        return total
