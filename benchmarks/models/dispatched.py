"""Expert parallelism as training frameworks write it: tokens go to the ranks of their experts, and results come back.

A rank has 1/W of the experts, each of them whole. It routes its own tokens and sorts their slots by expert. The ranks
tell each other how many slots each expert gets, and the host waits for these numbers: they are the sizes of the
all-to-all that takes the slots to their experts, and of the one that takes back what becomes of them. Inductor compiles
what lies between. An expert that all tokens take is whole on every rank.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.models.architecture import Architecture, Decoder
from benchmarks.models.experts import Experts, activated


def refusal(arch: Architecture, form: str, phase: str) -> str:
    """Why a cell is not for this form, empty where it is."""
    if not arch.experts:
        return "tokens are sent to experts, and this model has none"
    if form != "sp" or phase == "training":
        return "tokens are sent to their experts in forwards that are divided along the sequence"
    return ""


def dispatched(model: Decoder) -> Decoder:
    """The layers of a decoder in the form `sp`, whose weights it shares, but for those of the experts. Collective."""
    shared = {id(one): one for one in model.parameters()}
    own = copy.deepcopy(model, shared)
    for layer in own.layers:
        assert isinstance(layer.mlp, Experts)
        # It has no hook, as the one that gathers the tokens.
        layer.mlp = DispatchedExperts(layer.mlp)
    return own


class Sizes(NamedTuple):
    """Of what this rank has sent to each rank, and got from each, in slots. order: of the slots that it got."""

    sent: list[int]
    received: list[int]
    order: torch.Tensor


class DispatchedExperts(Experts):
    """1/W of the experts of the default group's ranks. cut: all of them, a part of the width of each. Collective."""

    def __init__(self, cut: Experts) -> None:
        nn.Module.__init__(self)
        # Few slots are sorted too: all are sent in the order of their experts.
        self.top_k, self.biased, self.few, self.plain, self.mesh = cut.top_k, cut.biased, 0, False, None
        self.router = cut.router
        self.register_buffer("scores", cut.scores, persistent=False)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if self.biased:
            self.gate_up_proj = _own(cut.gate_up_proj, 2)
            self.gate_up_proj_bias = _own(cut.gate_up_proj_bias, 1)
            self.down_proj = _own(cut.down_proj, 1)
            biases = cut.down_proj_bias.detach().chunk(self.world_size)[self.rank]
            self.down_proj_bias = nn.Parameter(biases * self.world_size)
        else:
            # Gates of all columns, then what they open.
            halves = _own(cut.gate_up_proj.unflatten(1, (2, -1)), 2)
            self.gate_up_proj, self.down_proj = nn.Parameter(halves.detach().flatten(1, 2)), _own(cut.down_proj, 2)
        self.shared_gate_up_proj, self.shared_down_proj = None, None
        if cut.shared_gate_up_proj is not None and cut.shared_down_proj is not None:
            halves = _gathered(cut.shared_gate_up_proj.weight.unflatten(0, (2, -1)), 1)
            self.shared_gate_up_proj = _linear(halves.flatten(0, 1))
            self.shared_down_proj = _linear(_gathered(cut.shared_down_proj.weight, 1))

    def _drawn(self, whole: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = whole.shape
        drawn = self._drawn_of(batch * tokens * self.world_size)
        return drawn.view(batch, self.world_size, tokens, -1)[:, self.rank].flatten(0, 1)

    def _found(self, rows: torch.Tensor, ids: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        taken, own_ids, own_ends, sizes = self._sent(rows, torch.diff(ends, prepend=ends.new_zeros(1)))
        both = self._by_groups(taken, "gate_up_proj", own_ids, own_ends)
        return self._sent_back(self._by_groups(activated(both, self.biased), "down_proj", own_ids, own_ends), sizes)

    @torch._dynamo.disable
    def _sent(self, rows: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Sizes]:
        """Returns (the slots of this rank's experts, sorted by expert; the expert of each; their ends; Sizes). counts:
        of the rows for each expert of all ranks.
        """
        mine = counts.view(self.world_size, -1)
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine)
        sent, received = torch.stack((mine.sum(1), theirs.sum(1))).tolist()
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows, received, sent)
        numbers = torch.arange(mine.shape[1], device=rows.device).repeat(self.world_size)
        ids, order = numbers.repeat_interleave(theirs.flatten(), output_size=len(arrived)).sort(stable=True)
        return arrived[order], ids, theirs.sum(0).cumsum(0, dtype=torch.int32), Sizes(sent, received, order)

    @torch._dynamo.disable
    def _sent_back(self, found: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """Returns what became of the rows that this rank has sent, in their order."""
        ordered = torch.empty_like(found)
        ordered[sizes.order] = found
        back = found.new_empty(sum(sizes.sent), found.shape[1])
        dist.all_to_all_single(back, ordered, sizes.sent, sizes.received)
        return back


def _own(part: torch.Tensor, dim: int) -> nn.Parameter:
    """This rank's experts [E / W, ..], whole along `dim`, of which every rank has a part for all experts."""
    part, world_size = part.detach().contiguous(), dist.get_world_size()
    parts = torch.empty_like(part)
    dist.all_to_all_single(parts, part)
    return nn.Parameter(torch.cat(parts.chunk(world_size), dim))


def _gathered(part: torch.Tensor, dim: int) -> torch.Tensor:
    """A weight of which every rank has a part along `dim`."""
    part = part.detach().contiguous()
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part)
    return torch.cat(parts, dim)


def _linear(weight: torch.Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight)
    return made
