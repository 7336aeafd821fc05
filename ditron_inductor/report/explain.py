"""``explain``: what Ditron does at every collective of a function, and why.

    report = ditron_inductor.explain(model)(tokens)   # on all ranks of the groups involved
    print(report)                                     # a table, with one row for equal collective sites
    Path("report.html").write_text(report.html())     # a page, with a picture of the graph around each site
    report.sites[0].strategy                          # the same, to read from code
    ditron_inductor.explain(model, measure=True)      # and every strategy timed at every site

Nothing here imports torch before ``explain`` is used.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ditron_inductor.options import Options
from ditron_inductor.report.explained import NOTHING, ExplainedSite
from ditron_inductor.report.report_page import report_page
from ditron_inductor.report.report_text import report_text
from ditron_inductor.task.site_records import GraphRecord, SiteRecord, collect_sites

if TYPE_CHECKING:
    import torch

    from ditron_inductor.report.measure import Timings

# A report must not raise, and needs no summary line.
UNASKED = {"ditron.strict": False, "ditron.summary": False}


@dataclass(frozen=True)
class Report:
    """All collective sites of a function's graphs, in order, as ``text()`` for a terminal, or a page, ``html()``."""

    sites: tuple[ExplainedSite, ...]
    graphs: tuple[GraphRecord, ...]
    options: Options

    @property
    def matched(self) -> tuple[ExplainedSite, ...]:
        """The sites that became a Task node, whatever they run by."""
        return tuple(site for site in self.sites if site.record.matched)

    @property
    def fused(self) -> tuple[ExplainedSite, ...]:
        """The sites that ran fused: by ``tile`` or ``chunked``, and not by the library."""
        return tuple(site for site in self.sites if site.fused)

    @property
    def left_alone(self) -> tuple[ExplainedSite, ...]:
        """The collectives that no pass made a Task node of."""
        return tuple(site for site in self.sites if not site.record.matched)

    def __str__(self) -> str:
        return self.text()

    def text(self) -> str:
        """The report for a terminal, whose lines are no longer than 120 characters, with a row for equal sites."""
        return report_text(self.sites, self.conclusion()) if self.sites else self.conclusion()

    def html(self) -> str:
        """The report as one file of HTML, with a picture of the graph around each row's first site."""
        return report_page(self.sites, self.conclusion())

    def conclusion(self) -> str:
        """How many collectives were matched, beside which other nodes, how many ran fused, and why the rest did not."""
        from ditron_inductor.summary import NOT_RUN, ran_by, ran_text

        if not self.graphs:
            return "Ditron compiled no graph: the function holds no tensor operation that torch.compile captures."
        graphs = f"{len(self.graphs)} graph{'s' if len(self.graphs) > 1 else ''}"
        if not self.sites:
            return f"Ditron compiled {graphs} without a collective: nothing to fuse."
        ran = [
            NOT_RUN if site.strategy == NOTHING else ran_by(site.strategy, site.source, site.reason)
            for site in self.matched
        ]
        local = Counter(kind for graph in self.graphs for kind in graph.local)
        text = f"{len(self.matched)} of {len(self.sites)} collectives matched, in {graphs}"
        if local:
            text += ", beside " + ", ".join(f"{count} {kind}" for kind, count in local.items())
        return text + (f"; {ran_text(ran)}" if ran else "") + _changed(self.options)


def explain(
    fn: Callable[..., Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    backward: bool = True,
    measure: bool = False,
) -> Callable[..., Report]:
    """``explain(fn)(*args, **kwargs)`` compiles and runs ``fn`` once with Ditron and reports on its collectives.

    It is collective: all ranks of the groups in ``fn`` have to call it. ``mode`` and ``options`` are those of
    ``torch.compile``, but ``ditron.strict`` is off. The compiler's caches are off too, because a graph from a cache has
    no reasons to show. If the outputs need gradients and ``backward`` is true, the backward pass runs too, without
    changing any ``.grad``. The state of the random generators is restored; other side effects of ``fn`` are those of
    one run. With ``measure`` the strategies that can run at each site are timed: one call at a time, on random data of
    the site's shapes, inside a CUDA graph if ``mode`` uses them.
    """
    parsed, _ = Options.parse(options)

    @functools.wraps(fn, assigned=("__doc__",), updated=())
    def run(*args: Any, **kwargs: Any) -> Report:
        import torch

        args, kwargs = cut_from_graph((args, kwargs))
        with collect_sites() as sink, without_caches(), random_state_kept():
            outputs = torch.compile(fn, backend=fresh_backend(mode, options))(*args, **kwargs)
            if backward:
                run_backward(outputs)
        report = build_report(sink.graphs, parsed)
        return measured_report(report, graph=uses_graphs(mode)) if measure else report

    return run


def fresh_backend(mode: str | None, options: Mapping[str, Any] | None) -> Callable[..., Any]:
    """Returns Ditron as a new backend object. With an equal backend Dynamo would reuse an earlier compilation."""

    def fresh(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        from ditron_inductor.backend import ditron

        return ditron(gm, example_inputs, mode=mode, options={**(options or {}), **UNASKED})

    return fresh


def measured_report(report: Report, *, graph: bool, rounds: int | None = None, chosen: bool = False) -> Report:
    """Returns the report with times for every site that has run; sites of one shape share a measurement. Collective.
    chosen: time only `library` and the strategy that runs, not all strategies that could run.
    """
    import torch

    from ditron_inductor.report.measure import SiteShape, measure
    from ditron_inductor.report.timing import ROUNDS
    from ditron_inductor.task.nodes import Policy
    from ditron_inductor.task.plan import possible

    known: dict[Any, Timings] = {}
    sites = []
    for site in report.sites:
        request, record = site.request, site.record
        call = None
        if request is not None and record.task is not None and record.operands is not None:
            call = record.task.timed(record.operands)
        if request is None or call is None:
            sites.append(site)
            continue
        node = replace(call[0], site="", policy=Policy())  # type: ignore[call-arg]
        strategies = tuple(dict.fromkeys(("library", site.strategy))) if chosen else ("library", *possible(request))
        # The name is equal on all ranks, even if their weights are not.
        key = (record.group_name, replace(request, site=""), node, strategies)
        if key not in known:
            shape = SiteShape(node, call[1], getattr(torch, record.dtype))
            on_gpu = request.device_type == "cuda"
            known[key] = measure(
                shape,
                group_name=shape.node.group_name,
                device=torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"),
                strategies=strategies,
                graph=graph and on_gpu,
                rounds=rounds or ROUNDS,
                workspace_limit=report.options.workspace_limit,
                timeout_s=report.options.timeout_arg,
            )
        sites.append(replace(site, measured=known[key]))
    return replace(report, sites=tuple(sites))


def uses_graphs(mode: str | None) -> bool:
    """Returns whether a mode of ``torch.compile`` runs the model inside CUDA graphs."""
    import torch._inductor

    modes: dict[str, dict[str, Any]] = torch._inductor.list_mode_options()
    return mode is not None and bool(modes[mode].get("triton.cudagraphs"))


def build_report(graphs: Sequence[GraphRecord], options: Options) -> Report:
    """The report on graphs that were compiled inside ``collect_sites`` and have run."""
    sites = [_explained(graph, record) for graph in graphs for record in graph.sites]
    return Report(tuple(sites), tuple(graphs), options)


@contextlib.contextmanager
def without_caches() -> Iterator[None]:
    """Turns caches off inside the block. A cache hit runs no pass, so it has nothing to report."""
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config

    with (
        torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False),
        # Compilations of the same function by other backends count against the limit.
        torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit + 64),
    ):
        yield


def _changed(options: Options) -> str:
    """The options that differ from the defaults, or nothing."""
    default = Options()
    # How long ranks wait for each other changes nothing in a report.
    names = [field.name for field in fields(Options) if field.name != "meeting_s"]
    changed = [name for name in names if getattr(options, name) != getattr(default, name)]
    return "".join(f"; ditron.{name} = {getattr(options, name)}" for name in changed)


def _explained(graph: GraphRecord, record: SiteRecord) -> ExplainedSite:
    direction = {None: "graph", False: "forward", True: "backward"}[graph.is_backward]
    if not record.matched:
        return ExplainedSite(direction, record, NOTHING, None, record.reason)
    # torch stays out of this module's imports.
    from ditron_inductor.device.meetings import meetings
    from ditron_inductor.task.plan import decisions

    last = decisions.last(record.group_name, record.site, (record.m, record.n, record.k))
    plain = meetings.plain_reason(record.group_name, record.site)
    if plain:
        reason = f"its graph runs as Inductor alone would run it: {plain}"
        return ExplainedSite(direction, record, "library", None, reason, "meeting")
    if last is None:
        reason = "it has not run: its tensors were empty, or nothing needed its result"
        return ExplainedSite(direction, record, NOTHING, None, reason)
    request, choice = last
    return ExplainedSite(
        direction=direction,
        record=record,
        strategy=choice.strategy,
        predicted_us=None if choice.predicted_us is None else choice.predicted_us[choice.strategy],
        reason=choice.reason,
        source=choice.source,
        predictions=choice.predicted_us or {},
        request=request,
        tried_us=choice.tried_us,
    )


def cut_from_graph(inputs: Any) -> Any:
    """Returns the same inputs as leaves, so that a backward run ends at them and does not touch the caller's graph."""
    import torch
    from torch.utils import _pytree

    def cut(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf:
            return value.detach().requires_grad_()
        return value

    return _pytree.tree_map(cut, inputs)


def run_backward(outputs: Any) -> None:
    """Computes the gradients of all outputs that have them, for every leaf, and drops them."""
    import torch
    from torch.utils import _pytree

    roots = [
        value
        for value in _pytree.tree_leaves(outputs)
        if isinstance(value, torch.Tensor) and value.grad_fn is not None and value.is_floating_point()
    ]
    leaves = _leaves_below(roots)
    if roots and leaves:
        torch.autograd.grad(roots, leaves, [torch.ones_like(root) for root in roots], allow_unused=True)


def _leaves_below(roots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors whose gradients would be accumulated: parameters and inputs, wherever the function found them."""
    found: list[torch.Tensor] = []
    seen: set[Any] = set()
    stack: list[Any] = [root.grad_fn for root in roots]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        # Only AccumulateGrad nodes hold the leaf itself.
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.append(variable)
        stack.extend(child for child, _ in node.next_functions)
    return found


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    import torch

    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield
