"""A fake process group around every test of this folder that asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.passes import graphs


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of `graphs.WORLD_SIZE` ranks of which only this process, rank 0, exists."""
    with graphs.fake_group():
        yield
