"""FlexAttention beside gathered keys and values: fused where what it shows is proved, else left alone with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ditron_inductor.options import Options
from ditron_inductor.pipeline import run
from ditron_inductor.task.attention_masks import Mask
from tests.cases import sampled
from tests.passes.graphs import WORLD_SIZE, compiled_graphs, gather_dim, only_task, reasons, run_ranks, text
from tests.passes.test_all_gather_attention import fuse_attention, of_all_ranks

pytestmark = pytest.mark.usefixtures("group")
ROWS, BLOCK = 32, 16
OFFSET, WINDOW = 2 * ROWS, 40


def operands(**given: Any) -> list[torch.Tensor]:
    return [torch.randn(1, ROWS, heads, 16, **given) for heads in (4, 2, 2)]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> torch.Tensor:
    keys, values = gather_dim(k, 1).transpose(1, 2), gather_dim(v, 1).transpose(1, 2)
    out = flex_attention(q.transpose(1, 2), keys, values, enable_gqa=True, **given)
    assert isinstance(out, torch.Tensor)
    return out


def window(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Of the third of four ranks."""
    return (i + OFFSET >= j) & (i + OFFSET - j < WINDOW)


def blocks(mask_mod: Callable[..., Any], keys: int = WORLD_SIZE * ROWS) -> BlockMask:
    return create_block_mask(mask_mod, None, None, ROWS, keys, device="cpu", BLOCK_SIZE=BLOCK)


def full(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attend(q, k, v, scale=0.5)


def scores_hidden(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attend(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(window(b, h, i, j), s, -float("inf")))


def capped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    def cap(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return torch.where(window(b, h, i, j), 0.5 * torch.tanh(s / 0.5), -float("inf"))

    return attend(q, k, v, score_mod=cap)


def in_blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attend(q, k, v, block_mask=blocks(window))


def in_blocks_of_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Those of each head, which are all the same."""
    rows, keys = q.shape[1], WORLD_SIZE * k.shape[1]
    return attend(q, k, v, block_mask=create_block_mask(window, 1, 4, rows, keys, device="cpu", BLOCK_SIZE=BLOCK))


MASKS = {
    full: ((Mask("full"), 0.5, 0.0), None),
    scores_hidden: ((Mask("causal", 40, 64), 0.25, 0.0), window),
    in_blocks: ((Mask("causal", 40, 64), 0.25, 0.0), window),
    in_blocks_of_heads: ((Mask("causal", 40, 64), 0.25, 0.0), window),
    capped: ((Mask("causal", 40, 64), 0.25, 0.5), window),
}


@pytest.mark.parametrize("form", sampled(MASKS), ids=lambda form: form.__name__)
def test_what_is_proved_is_fused(form: Callable[..., torch.Tensor]) -> None:
    with torch.no_grad():
        (module,) = compiled_graphs(form, *operands())
    assert fuse_attention(module) == 1, reasons(module)
    wanted, mask_mod = MASKS[form]
    task, _ = only_task(module)
    assert (task.mask, task.scale, task.softcap) == wanted
    module.graph.eliminate_dead_code()
    module.graph.lint()
    assert "flex" not in text(module.graph)
    inputs = of_all_ranks(tuple(node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"))
    found = run_ranks(module, inputs)
    # Where the queries are among the placeholders is the compiler's.
    shards = [[one for one in each if one.shape[2] == 2] for each in inputs]
    queries = [next(one for one in each if one.shape[2] == 4) for each in inputs]
    k, v = (torch.cat([each[place] for each in shards], 1).transpose(1, 2) for place in (0, 1))
    seen = None
    if mask_mod is not None:
        seen = mask_mod(0, 0, torch.arange(ROWS)[:, None], torch.arange(WORLD_SIZE * ROWS))
    scale = 0.5 if form is full else None
    for (out,), q in zip(found, queries, strict=True):
        if form is capped:
            scores = 0.5 * torch.tanh(q.transpose(1, 2) @ k.repeat_interleave(2, 1).mT * 0.25 / 0.5)
            assert seen is not None
            exact = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)
        else:
            exact = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, seen, scale=scale, enable_gqa=True)
        torch.testing.assert_close(out, exact)


def of_another_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Blocks of a window, of which each shows all that is not behind."""
    found = blocks(window)
    found.mask_mod = lambda b, h, i, j: i + OFFSET >= j
    return attend(q, k, v, block_mask=found)


def of_some_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    found = create_block_mask(
        lambda b, h, i, j: (i + OFFSET >= j) & ((h < 2) | (i + OFFSET - j < WINDOW)), 1, 4, ROWS, WORLD_SIZE * ROWS,
        device="cpu", BLOCK_SIZE=BLOCK,
    )  # fmt: skip
    return attend(q, k, v, block_mask=found)


def biased(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attend(q, k, v, score_mod=lambda s, b, h, i, j: s + (i - j))


def capped_twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attend(q, k, v, score_mod=lambda s, b, h, i, j: torch.tanh(torch.tanh(s) * 2.0) * 2.0)


def negative(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attend(q, k, v, scale=-0.5)


GIVEN = create_block_mask(window, None, None, ROWS, WORLD_SIZE * ROWS, device="cpu", BLOCK_SIZE=BLOCK)


def given_blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attend(q, k, v, block_mask=GIVEN)


@pytest.mark.parametrize(
    ("code", "form"),
    [
        ("flex_block_mask", of_another_mask),
        ("flex_block_mask", of_some_heads),
        ("flex_block_mask", given_blocks),
        ("flex_score_mod", biased),
        ("flex_score_mod", capped_twice),
        ("attention_form", negative),
    ],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
def test_left_alone(code: str, form: Callable[..., torch.Tensor]) -> None:
    with torch.no_grad():
        (module,) = compiled_graphs(form, *operands())
    run(module.graph, Options())
    assert set(reasons(module)) == {code}, text(module.graph)
    assert "flex" in text(module.graph) and "all_gather_attention" not in text(module.graph)
