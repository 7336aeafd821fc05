"""Which keys a mask shows, as `Mask` has it: proved from what `masks` knows of the tensor.

A mask is understood if it shows row i the keys whose positions are at most that of the row, and maybe those above a
second one, and if a row's position goes up by one from row to row but for some jumps. Keys stand in order, or in the
zig-zag order of a number of ranks. Where the rows stand is this rank's alone: where the program's queries are at
`rank * S + arange(S)`, or in two chunks, every rank's graph has other numbers, and on some rank two chunks are one. So
the rows decide nothing but what this rank computes, and a bound on rows alone, or on keys by a number that may come
from the rows, is not understood even where it hides nothing here. What is everybody's is the order of the keys, and the
length of a window, which is as long for every row.
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
    """What rows see. ranks: in the zig-zag order of so many the keys stand; 0 for any number, in order."""

    mask: Mask
    ranks: int = 0


def read_mask(node: fx.Node, queries: Any, keys: Any, *, hides: bool = False, lowest: float | None = None) -> Shown:
    """What a mask, or a bias that is added to the scores, of so many queries and keys shows. Raises Unknown.

    lowest: what a mask puts in the place of the others' scores; -inf without one. hides: it holds for those.
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
    """What is shown where a truth holds that has queries and keys as its last two dimensions, of this shape; elsewhere
    `lowest` is added to the scores. Raises Unknown with the node.
    """
    queries, keys = shape[-2:]
    if truth == TRUE:
        return Shown(Mask("full"))
    # With a dynamic length `rank * S` is a number on rank 0 alone: there it would be known, on other ranks not.
    if not isinstance(queries, int) or not isinstance(keys, int):
        raise UnknownMask(node)
    # Of one row nothing tells a bound that moves with the rows from one that does not.
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
            # Nor one that holds here: of the place of a rank's rows alone it may not hold on another.
            raise UnknownMask(node)
    # All by the same positions.
    places = {one.steps for one in uppers} | {one.scaled(-1).steps for one in lowers}
    if not uppers or len(places) != 1:
        raise UnknownMask(node)
    offset = min(one.const for one in uppers)
    window = min(offset + min(one.const for one in lowers) + 1, LONGEST_WINDOW) if lowers else 0
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
    """Whether every row of such a mask sees one of the keys of all ranks. This rank's alone."""
    if mask.kind == GIVEN:
        return False
    if not mask.jumps:
        return mask.offset >= 0 and (mask.window == 0 or proofs.known(mask.offset + queries - mask.window < keys))
    runs = mask.positions(0, 1, queries)
    last = max(run.start + run.count for run in runs)
    return min(run.start for run in runs) >= 0 and (mask.window == 0 or last - mask.window < keys)


def _in_chunks(mask: Mask, queries: int) -> bool:
    """Whether rows stand where they do by halves of a rank's. Then they stand in front of the first key on no rank, if
    they are as many keys farther on each; one position less, and on rank 0 alone one of them does.
    """
    chunk = queries // 2 if queries % 2 == 0 else queries
    return not any(edge % chunk for run in mask.positions(0, 1, queries) for edge in (run.first, run.start))


def _zigzag_ranks(steps: dict[int, int], keys: int) -> int | None:
    """Of how many ranks keys with these steps stand in zig-zag order; 0 if they stand in order; None for neither."""
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
