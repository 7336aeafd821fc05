"""A strategy that was chosen for a call, and its note for `explain`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ditron_inductor.task.plan import Choice, PlanRequest, decisions
from ditron_inductor.task.watch import watch

Runner = Callable[..., Any]
"""A function of the operands of a call."""


@dataclass(frozen=True, eq=False)
class Chosen:
    """A strategy.

    run: a function of the operands. choice: the group's name, the request and its choice, for `decisions`, or None
    where there is nothing to choose.
    """

    run: Callable[..., Any]
    choice: tuple[str, PlanRequest, Choice] | None = None

    def noted(self) -> Callable[..., Any]:
        """What to run, noted as the site's last choice."""
        if self.choice is not None:
            decisions.note(*self.choice)
            if watch.observer is not None:
                return watch.observer.call(self.run, *self.choice)
        return self.run
