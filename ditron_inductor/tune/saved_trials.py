"""Saves what trials in place have decided, so that later runs start with it."""

from __future__ import annotations

from ditron_inductor.options import Options
from ditron_inductor.task.nodes import PLANNED_KINDS
from ditron_inductor.task.table import Entry
from ditron_inductor.tune.tune_command import add_entries, entry_of_times, writable


def save_trials(path: str | None = None) -> int:
    """Adds the times of all trials in place that have decided in this process to a table, and returns how many lines
    they are. path: the table's file; the default is the one that the option ``ditron.table`` or the environment names.
    All ranks have the same times. Rank 0 of the default group writes, so every rank may call this. Groups that are
    first used later, in this process or in another one, take the table, and try nothing at shapes that it has. Raises
    InvalidOptionValue and InvalidTable for a file that cannot be a table, and OSError for one that cannot be written.
    """
    import torch.distributed as dist

    entries = ended_entries()
    if not dist.is_initialized() or dist.get_rank() == 0:
        add_entries(writable(path or Options.current().table), entries)
    return len(entries)


def ended_entries() -> list[Entry]:
    """Returns the trials that have decided as lines of a table, one for each mode that a trial says something about."""
    from ditron_inductor.lowering.host import trials
    from ditron_inductor.task import trial

    entries = []
    for request, times in trials.ended():
        problem = request.problem
        if problem.kind not in PLANNED_KINDS:
            continue
        for graph, us in enumerate(trial.measured_alone(request, times)):
            if us:
                entries.append(entry_of_times(problem, us, request.device_name, graph=graph))
    return entries
