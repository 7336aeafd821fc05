"""The mutations: faults of the device layer and its protocol, of kernels, of passes and of benchmarks."""

from __future__ import annotations

from tests.mutations.caching import CACHING
from tests.mutations.deciding import DECIDING
from tests.mutations.elsewhere import ELSEWHERE
from tests.mutations.masking import MASKING
from tests.mutations.measuring import MEASURING
from tests.mutations.multiplying import MULTIPLYING
from tests.mutations.mutation import Mutation
from tests.mutations.norming import NORMING
from tests.mutations.ordering import ORDERING
from tests.mutations.overlapping import OVERLAPPING
from tests.mutations.routing import ROUTING
from tests.mutations.sinking import SINKING
from tests.mutations.unsorting import UNSORTING

SIGNALS = "ditron_inductor/core/signals.py"
CREDITS = "tests/core/test_signals.py::test_a_slot_is_overwritten_with_the_credits_of_all_peers_only"
GIVEN = "tests/core/test_signals.py::test_credits_are_given_before_a_wait_and_not_by_a_poisoned_workspace"
CAPABILITIES = "ditron_inductor/device/capabilities.py"
RESET = "ditron_inductor/device/reset.py"
WORKSPACE = "ditron_inductor/device/workspace.py"
RING = "ditron_inductor/device/ring.py"
POINTS = "tests/device/test_meeting_points.py"
IN_ORDER = f"{POINTS}::test_reset_zeroes_when_all_kernels_have_ended_and_goes_on_when_all_is_zero"

DEVICE: tuple[Mutation, ...] = (
    Mutation(
        "may_send never waits",
        SIGNALS,
        "late = (lanes < WORLD) & (lanes != use.rank) & behind(asked, use.epoch - 1)",
        "late = (lanes < 0) & (lanes != use.rank) & behind(asked, use.epoch - 1)",
        CREDITS,
    ),
    Mutation(
        "may_send waits for an epoch too few",
        SIGNALS,
        "& behind(asked, use.epoch - 1)",
        "& behind(asked, use.epoch - 2)",
        CREDITS,
    ),
    Mutation(
        "wait_credits waits for epoch - 3",
        SIGNALS,
        "with_epoch(use, use.epoch - 1), CREDIT_ROW, WORLD, False, 1, False)",
        "with_epoch(use, use.epoch - 3), CREDIT_ROW, WORLD, False, 1, False)",
        CREDITS,
    ),
    Mutation(
        "wait_credits checks the site",
        SIGNALS,
        "with_epoch(use, use.epoch - 1), CREDIT_ROW, WORLD, False, 1, False)",
        "with_epoch(use, use.epoch - 1), CREDIT_ROW, WORLD, True, 1, False)",
        CREDITS,
    ),
    Mutation(
        "a poisoned workspace gives credits",
        SIGNALS,
        "    return tl.where(alive != 0, last_use(use), 0)",
        "    return last_use(use)",
        GIVEN,
    ),
    Mutation(
        "may_send gives credits in a poisoned workspace",
        SIGNALS,
        "settle(tl.where(ok != 0, due, 0), use, WORLD)",
        "settle(due, use, WORLD)",
        GIVEN,
    ),
    Mutation(
        "may_send waits before it gives credits",
        SIGNALS,
        """        settle(tl.where(ok != 0, due, 0), use, WORLD)
        ok = ok & wait_credits(use, WORLD)""",
        """        ok = ok & wait_credits(use, WORLD)
        settle(tl.where(ok != 0, due, 0), use, WORLD)""",
        GIVEN,
    ),
    Mutation(
        "a wait takes any site",
        SIGNALS,
        "elif seen != word(use.site, use.epoch):",
        "elif behind(seen, use.epoch):",
        "tests/device/test_workspace.py::test_divergence_names_both_sites",
    ),
    Mutation(
        "tile counters are not zero after the last arrival",
        SIGNALS,
        "total - 1\n    if last:\n        tl.atomic_xchg(counter, 0,",
        "total - 1\n    if last:\n        tl.atomic_xchg(counter, 1,",
        "tests/lowering/test_chunked.py::test_poisoned_buffers",
    ),
    Mutation(
        "the epoch does not advance",
        SIGNALS,
        "tl.store(words + EPOCH, use.epoch)",
        "tl.store(words + EPOCH, use.epoch - 1)",
        "tests/device/test_workspace.py::test_values_cross_in_order",
    ),
    Mutation(
        "reset without the meeting that ends all kernels",
        RESET,
        '    session.all_gather("reset the group: end all kernels", None, timeout_s)\n',
        "",
        IN_ORDER,
    ),
    Mutation(
        "reset without its last meeting",
        RESET,
        '    session.all_gather("reset the group: begin again", None, timeout_s)\n',
        "",
        IN_ORDER,
    ),
    Mutation(
        "growth without its last meeting",
        WORKSPACE,
        'by_rank = self.session.all_gather(f"begin to use the memory for {why}", captured, timeout_s)',
        "by_rank = [captured]",
        f"{POINTS}::test_growth_goes_on_when_all_is_zero",
    ),
    Mutation(
        "reset keeps tile counters",
        RING,
        "        self.counters.zero_()\n",
        "",
        f"{POINTS}::test_reset_forgets_what_a_launch_left_behind",
    ),
    Mutation(
        "reset keeps tickets",
        RING,
        "self.ctl.copy_(torch.tensor(words_of_ctl, ",
        "self.ctl.copy_(torch.maximum(self.ctl.cpu(), torch.tensor(words_of_ctl)).to(",
        f"{POINTS}::test_reset_forgets_what_a_launch_left_behind",
    ),
    Mutation(
        "reset keeps flags and credits",
        RING,
        "        self.heap.local[: slot_layout.HEADER_BYTES].zero_()\n",
        "",
        "tests/device/test_ring.py::test_a_new_ring_is_zero_but_for_where_things_are",
    ),
    Mutation(
        "the own size for the largest one of uneven shards",
        WORKSPACE,
        "max(each) for each",
        "each[-1] for each",
        f"{POINTS}::test_the_largest_of_uneven_shards_is_known_to_all",
    ),
    Mutation(
        "the most SMs of a rank instead of the fewest",
        CAPABILITIES,
        "num_sms=min(facts.num_sms for facts in ranks),",
        "num_sms=max(facts.num_sms for facts in ranks),",
        "tests/device/test_capabilities.py::test_the_smallest_device_counts",
    ),
    Mutation(
        "in band if any rank can",
        CAPABILITIES,
        "in_band=all(facts.in_band for facts in ranks),",
        "in_band=any(facts.in_band for facts in ranks),",
        "tests/device/test_capabilities.py::test_all_ranks_send_in_band_or_none",
    ),
    Mutation(
        "a rank is met under the same name in every life",
        "ditron_inductor/device/session.py",
        "nonce = uuid.uuid4().hex",
        "nonce = str(group.rank)",
        "tests/device/test_session.py::test_leftovers_of_an_earlier_group_are_not_met",
    ),
    Mutation(
        "slots may take more than the limit",
        RING,
        "return min(rounded, most)",
        "return rounded",
        "tests/device/test_ring.py::test_the_step_of_sizes_ends_at_the_limit",
    ),
)

ORDERS = "tests/core/test_order.py::test_orders"
REDUCTIONS = "tests/lowering/test_matmul_reduce_scatter.py::test_matches_reference"
ODD_REDUCTION = f"{REDUCTIONS}[cpu2-67x100@0-129-rc-bfloat16-avg-tile]"
INNER_REDUCTION = f"{REDUCTIONS}[cpu2-2x3x5x16@1-33-rr-bfloat16-sum-tile]"
ONE_SHOT = "tests/lowering/test_matmul_all_reduce.py::test_matches_reference[cpu2-1x64-40-rr-bfloat16-sum-tile]"
TWO_SHOTS = "tests/lowering/test_matmul_all_reduce.py::test_matches_reference[cpu2-67x100-129-rc-bfloat16-avg-tile]"
GATHERS = "tests/lowering/test_all_gather_matmul.py::test_matches_reference"
ODD_GATHER = f"{GATHERS}[cpu2-67x100@0-r-129c+1r+24p-bfloat16-nogather-tile]"
BIASED_SUM = "tests/lowering/test_sums.py::test_matches_reference[cpu2-reduce-2x33x48-36-bfloat16-sum-bias]"
LATE_RANK = "tests/lowering/test_repeated_calls.py::test_a_rank_starts_late[cpu2--1]"
ORDER = "tests/lowering/test_rank_order.py::test_every_sum_has_the_bits_of_the_sum_in_rank_order"
ROUNDINGS = "tests/lowering/test_epilogues.py::test_every_rounding_of_the_text_is_made"
UNCREDITED = "tests/lowering/test_uncredited.py::test_nothing_is_sent_without_credits"
EPILOGUES = "tests/lowering/test_epilogues.py::test_matches_the_text"
PARTIALS = "lowering/partials.py"

LOWERING: tuple[Mutation, ...] = (
    Mutation(
        "the own chunk is not the first one gathered",
        "ditron_inductor/core/order.py",
        "return (rank + step) % WORLD",
        "return (rank + 1 + step) % WORLD",
        ORDERS,
    ),
    Mutation(
        "chunks are scattered to the wrong ranks",
        "ditron_inductor/core/order.py",
        "return (rank + 1 + step) % WORLD",
        "return (rank + step) % WORLD",
        ODD_REDUCTION,
    ),
    Mutation(
        "shards along an inner dimension are not interleaved",
        "ditron_inductor/core/order.py",
        "return (row // block) * (block * WORLD) + chunk * block + row % block",
        "return chunk * rows + row",
        INNER_REDUCTION,
    ),
    Mutation(
        "the mean of a reduction is its sum",
        PARTIALS,
        "total = total / WORLD",
        "total = total / 1",
        ODD_REDUCTION,
    ),
    Mutation(
        "the own partial is added last",
        PARTIALS,
        "        total += tl.load(tl.multiple_of(partial, 16) + inside).to(tl.float32)\n",
        "        total += tl.where(source == rank, 0.0, tl.load(partial + inside).to(tl.float32))\n"
        "    total += tl.load(own + inside).to(tl.float32)\n",
        ORDER,
    ),
    Mutation(
        "the sum of partials is rounded after each",
        PARTIALS,
        "total += tl.load(tl.multiple_of(partial, 16) + inside).to(tl.float32)",
        "total = (total + tl.load(tl.multiple_of(partial, 16) + inside).to(tl.float32)).to(dtype).to(tl.float32)",
        ORDER,
    ),
    Mutation(
        "the all-reduce kernel adds the own piece last",
        "lowering/all_reduce/all_reduce_kernel.py",
        "        total += tl.where(source == rank, mine, theirs[source]).to(tl.float32)\n",
        "        total += theirs[source].to(tl.float32)\n    total += mine.to(tl.float32)\n",
        ORDER,
    ),
    Mutation(
        "no bias",
        "ditron_inductor/core/matmul.py",
        "acc += tl.load(bias + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]",
        "acc += tl.load(bias + offs_n, mask=offs_n < 0, other=0.0).to(tl.float32)[None, :]",
        BIASED_SUM,
    ),
    Mutation(
        "K beyond the last block is left out",
        "ditron_inductor/core/matmul.py",
        "            in_k = offs_k < K - k * TILES.BLOCK_K\n            a = ",
        "            in_k = offs_k < K - (k + 1) * TILES.BLOCK_K\n            a = ",
        ODD_GATHER,
    ),
    Mutation(
        "rows of B are taken to be contiguous",
        "ditron_inductor/core/matmul.py",
        "b_ptrs = b_rows + offs_n.to(tl.int64)[None, :] * weight.stride_n",
        "b_ptrs = b_rows + offs_n.to(tl.int64)[None, :]",
        ODD_REDUCTION,
    ),
    Mutation(
        "a tile is added up before its partials have come",
        "lowering/matmul_reduce_scatter/tile.py",
        "whole = alive & timed_wait_all(use, tile // chunk_tiles, WORLD, TRACE)",
        "whole = alive",
        LATE_RANK,
    ),
    Mutation(
        "a result is not carried before a wait",
        "lowering/matmul_all_reduce/two_shot.py",
        "carry(Carried(box, targets, carried, num_targets), 0, TILES.PIECE)",
        "carry(Carried(box, targets, 0, num_targets), 0, TILES.PIECE)",
        TWO_SHOTS,
    ),
    Mutation(
        "no credits before the first push of a gather",
        "lowering/gathers.py",
        "    if wait_credits(use, HOW.WORLD) != 0:\n        for i",
        "    if use.epoch != 0:\n        for i",
        f"{UNCREDITED}[cpu2-a gather whose tiles carry nothing]",
    ),
    Mutation(
        "no credits before a gather's tile carries",
        "lowering/all_gather_matmul/tile.py",
        "carries = carries & (credited > 0)",
        "carries = carries & (credited > -1)",
        f"{UNCREDITED}[cpu2-all_gather_matmul]",
    ),
    Mutation(
        "no credits before the partials of a reduce-scatter",
        "lowering/matmul_reduce_scatter/tile.py",
        "ok = first_credits(ok, alive, use, ticket, WORLD, TRACE)",
        "ok = alive",
        f"{UNCREDITED}[cpu2-matmul_reduce_scatter]",
    ),
    Mutation(
        "a gather's tile does not wait for its chunk",
        "lowering/all_gather_matmul/tile.py",
        "if (source != use.rank) & (chunk != ready):",
        "if (source != use.rank) & (chunk > ready + 1):",
        LATE_RANK,
    ),
    Mutation(
        "the last rows of a shard are not sent",
        "lowering/all_gather_matmul/tile.py",
        "count = tl.minimum(tl.minimum(sends.chunk_numel - inside, PIECE_NUMEL), numel - first).to(tl.int32)",
        "count = tl.minimum(tl.minimum(sends.chunk_numel - inside, PIECE_NUMEL), numel - 1 - first).to(tl.int32)",
        ODD_GATHER,
    ),
    Mutation(
        "one-shot sums add from the own rank on",
        "lowering/matmul_all_reduce/one_shot.py",
        "block = (source * tiles + previous).to(tl.int64) * (BLOCK_M * BLOCK_N)",
        "block = ((source + rank) % WORLD * tiles + previous).to(tl.int64) * (BLOCK_M * BLOCK_N)",
        ORDER,
    ),
    Mutation(
        "a one-shot tile is not published to the peers",
        "lowering/matmul_all_reduce/one_shot.py",
        "publish_all(use, ticket, WORLD)",
        "publish_all(use, ticket + 1, WORLD)",
        ONE_SHOT,
    ),
    Mutation(
        "an epilogue sees products that are not rounded",
        "lowering/epilogues.py",
        "mm = mm + (accs[i].to(DTYPE).to(tl.float32),)  # type: ignore[assignment]",
        "mm = mm + (accs[i],)  # type: ignore[assignment]",
        f"{ROUNDINGS}[cpu2-a product]",
    ),
    Mutation(
        "a cast inside an epilogue is dropped",
        "lowering/epilogues.py",
        'code = f"{value(argument)}.to({TRITON_DTYPES[dtype]}).to(tl.float32)"',
        'code = f"{value(argument)}"',
        f"{ROUNDINGS}[cpu2-a cast]",
    ),
    Mutation(
        "an extra row is read as a column",
        "lowering/epilogues.py",
        '"row": " + at.columns",',
        '"row": " + at.rows",',
        f"{EPILOGUES}[cpu2-tile]",
    ),
    Mutation(
        "the last piece of a cut is as long as the others",
        "lowering/schedules.py",
        "return [(first, min(first + length, rows)) for first in range(0, rows, length)] if rows else []",
        "return [(first, first + length) for first in range(0, rows, length)] if rows else []",
        "tests/lowering/test_schedules.py::test_cut",
    ),
    Mutation(
        "runs are those of the rank before",
        "lowering/schedules.py",
        "        base = (rank + piece.step) % world_size * rows\n",
        "        base = (rank - piece.step) % world_size * rows\n",
        "tests/lowering/test_schedules.py::test_runs_join_what_lies_together",
    ),
    Mutation(
        "shards are published by a program that lacks its credits",
        "lowering/transfers.py",
        "    if ok != 0:\n        # A program without its credits does not arrive",
        "    if ok >= 0:\n        # A program without its credits does not arrive",
        f"{UNCREDITED}[cpu2-a gather by chunks]",
    ),
    Mutation(
        "a slot is not revoked",
        "lowering/transfers.py",
        "        publish_all(use, REVOKED_ROW, WORLD)\n",
        "        settle(0, use, WORLD)\n",
        "tests/lowering/test_chunked_failures.py::test_a_reader_that_is_overtaken",
    ),
    Mutation(
        "a head of a decode is merged before its parts have come",
        "lowering/flash_decode/tile.py",
        "whole = ok & timed_wait_all(use, flag, SENDING.WORLD, TRACE)",
        "whole = ok",
        "tests/lowering/test_flash_decode.py::test_poisoned_buffers",
    ),
)

PROOFS = "passes/graph/proofs.py"
PIECES = "tests/passes/test_proofs.py"

PASSES: tuple[Mutation, ...] = (
    Mutation(
        "a sole user may use a node twice",
        PROOFS,
        "return user if read.count(node) == 1 else None",
        "return user",
        f"{PIECES}::test_a_sole_user_uses_a_node_once",
    ),
    Mutation(
        "slices that begin beyond the end are pieces",
        PROOFS,
        'return SlicedPart(bound["self"], dim, start, length) if known(start + length <= source.shape[dim]) else None',
        'return SlicedPart(bound["self"], dim, start, length)',
        f"{PIECES}::test_no_piece",
    ),
    Mutation(
        "the end of a slice is not clamped",
        PROOFS,
        "    length = result.shape[dim]\n    # A start",
        '    length = size(bound["end"]) - start if bound["end"] is not None else result.shape[dim]\n    # A start',
        f"{PIECES}::test_a_piece",
    ),
    Mutation(
        "slices with a step are pieces",
        PROOFS,
        'if source is None or result is None or not known_equal(size(bound["step"]), 1) or not known(start >= 0):',
        "if source is None or result is None or not known(start >= 0):",
        f"{PIECES}::test_no_piece",
    ),
    Mutation(
        "the pieces of a split begin one too late",
        PROOFS,
        'bound["split_sizes"][:index]), 0)',
        'bound["split_sizes"][: index + 1]), 0)',
        f"{PIECES}::test_a_piece",
    ),
    Mutation(
        "chunks may be put together in any order",
        PROOFS,
        "if not all(known_equal(chunk.start, index * chunk.length) for index, chunk in enumerate(found)):",
        "if not all(known(chunk.start >= 0) for index, chunk in enumerate(found)):",
        "tests/passes/test_all_gather_matmul.py::test_guard",
    ),
    Mutation(
        "some of the chunks are enough",
        PROOFS,
        "if len(found) != world_size or any(chunk.dim != first.dim for chunk in found):",
        "if any(chunk.dim != first.dim for chunk in found):",
        "tests/passes/test_all_gather_matmul.py::test_guard",
    ),
    Mutation(
        "a transpose keeps the order",
        PROOFS,
        "        return moved == sorted(moved)\n",
        "        return True\n",
        "tests/passes/test_matmul_all_reduce.py::test_guard",
    ),
    Mutation(
        "share_gathers ignores a write in between",
        "passes/normalize/share_gathers.py",
        "return not _written_between(first.collective, match.collective)",
        "return True",
        "tests/passes/test_share_gathers.py::test_a_write_between",
    ),
    Mutation(
        "share_gathers ignores writes into views",
        "passes/graph/proofs.py",
        "and any(memory(given) in lie_in for given in each.all_input_nodes)",
        "and node in each.all_input_nodes",
        "tests/passes/test_share_gathers.py::test_a_write_between",
    ),
    Mutation(
        "gathers along different dimensions are shared",
        "passes/normalize/share_gathers.py",
        "(operand, match.dim, match.collective.group_name)",
        "(operand, 0, match.collective.group_name)",
        "tests/passes/test_share_gathers.py::test_left_alone",
    ),
    Mutation(
        "gathers over different groups are shared",
        "passes/normalize/share_gathers.py",
        "(operand, match.dim, match.collective.group_name)",
        '(operand, match.dim, "")',
        "tests/passes/test_share_gathers.py::test_left_alone",
    ),
    Mutation(
        "both results of a shared gather may be returned",
        "passes/normalize/share_gathers.py",
        "    if proofs.is_returned(match.gathered) and proofs.is_returned(first.gathered):\n        return False\n",
        "",
        "tests/passes/test_share_gathers.py::test_left_alone",
    ),
    Mutation(
        "a scaled sum of reductions is merged",
        "passes/forms/merge_reductions.py",
        ' and bound["alpha"] == 1',
        "",
        "tests/passes/test_merge_reductions.py::test_left_alone",
    ),
    Mutation(
        "padded operands of reduce-scatters are merged",
        "passes/forms/merge_reductions.py",
        "unpadded = not proofs.padded(cat)",
        "unpadded = cat is not None",
        "tests/passes/test_merge_reductions.py::test_left_alone",
    ),
    Mutation(
        "products that are used otherwise are fused",
        "passes/graph/products.py",
        "any(user not in users for user in node.users)",
        "not node.users",
        "tests/passes/test_matmul_all_reduce.py::test_guard",
    ),
    Mutation(
        "the factor of an addmm is dropped",
        "passes/graph/products.py",
        'if bound["beta"] != 1 or bound["alpha"] != 1:',
        'if bound["beta"] != 1:',
        "tests/passes/test_products.py::test_guard",
    ),
    Mutation(
        "a reduction of any op is fused",
        "passes/graph/collectives.py",
        "if reduce_op is not None and reduce_op not in reduce_ops:",
        "if reduce_op is not None and not reduce_op:",
        "tests/passes/test_matmul_all_reduce.py::test_guard",
    ),
    Mutation(
        "a graph's group size is not compared with the group's",
        "passes/graph/collectives.py",
        'if bound.get("group_size", world_size) != world_size:',
        'if bound.get("group_size", world_size) < 0:',
        "tests/passes/test_all_gather_matmul.py::test_world_size_of_the_graph_must_be_that_of_the_group",
    ),
    Mutation(
        "a gather along the last dimension is not read as a transpose",
        "passes/graph/gathered.py",
        "return OrientedMatmul(user, use.operand, use.transposed != gathered.swapped)",
        "return OrientedMatmul(user, use.operand, use.transposed)",
        "tests/passes/test_transposed_problems.py::test_golden_weight_gathered_along_its_columns",
    ),
    Mutation(
        "a scatter of a view with other columns is fused",
        "passes/fuse/matmul_reduce_scatter.py",
        "if whole.ndim < 2 or not proofs.known_equal(whole.shape[-1], rows.shape[-1]):",
        "if whole.ndim < 2:",
        "tests/passes/test_matmul_reduce_scatter.py::test_guard",
    ),
    Mutation(
        "casts that widen are moved before the gather",
        "passes/forms/move_casts.py",
        "result.dtype.itemsize < dtype.itemsize",
        "result.dtype.itemsize != dtype.itemsize",
        "tests/passes/test_move_casts.py::test_left_alone",
    ),
    Mutation(
        "an epilogue takes a tensor that hangs on its own product",
        "passes/absorb/absorb_epilogues.py",
        "return proofs.depends_on(node, {chain.call}) or rewriting.pinned(node, chain.call) is not None",
        "return False",
        "tests/passes/test_absorb_epilogues.py::test_leaves_alone",
    ),
    Mutation(
        "an epilogue takes an operand in another layout",
        "passes/absorb/absorb_epilogues.py",
        "if not kind or _is_late(node, chain) or not proofs.row_major(operand):",
        "if not kind or _is_late(node, chain):",
        "tests/passes/test_absorb_epilogues.py::test_leaves_alone",
    ),
    Mutation(
        "an epilogue forgets what dtype it makes",
        "passes/absorb/absorb_epilogues.py",
        "expressions.as_output(outputs[node], proofs.fake(node).dtype, of_node)",
        "outputs[node]",
        "tests/passes/test_absorb_epilogues.py::test_absorbs",
    ),
    Mutation(
        "the padding of uneven shards is gathered with a product",
        "passes/fuse/matmul_all_gather.py",
        "    if cut is not None:\n        return ReasonCode.UNEVEN_SHARDS.at(cut)\n",
        "",
        "tests/passes/test_matmul_all_gather.py::test_does_not_fire",
    ),
)

MUTATIONS: tuple[Mutation, ...] = (
    *DEVICE,
    *LOWERING,
    *PASSES,
    *DECIDING,
    *MASKING, *CACHING, *SINKING, *ELSEWHERE, *MULTIPLYING, *NORMING,
    *ROUTING, *UNSORTING, *ORDERING, *OVERLAPPING,
    *MEASURING,
)
