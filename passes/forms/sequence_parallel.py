"""Row-wise work between all-reduces is done by every rank for its own rows only: sequence parallelism.

Before, as Hugging Face's `tp_plan` and Megatron without sequence parallelism have it:

    mm -> all_reduce -> wait [B, S, N] -> + x [B, S, N] -> norm [B, S, N] -> mm, mm
                                           '-> + (the next all-reduce's result) -> ..

After, for a dimension that divides, S here:

    mm -> split .. cat -> reduce_scatter -> wait [B, S/W, N] -> + own_chunk(x) -> norm [B, S/W, N] -> all_gather -> ..
                                                                '-> + ..

    .. -> split .. cat [B, S, N] -> mm, mm

Then both collectives are fused with the matmuls beside them (`matmul_reduce_scatter`, `all_gather_matmul`), and the
row-wise work shrinks to 1/W. The residual stays in parts from one all-reduce to the next. Other values that leave the
region are gathered, so every rank has the same bits of them.

`own_chunk` cuts a replicated tensor where it enters. The rank is found at run time and is not a part of the graph. The
graph does not show whether its inputs, and numbers in it, are the same on all ranks, so `replicated` compares samples
while the program runs, and raises if they differ (docs/algebra.md). The result is that of eager mode up to rounding.

Sizes, shipped numbers (`task/sequence_cost.py`) and the option `ditron.sequence_parallel` decide. It must not fire
* with dynamic sizes, without rows, or if no dimension of the rows divides by the number of ranks;
* if what is reduced comes from the same inputs that it would take for replicated ones, or, unless the option is `on`,
  if no product is reduced: sums over ranks of what each rank has are not tensor parallelism;
* in a backward graph, or if gathering values for other readers costs more than is saved: training graphs save
  replicated values for the backward;
* across ops that are not row-wise, random ones, and operands that are not replicated (see `row_regions`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.absorb.prepare_products import find_prepared
from ditron_inductor.passes.fuse.all_reduce_rms_norm import PATTERN, prove
from ditron_inductor.passes.graph import proofs, replicated_inputs, rewriting
from ditron_inductor.passes.graph.chunked_collectives import gathered, scattered
from ditron_inductor.passes.graph.collectives import WAIT, Collective
from ditron_inductor.passes.graph.norm_forms import is_rsqrt, normalised
from ditron_inductor.passes.graph.reasons import ReasonCode, refused
from ditron_inductor.passes.graph.reduced_sums import find_sum
from ditron_inductor.passes.graph.row_regions import Region, find_regions
from ditron_inductor.task import schema
from ditron_inductor.task.exchange import GATHERED_OPERAND, REDUCED_PRODUCT, SCATTERED_PRODUCT
from ditron_inductor.task.nodes import matmul_of
from ditron_inductor.task.sequence_cost import GatheredRows, Reduced, RegionWork, pays
from ditron_inductor.task.torch_dtypes import precision_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Match:
    """A region, and the dimension of its rows that is cut."""

    region: Region
    dim: int

    @property
    def group_name(self) -> str:
        return self.region.reductions[0].group_name

    @property
    def world_size(self) -> int:
        return self.region.reductions[0].world_size


def find_sequence_parallel(region: Region, options: Options) -> Match | None:
    """The region with the first dimension that divides, if the option asks for it or it is predicted to pay."""
    world_size = region.reductions[0].world_size
    dims = [dim for dim, length in enumerate(region.rows) if length % world_size == 0]
    if not dims or not all(region.rows):
        return None
    if options.sequence_parallel == "on":
        return Match(region, dims[0])
    fuses = {matmul_of(GATHERED_OPERAND), matmul_of(SCATTERED_PRODUCT)} <= set(options.fusions)
    of_region = work(region, options)
    multiplies = any(reduced.k for reduced in of_region.reduced)
    return Match(region, dims[0]) if fuses and multiplies and pays(of_region) else None


def work(region: Region, options: Options) -> RegionWork:
    """Returns what the cost model has to know about a region."""
    rows = 1
    for length in region.rows:
        rows *= length
    first = region.reductions[0]
    reduction_with_norm = {matmul_of(REDUCED_PRODUCT), PATTERN}
    normed = _with_norm(region) if reduction_with_norm <= set(options.fusions) else ()
    return RegionWork(
        m=rows,
        reduced=tuple(
            Reduced(n=_columns(reduction.wait), k=_contracted(reduction), has_norm=reduction.node in normed)
            for reduction in region.reductions
        ),
        gathered=tuple(GatheredRows(n=_columns_behind(node, region), k=_columns(node)) for node in region.exits),
        precision=precision_of(first.wait.meta["val"].dtype),
        world_size=first.world_size,
    )


def _with_norm(region: Region) -> set[fx.Node]:
    """Returns the all-reduces that would be one node with the norm behind them, if nothing were divided."""
    found = set()
    for rsqrt in region.members:
        rows = normalised(rsqrt) if is_rsqrt(rsqrt) else None
        total = None if rows is None else find_sum(rows)
        if total is not None and not isinstance(prove(total, rsqrt), ReasonCode):
            found.add(total.launch)
    return found


def _columns(node: fx.Node) -> int:
    length = node.meta["val"].shape[-1]
    assert isinstance(length, int)
    return length


def _contracted(start: Collective) -> int:
    """Returns the sum of K over the matmuls that are reduced; 0 if no fusion takes them, or a size is dynamic."""
    product = find_prepared(start.operand, (start.node,))
    if refused(product):
        return 0
    lengths = [factors.lhs.meta["val"].shape[1] for factors in product.factors]
    return sum(lengths) if all(isinstance(length, int) for length in lengths) else 0


def _columns_behind(node: fx.Node, region: Region) -> int:
    """The columns of all weights that the whole tensor is multiplied with; 0 if some size is dynamic."""
    inside = set(region.members)
    views = [view for view in proofs.views_down(node) if view is node or view not in inside]
    matmuls = {user for view in views for user in view.users if user.args and user.args[0] is view}
    lengths = [user.meta["val"].shape[1] for user in matmuls if proofs.proved_mm(user) is None]
    return sum(lengths) if all(isinstance(length, int) for length in lengths) else 0


def rewrite(graph: fx.Graph, match: Match, index: int) -> None:
    """Cuts the rows of the region. It is the `index`th region of the graph that is cut."""
    region = match.region
    names, constants = replicated_inputs.places(region.roots), "\n".join(_constants(region))
    inside = set(region.members)
    outside_users = {node: [user for user in node.users if user not in inside] for node in region.exits}
    chunks = {source: _own_chunk(graph, match, source) for source in region.entering}
    starts = {reduction.wait: reduction for reduction in region.reductions}
    for node in region.members:
        part = node
        if node in starts:
            start = starts[node]
            assert start.reduce_op is not None
            with graph.inserting_before(start.node):
                # An operand that was a member has been gathered before.
                operand = proofs.operand(start.node)
                part = scattered(graph, operand, match.dim, start.reduce_op, start.world_size, start.group_name)
            for user in [user for user in node.users if user in inside]:
                user.replace_input_with(node, part)
        else:
            for source in [source for source in node.all_input_nodes if source in chunks]:
                node.replace_input_with(source, chunks[source])
            rewriting.recompute(node)
        if node in outside_users:
            with graph.inserting_before(part.next):
                whole = gathered(graph, part, match.dim, match.world_size, match.group_name)
            for user in outside_users[node]:
                user.replace_input_with(node, whole)
        if node in starts:
            rewriting.erase_unused(graph, [node, starts[node].node])
    if region.roots or constants:
        site = _site(match, index)
        replicated_inputs.compare(graph, region.roots, match.group_name, site, names, constants)


def _own_chunk(graph: fx.Graph, match: Match, source: fx.Node) -> fx.Node:
    value = source.meta["val"]
    shape = list(value.shape)
    shape[match.dim] //= match.world_size
    args = (source, match.dim, match.world_size, match.group_name)
    first = next(node for node in match.region.members if source in node.all_input_nodes)
    with graph.inserting_before(first):
        return rewriting.call(graph, schema.overload("own_chunk"), args, source, tuple(shape))


def _constants(region: Region) -> list[str]:
    """Returns a hash of the numbers in the region and what enters it, then each once, with its op; or nothing."""
    reduced = {reduction.wait for reduction in region.reductions}
    found = {node for node in region.members if node not in reduced}
    pending = [source for node in found for source in node.all_input_nodes if source not in region.members]
    while pending:
        node = pending.pop()
        if node not in found and node.op == "call_function" and node.target is not WAIT:
            found.add(node)
            pending += node.all_input_nodes
    texts = [_constant(node) for node in region.members[0].graph.nodes if node in found]
    texts = [text for text in texts if text]
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:8]
    return [digest, *dict.fromkeys(texts)] if texts else []


def _constant(node: fx.Node) -> str:
    """Returns an op and its arguments as text, without devices, `_` for tensors; empty if it has no others."""
    given = [value for value in (*node.args, *node.kwargs.values()) if not isinstance(value, torch.device)]
    text = ", ".join(map(_argument, given))
    name = str(getattr(node.target, "__name__", node.target))
    return f"{name}({text})" if set(text) - set("_[], ") else ""


def _argument(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_argument, value))}]"
    return "_" if isinstance(value, fx.Node) else str(value)


def _site(match: Match, index: int) -> str:
    """The name of a comparison: a hash of the region's ops and shapes, which all ranks share."""
    facts: list[Any] = [match.region.rows, match.dim, match.world_size, index]
    facts += [(str(node.target), _columns(node)) for node in match.region.members if proofs.tensor(node) is not None]
    return f"sequence_parallel/{hashlib.sha256(repr(facts).encode()).hexdigest()[:8]}"


def sequence_parallel(graph: fx.Graph, *, options: Options) -> int:
    """Cuts the rows of every region where that pays; returns how many all-reduces went."""
    if options.sequence_parallel == "off" or not options.fusions:
        return 0
    if proofs.tangents(graph):
        return 0
    count = index = 0
    # Read the region again after each rewrite: what it reads may have been a member of another region.
    while (match := _first_match(graph, options)) is not None:
        count += len(match.region.reductions)
        rewrite(graph, match, index)
        index += 1
    return count


def _first_match(graph: fx.Graph, options: Options) -> Match | None:
    matches = (find_sequence_parallel(region, options) for region in find_regions(graph))
    return next((match for match in matches if match is not None), None)
