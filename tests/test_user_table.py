"""A user's table: where it is read from, and that all ranks of a group use rank 0's."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from ditron_inductor import user_table
from ditron_inductor.errors import InvalidOptionValue, InvalidTable
from ditron_inductor.task.table import Entry, Table
from tests.ranks import RankContext, RankPools

# The first compilation on a fresh machine precompiles Inductor's C++ headers, once for all tests.
pytestmark = pytest.mark.timeout(300)
LIMIT_S = 250.0


def table(**times: float | None) -> str:
    """One measured shape of the CPU device."""
    us: dict[str, Any] = dict(library_us=100.0, chunked_us=None, tile_us=None) | times
    entry = Entry("cpu", 2, "float32", "matmul_all_reduce", 4, 6, 8, 0, commit="", date="2026-01-31", **us)
    return Table([entry]).text()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_the_default_table_need_not_exist(home: Path) -> None:
    assert user_table.read(None) == ""
    path = user_table.default_path()
    assert path == home / "ditron_inductor" / "table.csv"
    path.parent.mkdir()
    path.write_text(table(tile_us=50.0))
    assert user_table.read(None) == table(tile_us=50.0)
    assert user_table.read("shipped") == ""


def test_a_default_table_that_cannot_be_read_is_a_warning(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    user_table.default_path().mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        assert user_table.read(None) == ""
    assert "table.csv cannot be read" in caplog.text


def test_a_table_that_is_named_has_to_exist(home: Path) -> None:
    with pytest.raises(InvalidOptionValue, match="ditron.table.*none.csv.*No such file"):
        user_table.read(str(home / "none.csv"))
    with pytest.raises(InvalidOptionValue, match="ditron.table"):
        user_table.read(str(home))


def test_what_is_no_table_is_named(home: Path) -> None:
    (home / "mine.csv").write_text("a,b\n")
    with pytest.raises(InvalidTable, match="mine.csv, line 1: the columns are a,b"):
        user_table.read(str(home / "mine.csv"))


def test_lines_of_what_was_deleted_are_left_out_with_a_warning(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = table(tile_us=50.0)
    deleted = lines.splitlines()[1].replace("matmul_all_reduce", "all_gather_contract")
    (home / "mine.csv").write_text(f"{lines}{deleted}\n{deleted}\n")
    with caplog.at_level(logging.WARNING):
        text = user_table.read(str(home / "mine.csv"))
    assert "mine.csv: times of all_gather_contract on 2 lines are not used: it was deleted, as it was" in caplog.text
    # All ranks are sent the text, and each leaves the lines out.
    assert Table.parse(text).entries == Table.parse(lines).entries
    assert Table.parse(text).merged([]).text() == lines


def test_times_of_a_strategy_that_a_fusion_lacks_are_left_out(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = table(tile_us=50.0, chunked_us=40.0).replace("matmul_all_reduce", "matmul_all_gather")
    (home / "mine.csv").write_text(text)
    with caplog.at_level(logging.WARNING):
        (entry,) = Table.parse(user_table.read(str(home / "mine.csv"))).entries
    assert "times of matmul_all_gather by chunked on 1 lines are not used: there is no such strategy" in caplog.text
    assert entry.us == {"library": 100.0, "tile": 50.0}


@pytest.mark.parametrize("option", ["a\0b", "~nobody-of-this-name/table.csv", "x" * 5000, "\ud800.csv"])
def test_what_is_no_path_is_named(home: Path, option: str) -> None:
    with pytest.raises(InvalidOptionValue, match="ditron.table"):
        user_table.read(option)


BROKEN = {
    "encoding": (b"gpu\n\xff\xfe,", "line 2: it is not UTF-8"),
    "columns": (b"a,b\n", "line 1: the columns are a,b"),
    "field": (b"a" * 200_000, "line 1: field larger than field limit"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_table_is_named(home: Path, name: str) -> None:
    content, problem = BROKEN[name]
    (home / "mine.csv").write_bytes(content)
    with pytest.raises(InvalidTable, match=f"mine.csv, {problem}"):
        user_table.read(str(home / "mine.csv"))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_default_table_is_named_with_what_to_do(home: Path, name: str) -> None:
    content, problem = BROKEN[name]
    path = user_table.default_path()
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(InvalidTable) as error:
        user_table.read(None)
    text = str(error.value)
    assert text.startswith(f"{path} (the default table") and problem in text
    assert "'ditron.table' to 'shipped'" in text
    assert user_table.read("shipped") == ""


def test_line_ends_and_a_mark_at_the_beginning_are_no_part_of_a_table(home: Path) -> None:
    (home / "mine.csv").write_bytes(b"\xef\xbb\xbf" + table(tile_us=50.0).replace("\n", "\r\n").encode())
    assert user_table.read(str(home / "mine.csv")) == table(tile_us=50.0)


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _run_with(ctx: RankContext, paths: list[str]) -> tuple[list[tuple[str, str]], bool, list[str]]:
    """Compile and run one site in new groups, each with this rank's table of `paths`: (strategy, source) of each."""
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as funcol

    import ditron_inductor.backend  # noqa: F401
    from ditron_inductor.task.plan import decisions

    messages = _Messages()
    logging.getLogger("ditron_inductor").addHandler(messages)
    torch.manual_seed(ctx.rank)
    x, w = torch.randn(4, 8), torch.randn(8, 6)
    choices, right = [], True
    for options in ({"ditron.table": paths[ctx.rank]}, {"ditron.table": "shipped"}):
        group = dist.new_group(list(range(ctx.world_size)))
        assert group is not None
        name = group.group_name

        def fn(x: torch.Tensor, w: torch.Tensor, name: str = name) -> torch.Tensor:
            return funcol.all_reduce(x @ w, "sum", name)

        torch._dynamo.reset()
        got = torch.compile(fn, backend="ditron", options=options)(x, w)
        right &= torch.allclose(got, fn(x, w), atol=1e-4)
        last = [choice for (group_name, _), (_, choice) in decisions._last.items() if group_name == name]
        choices.append((last[0].strategy, last[0].source))
    logging.getLogger("ditron_inductor").removeHandler(messages)
    return choices, right, messages.texts


def test_ranks_with_different_tables_use_that_of_rank_0(rank_pools: RankPools, tmp_path: Path) -> None:
    texts = [table(tile_us=50.0), table(tile_us=200.0)]
    paths = [tmp_path / f"rank{rank}.csv" for rank in range(2)]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    results = rank_pools.get("cpu", 2).run(_run_with, [str(path) for path in paths], timeout=LIMIT_S)
    for choices, right, messages in results:
        assert right
        assert choices == [("tile", "table"), ("library", "obstacle")]
        assert any("the tables of measured choices on ranks [1] differ from rank 0's" in text for text in messages)
        assert any("keeps the table of measured choices that it took" in text for text in messages)
