"""The phrase of a decode step: one token of each sequence is put into a cache, and attends to what is there."""

from __future__ import annotations

from dataclasses import dataclass

from tests.fuzz.maker import HEADS, SLOTS, Maker
from tests.fuzz.program import CACHE, Size


@dataclass(frozen=True)
class Step:
    """B sequences with kv key heads of D elements, and room for S tokens. position: an expression of one place, or, if
    own, of one for each sequence.
    """

    B: int
    kv: int
    D: int
    S: int
    position: str
    own: bool

    def here(self, tokens: str) -> str:
        """Returns the comparison of tokens with the position, behind which a mask is [B or 1, 1, 1, S]."""
        return f"({tokens} {{}} {self.position}{'[:, None]' * self.own})[{':, ' if self.own else 'None, '}None, None]"


def cached(maker: Maker) -> None:
    """A decode step behind a reduction."""
    rng, group = maker.rng, maker.group()
    if maker.current is not None:
        maker.output(maker.current.name)
    B, kv = rng.choice((1, 1, 2, 3, 16)), rng.choice((1, 2, 4))
    D = rng.choice((16, 16, *HEADS[maker.place.device_type]))
    heads, S = kv * rng.choice((1, 2, 4)), rng.choice(SLOTS[maker.place.device_type])
    x = maker.take((Size(B), Size(maker.length())))
    # A product with one row of a weight is no matmul for Inductor, and work between reductions may be divided.
    hidden = maker.matmul(x, max(maker.length(), 8), spread=maker.size(group))
    maker.collectives += 1
    hidden = maker.assign(f"reduce({hidden.name}, {group})", hidden.shape)
    maker.depth += 4
    q, k, v = (
        maker.assign(f"({hidden.name} @ {maker.weight(hidden.width, n * D)}).unflatten(-1, ({n}, {D}))[:, :, None]",
                     (Size(B), Size(n), Size(1), Size(D))).name
        for n in (heads, kv, kv)
    )  # fmt: skip
    own = maker.chance(0.4)
    zero = maker.take((Size(B if own else 1),), name="p").name
    place = rng.choice((0, 1, S // 2, S - 1))
    apart = f"(torch.arange({B}, device={q}.device) * 7 + {place}) % {S}"
    text = f"({zero} * 0).to(torch.long) + {apart if own else place}"
    step = Step(B, kv, D, S, maker.assign(text, (Size(B if own else 1),)).name, own)
    if maker.chance(0.7):
        rows, columns = rng.choice((1, B)), rng.choice((D, D // 2))
        form = "turned" if columns == D else rng.choice(("turned", "turned_by_halves"))
        tables = ", ".join(maker.take((Size(rows), Size(1), Size(1), Size(columns)), name="c").name for _ in range(2))
        if columns < D and form == "turned":
            tables = ", ".join(f"torch.cat([{one}, {one}], -1)" for one in tables.split(", "))
        q, k = (maker.assign(f"{form}({one}, {tables})", (Size(1),)).name for one in (q, k))
    store = paged if maker.chance(0.35) else own_places if own else one_place
    keys, values = store(maker, step, k, v)
    seen = maker.take((Size(rng.choice((1, B))), Size(1), Size(1), Size(S)), name="m").name
    here = step.here(f"torch.arange({S}, device={q}.device)")
    # At least the new token is seen: what attention to none is depends on the op.
    seen = rng.choice((here.format("<="), f"({seen} > -0.5) | {here.format('==')}",
                       f"torch.ones(1, 1, 1, {S}, dtype=torch.bool, device={q}.device)"))  # fmt: skip
    if maker.chance(0.35):
        sinks = maker.take((Size(heads),), name="s").name
        text = f"attention_with_sinks({q}, {keys}, {values}, {seen}, {sinks})"
    else:
        repeats = maker.chance(0.5)
        keys, values = (f"repeated({one}, {heads // kv})" if repeats else one for one in (keys, values))
        text = f"attention({q}, {keys}, {values}, {seen})"
    maker.current = maker.assign(f"{text}.flatten(1)", (Size(B), Size(heads * D)))


def one_place(maker: Maker, step: Step, k: str, v: str) -> list[str]:
    """Writes the new tokens at one position of static caches."""
    B, kv, D, S = (Size(size) for size in (step.B, step.kv, step.D, step.S))
    first, behind = maker.chance(0.3), maker.chance(0.5)
    shape = (B, S, kv, D) if first else (B, kv, S, D)
    caches = [maker.take(shape, name=CACHE).name for _ in range(2)]
    if first and behind:
        for cache, new in zip(caches, (k, v), strict=True):
            maker.line(f"{cache}.index_copy_(1, {step.position}, {new}.transpose(1, 2))")
    if first:
        caches = [maker.assign(f"{one}.transpose(1, 2)", shape).name for one in caches]
    if not (first and behind):
        for cache, new in zip(caches, (k, v), strict=True):
            maker.line(f"{cache}.index_copy_(2, {step.position}, {new})")
    return caches


def own_places(maker: Maker, step: Step, k: str, v: str) -> list[str]:
    """Writes the new tokens at a position of each sequence in static caches."""
    B, kv, D, S = (Size(size) for size in (step.B, step.kv, step.D, step.S))
    first = maker.chance(0.5)
    shape = (B, S, kv, D) if first else (B, kv, S, D)
    caches = [maker.take(shape, name=CACHE).name for _ in range(2)]
    for cache, new in zip(caches, (k, v), strict=True):
        heads = "" if first else ":, "
        maker.line(f"{cache}[torch.arange({step.B}, device={k}.device), {heads}{step.position}] = {new}[:, :, 0]")
    return [maker.assign(f"{one}.transpose(1, 2)", shape).name for one in caches] if first else caches


def paged(maker: Maker, step: Step, k: str, v: str) -> list[str]:
    """Writes the new tokens into blocks of which each sequence has some, and gathers its blocks."""
    page = maker.rng.choice([size for size in (1, 2, 3, 16, 32, 100, step.S) if step.S % size == 0])
    columns = step.S // page
    count = step.B * columns + 1
    order = maker.rng.choice((f"torch.arange({count - 1}, device={k}.device)",
                              f"torch.arange({count - 1}, 0, -1, device={k}.device)"))  # fmt: skip
    table = maker.assign(f"({order}).view({step.B}, {columns})", (Size(step.B), Size(columns))).name
    place = maker.assign(f"{step.position}.expand({step.B})", (Size(step.B),)).name
    block = maker.assign(f"{table}.gather(1, {place}[:, None] // {page})[:, 0]", (Size(step.B),)).name
    first = maker.chance(0.5)
    sizes = (count, page, step.kv, step.D) if first else (count, step.kv, page, step.D)
    found = []
    for new in (k, v):
        cache = maker.take(tuple(map(Size, sizes)), name=CACHE).name
        index = f"{block}, {place} % {page}" if first else f"{block}, :, {place} % {page}"
        maker.line(f"{cache}[{index}] = {new}[:, :, 0]")
        moved = "flatten(1, 2).transpose(1, 2)" if first else "transpose(1, 2).flatten(2, 3)"
        found.append(maker.assign(f"{cache}[{table}].{moved}", (Size(1),)).name)
    return found
