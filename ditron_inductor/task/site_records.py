"""Records of what a compiled graph did with its collectives, which `explain` prints.

The pipeline appends one `GraphRecord` per compiled graph to the sink that was open when the backend was called
(`collect_sites`). Without an open sink nothing is recorded. A cache hit runs no pass and therefore records nothing.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

from ditron_inductor.task.node import Shapes, TaskNode


@dataclasses.dataclass(frozen=True)
class NodeRecord:
    """One node of a graph: `name`, `op` and `value` (`[8, s0] bfloat16`) as the graph prints them, and `line`, the line
    of the user's program that it comes from (`model.py:12 in forward: x = self.down(x)`), empty where none is known.
    """

    name: str
    op: str
    value: str
    line: str

    def text(self) -> str:
        """`addmm (aten.addmm.default, [8, 16] bfloat16)`."""
        return f"{self.name} ({', '.join(part for part in (self.op, self.value) if part)})"


@dataclasses.dataclass(frozen=True)
class OutsideRecord:
    """A norm or an epilogue beside a Task node that did not become a part of it. `what` is `norm behind`, `norm in
    front` or `epilogue`; `code` and `text` say why; `node` is the op that shows it.
    """

    what: str
    code: str
    text: str
    node: NodeRecord


@dataclasses.dataclass(frozen=True)
class PictureRecord:
    """A node of the graph near a site, and the names of those nodes near the site that it reads."""

    node: NodeRecord
    inputs: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiteRecord:
    """One collective site of one graph, matched or left alone, in graph order.

    `matched` is whether the passes made a Task node of it; by which strategy the node runs, fused or not, is decided
    when it runs. `kind` is the Task kind (`all_gather_matmul`, ...) of a matched site, and otherwise the collective's
    own name (`all_gather_into_tensor`, ...). `m`, `n`, `k` are the sizes of the product that one rank computes, [m, k]
    @ [k, n]. With several weights n is their sum; if several products are added up, k is theirs. For a dynamic size
    they hold the compiler's hint, and None if a size is not known (a site left alone, an unbacked symbol).
    `bytes_moved` is what one rank receives from its peers in one call. `task` is the node of a matched site. `operands`
    are the shapes of its operands on this rank by name, with a list if there are several of one name; None if a size is
    not known. `line` is the user's line as in `NodeRecord`. `culprit` is the node that prevented the fusion, or the
    collective itself if the reason is its own. `outside` is what a matched site could not take in. `near` are the nodes
    around the site, itself included, in graph order.
    """

    site: str = ""
    kind: str
    matched: bool
    pattern: str
    group_name: str
    world_size: int | None
    dtype: str
    device_type: str
    shapes: tuple[str, ...]
    m: int | None = None
    n: int | None = None
    k: int | None = None
    itemsize: int | None
    bytes_moved: int | None
    strategy: str = ""
    node: str
    text: str
    reason_code: str = ""
    reason: str = ""
    task: TaskNode | None = None
    operands: Shapes | None = None
    line: str = ""
    culprit: NodeRecord | None = None
    outside: tuple[OutsideRecord, ...] = ()
    near: tuple[PictureRecord, ...] = ()


def stopped_text(node: str, line: str, reason_code: str, culprit: NodeRecord | None) -> str:
    """Two lines on a site left alone: the collective `node` and its line, then the reason and the node that gave it."""
    first = f"  {node}" + (f", {line}" if line else "")
    if culprit is None or culprit.name == node:
        return f"{first}\n    {reason_code}"
    return f"{first}\n    {reason_code}: {culprit.text()}" + (f", {culprit.line}" if culprit.line else "")


@dataclasses.dataclass(frozen=True)
class GraphRecord:
    """The sites of one compiled graph. `is_backward` is None where the compiler does not say. `local` has the kinds of
    its nodes that communicate nothing, one for each node.
    """

    index: int
    is_backward: bool | None
    region: str
    sites: tuple[SiteRecord, ...]
    graph_before: str
    graph_after: str
    local: tuple[str, ...] = ()


class SiteSink:
    """A list of graph records that the pipelines of one `collect_sites` block append to. A pipeline takes the sink when
    it is made, so a backward graph that another thread compiles later reaches it too.
    """

    def __init__(self) -> None:
        self.graphs: list[GraphRecord] = []

    def add(self, record: GraphRecord) -> None:
        """Append `record`, numbered by its place in this sink."""
        self.graphs.append(dataclasses.replace(record, index=len(self.graphs)))


_current_sink: contextvars.ContextVar[SiteSink | None] = contextvars.ContextVar("ditron_site_sink", default=None)


def current_sink() -> SiteSink | None:
    """The sink of the innermost open `collect_sites` block of this context, or None."""
    return _current_sink.get()


@contextlib.contextmanager
def collect_sites() -> Iterator[SiteSink]:
    """Record the sites of every graph that the backend compiles inside the block. A graph whose backward is compiled
    only after the block, but whose forward began inside it, is recorded too.
    """
    sink = SiteSink()
    reset_token = _current_sink.set(sink)
    try:
        yield sink
    finally:
        _current_sink.reset(reset_token)
