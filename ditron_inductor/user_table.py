"""A user's own table of measured choices: where its file is, and how the groups of this process get it.

`python -m ditron_inductor tune` writes one; the option `ditron.table` names it. A table acts at run time only: it is
not a part of a compiled graph, nor of the key under which the graph is cached.
"""

from __future__ import annotations

import io
import logging
from pathlib import Path

from ditron_inductor.errors import InvalidOptionValue, InvalidTable
from ditron_inductor.options import PREFIX, SHIPPED, cache_folder
from ditron_inductor.task.nodes import DELETED_KINDS
from ditron_inductor.task.table import Table

logger = logging.getLogger(__name__)


def default_path() -> Path:
    """Returns the path of the user's table if the option does not give one: in the user's folder for caches."""
    return cache_folder() / "table.csv"


def path_of(option: str | None) -> Path | None:
    """Returns the file for a value of `ditron.table`; None for `shipped`. Raises InvalidOptionValue for no path."""
    if option == SHIPPED:
        return None
    if option is None:
        return default_path()
    if "\0" in option:
        raise _unreadable(option, "it holds a null character")
    try:
        return Path(option).expanduser()
    except RuntimeError as error:  # no such user, or one without a home
        raise _unreadable(option, str(error)) from error


def read(option: str | None) -> str:
    """Returns the text of the user's table, empty if there is none. option: a path, `shipped` for the shipped tables
    alone, or None for the default path, which need not exist. Raises InvalidOptionValue for a path that cannot be read
    and InvalidTable for a file that is not a table.
    """
    path = path_of(option)
    if path is None:
        return ""
    # The user may not know of a file that no option names.
    default = f" (the default table: move it away, write it anew with 'tune', or set '{PREFIX}table' to '{SHIPPED}')"
    source = str(path) if option is not None else f"{path}{default}"
    try:
        text = text_of(path, source)
    except FileNotFoundError as error:
        if option is None:
            return ""
        raise _unreadable(option, error.strerror) from error
    except (OSError, UnicodeEncodeError) as error:  # the latter where a path has no bytes
        if option is None:
            logger.warning("the table of measured choices at %s cannot be read: %s", path, error)
            return ""
        raise _unreadable(option, str(error)) from error
    for what, lines in Table.parse(text, source).unused.items():
        why = f"it was {DELETED_KINDS[what]}" if what in DELETED_KINDS else "there is no such strategy"
        logger.warning("%s: times of %s on %d lines are not used: %s", source, what, lines, why)
    return text


def text_of(path: Path, source: str) -> str:
    """The text of a table's file, with plain line ends. Raises InvalidTable if it is not UTF-8, and OSError."""
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise InvalidTable(source=source, line=line, problem=f"it is not UTF-8: {error.reason}") from error
    return io.StringIO(text, newline=None).read()


def _unreadable(option: str, why: str | None) -> InvalidOptionValue:
    allowed = f"the path of a table ({why}), '{SHIPPED}', or None for {default_path()}"
    return InvalidOptionValue(key=f"{PREFIX}table", value=option, allowed=allowed)
