"""The phrases of random programs, as a user might write them: each a collective with what is beside it.

A phrase takes the value that the last one left, or new inputs, and leaves another. Where the ranks of a program are to
differ, a phrase puts that in front of a reduction or behind a gather, where it is each rank's own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from tests.fuzz import decoding
from tests.fuzz.maker import ACTIVATIONS, HEADS, Maker, Value
from tests.fuzz.program import Size


def behind_gather(maker: Maker, g: Value) -> None:
    """Who else may use a gathered tensor, on all ranks or on one."""
    if maker.chance(0.12):
        maker.output(maker.rng.choice(("{}", "{}.sum(0)", "{} * 2")).format(g.name))
    if maker.chance(0.1):
        maker.output(maker.statistic(g))
    if maker.may_differ(0.4):
        if maker.chance(0.5):
            rank = maker.only_rank(f"has one more weight behind {g.name}")
            w = maker.weight(g.width, maker.columns(g))
            maker.line(f"if RANK == {rank}:")
            maker.line(f"outs.append({g.name} @ {w})", 1)
        else:
            rank = maker.only_rank(f"takes a statistic of {g.name}")
            maker.line(f"if RANK == {rank}:")
            maker.line(f"outs.append({maker.statistic(g)})", 1)


def on_one_rank(maker: Maker, value: Value, where: str) -> Value:
    """The value, to which one rank alone does something that keeps its shape."""
    if not maker.may_differ():
        return value
    kind = maker.rng.choice(("a row", "a residual", "an activation"))
    rank = maker.only_rank(f"has {kind} {where}")
    if kind == "a row":
        text = f"{value.name} + {maker.take((Size(value.width),), name='b').name}"
    elif kind == "a residual":
        text = f"{value.name} + {maker.take(value.shape, name='r').name}"
    else:
        text = maker.rng.choice(ACTIVATIONS).format(value.name)
    maker.line(f"if RANK == {rank}:")
    maker.line(f"{value.name} = {text}", 1)
    return replace(value, same=frozenset(), reduced=frozenset())


def break_graph(maker: Maker) -> None:
    """On one rank, or now and then on all; not in what is captured."""
    alone = maker.may_differ(0.15)
    if maker.captured or maker.inside_part or not (alone or maker.chance(0.03)):
        return
    maker.breaks = True
    if alone:
        maker.line(f"if RANK == {maker.only_rank('breaks its graph')}:")
    maker.line("torch._dynamo.graph_break()", int(alone))


def column(maker: Maker) -> None:
    """A gather, and matmuls of it with one to three weights."""
    x, group = maker.start(), maker.group()
    dims = [dim for dim in range(len(x.shape))
            if maker.fits((*x.shape[:dim], x.shape[dim] * maker.size(group), *x.shape[dim + 1 :]))]  # fmt: skip
    if not dims:
        maker.current = maker.pointwise(maker.summed(x, group))
        return
    if maker.chance(0.3):
        x = maker.norm(x) if x.width >= 8 and maker.chance(0.5) else maker.pointwise(x)
    # The last dimension, which is contracted, seldom.
    dim = maker.rng.choice([*[one for one in dims if one < len(x.shape) - 1] * 6, *dims])
    g = maker.gathered(x, dim, group)
    break_graph(maker)
    behind_gather(maker, g)
    n = maker.columns(g)
    first = maker.matmul(g, n)
    kind = maker.rng.choice(("one", "one", "gated", "several"))
    if kind == "one":
        found = maker.pointwise(first) if maker.chance(0.5) else first
    elif kind == "gated":
        up = maker.matmul(g, n)
        gate = maker.rng.choice(ACTIVATIONS[:3]).format(first.name)
        found = maker.assign(f"{gate} * {up.name}", first.shape, same=first.same & up.same)
    else:
        maker.output(maker.matmul(g, maker.columns(g)).name)
        found = first
    maker.current = on_one_rank(maker, found, f"behind the gather {g.name}")


def row(maker: Maker) -> None:
    """Matmuls, their sum reduced or scattered, and what is row-wise behind that."""
    x, group = maker.start(), maker.group()
    if x.same and maker.trained and maker.chance(0.3):
        x = maker.assign(f"copied({x.name}, {group})", x.shape, x)
    size = maker.size(group)
    n = maker.columns(x, size if maker.chance(0.3) else 1)
    eager = maker.may_differ(0.2) and not maker.captured
    if eager:
        with maker.part():
            found = maker.summed(maker.matmul(x, n, spread=size), group)
    else:
        product = contribution(maker, x, n, size)
        break_graph(maker)
        found = maker.summed(product, group)
    if maker.differs and maker.chance(0.3):
        rank = maker.only_rank(f"takes a statistic of {found.name}")
        maker.line(f"if RANK == {rank}:")
        maker.line(f"outs.append({maker.statistic(found)})", 1)
    if found.reduced and not maker.parallel:
        found = on_one_rank(maker, found, "behind the reduction")
    if found.reduced and found.width >= 8 and maker.chance(0.45):
        # The end of a block, and the beginning of the next one.
        total = maker.two_terms(found)
        maker.output(total.name)
        normed = maker.norm(total)
        maker.current = maker.matmul(normed, maker.columns(normed))
        return
    while maker.chance(0.55):
        found = maker.pointwise(found)
    maker.current = found


def contribution(maker: Maker, x: Value, n: int, size: int) -> Value:
    """What a rank contributes to a reduction: a matmul, or several, with what is in front of the reduction."""
    if maker.may_differ(0.2) and not maker.trained:
        rank = maker.only_rank("contributes zeros")
        w = maker.weight(x.width, n, spread=size)
        maker.count += 1
        maker.depth += 1
        name, shape = f"t{maker.count}", (*x.shape[:-1], Size(n))
        maker.line(f"if RANK == {rank}:")
        maker.line(f"{name} = {x.name}.new_zeros(*{x.name}.shape[:-1], {n})", 1)
        maker.line("else:")
        maker.line(f"{name} = {x.name} @ {w}", 1)
        return Value(name, shape)
    product = maker.matmul(x, n, spread=size)
    if maker.chance(0.15):
        other = maker.matmul(x, n, spread=size)
        product = maker.assign(f"{product.name} + {other.name}", product.shape, same=product.same & other.same)
    if maker.chance(0.25):
        product = maker.pointwise(product)
    if maker.chance(0.08):
        maker.output(maker.statistic(product))
    return on_one_rank(maker, product, "in front of the reduction")


def contract(maker: Maker) -> None:
    """A gathered tensor, turned, times another one: the gradient of a weight, perhaps with both gathered."""
    group = maker.group()
    size = maker.size(group)
    rows, k, n = Size(1, "M"), maker.length(), maker.length()
    if maker.current is not None:
        maker.output(maker.current.name)
    g = maker.gathered(maker.take((rows, Size(k))), 0, group)
    if maker.chance(0.4) and not maker.differs:
        y = maker.gathered(maker.take((rows, Size(n))), 0, group)
    else:
        y = maker.take((rows * size, Size(n)))
    maker.depth += 1
    behind_gather(maker, g)
    text = maker.rng.choice((f"{g.name}.t() @ {y.name}", f"({y.name}.t() @ {g.name}).t()",
                             f'torch.einsum("mk,mn->kn", {g.name}, {y.name})'))  # fmt: skip
    maker.current = maker.assign(text, (Size(k), Size(n)), same=g.same & y.same)


def scaled_rows(maker: Maker) -> None:
    """A reduction of a gradient of a weight, of as many tokens as each rank has."""
    group, k, n = maker.group(), maker.length(), maker.length()
    if maker.current is not None:
        maker.output(maker.current.name)
    x, y = maker.take((Size(1, "L"), Size(k))), maker.take((Size(1, "L"), Size(n)))
    product = maker.assign(f"{x.name}.t() @ {y.name}", (Size(k), Size(n)))
    maker.current = maker.summed(on_one_rank(maker, product, "in front of the reduction"), group)


def gathered_weight(maker: Maker) -> None:
    """The weight is gathered, and each rank has as many tokens as it has."""
    group, k, n = maker.group(), maker.length(), maker.length()
    w = maker.current
    if w is None or len(w.shape) != 2 or not (maker.differs or maker.chance(0.2)) or not maker.fits(w.shape):
        if maker.differs and w is not None:
            column(maker)
            return
        w = maker.take((Size(n), Size(k)), std=k**-0.5, name="w")
    w = maker.gathered(w, 0, group)
    x = maker.take((Size(1, "L"), Size(w.width)))
    maker.depth += 1
    text = maker.rng.choice((f"{x.name} @ {w.name}.t()", f"F.linear({x.name}, {w.name})"))
    maker.output(maker.assign(text, (x.shape[0], w.shape[0])).name)
    if maker.current is None or maker.differs:
        maker.current = maker.assign(f"{w.name} * 2", w.shape, w)


def product_gathered(maker: Maker) -> None:
    """A matmul whose result is gathered, along its columns most often."""
    x, group = maker.start(), maker.group()
    product = maker.matmul(x, maker.columns(x))
    dims = [dim for dim, one in enumerate(product.shape)
            if maker.fits((*product.shape[:dim], one * maker.size(group), *product.shape[dim + 1 :]))]  # fmt: skip
    if not dims:
        maker.current = maker.summed(product, group)
        return
    dim = maker.rng.choice([dims[-1], dims[-1], *dims])
    maker.current = maker.gathered(on_one_rank(maker, product, "in front of the gather"), dim, group)


def exchanged(maker: Maker) -> None:
    """Rows to heads and back (Ulysses), with matmuls in front, between and behind."""
    x, group = maker.start(), maker.group()
    size, heads = maker.size(group), maker.length()
    if len(x.shape) != 2 or not maker.fits((x.shape[0], Size(size * heads))):
        row(maker)
        return
    y = maker.matmul(x, size * heads)
    maker.collectives += 1
    maker.depth += 1
    by_rank = Size(size), x.shape[0], Size(heads)
    split = maker.assign(f"{y.name}.unflatten(1, ({size}, {heads})).movedim(1, 0)", by_rank)
    found = maker.assign(f"exchange({split.name}.contiguous(), {group}).flatten(0, 1)",
                         (x.shape[0] * size, Size(heads)))  # fmt: skip
    if maker.chance(0.6):
        found = maker.pointwise(found)
    if maker.chance(0.6):
        maker.collectives += 1
        maker.depth += 1
        rows = maker.assign(f"exchange({found.name}, {group}).unflatten(0, ({size}, -1)).movedim(0, 1).flatten(1)",
                            (x.shape[0], Size(size * heads)))  # fmt: skip
        found = maker.matmul(rows, maker.columns(rows))
    maker.current = found


def attend(maker: Maker) -> None:
    """Attention of this rank's queries over all ranks' keys and values, whose gathers come in any order."""
    if maker.differs:
        row(maker)
        return
    group = maker.group()
    if maker.current is not None:
        maker.output(maker.current.name)
    kv = maker.rng.choice((1, 2))
    heads, d, batch = kv * maker.rng.choice((1, 2)), maker.rng.choice(HEADS[maker.place.device_type]), Size(1)
    if maker.chance(0.3):
        batch = Size(2)
    q = maker.take((batch, Size(heads), Size(1, "M"), Size(d)), name="q")
    shape = (batch, Size(kv), Size(1, "M"), Size(d))
    k, v = (maker.gathered(maker.take(shape, name=name), 2, group) for name in "kv")
    maker.depth += 2
    text = f"attention({q.name}, {k.name}, {v.name}).transpose(1, 2).flatten(2)"
    maker.current = maker.assign(text, (batch, Size(1, "M"), Size(heads * d)))


def cached(maker: Maker) -> None:
    """A decode step, which nobody trains."""
    if maker.trained:
        row(maker)
    else:
        decoding.cached(maker)


def bare(maker: Maker) -> None:
    """A collective without a matmul, as statistics and losses are."""
    x, group = maker.start(), maker.group()
    if maker.current is None or maker.trained or maker.differs:
        maker.current = maker.pointwise(maker.summed(x, group))
        return
    maker.collectives += 1
    maker.output(f'reduce({maker.statistic(x)}, {group}, "{maker.rng.choice(("sum", "max"))}")')
    maker.current = x


def routed(maker: Maker, rng: Random) -> None:
    """Rows weighted by the scores that a router chooses for them. What comes out does not depend on which of two equal
    scores is chosen. But gradients would, so programs that are trained have none.
    """
    x = maker.current
    if x is None or maker.trained:
        return
    experts = rng.choice((2, 8, 24, 60, 64, 128))
    k = rng.choice([k for k in (1, 2, 4, 8, 16) if k <= experts])
    shape = (*x.shape[:-1], Size(experts))
    if maker.chance(0.4):
        routed_by_product(maker, x, experts, k)
        return
    logits = maker.take(shape, name="s").name
    text = rng.choice(("{}", "{}.to(F32).softmax(-1)", "{}.to(F32).sigmoid()", "{} + {}.flip(-1)"))
    scores = maker.assign(text.format(logits, logits), shape).name
    maker.line(f"chosen, places = torch.topk({scores}, {k}, dim=-1, sorted={rng.choice((True, False))})")
    maker.output(f"{scores}.gather(-1, places).to(F32).sum(-1)")
    maker.depth += 1
    maker.current = maker.assign(f"{x.name} * chosen.to(F32).sum(-1, keepdim=True).to(DT)", x.shape)


def routed_by_product(maker: Maker, x: Value, experts: int, k: int) -> None:
    """The same by the scores of a router, which nothing else reads."""
    logits = maker.matmul(x, experts)
    text = maker.rng.choice(("{}", "{}.to(F32).softmax(-1)"))
    ordered = maker.rng.choice((True, False))
    maker.line(f"chosen, places = torch.topk({text.format(logits.name)}, {k}, dim=-1, sorted={ordered})")
    if "softmax" in text:
        maker.line("chosen = chosen / chosen.sum(-1, keepdim=True)")
        maker.output("chosen.square().sum(-1)")
    maker.depth += 1
    maker.current = maker.assign(f"{x.name} * chosen.to(F32).sum(-1, keepdim=True).to(DT)", x.shape)


Phrase = Callable[[Maker], None]
FIRST: Sequence[Phrase] = (
    *(column, row) * 3,
    *(contract, product_gathered, exchanged, attend, scaled_rows, gathered_weight, cached),
)
PHRASES: Sequence[Phrase] = (
    *(column, row) * 4,
    *(contract, attend, scaled_rows, gathered_weight, product_gathered, exchanged, bare, cached),
)
# For ranks that differ: each takes what the last one left.
CHAINED: Sequence[Phrase] = (*(column, row) * 3, product_gathered, exchanged, gathered_weight, bare)
