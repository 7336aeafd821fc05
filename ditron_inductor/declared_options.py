"""The options, each declared once: its default, its environment variable, what it may be, and what it does.

From the declarations follow the fields of `Options`, the attributes of `ditron_inductor.config`, the environment
variables, and the table in docs/options.md (`tools/option_table.py`). To add an option, add it to `DECLARED`, to the
fields of `Options` and to the annotations of `config`. A test compares the three.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ditron_inductor.errors import InvalidOptionValue
from ditron_inductor.task.nodes import DELETED_KINDS, FUSIONS, STRATEGIES

PREFIX = "ditron."
VARIABLE_PREFIX = "DITRON_"
SEQUENCE_PARALLEL = ("auto", "on", "off")
SHIPPED = "shipped"
STRICT_RUN = "run"
NO_FUSIONS = "none"
SWITCHES = {"1": True, "0": False, "true": True, "false": False, "on": True, "off": False}


@dataclass(frozen=True)
class Option:
    """One option.

    check: takes the name that the user wrote and a value, and returns the value in its final form, or raises
    InvalidOptionValue. of_text: takes the environment variable and its text, which is not empty, and returns a value
    for `check`, or raises InvalidOptionValue. values, meaning: the cells of the table in docs/options.md.
    compiled: whether a compiled graph depends on it, so that it is a part of the keys of Inductor's caches. The others
    act when the model runs, or on what is printed, so a graph from a cache is right for all their values.
    shared: whether the ranks of a group compare its values when the group is first used.
    """

    name: str
    default: Any
    check: Callable[[str, Any], Any]
    of_text: Callable[[str, str], Any]
    values: str
    meaning: str
    compiled: bool = True
    shared: bool = True

    @property
    def key(self) -> str:
        """The option as the `options` of `torch.compile` name it."""
        return PREFIX + self.name

    @property
    def variable(self) -> str:
        return VARIABLE_PREFIX + self.name.upper()

    def of_environment(self, environment: Mapping[str, str]) -> Any:
        """Returns the variable's value, or the default where the variable is missing or empty."""
        text = environment.get(self.variable, "").strip()
        # The check runs here too, so that the error names the variable and not an option that nobody gave.
        return self.check(self.variable, self.of_text(self.variable, text)) if text else self.default


def _one_of(allowed: tuple[str, ...]) -> Callable[[str, Any], str]:
    def check(key: str, value: Any) -> str:
        if value not in allowed:
            raise InvalidOptionValue(key=key, value=value, allowed=f"one of {', '.join(allowed)}")
        return str(value)

    return check


def _bytes(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise InvalidOptionValue(key=key, value=value, allowed="a whole number of bytes, at least 0")
    return value


def _seconds(allowed: str) -> Callable[[str, Any], float]:
    def check(key: str, value: Any) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= 0:
            raise InvalidOptionValue(key=key, value=value, allowed=allowed)
        return float(value)

    return check


def _timeout(key: str, value: Any) -> float | None:
    return None if value is None else _seconds("seconds above 0, or None for the group's own timeout")(key, value)


def _fusions(key: str, value: Any) -> tuple[str, ...]:
    names = tuple(value) if isinstance(value, (tuple, list, set, frozenset)) else (value,)
    if not all(name in FUSIONS for name in names):
        deleted = "".join(f"; {kind} was {what}" for kind, what in DELETED_KINDS.items() if kind in names)
        raise InvalidOptionValue(key=key, value=value, allowed=f"a list out of {', '.join(FUSIONS)}{deleted}")
    return tuple(name for name in FUSIONS if name in names)


def _table(key: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        raise InvalidOptionValue(key=key, value=value, allowed=f"the path of a table, '{SHIPPED}', or None")
    return str(value)


def _switch(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidOptionValue(key=key, value=value, allowed="True or False")
    return value


def _strict(key: str, value: Any) -> bool | str:
    if not isinstance(value, bool) and value != STRICT_RUN:
        raise InvalidOptionValue(key=key, value=value, allowed=f"True, False or '{STRICT_RUN}'")
    return value


def _text(variable: str, text: str) -> str:
    return text


def _number_of_text(kind: Callable[[str], Any], allowed: str) -> Callable[[str, str], Any]:
    def parse(variable: str, text: str) -> Any:
        try:
            return kind(text)
        except ValueError as error:
            raise InvalidOptionValue(key=variable, value=text, allowed=allowed) from error

    return parse


def _names_of_text(variable: str, text: str) -> list[str]:
    return [] if text == NO_FUSIONS else [name.strip() for name in text.split(",")]


def _switch_of_text(variable: str, text: str) -> bool:
    if text.lower() not in SWITCHES:
        raise InvalidOptionValue(key=variable, value=text, allowed=f"one of {', '.join(SWITCHES)}")
    return SWITCHES[text.lower()]


def _strict_of_text(variable: str, text: str) -> bool | str:
    return text if text == STRICT_RUN else _switch_of_text(variable, text)


DECLARED: tuple[Option, ...] = (
    Option(
        "strategy", "auto", _one_of(STRATEGIES), _text, values=", ".join(f"`{name}`" for name in STRATEGIES),
        meaning="How a fused site runs. With `auto` a plan chooses for each site.",
    ),
    Option(
        "workspace_limit", 1 << 30, _bytes, _number_of_text(int, "a whole number of bytes"), values="bytes, 0 or more",
        meaning="The symmetric memory that a process group may use on one device.",
    ),
    Option(
        "timeout_s", None, _timeout, _number_of_text(float, "seconds"), values="seconds above 0, or None",
        meaning="How long a kernel waits for a peer. None is the timeout of the process group.",
    ),
    Option(
        "meeting_s", 10.0, _seconds("seconds above 0"), _number_of_text(float, "seconds"), values="seconds above 0",
        meaning="How long the first run of a graph waits for a rank that does not bring a compiled graph.",
        shared=False,
    ),
    Option(
        "fusions", FUSIONS, _fusions, _names_of_text, values="names of fusions",
        meaning=f"The fusions that are allowed. The variable has commas between the names, or `{NO_FUSIONS}`.",
    ),
    Option(
        "table", None, _table, _text, values=f"a path, `{SHIPPED}`, or None",
        meaning=f"The file of times that you measured. None is the default file, `{SHIPPED}` no file of yours.",
        compiled=False, shared=False,
    ),
    Option(
        "strict", False, _strict, _strict_of_text, values=f"True, False or `{STRICT_RUN}`",
        meaning="A site that could be fused and is not is an error; "
        f"with `{STRICT_RUN}`, also a fused one that an obstacle makes run by `library`.",
    ),
    Option(
        "sequence_parallel", "auto", _one_of(SEQUENCE_PARALLEL), _text,
        values=", ".join(f"`{name}`" for name in SEQUENCE_PARALLEL),
        meaning="Work between all-reduces is divided among the ranks: where it pays, wherever it is possible, never.",
    ),
    Option(
        "trials", True, _switch, _switch_of_text, values="True or False",
        meaning="Calls of a site try several strategies, the first ones and some later ones, and the fastest is kept.",
    ),
    Option(
        "summary", True, _switch, _switch_of_text, values="True or False",
        meaning="A line is logged, once, that says what was matched and what ran fused.",
        compiled=False, shared=False,
    ),
)  # fmt: skip
"""All options, in the order in which they are shown."""
OPTIONS: dict[str, Option] = {option.name: option for option in DECLARED}
"""All options by name, without the prefix."""


def keys_text() -> str:
    """Names all options, for an error about one that does not exist."""
    return f"Ditron's options are {', '.join(option.key for option in DECLARED)}"
