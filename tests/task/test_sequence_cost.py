"""Whether dividing row-wise work pays: many rows do, few do not, and gathers that nobody multiplies do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ditron_inductor.task import cost
from ditron_inductor.task.dtypes import PRECISIONS
from ditron_inductor.task.sequence_cost import GatheredRows, Reduced, RegionWork, pays, predict


def llama(rows: int, dim: int, hidden: int, qkv: int, world_size: int) -> RegionWork:
    """A layer: attention's and the MLP's reduction, and a gather behind each."""
    return RegionWork(
        m=rows,
        reduced=(Reduced(dim, dim // world_size), Reduced(dim, hidden // world_size)),
        gathered=(GatheredRows(2 * hidden // world_size, dim), GatheredRows(qkv // world_size, dim)),
        precision=PRECISIONS[0],
        world_size=world_size,
    )


@pytest.mark.parametrize(("rows", "expected"), [(1, False), (64, False), (1024, False), (8192, True), (16384, True)])
def test_llama_8b(rows: int, expected: bool) -> None:
    assert pays(llama(rows, 4096, 14336, 6144, 4)) is expected


@pytest.mark.parametrize(("rows", "expected"), [(256, False), (8192, True)])
def test_llama_70b(rows: int, expected: bool) -> None:
    assert pays(llama(rows, 8192, 28672, 10240, 8)) is expected


def test_gathers_for_others_do_not_pay() -> None:
    """A graph for training saves residuals, whole."""
    work = llama(8192, 4096, 14336, 6144, 4)
    assert not pays(replace(work, gathered=work.gathered + (GatheredRows(0, 4096), GatheredRows(0, 4096))))


def test_without_matmuls_both_forms_send_the_same() -> None:
    work = RegionWork(m=8192, reduced=(Reduced(4096, 0),), gathered=(GatheredRows(0, 4096),), precision=PRECISIONS[0], world_size=4)
    replicated, sharded = predict(work, cost.H200)
    assert replicated < 1.5 * sharded and sharded < 1.5 * replicated


def test_a_norm_in_the_kernel_of_its_reduction() -> None:
    """It saves the replicated form a launch, and passes over the sum; where both are small, it decides."""
    work = llama(1024, 4096, 14336, 6144, 4)
    normed = replace(work, reduced=tuple(replace(one, has_norm=True) for one in work.reduced))
    (without, sharded), (with_norms, same) = predict(work, cost.H200), predict(normed, cost.H200)
    assert same == sharded and 4.0 < without - with_norms < 12.0
    many = replace(normed, m=8192)
    assert predict(many, cost.H200) == predict(replace(work, m=8192), cost.H200)


def test_every_known_gpu_has_to_gain() -> None:
    work = llama(8192, 4096, 14336, 6144, 2)
    gains = [sharded / replicated for replicated, sharded in (predict(work, on) for on in cost.KNOWN)]
    assert pays(work) is all(gain <= 0.98 for gain in gains)
