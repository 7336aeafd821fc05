"""The claims of docs/taxes.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.decode_floors import FLOORS, SYMM_MEM, is_judged, reading_us, short_name
from benchmarks.models.tables import Contest, newest_contests
from benchmarks.prose.accounted import FUSED, INDUCTOR, UNFUSED, Account
from benchmarks.prose.claims import Claim, ends, faster, numbers
from benchmarks.prose.picked import Results, pick, time_of
from benchmarks.records import Row

NARROW, WIDE = "llama3-8b", "llama3-70b"
STEPS = (
    ("`llama-8b --layers 4`", "llama-8b_prefill_2"),
    ("`llama-70b --layers 2`", "llama-70b_prefill_2"),
    ("`llama-8b --layers 4`, four ranks", "llama-8b_prefill_4"),
    ("`llama-70b --layers 2`, four ranks", "llama-70b_prefill_4"),
    ("`llama-8b --layers 4 --phase decode --batch 32`", "llama-8b_decode_2"),
)
"""The lines of the table of steps, and their files."""
GRAPHS = (
    ("`--batch 1`", "llama-8b_decode_2xH100_batch_1"),
    ("`--batch 1`, two H200s", "llama-8b_decode_2xH200_batch_1"),
    ("the same with launches that overlap", "llama-8b_decode_2xH200_batch_1_overlap"),
    ("`--batch 32`", "llama-8b_decode_2xH100_batch_32"),
    ("`--batch 128`", "llama-8b_decode_2xH200_batch_128"),
    ("`llama-70b --layers 2`, `--batch 128`", "llama-70b_decode_2xH200_batch_128"),
    ("`llama-70b`, `--batch 1`, two H200s, launches overlap", "llama-70b_decode_2xH200_batch_1_overlap"),
)
"""The lines of the table of CUDA graphs, and their files."""
LIBRARY = "matmuls, attention and copies of libraries"
PARTS = (
    "collectives of the library",
    "Ditron, kernels that exchange",
    "Ditron, other kernels",
    "Inductor's kernels",
    LIBRARY,
    "between kernels",
)
_, EXCHANGES, OTHERS, INDUCTORS, _, GAPS = PARTS
PRODUCTS = ("projections_kernel", "divided_product_kernel")
LIBRARYS = ("nvjet", "void cublasLt")
ROTARY, FLASH = "triton_poi_fused__scaled_dot_product", "void pytorch_flash"
CACHED = "llama-8b_decode_2xH200_cache_"
Accounts = Mapping[str, Account]
Cells = dict[tuple[str, str, int, int], Contest]
"""By GPU, model, number of sequences and length of the cache."""


def taxes(results: Results) -> list[Claim]:
    """Returns the claims of docs/taxes.md."""
    judged = [one for one in newest_contests(results.models) if is_judged(one)]
    cells = {
        (short_name(one), one.model, int(one.sizes["batch"]), int(one.sizes.get("cache", 0))): one for one in judged
    }
    return [
        *steps(results.accounts),
        *graphs(results.accounts),
        *layers(results.accounts, cells),
        *with_caches(results.accounts, cells, results.models),
        *before(results.models),
        *floors_missed(cells),
    ]


def share(part: float, whole: float) -> str:
    """Returns a part in per cent of the whole."""
    return f"{100 * part / whole:.0f}"


def digits(us: float) -> str:
    """Returns a time with three digits."""
    return "0" if us == 0 else f"{us:.0f}" if us >= 100 else f"{us:.1f}"


def steps(accounts: Accounts) -> list[Claim]:
    """Returns a claim for each pair of lines of the table of steps."""
    found = []
    for name, file in STEPS:
        one, shown = accounts[file], ()
        for column, launches in (("us", True), ("graph_us", False)):
            times = [one.step(form, column) for form in (UNFUSED, FUSED)]
            gain, known = times[0] - times[1], one.saved(launches=launches)
            shown = (*shown, *numbers([*times, gain, known]), share(known, gain))
        row = "| {} | {} | {} | {} | {} % |"
        found.append(Claim(f"| {name} | eager {row} | | CUDA graph {row}", shown))
    return found


def graphs(accounts: Accounts) -> list[Claim]:
    """Returns the claims on the accounts of CUDA graphs."""
    found, longer = [], []
    for name, file in GRAPHS:
        one = accounts[file]
        theirs, ours, unfused = (one.step(form) for form in (INDUCTOR, FUSED, UNFUSED))
        kernels = one.replay(INDUCTOR) - one.replay(FUSED)
        shown = numbers([theirs, ours, theirs - ours, kernels])
        sites = share(one.saved(launches=False), unfused - ours)
        text = f"| {name} | {{}} | {{}} | {{}} | {{}} ({{}} %) | {{}} % |"
        found.append(Claim(text, (*shown, share(kernels, theirs - ours), sites)))
        longer += [(one.replay(form) - one.step(form)) / one.launches(form) for form in (INDUCTOR, FUSED)]
    few, many = (accounts[f"llama-8b_decode_2xH100_batch_{batch}"] for batch in (1, 32))
    for part in PARTS:
        us = [one.part(form, part) for one in (few, many) for form in (INDUCTOR, FUSED)]
        found.append(Claim(f"| {part} | {{}} | {{}} | {{}} | {{}} |", tuple(map(digits, us))))
    counted = [few, *(accounts[f"llama-{size}_decode_2xH200_batch_1_overlap"] for size in ("8b", "70b"))]
    launches = tuple(str(one.launches(form)) for one in counted for form in (INDUCTOR, FUSED))
    attention = [few.kernels(FUSED, FLASH, ROTARY) / 4, few.kernels(FUSED, ROTARY) / 4]
    more = [(many.part(FUSED, part) - few.part(FUSED, part)) / 4 for part in (OTHERS, LIBRARY)]
    return [
        *found,
        Claim("profiler makes a step longer by {} to {} us for each kernel", numbers(ends(longer), 1)),
        Claim(
            "has {} kernels where the fused one has {} ({} and {} in 8B with one sequence on H200s, {} and {} in 70B)",
            launches,
        ),
        Claim("These three take {} us, the first two {} us of them.", numbers(attention, 1)),
        Claim("take {} us more than with one sequence, and its other products and attention {} us more", numbers(more)),
    ]


def per_layer(one: Contest, us: float | None = None) -> float:
    """Returns the time of a layer, by default of Ditron's step."""
    return (time_of(one) if us is None else us) / int(one.sizes["layers"])


def floor(one: Contest) -> float:
    """Returns how long a layer may take by the floor over reading."""
    return FLOORS[one.model].most_of(int(one.sizes["batch"])) * per_layer(one, reading_us(one))


def layers(accounts: Accounts, cells: Cells) -> list[Claim]:
    """Returns the claims on what a layer takes, without a cache."""

    def parts(name: str) -> list[float]:
        one = accounts[name]
        around = one.kernels(FUSED, FLASH, ROTARY)
        return [
            us / 4 for us in (one.kernels(FUSED, *PRODUCTS), one.part(FUSED, EXCHANGES), around, one.part(FUSED, GAPS))
        ]

    overlap, apart, many = (parts(f"llama-8b_decode_2xH200_batch_{name}") for name in ("1_overlap", "1", "32"))
    wide, wider = parts("llama-70b_decode_2xH200_batch_1_overlap"), accounts["llama-70b_decode_2xH200_batch_128"]
    alone, row = cells["H200", NARROW, 1, 0], cells["H200", WIDE, 1, 0]
    more, most = cells["H200", NARROW, 32, 0], cells["H200", NARROW, 128, 0]
    was = accounts["llama-8b_decode_2xH200_batch_1"].step(FUSED) / 4
    pairs = [cells["H100", NARROW, batch, 0] for batch in (32, 128)]
    reading = reading_us(cells["H200", WIDE, 128, 0])
    sums = [wider.step(FUSED), wider.part(FUSED, LIBRARY), reading]
    return [
        Claim("A layer takes {} us, where the floor is {}.", numbers([per_layer(alone), floor(alone)])),
        Claim("products take {} us, where a copy would take 52", numbers(overlap[:1])),
        Claim(
            "all-reduces with their norms {}, attention and rotary embeddings {}, and {} us are between kernels. So of",
            numbers(overlap[1:], 1),
        ),
        Claim("it took {} us, in this order {}, {}, {} and {}.", (*numbers([was, apart[0]]), *numbers(apart[1:], 1))),
        Claim("Of the {} us of a layer, its products take {} us", (*numbers([per_layer(row)]), *numbers(wide[:1], 1))),
        Claim(
            "its all-reduces {}, attention and rotary embeddings {}, and {} us are between kernels.",
            numbers(wide[1:], 1),
        ),
        Claim(
            "a layer of 70B takes {} us, where the floor for everything is {}", numbers([per_layer(row), floor(row)])
        ),
        Claim("take 222 us of {}.", numbers([per_layer(cells["H200", WIDE, 32, 0])])),
        Claim(
            "This is 86 us of {}, where reading takes {}.",
            numbers([per_layer(most), per_layer(most, reading_us(most))]),
        ),
        Claim("Of the {} us of two layers of 70B with 128 rows", numbers(sums[:1])),
        Claim("library's products and attention take {}, where reading takes {}", numbers(sums[1:])),
        Claim(
            "kernels that exchange {}, Inductor's {}, and {} us are between kernels",
            numbers([wider.part(FUSED, part) for part in (EXCHANGES, INDUCTORS, GAPS)]),
        ),
        Claim("A layer takes {} us, and the floor is {}. By the account", numbers([per_layer(more), floor(more)])),
        Claim("take {} us, where reading takes 52, its two all-reduces with", numbers(many[:1])),
        Claim(
            "their norms {}, attention and rotary embeddings about {}, and {} us are between",
            (*numbers(many[1:2], 1), *numbers(many[2:3]), *numbers(many[3:], 1)),
        ),
        Claim(
            "A layer takes {} us, and the floor is {}. By [the table", numbers([per_layer(pairs[0]), floor(pairs[0])])
        ),
        Claim(
            "A layer takes {} us, and the floor is {}. Of the [prod", numbers([per_layer(pairs[1]), floor(pairs[1])])
        ),
        Claim(
            "and all gaps of a layer are {} of {} us: at most", (*numbers(overlap[3:], 1), *numbers([per_layer(alone)]))
        ),
        Claim(
            "H200s they are {} of {} us, and {} of {} since launches overlap ({} of {} us in 70B)",
            (
                *(*numbers(apart[3:], 1), *numbers([was])),
                *(*numbers(overlap[3:], 1), *numbers([per_layer(alone)])),
                *(*numbers(wide[3:], 1), *numbers([per_layer(row)])),
            ),
        ),
        Claim("are worth no more than {} % on H200s", numbers([100 * overlap[3] / per_layer(alone)], 1)),
    ]


def with_caches(accounts: Accounts, cells: Cells, models: Sequence[Row]) -> list[Claim]:
    """Returns the claims on what a layer takes with a cache on H200s."""

    def beyond(one: Contest) -> float:
        return per_layer(one) - per_layer(one, reading_us(one))

    short, longer, without = (beyond(cells["H200", NARROW, 1, cache]) for cache in (4096, 65536, 0))
    shape = "model=llama3-8b;layers=4;form=kv;batch=1;tokens=1;cache={}"
    old = [beyond(pick(models, "decode", shape.format(cache), "850121e6")) for cache in (4096, 65536)]
    wide = [beyond(cells["H200", WIDE, 1, cache]) for cache in (4096, 65536, 0)]
    one = accounts[f"{CACHED}4096"]
    own = [one.kernels(FUSED, name) / 4 for name in PRODUCTS]
    librarys = one.kernels(FUSED, *LIBRARYS) / 4
    sent = [accounts[f"{CACHED}{cache}"].kernels(FUSED, "flash_decode") / 4 for cache in (4096, 65536, 262144)]
    return [
        Claim("with one sequence of 8B {} us with 4096 and with {} tokens", (*numbers([short]), "65536")),
        Claim("and {} us without a cache. So it is", numbers([without])),
        Claim("it was {} us, and with 70B {}, {} and {} us.", numbers([max(old), *wide])),
        Claim("a layer with 4096 tokens takes {} us, where", numbers([one.step(FUSED) / 4])),
        Claim("reading takes 63: its products {} us", numbers([sum(own) + librarys])),
        Claim(
            "attention with its exchange {}, the all-reduce with its norm {}",
            numbers([sent[0], one.kernels(FUSED, "in_band") / 4], 1),
        ),
        Claim(
            "Inductor's kernels {} and {} are between kernels",
            (*numbers([one.part(FUSED, INDUCTORS) / 4]), *numbers([one.part(FUSED, GAPS) / 4], 1)),
        ),
        Claim("and took {} us where reading takes 8.1", numbers([librarys], 1)),
        Claim("Q, K, V, gate and up take {}, and down {}", (*numbers(own[:1]), *numbers(own[1:], 1))),
        Claim("exchange take {} us and with 262144 tokens {}", (*numbers(sent[1:2], 1), *numbers(sent[2:]))),
    ]


def before(models: Sequence[Row]) -> list[Claim]:
    """Returns the claims on steps on H100s before and after a change."""

    def step(model: str, batch: int, commit: str) -> Contest:
        shape = f"model={model};layers={4 if model == NARROW else 2};form=ar;batch={batch};tokens=1"
        return pick(models, "decode", shape, commit, gpu="H100")

    parts = [time_of(step(NARROW, 1, commit)) for commit in ("15b2415c", "8008f686")]
    many = [step(NARROW, 128, commit) for commit in ("15b2415c", "bbf64ade", "f0f4e074")]
    cores = [time_of(step(model, 1, "ad88cb8e")) for model in (NARROW, WIDE)]
    launch = "took {} us before, {} us with the first and {} us with both, where Inductor took {}, {} and {} us"
    return [
        Claim("took {} us before that commit and {} us with it, which is {} us for", numbers([*parts, parts[1] / 4])),
        Claim(launch, numbers([time_of(one, name) for name in ("ditron", "inductor") for one in many])),
        Claim("before, four layers of 8B took {} us and two of 70B {}.", numbers(cores)),
    ]


def floors_missed(cells: Cells) -> list[Claim]:
    """Returns the claims on the floor over torch's all-reduces."""

    def theirs(gpu: str, model: str, batch: int, cache: int = 0) -> float:
        one = cells[gpu, model, batch, cache]
        return time_of(one, SYMM_MEM) / reading_us(one)

    def asked(gpu: str, model: str, batch: int, cache: int = 0) -> float:
        return theirs(gpu, model, batch, cache) / FLOORS[model].least

    read = [(32, 4096), (32, 16384), (32, 65536), (128, 4096)]
    narrow, wide = ([(theirs("H200", model, *cell), asked("H200", model, *cell)) for cell in read] for model in FLOORS)
    gains = [gain for one in cells.values() if (gain := one.gain(SYMM_MEM))]
    eight = [theirs("H200", model, 8, 65536) for model in FLOORS]
    return [
        Claim("Ditron is faster in every cell, by {} % or more.", (faster(min(gains)),)),
        Claim(
            "itself takes {}, {} and {} times as long as reading with 32 sequences of 8B",
            numbers([times for times, _ in narrow[:3]], 2),
        ),
        Claim("65536 tokens, and {} with 128: the floor of 1.40", numbers([narrow[3][0]], 2)),
        Claim("would ask for {}, {}, {} and {} times. With 70B", numbers([least for _, least in narrow], 2)),
        Claim("With 70B it takes {}, {}, {} and {} times as long, and", numbers([times for times, _ in wide], 2)),
        Claim("would ask for {}, {}, {} and {}. The floor over reading", numbers([least for _, least in wide], 2)),
        Claim("for {} times the time of reading with 128 sequences", numbers([asked("H100", NARROW, 128)], 2)),
        Claim(
            "it asks for {} times with these 128 sequences, and for {} with 128 sequences of 70B",
            numbers([asked("H200", model, 128) for model in FLOORS], 2),
        ),
        Claim(
            "the rival itself takes {} (8B) and {} times (70B) as long as reading, and with one, 70B takes {}",
            numbers([*eight, theirs("H200", WIDE, 1, 65536)], 2),
        ),
        Claim(
            "less than reading, or for {} and {} times as much",
            numbers([asked("H200", WIDE, batch, 65536) for batch in (8, 1)], 2),
        ),
    ]
