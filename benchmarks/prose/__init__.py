"""The numbers in the prose of README and docs, made from the results.

A *claim* is a piece of a page's text with `{}` for every number in it, and the numbers as the results have them.
`python -m benchmarks.report` puts the numbers into the pages; `--check`, and with it a test, fails where a page has
others. Whoever rewrites a sentence with a claim changes the claim too: a page without the text of one is an error.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.prose.claims import Claim
from benchmarks.prose.engines import engines
from benchmarks.prose.mixtures import mixtures
from benchmarks.prose.on_four import four_gpus
from benchmarks.prose.picked import Results
from benchmarks.prose.readme import home, readme
from benchmarks.prose.served import serving
from benchmarks.prose.single_kernels import beside_attention, single_kernels
from benchmarks.prose.taxed import taxes
from benchmarks.prose.tuned import tuning
from benchmarks.prose.whole_models import whole_models


def pages(root: Path, results: Results) -> dict[Path, list[Claim]]:
    """Returns the claims of every page."""
    models, docs = results.models, root / "docs"
    return {
        root / "README.md": readme(models, results.facts, results.generated),
        docs / "index.md": home(models),
        docs / "guide" / "other_stacks.md": engines(models),
        docs / "four_gpus.md": four_gpus(results),
        docs / "guide" / "serving.md": serving(results),
        docs / "guide" / "mixture_of_experts.md": mixtures(results),
        docs / "models.md": whole_models(models, results.facts),
        docs / "taxes.md": taxes(results),
        docs / "tuning.md": tuning(results),
        docs / "when_it_pays.md": single_kernels(results.gemm, models) + beside_attention(results.attention),
    }
