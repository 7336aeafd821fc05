"""all_gather -> mm becomes one `ditron::all_gather_matmul`.

Before, for a gather along dimension 0 or along an inner dimension (`split`, `getitem` and `cat` move the chunks there):

    shard [B, S, K] -> all_gather_into_tensor -> wait -> split -> getitem x W -> cat [B, W*S, K] -> reshape [B*W*S, K]
      -> mm(reshape, weight_0) [B*W*S, N_0]
      -> mm(reshape, weight_1) [B*W*S, N_1]
      -> any other use of the gathered tensor

After:

    shard, [weight_0, weight_1] -> ditron.all_gather_matmul -> getitem 0 [B*W*S, N_0]
                                                            -> getitem 1 [B*W*S, N_1]
                                                            -> getitem 2 [B, W*S, K]   only if used otherwise

A view instead of split and cat (batch size 1) keeps row-major order, so it reads as a gather along dimension 0.

All matmuls of one gather go into one node if their weights are available before the gathered tensor is first
used; ops that only prepare a weight (permute, cast) are moved up for that. A matmul whose weight cannot come so
early uses the node's gathered output instead.

It must not fire when
* the chunks are not all of the W equal chunks, once, in order, or any of them is used otherwise;
* the gather runs along the last dimension, or a view changes the last dimension before the matmul;
* the gathered tensor is the matmul's second operand, or its first one transposed (a weight gradient contracts the
  gathered dimension), or the weight depends on it;
* there is a bias (addmm), a cast, a matmul with a matrix for each batch, or a dtype other than bfloat16, float16
  and float32;
* the gathered tensor is cut (DTensor, where the dimension does not divide): only the last rank pads its shard, but
  the cut stands on every rank. Nothing here looks at how the shard was made, so all ranks leave such a site alone
  together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes import proofs, rewriting
from ditron_inductor.passes.collectives import ALL_GATHER, Collective, collectives, read_collective
from ditron_inductor.passes.reasons import ReasonCode, Refusal, Refused, leave_alone, refused
from ditron_inductor.task.nodes import AllGatherMatmul

PATTERN = AllGatherMatmul.kind


@dataclass(frozen=True)
class Match:
    """One gather and the matmuls that it feeds.

    `gathered` is the node that holds the tensor gathered along `gather_dim`; `steps` all nodes from the
    collective to it, and its views; `matmuls` the mm nodes in graph order, each `view of gathered @ weight`.
    """

    collective: Collective
    gathered: fx.Node
    gather_dim: int
    steps: tuple[fx.Node, ...]
    matmuls: tuple[fx.Node, ...]
    return_gathered: bool


@dataclass(frozen=True)
class _Gathered:
    node: fx.Node
    dim: int
    steps: tuple[fx.Node, ...]


def find_all_gather_matmul(node: fx.Node) -> Match | Refused:
    """Proves that the all-gather `node` feeds matmuls as drawn above, or says why not."""
    collective = read_collective(node)
    if isinstance(collective, ReasonCode):
        return collective
    # Dimension 0 first: its matmuls use the waited-for tensor itself. If there are none, look behind split and cat.
    direct = _match(collective, _Gathered(collective.wait, 0, (node, collective.wait)))
    if isinstance(direct, Match):
        return direct
    cats = _cats_of_pieces(collective.wait)
    if cats:
        inner = _inner_gathered(collective, cats)
        return inner if refused(inner) else _match(collective, inner)
    partial = [piece for piece in _pieces_of(collective.wait) if proofs.feeds_matmul(piece)]
    return ReasonCode.CHUNKS_PARTIAL.at(partial[0]) if direct is ReasonCode.NO_MATMUL and partial else direct


def _inner_gathered(collective: Collective, cats: list[fx.Node]) -> _Gathered | Refused:
    """The gathered tensor of a gather along an inner dimension, which `cats` put together from chunks."""
    if len(cats) > 1:
        return ReasonCode.INTERMEDIATE_USED.at(cats[1])
    chunks = proofs.regrouped(cats[0], collective.world_size)
    if refused(chunks):
        unread = chunks is ReasonCode.NO_MATMUL and proofs.feeds_matmul(cats[0])
        return (ReasonCode.CHUNKS_PARTIAL if unread else chunks).at(cats[0])
    result, source = proofs.tensor(cats[0]), proofs.tensor(chunks.source)
    assert result is not None and source is not None
    if chunks.source is not collective.wait or chunks.split_dim != 0 or result.ndim != source.ndim:
        return ReasonCode.CHUNKS_PARTIAL.at(cats[0])
    other = proofs.other_user([collective.wait], chunks.between)
    if other is not None:
        return ReasonCode.INTERMEDIATE_USED.at(other)
    steps = (collective.node, collective.wait, *chunks.between, cats[0])
    return _Gathered(cats[0], chunks.cat_dim, steps)


def _pieces_of(wait: fx.Node) -> list[fx.Node]:
    """The slices of the waited-for tensor, and the parts that it is split into."""
    pieces = [user for user in wait.users if user.target in proofs.SLICES]
    return pieces + [part for split in pieces for part in split.users if part.target in proofs.SLICES]


def _cats_of_pieces(wait: fx.Node) -> list[fx.Node]:
    """The cat nodes that put pieces of the waited-for tensor together, directly."""
    users = dict.fromkeys(user for piece in _pieces_of(wait) for user in piece.users)
    return [user for user in users if user.target is torch.ops.aten.cat.default]


def _match(collective: Collective, gathered: _Gathered) -> Match | Refused:
    """Collects the matmuls on views of the gathered tensor that can be proved."""
    value = proofs.tensor(gathered.node)
    assert value is not None
    views = list(proofs.views_down(gathered.node))
    uses = [(view, user) for view in views for user in view.users if user not in views]
    refusals: list[Refusal] = []
    candidates: list[fx.Node] = []
    order = {node: index for index, node in enumerate(collective.node.graph.nodes)}
    first_use = min(gathered.node.users, key=lambda one: order[one], default=None)
    for view, user in uses:
        code = _rejected(view, user, value, gathered)
        refusals += [] if code is None else [code.at(user)]
        if code is None and user not in candidates:
            candidates.append(user)
    assert first_use is not None or not candidates
    candidates.sort(key=lambda one: order[one])
    matmuls: list[fx.Node] = []
    for mm in candidates:
        weight = mm.args[1]
        assert isinstance(weight, fx.Node) and first_use is not None
        if proofs.depends_on(weight, {collective.wait}):
            refusals.append(ReasonCode.OPERAND_DEPENDS.at(weight))
        elif (pinned := rewriting.pinned(weight, first_use)) is not None:
            refusals.append(ReasonCode.OPERAND_LATE.at(pinned))
        else:
            matmuls.append(mm)
    if not matmuls:
        return _strongest(refusals)
    fused = set(matmuls)
    return_gathered = any(user not in fused for _, user in uses)
    if return_gathered and not proofs.row_major(value):
        return ReasonCode.INTERMEDIATE_USED.at(next(user for _, user in uses if user not in fused))
    steps = tuple(dict.fromkeys([*gathered.steps, *views]))
    return Match(collective, gathered.node, gathered.dim, steps, tuple(matmuls), return_gathered)


def _rejected(view: fx.Node, user: fx.Node, value: torch.Tensor, gathered: _Gathered) -> Refused | None:
    """Why a use of the gathered tensor (`value`, seen through `view`) is no matmul that can be fused; None if
    it is one.
    """
    if user.target in proofs.TRANSPOSES:
        return _rejected_transposed(user)
    if user.target in proofs.SLICES:
        return _rejected_slice(user)
    if user.target in proofs.CASTS:
        return ReasonCode.CAST_BETWEEN if proofs.feeds_matmul(user) else ReasonCode.NO_MATMUL
    code = proofs.proved_mm(user)
    if code is ReasonCode.BIAS and user.args[1] is not view:
        return _rejected_operand(user, user.args[2] is view)
    if code is not None:
        return code
    if user.args[0] is not view:
        return ReasonCode.GATHERED_WEIGHT
    if user.args[1] is view:
        return ReasonCode.OPERAND_DEPENDS
    if gathered.dim == value.ndim - 1:
        return ReasonCode.LAST_DIM
    rows = proofs.tensor(view)
    assert rows is not None
    if not proofs.known_equal(rows.shape[1], value.shape[-1]):
        return ReasonCode.LAYOUT
    # Rows follow from the number of elements, unless there are none.
    return None if proofs.known(value.shape[-1] > 0) else ReasonCode.SHAPE_UNPROVEN


def _rejected_operand(addmm: fx.Node, is_weight: bool) -> ReasonCode:
    """A gathered tensor that addmm multiplies with, or adds."""
    return ReasonCode.GATHERED_WEIGHT if is_weight else ReasonCode.NO_MATMUL


def _rejected_transposed(transpose: fx.Node) -> Refused:
    """A transposed use: as first operand it is a weight gradient, as second one a sharded weight. With more than two
    dimensions it moves rows (batch and sequence change places).
    """
    value = proofs.tensor(transpose)
    if value is not None and value.ndim > 2 and proofs.feeds_matmul(transpose):
        return ReasonCode.LAYOUT
    views = list(proofs.views_down(transpose))
    for user in (user for view in views for user in view.users):
        if user.target is torch.ops.aten.mm.default:
            is_gradient = user.args[0] in views
            return (ReasonCode.WEIGHT_GRADIENT_ONLY if is_gradient else ReasonCode.GATHERED_WEIGHT).at(user)
        if user.target is torch.ops.aten.addmm.default and user.args[2] in views:
            return ReasonCode.GATHERED_WEIGHT.at(user)
    return ReasonCode.NO_MATMUL


def _rejected_slice(part: fx.Node) -> ReasonCode:
    """A part of the gathered tensor: the padding of uneven shards is cut off at the end of a dimension but the last."""
    if part.target is not torch.ops.aten.slice.Tensor or not proofs.feeds_matmul(part):
        return ReasonCode.NO_MATMUL
    bound = proofs.arguments(part)
    value = proofs.tensor(part)
    assert value is not None
    start = 0 if bound["start"] is None else proofs.size(bound["start"])
    cut = bound["dim"] % value.ndim < value.ndim - 1 and proofs.known_equal(start, 0)
    return ReasonCode.UNEVEN_SHARDS if cut else ReasonCode.NO_MATMUL


def _strongest(refusals: list[Refusal]) -> Refused:
    """The reason to report when every use was rejected: the first one that names a matmul, if any does."""
    named = [one for one in refusals if one.code is not ReasonCode.NO_MATMUL]
    actionable = [one for one in named if one.code is not ReasonCode.WEIGHT_GRADIENT_ONLY]
    return next(iter(actionable or named), ReasonCode.NO_MATMUL)


def rewrite(graph: fx.Graph, match: Match, options: Options) -> fx.Node:
    """Replaces the match by one op call and returns that call."""
    collective = match.collective
    order = {node: index for index, node in enumerate(graph.nodes)}
    first_use = min(match.gathered.users, key=lambda one: order[one])
    weights = [mm.args[1] for mm in match.matmuls]
    for weight in weights:
        assert isinstance(weight, fx.Node)
        rewriting.hoist(weight, first_use)
    task = AllGatherMatmul(
        gather_dim=match.gather_dim,
        world_size=collective.world_size,
        group_name=collective.group_name,
        return_gathered=match.return_gathered,
        site=rewriting.UNNAMED_SITE,
        policy=rewriting.policy(options),
        num_weights=len(weights),
    )
    value = match.gathered.meta["val"]
    values = [mm.meta["val"] for mm in match.matmuls]
    values += [value] if match.return_gathered else []
    values.append(rewriting.new_token(value))
    with graph.inserting_before(first_use):
        call = rewriting.call_task(
            graph,
            task,
            (collective.operand, weights),
            (match.gather_dim, match.return_gathered),
            rewriting.copied_meta(match.matmuls[0]),
            values,
        )
        products = [
            rewriting.output(graph, call, index, rewriting.copied_meta(mm)) for index, mm in enumerate(match.matmuls)
        ]
        if match.return_gathered:
            gathered = rewriting.output(graph, call, len(weights), rewriting.copied_meta(match.gathered))
            match.gathered.replace_all_uses_with(gathered)
    for mm, product in zip(match.matmuls, products, strict=True):
        mm.replace_all_uses_with(product)
    rewriting.erase_unused(graph, [*match.steps, *match.matmuls])
    return call


def all_gather_matmul(graph: fx.Graph, *, options: Options) -> int:
    """Fuses every all-gather that provably feeds matmuls; returns how many were. The others get a reason."""
    count = 0
    for node in collectives(graph, ALL_GATHER):
        match = find_all_gather_matmul(node)
        if isinstance(match, Match) and PATTERN not in options.fusions:
            match = ReasonCode.DISABLED
        if refused(match):
            leave_alone(node, PATTERN, match)
            continue
        rewrite(graph, match, options)
        count += 1
    return count
