"""Ring attention, torch's own: named for what it is on every rank, forward and backward, and left alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

from ditron_inductor.options import Options
from ditron_inductor.pipeline import run
from tests.cases import rare
from tests.passes.graphs import WORLD_SIZE, compiled_graphs, fake_group, gather_dim, reasons, text
from tests.passes.test_all_gather_attention import operands, sdpa

FLASH: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@pytest.fixture(params=["allgather", "alltoall"])
def rotation(request: pytest.FixtureRequest) -> Iterator[str]:
    before = ring._cp_options.rotate_method
    ring.set_rotate_method(request.param)
    yield request.param
    ring._cp_options.rotate_method = before


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    """The forward of `context_parallel`, which has no CPU op of its own."""
    return ring._templated_ring_attention(dist.group.WORLD, 2, FLASH, q, k, v, is_causal=True, dropout_p=0.0)[:2]


def attend_backward(*given: torch.Tensor) -> Any:
    return ring._templated_ring_attention_backward(
        dist.group.WORLD, 2, FLASH_BACKWARD, given[0], "grad_out", *given[1:], is_causal=True, dropout_p=0.0
    )


@pytest.mark.parametrize(("rank", "balanced"), [(2, True), (0, False), *rare((0, True), (2, False))])
def test_it_is_named(rotation: str, rank: int, balanced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On rank 0 without load balance nobody reads what comes, of which there is nothing to see from all-to-alls."""
    monkeypatch.setattr(ring._cp_options, "enable_load_balance", balanced)
    with fake_group(rank=rank):
        _check_names(rotation, rank, balanced)


def _check_names(rotation: str, rank: int, balanced: bool) -> None:
    heads = [torch.empty(1, 4, 8, 16) for _ in range(3)]
    forward = compiled_graphs(attend, *heads)[0]
    run(forward.graph, Options())
    count = 1 if rotation == "allgather" else WORLD_SIZE - 1
    unread = rotation == "alltoall" and rank == 0 and not balanced
    assert reasons(forward) == ["no_matmul" if unread else "attention_parts"] * count, text(forward.graph)
    assert "ditron.all_gather_attention" not in text(forward.graph)
    if balanced:
        # Dynamo does not trace this backward alone, only the compiler behind it does.
        return
    backward = compiled_graphs(attend_backward, heads[0], *heads, heads[0], torch.empty(1, 4, 8))[0]
    run(backward.graph, Options())
    codes = reasons(backward)
    assert len(codes) == count + WORLD_SIZE
    assert codes.count("no_matmul") == unread * count and set(codes) <= {"attention_parts", "no_matmul"}


def test_the_ranks_differ_in_their_ops() -> None:
    """Why it is left alone: on every rank another program."""
    graphs = []
    for rank in range(WORLD_SIZE):
        with fake_group(rank=rank):
            (module,) = compiled_graphs(attend, *(torch.empty(1, 4, 8, 16) for _ in range(3)))
        graphs.append([str(node.target) for node in module.graph.nodes if node.op == "call_function"])
    assert len({len(graph) for graph in graphs}) == WORLD_SIZE


def queries_gathered(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return sdpa(gather_dim(q, 1), k.transpose(1, 2), v.transpose(1, 2))


def passed_on(x: torch.Tensor) -> torch.Tensor:
    assert dist.group.WORLD is not None
    return funcol.permute_tensor(x, [(rank + 1) % WORLD_SIZE for rank in range(WORLD_SIZE)], dist.group.WORLD)


def passed_beside(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """To the next rank, but not for the attention."""
    return sdpa(q, k.transpose(1, 2), v.transpose(1, 2)), passed_on(q.flatten() + 1)


@pytest.mark.usefixtures("group")
def test_others_are_not_it() -> None:
    for form in (queries_gathered, passed_beside):
        (module,) = compiled_graphs(form, *operands())
        run(module.graph, Options())
        assert set(reasons(module)) == {"no_matmul"}
