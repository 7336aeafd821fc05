"""`python -m benchmarks.report`: the pages that are generated from the results.

    benchmarks/results/gemm_collectives.md   every cell, with ratios and targets
    docs/when_it_pays.md                     the part between its two markers
    docs/models.md, docs/model_cells.md      likewise, from models.csv
    README.md                                likewise, from models.csv
    docs/index.md                            its number
    docs/deleted.md, docs/four_gpus.md       likewise, from all of them
    docs/taxes.md, docs/tuning.md            likewise, from models.csv
    docs/guide/serving.md                    likewise, from generation.csv
    docs/kernels/grouped_matmul_all_reduce.md  likewise, from moe.csv
    docs/kernels/grouped_projections.md        likewise
    benchmarks/results/models.html           all of models.csv and models_facts.csv

`--merge FILE...` first merges rows that were measured elsewhere into the results. `--check` writes nothing and fails
if a page differs from what it would write. The numbers in the prose of these pages are made from the results too
(`prose/`). Without `--check`, and with git, the fingerprints of the kernels at the
commits of new rows are added to `sources.csv` (`sources.py`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from benchmarks import (
    decode_floors,
    deleted,
    expert_floors,
    floors,
    gathered_floors,
    generate_table,
    prose,
    reduced_floors,
    sources,
    without_table,
)
from benchmarks.comparison import (
    COMMIT,
    MEASURED_OPS,
    NOISE,
    TITLES,
    Comparison,
    comparisons,
    geometric_mean,
    losses_table,
    means,
    mode,
    ratios_table,
    shown,
    shown_runs,
    times_table,
)
from benchmarks.figures import picture_path
from benchmarks.models import pages as model_pages
from benchmarks.models.facts import path_of, read_facts
from benchmarks.models.summary import means_table, phases_part, readme_part
from benchmarks.models.tables import docs_part as models_part
from benchmarks.models.tables import limits_part, newest_shown
from benchmarks.ops import targets
from benchmarks.prose.claims import with_claims
from benchmarks.prose.picked import read_results
from benchmarks.records import (
    ATTENTION,
    GEMM_COLLECTIVES,
    GENERATION,
    MODELS,
    MOE,
    NORM,
    Row,
    merge_csv,
    newest,
    read_csv,
)
from ditron_inductor.task.nodes import DELETED_KINDS, KINDS, NODES, STRATEGIES

COMMAND = "python -m benchmarks.report"
ROOT = Path(__file__).parents[1]
DOCS_PAGE = ROOT / "docs" / "when_it_pays.md"
MODELS_PAGE = ROOT / "docs" / "models.md"
CELLS_PAGE = ROOT / "docs" / "model_cells.md"
FOUR_PAGE = ROOT / "docs" / "four_gpus.md"
TAXES_PAGE = ROOT / "docs" / "taxes.md"
SERVING_PAGE = ROOT / "docs" / "guide" / "serving.md"
EXPERTS_PAGE = ROOT / "docs" / "guide" / "mixture_of_experts.md"
TUNING_PAGE = ROOT / "docs" / "tuning.md"
REDUCED_PAGE = ROOT / "docs" / "kernels" / "grouped_matmul_all_reduce.md"
GATHERED_PAGE = ROOT / "docs" / "kernels" / "grouped_projections.md"
DELETED_PAGE = ROOT / "docs" / "deleted.md"
README = ROOT / "README.md"
HOME = ROOT / "docs" / "index.md"
STACKS = ROOT / "docs" / "guide" / "other_stacks.md"
OTHERS = (ATTENTION, NORM, MODELS, MOE, GENERATION)
"""The results whose tables say how old a row is, besides those of matmuls."""
BEGIN = f"<!-- begin: {COMMAND} -->"
END = f"<!-- end: {COMMAND} -->"
BEST = "the best rival of each row"
MARKS = f"`{NOISE}`: the samples of both overlap, from the 20th to the 80th percentile."
OLD_ROWS = "`old` stands behind the commit of a row whose kernels have changed since."
FIRST_COLUMNS = (
    "gemm",
    *("nccl", "registered", "max_autotune", "async_tp", "symm_mem:two_shot"),
    *("ditron", "ditron:tile", "ditron:chunked"),
)
"""Of the table in the docs: what a reader compares."""


def conditions(rows: Sequence[Row]) -> str:
    """GPU, software, commits and dates of some rows, in one sentence."""

    def all_of(column: str) -> str:
        return ", ".join(sorted({str(getattr(row, column)) for row in rows}))

    return (
        f"{all_of('gpu')}, {all_of('dtype')}, torch {all_of('torch')}, Triton {all_of('triton')}, "
        f"commit {all_of('commit')}, {all_of('date')}"
    )


def results_page(rows: Sequence[Row], pictures: Sequence[Path] = ()) -> str:
    """Everything in the CSV as tables."""
    lines = [
        "# Matmuls with a collective: results",
        "",
        f"Generated from [`gemm_collectives.csv`](gemm_collectives.csv) by `{COMMAND}`.",
        "How it is measured, and what is not covered: [`../README.md`](../README.md).",
        f"Every cell shows its newest run. {OLD_ROWS}",
    ]
    cells = comparisons(rows)
    verdicts = targets.summary(cells)
    if verdicts:
        lines += ["", "## Targets", "", tabulate(verdicts, ["op", "row", "target", "verdict"], "github")]
    for gpu, world in dict.fromkeys((cell.gpu, cell.world) for cell in cells):
        here = [cell for cell in cells if (cell.gpu, cell.world) == (gpu, world)]
        lines += ["", f"## {world} ranks, {gpu}", "", f"{conditions(_rows(here))}.", "", _means(here)]
        for op in MEASURED_OPS:
            of_op = [cell for cell in here if cell.op == op]
            if of_op:
                lines += ["", f"### `{op}`", ""]
                lines += _of_deleted(of_op)
                lines += ["Microseconds per call:", "", times_table(of_op, "github")]
                lines += ["", "Ratios (above 1: `auto` is faster, or at the limit). " + MARKS, ""]
                lines += [ratios_table(of_op, targets.column(of_op), "github")]
    for picture in pictures:
        lines += ["", f"![{picture.stem}]({picture.name})"]
    return "\n".join(lines) + "\n"


def _of_deleted(cells: Sequence[Comparison]) -> list[str]:
    """What is said in front of the rows of a fusion that there is no more, or that has not all of their strategies."""
    op = cells[0].op
    if op in DELETED_KINDS:
        ((_, name, number, value), *_) = means(cells)
        against = f"{TITLES[name]} / auto was {value:.3f}, the geometric mean of these {number} rows"
        return [f"`{op}` was [deleted](../../docs/deleted.md): {against}.", ""]
    has = [f"ditron:{strategy}" for strategy in NODES[op].strategies]
    forced = [f"ditron:{strategy}" for strategy in STRATEGIES]
    lines = []
    for name in (one for one in shown(cells) if one in forced and one not in has):
        ratios = [ratio for ratio in (cell.ratio(tuple(has), name) for cell in cells) if ratio is not None]
        mean = f"{geometric_mean(ratios):.3f}, the geometric mean of these {len(ratios)} rows"
        deleted_since = f"`{TITLES[name]}` was [deleted](../../docs/deleted.md)"
        lines += [f"{deleted_since}: the fastest of the others / it was {mean}.", ""]
    return lines


def _rows(cells: Sequence[Comparison]) -> list[Row]:
    return [row for cell in cells for row in cell.rows.values()]


def _means(cells: Sequence[Comparison]) -> str:
    lines = [(op, TITLES[name], number, f"{value:.2f}") for op, name, number, value in means(cells)]
    headers = ["op", "rival", "rows", "rival / auto, geometric mean"]
    return tabulate(lines, headers, "github", disable_numparse=True) if lines else "No row has both `auto` and a rival."


def docs_part(rows: Sequence[Row]) -> str:
    """What stands between the markers: the anchor rows of the most ranks that were measured."""
    cells = [cell for cell in comparisons(row for row in rows if row.gpu != "cpu") if targets.is_anchor(cell)]
    if not cells:
        return "Nothing has been measured yet."
    world = max(cell.world for cell in cells)
    gpu = next(cell.gpu for cell in cells if cell.world == world)
    cells = [cell for cell in cells if cell.world == world and cell.gpu == gpu]
    names = [name for name in FIRST_COLUMNS if any(cell.us(name) for cell in cells)]
    lines = []
    for cell in cells:
        times = [_text(cell.us(name), 0 if (cell.us("gemm") or 0) >= 100 else 1) for name in names]
        ratios = [cell.ratio_text(cell.best_rival), cell.ratio_text("nccl"), _text(cell.ratio("limit", "ditron"), 2)]
        lines.append([f"`{cell.op}`", cell.shape, mode(cell), *ratios, *times, cell.measured])
    headers = ["op", "M x N x K", "mode", "best rival / auto", "NCCL + cuBLAS / auto", "limit / auto"]
    headers += [*(TITLES[name] for name in names), COMMIT]
    table = tabulate(lines, headers, "github", disable_numparse=True)
    return "\n".join(
        [
            f"{world}x {conditions(_rows(cells))}.",
            "Microseconds (p50, slowest rank), NVLink multicast off for everybody; `auto` is what the plan picks.",
            MARKS,
            f"{OLD_ROWS} All rows: [`gemm_collectives.md`](../benchmarks/results/gemm_collectives.md).",
            "",
            table,
            "",
            *_sentences(cells),
            "",
            *_losses(comparisons(row for row in rows if row.gpu != "cpu")),
        ]
    )


def _losses(cells: Sequence[Comparison]) -> list[str]:
    """Says in how many cells of all machines `auto` clearly loses, and shows these."""
    beside = [cell for cell in cells if cell.best_rival and cell.us("ditron")]
    lost = [cell for cell in beside if cell.is_lost]
    count = f"In {len(lost)} of {len(beside)} cells of all machines"
    slower = "`auto` is slower than the best rival by more than 2 % and outside of noise."
    return [f"{count} {slower}", *(["", losses_table(lost, "github")] if lost else [])]


def _sentences(cells: Sequence[Comparison]) -> list[str]:
    """Geometric means in words, losses included."""
    found = []
    for op in KINDS:
        for graph, where in ((0, "in eager mode"), (1, "inside CUDA graphs")):
            here = [cell for cell in cells if cell.op == op and cell.graph == graph]
            parts = []
            for name in ("best", "nccl", "async_tp", "symm_mem:two_shot"):
                over = [cell.ratio(cell.best_rival if name == "best" else name, "ditron") for cell in here]
                ratios = [ratio for ratio in over if ratio]
                if ratios:
                    number = f"{len(ratios)} row{'s' * (len(ratios) > 1)}"
                    rival = BEST if name == "best" else TITLES[name]
                    parts.append(f"{geometric_mean(ratios):.2f} over {rival} ({number})")
            if parts:
                found.append(f"* `{op}` {where}: {', '.join(parts)}.")
    return ["Geometric means of rival / `auto`; below 1 the rival is faster.", "", *found]


def _text(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def with_part(page: str, part: str) -> str:
    """The page with `part` between its markers. ValueError where they are missing."""
    if BEGIN not in page or END not in page:
        raise ValueError(f"no markers in the page: {BEGIN} ... {END}")
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{part}\n\n{END}{rest.partition(END)[2]}"


def generated(results: Path = GEMM_COLLECTIVES, docs_page: Path = DOCS_PAGE) -> dict[Path, str]:
    """Every generated page and its text."""
    rows = [row for run in shown_runs(read_csv(results)) for row in run]
    pictures = [path for path in (picture_path(results, op) for op in KINDS) if path.exists()]
    models, facts = newest_shown(read_csv(MODELS)), newest(read_facts(path_of(MODELS)))
    gpus = f"{conditions(models)}."
    summary = "\n\n".join([gpus, phases_part(models, facts), limits_part(read_csv(MODELS))])
    every_cell = "\n\n".join([gpus, means_table(models, by_model=True), models_part(models, facts)])
    texts = {
        results.with_suffix(".md"): results_page(rows, pictures),
        docs_page: with_part(docs_page.read_text(), docs_part(rows)),
        DELETED_PAGE: with_part(DELETED_PAGE.read_text(), deleted.part()),
        FOUR_PAGE: with_part(FOUR_PAGE.read_text(), floors.part()),
        TAXES_PAGE: with_part(TAXES_PAGE.read_text(), decode_floors.part()),
        EXPERTS_PAGE: with_part(EXPERTS_PAGE.read_text(), expert_floors.part()),
        TUNING_PAGE: with_part(TUNING_PAGE.read_text(), without_table.part()),
        REDUCED_PAGE: with_part(REDUCED_PAGE.read_text(), reduced_floors.part()),
        GATHERED_PAGE: with_part(GATHERED_PAGE.read_text(), gathered_floors.part()),
        SERVING_PAGE: with_part(SERVING_PAGE.read_text(), generate_table.part()),
        MODELS_PAGE: with_part(MODELS_PAGE.read_text(), summary),
        CELLS_PAGE: with_part(CELLS_PAGE.read_text(), every_cell),
        model_pages.page_path(MODELS): model_pages.page(models, facts),
        HOME: HOME.read_text(),
        STACKS: STACKS.read_text(),
        README: with_part(README.read_text(), readme_part(models, facts)),
    }
    claims = prose.pages(ROOT, read_results())
    return {path: with_claims(text, claims.get(path, ())) for path, text in texts.items()}


def stale(pages: dict[Path, str]) -> list[Path]:
    """The pages whose file differs."""
    return [path for path, text in pages.items() if not path.exists() or path.read_text() != text]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=GEMM_COLLECTIVES, help="the CSV")
    parser.add_argument("--docs", type=Path, default=DOCS_PAGE, help="the page with the markers")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], help="CSV files to merge into the results first")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a page is not up to date")
    options = parser.parse_args(arguments)
    for path in options.merge:
        merge_csv(options.results, read_csv(path))
    if not options.check:
        rows = [row for path in (options.results, *OTHERS) for row in read_csv(path)]
        sources.complete((row.commit for row in rows), options.results.with_name(sources.SOURCES.name))
    pages = generated(options.results, options.docs)
    outdated = stale(pages)
    for path in outdated:
        if options.check:
            print(f"{path} is not what the results say: run {COMMAND}", file=sys.stderr)
        else:
            path.write_text(pages[path])
            print(path)
    return int(options.check and bool(outdated))


if __name__ == "__main__":
    sys.exit(main())
