"""Calls that end where nobody notes it, and threads that would share the interpreter."""

from __future__ import annotations

import threading

import pytest

from ditron_inductor.errors import DitronInterpreterBusy, DitronPoisoned
from ditron_inductor.lowering.host.launcher import interpreting
from tests.device import jobs
from tests.ranks import RankContext, RankPools


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
