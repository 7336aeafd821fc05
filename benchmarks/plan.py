"""`python -m benchmarks.plan`: what the plan ships, made from the results of `python -m benchmarks.ops`.

    ditron_inductor/task/tables/<gpu>.csv    the measured table of each GPU
    ditron_inductor/task/cost.py             the cost model's numbers, fitted to the same times
    docs/tuning.md                           how far the model is off, the part between its two markers

Prints the model's error before and after. `--keep-model` leaves the cost model as it is.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.fit_cost_model import SOURCE, error_text, fit, write
from benchmarks.records import ATTENTION, GEMM_COLLECTIVES
from ditron_inductor.task import cost
from ditron_inductor.task.results import read_results
from ditron_inductor.task.table import FOLDER, Entry, Table

ROOT = Path(__file__).parents[1]
DOCS_PAGE = ROOT / "docs" / "tuning.md"
COMMAND = "python -m benchmarks.plan"
BEGIN = f"<!-- begin: {COMMAND} -->"
END = f"<!-- end: {COMMAND} -->"


def table_path(gpu: str) -> Path:
    """`NVIDIA H200` -> .../tables/nvidia_h200.csv."""
    return FOLDER / (re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_") + ".csv")


def tables(entries: Sequence[Entry]) -> dict[Path, str]:
    """The text of every shipped table, by path."""
    gpus = dict.fromkeys(entry.gpu for entry in entries)
    return {table_path(gpu): Table(entry for entry in entries if entry.gpu == gpu).text() for gpu in gpus}


def measured_entries(results: Sequence[str]) -> list[Entry]:
    """Returns the entries of the files that are about GPUs."""
    return [one for source in results for one in read_results(Path(source).read_text(), source) if one.gpu != "cpu"]


def with_report(page: str, report: str) -> str:
    """The page with `report` between its markers. ValueError where they are missing."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"{DOCS_PAGE.name} has no part between {BEGIN} and {END}")
    return f"{page.partition(BEGIN)[0]}{BEGIN}\n\n{report}\n\n{END}{page.partition(END)[2]}"


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.partition("\n")[0])
    results = [str(GEMM_COLLECTIVES), str(ATTENTION)]
    parser.add_argument("--results", nargs="+", default=results, help="CSVs of the benchmark")
    parser.add_argument("--keep-model", action="store_true", help="do not fit the cost model")
    arguments = parser.parse_args(argv)
    entries = measured_entries(arguments.results)
    for path, text in tables(entries).items():
        path.write_text(text)
        print(f"{path.relative_to(ROOT)}: {len(text.splitlines()) - 1} lines")
    for start in cost.KNOWN:
        measured = [entry for entry in entries if start.name in entry.gpu]
        if measured and not arguments.keep_model:
            found = fit(measured, start)
            print(f"{start.name} before: {error_text(measured, start)}")
            print(f"{start.name} after:  {error_text(measured, found)}")
            SOURCE.write_text(write(found, SOURCE.read_text()))
    # Another process: this one has the numbers of before.
    command = [sys.executable, "-m", "ditron_inductor", "tune", "--model-error", "--markdown"]
    report = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    DOCS_PAGE.write_text(with_report(DOCS_PAGE.read_text(), report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
