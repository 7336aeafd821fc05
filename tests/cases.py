"""Values of parameters that run with `--all-cases` only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def rare(*values: Any) -> list[Any]:
    """The values as parameters of tests, for cases that take long and are much like others. A tuple has a value for
    each of several parameters.
    """
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.all_cases)
        for value in values
    ]


def sampled(values: Iterable[Any], step: int = 2) -> list[Any]:
    """Every step-th value as a parameter of tests, from the first one on, and the others by `--all-cases`: for long
    lists of cases, each of which takes seconds.
    """
    return [value if index % step == 0 else rare(value)[0] for index, value in enumerate(values)]
