"""What a random program grows in: its lines and inputs so far, and the steps that all phrases are made of."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from tests.fuzz.program import Input, Place, Shape, Size

LENGTHS = {
    "cuda": (1, 3, 8, 16, 24, 64, 100, 127, 128, 191, 256, 320, 512, 596, 777, 1024),
    "cpu": (1, 3, 5, 8, 8, 12, 16, 16, 17, 24, 31, 32),
}
HEADS = {"cuda": (16, 64, 128), "cpu": (4, 8, 16)}
SLOTS = {"cuda": (2, 33, 100, 256, 700, 3000), "cpu": (2, 7, 16, 33)}
"""How many tokens a cache has room for."""
# No value may be larger, with tokens as many as there are at most.
MAX_TOKENS = {"cuda": 1024, "cpu": 33}
MAX_NUMEL = {"cuda": 1 << 22, "cpu": 1 << 13}
ACTIVATIONS = ("F.silu({})", 'F.gelu({}, approximate="tanh")', "F.gelu({})", "torch.tanh({})", "{} * 0.5")
STATISTICS = ("{}.abs().max()", "{}.to(F32).pow(2).mean()", "{}.to(F32).sum(-1)", "{}.detach().to(F32).square().sum()")


@dataclass(frozen=True)
class Value:
    """A value of the program.

    same: the groups whose ranks all have this value. reduced: those over which it was reduced, with only row-wise work
    since: what `sequence_parallel` may divide among their ranks.
    """

    name: str
    shape: Shape
    same: frozenset[str] = frozenset()
    reduced: frozenset[str] = frozenset()

    @property
    def width(self) -> int:
        """The last dimension, which is always a number."""
        assert not self.shape[-1].symbol
        return self.shape[-1].factor


@dataclass
class Maker:
    """A program that grows. `current` is what the last phrase left, `depth` counts matmuls and collectives.

    parallel: `sequence_parallel` is not off, so what meets a reduced value has to be the same on all ranks. differs:
    the ranks are to differ. Then each collective depends on the one before: where two of them do not, Inductor puts
    them in an order of its own in each rank's graph. breaks: the program has graph breaks.
    """

    rng: random.Random
    place: Place
    dtype: str
    trained: bool
    captured: bool
    parallel: bool
    differs: bool
    inputs: list[Input] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    current: Value | None = None
    collectives: int = 0
    depth: int = 0
    count: int = 0
    inside_part: bool = False
    breaks: bool = False

    # Choices.

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def length(self) -> int:
        return self.rng.choice(LENGTHS[self.place.device_type])

    def columns(self, rows: Value, by: int = 1) -> int:
        """How wide a product of these rows is, a multiple of `by`."""
        lengths = [by * one for one in LENGTHS[self.place.device_type]]
        return self.rng.choice([one for one in lengths if self.fits((*rows.shape[:-1], Size(one)))] or [by])

    def group(self) -> str:
        return self.rng.choice(["A", "A", *self.place.groups])

    def size(self, group: str) -> int:
        return self.place.groups[group]

    def fits(self, shape: Shape) -> bool:
        numel = 1
        for one in shape:
            numel *= one.factor * (MAX_TOKENS[self.place.device_type] if one.symbol else 1)
        return numel <= MAX_NUMEL[self.place.device_type]

    def uses(self, symbol: str) -> bool:
        """Whether an input has this size."""
        return any(size.symbol == symbol for one in self.inputs for size in one.shape)

    # Lines.

    def line(self, text: str, indent: int = 0) -> None:
        self.lines.append("    " * (1 + indent) + text)

    def assign(self, text: str, shape: Shape, like: Value | None = None, **changes: frozenset[str]) -> Value:
        """A new value; unless said otherwise it is as `like` where ranks have it the same."""
        self.count += 1
        name = f"t{self.count}"
        self.line(f"{name} = {text}")
        base = like or Value(name, shape)
        return replace(base, name=name, shape=shape, **changes)

    def take(self, shape: Shape, *, shared: bool = False, std: float = 1.0, name: str = "x") -> Value:
        """A new input."""
        self.inputs.append(Input(f"{name}{len(self.inputs)}", shape, shared, std))
        same = frozenset(self.place.groups) if shared else frozenset[str]()
        return Value(self.inputs[-1].name, shape, same)

    def beside(self, value: Value, shape: Shape, name: str) -> Value:
        """An input that meets `value` element by element: its own of each rank, unless that is forbidden."""
        shared = bool(value.reduced) and (self.parallel or self.chance(0.7))
        return self.take(shape, shared=shared or self.chance(0.3), name=name)

    def output(self, text: str) -> None:
        if not self.inside_part:
            self.line(f"outs.append({text})")

    def statistic(self, value: Value) -> str:
        return self.rng.choice(STATISTICS).format(value.name)

    # Ranks that differ.

    def may_differ(self, probability: float = 0.5) -> bool:
        return self.differs and not self.inside_part and self.chance(probability)

    def only_rank(self, what: str) -> int:
        """A rank that is to do this alone."""
        rank = self.rng.randrange(self.place.world_size)
        self.differences.append(f"rank {rank} alone {what}")
        return rank

    @contextmanager
    def part(self) -> Iterator[None]:
        """What the block adds becomes a function, which one rank runs eagerly."""
        self.breaks = True
        start, known = len(self.lines), {f"t{number}" for number in range(1, self.count + 1)}
        known |= {one.name for one in self.inputs}
        self.inside_part = True
        yield
        self.inside_part = False
        body, self.lines = self.lines[start:], self.lines[:start]
        known |= {one.name for one in self.inputs}
        made = re.match(r"\s+(\w+) =", body[-1])
        assert made
        found = dict.fromkeys(re.findall(r"\b[a-z]\d+\b", "\n".join(body)))
        names = ", ".join(name for name in found if name in known)
        part = f"part{len(self.parts)}"
        rank = self.only_rank(f"runs {part} eagerly")
        eager = f"torch.compiler.disable({part})"
        self.parts.append("\n".join([f"def {part}({names}):", *body, f"    return {made[1]}", "", "",
                                     f"{part}_eager = {eager}", "", ""]))  # fmt: skip
        self.line(f"{made[1]} = {part}_eager({names}) if RANK == {rank} else {part}({names})")

    # What phrases are made of.

    def start(self) -> Value:
        """The value to go on with: the last phrase's, most often."""
        current = self.current
        if current is not None and (self.differs or (self.fits(current.shape) and self.chance(0.75))):
            return current
        if current is not None:
            self.output(current.name)
        rows = Size(self.rng.choice((1, 1, self.place.world_size)), "M")
        shape: Shape = (rows, Size(self.length()))
        if self.chance(0.35):
            shape = (Size(self.rng.choice((1, 2, 3))), *shape)
        shared = self.chance(0.3)
        value = self.take(shape, shared=shared)
        return self.cast_around(value) if self.chance(0.1) else value

    def cast_around(self, value: Value) -> Value:
        """A value that was in float32, and is no more."""
        if self.dtype == "float32":
            return value
        return self.assign(f"{value.name}.to(F32).to(DT)", value.shape, value)

    def weight(self, k: int, n: int, *, spread: int = 1, turned: bool = False, shared: bool = False) -> str:
        """A weight [k, n] for a sum over `spread` ranks, as an input [n, k] if `turned`."""
        shape = (Size(n), Size(k)) if turned else (Size(k), Size(n))
        return self.take(shape, shared=shared, std=(k * spread) ** -0.5, name="w").name

    def matmul(self, x: Value, n: int, *, spread: int = 1) -> Value:
        """x [.., K] times a weight [K, n], in as many ways as users have."""
        k, rest = x.width, x.shape[:-1]
        forms = ["plain"] * 4 + ["linear", "linear", "turned", "einsum", "strided", "bias", "bias"]
        forms += ["addmm", "swapped"] if len(rest) == 1 else ["flat", "batched"]
        form = self.rng.choice(forms)
        shared = bool(x.same) and self.chance(0.2)
        same = x.same if shared else frozenset[str]()
        self.depth += 1
        turned = form in ("linear", "turned", "bias")
        width = 2 * n if form == "strided" else n
        w = self.weight(k, width, spread=spread, turned=turned, shared=shared)
        if form in ("bias", "addmm"):
            b = self.take((Size(n),), shared=shared, name="b").name
        text = {
            "plain": lambda: f"{x.name} @ {w}",
            "linear": lambda: f"F.linear({x.name}, {w})",
            "turned": lambda: f"{x.name} @ {w}.t()",
            "einsum": lambda: f'torch.einsum("...k,kn->...n", {x.name}, {w})',
            "strided": lambda: f"{x.name} @ {w}[:, ::2]",
            "bias": lambda: f"F.linear({x.name}, {w}, {b})",
            "addmm": lambda: f"torch.addmm({b}, {x.name}, {w})",
            "swapped": lambda: f"({w}.t() @ {x.name}.t()).t()",
            "flat": lambda: f"(({x.name}.flatten(0, 1)) @ {w}).unflatten(0, ({rest[0]}, -1))",
            "batched": lambda: f"torch.bmm({x.name}, {w}.expand({rest[0]}, {k}, {width}))",
        }[form]()
        return self.assign(text, (*rest, Size(n)), same=same)

    def pointwise(self, value: Value) -> Value:
        """A row, a number, a residual, an activation or a norm of it."""
        kind = self.rng.choice(("row", "number", "residual", "activation", "activation", "norm", "cast", "two terms"))
        if kind == "row":
            b = self.beside(value, (Size(value.width),), "b")
            op = self.rng.choice(("+", "+", "*"))
            return self.assign(f"{value.name} {op} {b.name}", value.shape, value, same=value.same & b.same)
        if kind == "number":
            by = self.rng.choice(("0.22", "0.5", "1.5", f"(8 / {value.name}.shape[0])"))
            return self.assign(f"{value.name} * {by}", value.shape, value)
        if kind == "residual":
            r = self.beside(value, value.shape, "r")
            return self.assign(f"{value.name} + {r.name}", value.shape, value, same=value.same & r.same)
        if kind == "norm" and value.width >= 8:
            return self.norm(value)
        if kind == "two terms" and value.width >= 8:
            return self.norm(self.two_terms(value))
        if kind == "cast" and self.dtype != "float32":
            text = self.rng.choice(ACTIVATIONS).format(f"{value.name}.to(F32)")
            return self.assign(f"({text}).to(DT)", value.shape, value)
        return self.assign(self.rng.choice(ACTIVATIONS).format(value.name), value.shape, value)

    def two_terms(self, value: Value, residual: Value | None = None) -> Value:
        """A residual, a new one for None, and what a shared expert adds."""
        a = self.beside(value, value.shape, "a")
        r = self.beside(value, value.shape, "r") if residual is None else residual
        forms = ("{2} + ({0} + {1})", "{2} + ({0} + {1}) * 0.22", "{2} + ({1} + {0})", "{2} + ({0} + {1} * 0.5)",
                 "({0} + {1}) + {2}", "({2} + {0}) + {1}")  # fmt: skip
        text = self.rng.choice(forms).format(value.name, a.name, r.name)
        return self.assign(text, value.shape, value, same=value.same & a.same & r.same)

    def norm(self, value: Value) -> Value:
        """RMSNorm or LayerNorm; its weights are the same on all ranks where the value was reduced."""
        width, shared = (Size(value.width),), bool(value.reduced) or self.chance(0.5)
        w = self.take(width, shared=shared, name="w")
        form = self.rng.choice(("rms", "rms", "layer", "written", "added"))
        if form == "layer":
            b = self.take(width, shared=shared, name="b")
            text = f"layer_norm({value.name}, {w.name}, {b.name})"
        elif form == "rms":
            text = f"rms_norm({value.name}, {w.name})"
        else:
            wide = self.assign(f"{value.name}.to(F32)", value.shape, value)
            if form == "added":
                r = self.beside(value, value.shape, "r")
                wide = self.assign(f"{wide.name} + {r.name}.to(F32)", value.shape, value, same=value.same & r.same)
                if self.chance(0.5):
                    self.output(f"{wide.name}.to(DT)")
                value = wide
            elif self.chance(0.3):
                # A layer norm that is written out.
                wide = self.assign(f"{wide.name} - {wide.name}.mean(-1, keepdim=True)", value.shape, value)
            mean = f"({wide.name}.pow(2).mean(-1, keepdim=True) + 1e-5)"
            scale = self.rng.choice((f"torch.rsqrt{mean}", f"torch.rsqrt{mean}", f"torch.pow({mean}, -0.5)"))
            text = f"({wide.name} * {scale}).to(DT) * {w.name}"
        return self.assign(text, value.shape, value, same=value.same & w.same)

    def gathered(self, x: Value, dim: int, group: str) -> Value:
        """All shards of x along a dimension, in float32 now and then."""
        self.collectives += 1
        self.depth += 1
        shape = tuple(one * self.size(group) if at == dim else one for at, one in enumerate(x.shape))
        same = x.same | self.whole(group)
        wide = self.dtype != "float32" and self.chance(0.08)
        text = f"gather({x.name}{'.to(F32)' if wide else ''}, {dim}, {group})" + (".to(DT)" if wide else "")
        return self.assign(text, shape, same=same)

    def whole(self, group: str) -> frozenset[str]:
        """The groups whose ranks all have what all ranks of a group have."""
        everywhere = self.size(group) == self.place.world_size
        return frozenset(name for name in self.place.groups if name == group or everywhere)

    def summed(self, x: Value, group: str) -> Value:
        """x reduced over the group: scattered where it can be, or on all ranks."""
        op = self.rng.choice(["sum"] * 8 + ["avg"] * self.place.averages + ["max"] * (not self.trained))
        operand, after = x.name, ""
        if self.dtype != "float32" and self.chance(0.08):
            operand, after = f"{x.name}.to(F32)", ".to(DT)"
        dims = [dim for dim, one in enumerate(x.shape) if one.factor % self.size(group) == 0]
        op_text = "" if op == "sum" else f', "{op}"'
        if dims and (self.chance(0.5) or not self.fits(x.shape)):
            return self.summed_along(x, group, self.rng.choice(dims), operand, op_text, after)
        if op != "max" and self.chance(0.1):
            # What experts return is added up behind the reduction.
            operand, after = f"torch.stack(({operand}, {operand} * 0.5))", f".sum(0){after}"
        return self.summed_along(x, group, None, operand, op_text, after)

    def summed_along(
        self, x: Value, group: str, dim: int | None, operand: str = "", op_text: str = "", after: str = ""
    ) -> Value:
        """x reduced over the group: on all ranks, or scattered along `dim`. operand: what is sent, if not x itself.
        op_text, after: what stands behind the group, and behind the call.
        """
        self.collectives += 1
        self.depth += 1
        operand = operand or x.name
        if dim is None:
            whole = self.whole(group)
            text = f"reduce({operand}, {group}{op_text}){after}"
            return self.assign(text, x.shape, same=x.same | whole, reduced=whole)
        gone = {name for name in self.place.groups if self.place.overlap(name, group)}
        text = f"scatter({operand}, {dim}, {group}{op_text}){after}"
        return self.assign(text, self.divided(x.shape, dim, group), same=x.same - gone)

    def divided(self, shape: Shape, dim: int, group: str) -> Shape:
        """The shape of a rank's part."""
        return tuple(one // self.size(group) if at == dim else one for at, one in enumerate(shape))

    # The end.

    def finish(self) -> None:
        """Returns what is left; where ranks were to differ and do not, one of them takes a statistic."""
        assert self.current is not None
        if self.differs and not self.differences:
            rank = self.only_rank("takes a statistic")
            self.line(f"if RANK == {rank}:")
            self.line(f"outs.append({self.statistic(self.current)})", 1)
        self.line(f"return [*outs, {self.current.name}]")

    def source(self) -> str:
        """The module."""
        names = ", ".join(one.name for one in self.inputs)
        return "\n".join([*self.parts, f"def program({names}):", "    outs = []", *self.lines, ""])
