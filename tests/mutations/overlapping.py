"""The mutations of the order of launches, and of those that begin early."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

PASS = "passes/finish/overlap_launches.py"
DEVICES = "lowering/overlapping.py"
OF_PASS = "tests/passes/test_overlap_launches.py"
OF_KERNELS = "tests/lowering/test_overlap.py"
ORDER = "passes/finish/order_collectives.py"
OF_ORDER = "tests/passes/test_order_collectives.py"

OVERLAPPING: tuple[Mutation, ...] = (
    Mutation(
        "a launch that leads begins early too, and does not wait",
        DEVICES,
        "if overlap == FOLLOWS.value else {}",
        "if overlap else {}",
        f"{OF_KERNELS}::test_a_single_row_overlaps_since_hopper",
    ),
    Mutation(
        "a launch follows though no norm is in front of it",
        PASS,
        "depends = any(source in behind for source in node.all_input_nodes)",
        "depends = True",
        f"{OF_PASS}::test_nothing_follows_without_a_norm_in_front",
    ),
    Mutation(
        "weights that the graph computes are read early",
        PASS,
        'return source.op in ("placeholder", "get_attr") and',
        "return",
        f"{OF_PASS}::test_weights_that_the_graph_computes_are_not_read_early",
    ),
    Mutation(
        "weights that are written are read early",
        PASS,
        " and memory not in written",
        "",
        f"{OF_PASS}::test_what_is_written_as_a_part_of_something_else_is_not_read_early",
    ),
    Mutation(
        "launches follow kernels that may write weights and let others begin",
        PASS,
        'if getattr(inductor_config.triton, "enable_pdl", False):',
        "if False:",
        f"{OF_PASS}::test_nothing_follows_where_inductor_s_kernels_may_begin_early",
    ),
    Mutation(
        "launches of several rows overlap",
        DEVICES,
        "bool(wanted) and rows == 1 and",
        "bool(wanted) and",
        f"{OF_KERNELS}::test_a_single_row_overlaps_since_hopper",
    ),
    Mutation(
        "a row is read before the launch has waited",
        "ditron_inductor/core/matmul_row.py",
        "    wait_for_last(TILES.OVERLAP)\n    total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)\n    if",
        "    total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)\n    if",
        f"{OF_KERNELS}::test_weights_alone_are_read_before_the_wait",
    ),
    Mutation(
        "words are sent before the launch has waited",
        "lowering/all_reduce_rms_norm/norm_in_band.py",
        "    wait_for_last(HOW.OVERLAP)\n",
        "",
        "tests/lowering/test_in_band_compile.py::test_a_launch_that_follows_touches_no_memory_before_it_has_waited",
    ),
    Mutation(
        "steps are loaded ahead that are not there",
        "lowering/tiles.py",
        "most = min(least_k, INTERPRETED_AHEAD if interpreted else MOST_AHEAD) // config.block_k",
        "most = (INTERPRETED_AHEAD if interpreted else MOST_AHEAD) // config.block_k",
        f"{OF_KERNELS}::test_steps_ahead_are_whole",
    ),
    Mutation(
        "Task nodes are not put behind each other",
        ORDER,
        "            current.update_arg(schema.TOKEN, token)\n",
        "            pass\n",
        f"{OF_ORDER}::test_one_chain_across_groups_with_tasks",
    ),
    Mutation(
        "collectives beside Task nodes stay outside of the chain",
        ORDER,
        "or is_vllm_collective(node) or shares(group):",
        "or is_vllm_collective(node) or (shares(group) and group not in groups):",
        f"{OF_ORDER}::test_generated_code_keeps_graph_order",
    ),
    Mutation(
        "collectives of groups that share ranks with a site's stay outside of the chain",
        ORDER,
        "or is_vllm_collective(node) or shares(group):",
        "or is_vllm_collective(node) or group in groups:",
        f"{OF_ORDER}::test_groups_that_share_two_ranks_are_chained",
    ),
    Mutation(
        "columns of a mesh are chained to its rows",
        ORDER,
        "len(group_ranks(group) & group_ranks(one)) > 1",
        "len(group_ranks(group) & group_ranks(one)) > 0",
        f"{OF_ORDER}::test_groups_that_share_two_ranks_are_chained",
    ),
)
