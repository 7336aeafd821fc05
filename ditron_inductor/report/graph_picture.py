"""Where the nodes and edges of a picture stand: the part of a graph around a site, from top to bottom."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ditron_inductor.task.site_records import NodeRecord, PictureRecord

BOX_WIDTH, BOX_HEIGHT = 220, 54
GAP_WIDTH, GAP_HEIGHT = 18, 34
MOST_CHARACTERS = 30
"""Of a line in a box: longer ones are cut."""


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
class Picture:
    """Boxes, and edges from the lower side of one to the upper side of another: (x, y, x of the other, y of it)."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    edges: tuple[tuple[float, float, float, float], ...]


def layout(near: Sequence[PictureRecord]) -> Picture:
    """Puts every node below all that it reads, and near to that. near: in the order of the graph."""
    rows = _rows(near)
    width = max(len(row) for row in rows) * (BOX_WIDTH + GAP_WIDTH) - GAP_WIDTH
    boxes: dict[str, Box] = {}
    for number, row in enumerate(rows):
        left = (width - len(row) * (BOX_WIDTH + GAP_WIDTH) + GAP_WIDTH) / 2
        for place, record in enumerate(_sorted(row, boxes, near)):
            x, y = left + place * (BOX_WIDTH + GAP_WIDTH), number * (BOX_HEIGHT + GAP_HEIGHT)
            boxes[record.node.name] = Box(record.node, x, y)
    edges = [
        (_middle(boxes[name]), boxes[name].y + BOX_HEIGHT, _middle(boxes[record.node.name]), boxes[record.node.name].y)
        for record in near
        for name in record.inputs
    ]
    return Picture(width, len(rows) * (BOX_HEIGHT + GAP_HEIGHT) - GAP_HEIGHT, tuple(boxes.values()), tuple(edges))


def _rows(near: Sequence[PictureRecord]) -> list[list[PictureRecord]]:
    """The nodes by their rows: each below all that it reads, and as near above its first reader as that allows."""
    number: dict[str, int] = {}
    for record in near:
        number[record.node.name] = max((number[name] + 1 for name in record.inputs), default=0)
    for record in reversed(near):
        readers = [number[reader.node.name] for reader in near if record.node.name in reader.inputs]
        if readers:
            number[record.node.name] = min(readers) - 1
    rows: list[list[PictureRecord]] = [[] for _ in range(max(number.values()) + 1)]
    for record in near:
        rows[number[record.node.name]].append(record)
    return rows


def _sorted(
    row: Sequence[PictureRecord], boxes: dict[str, Box], near: Sequence[PictureRecord]
) -> Sequence[PictureRecord]:
    """The nodes of a row, from left to right as what they read stands, or what their readers read beside them."""

    def place(record: PictureRecord) -> float:
        names = record.inputs or [
            name for reader in near if record.node.name in reader.inputs for name in reader.inputs if name in boxes
        ]
        return statistics.mean(_middle(boxes[name]) for name in names) if names else 0.0

    return sorted(row, key=place)


def _middle(box: Box) -> float:
    return box.x + BOX_WIDTH / 2


def _cut(line: str) -> str:
    return line if len(line) <= MOST_CHARACTERS else f"{line[: MOST_CHARACTERS - 1]}…"
