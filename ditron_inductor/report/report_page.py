"""A report of `explain` as one page of HTML, without scripts and without other files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ditron_inductor.report.explained import ExplainedSite, equal_sites
from ditron_inductor.report.graph_picture import BOX_HEIGHT, BOX_WIDTH, layout
from ditron_inductor.report.report_text import numbered_reasons

TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Ditron: explain</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2328; background: #fff; margin: 2rem auto; max-width: 1200px;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; } h3 { font-size: 1rem; margin: 2rem 0 .3rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; }
th, td { border-bottom: 1px solid #d0d7de; padding: .35rem .6rem; text-align: left; vertical-align: top; }
th { background: #f6f8fa; white-space: nowrap; }
td.number { text-align: right; } td.short { white-space: nowrap; }
code, svg text { font-family: ui-monospace, monospace; }
code { font-size: 13px; overflow-wrap: anywhere; }
figure { margin: .8rem 0 0; } svg { display: block; }
rect { fill: #fff; stroke: #8c959f; } rect.matched { fill: #ddf4ff; stroke: #0969da; stroke-width: 2; }
rect.alone { fill: #fff1e5; stroke: #bc4c00; stroke-width: 2; }
rect.cause { fill: #fff8c5; stroke: #9a6700; stroke-dasharray: 5 3; stroke-width: 1.5; }
svg text { font-size: 11px; fill: #1f2328; } svg text tspan.name { font-weight: 600; }
path.edge { fill: none; stroke: #57606a; } path.head { fill: #57606a; }
.fused { color: #1a7f37; font-weight: 600; } .unfused { color: #9a6700; } .note { color: #57606a; }
</style>
</head>
<body>
<h1>Ditron: explain</h1>
<p>{{ conclusion }}</p>
{%- if rows %}
<p class="note">A collective is <em>matched</em> if it became a node together with the matmuls, norms or attention
beside it. It runs <em>fused</em> if this node runs by <code>tile</code> or <code>chunked</code>, and not by the
library. Equal collectives have one row.</p>
<div class="wide"><table>
<tr><th>sites</th>{% for column in columns %}<th>{{ column }}</th>{% endfor %}</tr>
{%- for row in rows %}
<tr><td class="number"><a href="#row{{ loop.index }}">{{ row.sites | length }}</a></td>
{%- for column in columns %}
{%- if column == "why" %}<td>{% if row.reason %}<a href="#reason{{ row.reason }}">[{{ row.reason }}]</a>{% endif %}</td>
{%- elif column == "runs by" %}<td class="{{ row.state }}">{{ row.cells[column] }}</td>
{%- else %}<td{% if column in short %} class="short"{% endif %}>{{ row.cells[column] }}</td>
{%- endif %}{% endfor %}</tr>
{%- endfor %}
</table></div>
<h2>Why</h2>
<ol>
{%- for reason, number in reasons.items() %}
<li id="reason{{ number }}">{{ reason }}</li>
{%- endfor %}
</ol>
{%- if notes %}
<h2>No time</h2>
<ul>{% for note in notes %}<li>{{ note }}</li>{% endfor %}</ul>
{%- endif %}
<h2>The graph around each site</h2>
<p class="note">A blue box is a matched site, an orange one a collective that was left alone, and a dashed one the op
that prevented more. Point at a box to see the whole of its text and its line. A row has the picture of its first
site.</p>
{%- for row in rows %}
{%- set first = row.sites[0].record %}
<section>
<h3 id="row{{ loop.index }}">{{ row.sites | length }} × {{ row.cells["collective"] }}, {{ row.cells["graph"] }}</h3>
<div>{{ row.cells["pattern"] }}</div>
<div>{{ row.cells["runs by"] }}{% if row.reason %}, <a href="#reason{{ row.reason }}">[{{ row.reason }}]</a>
{%- endif %}{% if first.site %}; site <code>{{ first.site.partition("@")[0] }}</code>{% endif %}</div>
{%- for line in row.lines %}
<div><code>{{ line }}</code></div>
{%- endfor %}
{%- if not first.matched %}
<div class="note">{{ first.reason_code }}{% if first.culprit and first.culprit.name != first.node %}:
<code>{{ first.culprit.text() }}</code> <code>{{ first.culprit.line }}</code>{% endif %}</div>
{%- endif %}
{%- for one in first.outside %}
<div class="note">The {{ one.what }} stayed outside of the node: {{ one.text }} ({{ one.code }}):
<code>{{ one.node.text() }}</code> <code>{{ one.node.line }}</code></div>
{%- endfor %}
{%- if row.picture %}
<figure class="wide">
<svg xmlns="http://www.w3.org/2000/svg" width="{{ row.picture.width + 4 }}" height="{{ row.picture.height + 4 }}"
 viewBox="-2 -2 {{ row.picture.width + 4 }} {{ row.picture.height + 4 }}" role="img"
 aria-label="the graph around {{ first.node }}">
{%- for edge in row.picture.edges %}
<path class="edge" d="{{ edge.path }}"/>
<path class="head" d="M{{ edge.x - 4 }},{{ edge.y - 8 }} h8 l-4,8 z"/>
{%- endfor %}
{%- for box in row.picture.boxes %}
<g><title>{{ box.title }}</title>
<rect class="{{ row.marks.get(box.node.name, '') }}" x="{{ box.x }}" y="{{ box.y }}" rx="5"
 width="{{ box_width }}" height="{{ box_height }}"/>
<text x="{{ box.x + 8 }}" y="{{ box.y + 3 }}">
{%- for line in box.lines %}<tspan{% if loop.first %} class="name"{% endif %} x="{{ box.x + 8 }}" dy="1.3em">
{{- line }}</tspan>{% endfor %}</text></g>
{%- endfor %}
</svg></figure>
{%- endif %}
</section>
{%- endfor %}
{%- endif %}
</body>
</html>
"""
SHORT = ("graph", "dtype", "group", "moved", "predicted", "measured")
"""The columns whose cells are not broken into lines."""


def report_page(sites: Sequence[ExplainedSite], conclusion: str) -> str:
    from jinja2 import Environment

    groups = equal_sites(sites)
    reasons = numbered_reasons(groups)
    timed = any(site.measured or site.tried_us for site in sites)
    columns = [column for column in (groups[0][0].row() if groups else ()) if timed or column != "measured"]
    template = Environment(autoescape=True).from_string(TEMPLATE)
    return template.render(
        conclusion=conclusion,
        columns=columns,
        short=SHORT,
        rows=[_row(group, reasons) for group in groups],
        reasons=reasons,
        notes=dict.fromkeys(note for site in sites if site.measured for note in site.measured.notes),
        box_width=BOX_WIDTH,
        box_height=BOX_HEIGHT,
    )


def _row(group: Sequence[ExplainedSite], reasons: dict[str, int]) -> dict[str, Any]:
    first = group[0].record
    marks = {one.node.name: "cause" for one in first.outside}
    if first.culprit is not None:
        marks[first.culprit.name] = "cause"
    marks[first.node] = "matched" if first.matched else "alone"
    return {
        "sites": group,
        "cells": group[0].row(),
        "reason": reasons.get(group[0].reason),
        "state": "fused" if group[0].fused else "unfused",
        "lines": dict.fromkeys(site.record.line for site in group if site.record.line),
        "picture": layout(first.near) if first.near else None,
        "marks": marks,
    }
