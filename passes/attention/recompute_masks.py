"""A mask that the graph computes is computed again in the backward of its attention, and is not saved for it.

Before, in the joint graph of forward and backward:

    arange .. -> where = mask [Sq, Skv] -> _scaled_dot_product_flash_attention(q, keys, values, mask) -> ..
                                    \\---> _scaled_dot_product_flash_attention_backward(grad, .., mask) -> ..

After, the nodes of the mask are marked, so that the backward graph begins with

    arange .. -> where = mask -> _scaled_dot_product_flash_attention_backward(grad, .., mask) -> ..

The partitioner would save the mask in the forward for the backward, as it saves every tensor that an op reads which is
not pointwise. In the backward graph the mask would be an input, of which nothing is known. And a tensor with an element
for each pair of a query and a key would be kept. The marks are those of activation checkpointing.

It must not fire when
* the mask is not proved to be causal, or a causal window: a tensor that is passed on as a bias may as well be saved;
* the keys are not gathered, or the backward of attention is not to be fused.

The numbers and indices of FlexAttention's blocks are also computed again.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ditron_inductor.options import Options
from ditron_inductor.passes.attention.attention_calls import BACKWARD, FOLLOWED, mask_tensors, operands, read_attention
from ditron_inductor.passes.graph import proofs
from ditron_inductor.passes.graph.collectives import ALL_GATHER, WAIT, collectives
from ditron_inductor.passes.graph.reasons import refused
from ditron_inductor.passes.graph.rewriting import RECOMPUTE
from ditron_inductor.task.nodes import ATTENTION_KINDS

aten = torch.ops.aten

BETWEEN = FOLLOWED | {WAIT, aten.expand.default, aten.cat.default, aten.split.Tensor, aten.split_with_sizes.default}


def recompute_masks(graph: fx.Graph, *, options: Options) -> int:
    """Marks every known mask of a backward of attention; returns how many."""
    gathers = set(collectives(graph, ALL_GATHER))
    _, backward = ATTENTION_KINDS
    if backward not in options.fusions or not gathers:
        return 0
    known: set[tuple[fx.Node, ...]] = set()
    for node in [node for node in graph.nodes if node.op == "call_function" and node.target in BACKWARD]:
        masks = mask_tensors(node)
        # Keys are views, or parts put together, of what a collective gathers.
        sources = proofs.reached([operands(node)[1]], lambda key: key.all_input_nodes if key.target in BETWEEN else ())
        if not masks or tuple(masks) in known or gathers.isdisjoint(sources):
            continue
        attention = read_attention(node)
        if refused(attention) or attention.bias is not None:
            continue
        known.add(tuple(masks))
        for source in _made_of(masks):
            # A mark that the user's own checkpointing has put on a node stays.
            source.meta.setdefault(RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE)
    return len(known)


def _made_of(masks: list[fx.Node]) -> set[fx.Node]:
    """Returns the masks, and the nodes from which they are computed."""
    return {node for mask in masks for node in proofs.ancestors(mask) if node.op == "call_function"}
