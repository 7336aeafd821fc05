"""The programs of README and guide run as they are printed, and print what the page says they do."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import linecache
import os
import re
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.cases import rare
from tests.models.interpreted import without_generated_code
from tests.ranks import RankContext, RankPool, RankPools

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "guide").glob("*.md"))]
# Packages without which a page's programs do not run; the extra `models` has them.
NEEDS = {"docs/guide/hugging_face.md": ("transformers", "accelerate")}
# Accelerate keeps a state for each process: its page has processes that others use for it, too.
LABELS = {"docs/guide/hugging_face.md": "accelerate"}
COMPILE = torch.compile
LIMIT_S = 250.0


def programs(page: str) -> list[tuple[str, str]]:
    """The blocks of Python of a page, each with the block of text below it, empty where there is none."""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    following = [*blocks[1:], ("", "")]
    pairs = zip(blocks, following, strict=True)
    return [(code, text if kind == "text" else "") for (lang, code), (kind, text) in pairs if lang == "python"]


def compile_by_name(model: Any, *, backend: Any = None, **kwargs: Any) -> Any:
    """torch.compile, where a backend is named. Inductor alone is what the page compares with: it is torch's to test."""
    return model if backend is None else COMPILE(model, backend=backend, **kwargs)


def run_page(ctx: RankContext, page: str, blocks: list[str]) -> list[str]:
    """What each block prints, all of them in one module, as one reads them. On the CPU without Inductor's C++, which is
    not what the page is about.
    """
    torch._dynamo.reset()
    printed = []
    module = types.ModuleType("guide")
    with contextlib.ExitStack() as stack:
        rank = str(ctx.rank)
        environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(ctx.world_size)}
        stack.enter_context(mock.patch.dict(os.environ, environment))
        if importlib.util.find_spec("accelerate") is not None:
            from accelerate.state import AcceleratorState

            # It is the same for all of a process, also for what ran in this rank before.
            AcceleratorState._reset_state(reset_partial_state=True)
            stack.callback(AcceleratorState._reset_state, reset_partial_state=True)
        # Accelerate allows TF32, for all that follows.
        matmul = torch.backends.cuda.matmul
        stack.callback(setattr, matmul, "allow_tf32", matmul.allow_tf32)
        # Dynamo looks names up in the module that a function says it is from.
        # Only this name is taken back: what torch imports meanwhile must stay, as it registers its ops only once.
        sys.modules[module.__name__] = module
        stack.callback(sys.modules.pop, module.__name__)
        if ctx.device.type == "cpu":
            stack.enter_context(without_generated_code())
            stack.enter_context(mock.patch.object(torch, "compile", compile_by_name))
        for number, block in enumerate(blocks):
            name = f"{page}:{number}"
            # Dynamo reads the source of a function.
            linecache.cache[name] = (len(block), None, block.splitlines(keepends=True), name)
            out = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            exec(compile(block, name, "exec"), vars(module))
            printed.append(out.getvalue())
    return printed


def check_page(pool: RankPool, page: str) -> None:
    found = programs(page)
    assert found, f"{page} holds no program"
    missing = [name for name in NEEDS.get(page, ()) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"the page's programs need {', '.join(missing)}: pip install 'ditron-inductor[models]'")
    for printed in pool.run(run_page, page, [code for code, _ in found], timeout=LIMIT_S):
        for (_, wanted), text in zip(found, printed, strict=True):
            assert not wanted or text == wanted, text


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", [*(page for page in PAGES if page not in NEEDS), *rare(*NEEDS)])
def test_a_page_runs_as_it_is_printed(rank_pools: RankPools, page: str) -> None:
    check_page(rank_pools.get("cpu", 2, label=LABELS.get(page, "")), page)


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_on_gpus(rank_pools: RankPools, page: str) -> None:
    check_page(rank_pools.get("cuda", 2, label=LABELS.get(page, "")), page)
