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

`addmm` with a row as its bias counts as mm: the bias is added behind the node (and absorbed, see absorb_epilogues).

All matmuls of one gather go into one node if their weights are available before the gathered tensor is first
used; ops that only prepare a weight (permute, cast) are moved up for that. A matmul whose weight cannot come so
early uses the node's gathered output instead.

A gathered tensor that is the second operand (a sharded parameter) is fused as the transposed problem, where the matmul
keeps the gathered dimension: it makes the columns of the product.

    shard [N/W, K] -> all_gather -> wait -> permute [K, N] -> mm(x [M, K], permute) [M, N]
    shard [K, N/W] -> all_gather -> wait -> split -> cat [K, N] -> mm(x, cat) [M, N]

become

    shard, [permute(x)] -> ditron.all_gather_matmul -> getitem 0 [N, M] -> permute [M, N]
    permute(shard), [permute(x)] -> the same

It must not fire when
* the chunks are not all of the W equal chunks, once, in order, or any of them is used otherwise;
* the matmul contracts the gathered dimension: a first operand that was gathered along its last one, or transposed (a
  weight gradient), or a second operand gathered along its first one;
* a view changes the last dimension before the matmul, or the other operand depends on the gathered tensor;
* there is a bias that is no row (addmm with a matrix, or with factors), a cast, a matmul with a matrix for each batch,
  or a dtype other than bfloat16, float16 and float32;
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
from ditron_inductor.passes.biases import read_matmul, with_bias, with_bias_column
from ditron_inductor.passes.collectives import ALL_GATHER, Collective, collectives, read_collective
from ditron_inductor.passes.reasons import ReasonCode, Refusal, Refused, leave_alone, refused
from ditron_inductor.task.nodes import AllGatherMatmul

PATTERN = AllGatherMatmul.kind


@dataclass(frozen=True)
class Matmul:
    """`mm` as view of gathered @ `operand`; if `transposed`, as (view of gathered @ operand.T).T."""

    mm: fx.Node
    operand: fx.Node
    transposed: bool


@dataclass(frozen=True)
class Match:
    """One gather and the matmuls that it feeds.

    `gathered` is the node that holds the tensor gathered along `gather_dim`, which is read as its transpose if it is
    `swapped` (gathered along the last dimension); `steps` all nodes from the collective to it, and its views; `matmuls`
    in graph order. `first_use` is the first node that reads elements of it.
    """

    collective: Collective
    gathered: fx.Node
    gather_dim: int
    swapped: bool
    steps: tuple[fx.Node, ...]
    matmuls: tuple[Matmul, ...]
    first_use: fx.Node
    return_gathered: bool


@dataclass(frozen=True)
class Gathered:
    """The node that holds the tensor gathered along `dim`, and all nodes from the collective to it."""

    node: fx.Node
    dim: int
    steps: tuple[fx.Node, ...]


def find_all_gather_matmul(node: fx.Node) -> Match | Refused:
    """Proves that the all-gather `node` feeds matmuls as drawn above, or says why not."""
    collective = read_collective(node)
    if isinstance(collective, ReasonCode):
        return collective
    # Dimension 0 first: its matmuls use the waited-for tensor itself. If there are none, look behind split and cat.
    direct = _match(collective, Gathered(collective.wait, 0, (node, collective.wait)))
    if isinstance(direct, Match):
        return direct
    cats = _cats_of_pieces(collective.wait)
    if cats:
        inner = _inner_gathered(collective, cats)
        return inner if refused(inner) else _match(collective, inner)
    partial = [piece for piece in _pieces_of(collective.wait) if proofs.feeds_matmul(piece)]
    return ReasonCode.CHUNKS_PARTIAL.at(partial[0]) if direct is ReasonCode.NO_MATMUL and partial else direct


def gathered_tensor(collective: Collective) -> Gathered | Refused:
    """The tensor gathered along an inner dimension if pieces of the waited-for tensor are put together, else that."""
    cats = _cats_of_pieces(collective.wait)
    if cats:
        return _inner_gathered(collective, cats)
    return Gathered(collective.wait, 0, (collective.node, collective.wait))


def _inner_gathered(collective: Collective, cats: list[fx.Node]) -> Gathered | Refused:
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
    return Gathered(cats[0], chunks.cat_dim, steps)


def _pieces_of(wait: fx.Node) -> list[fx.Node]:
    """The slices of the waited-for tensor, and the parts that it is split into."""
    pieces = [user for user in wait.users if user.target in proofs.SLICES]
    return pieces + [part for split in pieces for part in split.users if part.target in proofs.SLICES]


def _cats_of_pieces(wait: fx.Node) -> list[fx.Node]:
    """The cat nodes that put pieces of the waited-for tensor together, directly."""
    users = dict.fromkeys(user for piece in _pieces_of(wait) for user in piece.users)
    return [user for user in users if user.target is torch.ops.aten.cat.default]


@dataclass(frozen=True)
class _Use:
    """`user` reads the gathered tensor through `view`, which holds its transpose if `transposed`."""

    view: fx.Node
    user: fx.Node
    transposed: bool


def _match(collective: Collective, gathered: Gathered) -> Match | Refused:
    """Collects the matmuls on views of the gathered tensor that can be proved."""
    value = proofs.tensor(gathered.node)
    assert value is not None
    views, uses = _uses(gathered.node)
    order = {node: index for index, node in enumerate(collective.node.graph.nodes)}
    swapped = value.ndim == 2 and gathered.dim == 1
    refusals: list[Refusal] = []
    candidates: dict[fx.Node, Matmul] = {}
    for use in uses:
        code = _rejected(use, value, gathered, swapped)
        if code is None:
            second = use.transposed != swapped
            # addmm begins with what it adds.
            operand = use.user.args[-2 if second else -1]
            assert isinstance(operand, fx.Node)
            candidates[use.user] = Matmul(use.user, operand, second)
        else:
            refusals.append(code.at(use.user))
    if not candidates:
        return _strongest(refusals)
    first_use = min((use.user for use in uses), key=lambda one: order[one])
    matmuls: list[Matmul] = []
    for mm in sorted(candidates, key=lambda one: order[one]):
        candidate = candidates[mm]
        if proofs.depends_on(candidate.operand, {collective.wait}):
            refusals.append(ReasonCode.OPERAND_DEPENDS.at(candidate.operand))
        elif (pinned := rewriting.pinned(candidate.operand, first_use)) is not None:
            refusals.append(ReasonCode.OPERAND_LATE.at(pinned))
        else:
            matmuls.append(candidate)
    if not matmuls:
        return _strongest(refusals)
    fused = {one.mm for one in matmuls}
    return_gathered = any(use.user not in fused for use in uses)
    if return_gathered and not proofs.row_major(value):
        return ReasonCode.INTERMEDIATE_USED.at(next(use.user for use in uses if use.user not in fused))
    steps = tuple(dict.fromkeys([*gathered.steps, *views]))
    dim = 0 if swapped else gathered.dim
    return Match(collective, gathered.node, dim, swapped, steps, tuple(matmuls), first_use, return_gathered)


def _uses(gathered: fx.Node) -> tuple[list[fx.Node], list[_Use]]:
    """(views of the gathered tensor, also of transposed matrices, each before its own views; all other uses)."""
    views, uses = list(proofs.views_down(gathered)), list[_Use]()
    for view in list(views):
        for user in view.users:
            if user in views:
                continue
            if not _transposes_matrix(user):
                uses.append(_Use(view, user, False))
                continue
            turned = list(proofs.views_down(user))
            views += turned
            uses += [_Use(one, last, True) for one in turned for last in one.users if last not in turned]
    return views, uses


def _transposes_matrix(node: fx.Node) -> bool:
    value = proofs.tensor(node)
    return node.target in proofs.TRANSPOSES and value is not None and value.ndim == 2


def _rejected(use: _Use, value: torch.Tensor, gathered: Gathered, swapped: bool) -> ReasonCode | None:
    """Why a use of the gathered tensor (`value`) is no matmul that can be fused; None if it is one."""
    view, user = use.view, use.user
    if user.target in proofs.TRANSPOSES:
        # More than two dimensions: it moves rows (batch and sequence change places).
        return ReasonCode.LAYOUT if proofs.feeds_matmul(user) else ReasonCode.NO_MATMUL
    if user.target in proofs.SLICES:
        return _rejected_slice(user)
    if user.target in proofs.CASTS:
        return ReasonCode.CAST_BETWEEN if proofs.feeds_matmul(user) else ReasonCode.NO_MATMUL
    matmul = read_matmul(user)
    code = matmul if isinstance(matmul, ReasonCode) else None
    if code is not None and user.target is not torch.ops.aten.addmm.default:
        return code
    left, right = user.args[-2:]
    if view not in (left, right):
        return ReasonCode.NO_MATMUL  # it is what addmm adds
    if left is right:
        return ReasonCode.OPERAND_DEPENDS
    first = left is view
    if first != (use.transposed == swapped):
        return _contracted(first, gathered.dim == value.ndim - 1)
    if gathered.dim == value.ndim - 1 and not swapped:
        return ReasonCode.LAST_DIM
    if code is not None:
        return code
    rows = proofs.tensor(view)
    assert rows is not None
    if not proofs.known_equal(rows.shape[0 if use.transposed else 1], value.shape[-1]):
        return ReasonCode.LAYOUT
    # Rows follow from the number of elements, unless there are none.
    return None if proofs.known(value.shape[-1] > 0) else ReasonCode.SHAPE_UNPROVEN


def _contracted(first: bool, last_dim: bool) -> ReasonCode:
    """A matmul that contracts the gathered dimension: of a transposed first operand, or of a second one."""
    if last_dim:
        return ReasonCode.LAST_DIM
    return ReasonCode.WEIGHT_GRADIENT_ONLY if first else ReasonCode.GATHERED_WEIGHT


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
    collective, first_use = match.collective, match.first_use
    for one in match.matmuls:
        rewriting.hoist(one.operand, first_use)
    task = AllGatherMatmul(
        gather_dim=match.gather_dim,
        world_size=collective.world_size,
        group_name=collective.group_name,
        return_gathered=match.return_gathered,
        site=rewriting.UNNAMED_SITE,
        policy=rewriting.policy(options),
        num_weights=len(match.matmuls),
    )
    value = match.gathered.meta["val"]
    with graph.inserting_before(first_use):
        shard = rewriting.transposed(graph, collective.operand) if match.swapped else collective.operand
        weights = [rewriting.transposed(graph, one.operand) if one.transposed else one.operand for one in match.matmuls]
        values = [_in_order(one.mm, one.transposed) for one in match.matmuls]
        values += [_in_order(match.gathered, match.swapped)] if match.return_gathered else []
        values.append(rewriting.new_token(value))
        call = rewriting.call_task(
            graph,
            task,
            (shard, weights),
            (match.gather_dim, match.return_gathered),
            rewriting.copied_meta(match.matmuls[0].mm),
            values,
        )
        products = [
            rewriting.output(graph, call, index, rewriting.copied_meta(one.mm))
            for index, one in enumerate(match.matmuls)
        ]
        if match.return_gathered:
            gathered = rewriting.output(graph, call, len(weights), rewriting.copied_meta(match.gathered))
            if match.swapped:
                gathered = rewriting.transposed_back(graph, gathered, match.gathered)
            match.gathered.replace_all_uses_with(gathered)
            # Views of it may stand before the call: all uses stand behind it.
            for view in match.steps:
                if view < call and view is not match.gathered and proofs.depends_on(view, {gathered}):
                    first_use.prepend(view)
    for one, product in zip(match.matmuls, products, strict=True):
        if one.transposed:
            product = with_bias_column(product, one.mm)
            with graph.inserting_before(one.mm):
                product = rewriting.transposed_back(graph, product, one.mm)
        else:
            product = with_bias(product, one.mm)
        one.mm.replace_all_uses_with(product)
    turned = [one.operand for one in match.matmuls if one.operand.target in proofs.TRANSPOSES]
    rewriting.erase_unused(graph, [*match.steps, *(one.mm for one in match.matmuls), *turned])
    return call


def _in_order(node: fx.Node, transposed: bool) -> torch.Tensor:
    """The fake value of what the op returns for a matmul or for the gathered tensor."""
    value: torch.Tensor = node.meta["val"]
    if not transposed:
        return value
    return rewriting.fake_like(value, (value.shape[1], value.shape[0]), (value.shape[0], 1))


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
