"""The forms in which collectives reach the passes: raw functional ones, torch.distributed calls, DTensor plans;
both directions.
"""

from __future__ import annotations

import expecttest
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.fx.experimental.proxy_tensor import make_fx

from ditron_inductor.passes.graph.collectives import is_collective
from ditron_inductor.task import schema
from ditron_inductor.task.verify import task_calls
from tests.passes.graphs import (
    WORLD_SIZE,
    all_gather,
    all_reduce,
    compiled_graphs,
    fake_group,
    fuse,
    group_name,
    only_task,
    reasons,
    text,
    traced,
)


def sites(module: fx.GraphModule) -> list[str]:
    """Fuses, and lists the fused ops and the collectives that remain, with their reasons, in graph order."""
    fuse(module)
    left = iter(reasons(module))
    names = []
    for node in module.graph.nodes:
        if "ditron." in str(node.target):
            names.append(str(node.target).removesuffix(".default"))
        elif node.op == "call_function" and is_collective(node):
            names.append(f"{str(node.target).removesuffix('.default').removeprefix('_c10d_functional.')}: {next(left)}")
    return names


class FeedForward(nn.Module):
    def __init__(self, hidden: int = 32, bias: bool = False) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.gate = nn.Linear(16, hidden, bias=bias)
        self.up = nn.Linear(16, hidden, bias=bias)
        self.down = nn.Linear(hidden, 16, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        out: torch.Tensor = x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))
        return out


class Mlp(FeedForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.mlp(self.norm(x))
        return out


def sequence_parallel(bias: bool = False) -> nn.Module:
    plan = {
        "norm": SequenceParallel(),
        "gate": ColwiseParallel(input_layouts=Shard(1)),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    return parallelize_module(FeedForward(bias=bias), init_device_mesh("cpu", (WORLD_SIZE,)), plan)


@pytest.mark.usefixtures("group")
class TestForms:
    def test_functional_collectives_in_training(self) -> None:
        def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            assert dist.group.WORLD is not None
            hidden = torch.relu(funcol.all_gather_tensor_autograd(x, 1, dist.group.WORLD) @ w)
            return funcol.reduce_scatter_tensor_autograd(hidden @ v, "sum", 1, dist.group.WORLD)

        x, w, v = torch.randn(2, 8, 16), torch.randn(16, 24), torch.randn(24, 16)
        forward, backward = compiled_graphs(fn, x.requires_grad_(), w.requires_grad_(), v.requires_grad_())
        assert sites(forward) == ["ditron.all_gather_matmul", "ditron.matmul_reduce_scatter"]
        assert sites(backward) == ["ditron.all_gather_matmul", "ditron.matmul_reduce_scatter"]

    def test_functional_collectives_in_training_with_dynamic_shapes(self) -> None:
        def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            assert dist.group.WORLD is not None
            hidden = torch.relu(funcol.all_gather_tensor_autograd(x, 1, dist.group.WORLD) @ w)
            return funcol.reduce_scatter_tensor_autograd(hidden @ v, "sum", 1, dist.group.WORLD)

        x, w, v = torch.randn(3, 8, 16), torch.randn(16, 24), torch.randn(24, 16)
        graphs = compiled_graphs(fn, x.requires_grad_(), w.requires_grad_(), v.requires_grad_(), dynamic=True)
        assert [sites(graph) for graph in graphs] == [["ditron.all_gather_matmul", "ditron.matmul_reduce_scatter"]] * 2
        for graph in graphs:
            assert "sym_size" not in "".join(
                str(node.args) for node in graph.graph.nodes if "ditron" in str(node.target)
            )

    def test_distributed_calls_in_place(self) -> None:
        def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            gathered = torch.empty(WORLD_SIZE * x.shape[0], x.shape[1])
            dist.all_gather_into_tensor(gathered, x)
            hidden = (gathered @ w).relu()
            out = torch.empty(x.shape[0], v.shape[1])
            dist.reduce_scatter_tensor(out, hidden @ v)
            total = out @ w
            dist.all_reduce(total)
            return total

        (graph,) = compiled_graphs(fn, torch.randn(8, 16), torch.randn(16, 24), torch.randn(24, 16))
        fuse(graph)
        expecttest.assert_expected_inline(
            text(graph.graph),
            """\
arg0_1 [8, 16]
arg1_1 [16, 24]
arg2_1 [24, 16]
empty [32, 16] = aten.empty.memory_format([32, 16], device=device(type='cpu'), pin_memory=False)
empty_1 [8, 16] = aten.empty.memory_format([8, 16], device=device(type='cpu'), pin_memory=False)
all_gather_matmul = ditron.all_gather_matmul([arg0_1, arg1_1], "gather_dim=0 world_size=4 group_name=0 site='' trials num_weights=1", None)
getitem [32, 24] = all_gather_matmul[0]
relu [32, 24] = aten.relu(getitem)
matmul_reduce_scatter = ditron.matmul_reduce_scatter([relu, arg2_1], "scatter_dim=0 reduce_op=sum world_size=4 group_name=0 site='' trials", None)
getitem_1 [8, 16] = matmul_reduce_scatter[0]
matmul_all_reduce = ditron.matmul_all_reduce([getitem_1, arg1_1], "reduce_op=sum world_size=4 group_name=0 site='' trials", None)
getitem_2 [8, 24] = matmul_all_reduce[0]
return (getitem_2,)
""",
        )

    @pytest.mark.parametrize("dim", [0, 1])
    def test_lists_of_shards(self, dim: int) -> None:
        def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            shards = [torch.empty_like(x) for _ in range(WORLD_SIZE)]
            dist.all_gather(shards, x)
            return torch.cat(shards, dim) @ w

        (graph,) = compiled_graphs(fn, torch.randn(2, 8, 16), torch.randn(16, 24))
        assert sites(graph) == ["ditron.all_gather_matmul"]

    def test_a_list_of_shards_in_another_order_is_left_alone(self) -> None:
        def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            shards = [torch.empty_like(x) for _ in range(WORLD_SIZE)]
            dist.all_gather(shards, x)
            return torch.cat(shards[::-1]) @ w

        (graph,) = compiled_graphs(fn, torch.randn(8, 16), torch.randn(16, 24))
        assert sites(graph) == ["all_gather_into_tensor: chunks_permuted"]

    def test_the_chunks_of_a_buffer(self) -> None:
        def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            whole = x.new_empty(WORLD_SIZE * x.shape[0], x.shape[1])
            dist.all_gather(list(whole.chunk(WORLD_SIZE)), x)
            return whole @ w

        (graph,) = compiled_graphs(fn, torch.randn(8, 16), torch.randn(16, 24))
        assert sites(graph) == ["ditron.all_gather_matmul"]
        assert "slice_scatter" not in text(graph.graph)

    @pytest.mark.parametrize("misuse", ["reversed", "gap", "read", "given"])
    def test_a_buffer_that_is_filled_otherwise_is_left_alone(self, misuse: str) -> None:
        def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            whole = torch.zeros(32, 16) if misuse == "given" else torch.empty(32, 16)
            parts = list(all_gather(x).chunk(4))
            early = x.new_zeros(1)
            for index, part in enumerate(parts[::-1] if misuse == "reversed" else parts):
                if misuse == "gap" and index == 2:
                    continue
                if misuse == "read" and index == 2:
                    early = whole.sum()
                whole[8 * index : 8 * index + 8] = part
            return whole @ w + early

        module = make_fx(torch.func.functionalize(fn), tracing_mode="fake")(torch.empty(8, 16), torch.empty(16, 24))
        module.graph.eliminate_dead_code()
        assert sites(module)[0].startswith("all_gather_into_tensor: ")

    def test_a_chain_of_matmuls(self) -> None:
        def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            assert dist.group.WORLD is not None
            hidden = funcol.all_gather_tensor_autograd(x, 1, dist.group.WORLD) @ w
            return funcol.reduce_scatter_tensor_autograd(hidden @ v, "sum", 1, dist.group.WORLD)

        args = [torch.randn(2, 8, 16), torch.randn(16, 24), torch.randn(24, 8)]
        graphs = compiled_graphs(fn, *(arg.requires_grad_() for arg in args))
        assert [sites(graph) for graph in graphs] == [["ditron.all_gather_matmul", "ditron.matmul_reduce_scatter"]] * 2

    def test_gathered_weights_in_training(self) -> None:
        """The gradient of the input reads the saved weight, that of the weight is scattered."""

        def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            assert dist.group.WORLD is not None
            return nn.functional.linear(x, funcol.all_gather_tensor_autograd(w, 0, dist.group.WORLD))

        graphs = compiled_graphs(fn, torch.randn(6, 16).requires_grad_(), torch.randn(2, 5, 16).requires_grad_())
        assert [sites(graph) for graph in graphs] == [["ditron.all_gather_matmul"], ["ditron.matmul_reduce_scatter"]]

    def test_dtensor_weights_that_are_gathered(self) -> None:
        """As FSDP shards them, written with DTensor."""
        mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        w = DTensor.from_local(torch.randn(6, 16), mesh, [Shard(0)], run_check=False).requires_grad_()

        def fn(w: DTensor, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, w.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Partial()]))

        graphs = compiled_graphs(fn, w, torch.randn(2, 5, 16).requires_grad_())
        assert [sites(graph) for graph in graphs] == [["ditron.all_gather_matmul"], ["ditron.matmul_reduce_scatter"]]

    def test_an_all_to_all_of_shards(self) -> None:
        def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            turned = torch.ops._dtensor.shard_dim_alltoall(x @ w, 0, 1, group_name())
            return all_reduce(turned @ v)

        module = traced(fn, torch.empty(8, 16), torch.empty(16, 24), torch.empty(6, 3))
        assert sites(module) == ["ditron.matmul_all_to_all", "ditron.matmul_all_reduce"]

    def test_dtensor_sequence_parallel(self) -> None:
        forward, backward = compiled_graphs(sequence_parallel(), torch.randn(2, 4, 16, requires_grad=True))
        assert sites(forward) == ["ditron.all_gather_matmul", "ditron.matmul_reduce_scatter"]
        # Two gradients are added: one reduction of both products.
        assert sites(backward) == ["ditron.all_gather_matmul", "ditron.matmul_reduce_scatter"]

    def test_dtensor_sequence_parallel_inference_batch_1(self) -> None:
        module = sequence_parallel().requires_grad_(False)
        (graph,) = compiled_graphs(module, torch.randn(1, 4, 16))
        assert sites(graph) == ["ditron.all_gather_matmul", "ditron.matmul_reduce_scatter"]
        task, given = only_task(graph, "all_gather_matmul")
        assert len(given["weights"]) == 2 and not task.return_gathered

    def test_dtensor_all_reduce(self) -> None:
        module = FeedForward()
        plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        module = parallelize_module(module, init_device_mesh("cpu", (WORLD_SIZE,)), plan)
        forward, backward = compiled_graphs(module, torch.randn(2, 8, 16, requires_grad=True))
        assert sites(forward) == ["ditron.matmul_all_reduce"]
        assert set(sites(backward)) == {"ditron.matmul_all_reduce"}

    def test_dtensor_bias(self) -> None:
        forward, _ = compiled_graphs(sequence_parallel(bias=True), torch.randn(2, 4, 16, requires_grad=True))
        assert sites(forward) == ["ditron.all_gather_matmul", "ditron.matmul_reduce_scatter"]

    def test_dtensor_bias_of_an_all_reduce(self) -> None:
        plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        module = parallelize_module(FeedForward(bias=True), init_device_mesh("cpu", (WORLD_SIZE,)), plan)
        forward, _ = compiled_graphs(module, torch.randn(2, 8, 16, requires_grad=True))
        assert sites(forward) == ["ditron.matmul_all_reduce"]
        (call,) = [node for node in forward.graph.nodes if "matmul_all_reduce" in str(node.target)]
        divided = schema.operand(call, "bias")
        assert divided.target is torch.ops.aten.div.Tensor and divided.args[1] == WORLD_SIZE

    def test_one_gather_for_gate_and_up(self) -> None:
        """Its backward adds the gradients of both before it reduces."""
        plan = {
            "norm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "mlp.gate": ColwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        module = parallelize_module(Block(), init_device_mesh("cpu", (WORLD_SIZE,)), plan)
        forward, backward = compiled_graphs(module, torch.randn(2, 4, 16, requires_grad=True))
        assert sites(forward) == ["ditron.all_gather_matmul", "ditron.matmul_reduce_scatter"]
        assert sites(backward) == ["ditron.all_gather_matmul", "ditron.matmul_reduce_scatter"]
        _, given = only_task(backward, "matmul_reduce_scatter")
        assert given.keys() == {"a", "b"} and [len(given["a"]), len(given["b"])] == [2, 2]


class Uneven(nn.Module):
    """A sequence of 10 over 4 ranks: 3, 3, 3 and 1."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.relu(self.up(x)))
        return out


# In eager too, torch 2.11 fails on a tensor whose padding is cut off an inner dimension.
CUTS_INNER_DIMS = pytest.mark.skipif(torch.__version__ < "2.12", reason="DTensor of torch 2.11 cannot run this")


@pytest.mark.parametrize(
    ("shape", "dim"), [((10, 16), 0), ((1, 10, 16), 1), pytest.param((2, 10, 16), 1, marks=CUTS_INNER_DIMS)]
)
def test_uneven_shards_are_left_alone_on_every_rank(shape: tuple[int, ...], dim: int) -> None:
    """The last rank's shard is padded and its result cut, on that rank alone: no rank may fuse it by itself."""

    def sites_of(rank: int) -> list[list[str]]:
        with fake_group(rank=rank):
            plan = {
                "": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(dim),)),
                "up": ColwiseParallel(input_layouts=Shard(dim)),
                "down": RowwiseParallel(output_layouts=Shard(dim), use_local_output=False),
            }
            module = parallelize_module(Uneven(), init_device_mesh("cpu", (WORLD_SIZE,)), plan)
            x = torch.randn(shape, requires_grad=True)
            return [sites(graph) for graph in compiled_graphs(lambda x: module(x).to_local(), x)]

    first, last = sites_of(0), sites_of(WORLD_SIZE - 1)
    assert first == last
    assert first == [
        ["all_gather_into_tensor: uneven_shards", "reduce_scatter_tensor: uneven_shards"],
        [
            "all_gather_into_tensor: uneven_shards",
            "reduce_scatter_tensor: uneven_shards",
            "all_gather_into_tensor: no_matmul",
        ],
    ]


@pytest.mark.parametrize("rank", [0, WORLD_SIZE - 1])
def test_a_shard_of_another_dimension_is_left_alone_on_every_rank(rank: int) -> None:
    """Where a group has no all-to-all, DTensor gathers, and each rank takes its own part."""
    with fake_group(rank=rank):
        mesh = init_device_mesh("cpu", (WORLD_SIZE,))

        def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return (
                DTensor.from_local(x, mesh, [Shard(0)], run_check=False).redistribute(mesh, [Shard(1)]).to_local() @ w
            )

        (graph,) = compiled_graphs(fn, torch.randn(8, 16), torch.randn(4, 24))
        assert sites(graph) == ["all_gather_into_tensor: chunks_partial"]


def test_two_groups_are_told_apart() -> None:
    with fake_group():
        other = dist.new_group([0, 1])
        assert other is not None

        def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            assert dist.group.WORLD is not None
            return funcol.all_reduce(funcol.all_reduce(x @ w, "sum", other) @ w, "sum", dist.group.WORLD)

        (graph,) = compiled_graphs(fn, torch.randn(8, 16), torch.randn(16, 16))
        fuse(graph)
        calls = [(task.world_size, task.group_name) for _, task in task_calls(graph.graph)]
        assert calls == [(2, other.group_name), (WORLD_SIZE, group_name())]
