"""Epilogues as kernels: the `@triton.jit` function that is generated from an epilogue's text, the order in which a
kernel takes the operands, and the elementwise kernel that applies an epilogue to products of the library.

A generated function computes the outputs of one group of products (see task/epilogue.py) for any block of elements. So
the same function runs on a tile in registers and in the elementwise kernel. The function that prepares a product for a
reduction is generated in the same way. Triton reads the source of what it compiles; `generated` leaves the source in
Python's cache of source lines, under a name that follows from the text.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ditron_inductor.core import pointwise
from ditron_inductor.device.streams import handle_for
from ditron_inductor.lowering.host.kind import Library, bound
from ditron_inductor.lowering.host.launch import ceil_div
from ditron_inductor.lowering.host.launcher import Arguments, Launcher, local_launcher
from ditron_inductor.task import epilogue_torch
from ditron_inductor.task.dtypes import ACTIVATIONS
from ditron_inductor.task.epilogue import (
    EXPERT_KINDS,
    FUNCTIONS,
    FUNCTIONS_OF_TWO,
    Binary,
    Cast,
    Epilogue,
    Expression,
    Extra,
    Function,
    Number,
    OutputGroup,
    ProductTerm,
    extras_of,
    parse,
    products,
    text,
)
from ditron_inductor.task.nodes import WithEpilogue
from ditron_inductor.task.torch_dtypes import NAMES, TORCH_DTYPES

PARAMETERS = "GROUP: tl.constexpr, mm, x, at"
PLACES = {
    "scalar": "",
    "row": " + at.columns",
    "column": " + at.rows",
    "full": " + at.places",
    "expert": " + at.expert * at.width + at.columns",
    "even": " + (at.expert * at.width + at.columns) * 2",
    "odd": " + (at.expert * at.width + at.columns) * 2 + 1",
}
"""Where an extra tensor of a kind has its elements, and where they are inside."""
MASKS = {"scalar": "", "row": "at.in_columns", "column": "at.in_rows", "full": "at.inside"} | dict.fromkeys(
    EXPERT_KINDS, "at.in_columns"
)
TRITON_DTYPES = {dtype.short: f"tl.{dtype.name}" for dtype in ACTIVATIONS}
PACKED_BITS = 8
"""The bits of one number in the compile-time integers that stand for lists (see `packed`)."""
BLOCK = 2048
WARPS = 8
NAMED = (*FUNCTIONS, *FUNCTIONS_OF_TWO)
INT32 = 1 << 31


@functools.cache
def generated(source: str) -> Any:
    """Returns the epilogue with this text as a `@triton.jit` function of PARAMETERS. The function returns the outputs
    of group GROUP, fp32, as a tuple. mm: the group's products, rounded, in fp32. x: pointers to all extra tensors. at:
    the `Elements`.
    """
    # The name is unique, because a compiled kernel tells apart the functions that it calls by their names.
    function = f"epilogue_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    code = _source(parse(source), function)
    name = f"<ditron {function}>"
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {function_name: getattr(pointwise, function_name) for function_name in NAMED}
    namespace |= {"tl": tl, "__name__": __name__}
    exec(compile(code, name, "exec"), namespace)
    return triton.jit(namespace[function])


def _source(epilogue: Epilogue, name: str) -> str:
    lines = [f"def {name}({PARAMETERS}):"]
    groups = epilogue.groups()
    for number, group in enumerate(groups):
        if len(groups) > 1:
            last = number == len(groups) - 1
            lines.append("    else:" if last else f"    {'if' if number == 0 else 'elif'} GROUP == {number}:")
        indent = "        " if len(groups) > 1 else "    "
        names: dict[Expression, str] = {}
        body: list[str] = []
        results = [_line(epilogue.outputs[output], group, names, body) for output in group.outputs]
        lines += [indent + line for line in [*body, f"return ({', '.join(results)},)"]]
    return "\n".join(lines) + "\n"


def _line(expression: Expression, group: OutputGroup, names: dict[Expression, str], body: list[str]) -> str:
    """Appends the lines that compute `expression` to `body`, and its name to `names`; returns the name."""
    if expression in names:
        return names[expression]

    def value(part: Expression) -> str:
        return _line(part, group, names, body)

    match expression:
        case ProductTerm(index):
            code = f"mm[{group.products.index(index)}]"
        case Extra(kind, index):
            mask = MASKS[kind]
            code = f"tl.load(x[{index}]{PLACES[kind]}{f', mask={mask}, other=0.0' if mask else ''}).to(tl.float32)"
        case Number(number):
            code = f"tl.full((), {number!r}, tl.float32)"
        case Function(name, argument):
            code = f"{name}({value(argument)})"
        case Binary(operator, left, right) if operator in FUNCTIONS_OF_TWO:
            code = f"{operator}({value(left)}, {value(right)})"
        case Binary(operator, left, right):
            code = f"{value(left)} {operator} {value(right)}"
        case Cast(argument, dtype):
            code = f"{value(argument)}.to({TRITON_DTYPES[dtype]}).to(tl.float32)"
    names[expression] = f"t{len(names)}"
    body.append(f"{names[expression]} = {code}")
    return names[expression]


class Groups(NamedTuple):
    """The groups of products that are computed together, known at compile time. In group g the weights from
    FIRST_WEIGHTS[g] on, NUM_TOGETHER[g] in number (1 or 2), are multiplied in one tile, from which the outputs from
    FIRST_OUTS[g] on are computed, NUM_OUTS[g] in number. Each of these lists is one integer with 8 bits for each g (see
    `unpacked`).
    """

    NUM_GROUPS: Any
    FIRST_WEIGHTS: Any
    NUM_TOGETHER: Any
    FIRST_OUTS: Any
    NUM_OUTS: Any


@dataclass(frozen=True, eq=False)
class Arrangement:
    """The order in which a kernel takes the operands of an epilogue: weights and outputs are ordered by group.

    Attributes:
        function: the generated function, None without an epilogue.
        groups: see `Epilogue.groups`.
        weights, outputs: the node's indices of the weights and outputs, in the kernel's order.
        sources: for each output, in the node's order, the index of a product that has its size.
        dtypes: for each output, in the node's order, the short name of its dtype, "" for the node's dtype.
        pre: the generated function that prepares the product for its reduction, None if the product itself is reduced.
        pre_in_slices: whether `pre` reads an extra tensor of the product's size.
    """

    function: Any
    groups: tuple[OutputGroup, ...]
    weights: tuple[int, ...]
    outputs: tuple[int, ...]
    sources: tuple[int, ...]
    dtypes: tuple[str, ...]
    pre: Any = None
    pre_in_slices: bool = False

    @property
    def together(self) -> int:
        """The largest number of products in one tile."""
        return max(len(group.products) for group in self.groups)

    @property
    def first_weights(self) -> list[int]:
        """The first weight of each group, in the kernel's order."""
        return [sum(len(group.products) for group in self.groups[:i]) for i in range(len(self.groups))]

    @property
    def packed_groups(self) -> Groups:
        """The groups as kernels take them."""
        outputs = [len(group.outputs) for group in self.groups]
        return Groups(
            NUM_GROUPS=len(self.groups),
            FIRST_WEIGHTS=packed(self.first_weights),
            NUM_TOGETHER=packed([len(group.products) for group in self.groups]),
            FIRST_OUTS=packed([sum(outputs[:i]) for i in range(len(outputs))]),
            NUM_OUTS=packed(outputs),
        )

    def new_outputs_of_sum(self, like: torch.Tensor, shape: Sequence[int]) -> list[torch.Tensor]:
        """Allocates the outputs, of `shape` each, of a node with the dtype of `like`."""
        return [like.new_empty(shape, dtype=TORCH_DTYPES.get(dtype, like.dtype)) for dtype in self.dtypes]

    def new_outputs(self, shard: torch.Tensor, rows: int, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Allocates the outputs, with `rows` rows each, in the node's order."""
        return [
            shard.new_empty(rows, weights[source].shape[-1], dtype=TORCH_DTYPES.get(dtype, shard.dtype))
            for source, dtype in zip(self.sources, self.dtypes, strict=True)
        ]


class Functions(NamedTuple):
    """The generated functions of a reduction's epilogue, None for none: PRE prepares the product, see `prepared`, and
    EPILOGUE computes the outputs from the sum, see `store_sum`.
    """

    PRE: Any
    EPILOGUE: Any


def packed(numbers: Sequence[int]) -> int:
    """Returns the numbers as one integer, with the first number in the lowest bits."""
    assert all(number < 1 << PACKED_BITS for number in numbers)
    return sum(number << (PACKED_BITS * i) for i, number in enumerate(numbers))


def arrange(epilogue: Epilogue | None, num_weights: int) -> Arrangement:
    """Returns the Arrangement of an epilogue. Without an epilogue every product is an output."""
    if epilogue is None:
        order = tuple(range(num_weights))
        groups = tuple(OutputGroup((index,), (index,)) for index in order)
        return Arrangement(None, groups, order, order, order, ("",) * num_weights)
    if epilogue.pre is not None:
        reads_all = any(extra.kind == "full" for extra in extras_of([epilogue.pre]))
        return replace(
            arrange(epilogue.behind, num_weights), pre=generated(text(epilogue.pre)), pre_in_slices=reads_all
        )
    groups = epilogue.groups()
    return Arrangement(
        function=generated(epilogue.text()),
        groups=groups,
        weights=tuple(index for group in groups for index in group.products),
        outputs=tuple(index for group in groups for index in group.outputs),
        sources=tuple(min(products(output)) for output in epilogue.outputs),
        dtypes=epilogue.dtypes(),
    )


PLAIN_SUM = arrange(None, 1)
"""The Arrangement of a reduction without an epilogue."""


@triton.constexpr_function
def unpacked(numbers, i):
    """Returns the i-th number of a result of `packed`."""
    return (numbers >> (8 * i)) & 255


class Elements(NamedTuple):
    """The elements of outputs [.., N] to which a block of values belongs: their rows and columns, their places rows * N
    + columns, and whether the row, the column and both are inside. All of these broadcast to the block's shape. width:
    N. expert: the expert of all rows, if they have one.
    """

    rows: Any
    columns: Any
    places: Any
    in_rows: Any
    in_columns: Any
    inside: Any
    width: Any
    expert: Any


@triton.jit
def elements_of(rows, columns, M, N):
    """Returns the Elements of a tile with rows [BLOCK_M] and columns [BLOCK_N] of a tensor [M, N]."""
    in_rows, in_columns = (rows < M)[:, None], (columns < N)[None, :]
    return elements_at(rows.to(tl.int64), columns, in_rows, in_columns, N)


@triton.jit
def elements_at(rows, columns, in_rows, in_columns, N, expert=0):
    """Returns the Elements of rows [BLOCK_M] and columns [BLOCK_N]. in_rows, in_columns: which are inside."""
    places = rows[:, None] * N + columns[None, :]
    return Elements(rows[:, None], columns[None, :], places, in_rows, in_columns, in_rows & in_columns, N, expert)


@triton.jit
def prepared(acc, x, elements, DTYPE: tl.constexpr, PRE: tl.constexpr):
    """Returns PRE of a tile `acc` of the product [.., N] of DTYPE with these Elements; `acc` if PRE is None."""
    result = acc
    if PRE is not None:
        mm = (acc.to(DTYPE).to(tl.float32),)
        result = PRE(0, mm, x, elements)[0]
    return result


@triton.jit
def store_outputs(
    accs, ok, x, outs, elements,
    GROUP: tl.constexpr, NUM_PRODUCTS: tl.constexpr, FIRST_OUT: tl.constexpr, NUM_OUTS: tl.constexpr,
    DTYPE: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """Stores these elements of the outputs of group GROUP, which begin with output FIRST_OUT, computed from the
    accumulators of the group's products; stores NaN if ok is 0. DTYPE: the dtype of the products.
    """
    results = accs
    if EPILOGUE is not None:
        mm = ()
        for i in tl.static_range(NUM_PRODUCTS):
            mm = mm + (accs[i].to(DTYPE).to(tl.float32),)  # type: ignore[assignment]
        results = EPILOGUE(GROUP, mm, x, elements)
    for i in tl.static_range(NUM_OUTS):
        out = outs[FIRST_OUT + i]
        result = tl.where(ok != 0, results[i], float("nan")).to(out.dtype.element_ty)
        tl.store(out + elements.places, result, mask=elements.inside)


@triton.jit
def store_sum(total, ok, x, outs, elements, DTYPE: tl.constexpr, EPILOGUE: tl.constexpr):
    """Does `store_outputs` for a tile `total`, fp32, of a reduced sum. All of `outs` are stored."""
    NUM_OUTS: tl.constexpr = len(outs)
    store_outputs((total,), ok, x, outs, elements, 0, 1, 0, NUM_OUTS, DTYPE, EPILOGUE)


@triton.jit
def store_flat_sum(total, ok, x, outs, places, inside, N, DTYPE: tl.constexpr, EPILOGUE: tl.constexpr):
    """Does `store_sum` for consecutive elements of a reduced sum [.., N]."""
    elements = Elements(places // N, places % N, places, inside, inside, inside, N, 0)
    store_sum(total, ok, x, outs, elements, DTYPE, EPILOGUE)


class Layout(NamedTuple):
    """How the products and the outputs of an epilogue lie in memory: `numel` elements, in rows of N columns and in runs
    of `run` consecutive elements. Several runs begin `pitch` elements apart.
    """

    numel: Any
    N: Any
    run: Any
    pitch: Any


def layout_of(x: torch.Tensor) -> Layout:
    """Returns the Layout of x, which is contiguous [.., N], or [runs, rows, N] with contiguous runs."""
    if x.is_contiguous():
        return Layout(x.numel(), x.shape[-1], x.numel(), x.numel())
    return Layout(x.numel(), x.shape[-1], x[0].numel(), x.stride(0))


@triton.jit
def apply_epilogue_kernel(
    mm, x, outs, sizes,
    GROUP: tl.constexpr, EPILOGUE: tl.constexpr, NUM_PRODUCTS: tl.constexpr, NUM_OUTS: tl.constexpr,
    IN_RUNS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes outs = EPILOGUE(mm) for group GROUP. All of `mm` and `outs` have the Layout `sizes`. IN_RUNS: the layout
    has several runs, and no extra tensor has a value for each row. WIDE: places need 64 bits.
    """
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    places = program * BLOCK + tl.arange(0, BLOCK)
    inside = places < sizes.numel
    held = places
    if IN_RUNS:
        held = places // sizes.run * sizes.pitch + places % sizes.run
    values = ()
    for i in tl.static_range(NUM_PRODUCTS):
        values = values + (tl.load(mm[i] + held, mask=inside, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    N = sizes.N
    results = EPILOGUE(GROUP, values, x, Elements(places // N, places % N, places, inside, inside, inside, N, 0))
    for i in tl.static_range(NUM_OUTS):
        tl.store(outs[i] + held, results[i].to(outs[i].dtype.element_ty), mask=inside)


def extras_or(instead: torch.Tensor, extras: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Returns the extra tensors, contiguous, as a kernel takes them. Its tuple must not be empty, so `instead`, which
    an epilogue without extra tensors does not read, stands for none.
    """
    return tuple(extra.contiguous() for extra in extras) or (instead,)


class Elementwise:
    """Applies an epilogue by the elementwise kernel: a launch for each group, a launcher for each layout."""

    def __init__(self, epilogue: Epilogue, device: torch.device) -> None:
        self._groups = epilogue.groups()
        self._function = generated(epilogue.text()) if self._groups else None
        self._device = device
        # The key is (group, layout).
        self._launchers: dict[tuple[int, Layout], Launcher] = {}

    def __call__(
        self, mm: Sequence[torch.Tensor], extras: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
    ) -> None:
        """Computes the epilogue of `mm` into `outs` on the current stream. An output may be one of the products. All of
        them are contiguous [.., N]. If no extra tensor has a value for each row, they may also be [runs, rows, N] with
        contiguous runs that are equally far apart in all of them.
        """
        x = extras_or(mm[0], extras)
        for number, group in enumerate(self._groups):
            tensors = {
                "mm": tuple(mm[index] for index in group.products),
                "x": x,
                "outs": tuple(outs[index] for index in group.outputs),
            }
            layout = layout_of(tensors["mm"][0])
            if layout.numel > 0:
                launcher = self._launchers.get((number, layout))
                if launcher is None:
                    launcher = local_launcher(apply_epilogue_kernel, self._device)
                    self._launchers[number, layout] = launcher
                arguments = functools.partial(_arguments, layout, number, group, self._function)
                launcher(handle_for(mm[0]), arguments, (), (), tensors)


class Finisher:
    """Computes the outputs of a node from products of the library. The library adds a bias where the epilogue does no
    more than that; for each other group there is one elementwise launch. All calls have operands of one form. biases:
    the index of the extra tensor that the library adds to a product, by the product's index. The library rounds only
    once, after the sum.
    """

    def __init__(
        self,
        epilogue: Epilogue,
        like: torch.Tensor,
        extras: Sequence[torch.Tensor],
        *,
        reduced: bool = False,
        apart: bool = False,
    ) -> None:
        """like: any tensor with the node's dtype and device. reduced: the product is a reduced sum, so no matmul adds a
        bias. apart: the library's products are batches, for which adding a bias takes passes of its own, so it adds a
        bias only if nothing else is left to compute.
        """
        folded, self.biases = (epilogue, {}) if reduced else epilogue.folded(NAMES[like.dtype])
        unfit = any(extras[row].dtype != like.dtype or not extras[row].is_contiguous() for row in self.biases.values())
        if unfit or (apart and not all(isinstance(output, ProductTerm) for output in folded.outputs)):
            folded, self.biases = epilogue, {}
        outputs = folded.outputs
        self._outputs = outputs
        # The outputs that are left to compute. An output that is a product is already there.
        self._made = [index for index, output in enumerate(outputs) if not isinstance(output, ProductTerm)]
        self._rest = Epilogue(tuple(outputs[index] for index in self._made))
        self._dtypes = epilogue_torch.out_dtypes(self._rest, like.dtype)
        self._elementwise = Elementwise(self._rest, like.device)

    def multiply(
        self, rows: torch.Tensor, weights: Sequence[torch.Tensor], extras: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Returns the outputs, in the node's order, for the products rows @ weight."""
        mm = [
            torch.addmm(extras[self.biases[i]].view(-1), rows, weight) if i in self.biases else rows @ weight
            for i, weight in enumerate(weights)
        ]
        return self.finish(mm, extras)

    def finish(
        self,
        mm: Sequence[torch.Tensor],
        extras: Sequence[torch.Tensor],
        made: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Returns the outputs, in the node's order. An output that is a product is one of `mm`. mm: the products,
        contiguous, by weight, with `biases` added. made: the result of `new_outputs`, if `make` has computed all of its
        rows already.
        """
        if made is None:
            made = self.new_outputs(mm)
            self.make(mm, extras, made)
        outputs: list[Any] = [mm[output.index] if isinstance(output, ProductTerm) else None for output in self._outputs]
        for index, output in zip(self._made, made, strict=True):
            outputs[index] = output
        return outputs

    def finish_sum(self, total: torch.Tensor, extras: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the outputs that are computed from a reduced sum [.., N], contiguous, each in its shape."""
        if total.dim() == 2:
            return self.finish([total], extras)
        outputs = self.finish([total.view(-1, total.shape[-1]) if total.numel() else total.flatten(0, -2)], extras)
        return [output.view(total.shape) for output in outputs]

    def makes_runs(self, whole: Sequence[int]) -> bool:
        """Returns whether `make` has anything to compute and may be called for runs of rows one by one. It may not if
        an extra tensor has a value for each row, or if a product that it needs is in `whole`, those that are not
        computed in runs.
        """
        kinds = {extra.kind for extra in self._rest.extras()}
        late = any(index in whole for group in self._rest.groups() for index in group.products)
        return bool(self._made) and kinds <= {"scalar", "row"} and not late

    def new_outputs(self, mm: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Allocates the outputs that are not products."""
        sources = [mm[min(products(output))] for output in self._rest.outputs]
        return [torch.empty_like(source, dtype=dtype) for source, dtype in zip(sources, self._dtypes, strict=True)]

    def make(self, mm: Sequence[torch.Tensor], extras: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """Computes the outputs that are not products, or a run of their rows from the same rows of the products."""
        if self._made and mm[0].is_cuda:
            self._elementwise(mm, extras, outs)
        elif self._made:
            for out, value in zip(outs, epilogue_torch.evaluate(self._rest, mm, extras), strict=True):
                out.copy_(value)


def finisher_of_sum(node: WithEpilogue, like: torch.Tensor) -> Finisher | None:
    """Returns what computes the outputs of a reduction from its sum; None if the sum is the output."""
    behind = None if node.parsed is None else node.parsed.behind
    return None if behind is None else Finisher(behind, like, (), reduced=True)


class Preparer:
    """Prepares a product of the library for its reduction, in place."""

    def __init__(self, pre: Expression, device: torch.device) -> None:
        self._pre = Epilogue((pre,))
        self._kinds = {extra.index: extra.kind for extra in self._pre.extras()}
        self._elementwise = Elementwise(self._pre, device)

    def prepare(self, product: torch.Tensor, extras: Sequence[torch.Tensor]) -> torch.Tensor:
        """Overwrites the product [.., N], contiguous, and returns it. extras: the parts for these rows."""
        if product.is_cuda:
            self._elementwise((product,), extras, (product,))
        elif product.numel() > 0:
            (made,) = epilogue_torch.evaluate(self._pre, [product.view(-1, product.shape[-1])], extras)
            product.copy_(made.view(product.shape))
        return product

    def runs(
        self, extras: Sequence[torch.Tensor], rows: int, columns: int, cut: Callable[[torch.Tensor], Sequence[Any]]
    ) -> Runs:
        """Returns a preparer of runs of the rows of a product [rows, columns]. cut: a function that cuts a tensor
        [rows, ..] into the runs. It has to be called before anything runs beside the current stream, since it copies.
        """
        parts: list[Sequence[torch.Tensor] | torch.Tensor] = list(extras)
        for index, kind in self._kinds.items():
            if kind in ("column", "full"):
                whole = extras[index].reshape(epilogue_torch.extra_shape(kind, (rows, columns)))
                parts[index] = [part.contiguous() for part in cut(whole)]
        return Runs(self, parts)


@dataclass(frozen=True)
class Runs:
    """A preparer of the runs of a product. extras: each is one tensor for all runs, or one for each run."""

    preparer: Preparer
    extras: Sequence[Sequence[torch.Tensor] | torch.Tensor]

    def prepare(self, place: int, product: torch.Tensor) -> None:
        """Overwrites `product`, the run number `place`."""
        extras = [extra if isinstance(extra, torch.Tensor) else extra[place] for extra in self.extras]
        self.preparer.prepare(product, extras)


def preparer_of(node: WithEpilogue, device: torch.device) -> Preparer | None:
    """Returns what prepares the product of a node for its reduction; None if the product itself is reduced."""
    pre = None if node.parsed is None else node.parsed.pre
    return None if pre is None else Preparer(pre, device)


def _arguments(layout: Layout, number: int, group: OutputGroup, function: Any) -> Arguments:
    runs = layout.numel // layout.run
    # The end of the last run is the farthest place.
    places = layout.numel if runs == 1 else (runs - 1) * layout.pitch + layout.run
    values = {
        "sizes": layout,
        "GROUP": number,
        "EPILOGUE": function,
        "NUM_PRODUCTS": len(group.products),
        "NUM_OUTS": len(group.outputs),
        "IN_RUNS": runs > 1,
        "WIDE": max(places, layout.numel) + BLOCK >= INT32,
        "BLOCK": BLOCK,
        "num_warps": WARPS,
    }
    return Arguments(ceil_div(layout.numel, BLOCK), values)


def by_reference_with_epilogue(reference: Callable[..., torch.Tensor]) -> Library:
    """Returns the Library that reduces by a function of task/reference.py and then computes the epilogue."""

    def library(node: Any, operands: Sequence[torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
        preparer, finisher = preparer_of(node, operands[0].device), finisher_of_sum(node, operands[0])
        reduce = bound(reference, node)

        def run(
            a: Sequence[torch.Tensor],
            b: Sequence[torch.Tensor],
            bias: torch.Tensor | None,
            extras: Sequence[torch.Tensor],
        ) -> list[torch.Tensor]:
            prepare = None if preparer is None else functools.partial(preparer.prepare, extras=extras)
            total = reduce(a, b, bias, prepare=prepare)
            return [total] if finisher is None else finisher.finish_sum(total, extras)

        return run

    return library
