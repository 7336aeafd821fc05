"""The options of this process, as attributes: `ditron_inductor.config.strategy = "tile"`.

    config.strategy = "tile"                    # from now on
    with config.patch(strategy="tile"): ...     # inside the block; also a decorator, as `torch._inductor.config.patch`
    del config.strategy                         # the environment or the default decides again

A model takes the values when it is compiled. An option in the `options` of `torch.compile` wins over its value here,
which wins over its environment variable, which wins over the default. A value is checked when it is set: a wrong one
raises InvalidOptionValue, and an unknown name raises UnknownOption. Values hold for all threads of the process.

This is not one of torch's config modules, because these cannot carry the options: they take from the environment only
switches and texts, and read them once, when they are imported; they check no value; importing them imports torch; and
in torch 2.13 what one thread sets is not seen by the others, unlike in torch 2.11.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from ditron_inductor.declared_options import OPTIONS, PREFIX, keys_text
from ditron_inductor.errors import UnknownOption

# For readers and type checkers; a name has a value in this module's dict only while it is set.
strategy: str
workspace_limit: int
timeout_s: float | None
meeting_s: float
fusions: tuple[str, ...]
table: str | None
strict: bool | str
sequence_parallel: str
trials: bool
summary: bool


class _Settings(ModuleType):
    """This module's class. Its dict has the options that are set, as they were checked."""

    def __getattr__(self, name: str) -> Any:
        if name not in OPTIONS:
            raise AttributeError(f"{self.__name__} has no option '{name}'. {keys_text()}")
        return OPTIONS[name].of_environment(os.environ)

    def __setattr__(self, name: str, value: Any) -> None:
        # Names such as __spec__ are set by the machinery of imports.
        if not name.startswith("__"):
            value = _checked(name, value)
        super().__setattr__(name, value)

    def __dir__(self) -> Iterable[str]:
        return {*super().__dir__(), *OPTIONS}


@contextlib.contextmanager
def patch(changes: Mapping[str, Any] | str | None = None, value: Any = None, /, **named: Any) -> Iterator[None]:
    """Sets options inside a `with` block, or while the decorated function runs. They may be given by name
    (`patch(strategy="tile")`), as a mapping, or as one name and its value (`patch("strategy", "tile")`). Raises
    UnknownOption and InvalidOptionValue, and then sets none.
    """
    given = {changes: value} if isinstance(changes, str) else dict(changes or {})
    checked = {}
    for key, wanted in (given | named).items():
        name = str(key).removeprefix(PREFIX)
        checked[name] = _checked(name, wanted)
    values = vars(sys.modules[__name__])
    before = {name: values[name] for name in checked if name in values}
    values.update(checked)
    try:
        yield
    finally:
        for name in checked:
            values.pop(name, None)
        values.update(before)


def configured() -> dict[str, Any]:
    """Returns the options that are set here, by name."""
    values = vars(sys.modules[__name__])
    return {name: values[name] for name in OPTIONS if name in values}


def _checked(name: str, value: Any) -> Any:
    if name not in OPTIONS:
        raise UnknownOption(key=f"{__name__}.{name}", valid=keys_text())
    return OPTIONS[name].check(f"{__name__}.{name}", value)


sys.modules[__name__].__class__ = _Settings
