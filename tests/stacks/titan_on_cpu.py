"""TorchTitan's own trainer on the CPU, where it knows GPUs only: one rank, with TorchTitan's arguments.

    torchrun --nproc-per-node 2 -m tests.stacks.titan_on_cpu --module llama3 ...

The trainer and the model are TorchTitan's, unchanged. What stands in here is the device: the counts of a GPU's memory
that TorchTitan prints, and, as the override `own_overrides.causal`, attention without FlexAttention, which has no
backward on the CPU. What Ditron counted on rank 0 is printed at the end.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import types
from pathlib import Path
from typing import Any

TEXT = "A tile waits for the signal that its own data has arrived, and for nothing else. "


def write_assets(folder: Path) -> list[str]:
    """Writes what TorchTitan's package lacks, a tokenizer of characters and a text; returns the arguments for them."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    tokenizer_folder, text_folder = folder / "tokenizer", folder / "text"
    words = ["<s>", "</s>", "?", *sorted(set(TEXT))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer_folder.mkdir()
    tokenizer.save(str(tokenizer_folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}
    (tokenizer_folder / "tokenizer_config.json").write_text(json.dumps(named))
    text_folder.mkdir()
    rows = [json.dumps({"text": TEXT * (4 + number % 5)}) + "\n" for number in range(64)]
    (text_folder / "data.json").write_text("".join(rows))
    assets = ["--hf-assets-path", str(tokenizer_folder), "--dataloader.dataset_path", str(text_folder)]
    return [*assets, "--dataloader.dataset", "c4_test"]


def use_cpu() -> None:
    """Makes `torchtitan.tools.utils`, when it is imported, find a device like a GPU, which is the CPU."""
    import torch
    import torch._utils

    device = types.ModuleType("cpu_as_a_device")
    stand_ins: dict[str, Any] = {
        "get_device_name": lambda device=None: "CPU",
        "get_device_properties": lambda device=None: types.SimpleNamespace(total_memory=1 << 30),
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "current_device": lambda: 0,
    }
    vars(device).update(vars(torch.cpu) | stand_ins)
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda name: device


def causal_override() -> types.ModuleType:
    """The module `own_overrides`, with the override `causal`."""
    from torchtitan.config.override import derive, override
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    own = types.ModuleType("own_overrides")

    def causal(config: Any) -> Any:
        return derive(config, ScaledDotProductAttention.Config)

    causal.__module__ = own.__name__
    own.causal = override(target=FlexAttention.Config)(causal)  # type: ignore[attr-defined]
    return own


def main() -> None:
    use_cpu()
    from torch._dynamo.utils import counters

    sys.modules["own_overrides"] = causal_override()
    runpy.run_module("torchtitan.train", run_name="__main__")
    if os.environ["RANK"] == "0":
        print("counted:", json.dumps(counters["ditron"]))


if __name__ == "__main__":
    main()
