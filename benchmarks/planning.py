"""Times the planners and sets what they find beside brute force.

    python benchmarks/planning.py --data DIR --save benchmarks/results/planning.txt

Two tables. *times*: what issue and papers ask of planning times. *small*: the first six layers of every profile, and
the profile joined to six layers, on four devices, beside every plan that there is.
"""

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import penstock
from measurement.reports import Report, conditions, option_parser, table
from penstock.errors import PenstockError
from penstock.planning.predictions import slowest_seconds
from penstock.planning.stage_costs import chain_costs
from penstock.simulating.outcomes import evaluate
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan, Stage
from penstock.values.profiles import LayerProfile, Profile
from penstock.values.transformers import Transformer
from planners.profiles import join, load_profiles
from planners.single_planners import partition

MACHINES = {"flat 16": Cluster.uniform(16, 1.25e9), "flat 64": Cluster.uniform(64, 3.125e9)}
SMALL_MACHINES = {"flat 4": Cluster.uniform(4, 1.25e9), "2x2": Cluster.hierarchical([(2, 12e9), (2, 1.25e9)])}
SMALL_LAYERS = 6
PER_DEVICE = 4
"""Microbatches of a minibatch for every device, the default of the search."""

Row = dict[str, Any]
Make = Callable[[], Plan]


def time_runs(make: Callable[[], object], repeats: int) -> tuple[Any, Row]:
    """What `make` makes, and its seconds: wall, and of the processor, which other jobs change less."""
    wall: list[float] = []
    processor: list[float] = []
    made: Any = None
    for _ in range(repeats):
        start, worked = time.perf_counter(), time.process_time()
        made = make()
        wall.append(time.perf_counter() - start)
        processor.append(time.process_time() - worked)
    seconds = {"wall_min": min(wall), "wall_median": statistics.median(wall), "processor_min": min(processor)}
    return made, {**seconds, "runs": repeats}


def times(profiles: dict[str, Profile], repeats: int, *, large: bool) -> Iterator[Row]:
    """The times that were asked for, each with its limit in seconds if there is one."""
    for name, profile in profiles.items():
        make = dp(profile, MACHINES["flat 16"])
        yield timed(f"PipeDream's DP, {name} ({len(profile)} layers), flat 16", 0.1, make, repeats)
    for machine, limit in (("flat 16", 3), *((("flat 64", 20),) if large else ())):
        for name, profile in profiles.items():
            yield timed(f"whole search, {name}, {machine}", limit, whole(profile, MACHINES[machine]), repeats)
    if not large:
        return
    randomly = random_profile(1000)
    layers = f"{len(randomly)} random layers, flat 64"
    yield timed(f"PipeDream's DP, {layers}", 5, dp(randomly, MACHINES["flat 64"]), repeats)
    yield timed(f"whole search, {layers}", None, whole(randomly, MACHINES["flat 64"]), 1)
    gpt = Transformer(layers=128, hidden=25600, heads=160)
    selene = Cluster.hierarchical([(8, 300e9), (384, 25e9)], memory_bytes=80 * 2**30)
    trillion = "whole search, GPT of 1008 billion parameters, 3,072 devices"
    yield timed(trillion, 30, lambda: penstock.plan(gpt, selene, batch_size=3072), repeats)


def dp(profile: Profile, cluster: Cluster) -> Make:
    return lambda: partition(profile, cluster)


def whole(profile: Profile, cluster: Cluster) -> Make:
    return lambda: penstock.plan(profile, cluster)


def timed(name: str, limit: float | None, make: Make, repeats: int) -> Row:
    plan, clock = time_runs(make, repeats)
    return {"table": "times", "name": name, "limit": limit, **clock, "plan": shape(plan)}


def random_profile(layers: int) -> Profile:
    draw = random.Random(0)
    made = (
        LayerProfile(str(number), draw.random(), 2 * draw.random(), draw.random() * 1e8, 1e6, draw.random() * 1e8)
        for number in range(layers)
    )
    return Profile(tuple(made), 1, name="random")


def shape(plan: Plan) -> str:
    """``1f1b-flush 15-1``; of many stages ``1f1b-flush 16 stages``."""
    counts = [len(stage.ranks) // plan.tensor_parallel for stage in plan.stages]
    text = "-".join(map(str, counts)) if len(counts) <= 8 else f"{len(counts)} stages x {min(counts)}"
    text += f" to {max(counts)}" if len(counts) > 8 and min(counts) < max(counts) else ""
    return f"{plan.schedule} {text}" + (f", t={plan.tensor_parallel}" if plan.tensor_parallel > 1 else "")


def small(profiles: dict[str, Profile]) -> Iterator[Row]:
    """The planners beside brute force: PipeDream's objective, and the search's samples per second."""
    for name, profile in profiles.items():
        cuts = {"first": profile.prefix(SMALL_LAYERS), "joined": join(profile, SMALL_LAYERS)}
        for kind, reduced in cuts.items():
            for machine, cluster in SMALL_MACHINES.items():
                row: Row = {"table": "small", "profile": name, "layers": kind, "machine": machine}
                if not reduced.seconds:
                    continue
                yield {**row, **beside_all(reduced, cluster)}


def beside_all(profile: Profile, cluster: Cluster) -> Row:
    """PipeDream's slowest part over the least of all plans; the searches' samples per second over the most."""
    costs = chain_costs(profile)
    arrangements = list(every_arrangement(len(profile), cluster.devices))
    least = min(slowest_seconds(stages, costs, cluster, "ring") for stages in arrangements)
    found = slowest_seconds(partition(profile, cluster).stages, costs, cluster, "ring")
    rates: dict[bool, float] = {True: 0.0, False: 0.0}
    count, fastest = 0, ""
    for plan in every_plan(profile, cluster, arrangements):
        try:
            rate = evaluate(plan, profile, cluster).samples_per_second
        except PenstockError:
            continue
        count += 1
        fastest = shape(plan) if rate > max(rates.values()) else fastest
        flushes = plan.schedule not in ("pipedream", "2bw")
        rates[flushes] = max(rates[flushes], rate)
    searched: dict[bool, float] = {}
    for flushes in (True, False):
        found_plan = penstock.plan(profile, cluster, asynchronous=not flushes)
        assert found_plan.predicted is not None
        searched[flushes] = found_plan.predicted.samples_per_second
    return {
        "objective_over_least": found / least,
        "plans": count,
        "fastest": f"{fastest}, {max(rates.values()):.4g}/s",
        "search": f"{shape(found_plan)}, {searched[False]:.4g}/s",
        "search_of_best": searched[False] / max(rates.values()),
        "synchronous_of_best": searched[True] / rates[True],
    }


def every_arrangement(layers: int, devices: int) -> Iterator[tuple[Stage, ...]]:
    """All cuts and all numbers of replicas on consecutive ranks; equal ones also side by side."""
    for count in range(1, min(layers, devices) + 1):
        for inner in combinations(range(1, layers), count - 1):
            cuts = list(pairwise((0, *inner, layers)))
            for stops in combinations(range(1, devices + 1), count):
                held = [tuple(range(*part)) for part in pairwise((0, *stops))]
                yield tuple(Stage(*cut, ranks) for cut, ranks in zip(cuts, held, strict=True))
                width = len(held[0])
                if count > 1 and width > 1 and {len(ranks) for ranks in held} == {width}:
                    beside = [tuple(range(stage, count * width, count)) for stage in range(count)]
                    yield tuple(Stage(*cut, ranks) for cut, ranks in zip(cuts, beside, strict=True))


def every_plan(profile: Profile, cluster: Cluster, arrangements: list[tuple[Stage, ...]]) -> Iterator[Plan]:
    """The arrangements under every schedule, with microbatches in turn or, under spp, split into whole samples."""
    microbatches, size = PER_DEVICE * cluster.devices, profile.microbatch_size
    for stages in arrangements:
        for schedule in ("gpipe", "1f1b-flush", "2bw"):
            yield Plan(stages, schedule, microbatches, size)
        yield Plan(stages, "pipedream", 1, size)
        if all(size % len(stage.ranks) == 0 for stage in stages):
            yield Plan(stages, "spp", microbatches, size, routing="split")
    for ranks in range(2, cluster.devices + 1):
        for per_rank in range(2, len(profile) // ranks + 1):
            for replicas in range(1, cluster.devices // ranks + 1):
                for inner in combinations(range(1, len(profile)), ranks * per_rank - 1):
                    cuts = enumerate(pairwise((0, *inner, len(profile))))
                    held = [tuple(range(stage, ranks * replicas, ranks)) for stage in range(ranks)]
                    stages = tuple(Stage(*cut, held[stage % ranks]) for stage, cut in cuts)
                    yield Plan(stages, "interleaved", microbatches, size)


TITLES = {"times": "TIMES, seconds", "small": "SMALL (beside all plans on consecutive ranks)"}


def report(rows: list[Row]) -> Iterator[str]:
    """The tables; the columns of each are those of its first row."""
    for name, title in TITLES.items():
        own = [row for row in rows if row["table"] == name]
        if own:
            head = [key for key in own[0] if key != "table"]
            cells = [[shown(row.get(key, "")) for key in head] + [row.get("refused", "")[:80]] for row in own]
            yield f"\n{title}\n{table([*head, ''], cells)}"


def shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--data", type=Path, help="folder with dnn-partitioning/ and piper/")
    parser.add_argument("--profiles", nargs="*", default=[], help="only these")
    parser.add_argument("--tables", nargs="*", default=["times", "small"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="without the thousand layers and the trillion parameters")
    options = parser.parse_args()

    saved = Report(options.save)
    saved.add(conditions("benchmarks/planning.py"))
    profiles = load_profiles(options.data, options.profiles)
    made: dict[str, Callable[[], Iterator[Row]]] = {
        "times": lambda: times(profiles, options.repeats, large=not options.quick),
        "small": lambda: small(profiles),
    }
    rows = []
    for name in options.tables:
        for row in made[name]():
            rows.append(row)
            print(json.dumps(row), flush=True)
    saved.add(*report(rows))


if __name__ == "__main__":
    main()
