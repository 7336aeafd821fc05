"""Programs of collectives, matmuls and what stands between them, as data: steps over numbered values.

    v0 = input(shape=(4, 8), dtype=float32)
    v1 = gather(v0, dim=0, group=world, order=all, form=chunk, leak=, contiguous=False)
    v2 = input(shape=(8, 4), dtype=float32)
    v3 = matmul(v1, v2, form=at)
    return v3

Inputs hold small integers: sums and products of them are exact in float32, in any order, and in bfloat16 wrong values
are far from right ones. `make_programs` makes such programs at random.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers what collectives make of tensors without memory
from torch.nn import functional as nn

c10d: Any = torch.ops._c10d_functional
# Gloo sends no int16.
BITS = {torch.bfloat16: torch.uint8, torch.float32: torch.int32}


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
        """How hypothesis prints a program."""
        printer.text(str(self))

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
    if form == "moved" and order == "all":
        whole = x.movedim(dim, 0).contiguous()
        front = c10d.wait_tensor(c10d.reduce_scatter_tensor(whole, reduce, size, name))
        result = front.movedim(0, dim)
        return [whole if leak == "piece" else front, result] if leak else result
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


def matmul_added(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.addmm(y, x, w) if x.ndim == 2 else y + x @ w


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
    "matmul_added": matmul_added,
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
