"""The phrase of a layer of experts: tokens choose some of them, and what these return is added up in front of a
reduction.

Which experts a token has does not depend on rounding, or the reference would have others: whole numbers that differ
decide, and they follow from the place of the token and from the sign of an input, which may differ between the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from unittest import mock

from tests.fuzz.maker import ACTIVATIONS, Maker, Value
from tests.fuzz.phrases import on_one_rank
from tests.fuzz.program import Shape, Size

# Torch's grouped matmul wants rows of 16 bytes.
WIDTHS = {"cuda": (16, 64, 128, 200, 256, 384, 512), "cpu": (8, 16, 24, 32)}
MANY_TOKENS = {"cuda": (512, 513, 600, 1000, 1024, 2048), "cpu": (512, 513, 520)}
FEW_TOKENS = {"cuda": (1, 2, 3, 8, 33, 64), "cpu": (1, 2, 3, 8)}
EXPERTS = {"cuda": (2, 4, 8, 32, 64, 128), "cpu": (2, 4, 8, 12)}
PRIME = 257
"""More than there are experts."""


@dataclass(frozen=True)
class Mixture:
    """`held` experts of a rank, of which the ranks of `group` have their own each if `apart`; K of all for each token
    of x, [tokens, D] by name and shape.

    `ids` [tokens, K] of the program are the experts; weights: the name of [tokens, K], of what each counts with. With
    experts apart an id is `held`, and its weight 0, where the expert is on another rank.
    """

    x: str
    tokens: Size
    D: int
    F: int
    held: int
    K: int
    apart: bool
    weights: str


def mixture(maker: Maker, rng: Random) -> None:
    """A layer of experts, of the value that the last phrase left, or of a new input."""
    # The rest of the program stays what it was.
    with mock.patch.object(maker, "rng", rng):
        _mixture(maker)


def _mixture(maker: Maker) -> None:
    # Torch multiplies groups of rows in bfloat16 alone.
    grouped = maker.dtype == "bfloat16" and maker.chance(0.8)
    group = maker.group()
    shard, x = _tokens(maker, group, grouped)
    mix = _routed(maker, x, group, shard if maker.chance(0.5) else None)
    total = _grouped(maker, mix) if grouped else _copied(maker, mix)
    if maker.chance(0.3):
        shared = maker.matmul(x, mix.D, spread=maker.size(group))
        total = maker.assign(f"{total.name} + {shared.name}", total.shape)
    maker.depth += 6
    found = maker.summed(on_one_rank(maker, total, "in front of the sum of experts"), group)
    if maker.chance(0.5):
        found = maker.norm(found)
    while maker.chance(0.4):
        found = maker.pointwise(found)
    maker.current = found


def _tokens(maker: Maker, group: str, grouped: bool) -> tuple[Value | None, Value]:
    """Returns (what x is gathered from, or None; x [tokens, D]): what is there, if it fits, or as many new tokens as
    the fusions want.
    """
    device = maker.place.device_type
    x = maker.current
    if x is not None and (maker.differs or maker.chance(0.3)):
        if len(x.shape) == 2 and x.width in WIDTHS[device] and (grouped or not x.shape[0].symbol):
            return None, x
        if maker.differs:
            # What comes next depends on what was before.
            n = maker.rng.choice(WIDTHS[device][:3])
            x = x if len(x.shape) == 2 else maker.assign(f"{x.name}.flatten(0, -2)", (_num_rows(x), x.shape[-1]), x)
            if grouped or not x.shape[0].symbol:
                return None, maker.matmul(x, n)
    if x is not None:
        maker.output(x.name)
    wanted = maker.rng.choice((MANY_TOKENS if grouped and maker.chance(0.7) else FEW_TOKENS)[device])
    width = maker.rng.choice([n for n in WIDTHS[device] if maker.fits((Size(wanted), Size(n)))])
    size = maker.size(group)
    if wanted % size == 0 and maker.chance(0.3):
        shard = maker.take((Size(wanted // size), Size(width)))
        return shard, maker.gathered(shard, 0, group)
    return None, maker.take((Size(wanted), Size(width)), shared=maker.chance(0.7))


def _num_rows(x: Value) -> Size:
    """How many rows x has if its leading dimensions become one."""
    found = Size(1)
    for one in x.shape[:-1]:
        assert not (found.symbol and one.symbol)
        found = Size(found.factor * one.factor, found.symbol or one.symbol)
    return found


def _routed(maker: Maker, whole: Value, group: str, shard: Value | None) -> Mixture:
    """Who gets which tokens: evenly, or some experts nothing. It is decided for the whole of them, or for each rank's
    shard, and gathered.
    """
    rng, device, size = maker.rng, maker.place.device_type, maker.size(group)
    x = whole if shard is None else shard
    number, tokens = rng.choice(EXPERTS[device]), x.shape[0]
    apart = number % size == 0 and number >= 2 * size and maker.chance(0.3)
    K = rng.choice([k for k in (1, 2, 2, 3, 4, 8) if k <= number and maker.fits((whole.shape[0], Size(k * x.width)))])
    F = rng.choice([n for n in WIDTHS[device] if maker.fits((whole.shape[0], Size(K * n)))])
    used = rng.choice([n for n in (K, number // 2, number, number, number) if n >= K])
    shared = bool(x.same) and (maker.parallel or maker.chance(0.7))
    sign = maker.take((Size(1),), shared=shared, name="p").name
    maker.line(f"row = torch.arange({x.name}.shape[0], device={x.name}.device)[:, None] + ({sign} > 0).to(torch.long)")
    maker.line(f"expert = torch.arange({number}, device={x.name}.device)")
    by, also = rng.randrange(1, PRIME), rng.randrange(1, PRIME)
    # Numbers of a row that differ by 4 at least, those of the experts that are used the largest.
    maker.line(f"score = 4 * ((row * {by} + expert * {also}) % {PRIME}) + 2048 * (expert < {used})")
    shape: Shape = (tokens, Size(K))
    if maker.chance(0.5):
        logits = maker.matmul(x, number)
        text = rng.choice(("{}.to(F32).softmax(-1)", "{}.to(F32).sigmoid()", "{}.softmax(-1)"))
        scores = maker.assign(text.format(logits.name), (tokens, Size(number))).name
        maker.line(f"ids = torch.topk({scores}.detach().to(F32) + score, {K}, dim=-1)[1]")
        weights = maker.assign(f"{scores}.gather(1, ids)", shape).name
        # One weight alone would be 1, with a gradient of 0 and what is left of it by rounding.
        if K > 1 and maker.chance(0.5):
            maker.line(f"{weights} = {weights} / {weights}.sum(-1, keepdim=True)")
    else:
        maker.line(f"ids = torch.topk(score.to(F32), {K}, dim=-1)[1]")
        given = maker.take(shape, shared=shared, name="s").name
        weights = maker.assign(rng.choice(("{}", "{}.to(F32)", "{}.to(F32).softmax(-1)")).format(given), shape).name
    if shard is not None:
        maker.collectives += 2
        maker.line(f"ids = gather(ids, 0, {group})")
        maker.line(f"{weights} = gather({weights}, 0, {group})")
    held = number // size if apart else number
    if apart:
        maker.line(f"absent = ids // {held} != ME_{group}")
        maker.line(f"ids = torch.where(absent, {held}, ids % {held})")
        maker.line(f"{weights} = {weights}.masked_fill(absent, 0.0)")
    if maker.chance(0.3):
        maker.line(f"{weights} = {weights}.to(DT)")
    return Mixture(whole.name, whole.shape[0], x.width, F, held, K, apart, weights)


@dataclass(frozen=True)
class Multiply:
    """How `slots` rows are multiplied by the weights of their experts: `text` has a place for the rows and one for the
    weight [held, k, n]. of_row: the name of the expert of each row. biased: each expert has a bias. leaves: whether
    anything may be in the products of rows whose expert is elsewhere, which `gone` marks.
    """

    text: str
    slots: Size
    of_row: str
    biased: bool
    leaves: bool = False

    def __call__(self, maker: Maker, mix: Mixture, rows: str, k: int, n: int, *, masked: bool = False) -> Value:
        """A product with a new weight, with what may be anything set to 0 if `masked`."""
        turned = maker.chance(0.6)
        shape = (n, k) if turned else (k, n)
        w = maker.take((Size(mix.held), *map(Size, shape)), std=k**-0.5, name="w").name
        found = maker.assign(self.text.format(rows=rows, w=f"{w}.mT" if turned else w), (self.slots, Size(n)))
        if self.biased:
            b = maker.take((Size(mix.held), Size(n)), name="b").name
            found = maker.assign(f"{found.name} + {b}[{self.of_row}]", found.shape)
        if self.leaves and (masked or maker.trained or maker.chance(0.3)):
            found = _masked(maker, found)
        return found


def _masked(maker: Maker, value: Value) -> Value:
    """The value with 0 in the rows whose expert is on another rank."""
    return maker.assign(f"{value.name}.masked_fill(gone, 0.0)", value.shape)


def _inside(maker: Maker, mix: Mixture, multiply: Multiply, rows: str) -> Value:
    """Gate, up and the activation between them."""
    way = maker.rng.choice(("two", "halves", "alternate", "one"))
    activation = maker.rng.choice(ACTIVATIONS[:3])
    shape = multiply.slots, Size(mix.F)
    if way == "two":
        gate, up = (multiply(maker, mix, rows, mix.D, mix.F).name for _ in range(2))
        return maker.assign(f"{activation.format(gate)} * {up}", shape)
    if way == "one":
        return maker.assign(activation.format(multiply(maker, mix, rows, mix.D, mix.F).name), shape)
    both = multiply(maker, mix, rows, mix.D, 2 * mix.F).name
    parts = f"{both}.chunk(2, dim=-1)" if way == "halves" else f"{both}[..., ::2], {both}[..., 1::2]"
    maker.line(f"gate, up = {parts}")
    return maker.assign(f"{activation.format('gate')} * up", shape)


def _grouped(maker: Maker, mix: Mixture) -> Value:
    """Slots in the order of their experts, and the sum by token: [tokens, D]."""
    S, D = mix.tokens * mix.K, Size(mix.D)
    maker.line("flat = ids.reshape(-1)")
    maker.line(maker.rng.choice(("order = flat.argsort()", "order = flat.argsort(stable=True)",
                                 "order = torch.sort(flat, stable=True)[1]", "order = flat.sort()[1]")))  # fmt: skip
    maker.line("experts = flat[order]")
    maker.line(f"ends = {_ends(maker, mix)}")
    maker.line(f"tokens = order // {mix.K}")
    rows = maker.assign(f"{mix.x}[tokens]", (S, D))
    scale = maker.assign(f"{mix.weights}.reshape(-1)[order].unsqueeze(-1)", (S, Size(1))).name
    if mix.apart:
        maker.line(f"gone = (experts == {mix.held}).unsqueeze(-1)")
        maker.line(f"experts = experts.clamp(max={mix.held - 1})")
    early = not mix.apart and maker.chance(0.15)
    if early:
        rows = maker.assign(f"({rows.name} * {scale}).to(DT)", (S, D))
    elif mix.apart and (maker.trained or maker.chance(0.3)):
        # A grouped matmul makes no gradients of these rows.
        rows = _masked(maker, rows)
    multiply = Multiply("grouped({rows}, {w}, ends)", S, "experts", maker.chance(0.25), leaves=mix.apart)
    inside = _inside(maker, mix, multiply, rows.name)
    if mix.apart and maker.chance(0.5):
        inside = _masked(maker, inside)
    out = multiply(maker, mix, inside.name, mix.F, mix.D, masked=True)
    if not early and maker.chance(0.3):
        written = f"torch.zeros_like({out.name}).index_copy(0, order, {out.name})"
        maker.line(f"slots = {written if maker.chance(0.5) else f'{out.name}[order.argsort()]'}")
        return _added_by_slot(maker, mix, "slots")
    return _added_by_token(maker, mix, out if early else maker.assign(f"{out.name} * {scale}", out.shape))


def _ends(maker: Maker, mix: Mixture) -> str:
    """Where the rows of each expert end, as a text."""
    numbers = f"torch.arange({mix.held}, device=flat.device)"
    counts = [f"torch.histc(experts.to(F32), {mix.held}, 0, {mix.held - 1})"] * 3 * (mix.held > 1)
    counts += [f"(flat[:, None] == {numbers}).sum(0)"]
    counts += [] if mix.apart else [f"F.one_hot(flat, {mix.held}).sum(0)"]
    ends = [f"{text}.cumsum(0, dtype=torch.int32)" for text in counts]
    return maker.rng.choice([*ends, f"torch.searchsorted(experts, {numbers}, right=True).to(torch.int32)"])


def _added_by_token(maker: Maker, mix: Mixture, out: Value) -> Value:
    """The sum of slots in the order of their experts, [S, D], by token: [tokens, D]."""
    zeros = f"{out.name}.new_zeros({mix.x}.shape[0], {mix.D})"
    inverse = maker.rng.choice(("order.argsort()", "torch.empty_like(order).index_put((order,), "
                                "torch.arange(order.shape[0], device=order.device))"))  # fmt: skip
    by_inverse = f"{out.name}[{inverse}].view(-1, {mix.K}, {mix.D}).sum(1)"
    text = maker.rng.choice((
        by_inverse,
        by_inverse,
        f"{zeros}.index_add(0, tokens, {out.name})",
        f"{zeros}.scatter_add(0, tokens.unsqueeze(-1).expand(-1, {mix.D}), {out.name})",
        f"{zeros}.index_put((tokens,), {out.name}, accumulate=True)",
    ))  # fmt: skip
    return maker.assign(f"{text}.to(DT)", (mix.tokens, Size(mix.D)))


def _added_by_slot(maker: Maker, mix: Mixture, slots: str) -> Value:
    """The weighted sum of slots [S, D] that lie token by token: [tokens, D]."""
    rows = f"{slots}.view(-1, {mix.K}, {mix.D})"
    way = maker.rng.choice(("sum", "sum", "einsum", "matmul", "loop"))
    if way == "loop":
        maker.line(f"rows = {rows}")
        # Not as a loop, in which torch compiles nothing of the program if its graph breaks there.
        text = " + ".join(f"{mix.weights}[:, {k} : {k + 1}] * rows[:, {k}]" for k in range(mix.K))
    else:
        text = {
            "sum": f"({rows} * {mix.weights}.unsqueeze(-1)).sum(1)",
            "einsum": f'torch.einsum("tk,tkn->tn", {mix.weights}.to(DT), {rows})',
            "matmul": f"({mix.weights}.to(DT).unsqueeze(1) @ {rows}).squeeze(1)",
        }[way]
    return maker.assign(f"({text}).to(DT)", (mix.tokens, Size(mix.D)))


def _copied(maker: Maker, mix: Mixture) -> Value:
    """A copy of its expert's weights for each slot, as in a decode step: [tokens, D]."""
    S = mix.tokens * mix.K
    maker.line("flat = ids.reshape(-1)")
    if mix.apart:
        maker.line(f"flat = flat.clamp(max={mix.held - 1})")
    text = maker.rng.choice(("torch.bmm({rows}.unsqueeze(1), {w}[flat]).squeeze(1)",
                             "torch.bmm({w}[flat].mT, {rows}.unsqueeze(-1)).squeeze(-1)",
                             'torch.einsum("sk,skn->sn", {rows}, {w}[flat])'))  # fmt: skip
    multiply = Multiply(text, S, "flat", maker.chance(0.25))
    rows = maker.assign(f"{mix.x}.repeat_interleave({mix.K}, 0)", (S, Size(mix.D))).name
    inside = _inside(maker, mix, multiply, rows).name
    return _added_by_slot(maker, mix, multiply(maker, mix, inside, mix.F, mix.D).name)
