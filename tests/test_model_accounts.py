"""`python -m benchmarks.models.account`: an account of each cell, or a word on why there is none."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from benchmarks.models import account
from benchmarks.models.zoo import Selection, tiny
from tests.rank_process import RankContext
from tests.ranks import RankPools


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--batches", "3"], "no cell has these"), (["--out", "/no/such/folder"], "/no/such/folder is no folder")],
)
def test_what_cannot_run_is_said(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert account.run(arguments) == 2
    assert said in capsys.readouterr().err


def write_accounts(ctx: RankContext, folder: str) -> bool:
    cells = tiny(Selection(("llama3-8b",), ("decode",), ("kv",), batches=(1,)).cells())
    request = account.AccountRequest(tuple(cells), "cpu", 100.0, 1, folder)
    try:
        return account.main(request, ctx.device, 0.0)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.all_cases
def test_an_account_of_a_cache(rank_pools: RankPools, tmp_path: Path) -> None:
    assert rank_pools.get("cpu", 2).run(write_accounts, str(tmp_path), timeout=100.0) == [True, True]
    (written,) = tmp_path.iterdir()
    assert written.name == "decode_llama3-8b_x_1_layers_kv_2_x_1_cache_32.csv"
    kinds = {row["kind"] for row in csv.DictReader(written.open()) if row["row"] == "site"}
    assert kinds == {"flash_decode", "matmul_all_reduce_rms_norm"}
