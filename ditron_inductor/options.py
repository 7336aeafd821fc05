"""The options of the backend: where they come from, what they may be, and the environment variables behind them.

This is the only file that reads environment variables. They give defaults; an option given to ``torch.compile`` wins.

=========================  ========================  ==================================================
option                     environment               meaning
=========================  ========================  ==================================================
``ditron.strategy``        DITRON_STRATEGY           ``auto`` (a plan chooses), or one of ``STRATEGIES``
``ditron.workspace_limit`` DITRON_WORKSPACE_LIMIT    bytes of symmetric memory that a group may take
``ditron.timeout_s``       DITRON_TIMEOUT_S          seconds to wait for a peer; None: the group's own
``ditron.meeting_s``       DITRON_MEETING_S          seconds that a graph's first run waits for its peers
``ditron.fusions``                                   the fusions to apply; all of them by default
``ditron.table``           DITRON_TABLE              file of measured choices, or ``shipped``; None: the user's
``ditron.strict``          DITRON_STRICT             whether a site that could be fused, and is not, is an error;
                                                     ``run``: one that cannot run fused too
``ditron.sequence_parallel``                         ``auto`` (where it pays), ``on`` or ``off``
``ditron.trials``          DITRON_TRIALS             whether the first calls of a site try several strategies
``ditron.summary``         DITRON_SUMMARY            whether a line says, once, what was fused
=========================  ========================  ==================================================
"""

from __future__ import annotations

import ast
import difflib
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_origin

from ditron_inductor.errors import InvalidOptionValue, UnknownOption
from ditron_inductor.task.nodes import DELETED_KINDS, STRATEGIES
from ditron_inductor.task.nodes import FUSIONS as FUSIONS

PREFIX = "ditron."
SEQUENCE_PARALLEL = ("auto", "on", "off")
SHIPPED = "shipped"
# These options act when the model runs, or on what is printed, so a graph from a cache is right for all their values.
NOT_COMPILED = ("table", "summary")
SHARED = ("strategy", "workspace_limit", "timeout_s", "fusions", "strict", "sequence_parallel", "trials")
STRICT_RUN = "run"
SWITCHES = {"1": True, "0": False, "true": True, "false": False, "on": True, "off": False}
ENVIRONMENT = {
    "strategy": "DITRON_STRATEGY",
    "workspace_limit": "DITRON_WORKSPACE_LIMIT",
    "timeout_s": "DITRON_TIMEOUT_S",
    "meeting_s": "DITRON_MEETING_S",
    "table": "DITRON_TABLE",
    "strict": "DITRON_STRICT",
    "trials": "DITRON_TRIALS",
    "summary": "DITRON_SUMMARY",
}


@dataclass(frozen=True)
class Options:
    """The options of a compilation. They have to be equal on all ranks of a group, which compare them at first use. Of
    `table` alone rank 0's value is used.

    strategy: one of ``STRATEGIES``; forced for every site unless ``auto``.
    workspace_limit: bytes, at least 0; a site that needs more runs by ``library``.
    timeout_s: seconds, above 0; None takes the process group's own timeout.
    meeting_s: seconds, above 0, that the first run of a graph waits for a rank that does not bring a compiled graph.
    fusions: names out of ``FUSIONS``, kept in that order.
    table: path of a table of measured choices, or ``SHIPPED`` for the shipped tables alone; None takes the one that
    ``python -m ditron_inductor tune`` writes, if there is one.
    strict: raise ``DitronNotFused`` if a collective beside a matmul is left alone that could be fused after a change;
    with ``STRICT_RUN`` also raise ``DitronRunsUnfused`` if an obstacle makes a fused site run by ``library``.
    sequence_parallel: whether work between all-reduces is divided among the ranks: ``auto`` (where it pays), ``on``
    (wherever it is possible) or ``off`` (never).
    trials: with the strategy ``auto``, time the strategies in the first calls of each site and keep the fastest.
    summary: log one line on what was fused when the first graph that holds collectives is compiled.
    Raises ``InvalidOptionValue``.
    """

    strategy: str = "auto"
    workspace_limit: int = 1 << 30
    timeout_s: float | None = None
    meeting_s: float = 10.0
    fusions: tuple[str, ...] = FUSIONS
    table: str | None = None
    strict: bool | str = False
    sequence_parallel: str = "auto"
    trials: bool = False
    summary: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            checked = _CHECKS[field.name](PREFIX + field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, checked)

    @property
    def timeout_arg(self) -> float:
        """``timeout_s`` as an argument of an op; 0.0 means the group's own timeout."""
        return 0.0 if self.timeout_s is None else self.timeout_s

    def text(self) -> str:
        """Returns one stable line with every field on which a compiled graph depends. It is a part of cache keys."""
        names = [field.name for field in fields(self) if field.name not in NOT_COMPILED]
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)

    def shared(self) -> dict[str, str]:
        """Returns the options that all ranks of a group must share, as text by their full names. They decide what is
        fused, what runs, and how long it waits.
        """
        return {PREFIX + name: repr(getattr(self, name)) for name in SHARED}

    @staticmethod
    def of_shared(texts: Mapping[str, str]) -> Options:
        """Returns options with these shared values, as `shared` wrote them."""
        return Options(**{key.removeprefix(PREFIX): ast.literal_eval(text) for key, text in texts.items()})

    @staticmethod
    def keys() -> tuple[str, ...]:
        """The options as a user writes them, ``ditron.`` included."""
        return tuple(PREFIX + field.name for field in fields(Options))

    @staticmethod
    def from_environment(environment: Mapping[str, str] | None = None) -> Options:
        """The defaults, as the environment changes them."""
        return Options(**_environment_values(os.environ if environment is None else environment))

    @staticmethod
    def parse(
        options: Mapping[str, Any] | None, environment: Mapping[str, str] | None = None
    ) -> tuple[Options, dict[str, Any]]:
        """Splits the ``options`` of ``torch.compile`` into Ditron's and Inductor's.

        Returns (Options, config patches for Inductor). Raises ``UnknownOption`` for a key that neither knows and
        ``InvalidOptionValue`` for a value that its option cannot take.
        """
        own = _environment_values(os.environ if environment is None else environment)
        inductor: dict[str, Any] = {}
        for key, value in (options or {}).items():
            if not isinstance(key, str):
                raise UnknownOption(key=key, valid=_valid_text(str(key)))
            if key.startswith(PREFIX):
                name = key.removeprefix(PREFIX)
                if name not in _CHECKS:
                    raise UnknownOption(key=key, valid=_valid_text(key))
                own[name] = value
            else:
                inductor[_inductor_key(key, value)] = value
        return Options(**own), inductor


def cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Ditron's part of the folder in which the platform keeps a user's caches. It need not exist."""
    given = os.environ if environment is None else environment
    # Not Path.home(), which raises for a user without a home; such a path is merely never there.
    standard = os.path.expanduser("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
    return Path(given.get("XDG_CACHE_HOME") or standard) / "ditron_inductor"


def _environment_values(environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, variable in ENVIRONMENT.items():
        text = environment.get(variable, "").strip()
        if text:
            # The check runs here too, so that the error names the variable and not an option that nobody gave.
            values[name] = _CHECKS[name](variable, _FROM_TEXT[name](variable, text))
    return values


def _inductor_key(key: str, value: Any) -> str:
    """Returns Inductor's name of the option. Raises if there is none, or if the value has another type."""
    from torch._inductor import config as inductor_config

    config: Any = inductor_config  # its methods are attached when it is installed as a config module
    name = key.replace("-", "_")
    known = config.get_config_copy()
    if name not in known:
        raise UnknownOption(key=key, valid=_valid_text(key, tuple(known)))
    wanted = config.get_type(name)
    # isinstance cannot check Callable[...] or dict[...]; Inductor leaves those unchecked too.
    if get_origin(wanted) is None and not isinstance(value, wanted):
        raise InvalidOptionValue(key=key, value=value, allowed=f"Inductor wants {getattr(wanted, '__name__', wanted)}")
    return name


def _valid_text(key: str, inductor: tuple[str, ...] = ()) -> str:
    text = f"Ditron's options are {', '.join(Options.keys())}"
    close = difflib.get_close_matches(key.replace("-", "_"), inductor, n=5, cutoff=0.5)
    if close:
        text += f"; the nearest ones of Inductor are {', '.join(close)}"
    if inductor:
        text += "; torch._inductor.list_options() lists Inductor's"
    return text


def _check_strategy(key: str, value: Any) -> str:
    if value not in STRATEGIES:
        raise InvalidOptionValue(key=key, value=value, allowed=f"one of {', '.join(STRATEGIES)}")
    return str(value)


def _check_workspace_limit(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise InvalidOptionValue(key=key, value=value, allowed="a whole number of bytes, at least 0")
    return value


def _check_timeout_s(key: str, value: Any) -> float | None:
    if value is None:
        return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:
        raise InvalidOptionValue(key=key, value=value, allowed="seconds above 0, or None for the group's own timeout")
    return float(value)


def _check_meeting_s(key: str, value: Any) -> float:
    if value is None:
        raise InvalidOptionValue(key=key, value=value, allowed="seconds above 0")
    seconds = _check_timeout_s(key, value)
    assert seconds is not None
    return seconds


def _check_fusions(key: str, value: Any) -> tuple[str, ...]:
    names = tuple(value) if isinstance(value, (tuple, list, set, frozenset)) else (value,)
    if not all(name in FUSIONS for name in names):
        deleted = "".join(f"; {kind} was {what}" for kind, what in DELETED_KINDS.items() if kind in names)
        raise InvalidOptionValue(key=key, value=value, allowed=f"a list out of {', '.join(FUSIONS)}{deleted}")
    return tuple(name for name in FUSIONS if name in names)


def _check_table(key: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        raise InvalidOptionValue(key=key, value=value, allowed=f"the path of a table, '{SHIPPED}', or None")
    return str(value)


def _check_switch(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidOptionValue(key=key, value=value, allowed="True or False")
    return value


def _check_strict(key: str, value: Any) -> bool | str:
    if not isinstance(value, bool) and value != STRICT_RUN:
        raise InvalidOptionValue(key=key, value=value, allowed=f"True, False or '{STRICT_RUN}'")
    return value


def _check_sequence_parallel(key: str, value: Any) -> str:
    if value not in SEQUENCE_PARALLEL:
        raise InvalidOptionValue(key=key, value=value, allowed=f"one of {', '.join(SEQUENCE_PARALLEL)}")
    return str(value)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "strategy": _check_strategy,
    "workspace_limit": _check_workspace_limit,
    "timeout_s": _check_timeout_s,
    "meeting_s": _check_meeting_s,
    "fusions": _check_fusions,
    "table": _check_table,
    "strict": _check_strict,
    "sequence_parallel": _check_sequence_parallel,
    "trials": _check_switch,
    "summary": _check_switch,
}


def _number(kind: Callable[[str], Any], allowed: str) -> Callable[[str, str], Any]:
    def parse(variable: str, text: str) -> Any:
        try:
            return kind(text)
        except ValueError as error:
            raise InvalidOptionValue(key=variable, value=text, allowed=allowed) from error

    return parse


def _switch(variable: str, text: str) -> bool:
    if text.lower() not in SWITCHES:
        raise InvalidOptionValue(key=variable, value=text, allowed=f"one of {', '.join(SWITCHES)}")
    return SWITCHES[text.lower()]


_FROM_TEXT: dict[str, Callable[[str, str], Any]] = {
    "strategy": lambda variable, text: text,
    "workspace_limit": _number(int, "a whole number of bytes"),
    "timeout_s": _number(float, "seconds"),
    "meeting_s": _number(float, "seconds"),
    "table": lambda variable, text: text,
    "strict": lambda variable, text: text if text == STRICT_RUN else _switch(variable, text),
    "trials": _switch,
    "summary": _switch,
}
