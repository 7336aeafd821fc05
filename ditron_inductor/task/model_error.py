"""The error of the cost model against measured times, which `python -m ditron_inductor tune --model-error` prints."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from ditron_inductor.task import cost
from ditron_inductor.task.dtypes import precision
from ditron_inductor.task.problem import Problem
from ditron_inductor.task.table import MEASURED, Entry


@dataclass(frozen=True)
class ModelError:
    """The error of one op by one strategy over `count` measurements, relative to the measured time. mean, median,
    worst: those of its absolute value. bias: the median with its sign, above 0 if the model predicts too long times.
    worst_at: the sizes at which the error is worst.
    """

    op: str
    strategy: str
    count: int
    mean: float
    median: float
    worst: float
    bias: float
    worst_at: str


def problem_of(entry: Entry) -> Problem:
    """Returns the problem that the model is asked about for an entry, whose dtype is one of the table of dtypes."""
    of_products = precision(entry.dtype)
    assert of_products is not None, f"no kernel of ours takes {entry.dtype}"
    sizes = entry.m, entry.n, entry.k
    return Problem(entry.op, *sizes, of_products, entry.world, captured=bool(entry.graph), slices=entry.slices)


def relative_error(entry: Entry, strategy: str, on: cost.Hardware) -> float:
    """Returns (predicted - measured) / measured."""
    return cost.predict(problem_of(entry), on)[strategy] / entry.us[strategy] - 1.0


def model_error(entries: Iterable[Entry]) -> list[ModelError]:
    """Returns one line per op and strategy that was measured on a GPU that the model knows, in the ops' order."""
    known = [entry for entry in entries if precision(entry.dtype) and cost.hardware(entry.gpu) is not cost.UNKNOWN]
    rows = []
    for op in dict.fromkeys(entry.op for entry in known):
        for strategy in MEASURED:
            errors = [
                (relative_error(entry, strategy, cost.hardware(entry.gpu)), entry)
                for entry in known
                if entry.op == op and strategy in entry.us
            ]
            if errors:
                worst, at = max(errors, key=lambda pair: abs(pair[0]))
                sizes = [abs(error) for error, _ in errors]
                rows.append(
                    ModelError(
                        op=op,
                        strategy=strategy,
                        count=len(errors),
                        mean=statistics.fmean(sizes),
                        median=statistics.median(sizes),
                        worst=abs(worst),
                        bias=statistics.median(error for error, _ in errors),
                        worst_at=f"m={at.m} n={at.n} k={at.k} x{at.world}{' graph' if at.graph else ''}",
                    )
                )
    return rows


def mean_error(entries: Iterable[Entry]) -> float:
    """The mean of all absolute relative errors, 0.0 where there are none."""
    rows = model_error(entries)
    count = sum(row.count for row in rows)
    return sum(row.mean * row.count for row in rows) / count if count else 0.0


def report_text(entries: Iterable[Entry], form: str = "simple") -> str:
    """The report as a table in a format of `tabulate`, errors in per cent of the measured time."""
    from tabulate import tabulate

    entries = list(entries)
    lines = [
        (
            row.op,
            row.strategy,
            row.count,
            *(f"{100 * value:.0f} %" for value in (row.mean, row.median, row.worst)),
            f"{100 * row.bias:+.0f} %",
            row.worst_at,
        )
        for row in model_error(entries)
    ]
    if not lines:
        return "no measurement on a GPU that the cost model knows"
    headers = ("op", "strategy", "shapes", "mean", "median", "worst", "bias", "worst at")
    table = tabulate(lines, headers=headers, tablefmt=form, disable_numparse=True)
    return f"{table}\n\nmean error: {100 * mean_error(entries):.0f} %"
