"""Which keys a mask shows, in the terms of `Mask`, proved from what `masks` knows of the tensor.

A mask is understood if it shows each row the keys whose positions are at most the row's own position, and with a window
only those above a second bound. The positions of neighbouring rows have to differ by one, except at some jumps. Keys
stand in order, or in the zig-zag order of a number of ranks.

The positions of the rows belong to this rank alone, and decide only what this rank computes. All ranks share the order
of the keys, and the length of a window, which is the same for every row. docs/attention.md says which masks are not
understood, because they might be on some ranks only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ditron_inductor.passes.attention.mask_values import TRUE, Selection, Truth
from ditron_inductor.passes.attention.masks import Masks, UnknownMask, hiding, shape_of
from ditron_inductor.passes.graph import proofs
from ditron_inductor.task.attention_masks import GIVEN, LONGEST_WINDOW, Mask


@dataclass(frozen=True)
class Shown:
    """What the rows see. ranks: the keys stand in the zig-zag order of this many ranks; 0 if they stand in order."""

    mask: Mask
    ranks: int = 0


def read_mask(node: fx.Node, queries: Any, keys: Any, *, hides: bool = False, lowest: float | None = None) -> Shown:
    """Returns what a mask, or a bias that is added to the scores, shows of `queries` x `keys` scores. Raises
    UnknownMask. lowest: the number that replaces hidden scores; None for a bias, or a mask that hides by -inf. hides:
    the mask is true where it hides.
    """
    value, shape = Masks().value(node), shape_of(node)
    if hides and isinstance(value, Truth):
        value = value.negated()
    if isinstance(value, Selection) and lowest is None:
        shown = hiding(node, value)
        if shown is None:
            raise UnknownMask(node)
        value, lowest = shown
    if not isinstance(value, Truth) or len(shape) < 2 or not proofs.same_shape(shape[-2:], (queries, keys)):
        raise UnknownMask(node)
    return shown_by(value, shape, node, -math.inf if lowest is None else lowest)


def shown_by(truth: Truth, shape: Sequence[Any], node: fx.Node, lowest: float = -math.inf) -> Shown:
    """Returns what is shown if keys are seen where a truth holds; elsewhere `lowest` is added to the scores. The last
    two dimensions of `shape` are queries and keys. Raises UnknownMask with the node.
    """
    queries, keys = shape[-2:]
    if truth == TRUE:
        return Shown(Mask("full"))
    # With a dynamic length `rank * S` is a number on rank 0 alone, so the mask would be known there alone.
    if not isinstance(queries, int) or not isinstance(keys, int):
        raise UnknownMask(node)
    # With one row a bound that moves with the rows looks like one that does not.
    if not truth.every and len(truth.terms) != 1 or queries <= 1 or keys <= 1:
        raise UnknownMask(node)
    uppers, lowers = [], []
    row, key = len(shape) - 2, len(shape) - 1
    for term in truth.terms:
        if term.depends_on(range(row)):
            raise UnknownMask(node)
        if term.coefs[-2:] == (1, -1):
            uppers.append(term)
        elif term.coefs[-2:] == (-1, 1):
            lowers.append(term)
        else:
            # A bound on rows or keys alone is not understood even if it holds here: it may not on another rank.
            raise UnknownMask(node)
    # All bounds have to use the same positions.
    places = {upper.steps for upper in uppers} | {lower.scaled(-1).steps for lower in lowers}
    if not uppers or len(places) != 1:
        raise UnknownMask(node)
    offset = min(upper.const for upper in uppers)
    window = min(offset + min(lower.const for lower in lowers) + 1, LONGEST_WINDOW) if lowers else 0
    if lowers and window <= 0:
        raise UnknownMask(node)
    jumps = " ".join(f"{at}{jump:+}" for at, jump in uppers[0].steps_of(row).items())
    ranks = _zigzag_ranks({at: -jump for at, jump in uppers[0].steps_of(key).items()}, keys)
    if ranks is None:
        raise UnknownMask(node)
    mask = Mask("zigzag_keys" if ranks else "causal", window, offset, jumps)
    # With a finite number a row that sees nothing sees everything.
    if lowest != -math.inf and not (all_see(mask, queries, keys) and _in_chunks(mask, queries)):
        raise UnknownMask(node)
    return Shown(mask, ranks)


def all_see(mask: Mask, queries: Any, keys: Any) -> bool:
    """Returns whether every row of this rank sees at least one of the keys of all ranks."""
    if mask.kind == GIVEN:
        return False
    if not mask.jumps:
        return mask.offset >= 0 and (mask.window == 0 or proofs.known(mask.offset + queries - mask.window < keys))
    runs = mask.positions(0, 1, queries)
    last = max(run.start + run.count for run in runs)
    return min(run.start for run in runs) >= 0 and (mask.window == 0 or last - mask.window < keys)


def _in_chunks(mask: Mask, queries: int) -> bool:
    """Returns whether the runs of rows begin at multiples of half the number of a rank's rows. A shift by one position
    would put one row in front of the first key, on rank 0 alone, and rank 0 alone would not prove the mask. So masks
    with such shifts are proved on no rank.
    """
    chunk = queries // 2 if queries % 2 == 0 else queries
    return not any(edge % chunk for run in mask.positions(0, 1, queries) for edge in (run.first, run.start))


def _zigzag_ranks(steps: dict[int, int], keys: int) -> int | None:
    """Returns the ranks in whose zig-zag order keys with these steps stand; 0 if in order; None for any other."""
    if not steps:
        return 0
    half = min(steps)
    ranks = keys // (2 * half)
    mask = Mask("zigzag_keys")
    runs = [run for rank in range(ranks) for run in mask.key_positions(rank, ranks, 2 * half)]
    ends = [run.start + run.count for run in runs]
    jumps = [(half * place, runs[place].start - ends[place - 1]) for place in range(1, len(runs))]
    same = keys == 2 * half * ranks and steps == {at: jump for at, jump in jumps if jump}
    return ranks if same else None
