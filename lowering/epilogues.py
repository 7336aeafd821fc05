"""Epilogues as kernels: the `@triton.jit` function that is generated from a text, how a kernel's operands are arranged
for it, and the elementwise kernel that applies it where the products were made by the library.

A generated function computes the outputs of one group of products (see task/epilogue.py) for any block of elements, so
the same one runs on a tile in registers and in the elementwise kernel. So does that of what is computed before a
reduction. Triton wants the source of what it compiles; it
finds it in Python's cache of source lines, where `generated` leaves it under a name that follows from the text.
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
from ditron_inductor.lowering.host.launch import ceil_div
from ditron_inductor.lowering.host.launcher import Arguments, Launcher, local_launcher
from ditron_inductor.task import epilogue_torch
from ditron_inductor.task.dtypes import ACTIVATIONS
from ditron_inductor.task.epilogue import (
    FUNCTIONS,
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

PARAMETERS = "GROUP: tl.constexpr, mm, x, rows, columns, places, in_rows, in_columns, inside"
TRITON_DTYPES = {dtype.short: f"tl.{dtype.name}" for dtype in ACTIVATIONS}
PACKED_BITS = 8
"""Of one number in the compile-time integers that stand for lists."""
BLOCK = 2048
WARPS = 8
INT32 = 1 << 31


@functools.cache
def generated(source: str) -> Any:
    """The epilogue of this text as a `@triton.jit` function of PARAMETERS.

    It returns the outputs of group GROUP, in fp32, as a tuple. mm: the group's products, rounded, in fp32. x: pointers
    to all extra tensors. rows, columns: of the elements in the outputs, places: rows * N + columns, and whether each of
    them is inside; all broadcast to the products' shape.
    """
    # A name of its own: a compiled kernel that calls two of them tells them apart by their names.
    function = f"epilogue_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    code = _source(parse(source), function)
    name = f"<ditron {function}>"
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {one: getattr(pointwise, one) for one in FUNCTIONS}
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
    """The name of the value of `expression`, after the lines of `body`; equal parts are computed once."""
    if expression in names:
        return names[expression]

    def value(part: Expression) -> str:
        return _line(part, group, names, body)

    match expression:
        case ProductTerm(index):
            code = f"mm[{group.products.index(index)}]"
        case Extra(kind, index):
            place = {"scalar": "", "row": " + columns", "column": " + rows", "full": " + places"}[kind]
            mask = {"scalar": "", "row": "in_columns", "column": "in_rows", "full": "inside"}[kind]
            code = f"tl.load(x[{index}]{place}{f', mask={mask}, other=0.0' if mask else ''}).to(tl.float32)"
        case Number(number):
            code = f"tl.full((), {number!r}, tl.float32)"
        case Function(name, argument):
            code = f"{name}({value(argument)})"
        case Binary(operator, left, right):
            code = f"{value(left)} {operator} {value(right)}"
        case Cast(argument, dtype):
            code = f"{value(argument)}.to({TRITON_DTYPES[dtype]}).to(tl.float32)"
    names[expression] = f"t{len(names)}"
    body.append(f"{names[expression]} = {code}")
    return names[expression]


class Groups(NamedTuple):
    """Of products that are computed together, known at compile time. Group g: NUM_TOGETHER[g] weights, 1 or 2, from
    weight FIRST_WEIGHTS[g] on, are multiplied in one tile, which makes NUM_OUTS[g] outputs, from FIRST_OUTS[g] on; each
    is an integer that has 8 bits for each g, see `unpacked`.
    """

    NUM_GROUPS: Any
    FIRST_WEIGHTS: Any
    NUM_TOGETHER: Any
    FIRST_OUTS: Any
    NUM_OUTS: Any


@dataclass(frozen=True, eq=False)
class Arrangement:
    """How a kernel sees the operands of an epilogue: weights and outputs ordered by group.

    groups: see Epilogue.groups. weights, outputs: the node's indices in the kernel's order. sources: by output in the
    node's order, a product of its size. dtypes: likewise, "" for the node's. pre: the function of what is reduced, None
    where that is the product; pre_in_slices: it reads as many elements as that has.
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
        """Most products in one tile."""
        return max(len(group.products) for group in self.groups)

    @property
    def first_weights(self) -> list[int]:
        """By group, in the kernel's order."""
        return [sum(len(group.products) for group in self.groups[:i]) for i in range(len(self.groups))]

    @property
    def packed_groups(self) -> Groups:
        """As a kernel of several products takes them."""
        outputs = [len(group.outputs) for group in self.groups]
        return Groups(
            NUM_GROUPS=len(self.groups),
            FIRST_WEIGHTS=packed(self.first_weights),
            NUM_TOGETHER=packed([len(group.products) for group in self.groups]),
            FIRST_OUTS=packed([sum(outputs[:i]) for i in range(len(outputs))]),
            NUM_OUTS=packed(outputs),
        )

    def new_outputs_of_sum(self, like: torch.Tensor, shape: Sequence[int]) -> list[torch.Tensor]:
        """Memory for the outputs, of `shape` each, of a node with the dtype of `like`."""
        return [
            like.new_empty(shape, dtype=TORCH_DTYPES.get(dtype, like.dtype)) for dtype in self.dtypes
        ]

    def new_outputs(self, shard: torch.Tensor, rows: int, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Memory for the outputs of `rows` rows, in the node's order."""
        return [
            shard.new_empty(rows, weights[source].shape[1], dtype=TORCH_DTYPES.get(dtype, shard.dtype))
            for source, dtype in zip(self.sources, self.dtypes, strict=True)
        ]


def packed(numbers: Sequence[int]) -> int:
    """The numbers as one integer, the first one lowest."""
    assert all(number < 1 << PACKED_BITS for number in numbers)
    return sum(number << (PACKED_BITS * i) for i, number in enumerate(numbers))


def arrange(epilogue: Epilogue | None, num_weights: int) -> Arrangement:
    """For a node with so many weights; without an epilogue each product is its own output."""
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
"""That of a reduction without an epilogue."""


@triton.constexpr_function
def unpacked(numbers, i):
    """Number i of what `packed` made."""
    return (numbers >> (8 * i)) & 255


class Elements(NamedTuple):
    """Which elements of outputs [.., N] a block of values is of: rows and columns, places: rows * N + columns, and
    whether each of them is inside; all broadcast to the block's shape.
    """

    rows: Any
    columns: Any
    places: Any
    in_rows: Any
    in_columns: Any
    inside: Any


@triton.jit
def elements_of(rows, columns, M, N):
    """The Elements of a tile, rows [BLOCK_M] and columns [BLOCK_N] of a tensor [M, N]."""
    in_rows, in_columns = (rows < M)[:, None], (columns < N)[None, :]
    return elements_at(rows.to(tl.int64), columns, in_rows, in_columns, N)


@triton.jit
def elements_at(rows, columns, in_rows, in_columns, N):
    """The Elements of a tile of rows [BLOCK_M] and columns [BLOCK_N], those inside being [BLOCK_M, 1] and [1, BLOCK_N].
    """
    places = rows[:, None] * N + columns[None, :]
    return Elements(rows[:, None], columns[None, :], places, in_rows, in_columns, in_rows & in_columns)


@triton.jit
def prepared(acc, x, elements, DTYPE: tl.constexpr, PRE: tl.constexpr):
    """A tile of what is reduced, made of a tile of the product by PRE; that itself, if PRE is None.

    elements: of the tile in the product [.., N] of DTYPE.
    """
    result = acc
    if PRE is not None:
        mm = (acc.to(DTYPE).to(tl.float32),)
        result = PRE(
            0, mm, x, elements.rows, elements.columns, elements.places, elements.in_rows, elements.in_columns,
            elements.inside,
        )[0]  # fmt: skip
    return result


@triton.jit
def store_outputs(
    accs, ok, x, outs, elements,
    GROUP: tl.constexpr, NUM_PRODUCTS: tl.constexpr, FIRST_OUT: tl.constexpr, NUM_OUTS: tl.constexpr,
    DTYPE: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """Stores these elements of the outputs of group GROUP, from FIRST_OUT on, made of accumulators; NaN unless `ok`.

    DTYPE: of the products.
    """
    results = accs
    if EPILOGUE is not None:
        mm = ()
        for i in tl.static_range(NUM_PRODUCTS):
            mm = mm + (accs[i].to(DTYPE).to(tl.float32),)  # type: ignore[assignment]
        results = EPILOGUE(
            GROUP, mm, x, elements.rows, elements.columns, elements.places, elements.in_rows, elements.in_columns,
            elements.inside,
        )  # fmt: skip
    for i in tl.static_range(NUM_OUTS):
        out = outs[FIRST_OUT + i]
        result = tl.where(ok != 0, results[i], float("nan")).to(out.dtype.element_ty)
        tl.store(out + elements.places, result, mask=elements.inside)


@triton.jit
def store_sum(total, ok, x, outs, elements, DTYPE: tl.constexpr, EPILOGUE: tl.constexpr):
    """`store_outputs` of a tile of a reduced sum, fp32: all of a tuple of outputs."""
    NUM_OUTS: tl.constexpr = len(outs)
    store_outputs((total,), ok, x, outs, elements, 0, 1, 0, NUM_OUTS, DTYPE, EPILOGUE)


@triton.jit
def store_flat_sum(total, ok, x, outs, places, inside, N, DTYPE: tl.constexpr, EPILOGUE: tl.constexpr):
    """`store_sum` of elements of a reduced sum [.., N] that follow each other."""
    store_sum(total, ok, x, outs, Elements(places // N, places % N, places, inside, inside, inside), DTYPE, EPILOGUE)


class Layout(NamedTuple):
    """How the products and the outputs of an epilogue lie in memory: `numel` elements in all, in rows of N columns.

    `run` elements follow each other, and runs begin `pitch` elements apart, where there are several.
    """

    numel: Any
    N: Any
    run: Any
    pitch: Any


def layout_of(x: torch.Tensor) -> Layout:
    """The layout of x [.., N], contiguous, or of several contiguous runs of rows [runs, rows, N]."""
    if x.is_contiguous():
        return Layout(x.numel(), x.shape[-1], x.numel(), x.numel())
    return Layout(x.numel(), x.shape[-1], x[0].numel(), x.stride(0))


@triton.jit
def apply_epilogue_kernel(
    mm, x, outs, sizes,
    GROUP: tl.constexpr, EPILOGUE: tl.constexpr, NUM_PRODUCTS: tl.constexpr, NUM_OUTS: tl.constexpr,
    IN_RUNS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """outs = EPILOGUE of group GROUP of the products mm, all of them in the Layout `sizes`. IN_RUNS: the layout has
    several runs, and no extra tensor has a value for each row. WIDE: 64-bit places.
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
    results = EPILOGUE(GROUP, values, x, places // sizes.N, places % sizes.N, places, inside, inside, inside)
    for i in tl.static_range(NUM_OUTS):
        tl.store(outs[i] + held, results[i].to(outs[i].dtype.element_ty), mask=inside)


class Elementwise:
    """Launches of the elementwise kernel for an epilogue, one for each group. Each layout has its own launcher."""

    def __init__(self, epilogue: Epilogue, device: torch.device) -> None:
        self._groups = epilogue.groups()
        self._function = generated(epilogue.text()) if self._groups else None
        self._device = device
        # By group and layout.
        self._launchers: dict[tuple[int, Layout], Launcher] = {}

    def __call__(
        self, mm: Sequence[torch.Tensor], extras: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
    ) -> None:
        """outs = what the epilogue makes of mm, on the current stream; an output may be one of the products.

        All of them are contiguous [.., N], or, where no extra tensor has a value for each row, [runs, rows, N] with
        contiguous runs that begin as far apart in all of them.
        """
        # Never empty: without any it gets what it does not look at.
        x = tuple(extra.contiguous() for extra in extras) or (mm[0],)
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
    """Makes the outputs of a node from what the library computes: products, some with their bias, and one launch for
    each group that has more of an epilogue. Its calls have operands of one form.

    biases: the extra tensor that the library adds to a product, by the product's index. It rounds the sum only.
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
        """like: any tensor of the node's dtype and device. reduced: the product is a sum that no library adds to.
        apart: the library's products are batches, to which it adds a bias in passes of its own: it does so only where
        nothing else is left to compute.
        """
        folded, self.biases = (epilogue, {}) if reduced else epilogue.folded(NAMES[like.dtype])
        unfit = any(extras[row].dtype != like.dtype or not extras[row].is_contiguous() for row in self.biases.values())
        if unfit or (apart and not all(isinstance(output, ProductTerm) for output in folded.outputs)):
            folded, self.biases = epilogue, {}
        outputs = folded.outputs
        self._outputs = outputs
        # What is left to compute: an output that is a product stays where it is.
        self._made = [index for index, output in enumerate(outputs) if not isinstance(output, ProductTerm)]
        self._rest = Epilogue(tuple(outputs[index] for index in self._made))
        self._dtypes = epilogue_torch.out_dtypes(self._rest, like.dtype)
        self._elementwise = Elementwise(self._rest, like.device)

    def multiply(
        self, rows: torch.Tensor, weights: Sequence[torch.Tensor], extras: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The outputs, in the node's order, of rows @ weight for every weight."""
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
        """The outputs, in the node's order. mm: contiguous, by weight, those with a bias after it; a plain output is
        one of them. made: those of `new_outputs`, if `make` has made all of their rows.
        """
        if made is None:
            made = self.new_outputs(mm)
            self.make(mm, extras, made)
        outputs: list[Any] = [mm[output.index] if isinstance(output, ProductTerm) else None for output in self._outputs]
        for index, output in zip(self._made, made, strict=True):
            outputs[index] = output
        return outputs

    def finish_sum(self, total: torch.Tensor, extras: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs made of a reduced sum [.., N], contiguous, each in its shape."""
        if total.dim() == 2:
            return self.finish([total], extras)
        outputs = self.finish([total.view(-1, total.shape[-1]) if total.numel() else total.flatten(0, -2)], extras)
        return [output.view(total.shape) for output in outputs]

    def makes_runs(self, whole: Sequence[int]) -> bool:
        """Whether `make` may be given runs of rows: it computes something, and from nothing that is cut like these.
        whole: products that are not made in runs.
        """
        kinds = {extra.kind for extra in self._rest.extras()}
        late = any(index in whole for group in self._rest.groups() for index in group.products)
        return bool(self._made) and kinds <= {"scalar", "row"} and not late

    def new_outputs(self, mm: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Memory for the outputs that are no products."""
        sources = [mm[min(products(output))] for output in self._rest.outputs]
        return [torch.empty_like(one, dtype=dtype) for one, dtype in zip(sources, self._dtypes, strict=True)]

    def make(self, mm: Sequence[torch.Tensor], extras: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """Compute the outputs that are no products, or runs of their rows, from the same rows of the products."""
        if self._made and mm[0].is_cuda:
            self._elementwise(mm, extras, outs)
        elif self._made:
            for out, value in zip(outs, epilogue_torch.evaluate(self._rest, mm, extras), strict=True):
                out.copy_(value)


def finisher_of_sum(node: WithEpilogue, like: torch.Tensor) -> Finisher | None:
    """What makes the outputs of a reduction of its sum; None where that is the output."""
    behind = None if node.parsed is None else node.parsed.behind
    return None if behind is None else Finisher(behind, like, (), reduced=True)


class Preparer:
    """Makes what a node reduces of what the library multiplies, in its place."""

    def __init__(self, pre: Expression, device: torch.device) -> None:
        self._pre = Epilogue((pre,))
        self._kinds = {extra.index: extra.kind for extra in self._pre.extras()}
        self._elementwise = Elementwise(self._pre, device)

    def prepare(self, product: torch.Tensor, extras: Sequence[torch.Tensor]) -> torch.Tensor:
        """The product [.., N], contiguous, which it overwrites. extras: those of the node, as these rows have them."""
        if product.is_cuda:
            self._elementwise((product,), extras, (product,))
        elif product.numel() > 0:
            (made,) = epilogue_torch.evaluate(self._pre, [product.view(-1, product.shape[-1])], extras)
            product.copy_(made.view(product.shape))
        return product

    def runs(
        self, extras: Sequence[torch.Tensor], rows: int, columns: int, cut: Callable[[torch.Tensor], Sequence[Any]]
    ) -> Runs:
        """The same for runs of the rows of a product [rows, columns]. cut: a tensor [rows, ..] into those of all runs.

        To be made before anything runs beside the current stream.
        """
        parts: list[Sequence[torch.Tensor] | torch.Tensor] = list(extras)
        for index, kind in self._kinds.items():
            if kind in ("column", "full"):
                whole = extras[index].reshape(epilogue_torch.extra_shape(kind, (rows, columns)))
                parts[index] = [part.contiguous() for part in cut(whole)]
        return Runs(self, parts)


@dataclass(frozen=True)
class Runs:
    """A preparer of the runs of a product. extras: a tensor for all of them, or one for each."""

    preparer: Preparer
    extras: Sequence[Sequence[torch.Tensor] | torch.Tensor]

    def prepare(self, place: int, product: torch.Tensor) -> None:
        """Makes what is reduced of the run `place`, in its place."""
        extras = [one if isinstance(one, torch.Tensor) else one[place] for one in self.extras]
        self.preparer.prepare(product, extras)


def preparer_of(node: WithEpilogue, device: torch.device) -> Preparer | None:
    """What makes what a node reduces; None where that is the product."""
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


def finished(
    reduce: Callable[..., torch.Tensor], node: WithEpilogue, like: torch.Tensor
) -> Callable[..., list[torch.Tensor]]:
    """The outputs of a reduction: its sum, or what is made of that."""
    preparer, finisher = preparer_of(node, like.device), finisher_of_sum(node, like)

    def library(
        a: Sequence[torch.Tensor],
        b: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        extras: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        prepare = None if preparer is None else functools.partial(preparer.prepare, extras=extras)
        total = reduce(a, b, bias, prepare=prepare)
        return [total] if finisher is None else finisher.finish_sum(total, extras)

    return library
