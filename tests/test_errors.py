"""Errors: each class belongs to its family, fills its template, and survives the way from a rank to its parent."""

from __future__ import annotations

import inspect
import pickle
import string
from typing import Any

import pytest

from ditron_inductor import errors
from ditron_inductor.errors import DitronDiverged, DitronError, DitronTimeout

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, DitronError) and cls is not DitronError
]


def sample_fields(cls: type[DitronError]) -> dict[str, Any]:
    """A value for every placeholder of the template: a number where it is formatted as one."""
    parts = string.Formatter().parse(cls.message)
    return {name: 1.5 if spec else f"<{name}>" for _, name, spec, _ in parts if name}


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_has_a_family_and_a_template(cls: type[DitronError]) -> None:
    assert issubclass(cls, (ValueError, RuntimeError))
    error = cls(**sample_fields(cls))
    for name, value in sample_fields(cls).items():
        assert error.fields[name] == value
        assert str(value) in str(error)
    assert "{" not in str(error)


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_can_be_pickled(cls: type[DitronError]) -> None:
    error = cls(**sample_fields(cls))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls and copy.fields == error.fields and str(copy) == str(error)


def test_run_time_errors_name_both_ranks_and_sites() -> None:
    diverged = DitronDiverged(rank=0, site="a/0:all_gather_matmul", peer=3, peer_site="b/1:matmul_all_reduce")
    assert isinstance(diverged, RuntimeError)
    for part in ("rank 0", "rank 3", "a/0:all_gather_matmul", "b/1:matmul_all_reduce", "reset"):
        assert part in str(diverged)
    flag = {"chunk": 4, "expected": "epoch 7", "seen": "epoch 6"}
    timeout = DitronTimeout(rank=1, seconds=30.0, site="a/0", peer=2, absent="Rank 3 has not come. ", **flag)
    for part in ("rank 1", "30.0 s", "rank 2", "chunk 4", "epoch 7", "epoch 6", "itself. Rank 3 has not come. Call "):
        assert part in str(timeout)
