"""Each rank multiplies its own rows with a router, and the products are gathered while the rows are.

Before, as sequence parallelism has it in front of a mixture of experts:

    shard [B, S, K] -> all_gather -> wait -> split .. cat [B, W*S, K] -> reshape [B*W*S, K]
      -> mm(reshape, router [K, E]) [B*W*S, E] -> softmax, top-k, sort .. -> rows
      -> index(reshape, rows)

After:

    shard -> reshape [B*S, K] -> mm(reshape, router) -> reshape [B, S, E] -> all_gather -> wait -> split .. cat
      -> reshape [B*W*S, E] -> softmax, top-k, sort .. -> rows
    shard -> all_gather ................................ wait -> split .. cat [B, W*S, K] -> reshape -> index(.., rows)

The products are a small part of the bytes of the rows, and `matmul_all_gather` takes them. The rows are waited for
where the first op reads them, which needs what comes of the products. So they are sent while tokens are routed, and the
ranks read the same products. Casts between the gather and the router move with it. Each element of a product is the
same sum as before, up to its rounding (docs/algebra.md).

That is right only if all ranks have the same router, which no graph shows: a weight may as well be cut by columns. So
the ranks compare samples of it when the graph first runs, and if these differ the graph runs as Inductor alone would
run it. It does so too if all values of the router are equal, because ranks may train parts of it that begin alike. They
compare again from time to time, and raise DitronNotReplicated if routers differ that were equal.

All other conditions are facts of the graph that are equal on all ranks. It must not fire when
* another matmul reads the gathered rows: `all_gather_matmul` hides the gather behind it;
* the products are more than a quarter of the bytes of the rows, or there are fewer than `FEW_ROWS` rows;
* anything reads the rows that does not need the products first, or a part of them only (see `find_whole_gather`);
* the router is not an input of the graph, or a view or cast of one; or more than a row is added to its product;
* something is written into the router behind the start of the gather;
* more than one dimension of the shard is known only at run time, or W chunks of such a dimension are put together;
* the ranks do not meet before the code of the graph runs: it is not Python, or another graph calls it;
* the option `fusions` leaves out `matmul_all_gather`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ditron_inductor.device.facts import digest
from ditron_inductor.options import Options
from ditron_inductor.passes.forms.move_casts import CASTS, cast_alike
from ditron_inductor.passes.graph import proofs, replicated_inputs, rewriting
from ditron_inductor.passes.graph.biases import Matmul, read_matmul
from ditron_inductor.passes.graph.chunked_collectives import gathered, reshaped
from ditron_inductor.passes.graph.collectives import ALL_GATHER, collectives
from ditron_inductor.passes.normalize.share_gathers import Match as Gather
from ditron_inductor.passes.normalize.share_gathers import find_whole_gather
from ditron_inductor.task import schema
from ditron_inductor.task.exchange import GATHERED_PRODUCT
from ditron_inductor.task.nodes import matmul_of

aten = torch.ops.aten
NARROW = 4
"""The bytes of the rows over those of all products, at least."""
FEW_ROWS = 2048
SITE = "route_shards"
"""What the names of the comparisons begin with."""


@dataclass(frozen=True)
class Router:
    """A matmul of gathered rows that were cast by `casts`, one after the other."""

    node: fx.Node
    matmul: Matmul
    casts: tuple[fx.Node, ...]

    @property
    def given(self) -> list[fx.Node]:
        """What is needed beside the rows: the weight, and the bias if there is one."""
        return [self.matmul.weight] + ([] if self.matmul.bias is None else [self.matmul.bias])


@dataclass(frozen=True)
class Match:
    """A gather, the routers that read it, and the first op that reads it behind them, or that writes into the shard.
    between: the views and casts of what is gathered, in the order of the graph.
    """

    gather: Gather
    routers: tuple[Router, ...]
    between: tuple[fx.Node, ...]
    first_use: fx.Node


def find_route_shards(node: fx.Node) -> Match | None:
    """Proves that a gather feeds routers and what needs their products, as drawn above; None if it does not."""
    gather = find_whole_gather(node)
    if gather is None or not _can_be_written(gather):
        return None
    routers, others = list[Router](), list[fx.Node]()
    casts: dict[fx.Node, tuple[fx.Node, ...]] = {gather.gathered: ()}
    pending = [gather.gathered]
    while pending:
        source = pending.pop()
        for user in source.users:
            if proofs.keeps_order(user) or _is_cast(user):
                if user not in casts:
                    casts[user] = (*casts[source], user) if _is_cast(user) else casts[source]
                    pending.append(user)
                continue
            router = _read_router(user, source, casts[source], gather)
            if router is not None:
                routers.append(router)
            elif proofs.is_matmul(user):
                return None
            else:
                others.append(user)
    products = {router.node for router in routers}
    behind = all(user.op == "output" or proofs.depends_on(user, products) for user in others)
    if not routers or not others or not behind or not _are_narrow(gather.gathered, routers):
        return None
    between = sorted(set(casts) - {gather.gathered})
    routers.sort(key=lambda router: router.node)
    # What is sent is read until it has been waited for.
    writers = [writer for writer in proofs.writers(gather.collective.operand) if writer > node]
    return Match(gather, tuple(routers), tuple(between), min(others + writers))


def _can_be_written(gather: Gather) -> bool:
    """Returns whether products of the shard can be gathered as the shard is: see the sizes in the list above."""
    value, shard = proofs.fake(gather.gathered), proofs.fake(gather.collective.operand)
    rows = shard.shape[:-1]
    dynamic = [length for length in rows if not isinstance(length, int)]
    fits = gather.dim < value.ndim - 1 and shard.ndim == value.ndim and isinstance(shard.shape[-1], int)
    lies = proofs.row_major(value) and proofs.row_major(shard)
    return fits and lies and len(dynamic) <= 1 and (gather.dim == 0 or isinstance(rows[0], int))


def _is_cast(node: fx.Node) -> bool:
    value, source = proofs.tensor(node), proofs.tensor(node.args[0]) if node.args else None
    if node.target not in CASTS or set(node.kwargs) - {"dtype"} or value is None or source is None:
        return False
    return value.is_floating_point() and source.is_floating_point()


def _read_router(node: fx.Node, rows: fx.Node, casts: tuple[fx.Node, ...], gather: Gather) -> Router | None:
    """Reads a matmul of the gathered rows `rows` [T, K]; None if it is none that can be made of the shard."""
    matmul = read_matmul(node)
    if not isinstance(matmul, Matmul) or matmul.rows is not rows or matmul.weight is rows:
        return None
    start, columns = gather.collective.node, proofs.fake(gather.gathered).shape[-1]
    router = Router(node, matmul, casts)
    fits = all(isinstance(given, fx.Node) for given in router.given)
    early = fits and all(_input_of(given) is not None and rewriting.can_hoist(given, start) for given in router.given)
    if not early or not proofs.known_equal(proofs.fake(rows).shape[1], columns):
        return None
    writers = (writer for given in router.given for writer in proofs.writers(given))
    return None if any(start < writer < node for writer in writers) else router


def _input_of(node: fx.Node) -> fx.Node | None:
    """Returns the input of the graph that `node` is, or is a view, transpose or cast of; None if it is none."""
    while proofs.keeps_order(node) or node.target in proofs.TRANSPOSES or _is_cast(node):
        node = proofs.operand(node)
    return node if node.op == "placeholder" and proofs.tensor(node) is not None else None


def _are_narrow(gathered: fx.Node, routers: list[Router]) -> bool:
    """Returns whether the products of many rows are few bytes beside the rows."""
    value, products = proofs.fake(gathered), [proofs.fake(router.node) for router in routers]
    columns = [product.shape[1] for product in products]
    if not all(isinstance(length, int) for length in columns):
        return False
    sent = sum(length * product.element_size() for length, product in zip(columns, products, strict=True))
    few = proofs.known(products[0].shape[0] < FEW_ROWS)
    return not few and sent * NARROW <= value.shape[-1] * value.element_size()


def rewrite(graph: fx.Graph, match: Match) -> None:
    """Multiplies the shard, gathers the products, and waits for the rows where they are first read."""
    gather = match.gather
    start = gather.collective.node
    for router in match.routers:
        for given in router.given:
            rewriting.hoist(given, start)
        with graph.inserting_before(start):
            product = _product_of_shard(graph, router, gather.collective.operand)
            whole = gathered(graph, product, gather.dim, gather.collective.world_size, gather.collective.group_name)
            rows = reshaped(graph, whole, proofs.fake(router.node).shape)
        router.node.replace_all_uses_with(rows)
    rewriting.erase_unused(graph, [*match.between, *(router.node for router in match.routers)])
    remaining = set(graph.nodes)
    for step in (*gather.steps[1:], *match.between):
        if step in remaining and step < match.first_use:
            match.first_use.prepend(step)


def _product_of_shard(graph: fx.Graph, router: Router, shard: fx.Node) -> fx.Node:
    """Inserts the product of a router with the shard [.., K]; returns it [.., E]."""
    *sizes, depth = proofs.fake(shard).shape
    length = math.prod(sizes)
    rows = reshaped(graph, shard, (length, depth))
    for cast in router.casts:
        rows = cast_alike(graph, cast, rows)
    node = router.node
    args = (*node.args[:-2], rows, router.matmul.weight)
    columns = proofs.fake(node).shape[1]
    target: Any = node.target
    product = rewriting.call(graph, target, args, node, (length, columns))
    return reshaped(graph, product, (*sizes, columns))


def route_shards(graph: fx.Graph, *, options: Options) -> int:
    """Multiplies shards with routers in front of every gather where that is proved; returns how many gathers."""
    if matmul_of(GATHERED_PRODUCT) not in options.fusions or not replicated_inputs.can_run_plain(graph):
        return 0
    count = 0
    assumed: dict[str, dict[fx.Node, str]] = {}
    for node in collectives(graph, ALL_GATHER):
        match = find_route_shards(node)
        if match is not None:
            inputs = [root for router in match.routers for root in map(_input_of, router.given) if root is not None]
            places = {root: replicated_inputs.places([root]) for root in inputs}
            assumed.setdefault(match.gather.collective.group_name, {}).update(places)
            rewrite(graph, match)
            count += 1
    for group_name, roots in assumed.items():
        shapes = [tuple(map(str, proofs.fake(root).shape)) for root in roots]
        names = "\n".join(roots.values())
        replicated_inputs.compare(graph, list(roots), group_name, f"{SITE}/{digest(repr(shapes))}", names)
    return count


def assumed(graph: fx.Graph) -> dict[str, list[str]]:
    """Returns the names of the inputs that this pass takes to be replicated, by the name of the group."""
    found: dict[str, list[str]] = {}
    for node in graph.find_nodes(op="call_function", target=schema.overload("replicated")):
        bound = proofs.arguments(node)
        if bound["site"].startswith(SITE):
            found.setdefault(bound["group_name"], []).extend(str(root.target) for root in bound["same"])
    return found
