"""recompute_masks: training with a mask that the graph computes is fused in the backward too, and keeps no mask."""

from __future__ import annotations

import functools

import pytest
import torch
from expecttest import assert_expected_inline
from torch._inductor import config

from ditron_inductor.options import Options
from ditron_inductor.passes.attention.recompute_masks import recompute_masks
from ditron_inductor.passes.graph.rewriting import RECOMPUTE
from ditron_inductor.pipeline import JointPipeline
from tests.passes.graphs import compiled_graphs, run_ranks, text, twin
from tests.passes.test_all_gather_attention import fuse_attention, masked, of_all_ranks, operands, sdpa
from tests.passes.test_attention_bias import with_prefix

pytestmark = pytest.mark.usefixtures("group")


def test_the_backward_knows_its_mask() -> None:
    given = tuple(one.requires_grad_() for one in operands())
    with config.patch(joint_custom_post_pass=JointPipeline(Options())):
        after = compiled_graphs(functools.partial(masked, 2), *given)
        before = [twin(one) for one in after]
    assert [fuse_attention(graph) for graph in after] == [1, 1]
    for module in after:
        module.graph.eliminate_dead_code()
    assert_expected_inline(
        next(line for line in text(after[1].graph).splitlines() if "ditron" in line),
        """attention_reduce_scatter = ditron.attention_reduce_scatter([permute_4, permute_2, permute, permute_1, getitem_8, getitem_9], "mask=(kind=causal window=11 offset=16) scale=0.25 softcap=0.0 world_size=4 group_name=0 site='' trials", None)""",
    )
    for old, new in zip(before, after, strict=True):
        inputs = of_all_ranks(tuple(node.meta["val"] for node in new.graph.nodes if node.op == "placeholder"))
        if new is after[1]:
            # The logarithms of sums of these queries and keys are smaller.
            for one in inputs:
                one[:] = [each + 9.0 if each.ndim == 3 and each.shape[1] == 4 else each for each in one]
        torch.testing.assert_close(run_ranks(new, inputs), run_ranks(old, inputs))


def test_rows_that_see_nothing() -> None:
    """A backward that is left alone makes NaN of logarithms that are -inf."""
    given = tuple(one.requires_grad_() for one in operands())
    after = compiled_graphs(functools.partial(masked, -1), *given)[0]
    before = twin(after)
    assert fuse_attention(after) == 1
    inputs = of_all_ranks(tuple(node.meta["val"] for node in after.graph.nodes if node.op == "placeholder"))
    found, wanted = (run_ranks(graph, inputs) for graph in (after, before))
    assert all((one[-1] == 0.0).all() for one in found)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close([one[0], one[-1]], [other[0], other[-1]])


def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return sdpa(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=torch.ones(8, 8).tril() > 0)


def test_other_masks_are_kept() -> None:
    marked = []

    def act(graph: torch.fx.Graph) -> None:
        marked.append((recompute_masks(graph, options=Options()), any(RECOMPUTE in node.meta for node in graph.nodes)))

    given = tuple(one.requires_grad_() for one in operands())
    with config.patch(joint_custom_post_pass=act):
        compiled_graphs(with_prefix, *given)
        # Nothing is gathered.
        compiled_graphs(alone, *given)
    assert marked == [(0, False), (0, False)]
