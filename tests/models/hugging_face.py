"""Small models of `transformers` with random weights, sharded by their own plan or by DTensor plans, inside a rank.

An `Architecture` names the parts of a model that a plan cuts; `cut` cuts a model that was made from its config alone:

    hf   the model's own `tp_plan`, as `from_pretrained` applies it: reductions behind every row-wise layer
    tp   DTensor's column- and row-wise layers: the same reductions, biases divided before them
    sp   the same layers, norms and residuals on a part of the sequence: gathers and scatters in place of reductions
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.models.plain import PlainConfig, PlainModel
from tests.rank_process import RankContext

FORMS = ("hf", "tp", "sp", "ep")


@dataclass(frozen=True)
class Sizes:
    """What every family has."""

    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    inner: int = 128
    vocabulary: int = 96
    longest: int = 64
    experts: int = 4
    dtype: torch.dtype = torch.float32

    def config(self, num_layers: int) -> dict[str, Any]:
        """As `transformers` names them."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": num_layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.longest,
        }


@dataclass(frozen=True)
class Architecture:
    """A kind of model: its `model_type`, the config values that are its own, and the names that plans use.

    embedding, layers, norm, head: full names. blocks: parts of a layer whose input is gathered under `sp`; a name
    in `keywords` gets it as `hidden_states=`. columns, rows: the linear layers that split their output or input.
    norms: those of a layer. positions: an embedding that is added to the tokens'. flat: columns, rows and norms of a
    layer that work on [tokens, hidden] and hold their part of the tokens, not of the sequence. own_plan: whether the
    model has a `tp_plan`; one without columns has no other. plain: it is one of `plain.py`. chooses: a token's experts,
    so that a rounding may change all that follows. from_sizes: config values that depend on the sizes.
    """

    model_type: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    norms: tuple[str, ...]
    blocks: tuple[str, ...]
    keywords: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    base: str = "model"
    embedding: str = "embed_tokens"
    norm: str = "norm"
    positions: str = ""
    flat: tuple[str, ...] = ()
    own_plan: bool = True
    plain: bool = False
    chooses: bool = False
    from_sizes: Mapping[str, Callable[[Sizes], int]] = field(default_factory=dict)

    def has(self, form: str) -> bool:
        """Whether the model can be cut in this form."""
        return {"hf": self.own_plan, "ep": self.chooses}.get(form, bool(self.columns))

    def make(self, num_layers: int, sizes: Sizes, device: torch.device) -> Any:
        """The model with random weights, the same on all ranks, its biases and norm weights random too."""
        torch.manual_seed(1)
        config = sizes.config(num_layers) | self.config
        model = (PlainModel(PlainConfig(**config)) if self.plain else self._transformers_model(config, sizes)).to(
            device
        )
        # Fresh models have biases of 0 and norm weights of 0 or 1: a form that loses them would go unseen.
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data.add_(torch.randn_like(parameter) * 0.1)
        return model.to(sizes.dtype)

    def _transformers_model(self, config: Mapping[str, Any], sizes: Sizes) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        own = {name: value(sizes) for name, value in self.from_sizes.items()}
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(self.model_type, use_cache=False, **(config | own))
        )

    def cut(self, model: Any, ctx: RankContext, form: str) -> Any:
        """`model` in one of FORMS, cut in place over all ranks. ep: each rank has some of the experts as a whole."""
        if form in ("hf", "ep"):
            return _own_plan(model, ctx, form)
        mesh = init_device_mesh(ctx.device.type, (ctx.world_size,))
        plan = self._layer_plan(form == "sp")
        base = model.get_submodule(self.base)
        tied = model.lm_head.weight is base.get_submodule(self.embedding).weight
        for layer in base.layers:
            parallelize_module(layer, mesh, plan)
            for part in layer.modules():
                # Some models count the heads, others take what there is.
                if isinstance(getattr(part, "num_heads", None), int):
                    part.num_heads //= ctx.world_size
        parallelize_module(model, mesh, self._outer_plan(form == "sp"))
        if tied:
            model.lm_head.weight = base.get_submodule(self.embedding).weight
        return model

    def _layer_plan(self, sequence_parallel: bool) -> dict[str, ParallelStyle]:
        def part(name: str) -> Any:
            return Shard(0 if name in self.flat else 1) if sequence_parallel else Replicate()

        plan: dict[str, ParallelStyle] = {}
        for name in self.columns:
            inside = any(name.startswith(f"{block}.") for block in self.blocks)
            plan[name] = ColwiseParallel(input_layouts=Replicate() if inside else part(name))
        plan |= {name: RowwiseParallel(output_layouts=part(name)) for name in self.rows}
        if not sequence_parallel:
            return plan
        plan |= {
            name: SequenceParallel(sequence_dim=0 if name in self.flat else 1, use_local_output=True)
            for name in self.norms
        }
        for name in self.blocks:
            # The input of a block is gathered once for all the matmuls that read it.
            if name in self.keywords:
                given: dict[str, Any] = {"hidden_states": Shard(1)}
                plan[name] = PrepareModuleInput(
                    input_kwarg_layouts=given, desired_input_kwarg_layouts={"hidden_states": Replicate()}
                )
            else:
                plan[name] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        return plan

    def _outer_plan(self, sequence_parallel: bool) -> dict[str, ParallelStyle]:
        rows = Shard(1) if sequence_parallel else Replicate()
        plan: dict[str, ParallelStyle] = {
            f"{self.base}.{self.embedding}": RowwiseParallel(input_layouts=Replicate(), output_layouts=rows),
            "lm_head": ColwiseParallel(input_layouts=rows, output_layouts=Replicate()),
        }
        if sequence_parallel:
            plan[f"{self.base}.{self.norm}"] = SequenceParallel()
        if sequence_parallel and self.positions:
            plan[f"{self.base}.{self.positions}"] = PrepareModuleOutput(
                output_layouts=Replicate(), desired_output_layouts=rows
            )
        return plan


def _own_plan(model: Any, ctx: RankContext, form: str) -> Any:
    """What `from_pretrained(..., distributed_config=DistributedConfig(tp_size=...))` does between making the model and
    loading its weights; here the weights are there already.
    """
    from transformers.distributed import DistributedConfig

    mesh_of = f"transformers mesh of {form}"
    if mesh_of not in ctx.shared:
        experts: dict[str, Any] = {}
        if form == "ep":
            # Otherwise training exchanges tokens, whose numbers it asks the device for.
            experts = {"ep_size": ctx.world_size, "ep_implementation": "all_reduce"}
            if "ep_size" not in DistributedConfig.__dataclass_fields__:
                # transformers before 5.23.
                experts = {"enable_expert_parallel": True}
        wanted = DistributedConfig(tp_size=ctx.world_size, **experts)
        ctx.shared[mesh_of] = model.prepare_distribute_model(wanted)
    config, _, mesh = ctx.shared[mesh_of]
    # The plan names both ends of a tied weight; they are tied again once both are cut.
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    model = model.maybe_distribute_model(model, config, mesh)
    model.tie_weights()
    return model


LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
QKV = tuple(f"self_attn.{name}_proj" for name in "qkv")
LLAMA_COLUMNS = (*QKV, "mlp.gate_proj", "mlp.up_proj")
LLAMA_ROWS = ("self_attn.o_proj", "mlp.down_proj")


def _like_llama(model_type: str, norms: tuple[str, ...] = LLAMA_NORMS, **from_sizes: Any) -> Architecture:
    return Architecture(
        model_type,
        columns=LLAMA_COLUMNS,
        rows=LLAMA_ROWS,
        norms=norms,
        blocks=("self_attn", "mlp"),
        keywords=("self_attn",),
        from_sizes=from_sizes,
    )


def _plain(columns: tuple[str, ...], norms: tuple[str, ...] = LLAMA_NORMS, **config: Any) -> Architecture:
    return Architecture(
        "",
        columns=columns,
        rows=LLAMA_ROWS,
        norms=norms,
        blocks=("self_attn", "mlp"),
        keywords=("self_attn",),
        config=config,
        own_plan=False,
        plain=True,
    )


def _experts(model_type: str, number: str, own_plan: bool = True, **config: Any) -> Architecture:
    """A mixture of experts, of which a token takes two; by its own plans only. number: the config value that says how
    many there are.
    """
    config = {"num_experts_per_tok": 2, "pad_token_id": 0} | config
    how: dict[str, Any] = {"config": config, "from_sizes": {number: lambda sizes: sizes.experts}}
    return Architecture(model_type, (), (), LLAMA_NORMS, (), chooses=True, own_plan=own_plan, **how)


ALL_TOKENS = {
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
}


def _head_dim(sizes: Sizes) -> int:
    return sizes.hidden // sizes.heads


# Every branch is scaled before the residual is added.
GRANITE = {
    "residual_multiplier": 0.22,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.25,
    "logits_scaling": 8.0,
    "pad_token_id": 0,
}
# Its last layer has heads of another width. Scores are not scaled, so in wide heads they would leave one of them.
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 96,
    "layer_types": None,
}
GEMMA3_NORMS = (*LLAMA_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
ARCHITECTURES = {
    "llama": _like_llama("llama"),
    "qwen3": _like_llama("qwen3", head_dim=_head_dim),
    "gemma": _like_llama("gemma", head_dim=_head_dim),
    "gemma3": _like_llama("gemma3_text", GEMMA3_NORMS, head_dim=_head_dim),
    "gpt_neox": Architecture(
        "gpt_neox",
        columns=("attention.query_key_value", "mlp.dense_h_to_4h"),
        rows=("attention.dense", "mlp.dense_4h_to_h"),
        norms=LLAMA_NORMS,
        blocks=("attention", "mlp"),
        base="gpt_neox",
        embedding="embed_in",
        norm="final_layer_norm",
    ),
    "opt": Architecture(
        "opt",
        columns=(*QKV, "fc1"),
        rows=("self_attn.out_proj", "fc2"),
        norms=("self_attn_layer_norm", "final_layer_norm"),
        blocks=("self_attn",),
        keywords=("self_attn",),
        config={"dropout": 0.0},
        from_sizes={"ffn_dim": lambda sizes: sizes.inner, "word_embed_proj_dim": lambda sizes: sizes.hidden},
        base="model.decoder",
        norm="final_layer_norm",
        positions="embed_positions",
        flat=("fc1", "fc2", "final_layer_norm"),
        own_plan=False,
    ),
    "phi": Architecture(
        "phi",
        columns=(*QKV, "mlp.fc1"),
        rows=("self_attn.dense", "mlp.fc2"),
        norms=("input_layernorm",),
        blocks=("self_attn", "mlp"),
        keywords=("self_attn",),
        norm="final_layernorm",
    ),
    "phi3": Architecture("phi3", (), (), LLAMA_NORMS, (), config={"pad_token_id": 0}),
    "granite": Architecture("granite", (), (), LLAMA_NORMS, (), config=GRANITE),
    "gemma4": Architecture("gemma4_text", (), (), GEMMA3_NORMS, (), config=GEMMA4),
    "olmo2": Architecture("olmo2", (), (), GEMMA3_NORMS[1::2], (), config={"pad_token_id": 0}),
    "mixtral": _experts("mixtral", "num_local_experts"),
    "qwen3_moe": _experts("qwen3_moe", "num_experts", moe_intermediate_size=32, head_dim=16),
    # One expert for all tokens beside those that are chosen; the second has latent attention, which is not cut.
    "glm4_moe": _experts("glm4_moe", "n_routed_experts", **ALL_TOKENS, head_dim=16),
    "deepseek_v3": _experts(
        "deepseek_v3",
        "n_routed_experts",
        **ALL_TOKENS,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        num_key_value_heads=4,
    ),
    # No plan cuts the expert for all tokens, which has a gate.
    "qwen2_moe": _experts("qwen2_moe", "num_experts", moe_intermediate_size=32, shared_expert_intermediate_size=64),
    # Its experts have biases, and it has a plan for expert parallelism only.
    "gpt_oss": _experts("gpt_oss", "num_local_experts", own_plan=False, head_dim=16),
    "plain_llama": _plain(LLAMA_COLUMNS),
    "plain_neox": _plain(
        ("self_attn.qkv_proj", "mlp.up_proj"), activation="gelu", bias=True, gated=False, packed=True, parallel=True
    ),
    "plain_opt": _plain((*QKV, "mlp.up_proj"), activation="relu", bias=True, gated=False),
    "plain_phi": _plain(
        (*QKV, "mlp.up_proj"),
        ("input_layernorm",),
        activation="gelu_tanh",
        bias=True,
        gated=False,
        parallel=True,
        shared=True,
    ),
}
