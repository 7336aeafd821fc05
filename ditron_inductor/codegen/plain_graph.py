"""A graph as Inductor alone would run it: kept as text beside the rewritten one, compiled when the ranks ask for it.

Passes that change the collectives themselves (sums of reductions merged, gathers shared, work divided among the ranks)
are right only if all ranks agree on them. If they do not agree, a graph runs as it was before the passes.
"""

from __future__ import annotations

import base64
import logging
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses import FakeTensorMode
from torch.fx._graph_pickler import GraphPickler
from torch.fx._graph_pickler import Options as PickleOptions
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from ditron_inductor.device.compilations import compilations

logger = logging.getLogger(__name__)

Run = Callable[[list[Any]], Sequence[Any]]

MOST_COMPILED = 8
"""The most forms of inputs for which a graph is compiled; for further forms it is interpreted, op by op."""


def dump(graph: fx.Graph) -> str:
    """Returns the module of the graph as text, without metadata; empty, with a warning, if it cannot be written."""
    module = graph.owning_module
    if module is None:
        return ""
    options = PickleOptions(ops_filter=None, node_metadata_key_filter=lambda key: False)
    try:
        return base64.b85encode(zlib.compress(GraphPickler.dumps(module, options))).decode()
    except Exception as exc:  # whatever an op, a constant or a subgraph raises that cannot be pickled
        logger.warning(
            "a graph that holds collectives cannot be kept as it was before Ditron's passes (%s: %s); "
            "it can run only if all ranks compile it alike",
            type(exc).__name__,
            exc,
        )
        return ""


def load(text: str) -> fx.GraphModule:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # Without metadata the module has no fake tensor, but the unpickler needs a mode.
    loaded: Any = GraphPickler.loads(zlib.decompress(base64.b85decode(text)), FakeTensorMode(shape_env=ShapeEnv()))
    assert isinstance(loaded, fx.GraphModule)
    return loaded


class PlainGraph:
    """Runs a dumped graph. text: the result of `dump`, not empty. rewrite: what Inductor calls on the graph first."""

    def __init__(self, text: str, rewrite: CustomGraphPass | None = None) -> None:
        self._text = text
        self._rewrite = rewrite
        self._module: fx.GraphModule | None = None
        self._compiled: dict[Any, Run] = {}

    def interpret(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """The graph's outputs, computed one op after the other: nothing has to be compiled."""
        if self._module is None:
            self._module = load(self._text)
        outputs: Sequence[Any] = fx.Interpreter(self._module).run(*inputs)
        return outputs

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """The graph's outputs, compiled by Inductor for inputs of this form."""
        form = tuple(_form(example) for example in inputs)
        run = self._compiled.get(form)
        if run is None:
            if len(self._compiled) >= MOST_COMPILED and self._rewrite is None:
                return self.interpret(inputs)
            run = self._compiled[form] = self._compile(list(inputs))
        return run(list(inputs))

    def _compile(self, inputs: list[Any]) -> Run:
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx_inner

        # Inductor changes the module that it compiles.
        module = load(self._text)
        _note_numbers(module, inputs)
        options = {"post_grad_custom_pre_pass": self._rewrite, "triton.cudagraphs": False}
        with compilations.announced(), torch.no_grad(), config.patch(options):
            compiled: Any = compile_fx_inner(module, inputs)
        run: Run = compiled
        return run


class _Numbers(FakeTensorProp):
    """Notes the numbers that a graph computes. FakeTensorProp notes only their symbols."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, (int, float, bool)):
            n.meta["val"] = result
        return result


def _note_numbers(module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [
        mode.from_tensor(example, static_shapes=True) if isinstance(example, torch.Tensor) else example
        for example in inputs
    ]
    _Numbers(module, mode).propagate_dont_convert_inputs(*fakes)
    for node in module.graph.nodes:
        if not isinstance(node.meta.get("val"), (int, float, bool)):
            node.meta.clear()


def restrided(outputs: Sequence[Any], strides: Sequence[tuple[int, ...] | None]) -> tuple[Any, ...]:
    """Returns the outputs with the strides that their reader was compiled for; None stands for any strides."""
    return tuple(
        x
        if wanted is None or not isinstance(x, torch.Tensor) or x.stride() == tuple(wanted)
        else torch.empty_strided(x.shape, wanted, dtype=x.dtype, device=x.device).copy_(x)
        for x, wanted in zip(outputs, strides, strict=True)
    )


def _form(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.shape, value.stride(), value.dtype, value.device, value.data_ptr() % 16
