"""The strategy that was chosen for a call, with the note of it for `explain`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ditron_inductor.task.plan import Choice, PlanRequest, decisions
from ditron_inductor.task.watch import watch

Runner = Callable[..., Any]
"""A function of the operands of a call, which runs it."""


@dataclass(frozen=True, eq=False)
class Chosen:
    """What runs a call, and (group name, request, choice) for `plan.decisions`, None if nothing was chosen."""

    run: Runner
    choice: tuple[str, PlanRequest, Choice] | None = None

    def noted(self) -> Runner:
        """Notes the choice as the site's last one, and returns what runs the call."""
        if self.choice is not None:
            decisions.note(*self.choice)
            if watch.observer is not None:
                return watch.observer.call(self.run, *self.choice)
        return self.run
