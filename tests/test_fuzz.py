"""The fuzzer: programs follow from their numbers, ranks agree on some of them, and faults are reported and survived."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import torch

from tests.fuzz.__main__ import arguments, main
from tests.fuzz.execute import difference, run_program
from tests.fuzz.generate import make_program
from tests.fuzz.program import Place, Program
from tests.fuzz.supervise import Fuzzer
from tests.fuzz.verdict import Settings, Verdict
from tests.planted_faults import planted
from tests.rank_process import Outcome, RankError
from tests.ranks import RankPool

CPU = Place(2, "cpu", captures=False, averages=False, divergent=0.2)
MESH = Place(4, "cuda", captures=True, averages=True, divergent=0.5)
# Small ones of seed 11, by `tile`: one with a backward.
SMALL = (20, 26, 67)
QUICK = Settings(generated=False)


def make_pool() -> RankPool:
    return RankPool(2)


def test_a_program_follows_from_its_numbers() -> None:
    for place in (CPU, MESH):
        first = [str(make_program(3, index, place)) for index in range(50)]
        assert first == [str(make_program(3, index, place)) for index in range(50)]
        assert len(set(first)) == 50
        assert first[7] != str(make_program(4, 7, place))


def test_programs_have_everything_in_them() -> None:
    programs = [make_program(0, index, MESH) for index in range(300)]
    text = "\n".join(map(str, programs))
    words = ("gather(", "scatter(", "reduce(", "exchange(", "attention(", "rms_norm(", "layer_norm(", "graph_break()")
    forms = (
        ".t() @",
        "F.linear(",
        "torch.addmm(",
        "torch.bmm(",
        "einsum",
        ".to(F32)",
        " * 0.22",
        "new_zeros",
        "_eager(",
        ', "avg")',
        ".index_copy_(2, ",
        "[:, :, 0]",
        ".gather(1, ",
        "attention_with_sinks(",
        "turned_by_halves(",
        "grouped(",
        "[flat]",
        "index_add(",
        "scatter_add(",
        "tkn->tn",
        "searchsorted(",
        "absent = ids // ",
    )
    for part in (*words, *forms, ", A", ", B", ", C", "if RANK ==", "777", "191", "sleeps", "spins"):
        assert part in text, part
    for program in programs:
        compile(program.source, "program", "exec")
        found = sum(program.source.count(f"{word}(") for word in ("gather", "scatter", "reduce", "exchange"))
        assert 1 <= found <= 9 and len(program.calls) >= 2
    for name in ("dynamic", "capture", "trained", "differs", "keeps_inputs"):
        assert {bool(getattr(program, name)) for program in programs} == {True, False}, name
    alike = [make_program(0, index, Place(4, "cuda", True, True, 0.0)) for index in range(300)]
    assert not any(program.differs or "RANK" in program.source for program in alike)


def test_ranks_of_a_mesh_have_rows_and_columns() -> None:
    assert [MESH.members("B", rank) for rank in (0, 1, 3)] == [[0, 1], [0, 1], [2, 3]]
    assert [MESH.members("C", rank) for rank in (0, 1, 3)] == [[0, 2], [1, 3], [1, 3]]
    assert not MESH.overlap("B", "C") and MESH.overlap("A", "C") and CPU.overlap("A", "B")


def test_a_value_is_held_to_the_reference() -> None:
    wanted = torch.randn(50, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    runs = [wanted.bfloat16()] * 2
    assert not difference(wanted.bfloat16(), wanted, runs, torch.bfloat16, depth=2)
    wrong, missing = wanted.bfloat16(), wanted.bfloat16()
    wrong[7, 3] += 0.5
    missing[0, 0] = float("nan")
    assert "1 of 2000 entries" in difference(wrong, wanted, runs, torch.bfloat16, depth=2)
    assert "[7, 3]" in difference(wrong, wanted, runs, torch.bfloat16, depth=2)
    assert "nan" in difference(missing, wanted, runs, torch.bfloat16, depth=2)
    assert difference(wanted.bfloat16()[1:], wanted, runs, torch.bfloat16, depth=2)
    assert difference(None, wanted, runs, torch.bfloat16, depth=2)


def test_some_programs_run() -> None:
    place = Place(2, "cpu", captures=False, averages=False, divergent=0.0)
    said: list[str] = []
    fuzzer = Fuzzer(make_pool, run_program, QUICK, limit_s=60.0, say=said.append)
    programs = [make_program(11, index, place) for index in SMALL]
    at, chosen = next((at, one) for at, one in enumerate(programs) if not one.trained)
    calls = tuple(replace(call, renewed=(number % 2,)) for number, call in enumerate(chosen.calls))
    programs[at] = replace(chosen, capture="trees", calls=calls)
    assert programs[at].keeps_inputs
    summary = fuzzer.run(programs)
    assert summary.programs == len(SMALL) and not summary.failures, "\n".join(said)
    assert sum(count for name, count in summary.sites.items() if "left alone" not in name) >= len(SMALL)
    assert "3 programs, 0 failed" in fuzzer.text(summary)


def test_faults_are_reported_and_do_not_stop_the_run() -> None:
    said: list[str] = []
    command = "python -m tests.fuzz --seed {} --only {}"
    fuzzer = Fuzzer(make_pool, planted, QUICK, limit_s=2.0, compare=False, say=said.append,
                    command=lambda program, before: command.format(program.seed, program.index))  # fmt: skip
    summary = fuzzer.run(make_program(5, index, CPU) for index in range(4))
    assert summary.programs == 4 and summary.sites["all_gather_matmul"] == 2
    wrong, hang = summary.failures
    assert (wrong.program.index, wrong.how, wrong.before) == (1, "wrong value", (0,)) and "3 for 4" in wrong.report
    assert (hang.program.index, hang.how) == (2, "hang")
    # The stack of the rank that hangs, the source, and how to see it again.
    assert "in planted" in hang.report and "def program(" in hang.report
    assert said == [wrong.report, hang.report]
    text = fuzzer.text(summary)
    assert all(f"python -m tests.fuzz --seed 5 --only {index}" in text for index in (1, 2))
    assert text.splitlines()[-1].startswith("4 programs, 2 failed")


class Pool:
    """In the place of ranks: they answer at once, by Ditron as `said`, and by Inductor wrongly in program 2 alone."""

    def __init__(self, said: dict[int, list[Outcome]]) -> None:
        self.said = said

    def run(self, fn: object, *args: object, timeout: float) -> None:
        pass

    def outcomes(self, fn: object, program: Program, settings: Settings, **limits: float) -> list[Outcome]:
        if settings.backend == "ditron":
            return self.said[program.index]
        wrong = "5 for 4" if program.index == 2 else ""
        return [Outcome(rank, Verdict(wrong=wrong)) for rank in range(2)]

    def log_tail(self, rank: int, length: int) -> str:
        return "stacks"

    def close(self) -> None:
        pass


def test_failures_are_told_from_what_inductor_fails_in_too() -> None:
    right, wrong, refused = Verdict(), Verdict(wrong="3 for 4"), Verdict(refused="no chunks")
    error = RankError("ValueError", ("ValueError",), "planted", "Traceback of planted")
    said = {
        0: [Outcome(0, right), Outcome(1, right)],
        1: [Outcome(0, wrong), Outcome(1, right)],
        2: [Outcome(0, right), Outcome(1, wrong)],
        3: [Outcome(0, error=error), Outcome(1, lost="no answer to run_program in time")],
        4: [Outcome(0, refused), Outcome(1, refused)],
        5: [Outcome(0, refused), Outcome(1, right)],
    }
    fuzzer = Fuzzer(lambda: cast(RankPool, Pool(said)), planted, QUICK, 1.0, jobs=2, say=lambda text: None)
    summary = fuzzer.run(make_program(5, index, CPU) for index in said)
    failed = {failure.program.index: failure for failure in summary.failures}
    assert {index: failure.how for index, failure in failed.items()} == {
        1: "wrong value",
        3: "error (ValueError, a hang of others)",
        5: "a strategy that some ranks refuse",
    }
    assert {failure.by_inductor for failure in failed.values()} == {"right"}
    assert [(failure.program.index, failure.by_inductor) for failure in summary.unfit] == [(2, "wrong value")]
    assert summary.refused == 1 and "Traceback of planted" in failed[3].report and "stacks" in failed[3].report
    assert "1 failed by Inductor too, 1 refused by their strategy" in fuzzer.text(summary)


def test_the_time_ends_a_run() -> None:
    fuzzer = Fuzzer(make_pool, planted, QUICK, limit_s=1.0)
    assert fuzzer.run((make_program(5, 0, CPU) for _ in range(3)), seconds=0.0).programs == 0


def test_the_command_line_shows_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--seed", "3", "--first", "7", "--programs", "2", "--show"]) == 0
    text = capsys.readouterr().out
    assert str(make_program(3, 7, CPU)) in text and "# program 8 of seed 3" in text
    assert arguments([]).divergent == CPU.divergent


def test_ranks_differ_only_where_they_meet(capsys: pytest.CaptureFixture[str]) -> None:
    assert arguments([]).divergent == 0.2 and arguments(["--interpreted"]).divergent == 0.0
    assert arguments(["--interpreted", "--divergent", "0"]).divergent == 0.0
    with pytest.raises(SystemExit):
        arguments(["--interpreted", "--divergent", "0.2"])
    assert "runs no meeting" in capsys.readouterr().err
