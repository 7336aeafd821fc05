"""The claims of docs/models.md."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.models.facts import Fact
from benchmarks.models.tables import Contest, compile_ratios, contests, limited, mean
from benchmarks.prose.claims import Claim, ends, faster, percent, slower, span
from benchmarks.prose.picked import TWO_H200S, at, every_run, is_cell, older
from benchmarks.prose.readme import workspaces
from benchmarks.records import Row


def whole_models(every: Sequence[Row], facts: Sequence[Fact]) -> list[Claim]:
    """Returns the claims of docs/models.md. every: the rows of all runs."""
    found = contests(every)
    known = contests(limited(every))
    most = [one.most_gain for one in known if one.most_gain]
    of_limit = [limit / us for one in known if (limit := one.limit_us) and (us := one.us("ditron"))]
    slow = [
        *older(every, world=4, batch=1, tokens=2048, model="llama3-8b"),
        *older(every, world=4, batch=1, tokens=2048, model="llama3-70b"),
        *older(every, world=4, model="gpt-oss-120b-dense"),
    ]
    since = [one.best_gain for one in slow if one.rows[0].commit == "bd50f25"]
    before = [one.best_gain for one in slow if one.rows[0].commit != "bd50f25"]
    biased = {name: older(every, world=2, form="sp", batch=2, tokens=4096, model=name) for name in BIASED}
    gemma = older(every, world=2, form="sp", batch=2, tokens=4096, model="gemma3-27b")
    host = older(every, world=2, form="sp", batch=1, tokens=2048, model="qwen3-32b")
    lost_runs = [one.best_gain for one in host if one.best_gain and one.best_gain < 1]
    won_runs = [one.best_gain for one in host if one.best_gain and one.best_gain >= 1]
    wide = [one for one in found if one.model == "llama3-70b"]
    wide = [one for one in wide if int(one.sizes["batch"]) * int(one.sizes["tokens"]) == 8192]
    inside, outside = (
        [one.gain("inductor") or 0.0 for one in wide if is_cell(one, world=4, phase=phase)]
        for phase in ("prefill in CUDA graphs", "prefill")
    )
    highest = sorted(most)[-2:]
    (of_70b,) = (one for one in known if is_cell(one, world=2, form="sp", batch=2, tokens=4096, model="llama3-70b"))
    over_limit = (of_70b.us("ditron") or 0.0) / (of_70b.limit_us or 1.0)

    in_reduces = dict(world=2, form="ar", batch=1, tokens=2048, model="gpt-oss-120b-dense")
    batched = dict(world=2, form="sp", batch=64, tokens=128, model="llama3-8b")
    lost = dict(world=4, form="sp", batch=2, tokens=4096, model="gemma3-27b")

    claims = [
        Claim("lost these cells by up to {} %", (percent(min(gain for gain in before if gain)),)),
        Claim("From commit bd50f25 on it wins them by {} to {} %.", tuple(map(percent, ends(since)))),
        Claim("It is {} to {} times as fast as Inductor with its collectives", span(most)),
        Claim("and Ditron reaches {} to {} of it", span(of_limit)),
        Claim("{} and {} in the two cells that would gain most", tuple(f"{one:.2f}" for one in reversed(highest))),
        Claim("form took {} times as long as the limit at commit {}", (f"{over_limit:.3f}", of_70b.rows[0].commit)),
        Claim("Ditron is {} and {} times as fast as Inductor on two GPUs", _inductor(biased, -1)),
        Claim("instead of {} and {} times", _inductor(biased, 0)),
        Claim("Gemma in sequence parallel form are {} % slower", (slower(older(every, **lost)[-1].best_gain),)),
        Claim("{} to {} in {} runs", (*span(one.best_gain for one in gemma), str(len(gemma)))),
        Claim("and {} to {} % remain", tuple(map(percent, ends(inside)))),
        Claim("of a gain that is {} to {} % outside", tuple(map(percent, ends(outside)))),
        Claim("of 2048 tokens took {} ms, where the best rival took {}: the host", _milliseconds(every, **in_reduces)),
        Claim("now they take {}, where it takes {}", _milliseconds(every, -1, **in_reduces)),
        Claim("took {} ms at commit 734c830e, where async TP took {}", _milliseconds(every, "734c830e", **batched)),
        Claim("#rows_by_rank) they take {} ms, where async TP takes {}", _milliseconds(every, -1, **batched)),
        Claim("On two H200s it ran in {} cells", (str(_tuned_on_h200s(every)),)),
        Claim(MANY_SEQUENCES, tuple(f"{_many(every, model)[0]:.2f}" for model in MIXTURES)),
        Claim(MANY_SEQUENCES_SINCE, tuple(f"{_many(every, model)[1]:.2f}" for model in MIXTURES)),
        Claim("were {} and {} % slower than the best rival in two of", tuple(map(slower, lost_runs))),
        Claim("in two of {} runs. The host", (str(len(host)),)),
        Claim("of the usual speed they are {} to {} % faster", tuple(map(faster, ends(won_runs)))),
    ]
    for world, where in ((2, "{} times as long as Inductor's on two GPUs"), (4, "{} times as long on four GPUs")):
        ratios = compile_ratios([fact for fact in facts if fact.world == world])
        numbers = (f"{mean(ratios) or 0.0:.2f}", str(len(ratios)), *span(ratios))
        claims.append(Claim(f"{where} (geometric mean of {{}} cells, {{}} to {{}})", numbers))
    return [*claims, workspaces(facts), *beside_max_autotune(every)]


BIASED = ("opt-30b", "gpt-oss-120b-dense")
MIXTURES = ("mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3")
MANY_SEQUENCES = (
    "Triton kernel took {} times as long as Ditron for Mixtral, {} for Qwen3 30B, {} for Qwen3 235B and {} "
    "for DeepSeek V3"
)
"""The claim on 128 sequences of MIXTURES at commit 734c830e, before experts of so many tokens had a kernel."""
MANY_SEQUENCES_SINCE = "takes so many tokens, the best rival takes {}, {}, {} and {} times as long"
ONE_SEQUENCE = (
    (("Llama 8B", "llama3-8b"), ("GPT-OSS 120B", "gpt-oss-120b")),
    (("Llama 70B", "llama3-70b"), ("Qwen3 30B", "qwen3-30b-a3b")),
    (("Qwen3 32B", "qwen3-32b"), ("Qwen3 235B", "qwen3-235b-a22b")),
    (("Gemma 3 27B", "gemma3-27b"), ("Mixtral", "mixtral-8x7b")),
    (("OPT 30B", "opt-30b"), ("DeepSeek V3", "deepseek-v3")),
)
"""The models in each line of the table of max-autotune in docs/models.md."""


def beside_max_autotune(every: Sequence[Row]) -> list[Claim]:
    """Returns a claim for each line of the table of one sequence in docs/models.md, in us, of the newest runs that have
    max-autotune. every: the rows of all runs.
    """
    times: dict[str, tuple[float | None, ...]] = {}
    for one in every_run(every):
        tuned = one.us("max_autotune") or one.us("max_autotune_select")
        if one.phase == "decode" and one.label.endswith(" ar, 1 x 1") and one.where == TWO_H200S and tuned:
            times[one.model] = one.us("inductor"), tuned, one.us("ditron")
    return [
        Claim(
            " ".join(f"| {title} | {{}} | {{}} | {{}} |" for title, _ in line),
            tuple(f"{us or 0.0:.0f}" for _, model in line for us in times[model]),
        )
        for line in ONE_SEQUENCE
    ]


def _tuned_on_h200s(every: Sequence[Row]) -> int:
    """In how many decode cells of two H200s max-autotune ran."""
    tuned = [one for one in every_run(every) if one.where == TWO_H200S and one.us("max_autotune")]
    return len({one.label for one in tuned if one.phase == "decode"})


def _many(every: Sequence[Row], model: str) -> tuple[float, float]:
    """The best rival / Ditron with 128 sequences, at commit 734c830e and in the newest run."""
    cells = older(every, phase="decode", world=2, form="ar", batch=128, model=model)
    return at(cells, "734c830e").best_gain or 0.0, cells[-1].best_gain or 0.0


def _milliseconds(every: Sequence[Row], run: int | str = 0, **cell: object) -> tuple[str, str]:
    """Ditron's time in a run of a cell, and that of its best rival. run: its number or its commit."""
    runs_of_cell = older(every, **cell)
    found = runs_of_cell[run] if isinstance(run, int) else at(runs_of_cell, run)
    us, gain = found.us("ditron") or 0.0, found.best_gain or 0.0
    return f"{us / 1e3:.2f}", f"{us * gain / 1e3:.2f}"


def _inductor(cells: dict[str, list[Contest]], run: int) -> tuple[str, ...]:
    """Inductor / Ditron in one run of each model."""
    return tuple(f"{found[run].gain('inductor'):.2f}" for found in cells.values())
