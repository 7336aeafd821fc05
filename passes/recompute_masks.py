"""A mask that the graph computes is computed again for the backward of its attention, not kept for it.

Before, in the joint graph of forward and backward:

    arange .. -> where = mask [Sq, Skv] -> _scaled_dot_product_flash_attention(q, keys, values, mask) -> ..
                                    \\---> _scaled_dot_product_flash_attention_backward(grad, .., mask) -> ..

After, the nodes of the mask are marked, so that the backward graph begins with

    arange .. -> where = mask -> _scaled_dot_product_flash_attention_backward(grad, .., mask) -> ..

The partitioner would hand the mask from the forward to the backward, as it hands on whatever an op that is not
pointwise reads. There it would be an input of the graph, of which nothing is known; and a tensor of all pairs of a
query and a key would be kept. The marks are those of activation checkpointing.

It must not fire when
* the mask is not one that is proved to be causal, or a causal window;
* the graph gathers nothing, or the backward of attention is not to be fused.
"""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ditron_inductor.options import Options
from ditron_inductor.passes import proofs
from ditron_inductor.passes.attention import BACKWARD, operands
from ditron_inductor.passes.attention_reduce_scatter import PATTERN
from ditron_inductor.passes.collectives import ALL_GATHER, collectives
from ditron_inductor.passes.masks import Unknown
from ditron_inductor.passes.shown_masks import read_mask

MARK = "recompute"
"""What the partitioner of AOTAutograd reads of a node."""


def recompute_masks(graph: fx.Graph, *, options: Options) -> int:
    """Marks every known mask of a backward of attention; returns how many."""
    if PATTERN not in options.fusions or not list(collectives(graph, ALL_GATHER)):
        return 0
    masks: set[fx.Node] = set()
    for node in [node for node in graph.nodes if node.op == "call_function" and node.target in BACKWARD]:
        bound = proofs.arguments(node)
        mask = bound.get("attn_mask", bound.get("attn_bias"))
        if not isinstance(mask, fx.Node) or mask in masks:
            continue
        q, k, _ = operands(node)
        try:
            read_mask(mask, q.meta["val"].shape[2], k.meta["val"].shape[2])
        except Unknown:
            continue
        masks.add(mask)
        for one in _made_of(mask):
            # What a user's own checkpointing says of a node stays.
            one.meta.setdefault(MARK, CheckpointPolicy.MUST_RECOMPUTE)
    return len(masks)


def _made_of(mask: fx.Node) -> set[fx.Node]:
    """The mask, and the tensors that it is computed from."""
    found: set[fx.Node] = set()
    left = [mask]
    while left:
        node = left.pop()
        if node not in found and node.op == "call_function" and proofs.tensor(node) is not None:
            found.add(node)
            left += node.all_input_nodes
    return found
