"""Where the nodes and edges of a picture stand: the part of a graph around a site, from top to bottom."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ditron_inductor.task.site_records import NodeRecord, PictureRecord

BOX_WIDTH, BOX_HEIGHT = 220, 54
LANE_WIDTH = 8
"""The width that an edge takes in a row that it passes."""
GAP_WIDTH, GAP_HEIGHT = 18, 34
BEND, HEAD = 18, 7
"""How far an edge goes straight down before it bends, and the height of its head."""
MOST_CHARACTERS = 30
"""The most characters of a line in a box: longer lines are cut."""


@dataclass(frozen=True)
class Box:
    """A node at the place of its upper left corner. `lines`: what stands in it; `title`: all that is known of it."""

    node: NodeRecord
    x: float
    y: float

    @property
    def lines(self) -> tuple[str, ...]:
        lines = self.node.name, self.node.op.removesuffix(".default"), self.node.value
        return tuple(_cut(line) for line in lines if line)

    @property
    def title(self) -> str:
        return "\n".join(line for line in (self.node.text(), self.node.line) if line)


@dataclass(frozen=True)
class Edge:
    """The line from one box down to another, as the text of an SVG path, and the point of its head."""

    path: str
    x: float
    y: float


@dataclass(frozen=True)
class Picture:
    """The boxes and edges of a picture of this size."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]


def layout(near: Sequence[PictureRecord]) -> Picture:
    """Puts every node below and near to what it reads; edges go around boxes. near: in the order of the graph."""
    nodes = {record.node.name: record.node for record in near}
    rows, ways = _rows(near)
    above = {name: [way[-2] for way in ways if way[-1] == name] for name in nodes}
    above |= {lane: [way[place - 1]] for way in ways for place, lane in enumerate(way) if lane not in nodes}
    widths = {name: BOX_WIDTH if name in nodes else LANE_WIDTH for row in rows for name in row}
    totals = [sum(widths[name] + GAP_WIDTH for name in row) - GAP_WIDTH for row in rows]
    left: dict[str, float] = {}
    for row, total in zip(rows, totals, strict=True):
        x = (max(totals) - total) / 2
        for name in sorted(row, key=lambda name: _place(name, above, left, widths)):
            left[name] = x
            x += widths[name] + GAP_WIDTH
    top = {name: number * (BOX_HEIGHT + GAP_HEIGHT) for number, row in enumerate(rows) for name in row}
    middle = {name: left[name] + widths[name] / 2 for name in left}
    boxes = tuple(Box(node, left[name], top[name]) for name, node in nodes.items())
    height = len(rows) * (BOX_HEIGHT + GAP_HEIGHT) - GAP_HEIGHT
    edges = tuple(_edge([(middle[name], top[name]) for name in way]) for way in ways)
    return Picture(max(totals), height, boxes, edges)


def _rows(near: Sequence[PictureRecord]) -> tuple[list[list[str]], list[list[str]]]:
    """Returns (the names in each row, the way of each edge as names). A node is below all that it reads, and as near
    above its first reader as that allows. A row has a lane for all edges from one node that pass it.
    """
    number: dict[str, int] = {}
    for record in near:
        number[record.node.name] = max((number[name] + 1 for name in record.inputs), default=0)
    for record in reversed(near):
        readers = [number[reader.node.name] for reader in near if record.node.name in reader.inputs]
        if readers:
            number[record.node.name] = min(readers) - 1
    ways = [
        [name, *(f"{name} in {row}" for row in range(number[name] + 1, number[record.node.name])), record.node.name]
        for record in near
        for name in record.inputs
    ]
    rows: list[dict[str, None]] = [{} for _ in range(max(number.values()) + 1)]
    for record in near:
        rows[number[record.node.name]][record.node.name] = None
    for way in ways:
        for row, lane in enumerate(way[1:-1], number[way[0]] + 1):
            rows[row][lane] = None
    return [list(row) for row in rows], ways


def _place(name: str, above: Mapping[str, list[str]], left: Mapping[str, float], widths: Mapping[str, int]) -> float:
    """Where a name wants to stand in its row: below what it reads, or else above those readers that are placed."""
    anchors = above[name] or [other for names in above.values() if name in names for other in names if other in left]
    return statistics.mean(left[other] + widths[other] / 2 for other in anchors) if anchors else 0.0


def _edge(corners: Sequence[tuple[float, float]]) -> Edge:
    """The edge along the upper middles of boxes and lanes."""
    (x, y), *others = corners
    y += BOX_HEIGHT
    path = f"M{x:.0f},{y:.0f}"
    for place, (to_x, to_y) in enumerate(others, 1):
        end = to_y - HEAD if place == len(others) else to_y
        path += f" C{x:.0f},{y + BEND:.0f} {to_x:.0f},{end - BEND:.0f} {to_x:.0f},{end:.0f}"
        x, y = to_x, to_y + BOX_HEIGHT
        if place < len(others):
            path += f" V{y:.0f}"
    return Edge(path, *others[-1])


def _cut(line: str) -> str:
    return line if len(line) <= MOST_CHARACTERS else f"{line[: MOST_CHARACTERS - 1]}…"
