"""Proofs about the slots of other ranks' experts, in graphs that multiply them all the same.

    topk -> getitem 1 [T, k], the experts of all ranks
    where(ne(div(that, E, floor), RANK), E, remainder(that, E)) -> reshape [S]        ids: E for an expert elsewhere
    clamp(ids, 0, E - 1) [S]                               the experts of the weights that are copied for each slot
    where(ge(ids, E), 0, weights of the slots) [S] -> unsqueeze [S, 1] -> mul(what expert E - 1 returns [S, N], that)

With expert parallelism each rank has E of the experts. A slot of an expert elsewhere is multiplied by the weights of
expert E - 1, and what comes of that is multiplied by 0 in the end. So it need not be computed: zeros may stand in its
place, where no op makes something of them that is not finite.

The releases 5.16 to 5.22 of `transformers` write, with elsewhere = ne(div(that, E, floor), RANK):

    fmod(where(elsewhere, -1, that), E)                    -1 for an expert elsewhere
    where(eq(fmod, -1), E, fmod) -> reshape [S]            ids
    where(elsewhere, 0, weights of the slots) -> reshape [S]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import getitem

import torch
from torch import fx

from ditron_inductor.passes.graph import expert_rows, proofs
from ditron_inductor.passes.graph.expressions import POINTWISE, POWER
from ditron_inductor.passes.graph.sorts import quotient

aten = torch.ops.aten
SPLITS: frozenset[object] = frozenset({aten.split.Tensor, aten.split_with_sizes.default})
REMAINDERS: frozenset[object] = frozenset({aten.remainder.Scalar, aten.fmod.Scalar})
QUOTIENTS: frozenset[object] = frozenset({aten.div.Tensor, POWER})
BY_ROW: frozenset[object] = frozenset({*POINTWISE, aten.where.self, aten.bmm.default}) - QUOTIENTS
"""Ops whose results have rows that depend on the same rows of their operands only, if all have as many dimensions. A
bmm has a batch for each row. Of zeros they make numbers.
"""


def ids_of(experts: fx.Node, num_experts: int) -> tuple[fx.Node, fx.Node] | None:
    """Returns (ids [S], the indices of a topk) if `experts` [S] are the experts of this rank, `num_experts` in number,
    and any other ones for slots whose id is that number or more; None if they are not. The ids of the other slots of a
    token differ, as the indices of a topk do, and lie between 0 and `num_experts` - 1.
    """
    marked = expert_rows.unclamped(experts, num_experts)
    chosen = None if marked is None else choices_behind(marked, num_experts)
    ids = None if marked is None else expert_rows.before_clamps(experts, marked)
    return None if chosen is None or ids is None else (ids, chosen)


def choices_behind(marked: fx.Node, num_experts: int) -> fx.Node | None:
    """Returns the indices of a topk of which `marked` has the experts of this rank, and `num_experts` or more in the
    place of other ones; None if it is made otherwise.
    """
    parts = _elsewhere(marked, num_experts)
    return None if parts is None else parts[1]


def _elsewhere(marked: fx.Node, num_experts: int) -> tuple[fx.Node, fx.Node] | None:
    """Returns (where the choices are not on this rank, the choices) behind `marked`, see `choices_behind`."""
    if marked.target is not aten.where.self:
        return None
    condition, instead, own = marked.args
    if not isinstance(instead, fx.Node) or not num_experts <= expert_rows.range_of(instead).least:
        return None
    assert isinstance(condition, fx.Node)
    if not isinstance(own, fx.Node) or own.target not in REMAINDERS or own.args[1] != num_experts:
        return None
    chosen = proofs.operand(own)
    if own.target is aten.fmod.Scalar:
        # Whatever is divided by 1 has no remainder, -1 neither.
        if num_experts == 1 or condition.target is not aten.eq.Scalar or condition.args != (own, -1):
            return None
        if chosen.target is not aten.where.self or not proofs.is_full(chosen.args[1], -1):
            return None
        condition, indices = proofs.operand(chosen), chosen.args[2]
        assert isinstance(indices, fx.Node)
        chosen = indices
    parts = quotient(proofs.operand(condition)) if condition.target is aten.ne.Scalar else None
    ranked = parts is not None and parts == (chosen, num_experts) and isinstance(condition.args[1], int)
    return (condition, chosen) if ranked and chosen.target is getitem and chosen.args[1] == 1 else None


def are_never_used(rows: fx.Node, ids: fx.Node, num_experts: int) -> bool:
    """Returns whether rows of `rows` [S, ..] whose id in `ids` [S] is `num_experts` or more are multiplied by 0 before
    anything else than ops by row reads them.
    """
    source = proofs.views_up(ids)[-1]
    return are_read_by_row(rows, lambda user, read: is_zero_elsewhere(user, read, source, num_experts))


def are_read_by_row(rows: fx.Node, is_end: Callable[[fx.Node, fx.Node], bool]) -> bool:
    """Returns whether rows of `rows` [S, ..] go through ops by row only, up to users that are an end. is_end: of (a
    user, what it reads).
    """
    seen, left = {rows}, [rows]
    while left:
        node = left.pop()
        for user in _readers(node):
            if is_end(user, node):
                continue
            if not _is_by_row(user, node):
                return False
            if user not in seen:
                seen.add(user)
                left.append(user)
    return True


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the users of `node`, and in the place of a split of other dimensions than the rows its parts."""
    for user in node.users:
        if user.target in SPLITS and int(proofs.arguments(user)["dim"]) % proofs.fake(node).ndim != 0:
            yield from user.users
        else:
            yield user


def _is_by_row(user: fx.Node, node: fx.Node) -> bool:
    """Returns whether the rows of `user` are made of the same rows of `node` and of other operands."""
    value, given = proofs.tensor(user), proofs.fake(node)
    if value is None or value.ndim == 0 or not proofs.known_equal(value.shape[0], given.shape[0]):
        return False
    if proofs.keeps_order(user):
        return True
    if user.target is getitem:
        # A part of a split.
        return True
    if user.target is aten.slice.Tensor:
        return int(proofs.arguments(user)["dim"]) % given.ndim != 0
    return value.ndim == given.ndim and (user.target in BY_ROW or _divides_by_more_than_one(user))


def _divides_by_more_than_one(node: fx.Node) -> bool:
    """Returns whether a node is x / (exp(y) + 1), as SiLU is written out."""
    divisor = node.args[1] if node.target is aten.div.Tensor else None
    if not isinstance(divisor, fx.Node) or divisor.target is not aten.add.Tensor or divisor.args[1] != 1:
        return False
    return proofs.operand(divisor).target is aten.exp.default


def is_zero_elsewhere(product: fx.Node, rows: fx.Node, ids: fx.Node, num_experts: int) -> bool:
    """Returns whether `product` multiplies the rows by numbers [S, 1] that are 0 where `ids`, in any shape that is no
    view, have `num_experts` or more.
    """
    if product.target is not aten.mul.Tensor:
        return False
    factors = [factor for factor in product.args if factor is not rows]
    if len(factors) != 1 or not isinstance(factors[0], fx.Node):
        return False
    value, given = proofs.tensor(factors[0]), proofs.fake(rows)
    of_rows = value is not None and value.ndim == given.ndim == 2 and proofs.known_equal(value.shape[0], given.shape[0])
    scale = proofs.views_up(factors[0])[-1]
    if not of_rows or scale.target is not aten.where.self or not proofs.is_full(scale.args[1], 0):
        return False
    mask = scale.args[0]
    if not isinstance(mask, fx.Node) or not proofs.alike(mask, scale):
        return False
    if mask.target is aten.ge.Scalar and mask.args[1] == num_experts:
        return proofs.views_up(proofs.operand(mask))[-1] is ids
    parts = _elsewhere(ids, num_experts)
    return parts is not None and mask is parts[0]
