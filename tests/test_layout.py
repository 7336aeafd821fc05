"""The two linked folders: one module each, a clear error under the bare name, and all of it in wheel and sdist."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("passes", "lowering")


def run_python(code: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_folder_imports_through_the_package(folder: str) -> None:
    done = run_python(f"import ditron_inductor.{folder} as m; print(m.__name__)")
    assert done.stdout.strip() == f"ditron_inductor.{folder}", done.stderr


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_bare_name_is_refused(folder: str) -> None:
    done = run_python(f"import {folder}")
    assert done.returncode != 0
    assert f"ImportError: use ditron_inductor.{folder}" in done.stderr


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_link_is_relative(folder: str) -> None:
    assert (ROOT / "ditron_inductor" / folder).readlink() == Path("..") / folder


def test_the_package_alone_imports_neither_torch_nor_triton() -> None:
    done = run_python("import ditron_inductor, sys; print('torch' in sys.modules, 'triton' in sys.modules)")
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_tune_is_the_function_and_stays_it() -> None:
    done = run_python("import ditron_inductor, ditron_inductor.report.measure; print(callable(ditron_inductor.tune))")
    assert done.stdout.strip() == "True", done.stderr


def test_the_backend_is_known_without_an_import() -> None:
    from torch._dynamo import list_backends

    if not _installed():
        pytest.skip("ditron-inductor is not installed here, so its entry point is not either")
    assert "ditron" in list_backends()


def test_wheel_and_sdist_hold_both_folders(tmp_path: Path) -> None:
    # Without isolation: a test must not fetch setuptools.
    pytest.importorskip("setuptools", minversion="77", reason="pyproject.toml needs setuptools 77 or newer")
    source = tmp_path / "source"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode != 0:
        pytest.skip("not a git checkout")
    _copy(tracked.stdout.splitlines(), source)
    # A process each: a build leaves state behind.
    for command in ("build_wheel", "build_sdist"):
        code = f"import setuptools.build_meta as build, sys; build.{command}(sys.argv[1])"
        line = [sys.executable, "-c", code, str(tmp_path)]
        done = subprocess.run(line, cwd=source, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        in_wheel = set(wheel.namelist())
        entry_points = wheel.read(next(name for name in in_wheel if name.endswith("entry_points.txt"))).decode()
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as sdist:
        in_sdist = {name.partition("/")[2] for name in sdist.getnames()}
    for folder in FOLDERS:
        modules = {f"ditron_inductor/{folder}/{path.name}" for path in (source / folder).glob("*.py")}
        assert modules <= in_wheel and modules <= in_sdist
    tables = {f"ditron_inductor/task/tables/{path.name}" for path in (source / "ditron_inductor/task/tables").iterdir()}
    assert tables and tables <= in_wheel and tables <= in_sdist
    assert not any(name.startswith(FOLDERS) for name in in_wheel), "no second copy under the bare name"
    assert "[torch_dynamo_backends]\nditron = ditron_inductor.backend:ditron" in entry_points


def _installed() -> bool:
    from importlib.metadata import entry_points

    return any(point.name == "ditron" for point in entry_points(group="torch_dynamo_backends"))


def _copy(names: list[str], target: Path) -> None:
    """The tracked files, links as links, so that nothing untracked gets into the build."""
    for name in names:
        path, copy = ROOT / name, target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            copy.symlink_to(path.readlink())
        elif path.is_file():
            copy.write_bytes(path.read_bytes())
