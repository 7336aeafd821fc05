"""The accounts of made-up times, and the bytes that they are made from."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ditron_inductor.task.node import Node
from ditron_inductor.task.nodes import (
    ATTENTION_KINDS,
    KINDS,
    ULYSSES_KINDS,
    AllGatherMatmul,
    AllReduceRmsNorm,
    FlashDecode,
    MatmulReduceScatter,
    Policy,
)
from ditron_inductor.task.site_records import SiteRecord
from ditron_inductor.taxes.accounts import (
    Account,
    SiteTaxes,
    StepTimes,
    explained,
    fused_account,
    unfused_account,
)
from ditron_inductor.taxes.intermediates import Intermediates, intermediates
from ditron_inductor.taxes.probe import Probe, Spent, largest
from tests.test_explain import site

BYTES = Intermediates(beside=10_000, inside=5_000, fused=3_000)


def test_a_wait_less_its_own_bytes_is_bulk_synchronous() -> None:
    account = unfused_account(Spent("library", 1, us=100.0, waited_us=40.0), BYTES, 1000.0)
    assert account == Account("library", 1, 100.0, 50.0, 35.0, 15.0, 0.0)
    # Two calls have twice the bytes, and no estimate takes more than there is.
    account = unfused_account(Spent("library", 2, us=50.0, waited_us=8.0), BYTES, 1000.0)
    assert (account.compute_us, account.bulk_synchronous_us, account.locality_us) == (22.0, 0.0, 28.0)
    assert unfused_account(Spent("library", 1, 10.0, 4.0), None, 1.0).bulk_synchronous_us == 4.0


def test_what_the_fused_kernel_takes_beyond_the_matmul_is_its_wait() -> None:
    unfused = unfused_account(Spent("library", 2, us=200.0, waited_us=80.0), BYTES, 1000.0)
    assert unfused.compute_us == 100.0
    account = fused_account(Spent("tile", 1, us=60.0, waited_us=0.0), BYTES, 1000.0, unfused)
    assert account == Account("tile", 1, 60.0, 50.0, 7.0, 3.0, 0.0)
    faster = fused_account(Spent("tile", 1, us=45.0, waited_us=0.0), BYTES, 1000.0, unfused)
    assert (faster.bulk_synchronous_us, faster.locality_us, faster.other_us) == (0.0, 0.0, -5.0)
    # By `library` there is a collective to be timed.
    assert fused_account(Spent("library", 1, 100.0, 40.0), BYTES, 1000.0, unfused).bulk_synchronous_us == 35.0


def test_the_gain_is_compared_with_the_accounts() -> None:
    unfused = unfused_account(Spent("library", 1, 100.0, 40.0), None, 1.0)
    fused = fused_account(Spent("tile", 1, 70.0, 0.0), None, 1.0, unfused)
    sites = [SiteTaxes("forward", site(), False, unfused, fused)]
    steps = {"unfused": StepTimes(250.0, 200.0), "fused": StepTimes(205.0, 168.0)}
    in_graph, eager = explained(sites, steps, True), explained(sites, steps, False)
    assert in_graph is not None and (in_graph.measured_us, in_graph.taxes_us) == (32.0, 30.0)
    assert eager is not None and (eager.measured_us, eager.taxes_us) == (45.0, 30.0 + 13.0)
    assert in_graph.part == pytest.approx(30 / 32)
    assert explained(sites, {"unfused": StepTimes(1.0), "fused": StepTimes(2.0)}, True) is None
    longer = explained(sites, {"unfused": StepTimes(1.0), "fused": StepTimes(2.0)}, False)
    assert longer is not None and longer.part is None


def test_a_sites_launches_are_those_of_all_its_calls() -> None:
    unfused = unfused_account(Spent("library", 3, 100.0, 40.0), None, 1.0)
    priced = SiteTaxes("forward", site(), False, unfused, None).with_launches(2.0, 5.0)
    assert priced.unfused is not None and priced.unfused.launch_us == 6.0 and priced.fused is None


def test_the_largest_of_the_ranks_counts() -> None:
    key = ("0", "a", 16)
    ranks = [
        {key: Spent("tile", 2, 5.0, 1.0)},
        {key: Spent("tile", 2, 4.0, 3.0), ("0", "b", 1): Spent("x", 1, 1.0, 0.0)},
    ]
    assert largest(ranks) == {key: Spent("tile", 2, 5.0, 3.0), ("0", "b", 1): Spent("x", 1, 1.0, 0.0)}


def record(kind: str, **changes: Any) -> SiteRecord:
    return site(kind=kind, m=8, n=4, k=16, itemsize=2, world_size=4, bytes_moved=192, **changes)


def of_inner_rows(task: Node) -> SiteRecord:
    """A record whose first operand is [2, 4, 16]."""
    name = task.slots()[0][0]
    first = (2, 4, 16) if task.slots()[0][1] is None else [(2, 4, 16)]
    return record(task.kind, task=task, operands={name: first})


GROUP: dict[str, Any] = {"world_size": 4, "group_name": "0", "site": "", "policy": Policy()}


PRODUCT, GATHERED, EXCHANGED = 8 * 4 * 2, 8 * 16 * 2, 8 * 16 * 2
EXPECTED = {
    "all_gather_matmul": Intermediates(GATHERED, GATHERED, GATHERED * 3 // 2),
    "matmul_reduce_scatter": Intermediates(PRODUCT, PRODUCT, PRODUCT * 3 // 2),
    "matmul_all_reduce": Intermediates(PRODUCT, PRODUCT, PRODUCT * 3 // 2),
    "all_reduce_rms_norm": Intermediates(PRODUCT, PRODUCT, PRODUCT * 3 // 2),
    "matmul_all_reduce_rms_norm": Intermediates(2 * PRODUCT, 2 * PRODUCT, PRODUCT * 3 // 2),
    "matmul_all_gather": Intermediates(PRODUCT, PRODUCT, 0),
    "matmul_all_to_all": Intermediates(3 * PRODUCT, PRODUCT, 0),
    "all_to_all_matmul": Intermediates(3 * EXCHANGED, EXCHANGED, EXCHANGED * 3 // 2),
    "all_gather_attention": Intermediates(GATHERED, GATHERED, GATHERED * 3 // 2),
    "attention_reduce_scatter": Intermediates(GATHERED, GATHERED, GATHERED * 3 // 2),
    "flash_decode": None,
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_intermediates(kind: str) -> None:
    assert intermediates(record(kind)) == EXPECTED[kind]


def test_every_kind_has_an_answer() -> None:
    kinds = {*KINDS, *ULYSSES_KINDS, *ATTENTION_KINDS, FlashDecode.kind, AllReduceRmsNorm.kind}
    assert kinds <= set(EXPECTED)


def test_copies_and_epilogues_are_intermediates_too() -> None:
    plain = EXPECTED["all_gather_matmul"]
    assert plain is not None
    # A dimension of two elements stands before the gathered one: the library copies what it gathered.
    gate: dict[str, Any] = {"return_gathered": False, "num_weights": 2, "epilogue": "silu(mm0) * mm1"}
    found = intermediates(of_inner_rows(AllGatherMatmul(1, **GROUP, **gate)))
    assert found == Intermediates(3 * GATHERED + 2 * PRODUCT, plain.inside, plain.fused)
    # Of a scattered sum a rank's epilogue reads its own part.
    added: dict[str, Any] = {"num_extras": 1, "epilogue": "mm0 + full(x0)"}
    found = intermediates(of_inner_rows(MatmulReduceScatter(0, "sum", **GROUP, **added)))
    assert found == Intermediates(PRODUCT + 2 * PRODUCT // 4, PRODUCT, PRODUCT * 3 // 2)
    assert intermediates(site(kind="matmul_reduce_scatter", m=None)) is None


@dataclass(frozen=True)
class _Event:
    us: float

    def elapsed_time(self, end: _Event) -> float:
        return (end.us - self.us) / 1e3


def test_what_marks_take_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks 10 us apart that take 2 us each: a call with one collective has four of them."""
    probe = Probe(torch.device("cuda"), mark_us=2.0)
    times = iter(range(0, 100, 10))
    monkeypatch.setattr(Probe, "_mark", lambda self: _Event(next(times)))
    request, choice = SimpleNamespace(site="a", problem=SimpleNamespace(m=16)), SimpleNamespace(strategy="library")
    run: Any = probe.call(lambda: probe.collective(lambda: None), "0", request, choice)  # type: ignore[arg-type]
    probe.step(lambda: (run(), run()))
    whole_us, spent = probe.take()
    # Of 30 us each, 2 for itself and 4 for the collective's; of 90 us for all, 2 for itself and 16 for what is inside.
    assert spent == {("0", "a", 16): Spent("library", 2, pytest.approx(48.0), pytest.approx(16.0))}  # type: ignore[arg-type]
    assert whole_us == pytest.approx(72.0)
    assert probe.take() == (0.0, {})


def test_a_step_without_its_host() -> None:
    assert [StepTimes(*us).device_us for us in ((9.0, 4.0), (9.0, 10.0), (9.0, None))] == [4.0, 9.0, 9.0]
    assert Spent("tile", 3, 8.0, 2.0).scaled(0.5) == Spent("tile", 3, 4.0, 1.0)
