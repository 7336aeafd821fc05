"""TorchTitan's experts on several ranks, in operations of static shapes (see expert_parallel.py). A run takes them by

    --override.imports ditron_inductor.torchtitan.gathered_experts --training.disable_cuda_graphs

Its own dispatcher sends each token to the ranks of its experts and reads from the device how many these are. This one
gathers the tokens of all ranks, sorts the slots of this rank's experts to the front, and adds up and scatters what they
return, so that a step with experts is one graph. TorchTitan's trainer accepts only dispatchers that it knows together
with its own CUDA graphs. It needs TorchTitan 0.3, and the ranks of an expert group on one host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchtitan.config import override
from torchtitan.config.override import derive
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    BaseEPTokenDispatcher,
    LocalDispatchMetadata,
    LocalTokenDispatcher,
)

from ditron_inductor.expert_parallel import summed_part, tokens_of_all


@dataclass(frozen=True)
class SortedSlots:
    """How the slots of all ranks' tokens lie, S = W * T * K. order: int64 [S], the slot at each place, those of this
    rank's experts first. absent: bool [S, 1], the places of other slots. factors: [S], the weights by place.
    """

    order: torch.Tensor
    absent: torch.Tensor
    factors: torch.Tensor


class GatheredTokenDispatcher(BaseEPTokenDispatcher):
    """A dispatcher whose sizes do not depend on the routing. On one rank it is TorchTitan's."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        """That of any dispatcher: `num_experts` of all ranks and `top_k`."""

    def dispatch(
        self, x: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, SortedSlots | LocalDispatchMetadata]:
        """Returns (rows [S, D] by expert, how many rows each expert of this rank has [E], how they lie). Rows behind
        those are 0, and so are their gradients. x: [T, D], as many tokens on every rank. scores, ids: [T, K]. counts:
        of this rank's tokens, which are not needed.
        """
        if self.ep_mesh is None:
            return LocalTokenDispatcher.dispatch(self, x, scores, ids, counts)
        num_local, left = divmod(self.num_experts, self.ep_mesh.size())
        if left:
            raise ValueError(f"num_experts = {self.num_experts} has to be a multiple of {self.ep_mesh.size()} ranks")
        rows, chosen, factors = tokens_of_all(x, ids, scores, num_local, self.ep_mesh.get_group())
        experts, order = torch.sort(chosen.flatten(), stable=True)
        slots = SortedSlots(order, (experts >= num_local).unsqueeze(1), factors.flatten()[order])
        if num_local == 1:
            held = (experts == 0).sum().reshape(1)
        else:
            # On the CPU only floats can be counted so, and on a GPU, if it is to be deterministic, only integers.
            numbers = experts.int() if x.is_cuda else experts.float()
            held = torch.histc(numbers, bins=num_local, min=0, max=num_local - 1)
        return rows[order // self.top_k].masked_fill(slots.absent, 0.0), held, slots

    def combine(
        self, products: torch.Tensor, slots: SortedSlots | LocalDispatchMetadata, x: torch.Tensor
    ) -> torch.Tensor:
        """Returns the weighted sums [T, D] for this rank's tokens of what the experts of all ranks return, in the dtype
        of x. products: [S, D], of which rows behind the last expert's may hold anything.
        """
        if self.ep_mesh is None:
            return LocalTokenDispatcher.combine(self, products, slots, x)
        assert isinstance(slots, SortedSlots)
        # Masked behind the weights, so that the backward keeps the products as they are.
        weighted = (products.float() * slots.factors.unsqueeze(1)).masked_fill(slots.absent, 0.0)
        places = torch.empty_like(slots.order)
        places[slots.order] = torch.arange(len(places), device=places.device)
        of_tokens = weighted.to(x.dtype)[places].view(-1, self.top_k, x.shape[1])
        return summed_part(of_tokens.sum(1), self.ep_mesh.get_group())


@override(target=AllToAllTokenDispatcher.Config, exact=True, description="experts on several ranks in static shapes")
def gathered_experts(config: AllToAllTokenDispatcher.Config) -> GatheredTokenDispatcher.Config:
    """The override: experts that TorchTitan would reach by all-to-alls are reached by a gather and a reduce-scatter."""
    return derive(config, GatheredTokenDispatcher.Config)
