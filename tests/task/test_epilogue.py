"""The text of epilogues: what it may hold, that it has one form, and what torch computes from it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ditron_inductor.errors import InvalidEpilogue
from ditron_inductor.task import epilogue as language
from ditron_inductor.task.epilogue import (
    Binary,
    Cast,
    Epilogue,
    Expression,
    Extra,
    Function,
    Number,
    OutputGroup,
    ProductTerm,
    parse,
)
from ditron_inductor.task.epilogue_torch import evaluate, extra_shape

TEXTS = (
    "mm0",
    "silu(mm0) * mm1",
    "cast(silu(mm0), bf16) * mm1; mm0; mm1",
    "mm0 + row(x0)",
    "(mm0 + row(x0)) * scalar(x1) - column(x2) / full(x3)",
    "mm0 - (mm1 - -0.5) - 1e-06",
    "mm0 / (exp(neg(mm0)) + 1.0); cast(square(relu(mm0)), fp32)",
)
REFUSED = (
    "", "mm0;", "mm0 mm1", "x0", "mm", "mm-1", "mm01", "mm0 ** 2.0", "mm0 + 1", "mm0 + True", "mm0 if mm1 else mm0",
    "__import__('os')", "silu(mm0, mm1)", "silu(x=mm0)", "cast(mm0, int8)", "cast(mm0, 'bf16')", "row(mm0)",
    "row(x0, x1)", "mm0.real", "mm0[0]", "f'{mm0}'", "(lambda: mm0)()", "1e999 * mm0", "exec(mm0)", "-mm0",
    "mm0 @ mm1", "[mm0]", "(" * 500 + "mm0" + ")" * 500, "mm0 + " * 2000 + "mm0",
)  # fmt: skip


@pytest.mark.parametrize("source", TEXTS)
def test_a_text_reads_back(source: str) -> None:
    assert parse(source).text() == source


@pytest.mark.parametrize("source", REFUSED)
def test_nothing_else_is_read(source: str) -> None:
    with pytest.raises(InvalidEpilogue):
        parse(source)


# A few of what Python's parser takes, and what works on its result does not: depth, digits, characters.
TOO_MUCH = {
    "terms": "+".join(["mm0"] * 2000),
    "factors": "*".join(["mm0"] * 2000),
    "right": "mm0+(" * 150 + "mm0" + ")" * 150,
    "functions": "exp(" * 150 + "mm0" + ")" * 150,
    "casts": "cast(" * 150 + "mm0" + ",bf16)" * 150,
    "negations": "-" * 3000 + "0.5",
    "index": f"mm{'1' * 5000}",
    "index_of_an_extra": f"mm0 + row(x{'1' * 5000})",
    "integer": "mm0 * " + "1" * 5000,
    "hexadecimal": f"mm0 * 0x{'f' * 5000}",
    "comparisons": "mm0" + "<mm0" * 1500,
    "attributes": "mm0" + ".a" * 3000,
    "brackets": "[" * 100 + "mm0" + "]" * 100,
    "null": "mm0 \0",
    "surrogate": "mm0 + \ud800",
    "string": "'" + "a" * 4000 + "'",
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_too_much_of_anything_is_refused(name: str) -> None:
    with pytest.raises(InvalidEpilogue) as error:
        parse(TOO_MUCH[name])
    assert len(str(error.value)) < 1000


def test_as_deep_as_allowed() -> None:
    source = " + ".join(["mm0"] * language.MAX_DEPTH)
    epilogue = parse(source)
    epilogue.verify(1, 0)
    assert epilogue.text() == source and epilogue.passes("bf16") == 2
    (sum_of_all,) = evaluate(epilogue, [torch.ones(2, 3)], [])
    assert torch.equal(sum_of_all, torch.full((2, 3), float(language.MAX_DEPTH)))
    with pytest.raises(InvalidEpilogue, match="inside each other"):
        parse(f"{source} + mm0")


@given(st.lists(st.sampled_from(["mm0", "mm1", "x0", "row(", "full(x1)", "cast(", ")", "(", ",", " bf16", "+", "-", "*", "/", "0.5",
                                 "1e400", "1", ";", "pre:", " ", "silu(", "\n", "\\", "#", "'", "[", "]", ":=", "lambda: "])
                | st.text(max_size=4), max_size=40))  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_a_text_of_any_kind_is_an_epilogue_or_refused(parts: list[str]) -> None:
    try:
        epilogue = parse("".join(parts))
        assert parse(epilogue.text()) == epilogue
        epilogue.verify(2, 2, reduces=True)
    except InvalidEpilogue:
        return
    epilogue.passes("bf16")


def test_outputs_that_share_a_product_are_one_group() -> None:
    found = parse("mm3 + row(x0); silu(mm0) * mm2; mm1; mm2").groups()
    assert found == (OutputGroup((0, 2), (1, 3)), OutputGroup((1,), (2,)), OutputGroup((3,), (0,)))


@pytest.mark.parametrize(
    ("source", "num_weights", "num_extras", "problem"),
    [
        ("mm0", 2, 0, "products"),
        ("mm2; mm0", 2, 0, "products"),
        ("mm0; full(x0)", 1, 1, "without a product"),
        ("mm0 + row(x1)", 1, 1, "extra tensors"),
        ("mm0 + row(x0)", 1, 2, "extra tensors"),
        ("mm0 + row(x0) * column(x0)", 1, 1, "extra tensors"),
        ("mm0 * mm1; mm1 * mm2", 3, 0, "combines 3"),
    ],
)
def test_what_does_not_fit_the_node_is_refused(source: str, num_weights: int, num_extras: int, problem: str) -> None:
    with pytest.raises(InvalidEpilogue, match=problem):
        parse(source).verify(num_weights, num_extras)


@pytest.mark.parametrize(
    ("source", "num_extras", "reduces", "problem"),
    [
        ("pre: mm0 * column(x0); mm0", 1, False, "nothing is reduced"),
        ("pre: column(x0); mm0", 1, True, "something else than a product"),
        ("pre: mm0 * mm1; mm0", 0, True, "something else than a product"),
        ("pre: mm0 * row(x0); mm0 + row(x0)", 1, True, "before and behind"),
        ("pre: mm0 * row(x1); mm0", 2, True, "extra tensors"),
        ("pre: relu(mm0)", 0, True, "no output"),
    ],
)
def test_what_is_reduced_is_made_of_one_product(source: str, num_extras: int, reduces: bool, problem: str) -> None:
    with pytest.raises(InvalidEpilogue, match=problem):
        parse(source).verify(1, num_extras, reduces=reduces)


def test_the_parts_of_a_reduction() -> None:
    epilogue = parse("pre: mm0 * column(x0); full(x1) + mm0")
    epilogue.verify(1, 2, reduces=True)
    assert epilogue.pre is not None and epilogue.behind == parse("full(x1) + mm0")
    assert parse("pre: relu(mm0); mm0").behind is None


def _expressions() -> st.SearchStrategy[Expression]:
    numbers = st.floats(-4.0, 4.0, width=32).map(lambda value: Number(value + 0.0))
    extras = st.builds(Extra, st.sampled_from(language.KINDS), st.integers(0, 3)).map(
        lambda one: Extra(language.KINDS[one.index], one.index)
    )
    leaves = st.builds(ProductTerm, st.integers(0, 1)) | extras | numbers
    return st.recursive(
        leaves,
        lambda inner: (
            st.builds(Function, st.sampled_from(language.FUNCTIONS), inner)
            | st.builds(Binary, st.sampled_from((*language.OPERATORS.values(), *language.FUNCTIONS_OF_TWO)), inner, inner)
            | st.builds(Cast, inner, st.sampled_from(language.DTYPES))
        ),
        max_leaves=8,
    )


@given(st.lists(_expressions(), min_size=1, max_size=3), st.none() | _expressions())
@settings(max_examples=75, deadline=None)
def test_round_trip_of_anything(outputs: list[Expression], pre: Expression | None) -> None:
    epilogue = Epilogue(tuple(outputs), pre)
    again = parse(epilogue.text())
    assert again == epilogue and again.text() == epilogue.text()


@given(_expressions(), st.integers(0, 5))
@settings(max_examples=50, deadline=None)
def test_torch_computes_what_the_text_says(expression: Expression, seed: int) -> None:
    """Python reads the text as the arithmetic that it looks like."""
    torch.manual_seed(seed)
    mm = torch.randn(2, 3, 4)
    expression = Binary("+", expression, ProductTerm(0))
    x = [torch.randn(extra_shape(kind, mm[0].shape)) for kind in language.KINDS]
    names = {
        "neg": torch.neg, "relu": torch.relu, "square": torch.square, "exp": torch.exp, "erf": torch.erf,
        "tanh": torch.tanh, "sigmoid": torch.sigmoid, "silu": F.silu, "gelu": F.gelu,
        "gelu_tanh": lambda one: F.gelu(one, approximate="tanh"),
        "minimum": torch.minimum, "maximum": torch.maximum,
        "cast": lambda one, dtype: one.to(dtype).float(),
        "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32,
        "mm0": mm[0], "mm1": mm[1], **{f"x{i}": one for i, one in enumerate(x)},
        **dict.fromkeys(language.KINDS, lambda one: one),
    }  # fmt: skip
    source = language.text(expression)
    numbered = language.text(_with_tensors(expression, names))
    wanted = eval(numbered, {**names}) + torch.zeros(3, 4)
    (got,) = evaluate(parse(source), list(mm), x)
    torch.testing.assert_close(got, wanted, equal_nan=True)


def _with_tensors(expression: Expression, names: dict[str, object]) -> Expression:
    """The expression with its numbers as tensors `n0`, ..: functions of torch take no numbers."""
    match expression:
        case Number(value):
            index = 100 + len(names)
            names[f"mm{index}"] = torch.tensor(value)
            return ProductTerm(index)
        case Function(name, argument):
            return Function(name, _with_tensors(argument, names))
        case Cast(argument, dtype):
            return Cast(_with_tensors(argument, names), dtype)
        case Binary(operator, left, right):
            return Binary(operator, _with_tensors(left, names), _with_tensors(right, names))
    return expression


@pytest.mark.parametrize(
    ("source", "rest", "biases", "passes"),
    [
        ("mm0 + row(x0)", "mm0", {0: 0}, 0),
        ("mm0 + row(x0); gelu(cast(mm0 + row(x0), bf16))", "mm0; gelu(mm0)", {0: 0}, 2),
        ("cast(silu(mm0), bf16) * mm1", "cast(silu(mm0), bf16) * mm1", {}, 3),
        # Used without it too, rounded later, another row, no row.
        ("mm0 + row(x0); mm0", "mm0 + row(x0); mm0", {}, 2),
        ("silu(mm0 + row(x0))", "silu(mm0 + row(x0))", {}, 2),
        ("mm0 + row(x0); mm0 + row(x1)", "mm0 + row(x0); mm0 + row(x1)", {}, 3),
        ("mm0 + full(x0)", "mm0 + full(x0)", {}, 3),
    ],
)
def test_what_is_left_when_products_have_their_biases(
    source: str, rest: str, biases: dict[int, int], passes: int
) -> None:
    folded, found = parse(source).folded("bf16")
    assert (folded.text(), found) == (rest, biases)
    assert parse(source).passes("bf16") == passes


def test_rounding_is_where_the_text_says() -> None:
    mm = torch.tensor([[1.0 + 2**-7]], dtype=torch.bfloat16)
    once, twice = evaluate(parse("mm0 * mm0 * mm0; cast(mm0 * mm0, bf16) * mm0"), [mm], [])
    assert torch.equal(once, (mm.float() ** 3).bfloat16())
    assert torch.equal(twice, mm * mm * mm)
    (exact,) = evaluate(parse("cast(mm0 * mm0, bf16)"), [mm.double()], [])
    assert torch.equal(exact, mm.double() ** 2)


def test_an_output_may_have_its_own_dtype() -> None:
    outputs = evaluate(parse("mm0; cast(mm0, fp32)"), [torch.ones(2, 3, dtype=torch.bfloat16)], [])
    assert [one.dtype for one in outputs] == [torch.bfloat16, torch.float32]
