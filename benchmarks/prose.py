"""The numbers in the prose of README and docs, made from the results.

A *claim* is a piece of a page's text with `{}` for every number in it, and the numbers as the results have them.
`python -m benchmarks.report` puts the numbers into the pages; `--check`, and with it a test, fails where a page has
others. Whoever rewrites a sentence with a claim changes the claim too: a page without the text of one is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.comparison import CLOSE, Comparison, comparisons, fastest_ratio
from benchmarks.models.facts import Fact
from benchmarks.models.tables import Contest, compile_ratios, contests, limited, mean
from benchmarks.ops import targets
from benchmarks.records import Row, grouped, newest, runs

NUMBER = r"(-?\d+(?:\.\d+)?)"
WORLD = 4
"""Ranks of the tables of single kernels."""
TWO_H200S = ("NVIDIA H200", 2)


@dataclass(frozen=True)
class Claim:
    """`text`, which stands once in a page, however its lines are broken, with `numbers` for each `{}` in it."""

    text: str
    numbers: tuple[str, ...]

    @property
    def pattern(self) -> re.Pattern[str]:
        words = [re.escape(word).replace(r"\{\}", NUMBER) for word in self.text.split()]
        return re.compile(r"\s+".join(words))

    def match(self, page: str) -> re.Match[str]:
        """Where it stands. ValueError unless that is one place."""
        found = list(self.pattern.finditer(page))
        if len(found) != 1:
            raise ValueError(f"the page has {len(found)} times, not once: {self.text}")
        return found[0]

    def put_into(self, page: str) -> str:
        """The page with these numbers."""
        found = self.match(page)
        ends = [found.start(), *(place for group in range(1, len(self.numbers) + 1) for place in found.span(group))]
        kept = [page[begin:end] for begin, end in list(pairwise(ends))[::2]]
        return page[: found.start()] + "".join(map("".join, zip(kept, self.numbers, strict=True))) + page[ends[-1] :]


def with_claims(page: str, claims: Iterable[Claim]) -> str:
    """The page with the numbers of all claims."""
    for claim in claims:
        page = claim.put_into(page)
    return page


def percent(ratio: float) -> str:
    """How far a ratio is from 1, in whole per cent."""
    return f"{abs(100 * (ratio - 1)):.0f}"


def slower(gain: float | None) -> str:
    """By how many per cent Ditron is slower. gain: how many times as fast it is. ValueError if it is not slower."""
    return _said("slower", gain, gain is not None and gain < 1)


def faster(gain: float | None) -> str:
    """By how many per cent Ditron is faster. gain: how many times as fast it is. ValueError if it is not faster."""
    return _said("faster", gain, gain is not None and gain > 1)


def _said(text: str, gain: float | None, holds: bool) -> str:
    if gain is None or not holds:
        raise ValueError(f"the prose says {text}, and Ditron is {gain} times as fast: write the sentence anew")
    return percent(gain)


def span(values: Iterable[float | None], digits: int = 2) -> tuple[str, str]:
    """The least and the most of those that there are."""
    known = [value for value in values if value is not None]
    return f"{min(known):.{digits}f}", f"{max(known):.{digits}f}"


def _is(one: Contest, *, world: int | None = None, phase: str = "prefill", **sizes: object) -> bool:
    """Whether a cell was measured on H200s, of which the prose speaks, and has all of these sizes, by the names that
    they have in `shape`.
    """
    same = all(one.sizes.get(name) == str(value) for name, value in sizes.items())
    return same and "H200" in one.where[0] and one.phase == phase and world in (None, one.where[1])


def _older(rows: Iterable[Row], **cell: object) -> list[Contest]:
    """Every run of the cells that have these sizes, the oldest first."""
    return [one for one in _runs(rows) if _is(one, **cell)]  # type: ignore[arg-type]


def _runs(rows: Iterable[Row]) -> list[Contest]:
    """Every run of every cell, the oldest of a cell first."""
    return [Contest(tuple(run)) for lines in grouped(rows).values() for run in runs(lines)]


def readme(models: Sequence[Row], facts: Sequence[Fact], generated: Sequence[Row]) -> list[Claim]:
    """Returns the claims of README.md."""
    measured = [one for one in contests(models) if one.best_gain]
    lost = [gain for one in measured if (gain := one.best_gain) and gain < 1]
    clearly = sum(gain < CLOSE and not one.unclear for one in measured if (gain := one.best_gain))
    limits = span(one.most_gain for one in contests(limited(models)))
    return [
        *home(models),
        Claim("in {} of {} cells, by up to {} %", (str(len(lost)), str(len(measured)), percent(min(lost)))),
        Claim("in {} of them by more than {} % and outside of noise", (str(clearly), percent(CLOSE))),
        Claim("alone with nothing to wait for, is [{} to {} times]", limits),
        workspaces(facts),
        on_h200s(models),
        *generation(generated),
    ]


GENERATED = ("ditron", "ditron:local", "inductor", "inductor:local")


def generation(rows: Sequence[Row]) -> list[Claim]:
    """Returns the claims on tokens per second of a whole model in README.md. rows: of all runs."""
    whole = {batch: _generated(rows, batch) for batch in (32, 1)}
    many, alone = ({name: batch * 1e6 / _us(row) for name, row in run.items()} for batch, run in whole.items())
    texts = (
        "makes {} tokens per second with Ditron, and {} compiled as [for serving](docs/guide/serving.md); Inductor "
        "makes {} and {}. That is {} times as many as the better of these",
        "With one sequence they are {} and {}, {} and {}: {} times",
    )
    found = []
    for text, rates in zip(texts, (many, alone), strict=True):
        others = {name: rate for name, rate in rates.items() if not name.startswith("ditron")}
        over = rates["ditron:local"] / max(others.values())
        found.append(Claim(text, (*(f"{rates[name]:.0f}" for name in GENERATED), f"{over:.2f}")))
    spreads = [(name.endswith(":local"), _spread(row)) for run in whole.values() for name, row in run.items()]
    served, other = (max(spread for local, spread in spreads if local is wanted) for wanted in (True, False))
    text = "percentile of a step are up to {} % apart where it was compiled for serving, and up to {} % elsewhere"
    return [*found, Claim(text, (f"{served:.1f}", f"{other:.0f}"))]


def _spread(row: Row) -> float:
    """How far the 20th and the 80th percentile are apart, in percent of the median."""
    assert row.p20_us is not None and row.p80_us is not None
    return 100.0 * (row.p80_us - row.p20_us) / _us(row)


def _us(row: Row) -> float:
    assert row.p50_us is not None
    return row.p50_us


def _generated(rows: Sequence[Row], batch: int) -> dict[str, Row]:
    """Returns the rows by contestant with `batch` sequences, of the newest run that has all of them."""
    cells = [run for lines in grouped(rows).values() for run in runs(lines) if _is_generated(run[0], batch)]
    found = [{row.contestant: row for row in run if row.p50_us} for run in cells]
    return next(one for one in reversed(found) if all(name in one for name in GENERATED))


def _is_generated(row: Row, batch: int) -> bool:
    """Whether a row is of a cell of which README.md tells the tokens per second."""
    cell = (row.sizes["model"], row.sizes["batch"], row.sizes["layers"], row.world)
    return cell == ("llama3-8b", str(batch), "32", 2) and "H200" in row.gpu


def beside_attention(attention: Sequence[Row]) -> list[Claim]:
    """Returns the claims of docs/when_it_pays.md on four GPUs."""
    causal = [row for row in newest(attention) if row.op == "all_gather_attention" and _plain(row) and row.world == 4]
    both = [row for row in newest(attention) if row.op in ("matmul_all_to_all", "all_to_all_matmul") and row.world == 4]
    return [
        Claim("All-to-alls with their matmuls are {} to {} times as fast", span(_gains(both, "nccl"))),
        Claim("is {} to {} times as fast as torch's ring attention", span(_gains(causal, "ring"))),
        Claim("and {} to {} times as fast as a gather followed by", span(_gains(causal, "sdpa:blocks"))),
    ]


def home(models: Sequence[Row]) -> list[Claim]:
    """Returns the claims of docs/index.md, without mixtures of experts, on the GPUs that were measured last."""
    decode = [
        one
        for one in contests(models)
        if one.phase == "decode" and not one.routed and one.where == TWO_H200S and one.best_gain
    ]
    over_inductor = [gain for one in decode if (gain := one.gain("inductor"))]
    over_best = [gain for one in decode if (gain := one.best_gain)]
    text = "is {} times as fast as by Inductor on two H200s**, and {} times as fast as by the best rival of each cell"
    return [
        Claim(text, (f"{mean(over_inductor) or 0.0:.2f}", f"{mean(over_best) or 0.0:.2f}")),
        Claim("geometric means of {} cells", (str(len(decode)),)),
    ]


def on_h200s(models: Sequence[Row]) -> Claim:
    """Returns the claim of README.md on the decode cells of two H200s that max-autotune ran in."""
    cells = [one for one in contests(models) if one.where == TWO_H200S and one.phase == "decode"]
    gains = [gain for one in cells if one.us("max_autotune") and (gain := one.best_gain)]
    text = "In {} decode cells on two H200s, with max-autotune as a rival, Ditron is {} to {} times as fast as the best"
    return Claim(text, (str(len(gains)), *span(gains)))


def workspaces(facts: Sequence[Fact]) -> Claim:
    """Returns the claim on workspaces of docs/models.md and README.md."""
    every = [fact.workspace_mib for fact in newest(facts) if fact.workspace_mib]
    of_8b = [fact.workspace_mib for fact in newest(facts) if fact.workspace_mib and "8b" in fact.sizes["model"]]
    ends = (*span(of_8b, 0), span(every, 0)[1])
    return Claim("{} to {} MiB in the cells of Llama 8B, and up to {} MiB in all cells", ends)


def _plain(row: Row) -> bool:
    """Causal, without a window or a soft cap."""
    return row.sizes["mask"] == "causal_offset" and not {"window", "softcap"} & set(row.sizes)


def _gains(rows: Iterable[Row], over: str) -> list[float]:
    """In every cell, how many times as fast as a rival Ditron's own choice is."""
    found = [fastest_ratio(lines, (over,), ("ditron",)) for lines in grouped(rows).values()]
    return [gain for gain in found if gain is not None]


def whole_models(every: Sequence[Row], facts: Sequence[Fact]) -> list[Claim]:
    """Returns the claims of docs/models.md. every: the rows of all runs."""
    found = contests(every)
    known = contests(limited(every))
    most = [one.most_gain for one in known if one.most_gain]
    of_limit = [limit / us for one in known if (limit := one.limit_us) and (us := one.us("ditron"))]
    slow = [
        *_older(every, world=4, batch=1, tokens=2048, model="llama3-8b"),
        *_older(every, world=4, batch=1, tokens=2048, model="llama3-70b"),
        *_older(every, world=4, model="gpt-oss-120b-dense"),
    ]
    since = [one.best_gain for one in slow if one.rows[0].commit == "bd50f25"]
    before = [one.best_gain for one in slow if one.rows[0].commit != "bd50f25"]
    biased = {name: _older(every, world=2, form="sp", batch=2, tokens=4096, model=name) for name in BIASED}
    gemma = _older(every, world=2, form="sp", batch=2, tokens=4096, model="gemma3-27b")
    host = _older(every, world=2, form="sp", batch=1, tokens=2048, model="qwen3-32b")
    lost_runs = [one.best_gain for one in host if one.best_gain and one.best_gain < 1]
    won_runs = [one.best_gain for one in host if one.best_gain and one.best_gain >= 1]
    inside, outside = (
        [one.gain("inductor") or 0.0 for one in found if one.model == "llama3-70b" and _is(one, world=4, phase=phase)
         and int(one.sizes["batch"]) * int(one.sizes["tokens"]) == 8192]
        for phase in ("prefill in CUDA graphs", "prefill")
    )  # fmt: skip
    highest = sorted(most)[-2:]
    (of_70b,) = (one for one in known if _is(one, world=2, form="sp", batch=2, tokens=4096, model="llama3-70b"))
    over_limit = (of_70b.us("ditron") or 0.0) / (of_70b.limit_us or 1.0)

    in_reduces = dict(world=2, form="ar", batch=1, tokens=2048, model="gpt-oss-120b-dense")
    batched = dict(world=2, form="sp", batch=64, tokens=128, model="llama3-8b")
    lost = dict(world=4, form="sp", batch=2, tokens=4096, model="gemma3-27b")

    claims = [
        Claim("lost these cells by up to {} %", (percent(min(gain for gain in before if gain)),)),
        Claim("From commit bd50f25 on it wins them by {} to {} %.", tuple(map(percent, _ends(since)))),
        Claim("It is {} to {} times as fast as Inductor with its collectives", span(most)),
        Claim("and Ditron reaches {} to {} of it", span(of_limit)),
        Claim("{} and {} in the two cells that would gain most", tuple(f"{one:.2f}" for one in reversed(highest))),
        Claim("form took {} times as long as the limit at commit {}", (f"{over_limit:.3f}", of_70b.rows[0].commit)),
        Claim("Ditron is {} and {} times as fast as Inductor on two GPUs", _inductor(biased, -1)),
        Claim("instead of {} and {} times", _inductor(biased, 0)),
        Claim("Gemma in sequence parallel form are {} % slower", (slower(_older(every, **lost)[-1].best_gain),)),
        Claim("{} to {} in {} runs", (*span(one.best_gain for one in gemma), str(len(gemma)))),
        Claim("and {} to {} % remain", tuple(map(percent, _ends(inside)))),
        Claim("of a gain that is {} to {} % outside", tuple(map(percent, _ends(outside)))),
        Claim("of 2048 tokens took {} ms, where the best rival took {}: the host", _milliseconds(every, **in_reduces)),
        Claim("now they take {}, where it takes {}", _milliseconds(every, -1, **in_reduces)),
        Claim("took {} ms at commit 734c830e, where async TP took {}", _milliseconds(every, "734c830e", **batched)),
        Claim("#rows_by_rank) they take {} ms, where async TP takes {}", _milliseconds(every, -1, **batched)),
        Claim("On two H200s it ran in {} cells", (str(_tuned_on_h200s(every)),)),
        Claim(MANY_SEQUENCES, tuple(f"{_many(every, model)[0]:.2f}" for model in MIXTURES)),
        Claim(MANY_SEQUENCES_SINCE, tuple(f"{_many(every, model)[1]:.2f}" for model in MIXTURES)),
        Claim("were {} and {} % slower than the best rival in two of", tuple(map(slower, lost_runs))),
        Claim("in two of {} runs. The host", (str(len(host)),)),
        Claim("of the usual speed they are {} to {} % faster", tuple(map(faster, _ends(won_runs)))),
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
    for one in _runs(every):
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
    tuned = [one for one in _runs(every) if one.where == TWO_H200S and one.us("max_autotune")]
    return len({one.label for one in tuned if one.phase == "decode"})


def _many(every: Sequence[Row], model: str) -> tuple[float, float]:
    """The best rival / Ditron with 128 sequences, at commit 734c830e and in the newest run."""
    cells = _older(every, phase="decode", world=2, form="ar", batch=128, model=model)
    return _at(cells, "734c830e").best_gain or 0.0, cells[-1].best_gain or 0.0


def _at(cells: Sequence[Contest], commit: str) -> Contest:
    """Returns the run at a commit."""
    (found,) = (one for one in cells if one.rows[0].commit == commit)
    return found


def _ends(values: Iterable[float | None]) -> tuple[float, float]:
    known = [value for value in values if value]
    return min(known), max(known)


def _milliseconds(every: Sequence[Row], run: int | str = 0, **cell: object) -> tuple[str, str]:
    """Ditron's time in a run of a cell, and that of its best rival. run: its number or its commit."""
    runs_of_cell = _older(every, **cell)
    found = runs_of_cell[run] if isinstance(run, int) else _at(runs_of_cell, run)
    us, gain = found.us("ditron") or 0.0, found.best_gain or 0.0
    return f"{us / 1e3:.2f}", f"{us * gain / 1e3:.2f}"


def _inductor(cells: dict[str, list[Contest]], run: int) -> tuple[str, ...]:
    """Inductor / Ditron in one run of each model."""
    return tuple(f"{found[run].gain('inductor'):.2f}" for found in cells.values())


def single_kernels(rows: Sequence[Row], models: Sequence[Row]) -> list[Claim]:
    """Returns the claims of docs/when_it_pays.md. models: the rows of all runs."""
    cells = [cell for cell in comparisons(rows) if cell.world == WORLD and cell.gpu != "cpu"]
    anchors = [cell for cell in cells if targets.is_anchor(cell)]
    eager, graph = ({op: _best(anchors, op, mode) for op in LIMITED} for mode in (0, 1))
    shapes = [cell.shape for cell in anchors if cell.op == "matmul_reduce_scatter" and not cell.graph][:5]
    captured = [cell for cell in cells if cell.graph and cell.shape in shapes]
    gather, scatter = LIMITED
    (timed,) = (cell for cell in anchors if (cell.op, cell.shape) == (scatter, TIMED_INSIDE))
    tile = timed.ratio("limit", "ditron:tile")
    small = [cell for cell in anchors if cell.op == "matmul_all_reduce" and cell.graph and 64 <= cell.M <= 256]
    behind = [cell.ratio("ditron", "symm_mem:two_shot") for cell in small]
    slow, *_ = _older(models, world=2, form="sp", batch=1, tokens=2048, model="qwen3-32b")
    host = tuple(f"{(slow.us(name) or 0.0) / 1e3:.2f}" for name in ("ditron", "inductor", "async_tp"))
    return [
        Claim("`all_gather_matmul`: {}, {}, {}, {}, {}, {} and, in a graph, {}", eager[gather] + graph[gather]),
        Claim("`matmul_reduce_scatter`: {}, {}, {}, {}, {}, {} and, in a graph, {}", eager[scatter] + graph[scatter]),
        Claim("the first five are {}, {}, {}, {} and {}", _best(captured, scatter, 1)),
        Claim("(the product alone in Triton) and {}", (f"{tile:.2f}",)),
        Claim("({} to {} % longer)", tuple(map(percent, _ends(behind)))),
        Claim("took {} ms, against {} ms by Inductor and {} ms by async TP", host),
    ]


TIMED_INSIDE = "2048 x 8192 x 7168"
"""The reduce-scatter whose kernel was timed part by part."""
LIMITED = ("all_gather_matmul", "matmul_reduce_scatter")


def _best(cells: Iterable[Comparison], op: str, graph: int) -> tuple[str, ...]:
    those = [cell for cell in cells if (cell.op, cell.graph) == (op, graph)]
    ratios = (cell.ratio("limit", ("ditron:tile", "ditron:chunked")) for cell in those)
    return tuple(f"{ratio:.2f}" for ratio in ratios if ratio)


def engines(models: Sequence[Row]) -> list[Claim]:
    """Returns the claims of docs/guide/other_stacks.md, on layers as vLLM writes them."""
    found = [one for one in contests(models) if one.model.endswith("-vllm")]

    def gains(gpu: str, phase: str, mixture: bool | None = None, over: str = "") -> tuple[str, ...]:
        those = [one for one in found if gpu in one.where[0] and one.phase == phase]
        those = [one for one in those if mixture is None or one.routed is mixture]
        return span(one.gain(over) if over else one.best_gain for one in those)

    return [
        Claim("decode is {} to {} times as fast as by the best rival", gains("H100", "decode", False)),
        Claim(
            "{} to {} times as fast as with one kernel for an all-reduce and its norm",
            gains("H100", "decode", False, "one_shot_norm"),
        ),
        Claim("those of a mixture of experts {} to {} times", gains("H100", "decode", True)),
        Claim("Prefill is {} to {} times as fast", gains("H100", "prefill")),
        Claim("dense models wins by factors of {} to {}", gains("H200", "decode", False)),
        Claim("and that of the mixture by {} to {}", gains("H200", "decode", True)),
    ]


def pages(
    root: Path,
    gemm: Sequence[Row],
    attention: Sequence[Row],
    models: Sequence[Row],
    facts: Sequence[Fact],
    generated: Sequence[Row],
) -> dict[Path, list[Claim]]:
    """The claims of every page. gemm, attention, models, generated: the rows of all runs of these files."""
    return {
        root / "README.md": readme(models, facts, generated),
        root / "docs" / "index.md": home(models),
        root / "docs" / "guide" / "other_stacks.md": engines(models),
        root / "docs" / "models.md": whole_models(models, facts),
        root / "docs" / "when_it_pays.md": single_kernels(gemm, models) + beside_attention(attention),
    }
