"""`python -m benchmarks.transformers_generation`: a token of `generate` of `transformers` with a static KV cache.

A model of the zoo as `transformers` has it, with random weights, loaded with its own plan of tensor parallelism. A
token is what a user waits for: the step, and what `generate` does around it. It is the time from the token in the
middle of a call to its last one, by the tokens between them; so the prompt does not count, nor the capture of graphs,
which each call begins with. The contestants take turns. The logits of each, which is fed the same tokens, are first
compared with those of the model in fp32: they may not be further from them than the rounding of eager mode explains.
Inductor has the options of `ditron_inductor.serving` too. `grouped_mm` is Inductor without what `generate` does to a
mixture of experts on a GPU: it copies the weights that each token takes, in place of torch's grouped matmul. `--device
cpu` runs a tiny model on the interpreter: that everything works, nothing about speed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate

from benchmarks import generation
from benchmarks.models.zoo import MODELS, TINY
from benchmarks.session import Session
from benchmarks.timing import Times, synchronize
from benchmarks.tolerances import narrow_limit, relative_error
from ditron_inductor import serving

MODULE = "benchmarks.transformers_generation"
CONTESTANTS = ("inductor", "max_autotune", "grouped_mm", "ditron")


@dataclass(frozen=True)
class Family:
    """How `transformers` names a model of the zoo. config: config values that the zoo does not have, or has in another
    form. experts_apart: whether its own plan gives each rank some of the experts as a whole, instead of a part of each.
    """

    model_type: str
    vocabulary: int
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    experts_apart: bool = False


LLAMA = Family("llama", 128256)
QWEN_EXPERTS = Family("qwen3_moe", 151936, {"norm_topk_prob": True})
FAMILIES = {
    "llama3-8b": LLAMA,
    "llama3-70b": LLAMA,
    "qwen3-32b": Family("qwen3", 151936),
    "gemma3-27b": Family("gemma3_text", 262208, {"query_pre_attn_scalar": 168, "sliding_window": 1024}),
    "mixtral-8x7b": Family("mixtral", 32000),
    "qwen3-30b-a3b": QWEN_EXPERTS,
    "qwen3-235b-a22b": QWEN_EXPERTS,
    "gpt-oss-120b": Family("gpt_oss", 201088, experts_apart=True),
    "deepseek-v3": Family("deepseek_v3", 129280, {"first_k_dense_replace": 0}),
}
PROMPT = 8
CHECKED = 4
"""Tokens of the comparison with fp32."""
LEAST_TOKENS = 4
LEAST_ROUNDS = 2
ENDING_S = 20.0
"""What the start of the processes and their end take of the limit, in seconds."""
COPYING = "_optimize_model_for_decode"
"""The method of a model with which `generate` turns to copies of the weights of experts."""
KEPT = ("_compiled_call", "_last_compile_config", "_previous_max_cache_length", COPYING)
"""Attributes of a model that are a contestant's own: what `generate` keeps of its last call, and that method."""


def config_of(name: str, layers: int, longest: int, cuda: bool) -> Any:
    """A model's config, of its own sizes or of tiny ones."""
    from transformers import AutoConfig

    arch = MODELS[name] if cuda else MODELS[name].like(TINY)
    family = FAMILIES[name]
    sizes: dict[str, Any] = {
        "hidden_size": arch.hidden,
        "intermediate_size": arch.inner,
        "num_hidden_layers": layers or arch.depth,
        "num_attention_heads": arch.heads,
        "num_key_value_heads": arch.kv_heads,
        "vocab_size": family.vocabulary if cuda else 96,
        "max_position_embeddings": longest,
        "pad_token_id": 0,  # that of some configs is beyond a tiny vocabulary
    }
    if arch.experts:
        count = "n_routed_experts" if arch.shared else "num_local_experts"
        sizes |= {count: arch.experts, "num_experts_per_tok": arch.top_k, "moe_intermediate_size": arch.inner}
    if arch.query_latent:
        latent = {"q_lora_rank": arch.query_latent, "kv_lora_rank": arch.key_latent}
        sizes |= latent | {"qk_rope_head_dim": arch.rotary_dim, "qk_nope_head_dim": arch.head_dim}
        sizes |= {"v_head_dim": arch.head_dim} | ({} if cuda else {"n_group": 1, "topk_group": 1})
    else:
        sizes["head_dim"] = arch.head_dim
    return AutoConfig.for_model(family.model_type, **(sizes | family.config))


def cut_over(ranks: int, experts_apart: bool) -> Any:
    """The `DistributedConfig` of a model's own plan; `experts_apart` is explained in `Family`."""
    from transformers.distributed import DistributedConfig

    named = {"ep_size": ranks, "ep_implementation": "all_reduce", "enable_expert_parallel": True}
    # By release it has some of these fields.
    apart = {name: value for name, value in named.items() if name in DistributedConfig.__dataclass_fields__}
    return DistributedConfig(tp_size=ranks, **(apart if experts_apart else {}))


@contextlib.contextmanager
def saved(session: Session, options: argparse.Namespace) -> Iterator[Callable[[torch.dtype], Any]]:
    """A function that loads the model, sharded, in a dtype. It is in a folder that rank 0 writes and removes."""
    from transformers import AutoModelForCausalLM

    device = session.clock.device
    folder = session.agree(tempfile.mkdtemp(prefix="ditron-generation-") if session.rank == 0 else "")[0]
    config = config_of(options.model, options.layers, max(options.cache), device.type == "cuda")
    whole = cut_over(session.world_size, FAMILIES[options.model].experts_apart)

    def load(dtype: torch.dtype) -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, distributed_config=whole).eval()
        for module in model.modules():
            # Some releases wait for gradients of norms. Nobody computes any here, and each would break the graph.
            module._backward_hooks.clear()
        return model

    try:
        if session.rank == 0:
            torch.manual_seed(1)
            with device:
                AutoModelForCausalLM.from_config(config).to(generation.dtype_on(device)).save_pretrained(folder)
        session.agree(None)
        yield load
        session.agree(None)
    finally:
        if session.rank == 0:
            shutil.rmtree(folder)


def compiled_by(name: str, cudagraphs: bool) -> dict[str, Any]:
    """Arguments of `generate` with which a contestant compiles its steps."""
    from transformers import CompileConfig

    # Of two contestants with the same options Dynamo would take the first one's step for the second one's.
    own = {} if name == "inductor" else {"max_autotune": name == "max_autotune"}
    options = serving.options(cudagraphs=cudagraphs, **own)
    if name != "ditron":
        options = {key: value for key, value in options.items() if not key.startswith("ditron")}
    # No mode: torch takes a mode or options.
    how: dict[str, Any] = {"backend": "ditron" if name == "ditron" else "inductor", "mode": None, "options": options}
    compiled: Any = CompileConfig(**how)
    compiled._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": compiled}


def generate(model: Any, tokens: torch.Tensor, count: int, **how: Any) -> Any:
    """`count` greedy tokens behind `tokens`."""
    return model.generate(tokens, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0, **how)


def fed_logits(model: Any, tokens: torch.Tensor, fed: torch.Tensor, **how: Any) -> torch.Tensor:
    """The logits [steps, batch, vocabulary] where the tokens `fed` [batch, steps] are chosen whatever they are."""

    def choose(seen: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -torch.inf).scatter(1, fed[:, seen.shape[1] - tokens.shape[1], None], 0.0)

    kept = {"return_dict_in_generate": True, "output_logits": True, "logits_processor": [choose]}
    out = generate(model, tokens, fed.shape[1], **kept, **how)
    assert torch.equal(out.sequences[:, tokens.shape[1] :], fed)
    return torch.stack(out.logits).float()


@contextlib.contextmanager
def turn(model: Any, kept: dict[str, Any]) -> Iterator[None]:
    """A contestant's turn. kept: what `generate` has left in the model at its last one."""
    model.__dict__.update(kept)
    yield
    kept.update({name: model.__dict__.pop(name) for name in KEPT if name in model.__dict__})


def token_us(session: Session, model: Any, tokens: torch.Tensor, count: int, how: dict[str, Any]) -> float:
    """How long the slowest rank waited for a token of the second half of a call of `count` tokens."""
    begun: list[float] = []

    def stamp(seen: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if seen.shape[1] - tokens.shape[1] == count // 2:
            synchronize(session.clock)
            begun.append(time.perf_counter())
        return scores

    synchronize(session.clock)
    dist.barrier()
    generate(model, tokens, count, logits_processor=[stamp], **how)
    synchronize(session.clock)
    # The scores of the first token that is not among the timed ones were there when the time began.
    return max(session.agree((time.perf_counter() - begun[0]) / (count - count // 2 - 1) * 1e6))


Turns = dict[str, tuple[dict[str, Any], dict[str, Any]]]
"""(arguments of `generate`, what `turn` keeps) of each contestant."""


def token_times(
    session: Session, model: Any, tokens: torch.Tensor, options: argparse.Namespace, turns: Turns
) -> dict[str, Times]:
    """The times of a token of each contestant, which take turns in another order in each round. From the second round
    on there is another one only if it would end before `options.limit`.
    """
    us: dict[str, list[float]] = {name: [] for name in turns}
    shuffle, order, begun = random.Random(0), list(turns), session.seconds()
    for done in range(options.rounds):
        now = session.seconds()
        if done >= LEAST_ROUNDS and now + (now - begun) / done > options.limit - ENDING_S:
            session.say(f"{done} of {options.rounds} rounds: the limit is {options.limit:.0f} s")
            break
        shuffle.shuffle(order)
        for name in order:
            how, kept = turns[name]
            with turn(model, kept):
                us[name].append(token_us(session, model, tokens, options.tokens, how))
    deciles = {name: statistics.quantiles(some, n=10) for name, some in us.items()}
    return {name: Times(one[1], one[4], one[7], 0.0) for name, one in deciles.items()}


def drawn(batch: int, vocabulary: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of a prompt, and those that follow in the comparison with eager mode."""
    generator = torch.Generator().manual_seed(batch)
    # The first tokens of a vocabulary may end a sequence.
    tokens = torch.randint(8, vocabulary, (batch, PROMPT + CHECKED), generator=generator).to(device)
    return tokens[:, :PROMPT], tokens[:, PROMPT:]


def measure(session: Session, options: argparse.Namespace) -> None:
    """All batch sizes, on this rank; rank 0 prints, and writes rows."""
    device = session.clock.device
    cuda, dtype, lines = device.type == "cuda", generation.dtype_on(device), []
    # All contestants compile the same code. One that met the limit would go on in eager mode.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    with saved(session, options) as load:
        model = load(torch.float32)
        given = [drawn(batch, model.config.vocab_size, device) for batch in options.batches]
        exact = [fed_logits(model, *one, disable_compile=True) for one in given]
        session.say(f"in fp32: {session.seconds():.0f} s")
        model = None
        model = load(dtype)
    session.say(f"loaded: {session.seconds():.0f} s")
    layers = model.config.num_hidden_layers
    for batch, cache, (tokens, fed), wanted in zip(options.batches, options.cache, given, exact, strict=True):
        eager = relative_error(fed_logits(model, tokens, fed, disable_compile=True), wanted)
        limit = narrow_limit(dtype, eager)
        torch.compiler.reset()
        turns: Turns = {}
        for name in (name for name in CONTESTANTS if name in options.contestants):
            if name == "grouped_mm" and not MODELS[options.model].experts:
                continue
            kept = {COPYING: contextlib.nullcontext} if name == "grouped_mm" else {}
            how, _ = turns[name] = (compiled_by(name, cuda) | {"max_cache_len": cache}, kept)
            with turn(model, kept):
                error = relative_error(fed_logits(model, tokens, fed, **how), wanted)
                assert error < limit, f"{name} is {error:.1e} from fp32, eager mode {eager:.1e}"
                session.say(f"batch {batch}: {name} is right, {session.seconds():.0f} s")
                for _ in range(2):
                    generate(model, tokens, options.tokens, **how)
        times = token_times(session, model, tokens, options, turns)
        shape = f"model={options.model};layers={layers};batch={batch};cache={cache};tokens={options.tokens}"
        generation.record(session, options, "transformers_generate", shape, times)
        lines.append([options.model, batch, cache, layers, *(f"{times[name].p50_us:.0f}" for name in times)])
    if session.rank == 0:
        where = torch.cuda.get_device_name() if cuda else "the CPU device, which says nothing of speed"
        print(f"us a token, {session.world_size} ranks, {where}, torch {torch.__version__}")
        print(tabulate(lines, ["model", "batch", "cache", "layers", *times], "github", disable_numparse=True))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = generation.parser(MODULE, __doc__, sorted(FAMILIES), CONTESTANTS, "of each sequence in a call")
    parser.add_argument("--cache", nargs="+", type=int, default=[4096, 4096], help="slots, one number for each batch")
    parser.set_defaults(tokens=128, contestants=["inductor", "grouped_mm", "ditron"])
    options = parser.parse_args(arguments)
    if options.tokens < LEAST_TOKENS:
        parser.error(f"--tokens {options.tokens}: a call has at least {LEAST_TOKENS}, and its later ones are timed")
    return generation.start(MODULE, options)


if __name__ == "__main__":
    sys.exit(main())
