"""Equal gathers: shared wherever all of the gathered tensor is used, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch

from ditron_inductor.options import Options
from ditron_inductor.passes.graph.collectives import ALL_GATHER
from ditron_inductor.passes.normalize.normalize_collectives import normalize_collectives
from ditron_inductor.passes.normalize.share_gathers import share_gathers
from tests.passes.graphs import (
    WORLD_SIZE,
    all_gather,
    assert_no_new_guards,
    assert_same_on_all_ranks,
    gather_dim,
    group_name,
    text,
    traced,
)

pytestmark = pytest.mark.usefixtures("group")

X = torch.empty(2, 8, 16)
W = torch.empty(16, 24)


def shared(fn: Callable[..., Any], *args: torch.Tensor, dynamic: bool = False) -> tuple[int, str, int]:
    """How many gathers went, the graph, and how many gathers it holds now."""
    module = traced(fn, *args, dynamic=dynamic)
    normalize_collectives(module.graph, options=Options())
    count = share_gathers(module.graph, options=Options())
    module.graph.lint()
    return count, text(module.graph), len(module.graph.find_nodes(op="call_function", target=ALL_GATHER))


def test_golden() -> None:
    _, graph, _ = shared(lambda x: (gather_dim(x, 1).sin(), gather_dim(x, 1).cos()), X)
    expecttest.assert_expected_inline(
        graph,
        """\
x_1 [2, 8, 16]
all_gather_into_tensor [8, 8, 16] = _c10d_functional.all_gather_into_tensor(x_1, 4, '0')
wait_tensor [8, 8, 16] = _c10d_functional.wait_tensor(all_gather_into_tensor)
split = aten.split.Tensor(wait_tensor, 2)
getitem [2, 8, 16] = split[0]
getitem_1 [2, 8, 16] = split[1]
getitem_2 [2, 8, 16] = split[2]
getitem_3 [2, 8, 16] = split[3]
cat [2, 32, 16] = aten.cat([getitem, getitem_1, getitem_2, getitem_3], 1)
sin [2, 32, 16] = aten.sin(cat)
cos [2, 32, 16] = aten.cos(cat)
return (sin, cos)
""",
    )


SHARED: dict[str, Callable[..., Any]] = {
    "dim_0": lambda x, w: all_gather(x).sin() + all_gather(x).cos(),
    "dim_1": lambda x, w: gather_dim(x, 1).sin() + gather_dim(x, 1).cos(),
    "one_fused": lambda x, w: (gather_dim(x, 1) @ w, gather_dim(x, 1).sin()),
    "viewed": lambda x, w: all_gather(x).view(64, 16).sin().sum() + all_gather(x).cos().sum(),
    "one_returned": lambda x, w: (all_gather(x), all_gather(x).sin()),
}


@pytest.mark.parametrize("fn", SHARED.values(), ids=SHARED)
def test_shared(fn: Callable[..., Any]) -> None:
    count, _, left = shared(fn, X, W)
    assert (count, left) == (1, 1)
    assert_same_on_all_ranks(fn, X, W, fused=int(fn is SHARED["one_fused"]))


def test_gathers_of_gathers() -> None:
    fn = lambda x: all_gather(all_gather(x)).sin() + all_gather(all_gather(x)).cos()  # noqa: E731
    count, _, left = shared(fn, X)
    assert (count, left) == (2, 2)
    assert_same_on_all_ranks(fn, X, fused=0)


def other_group(x: torch.Tensor) -> torch.Tensor:
    name = torch.distributed.new_group(list(range(WORLD_SIZE))).group_name
    return torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_gather_into_tensor(x, WORLD_SIZE, name)
    )


def permuted(x: torch.Tensor) -> torch.Tensor:
    return torch.cat(torch.chunk(all_gather(x), WORLD_SIZE)[::-1], 1)


LEFT: dict[str, Callable[..., Any]] = {
    # What DTensor does where the dimension does not divide: the shard of one rank may be padded.
    "cut": lambda x: all_gather(x)[:7].sin() + all_gather(x)[:7].cos(),
    "inner_cut": lambda x: gather_dim(x, 1)[:, :31].sin() + gather_dim(x, 1)[:, :31].cos(),
    "cut_behind_a_view": lambda x: all_gather(x).transpose(0, 1)[:, :7].sin() + all_gather(x)[:7].cos().transpose(0, 1),
    "permuted": lambda x: permuted(x).sin() + permuted(x).cos(),
    "partial": lambda x: torch.cat(all_gather(x).chunk(4)[1:]).sin() + torch.cat(all_gather(x).chunk(4)[1:]).cos(),
    "both_returned": lambda x: (all_gather(x), all_gather(x)),
    "views_returned": lambda x: (all_gather(x).view(64, 16), all_gather(x).transpose(0, 1)),
    "other_dim": lambda x: all_gather(x).sum() + gather_dim(x, 1).sum(),
    "other_tensor": lambda x: all_gather(x).sin() + all_gather(x + 1).cos(),
    "other_group": lambda x: all_gather(x).sin() + other_group(x).cos(),
}


@pytest.mark.parametrize("fn", LEFT.values(), ids=LEFT)
def test_left_alone(fn: Callable[..., Any]) -> None:
    count, _, left = shared(fn, X)
    assert (count, left) == (0, 2)


def gathers_around_a_write(read: Callable[[torch.Tensor], torch.Tensor], *, between: bool) -> int:
    """How many of two gathers of x go that have an op which writes into `read(x)` between them, or in front of both.

    The op is put there by hand: in a trace the second gather would read the result of the write, which is another node.
    """
    module = traced(lambda x, y: (read(x), all_gather(x).sin() + all_gather(x).cos()), X, torch.empty_like(X))
    x, y = module.graph.find_nodes(op="placeholder")
    (output,) = module.graph.find_nodes(op="output")
    gathers = module.graph.find_nodes(op="call_function", target=ALL_GATHER)
    assert [one.args[0] for one in gathers] == [x, x]
    target = output.args[0][0]
    with module.graph.inserting_before(gathers[int(between)]):
        written = module.graph.call_function(torch.ops.aten.copy_.default, (target, y))
    written.meta["val"] = target.meta["val"]
    return share_gathers(module.graph, options=Options())


@pytest.mark.parametrize("read", [lambda x: x, lambda x: x[1:]], ids=["the_tensor", "a_view"])
def test_a_write_between(read: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert gathers_around_a_write(read, between=True) == 0
    assert gathers_around_a_write(read, between=False) == 1


def test_a_write_into_another_tensor() -> None:
    assert gathers_around_a_write(lambda x: x + 1, between=True) == 1


def test_three_of_which_two_are_returned() -> None:
    count, _, left = shared(lambda x: (all_gather(x), all_gather(x), all_gather(x).sin()), X)
    assert (count, left) == (1, 2)


def test_nothing_without_fusions() -> None:
    module = traced(SHARED["dim_0"], X, W)
    assert share_gathers(module.graph, options=Options(fusions=())) == 0


def test_dynamic_shapes() -> None:
    module = traced(SHARED["dim_1"], X, W, dynamic=True)
    with assert_no_new_guards(module):
        normalize_collectives(module.graph, options=Options())
        assert share_gathers(module.graph, options=Options()) == 1
    assert share_gathers(module.graph, options=Options()) == 0
    assert group_name() in text(module.graph)


@pytest.mark.parametrize(
    "taken",
    [lambda whole: whole[0], lambda whole: whole.diagonal(0, 1, 2), lambda whole: whole.unbind()[1]],
    ids=["row", "diagonal", "unbound"],
)
def test_a_part_that_is_returned_too_has_its_own_memory(taken: Callable[..., torch.Tensor]) -> None:
    assert shared(lambda x: (all_gather(x), taken(all_gather(x))), X)[0] == 0
    assert shared(lambda x: (taken(all_gather(x)), taken(all_gather(x))), X)[0] == 0
