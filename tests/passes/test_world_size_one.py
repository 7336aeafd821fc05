"""A group of one rank: nothing is sent, so nothing is fused."""

from __future__ import annotations

from typing import Any

import torch

from tests.passes import graphs


def test_left_alone() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[Any, ...]:
        wait, name = graphs.c10d.wait_tensor, graphs.group_name()
        return (
            wait(graphs.c10d.all_gather_into_tensor(x, 1, name)) @ w,
            wait(graphs.c10d.reduce_scatter_tensor(x @ w, "sum", 1, name)),
            wait(graphs.c10d.all_reduce(x @ w, "sum", name)),
        )

    with graphs.fake_group(world_size=1):
        module = graphs.traced(fn, torch.empty(8, 16), torch.empty(16, 24))
        assert graphs.fuse(module) == 0
        assert graphs.reasons(module) == ["world_size_one"] * 3
