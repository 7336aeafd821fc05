"""Steps of a served model without the host's part that training needs: plain parameters, and few checks of them.

A step of decoding is so short that the host's part of it shows. Of a compiled model with DTensor parameters this is the
unwrapping of each parameter, and Dynamo's check that each is still the one that was compiled for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo.types import GuardFilterEntry
from torch.distributed.tensor import DTensor


def local_parameters(model: nn.Module) -> nn.Module:
    """Keeps this rank's part of every DTensor parameter of ``model`` as a plain parameter, in place, and returns it.
    The forward still sees DTensors: they are made of the parts where a module reads them, which a compiled graph does
    when it is traced. So a plan of `parallelize_module` holds as before. Names stay, ``state_dict`` has the parts, and
    no parameter requires a gradient: the model is for inference from here on. Raises ValueError for a module with a
    forward of its own instance, as `transformers` makes them: it may look for DTensors elsewhere than a class does.
    """
    for module in model.modules():
        parameters: dict[str, Any] = module._parameters
        cut = {name: one for name, one in parameters.items() if isinstance(one, DTensor)}
        if cut and "forward" in vars(module):
            raise ValueError(f"the forward of a {type(module).__name__} was replaced: use serving.options() alone")
        if cut:
            for name, one in cut.items():
                parameters[name] = nn.Parameter(one.to_local().detach(), requires_grad=False)
            own = type(module)
            readers = {name: _reader(name, one) for name, one in cut.items()}
            module.__class__ = type(own.__name__, (own,), {**readers, "__module__": own.__module__})
    return model.requires_grad_(False)


def _reader(name: str, whole: DTensor) -> property:
    """What makes the DTensor of a module's part."""
    mesh, placements, shape, stride = whole.device_mesh, whole.placements, whole.shape, whole.stride()

    def read(module: nn.Module) -> DTensor:
        part = module._parameters[name]
        assert part is not None
        return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)

    return property(read)


INDEX = re.compile(r"\['?\d+'?\]")
"""The place of a module in a list of modules, in the name of what a guard checks."""


def guards_to_keep(guards: Sequence[GuardFilterEntry]) -> list[bool]:
    """Which guards of a graph stay: of those of modules and parameters that differ in the place of a layer alone, the
    first one. So what is checked does not grow with the number of layers, and a graph is still not taken for that of
    another object of the same class, such as the next layer behind a graph break or a second model, unless these two
    differ in their later layers only. torch's own filter,
    ``torch.compiler.skip_guard_on_all_nn_modules_unsafe``, lets each layer behind a graph break run as the first one.
    """
    seen: set[tuple[str, str]] = set()
    found = []
    for guard, of_inputs in zip(guards, torch.compiler.skip_guard_on_all_nn_modules_unsafe(guards), strict=True):
        kind = guard.guard_type, INDEX.sub("[]", guard.name)
        found.append(of_inputs or kind not in seen)
        seen.add(kind)
    return found


def options(cudagraphs: bool | None = None, **more: Any) -> dict[str, Any]:
    """Options of ``torch.compile(..., backend="ditron")`` for steps of a model that nobody changes between two steps.
    They leave out the checks of modules and parameters but for one layer (`guards_to_keep`), and capture the step in
    CUDA graphs: by default where there is a GPU. Two models of one class that differ in their later layers only need a
    `torch.compiler.reset` between them. Further options go beside them: ``options(**{"ditron.strategy": "tile"})``.
    """
    found: dict[str, Any] = {"guard_filter_fn": guards_to_keep}
    if torch.cuda.is_available() if cudagraphs is None else cudagraphs:
        found["triton.cudagraphs"] = True
    return found | more


def compile_step(model: nn.Module, cudagraphs: bool | None = None, **more: Any) -> Callable[..., Any]:
    """Compiles a forward of ``model`` for serving: with `local_parameters`, and with `options`. The result is called
    like the model, without gradients. Whoever replaces weights or modules afterwards compiles again; writing into a
    weight is fine.
    """
    return torch.compile(local_parameters(model), backend="ditron", options=options(cudagraphs, **more))
