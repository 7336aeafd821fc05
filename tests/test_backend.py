"""The backend from outside: modes, options, a user's own pass, and values against eager, forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import fx, nn
from torch._dynamo.utils import counters
from torch._logging import warning_once
from torch.distributed import _functional_collectives as functional

from benchmarks.tolerances import assert_near
from ditron_inductor import backend
from ditron_inductor.backend import ditron
from ditron_inductor.errors import InvalidOptionValue, UnknownOption
from ditron_inductor.pipeline import DitronPipeline, JointPipeline, UserPassThen
from ditron_inductor.report.explain import without_caches
from ditron_inductor.task.site_records import collect_sites
from tests.cases import rare
from tests.conftest import CPU_PLACES, Place
from tests.passes import graphs
from tests.ranks import RankContext, RankPools

LIBRARY = {"ditron.strategy": "library"}
USER_PASS, JOINT_PASS = "post_grad_custom_pre_pass", "joint_custom_post_pass"
OURS = USER_PASS, JOINT_PASS, "joint_custom_pre_pass", "shape_padding"


# Modes, options, passes: what reaches Inductor.


@pytest.fixture
def patches(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Calls the backend and returns the config patches that it hands to Inductor."""

    def call(**settings: Any) -> dict[str, Any]:
        seen: list[dict[str, Any]] = []

        def compile_fx(gm: fx.GraphModule, inputs: Any, *, config_patches: dict[str, Any]) -> Callable[..., Any]:
            seen.append(config_patches)
            return gm.forward

        monkeypatch.setattr(backend, "compile_fx", compile_fx)
        ditron(fx.symbolic_trace(lambda x: x + 1), [torch.ones(1)], **settings)
        return seen[0]

    return call


def pipeline_in(value: Any) -> DitronPipeline:
    """Our pass in the value of the option, with or without others before it."""
    last = value[-1] if isinstance(value, list) else value
    last = last.pipeline if isinstance(last, UserPassThen) else last
    assert isinstance(last, DitronPipeline)
    return last


def test_backend_is_found_by_name() -> None:
    assert "ditron" in torch._dynamo.list_backends(exclude_tags=())


def test_plain_call_patches_the_passes_and_what_ranks_would_decide_alone(
    patches: Callable[..., dict[str, Any]],
) -> None:
    given = patches()
    assert set(given) == {*OURS}
    assert given["shape_padding"] is False
    assert isinstance(given[USER_PASS], DitronPipeline) and isinstance(given[JOINT_PASS], JointPipeline)


@pytest.mark.parametrize("mode", list(torch._inductor.list_mode_options()))
def test_mode_means_what_it_means_for_inductor(mode: str, patches: Callable[..., dict[str, Any]]) -> None:
    given = patches(mode=mode)
    assert {key: given[key] for key in given if key not in OURS} == torch._inductor.list_mode_options(mode)


def test_options_win_over_mode(patches: Callable[..., dict[str, Any]]) -> None:
    assert patches(mode="max-autotune", options={"max_autotune": False})["max_autotune"] is False


def test_shape_padding_stays_off_and_says_so_once(
    patches: Callable[..., dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """Each rank would measure for itself which matmuls Inductor pads, and would compile another graph."""
    warning_once.cache_clear()
    with inductor_config.patch(shape_padding=True), caplog.at_level("WARNING", logger=backend.__name__):
        assert patches()["shape_padding"] is False
        assert patches(options={"shape_padding": False})["shape_padding"] is False
        assert not caplog.messages
        for _ in range(2):
            assert patches(options={"shape_padding": True})["shape_padding"] is False
    (message,) = caplog.messages
    assert message.startswith("the option shape_padding=True is taken as False")


def test_unknown_mode(patches: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(InvalidOptionValue, match="'mode' = 'fastest'.*reduce-overhead"):
        patches(mode="fastest")


def test_options_are_split(patches: Callable[..., dict[str, Any]]) -> None:
    given = patches(options={"ditron.strategy": "library", "max_autotune": True, "triton.cudagraphs": False})
    assert given["max_autotune"] is True and given["triton.cudagraphs"] is False
    assert pipeline_in(given[USER_PASS]).options.strategy == "library"
    assert not any(key.startswith("ditron") for key in given)


def test_wrong_options(patches: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(UnknownOption, match="ditron.stratgy.*ditron.strategy"):
        patches(options={"ditron.stratgy": "tile"})
    with pytest.raises(UnknownOption, match="max_autotunes"):
        patches(options={"max_autotunes": True})
    with pytest.raises(InvalidOptionValue, match="ditron.timeout_s.*-1"):
        patches(options={"ditron.timeout_s": -1})


def test_errors_reach_the_user_of_torch_compile() -> None:
    with pytest.raises(Exception, match="ditron.stratgy"):
        torch.compile(lambda x: x + 1, backend=ditron, options={"ditron.stratgy": "tile"})(torch.ones(1))


def no_pass(graph: fx.Graph) -> None: ...


def test_user_pass_of_config_and_of_options(patches: Callable[..., dict[str, Any]]) -> None:
    def other(graph: fx.Graph) -> None: ...

    def users(value: Any) -> list[Any]:
        return value[:-1] if isinstance(value, list) else [value.user_pass]

    with inductor_config.patch({USER_PASS: no_pass}):
        assert users(patches()[USER_PASS]) == [no_pass]
        # An option wins over the config, as for Inductor.
        assert users(patches(options={USER_PASS: other})[USER_PASS]) == [other]
        pipeline_in(patches()[USER_PASS])
    assert users(patches(options={USER_PASS: other})[USER_PASS]) == [other]


# On graphs: a fake group, no peers.


@pytest.fixture
def fake_group() -> Iterator[None]:
    with graphs.fake_group():
        torch._dynamo.reset()
        yield


@pytest.mark.usefixtures("fake_group")
def test_user_pass_runs_first_and_ours_after_it() -> None:
    seen: list[str] = []

    def user_pass(graph: fx.Graph) -> None:
        seen.append(str(graph))
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
            node.target = torch.ops.aten.neg.default

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + 1

    x = torch.randn(8, 16)
    with collect_sites() as sink, without_caches():
        compiled = torch.compile(fn, backend=ditron, options={USER_PASS: user_pass})
        torch.testing.assert_close(compiled(x), 1 - x)
    assert len(seen) == 1 and "ditron" not in seen[0]
    assert "aten.neg" in sink.graphs[0].graph_before


# On ranks: values against eager.

Problem = Callable[..., tuple[torch.Tensor, ...]]


def sequence_parallel(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gather, two matmuls, scatter; and an all-gather that no pass can fuse between them."""
    group = dist.group.WORLD
    gathered = functional.all_gather_tensor_autograd(x, 0, group)
    hidden = torch.nn.functional.silu(gathered @ w) * (gathered @ w.flip(0))
    alone = functional.all_gather_tensor_autograd(x * 2, 0, group).tanh()
    return functional.reduce_scatter_tensor_autograd(hidden @ v, "sum", 0, group), alone


def batched(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same along an inner dimension of a batch."""
    group = dist.group.WORLD
    stacked = torch.stack([x, x + 1])
    hidden = functional.all_gather_tensor_autograd(stacked, 1, group) @ w
    return (functional.reduce_scatter_tensor_autograd(torch.relu(hidden) @ v, "sum", 1, group),)


def other_forms(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Batched matmuls with one matrix, collectives of two tensors, and a dimension that moves to be scattered."""
    group = dist.group.WORLD
    stacked = torch.stack([x, x + 1])
    hidden = torch.einsum("bsk,kn->bsn", functional.all_gather_tensor_autograd(stacked, 1, group), w).relu()
    out = functional.reduce_scatter_tensor_autograd(torch.bmm(hidden, v.expand(2, *v.shape)), "sum", 1, group)
    in_front = (stacked @ (w + 1)).movedim(1, 0).contiguous()
    moved = functional.reduce_scatter_tensor_autograd(in_front, "sum", 0, group).movedim(0, 1)
    reduced = torch.ops._c10d_functional.all_reduce_coalesced([x @ w, x * 2], "sum", group.group_name)
    return out, moved, *map(torch.ops._c10d_functional.wait_tensor, reduced)


def inference(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Reductions, which have no autograd formula, fused and not, and calls of torch.distributed."""
    group = dist.group.WORLD
    reduced = functional.all_reduce(x @ w, "sum", group)
    norm = functional.all_reduce((reduced**2).sum(), "sum", group)
    averaged = functional.all_reduce(x @ w, "avg", group) if x.is_cuda else reduced / 2
    gathered = torch.empty(x.shape[0] * dist.get_world_size(), x.shape[1], device=x.device)
    dist.all_gather_into_tensor(gathered, x)
    return averaged, norm, gathered @ w, functional.broadcast(x * 2, 0, group)


def run_problem(ctx: RankContext, problem: Problem, backward: bool) -> dict[str, int]:
    """Asserts that compiled and eager agree; returns what the passes counted."""
    with without_caches(), collect_sites() as sink:
        compare_with_eager(ctx, problem, backward)
    assert [graph.is_backward for graph in sink.graphs] == ([False, True] if backward else [False])
    return dict(counters["ditron"])


def compare_with_eager(ctx: RankContext, problem: Problem, backward: bool) -> None:
    counters.clear()
    torch._dynamo.reset()
    shapes = (8, 16), (16, 32), (32, 16)
    eager = [torch.randn(shape, device=ctx.device).requires_grad_(backward) for shape in shapes]
    ours = [value.detach().clone().requires_grad_(backward) for value in eager]
    compiled = torch.compile(problem, backend="ditron", fullgraph=True, options=LIBRARY)
    wanted = problem(*eager)
    got = compiled(*ours)
    for one, other in zip(got, wanted, strict=True):
        assert_near(one.detach(), other.detach(), num_partials=4, what="output")
    if backward:
        sum((value.sin().sum() for value in wanted), torch.zeros((), device=ctx.device)).backward()
        sum((value.sin().sum() for value in got), torch.zeros((), device=ctx.device)).backward()
        for one, other in zip(ours, eager, strict=True):
            assert one.grad is not None and other.grad is not None
            assert_near(one.grad, other.grad, num_partials=32, what="gradient")


@pytest.fixture(scope="module", params=CPU_PLACES[:1])
def place(request: pytest.FixtureRequest) -> Place:
    """Two ranks on the CPU: what runs here is the library."""
    return request.param


@pytest.mark.parametrize(
    ("problem", "backward", "fused"),
    [
        (sequence_parallel, True, {"all_gather_matmul": 2, "matmul_reduce_scatter": 2}),
        *rare((batched, True, {"all_gather_matmul": 2, "matmul_reduce_scatter": 2})),
        (other_forms, True, {"try_forms": 7, "matmul_reduce_scatter": 3, "matmul_all_reduce": 1}),
        (inference, False, {"all_gather_matmul": 1, "matmul_all_reduce": 1}),
    ],
    ids=["sequence_parallel", "batched", "other_forms", "inference"],
)
def test_values(rank_pools: RankPools, place: Place, problem: Problem, backward: bool, fused: dict[str, int]) -> None:
    pool = rank_pools.get(place.device_type, place.world_size)
    for counted in pool.run(run_problem, problem, backward, timeout=200.0):
        assert {kind: counted.get(kind, 0) for kind in fused} == fused


class Mlp(nn.Module):
    """x + down(silu(gate(norm(x))) * up(norm(x)))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.gate, self.up = nn.Linear(16, 32, bias=False), nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(hidden)) * self.up(hidden))


def run_dtensor(ctx: RankContext, sequence_parallel: bool) -> dict[str, int]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    counters.clear()
    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh = init_device_mesh(ctx.device.type, (ctx.world_size,))
    plain, ours = Mlp().to(ctx.device), Mlp().to(ctx.device)
    ours.load_state_dict(copy.deepcopy(plain.state_dict()))
    sharded = {"input_layouts": Shard(1)} if sequence_parallel else {}
    plan: dict[str, Any] = {
        "gate": ColwiseParallel(**sharded),
        "up": ColwiseParallel(**sharded),
        "down": RowwiseParallel(**({"output_layouts": Shard(1)} if sequence_parallel else {})),
    }
    if sequence_parallel:
        plan["norm"] = SequenceParallel()
    parallelize_module(ours, mesh, plan)
    full = torch.randn(2, 4 * ctx.world_size, 16, device=ctx.device)
    local = full.chunk(ctx.world_size, 1)[ctx.rank].contiguous() if sequence_parallel else full.clone()
    full.requires_grad_()
    local.requires_grad_()
    wanted = plain(full)
    with without_caches():
        got = torch.compile(ours, backend="ditron", options=LIBRARY)(local)
        wanted.sin().sum().backward()
        got.sin().sum().backward()
    assert full.grad is not None and local.grad is not None

    def part(value: torch.Tensor) -> torch.Tensor:
        return value.chunk(ctx.world_size, 1)[ctx.rank] if sequence_parallel else value

    assert_near(got.detach(), part(wanted.detach()), num_partials=4, what="output")
    assert_near(local.grad, part(full.grad), num_partials=32, what="gradient")
    for (name, parameter), (_, reference) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        gradient: Any = parameter.grad
        assert gradient is not None and reference.grad is not None
        assert_near(gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient, reference.grad,
                    num_partials=32, what=name)  # fmt: skip
    return dict(counters["ditron"])


@pytest.mark.parametrize("sequence_parallel", [False, *rare(True)], ids=["all_reduce", "sequence_parallel"])
def test_dtensor(rank_pools: RankPools, place: Place, sequence_parallel: bool) -> None:
    pool = rank_pools.get(place.device_type, place.world_size)
    for counted in pool.run(run_dtensor, sequence_parallel, timeout=200.0):
        if sequence_parallel:
            assert counted["all_gather_matmul"] >= 1 and counted["matmul_reduce_scatter"] >= 1
        else:
            assert counted["matmul_all_reduce"] >= 1
