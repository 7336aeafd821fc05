"""A sum over other dimensions than the ranks moves in front of the all-reduce whose result it adds up.

Before, as Llama 4 of `transformers` has it, whose experts are a batched matmul over all tokens:

    bmm [E, T, N] -> view [E * T, N] -> all_reduce -> wait -> view [E, T, N] -> sum over E [T, N]

After, with 1/E of the bytes:

    bmm [E, T, N] -> view [E * T, N] -> view [E, T, N] -> sum over E [T, N] -> all_reduce -> wait

Views that keep the order move with it. The result is that of eager mode up to rounding: every rank rounds its own sum,
and the sums of the ranks are rounded once, instead of one reduction for each summand. `move_across` calls this.

It must not fire when
* the sum has another dtype than what is reduced, or as many elements;
* the op is neither sum nor avg, or the dtype is float16, in which the sum of one rank may leave the range although that
  of all ranks does not;
* the reduced tensor, or a view of it, is used elsewhere too, or what is reduced does not lie row after row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.collectives import ALL_REDUCE, Collective, read_collective
from ditron_inductor.passes.graph.reasons import refused

SUM = torch.ops.aten.sum.dim_IntList
SUMMED_DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Match:
    """An all-reduce, and the views and the sum that move in front of it, the sum last."""

    collective: Collective
    moved: tuple[fx.Node, ...]


def find_summed(node: fx.Node) -> Match | None:
    """Proves that a sum of an all-reduce's result could stand in front of it, with fewer elements, or None."""
    collective = read_collective(node) if node.target is ALL_REDUCE else None
    if collective is None or refused(collective):
        return None
    value = proofs.fake(collective.operand)
    if value.dtype not in SUMMED_DTYPES or not proofs.row_major(value):
        return None
    moved: list[fx.Node] = []
    user = proofs.sole_user(collective.wait)
    while user is not None and proofs.keeps_order(user):
        moved.append(user)
        user = proofs.sole_user(user)
    total = None if user is None or user.target is not SUM else proofs.tensor(user)
    if user is None or total is None or total.dtype != value.dtype or total.ndim == 0:
        return None
    if not proofs.known(total.numel() < value.numel()):
        return None
    moved.append(user)
    known = {collective.wait, *moved}
    early = all(source in known or source < node for step in moved for source in step.all_input_nodes)
    return Match(collective, tuple(moved)) if early else None


def rewrite(graph: fx.Graph, match: Match) -> None:
    """Moves the views and the sum in front of the all-reduce."""
    node, wait = match.collective.node, match.collective.wait
    first, last = match.moved[0], match.moved[-1]
    first.replace_input_with(wait, match.collective.operand)
    last.replace_all_uses_with(wait)
    for step in match.moved:
        node.prepend(step)
    node.update_arg(0, last)
    shape = tuple(last.meta["val"].shape)
    for changed in (node, wait):
        changed.meta["val"] = rewriting.fake_like(last.meta["val"], shape, rewriting.contiguous_strides(shape))
        changed.meta.pop("eager_input_vals", None)
