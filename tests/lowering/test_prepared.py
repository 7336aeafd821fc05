"""What is kept between calls changes nothing: ranks meet at the same calls, and what has ended is not used again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ditron_inductor
from benchmarks.tolerances import assert_near
from ditron_inductor.device import workspaces
from ditron_inductor.lowering import register
from ditron_inductor.lowering.host import prepared as prepared_module
from ditron_inductor.lowering.host.chosen import Chosen
from ditron_inductor.lowering.host.prepared import Prepared, PreparedCalls, form
from ditron_inductor.task.plan import decisions
from tests.lowering import calls
from tests.lowering.calls import Site
from tests.lowering.problems import KINDS, SMALL, Problem, Size
from tests.rank_process import RankContext
from tests.ranks import RankPool, RankPools


class FakeWorkspace:
    """A workspace as prepared calls see it."""

    def __init__(self) -> None:
        self.current = True
        self.sizes = {"K": (40, 40)}
        self.at_release: set[Any] = set()
        self.capturing = False

    @property
    def shared(self) -> FakeWorkspace:
        return self

    @property
    def order(self) -> FakeWorkspace:
        return self

    def is_capturing(self) -> bool:
        return self.capturing

    def is_current(self) -> bool:
        return self.current

    def agreed(self, what: str) -> tuple[int, int] | None:
        return self.sizes.get(what)


def prepared(workspace: FakeWorkspace, run: Any = "run") -> Prepared:
    chosen = Chosen(run)
    return Prepared(workspace, chosen, chosen, "K", workspace.agreed("K"))  # type: ignore[arg-type]


def test_a_capture_runs_what_was_chosen_for_it() -> None:
    known, workspace = PreparedCalls(), FakeWorkspace()
    eager, captured = Chosen("eager"), Chosen("captured")  # type: ignore[arg-type]
    known.keep("call", Prepared(workspace, eager, captured, "K", workspace.agreed("K")))  # type: ignore[arg-type]
    assert known.find("call") == "eager"
    workspace.capturing = True
    assert known.find("call") == "captured"


def test_a_prepared_call_holds_until_its_workspace_or_a_size_changes() -> None:
    known, workspace = PreparedCalls(), FakeWorkspace()
    assert known.find("call") is None
    known.keep("call", prepared(workspace))
    assert known.find("call") == "run" and known.find("another") is None
    workspace.sizes["K"] = tuple([40, 40])  # type: ignore[assignment]
    assert known.find("call") is None, "equal sizes, but agreed on anew"
    known.keep("call", prepared(workspace, "again"))
    assert known.find("call") == "again"
    workspace.sizes = {}
    assert known.find("call") is None
    known.keep("call", prepared(workspace))
    workspace.current = False
    assert known.find("call") is None


def test_a_released_workspace_takes_its_calls_along() -> None:
    known, one, other = PreparedCalls(), FakeWorkspace(), FakeWorkspace()
    for index in range(3):
        known.keep(("one", index), prepared(one))
        known.keep(("other", index), prepared(other))
    assert len(one.at_release) == 1
    for callback in one.at_release:
        callback(one)
    assert len(known) == 3 and known.find(("other", 2)) == "run" and known.find(("one", 2)) is None


def test_the_number_of_prepared_calls_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared_module, "MOST_CALLS", 8)
    known, workspace = PreparedCalls(), FakeWorkspace()
    for index in range(100):
        known.keep(index, prepared(workspace))
        assert known.find(index) == "run" and len(known) <= 8


def test_the_form_is_everything_but_address_and_values() -> None:
    x = torch.zeros(4, 6)
    assert form(x) == form(torch.ones(4, 6))
    others = [
        x.t(),
        x[:, :5],
        x[:3],
        x.double(),
        torch.zeros(6, 4).t(),
        torch.zeros(4, 7)[:, :6],
        x.to("meta", torch.half),
    ]
    assert all(form(x) != form(other) for other in others)


def _meetings(ctx: RankContext) -> int:
    """How often the ranks have met on the host for the default group's workspace."""
    (shared,) = workspaces.of_group(dist.distributed_c10d._get_default_group())
    return int(shared.session._sequence)


def _sizes_change(ctx: RankContext) -> list[int]:
    site = Site(name="prepared/0:matmul_all_reduce")
    operands = {}
    for k in (40, 24):
        operands[k] = calls.operand(ctx, [36, k], torch.bfloat16), calls.weight(ctx, k, 44, torch.bfloat16)
    meetings = []
    for swapped in (False, False, False, True, True, False, False):
        a, b = operands[(40, 24)[(ctx.rank + swapped) % 2]]
        out = calls.matmul_all_reduce(ctx, site, a, b)
        want = calls.reference_matmul_all_reduce(ctx, site, a, b)
        assert_near(out, want, num_partials=ctx.world_size, what=f"swapped {swapped}:")
        meetings.append(_meetings(ctx))
    ditron_inductor.reset(dist.group.WORLD)
    for _ in range(2):
        meetings.append(_meetings(ctx))
        assert_near(calls.matmul_all_reduce(ctx, site, a, b), want, num_partials=ctx.world_size, what="after a reset:")
    meetings.append(_meetings(ctx))
    return meetings


def test_ranks_meet_once_for_a_local_size_whatever_becomes_of_it(rank_pools: RankPools) -> None:
    for meetings in rank_pools.get("cpu", 2, label="prepared").run(_sizes_change):
        steps = [after - before for before, after in zip(meetings, meetings[1:], strict=False)]
        before_reset, after_reset = steps[:6], steps[7:]
        # It may have changed on one rank alone, and the others would not come.
        assert before_reset == [0, 0, 0, 0, 0, 0]
        assert after_reset == [1, 0]


def _options_differ(ctx: RankContext) -> None:
    problems = {}
    for strategy in ("tile", "library", "chunked"):
        site = Site(name="prepared/1:options", strategy=strategy)
        problems[strategy] = Problem(ctx, "matmul_reduce_scatter", SMALL[ctx.device.type], site=site)
    # The same operands, hence the same forms.
    for strategy in [*problems, *problems, *reversed(problems)]:
        problem = problems[strategy]
        problem.check(problem(), what=strategy)
        last = decisions.last(ctx.group_name, "prepared/1:options")
        assert last is not None and last[1].strategy == strategy, "the last choice is noted at every call"


def test_options_are_part_of_the_call(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 2, label="prepared").run(_options_differ)


def _layouts_differ(ctx: RankContext, kind: str) -> None:
    """The same site and shapes with other strides, alignments and dtypes, in turns."""
    size = Size(24, 40, 36)
    variants = []
    for dtype in (torch.bfloat16, torch.float32):
        for layout in ("row", "padded", "offset", "column"):
            problem = Problem(ctx, kind, size, site=Site(name=f"prepared/2:{kind}"), dtype=dtype)
            problem.left = calls.operand(ctx, list(problem.left.shape), dtype, layout=layout)
            variants.append(problem)
    for problem in [*variants, *reversed(variants)]:
        problem.check(problem(), what=f"{problem.left.dtype} {problem.left.stride()}")


@pytest.mark.parametrize("kind", KINDS)
def test_the_form_of_the_operands_is_part_of_the_call(rank_pools: RankPools, kind: str) -> None:
    rank_pools.get("cpu", 2, label="prepared").run(_layouts_differ, kind)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_the_form_of_the_operands_is_part_of_the_call_on_gpus(rank_pools: RankPools, kind: str) -> None:
    rank_pools.get("cuda", 2).run(_layouts_differ, kind)


def _group_is_made_again(ctx: RankContext, folder: str) -> list[int]:
    kept = []
    for life in range(3):
        problems = [Problem(ctx, kind, SMALL[ctx.device.type]) for kind in KINDS]
        for problem in [*problems, *problems]:
            problem.check(problem(), what=f"life {life}:")
        kept.append(len(register.calls))
        dist.destroy_process_group()
        kept.append(len(register.calls))
        store = dist.FileStore(f"{folder}/{life}", ctx.world_size)
        dist.init_process_group("gloo", store=store, rank=ctx.rank, world_size=ctx.world_size)
    return kept


def test_a_group_made_again_starts_anew(tmp_path: Path) -> None:
    pool = RankPool(2)
    try:
        for kept in pool.run(_group_is_made_again, str(tmp_path)):
            assert kept == 3 * [len(KINDS), 0]
    finally:
        pool.close()
