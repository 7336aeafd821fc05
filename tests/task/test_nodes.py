"""Task nodes: their text, and the field that every illegal value is blamed on."""

from __future__ import annotations

import dataclasses
import textwrap

import expecttest
import pytest

from ditron_inductor.errors import InvalidTaskNode
from ditron_inductor.task.nodes import (
    MAX_PRODUCTS,
    AllGatherMatmul,
    AllReduceRmsNorm,
    AllToAllMatmul,
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
from ditron_inductor.task.ops import argument_of, node_from_call, norm_args, overload, site_args

POLICY = Policy("tile", 1 << 20, 1.5)
GATHER = AllGatherMatmul(1, 4, "0", True, "r/0", POLICY, 2)
SCATTER = MatmulReduceScatter(0, "avg", 4, "0", "r/1", POLICY)
REDUCE = MatmulAllReduce("sum", 4, "0", "r/2", POLICY, num_products=3, has_bias=True)
NORM = Norm("rms", 1e-6, round_first=True)
NORMED = AllReduceRmsNorm("sum", NORM, ("residual", "weight"), 4, "0", "r/3", POLICY)
DECODED = MatmulAllReduceRmsNorm(
    "avg", Norm("layer", 0.5), ("post_weight",), 4, "0", "r/4", POLICY, NORM, ("reduced", "post_rstd", "mean"), 2, True
)
GATHERED = MatmulAllGather(2, 4, "0", "r/3", POLICY, num_products=2, has_bias=True)
ATTENDED = FlashDecode(0.125, 30.0, 4, "0", "r/5", POLICY, True)
TO_HEADS = MatmulAllToAll(1, 3, 4, "0", "r/6", POLICY, num_products=2, has_bias=True)
TO_ROWS = AllToAllMatmul(1, 3, True, 4, "0", "r/7", POLICY)
NODES = (GATHER, SCATTER, REDUCE, NORMED, DECODED, GATHERED, TO_HEADS, TO_ROWS, ATTENDED)


def test_golden_text() -> None:
    lines = "\n".join(textwrap.fill(node.text(), 100, subsequent_indent="  ") for node in NODES) + "\n"
    expecttest.assert_expected_inline(
        lines,
        """\
all_gather_matmul(gather_dim=1, num_weights=2, return_gathered=True, world_size=4, group_name='0',
  site='r/0', strategy=tile, workspace_limit=1048576, timeout_s=1.5)
matmul_reduce_scatter(scatter_dim=0, reduce_op=avg, num_products=1, has_bias=False, world_size=4,
  group_name='0', site='r/1', strategy=tile, workspace_limit=1048576, timeout_s=1.5)
matmul_all_reduce(reduce_op=sum, num_products=3, has_bias=True, world_size=4, group_name='0',
  site='r/2', strategy=tile, workspace_limit=1048576, timeout_s=1.5)
all_reduce_rms_norm(reduce_op=sum, norm=rms(eps=1e-06, round_first), extras=residual+weight,
  world_size=4, group_name='0', site='r/3', strategy=tile, workspace_limit=1048576, timeout_s=1.5)
matmul_all_reduce_rms_norm(reduce_op=avg, num_products=2, has_bias=True, post=rms(eps=1e-06,
  round_first), norm=layer(eps=0.5), extras=post_weight, saved=reduced+post_rstd+mean, world_size=4,
  group_name='0', site='r/4', strategy=tile, workspace_limit=1048576, timeout_s=1.5)
matmul_all_gather(gather_dim=2, num_products=2, has_bias=True, world_size=4, group_name='0',
  site='r/3', strategy=tile, workspace_limit=1048576, timeout_s=1.5)
matmul_all_to_all(gather_dim=1, parts=3, num_products=2, has_bias=True, world_size=4,
  group_name='0', site='r/6', strategy=tile, workspace_limit=1048576, timeout_s=1.5)
all_to_all_matmul(scatter_dim=1, parts=3, return_received=True, world_size=4, group_name='0',
  site='r/7', strategy=tile, workspace_limit=1048576, timeout_s=1.5)
flash_decode(scale=0.125, softcap=30, paged=True, world_size=4, group_name='0', site='r/5',
  strategy=tile, workspace_limit=1048576, timeout_s=1.5)
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
        (DECODED, "extras", ("scale",)),
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


def test_a_call_reads_back_as_its_node() -> None:
    gather_args = ("shard", ["w0", "w1"], None, 1, True, *site_args(GATHER))
    assert node_from_call(overload(GATHER.kind), gather_args) == GATHER
    scatter_args = (["a"], ["b"], None, None, 0, "avg", *site_args(SCATTER))
    assert node_from_call(overload(SCATTER.kind), scatter_args) == SCATTER
    reduce_args = (["a", "c", "e"], ["b", "d", "f"], "bias", None, "sum", *site_args(REDUCE))
    assert node_from_call(overload(REDUCE.kind), reduce_args) == REDUCE
    gathered_args = (["a", "c"], ["b", "d"], "bias", None, 2, *site_args(GATHERED))
    assert node_from_call(overload(GATHERED.kind), gathered_args) == GATHERED
    to_heads = (["a", "c"], ["b", "d"], "bias", None, 1, 3, *site_args(TO_HEADS))
    assert node_from_call(overload(TO_HEADS.kind), to_heads) == TO_HEADS
    assert node_from_call(overload(TO_ROWS.kind), ("x", "w", None, 1, 3, True, *site_args(TO_ROWS))) == TO_ROWS
    norms = *norm_args(NORM), *norm_args(None), ""
    normed = ("x", *[None] * 4, "r", "w", *[None] * 4, "sum", *norms, *site_args(NORMED))
    assert node_from_call(overload(NORMED.kind), normed) == NORMED
    given = (["a", "c"], ["b", "d"], "bias", None, None, "w", *[None] * 7)
    norms = *norm_args(DECODED.norm), *norm_args(NORM), "reduced+post_rstd+mean"
    decoded = (*given, "avg", *norms, *site_args(DECODED))
    assert node_from_call(overload(DECODED.kind), decoded) == DECODED
    attended = ("q", "k", "v", "lengths", "block_table", None, 0.125, 30.0, *site_args(ATTENDED))
    assert node_from_call(overload(ATTENDED.kind), attended) == ATTENDED
    assert argument_of(overload(DECODED.kind), decoded, "reduce_op") == "avg"


def test_an_epilogue_is_part_of_the_text_and_of_the_call() -> None:
    node = dataclasses.replace(GATHER, epilogue="cast(silu(mm0), bf16) * mm1 + row(x0); mm1", num_extras=1)
    node.verify()
    assert "return_gathered=True, epilogue='cast(silu(mm0), bf16) * mm1 + row(x0); mm1', world_size=4" in node.text()
    args = ("shard", ["w0", "w1"], None, 1, True, *site_args(node), ["bias"], node.epilogue)
    assert node_from_call(overload(node.kind), args) == node
    assert node.num_outputs == 2


def test_a_reduction_has_one_product_for_its_epilogue() -> None:
    for node in (SCATTER, REDUCE):
        finished = dataclasses.replace(node, epilogue="relu(mm0 + row(x0)); mm0", num_extras=1)
        finished.verify()
        assert "epilogue='relu(mm0 + row(x0)); mm0'" in finished.text() and finished.num_outputs == 2
        dims = (0,) if node is SCATTER else ()
        a, b = (["x"] * node.num_products for _ in range(2))
        bias = "bias" if node.has_bias else None
        args = (a, b, bias, None, *dims, node.reduce_op, *site_args(node), ["row"], finished.epilogue)
        assert node_from_call(overload(node.kind), args) == finished
        with pytest.raises(InvalidTaskNode, match="epilogue"):
            dataclasses.replace(node, epilogue="mm0 * mm1").verify()
        with pytest.raises(InvalidTaskNode, match="num_extras"):
            dataclasses.replace(node, num_extras=1).verify()


@pytest.mark.parametrize("norm", [Norm("batch"), Norm(eps=-1.0), Norm(eps=float("inf"))])
def test_an_illegal_norm_is_named(norm: Norm) -> None:
    with pytest.raises(InvalidTaskNode, match="norm|eps"):
        dataclasses.replace(NORMED, norm=norm).verify()
