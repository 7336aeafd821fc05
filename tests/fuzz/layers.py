"""Layers of random programs as transformers have them: a residual, to which halves of layers add what they compute.

A half is a norm, a matmul, an activation, and a matmul whose sum over the ranks is added to the residual. The sum is on
all ranks, or, with the residual, divided among them along a dimension; then the norm is gathered.
"""

from __future__ import annotations

from random import Random

from tests.fuzz.maker import ACTIVATIONS, Maker, Value
from tests.fuzz.phrases import contribution, on_one_rank

MOST = 3
"""Halves of a program. The longest ones have fewer: compiling takes the longest."""
ENOUGH = 7
"""Collectives."""


def layers(maker: Maker, rng: Random) -> None:
    """Halves of layers behind what a program has left, and the norm behind the last one."""
    x, group = maker.start(), maker.group()
    size = maker.size(group)
    if x.width < 8 or not maker.fits(x.shape):
        return
    dims = [dim for dim, one in enumerate(x.shape[:-1]) if one.factor % size == 0]
    dim = rng.choice(dims) if dims and rng.random() < 0.35 else None
    shared = dim is None and (maker.parallel or rng.random() < 0.9)
    shape = x.shape if dim is None else maker.divided(x.shape, dim, group)
    total = maker.take(shape, shared=shared, name="r")
    for number in range(rng.randint(1, MOST)):
        if number:
            if maker.collectives >= ENOUGH:
                break
            x = _entering(maker, rng, maker.norm(total), group, dim)
        found = maker.summed_along(_half(maker, rng, x, total.width, size), group, dim)
        if dim is None:
            found = on_one_rank(maker, found, "behind the sum of a layer")
        if rng.random() < 0.25:
            # An expert that every rank has whole adds to it too.
            total = maker.two_terms(found, total)
        else:
            total = maker.assign(f"{total.name} + {found.name}", shape, found, same=found.same & total.same)
        if rng.random() < 0.4:
            maker.output(total.name)
    maker.current = maker.norm(total)


def _entering(maker: Maker, rng: Random, normed: Value, group: str, dim: int | None) -> Value:
    """What the first matmul of a half multiplies."""
    if dim is not None:
        return maker.gathered(normed, dim, group)
    if maker.trained and normed.same and rng.random() < 0.7:
        return maker.assign(f"copied({normed.name}, {group})", normed.shape, normed)
    return normed


def _half(maker: Maker, rng: Random, x: Value, width: int, size: int) -> Value:
    """What a rank adds to the sum."""
    if rng.random() < 0.3:
        return contribution(maker, x, width, size)
    inner = maker.matmul(x, maker.columns(x))
    text = rng.choice(ACTIVATIONS).format(inner.name)
    if rng.random() < 0.5:
        text += f" * {maker.matmul(x, inner.width).name}"
    inner = maker.assign(text, inner.shape)
    return on_one_rank(maker, maker.matmul(inner, width, spread=size), "in front of the sum of a layer")
