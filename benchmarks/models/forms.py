"""How a decoder is cut over the ranks: DTensor's plans for tensor parallelism, and attention to the keys of all ranks.

Both attentions are written with what torch has, by its fastest kernels, as programs without Ditron have them. Ditron's
contestant has another form of each (`for_ditron`): under context parallelism the call of ours, for a causal mask over a
sequence that is divided can be written in many ways; over a cache the form that is recognised, where heads that share
keys are rows of one query.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from benchmarks.models.architecture import Architecture, Decoder, EngineDecoder
from benchmarks.models.attention import AttentionCore, SinkAttention, plain_attention
from benchmarks.models.experts import Experts
from benchmarks.models.latent import LatentAttention
from benchmarks.models.zoo import Cell
from ditron_inductor.ops import all_gather_attention
from ditron_inductor.tools.demo_model import rotary_table

PROJECTIONS = tuple(f"self_attn.{name}_proj" for name in ("q", "k", "v", "qkv", "q_b", "kv_b"))
COLUMNS = (*PROJECTIONS, "mlp.gate_proj", "mlp.up_proj", "mlp.packed_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")
NORMS = ("input_layernorm", "attention_outnorm", "feedforward_innorm", "feedforward_outnorm")

PROJECTED = 3.0**-0.5
"""Standard deviation of what a fresh linear layer makes of normalised rows."""
PEAK = 3.0
"""Standard deviation of the scores of attention: of thousands of keys a few have most of the weight."""


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, Hq, S, D], log-sum-exp [B, Hq, S] in fp32), by torch's fastest kernel: cuDNN's, or that for CPUs."""
    aten = torch.ops.aten
    if q.is_cuda:
        found = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
        out, lse = found[0], found[1]
    else:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, lse.reshape(q.shape[:3]).float()


def attend_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Does what `attend` does for one query [B, Hq, 1, D], with heads that share keys as rows, by flash kernels."""
    aten = torch.ops.aten
    rows = q.view(q.shape[0], k.shape[1], -1, q.shape[3])
    if q.is_cuda:
        found = aten._scaled_dot_product_flash_attention(rows, k, v, 0.0, False, False, scale=scale)
    else:
        found = aten._scaled_dot_product_flash_attention_for_cpu(rows, k, v, 0.0, False, scale=scale)
    return found[0].reshape(q.shape), found[1].reshape(q.shape[:3])


class Gathering(AttentionCore):
    """Attention with one gather of what all ranks have."""

    @property
    def group(self) -> dist.ProcessGroup:
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """[n, ..] of each rank as [W * n, ..]."""
        return all_gather_tensor(x, 0, self.group)

    def along_sequence(self, x: torch.Tensor) -> torch.Tensor:
        """[B, H, S, D] of each rank as [B, H, W * S, D]."""
        return self.gathered(x.movedim(2, 0).contiguous()).movedim(0, 2)


class ContextAttention(Gathering):
    """Causal, of this rank's queries to the keys of all ranks.

    In torch: a gather of keys and values, attention to the own keys and to all in front of them, merged.
    """

    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.scale = scale
        self.for_ditron = False

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.plain:
            keys, values = (self.along_sequence(one) for one in (k, v))
            return plain_attention(q, keys, values, self.scale, dist.get_rank() * k.shape[2])
        if self.for_ditron:
            return all_gather_attention(q, k, v, mask="causal_offset", scale=self.scale)
        rank, length = dist.get_rank(), k.shape[2]
        # Both in one gather, along a dimension that makes it one copy.
        gathered = self.gathered(torch.stack((k, v)).unsqueeze(0))
        out, lse = attend(q, k, v, True, self.scale)
        if not rank:
            return out
        # [ranks, 2, B, Hkv, S, D] -> the tokens in front of this rank's.
        before = gathered[:rank].permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        assert before.shape[3] == rank * length
        other, other_lse = attend(q, before[0], before[1], False, self.scale)
        share = torch.sigmoid(lse - other_lse)[..., None]
        return (out.float() * share + other.float() * (1.0 - share)).to(q.dtype)


class ShardedCache(Gathering):
    """Attention of one new token per sequence to a cache whose tokens are divided over the ranks.

    The cache is full. The new key and value take the place of the oldest ones, on the rank whose turn it is.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slot: torch.Tensor
    mine: torch.Tensor

    def __init__(self, arch: Architecture, batch: int, length: int, owner: bool) -> None:
        super().__init__()
        self.for_ditron = False
        self.scale = arch.scale if arch.scale is not None else arch.head_dim**-0.5
        shape = batch, arch.kv_heads, length, arch.head_dim
        self.register_buffer("keys", torch.empty(shape), persistent=False)
        self.register_buffer("values", torch.empty(shape), persistent=False)
        self.register_buffer("slot", torch.zeros(1, dtype=torch.int64), persistent=False)
        self.register_buffer("mine", torch.full((1,), owner), persistent=False)

    def fill(self, generator: torch.Generator) -> None:
        """With random keys and values, as large as the projections make them."""
        for cache in (self.keys, self.values):
            cache.normal_(std=PROJECTED, generator=generator)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for cache, new in ((self.keys, k), (self.values, v)):
            cache.index_copy_(2, self.slot, torch.where(self.mine, new, cache.index_select(2, self.slot)))
        if self.plain:
            keys, values = (self.along_sequence(one) for one in (self.keys, self.values))
            return plain_attention(q, keys, values, self.scale, None)
        if self.for_ditron:
            out, lse = attend_rows(q, self.keys, self.values, self.scale)
        else:
            out, lse = attend(q, self.keys, self.values, False, self.scale)
        parts = torch.cat((out.reshape(*lse.shape[:2], -1).float(), lse), dim=-1)
        gathered = self.gathered(parts).view(self.group.size(), *parts.shape)
        weights = torch.softmax(gathered[..., -1], 0)
        return (weights[..., None] * gathered[..., :-1]).sum(0).to(q.dtype).view(q.shape)


def decoder(
    arch: Architecture,
    cell: Cell,
    world_size: int,
    rank: int,
    context: type[ContextAttention],
    cached: type[ShardedCache],
) -> Decoder:
    """The cell's layers in the sizes of `arch` with random weights and caches on the default device. context, cached:
    the attention of the forms `cp` and `kv`.
    """
    make_core: Callable[[], nn.Module] | None = None
    if cell.form == "cp":
        make_core = functools.partial(context, arch.scale)
    if cell.form == "kv":
        make_core = functools.partial(cached, arch, cell.batch, cell.cache // world_size, rank == 0)
    if arch.sinks:
        windows = itertools.cycle((arch.window, 0))
        cores = (SinkAttention(arch.heads, cell.tokens, window, arch.scale) for window in windows)
        make_core = functools.partial(next, cores)
    torch.manual_seed(1)
    model = (EngineDecoder if arch.engine else Decoder)(arch, cell.layers, make_core)
    _peak(model, arch)
    own = torch.Generator(torch.get_default_device()).manual_seed(100 + rank)
    for part in model.modules():
        if isinstance(part, ShardedCache):
            part.fill(own)
    return model


def build(arch: Architecture, cell: Cell, mesh: DeviceMesh) -> Decoder:
    """The cell's layers with random weights on the default device, cut over the mesh.

    Raises ValueError for sizes that do not divide over its ranks, and for sinks in the forms `cp` and `kv`.
    """
    world_size, rank = mesh.size(), mesh.get_rank()
    if arch.sinks and cell.form in ("cp", "kv"):
        raise ValueError(f"{cell.model} has sinks, and the attention of {cell.form} has none")
    for name, size in _divided(arch, cell).items():
        if size % world_size:
            raise ValueError(f"{name} = {size} of {cell.model} does not divide over {world_size} ranks")
    model = decoder(arch, cell, world_size, rank, ContextAttention, ShardedCache)
    _random_vectors(model)
    return cut(model, cell.form, mesh)


def cut(model: Decoder, form: str, mesh: DeviceMesh) -> Decoder:
    """A decoder of a form, in place, over the mesh."""
    plan = _plan(form)
    for layer in model.layers:
        parts = {name: style for name, style in plan.items() if _has(layer, name)}
        if parts:
            parallelize_module(layer, mesh, parts)
        if isinstance(layer.mlp, Experts) and form != "cp":
            layer.mlp.cut(mesh, form == "sp")
        if isinstance(layer.self_attn, LatentAttention) and form in ("ar", "sp"):
            layer.self_attn.mesh = mesh
        if isinstance(layer.self_attn.core, SinkAttention):
            layer.self_attn.core.cut(mesh)
    if form == "sp":
        parallelize_module(model, mesh, {"norm": SequenceParallel(use_local_output=True)})
    return model


def _divided(arch: Architecture, cell: Cell) -> dict[str, int]:
    """The sizes that have to divide by the number of ranks."""
    if cell.form == "cp":
        return {"tokens": cell.tokens}
    sizes = {"inner": arch.inner} | ({"shared": arch.shared} if arch.shared else {})
    if cell.form == "kv":
        return sizes | {"cache": cell.cache}
    sizes |= {"heads": arch.heads, "kv_heads": arch.kv_heads}
    return sizes | {"tokens": cell.tokens} if cell.form == "sp" else sizes


def _random_vectors(model: Decoder) -> None:
    """Fresh norms and biases are 0 or 1: a program that loses them would go unseen."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                drawn = torch.randn(parameter.shape, generator=generator, device=generator.device)
                parameter.add_((drawn * 0.1).to(parameter))


def _peak(model: Decoder, arch: Architecture) -> None:
    """Scale the queries so that the scores of attention have a standard deviation of PEAK.

    Those of fresh weights are nearly equal. Attention then is the mean of thousands of values, which is next to nothing
    beside the residual: what is wrong in it goes unseen.
    """
    scale = arch.scale if arch.scale is not None else arch.head_dim**-0.5
    factor = PEAK / (scale * arch.head_dim**0.5 * (1.0 if arch.qk_norm else PROJECTED**2))
    for layer in model.layers:
        layer.self_attn.sharpen(factor)


def _has(layer: nn.Module, name: str) -> bool:
    owner, _, last = name.rpartition(".")
    return getattr(layer.get_submodule(owner), last, None) is not None


def _plan(form: str) -> dict[str, ParallelStyle]:
    """Returns how the modules of a layer are cut in a form."""
    if form == "cp":
        return {}
    rows = Shard(1) if form == "sp" else Replicate()
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in COLUMNS}
    plan |= {name: RowwiseParallel(output_layouts=rows) for name in ROWS}
    if form == "kv":
        return {name: style for name, style in plan.items() if name.startswith("mlp.")}
    if form == "sp":
        plan |= {name: SequenceParallel(use_local_output=True) for name in NORMS}
        # The inputs of a layer's two halves are gathered once for all the matmuls that read them.
        plan["mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan["self_attn"] = PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        )
    return plan


def inputs(
    arch: Architecture, cell: Cell, rank: int, world_size: int, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(hidden states, cos, sin): random, of this rank's part of the sequence where it is divided."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(cell.batch, cell.tokens, arch.hidden, generator=generator).to(device, dtype)
    if cell.form in ("sp", "cp"):
        x = x.chunk(world_size, dim=1)[rank].contiguous()
    if not arch.theta:
        return x, None, None
    begin = cell.cache
    cos, sin = (one[begin:] for one in rotary_table(begin + cell.tokens, arch.rotated, arch.theta))
    if cell.form == "cp":
        cos, sin = cos.chunk(world_size)[rank], sin.chunk(world_size)[rank]
    return x, cos.contiguous().to(device), sin.contiguous().to(device)
