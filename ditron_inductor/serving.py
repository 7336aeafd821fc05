"""Steps of a served model without the host's part that training needs: plain parameters, and no checks of them.

A step of decoding is so short that the host's part of it shows. Of a compiled model with DTensor parameters this is the
unwrapping of each parameter, and Dynamo's check that each is still the one that was compiled for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._dynamo import convert_frame, eval_frame
from torch._dynamo.types import GuardFilterEntry
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as modules


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


def guards_to_keep(guards: Sequence[GuardFilterEntry]) -> list[bool]:
    """Which guards of a graph stay: none of modules and parameters, if the graph begins the call of the one module that
    runs. Behind a graph break Dynamo compiles the code of a layer once for all layers, and only guards tell them apart;
    without them each layer would run as the first one, with its place in the cache. There all guards stay, and so they
    do within a module that runs without being compiled.
    """
    if _begins_a_call(sys._getframe(1)):
        return torch.compiler.skip_guard_on_all_nn_modules_unsafe(guards)
    return [True] * len(guards)


def _begins_a_call(frame: FrameType | None) -> bool:
    """Whether Dynamo, which builds guards in `frame`, compiles what was called, and nothing that runs inside of it."""
    stack = []
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    called = [one.f_locals["self"] for one in stack if one.f_code is nn.Module._call_impl.__code__]
    if len({id(one) for one in called if not isinstance(one, eval_frame.OptimizedModule)}) > 1:
        return False
    names = [(one.f_code.co_filename, one.f_code.co_name) for one in stack]
    # Between Dynamo and what it was asked to run are only the frames with which torch calls a module.
    outwards = names[names.index((convert_frame.__file__, "__call__")) :]
    behind = [file for file, _ in outwards if file not in (convert_frame.__file__, modules.__file__)]
    return behind[0] == eval_frame.__file__


def options(cudagraphs: bool | None = None, **more: Any) -> dict[str, Any]:
    """Options of ``torch.compile(..., backend="ditron")`` for steps of a model that nobody changes between two steps.
    They leave out the checks of the model's modules and parameters (`guards_to_keep`), and capture the step in CUDA
    graphs: by default where there is a GPU. Several models of one class in a process are not tested, and failed once by
    KeyError. Serve one of a class, and call `torch.compiler.reset` before another one. Further options go beside them:
    ``options(**{"ditron.strategy": "tile"})``.
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
