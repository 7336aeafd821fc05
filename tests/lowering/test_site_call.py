"""Sites called past the dispatcher: on ranks without GPUs, what the launches get; what a record can hold."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ditron_inductor.lowering.host.recording import LaunchMade, Recorder, SlotUse, is_view, recording, with_own_storage
from ditron_inductor.task.nodes import Projections
from ditron_inductor.tools.processes import run_ranks
from tests.lowering.calls import Site
from tests.lowering.compiled_rank import check_on_rank
from tests.lowering.problems import SMALL, TILE_KINDS, Problem
from tests.rank_process import RankContext
from tests.ranks import RankPools

aten = torch.ops.aten


@pytest.mark.timeout(200)
def test_a_record_does_what_the_op_does(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    codes = run_ranks(check_on_rank, str(tmp_path), world_size=2, device_type="cpu", limit_s=180.0)
    assert codes == [0, 0], capfd.readouterr().err


def _values(ctx: RankContext, kind: str, recorded: bool) -> None:
    from tests.lowering.site_call_checks import Called

    site = Site(name=f"site_call/{TILE_KINDS.index(kind)}:{kind}")
    problem = Problem(ctx, kind, SMALL[ctx.device.type], site=site)
    with torch.no_grad():
        called = Called.of(problem)
        for step in range(6 if recorded else 2):
            problem.refill()
            *outputs, token = called.by_site()
            assert token.shape == (1,) and token.dtype == torch.uint8
            problem.check(outputs, f"step {step}:")
        assert len(called.site.repeated) == recorded, called.site.problem
        if recorded:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                *outputs, token = called.by_site()
            for step in range(3):
                problem.refill()
                graph.replay()
                problem.check(outputs, f"replay {step}:")


def test_values_in_the_interpreter_which_takes_no_record(rank_pools: RankPools) -> None:
    rank_pools.get("cpu", 2).run(_values, "matmul_reduce_scatter", False)


@pytest.mark.gpu
@pytest.mark.skipif(torch.version.hip is not None, reason="nothing is recorded for Triton's compiler for AMD")
@pytest.mark.parametrize("kind", TILE_KINDS)
def test_values_from_records(rank_pools: RankPools, kind: str) -> None:
    rank_pools.get("cuda", 2).run(_values, kind, True)


def test_an_op_that_looks_nothing_up_is_not_watched() -> None:
    from ditron_inductor.runtime import site_call

    call = site_call("projections", True, Projections(2, strategy="library").text())
    x, *weights = torch.randn(4, 6), torch.randn(6, 5), torch.randn(6, 3)
    with torch.no_grad():
        for _ in range(3):
            for got, weight in zip(call(x, *weights), weights, strict=True):
                torch.testing.assert_close(got, x @ weight)
    assert not call.static and not recording.lock.locked()


def test_one_call_is_watched_at_a_time() -> None:
    first, second = Recorder([torch.randn(4)]), Recorder([torch.randn(4)])
    with pytest.raises(AssertionError, match="one watches"), first:
        pass
    with recording.lock, first:
        assert recording.here() is first
        with ThreadPoolExecutor(1) as other:
            assert other.submit(recording.here).result() is None, "another thread's calls are its own"
        with pytest.raises(AssertionError, match="one watches"), second:
            pass


def test_parts_of_one_tensor_get_storages_of_their_own() -> None:
    whole = torch.randn(4, 6).bfloat16()
    one, other = (with_own_storage(part) for part in (whole[:, 1:4], whole.t()))
    assert torch.equal(one, whole[:, 1:4]) and other.stride() == (1, 6)
    assert one.data_ptr() == whole[:, 1:4].data_ptr()
    storages = {x.untyped_storage()._cdata for x in (whole, one, other)}
    assert len(storages) == 3 and one[1:].untyped_storage()._cdata in storages


def test_views_and_allocations_are_all_that_a_record_holds() -> None:
    x = torch.randn(4, 6)
    with recording.lock, Recorder([x]) as recorder:
        (own,) = recorder.operands
        own.view(6, 4).t().unsqueeze(0)
        made = [own.new_empty(3), torch.empty_like(own), torch.empty(2, dtype=torch.uint8)]
        own.reshape(2, 12), own.contiguous(), own.detach(), own.split(2)
    assert recorder.problem == "" and [y.data_ptr() for y in recorder.allocated] == [y.data_ptr() for y in made]
    assert recording.active is None


@pytest.mark.parametrize(
    ("act", "problem"),
    [
        (lambda x: x.t().contiguous(), "aten.clone"),
        (lambda x: x.t().reshape(24), "aten.clone"),
        (lambda x: x.zero_(), "aten.zero_"),
        (lambda x: x.double(), "aten._to_copy"),
        (lambda x: torch.zeros(3), "aten.zeros"),
        (lambda x: x.sum().item(), "aten.sum"),
        (lambda x: x.new_empty(4, 6).copy_(x), "aten.copy_"),
    ],
)
def test_anything_else_is_a_problem(act: object, problem: str) -> None:
    with recording.lock, Recorder([torch.randn(4, 6)]) as recorder:
        act(recorder.operands[0])  # type: ignore[operator]
    assert recorder.problem.startswith(problem)


def test_what_torch_does_not_see_reports_itself() -> None:
    limit = torch.zeros(1)

    def begin(*arguments: int) -> tuple[Any, int, int]:
        torch.empty(2)
        limit.fill_(5)
        return arguments, 0, 0

    slot = SlotUse(SimpleNamespace(begin=begin), (1, 2))
    with recording.lock, Recorder([torch.randn(4)]) as recorder:
        recorder.found("prepared", "chosen")
        recorder.launched(LaunchMade("before", None, (), {}))
        assert recorder.take(slot) == ((1, 2), 0, 0)
        recorder.launched(LaunchMade("in the slot", None, (), {}))
        recorder.launched(LaunchMade("behind", None, (), {}))
        assert recorder.problem == "" and recorder.allocated == [], "a repeated call takes its own slot"
        assert [(launch.launcher, launch.slot) for launch in recorder.launches] == [
            ("before", None),
            ("in the slot", slot),
            ("behind", None),
        ]
        recorder.take(slot)
    assert recorder.problem == "two slots" and limit.item() == 5
    for act in (lambda recorder: recorder.take(slot), lambda recorder: recorder.found("prepared", "chosen")):
        with recording.lock, Recorder([torch.randn(4)]) as recorder:
            act(recorder)
            act(recorder)
        assert recorder.problem
    with recording.lock, Recorder([torch.randn(4)]) as recorder:
        recorder.found("prepared", None)
    assert recorder.problem, "what is prepared now was not looked up"


def test_views_by_schema() -> None:
    assert is_view(aten.view.default) and is_view(aten.split.Tensor) and is_view(aten.detach.default)
    assert not is_view(aten.mm.default) and not is_view(aten.zero_.default) and not is_view(aten._assert_async.default)
