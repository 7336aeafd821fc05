"""The contestants of a cell: how a model is compiled, and what one step of it computes."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.models.architecture import Decoder, Layer
from benchmarks.models.by_hand import ByHand
from benchmarks.models.dispatched import dispatched
from benchmarks.models.experts import Experts
from benchmarks.models.forms import ContextAttention, ShardedCache
from benchmarks.models.request import OURS
from benchmarks.rivals import registered, symmetric
from benchmarks.trying import UNTABLED
from ditron_inductor.backend import ditron

Step = Callable[[], dict[str, torch.Tensor]]
"""One step; what it computed, by name."""
Compiler = Callable[[nn.Module], Callable[..., Any]]
_MODELS_WITH_AUTO_SELECT = itertools.count()


def _inductor(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model, fullgraph=True, dynamic=False)


def _max_autotune(model: nn.Module) -> Callable[..., Any]:
    # CUDA graphs are ours to capture, for all contestants alike.
    return torch.compile(model, fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs")


def _overlap(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model, fullgraph=True, dynamic=False, options={"reorder_for_compute_comm_overlap": True})


def _auto_select(model: nn.Module, **options: Any) -> Callable[..., Any]:
    problem = symmetric.auto_select_refusal()
    if problem:
        raise ValueError(problem)
    # Inductor draws the identities of its symmetric buffers from `random`, whose state Dynamo restores after compiling.
    # So the buffers of two cells would have the same identities, and those of different sizes are refused.
    random.seed(next(_MODELS_WITH_AUTO_SELECT))
    return torch.compile(model, fullgraph=True, dynamic=False, options={**options, symmetric.AUTO_SELECT: True})


def _max_autotune_select(model: nn.Module) -> Callable[..., Any]:
    return _auto_select(model, **torch._inductor.list_mode_options("max-autotune-no-cudagraphs"))


def _symm_mem(model: nn.Module) -> Callable[..., Any]:
    options: dict[str, Any] = {"post_grad_custom_post_pass": symmetric.ByHand()}
    return torch.compile(model, fullgraph=True, dynamic=False, options=options)


def _registered(model: nn.Module) -> Callable[..., Any]:
    return registered.of_world(next(model.parameters()).device).calling(_inductor(model))


def _written(write: Callable[[Decoder], nn.Module], model: nn.Module) -> nn.Module:
    """The layers of a model as `write` writes them, also where a module around them returns what they pass on."""
    return write(model) if isinstance(model, Decoder) else type(model)(write(model.model))  # type: ignore[arg-type]


def _one_shot_norm(model: nn.Module) -> Callable[..., Any]:
    return _inductor(_written(ByHand, model))


def _grouped(model: nn.Module) -> Callable[..., Any]:
    return _inductor(_written(functools.partial(ByHand, copies=False), model))


def _fused(model: nn.Module) -> Callable[..., Any]:
    # `in_form` chooses the experts' form at each call.
    return _inductor(model)


def _one_shot_fused(model: nn.Module) -> Callable[..., Any]:
    return _inductor(_written(functools.partial(ByHand, fused=True), model))


def _dispatched(model: nn.Module) -> Callable[..., Any]:
    own = _written(dispatched, model)
    # The sizes of all-to-alls are known to the host alone, so each layer is several graphs. One compilation of all
    # layers would break inside their loop: then torch does not compile this loop again, for no contestant.
    for part in own.modules():
        if isinstance(part, Layer):
            part.compile(dynamic=False)
    return own


def _async_tp(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model, fullgraph=True, dynamic=False, options={"_micro_pipeline_tp": True})


def _ditron(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model, backend=ditron, fullgraph=True, dynamic=False)


def _ditron_planned(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model, backend=ditron, fullgraph=True, dynamic=False, options={"ditron.trials": False})


def _ditron_untabled(model: nn.Module) -> Callable[..., Any]:
    # The run takes the tables away. With an option, though it is the default, torch compiles anew.
    return torch.compile(model, backend=ditron, fullgraph=True, dynamic=False, options={"ditron.trials": True})


COMPILERS: Mapping[str, Compiler] = {
    "eager": lambda model: model,
    "inductor": _inductor,
    "max_autotune": _max_autotune,
    "max_autotune_select": _max_autotune_select,
    "overlap": _overlap,
    "auto_select": _auto_select,
    "symm_mem": _symm_mem,
    "registered": _registered,
    "one_shot_norm": _one_shot_norm,
    "grouped": _grouped,
    "fused": _fused,
    "one_shot_fused": _one_shot_fused,
    "dispatched": _dispatched,
    "async_tp": _async_tp,
    "ditron": _ditron,
    UNTABLED: _ditron_untabled,
    "ditron:planned": _ditron_planned,
}


def in_form(name: str, compiler: Compiler, model: nn.Module) -> Callable[..., Any]:
    """The compiled model of a contestant, at every call in its own form of attention (see `forms`) and of experts."""
    call = compiler(model)
    attention = [part for part in model.modules() if isinstance(part, ShardedCache | ContextAttention)]
    experts = [part for part in model.modules() if isinstance(part, Experts)]

    def chosen(*operands: Any) -> Any:
        for part in attention:
            part.for_ditron = name in OURS
        for mixture in experts:
            mixture.fused = name == "fused"
        return call(*operands)

    return chosen if attention or experts else call


def forward(call: Callable[..., Any], model: nn.Module, operands: tuple[Any, ...]) -> Step:
    """One forward without gradients."""

    def step() -> dict[str, torch.Tensor]:
        with torch.no_grad():
            return {"output": call(*operands)}

    return step


def training(call: Callable[..., Any], model: nn.Module, operands: tuple[Any, ...]) -> Step:
    """One forward and backward. The gradient of the output is not uniform, so that no part of it cancels."""
    x, *rest = operands
    leaf = x.detach().clone().requires_grad_()
    weight = torch.linspace(-1, 1, x.numel(), device=x.device).view(x.shape).to(x.dtype)

    def step() -> dict[str, torch.Tensor]:
        leaf.grad = None
        model.zero_grad(set_to_none=True)
        out = call(leaf, *rest)
        out.backward(weight)
        assert leaf.grad is not None
        values = {"output": out.detach(), "input's gradient": leaf.grad}
        gradients = {name: one.grad for name, one in model.named_parameters()}
        assert all(one is not None for one in gradients.values()), "a weight has no gradient"
        return values | {f"gradient of {name}": one for name, one in gradients.items() if one is not None}

    return step


def step_of(phase: str, name: str, compiler: Compiler, model: nn.Module, operands: tuple[Any, ...]) -> Step:
    """One step of a contestant, compiled at its first call."""
    return (training if phase == "training" else forward)(in_form(name, compiler, model), model, operands)


def whole(value: torch.Tensor) -> torch.Tensor:
    """Returns the value as a plain tensor; pending sums are a matter of layout. Collective for what is cut."""
    return value.full_tensor() if isinstance(value, DTensor) else value
