"""Random programs, made step by step so that each is valid: shapes, dtypes and groups are known while one grows.

Every choice is one number of a `Choose`. Hypothesis gives the numbers where a failure has to be shrunk (0 is the simplest
choice), and a seed does where programs are sent to ranks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.passes.programs import OPS, Program, Step

# Choose(n): a number from 0 to n - 1.
Choose = Callable[[int], int]
MAX_NUMEL = 2048
MAX_STEPS = 20
LENGTHS = (4, 8)
# How the chunks of a gather or a scatter are put together; `all` is the right one, and `finer` says the same of more.
ORDERS = (*["all"] * 10, "reversed", "swapped", "repeated", "finer")
FORMS = ("chunk", "split", "slices")
SCATTER_FORMS = (*FORMS, "moved")
MATMUL_FORMS = ("at", "linear", "einsum", "flat", "batched")
INPUTS = ((4, 8), (8, 4), (8, 16), (2, 4, 8), (1, 8, 4), (4, 8, 8))
DTYPES = (torch.float32, torch.float32, torch.bfloat16)


@dataclass
class Maker:
    """A program that grows: `values` are the shapes and dtypes so far, as tensors without memory."""

    choose: Choose
    group_sizes: Mapping[str, int]
    reduce_ops: Sequence[str]
    steps: list[Step] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    given: set[int] = field(default_factory=set)
    phrases: Sequence[str] = ()

    def pick(self, options: Sequence[Any]) -> Any:
        return options[self.choose(len(options))]

    def rarely(self) -> bool:
        return self.choose(6) == 5

    def recent(self, accept: Callable[[torch.Tensor], bool]) -> int | None:
        """One of the values that `accept` takes: most often the last one that was computed, or one not long before."""
        found = [index for index, value in enumerate(self.values) if accept(value)]
        if not found:
            return None
        computed = [index for index in found if index not in self.given]
        if computed and self.choose(5) < 4:
            return computed[-1]
        return found[-1 - min(self.choose(len(found)), self.choose(len(found)))]

    def add(self, op: str, *values: int, **settings: Any) -> None:
        """Appends the step."""
        step = Step(op, values, tuple(settings.items()))
        if op == "input":
            results = [torch.empty(settings["shape"], dtype=settings["dtype"], device="meta")]
        else:
            if "group" in settings:
                settings["group"] = ("", self.group_sizes[settings["group"]])
            made = OPS[op](*[self.values[index].clone() for index in values], **settings)
            results = made if isinstance(made, list) else [made]
        self.steps.append(step)
        self.values += [one.contiguous() for one in results]

    def input(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        self.given.add(len(self.values))
        self.add("input", shape=tuple(shape), dtype=dtype)
        return len(self.values) - 1

    def some(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """A value of this shape: now and then an earlier one, else an input."""
        equal = lambda one: one.shape == torch.Size(shape) and one.dtype == dtype  # noqa: E731
        found = self.recent(equal) if self.rarely() else None
        return self.input(shape, dtype) if found is None else found

    # One method per kind of step: it appends the step, unless no value is fit for it.

    def group(self) -> str:
        return self.pick(list(self.group_sizes))

    def leak(self) -> str:
        return self.pick(["piece", "whole"]) if self.rarely() else ""

    def gather(self) -> None:
        group = self.group()
        size = self.group_sizes[group]
        x = self.recent(lambda one: one.ndim >= 2 and one.numel() * size <= MAX_NUMEL)
        if x is None:
            return
        # Dimension 0 as it comes most often, and the last one seldom: it is never fused.
        ndim = self.values[x].ndim
        dim = self.pick([0, 0, *range(ndim - 1), ndim - 1])
        plain = dim == 0 and not self.rarely()
        order = "all" if plain else self.pick(ORDERS)
        if order == "finer" and self.values[x].shape[0] % 2:
            return
        self.add("gather", x, dim=dim, group=group, order=order, form=self.pick(FORMS), leak=self.leak(),
                 contiguous=self.rarely())  # fmt: skip

    def gather_bits(self) -> None:
        group = self.group()
        x = self.recent(lambda one: one.ndim >= 2 and one.numel() * self.group_sizes[group] <= MAX_NUMEL)
        if x is not None:
            self.add("gather_bits", x, group=group)

    def scatter(self) -> None:
        group = self.group()
        size = self.group_sizes[group]
        x = self.recent(lambda one: one.ndim >= 2 and any(length % size == 0 for length in one.shape))
        if x is None:
            return
        shape = self.values[x].shape
        dims = [dim for dim, length in enumerate(shape) if length % size == 0]
        dim = self.pick([*dims[:1] * 4, *dims])
        order = "all" if dim == 0 and not self.rarely() else self.pick(ORDERS)
        if order == "finer" and (dim or shape[0] % (2 * size)):
            return
        self.add("scatter", x, dim=dim, group=group, reduce=self.pick(self.reduce_ops), order=order,
                 form=self.pick(SCATTER_FORMS), leak=self.leak(), contiguous=self.rarely())  # fmt: skip

    def reduce(self) -> None:
        x = self.recent(lambda one: True)
        if x is not None:
            self.add("reduce", x, group=self.group(), reduce=self.pick(self.reduce_ops), contiguous=self.rarely())

    def matmul(self) -> None:
        x = self.recent(lambda one: one.ndim >= 2 and one.shape[-1] > 1)
        if x is None:
            return
        shape, dtype = self.values[x].shape, self.values[x].dtype
        if self.rarely():  # as the second operand
            if self.values[x].ndim == 2:
                self.add("matmul", self.some((self.pick(LENGTHS), shape[0]), dtype), x, form=self.pick(MATMUL_FORMS))
            return
        if self.rarely() and self.values[x].ndim == 3:
            self.add("batched", x, self.some((shape[0], shape[2], self.pick(LENGTHS)), dtype))
            return
        columns = self.pick(LENGTHS)
        if math.prod(shape[:-1]) * columns > MAX_NUMEL:
            return
        w = self.some((shape[-1], columns), dtype)
        if self.rarely():
            self.add("matmul_bias", x, w, self.some((columns,), dtype), form=self.pick(["linear", "addmm"]))
            return
        self.add("matmul", x, w, form=self.pick(MATMUL_FORMS))
        if self.choose(3) == 2:  # more of the same operand, rows, and perhaps their sum
            for _ in range(1 + self.choose(3)):
                self.term(x, columns)

    def term(self, x: int, columns: int) -> None:
        """Most often adds something to the last value, a product of x or a sum of them."""
        shape, dtype, total = self.values[x].shape, self.values[x].dtype, len(self.values) - 1
        kind = self.pick(["matmul", "matmul", "addmm", "row"])
        if kind == "row":
            self.add("add", total, self.some((columns,), dtype))
            return
        w = self.some((shape[-1], columns), dtype)
        if kind == "addmm":
            self.add("matmul_added", total, x, w)
            return
        self.add("matmul", x, w, form=self.pick(MATMUL_FORMS))
        if self.choose(3):
            pair = total, len(self.values) - 1
            self.add("add", *(pair[::-1] if self.choose(2) else pair))

    def reshape(self) -> None:
        form = self.pick(["flat", "rows", "heads", "unsqueeze", "back"])
        odd = {"rows": 0, "heads": -1}.get(form)
        x = self.recent(lambda one: 2 <= one.ndim <= 3 and (odd is None or one.shape[odd] % 2 == 0))
        if x is not None and not (form in ("rows", "unsqueeze") and self.values[x].ndim > 2):
            self.add("reshape", x, form=form)

    def transpose(self) -> None:
        x = self.recent(lambda one: one.ndim >= 2)
        if x is not None:
            self.add("transpose", x, dims=self.pick([(0, 1), (-2, -1)]))

    def part(self) -> None:
        dim = self.choose(2)
        x = self.recent(lambda one: one.ndim >= 2 and one.shape[dim] % 2 == 0)
        if x is not None:
            self.add("part", x, dim=dim, index=self.choose(2))

    def rechunk(self) -> None:
        count, dim = self.pick([2, 4]), self.choose(2)
        x = self.recent(lambda one: one.ndim >= 2 and one.shape[dim] % (2 * count) == 0)
        if x is not None:
            self.add("rechunk", x, dim=dim, count=count, form=self.pick(FORMS), order=self.pick(ORDERS),
                     to=self.choose(2))  # fmt: skip

    def cat(self) -> None:
        x = self.recent(lambda one: one.ndim >= 2 and 2 * one.numel() <= MAX_NUMEL)
        if x is not None:
            self.add("cat", x, self.some(self.values[x].shape, self.values[x].dtype), dim=self.choose(2))

    def cast(self) -> None:
        x = self.recent(lambda one: True)
        if x is not None:
            other = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32}
            self.add("cast", x, dtype=other[self.values[x].dtype])

    def pointwise(self) -> None:
        x = self.recent(lambda one: True)
        if x is None:
            return
        op = self.pick(["relu", "scale", "add", "clone"])
        if op == "add":
            self.add("add", x, self.some(self.values[x].shape, self.values[x].dtype))
        else:
            self.add(op, x, **({"by": self.pick([0.5, 2])} if op == "scale" else {}))

    # What the algebra of collectives rewrites.

    def sum_of_reductions(self) -> None:
        x = self.recent(lambda one: True)
        if x is None:
            return
        y = self.some(self.values[x].shape, self.values[x].dtype)
        settings = {"group": self.group(), "reduce": self.pick(self.reduce_ops), "contiguous": False}
        self.add("reduce", x, **settings)
        first = len(self.values) - 1
        self.add("reduce", y, **settings)
        if self.rarely():
            self.add("add", first, self.some(self.values[x].shape, self.values[x].dtype))
            self.add("add", len(self.values) - 2 if self.rarely() else first, len(self.values) - 1)
        else:
            self.add("add", first, len(self.values) - 1)

    def reductions_of_reductions(self) -> None:
        """Reductions whose operands are made of earlier ones, and which meet these again behind."""
        x = self.recent(lambda one: one.ndim >= 2)
        if x is None:
            return
        settings = {"group": self.group(), "reduce": self.pick(self.reduce_ops), "contiguous": False}
        shape = self.values[x].shape
        made = []
        for _ in range(2 + self.choose(2)):
            self.add("reduce", x, **settings)
            made.append(len(self.values) - 1)
            x = self.pick(made)
            for _ in range(self.choose(3)):
                op = self.pick(["relu", "scale", "clone", "add"])
                others = {"scale": {"by": self.pick([0.5, 2])}}.get(op, {})
                self.add(op, x, *([self.pick(made)] if op == "add" else []), **others)
                x = len(self.values) - 1
                made.append(x)
            assert self.values[x].shape == shape
        for other in made[-1 - self.choose(3) :]:
            self.add("add", x, other)
            x = len(self.values) - 1

    def equal_gathers(self) -> None:
        group = self.group()
        x = self.recent(lambda one: one.ndim >= 2 and one.numel() * self.group_sizes[group] <= MAX_NUMEL)
        if x is None:
            return
        dim = self.choose(2)
        for _ in range(2):
            self.add("gather", x, dim=dim, group=group, order="all", form=self.pick(FORMS), leak=self.leak(),
                     contiguous=False)  # fmt: skip
            if self.choose(2):
                self.add("relu", len(self.values) - 1)

    def residual_chain(self) -> None:
        """A reduction, what is row-wise behind it, and a matmul."""
        self.matmul()
        self.reduce()
        for _ in range(1 + self.choose(3)):
            self.pointwise()
        self.matmul()

    def write(self) -> None:
        x = self.pick(sorted(self.given)) if self.choose(2) else self.recent(lambda one: True)
        assert x is not None
        if self.choose(2):
            self.add("shift", x, by=1)
        else:
            self.add("add_", x, self.some(self.values[x].shape, self.values[x].dtype))

    def program(self, max_phrases: int) -> Program:
        self.input(self.pick(INPUTS), self.pick(DTYPES))
        for phrase in range(1 + self.choose(max_phrases)):
            getattr(self, self.pick((*STEPS, *self.phrases) if phrase else STEPS[:2]))()
            count = 0
            # A step that no value was fit for ends the phrase.
            while count < len(self.steps) < MAX_STEPS and self.steps[-1].op in FOLLOWED and self.choose(6) < 5:
                count = len(self.steps)
                getattr(self, self.pick(FOLLOWED[self.steps[-1].op]))()
        count = len(self.values)
        outputs = [index for index in range(count - 1) if self.choose(6) == 5]
        return Program(tuple(self.steps), (*outputs, count - 1))


STEPS = (
    *["gather", "matmul"] * 6,
    *["reshape", "pointwise", "write"] * 2,
    *["scatter", "reduce", "gather_bits", "transpose", "part", "rechunk", "cat", "cast"],
)

ALGEBRA = (*["sum_of_reductions", "equal_gathers", "residual_chain"] * 6,)
NESTED = (*["reductions_of_reductions"] * 12, *["equal_gathers", "residual_chain"] * 3)

# What can be fused comes often; anything else may come in between, and then it may still reach a reduction.
REDUCTIONS = ("scatter", "reduce")
BETWEEN = ("transpose", "reshape", "cast", "pointwise")
FOLLOWED = {
    "gather": (*["matmul"] * 16, *BETWEEN),
    "gather_bits": ("matmul",),
    "matmul": (*REDUCTIONS * 8, *BETWEEN),
    "matmul_added": REDUCTIONS,
    **dict.fromkeys((*BETWEEN, "add", "scale", "relu"), ("gather", "matmul", "matmul", *REDUCTIONS)),
}


def make_program(
    choose: Choose,
    group_sizes: Mapping[str, int],
    *,
    reduce_ops: Sequence[str] = ("sum",),
    max_phrases: int = 5,
    phrases: Sequence[str] = (),
) -> Program:
    """A program over groups of these sizes, by the numbers of `choose`; `phrases` come beside the usual ones."""
    return Maker(choose, group_sizes, reduce_ops, phrases=phrases).program(max_phrases)


def seeded(seed: int) -> Choose:
    return random.Random(seed).randrange
