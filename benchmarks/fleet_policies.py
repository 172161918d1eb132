"""Comparisons of Gavel [Narayanan 2021, section 5.7.3] without arrivals: capacity, cost, levels, time of policies.

    python benchmarks/fleet_policies.py --save benchmarks/results/fleet-policies.txt

The workload has the 26 job types with the throughputs that the authors measured, on 36 V100, 36 P100 and 36 K80.
`fleet_figures.py` has the figures with arrivals.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import numpy

from fleets.baselines import blind
from fleets.workloads import THESIS_KINDS, thesis_types
from measurement.reports import Report, conditions, option_parser
from penstock.fleet import (
    Arrival,
    Entity,
    Job,
    Kind,
    Problem,
    fifo,
    finish_time_fairness,
    hierarchical,
    max_min_fairness,
    max_throughput,
    min_cost,
    min_cost_near_deadlines,
    min_makespan,
    simulate_fleet,
    strict_fifo,
)

KINDS = tuple(Kind(name, 36, price) for name, price in zip(THESIS_KINDS, (2.48, 1.46, 0.45), strict=True))
"""With the prices per hour of Google's on-demand machines, which table 6.1 implies."""

COST_ROWS = {"ResNet-50": (1.0, 3.7 / 9.6, 1 / 9.6), "A3C": (1.0, 1.2 / 2.2, 1 / 2.2)}
"""Throughputs relative to a V100 by table 6.1, which is about cost and has no batch sizes."""
SIZES = {False: {1: 60}, True: {1: 133, 2: 26, 4: 39, 8: 13}}
"""Jobs of each type by their workers, without and with gangs: in the parts of the workloads, where 19 of the 26 types
form gangs.
"""


@functools.cache
def capacity(gangs: bool, is_blind: bool = False) -> float:
    """The jobs per hour that the fleet can do, if all types are equally frequent, all jobs have the mean length and all
    workers are busy to the end.
    """
    minutes = 0.8 * (1e3 - 10**1.5) / math.log(10**1.5) + 0.2 * (1e4 - 1e3) / math.log(10)
    jobs: list[Job] = []
    rows: list[tuple[float, ...]] = []
    for kind in thesis_types():
        for workers, speeds in {1: kind.throughputs, **kind.gangs}.items():
            for _ in range(SIZES[gangs].get(workers, 0)):
                jobs.append(Job(f"job {len(jobs)}", speeds[0] * minutes * 60, workers=workers))
                rows.append(speeds)
    policy = blind(min_makespan) if is_blind else min_makespan
    seconds = policy(Problem(tuple(jobs), KINDS, tuple(rows))).seconds_left().max()
    return len(jobs) / (float(seconds) / 3600)


def capacities(seed: int) -> Iterator[tuple[str, float, str]]:
    """How much more load a fleet takes that knows its kinds. At 5.6 jobs per hour the thesis measures single jobs."""
    for gangs, published in ((False, "5.6"), (True, "2.6")):
        name = f"capacity, {'gangs' if gangs else 'single workers'}"
        yield f"{name}: jobs per hour", capacity(gangs), f"measured at {published}"
        yield f"{name}: over that of a blind policy", capacity(gangs) / capacity(gangs, is_blind=True), "1.5"


def cost(seed: int) -> Iterator[tuple[str, float, str]]:
    """ResNet-50 and A3C in a cloud with enough of everything, and deadlines of 1.2, 2 and 10 times the duration."""
    random = numpy.random.default_rng(seed)
    count = 500
    kinds = [Kind(kind.name, count, kind.price_per_hour) for kind in KINDS]
    workload = []
    for index in range(count):
        seconds = float(random.choice([0.5, 1, 2, 4, 8])) * 86400
        deadline = seconds * float(random.choice([1.2, 2, 10]))
        job = Job(f"job {index}", seconds, deadline_seconds=deadline)
        workload.append(Arrival(0.0, job, COST_ROWS[str(random.choice(["ResNet-50", "A3C"]))]))
    fast, cheap, kept = (
        simulate_fleet(workload, kinds, policy, ideal=True)
        for policy in (max_throughput, min_cost, min_cost_near_deadlines)
    )
    yield "cost of the largest throughput over the least cost", fast.cost / cheap.cost, "1.4"
    yield "the same, deadlines kept", fast.cost / kept.cost, "1.2"
    yield "share of late jobs at least cost", cheap.late / count, "0.35"
    yield "share of late jobs, deadlines kept", kept.late / count, "0"


def levels(seed: int) -> Iterator[tuple[str, float, str]]:
    """Total throughput of the hierarchical policy over that of a static partition, 18 jobs on three of each kind."""
    random, types = numpy.random.default_rng(seed), thesis_types()
    kinds = tuple(Kind(name, 3) for name in THESIS_KINDS)
    entities = tuple(Entity(str(weight), float(weight)) for weight in (1, 2, 3))
    rows = tuple(types[int(random.integers(len(types)))].throughputs for _ in range(18))
    owners = tuple(Job(f"job {m}", 1e6, entity=entities[m // 6].name) for m in range(18))
    problem = Problem(owners, kinds, rows, entities=entities)
    # Each entity owns its part of every kind, and each of its six jobs a sixth of that.
    shares = numpy.array([[3 * (m // 6 + 1) / 6 / 6 for _ in kinds] for m in range(18)])
    shares /= numpy.maximum(1.0, shares.sum(axis=1, keepdims=True))
    static = (shares * problem.speeds()).sum()
    yield (
        "hierarchical: total throughput over a static partition",
        hierarchical(problem).throughputs().sum() / static,
        "1.2",
    )


def _drawn(count: int, kinds: Sequence[Kind], seed: int, *, alike: bool, entities: int = 0) -> Problem:
    """`count` jobs of the 26 types, with their throughputs or (not `alike`) with some of their own."""
    random, types = numpy.random.default_rng(seed), thesis_types()
    rows, owners = [], []
    for m in range(count):
        speeds = types[int(random.integers(len(types)))].throughputs
        rows.append(tuple(speed * (1.0 if alike else float(random.uniform(0.9, 1.1))) for speed in speeds))
        steps, entity = float(10 ** random.uniform(3, 6)), f"entity {m % entities}" if entities else ""
        owners.append(Job(f"job {m}", steps, elapsed_seconds=float(m), entity=entity))
    named = tuple(Entity(f"entity {number}") for number in range(entities))
    return Problem(tuple(owners), tuple(kinds), tuple(rows), entities=named)


def steps_of_policies(seed: int) -> Iterator[tuple[str, float, str]]:
    """Seconds of one policy step for 500 jobs over 108 machines: of the 26 types, and all different."""
    for alike in (True, False):
        problem = _drawn(500, KINDS, seed, alike=alike)
        for policy in (max_min_fairness, finish_time_fairness, min_makespan, fifo, strict_fifo):
            start = time.process_time()
            name = policy(problem).policy
            label = "of 26 types" if alike else "all different"
            yield f"{name}, 500 jobs {label}: processor seconds", time.process_time() - start, "not given"


def scaling(seed: int) -> Iterator[tuple[str, float, str]]:
    """Seconds of one hierarchical allocation for 2,048 jobs, all of which differ."""
    for count in (512, 2048):
        problem = _drawn(count, [Kind(name, count // 6) for name in THESIS_KINDS], seed, alike=False, entities=8)
        start = time.process_time()
        hierarchical(problem)
        yield f"hierarchical, {count} jobs: processor seconds", time.process_time() - start, "< 600 at 2048"


COMPARISONS: dict[str, Callable[[int], Iterator[tuple[str, float, str]]]] = {
    "capacity": capacities,
    "steps": steps_of_policies,
    "levels": levels,
    "cost": cost,
    "scaling": scaling,
}


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(COMPARISONS), default=list(COMPARISONS))
    arguments = parser.parse_args()
    report = Report(arguments.save)
    report.add(conditions("benchmarks/fleet_policies.py"), f"{arguments.seeds} seeds; mean, its spread, the thesis")
    for name in arguments.only:
        start, found = time.process_time(), dict[str, tuple[list[float], str]]()
        for seed in range(arguments.seeds):
            for label, ratio, published in COMPARISONS[name](seed):
                found.setdefault(label, ([], published))[0].append(ratio)
        for label, (ratios, published) in found.items():
            spread = statistics.stdev(ratios) if len(ratios) > 1 else 0.0
            report.add(f"{label}: {statistics.mean(ratios):.3g} +- {spread:.2g} (thesis: {published})")
        report.add(f"  {name}: {time.process_time() - start:.0f} s of processor time")


if __name__ == "__main__":
    main()
