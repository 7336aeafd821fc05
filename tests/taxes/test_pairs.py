"""Sites of two graphs that belong together."""

from __future__ import annotations

from typing import Any

from ditron_inductor.report.explained import ExplainedSite
from ditron_inductor.taxes.pairs import distinct, paired
from tests.test_explain import site


def made(name: str, kind: str = "matmul_all_reduce", direction: str = "forward", m: int = 16, **more: Any) -> Any:
    return ExplainedSite(direction, site(site=f"{name}:{kind}", kind=kind, m=m, **more), "tile", None, "")


def names(pairs: list[tuple[ExplainedSite, ExplainedSite | None]]) -> list[tuple[str, str | None]]:
    return [(one.record.site, None if other is None else other.record.site) for one, other in pairs]


def test_one_name_is_one_site() -> None:
    both = [made("a/0"), made("a/1")]
    assert names(paired(both, list(reversed(both)))) == [(one.record.site,) * 2 for one in both]


def test_other_names_go_in_their_order() -> None:
    """A norm is absorbed in one graph only, and the graphs have other names for all; one name is the same."""
    fused = [made("b/0", "matmul_all_reduce_rms_norm"), made("a/1"), made("b/2", direction="backward"), made("b/3")]
    unfused = [made("a/0"), made("a/1"), made("a/2"), made("c/0", direction="backward")]
    assert names(paired(fused, unfused)) == [
        ("b/0:matmul_all_reduce_rms_norm", "a/0:matmul_all_reduce"),
        ("a/1:matmul_all_reduce", "a/1:matmul_all_reduce"),
        ("b/2:matmul_all_reduce", "c/0:matmul_all_reduce"),
        ("b/3:matmul_all_reduce", "a/2:matmul_all_reduce"),
    ]


def test_what_is_not_certain_has_no_counterpart() -> None:
    fused = [made("b/0"), made("b/1")]
    for unfused in ([made("a/0")], [made("a/0"), made("a/1", m=8)], [made("a/0"), made("a/1", direction="graph")]):
        assert [other for _, other in paired(fused, unfused)] == [None, None]


def test_graphs_with_the_same_launches_share_their_calls() -> None:
    twice = [made("a/0"), made("a/1"), made("a/0"), made("a/0", m=8)]
    assert distinct(twice) == [twice[2], twice[1], twice[3]]
