"""Fits the cost model's numbers of a GPU to measured times, for `python -m benchmarks.plan`.

Least squares on the logarithm of predicted / measured, every op and strategy with the same weight, by coordinate
descent from the present numbers. What the measurements do not determine stays where it is: a small weight holds every
number to its start.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from ditron_inductor.task import cost
from ditron_inductor.task.model_error import problem_of
from ditron_inductor.task.table import Entry

SOURCE = Path(cost.__file__)
FITTED = tuple(field.name for field in fields(cost.Hardware) if field.name != "name")
HOLD = 0.002
"""Weight of the squared logarithm of a number over its start."""
STEPS = (1.3, 1.1, 1.03, 1.01)
SWEEPS = 60
HELD = {"H100": ("pair_gain", "copy_bytes_per_s")}
"""What is not fitted: two H100s were measured, not more, so a rate for pairs alone would be fitted, by two numbers. Its
links are those of the H200, whose numbers these are.
"""
# A matmul cut into pieces, or in our kernel, is not faster than the library's.
UPPER = {"tile_efficiency": 1.0, "chunk_efficiency": 1.0}


def loss(entries: Sequence[Entry], on: cost.Hardware, start: cost.Hardware) -> float:
    """The mean over ops and strategies of the mean squared log error, and what holds the numbers to their start."""
    errors: dict[tuple[str, str], list[float]] = {}
    for entry in entries:
        predicted = cost.predict(problem_of(entry), on)
        for strategy, us in entry.us.items():
            errors.setdefault((entry.op, strategy), []).append(math.log(predicted[strategy] / us) ** 2)
    held = sum(math.log(getattr(on, name) / getattr(start, name)) ** 2 for name in FITTED)
    return sum(sum(each) / len(each) for each in errors.values()) / max(1, len(errors)) + HOLD * held / len(FITTED)


def fit(entries: Sequence[Entry], start: cost.Hardware) -> cost.Hardware:
    """The numbers near `start` under which the model predicts `entries` best."""
    best, lowest = start, loss(entries, start, start)
    for step in STEPS:
        for _ in range(SWEEPS):
            before = lowest
            for name in (name for name in FITTED if name not in HELD.get(start.name, ())):
                for factor in (step, 1.0 / step):
                    value = min(getattr(best, name) * factor, UPPER.get(name, math.inf))
                    tried = replace(best, **{name: value})
                    found = loss(entries, tried, start)
                    if found < lowest:
                        best, lowest = tried, found
            if lowest > before * (1 - 1e-4):
                break
    return best


def text(on: cost.Hardware) -> str:
    """The numbers as they stand in the source."""
    lines = [f'    name="{on.name}",']
    for name in FITTED:
        lines.append(f"    {name}={number_text(getattr(on, name))},")
    return f"{on.name} = Hardware(\n" + "\n".join(lines) + "\n)\n"


def number_text(value: float) -> str:
    """Three digits: `727e12`, `4.16e12`, `238e9`, `15.6`."""
    for exponent in (12, 9):
        if value >= 10**exponent:
            return f"{float(f'{value / 10**exponent:.3g}'):g}e{exponent}"
    return str(float(f"{value:.3g}"))


def write(on: cost.Hardware, source: str) -> str:
    """`source`, the text of cost.py, with the numbers of `on.name` replaced."""
    pattern = re.compile(rf"^{on.name} = Hardware\(\n.*?^\)\n", re.MULTILINE | re.DOTALL)
    assert len(pattern.findall(source)) == 1, f"{on.name} stands once in {SOURCE}"
    return pattern.sub(lambda _: text(on), source)


def error_text(entries: Sequence[Entry], on: cost.Hardware) -> str:
    """Mean absolute error by op and strategy, in per cent."""
    errors: dict[tuple[str, str], list[float]] = {}
    for entry in entries:
        predicted = cost.predict(problem_of(entry), on)
        for strategy, us in entry.us.items():
            errors.setdefault((entry.op, strategy), []).append(abs(predicted[strategy] / us - 1.0))
    return ", ".join(f"{op} {name} {100 * sum(each) / len(each):.1f} %" for (op, name), each in sorted(errors.items()))
