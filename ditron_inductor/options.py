"""The options of a compilation: what was given to `torch.compile`, else `config`, else the environment, else defaults.

`declared_options.py` says what each option is, and `config.py` holds what a program has set for its whole process.
The environment variables of options are read in these modules only, when a model is compiled.
"""

from __future__ import annotations

import ast
import difflib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_origin

from ditron_inductor import config
from ditron_inductor.declared_options import DECLARED, OPTIONS, PREFIX, keys_text
from ditron_inductor.declared_options import SHIPPED as SHIPPED
from ditron_inductor.declared_options import STRICT_RUN as STRICT_RUN
from ditron_inductor.errors import InvalidOptionValue, UnknownOption

MODE_IS_NO_OPTION = (
    "A mode is an argument of torch.compile, which takes either mode or options. To have both, give it the mode, and "
    "set Ditron's options in ditron_inductor.config, as in ditron_inductor.config.strategy = 'tile'; or write out "
    "what the mode stands for: options={**torch._inductor.list_mode_options('reduce-overhead'), ...}"
)


@dataclass(frozen=True)
class Options:
    """The options of a compilation, with their defaults. What each of them may be and does is in `docs/options.md`.
    They have to be equal on all ranks of a group, which compare them at first use. Of `table` alone rank 0's value is
    used. Raises ``InvalidOptionValue``.
    """

    strategy: str = OPTIONS["strategy"].default
    workspace_limit: int = OPTIONS["workspace_limit"].default
    timeout_s: float | None = OPTIONS["timeout_s"].default
    meeting_s: float = OPTIONS["meeting_s"].default
    fusions: tuple[str, ...] = OPTIONS["fusions"].default
    table: str | None = OPTIONS["table"].default
    strict: bool | str = OPTIONS["strict"].default
    sequence_parallel: str = OPTIONS["sequence_parallel"].default
    trials: bool = OPTIONS["trials"].default
    summary: bool = OPTIONS["summary"].default

    def __post_init__(self) -> None:
        for field in fields(self):
            option = OPTIONS[field.name]
            object.__setattr__(self, option.name, option.check(option.key, getattr(self, option.name)))

    @property
    def timeout_arg(self) -> float:
        """``timeout_s`` as an argument of an op; 0.0 means the group's own timeout."""
        return 0.0 if self.timeout_s is None else self.timeout_s

    def text(self) -> str:
        """Returns one stable line with every field on which a compiled graph depends. It is a part of cache keys."""
        return ", ".join(f"{option.name}={getattr(self, option.name)!r}" for option in DECLARED if option.compiled)

    def shared(self) -> dict[str, str]:
        """Returns the options that all ranks of a group must share, as text by their full names. They decide what is
        fused, what runs, and how long it waits.
        """
        return {option.key: repr(getattr(self, option.name)) for option in DECLARED if option.shared}

    @staticmethod
    def of_shared(texts: Mapping[str, str]) -> Options:
        """Returns options with these shared values, as `shared` wrote them. Others than Ditron's are left out."""
        own = {key.removeprefix(PREFIX): text for key, text in texts.items() if key.startswith(PREFIX)}
        return Options(**{name: ast.literal_eval(text) for name, text in own.items()})

    @staticmethod
    def current(environment: Mapping[str, str] | None = None) -> Options:
        """Returns what holds where `torch.compile` is given nothing: `config`, else the environment, else defaults."""
        return Options(**_settings(environment))

    @staticmethod
    def parse(
        options: Mapping[str, Any] | None, environment: Mapping[str, str] | None = None
    ) -> tuple[Options, dict[str, Any]]:
        """Splits the ``options`` of ``torch.compile`` into Ditron's and Inductor's. Returns (Options, config patches
        for Inductor). Options of Ditron that are not given are as in `current`. Raises ``UnknownOption`` for a key that
        neither knows and ``InvalidOptionValue`` for a value that its option cannot take.
        """
        own: dict[str, Any] = {}
        inductor: dict[str, Any] = {}
        for key, value in (options or {}).items():
            if not isinstance(key, str):
                raise UnknownOption(key=key, valid=_valid_text(str(key)))
            if key.startswith(PREFIX):
                name = key.removeprefix(PREFIX)
                if name not in OPTIONS:
                    raise UnknownOption(key=key, valid=_valid_text(key))
                own[name] = value
            else:
                inductor[_inductor_key(key, value)] = value
        return Options(**_settings(environment, own)), inductor


def cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Ditron's part of the folder in which the platform keeps a user's caches. It need not exist."""
    given = os.environ if environment is None else environment
    # Not Path.home(), which raises for a user without a home; such a path is merely never there.
    standard = os.path.expanduser("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
    return Path(given.get("XDG_CACHE_HOME") or standard) / "ditron_inductor"


def _settings(environment: Mapping[str, str] | None, own: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Returns the values of all options: `own`, else what config sets, else the environment, else defaults."""
    given, decided = os.environ if environment is None else environment, {**config.configured(), **own}
    # The variable of an option that is decided before is not read, so a wrong one does no harm there.
    others = (option for option in DECLARED if option.name not in decided)
    return decided | {option.name: option.of_environment(given) for option in others}


def _inductor_key(key: str, value: Any) -> str:
    """Returns Inductor's name of the option. Raises if there is none, or if the value has another type."""
    from torch._inductor import config as inductor_config

    inductor: Any = inductor_config  # its methods are attached when it is installed as a config module
    name = key.replace("-", "_")
    known = inductor.get_config_copy()
    if name not in known:
        raise UnknownOption(key=key, valid=MODE_IS_NO_OPTION if name == "mode" else _valid_text(key, tuple(known)))
    wanted = inductor.get_type(name)
    # isinstance cannot check Callable[...] or dict[...]; Inductor leaves those unchecked too.
    if get_origin(wanted) is None and not isinstance(value, wanted):
        raise InvalidOptionValue(key=key, value=value, allowed=f"Inductor wants {getattr(wanted, '__name__', wanted)}")
    return name


def _valid_text(key: str, inductor: tuple[str, ...] = ()) -> str:
    text = keys_text()
    close = difflib.get_close_matches(key.replace("-", "_"), inductor, n=5, cutoff=0.5)
    if close:
        text += f"; the nearest ones of Inductor are {', '.join(close)}"
    if inductor:
        text += "; torch._inductor.list_options() lists Inductor's"
    return text
