"""all_gather_attention and attention_reduce_scatter: attention to gathered keys and values, and its backward, in the forms
that Inductor shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ditron_inductor.options import Options
from ditron_inductor.passes.attention.all_gather_attention import all_gather_attention
from ditron_inductor.passes.attention.attention_reduce_scatter import attention_reduce_scatter
from ditron_inductor.passes.normalize.normalize_collectives import normalize_collectives
from ditron_inductor.passes.normalize.share_gathers import share_gathers
from ditron_inductor.task import schema
from ditron_inductor.task.attention_masks import Mask
from tests.passes.graphs import (
    WORLD_SIZE,
    all_gather,
    compiled_graphs,
    gather_dim,
    only_task,
    reasons,
    run_ranks,
    scatter_dim,
    text,
    twin,
)

pytestmark = pytest.mark.usefixtures("group")
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def fuse_attention(module: fx.GraphModule, options: Options | None = None) -> int:
    """Both passes, behind those that they want; how many sites they fused."""
    options = options or Options()
    for prepare in (normalize_collectives, share_gathers):
        prepare(module.graph, options=options)
    count = all_gather_attention(module.graph, options=options) + attention_reduce_scatter(
        module.graph, options=options
    )
    module.graph.lint()
    module.recompile()
    return count


def operands(B: int = 1, S: int = 8, heads: int = 4, key_heads: int = 2, D: int = 16) -> Operands:
    """q, k, v [B, S, H, D]."""
    return torch.randn(B, S, heads, D), torch.randn(B, S, key_heads, D), torch.randn(B, S, key_heads, D)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> torch.Tensor:
    """Of q [B, S, H, D] and keys and values [B, H, S, D], as [B, S, H * D]."""
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, enable_gqa=True, **given)
    return out.transpose(1, 2).flatten(2)


def sequence_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> torch.Tensor:
    return sdpa(q, gather_dim(k, 1).transpose(1, 2), gather_dim(v, 1).transpose(1, 2), **given)


def heads_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    keys, values = (gather_dim(one.transpose(1, 2).contiguous(), 2) for one in (k, v))
    return sdpa(q, keys, values)


def stacked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    keys, values = gather_dim(torch.stack((k, v)), 2)
    return sdpa(q, keys.transpose(1, 2), values.transpose(1, 2))


def projected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Heads are split off behind the gather, keys and values are in one projection."""
    both = gather_dim(torch.cat((k.flatten(2), v.flatten(2)), 2), 1)
    keys, values = (one.unflatten(2, k.shape[2:]).transpose(1, 2) for one in both.chunk(2, 2))
    return sdpa(q, keys, values)


def one_sequence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A batch of one is gathered as rows."""
    keys, values = (all_gather(one.flatten(0, 1)).unsqueeze(0).transpose(1, 2) for one in (k, v))
    return sdpa(q, keys, values)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return sequence_first(q, k, v, is_causal=True)


def scaled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return sequence_first(q, k, v, scale=0.5)


def queries_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Every version of the compiler has the operands in this order."""
    q = q.transpose(1, 2)
    keys, values = gather_dim(k, 1).transpose(1, 2), gather_dim(v, 1).transpose(1, 2)
    return F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)


def repeated(x: torch.Tensor) -> torch.Tensor:
    """Every head twice in a row, as Hugging Face's models have it."""
    B, heads, S, D = x.shape
    return x[:, :, None].expand(B, heads, 2, S, D).reshape(B, 2 * heads, S, D)


def heads_repeated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    keys, values = (repeated(gather_dim(one, 1).transpose(1, 2)) for one in (k, v))
    return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, is_causal=True)


FORMS = (sequence_first, heads_first, stacked, projected, one_sequence, causal, scaled, heads_repeated)


def of_all_ranks(given: Operands) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(one.shape, generator=generator) for one in given] for _ in range(WORLD_SIZE)]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_forms_are_fused_and_right(form: Callable[..., torch.Tensor]) -> None:
    given = operands(B=1 if form is one_sequence else 2)
    (after,) = compiled_graphs(form, *given)
    before = twin(after)
    assert fuse_attention(after) == 1, text(after.graph)
    assert not any("all_gather_into_tensor" in str(node.target) for node in after.graph.nodes)
    assert fuse_attention(after) == 0
    # The order of the placeholders is the compiler's.
    inputs = of_all_ranks(tuple(node.meta["val"] for node in after.graph.nodes if node.op == "placeholder"))
    torch.testing.assert_close(run_ranks(after, inputs), run_ranks(before, inputs))


@pytest.mark.parametrize("form", [sequence_first, heads_first, stacked, causal], ids=lambda form: form.__name__)
def test_training_is_fused_and_right(form: Callable[..., torch.Tensor]) -> None:
    given = tuple(one.requires_grad_() for one in operands(B=2))
    after = compiled_graphs(form, *given)
    before = [twin(one) for one in after]
    assert [fuse_attention(graph) for graph in after] == [1, 0 if form is stacked else 1]
    for old, new in zip(before, after, strict=True):
        inputs = of_all_ranks(tuple(node.meta["val"] for node in new.graph.nodes if node.op == "placeholder"))
        if new is after[1]:
            # The logarithms of sums of these queries and keys are smaller.
            for one in inputs:
                one[:] = [each + 9.0 if each.ndim == 3 and each.shape[1] == 4 else each for each in one]
        torch.testing.assert_close(run_ranks(new, inputs), run_ranks(old, inputs))


def test_two_layers_in_training() -> None:
    def form(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sequence_first(heads_first(q, k, v).view(q.shape), k, v)

    given = tuple(one.requires_grad_() for one in operands())
    after = compiled_graphs(form, *given)[0]
    before = twin(after)
    assert fuse_attention(after) == 2
    inputs = of_all_ranks(tuple(node.meta["val"] for node in after.graph.nodes if node.op == "placeholder"))
    torch.testing.assert_close(run_ranks(after, inputs), run_ranks(before, inputs))


def test_a_forward() -> None:
    (module,) = compiled_graphs(sequence_first, *operands())
    assert fuse_attention(module) == 1
    assert_expected_inline(
        text(module.graph),
        """\
arg0_1 [1, 8, 2, 16]
arg1_1 [1, 8, 2, 16]
arg2_1 [1, 8, 4, 16]
permute_2 [1, 4, 8, 16] = aten.permute(arg2_1, [0, 2, 1, 3])
permute_default [1, 2, 8, 16] = aten.permute(arg0_1, [0, 2, 1, 3])
permute_default_1 [1, 2, 8, 16] = aten.permute(arg1_1, [0, 2, 1, 3])
all_gather_attention = ditron.all_gather_attention([permute_2, permute_default, permute_default_1], "mask=(kind=full) scale=0.25 softcap=0.0 world_size=4 group_name=0 site='' trials", None)
getitem_9 [1, 4, 8, 16] = all_gather_attention[0]
permute_3 [1, 8, 4, 16] = aten.permute(getitem_9, [0, 2, 1, 3])
view [1, 8, 64] = aten.reshape(permute_3, [1, 8, 64])
return (view,)
""",
    )


def test_a_backward() -> None:
    forward, backward = compiled_graphs(queries_first, *(one.requires_grad_() for one in operands()))
    assert fuse_attention(forward) == 1 and fuse_attention(backward) == 1
    assert_expected_inline(
        text(forward.graph),
        """\
primals_1 [1, 8, 4, 16]
primals_2 [1, 8, 2, 16]
primals_3 [1, 8, 2, 16]
permute [1, 4, 8, 16] = aten.permute(primals_1, [0, 2, 1, 3])
permute_default [1, 2, 8, 16] = aten.permute(primals_2, [0, 2, 1, 3])
permute_default_1 [1, 2, 8, 16] = aten.permute(primals_3, [0, 2, 1, 3])
all_gather_attention = ditron.all_gather_attention([permute, permute_default, permute_default_1], "mask=(kind=causal) scale=0.25 softcap=0.0 world_size=4 group_name=0 site='' trials return_gathered", None)
getitem_10 [1, 4, 8, 16] = all_gather_attention[0]
getitem_11 [1, 4, 8] = all_gather_attention[1]
getitem_12 [1, 2, 32, 16] = all_gather_attention[2]
getitem_13 [1, 2, 32, 16] = all_gather_attention[3]
return (getitem_10, permute, getitem_12, getitem_13, getitem_10, getitem_11)
""",
    )
    assert_expected_inline(
        text(backward.graph),
        """\
permute [1, 4, 8, 16]
permute_1 [1, 2, 32, 16]
permute_2 [1, 2, 32, 16]
getitem_8 [1, 4, 8, 16]
getitem_9 [1, 4, 8]
tangents_1 [1, 4, 8, 16]
attention_reduce_scatter = ditron.attention_reduce_scatter([tangents_1, permute, permute_1, permute_2, getitem_8, getitem_9], "mask=(kind=causal) scale=0.25 softcap=0.0 world_size=4 group_name=0 site='' trials", None)
getitem [1, 4, 8, 16] = attention_reduce_scatter[0]
getitem_13 [1, 2, 8, 16] = attention_reduce_scatter[1]
permute_default [1, 8, 2, 16] = aten.permute(getitem_13, [0, 2, 1, 3])
getitem_14 [1, 2, 8, 16] = attention_reduce_scatter[2]
permute_default_1 [1, 8, 2, 16] = aten.permute(getitem_14, [0, 2, 1, 3])
permute_5 [1, 8, 4, 16] = aten.permute(getitem, [0, 2, 1, 3])
return (permute_5, permute_default, permute_default_1)
""",
    )


def masked(rank: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A window of 11 keys, in a sequence that is sharded in rank order."""
    S = q.shape[1]
    ahead = torch.arange(S)[:, None] + rank * S - torch.arange(WORLD_SIZE * S)[None]
    return sequence_first(q, k, v, attn_mask=(ahead >= 0) & (ahead < 11))


def test_a_mask_of_every_rank_in_its_own_graph() -> None:
    """They differ by the offset alone, and so do the ranks' programs."""
    tasks = []
    for rank in (0, 2):
        form = functools.partial(masked, rank)
        (after,) = compiled_graphs(form, *operands())
        before = twin(after)
        assert fuse_attention(after) == 1, text(after.graph)
        after.graph.eliminate_dead_code()
        tasks.append(only_task(after))
        inputs = of_all_ranks(tuple(node.meta["val"] for node in after.graph.nodes if node.op == "placeholder"))
        torch.testing.assert_close(run_ranks(after, inputs), run_ranks(before, inputs))
    assert "iota" not in text(after.graph)
    (first, operands_of_first), (third, operands_of_third) = tasks
    assert third.mask == Mask("causal", 11, 16) and third.scale == 0.25
    assert replace(first, mask=replace(first.mask, offset=16)) == third and first.mask.offset == 0
    assert operands_of_first == operands_of_third and "bias" not in operands_of_first


def without_values(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return sdpa(q, gather_dim(k, 1).transpose(1, 2), v.repeat(1, WORLD_SIZE, 1, 1).transpose(1, 2))


def partly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    keys, values = (gather_dim(one, 1)[:, :-1].transpose(1, 2) for one in (k, v))
    return sdpa(q, keys, values)


def batch_gathered(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q = q.repeat(WORLD_SIZE, 1, 1, 1)
    return sdpa(q, all_gather(k).transpose(1, 2), all_gather(v).transpose(1, 2))


def queries_from_keys(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    keys, values = gather_dim(k, 1).transpose(1, 2), gather_dim(v, 1).transpose(1, 2)
    return sdpa(q + keys.sum(), keys, values)


@pytest.mark.parametrize(
    ("code", "form"),
    [
        ("attention_form", without_values),
        ("attention_form", lambda q, k, v: sequence_first(q, k, v, scale=-0.5)),
        ("attention_parts", partly),
        ("layout", batch_gathered),
        ("intermediate_used", queries_from_keys),
    ],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
def test_left_alone(code: str, form: Callable[..., torch.Tensor]) -> None:
    (module,) = compiled_graphs(form, *operands())
    before = text(module.graph)
    assert fuse_attention(module) == 0
    assert set(reasons(module)) == {code}, text(module.graph)
    assert "ditron" not in text(module.graph) and before.count("all_gather") >= text(module.graph).count("all_gather")


def test_large_heads_are_left_alone_in_both_directions() -> None:
    given = tuple(one.requires_grad_() for one in operands(D=264))
    for module in compiled_graphs(causal, *given):
        assert fuse_attention(module) == 0 and set(reasons(module)) == {"attention_head_dim"}


def test_dropout_is_left_alone() -> None:
    (module,) = compiled_graphs(sequence_first, *operands())
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    (attention,) = module.graph.find_nodes(op="call_function", target=flash)
    attention.args = (*attention.args[:3], 0.25)
    assert fuse_attention(module) == 0 and set(reasons(module)) == {"attention_dropout"}


def test_the_option_switches_it_off() -> None:
    (module,) = compiled_graphs(sequence_first, *operands())
    assert fuse_attention(module, Options(fusions=("all_gather_matmul",))) == 0
    assert set(reasons(module)) == {"disabled"}


def test_what_else_reads_the_keys_gets_them() -> None:
    def form(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = gather_dim(k, 1).transpose(1, 2), gather_dim(v, 1).transpose(1, 2)
        return sdpa(q, keys, values), keys.sum(2)

    given = operands()
    (after,) = compiled_graphs(form, *given)
    before = twin(after)
    assert fuse_attention(after) == 1
    inputs = of_all_ranks(tuple(node.meta["val"] for node in after.graph.nodes if node.op == "placeholder"))
    torch.testing.assert_close(run_ranks(after, inputs), run_ranks(before, inputs))


CUDA_OPS = {
    "flash": lambda q, k, v: torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0],
    "efficient": lambda q, k, v: torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, False)[0],
    "cudnn": lambda q, k, v: torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)[1],
    "logarithms": lambda q, k, v: torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True)[1],
}
SHAPES = {"cudnn": (2, 4, 8, 1), "logarithms": (2, 4, 32)}


@pytest.mark.parametrize("name", CUDA_OPS)
def test_kernels_of_gpus(name: str) -> None:
    def form(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = gather_dim(k, 1).transpose(1, 2), gather_dim(v, 1).transpose(1, 2)
        return CUDA_OPS[name](q.transpose(1, 2), keys, values)

    with FakeTensorMode():
        given = [torch.empty(2, 8, 4, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
        module = make_fx(form)(*given)
    module.graph.eliminate_dead_code()
    assert fuse_attention(module) == 1, text(module.graph)
    (output,) = module.graph.find_nodes(op="output")[0].args
    assert output.meta["val"].shape == SHAPES.get(name, (2, 4, 8, 64))


def test_logarithms_that_the_memory_efficient_kernel_has_padded() -> None:
    def form(
        grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor
    ) -> list[torch.Tensor]:
        backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        seed = torch.empty((), dtype=torch.int64, device="cuda")
        grads = backward(grad, q, k, v, None, grad, lse, seed, seed, 0.0, [True, True, True, False])
        return [grads[0], *(scatter_dim(one, 2) for one in grads[1:3])]

    with FakeTensorMode():
        q = torch.empty(2, 4, 8, 64, device="cuda")
        k = torch.empty(2, 4, 8 * WORLD_SIZE, 64, device="cuda")
        module = make_fx(form)(q, q, k, k, torch.empty(2, 4, 32, device="cuda"))
    module.graph.eliminate_dead_code()
    assert fuse_attention(module) == 1, text(module.graph)
    (call,) = [node for node in module.graph.nodes if "attention" in str(node.target)]
    assert schema.operand(call, "lse").meta["val"].shape == (2, 4, 8)
