"""Values of parameters that run with `--all-cases` only."""

from __future__ import annotations

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
