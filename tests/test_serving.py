"""`ditron_inductor.serving`: a served model computes what its DTensor model does, and its sites are fused as before."""

from __future__ import annotations

import importlib.util
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from ditron_inductor import serving
from ditron_inductor.tools.demo_model import Llama, LlamaConfig, tensor_parallel
from tests.cases import rare
from tests.models.interpreted import without_generated_code
from tests.ranks import RankContext, RankPools

LAYERS = 1


def served(ctx: RankContext, sequence_parallel: bool) -> dict[str, int]:
    """What was fused, of a Llama whose step computed what the DTensor model does, before and after a weight changed."""
    torch._dynamo.reset()
    counters.clear()
    mesh = init_device_mesh(ctx.device.type, (ctx.world_size,))
    torch.manual_seed(0)
    model = Llama(LlamaConfig(num_layers=LAYERS)).to(ctx.device)
    tensor_parallel(model, mesh, sequence_parallel=sequence_parallel)
    names = [name for name, _ in model.named_parameters()]
    hidden = torch.randn(2, 8 // (ctx.world_size if sequence_parallel else 1), 64, device=ctx.device)
    arguments = (hidden, 8) if sequence_parallel else (hidden,)
    with torch.no_grad(), without_generated_code():
        wanted = model(*arguments)
        step = serving.compile_step(model, cudagraphs=False)
        torch.testing.assert_close(step(*arguments), wanted, rtol=1e-4, atol=1e-4)
        assert [name for name, _ in model.named_parameters()] == names
        assert not any(isinstance(one, DTensor) or one.requires_grad for one in model.parameters())
        assert isinstance(model.layers[0].attention.wq.weight, DTensor)
        # Eager mode reads the same parts.
        torch.testing.assert_close(model(*arguments), wanted)
        # A weight that is written into is the step's, too; the last norm's is whole in either form.
        model._modules["norm"]._parameters["weight"].mul_(2.0)
        torch.testing.assert_close(step(*arguments), 2 * wanted, rtol=1e-4, atol=1e-4)
    return dict(counters["ditron"])


@pytest.mark.parametrize(
    ("sequence_parallel", "kinds"),
    [*rare((False, {"all_reduce_rms_norm": 2 * LAYERS})), (True, {"all_gather_matmul": 2 * LAYERS})],
)
def test_a_step_is_that_of_the_model(rank_pools: RankPools, sequence_parallel: bool, kinds: dict[str, int]) -> None:
    for counted in rank_pools.get("cpu", 2).run(served, sequence_parallel, timeout=200.0):
        assert {kind: counted[kind] for kind in kinds} == kinds


def test_options() -> None:
    assert "triton.cudagraphs" not in serving.options(cudagraphs=False)
    found = serving.options(cudagraphs=True, **{"ditron.strategy": "tile"})
    assert found["triton.cudagraphs"] is True and found["ditron.strategy"] == "tile"
    assert found["guard_filter_fn"] is torch.compiler.skip_guard_on_all_nn_modules_unsafe


def generated(ctx: RankContext) -> int:
    """How many collectives were fused while `generate` with a static cache made the tokens of eager mode."""
    import transformers
    from transformers import AutoModelForCausalLM, CompileConfig
    from transformers.distributed import DistributedConfig

    torch._dynamo.reset()
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4)
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=96, max_position_embeddings=64)
    with tempfile.TemporaryDirectory() as own, without_generated_code():
        folder = [own]
        dist.broadcast_object_list(folder)
        torch.manual_seed(0)
        if ctx.rank == 0:
            transformers.LlamaForCausalLM(config).save_pretrained(folder[0])
        dist.barrier()
        distributed: Any = DistributedConfig(tp_size=ctx.world_size)
        model = AutoModelForCausalLM.from_pretrained(folder[0], distributed_config=distributed).eval()
        tokens = torch.arange(1, 9).view(1, -1)
        how = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        wanted = model.generate(tokens, **how, disable_compile=True)
        with pytest.raises(ValueError, match="was replaced"):
            serving.local_parameters(model)
        compiled = CompileConfig(backend="ditron", mode=None, options=serving.options(cudagraphs=False))
        compiled._compile_all_devices = True
        counters.clear()
        got = model.generate(tokens, **how, cache_implementation="static", compile_config=compiled)
    assert torch.equal(got, wanted)
    return counters["ditron"]["name_sites"]


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers: the extra 'models'")
def test_generate_with_a_static_cache(rank_pools: RankPools) -> None:
    assert rank_pools.get("cpu", 2, label="accelerate").run(generated, timeout=200.0) == [2 + 2 * LAYERS] * 2
