"""all_gather -> mm becomes one `ditron::all_gather_matmul`.

Before, for a gather along dimension 0 or along an inner dimension (`split`, `getitem` and `cat` move the chunks there):

    shard [B, S, K] -> all_gather_into_tensor -> wait -> split -> getitem x W -> cat [B, W*S, K] -> reshape [B*W*S, K]
      -> mm(reshape, weight_0) [B*W*S, N_0]
      -> mm(reshape, weight_1) [B*W*S, N_1]
      -> any other use of the gathered tensor

After:

    shard, [weight_0, weight_1] -> ditron.all_gather_matmul -> getitem 0 [B*W*S, N_0]
                                                            -> getitem 1 [B*W*S, N_1]
                                                            -> getitem 2 [B, W*S, K]   only if used elsewhere

A view instead of split and cat (batch size 1) keeps row-major order, so it reads as a gather along dimension 0.

`addmm` with a row as its bias counts as mm: the bias is added behind the node (and absorbed, see absorb_epilogues).

All matmuls of one gather go into one node if their weights are available before the gathered tensor is first used; ops
that only prepare a weight (permute, cast) are moved up for that. A matmul whose weight cannot come so early uses the
node's gathered output instead.

A gathered tensor that is the second operand (a sharded parameter) is fused as the transposed problem, if the matmul
keeps the gathered dimension, which then becomes the columns of the product.

    shard [N/W, K] -> all_gather -> wait -> permute [K, N] -> mm(x [M, K], permute) [M, N]
    shard [K, N/W] -> all_gather -> wait -> split -> cat [K, N] -> mm(x, cat) [M, N]

become

    shard, [permute(x)] -> ditron.all_gather_matmul -> getitem 0 [N, M] -> permute [M, N]
    permute(shard), [permute(x)] -> the same

It must not fire when
* the chunks are not all of the W equal chunks, once, in order, or any of them is used elsewhere;
* the matmul contracts the gathered dimension: a first operand that was gathered along its last dimension, or transposed
  (a weight gradient), or a second operand gathered along its first dimension. This was measured as no faster, hence
  `no_gain`;
* a view changes the last dimension before the matmul, or the other operand depends on the gathered tensor;
* there is a bias that is no row (addmm with a matrix, or with factors), a cast, a matmul with a matrix for each batch,
  or a dtype other than bfloat16, float16 and float32;
* the gathered tensor is cut (DTensor, where the dimension does not divide): only the last rank pads its shard, but the
  cut stands on every rank. Nothing here looks at how the shard was made, so all ranks leave such a site alone together.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.graph import rewriting
from ditron_inductor.passes.graph.collectives import ALL_GATHER, Collective, read_collective
from ditron_inductor.passes.graph.fusion import Fusion
from ditron_inductor.passes.graph.gathered import Feeds, find_feeds, replace
from ditron_inductor.passes.graph.reasons import ReasonCode, Refused, refused
from ditron_inductor.task.nodes import AllGatherMatmul


@dataclass(frozen=True)
class Match:
    """One gather and the matmuls that it feeds."""

    collective: Collective
    feeds: Feeds


def find_all_gather_matmul(node: fx.Node) -> Match | Refused:
    """Proves that the all-gather `node` feeds matmuls as drawn above, or says why not."""
    collective = read_collective(node)
    if isinstance(collective, ReasonCode):
        return collective
    feeds = find_feeds(collective)
    return feeds if refused(feeds) else Match(collective, feeds)


def rewrite(graph: fx.Graph, match: Match, options: Options) -> fx.Node:
    """Replaces the match by one op call and returns that call."""
    collective, feeds = match.collective, match.feeds
    task = AllGatherMatmul(
        gather_dim=0 if feeds.gathered.swapped else feeds.gathered.dim,
        return_gathered=feeds.return_gathered,
        num_weights=len(feeds.matmuls),
        **rewriting.site_fields(collective.world_size, collective.group_name, options),
    )
    return replace(graph, feeds, task, collective.operand)


all_gather_matmul = Fusion(AllGatherMatmul, (ALL_GATHER,), find_all_gather_matmul, rewrite)
"""Fuses every all-gather that provably feeds matmuls. The others get a reason."""
