"""What is shipped: the package imports nothing that it does not depend on, and a wheel runs without its repository."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from ditron_inductor.__main__ import main
from ditron_inductor.tools import bench
from ditron_inductor.version import VERSION

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWN = {"ditron_inductor", "benchmarks"}
PICTURES = {"matplotlib"}
"""Of the extra `bench`; without it a command says what to install."""

MODELS = {"transformers"}
"""Of the extra `models`: what measures Hugging Face's models, and what registers with them, which has them."""


def top_level(path: Path) -> set[str]:
    """The modules that a file imports, anywhere in it, by their first names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - OWN


def test_what_is_imported_is_depended_on() -> None:
    declared = {re.match(r"[\w-]+", text)[0] for text in PROJECT["dependencies"]}  # type: ignore[index]
    folders = [ROOT / name for name in ("ditron_inductor", "passes", "lowering")]
    imported = {name for folder in folders for path in folder.rglob("*.py") for name in top_level(path)}
    # vLLM is looked at where it is there, and TorchTitan imports a module that is for it. Types are read by mypy alone,
    # and functorch is a part of torch.
    elsewhere = {"vllm", "torchtitan", "typing_extensions", "functorch"}
    assert imported - elsewhere - PICTURES - MODELS <= declared
    measured = {name for path in (ROOT / "benchmarks").rglob("*.py") for name in top_level(path)}
    assert measured - elsewhere - PICTURES - MODELS <= declared


def test_bench_names_its_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == main(["bench", "nothing"]) == 2
    assert "ops,models,host" in capsys.readouterr().err
    for module in bench.PROGRAMS.values():
        path = bench.FOLDER.joinpath(*module.split("."))
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing in it but an unpacked wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    copy = folder / "source"
    # Not in the checkout, where a build leaves files.
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(copy)], check=True)
    subprocess.run([*command, str(copy)], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder / "site")
    return folder / "site"


def run(installed: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=True
    )


HELPED = """
import contextlib, io, runpy, sys
from ditron_inductor.__main__ import main

for command in sys.argv[1:]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
    assert "usage: " in printed.getvalue(), command
sys.argv[1:] = ["doctor"]
runpy.run_module("ditron_inductor", run_name="__main__", alter_sys=True)
"""


def test_commands_run_from_a_wheel(installed: Path, tmp_path: Path) -> None:
    """The help of all of them and one that runs, in one process, since each imports torch."""
    benches = ("bench", *(f"bench {name}" for name in bench.PROGRAMS))
    done = run(installed, tmp_path, "-c", HELPED, *benches, "demo", "report", "taxes", "tune")
    assert f"ok  {VERSION}" in done.stdout


@pytest.mark.all_cases
def test_readme_runs_from_a_wheel(installed: Path, tmp_path: Path) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    where = f"assert ditron_inductor.__file__.startswith({str(installed)!r}), ditron_inductor.__file__\n"
    (tmp_path / "example.py").write_text(f"{example}\n{where}")
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--local-addr", "127.0.0.1")
    done = run(installed, tmp_path, *torchrun, "example.py")
    assert "matched" in done.stdout


@pytest.mark.all_cases
def test_benchmarks_run_from_a_wheel(installed: Path, tmp_path: Path) -> None:
    tiny = ("--device", "cpu", "--shapes", "tiny", "--ops", "matmul_all_reduce", "--out", "rows.csv")
    run(installed, tmp_path, "-m", "ditron_inductor", "bench", "ops", *tiny)
    rows = (tmp_path / "rows.csv").read_text().splitlines()
    assert len(rows) > 2 and any("ditron" in row for row in rows)
