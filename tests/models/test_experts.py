"""Mixtures of experts as `transformers` runs them, fused and equal to eager: with weights that are copied for each slot
where it decodes, and by grouped matmuls where it reads a prompt.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

from benchmarks.tolerances import MODEL_TOLERANCES
from ditron_inductor.report.explain import without_caches
from ditron_inductor.task.nodes import MOST_EXPERT_TOKENS
from ditron_inductor.task.plan import decisions
from tests.cases import rare
from tests.models.hugging_face import ARCHITECTURES, Sizes
from tests.models.run_hugging_face import Setup, compiled_model, inputs_of, run_model, step_of
from tests.models.settled import settle
from tests.models.test_hugging_face import OLDER, UNSHOWN, WIDE, skip_otherwise
from tests.rank_process import RankContext
from tests.ranks import RankPools

fuse = importlib.import_module("ditron_inductor.passes.fuse.grouped_matmul_all_reduce")
sort = importlib.import_module("ditron_inductor.passes.fuse.sorted_experts")
pytest.importorskip("transformers", reason="the models are those of the extra 'models'")
COPIES, GROUPED = "batched_mm", "grouped_mm"
PROJECTED, COMBINED = "expert_projections", "combine_experts"
REDUCED = "grouped_matmul_all_reduce"


def _reduced(ctx: RankContext, setup: Setup) -> int:
    """Does `_run` with the reductions behind the experts of a prompt; returns the number of their calls."""
    with mock.patch.object(fuse, "LEAST_TOKENS", 64):
        _run(ctx, setup, GROUPED)
    return counters["ditron"][REDUCED]


def _trained(ctx: RankContext, setup: Setup) -> tuple[int, int]:
    """The reductions in (the forward, the backward) that became a node with the sum and the matmul in front of it."""
    with mock.patch.object(fuse, "LEAST_TOKENS", 64):
        sites = run_model(ctx, setup)
    return sites["forward"][REDUCED], sites["backward"][REDUCED]


def _decoded(ctx: RankContext, setup: Setup) -> tuple[int, int, int]:
    """Does `_run` with copied weights; returns the calls of the experts' matmuls, those of norms, and how many of these
    add up what the experts return.
    """
    _run(ctx, setup)
    return counters["ditron"][PROJECTED], counters["ditron"]["all_reduce_rms_norm"], counters["ditron"]["absorb_sums"]


def _read(ctx: RankContext, setup: Setup) -> tuple[int, int]:
    """Does `_run` with grouped matmuls, of more tokens than calls of `expert_projections` take; returns the number of
    sums, and how many of these matmuls take their rows where they lie.
    """
    with mock.patch.object(sort, "most_expert_tokens", return_value=MOST_EXPERT_TOKENS):
        return _run(ctx, setup, GROUPED), counters["ditron"]["grouped_projections"]


def _run(ctx: RankContext, setup: Setup, experts: str = COPIES) -> int:
    """Compares the compiled model with eager, at two batches, or one where that is a prompt, whose kernels take their
    time in the interpreter; returns the number of sums of all layers.
    """
    torch._dynamo.reset()
    counters.clear()
    architecture = ARCHITECTURES[setup.name]
    whole, part = (architecture.make(setup.num_layers, setup.sizes, ctx.device) for _ in range(2))
    model = architecture.cut(part, ctx, setup.form)
    model.set_experts_implementation(experts)
    # The tiny models take fewer experts for each token, whose sums Inductor would unroll.
    with without_caches(), torch.no_grad(), inductor_config.patch(unroll_reductions_threshold=2):
        call = compiled_model(setup, model)
        for index in range(1 if experts == GROUPED else 2):
            given = settle(whole.float(), inputs_of(ctx, setup, index), setup.sizes.vocabulary)
            wanted, got = (step_of(setup, model, fn, given)["logits"] for fn in (model, call))
            error = float((got - wanted).float().norm() / wanted.float().norm())
            assert error <= MODEL_TOLERANCES[setup.sizes.dtype], f"{setup}: {error:.1e}"
    return counters["ditron"][COMBINED]


NARROW = replace(Sizes(), dtype=torch.bfloat16)
# On four ranks every one has a head of keys and two experts: one alone is no mixture, and nothing is proved of it.
FOUR = replace(NARROW, kv_heads=4, experts=8)
SETUPS = (
    pytest.param(Setup("mixtral", "hf", num_layers=2), marks=pytest.mark.all_cases),
    *rare(Setup("deepseek_v3", "hf")),
    Setup("qwen3_moe", "hf", sizes=NARROW, inductor=True, batch=1, seq_len=1),
    # A rank has whole experts, the slots of other ones are marked, and the experts have biases.
    Setup("gpt_oss", "ep", sizes=NARROW, batch=3, seq_len=1),
    *rare(
        Setup("gpt_oss", "ep", sizes=NARROW, inductor=True, batch=1, seq_len=1),
        Setup("qwen3_moe", "ep", sizes=NARROW),
    ),
)
PROMPTS = (
    pytest.param(
        Setup("mixtral", "hf", sizes=NARROW, strategy="tile", inductor=True, batch=5, seq_len=14),
        marks=pytest.mark.all_cases,
    ),
    *rare(Setup("qwen3_moe", "hf", sizes=NARROW, strategy="tile", batch=5, seq_len=15)),
)


@pytest.mark.timeout(220)
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_experts_are_two_calls_a_layer(rank_pools: RankPools, setup: Setup) -> None:
    # Gate and up in one, down in the other.
    for projected, normed, summed in rank_pools.get("cpu", 2).run(_decoded, setup, timeout=200):
        assert projected == 2 * setup.num_layers and normed >= setup.num_layers
        # The matmul of DeepSeek's shared expert takes the sum.
        assert summed == (0 if setup.name == "deepseek_v3" else setup.num_layers)


def _unsorted(ctx: RankContext, setup: Setup) -> tuple[int, int, int]:
    """Does `_run` with grouped matmuls; returns what `_decoded` does."""
    _run(ctx, setup, GROUPED)
    return counters["ditron"][PROJECTED], counters["ditron"]["all_reduce_rms_norm"], counters["ditron"]["absorb_sums"]


@pytest.mark.timeout(220)
@pytest.mark.parametrize(
    ("name", "form"),
    [("gpt_oss", "ep"), *rare(("qwen3_moe", "hf"), ("qwen3_moe", "ep"), ("mixtral", "hf"), ("deepseek_v3", "hf"))],
)
def test_sorted_slots_of_a_few_tokens_are_two_calls_a_layer(rank_pools: RankPools, name: str, form: str) -> None:
    setup = Setup(name, form, sizes=NARROW, strategy="tile", batch=3, seq_len=1)
    for projected, normed, summed in rank_pools.get("cpu", 2).run(_unsorted, setup, timeout=200):
        assert projected == 2 * setup.num_layers and normed >= setup.num_layers
        # A shared expert takes the sum.
        assert summed == (0 if name == "deepseek_v3" else setup.num_layers)


@pytest.mark.timeout(220)
@pytest.mark.all_cases
@pytest.mark.parametrize(("name", "form"), [("mixtral", "hf"), ("deepseek_v3", "hf"), ("gpt_oss", "ep")])
def test_rows_of_a_prompt_are_not_copied(rank_pools: RankPools, name: str, form: str) -> None:
    setup = Setup(name, form, sizes=NARROW, batch=5, seq_len=16)
    found = rank_pools.get("cpu", 2).run(_read, setup, timeout=200)
    assert [taken for _, taken in found] == [setup.num_layers] * 2


@pytest.mark.timeout(220)
@pytest.mark.parametrize("setup", PROMPTS, ids=str)
def test_experts_of_a_prompt_are_combined_in_a_call(rank_pools: RankPools, setup: Setup) -> None:
    # The first matmul takes its rows where they lie.
    wanted = setup.num_layers, setup.num_layers
    assert rank_pools.get("cpu", 2).run(_read, setup, timeout=200) == [wanted] * 2


@pytest.mark.timeout(220)
@pytest.mark.parametrize(
    ("name", "form", "strategy"),
    [
        # Its experts have biases.
        ("gpt_oss", "ep", "tile"),
        ("mixtral", "hf", "library"),
        *rare(("qwen3_moe", "hf", "library"), ("qwen3_moe", "ep", "library")),
        *rare(("qwen3_moe", "hf", "tile"), ("qwen3_moe", "ep", "tile"), ("gpt_oss", "ep", "library")),
        *rare(("mixtral", "hf", "tile"), ("deepseek_v3", "hf", "tile"), ("deepseek_v3", "hf", "library")),
    ],
)
def test_experts_of_a_prompt_are_reduced_in_a_call(rank_pools: RankPools, name: str, form: str, strategy: str) -> None:
    setup = Setup(name, form, sizes=NARROW, strategy=strategy, batch=5, seq_len=16)
    assert rank_pools.get("cpu", 2).run(_reduced, setup, timeout=200) == [setup.num_layers] * 2


TRAINED = (
    Setup("mixtral", "hf", train=True, sizes=NARROW, strategy="library", batch=5, seq_len=15),
    # The forward keeps masked products.
    *rare(
        Setup("mixtral", "ep", train=True, sizes=NARROW, batch=5, seq_len=15),
        Setup("qwen3_moe", "ep", train=True, sizes=NARROW, batch=5, seq_len=15),
        Setup("gpt_oss", "ep", train=True, sizes=NARROW, batch=5, seq_len=15),
        # Its config says how many heads of keys there are.
        *(
            Setup("deepseek_v3", form, train=True, sizes=replace(NARROW, heads=4), batch=5, seq_len=15)
            for form in ("ep", "hf")
        ),
    ),
)


@pytest.mark.timeout(220)
@pytest.mark.parametrize("setup", TRAINED, ids=str)
def test_training_reduces_in_a_call(rank_pools: RankPools, setup: Setup) -> None:
    if OLDER and setup.form == "hf":
        pytest.skip(f"torch {torch.__version__}: {UNSHOWN}")
    assert rank_pools.get("cpu", 2).run(_trained, setup, timeout=200) == [(1, 1)] * 2


DECODED_BY_FOUR = rare(
    (Setup("gpt_oss", "ep", sizes=FOUR, batch=3, seq_len=1), (2, 1, 1)),
    (Setup("mixtral", "ep", sizes=FOUR, batch=3, seq_len=1), (2, 3, 1)),
    (Setup("deepseek_v3", "hf", sizes=Sizes(kv_heads=4), batch=1, seq_len=1), (2, 2, 0)),
)


@pytest.mark.timeout(220)
@pytest.mark.parametrize(("setup", "wanted"), DECODED_BY_FOUR, ids=str)
def test_four_ranks_decode(rank_pools: RankPools, setup: Setup, wanted: tuple[int, int, int]) -> None:
    assert rank_pools.get("cpu", 4).run(_decoded, setup, timeout=200) == [wanted] * 4


def _reduced_by(ctx: RankContext, setup: Setup) -> tuple[int, set[str]]:
    """(What `_reduced` returns, the strategies by which the sites ran)."""
    decisions._last.clear()
    return _reduced(ctx, setup), {choice.strategy for _, choice in decisions._last.values()}


@pytest.mark.timeout(220)
@pytest.mark.parametrize(
    ("name", "form"),
    rare(
        *((name, form) for name in ("mixtral", "qwen3_moe", "deepseek_v3") for form in ("hf", "ep")),
        ("gpt_oss", "ep"),
    ),
)
def test_four_ranks_reduce_a_prompt_in_a_call(rank_pools: RankPools, name: str, form: str) -> None:
    setup = Setup(name, form, sizes=FOUR, batch=5, seq_len=14)
    found = rank_pools.get("cpu", 4).run(_reduced_by, setup, timeout=200)
    assert found == [(setup.num_layers, {"tile"})] * 4


@pytest.mark.timeout(220)
@pytest.mark.parametrize(
    ("name", "form", "strategy"),
    rare(
        ("mixtral", "hf", "library"),
        ("deepseek_v3", "hf", "tile"),
        *((name, "ep", "tile") for name in ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")),
    ),
)
def test_four_ranks_train(rank_pools: RankPools, name: str, form: str, strategy: str) -> None:
    setup = Setup(name, form, train=True, sizes=FOUR, strategy=strategy, batch=5, seq_len=16)
    assert rank_pools.get("cpu", 4).run(_trained, setup, timeout=200) == [(1, 1)] * 4


MIXED = replace(WIDE, inner=2048, experts=8)
ON_GPUS = [
    Setup("mixtral", "hf", sizes=MIXED, inductor=True),
    *(Setup("qwen3_moe", form, sizes=MIXED, inductor=True) for form in ("hf", "ep")),
    # Its config says how many heads of keys there are.
    Setup("deepseek_v3", "hf", sizes=replace(MIXED, heads=4), inductor=True),
    Setup("gpt_oss", "ep", sizes=MIXED, inductor=True),
]
TRAINED_ON_GPUS = [replace(setup, form="ep") if setup.name == "deepseek_v3" else setup for setup in ON_GPUS]


@pytest.mark.gpu
@pytest.mark.parametrize("experts", [COPIES, GROUPED])
@pytest.mark.parametrize("setup", ON_GPUS, ids=str)
def test_a_step_on_gpus(rank_pools: RankPools, setup: Setup, experts: str) -> None:
    skip_otherwise(setup)
    run = _decoded if experts == COPIES else _unsorted
    for projected, normed, summed in rank_pools.get("cuda", 2).run(
        run, replace(setup, batch=3, seq_len=1), timeout=200
    ):
        assert projected == 2 * setup.num_layers and normed >= setup.num_layers
        assert summed == (0 if setup.name == "deepseek_v3" else setup.num_layers)


@pytest.mark.gpu
@pytest.mark.parametrize("setup", ON_GPUS, ids=str)
def test_a_prompt_on_gpus(rank_pools: RankPools, setup: Setup) -> None:
    skip_otherwise(setup)
    found = rank_pools.get("cuda", 2).run(_reduced, replace(setup, seq_len=256), timeout=200)
    assert found == [setup.num_layers] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("setup", TRAINED_ON_GPUS, ids=str)
def test_training_on_gpus(rank_pools: RankPools, setup: Setup) -> None:
    if OLDER and setup.form == "hf":
        pytest.skip(f"torch {torch.__version__}: {UNSHOWN}")
    assert rank_pools.get("cuda", 2).run(_trained, replace(setup, train=True, seq_len=256), timeout=200) == [(1, 1)] * 2
