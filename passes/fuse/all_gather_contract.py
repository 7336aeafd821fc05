"""all_gather -> mm that contracts the gathered dimension becomes one `ditron::all_gather_contract`.

Before, for a gather along dimension 0 or along an inner dimension (`split`, `getitem` and `cat` move the chunks there),
as the backward of a sequence-parallel layer gathers for its weight gradient:

    shard [B, S, C] -> all_gather_into_tensor -> wait -> split .. cat [B, W*S, C] -> reshape [B*W*S, C]
      -> permute [C, B*W*S] -> mm(permute, factor [B*W*S, N]) [C, N]
      -> any other use of the gathered tensor

After:

    shard, [factor] -> ditron.all_gather_contract -> getitem 0 [C, N]
                                                  -> getitem 1 [B, W*S, C]   only if used otherwise

The other three forms have the gathered tensor second, or the gathered dimension last:

    mm(factor [N, W*S], gathered [W*S, C])
    mm(gathered [M, W*S], factor [W*S, N])
    mm(factor [N, W*S], permute(gathered [M, W*S]))

All products of one gather go into one node, with the gathered tensor on the side of the first of them: the others are
computed as the transposed problem. `addmm` with a row as its bias counts as mm; the bias is added behind the node.

A gather that also feeds a matmul which keeps the gathered dimension belongs to `all_gather_matmul`, and one that
gathers a product to `matmul_all_gather`: both run first. The first one returns the gathered tensor for the others.

It must not fire when
* the chunks are not all of the W equal chunks, once, in order, or any of them is used otherwise;
* a view changes the last dimension before the matmul, or the other operand depends on the gathered tensor;
* there is a bias that is no row, a cast, a matmul with a matrix for each batch, or a dtype other than bfloat16, float16
  and float32;
* the gathered tensor is cut, see all_gather_matmul.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.graph import rewriting
from ditron_inductor.passes.graph.collectives import ALL_GATHER, Collective, collectives, read_collective
from ditron_inductor.passes.graph.gathered import (
    Feeds,
    Gathered,
    OrientedMatmul,
    Use,
    collect,
    contracts,
    find_feeding,
    replace,
)
from ditron_inductor.passes.graph.reasons import LEFT_ALONE, ReasonCode, Refused, leave_alone, refused
from ditron_inductor.task.nodes import AllGatherContract

PATTERN = AllGatherContract.kind


@dataclass(frozen=True)
class Match:
    """One gather and the matmuls that contract what it gathers; `gathered_first`: on which side of the first one."""

    collective: Collective
    gathered: Gathered
    gathered_first: bool
    feeds: Feeds


def find_all_gather_contract(node: fx.Node) -> Match | Refused:
    """Proves that the all-gather `node` feeds matmuls as drawn above, or says why not."""
    collective = read_collective(node)
    if isinstance(collective, ReasonCode):
        return collective
    return find_feeding(collective, partial(_match, collective))


def _match(collective: Collective, gathered: Gathered) -> Match | Refused:
    """Collects the matmuls on views of the gathered tensor that can be proved."""
    feeds = collect(collective, gathered, partial(_read, gathered))
    if refused(feeds):
        return feeds
    # Of each matmul it is known so far whether the gathered tensor is its second operand.
    first = not feeds.matmuls[0].transposed
    matmuls = tuple(OrientedMatmul(one.mm, one.operand, one.transposed == first) for one in feeds.matmuls)
    feeds = Feeds(matmuls, feeds.steps, feeds.first_use, feeds.return_gathered)
    return Match(collective, gathered, first, feeds)


def _read(gathered: Gathered, use: Use, value: torch.Tensor) -> OrientedMatmul | ReasonCode:
    """A matmul that contracts the gathered dimension; `transposed` stands for the gathered tensor as second operand."""
    if not contracts(use, gathered.dim == value.ndim - 1):
        return ReasonCode.NO_MATMUL
    return OrientedMatmul(use.user, use.operand, not use.first)


def rewrite(graph: fx.Graph, match: Match, options: Options) -> fx.Node:
    """Replaces the match by one op call and returns that call."""
    collective, feeds, dim = match.collective, match.feeds, match.gathered.dim
    task = AllGatherContract(
        gather_dim=dim,
        gathered_first=match.gathered_first,
        world_size=collective.world_size,
        group_name=collective.group_name,
        return_gathered=feeds.return_gathered,
        site=rewriting.UNNAMED_SITE,
        policy=rewriting.policy(options),
        num_factors=len(feeds.matmuls),
    )
    return replace(graph, feeds, match.gathered.node, task, collective.operand, swapped=False)


def all_gather_contract(graph: fx.Graph, *, options: Options) -> int:
    """Fuses every all-gather that provably feeds contractions; returns how many were. Of the others, those whose matmul
    does contract what they gather get a reason.
    """
    count = 0
    for node in collectives(graph, ALL_GATHER):
        match = find_all_gather_contract(node)
        if isinstance(match, Match) and PATTERN not in options.fusions:
            match = ReasonCode.DISABLED
        if not refused(match):
            rewrite(graph, match, options)
            count += 1
            continue
        given = node.meta.get(LEFT_ALONE)
        if given is None or given.code == ReasonCode.CONTRACTED.value:
            leave_alone(node, PATTERN, match)
    return count
