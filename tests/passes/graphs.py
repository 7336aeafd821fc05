"""Tools for tests of passes: a process group without ranks, graphs as a compiler sees them, their text, and
what they compute.

No device and no second process: `fake_group` makes collectives traceable, and `run_ranks` computes a graph for
all ranks at once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import getitem
from typing import Any

import torch
import torch._functorch.config
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import fx
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes import post_grad
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map

from ditron_inductor.options import Options
from ditron_inductor.passes.finish.name_sites import name_sites
from ditron_inductor.passes.finish.order_collectives import order_collectives
from ditron_inductor.passes.finish.verify_tasks import verify_tasks
from ditron_inductor.passes.forms.merge_reductions import merge_reductions
from ditron_inductor.passes.forms.move_across import move_across
from ditron_inductor.passes.forms.sequence_parallel import sequence_parallel
from ditron_inductor.passes.forms.try_forms import try_forms
from ditron_inductor.passes.fuse.fusions import FUSIONS
from ditron_inductor.passes.graph.launches import group_of, is_task
from ditron_inductor.passes.graph.proofs import arguments
from ditron_inductor.passes.graph.reasons import LEFT_ALONE
from ditron_inductor.passes.normalize.normalize_collectives import normalize_collectives
from ditron_inductor.passes.normalize.share_gathers import share_gathers
from ditron_inductor.task import schema
from ditron_inductor.task.nodes import NODES
from ditron_inductor.task.verify import task_calls
from tests.passes.node_values import evaluate_nodes, reduced

WORLD_SIZE = 4
PREPARATIONS = (
    normalize_collectives,
    share_gathers,
    move_across,
    merge_reductions,
    sequence_parallel,
    try_forms,
)
c10d: Any = torch.ops._c10d_functional


@contextlib.contextmanager
def fake_group(world_size: int = WORLD_SIZE, rank: int = 0) -> Iterator[None]:
    """A process group of which only this process exists; its collectives return without communicating."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def group_name() -> str:
    group = dist.group.WORLD
    assert group is not None
    return str(group.group_name)


def all_gather(x: torch.Tensor) -> torch.Tensor:
    """All shards along dimension 0, as one functional collective and its wait."""
    out: torch.Tensor = c10d.wait_tensor(c10d.all_gather_into_tensor(x, WORLD_SIZE, group_name()))
    return out


def reduce_scatter(x: torch.Tensor, op: str = "sum") -> torch.Tensor:
    out: torch.Tensor = c10d.wait_tensor(c10d.reduce_scatter_tensor(x, op, WORLD_SIZE, group_name()))
    return out


def all_reduce(x: torch.Tensor, op: str = "sum") -> torch.Tensor:
    out: torch.Tensor = c10d.wait_tensor(c10d.all_reduce(x, op, group_name()))
    return out


def all_to_all(x: torch.Tensor) -> torch.Tensor:
    """Chunk i of dimension 0 goes to rank i, one functional collective with equal splits and its wait."""
    splits = [x.shape[0] // WORLD_SIZE] * WORLD_SIZE
    out: torch.Tensor = c10d.wait_tensor(c10d.all_to_all_single(x, splits, splits, group_name()))
    return out


def gather_dim(x: torch.Tensor, dim: int) -> torch.Tensor:
    """All shards along `dim`, the way functional collectives do it."""
    gathered = all_gather(x)
    return torch.cat(torch.chunk(gathered, WORLD_SIZE), dim) if dim else gathered


def scatter_dim(x: torch.Tensor, dim: int, op: str = "sum") -> torch.Tensor:
    return reduce_scatter(torch.cat(torch.chunk(x, WORLD_SIZE, dim)) if dim else x, op)


def traced(fn: Callable[..., Any], *args: torch.Tensor, dynamic: bool = False) -> fx.GraphModule:
    """`fn` as a graph of aten ops with fake tensors; all sizes are symbols if `dynamic`."""
    module = make_fx(fn, tracing_mode="symbolic" if dynamic else "fake")(*args)
    module.graph.eliminate_dead_code()
    return module


def graph_on(
    fn: Callable[..., Any], *shapes: Any, dtype: torch.dtype = torch.bfloat16, device: str = "cuda"
) -> fx.GraphModule:
    """`fn` of tensors of these shapes, as a graph on a device that need not be there."""
    with FakeTensorMode():
        module = make_fx(fn)(*(torch.empty(shape, dtype=dtype, device=device) for shape in shapes))
    module.graph.eliminate_dead_code()
    return module


def twin(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph again, which passes over the first one leave as it is."""
    # The copy of a module would copy its constants, which fails under a fake mode.
    duplicate = fx.Graph()
    duplicate.output(duplicate.graph_copy(module.graph, {}))
    return fx.GraphModule(module, duplicate)


def compiled_graphs(fn: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> list[fx.GraphModule]:
    """The graphs that Inductor hands to a `post_grad_custom_pre_pass`: forward, and backward if an argument
    wants gradients.

    Dynamo, autograd, decompositions, joint-graph passes and the partitioner are the real ones; nothing is
    lowered to kernels.
    """
    graphs: list[fx.GraphModule] = []

    def inner_compile(gm: fx.GraphModule, example_inputs: Any, **options: Any) -> Any:
        post_grad.view_to_reshape(gm)
        if options.get("is_inference"):
            post_grad.reorder_for_locality(gm.graph)
        graphs.append(twin(gm))
        return make_boxed_func(gm.forward)

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        return compile_fx(gm, example_inputs, inner_compile=inner_compile)

    torch._dynamo.reset()
    with (
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch.compiler.config.patch(force_disable_caches=True),
    ):
        out = torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
        if isinstance(out, torch.Tensor) and out.requires_grad:
            out.sum().backward()
    return graphs


def fuse(module: fx.GraphModule, options: Options | None = None) -> int:
    """Runs the passes up to the fusions, these included; returns the number of sites that were fused."""
    counts = [each(module.graph, options=options or Options()) for each in (*PREPARATIONS, *FUSIONS)]
    module.graph.lint()
    module.recompile()
    return sum(counts[-len(FUSIONS) :])


def local_nodes(
    module: fx.GraphModule, kind: str, name_pass: Callable[[fx.Graph, Options], int], options: Options | None = None
) -> list[Any]:
    """The nodes of a kind that communicates nothing, behind the fusions and `name_pass`, which makes them and returns
    how many. The passes that finish a graph accept it.
    """
    options = options or Options()
    fuse(module, options)
    count = name_pass(module.graph, options)
    named = twin(module)
    for finish in (order_collectives, name_sites, verify_tasks):
        finish(named.graph, options=options)
    module.graph.lint()
    module.recompile()
    calls = module.graph.find_nodes(op="call_function", target=schema.overload(kind))
    assert len(calls) == count
    return [schema.node_from_call(call.target, call.args) for call in calls]


def rewritten(
    name_pass: Callable[..., int], fn: Callable[..., Any], *args: torch.Tensor
) -> tuple[int, fx.GraphModule, fx.GraphModule]:
    """How many sites one pass rewrites, the graph of `fn` before it, and behind it."""
    module = traced(fn, *args)
    normalize_collectives(module.graph, options=Options())
    before = twin(module)
    count = name_pass(module.graph, options=Options())
    module.graph.lint()
    module.recompile()
    return count, before, module


def reasons(module: fx.GraphModule) -> list[str]:
    """The reason codes of the collectives that were left alone, in graph order."""
    return [node.meta[LEFT_ALONE].code for node in module.graph.nodes if LEFT_ALONE in node.meta]


@contextlib.contextmanager
def assert_no_new_guards(module: fx.GraphModule) -> Iterator[None]:
    """Nothing in the block specialises, relates or guards a symbol of the graph."""
    values = [node.meta.get("val") for node in module.graph.nodes]
    shape_env: Any = next(value.fake_mode.shape_env for value in values if hasattr(value, "fake_mode"))

    def state() -> tuple[Any, ...]:
        return (list(shape_env.guards), dict(shape_env.replacements), dict(shape_env.var_to_range))

    before = state()
    yield
    assert state() == before


def text(graph: fx.Graph) -> str:
    """One line per node: name, shape, op, arguments."""
    return "\n".join(_line(node) for node in graph.nodes) + "\n"


def _line(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {node.args[0]}"
    value = node.meta.get("val")
    shape = f" {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
    if node.op == "placeholder":
        return f"{node.name}{shape}"
    if node.target is getitem:
        return f"{node.name}{shape} = {node.args[0]}[{node.args[1]}]"
    target = str(node.target).removesuffix(".default")
    arguments = [repr(argument) for argument in node.args] + [f"{k}={v!r}" for k, v in node.kwargs.items()]
    return f"{node.name}{shape} = {target}({', '.join(arguments)})"


def only_task(module: fx.GraphModule, kind: str = "") -> tuple[Any, dict[str, Any]]:
    """The node of the only call of a kind, or of all kinds, and its operands by name: their names in the graph."""
    ((call, task),) = [(call, task) for call, task in task_calls(module.graph) if kind in ("", task.kind)]
    return task, tree_map(str, schema.operands_from_call(call))


def run_ranks(
    module: fx.GraphModule,
    inputs: list[list[torch.Tensor]],
    groups: Mapping[str, Sequence[Sequence[int]]] | None = None,
) -> list[Any]:
    """What every rank computes: `inputs[rank]` are its arguments. Collectives and fused ops take the values of all
    ranks of a group together; `groups` has the sets of ranks that a group's name stands for, where not all are in one.
    """
    world_size = len(inputs)
    values: dict[fx.Node, list[Any]] = {}
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for index, node in enumerate(placeholders):
        values[node] = [inputs[rank][index] for rank in range(world_size)]
    for node in module.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "get_attr":
            values[node] = [module.get_submodule(str(node.target))] * world_size
            continue
        args = [
            fx.map_arg((node.args, dict(node.kwargs)), lambda one, r=rank: values[one][r]) for rank in range(world_size)
        ]
        if node.op == "output":
            return [tree_map(lambda one: one, arg[0][0]) for arg in args]
        together = _together(node.target)
        if together is not None:
            values[node] = [None] * world_size
            for ranks in _groups_of(node, groups or {}, world_size):
                for rank, value in zip(ranks, together([args[rank][0] for rank in ranks]), strict=True):
                    values[node][rank] = value
        else:
            values[node] = [node.target(*arg[0], **arg[1]) for arg in args]
    raise AssertionError("a graph without an output")


def _groups_of(
    node: fx.Node, groups: Mapping[str, Sequence[Sequence[int]]], world_size: int
) -> Sequence[Sequence[int]]:
    name = group_of(node) if is_task(node) else arguments(node).get("group_name")
    return groups.get(str(name), [range(world_size)])


def _together(target: Any) -> Callable[[list[Any]], list[Any]] | None:
    """What computes an op of all ranks together from its arguments by rank; None for an op that does not communicate."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    if target.namespace == "ditron" and target._opname in NODES:
        return functools.partial(evaluate_nodes, target._opname)
    return _TOGETHER.get(f"{target.namespace}.{target._opname}")


def _members(name: str, args: list[Any]) -> list[Any]:
    """A coalesced collective: the single one on each member of the lists."""
    single = _TOGETHER[f"_c10d_functional.{name}"]
    members = [single([(arg[0][index], *arg[1:]) for arg in args]) for index in range(len(args[0][0]))]
    return [list(results) for results in zip(*members, strict=True)]


def _run_all_to_all(args: list[Any]) -> list[Any]:
    """Of any splits: a rank's chunks of what each rank sends."""
    sent = [arg[0].split(list(arg[2])) for arg in args]
    return [torch.cat([chunks[rank] for chunks in sent]) for rank in range(len(args))]


def _run_shard_dim(args: list[Any]) -> list[Any]:
    _, gathered, sharded, _ = args[0]
    sent = [arg[0].chunk(len(args), sharded) for arg in args]
    return [torch.cat([chunks[rank] for chunks in sent], gathered) for rank in range(len(args))]


_TOGETHER: dict[str, Callable[[list[Any]], list[Any]]] = {
    "_c10d_functional.all_gather_into_tensor": lambda args: [torch.cat([arg[0] for arg in args])] * len(args),
    "_c10d_functional.reduce_scatter_tensor": lambda args: list(
        reduced([arg[0] for arg in args], args[0][1]).chunk(len(args))
    ),
    "_c10d_functional.all_reduce": lambda args: [reduced([arg[0] for arg in args], args[0][1])] * len(args),
    "_c10d_functional.all_reduce_": lambda args: [reduced([one[0] for one in args], args[0][1]) for _ in args],
    "_c10d_functional.all_to_all_single": _run_all_to_all,
    "_dtensor.shard_dim_alltoall": _run_shard_dim,
    "_c10d_functional.wait_tensor": lambda args: [arg[0] for arg in args],
    "_c10d_functional.all_reduce_coalesced": lambda args: _members("all_reduce", args),
    "_c10d_functional.all_reduce_coalesced_": lambda args: _members("all_reduce_", args),
    "_c10d_functional.all_gather_into_tensor_coalesced": lambda args: _members("all_gather_into_tensor", args),
    "_c10d_functional.reduce_scatter_tensor_coalesced": lambda args: _members("reduce_scatter_tensor", args),
    "ditron.own_chunk": lambda args: [arg[0].chunk(arg[2], arg[1])[rank] for rank, arg in enumerate(args)],
    "ditron.replicated": lambda args: [arg[0] for arg in args],
    "ditron.after": lambda args: [arg[0] for arg in args],
    "ditron.after_": lambda args: [None for _ in args],
    "ditron.token_of": lambda args: [torch.empty(1) for _ in args],
}


def assert_same_on_all_ranks(fn: Callable[..., Any], *args: torch.Tensor, fused: int) -> fx.GraphModule:
    """Traces `fn`, fuses, and compares what all ranks compute before and after; returns the rewritten graph.

    The first argument differs between ranks, as a shard does; so do the others, as weights sharded over ranks do.
    """
    after = traced(fn, *args)
    before = twin(after)
    assert fuse(after) == fused
    generator = torch.Generator().manual_seed(0)
    inputs = [[torch.randn(arg.shape, generator=generator).to(arg.dtype) for arg in args] for _ in range(WORLD_SIZE)]
    torch.testing.assert_close(run_ranks(after, inputs), run_ranks(before, inputs))
    return after
