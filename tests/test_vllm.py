"""vLLM itself on 2 ranks: its collectives and norms are fused, and compute what they do by themselves; its engine makes
the same tokens.

`tests/passes/test_vllm_collectives.py` and `tests/passes/test_foreign_norms.py` have the cases, with ops of the same
names and schemas.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import ditron_inductor
from benchmarks.tolerances import assert_near
from tests.models.interpreted import without_generated_code
from tests.ranks import RankContext, RankPools

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-stacks")
# A vLLM that has been built for GPUs runs on the CPU too.
ON_CPU = {"VLLM_TARGET_DEVICE": "cpu"}
# With this value, as in a process of Ray, vLLM takes its own Triton kernels, and the interpreter runs them. Otherwise,
# where there is no GPU, it calls a function instead of one of them, which takes other arguments in 0.32.0 and fails.
OWN_KERNELS = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ON_CPU.items():
        monkeypatch.setenv(name, value)


def run_layer(ctx: RankContext) -> Counter[str]:
    """What the passes counted while a compiled function computed what the eager one does."""
    os.environ.update(ON_CPU)
    from vllm.distributed.parallel_state import GroupCoordinator

    torch._dynamo.reset()
    counters.clear()
    group = GroupCoordinator(
        [list(range(ctx.world_size))], ctx.rank, "gloo", use_device_communicator=True, group_name="tp"
    )
    group.use_custom_op_call = True  # as on a GPU

    def layer(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        hidden = group.all_gather(x, 0) @ w
        return [group.reduce_scatter(hidden @ v, 0), group.all_reduce(x @ w), group.all_gather(x @ w)]

    operands = [torch.randn(shape) for shape in ((8, 16), (16, 32), (32, 16))]
    with torch.no_grad(), without_generated_code():
        got = torch.compile(layer, options=ditron_inductor.passes_for_inductor(), fullgraph=True)(*operands)
        for one, other in zip(got, layer(*operands), strict=True):
            assert_near(one, other, num_partials=ctx.world_size)
    return Counter(counters["ditron"])


def test_vllms_ops_are_fused(rank_pools: RankPools) -> None:
    kinds = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_gather"
    for counted in rank_pools.get("cpu", 2, label="vllm").run(run_layer, timeout=200.0):
        assert {kind: counted[kind] for kind in kinds} == dict.fromkeys(kinds, 1)


def test_its_config_takes_the_passes() -> None:
    from vllm.config import CompilationConfig

    config, other = (
        CompilationConfig(inductor_compile_config=ditron_inductor.passes_for_inductor({"ditron.strategy": strategy}))
        for strategy in ("library", "tile")
    )
    assert config.compute_hash() == pickle.loads(pickle.dumps(config)).compute_hash() != other.compute_hash()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32, "rows"])
def test_the_definitions_of_its_norms_are_ours(dtype: torch.dtype, weight_dtype: Any) -> None:
    """Bit for bit, what takes the place of an op is what vLLM says that it computes."""
    import vllm.ir.ops  # noqa: F401

    from ditron_inductor.passes.graph.foreign_norms import foreign_norms, open_norm
    from tests.passes.graphs import traced

    ops: Any = torch.ops.vllm_ir
    x, residual = torch.randn(64, 48).to(dtype), torch.randn(64, 48).to(dtype)
    weight = None if weight_dtype is None else torch.randn(48).to(dtype if weight_dtype == "rows" else weight_dtype)

    def norms(x: torch.Tensor, residual: torch.Tensor, *weights: torch.Tensor) -> Any:
        weight = weights[0] if weights else None
        return ops.rms_norm(x, weight, 1e-5), *ops.fused_add_rms_norm(x, residual, weight, 1e-5)

    given = (x, residual) if weight is None else (x, residual, weight)
    module = traced(norms, *given)
    found = foreign_norms(module.graph)
    assert len(found) == 2
    for norm in found:
        open_norm(module.graph, norm)
    module.recompile()
    assert "vllm_ir" not in module.code
    for got, wanted in zip(module(*given), norms(*given), strict=True):
        assert torch.equal(got, wanted)


TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
ENGINE_S = 400


def engine(folder: Path, *settings: str) -> list[dict[str, Any]]:
    """What the ranks of an engine write; see `tests/stacks/vllm_on_cpu.py`."""
    (folder / "config.json").write_text(json.dumps(TINY))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, **{name: str(value) for name, value in names.items()}, "OMP_NUM_THREADS": "1"}
        environment |= ON_CPU | OWN_KERNELS | {"VLLM_CACHE_ROOT": str(folder), "VLLM_DIST_IDENT": folder.name}
        log = (folder / f"rank{rank}.log").open("w")
        command = [sys.executable, "-m", "tests.stacks.vllm_on_cpu", str(folder), *settings]
        ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    try:
        codes = [rank.wait(ENGINE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0, 0], (folder / "rank0.log").read_text()[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def own_tokens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The tokens of vLLM by itself, by dtype."""
    found = {dtype: engine(tmp_path_factory.mktemp(dtype), dtype, "own", "auto") for dtype in ("bfloat16", "float32")}
    return {dtype: ranks[0]["tokens"] for dtype, ranks in found.items()}


@pytest.mark.timeout(4 * ENGINE_S)
@pytest.mark.parametrize(
    ("form", "dtype", "strategy"),
    [("traced", "bfloat16", "library"), ("pieces", "bfloat16", "library"), ("pieces", "float32", "tile")],
)
def test_an_engine_makes_its_own_tokens(
    own_tokens: dict[str, Any], tmp_path: Path, form: str, dtype: str, strategy: str
) -> None:
    """With the embedding's all-reduce and two for each layer, all of them fused with the norm behind."""
    layers = TINY["num_hidden_layers"]
    assert isinstance(layers, int)
    for found in engine(tmp_path, dtype, form, strategy):
        counted = found["counted"]
        assert counted["normalize_collectives"] == counted["all_reduce_rms_norm"] == 1 + 2 * layers
        assert counted["matmul_all_reduce"] == 2 * layers
        assert found["tokens"] == own_tokens[dtype]
