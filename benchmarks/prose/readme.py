"""The claims of README.md and docs/index.md."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.comparison import CLOSE
from benchmarks.models.facts import Fact
from benchmarks.models.tables import contests, limited, mean
from benchmarks.prose.claims import Claim, percent, span
from benchmarks.prose.picked import TWO_H200S, us_of
from benchmarks.records import Row, grouped, newest, runs


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
    many, alone = ({name: batch * 1e6 / us_of(row) for name, row in run.items()} for batch, run in whole.items())
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
    return 100.0 * (row.p80_us - row.p20_us) / us_of(row)


def _generated(rows: Sequence[Row], batch: int) -> dict[str, Row]:
    """Returns the rows by contestant with `batch` sequences, of the newest run that has all of them."""
    cells = [run for lines in grouped(rows).values() for run in runs(lines) if _is_generated(run[0], batch)]
    found = [{row.contestant: row for row in run if row.p50_us} for run in cells]
    return next(one for one in reversed(found) if all(name in one for name in GENERATED))


def _is_generated(row: Row, batch: int) -> bool:
    """Whether a row is of a cell of which README.md tells the tokens per second."""
    cell = (row.sizes["model"], row.sizes["batch"], row.sizes["layers"], row.world)
    return cell == ("llama3-8b", str(batch), "32", 2) and "H200" in row.gpu


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
