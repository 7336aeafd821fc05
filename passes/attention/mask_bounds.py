"""Finds the bounds of what a mask shows, once for all attentions that read the mask.

    shown [B, S] -> where(shown, iota, S) -> amin = begin [B]
                 -> where(shown, iota + 1, 0) -> amax = end [B]

A cache with room for thousands of tokens often holds a few hundred, and a window shows fewer still. The layers of a
model share one mask, so Inductor computes the bounds in one kernel for each step, and the attention of each layer reads
nothing outside of them.
"""

from __future__ import annotations

import torch
from torch import fx

from ditron_inductor.passes.attention.step_attention import TokenChoice
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.task.decode_node import BOUNDS, HIDDEN

aten = torch.ops.aten


class MaskOperands:
    """The operands of all calls in a graph that say which tokens are attended to, each made once."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._made: dict[tuple[fx.Node, tuple[int, int], bool], dict[str, fx.Node]] = {}

    def of(self, choice: TokenChoice, tokens: int) -> dict[str, fx.Node]:
        """Returns the mask of a choice [B, tokens] or [1, tokens], as the node names it, and its bounds."""
        mask = choice.shown if choice.bias is None else choice.bias
        if mask is None:
            return {}
        # Each layer may have views of its own.
        root = proofs.views_up(mask)[-1]
        key = root, (proofs.fake(root).numel() // tokens, tokens), choice.kept
        if key not in self._made:
            self._made[key] = self._make(choice, *key[:2])
        return self._made[key]

    def _make(self, choice: TokenChoice, root: fx.Node, shape: tuple[int, int]) -> dict[str, fx.Node]:
        graph = self._graph
        with graph.inserting_before(_behind(root)):
            mask = rewriting.shaped(graph, root, shape)
            if choice.bias is not None:
                # NaN counts as seen.
                hidden = rewriting.computed(graph, aten.le.Scalar, (mask, HIDDEN), mask)
                seen = rewriting.computed(graph, aten.logical_not.default, (hidden,), mask)
            else:
                if not choice.kept:
                    mask = rewriting.computed(graph, aten.logical_not.default, (mask,), mask)
                seen = mask
            name = "shown" if choice.bias is None else "bias"
            return {name: mask, **dict(zip(BOUNDS, self._bounds(seen, shape[1]), strict=True))}

    def _bounds(self, seen: fx.Node, tokens: int) -> tuple[fx.Node, fx.Node]:
        graph = self._graph
        first, behind = (rewriting.integers(graph, seen, tokens, torch.int32, begin=begin) for begin in (0, 1))
        none, zero = (rewriting.full(graph, seen, (), value, torch.int32) for value in (tokens, 0))
        firsts = rewriting.computed(graph, aten.where.self, (seen, first, none), seen)
        lasts = rewriting.computed(graph, aten.where.self, (seen, behind, zero), seen)
        begin = rewriting.computed(graph, aten.amin.default, (firsts, [1]), seen, "begin")
        return begin, rewriting.computed(graph, aten.amax.default, (lasts, [1]), seen, "end")


def _behind(node: fx.Node) -> fx.Node:
    """Returns the first node in front of which something may be inserted that reads `node`."""
    following = node.next
    while following.op == "placeholder":
        following = following.next
    return following
