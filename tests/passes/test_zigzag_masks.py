"""Masks of a sequence in zig-zag order, as tensors: every rank's graph has other numbers, and the same calls."""

from __future__ import annotations

import functools
import re

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch._inductor import config

from ditron_inductor.options import Options
from ditron_inductor.passes.finish.name_sites import name_sites
from ditron_inductor.pipeline import JointPipeline
from ditron_inductor.task.attention_masks import Mask
from tests.passes.graphs import WORLD_SIZE, compiled_graphs, gather_dim, only_task, reasons, run_ranks, text, twin
from tests.passes.test_all_gather_attention import fuse_attention, of_all_ranks, operands

pytestmark = pytest.mark.usefixtures("group")
S = 8


def chunks_of(rank: int, world_size: int, length: int) -> torch.Tensor:
    """The positions of a rank's tokens."""
    half = length // 2
    return torch.cat([torch.arange(half) + place * half for place in (rank, 2 * world_size - 1 - rank)])


def form(rank: int, world_size: int, window: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """world_size: of the order in which the keys of all stand."""
    q = q.transpose(1, 2)
    keys, values = gather_dim(k, 1).transpose(1, 2), gather_dim(v, 1).transpose(1, 2)
    length = WORLD_SIZE * S // world_size
    rows = chunks_of(rank, world_size, length)[:S]
    columns = torch.cat([chunks_of(one, world_size, length) for one in range(world_size)])
    ahead = rows[:, None] - columns[None]
    seen = (ahead >= 0) & (ahead < window) if window else rows[:, None] >= columns[None]
    return F.scaled_dot_product_attention(q, keys, values, seen, enable_gqa=True)


def test_the_graphs_of_all_ranks_have_one_call() -> None:
    lines, sites = [], set()
    for rank in range(WORLD_SIZE):
        (module,) = compiled_graphs(functools.partial(form, rank, WORLD_SIZE, 0), *operands())
        assert fuse_attention(module) == 1, reasons(module)
        name_sites(module.graph, options=Options())
        module.graph.eliminate_dead_code()
        assert "iota" not in text(module.graph)
        line = next(line for line in text(module.graph).splitlines() if "ditron" in line)
        lines.append(line.partition("], ")[2])
        sites |= set(re.findall(r"\w+/\d+:all_gather_attention", line))
    assert len(sites) == 1
    assert_expected_inline(
        re.sub(r"\w+/0:", "", "\n".join(lines)),
        """\
"mask=(kind=zigzag_keys jumps='4+24') scale=0.25 softcap=0.0 world_size=4 group_name=0 site=all_gather_attention trials", None)
"mask=(kind=zigzag_keys offset=4 jumps='4+16') scale=0.25 softcap=0.0 world_size=4 group_name=0 site=all_gather_attention trials", None)
"mask=(kind=zigzag_keys offset=8 jumps='4+8') scale=0.25 softcap=0.0 world_size=4 group_name=0 site=all_gather_attention trials", None)
'mask=(kind=zigzag_keys offset=12) scale=0.25 softcap=0.0 world_size=4 group_name=0 site=all_gather_attention trials', None)""",
    )


@pytest.mark.parametrize("window", [0, 5])
def test_every_rank_has_its_part_of_the_whole(window: int) -> None:
    found = []
    for rank in range(WORLD_SIZE):
        one = functools.partial(form, rank, WORLD_SIZE, window)
        (after,) = compiled_graphs(one, *operands())
        before = twin(after)
        assert fuse_attention(after) == 1
        inputs = of_all_ranks(tuple(node.meta["val"] for node in after.graph.nodes if node.op == "placeholder"))
        results = [run_ranks(graph, inputs)[rank][0] for graph in (before, after)]
        torch.testing.assert_close(results[1], results[0])
        found.append(results[1])
    order = torch.cat([chunks_of(rank, WORLD_SIZE, S) for rank in range(WORLD_SIZE)]).argsort()
    # Where the queries are among the placeholders is the compiler's.
    shards = [[one for one in each if one.shape[2] == heads] for heads in (4, 2) for each in inputs]
    whole = [
        torch.cat([one[place] for one in shards[first:][:WORLD_SIZE]], 1) for first, place in ((0, 0), (4, 0), (4, 1))
    ]
    q, k, v = (one[:, order].transpose(1, 2) for one in whole)
    seen = torch.ones(len(order), len(order), dtype=torch.bool).tril()
    exact = F.scaled_dot_product_attention(q, k, v, seen.triu(1 - window) if window else seen, enable_gqa=True)
    torch.testing.assert_close(torch.cat(found, 2)[:, :, order], exact)


def test_training() -> None:
    given = tuple(one.requires_grad_() for one in operands())
    for rank in (1, WORLD_SIZE - 1):
        with config.patch(joint_custom_post_pass=JointPipeline(Options())):
            after = compiled_graphs(functools.partial(form, rank, WORLD_SIZE, 0), *given)
            before = [twin(one) for one in after]
        assert [fuse_attention(graph) for graph in after] == [1, 1]
        for old, new in zip(before, after, strict=True):
            new.graph.eliminate_dead_code()
            mask = only_task(new)[0].mask
            assert (mask.kind, mask.window) == ("zigzag_keys", 0) and "iota" not in text(new.graph)
            inputs = of_all_ranks(tuple(node.meta["val"] for node in new.graph.nodes if node.op == "placeholder"))
            if new is after[1]:
                # The logarithms of sums of these queries and keys are smaller.
                for one in inputs:
                    one[:] = [each + 9.0 if each.ndim == 3 and each.shape[1] == 4 else each for each in one]
            torch.testing.assert_close(run_ranks(new, inputs), run_ranks(old, inputs))


def test_the_order_of_other_ranks() -> None:
    """Keys in the zig-zag order of two ranks, gathered from four: the call has the mask as it is."""
    for rank in (0, 1):
        one = functools.partial(form, rank, 2, 0)
        (after,) = compiled_graphs(one, *operands())
        before = twin(after)
        assert fuse_attention(after) == 1 and only_task(after)[0].mask == Mask("given")
        inputs = of_all_ranks(tuple(node.meta["val"] for node in after.graph.nodes if node.op == "placeholder"))
        torch.testing.assert_close(run_ranks(after, inputs), run_ranks(before, inputs))
