"""The numbers in the prose of the pages are those of the results, and rows whose kernels have changed are old."""

from __future__ import annotations

import ast
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import sources
from benchmarks.prose import pages
from benchmarks.prose.claims import Claim, faster, slower, with_claims
from benchmarks.prose.picked import read_results
from benchmarks.records import GEMM_COLLECTIVES, MODELS, RESULTS, newest, read_csv
from benchmarks.report import BEGIN, END, OTHERS, README, ROOT, stale
from tests.test_results import ROW

CLAIMED = {
    "README.md": ("## How much faster", "## Try it"),
    "models.md": ("## Where it comes from", "## How results are checked"),
    "when_it_pays.md": ("**Around attention, on four GPUs.**", "The rest of the time is spent"),
}
"""The parts of pages in which every ratio and percentage is claimed."""


@pytest.fixture(scope="module")
def claims() -> dict[Path, list[Claim]]:
    return pages(ROOT, read_results())


def test_claims_replace_their_numbers_alone() -> None:
    page = "In 3 runs it is\n0.98 to 1.03 times as\nfast; in 4, faster."
    claim = Claim("it is {} to {} times as fast", ("1.10", "1.20"))
    assert claim.put_into(page) == "In 3 runs it is\n1.10 to 1.20 times as\nfast; in 4, faster."
    assert with_claims("A row: 2 of 3.", [Claim("{} of {}", ("4", "5"))]) == "A row: 4 of 5."
    for other in ("it is fast", page + page):
        with pytest.raises(ValueError, match="not once: it is"):
            claim.match(other)


def test_another_number_on_a_page_is_noticed(claims: dict[Path, list[Claim]]) -> None:
    for path, of_page in claims.items():
        page = path.read_text()
        assert with_claims(page, of_page) == page, f"the numbers of {path.name} are not those of the results"
        for claim in of_page:
            wrong = replace(claim, numbers=tuple("77" for _ in claim.numbers)).put_into(page)
            assert wrong != page and with_claims(wrong, of_page) == page, claim.text
            assert stale({path: wrong}) == [path]


def test_a_sentence_that_turned_around_is_refused() -> None:
    assert (slower(0.94), faster(1.06)) == ("6", "6")
    for says, gain in ((slower, 1.05), (slower, None), (faster, 0.95)):
        with pytest.raises(ValueError, match="write the sentence anew"):
            says(gain)


@pytest.mark.parametrize("name", CLAIMED)
def test_every_ratio_of_these_parts_is_claimed(name: str, claims: dict[Path, list[Claim]]) -> None:
    (path,) = (path for path in claims if path.name == name)
    text = path.read_text()
    for claim in claims[path]:
        begin, end = claim.match(text).span()
        text = text[:begin] + re.sub(r"\d", "n", text[begin:end]) + text[end:]
    begin, end = CLAIMED[name]
    part = text[text.index(begin) : text.index(end)]
    if BEGIN in part:
        part = part.partition(BEGIN)[0] + part.partition(END)[2]
    assert not re.findall(r"\d+\.\d+|\d+ %|\d+ times", part)


def test_the_readme_says_that_multicast_is_off() -> None:
    text = " ".join(README.read_text().split())
    assert "NVLink multicast is off for everybody. Rivals that use it are faster than shown." in text


def test_rows_are_not_removed() -> None:
    """Nine rows in which `auto` had lost were once removed."""
    lost = {
        *(("matmul_reduce_scatter", f"M={M};N=4096;K=3584", 0) for M in (8192, 4096)),
        ("matmul_reduce_scatter", "M=2048;N=8192;K=7168", 0),
    }
    found = {(row.op, row.shape, row.graph) for row in newest(read_csv(GEMM_COLLECTIVES)) if row.contestant == "ditron"}
    assert lost <= found
    # As many as there were on 2026-11-30.
    least = {
        "attention": 2231,
        "decode": 487,
        "gemm_collectives": 6420,
        "generation": 107,
        "models": 3074,
        "moe": 1534,
        "norm": 1831,
        "own_routers": 14,
        "projections": 80,
        "sorted_slots": 8,
        "tables_removed": 130,
        "unaligned": 126,
    }
    assert not [name for name, rows in least.items() if len(read_csv(RESULTS / f"{name}.csv")) < rows]


def test_every_commit_of_the_results_has_its_fingerprints() -> None:
    """`python -m benchmarks.report` adds them."""
    commits = {row.commit for path in (GEMM_COLLECTIVES, *OTHERS) for row in read_csv(path)}
    known = sources.recorded()
    assert not [commit for commit in commits if not any(of == commit for of, _ in known)]


def test_comments_make_no_kernel_old() -> None:
    before = '"""A kernel."""\n\n# How.\ndef f(x):\n    """Of x."""\n    return x + 1\n'
    after = '"""A fast kernel.\n\nReally.\n"""\ndef f(x):\n    # Why.\n    return x + 1\n'

    def lines(text: str) -> list[str]:
        return [*sources.code(text, ast.parse(text)).values()]

    assert lines(before) == lines(after) != lines(before.replace("x + 1", "x + 2"))


def _tree(root: Path) -> Path:
    for name, text in {
        "lowering/one/__init__.py": "",
        "lowering/one/tile.py": "from ditron_inductor.lowering.shared import put\n\ndef f(x):\n    return put(x)\n",
        "lowering/other/__init__.py": "",
        "lowering/other/tile.py": "from ditron_inductor.core import signals as words\nROW = words.OTHER\n",
        "lowering/shared.py": SHARED,
        "lowering/host/__init__.py": "",
        "lowering/host/launch.py": "SLOW = 1\n",
        "ditron_inductor/core/signals.py": "SIGNAL = 1\nOTHER = 2\nUNUSED = 3\n",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


SHARED = """
from ditron_inductor.core.signals import SIGNAL
from ditron_inductor.lowering.host.launch import SLOW

def put(x):
    return inner(x)

@cache
def inner(x):
    return x + SIGNAL + SLOW

def get(x):
    return x
"""


@pytest.mark.parametrize(
    ("path", "old", "new", "changed"),
    [
        ("lowering/host/launch.py", "1", "2", ""),
        ("lowering/shared.py", "    return x\n", "    return x + 1\n", ""),
        ("lowering/shared.py", "x + SIGNAL", "x - SIGNAL", "one"),
        ("lowering/shared.py", "@cache", "@other", "one"),
        ("lowering/shared.py", "def get", "inner = get\n\ndef get", "one"),
        ("ditron_inductor/core/signals.py", "SIGNAL = 1", "SIGNAL = 2", "one"),
        ("ditron_inductor/core/signals.py", "OTHER = 2", "OTHER = 1", "other"),
        ("ditron_inductor/core/signals.py", "UNUSED = 3", "UNUSED = 4", ""),
        ("ditron_inductor/core/signals.py", "UNUSED = 3", "UNUSED = 3\nUNUSED += 1", ""),
        ("ditron_inductor/core/signals.py", "OTHER = 2", "OTHER = 2\nOTHER += 1", "other"),
        ("ditron_inductor/core/signals.py", "UNUSED = 3", "assert UNUSED", ""),
        ("ditron_inductor/core/signals.py", "UNUSED = 3", "if SIGNAL:\n    OTHER = 4", "one other"),
    ],
)
def test_a_kernel_is_made_of_what_it_uses(tmp_path: Path, path: str, old: str, new: str, changed: str) -> None:
    root = _tree(tmp_path)
    assert sources.kinds(root) == ("one", "other")
    before = {kind: sources.fingerprint(kind, root) for kind in sources.kinds(root)}
    text = (root / path).read_text()
    assert old in text
    (root / path).write_text(text.replace(old, new))
    now = [kind for kind in sources.kinds(root) if sources.fingerprint(kind, root) != before[kind]]
    assert now == changed.split()


def test_the_registry_is_no_part_of_a_kernel(tmp_path: Path) -> None:
    """It names the kernels of all kinds, so each kind would be made of all kernels."""
    root = _tree(tmp_path)
    (root / "lowering/register.py").write_text("from ditron_inductor.lowering.shared import get\n\nKINDS = (get,)\n")
    shared = root / "lowering/shared.py"
    shared.write_text(
        "from ditron_inductor.lowering.register import KINDS\n" + SHARED.replace("+ SLOW", "+ SLOW + KINDS")
    )
    before = sources.fingerprint("one", root)
    shared.write_text(shared.read_text().replace("def get(x):\n    return x", "def get(x):\n    return x + 1"))
    assert sources.fingerprint("one", root) == before


def test_where_a_name_stands_does_not_matter(tmp_path: Path) -> None:
    root = _tree(tmp_path)
    before = sources.fingerprint("one", root)
    moved = "def put(x):\n    return inner(x)\n"
    (root / "lowering/moved.py").write_text(f"from ditron_inductor.lowering.shared import inner\n\n{moved}")
    stays = "from ditron_inductor.lowering.moved import put\n" + SHARED.replace(moved, "")
    (root / "lowering/shared.py").write_text(stays)
    assert sources.fingerprint("one", root) == before


def test_the_age_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {("abc", "one"): "1", ("abc", "other"): "2", ("lost", "one"): "", ("lost", "other"): ""}
    monkeypatch.setattr(sources, "recorded", lambda: known)
    monkeypatch.setattr(sources, "today", lambda: {"one": "1", "other": "9"})
    assert sources.age("abc", ["one"]) == sources.CURRENT
    assert sources.age("abc", ["one", "other"]) == sources.OLD
    assert sources.age("lost", ["one"]) == sources.UNKNOWN
    assert sources.age("measured just now", ["one"]) == sources.CURRENT


def test_the_kinds_that_a_row_has_run() -> None:
    model = replace(ROW, bench="models", op="prefill")
    assert sources.kinds_of(ROW) == ("all_gather_matmul",)
    assert sources.kinds_of(replace(ROW, bench="norm", op="swiglu")) == ("all_gather_matmul",)
    assert sources.kinds_of(model, "4 flash_decode, 1 all_gather left alone (no_matmul)") == ("flash_decode",)
    assert sources.kinds_of(model) == sources.kinds_of(replace(ROW, bench="moe", op="gathered")) == sources.kinds()


def test_reports_need_no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_git(*arguments: object, **options: object) -> None:
        raise AssertionError("git was asked")

    monkeypatch.setattr(subprocess, "run", no_git)
    assert sources.age(read_csv(MODELS)[0].commit, sources.kinds()) in (sources.OLD, sources.CURRENT)


def test_commits_without_history_are_recorded_as_unknown(tmp_path: Path) -> None:
    path = tmp_path / "sources.csv"
    assert sources.complete(["not-a-commit"], path) and not sources.complete(["not-a-commit"], path)
    assert set(sources.recorded(path).values()) == {""}
