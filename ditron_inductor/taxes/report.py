"""The tax report: a table for people, and the same data as CSV for programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ditron_inductor.task.site_records import SiteRecord
from ditron_inductor.taxes.accounts import FUSED, INDUCTOR, UNFUSED, Account, SiteTaxes, StepTimes, explained
from ditron_inductor.taxes.captured_step import PARTS, CapturedStep, save_timeline

if TYPE_CHECKING:
    from ditron_inductor.taxes.step_trace import Trace

NONE = "-"
ON_CPU = (
    "On the CPU device, whose kernels run in Triton's interpreter: this shows that the report works. "
    "Its times say nothing about speed."
)
COLUMNS = (
    "row,form,direction,site,kind,pattern,strategy,calls,us,compute_us,bulk_synchronous_us,locality_us,other_us,"
    "launch_us,in_kernel_us,graph_us"
).split(",")
"""The columns of the CSV. `row` is `site`, `step`, `part` or `kernel`; `form` is one of `CONTESTANTS`. The us of a site
is that of a step in eager mode with the host ahead, and the us of a step is that of the step as it is. graph_us is that
of the step in a CUDA graph, or of a part of it or of one of its kernels, whose name is in `pattern`, by the profiler on
rank 0. A value that does not exist is empty.
"""
CONTESTANTS = (INDUCTOR, UNFUSED, FUSED)
TAXES = {
    "bulk synchronous": "bulk_synchronous_us",
    "locality": "locality_us",
    "other": "other_us",
    "compute": "compute_us",
}


@dataclass(frozen=True)
class TaxReport:
    """The costs of the taxes: `sites` that were fused, in graph order, and whole `steps` by contestant. left_alone:
    collectives that are the same in all contestants and are in no account. bytes_per_us: the speed of the copy by which
    the locality tax is priced. rounds: samples of each time. notes: what is missing and why. trace: the trace of one
    step, if it was asked for. captured: the kernels of the steps that are CUDA graphs, by contestant. parameter_bytes:
    the bytes of a rank's part of the module's parameters, 0 of a function. Equal on all ranks.
    """

    sites: tuple[SiteTaxes, ...]
    left_alone: tuple[SiteRecord, ...]
    steps: Mapping[str, StepTimes]
    device: str
    world_size: int
    bytes_per_us: float
    rounds: int
    notes: tuple[str, ...] = ()
    trace: Trace | None = None
    captured: Mapping[str, CapturedStep] = field(default_factory=dict)
    parameter_bytes: int = 0

    def __str__(self) -> str:
        return self.text()

    def total(self, form: str, field: str) -> float:
        """Returns the sum of a field over the accounts of the sites. form: `unfused` or `fused`."""
        accounts: list[Account | None] = [getattr(site, form) for site in self.sites]
        return float(sum(getattr(account, field) or 0.0 for account in accounts if account is not None))

    def text(self) -> str:
        """Returns the report as text: sites, steps, how much of the gain the accounts explain, and notes."""
        from tabulate import tabulate

        head = [ON_CPU] if self.device == "cpu" else []
        head.append(
            f"{self.world_size} ranks, {self.device}: microseconds, the largest of any rank, medians of {self.rounds} "
            f"rounds; a copy reads and writes {self.bytes_per_us / 1e3:.0f} GB/s"
        )
        if not self.sites:
            body = ["no collective was fused: there is nothing to compare at a site"]
        else:
            widths = [30 if column == "pattern" else None for column in self._site_rows()[0]]
            sites = tabulate(self._site_rows(), headers="keys", disable_numparse=True, maxcolwidths=widths)
            body = ["by site, unfused -> fused:", sites]

        def table(rows: list[dict[str, str]]) -> str:
            return tabulate(rows, headers="keys", disable_numparse=True, colalign=("left", *["right"] * 4))

        parts = self._part_rows()
        in_graph = ["", "in a CUDA graph, by its kernels on rank 0:", table(parts)] if parts else []
        ends = [*self._conclusions(), *self._conclusions_of_kernels(), *self.notes]
        return "\n".join([*head, "", *body, "", "by step:", table(self._step_rows()), *in_graph, "", *ends])

    def csv_text(self) -> str:
        """Returns the report as CSV in long form (see `COLUMNS`)."""
        out = io.StringIO()
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for site in self.sites:
            record = site.record
            for form in (UNFUSED, FUSED):
                account = getattr(site, form)
                if account is not None:
                    name = dict(direction=site.direction, site=record.site, kind=record.kind, pattern=record.pattern)
                    writer.writerow({"row": "site", "form": form, **name, **_cells(vars(account))})
        for form, step in self.steps.items():
            totals = {} if form == INDUCTOR else {name: self.total(form, name) for name in TAXES.values()}
            times = {"us": step.eager_us, "graph_us": step.graph_us, "launch_us": step.launch_us}
            writer.writerow({"row": "step", "form": form, **_cells({**totals, **times})})
        for form, captured in self.captured.items():
            for part, us in captured.parts().items():
                writer.writerow({"row": "part", "form": form, "kind": part, **_cells({"graph_us": us})})
            for kernel, (launches, us) in captured.by_name().items():
                what = {"kind": captured.part_of(kernel), "pattern": kernel}
                writer.writerow({"row": "kernel", "form": form, **what, **_cells({"calls": launches, "graph_us": us})})
        return out.getvalue()

    def save_csv(self, path: str | Path) -> None:
        """Writes `csv_text` to a file."""
        Path(path).write_text(self.csv_text())

    def save_png(self, path: str | Path) -> None:
        """Writes the picture, which has two stacked bars for every site and for the step. Raises MissingDependency."""
        from ditron_inductor.taxes.picture import save

        of_cpu = ", interpreted: no times to go by" if self.device == "cpu" else ""
        save(path, self.sites, self.steps, f"{self.world_size} ranks, {self.device}{of_cpu}")

    def save_trace(self, path: str | Path) -> None:
        """Writes the trace as JSON for Perfetto. Raises ValueError if no trace was taken."""
        if self.trace is None:
            raise ValueError("this report has no trace: ask for it with profile_taxes(.., trace=True)")
        self.trace.save(path)

    def save_timeline(self, path: str | Path) -> None:
        """Writes the kernels of the CUDA graphs as JSON for Perfetto. Raises ValueError if no step was captured."""
        if not self.captured:
            raise ValueError("this report has no CUDA graph: its notes say why")
        save_timeline(path, self.captured)

    def _site_rows(self) -> list[dict[str, str]]:
        rows = []
        for site in self.sites:
            both = site.unfused, site.fused
            row = {
                "graph": site.direction,
                "site": site.record.site,
                "pattern": site.record.pattern,
                "strategy": NONE if site.fused is None else site.fused.strategy,
                "calls": NONE if site.fused is None else str(site.fused.calls),
                "time": _pair(*both, "us"),
                "compute": _pair(*both, "compute_us"),
                "bulk synchronous": _pair(*both, "bulk_synchronous_us"),
                "locality": _pair(*both, "locality_us") if site.locality else NONE,
                "other": _pair(*both, "other_us"),
                "launch": _pair(*both, "launch_us"),
            }
            if any(row.fused is not None and row.fused.in_kernel_us is not None for row in self.sites):
                row["waits in kernel"] = _time(None if site.fused is None else site.fused.in_kernel_us)
            rows.append(row)
        return rows

    def _step_rows(self) -> list[dict[str, str]]:
        rows = []
        for title, column in TAXES.items():
            before, after = (self.total(form, column) for form in (UNFUSED, FUSED))
            rows.append(_row(f"{title}, all sites", None, before, after))
        launches = [self.steps[form].launch_us for form in CONTESTANTS]
        rows.append(_row("launch, whole step", *launches))
        rows.append(_row("step, CUDA graph", *(self.steps[form].graph_us for form in CONTESTANTS)))
        rows.append(_row("step, eager", *(self.steps[form].eager_us for form in CONTESTANTS)))
        return rows

    def _part_rows(self) -> list[dict[str, str]]:
        if not self.captured:
            return []
        parts = {form: step.parts() for form, step in self.captured.items()}
        rows = [_row(part, *(parts[form][part] if form in parts else None for form in CONTESTANTS)) for part in PARTS]
        rows.append(_row("replay", *(self._replay_us(form) for form in CONTESTANTS)))
        launches = [str(len(self.captured[form].kernels)) if form in self.captured else NONE for form in CONTESTANTS]
        rows.append({"": "kernels and copies", **dict(zip(CONTESTANTS, launches, strict=True)), "saved": NONE})
        return rows

    def _replay_us(self, form: str) -> float | None:
        return self.captured[form].us if form in self.captured else None

    def _conclusions_of_kernels(self) -> list[str]:
        lines = []
        steps = [self.steps[form].graph_us for form in (INDUCTOR, FUSED)]
        replays = [self._replay_us(form) for form in (INDUCTOR, FUSED)]
        if None not in (*steps, *replays):
            measured, seen = steps[0] - steps[1], replays[0] - replays[1]  # type: ignore[operator]
            part = f", {100 * seen / measured:.0f} % of it" if measured > 0 else ""
            lines.append(
                f"in a CUDA graph: the fused step is {abs(measured):.0f} us {_change(measured)} than Inductor's; "
                f"by its kernels and what is between them, {abs(seen):.0f} us {_change(seen)}{part}"
            )
        fused = self._replay_us(FUSED)
        if self.parameter_bytes and fused is not None:
            # A copy reads and writes; the speed counts both.
            reading = self.parameter_bytes / self.bytes_per_us
            lines.append(
                f"a rank's parameters are {self.parameter_bytes / 2**20:.0f} MiB, and reading them at the speed of the "
                f"copy takes {reading:.0f} us: the fused step takes {fused / reading:.2f} times as long"
            )
        return lines

    def _conclusions(self) -> list[str]:
        lines = []
        for graph in (False, True):
            found = explained(self.sites, self.steps, graph)
            if found is None:
                continue
            mode, change = "in a CUDA graph" if graph else "eager", _change(found.measured_us)
            part = "" if found.part is None else f", {100 * found.part:.0f} % of it"
            lines.append(
                f"{mode}: the fused step is {abs(found.measured_us):.0f} us {change} than the unfused one; "
                f"by the accounts, {found.taxes_us:.0f} us of taxes are saved{part}, "
                f"and {found.other_us:.0f} us of other times"
            )
        # The passes moved or merged collectives, and removed others. This is not a tax of any site.
        gain = self.steps[INDUCTOR].eager_us - self.steps[UNFUSED].eager_us
        graphs = [self.steps[form].graph_us for form in (INDUCTOR, UNFUSED)]
        if graphs[0] is not None and graphs[1] is not None:
            gain = graphs[0] - graphs[1]
        lines.append(f"the graph's rewrites alone (inductor - unfused): {gain:.0f} us")
        if self.left_alone:
            lines.append(
                f"{len(self.left_alone)} collectives were left alone and are in no account; `explain` says why"
            )
        return lines


def _change(saved_us: float) -> str:
    return "shorter" if saved_us > 0 else "longer"


def _cells(values: Mapping[str, Any]) -> dict[str, str]:
    """Returns the values that have a column, with numbers as text."""
    texts = {name: f"{value:.3f}" if isinstance(value, float) else str(value) for name, value in values.items()}
    return {name: text for name, text in texts.items() if name in COLUMNS and values[name] is not None}


def _row(title: str, inductor: float | None, before: float | None, after: float | None) -> dict[str, str]:
    saved = None if before is None or after is None else before - after
    return {"": title, INDUCTOR: _time(inductor), UNFUSED: _time(before), FUSED: _time(after), "saved": _time(saved)}


def _pair(before: Account | None, after: Account | None, field: str) -> str:
    times = [None if account is None else getattr(account, field) for account in (before, after)]
    return NONE if times == [None, None] else f"{_time(times[0])} -> {_time(times[1])}"


def _time(us: float | None) -> str:
    if us is None:
        return NONE
    return f"{us:.1f}" if abs(us) < 99.95 else f"{us:.0f}"
