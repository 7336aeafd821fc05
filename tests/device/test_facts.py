"""What follows when the ranks' lists of collectives are compared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ditron_inductor.device.agreements import Agreement, Form, decide, forms_of
from ditron_inductor.device.facts import CUDAGRAPHS, GraphFacts, GroupFacts, LaunchFacts, compare
from ditron_inductor.errors import DitronDiverged

REDUCED = LaunchFacts("all_reduce sum bfloat16", 64, "cpu")
GATHERED = LaunchFacts("all_gather bfloat16", 32, "cpu", order=1)
FUSED = replace(REDUCED, kind="matmul_all_reduce", local="{}", site="r/0:matmul_all_reduce@k")
GROUP = GroupFacts("0", 2, (REDUCED, GATHERED), (FUSED, GATHERED))
BARE = GroupFacts("0", 2, (REDUCED, GATHERED), (REDUCED, GATHERED))
OPTIONS = [{"ditron.strategy": "auto"}] * 2


def test_graphs_alike_are_fused_by_what_rank_0_has() -> None:
    other = replace(GROUP, after=(replace(FUSED, local='{"has_bias": true}'), GATHERED))
    verdict = compare([GROUP, other], OPTIONS)
    assert (verdict.plain, verdict.library, verdict.leader) == ("", {}, {0: "{}"})
    assert forms_of(other, verdict) == (Form(REDUCED.wire, "matmul_all_reduce", "", "{}"), Form(GATHERED.wire))


def test_graphs_of_other_shapes_have_other_keys() -> None:
    """What is decided for the sites of one is not looked up for those of the other."""
    whole, other, cut = (
        replace(GROUP, before=(replace(REDUCED, shape=shape), GATHERED), after=(replace(FUSED, sizes=sizes), GATHERED))
        for shape, sizes in (((8, 8), (8, 8)), ((4, 16), (4, 16)), ((8, 8), (4, 16)))
    )
    facts = [GraphFacts((group,), OPTIONS[0]) for group in (whole, other, cut)]
    assert len({one.key for one in facts}) == 3 and len({(one.program, one.sizes, one.form) for one in facts}) == 1
    assert all(GraphFacts.parse(one.text()) == one for one in facts)


def test_sizes_are_open_where_a_rank_has_a_symbol() -> None:
    groups = [replace(GROUP, after=(replace(FUSED, sizes=sizes), GATHERED)) for sizes in ((8, 16), (None, 16))]
    verdict = compare(groups, OPTIONS)
    assert verdict.sizes == {0: (None, 16)} and forms_of(groups[0], verdict)[0].sizes == (None, 16)


def test_a_node_that_one_rank_lacks_runs_by_the_library() -> None:
    verdict = compare([GROUP, BARE], OPTIONS)
    assert verdict.library == {0: "the ranks fused it differently: matmul_all_reduce on rank 0, left alone on rank 1"}
    assert verdict.plain == "" and verdict.leader == {}


def test_nodes_that_send_in_an_order_of_their_own_have_no_library_for_one_rank() -> None:
    raw = LaunchFacts("all_to_all bfloat16", 64)
    one = GroupFacts("0", 2, (raw,), (replace(raw, kind="matmul_all_to_all"),))
    assert "fused it differently" in compare([one, GroupFacts("0", 2, (raw,), (raw,))], OPTIONS).plain


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (replace(GROUP, before=(REDUCED,), after=(FUSED,)), "2 on rank 0, 1 on rank 1 collectives"),
        (replace(GROUP, after=(FUSED,)), "2 on rank 0, 1 on rank 1 launches"),
        (replace(GROUP, after=(replace(FUSED, wire="all_reduce sum float32"), GATHERED)), "the passes made launch 0"),
        (replace(GROUP, after=(FUSED, replace(GATHERED, order=2))), "launches of other groups stand elsewhere"),
        (replace(GROUP, moved="try_forms 1"), "moved something across"),
    ],
)
def test_what_the_passes_changed_on_one_rank_alone_runs_plain(other: GroupFacts, expected: str) -> None:
    assert expected in compare([GROUP, other], OPTIONS).plain


def test_what_all_graphs_moved_alike_is_fused_and_what_other_graphs_moved_is_not() -> None:
    moved = replace(GROUP, moved="try_forms 1", structure="a")
    assert compare([moved, moved], OPTIONS).plain == ""
    assert "moved something" in compare([moved, replace(moved, structure="b")], OPTIONS).plain


@pytest.mark.parametrize(
    "other",
    [
        replace(REDUCED, wire="all_reduce avg bfloat16"),
        replace(REDUCED, wire="all_reduce sum float32"),
        replace(REDUCED, numel=63),
        GATHERED,
    ],
)
def test_the_first_collective_that_differs_is_named(other: LaunchFacts) -> None:
    verdict = compare([GROUP, replace(GROUP, before=(other, GATHERED))], OPTIONS)
    assert verdict.diverged is not None and verdict.diverged[:2] == (0, 1)


def test_a_size_that_is_a_symbol_may_be_any() -> None:
    verdict = compare([GROUP, replace(GROUP, before=(replace(REDUCED, numel=None), GATHERED))], OPTIONS)
    assert verdict.diverged is None and verdict.plain == ""


def test_options_differ() -> None:
    options = [*OPTIONS[:1], {"ditron.strategy": "tile"}]
    assert compare([GROUP, GROUP], options).options == "ditron.strategy is auto on rank 0, tile on rank 1"
    assert "different options" in compare([GROUP, BARE], options).plain


def test_ranks_may_differ_in_what_torch_captures() -> None:
    """Inductor alone runs them right, so nobody is to blame, but a replayed call runs by other strategies."""
    options = [{**OPTIONS[0], CUDAGRAPHS: str(captured)} for captured in (True, False)]
    verdict = compare([GROUP, GROUP], options)
    assert verdict.plain == f"the ranks have different options: {CUDAGRAPHS} is True on rank 0, False on rank 1"
    assert not verdict.options
    options[1]["ditron.strategy"] = "tile"
    assert compare([GROUP, GROUP], options).options == "ditron.strategy is auto on rank 0, tile on rank 1"


def test_facts_survive_their_text() -> None:
    facts = GraphFacts((replace(GROUP, moved="x", structure="y"),), OPTIONS[0])
    assert GraphFacts.parse(facts.text()) == facts
    assert not facts.is_bare and GraphFacts((BARE,)).is_bare
    assert GraphFacts((replace(BARE, moved="x"),)).is_bare is False


def agreed(*forms: Form) -> Agreement:
    return Agreement(forms={"0": forms})


def test_a_graph_of_the_agreed_form_plans_as_rank_0() -> None:
    form = Form(REDUCED.wire, "matmul_all_reduce", "", '{"num_products": 2}')
    decision = decide(GraphFacts((GROUP,)), agreed(form, Form(GATHERED.wire)))
    assert decision.conform is None and decision.leader == {("0", FUSED.site): form.leader}


def test_a_graph_without_an_agreed_node_conforms_and_one_with_a_node_more_does_not_run_it() -> None:
    with_node = agreed(Form(REDUCED.wire, "matmul_all_reduce", "", "{}"), Form(GATHERED.wire))
    assert decide(GraphFacts((BARE,)), with_node).conform == with_node.forms
    alone = agreed(Form(REDUCED.wire), Form(GATHERED.wire))
    decision = decide(GraphFacts((GROUP,)), alone)
    assert decision.conform is None and list(decision.library) == [("0", FUSED.site)]


def test_an_agreement_on_collectives_that_this_graph_does_not_have_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from ditron_inductor.device import agreements

    error = DitronDiverged(rank=0, site="", peer=1, peer_site="")
    monkeypatch.setattr(agreements, "_unlike", lambda group, forms: error)
    with pytest.raises(DitronDiverged):
        decide(GraphFacts((BARE,)), agreed(Form("all_reduce sum float32")))
