"""Calls that end where nobody notes it, and threads that would share the interpreter."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from ditron_inductor.device import calibrate
from ditron_inductor.device.interpreter_lock import interpreting
from ditron_inductor.errors import DitronCaptureError, DitronInterpreterBusy, DitronPoisoned
from ditron_inductor.lowering.host.launcher import Arguments, local_launcher
from tests.device import jobs
from tests.device.one_rank import make_shared
from tests.ranks import RankContext, RankPools
from tests.test_imports import MODULES, tree_of

CPU = torch.device("cpu")


def interrupted(ctx: RankContext) -> str:
    """What the next call raises, when an interrupt came between the count of a call and the block that guards it."""
    from ditron_inductor.device.reset import reset

    registry, workspace = jobs.opened(ctx)
    jobs.ping_and_check(workspace)
    workspace.call("test/0:ping", 64).__enter__()
    try:
        workspace.call("test/0:ping", 64).__enter__()
    except DitronPoisoned as error:
        found = str(error)
    reset(registry=registry)
    jobs.ping_and_check(registry.get(ctx.group_name, ctx.device, jobs.OPTIONS))
    return found


def test_a_call_that_never_ended_is_noticed_and_a_reset_mends_it(rank_pools: RankPools) -> None:
    for text in rank_pools.get("cpu", 2, label="interrupted").run(interrupted, timeout=60.0):
        assert "a call before this one neither ended nor failed" in text


@pytest.mark.parametrize("step", ["number", "enter", "set_poll_limit", "begin"])
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_an_exception_while_a_call_is_prepared_asks_for_a_reset(step: str, kind: type[BaseException]) -> None:
    """The peers go through with the call, so this rank may not take its next call for this one."""
    shared = make_shared()
    owners = {"number": shared.sites, "enter": shared.order, "set_poll_limit": shared.generations[-1]}
    owner: Any = owners.get(step, shared.health)
    with pytest.raises(kind), mock.patch.object(owner, step, side_effect=kind("in between")):
        shared.begin("r/0:site", 64, 1 << 30, 1.0, 2.0)
    with pytest.raises(DitronPoisoned, match=f"{kind.__name__}: in between"):
        shared.begin("r/0:site", 64, 1 << 30, 1.0, 2.0)
    shared.restart(shared.session, {ring.name for ring in shared.generations})
    for calls in range(3):
        assert shared.begin("r/0:site", 64, 1 << 30, 1.0, 2.0)[1] == calls % 2
        shared.end()


def test_a_call_that_a_capture_refuses_may_be_made_again() -> None:
    """Nothing of it has happened, so the ranks are in step once it is made."""
    shared = make_shared()
    refused = DitronCaptureError(site="the stream of the last call", problem="a call has to be ordered after it")
    with pytest.raises(DitronCaptureError), mock.patch.object(shared.order, "enter", side_effect=refused):
        shared.begin("r/0:site", 64, 1 << 30, 1.0, 2.0)
    assert shared.begin("r/0:site", 64, 1 << 30, 1.0, 2.0)[1] == 0


def test_a_call_whose_failure_could_not_be_noted_is_noticed_by_the_next() -> None:
    shared = make_shared()
    shared.begin("r/0:site", 64, 1 << 30, 1.0, 2.0)
    with (
        pytest.raises(KeyboardInterrupt),
        mock.patch.object(shared.health, "fail", side_effect=KeyboardInterrupt),
    ):
        shared.fail(ValueError("in the call"))
    with pytest.raises(DitronPoisoned, match="neither ended nor failed"):
        shared.begin("r/0:site", 64, 1 << 30, 1.0, 2.0)


def test_a_second_thread_in_the_interpreter_is_refused_by_name() -> None:
    raised: list[BaseException] = []

    def launch() -> None:
        try:
            with interpreting(launch):
                raise AssertionError("the interpreter was free")
        except DitronInterpreterBusy as error:
            raised.append(error)

    with interpreting(launch):
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()
    assert len(raised) == 1 and "kernel 'launch' cannot be launched" in str(raised[0])
    with interpreting(launch):
        pass


@pytest.mark.parametrize("name", ["first", "second"])
def test_the_interpreter_is_free_again_after_an_error(name: str) -> None:
    with pytest.raises(ZeroDivisionError), interpreting(name):
        raise ZeroDivisionError


class Interpreted:
    """Stands in for an interpreted kernel: a launch runs `body`, and counts."""

    __name__ = "stand_in"
    arg_names = ("x",)

    def __init__(self, body: Callable[[], None]) -> None:
        self.body = body
        self.launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.launches += 1
            self.body()

        return launch


def error_in_another_thread(run: Callable[[], Any]) -> BaseException | None:
    raised: list[BaseException] = []

    def catch() -> None:
        try:
            run()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=catch)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def launch_of(kernel: Any) -> Callable[[], None]:
    """A launch as all sites make it."""
    launcher = local_launcher(kernel, CPU)
    return lambda: launcher(0, lambda: Arguments(1, {}), (), (), {"x": torch.ones(1)})


def test_a_launch_keeps_other_threads_out_of_the_interpreter() -> None:
    found: list[BaseException | None] = []
    second = Interpreted(lambda: None)
    launch_of(Interpreted(lambda: found.append(error_in_another_thread(launch_of(second)))))()
    assert isinstance(found[0], DitronInterpreterBusy) and "kernel 'stand_in' cannot be launched" in str(found[0])
    assert second.launches == 0
    launch_of(second)()
    assert second.launches == 1


def test_the_measurement_of_polls_shares_the_interpreter_with_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = Interpreted(lambda: None)
    monkeypatch.setattr(calibrate, "_wait_in_vain", wait)
    found: list[BaseException | None] = []
    launch_of(Interpreted(lambda: found.append(error_in_another_thread(lambda: calibrate.measure(CPU)))))()
    assert isinstance(found[0], DitronInterpreterBusy) and wait.launches == 0
    # The other way round: while it measures, nobody launches.
    wait.body = lambda: found.append(error_in_another_thread(launch_of(Interpreted(lambda: None))))
    with pytest.raises(AssertionError):
        calibrate.measure(CPU)  # The stand-in writes no record of a wait that expired.
    assert len(found) > 1 and all(isinstance(error, DitronInterpreterBusy) for error in found)


def test_kernels_are_launched_where_the_interpreter_is_held() -> None:
    """A new place has to hold it too, unless it runs on GPUs only, as the clocks of a trace do."""
    places = set()
    for module in MODULES:
        tree = tree_of(module)
        for node in ast.walk(tree):
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple) and len(node.slice.elts) == 1:
                places.add(module)
    assert places == {"device.calibrate", "lowering.host.launcher", "taxes.step_trace"}
