"""Gate and up in one weight become two products before forward and backward are parted, so that their epilogue fuses.

Before, in the joint graph of forward and backward:

    shard -> all_gather -> .. -> mm with weight [K, 2F] = product [M, 2F] -> split -> silu of one half * the other -> ..
                                                                             '-> their gradients -> cat -> ..

After:

    shard -> all_gather -> .. -> mm with columns of the weight [K, F], twice -> silu of the one * the other -> ..
                                                                             '-> their gradients -> cat -> ..

The backward reads the halves only, and the partitioner would keep what it takes for one product, the whole, which a
kernel with both halves in its registers does not have in one piece. Now it keeps two, and the forward graph gets

    shard, [columns, columns] -> ditron.all_gather_matmul(.., epilogue="cast(silu(mm0), bf16) * mm1; mm0; mm1")

The gradients of the halves are put together as before: the weight and the gathered tensor get theirs from one matmul
each. It is tried on a copy of the forward part.

It must not fire when
* no epilogue combines the halves then, or the product is used as a whole: see `split_weights`, which does the same for
  inference;
* nothing is gathered: a matmul of a few rows is not trained with;
* the program writes to the bias afterwards: the backward adds it to the halves once more, and would read what was
  written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.absorb.absorb_epilogues import absorb_epilogues
from ditron_inductor.passes.forms.split_weights import combines, find_split, rewrite
from ditron_inductor.passes.forms.try_forms import try_forms
from ditron_inductor.passes.fuse.all_gather_matmul import all_gather_matmul
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.collectives import ALL_GATHER, collectives
from ditron_inductor.passes.normalize.normalize_collectives import normalize_collectives
from ditron_inductor.passes.normalize.share_gathers import share_gathers
from ditron_inductor.task.nodes import AllGatherMatmul

FORWARD_PASSES = (normalize_collectives, share_gathers, try_forms, all_gather_matmul, absorb_epilogues)


def split_trained_weights(graph: fx.Graph, *, options: Options) -> int:
    """Splits every weight of which the forward's epilogue combines the halves then; returns how many."""
    fuses = AllGatherMatmul.kind in options.fusions and options.strategy != "library"
    backward = _behind(_tangents(graph))
    if not fuses or not backward or not list(collectives(graph, ALL_GATHER)):
        return 0
    matches = [match for node in graph.nodes if node not in backward and (match := find_split(node, math.inf))]
    found = [match for match in matches if match.bias is None or not _is_written(match.bias)]
    if not found:
        return 0
    copy, twins = rewriting.copied(graph)
    saved = [part for match in found for part, _ in match.halves]
    _keep_forward(copy, {twins[node] for node in backward}, [twins[node] for node in saved])
    views = [rewrite(copy, twins[match.product], math.inf) for match in found]
    for each in FORWARD_PASSES:
        each(copy, options=options)
    taken = [match for match, columns in zip(found, views, strict=True) if combines(columns)]
    for match in taken:
        rewrite(graph, match.product, math.inf)
    return len(taken)


def _is_written(node: fx.Node) -> bool:
    """Whether the graph writes to the memory of a node."""
    ops = (user.target for user in proofs.views_up(node)[-1].users)
    return any(isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable for op in ops)


def _tangents(graph: fx.Graph) -> list[fx.Node]:
    """The gradients that the backward of a joint graph starts from; none in inference."""
    return [node for node in graph.find_nodes(op="placeholder") if node.name.startswith("tangents_")]


def _behind(sources: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes, and all that is computed from them, but for the graph's output."""
    found, pending = set(sources), list(sources)
    while pending:
        for user in pending.pop().users:
            if user not in found and user.op != "output":
                found.add(user)
                pending.append(user)
    return found


def _keep_forward(graph: fx.Graph, backward: set[fx.Node], saved: list[fx.Node]) -> None:
    """Leaves what the outputs of the forward, and what it saves, are computed from."""
    output = graph.output_node()
    returned = [node for node in output.all_input_nodes if node not in backward]
    output.args = ((*returned, *saved),)
    needed = set(proofs.ancestors(output))
    for node in reversed(list(graph.nodes)):
        if node not in needed and node.op != "placeholder":
            graph.erase_node(node)
