"""The ordered list of passes, and the runner that knows none of them.

A pass is `name_pass(graph, *, options) -> int`, the number of sites that it rewrote. `PASSES` is the whole compiler
from graph to graph. `DitronPipeline` is what Inductor calls, once per forward, backward or inference graph, after a
pass that the user has set there himself. `JOINT_PASSES` see forward and backward in one graph, before it is parted.

What can be read from outside: `TORCH_LOGS="+ditron_inductor"` prints what each pass did to the number of calls of
each op; `torch._logging.trace_structured` gets the graph before the first pass and after each one (tlparse shows them);
`torch._dynamo.utils.counters["ditron"]` counts what each pass rewrote, and `summary` logs a line on it; an
open `collect_sites` block gets the sites.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import fx
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._logging import trace_structured

from ditron_inductor import runtime
from ditron_inductor.codegen import plain_graph
from ditron_inductor.codegen.meeting_kernel import MEETING, declare_meeting
from ditron_inductor.codegen.site_kernel import declare
from ditron_inductor.device.agreements import Form
from ditron_inductor.options import Options
from ditron_inductor.passes.absorb.absorb_epilogues import absorb_epilogues
from ditron_inductor.passes.absorb.absorb_norms import absorb_norms
from ditron_inductor.passes.absorb.prepare_products import prepare_products
from ditron_inductor.passes.attention.all_gather_attention import all_gather_attention
from ditron_inductor.passes.attention.attention_reduce_scatter import attention_reduce_scatter
from ditron_inductor.passes.attention.flash_decode import flash_decode
from ditron_inductor.passes.attention.recompute_masks import recompute_masks
from ditron_inductor.passes.finish.conform import conform
from ditron_inductor.passes.finish.name_sites import add_key, name_sites
from ditron_inductor.passes.finish.order_collectives import order_collectives
from ditron_inductor.passes.finish.pad_products import pad_products
from ditron_inductor.passes.finish.record_sites import record_graph
from ditron_inductor.passes.finish.require_fusions import require_fusions
from ditron_inductor.passes.finish.review_left_alone import review_left_alone
from ditron_inductor.passes.finish.summary import summary
from ditron_inductor.passes.finish.verify_tasks import verify_tasks
from ditron_inductor.passes.finish.wire_facts import Before, before_passes, facts_of, graph_facts
from ditron_inductor.passes.forms.merge_reductions import merge_reductions
from ditron_inductor.passes.forms.move_across import move_across
from ditron_inductor.passes.forms.sequence_parallel import sequence_parallel
from ditron_inductor.passes.forms.split_weights import split_weights
from ditron_inductor.passes.forms.try_forms import try_forms
from ditron_inductor.passes.fuse.all_reduce_rms_norm import all_reduce_rms_norm
from ditron_inductor.passes.fuse.fusions import FUSIONS
from ditron_inductor.passes.fuse.projections import projections
from ditron_inductor.passes.graph.collectives import group_sizes
from ditron_inductor.passes.normalize.normalize_collectives import normalize_collectives
from ditron_inductor.passes.normalize.share_gathers import share_gathers
from ditron_inductor.passes.normalize.vllm_collectives import group_names
from ditron_inductor.task.nodes import COMPILED_BY_US, NODES
from ditron_inductor.task.schema import NAMESPACE, overload
from ditron_inductor.task.site_records import SiteSink, current_sink

log = logging.getLogger(__name__)

PACKAGE = Path(__file__).parent
# What a pass may depend on and the cache must therefore know: sources, and tables that ship with them.
HASHED_SUFFIXES = (".py", ".csv", ".json")


class Pass(Protocol):
    """A pure rewrite of a graph in place."""

    @property
    def __name__(self) -> str: ...

    def __call__(self, graph: fx.Graph, *, options: Options) -> int: ...


PASSES: tuple[Pass, ...] = (
    # One spelling for each collective, before anything looks for one.
    normalize_collectives,
    # Equal gathers become one, so that each fusion sees all users of what is gathered.
    share_gathers,
    # Attention takes its gathers first: the passes that move things would take its views and casts for their own.
    all_gather_attention,
    attention_reduce_scatter,
    # Fewer collectives, before anything is moved across those that remain.
    merge_reductions,
    # What only delays a collective goes to its other side, so that the matmul stands beside it.
    move_across,
    # An all-reduce becomes a reduce-scatter and a gather, which the fusions behind then take.
    sequence_parallel,
    # Other forms are tried with all the fusions that follow, and kept where one of these fires.
    try_forms,
    # One collective with the matmuls beside it: the list has a line for each kind, and says why it stands there.
    *FUSIONS,
    # Reductions whose product was changed in between: those that the passes above could not take as they stand.
    prepare_products,
    # The norm behind a reduction, fused by then or not.
    all_reduce_rms_norm,
    # Three gathers of parts that no matmul reads, once the gathers of matmuls are gone.
    flash_decode,
    # The reasons of what was left alone, once no fusion can follow.
    review_left_alone,
    # An error, where `ditron.strict` is set, before any time goes into the rest.
    require_fusions,
    # Gate and up apart, as the epilogues read them.
    split_weights,
    # Matmuls that are left and that no fusion can take any more.
    projections,
    # Epilogues and prologues, once all nodes that may have them stand.
    absorb_epilogues,
    absorb_norms,
    # Products that remain torch's, once the fused ones are gone.
    pad_products,
    # The order of what is launched, once nothing that is launched changes.
    order_collectives,
    # Names by place in that order.
    name_sites,
    # The last word.
    verify_tasks,
)
"""The compiler from graph to graph. A comment says why the pass, or the passes, below it stand at this place."""
MOVING = ("share_gathers", "merge_reductions", "move_across", "sequence_parallel", "try_forms")
"""Passes behind which other numbers travel than before, or in another order: right only if all ranks do the same."""
JOINT_PASSES: tuple[Pass, ...] = (recompute_masks,)


def run(graph: fx.Graph, options: Options, passes: Sequence[Pass] = PASSES) -> dict[str, int]:
    """Run the passes in order on `graph`; returns how many sites each rewrote, by name."""
    rewritten: dict[str, int] = {}
    trace("input", graph)
    calls = count_calls(graph)
    for index, name_pass in enumerate(passes):
        name = name_pass.__name__
        rewritten[name] = name_pass(graph, options=options)
        counters["ditron"][name] += rewritten[name]
        calls_before, calls = calls, count_calls(graph)
        log.debug("%s: %d rewritten, ops: %s", name, rewritten[name], describe_change(calls_before, calls))
        trace(f"{index}_{name}", graph)
    graph.lint()
    return rewritten


def count_calls(graph: fx.Graph) -> Counter[str]:
    """How many times the graph calls each op."""
    return Counter(str(node.target) for node in graph.nodes if node.op == "call_function")


def describe_change(before: Counter[str], after: Counter[str]) -> str:
    """The ops whose number of calls changed, as `aten.mm.default -1, ditron.all_gather_matmul.default +1`."""
    changes = {name: after[name] - before[name] for name in sorted({*before, *after})}
    return ", ".join(f"{name} {change:+d}" for name, change in changes.items() if change) or "unchanged"


def graph_text(graph: fx.Graph) -> str:
    """The graph as readable Python with shapes."""
    module = graph.owning_module
    return str(graph) if module is None else module.print_readable(print_output=False)


def trace(name: str, graph: fx.Graph) -> None:
    """Hand the graph to tlparse, if a structured trace is being written."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"ditron_{name}", "encoding": "string"},
        payload_fn=lambda: graph_text(graph),
    )


class DitronPipeline(CustomGraphPass):
    """The passes as Inductor wants them: callable on a graph, and with a `uuid` for its caches."""

    def __init__(self, options: Options, *, passes: Sequence[Pass] = PASSES, root: Path = PACKAGE) -> None:
        self.options = options
        self.passes = tuple(passes)
        self.root = root
        # Taken now: the backward graph may be compiled by another thread, after the block has closed.
        self.sink: SiteSink | None = current_sink()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In another process the passes bring the Task ops, their kernels and a table with them."""
        vars(self).update(state)
        runtime.use_table(self.options)

    def __call__(self, graph: fx.Graph) -> None:
        declare_calls()
        text = graph_text(graph) if self.sink is not None else ""
        before = before_passes(graph)
        plain = plain_graph.dump(graph) if before else ""
        rewritten = run(graph, self.options, self.passes)
        mark_calls(graph)
        if before is not None:
            moved = ", ".join(f"{name} {rewritten[name]}" for name in MOVING if rewritten.get(name))
            add_meeting(graph, before, moved, plain, self.options)
        if self.options.summary:
            summary.add(graph)
        if self.sink is not None:
            self.sink.add(record_graph(graph, graph_before=text, graph_after=graph_text(graph)))

    def uuid(self) -> str:
        """A hash of everything that decides what the passes do: sources, shipped tables, options, order, the groups
        that stand behind names which are in the graph but are not torch's, and the size of each group.

        What acts at run time only, a user's tuned table above all, stays out: it may differ between a run that fills
        the cache and one that reads it.
        """
        parts = [source_digest(self.root), self.options.text(), *(one.__name__ for one in self.passes)]
        parts += [f"{name}={known}" for name, known in group_names().items()]
        parts += [f"{name}: {size} ranks" for name, size in sorted(group_sizes().items())]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class ConformPipeline(CustomGraphPass):
    """What gives a graph as it was before the passes the forms that the ranks agreed on.

    key: of the graph whose place it takes, by which its sites find what was agreed for them.
    """

    def __init__(self, forms: Mapping[str, Sequence[Form]], options: Options, key: str) -> None:
        self.forms = forms
        self.options = options
        self.key = key

    def __call__(self, graph: fx.Graph) -> None:
        declare_calls()
        conform(graph, self.forms, options=self.options)
        for name_pass in (order_collectives, name_sites, verify_tasks):
            name_pass(graph, options=self.options)
        mark_calls(graph)
        add_key(graph, self.key)
        graph.lint()

    def uuid(self) -> None:
        """None: such a graph is compiled where it is needed, and not kept."""
        return None


class JointPipeline(DitronPipeline):
    """The passes for a joint graph, from which no site follows yet."""

    def __init__(self, options: Options) -> None:
        super().__init__(options, passes=JOINT_PASSES)

    def __call__(self, graph: fx.Graph) -> None:
        for name_pass in self.passes:
            changed = name_pass(graph, options=self.options)
            log.debug("joint graph: %s: %d rewritten", name_pass.__name__, changed)
        graph.lint()


@functools.cache
def declare_calls() -> None:
    """Tell Inductor that its graphs call our ops as they are, and how sites are called; once.

    That they are called it would find out by itself, and up to torch 2.12 write down for a log, wanted or not, all that
    the first call of each op is computed from: of a few layers that took a minute.
    """
    declare_meeting()
    declare(tuple(NODES))


def mark_calls(graph: fx.Graph) -> None:
    """Let our ops in a graph be called by site: its code is cached under a key that knows our sources."""
    for node in graph.nodes:
        if node.op == "call_function" and getattr(node.target, "namespace", "") == NAMESPACE:
            node.meta[COMPILED_BY_US] = True


def add_meeting(graph: fx.Graph, before: Before, moved: str, plain: str, options: Options) -> None:
    """Have the ranks compare the graph when it first runs; its sites carry the key by which they find what came of it.

    before: of the graph as Inductor alone would run it. moved: what the passes changed of its collectives. plain: that
    graph, see codegen/plain_graph.py.
    """
    key = graph_facts(before, facts_of(graph), moved, options.shared()).key
    add_key(graph, key)
    facts = graph_facts(before, facts_of(graph), moved, options.shared())
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        node = graph.call_function(overload("meet"), (key,))
    node.meta.update({"val": None, MEETING: (facts.text(), plain, options.meeting_s)})
    graph.lint()


@functools.cache
def source_digest(root: Path) -> str:
    """A hash of all sources and shipped tables below `root`, names included; links to folders are followed."""
    digest = hashlib.sha256()
    for path in sorted(_hashed_files(root)):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _hashed_files(root: Path) -> Iterable[Path]:
    for folder, _, names in os.walk(root, followlinks=True):
        for name in names:
            if name.endswith(HASHED_SUFFIXES):
                yield Path(folder) / name


class UserPassThen(CustomGraphPass):
    """A user's own pass and then ours, for the versions of Inductor that take one pass only."""

    def __init__(self, user_pass: Callable[[fx.Graph], Any], pipeline: DitronPipeline) -> None:
        self.user_pass = user_pass
        self.pipeline = pipeline

    def __call__(self, graph: fx.Graph) -> None:
        self.user_pass(graph)
        self.pipeline(graph)

    def uuid(self) -> tuple[Any, str] | None:
        """Both, or None, which turns Inductor's caches off, when the user's pass has none."""
        user = self.user_pass.uuid() if isinstance(self.user_pass, CustomGraphPass) else None
        return None if user is None else (user, self.pipeline.uuid())


def with_user_passes(user_passes: Any, pipeline: DitronPipeline) -> Any:
    """The value of Inductor's option: what the user has there, whatever its form, and then `pipeline`."""
    if user_passes is None or user_passes == [] or user_passes == ():
        return pipeline
    if isinstance(user_passes, (list, tuple)):  # only where Inductor takes several
        return [*user_passes, pipeline]
    return [user_passes, pipeline] if takes_several_passes() else UserPassThen(user_passes, pipeline)


def takes_several_passes() -> bool:
    """Whether this Inductor takes a list of passes (with a `uuid` each) as one option."""
    from torch._inductor import custom_graph_pass

    return "get_custom_graph_passes" in vars(custom_graph_pass)
