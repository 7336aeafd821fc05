"""Slots of other ranks' experts: not computed by `expert_projections` where what comes of them is multiplied by 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from tests.passes.graphs import all_reduce, compiled_graphs, twin
from tests.passes.test_expert_projections import calls
from tests.passes.test_grouped_matmul_all_reduce import assert_same

pytestmark = pytest.mark.usefixtures("group")

T, D, F, K, RANKS, HERE = 3, 16, 8, 2, 4, 3
X, NORM, SCORES = torch.empty(T, D), torch.empty(D, D), torch.empty(T, RANKS * HERE)
# As the plans store them: the columns are contiguous.
GATE_UP, DOWN = torch.empty(HERE, D, 2 * F), torch.empty(HERE, F, D)
OPERANDS = (X, NORM, SCORES, GATE_UP, torch.empty(HERE, 2 * F), DOWN, torch.empty(HERE, D))
"""In the order in which they are used."""
Marking = Callable[[torch.Tensor], torch.Tensor]


def on_rank(chosen: torch.Tensor, rank: int = 1, here: int = HERE, instead: int = HERE) -> torch.Tensor:
    """As `transformers` marks the experts of other ranks."""
    return torch.where(chosen // here != rank, instead, chosen % here)


def is_elsewhere(chosen: torch.Tensor, rank: int = 1, here: int = HERE) -> torch.Tensor:
    return chosen // here != rank


def on_rank_before(
    chosen: torch.Tensor, elsewhere: torch.Tensor, nowhere: int = -1, here: int = HERE, instead: int = HERE
) -> torch.Tensor:
    """As the releases 5.16 to 5.22 of `transformers` mark them."""
    own = torch.fmod(chosen.masked_fill(elsewhere, nowhere), here)
    return own.masked_fill(own == -1, instead)


def layer_of(
    *,
    marked: Marking = on_rank,
    routed: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None,
    clamped: Marking = lambda ids: ids.clamp(0, HERE - 1),
    masked: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda scale, ids: scale.masked_fill(ids >= HERE, 0),
    between: Marking = lambda rows: rows,
    scaled: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.mul,
    behind: Marking | None = None,
) -> Callable[..., Any]:
    """A layer as `transformers` decodes under expert parallelism. routed: the weights and ids that the router returns,
    of its weights and choices. masked: the weights that the experts take. between: of what the first matmul returns. behind: of
    the weighted rows, which are reduced then; the layer returns the weights too.
    """

    def layer(
        x: torch.Tensor,
        norm: torch.Tensor,
        scores: torch.Tensor,
        gate_up: torch.Tensor,
        first_bias: torch.Tensor,
        down: torch.Tensor,
        second_bias: torch.Tensor,
    ) -> Any:
        x = all_reduce(x @ norm)
        weights, chosen = scores.topk(K)
        weights, marks = (weights, marked(chosen)) if routed is None else routed(weights, chosen)
        ids = marks.reshape(-1)
        taken = clamped(ids)
        rows = x.repeat_interleave(K, 0).unsqueeze(1)
        gate, up = between(torch.bmm(rows, gate_up[taken]).squeeze(1) + first_bias[taken]).chunk(2, -1)
        out = torch.bmm((silu(gate) * up).unsqueeze(1), down[taken]).squeeze(1) + second_bias[taken]
        factors = masked(weights.reshape(-1), ids)
        terms = scaled(out, factors.unsqueeze(-1))
        return all_reduce(terms.view(-1, K, D).sum(1)) if behind is None else (all_reduce(behind(terms)), factors)

    return layer


def by_router(
    marked: Callable[..., torch.Tensor] = on_rank_before,
    elsewhere: Marking = is_elsewhere,
    weighed: Marking | None = None,
    filled: float = 0.0,
    masked: bool = False,
    **how: int,
) -> Callable[..., Any]:
    """A layer as the releases 5.16 to 5.22 of `transformers` decode, whose router masks ids and weights. elsewhere,
    weighed: the slots whose ids, and whose weights, it masks, the same by default. masked: the experts mask weights.
    """

    def routed(weights: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        others = elsewhere(chosen)
        hidden = others if weighed is None else weighed(chosen)
        return weights if masked else weights.masked_fill(hidden, filled), marked(chosen, others, **how)

    by_experts = {} if masked else {"masked": lambda scale, ids: scale}
    return layer_of(routed=routed, **by_experts)


FIRES = {
    "as transformers marks them": layer_of(),
    "of the first rank": layer_of(marked=lambda chosen: on_rank(chosen, 0)),
    "with a greater number": layer_of(marked=lambda chosen: on_rank(chosen, instead=HERE + 5)),
    "clamped from above": layer_of(clamped=lambda ids: ids.clamp(max=HERE - 1)),
    "as the router marks them": by_router(),
    "as the router marks them, weighed by the experts": by_router(masked=True),
    "as the experts mark them, weighed by the router": by_router(
        lambda chosen, elsewhere: torch.where(elsewhere, HERE, chosen % HERE)
    ),
}


@pytest.mark.parametrize("name", FIRES)
def test_slots_elsewhere_are_not_computed(name: str) -> None:
    (after,) = compiled_graphs(FIRES[name], *OPERANDS)
    before = twin(after)
    assert calls(after) == 2
    assert_same(after, before, OPERANDS, 1e-4)


REFUSED = {
    # Two slots of a token may have one expert.
    "any ids": layer_of(marked=lambda chosen: chosen // 2),
    "remainders by another number": layer_of(
        marked=lambda chosen: torch.where(chosen // HERE != 1, HERE, chosen % (HERE + 1))
    ),
    "quotients by another number": layer_of(
        marked=lambda chosen: torch.where(chosen // (HERE + 1) != 1, HERE, chosen % HERE)
    ),
    "marked as an expert of the rank": layer_of(marked=lambda chosen: on_rank(chosen, instead=HERE - 1)),
    "all ranks are the others": layer_of(marked=lambda chosen: torch.where(chosen // HERE == 1, HERE, chosen % HERE)),
    "remainders by another number, of the router": by_router(here=HERE + 1),
    "marked by another number": by_router(nowhere=-2),
    "marked as an expert of the rank, by the router": by_router(instead=HERE - 1),
    "other slots than those of another rank": by_router(elsewhere=lambda chosen: chosen // HERE == 1),
    "weights of another rank": by_router(weighed=lambda chosen: is_elsewhere(chosen, 2)),
    "weights of 1, of the router": by_router(filled=1.0),
    "clamped to fewer": layer_of(clamped=lambda ids: ids.clamp(0, HERE - 2)),
    # What comes of them is used.
    "weights that are not 0": layer_of(masked=lambda scale, ids: scale),
    "weights that are 0 for other ids": layer_of(masked=lambda scale, ids: scale.masked_fill(ids >= HERE - 1, 0)),
    "weights of 1 elsewhere": layer_of(masked=lambda scale, ids: scale.masked_fill(ids >= HERE, 1)),
    "added weights": layer_of(scaled=torch.add),
}
SECOND_ONLY = {
    # Zeros that become no numbers, or rows that are mixed.
    "inverses": layer_of(between=lambda rows: 1.0 / rows),
    "quotients of rows": layer_of(between=lambda rows: rows / (rows * rows)),
    "rows in another order": layer_of(between=lambda rows: rows.flip(0)),
    "all rows": layer_of(between=lambda rows: rows - rows.mean(0)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_must_not_fire(name: str) -> None:
    (module,) = compiled_graphs(REFUSED[name], *OPERANDS)
    assert calls(module) == 0


@pytest.mark.parametrize("name", SECOND_ONLY)
def test_rows_that_something_else_reads_are_computed(name: str) -> None:
    """The second matmul alone is a call: of its rows nothing becomes of those elsewhere."""
    (module,) = compiled_graphs(SECOND_ONLY[name], *OPERANDS)
    assert calls(module) == 1


@pytest.mark.parametrize(
    ("behind", "absorbed"),
    [
        (lambda terms: terms, True),
        (lambda terms: terms + 1.0, False),
        (lambda terms: terms.view(-1, D).sigmoid(), False),
    ],
    ids=["nothing", "added", "views"],
)
def test_what_is_made_of_weighted_slots_stays_outside(behind: Marking, absorbed: bool) -> None:
    """In the outputs of the call slots elsewhere are 0, as weighted rows are, but not what is made of these."""
    layer = layer_of(behind=behind)
    (after,) = compiled_graphs(layer, *OPERANDS)
    before = twin(after)
    assert calls(after) == 2
    assert any("column(x" in str(node.args) for node in after.graph.nodes) == absorbed
    assert_same(after, before, OPERANDS, 1e-4)
