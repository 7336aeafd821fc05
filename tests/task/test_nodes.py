"""Task nodes: their text, and the field that every illegal value is blamed on."""

from __future__ import annotations

import dataclasses
import textwrap

import expecttest
import pytest

from ditron_inductor.errors import InvalidTaskNode
from ditron_inductor.task.attention_masks import Mask
from ditron_inductor.task.nodes import (
    MAX_PRODUCTS,
    AllGatherAttention,
    AllGatherMatmul,
    AllReduceRmsNorm,
    AllToAllMatmul,
    AttentionReduceScatter,
    FlashDecode,
    MatmulAllGather,
    MatmulAllReduce,
    MatmulAllReduceRmsNorm,
    MatmulAllToAll,
    MatmulReduceScatter,
    Norm,
    Policy,
    TaskNode,
)
from ditron_inductor.task.schema import arguments, node_from_call, overload

POLICY = Policy("tile", 1 << 20, 1.5)
GATHER = AllGatherMatmul(1, 4, "0", True, "r/0", POLICY, 2)
SCATTER = MatmulReduceScatter(0, "avg", 4, "0", "r/1", POLICY)
REDUCE = MatmulAllReduce("sum", 4, "0", "r/2", POLICY, num_products=3, has_bias=True)
NORM = Norm("rms", 1e-6, round_first=True)
NORMED = AllReduceRmsNorm("sum", NORM, ("residual", "weight"), 4, "0", "r/3", POLICY)
SCALED = AllReduceRmsNorm(
    "sum", dataclasses.replace(NORM, unrounded=True), ("residual", "weight", "scale"), 4, "0", "r/3", POLICY
)
SAVED = ("reduced", "post_rstd", "mean")
DECODED = MatmulAllReduceRmsNorm(
    "avg", Norm("layer", 0.5), ("post_weight",), 4, "0", "r/4", POLICY, NORM, SAVED, 2, True, factor=0.25
)
GATHERED = MatmulAllGather(2, 4, "0", "r/3", POLICY, num_products=2, has_bias=True)
ATTENDED = FlashDecode(0.125, 30.0, 4, "0", "r/5", POLICY, True)
TO_HEADS = MatmulAllToAll(1, 3, 4, "0", "r/6", POLICY, num_products=2, has_bias=True)
TO_ROWS = AllToAllMatmul(1, 3, True, 4, "0", "r/7", POLICY)
GATHERED_KEYS = AllGatherAttention(Mask("causal", 40, 64, "8+24"), 0.25, 30.0, 4, "0", "r/8", POLICY, True)
SCATTERED_KEYS = AttentionReduceScatter(Mask("given"), 0.25, 0.0, 4, "0", "r/9", POLICY)
NODES = (
    *(GATHER, SCATTER, REDUCE, NORMED, SCALED, DECODED, GATHERED, TO_HEADS, TO_ROWS, ATTENDED),
    *(GATHERED_KEYS, SCATTERED_KEYS),
)


def test_golden_text() -> None:
    lines = "\n".join(textwrap.fill(f"{node.kind} {node.text()}", 100, subsequent_indent="  ") for node in NODES) + "\n"
    expecttest.assert_expected_inline(
        lines,
        """\
all_gather_matmul gather_dim=1 world_size=4 group_name=0 return_gathered site=r/0 strategy=tile
  workspace_limit=1048576 timeout_s=1.5 num_weights=2
matmul_reduce_scatter scatter_dim=0 reduce_op=avg world_size=4 group_name=0 site=r/1 strategy=tile
  workspace_limit=1048576 timeout_s=1.5
matmul_all_reduce reduce_op=sum world_size=4 group_name=0 site=r/2 strategy=tile
  workspace_limit=1048576 timeout_s=1.5 num_products=3 has_bias
all_reduce_rms_norm reduce_op=sum norm=(round_first) extras=residual+weight world_size=4
  group_name=0 site=r/3 strategy=tile workspace_limit=1048576 timeout_s=1.5
all_reduce_rms_norm reduce_op=sum norm=(round_first unrounded) extras=residual+weight+scale
  world_size=4 group_name=0 site=r/3 strategy=tile workspace_limit=1048576 timeout_s=1.5
matmul_all_reduce_rms_norm reduce_op=avg norm=(form=layer eps=0.5) extras=post_weight world_size=4
  group_name=0 site=r/4 strategy=tile workspace_limit=1048576 timeout_s=1.5 post=(round_first)
  saved=reduced+post_rstd+mean factor=0.25 num_products=2 has_bias
matmul_all_gather gather_dim=2 world_size=4 group_name=0 site=r/3 strategy=tile
  workspace_limit=1048576 timeout_s=1.5 num_products=2 has_bias
matmul_all_to_all gather_dim=1 parts=3 world_size=4 group_name=0 site=r/6 strategy=tile
  workspace_limit=1048576 timeout_s=1.5 num_products=2 has_bias
all_to_all_matmul scatter_dim=1 parts=3 return_received world_size=4 group_name=0 site=r/7
  strategy=tile workspace_limit=1048576 timeout_s=1.5
flash_decode scale=0.125 softcap=30.0 world_size=4 group_name=0 site=r/5 strategy=tile
  workspace_limit=1048576 timeout_s=1.5 paged
all_gather_attention mask=(kind=causal window=40 offset=64 jumps='8+24') scale=0.25 softcap=30.0
  world_size=4 group_name=0 site=r/8 strategy=tile workspace_limit=1048576 timeout_s=1.5
  return_gathered
attention_reduce_scatter mask=(kind=given) scale=0.25 softcap=0.0 world_size=4 group_name=0 site=r/9
  strategy=tile workspace_limit=1048576 timeout_s=1.5
""",
    )


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.kind)
def test_a_node_is_frozen_equal_by_value_and_legal(node: TaskNode) -> None:
    node.verify()
    assert node == dataclasses.replace(node)
    assert hash(node) == hash(dataclasses.replace(node))
    with pytest.raises(dataclasses.FrozenInstanceError):
        node.site = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("node", "field", "value"),
    [
        (GATHER, "gather_dim", -1),
        (GATHER, "num_weights", 0),
        (GATHER, "world_size", 1),
        (GATHER, "epilogue", "mm0"),
        (GATHER, "epilogue", "mm0 + full(x0); mm1"),
        (GATHER, "epilogue", "mm0; eval(mm1)"),
        (GATHER, "num_extras", 1),
        (GATHER, "group_name", ""),
        (SCATTER, "scatter_dim", -2),
        (SCATTER, "reduce_op", "max"),
        (SCATTER, "world_size", 0),
        (SCATTER, "num_products", 0),
        (REDUCE, "num_products", MAX_PRODUCTS + 1),
        (REDUCE, "reduce_op", "product"),
        (REDUCE, "group_name", ""),
        (NORMED, "reduce_op", "max"),
        (NORMED, "extras", ("weight", "residual")),
        (NORMED, "saved", ("rstd", "mean")),
        (NORMED, "saved", ("post_rstd",)),
        (NORMED, "extras", ("post_weight", "weight")),
        (NORMED, "extras", ("residual", "weight", "other_weight")),
        (DECODED, "extras", ("gain",)),
        (DECODED, "norm", Norm("layer", 0.5, unrounded=True)),
        (NORMED, "norm", Norm("none", 0.0, unrounded=True)),
        (NORMED, "post", Norm("rms", 1e-6, unrounded=True)),
        (NORMED, "factor", float("inf")),
        (SCALED, "factor", 0.5),
        (DECODED, "saved", ("variance",)),
        (DECODED, "world_size", 1),
        (GATHERED, "gather_dim", -1),
        (GATHERED, "num_products", 0),
        (GATHERED, "world_size", 1),
        (TO_HEADS, "gather_dim", -1),
        (TO_HEADS, "parts", 0),
        (TO_HEADS, "num_products", MAX_PRODUCTS + 1),
        (TO_ROWS, "scatter_dim", -1),
        (TO_ROWS, "parts", 0),
        (TO_ROWS, "group_name", ""),
        (GATHERED_KEYS, "mask", Mask("diagonal")),
        (GATHERED_KEYS, "scale", float("inf")),
        (SCATTERED_KEYS, "softcap", -1.0),
        (ATTENDED, "scale", 0.0),
        (ATTENDED, "softcap", -1.0),
        (ATTENDED, "group_name", ""),
    ],
)
def test_an_illegal_field_is_named(node: TaskNode, field: str, value: object) -> None:
    with pytest.raises(InvalidTaskNode, match=f"{node.kind}: field '{field}'"):
        dataclasses.replace(node, **{field: value}).verify()


@pytest.mark.parametrize("policy", [Policy("fast"), Policy(workspace_limit=-1), Policy(timeout_s=-1.0)])
@pytest.mark.parametrize("node", NODES, ids=lambda node: node.kind)
def test_an_illegal_policy_is_named(node: TaskNode, policy: Policy) -> None:
    with pytest.raises(InvalidTaskNode, match="strategy|workspace_limit|timeout_s"):
        dataclasses.replace(node, policy=policy).verify()


PRODUCTS = {"a": ["a0", "a1"], "b": ["b0", "b1"]}


@pytest.mark.parametrize(
    ("node", "given", "operands"),
    [
        (GATHER, {"shard": "x", "weights": ["w0", "w1"]}, ["x", "w0", "w1"]),
        (SCATTER, {"a": ["a"], "b": ["b"]}, ["a", "b"]),
        (REDUCE, {"a": ["a", "c", "e"], "b": ["b", "d", "f"], "bias": "r"}, ["a", "c", "e", "b", "d", "f", "r"]),
        (NORMED, {"x": "x", "residual": "r", "weight": "w"}, ["x", "r", "w"]),
        (DECODED, {**PRODUCTS, "product_bias": "c", "post_weight": "w"}, ["a0", "a1", "b0", "b1", "c", "w"]),
        (GATHERED, {**PRODUCTS, "bias": "r"}, ["a0", "a1", "b0", "b1", "r"]),
        (TO_HEADS, {**PRODUCTS, "bias": "r"}, ["a0", "a1", "b0", "b1", "r"]),
        (TO_ROWS, {"x": "x", "weight": "w"}, ["x", "w"]),
        (
            ATTENDED,
            {"q": "q", "k": "k", "v": "v", "lengths": "n", "block_table": "t"},
            ["q", "k", "v", "n", "t"],
        ),
        (GATHERED_KEYS, {"q": "q", "k": "k", "v": "v"}, ["q", "k", "v"]),
        (
            SCATTERED_KEYS,
            {"grad_out": "g", "q": "q", "k": "k", "v": "v", "out": "o", "lse": "l", "bias": "b"},
            ["g", "q", "k", "v", "o", "l", "b"],
        ),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_a_call_reads_back_as_its_node(node: TaskNode, given: dict[str, object], operands: list[str]) -> None:
    # Operands by name, in whatever order, stand in that of the slots.
    args = arguments(node, "token", **dict(reversed(given.items())))
    assert args == (operands, node.text(), "token")
    assert node_from_call(overload(node.kind), args) == node
    assert node.named(operands) == given and list(node.named(operands)) == [name for name, _ in node.slots()]


def test_what_is_no_call_of_a_node() -> None:
    args = arguments(TO_ROWS, x="x", weight="w")
    for target, given in ((overload("after"), args), (overload(TO_ROWS.kind), args[:2])):
        with pytest.raises(AssertionError, match="not a call of a node"):
            node_from_call(target, given)
    with pytest.raises(AssertionError, match="not an op of ours"):
        node_from_call(len, args)


def test_an_epilogue_is_part_of_the_text_and_of_the_call() -> None:
    node = dataclasses.replace(GATHER, epilogue="cast(silu(mm0), bf16) * mm1 + row(x0); mm1", num_extras=1)
    node.verify()
    assert "epilogue='cast(silu(mm0), bf16) * mm1 + row(x0); mm1'" in node.text()
    args = arguments(node, shard="shard", weights=["w0", "w1"], extras=["bias"])
    assert args[0] == ["shard", "w0", "w1", "bias"]
    assert node_from_call(overload(node.kind), args) == node
    assert node.num_outputs == 2


def test_a_reduction_has_one_product_for_its_epilogue() -> None:
    for node in (SCATTER, REDUCE):
        finished = dataclasses.replace(node, epilogue="relu(mm0 + row(x0)); mm0", num_extras=1)
        finished.verify()
        assert "epilogue='relu(mm0 + row(x0)); mm0'" in finished.text() and finished.num_outputs == 2
        a, b = ([f"{name}{index}" for index in range(node.num_products)] for name in "ab")
        bias = "bias" if node.has_bias else None
        args = arguments(finished, a=a, b=b, bias=bias, extras=["row"])
        assert args[0] == [*a, *b, *["bias"] * node.has_bias, "row"]
        assert node_from_call(overload(node.kind), args) == finished
        with pytest.raises(InvalidTaskNode, match="epilogue"):
            dataclasses.replace(node, epilogue="mm0 * mm1").verify()
        with pytest.raises(InvalidTaskNode, match="num_extras"):
            dataclasses.replace(node, num_extras=1).verify()


@pytest.mark.parametrize("norm", [Norm("batch"), Norm(eps=-1.0), Norm(eps=float("inf"))])
def test_an_illegal_norm_is_named(norm: Norm) -> None:
    with pytest.raises(InvalidTaskNode, match="norm|eps"):
        dataclasses.replace(NORMED, norm=norm).verify()
