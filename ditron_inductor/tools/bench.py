"""``ditron bench ops | models | host | generation ...``: the benchmarks, from a checkout or from an installed wheel.

The benchmarks are a package of their own, `benchmarks`, which ships in a folder of this one and is put on the path of
this process and of the ranks that it starts.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "bench"
PROGRAMS = {
    "ops": "benchmarks.ops",
    "models": "benchmarks.models",
    "host": "benchmarks.host",
    "generation": "benchmarks.generation",
}
WRITE = ("ops", "models")
"""The programs that write rows: into the current folder, unless `--out` says otherwise."""


def main(argv: Sequence[str]) -> int:
    """Runs a program and returns its exit code. argv: the program's name, then its arguments."""
    if not argv or argv[0] not in PROGRAMS:
        names, asked = ",".join(PROGRAMS), bool(argv) and argv[0] in ("-h", "--help")
        usage = f"usage: ditron bench {{{names}}} ...; --help behind a name lists its options"
        print(usage, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    program, *arguments = argv
    given = any(argument == "--out" or argument.startswith("--out=") for argument in arguments)
    if program in WRITE and not given:
        arguments += ["--out", f"ditron_{program}.csv"]
    sys.path.append(str(FOLDER))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(FOLDER))))
    sys.argv = [f"ditron bench {program}", *arguments]
    try:
        runpy.run_module(PROGRAMS[program], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
