"""The command and the picture: what is asked of the ranks, what is refused, what is drawn."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ditron_inductor.__main__ import main
from ditron_inductor.taxes import command
from ditron_inductor.taxes.accounts import SiteTaxes, StepTimes, fused_account, unfused_account
from ditron_inductor.taxes.command import TaxRequest
from ditron_inductor.taxes.intermediates import Intermediates
from ditron_inductor.taxes.probe import Spent
from ditron_inductor.taxes.report import TaxReport
from ditron_inductor.tools.processes import Rank
from tests.ranks import RankContext, RankPool, RankPools
from tests.test_explain import site

TINY = ["taxes", "llama-tiny", "--device", "cpu"]


def made_up() -> TaxReport:
    """A report as two H200s could have made it."""
    sites = []
    for index in range(2):
        bytes_ = Intermediates(400_000, 400_000, 200_000)
        unfused = unfused_account(Spent("library", 1, 100.0, 40.0), bytes_, 4000.0)
        fused = fused_account(Spent("tile", 1, 70.0, 0.0), bytes_, 4000.0, unfused)
        taxed = SiteTaxes("forward", site(site=f"ab12/{index}:matmul_all_reduce"), True, unfused, fused)
        sites.append(taxed.with_launches(20.0, 12.0))
    steps = {"inductor": StepTimes(270.0, 210.0), "unfused": StepTimes(260.0, 200.0), "fused": StepTimes(180.0, 142.0)}
    return TaxReport(tuple(sites), (), steps, "NVIDIA H200", 2, 4000.0, 15, ("inductor: a note",))


def test_the_gain_and_what_explains_it_are_told() -> None:
    text = made_up().text()
    assert "in a CUDA graph: the fused step is 58 us shorter than the unfused one" in text
    assert "by the accounts, 60 us of taxes are saved, 103 % of it" in text
    assert "eager: the fused step is 80 us shorter" in text and "82 us of taxes are saved" in text
    assert "and 0 us of other times" in text
    assert "inductor - unfused): 10 us" in text and "inductor: a note" in text
    assert "20.0 -> 12.0" in text and "say nothing about speed" not in text


def asked(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> TaxRequest:
    requests: list[Any] = []
    monkeypatch.setattr(command, "run_ranks", lambda target, request, **kwargs: requests.append(request) or [0, 0])
    assert main([*TINY, *arguments]) == 0
    (request,) = requests
    assert isinstance(request, TaxRequest)
    return request


def test_the_defaults_follow_from_the_phase(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    request = asked(monkeypatch)
    assert request == TaxRequest("llama-tiny", 1, "prefill", "sp", 2, 16, "tile", 0, True, "", "")
    request = asked(monkeypatch, "--phase", "decode", "--layers", "3", "--csv", str(tmp_path / "taxes.csv"))
    assert (request.form, request.tokens, request.layers) == ("ar", 1, 3)
    assert request.csv == str(tmp_path / "taxes.csv")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tokens", "9"], "does not divide over 2 ranks"),
        (["--layers", "-1"], "at least 1"),
        (["--ranks", "1"], "at least 2"),
        (["--csv", "/nowhere/taxes.csv"], "no folder /nowhere"),
    ],
)
def test_a_command_that_cannot_run_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main([*TINY, *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_large_model_is_not_interpreted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["taxes", "llama-8b", "--device", "cpu"]) == 2
    assert "llama-tiny" in capsys.readouterr().err


def test_a_failing_rank_fails_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "run_ranks", lambda *args, **kwargs: [0, 1])
    assert main(TINY) == 1
    assert "rank 1 (exit code 1)" in capsys.readouterr().err


def test_without_matplotlib_the_picture_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*TINY, "--png", str(tmp_path / "taxes.png")]) == 2
    error = capsys.readouterr().err
    assert "matplotlib is needed for a picture" in error and "ditron-inductor[bench]" in error


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made_up().save_png(tmp_path / "taxes.png")
    assert (tmp_path / "taxes.png").read_bytes().startswith(b"\x89PNG")


def _run_rank(ctx: RankContext, request: TaxRequest) -> bool:
    rank = Rank(ctx.rank, ctx.world_size, ctx.device.type, "", 60.0)
    with pytest.MonkeyPatch.context() as patch:
        # The group is there already.
        patch.setattr(Rank, "join", lambda self: ctx.device)
        torch._dynamo.reset()
        return command.rank_main(rank, request)


@pytest.mark.all_cases
@pytest.mark.timeout(300)
@pytest.mark.parametrize("phase", ["prefill", "decode", "training"])
def test_every_phase_runs(rank_pools: RankPools, tmp_path: Path, phase: str) -> None:
    form, tokens = ("ar", 1) if phase == "decode" else ("sp", 8)
    request = TaxRequest("llama-tiny", 1, phase, form, 2, tokens, "tile", 1, True, str(tmp_path / "taxes.csv"), "")
    assert all(rank_pools.get("cpu", 2).run(_run_rank, replace(request), timeout=280))
    lines = (tmp_path / "taxes.csv").read_text().splitlines()
    assert len(lines) > 6 and any("backward" in line for line in lines) == (phase == "training")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("phase", ["prefill", "decode", "training"])
def test_layers_on_gpus(gpu_pool: RankPool, tmp_path: Path, phase: str) -> None:
    """Every step is captured, every site has its launch tax, and what runs by `tile` has a trace."""
    form, tokens = ("ar", 1) if phase == "decode" else ("sp", 1024)
    table, picture = tmp_path / "taxes.csv", tmp_path / "trace.json"
    request = TaxRequest("llama-8b", 1, phase, form, 2, tokens, "tile", 5, True, str(table), "", str(picture))
    assert all(gpu_pool.run(_run_rank, request, timeout=380))
    rows = list(csv.DictReader(table.open()))
    steps = {row["form"]: row for row in rows if row["row"] == "step"}
    assert set(steps) == {"inductor", "unfused", "fused"}
    assert all(float(row["graph_us"]) > 0 for row in steps.values())
    sites = [row for row in rows if row["row"] == "site"]
    assert {row["strategy"] for row in sites if row["form"] == "fused"} == {"tile"}
    assert all(float(row["launch_us"]) >= 0 for row in sites if row["kind"].startswith(("matmul", "all_gather_matmul")))
    spans = [row for row in json.loads(picture.read_text())["traceEvents"] if row["ph"] == "X"]
    if form == "sp":
        # Within a second of each other: one step, by clocks that agree.
        assert {row["pid"] for row in spans} == set(range(gpu_pool.world_size))
        assert max(row["ts"] + row["dur"] for row in spans) < 1e6
        assert len({row["tid"] for row in spans}) > 16
