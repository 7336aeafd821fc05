"""Put each mutation into a copy of the sources and see whether its test fails: `python -m tests.mutations`.

The default suite says whether the code is right; this says whether the suite would notice if it were not. The copy is a
temporary folder with all files that git tracks or would track, so the checkout is never touched. First the named tests
have to pass there without any mutation. Then, one mutation at a time, its test runs with a time limit: a failure or an
expired limit has *killed* the mutation, a pass means that it *survived*.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from tests.mutations.catalogue import MUTATIONS
from tests.mutations.mutation import KILLED, PAGE, ROOT, SURVIVED, Mutation, with_table

PASSED, FAILED = 0, 1
"""Exit codes of pytest; all others mean that no test ran."""


class BrokenMutation(Exception):
    """A mutation that says nothing about its test."""


def copy_tree(target: Path) -> None:
    """All files that git tracks or would track, with links as links."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines():
        path, copy = ROOT / name, target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            copy.symlink_to(path.readlink())
        elif path.is_file():
            copy.write_bytes(path.read_bytes())


def pytest(tree: Path, arguments: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Exit code (None: the limit expired) and output of pytest in `tree`."""
    # Without compiled files: two versions of one file may have one size and one second.
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not gpu", "-p", "no:cacheprovider", *arguments]
    # A session of its own: ranks that hang end with their test.
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            code = None
        output.seek(0)
        return code, output.read()


def check_tests(tree: Path, mutations: Sequence[Mutation], limit_s: float) -> None:
    """Raises BrokenMutation unless all named tests belong to the default suite, and pass without a mutation."""
    tests = sorted({one.test for one in mutations})
    files = sorted({test.partition("::")[0] for test in tests})
    _, listed = pytest(tree, ["--collect-only", *files], limit_s)
    collected = set(listed.splitlines())
    names = collected | {line.partition("[")[0] for line in collected}
    missing = [test for test in tests if test not in names]
    if missing:
        raise BrokenMutation("no test of the default suite: " + ", ".join(missing))
    code, output = pytest(tree, tests, limit_s * len(tests))
    if code != PASSED:
        raise BrokenMutation(f"without a mutation the tests do not pass:\n{output}")


def run(tree: Path, mutation: Mutation, limit_s: float) -> str:
    """KILLED or SURVIVED."""
    path = tree / mutation.file
    source = path.read_text()
    path.write_text(mutation.applied(source))
    try:
        code, output = pytest(tree, [mutation.test], limit_s)
    finally:
        path.write_text(source)
    if code not in (PASSED, FAILED, None):
        raise BrokenMutation(f"'{mutation.name}': pytest ended with {code}:\n{output}")
    return SURVIVED if code == PASSED else KILLED


def main() -> int:
    """Runs the command; 1 if a mutation survived."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="mutations with NAME in their name or file")
    parser.add_argument("--list", action="store_true", help="print the mutations and run nothing")
    parser.add_argument("--write", action="store_true", help="put the results into the table of docs/mutations.md")
    parser.add_argument("--limit-s", type=float, default=240.0, help="seconds that one test may take (%(default)s)")
    options = parser.parse_args()
    wanted = options.only or [""]
    mutations = [one for one in MUTATIONS if any(text in one.name or text in one.file for text in wanted)]
    if options.list:
        print(tabulate([(one.name, one.file, one.test) for one in mutations], ["mutation", "file", "test"]))
        return 0
    rows, results = [], {}
    with tempfile.TemporaryDirectory(prefix="ditron-mutations-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        check_tests(tree, mutations, options.limit_s)
        for mutation in mutations:
            began = time.monotonic()
            results[mutation.name] = result = run(tree, mutation, options.limit_s)
            rows.append((mutation.name, mutation.file, result, f"{time.monotonic() - began:.0f}"))
            print(f"{result}: {mutation.name}", file=sys.stderr, flush=True)
    killed = sum(result == KILLED for result in results.values())
    print(tabulate(rows, ["mutation", "file", "result", "s"]))
    print(f"{killed} of {len(mutations)} killed")
    if options.write:
        PAGE.write_text(with_table(PAGE.read_text(), MUTATIONS, results))
    return int(killed < len(mutations))


if __name__ == "__main__":
    sys.exit(main())
