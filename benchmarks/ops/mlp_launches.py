"""Does one launch with a grid-wide hand-over beat two launches in a CUDA graph? Gate, up, silu * and down of few rows.

python3 -m benchmarks.ops.mlp_launches [M ..]     one GPU; prints microseconds of each variant, in one CUDA graph, interleaved
"""
import itertools, statistics, sys
import torch, triton, triton.language as tl
from ditron_inductor.core.matmul import Tiles, Weight, first_rows, matmul_steps_of_few_rows
from ditron_inductor.core.matmul_pair import matmul_pair_of_few_rows


@triton.jit
def meet(counter, epoch, programs):
    """All programs of the grid have come here: what they wrote is visible. counter: counts up for ever."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    tries = 0
    while (tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < epoch * programs) & (tries < 200000):
        tries += 1
    tl.debug_barrier()


@triton.jit(do_not_specialize=["M"])
def mlp_kernel(x, wg, wu, wd, h, out, counter, epochs, M, K, F, N, PAIR: tl.constexpr, DOWN: tl.constexpr,
               AHEAD: tl.constexpr, MEET: tl.constexpr):
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    BM: tl.constexpr = PAIR.BLOCK_M
    BN: tl.constexpr = DOWN.BLOCK_N
    rows = first_rows(x, K, M, BM)
    offs_m = tl.arange(0, BM)
    for tile in range(pid, tl.cdiv(F, PAIR.BLOCK_N), programs):
        column = tile * PAIR.BLOCK_N
        gate, up = matmul_pair_of_few_rows(rows, Weight(wg, 1, K), Weight(wu, 1, K), column, F, K, PAIR)
        offs_n = column + tl.arange(0, PAIR.BLOCK_N)
        act = gate * tl.sigmoid(gate) * up
        tl.store(h + offs_m[:, None] * F + offs_n[None, :], act.to(h.dtype.element_ty),
                 mask=rows.inside[:, None] & (offs_n < F)[None, :])
    if MEET:
        epoch = tl.load(epochs) + 1
        # The weights that this program reads first behind the hand-over are on their way already.
        first = pid * DOWN.BLOCK_N + tl.arange(0, DOWN.BLOCK_N)
        if AHEAD > 0:
            offs = tl.arange(0, AHEAD)
            early = tl.load(wd + first.to(tl.int64)[:, None] * F + offs[None, :], mask=(first < N)[:, None], other=0.0)
            # Kept alive by a store that never happens.
            tl.store(out + first, tl.max(early, 1), mask=(first < 0))
        meet(counter, epoch, programs)
        if pid == 0:
            tl.store(epochs, epoch)
        hidden = first_rows(h, F, M, BM)
        for tile in range(pid, tl.cdiv(N, DOWN.BLOCK_N), programs):
            column = tile * DOWN.BLOCK_N
            acc = tl.zeros((BN, BM), dtype=tl.float32)
            acc = matmul_steps_of_few_rows(acc, hidden, Weight(wd, 1, F), column, N, F, DOWN).T
            offs_n = column + tl.arange(0, DOWN.BLOCK_N)
            tl.store(out + offs_m[:, None] * N + offs_n[None, :], acc.to(out.dtype.element_ty),
                     mask=rows.inside[:, None] & (offs_n < N)[None, :])


@triton.jit(do_not_specialize=["M"])
def down_kernel(h, wd, out, M, F, N, DOWN: tl.constexpr):
    BM: tl.constexpr = DOWN.BLOCK_M
    BN: tl.constexpr = DOWN.BLOCK_N
    hidden = first_rows(h, F, M, BM)
    column = tl.program_id(0) * DOWN.BLOCK_N
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    acc = matmul_steps_of_few_rows(acc, hidden, Weight(wd, 1, F), column, N, F, DOWN).T
    offs_n = column + tl.arange(0, DOWN.BLOCK_N)
    tl.store(out + tl.arange(0, BM)[:, None] * N + offs_n[None, :], acc.to(out.dtype.element_ty),
             mask=hidden.inside[:, None] & (offs_n < N)[None, :])


def tiles(bm, bn, bk, k, cuda):
    return Tiles(BLOCK_M=bm, BLOCK_N=bn, BLOCK_K=bk, GROUP_M=1, DESCRIPTORS=False, K_MAJOR=0, EVEN_K=k % bk == 0,
                 PRECISION="ieee", UPCAST=not cuda, THREADS=0, PIECE=0)


def build(M, K, F, N, device):
    cuda = device == "cuda"
    g = lambda *s: torch.randn(*s, device=device).mul_(s[-1] ** -0.5).bfloat16()
    x, wg, wu, wd = torch.randn(M, K, device=device).bfloat16(), g(F, K), g(F, K), g(N, F)
    h, out = torch.empty(M, F, device=device).bfloat16(), torch.empty(M, N, device=device).bfloat16()
    counter, epochs = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
    bm = 16 if M <= 16 else 32 if M <= 32 else 64
    sms = torch.cuda.get_device_properties(0).multi_processor_count if cuda else 1
    want = (torch.nn.functional.silu(x.float() @ wg.float().T) * (x.float() @ wu.float().T)).bfloat16().float() @ wd.float().T
    variants = {}

    def one(bn1, bk1, bn2, bk2, warps, stages, per, ahead):
        pair, down = tiles(bm, bn1, bk1, K, cuda), tiles(bm, bn2, bk2, F, cuda)
        counter, epochs = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
        def run():
            mlp_kernel[(sms * per,)](x, wg, wu, wd, h, out, counter, epochs, M, K, F, N, pair, down, ahead, True,
                                     num_warps=warps, num_stages=stages)
        return run

    def two(bn1, bk1, bn2, bk2, warps, stages, cublas):
        pair, down = tiles(bm, bn1, bk1, K, cuda), tiles(bm, bn2, bk2, F, cuda)
        def run():
            mlp_kernel[(triton.cdiv(F, bn1),)](x, wg, wu, wd, h, out, counter, epochs, M, K, F, N, pair, down, 0, False,
                                               num_warps=warps, num_stages=stages)
            if cublas:
                torch.mm(h, wd.T, out=out)
            else:
                down_kernel[(triton.cdiv(N, bn2),)](h, wd, out, M, F, N, down, num_warps=warps, num_stages=stages)
        return run

    if not cuda:
        return {"two": two(16, 16, 16, 16, 4, 1, False), "one": one(16, 16, 16, 16, 4, 1, 1, 16), "cublas": two(16, 16, 16, 16, 4, 1, True)}, out, want
    variants["two:cublas"] = two(64, 64, 64, 128, 4, 6, True)
    for bn2, bk2 in ((32, 128), (32, 256), (64, 128)):
        variants[f"two:{bn2}x{bk2}"] = two(64, 64, bn2, bk2, 4, 4 if bk2 == 256 else 6, False)
    for bn1, bn2, bk1, bk2, warps, stages, per, ahead in (
        (64, 32, 64, 128, 4, 6, 1, 0), (64, 32, 64, 128, 4, 6, 1, 128), (64, 32, 64, 128, 4, 6, 1, 256),
        (32, 32, 64, 128, 4, 6, 1, 0), (32, 16, 64, 256, 4, 4, 2, 0), (32, 16, 64, 256, 4, 4, 2, 256),
        (32, 16, 128, 256, 4, 3, 2, 0), (32, 16, 128, 256, 4, 3, 2, 256), (16, 16, 128, 256, 4, 4, 2, 0),
        (64, 32, 128, 256, 8, 4, 1, 0), (64, 32, 128, 256, 8, 4, 1, 256),
    ):
        variants[f"one:{bn1},{bn2}/{bk1},{bk2}/w{warps}s{stages}p{per}a{ahead}"] = one(bn1, bk1, bn2, bk2, warps, stages, per, ahead)
    return variants, out, want


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = [("8B/2", 4096, 7168, 4096), ("70B/2", 8192, 14336, 8192), ("8B/4", 4096, 3584, 4096)] if device == "cuda" else [("tiny", 32, 48, 40)]
    for name, K, F, N in shapes:
        for M in [int(a) for a in sys.argv[1:]] or [1, 32]:
            variants, out, want = build(M, K, F, N, device)
            graphs = {}
            for v, run in variants.items():
                out.fill_(float("nan"))
                try:
                    run(); run()
                    error = ((out.float() - want).norm() / want.norm()).item()
                    assert error < 1e-2, error
                    if device == "cuda":
                        torch.cuda.synchronize()
                        g = torch.cuda.CUDAGraph()
                        with torch.cuda.graph(g):
                            for _ in range(10): run()
                        g.replay(); torch.cuda.synchronize()
                        graphs[v] = g
                except Exception as e:
                    print(name, M, v, "failed", type(e).__name__, str(e)[:100], flush=True)
            if device == "cpu":
                print("right", list(variants)); continue
            times = {v: [] for v in graphs}
            for _ in range(15):
                for v, g in graphs.items():
                    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    a.record(); g.replay(); b.record(); b.synchronize()
                    times[v].append(a.elapsed_time(b) * 100)
            floor = (2 * F * K + N * F) * 2 / 2.98e6
            print(f"{name} M={M} floor {floor:.1f}", {v: round(statistics.median(t), 1) for v, t in sorted(times.items(), key=lambda kv: statistics.median(kv[1]))}, flush=True)
            del graphs, variants


main()
