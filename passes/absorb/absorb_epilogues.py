"""Pointwise ops behind an `all_gather_matmul`, a reduction of matmuls, or a node that communicates nothing, become its
epilogue.

Before:

    shard, [gate, up] -> ditron.all_gather_matmul -> getitem 0 -> reshape -> float -> neg, exp, add 1, div -> bfloat16
                                                  -> getitem 1 -> reshape -> mul by that
After:

    shard, [gate, up] -> ditron.all_gather_matmul(.., epilogue="cast(silu(mm0), bf16) * mm1") -> getitem 0 -> reshape

and likewise, of the sum after its reduction:

    a, b -> ditron.matmul_reduce_scatter -> getitem 0 -> add(residual, that)
    a, b -> ditron.matmul_reduce_scatter(.., extras=[residual], epilogue="full(x0) + mm0") -> getitem 0

An epilogue that `prepare_products` has put in front of the reduction stays there: "pre: mm0 * column(x0); full(x1) +
mm0".

A mask of the slots elsewhere behind a call of experts is a part of it, since it has zeros there.

A value in between that is used elsewhere too, such as a product that the backward needs, becomes one more output.

An absorbed op is removed from Inductor's kernels. So an op may be absorbed only if Inductor's kernel would read the
products from memory, compute these ops and end. Then `tile` saves that kernel, and `library` runs a similar one. It
must not fire when
* the result, or a product, feeds anything that Inductor fuses with it (another pointwise op, a reduction, a copy): only
  matmuls, attention, collectives, our ops and the graph's outputs end a chain;
* another operand is not stored anyhow (a placeholder, a matmul's result, ..): Inductor computes it on the way;
* another operand depends on the products, or cannot be computed before the node;
* an op is not in `expressions.POINTWISE`, changes the shape by broadcasting, or its result is not contiguous;
* products of more than two weights, or of different widths, would be combined;
* it reads what the weights of slots elsewhere have set to 0 (see graph/slots_elsewhere.py): the outputs of these slots
  are 0, whatever the epilogue makes of that.

It runs behind all_reduce_rms_norm: a residual sum that a norm reads belongs to that node, or is left to Inductor with
the norm.

The pass looks only at ops and shapes on the gathered side, which are equal on all ranks. The widths of weights may
differ between ranks, but whether two of them are equal does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from operator import getitem
from typing import Any, cast

import torch
from torch import fx

from ditron_inductor.options import Options
from ditron_inductor.passes.absorb.expert_tables import table_of_experts
from ditron_inductor.passes.graph import expressions, proofs, rewriting, slots_elsewhere
from ditron_inductor.passes.graph.launches import launches_collective
from ditron_inductor.passes.graph.rows_behind import rows_before_mask
from ditron_inductor.task import schema
from ditron_inductor.task.epilogue import MAX_TOGETHER, Epilogue, Expression, Extra, ProductTerm, mapped, products, walk
from ditron_inductor.task.nodes import ExpertProjections, ProductsOfExperts, WithEpilogue
from ditron_inductor.task.verify import local_calls, task_calls

aten = torch.ops.aten

MAX_PARTS = 64
"""The most terms that one expression may have. A value that is used twice is written twice."""
MAX_EXTRAS = 8
MAX_OUTPUTS = 8
ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "flex_attention")
RESHAPING: frozenset[object] = proofs.MAY_KEEP_ORDER - {aten.clone.default} | proofs.SLICES


@dataclass
class EpilogueChain:
    """The pointwise ops behind one call. plain: products and their views; values: every node that can be computed in
    the epilogue, views included; extras: the tensors that it takes, with their kinds, by number; zeros: the values, and
    views of them, that are 0 in the rows of slots elsewhere and may be used there.
    """

    call: fx.Node
    plain: dict[fx.Node, int]
    values: dict[fx.Node, Expression]
    groups: list[frozenset[int]]
    extras: dict[tuple[fx.Node, str], int] = field(default_factory=dict)
    zeros: set[fx.Node] = field(default_factory=set)


@dataclass(frozen=True)
class Match:
    """The nodes whose values become outputs of `call`, products that are used themselves included, with their
    expressions; the extra tensors by index; and all nodes that the epilogue may stand for.
    """

    call: fx.Node
    outputs: dict[fx.Node, Expression]
    extras: tuple[fx.Node, ...]
    covered: frozenset[fx.Node]


def find_epilogue(call: fx.Node, task: WithEpilogue) -> Match | None:
    """Returns what can be absorbed into `call` with a gain, as drawn above; None if there is nothing."""
    known = task.parsed
    if known is not None and (known.pre is None or known.behind is not None):
        return None
    chain = _read_chain(call, task)
    kept = _closed(chain)
    outputs = {
        node: chain.values[node]
        for node in call.graph.nodes
        if node in kept and not _is_view(node, chain) and _is_needed(node, kept, chain)
    }
    computed = [node for node in outputs if node not in chain.plain]
    if not computed or len(outputs) > MAX_OUTPUTS:
        return None
    # What is computed first, then the products themselves.
    ordered = [*computed, *(node for node in outputs if node in chain.plain)]
    of_node = call.meta["val"][0].dtype
    read = {
        node: outputs[node]
        if node in chain.plain
        else expressions.as_output(outputs[node], proofs.fake(node).dtype, of_node)
        for node in ordered
    }
    if {index for output in read.values() for index in products(output)} != set(range(task.num_operands)):
        return None
    used = {number: None for output in read.values() for number in _extras(output)}
    numbers = {number: task.num_extras + index for index, number in enumerate(used)}
    by_number = {number: node for (node, _), number in chain.extras.items()}

    def renumbered(operand: Expression) -> Expression:
        return Extra(operand.kind, numbers[operand.index]) if isinstance(operand, Extra) else operand

    return Match(
        call,
        {node: mapped(output, renumbered) for node, output in read.items()},
        tuple(by_number[number] for number in used),
        frozenset(kept),
    )


NO_TEXT, WITH_READER = "no_text", "computed_with_its_reader"
"""Why an op stays outside of the node: no text for it, or Inductor computes it in one kernel with its reader."""


def find_left_outside(call: fx.Node, task: WithEpilogue) -> tuple[str, fx.Node, fx.Node | None] | None:
    """Returns why the pointwise ops behind a call without an epilogue are none, the first of these ops, and the reader
    with which Inductor computes them, if that is the reason. None if there are no such ops, or if there is an epilogue.
    """
    if task.parsed is not None and (task.parsed.pre is None or task.parsed.behind is not None):
        return None
    chain = _read_chain(call, task)
    for node in call.graph.nodes:
        pointwise = node.target in expressions.POINTWISE or torch.Tag.pointwise in getattr(node.target, "tags", ())
        if pointwise and not chain.plain.keys().isdisjoint(node.all_input_nodes):
            if node not in chain.values:
                return NO_TEXT, node, None
            readers = [user for value in chain.values for user in value.users if user not in chain.values]
            open_ones = [user for user in readers if not _ends(user)]
            return (WITH_READER, node, open_ones[0]) if open_ones else None
    return None


def _read_chain(call: fx.Node, task: WithEpilogue) -> EpilogueChain:
    """Everything behind the products that an epilogue can compute."""
    plain = {
        user: int(user.args[1])  # type: ignore[arg-type]
        for user in call.users
        if user.target is getitem and user.args[1] in range(task.num_operands)
    }
    chain = EpilogueChain(call, plain, {node: ProductTerm(index) for node, index in plain.items()}, [])
    for node in call.graph.nodes:
        if node.op != "call_function" or node in chain.values or not any(arg in chain.values for arg in node.args):
            continue
        value, source = proofs.tensor(node), node.args[0]
        if value is None or not proofs.row_major(value):
            continue
        if proofs.keeps_order(node) and source in chain.values:
            chain.values[node] = chain.values[source]
            if source in chain.plain:
                chain.plain[node] = chain.plain[source]
            if source in chain.zeros:
                chain.zeros.add(node)
        elif (rows := rows_before_mask(node, chain.call)) in chain.values:
            # In these rows the outputs are 0, whatever the epilogue makes of them.
            chain.values[node] = chain.values[rows]
            chain.zeros.add(node)
        elif node.target in expressions.POINTWISE and chain.zeros.isdisjoint(node.all_input_nodes):
            _read_pointwise(node, value, chain)
            if node in chain.values and _is_zero_elsewhere(node, chain, task):
                chain.zeros.add(node)
    return chain


def _is_zero_elsewhere(node: fx.Node, chain: EpilogueChain, task: WithEpilogue) -> bool:
    """Returns whether a value of the chain is 0 in the rows of slots elsewhere."""
    if not isinstance(task, ProductsOfExperts) or not task.has_zeros:
        return False
    ids = proofs.views_up(schema.operand(chain.call, "experts"))[-1]
    num_experts = proofs.fake(schema.operand(chain.call, "weights")[0]).shape[0]
    rows = [operand for operand in node.all_input_nodes if operand in chain.values]
    return any(slots_elsewhere.is_zero_elsewhere(node, one, ids, num_experts) for one in rows)


def _read_pointwise(node: fx.Node, value: torch.Tensor, chain: EpilogueChain) -> None:
    """Adds the value of a pointwise op to the chain if an epilogue can compute it."""
    inputs = [operand for operand in node.all_input_nodes if operand in chain.values]
    together = frozenset(index for operand in inputs for index in products(chain.values[operand]))
    for group in chain.groups:
        together |= group if group & together else frozenset()
    widths = [_width(chain, index) for index in together]
    if len(together) > MAX_TOGETHER or not all(proofs.known_equal(width, widths[0]) for width in widths):
        return
    if not all(proofs.same_shape(operand.meta["val"].shape, value.shape) for operand in inputs):
        return
    before = dict(chain.extras)

    def read(operand: fx.Node) -> Expression | None:
        if operand in chain.values:
            return chain.values[operand]
        return _read_extra(operand, value, widths[0], chain)

    expression = expressions.read_pointwise(node, read)
    if expression is None or sum(1 for _ in walk(expression)) > MAX_PARTS or len(chain.extras) > MAX_EXTRAS:
        chain.extras = before
        return
    chain.values[node] = expression
    chain.groups = [group for group in chain.groups if not group & together] + [together]


def _read_extra(node: fx.Node, value: torch.Tensor, width: Any, chain: EpilogueChain) -> Expression | None:
    """An operand that is no part of the chain: an extra tensor, or a pointwise op of such; None if it is neither."""
    operand = proofs.fake(node)
    if operand.device != value.device:
        return None
    table = table_of_experts(node, chain.call, width) if value.ndim == 2 else None
    if table is not None and not _is_late(table[0], chain):
        return Extra(table[1], chain.extras.setdefault(table, len(chain.extras)))
    if not is_stored(node):
        if node.target not in expressions.POINTWISE:
            return None
        return expressions.read_pointwise(node, lambda operand: _read_extra(operand, value, width, chain))
    kind = expressions.spread(operand, value, width)
    if not kind or _is_late(node, chain) or not proofs.row_major(operand):
        return None
    return Extra(kind, chain.extras.setdefault((node, kind), len(chain.extras)))


def _is_late(node: fx.Node, chain: EpilogueChain) -> bool:
    """Returns whether a tensor cannot be computed before the call."""
    return proofs.depends_on(node, {chain.call}) or rewriting.pinned(node, chain.call) is not None


def is_stored(node: fx.Node) -> bool:
    """Returns whether a tensor is in memory whatever Inductor fuses."""
    source = proofs.views_up(node)[-1]
    if source.target is aten.slice.Tensor and is_stored(source.all_input_nodes[0]):
        return True
    if source.op != "call_function" or source.target in proofs.MATMULS or source.target is getitem:
        return source.target is not getitem or _launches(source.args[0])
    return _launches(source) or any(_ends(user) for user in source.users)


def fits_an_epilogue(node: fx.Node, readers: set[fx.Node]) -> bool:
    """Returns whether a call of experts can compute `node` in its epilogue, if the `readers` of it become a call that
    takes it from memory.
    """
    for call in proofs.reached([node], _read_in_epilogue):
        task = schema.node_of(call)
        if not isinstance(task, ExpertProjections) or task.parsed is not None:
            continue
        chain = _read_chain(call, task)
        if node in chain.values and products(chain.values[node]) == set(range(task.num_operands)):
            made = {value for value in chain.values if proofs.depends_on(node, {value})}
            left = {user for value in made for user in value.users} - made
            return left <= readers
    return False


def _read_in_epilogue(node: fx.Node) -> list[fx.Node]:
    """Returns the operands of what may be computed in an epilogue, and the call of an output; nothing of others."""
    computed = node.target in expressions.POINTWISE or node.target is aten.where.self
    return node.all_input_nodes if computed or node.target is getitem or proofs.keeps_order(node) else []


def _launches(node: object) -> bool:
    """Returns whether a node runs a kernel that is not Inductor's."""
    if not isinstance(node, fx.Node) or not isinstance(node.target, torch._ops.OpOverload):
        return False
    waits = node.target.namespace in ("_c10d_functional", schema.NAMESPACE)
    attends = node.target._opname.startswith(ATTENTION)
    return waits or attends or launches_collective(node) or node.target in (*proofs.MATMULS, proofs.GROUPED)


def _closed(chain: EpilogueChain) -> set[fx.Node]:
    """The nodes left of the chain when no absorbed value or product of them feeds what Inductor would fuse with it."""
    kept = set(chain.values)
    while True:
        is_open = {node for node in kept if not all(user in kept or _ends(user) for user in node.users)}
        again = {chain.plain[node] for node in is_open if node in chain.plain}
        lost = {node for node in kept - chain.plain.keys() if node in is_open or products(chain.values[node]) & again}
        if not lost:
            return kept
        kept -= lost


def _ends(user: fx.Node) -> bool:
    """Returns whether Inductor computes nothing of `user` in the kernel that makes its operand."""
    if user.op == "output" or _launches(user):
        return True
    return user.target in RESHAPING and all(_ends(reader) for reader in user.users)


def _is_view(node: fx.Node, chain: EpilogueChain) -> bool:
    return node.args[0] is not chain.call and proofs.keeps_order(node)


def _is_needed(node: fx.Node, kept: set[fx.Node], chain: EpilogueChain) -> bool:
    """Returns whether something outside of the chain uses a value, or a view of it."""
    return any(user not in kept or (_is_view(user, chain) and _is_needed(user, kept, chain)) for user in node.users)


def _width(chain: EpilogueChain, index: int) -> Any:
    return chain.call.meta["val"][index].shape[-1]


def _extras(expression: Expression) -> list[int]:
    return [term.index for term in walk(expression) if isinstance(term, Extra)]


def rewrite(graph: fx.Graph, match: Match, task: WithEpilogue) -> fx.Node:
    """Replaces the call by one with the epilogue, and returns that."""
    call = match.call
    for extra in match.extras:
        rewriting.hoist(extra, call)
    operands, known = schema.operands_from_call(call), task.parsed
    # The part that is computed before the reduction stays.
    extras = [*operands.get("extras", ()), *match.extras]
    epilogue = Epilogue(tuple(match.outputs.values()), None if known is None else known.pre)
    epilogue.verify(task.num_operands, len(extras), reduces=task.reduces, of_experts=task.of_experts)
    old = call.meta["val"]
    values = []
    for node, made in match.outputs.items():
        like = old[min(products(made))]
        values.append(rewriting.fake_like(like, tuple(like.shape), tuple(like.stride()), proofs.fake(node).dtype))
    values += old[task.num_operands :]
    with graph.inserting_before(call):
        with_epilogue: Any = replace(cast(Any, task), num_extras=len(extras), epilogue=epilogue.text())
        given, token = {**operands, "extras": extras}, call.args[schema.TOKEN]
        new = rewriting.call_task(graph, with_epilogue, given, call, values, token)
        outputs = [rewriting.output(graph, new, index, node) for index, node in enumerate(match.outputs)]
        for user in list(call.users):
            # The gathered tensor.
            if user not in match.covered:
                assert isinstance(user.args[1], int)
                index = user.args[1] - task.num_operands + len(outputs)
                user.replace_all_uses_with(rewriting.output(graph, new, index, user))
    # All outputs are made before any is used, because the chains to them lead through each other.
    viewed = [_viewed(graph, node, output, match) for node, output in zip(match.outputs, outputs, strict=True)]
    for node, output in zip(match.outputs, viewed, strict=True):
        node.replace_all_uses_with(output)
    rewriting.erase_unused(graph, [*match.covered, *call.users])
    # Erase also what was computed on the way to an operand.
    on_the_way = (*expressions.POINTWISE, aten.index.Tensor, aten.slice.Tensor)
    rewriting.erase_unused(graph, [call, *(node for node in graph.nodes if node.target in on_the_way)])
    return new


def _viewed(graph: fx.Graph, node: fx.Node, output: fx.Node, match: Match) -> fx.Node:
    """`output` in the shape of `node`: through the views on a way from a product to it."""
    views: list[fx.Node] = []
    current = node
    while current.args[0] is not match.call:
        if proofs.keeps_order(current):
            views.append(current)
        current = next(operand for operand in current.all_input_nodes if operand in match.covered)
    for view in reversed(views):
        shape, strides = tuple(view.meta["val"].shape), tuple(view.meta["val"].stride())
        if proofs.same_shape(tuple(output.meta["val"].shape), shape):
            continue
        with graph.inserting_before(node):
            copy = graph.create_node("call_function", view.target, (output, *view.args[1:]), dict(view.kwargs))
        copy.meta.update(rewriting.copied_meta(view))
        copy.meta["val"] = rewriting.fake_like(output.meta["val"], shape, strides, output.meta["val"].dtype)
        output = copy
    return output


def absorb_epilogues(graph: fx.Graph, *, options: Options) -> int:
    """Gives every call the epilogue that provably follows it; returns how many got one."""
    count = 0
    for call, task in _calls(graph):
        match = find_epilogue(call, task)
        if match is not None:
            rewrite(graph, match, task)
            count += 1
    return count


def _calls(graph: fx.Graph) -> list[tuple[fx.Node, WithEpilogue]]:
    """Everything that may have an epilogue."""
    calls = [*task_calls(graph), *local_calls(graph)]
    return [(call, node) for call, node in calls if isinstance(node, WithEpilogue)]
