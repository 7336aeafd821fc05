"""Integers that are affine in indices, and jump: whatever is read of a program is what it computes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from ditron_inductor.passes.attention.affine import Affine, NotAffine, Threshold, affine
from ditron_inductor.passes.attention.mask_values import Selection, Truth, Value
from ditron_inductor.passes.attention.masks import Masks, UnknownMask
from tests.cases import rare

Change = Callable[[torch.Tensor], torch.Tensor]


def as_tensor(term: Affine, shape: tuple[int, ...]) -> torch.Tensor:
    found = torch.full(shape, term.const)
    for dim, coef in enumerate(term.coefs):
        index = torch.arange(shape[dim]).view([-1 if place == dim else 1 for place in range(len(shape))])
        found = found + coef * index
        for step in term.steps:
            found = found + torch.where(index >= step.at, step.jump, 0) * (step.dim == dim)
    return found


def holds(truth: Truth, shape: tuple[int, ...]) -> torch.Tensor:
    terms = [as_tensor(term, shape) >= 0 for term in truth.terms]
    both = torch.logical_and if truth.every else torch.logical_or
    found = torch.full(shape, truth.every)
    for term in terms:
        found = both(found, term)
    return found


def of_value(value: Value, shape: tuple[int, ...]) -> torch.Tensor:
    if isinstance(value, Affine):
        return as_tensor(value, shape)
    if isinstance(value, Truth):
        return holds(value, shape)
    assert isinstance(value, Selection)
    return torch.where(holds(value.truth, shape), value.yes, value.no)


def changes(draw: random.Random) -> list[Change]:
    """What programs do with positions, on tensors of 12 elements or 3 x 4."""
    number = draw.randint(-5, 5)
    return [
        lambda x: x + number,
        lambda x: x * number,
        lambda x: x - x.flip(0),
        lambda x: x.flip(-1),
        lambda x: x.flatten()[torch.arange(12).flip(0)].view(x.shape),
        lambda x: x.view((12,) if x.ndim == 2 else (3, 4)),
        lambda x: x.t().reshape(-1) if x.ndim == 2 else x,
        lambda x: torch.cat((x[2:], x[:2] + number)),
        lambda x: torch.stack(x.flatten().chunk(3)[::-1]),
        lambda x: x // 4,
        lambda x: x % 5,
        lambda x: torch.where(x >= number, x, number - x),
        lambda x: torch.where(torch.arange(x.shape[-1]) < 2, x, x + 7),
        lambda x: torch.where(torch.arange(x.shape[-1]) % 3 < 2, number, 2) + x,
        lambda x: (x >= number).long() if number > 3 else x,
    ]


@pytest.mark.parametrize("seed", [*range(4), *rare(*range(4, 8))])
def test_what_is_read_is_what_is_computed(seed: int) -> None:
    draw = random.Random(seed)
    known = 0
    for _ in range(40):
        steps = [draw.choice(changes(draw)) for _ in range(draw.randint(1, 5))]

        def form(steps: Any = tuple(steps)) -> torch.Tensor:
            found = torch.arange(12)
            for step in steps:
                found = step(found)
            return found

        graph = make_fx(lambda: form(), decomposition_table=select_decomp_table(), tracing_mode="fake")().graph
        (node,) = graph.find_nodes(op="output")[0].args
        try:
            value = Masks().value(node)
        except UnknownMask:
            continue
        known += 1
        wanted = form()
        assert torch.equal(of_value(value, tuple(wanted.shape)).to(wanted.dtype), wanted), graph
        if isinstance(value, Affine):
            assert value.bounds(wanted.shape) == (wanted.min(), wanted.max())
    assert known > 10


def test_steps_are_in_order() -> None:
    steps = [Threshold(0, 8, 3), Threshold(0, 0, 2), Threshold(0, 4, 1), Threshold(0, 8, -3), Threshold(0, 4, 1)]
    assert affine(5, (1,), steps) == Affine(7, (1,), (Threshold(0, 4, 2),))


def test_a_jump_within_rows_is_none_of_both_indices() -> None:
    """[0 1 2 9 | 10 11 12 13] as two rows."""
    jumping = affine(0, (1,), [Threshold(0, 3, 6)])
    with pytest.raises(NotAffine):
        jumping.at([Affine(0, (4, 1))], (2, 4))
    at_rows = affine(0, (1,), [Threshold(0, 4, 6)])
    assert as_tensor(at_rows.at([Affine(0, (4, 1))], (2, 4)), (2, 4)).tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]
