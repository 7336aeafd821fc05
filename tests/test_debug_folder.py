"""The debug folder that TORCH_COMPILE_DEBUG=1 asks for, and the archive that the command `report` makes of it."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import fx

from ditron_inductor import pipeline
from ditron_inductor.__main__ import main
from ditron_inductor.backend import ditron
from ditron_inductor.tools import doctor, issue_archive
from tests.passes import graphs

FILES = ["facts.json", "graph_after.txt", "graph_before.txt", "sites.txt"]
RUN = "run_2026_01_02_03_04_05_000006-pid_7"


@pytest.fixture
def fake_group() -> Iterator[None]:
    with graphs.fake_group():
        yield


def two_gathers(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One gather becomes a Task node. The other has no matmul."""
    return graphs.all_gather(x) @ w, graphs.all_gather(w)


def compiled_only(gm: fx.GraphModule, inputs: Any, **settings: Any) -> Any:
    """Compiles with Ditron and runs as it is: the collectives of a fake group have no peers to meet."""
    ditron(gm, inputs, **settings)
    return gm.forward


def compile_within(folder: Path, options: dict[str, Any]) -> None:
    """As TORCH_COMPILE_DEBUG=1 does, with another folder."""
    torch._dynamo.reset()
    inputs = torch.randn(4, 8), torch.randn(8, 8)
    # Torch logs the folder's name as a warning.
    logging.getLogger("torch._inductor.debug").disabled = True
    try:
        with torch.no_grad(), inductor_config.patch({"trace.enabled": True, "trace.debug_dir": str(folder)}):
            torch.compile(two_gathers, backend=compiled_only, options=options)(*inputs)
    finally:
        logging.getLogger("torch._inductor.debug").disabled = False


@pytest.mark.usefixtures("fake_group")
def test_the_folder_has_the_graphs_the_sites_and_the_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DITRON_STRATEGY", "tile")
    compile_within(tmp_path, {"ditron.strategy": "library"})
    (folder,) = tmp_path.glob("torchinductor/*/ditron_*")
    assert folder.name == "ditron_0" and (folder.parent / "output_code.py").is_file()
    assert sorted(path.name for path in folder.iterdir()) == FILES
    before, after = ((folder / f"graph_{when}.txt").read_text() for when in ("before", "after"))
    assert "ditron.all_gather_matmul" in after and "ditron" not in before
    facts = json.loads((folder / "facts.json").read_text())
    assert facts["options"]["strategy"] == "library" and facts["environment"]["DITRON_STRATEGY"] == "tile"
    assert facts["versions"]["torch"] == torch.__version__
    assert (facts["rank"], facts["world_size"]) == (0, graphs.WORLD_SIZE)
    alone, fused = (folder / "sites.txt").read_text().split("\n\n")
    assert "became: all_gather_matmul" in fused and "test_debug_folder.py" in fused
    assert "left alone: no_matmul" in alone and "became" not in alone


@pytest.mark.usefixtures("fake_group")
def test_the_graph_in_front_is_there_when_a_pass_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(graph: fx.Graph, *others: Any) -> None:
        raise AssertionError("a mistake in a pass")

    monkeypatch.setattr(pipeline, "run", failing)
    with pytest.raises(Exception, match="a mistake in a pass"):
        compile_within(tmp_path, {})
    (folder,) = tmp_path.glob("torchinductor/*/ditron_*")
    assert sorted(path.name for path in folder.iterdir()) == ["facts.json", "graph_before.txt"]


def written(root: Path, run: str, rank: int, world_size: int = 2) -> Path:
    """As a process of so many ranks leaves it."""
    folder = root / run / "torchinductor" / "model__0_inference_0.0" / "ditron_0"
    folder.mkdir(parents=True)
    (folder / "facts.json").write_text(json.dumps({"rank": rank, "world_size": world_size}))
    (folder.parent / "output_code.py").write_text(f"# {run}")
    return root / run


def test_the_newest_run_has_all_its_ranks(tmp_path: Path) -> None:
    assert issue_archive.newest_runs(tmp_path) == []
    for minute in range(2):
        runs = [written(tmp_path, RUN.replace("04", f"0{minute}") + str(rank), rank) for rank in range(2)]
    (tmp_path / RUN.replace("04", "58")).mkdir()  # of a program without Ditron
    written(tmp_path, RUN.replace("04", "00") + "9", 2, world_size=4)
    found = issue_archive.newest_runs(tmp_path)
    assert [run.folder for run in found] == runs and [run.rank for run in found] == [0, 1]
    alone = written(tmp_path, RUN.replace("04", "30"), 0, world_size=1)
    assert [run.folder for run in issue_archive.newest_runs(tmp_path)] == [alone]


@pytest.mark.parametrize("debugged", [True, False])
def test_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], debugged: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCH_COMPILE_DEBUG_DIR", raising=False)
    monkeypatch.setattr(doctor, "main", lambda: print("all is well"))
    if debugged:
        written(tmp_path / "torch_compile_debug", RUN, 1)
    assert main(["report"]) == 0
    (path,) = tmp_path.glob("ditron_report_*.zip")
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        assert archive.read("doctor.txt") == b"all is well\n"
        assert f"torch {importlib.metadata.version('torch')}\n".encode() in archive.read("versions.txt")
    inside = f"rank_1/{RUN}/torchinductor/model__0_inference_0.0"
    graph = {f"{inside}/output_code.py", f"{inside}/ditron_0/facts.json"}
    assert names == {"versions.txt", "doctor.txt"} | (graph if debugged else set())
    said = capsys.readouterr().out
    assert path.name in said and ("look at it before" if debugged else "TORCH_COMPILE_DEBUG=1") in said


@pytest.mark.usefixtures("fake_group")
def test_the_report_finds_what_a_compilation_wrote(tmp_path: Path) -> None:
    compile_within(tmp_path / RUN, {})
    (run,) = issue_archive.newest_runs(tmp_path)
    assert [path.name for path in run.files()] == [*FILES, "output_code.py"]


def test_the_folder_of_torch_is_where_torch_makes_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder in ("", str(tmp_path)):
        monkeypatch.setenv("TORCH_COMPILE_DEBUG_DIR", folder)
        assert issue_archive.default_root() == Path(folder or Path.cwd()) / "torch_compile_debug"
    assert str(issue_archive.default_root()) == torch._dynamo.config.default_debug_dir_root()
