"""Slices and splits as pieces of a tensor: where each begins and how long it is, beyond the end too; and sole users."""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

import pytest
import torch
from torch import fx

from ditron_inductor.passes.graph import proofs
from tests.passes.graphs import traced

aten = torch.ops.aten
X = torch.empty(4, 8)


def piece_of(fn: Callable[..., Any]) -> proofs.SlicedPart | None:
    """What the last node of `fn` is of its argument."""
    graph = traced(fn, X).graph
    (output,) = graph.find_nodes(op="output")
    node = output.args[0]
    assert isinstance(node, fx.Node) and node.target in (aten.slice.Tensor, getitem)
    return proofs.piece(node)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        pytest.param(lambda x: aten.slice(x, 1, 2, 5), (1, 2, 3), id="inside"),
        pytest.param(lambda x: aten.slice(x, -1, 2), (1, 2, 6), id="to_the_end"),
        pytest.param(lambda x: aten.slice(x, 1, 6, 20), (1, 6, 2), id="the_end_is_clamped"),
        pytest.param(lambda x: aten.slice(x, 1, 8, 20), (1, 8, 0), id="nothing_at_the_end"),
        pytest.param(lambda x: aten.slice(x, 0, 1, -1), (0, 1, 2), id="a_negative_end"),
        pytest.param(lambda x: x.split(3, 1)[2], (1, 6, 2), id="split"),
        pytest.param(lambda x: x.split([1, 2, 5], 1)[2], (1, 3, 5), id="split_with_sizes"),
    ],
)
def test_a_piece(fn: Callable[..., Any], expected: tuple[int, int, int]) -> None:
    piece = piece_of(fn)
    assert piece is not None and (piece.dim, piece.start, piece.length) == expected


@pytest.mark.parametrize(
    "fn",
    [
        # Its start is clamped to 8: it does not begin where it says.
        pytest.param(lambda x: aten.slice(x, 1, 10, 20), id="a_start_beyond_the_end"),
        pytest.param(lambda x: aten.slice(x, 1, -3), id="a_negative_start"),
        pytest.param(lambda x: aten.slice(x, 1, 0, 8, 2), id="a_step"),
    ],
)
def test_no_piece(fn: Callable[..., Any]) -> None:
    assert piece_of(fn) is None


@pytest.mark.parametrize(
    ("fn", "uses"),
    [
        pytest.param(lambda x: x.sin() + 1.0, 1, id="once"),
        pytest.param(lambda x: (y := x.sin()) * y, 2, id="twice"),
        pytest.param(lambda x: torch.cat((y := x.sin(), y)), 2, id="twice_in_a_list"),
    ],
)
def test_a_sole_user_uses_a_node_once(fn: Callable[..., Any], uses: int) -> None:
    (sine,) = traced(fn, X).graph.find_nodes(op="call_function", target=aten.sin.default)
    (user,) = sine.users
    assert proofs.sole_user(sine) is (user if uses == 1 else None)
