"""What a contest of one op is: operands, contestants, the reference that each must match, and the bytes on the link."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ops.request import Request
from benchmarks.ops.shapes import Cell
from benchmarks.rivals import registered
from benchmarks.trying import TRYING, UNTABLED
from ditron_inductor.task import schema
from ditron_inductor.task.node import Node
from ditron_inductor.task.nodes import STRATEGIES, Policy

# Operands change from call to call, so many that no contestant finds them in the cache.
ROTATED_BYTES = 256 << 20
MAX_ROTATED = 4
LINK_BYTES_PER_S = 450e9
WORKSPACE_LIMIT = 4 << 30
SYMMETRIC_BYTES = 256 << 20
# Long enough for a rank that compiles while its peers wait; a kernel that hangs costs no more.
TIMEOUT_S = 30.0
# Rows of every shard whose values are compared with an fp32 reference.
SAMPLED_ROWS = 64

OURS: dict[str, str] = {"ditron": "auto"} | {f"ditron:{name}": name for name in STRATEGIES if name != "auto"}
"""Our contestants, and the strategy that each of them forces."""
PLANNED = "ditron:planned"
"""The plan's strategy, without trials."""
OURS_ON_GPUS = OURS | dict.fromkeys((UNTABLED, PLANNED), "auto")
"""Without a GPU nothing is tried, and these two are what `ditron` is."""
CONTESTANTS: tuple[str, ...] = (
    "gemm",
    "nccl",
    "gloo",
    "registered",
    "max_autotune",
    "async_tp",
    "symm_mem:one_shot",
    "symm_mem:two_shot",
    *OURS_ON_GPUS,
)
"""Every name that a row can have, in the order of the tables."""

Call = Callable[[int], torch.Tensor]
Make = Callable[..., torch.Tensor]
"""Makes an empty tensor of some sizes and a dtype."""
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Returns the product of two matrices, in the third one or in a new tensor."""
Operands = Mapping[str, Any]
"""Of one call of an op of ours, by name."""


def library_of(device: torch.device) -> str:
    """The collective library of a device, and the name of its contestant."""
    return "nccl" if device.type == "cuda" else "gloo"


def wanted(request: Request) -> tuple[str, ...]:
    """The contestants that were asked for. ValueError for a name that there is not."""
    unknown = {*request.only, *request.skip} - set(CONTESTANTS)
    if unknown:
        raise ValueError(f"no contestants: {', '.join(sorted(unknown))}; there are {', '.join(CONTESTANTS)}")
    return tuple(name for name in request.only or CONTESTANTS if name not in request.skip)


@dataclass
class Contest:
    """The problem of one cell.

    contestants: `contestants[name](i)` makes one call on the i-th operands and returns its result, in a fixed or a new
    tensor. unable: contestants that this shape is not for, and why. library: the collective and the matmul of the
    library, whose result every other result is compared with. sample: some rows of this rank's result on the 0-th
    operands, and what they are in fp32; collective. num_partials: how many ranks' products a value is the sum of.
    link_bytes: what a rank has to receive.
    """

    contestants: dict[str, Call]
    library: Call
    sample: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    link_bytes: int
    num_partials: int = 1
    unable: dict[str, str] = field(default_factory=dict)


class SymmetricBuffer:
    """One piece of torch's symmetric memory, for the contestants that take their operand from it.

    Made anew only where a cell needs more: to make one and exchange its handles takes longer than a measurement.
    """

    def __init__(self, group_name: str) -> None:
        self._group_name = group_name
        self._bytes: torch.Tensor | None = None

    def get(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor in it; all ranks ask for the same. It shares its memory with what was got before."""
        import torch.distributed._symmetric_memory as symm_mem

        nbytes = math.prod(shape) * dtype.itemsize
        if self._bytes is None or self._bytes.numel() < nbytes:
            self._bytes = symm_mem.empty(max(nbytes, SYMMETRIC_BYTES), dtype=torch.uint8, device=device)
            symm_mem.rendezvous(self._bytes, self._group_name)
        return self._bytes[:nbytes].view(dtype).view(shape)


@dataclass(frozen=True)
class Setting:
    """The place of a contest. cell: the shape of the present cell, of whose contestants each is a site of its own. The
    ranks of a site agree once on a size that each of them has of its own, such as K of a reduced product, so cells
    that shared a site would share the trial of the first of them.
    """

    device: torch.device
    rank: int
    world_size: int
    group_name: str
    shared: SymmetricBuffer
    cell: str = ""

    @property
    def library(self) -> str:
        """The baseline's name: the collective library of this device."""
        return library_of(self.device)

    @property
    def has_symmetric_memory(self) -> bool:
        """Returns whether the contestants in torch's symmetric memory can run."""
        return self.device.type == "cuda"

    def expert(self, result: Contest, make: Callable[[Make, Product], Call]) -> None:
        """Add what an expert would set up around the same collective: registered buffers, and the best product.

        make: makes the baseline's call, given what makes its tensors, and what multiplies.
        """
        if self.device.type != "cuda":
            return
        assert dist.group.WORLD is not None
        empty = functools.partial(torch.empty, device=self.device)
        if problem := registered.refusal(dist.group.WORLD, self.device):
            result.unable["registered"] = problem
        else:
            result.contestants["registered"] = make(registered.of_world(self.device).calling(empty), product_into)
        result.contestants["max_autotune"] = make(empty, tuned_product())

    def site(self, op: str, name: str) -> str:
        """The name of the site that one of our contestants is."""
        return f"benchmark/{self.cell}:{op}:{name}"

    def ours(self, kind: type[Node], fields: Mapping[str, Any], operands: Sequence[Operands]) -> dict[str, Call]:
        """Our contestants, which return the first output. fields: of the node, those of the site excepted."""
        group = {"world_size": self.world_size, "group_name": self.group_name}

        def bound(name: str, strategy: str) -> Call:
            policy = Policy(strategy, WORKSPACE_LIMIT, TIMEOUT_S, trials=name in TRYING)
            return in_turns(kind(**fields, **group, site=self.site(kind.kind, name), policy=policy), operands, 0)

        has = "auto", *kind.strategies
        names = OURS_ON_GPUS if self.device.type == "cuda" else OURS
        return {name: bound(name, strategy) for name, strategy in names.items() if strategy in has}


def product_into(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """left @ right, by the library."""
    return torch.mm(left, right, out=out)


def tuned_product() -> Product:
    """Returns the product by the fastest kernel that Inductor finds with `max-autotune-no-cudagraphs`."""

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.mm(left, right)

    # Every shape is a program of its own, and there are more of them than the compiler allows of one function.
    torch._dynamo.reset()
    compiled = torch.compile(product, fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs")
    # In a new tensor: into a given one Inductor would copy what the library's kernel has computed.
    return lambda left, right, out: compiled(left, right)


def in_turns(node: Node, operands: Sequence[Operands], outputs: int | slice) -> Callable[[int], Any]:
    """A function of i that calls the op of a node on the i-th of these sets of operands, in turns.

    outputs: which of the op's outputs it returns. The arguments are made here: a call has only to pass them on.
    """
    op, count = schema.overload(node.kind), len(operands)
    bound = [schema.arguments(node, **given) for given in operands]
    return lambda i: op(*bound[i % count])[outputs]


def dtype_of(cell: Cell) -> torch.dtype:
    """The cell's dtype as torch's."""
    dtype = getattr(torch, cell.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def operands(setting: Setting, cell: Cell, rows: int, seed: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Random rows [rows, K] and weights [K, N] with contiguous K, as nn.Linear holds them; several of each."""
    generator = torch.Generator(setting.device).manual_seed(1 + setting.rank + setting.world_size * seed)
    dtype = dtype_of(cell)
    nbytes = (rows * cell.K + cell.K * cell.N) * dtype.itemsize
    copies = max(1, min(MAX_ROTATED, math.ceil(ROTATED_BYTES / nbytes)))

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=setting.device).normal_(0.0, scale, generator=generator)

    left = [draw(rows, cell.K) for _ in range(copies)]
    right = [draw(cell.N, cell.K, scale=1 / math.sqrt(cell.K)).t() for _ in range(copies)]
    return left, right


def sampled_rows(rows: int, device: torch.device) -> torch.Tensor:
    """Indices of up to SAMPLED_ROWS of `rows` rows, the first and the last one among them, equal on all ranks."""
    if rows <= SAMPLED_ROWS:
        return torch.arange(rows, device=device)
    generator = torch.Generator().manual_seed(rows)
    inner = 1 + torch.randperm(rows - 2, generator=generator)[: SAMPLED_ROWS - 2].sort().values
    return torch.cat([torch.tensor([0]), inner, torch.tensor([rows - 1])]).to(device)


def of_every_shard(rows: torch.Tensor, shard_rows: int, world_size: int) -> torch.Tensor:
    """The indices of these rows of a shard in the tensor of all shards, in rank order."""
    offsets = torch.arange(world_size, device=rows.device) * shard_rows
    return (offsets[:, None] + rows).flatten()


def world_group_name() -> str:
    """The default group's name."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name
