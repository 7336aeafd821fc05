"""A user's own table of measured choices: where it lies, and how it comes to the groups of this process.

`python -m ditron_inductor tune` writes one; the option `ditron.table` names it. A table acts at run time only: it is no
part of a compiled graph, nor of the key that the graph is cached under.
"""

from __future__ import annotations

import logging
from pathlib import Path

from ditron_inductor.errors import InvalidOptionValue
from ditron_inductor.options import PREFIX, SHIPPED, cache_folder
from ditron_inductor.task.table import Table

logger = logging.getLogger(__name__)


def default_path() -> Path:
    """Where a table lies unless the option says otherwise: in the user's folder for caches."""
    return cache_folder() / "table.csv"


def path_of(option: str | None) -> Path | None:
    """The file that a value of the option `ditron.table` stands for; None for `shipped`, which is no file."""
    if option == SHIPPED:
        return None
    return default_path() if option is None else Path(option).expanduser()


def read(option: str | None) -> str:
    """The text of the user's table, empty where there is none.

    option: a path, `shipped` for the shipped tables alone, or None for the default path, which need not exist.
    Raises InvalidOptionValue for a path that cannot be read and InvalidTable for a file that is not a table.
    """
    path = path_of(option)
    if path is None:
        return ""
    try:
        text = path.read_text()
    except FileNotFoundError as error:
        if option is None:
            return ""
        raise _unreadable(path, error) from error
    except OSError as error:
        if option is None:
            logger.warning("the table of measured choices at %s cannot be read: %s", path, error)
            return ""
        raise _unreadable(path, error) from error
    Table.parse(text, str(path))
    return text


def _unreadable(path: Path, error: OSError) -> InvalidOptionValue:
    allowed = f"the path of a table ({error.strerror}), '{SHIPPED}', or None for {default_path()}"
    return InvalidOptionValue(key=f"{PREFIX}table", value=str(path), allowed=allowed)
