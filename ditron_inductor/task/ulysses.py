"""The projections around attention whose heads and sequence change places between ranks (Ulysses): two node kinds.

Outside of the attention every rank holds a part of the sequence and all heads, inside of it the whole sequence and a
part of the heads. An all-to-all changes one into the other, with the same number of rows and of columns for every rank:

    matmul_all_to_all    product [P, S, parts, W, C]  ->  out [P, W, S, parts, C]           columns scattered
    all_to_all_matmul    x [P, W, S, parts, C]  ->  received [P, S, parts, W, C], times w   rows scattered

The dimension W is that of the ranks: before, which rank an element goes to; after, which it came from. Each tensor has
its rows [P, S], or [P, W, S], in its dimensions but the last one, and [parts, W, C], or [parts, C], in the last. parts
is 1, or 3 where queries, keys and values lie side by side and each of them has its own heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def gathered_shape(shape: Sequence[Any], columns: Any, gather_dim: int, world_size: int) -> list[Any]:
    """Returns the shape of a `MatmulAllToAll`'s result, from that of a_i and the columns N. Sizes may be symbolic."""
    result = [*shape[:-1], columns // world_size]
    result[gather_dim] = result[gather_dim] * world_size
    return result


def received_shape(shape: Sequence[Any], scatter_dim: int, world_size: int) -> list[Any]:
    """Returns the shape of what an `AllToAllMatmul` multiplies, from the shape of x. Sizes may be symbolic."""
    result = [*shape[:-1], shape[-1] * world_size]
    result[scatter_dim] = result[scatter_dim] // world_size
    return result
