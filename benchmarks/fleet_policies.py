"""The published comparisons of Gavel [Narayanan 2021, section 5.7.3], simulated: our ratios beside those of the thesis.

    python benchmarks/fleet_policies.py --save benchmarks/results/fleet-policies.txt
    python benchmarks/fleet_policies.py --jobs 500 --seeds 1 --only las ftf

The first takes hours on one core, the second is a look.

The workload has the 26 job types with the speedups of table 6.1, on 36 V100, 36 P100 and 36 K80. The thesis measures
jobs 4000 to 5000; with N jobs these are those from 4/6 N to 5/6 N, while the later ones keep the fleet busy.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy

from penstock.fleet import (
    THESIS_KINDS,
    Arrival,
    Entity,
    FleetRun,
    Job,
    Kind,
    Policy,
    Problem,
    blind,
    fifo,
    finish_time_fairness,
    hierarchical,
    max_min_fairness,
    max_throughput,
    min_cost,
    min_cost_near_deadlines,
    min_makespan,
    poisson_workload,
    simulate_fleet,
    static_workload,
    thesis_types,
)

KINDS = tuple(Kind(name, 36, price) for name, price in zip(THESIS_KINDS, (2.48, 1.46, 0.45), strict=True))
"""With the prices per hour of Google's on-demand machines, which table 6.1 implies."""


RATES = {False: 4.1, True: 2.2}
"""Jobs per hour without and with gangs: 96 % of what the fleet can do with these speedups, 4.24 and 2.29. Blind
policies can do 3.83 and 2.07. The thesis has 5.6 and 2.6, so its throughputs, which it does not print, are others.
"""


def continuous(policy: Policy, rate: float, gangs: bool, jobs: int, seed: int) -> FleetRun:
    """The steady state of Poisson arrivals."""
    workload = poisson_workload(thesis_types(), jobs, rate, seed=seed, gangs=gangs)
    return simulate_fleet(workload, KINDS, policy, watched=range(jobs * 4 // 6, jobs * 5 // 6))


def las(jobs: int, seed: int) -> Iterator[tuple[str, float, str]]:
    """Least attained service at high load."""
    for gangs, published in ((False, "3.5"), (True, "2.2")):
        rate = RATES[gangs]
        aware, baseline = (
            continuous(policy, rate, gangs, jobs, seed) for policy in (max_min_fairness, blind(max_min_fairness))
        )
        name = f"LAS, {'gangs' if gangs else 'single workers'}, {rate} jobs/h: mean completion time"
        yield name, baseline.mean_seconds / aware.mean_seconds, published


def ftf(jobs: int, seed: int) -> Iterator[tuple[str, float, str]]:
    """Finish-time fairness."""
    aware, baseline = (
        continuous(policy, RATES[True], True, jobs, seed)
        for policy in (finish_time_fairness, blind(finish_time_fairness))
    )
    yield (
        "finish-time fairness, gangs: mean completion time",
        baseline.mean_seconds / aware.mean_seconds,
        "3",
    )
    yield "finish-time fairness, gangs: mean rho", baseline.fairness / aware.fairness, "2.8"


def first_come(jobs: int, seed: int) -> Iterator[tuple[str, float, str]]:
    """FIFO, with the printed weights."""
    aware, baseline = (continuous(policy, RATES[False], False, jobs, seed) for policy in (fifo, blind(fifo)))
    yield "FIFO, single workers: mean completion time", baseline.mean_seconds / aware.mean_seconds, "2.7"


def makespan(jobs: int, seed: int) -> Iterator[tuple[str, float, str]]:
    """A static workload; the rounds are those of the simulator."""
    workload = static_workload(thesis_types(), max(jobs // 5, 20), seed=seed, gangs=True)
    aware, baseline = (simulate_fleet(workload, KINDS, policy) for policy in (min_makespan, blind(fifo)))
    yield f"makespan of {len(workload)} jobs, compared with FIFO", baseline.makespan / aware.makespan, "2.5"


def cost(jobs: int, seed: int) -> Iterator[tuple[str, float, str]]:
    """ResNet-50 and A3C in a cloud with enough of everything, and deadlines of 1.2, 2 and 10 times the duration."""
    random = numpy.random.default_rng(seed)
    count = max(jobs // 10, 20)
    kinds = [Kind(kind.name, count, kind.price_per_hour) for kind in KINDS]
    rows = {kind.name.partition("/")[0]: kind.throughputs for kind in thesis_types()}
    workload = []
    for index in range(count):
        seconds = float(random.choice([0.5, 1, 2, 4, 8])) * 86400
        deadline = seconds * float(random.choice([1.2, 2, 10]))
        job = Job(f"job {index}", seconds, deadline_seconds=deadline)
        workload.append(Arrival(0.0, job, rows[str(random.choice(["ResNet-50", "A3C"]))]))
    fast, cheap, kept = (
        simulate_fleet(workload, kinds, policy, ideal=True)
        for policy in (max_throughput, min_cost, min_cost_near_deadlines)
    )
    yield "cost of the largest throughput over the least cost", fast.cost / cheap.cost, "1.4"
    yield "the same, deadlines kept", fast.cost / kept.cost, "1.2"
    yield "share of late jobs at least cost", cheap.late / count, "0.35"
    yield "share of late jobs, deadlines kept", kept.late / count, "0"


def levels(jobs: int, seed: int) -> Iterator[tuple[str, float, str]]:
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


def scaling(jobs: int, seed: int) -> Iterator[tuple[str, float, str]]:
    """Seconds of one hierarchical allocation for 2,048 jobs, all of which differ."""
    random, types = numpy.random.default_rng(seed), thesis_types()
    for count in (512, 2048):
        entities = tuple(Entity(f"entity {number}") for number in range(8))
        rows = []
        for _ in range(count):
            speeds = types[int(random.integers(len(types)))].throughputs
            rows.append(tuple(speed * float(random.uniform(0.9, 1.1)) for speed in speeds))
        owners = tuple(Job(f"job {m}", 1e6, entity=f"entity {m % 8}") for m in range(count))
        kinds = tuple(Kind(name, count // 6) for name in THESIS_KINDS)
        problem = Problem(owners, kinds, tuple(rows), entities=entities)
        start = time.process_time()
        hierarchical(problem)
        yield f"hierarchical, {count} jobs: processor seconds", time.process_time() - start, "< 600 at 2048"


COMPARISONS: dict[str, Callable[[int, int], Iterator[tuple[str, float, str]]]] = {
    "levels": levels,
    "cost": cost,
    "scaling": scaling,
    "las": las,
    "ftf": ftf,
    "fifo": first_come,
    "makespan": makespan,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=6000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(COMPARISONS), default=list(COMPARISONS))
    parser.add_argument("--save", type=Path, help="write the table to this file, too")
    arguments = parser.parse_args()
    lines = [
        f"{arguments.jobs} jobs, {arguments.seeds} seeds; ratio of the baseline to the policy, its spread, the thesis"
    ]
    print(lines[0], flush=True)
    for name in arguments.only:
        start, found = time.process_time(), dict[str, tuple[list[float], str]]()
        for seed in range(arguments.seeds):
            for label, ratio, published in COMPARISONS[name](arguments.jobs, seed):
                found.setdefault(label, ([], published))[0].append(ratio)
        for label, (ratios, published) in found.items():
            spread = statistics.stdev(ratios) if len(ratios) > 1 else 0.0
            lines.append(f"{label}: {statistics.mean(ratios):.3g} +- {spread:.2g} (thesis: {published})")
            print(lines[-1], flush=True)
        lines.append(f"  {name}: {time.process_time() - start:.0f} s of processor time")
        print(lines[-1], flush=True)
        if arguments.save:
            arguments.save.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
