"""The parts of DTensors as torch itself takes them out, one by one and in a compiled graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._functorch._aot_autograd import runtime_wrappers, subclass_utils
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ditron_inductor import dtensor_parts

general = getattr(subclass_utils, dtensor_parts.NAME)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def meta(outer_size: tuple[Any, ...], outer_stride: tuple[Any, ...], **inside: Any) -> Any:
    """What torch keeps of a subclass that a graph was made for. inside: of the tensors inside, for which it asks."""
    found = object.__new__(subclass_utils.SubclassCreationMeta)
    vars(found).update(attrs=inside, outer_size=outer_size, outer_stride=outer_stride)
    return found


def same(mine: list[Any], wanted: list[Any]) -> bool:
    return len(mine) == len(wanted) and all(
        a is b or (type(a) is int and a == b) for a, b in zip(mine, wanted, strict=True)
    )


@pytest.mark.parametrize("of_graph", ["forward", "forward of static sizes", "backward"])
def test_every_kind_of_input_comes_out_as_by_torch(mesh: DeviceMesh, of_graph: str) -> None:
    def cut() -> DTensor:
        return DTensor.from_local(torch.randn(2, 6), mesh, [Shard(0)], run_check=False)

    plain, parameter, dtensor, wide, tall = torch.randn(3), torch.nn.Parameter(torch.randn(3)), cut(), cut(), cut()
    waiting = DTensor.from_local(AsyncCollectiveTensor(torch.randn(2, 3)), mesh, [Replicate()], run_check=False)
    kept = {
        plain: None,
        7: None,
        dtensor: meta((4, 6), (6, 1)),
        waiting: meta((2, 3), (3, 1), _local_tensor=meta((2, 3), (3, 1), elem=None)),
        parameter: None,
        wide: meta((4, None), (6, 1)),
        tall: meta((4, 6), (None, 1)),
        torch.nn.Parameter(dtensor): meta((4, 6), (6, 1)),
    }
    args = [one for one in kept if of_graph != "forward of static sizes" or one is not wide and one is not tall]
    metas = [kept[one] for one in args]
    how = {"append_symints": False} if of_graph == "backward" else {"append_symints": True, "subclass_metas": metas}
    left: list[Any] = []

    def others(some: list[Any], **of_some: Any) -> list[Any]:
        left.extend(some)
        assert of_some == how | {"subclass_metas": [kept[some[0]]] if "subclass_metas" in how else None}
        return [some]

    found = dtensor_parts.by(others)(args, **how)
    for_torch = [7, waiting, wide, tall] if of_graph == "forward" else [7, waiting]
    assert same(left, [one for one in args if any(one is other for other in for_torch)])
    for one, part in zip(args, found, strict=True):
        taken = one.to_local() if isinstance(one, DTensor) else one
        assert part == [one] if any(one is other for other in for_torch) else part.data_ptr() == taken.data_ptr()
    if dtensor_parts.SLOW:
        assert same(dtensor_parts.by(general)(args, **how), general(args, **how))


def test_only_the_version_that_needs_it_is_changed() -> None:
    dtensor_parts.install()
    placed = getattr(runtime_wrappers, dtensor_parts.NAME, general)
    assert (placed is not general) == torch.__version__.startswith("2.11."), torch.__version__
    dtensor_parts.install()
    assert getattr(runtime_wrappers, dtensor_parts.NAME, general) is placed, "once is enough"


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_graph_is_right_forward_and_backward(mesh: DeviceMesh, dynamic: bool) -> None:
    """Nothing is communicated: a fake group leaves the results of collectives as they were in memory."""
    dtensor_parts.install()
    weight = torch.nn.Parameter(DTensor.from_local(torch.randn(4, 3), mesh, [Shard(1)], run_check=False))

    def loss(x: DTensor) -> torch.Tensor:
        return (x @ weight).to_local().square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (3, 5):
        x = DTensor.from_local(torch.randn(rows, 4), mesh, [Replicate()], run_check=False)
        gradients = []
        for run in (loss, compiled):
            weight.grad = None
            run(x).backward()
            gradients.append(weight.grad)
        torch.testing.assert_close(gradients[0].to_local(), gradients[1].to_local())
