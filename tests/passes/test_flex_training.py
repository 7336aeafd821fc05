"""FlexAttention in training: both directions are fused where what they show is proved, with logarithms of base 2 between
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx
from torch._inductor import config
from torch.nn.attention import flex_attention as flex

from ditron_inductor.options import Options
from ditron_inductor.passes.attention.flex_attention import FLEX_BACKWARD, flex_call
from ditron_inductor.pipeline import JointPipeline
from tests.cases import rare
from tests.passes.graphs import WORLD_SIZE, compiled_graphs, gather_dim, reasons, run_ranks, text
from tests.passes.test_all_gather_attention import fuse_attention, of_all_ranks
from tests.passes.test_flex_attention import (
    ROWS,
    attend,
    biased,
    blocks,
    capped,
    full,
    given_blocks,
    in_blocks,
    in_blocks_of_heads,
    operands,
    scores_hidden,
    window,
)

pytestmark = pytest.mark.usefixtures("group", "trained_on_the_cpu")
HALF = ROWS // 2


@pytest.fixture
def trained_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch traces the backward of FlexAttention on CPUs, and computes it in plain operations, but for this check."""
    monkeypatch.setattr(flex, "_validate_device", lambda q, k, v: None)
    yield


def seen_by_none(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The first rows stand in front of all keys."""
    return attend(q, k, v, block_mask=blocks(lambda b, h, i, j: i - 5 >= j))


def zigzag(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The rows of rank 1."""

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        source, inside = j // ROWS, j % ROWS
        row = torch.where(i < HALF, HALF + i, (2 * WORLD_SIZE - 3) * HALF + i)
        return row >= torch.where(inside < HALF, source, 2 * WORLD_SIZE - 2 - source) * HALF + inside

    return attend(q, k, v, block_mask=blocks(mask))


def with_sums(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, detached: bool = True) -> torch.Tensor:
    keys, values = gather_dim(k, 1).transpose(1, 2), gather_dim(v, 1).transpose(1, 2)
    out, lse = flex.flex_attention(q.transpose(1, 2), keys, values, enable_gqa=True, return_lse=True)
    return out * (lse.detach() if detached else lse)[..., None]


def graphs(form: Callable[..., torch.Tensor]) -> list[fx.GraphModule]:
    """Forward and backward."""
    with config.patch(joint_custom_post_pass=JointPipeline(Options())):
        return compiled_graphs(form, *operands(requires_grad=True))


@pytest.mark.parametrize(
    "form",
    [full, in_blocks_of_heads, zigzag, with_sums, *rare(scores_hidden, in_blocks, seen_by_none)],
    ids=lambda form: form.__name__,
)
def test_both_directions_are_fused_and_right(form: Callable[..., torch.Tensor]) -> None:
    for direction, module in enumerate(graphs(form)):
        inputs = of_all_ranks(tuple(node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"))
        if direction == 1:
            # The logarithms of sums of these queries and keys are smaller.
            for one in inputs:
                one[:] = [each + 9.0 if each.ndim == 3 and each.shape[1] == 4 else each for each in one]
        wanted = run_ranks(module, inputs)
        assert fuse_attention(module) == 1, reasons(module)
        module.graph.eliminate_dead_code()
        assert "flex" not in text(module.graph) and "sort" not in text(module.graph)
        torch.testing.assert_close(run_ranks(module, inputs), wanted)


def queries_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Every version of the compiler has the operands in this order."""
    q = q.transpose(1, 2)
    keys, values = gather_dim(k, 1).transpose(1, 2), gather_dim(v, 1).transpose(1, 2)
    out = flex.flex_attention(q, keys, values, block_mask=blocks(window), enable_gqa=True)
    assert isinstance(out, torch.Tensor)
    return out


def test_the_sums_are_of_base_two() -> None:
    forward, backward = graphs(queries_first)
    assert fuse_attention(forward) == 1 and fuse_attention(backward) == 1
    for module in (forward, backward):
        module.graph.eliminate_dead_code()
    assert_expected_inline(
        text(forward.graph),
        """\
primals_1 [1, 32, 4, 16]
primals_2 [1, 32, 2, 16]
primals_3 [1, 32, 2, 16]
permute [1, 4, 32, 16] = aten.permute(primals_1, [0, 2, 1, 3])
permute_default [1, 2, 32, 16] = aten.permute(primals_2, [0, 2, 1, 3])
permute_default_1 [1, 2, 32, 16] = aten.permute(primals_3, [0, 2, 1, 3])
all_gather_attention = ditron.all_gather_attention([permute, permute_default, permute_default_1], "mask=(kind=causal window=40 offset=64) scale=0.25 softcap=0.0 world_size=4 group_name=0 site='' trials return_gathered", None)
getitem_18 [1, 4, 32, 16] = all_gather_attention[0]
getitem_19 [1, 4, 32] = all_gather_attention[1]
mul_tensor [1, 4, 32] = aten.mul.Tensor(getitem_19, 1.4426950408889634)
getitem_20 [1, 2, 128, 16] = all_gather_attention[2]
getitem_21 [1, 2, 128, 16] = all_gather_attention[3]
return (getitem_18, permute, getitem_20, getitem_21, getitem_18, mul_tensor)
""",
    )
    assert_expected_inline(
        text(backward.graph),
        """\
permute [1, 4, 32, 16]
permute_1 [1, 2, 128, 16]
permute_2 [1, 2, 128, 16]
getitem_16 [1, 4, 32, 16]
getitem_17 [1, 4, 32]
tangents_1 [1, 4, 32, 16]
mul_tensor [1, 4, 32] = aten.mul.Tensor(getitem_17, 0.6931471805599453)
attention_reduce_scatter = ditron.attention_reduce_scatter([tangents_1, permute, permute_1, permute_2, getitem_16, mul_tensor], "mask=(kind=causal window=40 offset=64) scale=0.25 softcap=0.0 world_size=4 group_name=0 site='' trials", None)
getitem [1, 4, 32, 16] = attention_reduce_scatter[0]
getitem_22 [1, 2, 32, 16] = attention_reduce_scatter[1]
permute_default [1, 32, 2, 16] = aten.permute(getitem_22, [0, 2, 1, 3])
getitem_23 [1, 2, 32, 16] = attention_reduce_scatter[2]
permute_default_1 [1, 32, 2, 16] = aten.permute(getitem_23, [0, 2, 1, 3])
permute_8 [1, 32, 4, 16] = aten.permute(getitem, [0, 2, 1, 3])
return (permute_8, permute_default, permute_default_1)
""",
    )


def of_other_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The backward looks at other blocks than the forward."""
    found = blocks(window)
    found.q_indices = found.q_indices.flip(-1)
    return attend(q, k, v, block_mask=found)


def of_fewer_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    found = blocks(window)
    found.full_q_num_blocks = found.full_q_num_blocks - 1
    return attend(q, k, v, block_mask=found)


def by_natural_sums(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attend(q, k, v, kernel_options={"BACKEND": "FLASH"})


def sums_with_gradient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return with_sums(q, k, v, detached=False)


@pytest.mark.parametrize(
    ("codes", "form"),
    [
        ((None, "flex_block_mask"), of_other_rows),
        *rare(((None, "flex_block_mask"), of_fewer_rows), (("flex_score_mod", "flex_score_mod"), biased)),
        (("flex_block_mask", "flex_block_mask"), given_blocks),
        ((None, "flex_score_mod"), capped),
        (("flex_gradient", "flex_gradient"), by_natural_sums),
        ((None, "flex_gradient"), sums_with_gradient),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_left_alone(codes: tuple[str | None, ...], form: Callable[..., torch.Tensor]) -> None:
    for code, module in zip(codes, graphs(form), strict=True):
        assert fuse_attention(module) == (code is None)
        assert set(reasons(module)) == ({code} if code else set()), text(module.graph)


def test_a_derivative_is_a_multiple_of_the_gradient() -> None:
    """The score in its place, as no program has it."""
    backward = graphs(full)[1]
    (node,) = backward.graph.find_nodes(op="call_function", target=FLEX_BACKWARD)
    derivative = flex_call(node).gradient.score_mod  # type: ignore[union-attr]
    inner = backward.get_submodule(derivative.target)  # type: ignore[attr-defined]
    output, score = inner.graph.output_node(), next(iter(inner.graph.nodes))
    output.args = ([score, *output.args[0][1:]],)
    assert fuse_attention(backward) == 0 and set(reasons(backward)) == {"flex_score_mod"}


def test_blocks_of_keys_that_are_not_gathered_are_kept() -> None:
    """The mask is known, but nothing is to be fused, so computing it again would only cost."""

    def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        mask = blocks(lambda b, h, i, j: i >= j, ROWS)
        out = flex.flex_attention(q, k, k + gather_dim(v, 1).sum(), block_mask=mask, enable_gqa=True)
        assert isinstance(out, torch.Tensor)
        return out

    forward, backward = graphs(alone)
    assert "sort" in text(forward.graph) and "sort" not in text(backward.graph)
