"""How long ranks wait for each other: which limit holds where, and what an error says about it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ditron_inductor.core import layout as words
from ditron_inductor.device import replicas as replicas_module
from ditron_inductor.device import watchdog
from ditron_inductor.device.handshake import AgreedOptions
from ditron_inductor.device.registry import FIRST_TIMEOUT_S, Registry
from ditron_inductor.device.reset import SLACK_S
from ditron_inductor.device.sites import SiteNames
from ditron_inductor.device.watchdog import Health
from ditron_inductor.device.workspace import Workspace
from ditron_inductor.errors import DitronTimeout
from tests.device.jobs import LIMIT_S, OPTIONS, SHORT, SHORT_S, expected, ping
from tests.device.one_rank import POLLS_PER_S, make_shared
from tests.device.threads import Anchor, make_group
from tests.rank_process import RankContext
from tests.ranks import RankPools

registry_module = importlib.import_module("ditron_inductor.device.registry")
reset_module = importlib.import_module("ditron_inductor.device.reset")  # The package has a function of this name.


# What an error of a kernel says.


@dataclass
class Clock:
    """The host's clock, as the watchdog reads it."""

    now: float = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr("ditron_inductor.device.watchdog.time", Clock())
    return watchdog.time  # type: ignore[attr-defined, no-any-return]


@pytest.fixture
def health() -> Health:
    group = make_group(dist.HashStore(), 0, 2)
    return Health(group, SiteNames(group, "s"), torch.device("cpu"))


@pytest.mark.parametrize(("passed_s", "waited_s"), [(7.0, 7.0), (0.5, 1.5)])
def test_a_timeout_on_the_cpu_says_how_long_the_polls_took(
    clock: Clock, health: Health, passed_s: float, waited_s: float
) -> None:
    """It is at least the limit, and the time in which the names are looked up is no part of it."""

    def look_up(number: int) -> str:
        clock.now += 2.0
        return "a site"

    health.begin(1.5)
    clock.now += passed_s
    health.record[words.STATE.value] = words.TIMEOUT.value
    with (
        mock.patch.object(health._sites, "text", look_up),
        pytest.raises(DitronTimeout, match=f"rank 0 waited {waited_s} s"),
    ):
        health.check()


def test_a_timeout_on_a_gpu_says_the_limit(clock: Clock, health: Health) -> None:
    """The host does not know when the kernel began."""
    health._on_host = False
    health.begin(1.5)
    clock.now += 7.0
    assert health._waited_s() == 1.5


def test_the_wait_is_that_of_the_present_call(clock: Clock, health: Health) -> None:
    health.begin(1.5)
    clock.now += 100.0
    health.begin(2.0)
    clock.now += 3.0
    assert health._waited_s() == 3.0


# First calls, in which a peer may still be compiling.


def limits_of_calls(workspace: Workspace, *sites: str) -> list[float]:
    """The limits, in seconds, that the kernels of these calls have."""
    found = []
    for site in sites:
        with workspace.call(site, 64) as call:
            found.append(int(call.ctl[words.POLL_LIMIT.value]) / POLLS_PER_S)
            assert workspace.shared.health.timeout_s == found[-1]
    return found


def test_the_first_call_of_a_site_waits_longer() -> None:
    shared = make_shared()
    workspace = Workspace(shared, SHORT, SHORT_S, 50.0)
    assert limits_of_calls(workspace, "a", "a", "b", "a", "b") == [50.0, SHORT_S, 50.0, SHORT_S, SHORT_S]
    shared.restart(shared.session, {ring.name for ring in shared.generations})
    assert limits_of_calls(workspace, "a", "a") == [50.0, SHORT_S]


def test_a_first_call_never_waits_less_than_others() -> None:
    workspace = Workspace(make_shared(), OPTIONS, LIMIT_S, SHORT_S)
    assert workspace.first_timeout_s == LIMIT_S
    assert limits_of_calls(workspace, "a", "a") == [LIMIT_S, LIMIT_S]


def test_a_captured_call_is_no_first_call() -> None:
    """It runs whenever its graph is replayed."""
    shared = make_shared()
    workspace = Workspace(shared, SHORT, SHORT_S, 50.0)
    with mock.patch.object(shared.order, "enter", return_value=True):
        assert limits_of_calls(workspace, "a") == [SHORT_S]
    assert limits_of_calls(workspace, "a", "a") == [50.0, SHORT_S]


def test_growth_and_sizes_wait_as_long_as_a_first_call() -> None:
    shared = make_shared()
    workspace = Workspace(shared, SHORT, SHORT_S, 50.0)
    with mock.patch.object(shared, "_add_generation", side_effect=ZeroDivisionError) as add:
        with pytest.raises(ZeroDivisionError):
            workspace.call("a", 1 << 22).__enter__()
    assert add.call_args.args[1] == 50.0
    with mock.patch("ditron_inductor.device.workspace.agree_options", return_value=[[3], [2]]) as agree:
        assert workspace.largest("columns", 3) == 3
    assert agree.call_args.args[2] == 50.0


def test_two_minutes_are_the_least_that_ranks_wait_for_a_first_call() -> None:
    assert Registry().first_timeout_s == FIRST_TIMEOUT_S == 120.0


def opens_with_limits(ctx: RankContext) -> dict[str, list[float]]:
    """How long a registry waits in what it does with the peers: at the first use of a group and of further options."""
    found: dict[str, list[float]] = {}

    def noted(name: str, place: int) -> Any:
        step = getattr(registry_module, name)

        def run(*args: Any) -> Any:
            found.setdefault(name, []).append(args[place])
            return step(*args)

        return mock.patch.object(registry_module, name, run)

    registry = Registry(first_timeout_s=50.0)
    with noted("meet", 3), noted("shake_hands", 4), noted("agree_options", 2):
        workspaces = [
            registry.get(ctx.group_name, ctx.device, AgreedOptions("tile", 1 << 26, timeout_s))
            for timeout_s in (SHORT_S, 70.0, 49.0)
        ]
    found["first"] = [workspace.first_timeout_s for workspace in workspaces]
    found["ring"] = [workspaces[0].shared.generations[0].timeout_s]
    return found


def test_a_registry_waits_as_long_as_a_first_call(rank_pools: RankPools) -> None:
    limits = {"meet": [50.0], "shake_hands": [50.0], "agree_options": [70.0, 50.0], "first": [50.0, 70.0, 50.0]}
    assert rank_pools.get("cpu", 2).run(opens_with_limits) == [{**limits, "ring": [50.0]}] * 2


# What follows from the limits of the calls.


@pytest.fixture
def limits_of_resets() -> Iterator[list[float]]:
    found: list[float] = []

    def note(joined: Any, shared: Any, timeout_s: float, registry: Any) -> None:
        found.append(timeout_s)

    group = make_group(dist.HashStore(), 0, 2)
    with (
        mock.patch.object(reset_module, "_reset", note),
        mock.patch.object(reset_module.groups, "find", lambda group: Anchor()),
        mock.patch.object(reset_module.groups, "resolve", lambda joined: group),
    ):
        yield found


def registry_with(first_timeout_s: float, *timeouts: set[float]) -> Any:
    shared = [SimpleNamespace(timeouts=limits) for limits in timeouts]
    return SimpleNamespace(first_timeout_s=first_timeout_s, of_group=lambda group: shared)


@pytest.mark.parametrize(
    ("registry", "limit_s"),
    [
        (registry_with(0.0, {1.0, 20.0}, {3.0}), 2 * 20.0 + SLACK_S),
        (registry_with(0.0, {1.0}, {30.0, 2.0}), 2 * 30.0 + SLACK_S),
        (registry_with(120.0, {1.0, 20.0}), 120.0),
        (registry_with(120.0, {200.0}), 2 * 200.0 + SLACK_S),
        (registry_with(120.0), make_group(dist.HashStore(), 0, 2).timeout_s),
    ],
    ids=["longest", "of all devices", "first call", "longer than a first call", "no calls"],
)
def test_a_reset_waits_for_a_rank_that_began_to_wait_late(
    limits_of_resets: list[float], registry: Any, limit_s: float
) -> None:
    reset_module.reset(registry=registry)
    reset_module.reset(registry=registry, timeout_s=0.25)
    assert limits_of_resets == [limit_s, 0.25]


@pytest.mark.parametrize(
    ("registry", "limit_s"),
    [
        (registry_with(0.0, {1.0, 20.0}, {3.0}), 20.0),
        (registry_with(0.0, {1.0}, {30.0, 2.0}), 30.0),
        (registry_with(120.0, {1.0, 20.0}), 120.0),
        (registry_with(120.0, {200.0}), 200.0),
        (registry_with(120.0), 5.0),
    ],
    ids=["longest", "of all devices", "first call", "longer than a first call", "no calls"],
)
def test_a_comparison_of_inputs_waits_as_long_as_the_calls(registry: Any, limit_s: float) -> None:
    group = SimpleNamespace(timeout_s=5.0, process_group=lambda: Anchor())
    gone = SimpleNamespace(timeout_s=5.0, process_group=lambda: None)
    with mock.patch.object(replicas_module, "workspaces", registry):
        assert replicas_module._limit_s(group) == limit_s  # type: ignore[arg-type]
        assert replicas_module._limit_s(gone) == 5.0  # type: ignore[arg-type]


# A workspace that nothing watches.


def opens_without_watchdog(ctx: RankContext) -> tuple[bool, bool]:
    """Whether a workspace could be found that is not watched, and whether the next one is watched."""
    registry, broken = Registry(first_timeout_s=0.0), RuntimeError("can't start new thread")
    with mock.patch.object(registry._watchdog, "watch", side_effect=broken):
        try:
            registry.get(ctx.group_name, ctx.device, OPTIONS)
        except RuntimeError as error:
            assert error is broken
    left = bool(registry.of_group(dist.distributed_c10d._get_default_group()))
    workspace = registry.get(ctx.group_name, ctx.device, OPTIONS)
    assert ping(workspace).tolist() == expected(workspace, 1)
    return left, workspace.shared.health in registry._watchdog._watched


def test_a_workspace_that_is_not_watched_is_not_found(rank_pools: RankPools) -> None:
    assert rank_pools.get("cpu", 2).run(opens_without_watchdog) == [(False, True)] * 2
