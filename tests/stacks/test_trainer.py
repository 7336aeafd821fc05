"""The `Trainer` of transformers with a model that is cut over the ranks, compiled by Inductor with our passes in its
config: it trains as without compilation, and is fused.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

import ditron_inductor
from tests.models.interpreted import without_generated_code
from tests.ranks import RankContext, RankPools

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("accelerate", "transformers")),
    reason="needs the Trainer: pip install 'ditron-inductor[models]'",
)
STEPS = 3


def save_model(folder: str) -> None:
    """A tiny Llama, as a user has one on disk."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 96}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).save_pretrained(folder)


def losses(ctx: RankContext, folder: str, *, compiled: bool) -> list[float]:
    """The losses that the Trainer logs, a step each."""
    from accelerate.state import AcceleratorState
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    AcceleratorState._reset_state(reset_partial_state=True)
    torch._dynamo.reset()
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    assert model.tp_size == ctx.world_size
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randint(96, (8,), generator=generator) for _ in range(2 * STEPS)]
    rows = [{"input_ids": text, "labels": text} for text in texts]
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        torch_compile=compiled,
        torch_compile_backend="inductor" if compiled else None,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    trainer = Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, None))
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def train(ctx: RankContext, folder: str) -> tuple[list[float], list[float], Counter[str]]:
    """The losses without compilation and with it, and what was fused."""
    from accelerate import ParallelismConfig

    rank = str(ctx.rank)
    environment: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(ctx.world_size)}
    # Asked for, and not used: there is a process group already.
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment))
        # Accelerate has tensor parallelism for accelerators only.
        stack.enter_context(mock.patch.object(ParallelismConfig, "_validate_accelerator"))
        if ctx.rank == 0:
            save_model(folder)
        dist.barrier()
        wanted = losses(ctx, folder, compiled=False)
        counters.clear()
        stack.enter_context(inductor_config.patch(ditron_inductor.passes_for_inductor()))
        stack.enter_context(without_generated_code())
        return wanted, losses(ctx, folder, compiled=True), Counter(counters["ditron"])


def test_training(rank_pools: RankPools, tmp_path: Any) -> None:
    for wanted, got, fused in rank_pools.get("cpu", 2, label="accelerate").run(train, str(tmp_path), timeout=200.0):
        assert len(wanted) == STEPS and got == pytest.approx(wanted, rel=1e-3)
        assert fused["matmul_all_reduce"] >= 4, "two in the forward, and those of the backward"
