"""`ditron_inductor.config`: attributes, `patch`, what wins over what, and that a value counts in keys of caches."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
from dataclasses import fields
from unittest import mock

import pytest

import ditron_inductor
from ditron_inductor import config, passes_for_inductor
from ditron_inductor.declared_options import DECLARED, OPTIONS
from ditron_inductor.errors import InvalidOptionValue, UnknownOption
from ditron_inductor.options import Options
from tests.test_backend import USER_PASS, pipeline_in


def test_declarations_fields_and_attributes_are_the_same_options() -> None:
    assert [field.name for field in fields(Options)] == list(OPTIONS) == [one.name for one in DECLARED]
    assert inspect.get_annotations(config) == {field.name: field.type for field in fields(Options)}
    assert set(OPTIONS) <= set(dir(config)) and ditron_inductor.config is config


def test_what_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of torch.compile, then config, then the environment, then the default."""
    monkeypatch.delenv("DITRON_STRATEGY", raising=False)
    assert config.strategy == "auto"
    monkeypatch.setenv("DITRON_STRATEGY", "library")
    assert config.strategy == "library" == Options.current().strategy
    with config.patch(strategy="chunked"):
        assert config.strategy == "chunked" == Options.current().strategy == Options.parse({})[0].strategy
        assert Options.parse({"ditron.strategy": "tile"})[0].strategy == "tile"
    assert config.strategy == "library"


def test_a_value_stays_until_it_is_deleted() -> None:
    try:
        config.workspace_limit = 4096
        assert Options.current().workspace_limit == 4096 and config.configured() == {"workspace_limit": 4096}
    finally:
        del config.workspace_limit
    assert config.workspace_limit == Options.current().workspace_limit == 1 << 30 and config.configured() == {}


def test_patches_nest_and_end_with_an_error() -> None:
    with config.patch("strategy", "tile"):
        with pytest.raises(RuntimeError), config.patch({"ditron.strategy": "library", "trials": True}):
            assert (config.strategy, config.trials) == ("library", True)
            raise RuntimeError
        assert config.configured() == {"strategy": "tile"}
        # What unittest does by itself, to a value that is set and to one that is not.
        with mock.patch.object(config, "strategy", "chunked"), mock.patch.object(config, "trials", True):
            assert config.configured() == {"strategy": "chunked", "trials": True}
        assert config.configured() == {"strategy": "tile"}
    assert config.configured() == {}


def test_a_patch_decorates() -> None:
    @config.patch(strict="run")
    def inside() -> bool | str:
        return config.strict

    assert [inside(), inside(), config.strict] == ["run", "run", False]


def test_other_threads_see_a_value() -> None:
    """Graphs may be compiled in a thread of the compiler."""
    seen: list[str] = []
    with config.patch(strategy="tile"):
        thread = threading.Thread(target=lambda: seen.append(Options.current().strategy))
        thread.start()
        thread.join()
    assert seen == ["tile"]


def test_values_are_checked_where_they_are_set() -> None:
    with pytest.raises(InvalidOptionValue, match=r"'ditron_inductor\.config\.strategy' = 'fast'.*auto"):
        config.strategy = "fast"
    with pytest.raises(UnknownOption, match=r"ditron_inductor\.config\.stratgy.*ditron\.strategy"):
        config.stratgy = "tile"  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"stratgy.*ditron\.strategy"):
        _ = config.stratgy  # type: ignore[attr-defined]
    with pytest.raises(InvalidOptionValue), config.patch(strategy="tile", timeout_s=-1):
        pytest.fail("a patch with a wrong value begins")
    for changes in ({"ditron.stratgy": "tile"}, {"stratgy": "tile"}, {5: "tile"}):
        name = str(next(iter(changes))).removeprefix("ditron.")
        with pytest.raises(UnknownOption, match=rf"'ditron_inductor\.config\.{name}'"), config.patch(changes):  # type: ignore[arg-type]
            pytest.fail("a patch with an unknown name begins")
    assert config.configured() == {}


def test_config_counts_in_the_key_of_a_graph_as_options_do() -> None:
    def key(**options: object) -> str:
        given = {f"ditron.{name}": value for name, value in options.items()}
        return pipeline_in(passes_for_inductor(given)[USER_PASS]).uuid()

    plain = key()
    for name, value in {"strategy": "library", "fusions": ["projections"], "strict": "run", "meeting_s": 3}.items():
        with config.patch(name, value):
            assert key() == key(**{name: value}) != plain
    with config.patch(summary=False):
        assert key() == plain, "it acts when the graph runs"


def test_config_needs_no_torch() -> None:
    code = (
        "import sys; from ditron_inductor import config; config.strategy = 'tile'; "
        "assert config.strategy == 'tile' and not {'torch', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
