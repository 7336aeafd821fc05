"""Where keys and values lie: operands of any strides, what `chunked` copies of them, and what that costs the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ditron_inductor.device import slot_layout
from ditron_inductor.device.lanes import StreamLane
from ditron_inductor.lowering.all_gather_attention import chunked
from ditron_inductor.lowering.attention.block_parts import as_sent
from ditron_inductor.lowering.attention.local_attention import Local
from ditron_inductor.task.attention_masks import Mask
from ditron_inductor.task.nodes import AllGatherAttention
from ditron_inductor.task.policy import Policy
from tests.lowering import test_all_gather_attention as attention
from tests.lowering.recording import WORLD, FakeOrder, Log, make_launch, record
from tests.lowering.test_all_gather_attention import FP16, FP32, Case
from tests.lowering.test_chunked_order import Operators
from tests.rank_process import RankContext
from tests.ranks import RankPool, RankPools

SLICES = (
    Case("causal_offset", 18, 18, layout="slice"),
    Case("full", 19, 12, B=2, dtype=FP32, layout="slice", gathered=True),
)


@pytest.mark.parametrize("strategy", ["chunked", "library"])
@pytest.mark.parametrize("case", SLICES, ids=str)
def test_slices_of_one_projection(pool: RankPool, case: Case, strategy: str) -> None:
    pool.run(attention._check, case, strategy)


GPU_SLICES = (
    Case("causal_offset", 1024, 1024, heads=8, D=128, layout="slice"),
    Case("full", 777, 555, heads=4, key_heads=1, D=64, B=2, dtype=FP16, layout="slice", gathered=True),
    Case("causal_offset", 512, 512, heads=4, D=128, B=2, layout="heads", gathered=True),
)


@pytest.mark.parametrize("strategy", ["chunked", "library"])
@pytest.mark.parametrize("large_case", GPU_SLICES, ids=str)
def test_slices_at_size(gpu_pool: RankPool, large_case: Case, strategy: str) -> None:
    gpu_pool.run(attention._check, large_case, strategy)


JOINED = (
    Case("full", 6, 6, heads=2, dtype=FP32),
    Case("full", 6, 6, heads=2, dtype=FP32, gathered=True),
    # Parts of the keys of joined sources.
    Case("zigzag", 8, 8, heads=2, dtype=FP32),
)


def _join(ctx: RankContext, case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "JOINED_ROWS", 1)
        attention._check(ctx, case, "chunked")


@pytest.mark.parametrize("case", JOINED, ids=str)
def test_joined_sources(rank_pools: RankPools, case: Case) -> None:
    rank_pools.get("cpu", 4).run(_join, case)


def test_keys_of_a_projection_are_sent_as_they_are() -> None:
    projected = torch.randn(2, 5, 3, 8).transpose(1, 2)
    assert as_sent(projected).data_ptr() == projected.data_ptr()
    others = {
        "heads outside": torch.randn(2, 3, 5, 8),
        "a slice": torch.randn(2, 5, 9, 8)[:, :, 3:6].transpose(1, 2),
        "strided": torch.randn(2, 5, 3, 16)[..., ::2].transpose(1, 2),
        "no boundary": torch.randn(2 * 5 * 3 * 8 + 1)[1:].view(2, 5, 3, 8).transpose(1, 2),
    }
    for name, x in others.items():
        sent = as_sent(x)
        assert sent.is_contiguous() and sent.data_ptr() % 16 == 0, name
        assert torch.equal(sent.transpose(1, 2), x), name


def a_call(log: Log, *, return_gathered: bool = False) -> Callable[[], Any]:
    """Of rank 1 of 4, on a lane that leaves lines; attention and its merge leave one, too."""
    order = FakeOrder(log)
    launch = make_launch(StreamLane(torch.device("cuda", 0), order), order)
    node = AllGatherAttention(
        Mask("full"), 1.0, 0.0, WORLD, "g", "s", Policy("chunked", 1 << 30, 30.0), return_gathered
    )
    # 8 heads of queries share 2 of keys: each has 64 bytes in a row.
    q, k, v = (torch.zeros(1, 16, heads, 16).transpose(1, 2) for heads in (8, 2, 2))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *seen: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert k.stride()[1:] == v.stride()[1:] == (16, 2 * 16, 1)
        log.current.lines.append(f"attend {k.shape[2]}")
        return q, q

    def merge(stream: int, partials: Any) -> tuple[torch.Tensor, torch.Tensor]:
        log.streams[stream].lines.append(f"merge {len(partials)}")
        return q, q

    sizes: Any = chunked.geometry(node, launch, q, k, v)
    sizes = replace(sizes, run=Local("fake", attend, None, 1.0, 1.0), merge=merge)  # type: ignore[arg-type]
    return lambda: chunked.all_gather_attention(node, launch, sizes, q, k, v)


ORDERS = {
    "a copy of both": (
        False,
        chunked.JOINED_ROWS,
        """
        main: stage, attend 16, <- side 3, attend 16, <- side 4, attend 16, <- side 5, attend 16, <- side 5, merge 4,
            close_slot
        side: <- main 0, await_pieces 0 3 1 0, copy 4096, copy 4096, copy 4096
        """,
    ),
    "both are outputs": (
        True,
        chunked.JOINED_ROWS,
        """
        main: stage, attend 16, <- side 4, attend 16, <- side 6, attend 16, <- side 8, attend 16, <- side 8, merge 4,
            close_slot
        side: <- main 0, await_pieces 0 3 1 0, copy 2048, copy 2048, copy 2048, copy 2048, copy 2048, copy 2048
        """,
    ),
    # Those of rank 0; of ranks 3 and 2.
    "joined": (
        False,
        1,
        """
        main: stage, attend 16, <- side 4, attend 16, <- side 8, attend 32, <- side 8, merge 3, close_slot
        side: <- main 0, await_pieces 0 3 1 0, copy 2048, copy 2048, copy 2048, copy 2048, copy 2048, copy 2048
        """,
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_the_order_on_every_stream(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    return_gathered, joined_rows, expected = ORDERS[name]
    monkeypatch.setattr(chunked, "JOINED_ROWS", joined_rows)
    log = record(monkeypatch)
    call = a_call(log, return_gathered=return_gathered)
    # Each slot, and each of them again.
    for _ in range(2 * slot_layout.NUM_SLOTS):
        call()
        assert log.take().split() == expected.split()


@pytest.mark.parametrize(
    ("return_gathered", "expected"),
    [
        # What arrives, its keys and its values; of each source both, and heads outside.
        (False, {"new_empty": 1, "select": 2 + 6, "transpose": 4 + 6}),
        # The own part of both, too; and the outputs in their shape, of one sequence a view.
        (True, {"new_empty": 2, "select": 2 + 6, "transpose": 4 + 6 + 4, "view": 2}),
    ],
    ids=["inference", "training"],
)
def test_what_a_call_costs_the_host(
    monkeypatch: pytest.MonkeyPatch, return_gathered: bool, expected: dict[str, int]
) -> None:
    call = a_call(record(monkeypatch), return_gathered=return_gathered)
    for _ in range(slot_layout.NUM_SLOTS):
        call()
    with Operators() as operators:
        call()
    assert operators.found == expected
