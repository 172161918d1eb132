"""Prints the orders that are found beside published ones and beside the named schedules, with bounds and seconds.

    python benchmarks/orders.py --save benchmarks/results/orders.txt
    python benchmarks/orders.py --save benchmarks/results/orders.txt --only "vgg16|pairs"

Each case is searched under eight limits: multiples of what `1f1b-flush` takes. Rows are written to a `.jsonl` beside
the text as they come, and a run that was stopped goes on there; with `--only` the cases whose names match are searched
again. Nothing runs on a device: all times are simulated. `to gain`: the most that the lower bound leaves. `code`: the
tree of the code that searched, as `git rev-parse --short HEAD:src/penstock/planning/orders` prints it. Where a case has
layers, cuts move and stages may recompute. Cases with 24 ranks or more have three limits, since they take longest.
Small uneven cases are beside what OR-Tools' CP-SAT finds (`pip install ortools`); without it they have no reference.

Sources: times, bytes and bubbles measured by github.com/sail-sg/zero-bubble-pipeline-parallelism, f68d387
(efficiency.py), and the costs of its unit test; the frontier of the building blocks of [V 2024] as the code of its
authors expects it; Tessel's `vshape` (HPCA 2024); two cuts of PyTorch's tests of partitions; PipeDream's profiles, in
tests/data. Links of the last, and bytes of the cuts, are our own.
"""

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path
from random import Random
from statistics import median
from time import process_time
from typing import Any

import penstock
from measurement.reports import Report, conditions, option_parser, table
from order_optima import optimum
from penstock import DeviceKind
from penstock.errors import PlanError, ScheduleError
from penstock.planning.orders.bounds import bound_of
from penstock.planning.orders.judged_stages import named_plans
from penstock.planning.orders.limited_search import moved_in_rounds
from penstock.planning.orders.local_moves import improve
from penstock.planning.orders.rows import OrderCosts, TimedRows, rows_of, time_rows
from penstock.planning.orders.search import find_order
from penstock.planning.orders.seeds import find_seeds, spread_weights
from penstock.scheduling.placements import Placement
from penstock.scheduling.schedules import Schedule
from penstock.simulating.outcomes import evaluate
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan, Stage
from penstock.values.profiles import LayerProfile, Profile
from planners.profiles import load_profiles

MEASURED = (
    (8, 24, 18522, 18086, 9337, 601, 2304, 24, 0.1585, 0.0433),
    (8, 32, 18513, 18086, 9331, 626, 2304, 24, 0.1242, 0.0039),
    (8, 24, 29718, 29444, 19927, 527, 4096, 32, 0.1323, 0.0029),
    (8, 32, 29802, 29428, 19530, 577, 4096, 32, 0.1045, 0.0022),
    (8, 64, 29935, 29621, 19388, 535, 4096, 32, 0.0554, 0.0010),
    (16, 48, 11347, 11248, 8132, 377, 5120, 40, 0.1397, 0.0066),
    (16, 64, 11307, 11254, 8101, 379, 5120, 40, 0.1088, 0.0054),
    (32, 96, 10419, 10207, 7715, 408, 6144, 48, 0.1421, 0.0038),
)
"""p, m, f, b, w, c (microseconds), h, a, and the bubbles of ZB-1p and ZB-2p."""
HALVES = (
    (16, 48, 14407, 14380, 9676, 1610, 4096, 32, 0.1397 / 2),
    (16, 64, 14412, 14393, 9688, 1621, 4096, 32, 0.1088 / 2),
    (24, 72, 6763, 6969, 5251, 755, 5120, 40, None),
    (24, 96, 6783, 6984, 5259, 758, 5120, 40, None),
    (32, 96, 9458, 9748, 7288, 879, 6144, 48, 0.1421 / 2),
)
"""The same of half-stages, two on a rank; what is to be beaten is half the bubble of ZB-1p."""
LIMITS = (0.375, 0.5, 0.625, 0.75, 1.0, 1.25, 1.5, 2.0)
UNEVEN, SOLVED = (0.5, 0.75, 1.0), 60.0
"""The limits of small uneven cases, and the seconds that CP-SAT has for each."""
FEW_LIMITS = (0.5, 1.0, 2.0)
"""Those of cases with 24 ranks or more."""
SEEDS, IMPROVED = 4, 2
"""Seeds that are moved, and those of them that go on in rounds of moves."""
TRIES, TIMED, PUT, ROUNDS = 400, 1_000_000, 12_000, 3
"""The most moves on each in a round, the operations that these time, those put in windows, and the most rounds."""
CUTS: dict[tuple[int, ...], tuple[int, ...]] = {
    (8, 11, 2, 1, 18, 5, 4, 11): (3, 5, 6),
    (1170, 2846, 1146, 4254, 2199, 1289, 6888, 2312): (4, 6, 7),
}
"""By seconds of the layers: where PyTorch's tests cut them into four."""
Row = dict[str, Any]
"""`limit`, `reference` (None where there is none), `found` (None where nothing fits), `to_gain`, `order`, `seconds`."""


def search(costs: OrderCosts, named: list[Schedule], before: TimedRows | None = None) -> TimedRows | None:
    """The best rows for `costs`. `before`: those under a lower limit, from which moves go on, too."""
    tries = min(TRIES, TIMED // costs.operations)
    seeds = [*find_seeds(costs, named)[:SEEDS], *([] if before is None else [before])]
    moved = sorted((improve(costs, seed, tries) for seed in seeds), key=lambda timed: timed.score)
    improved = [[timed, *moved_in_rounds(costs, timed, tries, PUT, ROUNDS)][-1] for timed in moved[:IMPROVED]]
    improved += [again for timed in improved for again in spread_weights(costs, timed)]
    return min(improved, key=lambda timed: timed.seconds, default=None)


def rows_under_limits(
    costs: OrderCosts,
    limits: Sequence[float],
    unit: float,
    measure: Callable[[float], float],
    reference: Callable[..., float | None],
) -> Iterator[Row]:
    """One row for each of `limits`, in units of `unit` bytes; `measure` makes the figure of a row of seconds."""
    best: TimedRows | None = None
    for share in limits:
        limited = replace(costs, limits=(share * unit,) * costs.length)
        names = ("gpipe", "1f1b-flush", "zb-h1") if costs.stages == costs.length else ("zb-v", "v-half", "v-min")
        named = [Schedule(name, costs.length, costs.microbatches, costs.stages // costs.length) for name in names]
        begun = process_time()
        best = search(limited, named, best)
        row: Row = {"limit": share, "seconds": process_time() - begun, "reference": reference(share, limited, named)}
        row["found"], row["order"] = (None, "nothing fits") if best is None else (measure(best.seconds), "")
        yield row if best is None else {**row, "to_gain": bound_of(limited).gap(best.seconds)}


def best_named(share: float, costs: OrderCosts, named: list[Schedule]) -> float | None:
    """The seconds of the fastest named schedule that fits."""
    rows = [found for schedule in named if (found := rows_of(schedule, costs.whole)) is not None]
    fitting = [found for found in rows if all(costs.fits(row, rank) for rank, row in enumerate(found))]
    return min((timed.seconds for found in fitting if (timed := time_rows(costs, found))), default=None)


def order_costs(ranks: tuple[int, ...], m: int, *seconds: float, size: float = 1.0, **options: Any) -> OrderCosts:
    """`seconds`: of a forward, an input and a weight backward and a message on every stage."""
    f, b, w, c = ((second,) * len(ranks) for second in seconds)
    return OrderCosts(ranks, m, f, b, w, c[1:], c[1:], (size,) * len(ranks), (), **options)


def folded(p: int) -> tuple[int, ...]:
    return tuple(held[0] for held in Placement.folded(p).stages)


def measured(case: tuple[Any, ...], *, halves: bool) -> Iterator[Row]:
    p, m, f, b, w, c, h, a, *published = case
    size, bubbles = 34 * h + 5 * a * 1024, dict(zip((1.0, 2.0), published, strict=False))
    freed = (2 * h + 5 * a * 1024,) * p * (1 + halves)
    costs = order_costs(folded(p) if halves else tuple(range(p)), m, f, b, w, c, size=size, freed=freed, barrier=False)

    def bubble(seconds: float) -> float:
        return 1 - max(costs.work) / seconds

    limits = LIMITS if p < 24 else FEW_LIMITS
    yield from rows_under_limits(costs, limits, p * (1 + halves) * size, bubble, lambda share, *_: bubbles.get(share))


def expected_blocks(p: int, m: int, share: float, *_: Any) -> float | None:
    """The step of the building blocks as a share of 1F1B's, for a peak of k half-stages. No block takes less than p."""
    k = min(2 * p, int(2 * p * share))
    bubble = 3 * p - 1 - 3 * k + max(3 * p, p - 1 + 2 * (1 + (k + 1) // 2))
    return (6 * m + bubble) / (6 * (m + p - 1)) if k >= p else None


def blocks(p: int, m: int) -> Iterator[Row]:
    costs = order_costs(folded(p), m, 1.0, 1.0, 1.0, 0.0, barrier=False)
    unit = 6 * (m + p - 1)
    yield from rows_under_limits(costs, LIMITS, 2 * p, lambda seconds: seconds / unit, partial(expected_blocks, p, m))


def unit_test(*, halves: bool) -> Iterator[Row]:
    costs = order_costs(folded(8) if halves else tuple(range(8)), 8, 5.0, 6.0, 4.0, 1.0)
    yield from rows_under_limits(costs, LIMITS, 8 * (1 + halves), float, best_named)


def vshape() -> Iterator[Row]:
    """Whole backwards; limits are numbers of microbatches."""
    costs = order_costs(tuple(range(4)), 4, 1.0, 1.5, 1.5, 0.0, whole=frozenset(range(4)))
    yield from rows_under_limits(costs, (1, 2, 3, 4, 5, 6), 1.0, float, best_named)


def uneven(p: int, m: int, seed: int) -> Iterator[Row]:
    """A V of uneven stages, in shares of what `1f1b-flush` holds with two of them on each rank."""
    draw, stages = Random(seed), range(2 * p)
    ranks = folded(p)
    times = [tuple(float(draw.randint(1, 20)) for _ in stages) for _ in range(3)]
    late = tuple(2.0 * (here != there) for here, there in pairwise(ranks))
    saved = tuple(float(draw.randint(4, 12)) for _ in stages)
    peak = max(min(m, p - rank) * (saved[2 * rank] + saved[2 * rank + 1]) for rank in range(p))
    least = max(saved[rank] + saved[-1 - rank] for rank in range(p)) / peak
    costs = OrderCosts(ranks, m, times[0], times[1], times[2], late, late, saved, ())
    yield from rows_under_limits(costs, [max(share, least) for share in UNEVEN], peak, float, solved)


def solved(share: float, costs: OrderCosts, named: list[Schedule]) -> float | None:
    """The seconds of the best order that CP-SAT finds from the best seed on."""
    seed = min(find_seeds(costs, named), key=lambda timed: timed.score)
    try:
        found, _ = optimum(costs, SOLVED, hint=seed)
    except ImportError as error:
        print(f"uneven: no reference: {error}")
        return None
    return seed.seconds if found is None else min(found.seconds, seed.seconds)


def cut_of(layers: tuple[int, ...]) -> Iterator[Row]:
    """The cases of layers whose bytes rise with their seconds, as those of layers of one kind do."""
    profile = Profile(tuple(LayerProfile(str(t), t, 2.0 * t, 0.0, 1e6 * t, 0.0) for t in layers), 1)
    bounds = pairwise((0, *CUTS[layers], len(layers)))
    stages = tuple(Stage(first, stop, (rank,)) for rank, (first, stop) in enumerate(bounds))
    yield from planned(profile, Cluster.uniform(4, 1e12), 4, 8, (Plan(stages, microbatches=8),))


def transformer(p: int, m: int, cluster: Cluster) -> Iterator[Row]:
    """32 equal blocks and a head of as much time as one and with 2.5 times their activations."""
    layers = [LayerProfile(f"block{index}", 1e-2, 2e-2, 16e6, 4e8, 1e8) for index in range(32)]
    profile = Profile((*layers, LayerProfile("head", 1.2e-2, 2.4e-2, 0, 1e9, 4e8)), 1)
    yield from planned(profile, cluster, p, m)


def planned(profile: Profile, cluster: Cluster, p: int, m: int, more: tuple[Plan, ...] = ()) -> Iterator[Row]:
    """The best order of equal stages, one and two on a rank, beside the best named one; in units of 1F1B's step."""
    weights = [layer.seconds for layer in profile.layers]
    plans = [Plan.balanced(weights, p, microbatches=m), *more]
    if 2 * p <= len(profile.layers):
        plans += [Plan.balanced(weights, 2 * p, "zb-v", microbatches=m, stages_per_rank=2)]
    first = evaluate(plans[0], profile, cluster)
    outcomes = []
    for each in (made for plan in plans for made in named_plans(plan)):
        try:
            outcomes.append(evaluate(each, profile, cluster))
        except (PlanError, ScheduleError):
            continue
    for share in LIMITS:
        memory, begun, found = share * max(first.peak_bytes), process_time(), []
        for plan in plans:
            try:
                found.append(
                    find_order(plan, profile, cluster, memory_bytes=memory, move_cuts=True, choose_recompute=True)
                )
            except PlanError:
                continue
        fitting = [each.minibatch_seconds for each in outcomes if max(each.peak_bytes) <= memory]
        best = min(found, key=lambda each: seconds_of(each.plan), default=None)
        row: Row = {
            "limit": share,
            "reference": min(fitting) / first.minibatch_seconds if fitting else None,
            "seconds": process_time() - begun,
        }
        if best is None:
            yield {**row, "found": None, "order": "nothing fits"}
            continue
        step, order = seconds_of(best.plan), f"{best.plan.schedule}, {len(best.plan.stages)}"
        yield {**row, "found": step / first.minibatch_seconds, "order": order, "to_gain": best.gap}


def seconds_of(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.minibatch_seconds


def slow_rank(p: int, bandwidth: float) -> Cluster:
    """The last device takes 1.5 times as long."""
    kinds = [DeviceKind("fast")] * (p - 1) + [DeviceKind("slow", speed=1 / 1.5)]
    return Cluster.uniform(p, bandwidth).with_kinds(kinds)


SECTIONS = {
    "one stage per rank": "measured times and bytes; bubbles of a rank's longest span, beside ZB-1p and ZB-2p",
    "two half-stages": "in a V; bubbles of the longest span, beside half of ZB-1p's; three limits from 24 ranks on",
    "blocks": "two stages per rank in a V, F = B = W; the step as a share of 1F1B's, beside [V 2024]'s",
    "small": "seconds beside the best named order that fits",
    "uneven": "seconds of uneven stages in a V, drawn by a seed, beside what CP-SAT finds in 60 s",
    "cuts": "the step as a share of 1F1B's with the most equal cut, beside the best named one, also with PyTorch's cut",
    "transformer": "the step as a share of 1F1B's, beside the best named one that fits",
    "PipeDream": "m = 2p; the step as a share of 1F1B's, beside the best named one that fits",
}


def find_cases() -> dict[tuple[str, str], Callable[[], Iterator[Row]]]:
    """By section and name."""
    found: dict[tuple[str, str], Callable[[], Iterator[Row]]] = {}
    for section, cases, halves in (("one stage per rank", MEASURED, False), ("two half-stages", HALVES, True)):
        for case in cases:
            found[section, "p={} m={} f={}".format(*case)] = partial(measured, case, halves=halves)
    for p, m in ((4, 8), (8, 16), (8, 24)):
        found["blocks", f"p={p} m={m}"] = partial(blocks, p, m)
    found["small", "unit test"], found["small", "unit test, in a V"] = (
        partial(unit_test, halves=halves) for halves in (False, True)
    )
    found["small", "vshape"] = vshape
    for seed, (p, m) in enumerate(((3, 4), (3, 6), (3, 8), (4, 4), (4, 6), (4, 8))):
        found["uneven", f"p={p} m={m}"] = partial(uneven, p, m, seed)
    for layers in CUTS:
        found["cuts", f"{layers[0]}, {layers[1]}, ..."] = partial(cut_of, layers)
    hosts = {p: Cluster.hierarchical([(p // 2, 100e9), (2, 3e9)]) for p in (4, 8)}
    links = [(4, 8, 100e9), (4, 8, 12e9), (4, 8, 1.25e9), (8, 16, 100e9), (8, 16, 3e9), (8, 32, 12e9)]
    machines = {f"p={p} m={m} {rate / 1e9:g} GB/s": (p, m, Cluster.uniform(p, rate)) for p, m, rate in links}
    machines |= {"2 hosts x 4": (8, 16, hosts[8]), "slow rank": (4, 8, slow_rank(4, 100e9))}
    for name, machine in machines.items():
        found["transformer", name] = partial(transformer, *machine)
    fast, slow = Cluster.uniform(4, 12e9), Cluster.uniform(4, 1.25e9)
    for model, name, cluster in (
        *((model, name, used) for model in ("vgg16", "resnet50") for name, used in (("fast", fast), ("slow", slow))),
        *((model, "fast", fast) for model in ("gnmt", "squeezenet1_0")),
        *((model, "2x2", hosts[4]) for model in ("resnet50", "vgg16")),
        *((model, "slow rank", slow_rank(4, 12e9)) for model in ("resnet50", "vgg16")),
        *((model, "p=8", Cluster.uniform(8, 12e9)) for model in ("resnet50", "vgg16")),
    ):
        p = 8 if name == "p=8" else 4
        found["PipeDream", f"{model} {name}"] = partial(pipedream, model, cluster, p)
    return found


def pipedream(model: str, cluster: Cluster, p: int) -> Iterator[Row]:
    yield from planned(load_profiles(None, [model])[model], cluster, p, 2 * p)


def cells(name: str, row: Row) -> list[str]:
    found, reference = row["found"], row["reference"]
    verdict = "" if found is None or reference is None else _verdict(found - reference, reference)
    numbers = ["" if number is None else f"{number:.4f}" for number in (reference, found)]
    to_gain = f"{row['to_gain']:.1%}" if "to_gain" in row else ""
    return [name, f"{row['limit']:g}", *numbers, verdict, to_gain, row["order"], f"{row['seconds']:.1f}"]


def _verdict(more: float, reference: float) -> str:
    """Figures within 0.0005, or a thousandth of larger ones, are equal."""
    if abs(more) <= 5e-4 * max(1.0, reference):
        return "equal"
    return "better" if more < 0 else "WORSE"


def _slower(rows: list[Row]) -> Iterator[float]:
    """The limits under which a step takes longer than under a lower one."""
    least = inf
    for row in rows:
        found = inf if row["found"] is None else row["found"]
        if least < inf and _verdict(found - least, least) == "WORSE":
            yield row["limit"]
        least = min(least, found)


def _version() -> str:
    """The tree of the code that searches."""
    asked = ["git", "-C", str(Path(penstock.__file__).parent), "rev-parse", "--short", "HEAD:./planning/orders"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--only", default=None, help="an expression: the cases in whose section or name it is found")
    options = parser.parse_args()
    kept = Path("/dev/null") if options.save is None else options.save.with_suffix(".jsonl")
    rows: dict[str, Row] = {}
    for line in kept.read_text().splitlines() if kept.exists() else ():
        rows[json.loads(line)["case"]] = json.loads(line)
    cases, version = find_cases(), _version()
    for section, name in cases:
        key = f"{section}: {name}"
        if re.search(options.only, key) if options.only is not None else key not in rows:
            rows[key] = {"case": key, "version": version, "rows": list(cases[section, name]())}
            print(
                table(cells(key, rows[key]["rows"][0]), [cells("", row) for row in rows[key]["rows"][1:]]), flush=True
            )
            if options.save is not None:
                kept.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    shown = Report(options.save)
    shown.add(conditions("benchmarks/orders.py"))
    head = ["case", "limit", "reference", "found", "", "to gain", "order, stages", "s", "code"]
    for section, what in SECTIONS.items():
        own = [(name, rows.get(f"{section}: {name}")) for part, name in cases if part == section]
        lines = [[*cells(name, row), done["version"]] for name, done in own if done is not None for row in done["rows"]]
        if lines:
            shown.add("", f"{section}: {what}", table(head, lines))
    every = [row for done in rows.values() for row in done["rows"]]
    judged = [cells("", row)[4] for row in every]
    gaps = [row["to_gain"] for row in every if row.get("to_gain", inf) < inf]
    counts = ", ".join(f"{judged.count(word)} {word}" for word in ("better", "equal", "WORSE"))
    shown.add("", f"{len(judged)} rows: {counts}")
    if gaps:
        shown.add(f"to gain: {median(gaps):.1%} in the median (the aim is 3.0%), {max(gaps):.1%} at most")
        for share in LIMITS:
            alike = [row["to_gain"] for row in every if row["limit"] == share and "to_gain" in row]
            shown.add(f"    at {share:g}: {median(alike):.1%} of {len(alike)} rows")
    slower = [f"{case} at {limit:g}" for case, done in rows.items() for limit in _slower(done["rows"])]
    shown.add(f"slower than with less memory: {', '.join(slower) or 'none'}")
    slowest = max(rows.values(), key=lambda done: max(row["seconds"] for row in done["rows"]))
    seconds = median(row["seconds"] for row in every), max(row["seconds"] for row in slowest["rows"])
    shown.add("processor time per row: {:.1f} s in the median, {:.1f} s at most ({})".format(*seconds, slowest["case"]))


if __name__ == "__main__":
    main()
