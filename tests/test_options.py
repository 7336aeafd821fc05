"""Options: defaults, environment, ranges, and errors that name the key and list what is valid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor
from torch._dynamo.exc import BackendCompilerFailed

from ditron_inductor import config, passes_for_inductor
from ditron_inductor.declared_options import OPTIONS, Option
from ditron_inductor.errors import InvalidOptionValue, UnknownOption
from ditron_inductor.options import Options, cache_folder
from ditron_inductor.task.nodes import FUSIONS


def test_defaults() -> None:
    options, patches = Options.parse(None, environment={})
    assert options == Options(strategy="auto", workspace_limit=1 << 30, timeout_s=None, fusions=FUSIONS)
    assert patches == {} and options.timeout_arg == 0.0


def test_ours_and_inductors_keys_are_told_apart() -> None:
    given = {"ditron.strategy": "tile", "ditron.timeout_s": 5, "max-autotune": True, "triton.cudagraphs": False}
    options, patches = Options.parse(given, environment={})
    assert (options.strategy, options.timeout_s, options.timeout_arg) == ("tile", 5.0, 5.0)
    assert patches == {"max_autotune": True, "triton.cudagraphs": False}


def test_a_callable_value_of_inductor_passes() -> None:
    _, patches = Options.parse({"post_grad_custom_pre_pass": print}, environment={})
    assert patches == {"post_grad_custom_pre_pass": print}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"ditron.stratgy": "tile"}, UnknownOption),
        ({"max_autotun": True}, UnknownOption),
        ({"ditron.strategy": "fast"}, InvalidOptionValue),
    ],
)
def test_what_a_user_of_torch_compile_sees(options: dict[str, Any], error: type[Exception]) -> None:
    """As the page on options says: torch wraps what a backend raises, and Ditron can be asked before."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + 1, backend="ditron", options=dict(options))
    with pytest.raises(BackendCompilerFailed) as wrapped:
        compiled(torch.ones(2))
    assert type(wrapped.value.inner_exception) is error and next(iter(options)) in str(wrapped.value)
    with pytest.raises(ValueError) as plain:
        passes_for_inductor(options)
    assert type(plain.value) is error and str(plain.value) in str(wrapped.value)


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("ditron.stratgy", "ditron.strategy, ditron.workspace_limit, ditron.timeout_s, ditron.meeting_s"),
        ("strategy", "ditron.strategy"),
        ("max_autotun", "max_autotune"),
        (5, "ditron.strategy"),
    ],
)
def test_an_unknown_key_is_named_with_the_valid_ones(key: Any, named: str) -> None:
    with pytest.raises(UnknownOption) as error:
        Options.parse({key: 1}, environment={})
    assert f"'{key}'" in str(error.value) and named in str(error.value)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ditron.strategy", "fast"),
        ("ditron.strategy", None),
        ("ditron.strategy", ["tile"]),
        ("ditron.workspace_limit", -1),
        ("ditron.workspace_limit", 1.5),
        ("ditron.workspace_limit", True),
        ("ditron.timeout_s", 0),
        ("ditron.timeout_s", float("nan")),
        ("ditron.timeout_s", float("inf")),
        ("ditron.timeout_s", "10"),
        ("ditron.fusions", ["matmul_broadcast"]),
        ("ditron.fusions", 7),
        ("ditron.fusions", [[]]),
        ("ditron.sequence_parallel", True),
        ("ditron.table", 7),
        ("ditron.table", ""),
        ("ditron.strict", 1),
        ("ditron.strict", "runs"),
        ("ditron.summary", None),
        ("max_autotune", "yes"),
    ],
)
def test_a_value_out_of_range_is_named(key: str, value: Any) -> None:
    with pytest.raises(InvalidOptionValue, match=key):
        Options.parse({key: value}, environment={})


def test_fusions_keep_one_order() -> None:
    given = {"ditron.fusions": ["matmul_all_reduce", "all_gather_matmul"]}
    options, _ = Options.parse(given, environment={})
    assert options.fusions == ("all_gather_matmul", "matmul_all_reduce")
    assert Options.parse({"ditron.fusions": []}, environment={})[0].fusions == ()


def test_environment_gives_defaults_and_options_win() -> None:
    environment = {"DITRON_STRATEGY": "library", "DITRON_WORKSPACE_LIMIT": "4096", "DITRON_TIMEOUT_S": "2.5"}
    options = Options.current(environment)
    assert (options.strategy, options.workspace_limit, options.timeout_s) == ("library", 4096, 2.5)
    options, _ = Options.parse({"ditron.strategy": "tile"}, environment)
    assert (options.strategy, options.workspace_limit) == ("tile", 4096)
    assert Options.current({"DITRON_STRATEGY": ""}) == Options()


@pytest.mark.parametrize(("text", "value"), [("1", True), ("True", True), ("on", True), ("0", False), ("off", False)])
def test_a_switch_in_the_environment(text: str, value: bool) -> None:
    assert Options.current({"DITRON_STRICT": text}).strict is value


def test_strict_has_a_third_value() -> None:
    assert Options.current({"DITRON_STRICT": "run"}).strict == "run"
    assert Options.parse({"ditron.strict": "run"}, environment={})[0].strict == "run"
    assert Options.of_shared(Options(strict="run").shared()).strict == "run"
    assert Options(strict="run").text() != Options(strict=True).text()


@pytest.mark.parametrize("option", [option for option in OPTIONS.values() if option.name != "table"])
def test_a_bad_variable_is_named(option: Option) -> None:
    with pytest.raises(InvalidOptionValue, match=option.variable):
        Options.current({option.variable: "wrong"})


@pytest.mark.parametrize("option", [option for option in OPTIONS.values() if option.name != "table"])
def test_a_bad_variable_does_no_harm_to_an_option_that_is_given(option: Option) -> None:
    given = {option.variable: "wrong"}
    assert Options.parse({option.key: option.default}, given) == (Options(), {})
    with config.patch({option.key: option.default}):
        assert Options.parse(None, given) == (Options(), {})
    with pytest.raises(InvalidOptionValue, match=option.variable):
        Options.parse({}, given)


def test_a_bad_variable_is_an_error_of_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that no option has is not read at all."""
    torch._dynamo.reset()
    monkeypatch.setenv("DITRON_STRATGY", "tile")
    compiled = torch.compile(lambda x: x + 1, backend="ditron")
    assert compiled(torch.ones(2)).tolist() == [2, 2]
    torch._dynamo.reset()
    monkeypatch.setenv("DITRON_STRATEGY", "fast")
    with pytest.raises(BackendCompilerFailed, match=r"'DITRON_STRATEGY' = 'fast' is not valid: one of auto") as wrapped:
        compiled(torch.ones(2))
    assert type(wrapped.value.inner_exception) is InvalidOptionValue
    with pytest.raises(InvalidOptionValue, match="DITRON_STRATEGY"):
        passes_for_inductor()


def test_with_suppress_errors_a_bad_option_leaves_the_model_eager() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + 1, backend="ditron", options={"ditron.stratgy": "tile"})
    with torch._dynamo.config.patch(suppress_errors=True):
        assert compiled(torch.ones(2)).tolist() == [2, 2]


def test_fusions_in_the_environment() -> None:
    given = {"DITRON_FUSIONS": "matmul_all_reduce, all_gather_matmul"}
    assert Options.current(given).fusions == ("all_gather_matmul", "matmul_all_reduce")
    assert Options.current({"DITRON_FUSIONS": "none"}).fusions == ()
    assert Options.current({"DITRON_SEQUENCE_PARALLEL": "off"}).sequence_parallel == "off"


def test_a_mode_among_the_options_is_said_to_be_none() -> None:
    """torch.compile itself takes either a mode or options, and its error does not say what to do."""
    with pytest.raises(RuntimeError, match="Either mode or options can be specified"):
        torch.compile(torch.neg, backend="ditron", mode="reduce-overhead", options={"ditron.strategy": "tile"})
    with pytest.raises(UnknownOption, match=r"set Ditron's options in ditron_inductor\.config"):
        Options.parse({"mode": "reduce-overhead", "ditron.strategy": "tile"}, environment={})
    written_out = {**torch._inductor.list_mode_options("reduce-overhead"), "ditron.strategy": "tile"}
    options, patches = Options.parse(written_out, environment={})
    assert options.strategy == "tile" and patches["triton.cudagraphs"] is True


def test_the_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DITRON_STRATEGY", "library")
    assert Options.parse(None)[0].strategy == "library"


def test_a_fusion_that_was_deleted_is_said_to_be() -> None:
    with pytest.raises(InvalidOptionValue, match="; all_gather_contract was deleted, as it was no faster"):
        Options.parse({"ditron.fusions": ["all_gather_matmul", "all_gather_contract"]}, environment={})
    with pytest.raises(InvalidOptionValue) as caught:
        Options.parse({"ditron.fusions": ["none"]}, environment={})
    assert "deleted" not in str(caught.value)


def test_a_table_is_a_path_and_no_part_of_cache_keys() -> None:
    assert Options.parse({"ditron.table": "mine.csv"}, environment={})[0].table == "mine.csv"
    assert Options.current({"DITRON_TABLE": "shipped"}).table == "shipped"
    assert Options(table="mine.csv").text() == Options().text()


def test_the_cache_folder_follows_the_platform() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/caches"}) == Path("/caches/ditron_inductor")
    assert cache_folder({}).name == "ditron_inductor" and cache_folder({}).parent.name.lower() in (".cache", "caches")


def test_text_shows_every_field_and_tells_options_apart() -> None:
    assert Options(timeout_s=3).text() == (
        "strategy='auto', workspace_limit=1073741824, timeout_s=3.0, meeting_s=10.0, "
        "fusions=('all_gather_matmul', 'matmul_reduce_scatter', 'matmul_all_reduce', 'matmul_all_gather', "
        "'all_reduce_rms_norm', 'matmul_all_to_all', 'all_to_all_matmul', "
        "'flash_decode', 'cached_attention', 'projections', 'expert_projections', 'grouped_projections', "
        "'combine_experts', 'choose_experts', 'grouped_matmul_all_reduce', 'grouped_matmul_reduce_scatter', "
        "'all_gather_attention', 'attention_reduce_scatter'), "
        "strict=False, sequence_parallel='auto', trials=True"
    )
    assert Options().text() != Options(fusions=()).text()
    assert Options().text() == Options(summary=False).text()
