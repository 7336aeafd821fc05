"""What every `tile` launch needs besides its kernel: a workspace, a tile shape, a grid, and operands as rows [M, K]."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ditron_inductor.core.matmul import Terms, Tiles, Widths
from ditron_inductor.core.signals import FIRST_SLOT, Pointers
from ditron_inductor.device.ring import Generation
from ditron_inductor.device.workspace import Call, Workspace
from ditron_inductor.lowering.config import Config, select_config
from ditron_inductor.lowering.host.launcher import Arguments, Launcher
from ditron_inductor.lowering.host.recording import SlotUse, recording, refuse_to_record
from ditron_inductor.lowering.host.tracing import PARAMETER, TraceBuffer, clock_of, takes_part, tracing

WORDS = ("pointers",)
"""The parameter that every kernel of the protocol has and that `Launch.run` passes by itself; see `pointers_of`."""

INTERPRETED_CHUNKS = 4
"""The most flags that a launch in the interpreter uses. They are few, so that tiles of small problems share flags."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """Returns the smallest multiple of b that is at least a."""
    return ceil_div(a, b) * b


def pointers_of(generation: Generation, slot: int, site: int) -> Pointers:
    """Returns what a kernel is told of its use of a slot, for the site with this number."""
    return Pointers(generation.table, generation.ctl, generation.counters, slot + FIRST_SLOT.value, site)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """Returns x [.., K] as rows [M, K] with contiguous K; a view if the strides of x allow it, and otherwise a copy."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x
    # M is computed, because reshape cannot infer it from -1 if K is 0, as on a rank with an empty slice of K.
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def longest_first(
    a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Returns (the a_i [.., K_i] as rows, the b_i) in the order in which a kernel adds up the products a_i @ b_i. The
    longest K comes first, because the first K loop carries finished tiles to peers.
    """
    if len(a) == 1:
        return (rows_of(a[0]),), (b[0],)
    pairs = sorted(zip(a, b, strict=True), key=lambda pair: -pair[1].shape[0])
    return tuple(rows_of(left) for left, _ in pairs), tuple(right for _, right in pairs)


def terms_of(lefts: Sequence[torch.Tensor], rights: Sequence[torch.Tensor]) -> Terms:
    """Returns the sizes that a kernel takes with the results of `longest_first`."""
    return Terms(
        depths=tuple(right.shape[0] for right in rights),
        strides_am=tuple(left.stride(0) for left in lefts),
        strides_bk=tuple(right.stride(0) for right in rights),
        strides_bn=tuple(right.stride(1) for right in rights),
    )


def widths_of(weights: Sequence[torch.Tensor]) -> Widths:
    """Returns the sizes that a kernel takes with weights [K, N_i] whose products it does not add up."""
    return Widths(
        columns=tuple(weight.shape[1] for weight in weights),
        strides_bk=tuple(weight.stride(0) for weight in weights),
        strides_bn=tuple(weight.stride(1) for weight in weights),
    )


def is_tf32_allowed() -> bool:
    """Returns whether torch allows TF32 in products of fp32, by torch.set_float32_matmul_precision or by
    torch.backends.cuda.matmul.fp32_precision. It reads torch's setting directly, because
    torch.get_float32_matmul_precision raises once the second of these was set.
    """
    allowed: bool = torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32"
    return allowed


def dot_precision(dtype: torch.dtype) -> str:
    """Returns `input_precision` of `tl.dot` for operands of `dtype`. Products of fp32 obey torch's settings."""
    exact = dtype != torch.float32 or not is_tf32_allowed()
    # AMD GPUs have no TF32, and the compiler refuses the word even for other dtypes.
    return "ieee" if exact or torch.version.hip is not None else "tf32"


def is_block_loadable(x: torch.Tensor) -> bool:
    """Returns whether a tensor descriptor can describe x [R, C] or its transpose: one dimension has to be contiguous,
    and the address and the other stride have to be multiples of 16 bytes.
    """
    if x.numel() == 0 or x.data_ptr() % 16 != 0 or 1 not in x.stride():
        return False
    pitch = x.stride(1) if x.stride(0) == 1 else x.stride(0)
    return pitch * x.element_size() % 16 == 0


@dataclass(frozen=True)
class Launch:
    """The calls of one site with operands of one form. `site_text` names the site, the sizes and the dtype, for error
    messages on all ranks. `turn` is that of `Workspace.call`. `launchers` has the launcher of each kernel, by (id of
    the kernel, clock of its time stamps).
    """

    workspace: Workspace
    site_text: str
    turn: int | None = None
    launchers: dict[tuple[int, int], Launcher] = field(default_factory=dict, compare=False, repr=False)

    @property
    def rank(self) -> int:
        return self.workspace.rank

    @property
    def interpreted(self) -> bool:
        return self.workspace.device.type == "cpu"

    @property
    def num_sms(self) -> int:
        """The SMs of the group's smallest device, which decide tile shapes and so layouts, equal on all ranks."""
        return self.workspace.capabilities.num_sms

    def config(self, *, rows: int, columns: int, repeats: int, dtype: torch.dtype) -> Config:
        """Returns the tile shape for `repeats` outputs [rows, columns]; with few block rows group_m is smaller."""
        config = select_config(
            rows=rows, columns=columns, repeats=repeats, dtype=dtype, interpreted=self.interpreted, num_sms=self.num_sms
        ).for_arch(self.workspace.capabilities.arch)
        half = ceil_div(ceil_div(rows, config.block_m), 2)
        return replace(config, group_m=min(config.group_m, 1 << (half - 1).bit_length()))

    def tile(self, config: Config, a: torch.Tensor, weights: Sequence[torch.Tensor]) -> Tiles:
        """Returns how a kernel multiplies a [.., K], with contiguous K, by weights [K, N_i]."""
        threads = self.threads(config.num_warps)
        return Tiles(
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            GROUP_M=config.group_m,
            DESCRIPTORS=self.loads_by_descriptor(a, weights),
            K_MAJOR=sum(1 << i for i, weight in enumerate(weights) if weight.stride(0) == 1),
            EVEN_K=a.shape[-1] % config.block_k == 0,
            PRECISION=dot_precision(a.dtype),
            UPCAST=self.interpreted,
            THREADS=threads,
            # Each thread carries 16 bytes.
            PIECE=4 * threads,
        )

    def tile_of_sum(self, config: Config, lefts: Sequence[torch.Tensor], rights: Sequence[torch.Tensor]) -> Tiles:
        """Returns how a kernel adds up products of rows [M, K_i] with weights [K_i, N]."""
        tile = self.tile(config, lefts[0], rights)
        return tile._replace(
            DESCRIPTORS=tile.DESCRIPTORS and all(self.loads_by_descriptor(left, ()) for left in lefts[1:]),
            EVEN_K=all(right.shape[0] % config.block_k == 0 for right in rights),
        )

    def tile_of_few_rows(self, config: Config, lefts: Sequence[torch.Tensor], rights: Sequence[torch.Tensor]) -> Tiles:
        """Returns `tile_of_sum` for a kernel that does not load by descriptors, group tiles or carry them."""
        tile = self.tile_of_sum(config, lefts, rights)
        return tile._replace(GROUP_M=1, DESCRIPTORS=False, K_MAJOR=0, PIECE=0)

    def loads_by_descriptor(self, a: torch.Tensor, weights: Sequence[torch.Tensor]) -> bool:
        """Returns whether the copy unit (TMA, since Hopper) can fetch blocks of these operands, 16-byte aligned."""
        arch = self.workspace.capabilities.arch
        if not (arch == "interpreter" or arch.startswith(("sm_9", "sm_10", "sm_11", "sm_12"))):
            return False
        rows = a.flatten(0, -2)
        # With K = 1 both strides may be 1, and is_block_loadable would then look at the other one.
        if rows.stride(0) * rows.element_size() % 16 != 0:
            return False
        return all(is_block_loadable(x) for x in (rows, *weights))

    def programs(self, work: int, config: Config) -> int:
        """Returns the programs of a persistent kernel with `work` tickets. Results do not depend on the number."""
        return max(1, min(work, self.num_sms * config.programs_per_sm))

    def threads(self, num_warps: int) -> int:
        """Returns the threads of a program with so many warps. Warps of AMD's data-centre GPUs have 64 threads."""
        return num_warps * (64 if self.workspace.capabilities.arch.startswith("gfx9") else 32)

    def launcher(self, kernel: Any, clock: int = 0) -> Launcher:
        """Returns the launcher of a kernel with the parameter WORDS. clock: of time stamps, or 0."""
        found = self.launchers.get((id(kernel), clock))
        if found is None:
            workspace = self.workspace
            scratch = workspace.shared.scratch
            found = Launcher(kernel, workspace.device, numbers=(), words=WORDS, allocator=scratch)
            self.launchers[id(kernel), clock] = found
        return found

    def run(self, kernel: Any, nbytes: int, arguments: Callable[[], Arguments], tensors: Mapping[str, Any]) -> None:
        """Launches `kernel` once, as a use of a slot with at least `nbytes` bytes. It raises what `Workspace.call`
        raises. kernel: see `launcher`. tensors: its other pointers by name, in the same order in every call. arguments:
        returns the rest; `Launcher.__call__` says what it may depend on.
        """
        workspace = self.workspace
        shared = workspace.shared
        limits = workspace.timeout_s, workspace.first_timeout_s
        use = SlotUse(shared, (self.site_text, nbytes, workspace.options.workspace_limit, *limits, self.turn))
        here = recording.here()
        generation, slot, site = use.take() if here is None else here.take(use)
        try:
            words = (pointers_of(generation, slot, site),)
            clock = 0
            if tracing.buffer is not None:
                refuse_to_record("time stamps")
                clock, arguments = self.timed(kernel, arguments)
                tracing.buffer.attach(generation, site, self.site_text)
            self.launcher(kernel, clock)(shared.order.stream, arguments, (), words, tensors)
        except BaseException as exc:
            shared.fail(exc)
            raise
        shared.end()

    def call(self, nbytes: int) -> AbstractContextManager[Call]:
        """Returns a use of one slot with at least `nbytes` bytes; see `Workspace.call`."""
        refuse_to_record("a slot for more than a launch")
        call = self.workspace.call(self.site_text, nbytes, self.turn)
        return call if tracing.buffer is None else self._traced(call, tracing.buffer)

    @contextmanager
    def _traced(self, call: Call, buffer: TraceBuffer) -> Iterator[Call]:
        with call:
            buffer.attach(call.generation, call.site, self.site_text)
            yield call

    def run_within(
        self, call: Call, kernel: Any, arguments: Callable[[], Arguments], tensors: Mapping[str, Any]
    ) -> None:
        """Launches `kernel` once within `call`, a use of a slot; see `run`."""
        clock, arguments = self.timed(kernel, arguments)
        words = (pointers_of(call.generation, call.slot, call.site),)
        self.launcher(kernel, clock)(call.stream, arguments, (), words, tensors)

    def timed(self, kernel: Any, arguments: Callable[[], Arguments]) -> tuple[int, Callable[[], Arguments]]:
        """Returns (the clock that a launch of `kernel` should read now, 0 for none; the arguments with that clock)."""
        wanted = tracing.buffer is not None and takes_part(kernel)
        clock = (clock_of(self.workspace.capabilities.arch) or 0) if wanted else 0
        return clock, _with_clock(arguments, clock) if clock else arguments

    @staticmethod
    def shard_block(shard_shape: list[int], dim: int) -> int:
        """Returns the argument `block` of `interleaved_row` for shards of `shard_shape` [.., K] along `dim`."""
        return math.prod(shard_shape[dim:-1])

    def chunk_tiles(self, tiles: int, max_chunks: int) -> int:
        """Returns how many tiles are in one chunk if `tiles` tiles share at most `max_chunks` flags."""
        return ceil_div(max(tiles, 1), min(max_chunks, INTERPRETED_CHUNKS) if self.interpreted else max_chunks)


def _with_clock(arguments: Callable[[], Arguments], clock: int) -> Callable[[], Arguments]:
    def with_clock() -> Arguments:
        chosen = arguments()
        return replace(chosen, values={**chosen.values, PARAMETER: clock})

    return with_clock
