"""What the files `results/taxes_*.csv` have, each from one run of `profile_taxes`."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.records import RESULTS

INDUCTOR, UNFUSED, FUSED = "inductor", "unfused", "fused"
TAXES = ("compute_us", "bulk_synchronous_us", "locality_us", "other_us")
LAUNCH = "launch_us"
PREFIX = "taxes_"


@dataclass(frozen=True)
class Account:
    """The lines of a file, by column."""

    lines: tuple[Mapping[str, str], ...]

    def step(self, form: str, column: str = "graph_us") -> float:
        """Returns a time of the step, by default that in a CUDA graph."""
        (line,) = (line for line in self.lines if (line["row"], line["form"]) == ("step", form))
        return float(line[column] or 0.0)

    def part(self, form: str, kind: str) -> float:
        """Returns a part of a replay."""
        (line,) = (line for line in self.lines if (line["row"], line["form"], line["kind"]) == ("part", form, kind))
        return float(line["graph_us"])

    def replay(self, form: str) -> float:
        """Returns the time of a replay beside the profiler, which is the sum of its parts."""
        return sum(float(line["graph_us"]) for line in self.lines if (line["row"], line["form"]) == ("part", form))

    def kernels(self, form: str = FUSED, *begins: str) -> float:
        """Returns the time of the kernels whose names begin so. ValueError if there are none."""
        found = [float(line["graph_us"]) for line in self._kernels(form) if line["pattern"].startswith(begins)]
        if not found:
            raise ValueError(f"no kernel begins with {begins}")
        return sum(found)

    def launches(self, form: str) -> int:
        """Returns how many kernels the step has."""
        return sum(int(line["calls"]) for line in self._kernels(form))

    def saved(self, *, launches: bool) -> float:
        """Returns what the sites save by their accounts. launches: whether with the launch tax, as in eager steps."""
        columns = (*TAXES, LAUNCH) if launches else TAXES
        return sum(self.step(UNFUSED, column) - self.step(FUSED, column) for column in columns)

    def _kernels(self, form: str) -> list[Mapping[str, str]]:
        return [line for line in self.lines if (line["row"], line["form"]) == ("kernel", form)]


def read_account(path: Path) -> Account:
    """Returns the lines of a file."""
    with path.open(newline="") as file:
        return Account(tuple(csv.DictReader(file)))


def read_accounts() -> dict[str, Account]:
    """Returns every account, by the name of its file without what all names have in common."""
    return {path.stem.removeprefix(PREFIX): read_account(path) for path in sorted(RESULTS.glob(f"{PREFIX}*.csv"))}
