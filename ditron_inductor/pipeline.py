"""The ordered list of passes, and the runner that knows none of them.

A pass is `name_pass(graph, *, options) -> int`, the number of sites that it rewrote. `PASSES` is the whole compiler
from graph to graph. Inductor calls `DitronPipeline` once per forward, backward or inference graph, after a pass that
the user has set in the same place. `JOINT_PASSES` see forward and backward in one graph, before it is partitioned.

Its work can be observed in five ways. `TORCH_LOGS="+ditron_inductor"` prints how each pass changed the number of calls
of each op; `torch._logging.trace_structured` gets the graph before the first pass and after each one (tlparse shows
them); `torch._dynamo.utils.counters["ditron"]` counts what each pass rewrote; an open `collect_sites` block gets the
sites; and torch's debug folder gets the graph, before and after, with its sites (see debug_folder.py). When the graph
runs, `summary` logs a line on what was matched and what ran fused.
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
from ditron_inductor.debug_folder import DebugFolder, torch_folder
from ditron_inductor.device.agreements import Form
from ditron_inductor.device.facts import CUDAGRAPHS, GraphFacts
from ditron_inductor.options import Options
from ditron_inductor.passes.absorb.absorb_epilogues import absorb_epilogues
from ditron_inductor.passes.absorb.absorb_norms import absorb_norms
from ditron_inductor.passes.absorb.absorb_sums import absorb_sums
from ditron_inductor.passes.absorb.prepare_products import prepare_products
from ditron_inductor.passes.attention.all_gather_attention import all_gather_attention
from ditron_inductor.passes.attention.attention_reduce_scatter import attention_reduce_scatter
from ditron_inductor.passes.attention.cached_attention import cached_attention
from ditron_inductor.passes.attention.flash_decode import flash_decode
from ditron_inductor.passes.attention.recompute_masks import recompute_masks
from ditron_inductor.passes.finish.conform import conform
from ditron_inductor.passes.finish.name_sites import add_key, name_sites
from ditron_inductor.passes.finish.order_collectives import order_collectives
from ditron_inductor.passes.finish.overlap_launches import overlap_launches
from ditron_inductor.passes.finish.pad_products import pad_products
from ditron_inductor.passes.finish.record_sites import count_left_alone, record_graph
from ditron_inductor.passes.finish.require_fusions import require_fusions
from ditron_inductor.passes.finish.review_left_alone import review_left_alone
from ditron_inductor.passes.finish.unroll_topk import unroll_topk
from ditron_inductor.passes.finish.verify_tasks import verify_tasks
from ditron_inductor.passes.finish.wire_facts import Before, before_passes, facts_of, graph_facts
from ditron_inductor.passes.forms.merge_reductions import merge_reductions
from ditron_inductor.passes.forms.move_across import move_across
from ditron_inductor.passes.forms.rows_by_rank import rows_by_rank
from ditron_inductor.passes.forms.sequence_parallel import sequence_parallel
from ditron_inductor.passes.forms.split_weights import split_weights
from ditron_inductor.passes.forms.try_forms import try_forms
from ditron_inductor.passes.fuse.all_reduce_rms_norm import all_reduce_rms_norm
from ditron_inductor.passes.fuse.choose_experts import choose_experts
from ditron_inductor.passes.fuse.combine_experts import combine_experts
from ditron_inductor.passes.fuse.expert_projections import expert_projections
from ditron_inductor.passes.fuse.fusions import FUSIONS
from ditron_inductor.passes.fuse.grouped_projections import grouped_projections
from ditron_inductor.passes.fuse.projections import projections
from ditron_inductor.passes.graph.collectives import group_sizes
from ditron_inductor.passes.graph.rewriting import is_replayed
from ditron_inductor.passes.normalize.keep_roundings import hide_roundings, show_roundings
from ditron_inductor.passes.normalize.mark_exchanges import mark_exchanges
from ditron_inductor.passes.normalize.mark_sorts import mark_sorts
from ditron_inductor.passes.normalize.normalize_collectives import normalize_collectives
from ditron_inductor.passes.normalize.recompute_zeros import recompute_zeros
from ditron_inductor.passes.normalize.share_gathers import share_gathers
from ditron_inductor.passes.normalize.vllm_collectives import group_names
from ditron_inductor.task.nodes import COMPILED_BY_US, NODES
from ditron_inductor.task.schema import NAMESPACE, overload
from ditron_inductor.task.site_records import SiteSink, current_sink

log = logging.getLogger(__name__)

PACKAGE = Path(__file__).parent
# The files on which a pass may depend, and which the cache must therefore know: sources, and tables that ship with
# them.
HASHED_SUFFIXES = (".py", ".csv", ".json")


class Pass(Protocol):
    """A pure rewrite of a graph in place."""

    @property
    def __name__(self) -> str: ...

    def __call__(self, graph: fx.Graph, *, options: Options) -> int: ...


PASSES: tuple[Pass, ...] = (
    # Each collective gets one spelling, before any pass looks for collectives.
    normalize_collectives,
    # Equal gathers become one, so that each fusion sees all users of what is gathered.
    share_gathers,
    # Attention takes its gathers first, because the passes that move ops would move its views and casts.
    all_gather_attention,
    attention_reduce_scatter,
    # Ops beside a collective move to its other side, if fewer bytes are then sent.
    move_across,
    # Reductions are merged, as they then are.
    merge_reductions,
    # An all-reduce becomes a reduce-scatter and a gather, which the fusions behind then take.
    sequence_parallel,
    # Several sequences' rows keep the order of the ranks, once all gathers and scatters are there and none is fused.
    rows_by_rank,
    # Other forms are tried with all the fusions that follow, and kept where one of these fires.
    try_forms,
    # One collective is fused with the matmuls beside it. The list has a line for each kind, and says why it is there.
    *FUSIONS,
    # Reductions whose product is changed in between, which the passes above could not take.
    prepare_products,
    # The norm behind a reduction, whether or not the reduction has been fused.
    all_reduce_rms_norm,
    # Three gathers of parts that no matmul reads, once the gathers of matmuls are gone.
    flash_decode,
    # The reasons of collectives that were left alone are reviewed once no fusion can follow.
    review_left_alone,
    # With `ditron.strict` the error is raised before any time is spent on the rest.
    require_fusions,
    # Experts of few tokens and of many, before their gate and up are separated.
    expert_projections,
    grouped_projections,
    # What experts return, once the collective behind it is decided on: in a launch that reduces it, or in its own.
    absorb_sums,
    combine_experts,
    # Attention to a rank's own cache, with the rotary embeddings and the writes in front of it.
    cached_attention,
    # Gate and up are separated, as the epilogues read them.
    split_weights,
    # Matmuls that no fusion can take any more are put together.
    projections,
    # Epilogues and prologues are absorbed once all nodes that may have them exist.
    absorb_epilogues,
    absorb_norms,
    # Products that remain torch's are padded once the fused products are gone.
    pad_products,
    # A router's choice, or its topk alone, becomes something else once no pass looks for it any more.
    choose_experts,
    unroll_topk,
    # Launches are ordered once no launch changes any more.
    order_collectives,
    # Those that may begin early do, once their weights and what is in front of them are known.
    overlap_launches,
    # Sites are named by their places in that order.
    name_sites,
    # The result is checked at the end.
    verify_tasks,
)
"""The compiler from graph to graph. A comment says why the pass, or the passes, below it stand at this place."""
MOVING = ("share_gathers", "merge_reductions", "move_across", "sequence_parallel", "try_forms")
"""The passes that change which numbers are sent, or in which order. They are right only if all ranks do the same."""
BEFORE_JOINT: tuple[Pass, ...] = (hide_roundings,)
"""What runs on a joint graph in front of Inductor's own passes."""
BEHIND_JOINT: tuple[Pass, ...] = (show_roundings, recompute_masks, recompute_zeros, mark_sorts, mark_exchanges)
"""What runs on a joint graph behind Inductor's own passes."""


def run(graph: fx.Graph, options: Options, passes: Sequence[Pass] = PASSES) -> dict[str, int]:
    """Runs the passes in order on `graph`, and returns how many sites each of them rewrote, by name."""
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
    """Returns how many times the graph calls each op."""
    return Counter(str(node.target) for node in graph.nodes if node.op == "call_function")


def describe_change(before: Counter[str], after: Counter[str]) -> str:
    """Returns the ops whose number of calls changed, as `aten.mm.default -1, ditron.all_gather_matmul.default +1`."""
    changes = {name: after[name] - before[name] for name in sorted({*before, *after})}
    return ", ".join(f"{name} {change:+d}" for name, change in changes.items() if change) or "unchanged"


def graph_text(graph: fx.Graph) -> str:
    """The graph as readable Python with shapes."""
    module = graph.owning_module
    return str(graph) if module is None else module.print_readable(print_output=False)


def trace(name: str, graph: fx.Graph) -> None:
    """Writes the graph for tlparse, if a structured trace is being written."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"ditron_{name}", "encoding": "string"},
        payload_fn=lambda: graph_text(graph),
    )


class DitronPipeline(CustomGraphPass):
    """The passes in the form that Inductor requires: callable on a graph, and with a `uuid` for its caches. lines:
    those of the program that the graph is made of (see `lines_of`), if they are known.
    """

    def __init__(
        self, options: Options, *, passes: Sequence[Pass] = PASSES, root: Path = PACKAGE, lines: str = ""
    ) -> None:
        self.options = options
        self.passes = tuple(passes)
        self.root = root
        self.lines = lines
        # The sink is taken now, because another thread may compile the backward graph after the block has closed.
        self.sink: SiteSink | None = current_sink()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores the pipeline in another process. The passes import the Task ops and their kernels there."""
        vars(self).update(state)
        runtime.use(self.options)

    def __call__(self, graph: fx.Graph) -> None:
        declare_calls()
        if graph.owning_module is not None and graph.owning_module.meta.get(BRANCH):
            return
        within = torch_folder()
        text = graph_text(graph) if within is not None or self.sink is not None else ""
        folder = None if within is None else DebugFolder(within, text, self.options, source_digest(self.root))
        before = before_passes(graph)
        plain = plain_graph.dump(graph) if before else ""
        rewritten = run(graph, self.options, self.passes)
        mark_calls(graph)
        if before is not None or count_left_alone(graph):
            moved = ", ".join(f"{name} {rewritten[name]}" for name in MOVING if rewritten.get(name))
            add_meeting(graph, before or Before({}, ""), moved, plain, self.options)
        if self.sink is None and folder is None:
            return
        record = record_graph(graph, self.options, graph_before=text, graph_after=graph_text(graph))
        if self.sink is not None:
            self.sink.add(record)
        if folder is not None:
            folder.add(record)

    def uuid(self) -> str:
        """Returns a hash of everything that decides what the passes do: sources, shipped tables, options, order, the
        groups behind names in the graph that are not torch's, the size of each group, and the lines of the program, by
        which ranks find each other's graphs when they run. What acts only at run time, such as a user's tuned table, is
        not a part of it: it may differ between a run that fills the cache and a run that reads it.
        """
        parts = [source_digest(self.root), self.options.text(), *(name_pass.__name__ for name_pass in self.passes)]
        parts.append(self.lines)
        parts += [f"{name}={known}" for name, known in group_names().items()]
        parts += [f"{name}: {size} ranks" for name, size in sorted(group_sizes().items())]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


BRANCH = "ditron_branch"
"""The key in the metadata of a module that runs only if a condition holds."""

BRANCHING = "cond", "while_loop"
"""The higher-order operators that choose what they run."""


class ConformPipeline(CustomGraphPass):
    """The passes for a graph that has to take the forms that the ranks agreed on. They start from the graph before the
    passes. facts: those of the graph that it replaces. By their key its sites find what was agreed for them. Torch
    captures this graph if it captures the other one, which calls it.
    """

    def __init__(self, forms: Mapping[str, Sequence[Form]], facts: GraphFacts) -> None:
        self.forms = forms
        self.facts = facts
        self.options = Options.of_shared(facts.options)

    def __call__(self, graph: fx.Graph) -> None:
        declare_calls()
        conform(graph, self.forms, options=self.options)
        for name_pass in (order_collectives, name_sites, verify_tasks):
            name_pass(graph, options=self.options)
        mark_calls(graph)
        add_key(graph, self.facts)
        graph.lint()

    def uuid(self) -> None:
        """Returns None: such a graph is compiled when it is needed, and is not cached."""
        return None


class JointPipeline(DitronPipeline):
    """The passes for a joint graph, which make no site yet."""

    def __init__(self, options: Options, *, passes: Sequence[Pass] = BEHIND_JOINT) -> None:
        super().__init__(options, passes=passes)

    def __call__(self, graph: fx.Graph) -> None:
        for name_pass in self.passes:
            changed = name_pass(graph, options=self.options)
            log.debug("joint graph: %s: %d rewritten", name_pass.__name__, changed)
        mark_branches(graph)
        graph.lint()


def mark_branches(graph: fx.Graph) -> None:
    """Marks subgraphs that a graph chooses between: ranks may choose differently, so their collectives stay."""
    for node in graph.nodes:
        if node.op == "call_function" and str(node.target) in BRANCHING:
            for given in node.all_input_nodes:
                module = getattr(graph.owning_module, str(given.target), None) if given.op == "get_attr" else None
                if isinstance(module, fx.GraphModule):
                    module.meta[BRANCH] = True


@functools.cache
def declare_calls() -> None:
    """Declares to Inductor, once, that its graphs call our ops as they are, and how sites are called. Inductor would
    find out by itself that the ops are called. But up to torch 2.12 it would then write, for a log that nobody asked
    for, everything from which the first call of each op is computed. For a few layers this took a minute.
    """
    declare_meeting()
    declare(tuple(NODES))


def mark_calls(graph: fx.Graph) -> None:
    """Marks our ops in a graph as calls by site: its code is cached under a key that depends on our sources."""
    for node in graph.nodes:
        if node.op == "call_function" and getattr(node.target, "namespace", "") == NAMESPACE:
            node.meta[COMPILED_BY_US] = True


def add_meeting(graph: fx.Graph, before: Before, moved: str, plain: str, options: Options) -> None:
    """Makes the ranks compare the graph when it first runs. Its sites carry the key by which they find the result.
    before: the facts of the graph as Inductor alone would run it. plain: that graph as text (see
    codegen/plain_graph.py). moved: what the passes changed of its collectives.
    """
    settings = {**options.shared(), CUDAGRAPHS: repr(is_replayed())}
    unnamed = graph_facts(before, facts_of(graph), moved, settings)
    add_key(graph, unnamed)
    facts = graph_facts(before, facts_of(graph), moved, settings)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        node = graph.call_function(overload("meet"), (unnamed.key,))
    node.meta.update({"val": None, MEETING: (facts.text(), plain, options.meeting_s, count_left_alone(graph))})
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
    for folder, folders, names in os.walk(root, followlinks=True):
        # The benchmarks, which ship for `ditron bench`, compile nothing.
        folders[:] = [name for name in folders if name != "bench"]
        for name in names:
            if name.endswith(HASHED_SUFFIXES):
                yield Path(folder) / name


class UserPassThen(CustomGraphPass):
    """A pass of the user and then ours, for the versions of Inductor that take only one pass."""

    def __init__(self, user_pass: Callable[[fx.Graph], Any], pipeline: DitronPipeline) -> None:
        self.user_pass = user_pass
        self.pipeline = pipeline

    def __call__(self, graph: fx.Graph) -> None:
        self.user_pass(graph)
        self.pipeline(graph)

    def uuid(self) -> tuple[Any, str] | None:
        """Returns the ids of both passes, or None if the user's pass has none, which turns Inductor's caches off."""
        user = self.user_pass.uuid() if isinstance(self.user_pass, CustomGraphPass) else None
        return None if user is None else (user, self.pipeline.uuid())


def with_user_passes(user_passes: Any, pipeline: DitronPipeline) -> Any:
    """Returns the value of Inductor's option: the user's passes, in whatever form, and then `pipeline`."""
    if user_passes is None or user_passes == [] or user_passes == ():
        return pipeline
    if isinstance(user_passes, (list, tuple)):  # only where Inductor takes several
        return [*user_passes, pipeline]
    return [user_passes, pipeline] if takes_several_passes() else UserPassThen(user_passes, pipeline)


def takes_several_passes() -> bool:
    """Returns whether this Inductor takes a list of passes (with a `uuid` each) as one option."""
    from torch._inductor import custom_graph_pass

    return "get_custom_graph_passes" in vars(custom_graph_pass)
