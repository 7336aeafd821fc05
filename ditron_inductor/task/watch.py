"""An observer of the calls of Task nodes and of `library`'s collectives, set by the tax report while it measures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ditron_inductor.task.plan import Choice, PlanRequest


class Observer(Protocol):
    """An object that is told of the calls, perhaps on another thread, such as that of the backward pass."""

    def call(
        self, run: Callable[..., Any], group_name: str, request: PlanRequest, choice: Choice
    ) -> Callable[..., Any]:
        """Returns the function to run instead of `run`, which is the call of a site by the strategy of `choice`."""

    def collective(self, launch: Callable[[], Any]) -> None:
        """Do `launch`, a blocking collective of the call that is running."""


class Watch:
    """The observer of this process, if there is one."""

    def __init__(self) -> None:
        self.observer: Observer | None = None

    @contextlib.contextmanager
    def by(self, observer: Observer) -> Iterator[None]:
        """Tell `observer` of the calls inside the block; not to be nested."""
        assert self.observer is None, "somebody watches already"
        self.observer = observer
        try:
            yield
        finally:
            self.observer = None


watch = Watch()
"""The observer of this process."""


def communicate(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Do a blocking collective, by an observer where there is one."""
    if watch.observer is None:
        collective(*args, **kwargs)
    else:
        watch.observer.collective(lambda: collective(*args, **kwargs))
