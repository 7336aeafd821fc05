"""Architectures from `transformers` configurations: of a folder with a `config.json`, where that is installed."""

from __future__ import annotations

from typing import Any

from benchmarks.models.architecture import Architecture

ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
LIKE_LLAMA = ("llama", "mistral", "qwen3", "gemma3_text", "mixtral", "qwen3_moe")
DENSE = "a dense approximation: one feed-forward as wide as the experts that a token takes, without a router"


def read(path: str) -> Architecture:
    """The architecture of a configuration on disk. ValueError where it cannot be read, or its family is not known."""
    try:
        from transformers import AutoConfig
    except ImportError:
        raise ValueError("--config needs transformers: pip install 'ditron-inductor[models]'") from None
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"--config {path}: {' '.join(str(error).split())[:200]}") from None
    return of_config(getattr(config, "text_config", config))


def of_config(config: Any) -> Architecture:
    """Returns the decoder of a config, hidden states in and out. Raises ValueError for layers of another form."""
    kind = config.model_type
    if kind == "opt":
        if not config.do_layer_norm_before:
            raise ValueError("OPT with norms behind its layers is not a form that is built here")
        return Architecture(
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_attention_heads,
            inner=config.ffn_dim,
            depth=config.num_hidden_layers,
            head_dim=config.hidden_size // config.num_attention_heads,
            activation=ACTIVATIONS[config.activation_function],
            gated=False,
            norm="layer",
            bias=config.enable_bias,
            theta=0.0,
        )
    if kind not in (*LIKE_LLAMA, "gpt_oss"):
        known = ", ".join((*LIKE_LLAMA, "gpt_oss", "opt"))
        raise ValueError(f"models of type '{kind}' are not built here, but {known} are")
    gemma, routed = kind == "gemma3_text", kind in ("mixtral", "qwen3_moe")
    taken = getattr(config, "num_experts_per_tok", 1)
    if kind == "qwen3_moe" and (config.mlp_only_layers or config.decoder_sparse_step != 1 or not config.norm_topk_prob):
        raise ValueError("Qwen3 MoE with dense layers or weights of experts that are not normalised is not built here")
    activation = config.hidden_activation if gemma else config.hidden_act
    return Architecture(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        inner=getattr(config, "moe_intermediate_size", config.intermediate_size) * (1 if routed else taken),
        depth=config.num_hidden_layers,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        activation=ACTIVATIONS[activation],
        norm="gemma" if gemma else "rms",
        bias=bool(getattr(config, "attention_bias", False)),
        qk_norm=kind in ("qwen3", "qwen3_moe", "gemma3_text"),
        sandwich=gemma,
        theta=_theta(config),
        scale=config.query_pre_attn_scalar**-0.5 if gemma else None,
        eps=config.rms_norm_eps,
        experts=config.num_local_experts if routed else 0,
        top_k=taken if routed else 0,
        note=DENSE if taken > 1 and not routed else "",
    )


def _theta(config: Any) -> float:
    """Returns the base of the rotary embedding; that of layers that see everything, where there are others."""
    rope = config.rope_parameters
    return float(rope.get("full_attention", rope)["rope_theta"])
