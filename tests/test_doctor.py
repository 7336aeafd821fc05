"""The doctor: each way of running Ditron is judged by what it needs, and the report ends in an exit code."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ditron_inductor.tools import doctor
from ditron_inductor.tools.doctor import Finding, Gpus, judge

NAMES = ("python", "torch", "triton", "tabulate", "numpy", "C++ compiler", "shared memory")
INTERPRETER = Finding("interpreter", True, "")
NO_GPU = Gpus((), None, None)
ROW = ("0", "GPU", "9.0", "141 GiB", "132")
TWO_GPUS = Gpus((ROW, ROW), Finding("peer access", True, ""), Finding("symmetric memory", True, ""))


def software(*missing: str) -> list[Finding]:
    return [Finding(name, name not in missing, "", f"install {name}" if name in missing else "") for name in NAMES]


def verdicts(findings: list[Finding], gpus: Gpus = NO_GPU, interpreter: Finding = INTERPRETER) -> list[bool]:
    """CPU library, CPU tile, GPU library, GPU tile."""
    return [verdict.ok for verdict in judge(findings, gpus, interpreter)]


def test_a_machine_without_gpus_runs_both_strategies_on_the_cpu() -> None:
    assert verdicts(software()) == [True, True, False, False]


def test_two_gpus_run_everything() -> None:
    assert verdicts(software(), TWO_GPUS) == [True, True, True, True]


def test_one_gpu_is_not_enough() -> None:
    one = Gpus((ROW,), None, None)
    assert verdicts(software(), one) == [True, True, False, False]
    assert "1 found, 2 are needed" in judge(software(), one, INTERPRETER)[2].detail


@pytest.mark.parametrize("name", ["python", "torch", "triton", "tabulate", "C++ compiler"])
def test_nothing_runs_without_the_basis(name: str) -> None:
    assert verdicts(software(name), TWO_GPUS) == [False] * 4
    assert judge(software(name), NO_GPU, INTERPRETER)[0].remedy == f"install {name}"


def test_only_tile_on_the_cpu_needs_shared_memory_and_the_interpreter() -> None:
    broken = Finding("interpreter", False, "numpy is too new")
    assert verdicts(software(), TWO_GPUS, broken) == [True, False, True, True]
    assert verdicts(software("shared memory"), TWO_GPUS) == [True, False, True, True]


def test_without_peer_access_the_gpus_run_library_only() -> None:
    gpus = Gpus(TWO_GPUS.rows, Finding("peer access", False, "missing: 0->1", "check the links"), None)
    assert verdicts(software(), gpus) == [True, True, True, False]
    assert judge(software(), gpus, INTERPRETER)[3].remedy == "check the links"


def test_a_missing_compiler_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    finding = doctor.check_compiler()
    assert not finding.ok and "g++" in finding.remedy


@pytest.mark.parametrize(
    ("version", "ok"), [("2.10.1", False), ("2.11.0+cu129", True), ("2.13.0", True), ("2.14.0", False)]
)
def test_versions_of_torch(monkeypatch: pytest.MonkeyPatch, version: str, ok: bool) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: version if name == "torch" else "9.9")
    found = {finding.name: finding for finding in doctor.check_software()}
    assert found["torch"].ok is ok and found["torch"].detail == version
    assert bool(found["torch"].remedy) is not ok


@pytest.mark.parametrize("tabulate", [True, False])
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_the_report_for_any_number_of_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], count: int, tabulate: bool
) -> None:
    links = (TWO_GPUS.peer_access, TWO_GPUS.symmetric_memory) if count > 1 else (None, None)
    monkeypatch.setattr(doctor, "check_gpus", lambda: Gpus((ROW,) * count, *links))
    monkeypatch.setattr(doctor, "check_interpreter", lambda software: INTERPRETER)
    monkeypatch.setattr(doctor, "topology_text", lambda: "")
    if not tabulate:
        monkeypatch.setitem(sys.modules, "tabulate", None)
    doctor.main()
    text = capsys.readouterr().out
    assert text.count("141 GiB") == count
    assert ("Between the GPUs" in text) == (count > 1) and ("none that torch can use" in text) == (count == 0)
    assert (f"{count} found, 2 are needed" in " ".join(text.split())) == (count < 2)


def test_the_report_is_printed_and_something_can_run_here() -> None:
    command = [sys.executable, "-m", "ditron_inductor", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("Software", "What can run here", "CPU, strategy library", "GPUs, strategy tile", "to do"):
        assert part in done.stdout
