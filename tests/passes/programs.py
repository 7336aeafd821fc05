"""Random programs of collectives, matmuls and what stands between them: made step by step, so that each is valid.

A program is a list of steps over numbered values; its shapes, dtypes and groups are known while it is made. Every choice
is one number of a `Choose`: hypothesis gives the numbers where a failure has to be shrunk (0 is the simplest choice),
and a seed does where programs are sent to ranks.

    v0 = input(shape=(4, 8), dtype=float32)
    v1 = gather(v0, dim=0, group=world, chunks=all, form=chunk, leak=)
    v2 = input(shape=(8, 4), dtype=float32)
    v3 = matmul(v1, v2, form=at)
    return v3

Inputs hold small integers: sums and products of them are exact in float32, in any order, and in bfloat16 wrong
values are far from right ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as nn

c10d: Any = torch.ops._c10d_functional
# Choose(n): a number from 0 to n - 1.
Choose = Callable[[int], int]
MAX_NUMEL = 2048
LENGTHS = (4, 8)
# How the chunks of a gather or a scatter are put together; `all` is the only right one, `finer` says the same of more.
ORDERS = (*["all"] * 10, "reversed", "swapped", "repeated", "finer")
MATMUL_FORMS = ("at", "linear", "einsum", "flat", "batched")
FORMS = ("chunk", "split", "slices")
BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


@dataclass(frozen=True)
class Step:
    """`op` of earlier values (by number) and settings; it adds one value, and another where it `leaks` one."""

    op: str
    values: tuple[int, ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        settings = [f"{key}={str(value).removeprefix('torch.')}" for key, value in self.settings]
        return f"{self.op}({', '.join([f'v{index}' for index in self.values] + settings)})"


@dataclass(frozen=True)
class Program:
    """Steps, and the numbers of the values that are returned."""

    steps: tuple[Step, ...]
    outputs: tuple[int, ...]

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))  # for hypothesis

    def __str__(self) -> str:
        lines, count = [], 0
        for step in self.steps:
            names = [f"v{count + index}" for index in range(1 + leaks(step))]
            lines.append(f"    {', '.join(names)} = {step}")
            count += len(names)
        return "\n".join(["", *lines, f"    return {', '.join(f'v{index}' for index in self.outputs)}"])

    @property
    def inputs(self) -> list[dict[str, Any]]:
        """Shape and dtype of every input."""
        return [dict(step.settings) for step in self.steps if step.op == "input"]

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of all values."""
        return {value for step in self.steps for key, value in step.settings if key == "dtype"}

    def arguments(self, seed: int) -> list[torch.Tensor]:
        """Values of the inputs, for one rank."""
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(-1, 2, one["shape"], generator=generator).to(one["dtype"]) for one in self.inputs]

    def function(
        self, groups: Mapping[str, tuple[str, int]], *, eager: bool = False
    ) -> Callable[..., list[torch.Tensor]]:
        """The program as a function of its inputs; `groups` has the name and the size of each group."""

        def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
            values: list[torch.Tensor] = []
            given = iter(inputs)
            for step in self.steps:
                if step.op == "input":
                    values.append(next(given))
                    continue
                settings = dict(step.settings)
                if "group" in settings:
                    settings["group"] = groups[settings["group"]]
                if eager and "contiguous" in settings:
                    settings["contiguous"] = True  # collectives in eager mode take nothing else
                result = OPS[step.op](*[values[index] for index in step.values], **settings)
                values += result if isinstance(result, list) else [result]
            return [values[index] for index in self.outputs]

        return run


def leaks(step: Step) -> bool:
    """Whether the step gives away something that lies between its ends."""
    return bool(dict(step.settings).get("leak"))


# What the steps compute.


def launched(x: torch.Tensor, contiguous: bool) -> torch.Tensor:
    return x.contiguous() if contiguous else x


def pieces(x: torch.Tensor, count: int, dim: int, form: str, order: str) -> list[torch.Tensor]:
    """The chunks of x in the wanted order: as many as asked for, but for `finer`."""
    count = 2 * count if order == "finer" else count
    length = x.shape[dim] // count
    if form == "chunk":
        parts = list(x.chunk(count, dim))
    elif form == "split":
        parts = list(x.split([length] * count, dim))
    else:
        parts = [x.narrow(dim, index * length, length) for index in range(count)]
    if order == "reversed":
        return parts[::-1]
    if order == "swapped":
        return [parts[1], parts[0], *parts[2:]]
    return [*parts[:-1], parts[0]] if order == "repeated" else parts


def gather(
    x: torch.Tensor, dim: int, group: tuple[str, int], order: str, form: str, leak: str, contiguous: bool
) -> Any:
    name, size = group
    gathered = c10d.wait_tensor(c10d.all_gather_into_tensor(launched(x, contiguous), size, name))
    if dim == 0 and order == "all":
        return [gathered, gathered] if leak else gathered
    parts = pieces(gathered, size, 0, form, order)
    result = torch.cat(parts, dim)
    return [parts[0] if leak == "piece" else gathered, result] if leak else result


def scatter(
    x: torch.Tensor, dim: int, group: tuple[str, int], reduce: str, order: str, form: str, leak: str, contiguous: bool
) -> Any:
    name, size = group
    whole = x
    if dim or order != "all":
        parts = pieces(x, size, dim, form, order)
        whole = torch.cat(parts)
    result = c10d.wait_tensor(c10d.reduce_scatter_tensor(launched(whole, contiguous), reduce, size, name))
    return [parts[0] if leak == "piece" and whole is not x else whole, result] if leak else result


def reduce(x: torch.Tensor, group: tuple[str, int], reduce: str, contiguous: bool) -> torch.Tensor:
    return c10d.wait_tensor(c10d.all_reduce(launched(x, contiguous), reduce, group[0]))


def gather_bits(x: torch.Tensor, group: tuple[str, int]) -> torch.Tensor:
    name, size = group
    bits = x.contiguous().view(BITS[x.dtype])
    return c10d.wait_tensor(c10d.all_gather_into_tensor(bits, size, name)).view(x.dtype)


def matmul(x: torch.Tensor, w: torch.Tensor, form: str) -> torch.Tensor:
    """x [.., K] @ w [K, N], in as many ways as users have."""
    if form == "at":
        return x @ w
    if form == "linear":
        return nn.linear(x, w.t())
    if form == "einsum":
        return torch.einsum("...k,kn->...n", x, w)
    if form == "batched":
        return torch.bmm(x, w.expand(x.shape[0], *w.shape)) if x.ndim == 3 else torch.mm(x, w)
    return torch.mm(x.reshape(-1, x.shape[-1]), w).view(*x.shape[:-1], w.shape[1])


def matmul_bias(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, form: str) -> torch.Tensor:
    return torch.addmm(b, x, w) if form == "addmm" and x.ndim == 2 else nn.linear(x, w.t(), b)


def reshape(x: torch.Tensor, form: str) -> torch.Tensor:
    if form == "flat":
        return x.reshape(-1, x.shape[-1])
    if form == "rows":
        return x.reshape(2, -1, *x.shape[1:])
    if form == "heads":
        return x.reshape(*x.shape[:-1], 2, -1).flatten(1, 2)
    return x.unsqueeze(0) if form == "unsqueeze" else x.reshape(1, *x.shape).squeeze(0).flatten().reshape(x.shape)


def add_in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.add_(y)


OPS: dict[str, Callable[..., Any]] = {
    "gather": gather,
    "scatter": scatter,
    "reduce": reduce,
    "gather_bits": gather_bits,
    "matmul": matmul,
    "matmul_bias": matmul_bias,
    "batched": torch.bmm,
    "reshape": reshape,
    "transpose": lambda x, dims: x.transpose(*dims),
    "part": lambda x, dim, index: x.chunk(2, dim)[index],
    "rechunk": lambda x, dim, count, form, order, to: torch.cat(pieces(x, count, dim, form, order), to),
    "cat": lambda x, y, dim: torch.cat([x, y], dim),
    "cast": lambda x, dtype: x.to(dtype),
    "clone": torch.clone,
    "scale": lambda x, by: x * by,
    "shift": lambda x, by: x.add_(by),
    "relu": torch.relu,
    "add": torch.add,
    "add_": add_in_place,
}


# How programs are made.


@dataclass
class Maker:
    """A program that grows: `values` are the shapes and dtypes so far, as tensors without memory."""

    choose: Choose
    group_sizes: Mapping[str, int]
    reduce_ops: Sequence[str]
    steps: list[Step] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    given: set[int] = field(default_factory=set)

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
        found = self.recent(lambda one: one.shape == torch.Size(shape) and one.dtype == dtype) if self.rarely() else None
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
        dim = self.pick([dim for dim, length in enumerate(shape) if length % size == 0])
        order = "all" if dim == 0 and not self.rarely() else self.pick(ORDERS)
        if order == "finer" and (dim or shape[0] % (2 * size)):
            return
        self.add("scatter", x, dim=dim, group=group, reduce=self.pick(self.reduce_ops), order=order,
                 form=self.pick(FORMS), leak=self.leak(), contiguous=self.rarely())  # fmt: skip

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
        if self.rarely():  # a second one of the same operand, and perhaps their sum
            first = len(self.values) - 1
            self.add("matmul", x, self.some((shape[-1], columns), dtype), form=self.pick(MATMUL_FORMS))
            if self.choose(2):
                self.add("add", first, len(self.values) - 1)

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

    def write(self) -> None:
        x = self.recent(lambda one: True)
        if x is None:
            return
        if self.choose(2):
            self.add("shift", x, by=1)
        else:
            self.add("add_", x, self.some(self.values[x].shape, self.values[x].dtype))

    def program(self, max_steps: int) -> Program:
        shape = self.pick([(4, 8), (8, 4), (8, 16), (2, 4, 8), (1, 8, 4), (4, 8, 8)])
        self.input(shape, self.pick([torch.float32, torch.float32, torch.bfloat16]))
        for _ in range(1 + self.choose(max_steps)):
            last = self.steps[-1].op
            # What can be fused comes often; anything else may come in between.
            likely = {"gather": self.matmul, "gather_bits": self.matmul, "matmul": self.pick([self.scatter, self.reduce])}
            if last in likely and self.choose(5) < 4:
                likely[last]()
            else:
                getattr(self, self.pick(STEPS))()
        count = len(self.values)
        outputs = [index for index in range(count - 1) if self.choose(6) == 5]
        return Program(tuple(self.steps), (*outputs, count - 1))


STEPS = (
    *("gather", "matmul") * 6,
    *("reshape", "pointwise", "write") * 2,
    *("scatter", "reduce", "gather_bits", "transpose", "part", "rechunk", "cat", "cast"),
)


def make_program(
    choose: Choose, group_sizes: Mapping[str, int], *, reduce_ops: Sequence[str] = ("sum",), max_steps: int = 10
) -> Program:
    """A program over groups of these sizes, by the numbers of `choose`."""
    return Maker(choose, group_sizes, reduce_ops).program(max_steps)


def seeded(seed: int) -> Choose:
    return random.Random(seed).randrange
