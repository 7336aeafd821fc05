"""The text of a node: every node reads back as itself, equal ones have one text, and what is no text is an error."""

from __future__ import annotations

import dataclasses
import math
import random
import types
import typing
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from ditron_inductor.task.attention_masks import Mask
from ditron_inductor.task.codec import INLINED, decode, encode
from ditron_inductor.task.nodes import (
    EXTRAS,
    NODES,
    AllGatherAttention,
    AllGatherMatmul,
    AllReduceRmsNorm,
    MatmulAllReduce,
    MatmulAllReduceRmsNorm,
    Norm,
    Policy,
    Projections,
    ShardNorm,
)

STRINGS = (
    *("", "0", "tp", "default_pg:1", "be5e4ea9/0:all_gather_matmul@7f", "a\\b", "8+24 16-8", "x y", " x ", "a=b", "()"),
    *("it's", 'so "called"', "both ' and \"", "world_size=3", "has_bias", "a\nb\tc", "\\n", "\x00", "über", "\u3000", "+"),
    *("cast(silu(mm0), bf16) * mm1 + row(x0); mm1", "pre: mm0 * column(x0); mm0", "\ud800", "🙂", "'", '"', "\\'"),
)
NUMBERS = (0, 1, 2, -1, -7, 63, 1 << 30, -(1 << 40), 2**63 - 1)
FLOATS = (0.0, 1.0, -1.5, 0.1, 1e-6, 1e20, 1 / 3, 5e-324, 1.7976931348623157e308, math.pi, math.inf, -math.inf, 600.0)


def random_value(kind: Any, random: random.Random) -> Any:
    """A value of a field's type, mostly none that is likely."""
    if isinstance(kind, types.UnionType):
        (some,) = (one for one in typing.get_args(kind) if one is not types.NoneType)
        return random_value(some, random) if random.random() < 0.7 else None
    if dataclasses.is_dataclass(kind):
        return random_instance(kind, random)
    if kind is bool:
        return random.random() < 0.5
    if kind is int:
        return random.choice(NUMBERS) if random.random() < 0.7 else random.randint(-(2**63), 2**63 - 1)
    if kind is float:
        return random.choice(FLOATS) if random.random() < 0.7 else random.uniform(-1, 1) * 10 ** random.randint(-30, 30)
    if kind is str:
        odd = "".join(random.choice(" ab0'\"()=+\\;:/\n") for _ in range(random.randint(0, 9)))
        return random.choice([*STRINGS, odd])
    assert kind == tuple[str, ...], kind
    return tuple(random.choice([*EXTRAS, *STRINGS]) for _ in range(random.randint(0, 4)))


def random_instance(cls: Any, random: random.Random) -> Any:
    """An instance, with some of its fields at their defaults."""
    hints = typing.get_type_hints(cls)
    given = {}
    for one in dataclasses.fields(cls):
        if one.default is dataclasses.MISSING or random.random() < 0.6:
            given[one.name] = random_value(hints[one.name], random)
    return cls(**given)


@pytest.mark.parametrize("kind", list(NODES))
def test_every_node_reads_back_as_itself(kind: str) -> None:
    generator = random.Random(f"nodes {kind}")
    texts: dict[str, Any] = {}
    for _ in range(300):
        node = random_instance(NODES[kind], generator)
        text = node.text()
        read = decode(NODES[kind], text)
        assert read == node and hash(read) == hash(node), text
        assert text.isprintable() and text.strip() == text
        # Different nodes have different texts.
        assert texts.setdefault(text, node) == node
    assert len(texts) > (20 if kind == Projections.kind else 200)


def test_every_field_is_told_apart() -> None:
    """Two nodes that differ in one field only have different texts, and so it is for the fields within fields."""
    generator = random.Random("fields")
    for cls in NODES.values():
        hints = typing.get_type_hints(cls)
        for one in dataclasses.fields(cls):
            node = random_instance(cls, generator)
            for _ in range(20):
                other = replace(node, **{one.name: random_value(hints[one.name], generator)})
                assert (encode(other) == encode(node)) is (other == node), one.name


@pytest.mark.parametrize("string", STRINGS)
def test_strings(string: str) -> None:
    node = MatmulAllReduce("sum", 4, string, string, Policy(string), epilogue=string)
    assert decode(MatmulAllReduce, node.text()) == node
    named = AllReduceRmsNorm("sum", Norm(string), (string, "weight", string), 4, "0", "r/0", Policy(), saved=(string,))
    assert decode(AllReduceRmsNorm, named.text()) == named


def test_strings_are_bare_where_they_can_be() -> None:
    node = AllGatherMatmul(1, 4, "tp", False, "be5e4ea9/0:all_gather_matmul", Policy(), 2, epilogue="silu(mm0) * mm1")
    assert node.text() == (
        "gather_dim=1 world_size=4 group_name=tp site=be5e4ea9/0:all_gather_matmul num_weights=2 "
        "epilogue='silu(mm0) * mm1'"
    )
    assert replace(node, site="", epilogue="it's").text().endswith("site='' num_weights=2 epilogue=\"it's\"")


@pytest.mark.parametrize("number", [*FLOATS, 0.1 + 0.2, 1e16 + 2])
def test_floats_are_exact(number: float) -> None:
    read = decode(AllGatherAttention, AllGatherAttention(Mask("full"), number, 0.0, 4, "0", "", Policy()).text())
    assert read.scale.hex() == number.hex()


@pytest.mark.parametrize("number", NUMBERS)
def test_integers_may_be_negative(number: int) -> None:
    node = AllGatherAttention(Mask("causal", number, number), 1.0, 0.0, number, "0", "", Policy())
    assert decode(AllGatherAttention, node.text()) == node


def test_equal_nodes_have_one_text() -> None:
    def made(timeout: float, softcap: float, limit: Any, returned: Any) -> AllGatherAttention:
        return AllGatherAttention(Mask("full"), 1.0, softcap, 4, "0", "r/0", Policy("tile", limit, timeout), returned)

    node = made(5.0, 0.0, 1, True)
    for other in (made(5, 0, True, 1), made(5.0, -0.0, 1, True)):
        assert other == node and other.text() == node.text()
        assert decode(AllGatherAttention, other.text()) == node
    assert "timeout_s=5.0" in node.text() and "workspace_limit=1 " in node.text()
    with pytest.raises(TypeError):
        encode(made(5.0, 0.0, 1.5, True))


def test_texts_and_nodes_are_made_once() -> None:
    node = MatmulAllReduce("sum", 4, "made once", "r/0", Policy("tile"))
    twin = replace(node, policy=replace(node.policy))
    assert twin is not node and twin.text() is node.text()
    again = "".join(list(node.text()))
    assert again is not node.text() and decode(MatmulAllReduce, again) is decode(MatmulAllReduce, node.text())
    # One text, read as two kinds, is two nodes.
    text = AllReduceRmsNorm("sum", Norm(), (), 4, "0", "r/0", Policy()).text()
    assert decode(MatmulAllReduceRmsNorm, text) != decode(AllReduceRmsNorm, text)


def test_structures() -> None:
    node = AllGatherMatmul(
        1,
        4,
        "0",
        True,
        "r/0",
        Policy("chunked", timeout_s=1.5),
        1,
        prologue=ShardNorm(Norm("layer", 1e-5, plus_one=True), ("residual", "weight"), ("rstd",)),
    )
    assert node.text() == (
        "gather_dim=1 world_size=4 group_name=0 return_gathered site=r/0 strategy=chunked timeout_s=1.5 num_weights=1 "
        "prologue=(norm=(form=layer eps=1e-05 plus_one) extras=residual+weight saved=rstd)"
    )
    assert decode(AllGatherMatmul, node.text()) == node
    plain = replace(node, prologue=ShardNorm(Norm()), policy=Policy())
    assert plain.text().endswith("site=r/0 num_weights=1 prologue=(norm=())")
    assert decode(AllGatherMatmul, plain.text()) == plain
    assert decode(AllGatherMatmul, plain.text()) != replace(plain, prologue=None)
    assert "prologue" not in replace(plain, prologue=None).text()


def test_no_names_and_one_without_letters() -> None:
    node = AllReduceRmsNorm("sum", Norm(), (), 4, "0", "r/0", Policy())
    assert node.text() == "reduce_op=sum norm=() extras=() world_size=4 group_name=0 site=r/0"
    for names in ((), ("",), ("", ""), ("+",), ("()",), ("a b", "c=d")):
        for saved in (names, ()):
            other = replace(node, extras=names, saved=saved)
            assert decode(AllReduceRmsNorm, other.text()) == other


@dataclass(frozen=True)
class Inner:
    depth: int = 3
    wide: bool = True


@dataclass(frozen=True)
class Outer:
    flag: bool
    set_at_first: bool = True
    ratio: float | None = None
    inner: Inner | None = None
    beside: Inner = field(default=Inner(), metadata=INLINED)


def test_flags_whose_default_is_to_be_set_and_fields_that_may_be_none() -> None:
    texts = set()
    for flag in (False, True):
        for at_first in (False, True):
            for ratio in (None, 0.0, 2.0):
                for inner in (None, Inner(), Inner(4, False)):
                    for beside in (Inner(), Inner(3, False), Inner(-1)):
                        value = Outer(flag, at_first, ratio, inner, beside)
                        assert decode(Outer, encode(value)) == value
                        texts.add(encode(value))
    assert len(texts) == 2 * 2 * 3 * 3 * 3
    assert encode(Outer(False)) == "set_at_first wide" and encode(Outer(True, False, beside=Inner(5, False))) == (
        "flag depth=5"
    )


REDUCE = "reduce_op=sum world_size=4 group_name=0 site=r/0"
GATHER = "gather_dim=1 world_size=4 group_name=0 site=r/0 num_weights=1"


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (MatmulAllReduce, f"{REDUCE} colour=red", "MatmulAllReduce has no field 'colour'"),
        (MatmulAllReduce, f"{REDUCE} policy=()", "MatmulAllReduce has no field 'policy'"),
        (MatmulAllReduce, f"{REDUCE} kind=x", "MatmulAllReduce has no field 'kind'"),
        (MatmulAllReduce, "", "MatmulAllReduce: the field 'reduce_op' is missing"),
        (MatmulAllReduce, "reduce_op=sum world_size=4 site=r/0", "the field 'group_name' is missing"),
        (MatmulAllReduce, f"{REDUCE} num_products", "MatmulAllReduce: the field 'num_products' has no value"),
        (MatmulAllReduce, f"{REDUCE} num_products=", "the field 'num_products': no value"),
        (MatmulAllReduce, f"{REDUCE} num_products= has_bias", "the field 'num_products': no value"),
        (MatmulAllReduce, f"{REDUCE} epilogue= has_bias", "the field 'epilogue': no value"),
        (MatmulAllReduce, f"{REDUCE} has_bias=True", "the field 'has_bias' is a flag"),
        (MatmulAllReduce, f"{REDUCE} has_bias=False", "the field 'has_bias' is a flag"),
        (MatmulAllReduce, f"{REDUCE} has_bias has_bias", "the field 'has_bias' stands there twice"),
        (MatmulAllReduce, f"{REDUCE} reduce_op=avg", "the field 'reduce_op' stands there twice"),
        (MatmulAllReduce, REDUCE.replace("=4", "=1.5"), "the field 'world_size': '1.5' is no int"),
        (MatmulAllReduce, REDUCE.replace("=4", "=four"), "the field 'world_size': 'four' is no int"),
        (MatmulAllReduce, f"{REDUCE} timeout_s=soon", "MatmulAllReduce: the field 'timeout_s': 'soon' is no float"),
        (MatmulAllReduce, f"{REDUCE} timeout_s=1.5s", "the field 'timeout_s': '1.5s' is no float"),
        (MatmulAllReduce, f"{REDUCE} workspace_limit=1e6", "the field 'workspace_limit': '1e6' is no int"),
        (MatmulAllReduce, f"{REDUCE} !", "MatmulAllReduce: unexpected ' !'"),
        (MatmulAllReduce, f"{REDUCE})", "MatmulAllReduce: unexpected '\\)'"),
        (MatmulAllReduce, f"{REDUCE}=x", "MatmulAllReduce: unexpected '=x'"),
        (MatmulAllReduce, f"{REDUCE}'x'", "MatmulAllReduce: unexpected"),
        (MatmulAllReduce, f"{REDUCE} epilogue='mm0", "the field 'epilogue': no value"),
        (MatmulAllReduce, f"{REDUCE} epilogue=mm0'", "MatmulAllReduce: unexpected"),
        (MatmulAllReduce, f"{REDUCE} epilogue=(mm0)", "the field 'epilogue': no value"),
        (MatmulAllReduce, f"{REDUCE} epilogue='\\x'", "the field 'epilogue': '\\\\x' is no string"),
        (AllGatherMatmul, f"{GATHER} prologue=norm", "the field 'prologue': no ShardNorm in parentheses"),
        (AllGatherMatmul, f"{GATHER} prologue=()", "the field 'prologue': ShardNorm: the field 'norm' is missing"),
        (AllGatherMatmul, f"{GATHER} prologue=(norm=()", "no closing parenthesis of a ShardNorm"),
        (AllGatherMatmul, f"{GATHER} prologue=(norm=(eps=1.0 saved=rstd)", "Norm has no field 'saved'"),
        (AllGatherMatmul, f"{GATHER} prologue=(norm=(eps=1.0 !))", "no closing parenthesis of a Norm"),
        (AllGatherMatmul, f"{GATHER} prologue=(norm=(eps=much))", "Norm: the field 'eps': 'much' is no float"),
        (AllGatherMatmul, f"{GATHER} prologue=(norm=()))", "AllGatherMatmul: unexpected '\\)'"),
        (AllGatherMatmul, f"{GATHER} prologue=(norm=() extras=a+)", "ShardNorm: the field 'extras': no value"),
        (AllGatherMatmul, f"{GATHER} prologue=(norm=() strategy=tile)", "ShardNorm has no field 'strategy'"),
    ],
)
def test_what_is_no_text_names_its_class_or_field(kind: Any, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decode(kind, text)


@pytest.mark.parametrize(
    "text",
    [
        f" {REDUCE}",
        f"{REDUCE} ",
        REDUCE.replace(" world", "  world"),
        REDUCE.replace("=sum", "='sum'"),
        REDUCE.replace("=4", "=04"),
        REDUCE.replace("=4", "=+4"),
        f"{REDUCE} num_products=1",
        f"{REDUCE} timeout_s=2",
        f"{REDUCE} epilogue='mm0'has_bias",
        f"{REDUCE} has_bias num_products=2",
        "world_size=4 reduce_op=sum group_name=0 site=r/0",
    ],
)
def test_a_node_has_no_other_text(text: str) -> None:
    """Texts are compared, by those who look for equal nodes."""
    with pytest.raises(ValueError, match="MatmulAllReduce: .* has to be written 'reduce_op=sum world_size=4"):
        decode(MatmulAllReduce, text)


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
def test_random_changes_of_a_text_never_pass_unseen() -> None:
    """What still is a text stands for another node; the rest is a ValueError, and no other error."""
    generator = random.Random("changes")
    seen = {True: 0, False: 0}
    for _ in range(1500):
        cls: Any = generator.choice(list(NODES.values()))
        node = random_instance(cls, generator)
        text = node.text()
        place, count = generator.randrange(len(text)), generator.randint(0, 3)
        changed = text[:place] + generator.choice(["", " ", "'", "(", ")", "=", "+", "x", "1"]) + text[place + count :]
        try:
            read = decode(cls, changed)
        except ValueError as error:
            assert "has no field" in str(error) or any(name.__name__ in str(error) for name in (cls, Norm, Mask))
            seen[False] += 1
            continue
        assert encode(read) == changed and (read == node) is (changed == text)
        seen[True] += 1
    assert min(seen.values()) > 100
