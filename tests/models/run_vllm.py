"""One rank of a vLLM engine on the CPU: a process of its own, which writes its tokens and what was fused.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=.. MASTER_PORT=.. python -m tests.models.run_vllm folder float32 pieces library

The folder has the model's `config.json`; the weights are random, and the same in every run. The forms:

    own       vLLM by itself
    traced    with our passes, in the one graph that vLLM compiles on CPUs: norms are ops of torch
    pieces    with our passes, in the graphs that it compiles on GPUs, cut at attention: norms are ops of vLLM

In the last two forms collectives are vLLM's ops, and linear layers are matmuls, as on GPUs. On CPUs vLLM has other ops.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_DISABLE_COMPILE_CACHE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    # A graph from a cache would be one that no pass has run on.
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
}
PROMPTS = ([5, 6, 7, 8, 9], [11, 12], [3])
TOKENS = 8


def as_on_gpus(pieces: bool) -> None:
    """Makes vLLM compile for the CPU what it compiles for GPUs."""
    import vllm._custom_ops
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.model_executor.layers import utils
    from vllm.platforms.cpu import CpuPlatform

    platform: Any = CpuPlatform
    platform.use_custom_op_collectives = classmethod(lambda cls: True)
    vllm._custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False
    if not pieces:
        return
    update = platform.check_and_update_config.__func__

    def keep_compilation(cls: Any, config: Any) -> None:
        compilation = config.compilation_config
        kept = compilation.mode, compilation.backend, dict(compilation.inductor_compile_config)
        update(cls, config)
        compilation.mode, compilation.backend, compilation.inductor_compile_config = kept
        compilation.ir_enable_torch_wrap = True

    platform.check_and_update_config = classmethod(keep_compilation)
    # It looks for ops that vLLM has not built for CPUs.
    FixFunctionalizationPass.__call__ = lambda self, graph: None


def run(folder: Path, dtype: str, form: str, strategy: str) -> dict[str, Any]:
    """The tokens of each prompt, and what the passes counted."""
    from torch._dynamo.utils import counters

    compilation: dict[str, Any] = {}
    if form != "own":
        import ditron_inductor

        as_on_gpus(form == "pieces")
        passes = ditron_inductor.passes_for_inductor({"ditron.strategy": strategy})
        compilation = {"inductor_compile_config": passes, "compile_sizes": []}

    from vllm import LLM, SamplingParams

    llm = LLM(
        str(folder),
        tensor_parallel_size=int(os.environ["WORLD_SIZE"]),
        distributed_executor_backend="external_launcher",
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=64,
        max_num_seqs=len(PROMPTS),
        seed=0,
        compilation_config=compilation,
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], greedy)
    return {"tokens": [list(one.outputs[0].token_ids) for one in outputs], "counted": dict(counters["ditron"])}


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    found = run(Path(sys.argv[1]), *sys.argv[2:])
    (Path(sys.argv[1]) / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
