"""Lint what ruff and mypy do not see: the length of every file, and the links that put folders into the package.

Prints one line per finding and exits with 1 if there are any.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
LINKS = {"passes": "../passes", "lowering": "../lowering", "bench/benchmarks": "../../benchmarks"}
"""The links in the package to folders beside it, which ship inside it."""
MAX_LINES = 600
MAX_README_LINES = 200
SUFFIXES = (".py", ".md", ".toml")


def tracked_files() -> list[Path]:
    """Every text file that git tracks or would track, without links and what the benchmarks generate."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    paths = (ROOT / name for name in names)
    paths = (path for path in paths if path.parent != RESULTS)
    return [path for path in paths if path.suffix in SUFFIXES and path.is_file() and not path.is_symlink()]


def findings() -> list[str]:
    found = []
    for path in tracked_files():
        limit = MAX_README_LINES if path.name == "README.md" else MAX_LINES
        lines = len(path.read_text().splitlines())
        if lines > limit:
            found.append(f"{path.relative_to(ROOT)}: {lines} lines, at most {limit}")
    for place, target in LINKS.items():
        link = ROOT / "ditron_inductor" / place
        if not link.is_symlink() or str(link.readlink()) != target:
            found.append(f"ditron_inductor/{place} is not the relative link {target}")
    return found


if __name__ == "__main__":
    found = findings()
    print("\n".join(found) or "layout: fine")
    sys.exit(bool(found))
