"""A weight that holds gate and up side by side becomes two views of it, if one epilogue combines their products.

Before:

    shard, [weight [K, 2F]] -> ditron.all_gather_matmul -> getitem 0 [M, 2F] -> reshape [B, S, 2F]
      -> split -> getitem 0 [B, S, F] -> silu ..
               -> getitem 1 [B, S, F] -> mul by that

After:

    weight -> slice [K, F] twice
    shard, [slice, slice] -> ditron.all_gather_matmul -> getitem 0 [M, F] -> reshape [B, S, F] -> silu ..
                                                      -> getitem 1 [M, F] -> reshape [B, S, F] -> mul by that

Then absorb_epilogues makes the epilogue `cast(silu(mm0), bf16) * mm1`: one program has both halves of the product in
its registers. A view costs nothing.

A bias of the whole product becomes two views of it likewise: `silu(mm0 + row(x0)) * (mm1 + row(x1))`.

The same is done for the weight of `expert_projections`, also if gate and up lie in alternate columns of it (see
split_columns.py), and for a plain `mm` or `addmm` of a few rows, which
`projections` then takes. It is tried on a copy of the graph. A product whose parts no epilogue combines stays one
product, such as Q, K and V in one weight.

It must not fire when
* the product is not cut directly and completely into two halves of its columns, or is used as a whole too, as by a
  backward that splits it again: there two products were measured as no faster, see docs/deleted.md;
* the width of the product is dynamic;
* the result feeds something that Inductor fuses with it, see absorb_epilogues;
* the strategy is `library`, for which one wide matmul is faster than two.

Only one fact counts, namely that the halves are equally wide: if one rank combines them element by element, all ranks
do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.absorb.absorb_epilogues import absorb_epilogues
from ditron_inductor.passes.forms import split_columns
from ditron_inductor.passes.fuse.projections import projections
from ditron_inductor.passes.graph import proofs, rewriting
from ditron_inductor.passes.graph.biases import Matmul, read_matmul
from ditron_inductor.passes.graph.launches import is_task
from ditron_inductor.task import schema
from ditron_inductor.task.nodes import FEW_PROJECTED_ROWS, SharedOperand

aten = torch.ops.aten

HALVES = 2
RESHAPES: frozenset[object] = frozenset({aten.reshape.default, aten.view.default, aten._unsafe_view.default})


@dataclass(frozen=True)
class Match:
    """A product, an output of an `all_gather_matmul` or an `mm`, and its halves: each a node, first or second. steps:
    from the product to what is cut, views and the sum with a bias. view: the last view among them, in the shape of the
    halves but for their width; the product itself if there is none.
    """

    product: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    steps: tuple[fx.Node, ...]
    view: fx.Node
    halves: tuple[tuple[fx.Node, int], ...]

    @property
    def width(self) -> int:
        """The number of columns of each half."""
        return int(self.product.meta["val"].shape[-1]) // HALVES


def find_split(product: fx.Node) -> Match | None:
    """Proves that all uses of a product are its two halves; None if they are not."""
    weight, bias = _operands(product)
    value = proofs.tensor(product)
    if weight is None or value is None or not isinstance(value.shape[-1], int) or value.shape[-1] % HALVES:
        return None
    steps, view = [product], product
    while (only := proofs.sole_user(steps[-1])) is not None:
        if only.target in RESHAPES:
            if not proofs.known_equal(only.meta["val"].shape[-1], value.shape[-1]):
                return None
            view = only
        elif bias is None and (row := _added_row(only, steps[-1])) is not None:
            bias = row
        else:
            break
        steps.append(only)
    halves = []
    for part in _parts(steps[-1]):
        half = _half(part, steps[-1], value.shape[-1] // HALVES)
        if half is None:
            return None
        halves.append((part, half))
    if {half for _, half in halves} != set(range(HALVES)):
        return None
    return Match(product, weight, bias, tuple(steps), view, tuple(halves))


def _added_row(node: fx.Node, product: fx.Node) -> fx.Node | None:
    """The row of its own dtype that `node` adds to a product; None if it does something else."""
    if node.target is not aten.add.Tensor or node.kwargs.get("alpha", 1) != 1 or len(node.all_input_nodes) != 2:
        return None
    (other,) = (operand for operand in node.all_input_nodes if operand is not product)
    row, value = proofs.tensor(other), proofs.tensor(node)
    if row is None or value is None or not row.dtype == value.dtype == product.meta["val"].dtype:
        return None
    same = proofs.same_shape(product.meta["val"].shape, value.shape)
    return other if same and proofs.is_row(row, value.shape[-1]) else None


def _operands(product: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """Returns (second operand, bias) of a product that may be split: a site's, or a matmul's of a few rows."""
    weight: Any = None
    if product.target in (aten.mm.default, aten.addmm.default):
        matmul = read_matmul(product)
        if not isinstance(matmul, Matmul):
            return None, None
        rows = product.meta["val"].shape[0]
        few = isinstance(rows, int) and 0 < rows <= FEW_PROJECTED_ROWS
        return (matmul.weight, matmul.bias) if few else (None, None)
    if product.target is getitem and isinstance(product.args[0], fx.Node):
        call, index = product.args[0], product.args[1]
        if isinstance(schema.node_of(call), SharedOperand):
            weights = schema.operand(call, "weights")
            weight = weights[index] if index in range(len(weights)) else None
    return weight if isinstance(weight, fx.Node) else None, None


def _parts(view: fx.Node) -> Iterator[fx.Node]:
    """The users of `view`, and in the place of a split its parts."""
    for user in view.users:
        if user.target in (aten.split.Tensor, aten.split_with_sizes.default):
            yield from user.users
        else:
            yield user


def _half(part: fx.Node, view: fx.Node, width: int) -> int | None:
    """Returns which half of the columns of `view` a node is, 0 or 1; None if it is something else."""
    found = proofs.piece(part)
    value = proofs.tensor(part)
    whole = proofs.tensor(view)
    if found is None or value is None or whole is None or found.source is not view:
        return None
    if found.dim != whole.ndim - 1 or not proofs.known_equal(value.shape[-1], width):
        return None
    return next((half for half in range(HALVES) if proofs.known_equal(found.start, half * width)), None)


def rewrite(graph: fx.Graph, product: fx.Node) -> tuple[fx.Node, ...]:
    """Replaces a product that `find_split` accepts by two; returns the views of its weight."""
    # Match again: a product may have halves of another product as operands, which were replaced when that one was cut.
    match = find_split(product)
    assert match is not None, product
    width = match.width
    call = product.args[0] if product.target is getitem else product
    assert isinstance(call, fx.Node)
    with graph.inserting_before(call):
        views = tuple(_columns(graph, match.weight, half * width, width) for half in range(HALVES))
        if call is product:
            made = [_mm(graph, product, view, width) for view in views]
        else:
            made = _outputs(graph, call, product, views, width)
    for part, half in match.halves:
        with graph.inserting_before(part):
            shaped = _shaped(graph, made[half], match.view, part)
            part.replace_all_uses_with(_biased(graph, shaped, match.bias, half * width, width, part))
    parts = [part for part, _ in match.halves]
    splits = [user for user in match.steps[-1].users if user not in parts]
    rewriting.erase_unused(graph, [*parts, *splits, *match.steps])
    if call is not product:
        rewriting.erase_unused(graph, [*call.users, call])
    return views


def _columns(graph: fx.Graph, weight: fx.Node, start: int, width: int) -> fx.Node:
    """Inserts a view of some columns of a matrix, or of some elements of a row."""
    value: torch.Tensor = weight.meta["val"]
    args = (weight, value.ndim - 1, start, start + width)
    shape = (*value.shape[:-1], width)
    return rewriting.call(graph, aten.slice.Tensor, args, weight, shape, value.stride(), name="columns")


def _biased(graph: fx.Graph, half: fx.Node, bias: fx.Node | None, start: int, width: int, part: fx.Node) -> fx.Node:
    """Inserts the sum of a half and its columns of the bias; the half itself if there is none."""
    if bias is None:
        return half
    args, value = (half, _columns(graph, bias, start, width)), half.meta["val"]
    return rewriting.call(
        graph, aten.add.Tensor, args, part, value.shape, value.stride(), dtype=value.dtype, name="biased"
    )


def _mm(graph: fx.Graph, product: fx.Node, weight: fx.Node, width: int) -> fx.Node:
    matmul = read_matmul(product)
    assert isinstance(matmul, Matmul)
    node = graph.create_node("call_function", aten.mm.default, (matmul.rows, weight), name="half")
    node.meta.update(rewriting.copied_meta(product))
    node.meta["val"] = _product(product, width)
    return node


def _product(product: fx.Node, width: int) -> torch.Tensor:
    value: torch.Tensor = product.meta["val"]
    return rewriting.fake_like(value, (value.shape[0], width), (width, 1))


def _outputs(graph: fx.Graph, call: fx.Node, product: fx.Node, views: tuple[fx.Node, ...], width: int) -> list[fx.Node]:
    """Makes a call like `call` with `views` for the product's weight: its products. Other outputs are replaced."""
    operands = schema.operands_from_call(call)
    weights, split = operands["weights"], product.args[1]
    assert isinstance(split, int)
    operands["weights"] = [*weights[:split], *views, *weights[split + 1 :]]
    values = list(call.meta["val"])
    values[split : split + 1] = [_product(product, width) for _ in views]
    task = replace(schema.node_from_call(call.target, call.args), num_weights=len(operands["weights"]))
    new = rewriting.call_task(graph, task, operands, call, values, call.args[schema.TOKEN])
    for user in list(call.users):
        index = user.args[1]
        assert isinstance(index, int)
        if index != split:
            moved = index if index < split else index + HALVES - 1
            user.replace_all_uses_with(rewriting.output(graph, new, moved, user))
    return [rewriting.output(graph, new, split + half, product) for half in range(HALVES)]


def _shaped(graph: fx.Graph, half: fx.Node, view: fx.Node, part: fx.Node) -> fx.Node:
    """Inserts the view of a half in the shape of `part`; the half itself if it has that."""
    value: torch.Tensor = part.meta["val"]
    if view.target not in RESHAPES:
        return half
    sizes: Any = view.args[1]
    args = (half, [*sizes[:-1], half.meta["val"].shape[-1]])
    return rewriting.call(graph, aten.reshape.default, args, part, value.shape)


def _combines(views: tuple[fx.Node, ...]) -> bool:
    """Returns whether one epilogue makes something of the products with all of these weights."""
    for call in views[0].users:
        node = schema.node_of(call)
        if not isinstance(node, SharedOperand):
            continue
        weights, parsed = schema.operand(call, "weights"), node.parsed
        if parsed is not None and all(view in weights for view in views):
            indices = {weights.index(view) for view in views}
            return any(indices <= set(group.products) for group in parsed.groups())
    return False


def split_weights(graph: fx.Graph, *, options: Options) -> int:
    """Splits every weight if an epilogue then combines the halves of its product, and returns how many."""
    if options.strategy == "library" or not any(is_task(node) for node in graph.nodes):
        return 0
    found: dict[object, Match] = {}
    for node in graph.nodes:
        match = find_split(node)
        if match is not None:
            # One product of a call at a time: the others are made anew with it.
            found.setdefault(node.args[0] if node.target is getitem else node, match)
    columns = [pair for node in graph.nodes if (pair := split_columns.find_columns(node)) is not None]
    if not found and not columns:
        return 0
    copy, twins = rewriting.copied(graph)
    views = {}
    for match in found.values():
        views[match.product] = rewrite(copy, twins[match.product])
    weights = {}
    for pair in columns:
        twin = split_columns.find_columns(twins[pair.product])
        weights[pair.product] = None if twin is None else split_columns.rewrite(copy, twin)
    projections(copy, options=options)
    absorb_epilogues(copy, options=options)
    taken = [match for match in found.values() if _combines(views[match.product])]
    for match in taken:
        rewrite(graph, match.product)
    both = [pair for pair in columns if (made := weights[pair.product]) is not None and split_columns.combines(made)]
    for pair in both:
        again = split_columns.find_columns(pair.product)
        assert again is not None, pair.product
        split_columns.rewrite(graph, again)
    return len(taken) + len(both)
