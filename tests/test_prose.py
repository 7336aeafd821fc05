"""The claims of the pages come from the rows that they speak of: another row is another number, or no claim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest

from benchmarks.prose import pages
from benchmarks.prose.accounted import Account
from benchmarks.prose.claims import Claim
from benchmarks.prose.mixtures import mixtures
from benchmarks.prose.on_four import four_gpus
from benchmarks.prose.picked import Results, pick, read_results, time_of
from benchmarks.prose.served import serving
from benchmarks.prose.taxed import taxes
from benchmarks.prose.tuned import tuning
from benchmarks.records import Row

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def results() -> Results:
    return read_results()


def grown(row: Row) -> Row:
    """The row with larger times: the order of any two stays, and no ratio does but 1."""
    times = {name: None if (us := getattr(row, name)) is None else us**1.3 for name in ("p20_us", "p50_us", "p80_us")}
    return replace(row, **times, limit_us=None if row.limit_us is None else row.limit_us**1.3)


def changed(rows: Sequence[Row], contestant: str, shape: str, factor: float) -> list[Row]:
    """The rows, and those of a contestant in cells of this shape longer by a factor."""

    def of(row: Row) -> Row:
        is_it = (row.contestant, row.shape) == (contestant, shape) and row.p50_us
        return replace(row, p50_us=factor * (row.p50_us or 0.0)) if is_it else row

    return [of(row) for row in rows]


def numbers_of(claims: Sequence[Claim], begins: str) -> tuple[str, ...]:
    (found,) = (claim for claim in claims if claim.text.startswith(begins))
    return found.numbers


def longer(account: Account) -> Account:
    """The account with times that are 1.3 times as long."""

    def of(line: Mapping[str, str]) -> dict[str, str]:
        return {name: str(1.3 * float(text)) if name.endswith("us") and text else text for name, text in line.items()}

    return Account(tuple(map(of, account.lines)))


def test_other_rows_are_other_numbers(results: Results) -> None:
    """Every claim of three pages has another number if all times grow, but for one that counts kernels."""
    rows = {
        field.name: [grown(row) for row in getattr(results, field.name)]
        for field in fields(Results)
        if field.name not in ("facts", "accounts")
    }
    accounts = {name: longer(one) for name, one in results.accounts.items()}
    other = replace(results, **rows, accounts=accounts)
    pairs = [pair for made in (serving, four_gpus, taxes) for pair in zip(made(results), made(other), strict=True)]
    assert len(pairs) > 80 and all(claim.text == now.text for claim, now in pairs)
    same = [claim.text for claim, now in pairs if claim.numbers == now.numbers]
    assert [text[:14] for text in same] == ["has {} kernels"]


def test_a_row_of_the_kernels_that_were_measured_is_the_number_of_a_page(results: Results) -> None:
    gemm = changed(results.gemm, "ditron", "M=1;N=8192;K=7168", 1.03)
    (before, now) = (numbers_of(four_gpus(one), "x [7168") for one in (results, replace(results, gemm=gemm)))
    assert before[1] == now[1] and float(now[0]) == pytest.approx(1.03 * float(before[0]), abs=0.1)


def test_sentences_that_turn_around_are_refused(results: Results) -> None:
    slow = changed(results.gemm, "ditron", "M=1;N=8192;K=7168", 2.0)
    with pytest.raises(ValueError, match="the prose says faster"):
        four_gpus(replace(results, gemm=slow))
    fast = changed(results.gemm, "ditron", "M=64;N=4096;K=3584", 0.5)
    with pytest.raises(ValueError, match="the prose says slower"):
        four_gpus(replace(results, gemm=fast))
    shape = "model=mixtral-8x7b;layers=2;form=ar;batch=1;tokens=1"
    with pytest.raises(ValueError, match="misses a floor that it reaches"):
        mixtures(replace(results, models=changed(results.models, "ditron", shape, 0.5)))
    cached = "model=llama3-70b;layers=2;form=kv;batch=128;tokens=1;cache=4096"
    with pytest.raises(ValueError, match="the prose says faster"):
        taxes(replace(results, models=changed(results.models, "ditron", cached, 1.5)))


def test_ratios_of_experts_are_those_of_their_rows(results: Results) -> None:
    shape = "model=mixtral-8x7b;layers=2;form=ar;batch=8;tokens=1"
    models = changed(results.models, "ditron", shape, 1.1)
    text = "The floor would ask for {}, {} and {} times, and"
    before, now = (numbers_of(mixtures(one), text) for one in (results, replace(results, models=models)))
    assert float(now[4]) == pytest.approx(1.1 * float(before[4]), abs=0.01)
    assert (now[:4], now[5]) == (before[:4], before[5])


def test_times_of_tables_on_tuning_are_those_of_their_rows(results: Results) -> None:
    shape = "model=qwen3-32b;layers=2;form=sp;batch=2;tokens=4096"
    removed = changed(results.removed, "ditron:untabled", shape, 2.0)
    before, now = (numbers_of(tuning(one), "| Qwen3 32B") for one in (results, replace(results, removed=removed)))
    assert (before[:2], before[3]) == (now[:2], now[3]) and float(now[2]) == pytest.approx(
        2 * float(before[2]), abs=0.02
    )


def test_accounts_are_the_numbers_of_the_page_on_taxes(results: Results) -> None:
    name = "llama-8b_decode_2xH100_batch_1"
    longer = tuple(
        {**line, "graph_us": str(2 * float(line["graph_us"] or 0))} if line["row"] == "step" else line
        for line in results.accounts[name].lines
    )
    other = replace(results, accounts={**results.accounts, name: Account(longer)})
    before, now = (numbers_of(taxes(one), "| `--batch 1` |") for one in (results, other))
    assert [float(us) for us in now[:3]] == pytest.approx([2 * float(us) for us in before[:3]], abs=1.1)
    assert now[3] == before[3] and now[4:] != before[4:]


def test_accounts_add_up(results: Results) -> None:
    for name, one in results.accounts.items():
        if one.replay("fused"):
            parts = one.kernels("fused", "") + one.part("fused", "between kernels")
            assert one.replay("fused") == pytest.approx(parts, rel=0.02), name
    with pytest.raises(ValueError, match="no kernel begins"):
        next(iter(results.accounts.values())).kernels("fused", "none of this name")


def test_a_run_of_a_cell_is_found(results: Results) -> None:
    shape = "M=64;N=4096;K=3584"
    first, last = (pick(results.gemm, "matmul_all_reduce", shape, run, world=4) for run in (0, -1))
    assert pick(results.gemm, "matmul_all_reduce", shape, last.rows[0].commit, world=4).rows == last.rows != first.rows
    with pytest.raises(ValueError, match="has no time"):
        time_of(last, "nobody")
    with pytest.raises(IndexError):
        pick(results.gemm, "matmul_all_reduce", shape, "no commit", world=4)


def test_every_page_with_claims_is_generated(results: Results) -> None:
    assert all(path.exists() and claims for path, claims in pages(ROOT, results).items())
