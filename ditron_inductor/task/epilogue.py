"""Epilogues are pointwise expressions of the products of a node, kept as text in the op's arguments.

    "cast(silu(mm0), bf16) * mm1; mm0; mm1"

Each part between semicolons is one output of the node, [rows, N]. Its dtype is the node's, or `T` if the whole part is
`cast(.., T)`. In the epilogue of a reduction the first part may say what each rank computes from its own product before
it is reduced:

    "pre: mm0 * column(x0); full(x1) + mm0"

In this part mm0 is the rank's product, with all its rows, and the result has the node's dtype. The operands are:

    mm0, mm1, ..                          the product with weight 0, 1, .., rounded to the node's dtype; in a reduction
                                          mm0 is the reduced sum (before the reduction: the sum of this rank's products)
    full(x0)                              extra tensor 0, with an element for each element of the output
    row(x0), column(x0), scalar(x0)       extra tensor 0, with N elements, the same in every row; with one element for
                                          each row; with one element
    expert(x0)                            extra tensor 0, with N elements for each expert, of the expert of a row; only
                                          behind the matmuls of experts
    even(x0), odd(x0)                     the same of extra tensors with 2 N elements, of which every second is taken
    0.5                                   a number

Everything is computed in fp32 and rounded to the output's dtype at its end; `cast(e, bf16)` rounds in between, where
eager rounds. Products of several weights in one part, or in parts that share a product, need equal widths, because they
are computed together (see `groups`).

The text is parsed through a whitelist of Python's own syntax tree, and is never evaluated. `text()` is the only form of
an epilogue: `parse(e.text()) == e`.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from ditron_inductor.errors import InvalidEpilogue
from ditron_inductor.task.dtypes import ACTIVATIONS

KINDS: tuple[str, ...] = ("scalar", "row", "column", "full")
EXPERT_KINDS: tuple[str, ...] = ("expert", "even", "odd")
"""The kinds of extra tensors that are tables of experts."""
FUNCTIONS: tuple[str, ...] = (
    "neg", "relu", "square", "exp", "erf", "tanh", "sigmoid", "silu", "gelu", "gelu_tanh",
)  # fmt: skip
DTYPES: tuple[str, ...] = tuple(dtype.short for dtype in ACTIVATIONS)
FUNCTIONS_OF_TWO: tuple[str, ...] = ("minimum", "maximum")
OPERATORS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
READ = (*KINDS, *EXPERT_KINDS)
PRE = "pre:"
MAX_TEXT = 8192
MAX_DEPTH = 128
"""The deepest nesting of an expression. Functions that work on expressions are recursive."""
MAX_DIGITS = 6
"""The most digits of the index of a product or an extra tensor."""
SHOWN = 200
"""The most characters of a refused text that an error shows."""
MAX_TOGETHER = 2
"""The most products that are computed in one tile. More accumulators do not fit into a program's registers."""


@dataclass(frozen=True)
class ProductTerm:
    """The product with weight `index`."""

    index: int


@dataclass(frozen=True)
class Extra:
    """Extra tensor `index`, read as `kind`, one of KINDS and EXPERT_KINDS."""

    kind: str
    index: int


@dataclass(frozen=True)
class Number:
    value: float


@dataclass(frozen=True)
class Function:
    """name(argument), one of FUNCTIONS."""

    name: str
    argument: Expression


@dataclass(frozen=True)
class Binary:
    """left operator right, with one of the four operators, or operator(left, right), one of FUNCTIONS_OF_TWO."""

    operator: str
    left: Expression
    right: Expression


@dataclass(frozen=True)
class Cast:
    """The argument rounded to `dtype`, one of DTYPES."""

    argument: Expression
    dtype: str


Expression = ProductTerm | Extra | Number | Function | Binary | Cast


@dataclass(frozen=True)
class OutputGroup:
    """Products that are computed together, and the outputs made of them: indices of both, ascending."""

    products: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Epilogue:
    """One expression for each output of a node. pre: the expression that is reduced, None for the product itself."""

    outputs: tuple[Expression, ...]
    pre: Expression | None = None

    def text(self) -> str:
        before = () if self.pre is None else (f"{PRE} {text(self.pre)}",)
        return "; ".join((*before, *(text(output) for output in self.outputs)))

    @property
    def behind(self) -> Epilogue | None:
        """The part that is computed from a reduced sum; None if the sum is the output."""
        return None if self.outputs == (ProductTerm(0),) else Epilogue(self.outputs)

    def groups(self) -> tuple[OutputGroup, ...]:
        """The products in groups that share outputs, in the order of their first product."""
        sets: list[set[int]] = []
        for output in self.outputs:
            used = set(products(output))
            together = [group for group in sets if group & used]
            sets = [group for group in sets if group not in together] + [used.union(*together)]
        return tuple(
            OutputGroup(
                tuple(sorted(group)), tuple(i for i, output in enumerate(self.outputs) if group & set(products(output)))
            )
            for group in sorted(sets, key=min)
        )

    def extras(self) -> tuple[Extra, ...]:
        found = {*extras_of(self.outputs), *extras_of(() if self.pre is None else (self.pre,))}
        return tuple(sorted(found, key=lambda extra: (extra.index, extra.kind)))

    def dtypes(self) -> tuple[str, ...]:
        """The dtype of every output; "" for the node's own."""
        return tuple(output.dtype if isinstance(output, Cast) else "" for output in self.outputs)

    def passes(self, dtype: str, *, biases: bool = True) -> int:
        """Returns how many tensors [rows, N] are read and written if a node of `dtype` first computes its products with
        their `biases`, and another kernel computes the outputs from them.
        """
        folded = self.folded(dtype)[0] if biases else self
        return sum(folded._passes(group) for group in folded.groups())

    def _passes(self, group: OutputGroup) -> int:
        made = [self.outputs[i] for i in group.outputs if not isinstance(self.outputs[i], ProductTerm)]
        read = {term for output in made for term in walk(output) if isinstance(term, ProductTerm)}
        full = {term for output in made for term in walk(output) if isinstance(term, Extra) and term.kind == "full"}
        return len(read) + len(full) + len(made)

    def folded(self, dtype: str) -> tuple[Epilogue, dict[int, int]]:
        """Separates the biases: returns the epilogue of products that have their biases already, in a node of `dtype`,
        and the extra tensors that are biases, by product. A bias is a row that is added wherever the product is used,
        with the sum rounded to `dtype` at once.
        """
        uses = Counter(term.index for output in self.outputs for term in walk(output) if isinstance(term, ProductTerm))
        sums = Counter(term for output in self.outputs for term in _biased(output, dtype, rounded=True))
        biases = {product: row for (product, row), count in sums.items() if count == uses[product]}
        return Epilogue(tuple(_unbiased(output, biases, dtype) for output in self.outputs)), biases

    def verify(
        self, num_weights: int, num_extras: int, *, reduces: bool = False, of_experts: bool = False
    ) -> None:
        """Raises `InvalidEpilogue` unless it fits a node with so many weights and extras. reduces: the node reduces.
        of_experts: its rows have experts.
        """
        if self.pre is not None:
            self._verify_pre(reduces)
        _check(bool(self.outputs), self.text(), "has no output")
        for output in self.outputs:
            _check(bool(products(output)), self.text(), f"has an output without a product: {text(output)}")
        used = {index for output in self.outputs for index in products(output)}
        _check(used == set(range(num_weights)), self.text(), f"uses the products {sorted(used)} of {num_weights}")
        indices = [extra.index for extra in self.extras()]
        _check(indices == list(range(num_extras)), self.text(), f"uses the extra tensors {indices} of {num_extras}")
        tables = [extra.kind for extra in self.extras() if extra.kind in EXPERT_KINDS]
        _check(of_experts or not tables, self.text(), f"reads tables of experts {tables}, but its rows have none")
        most = max(len(group.products) for group in self.groups())
        _check(most <= MAX_TOGETHER, self.text(), f"combines {most} products, more than {MAX_TOGETHER}")

    def _verify_pre(self, reduces: bool) -> None:
        assert self.pre is not None
        _check(reduces, self.text(), "has a part before the reduction, but nothing is reduced")
        _check(products(self.pre) == {0}, self.text(), f"reduces something else than a product: {text(self.pre)}")
        # The rows of the product are not those of a scattered sum.
        both = {extra.index for extra in extras_of(self.outputs)} & {extra.index for extra in extras_of((self.pre,))}
        _check(not both, self.text(), f"uses the extra tensors {sorted(both)} before and behind the reduction")


def parse(source: str) -> Epilogue:
    """The epilogue of a text. Raises `InvalidEpilogue` for anything that is not in the grammar."""
    _check(len(source) <= MAX_TEXT, source, f"is longer than {MAX_TEXT} characters")
    first, *parts = (part.strip() for part in source.split(";"))
    if not first.startswith(PRE):
        return Epilogue(tuple(_parse_output(part, source) for part in (first, *parts)))
    pre = _parse_output(first.removeprefix(PRE).strip(), source)
    return Epilogue(tuple(_parse_output(part, source) for part in parts), pre)


def text(expression: Expression) -> str:
    """The one text of an expression."""
    match expression:
        case ProductTerm(index):
            return f"mm{index}"
        case Extra(kind, index):
            return f"{kind}(x{index})"
        case Number(value):
            return repr(value)
        case Function(name, argument):
            return f"{name}({text(argument)})"
        case Cast(argument, dtype):
            return f"cast({text(argument)}, {dtype})"
        case Binary(operator, left, right) if operator in FUNCTIONS_OF_TWO:
            return f"{operator}({text(left)}, {text(right)})"
        case Binary(operator, left, right):
            level = _level(expression)
            first = f"({text(left)})" if _level(left) < level else text(left)
            second = f"({text(right)})" if _level(right) <= level else text(right)
            return f"{first} {operator} {second}"


def walk(expression: Expression) -> Iterator[Expression]:
    yield expression
    match expression:
        case Function(_, argument) | Cast(argument, _):
            yield from walk(argument)
        case Binary(_, left, right):
            yield from walk(left)
            yield from walk(right)


def mapped(expression: Expression, change: Callable[[Expression], Expression]) -> Expression:
    """Returns the expression with `change` of each of its operands."""
    match expression:
        case Function(_, argument) | Cast(argument, _):
            return replace(expression, argument=mapped(argument, change))
        case Binary(operator, left, right):
            return Binary(operator, mapped(left, change), mapped(right, change))
    return change(expression)


def extras_of(expressions: Iterable[Expression]) -> Iterator[Extra]:
    return (term for expression in expressions for term in walk(expression) if isinstance(term, Extra))


def _biased(expression: Expression, dtype: str, *, rounded: bool) -> Iterator[tuple[int, int]]:
    """Yields (product, row) for each sum of the two that is rounded to `dtype` at once. rounded: so is the whole."""
    match expression:
        case Binary("+", ProductTerm(product), Extra("row", row)):
            if rounded or dtype == "fp32":
                yield product, row
        case Cast(argument, to):
            yield from _biased(argument, dtype, rounded=to == dtype)
        case Function(_, argument):
            yield from _biased(argument, dtype, rounded=False)
        case Binary(_, left, right):
            yield from _biased(left, dtype, rounded=False)
            yield from _biased(right, dtype, rounded=False)


def _unbiased(expression: Expression, biases: dict[int, int], dtype: str) -> Expression:
    match expression:
        case Binary("+", ProductTerm(product), Extra("row", row)) if biases.get(product) == row:
            return ProductTerm(product)
        case Cast(argument, to):
            inner = _unbiased(argument, biases, dtype)
            return inner if isinstance(inner, ProductTerm) and to == dtype else Cast(inner, to)
        case Function(name, argument):
            return Function(name, _unbiased(argument, biases, dtype))
        case Binary(operator, left, right):
            return Binary(operator, _unbiased(left, biases, dtype), _unbiased(right, biases, dtype))
    return expression


def products(expression: Expression) -> frozenset[int]:
    return frozenset(term.index for term in walk(expression) if isinstance(term, ProductTerm))


def _level(expression: Expression) -> int:
    """Returns how tightly an expression binds."""
    if not isinstance(expression, Binary) or expression.operator in FUNCTIONS_OF_TWO:
        return 3
    return 1 if expression.operator in "+-" else 2


def _check(holds: bool, source: str, problem: str) -> None:
    if not holds:
        raise InvalidEpilogue(text=_short(source), problem=problem)


def _parse_output(part: str, source: str) -> Expression:
    try:
        body = ast.parse(part, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidEpilogue(text=_short(source), problem=f"cannot be parsed at {_short(part)!r}") from error
    return _Reader(part, source).read(body)


@dataclass(frozen=True)
class _Reader:
    """Reads the syntax tree of `part`, one part of the epilogue `source`."""

    part: str
    source: str

    def read(self, node: ast.expr, depth: int = 1) -> Expression:
        _check(depth <= MAX_DEPTH, self.source, f"has more than {MAX_DEPTH} operations inside each other")
        match node:
            case ast.Name(id=name):
                return ProductTerm(self.index(name, "mm"))
            case ast.Constant(value=float(value)):
                return self.number(value)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=float(value))):
                return self.number(-value)
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in OPERATORS:
                operands = self.read(left, depth + 1), self.read(right, depth + 1)
                return Binary(OPERATORS[type(operator)], *operands)
            case ast.Call(func=ast.Name(id=kind), args=[ast.Name(id=name)], keywords=[]) if kind in READ:
                return Extra(kind, self.index(name, "x"))
            case ast.Call(func=ast.Name(id=name), args=[left, right], keywords=[]) if name in FUNCTIONS_OF_TWO:
                return Binary(name, self.read(left, depth + 1), self.read(right, depth + 1))
            case ast.Call(func=ast.Name(id="cast"), args=[value, ast.Name(id=dtype)], keywords=[]) if dtype in DTYPES:
                return Cast(self.read(value, depth + 1), dtype)
            case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
                return Function(name, self.read(argument, depth + 1))
        raise self.refused(ast.get_source_segment(self.part, node) or self.part)

    def number(self, value: float) -> Number:
        _check(abs(value) < float("inf"), self.source, "has a number that is not finite")
        return Number(value)

    def index(self, name: str, prefix: str) -> int:
        digits = name.removeprefix(prefix)
        plain = name.startswith(prefix) and digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS
        if not plain or str(int(digits)) != digits:
            raise self.refused(name)
        return int(digits)

    def refused(self, text: str) -> InvalidEpilogue:
        return InvalidEpilogue(text=_short(self.source), problem=f"may not contain {_short(text)!r}")


def _short(text: str) -> str:
    """Returns a text, cut to its beginning if it is long."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}.."
