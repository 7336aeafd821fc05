"""One page that a person opens: `models.html`, which needs nothing else, with tables that sort, and bars."""

from __future__ import annotations

import html
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.comparison import NOISE, overlap
from benchmarks.models.charts import charts, png, png_path, svg
from benchmarks.models.facts import Fact, merge_facts, path_of, read_facts, reasons
from benchmarks.models.request import LIMIT, TITLES, Request
from benchmarks.models.tables import (
    FACT_HEADERS,
    Contest,
    contestants_of,
    contests,
    fact_lines,
    mean_lines,
    newest_shown,
    number,
    reason_lines,
    report,
)
from benchmarks.models.zoo import MODELS
from benchmarks.records import Row, merge_csv, newest, read_csv

STYLE = """
body{font:15px/1.45 system-ui,sans-serif;color:#1c1c1c;max-width:1370px;margin:2em auto;padding:0 1em}
table{border-collapse:collapse;margin:.6em 0 1.6em;font-size:12px;width:100%}
th,td{padding:.25em .4em;border-bottom:1px solid #ddd;text-align:left;white-space:nowrap}
th{white-space:normal}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}td:last-child{white-space:normal}
th{background:#f2f4f5;position:sticky;top:0}
table.sorts th{cursor:pointer}table.sorts th:after{content:" \\2195";color:#999}
div.wide{overflow-x:auto}td.won{background:#e1f2e5}td.lost{background:#fbe3e0}small,.muted{color:#666}svg{width:100%;max-width:1100px;height:auto}
svg text{font:11px system-ui,sans-serif;fill:#222}svg text.value{font-size:10px;fill:#555}
.warn{background:#fff3cd;padding:.6em}
"""
SCRIPT = """
document.querySelectorAll('table.sorts').forEach(t=>t.querySelectorAll('th').forEach((h,i)=>h.addEventListener('click',()=>{
const b=t.tBodies[0],d=h.dataset.up=h.dataset.up==='1'?'0':'1',k=r=>{const c=r.cells[i],v=c.dataset.v??c.textContent;
return v===''||isNaN(v)?v:+v},s=d==='1'?1:-1;
[...b.rows].sort((x,y)=>{const p=k(x),q=k(y);return typeof p===typeof q?(p<q?-s:p>q?s:0):typeof p==='number'?-1:1})
.forEach(r=>b.append(r))})));
"""
HEADERS = ("phase", "model", "layers", "form", "tokens", "ranks")
RATIOS = ("best other / Ditron", "Inductor / Ditron")
SPREAD = "spread %"
LOSS, GAIN = 0.98, 1.02
ABOUT = """Layers of real shapes with random weights, hidden states in and out. Milliseconds of one step: of each rank
the median of its samples, of the ranks the slowest. All contestants of a row come from one run, in turns in a new order
each round, and the results of each were checked before it was timed. <code>decode</code> runs inside CUDA graphs, eager
and Inductor too. NVLink multicast is off for everybody (<code>NCCL_NVLS_ENABLE=0</code>)."""
FORMS = """<code>ar</code>: tensor parallelism with all-reduces; <code>sp</code>: the same with sequence parallelism;
<code>cp</code>: the sequence is divided over the ranks, and so is <code>kv</code>'s cache. In <code>decode</code> only
<code>kv</code> has a cache. <code>limit</code>: one rank's share through Inductor alone, with nothing to wait for: what
is left of a step if communication costs nothing. Better kernels than Inductor's can be faster."""


def page(rows: Sequence[Row], facts: Sequence[Fact]) -> str:
    """The whole page, of the run of every cell that `shown` picks."""
    rows, facts = newest_shown(rows), newest(facts)
    title = "Whole models through Ditron"
    on_cpu = bool(rows) and all(row.gpu == "cpu" for row in rows)
    warning = (
        '<p class="warn">Measured on a CPU device with an interpreter of kernels: this shows that the program works, '
        "and nothing about speed.</p>"
        if on_cpu
        else ""
    )
    body = [f"<h1>{title}</h1>", warning, f"<p>{ABOUT}</p>", f"<p>{FORMS}</p>"]
    for gpu, world in dict.fromkeys(one.where for one in contests(rows)):
        here = [row for row in rows if (row.gpu, row.world) == (gpu, world)]
        known = [fact for fact in facts if (fact.gpu, fact.world) == (gpu, world)]
        body += [f"<h2>{world} x {html.escape(gpu)}</h2>", f"<p class=muted>{html.escape(_conditions(here))}</p>"]
        body += ["<h3>Means</h3>", _means(here)]
        for chart in charts(here):
            body += [f"<h3>{html.escape(chart.title)}</h3>", svg(chart)]
        body += ["<h3>Times, ms</h3>", _times(here, known)]
        if any(fact.compile_s is not None for fact in known):
            body += ["<h3>First call, memory, fused sites</h3>", f"<p class=muted>{COMPILED}</p>", _compiled(known)]
    missing = reason_lines(facts, rows)
    if missing:
        body += ["<h2>No number</h2>", "<ul>", *(f"<li>{html.escape(line)}</li>" for line in missing), "</ul>"]
    notes = [f"<li>{name}: {html.escape(one.note)}</li>" for name, one in MODELS.items() if one.note]
    body += ["<h2>How the models differ from their namesakes</h2>", "<ul>", *notes, "</ul>"]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title>\n<style>{STYLE}</style></head>\n'
        + "<body>\n"
        + "\n".join(part for part in body if part)
        + f"\n<script>{SCRIPT}</script>\n</body></html>\n"
    )


COMPILED = """First call: tracing, Inductor, and kernels that Triton's cache on disk has not; contestants take turns in
going first. Peak: of torch's allocator in one step, with weights and inputs, and in older rows with what results were
compared with; of `ditron` on H100s, in rows with the commits 6693ac3, 8c12529, 72827bf, f603ca2 and 92af0ec, also with
the results of the 16 steps of its trials, which the program held.
Workspace: Ditron's memory that peers write into, not in the peak."""


def _conditions(rows: Iterable[Row]) -> str:
    taken = list(rows)

    def all_of(column: str) -> str:
        return ", ".join(sorted({str(getattr(row, column)) for row in taken}))

    software = f"torch {all_of('torch')}, Triton {all_of('triton')}"
    return f"{all_of('dtype')}, {software}, {all_of('date')}"


def _means(rows: Sequence[Row]) -> str:
    lines = sorted(
        (phase, model, number(inductor, 2), number(async_tp, 2), str(cells))
        for phase, model, _, cells, inductor, async_tp in mean_lines(rows)
    )
    return _table(("phase", "model", "Inductor / Ditron", "async TP / Ditron", "cells"), lines)


def _table(headers: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(one)}</th>" for one in headers)
    rows = "".join(f"<tr>{''.join(f'<td>{html.escape(one)}</td>' for one in line)}</tr>" for line in lines)
    return f'<div class=wide><table class="sorts"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _times(rows: Sequence[Row], facts: Sequence[Fact]) -> str:
    why = {(fact.cell, fact.contestant): fact.why for fact in reasons(facts, rows)}
    head = "".join(f"<th>{name}</th>" for name in HEADERS)
    names = contestants_of(contests(rows))
    titles = [TITLES[name] for name in (*names, LIMIT)]
    head += "".join(f'<th class="n">{title}</th>' for title in (*RATIOS, *titles, SPREAD))
    lines = []
    for one in contests(rows):
        sizes = one.sizes
        line = [one.phase, one.model, sizes["layers"], sizes["form"], one.tokens, str(one.where[1])]
        cells = [f"<td>{html.escape(text)}</td>" for text in line]
        ours, theirs = one.row("ditron"), one.row("inductor")
        unclear = ours is not None and theirs is not None and overlap(ours, theirs)
        cells += [_gain(one.best_gain, one.unclear), _gain(one.gain("inductor"), unclear)]
        cells += [_time(one, name, why.get((one.rows[0].cell, name), "")) for name in names]
        limit = one.limit_us and one.limit_us / 1e3
        cells.append(f'<td class="n" data-v="{number(limit, 5, "")}">{number(limit, 3)}</td>')
        cells.append(f'<td class="n">{number(one.spread_pct, 1)}</td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    body = f'<thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody>'
    return f'<div class=wide><table class="sorts">{body}</table></div>'


def _time(one: Contest, name: str, why: str) -> str:
    row = one.row(name)
    if row is None or row.p50_us is None:
        return f'<td class="n" data-v="" title="{html.escape(why)}">{"failed" if row else "-"}</td>'
    spread = f"{(row.p20_us or 0) / 1e3:.3f} to {(row.p80_us or 0) / 1e3:.3f}, ranks {number(row.skew_pct, 1)} % apart"
    return f'<td class="n" data-v="{row.p50_us:.2f}" title="{spread}">{row.p50_us / 1e3:.3f}</td>'


def _gain(value: float | None, unclear: bool) -> str:
    """unclear: whether the samples of both overlap, which a mark shows."""
    mark = "" if value is None else " won" if value > GAIN else " lost" if value < LOSS else ""
    text = number(value, 2) + f" {NOISE}" * unclear
    return f'<td class="n{mark}" data-v="{number(value, 4, "")}">{text}</td>'


def _compiled(facts: Sequence[Fact]) -> str:
    named = [replace(fact, contestant=TITLES.get(fact.contestant, fact.contestant)) for fact in facts]
    return _table(FACT_HEADERS, fact_lines(named, missing=""))


def page_path(results: Path) -> Path:
    """Beside the CSV."""
    return results.with_suffix(".html")


def write(results: Path) -> list[Path]:
    """The page and the pictures of a file of rows; their paths."""
    rows, facts = read_csv(results), read_facts(path_of(results))
    paths = [page_path(results)]
    paths[0].write_text(page(rows, facts))
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("no PNG charts: matplotlib is not installed (pip install -e '.[bench]')", file=sys.stderr)
        return paths
    for chart in charts(rows):
        paths.append(png_path(results, chart))
        png(chart, paths[-1])
    return paths


def merge(results: Path, others: Iterable[Path]) -> None:
    """Rows and facts that were measured elsewhere. ValueError where there are none in a file."""
    for other in others:
        rows = read_csv(other)
        if not rows:
            raise ValueError(f"{other} has no rows")
        merge_csv(results, rows)
        merge_facts(path_of(results), read_facts(path_of(other)))


def finish(request: Request, world_size: int, with_page: bool = True) -> None:
    """Print what a run found, and write the page of all results."""
    results = Path(request.out)
    wanted = {(cell.phase, cell.shape) for cell in request.cells}
    rows = [
        row
        for row in read_csv(results)
        if (row.op, row.shape) in wanted and row.world == world_size and row.commit == request.commit
    ]
    facts = [
        fact
        for fact in read_facts(path_of(results))
        if (fact.op, fact.shape) in wanted and fact.world == world_size and fact.commit == request.commit
    ]
    print(report(rows, facts), flush=True)
    if with_page and read_csv(results):
        print("\n".join(str(path) for path in write(results)), flush=True)
