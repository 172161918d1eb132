"""The sweeps of Gavel [Narayanan 2021, section 5.7.3], simulated at the thesis's rates of arrivals and numbers of jobs.

    python benchmarks/fleet_figures.py --save benchmarks/results/fleet-figures.txt
    python benchmarks/fleet_figures.py --only 5.9 --rates 0.4 0.8 1.2 1.6 2 2.4 2.8 3.2 3.6 4 4.4 4.8 5.2 5.6 6
    python benchmarks/fleet_figures.py --only packing makespan --data DIR

The fleet has 36 V100, 36 P100 and 36 K80. Jobs 4000 to 5000 of 6,500 are measured; with `--jobs` the same parts of
another number. Jobs have exactly their shares at any time: rounds of six minutes add 2 % (docs/papers.md, figure 5.15).
The authors' sweeps are 0.4 to 6 jobs an hour in steps of 0.4, and with gangs 0.3 to 3 in steps of 0.3. DIR has their
published throughputs of pairs in `gavel/simulation_throughputs.json`; `packing` needs them, on a ninth of the fleet.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean

from fleets.baselines import blind, gandiva
from fleets.workloads import THESIS_KINDS, poisson_workload, static_workload, thesis_types
from measurement.reports import Report, conditions, option_parser
from penstock.fleet import (
    Allocation,
    Arrival,
    CompletedJob,
    FleetRun,
    Kind,
    Policy,
    Problem,
    allox,
    fifo,
    finish_time_fairness,
    max_min_fairness,
    min_makespan,
    simulate_fleet,
)

KINDS = tuple(Kind(name, 36) for name in THESIS_KINDS)
PART = 9
"""Packing is simulated on a ninth of the fleet: its linear programs have a variable for every two jobs."""

Shared = dict[tuple[str, str], tuple[tuple[float, ...], tuple[float, ...]]]


class Staying:
    """A policy whose jobs keep their kind from the moment at which they have all of the time there, as AlloX's jobs do
    in the authors' program. The others get what is left.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.kept: dict[str, int] = {}

    def __call__(self, problem: Problem) -> Allocation:
        kept = {m: self.kept[job.name] for m, job in enumerate(problem.jobs) if job.name in self.kept}
        rows = [[float(kept.get(m) == j) for j in range(len(problem.kinds))] for m in range(len(problem.jobs))]
        left = [kind.workers - list(kept.values()).count(j) for j, kind in enumerate(problem.kinds)]
        free, waiting = [j for j, workers in enumerate(left) if workers], [m for m in range(len(rows)) if m not in kept]
        if free and waiting:
            found = self.policy(
                Problem(
                    jobs=tuple(problem.jobs[m] for m in waiting),
                    kinds=tuple(replace(problem.kinds[j], workers=left[j]) for j in free),
                    throughputs=tuple(tuple(problem.throughputs[m][j] for j in free) for m in waiting),
                )
            )
            for m, shares in zip(waiting, found.shares, strict=True):
                for j, share in zip(free, shares, strict=True):
                    rows[m][j] = share
        names = [job.name for job in problem.jobs]
        self.kept = {name: row.index(1.0) for name, row in zip(names, rows, strict=True) if 1.0 in row}
        return Allocation(problem, tuple(map(tuple, rows)), "staying")


@dataclass(frozen=True)
class Sweep:
    """A figure: mean completion times under several policies at several rates of arrivals."""

    policies: Mapping[str, Policy]
    """The first is the one that the others are compared with."""
    rates: Sequence[float]
    """Jobs an hour; those of a small fleet are multiplied by its part."""
    thesis: str
    gangs: bool = False
    priorities: bool = False
    """A fifth of the jobs weighs five times as much."""
    jobs: int = 6500
    packing: bool = False
    """On a part of the fleet; policies whose name says so have pairs."""


LAS = {"LAS, aware": max_min_fairness, "LAS, blind": blind(max_min_fairness)}
SWEEPS = {
    "5.9": Sweep({**LAS, "AlloX": allox, "AlloX, jobs stay": allox}, (5.6,), "LAS 3.5 at 5.6"),
    "5.10": Sweep(LAS, (2.6,), "2.2 at 2.6", gangs=True),
    "5.11": Sweep(
        {"FTF, aware": finish_time_fairness, "FTF, blind": blind(finish_time_fairness)},
        (2.6,),
        "3, of rho 2.8",
        gangs=True,
    ),
    "fifo": Sweep({"FIFO, aware": fifo, "FIFO, blind": blind(fifo)}, (5.6,), "2.7", jobs=1300),
    "priorities": Sweep(LAS, (5.6,), "1.5 for high, 2.7 for low priority", priorities=True),
    "packing": Sweep(
        {
            "LAS, pairs": max_min_fairness,
            "LAS, aware": max_min_fairness,
            "LAS, blind": blind(max_min_fairness),
            "Gandiva, pairs": gandiva,
            "FIFO, pairs": fifo,
            "FIFO, aware": fifo,
            "FIFO, blind": blind(fifo),
        },
        (7.0,),
        "Gandiva 2.2; FIFO 3.8 blind over pairs, 2.7 blind over aware",
        jobs=520,
        packing=True,
    ),
}
HEAD = f"{'jobs/h':>6} seed  {'policy':30} {'mean h':>8}  ratio   99 % h    rho  ratio     s"


def published(data: Path) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Steps per second by kind, type of job and the type beside it."""
    found: dict[str, dict[str, dict[str, list[float]]]] = json.loads(
        (data / "gavel" / "simulation_throughputs.json").read_text()
    )
    return found


def published_type(arrival: Arrival) -> str:
    """The name of a job's type in the published file."""
    model, size = arrival.job.name.split()[1].split("/")
    name = {"LSTM": "LM", "Recoder": "Recommendation"}.get(model, model)
    batch = "" if name in ("A3C", "CycleGAN") else f" (batch size {size})"
    return f"('{name}{batch}', {arrival.job.workers})"


def shared_speeds(data: Path, types: Mapping[str, str], kinds: Sequence[Kind]) -> Shared:
    """The throughputs of all pairs of jobs that can share devices, by their names. `types`: those of the jobs. Only
    jobs of equally many workers have published ones.
    """
    tables = published(data)
    rows = [tables[kind.name.lower()] for kind in kinds]
    by_types: dict[tuple[str, str], tuple[tuple[float, ...], tuple[float, ...]]] = {}
    found: Shared = {}
    for one, two in combinations(types, 2):
        key = types[one], types[two]
        if key not in by_types:
            speeds = [row.get(key[0], {}).get(key[1], (0.0, 0.0)) for row in rows]
            by_types[key] = tuple(first for first, _ in speeds), tuple(second for _, second in speeds)
        if max(by_types[key][0]) > 0:
            found[one, two] = by_types[key]
    return found


def simulate(sweep: Sweep, name: str, rate: float, jobs: int, seed: int, data: Path | None) -> FleetRun:
    """One run of a sweep."""
    part = PART if sweep.packing else 1
    workload = poisson_workload(thesis_types(), jobs, rate / part, seed=seed, gangs=sweep.gangs)
    if sweep.priorities:
        workload = tuple(
            replace(each, job=replace(each.job, weight=5.0 if number % 5 == 0 else 1.0))
            for number, each in enumerate(workload)
        )
    kinds = tuple(replace(kind, workers=kind.workers // part) for kind in KINDS)
    pairs = None
    if data is not None and name.endswith("pairs"):
        pairs = shared_speeds(data, {each.job.name: published_type(each) for each in workload}, kinds)
    policy = Staying(sweep.policies[name]) if name.endswith("stay") else sweep.policies[name]
    watched = range(jobs * 8 // 13, jobs * 10 // 13)
    return simulate_fleet(workload, kinds, policy, watched=watched, ideal=True, pairs=pairs)


def groups(sweep: Sweep, run: FleetRun) -> dict[str, list[CompletedJob]]:
    """The jobs that have a mean of their own."""
    if not sweep.priorities:
        return {"": list(run.jobs)}
    high, low = ([job for job in run.jobs if (job.job.weight > 1) == above] for above in (True, False))
    return {", high": high, ", low": low}


def rows_of(sweep: Sweep, rate: float, jobs: int, seed: int, data: Path | None) -> Iterator[str]:
    """A line for each policy at one rate."""
    first: dict[str, tuple[float, float]] = {}
    for name in sweep.policies:
        start = time.process_time()
        run = simulate(sweep, name, rate, jobs, seed, data)
        spent = time.process_time() - start
        for group, members in groups(sweep, run).items():
            hours, rho = fmean(job.seconds for job in members) / 3600, fmean(job.fairness for job in members)
            base = first.setdefault(group, (hours, rho))
            tail = sorted(job.seconds for job in members)[int(0.99 * len(members))] / 3600
            ratios = f"{hours / base[0]:6.2f} {tail:8.1f} {rho:6.2f} {rho / base[1]:6.2f}"
            yield f"{rate:6g} {seed:4}  {name + group:30} {hours:8.2f} {ratios} {spent:5.0f}"


def makespans(counts: Sequence[int], seed: int, data: Path | None) -> Iterator[str]:
    """Batches of jobs with gangs: the makespan policy, FIFO, and with `data` Gandiva."""
    for count in counts:
        workload = static_workload(thesis_types(), count, seed=seed, gangs=True)
        policies: dict[str, Policy] = {"makespan": min_makespan, "FIFO, blind": blind(fifo)}
        pairs = None
        if data is not None and count <= 100:
            policies.update({"Gandiva, pairs": gandiva, "makespan, pairs": min_makespan})
            pairs = shared_speeds(data, {each.job.name: published_type(each) for each in workload}, KINDS)
        first = 0.0
        for name, policy in policies.items():
            start = time.process_time()
            given = pairs if name.endswith("pairs") else None
            found = simulate_fleet(workload, KINDS, policy, ideal=True, pairs=given).makespan / 3600
            first, spent = first or found, time.process_time() - start
            yield f"{count:4} jobs, seed {seed}  {name:16} {found:8.2f} h {found / first:6.2f} {spent:5.0f} s"


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--jobs", type=int, help="by default that of each sweep")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rates", type=float, nargs="+", help="jobs an hour; by default those of each sweep")
    parser.add_argument("--counts", type=int, nargs="+", default=[100, 300, 500], help="the jobs of makespans")
    parser.add_argument("--only", nargs="+", choices=[*SWEEPS, "makespan"], default=[*SWEEPS, "makespan"])
    parser.add_argument("--data", type=Path, help="folder with gavel/")
    arguments = parser.parse_args()
    report = Report(arguments.save)
    report.add(conditions("benchmarks/fleet_figures.py"))
    for name in arguments.only:
        if name == "makespan":
            report.add("", "makespan, gangs (thesis: FIFO 2.5, Gandiva 1.4, pairs 0.92)")
            for seed in range(arguments.seeds):
                for row in makespans(arguments.counts, seed, arguments.data):
                    report.add(row)
            continue
        sweep = SWEEPS[name]
        if sweep.packing and arguments.data is None:
            report.add("", f"{name}: left out, needs --data")
            continue
        jobs = arguments.jobs or sweep.jobs
        report.add("", f"{name}, {jobs} jobs (thesis: {sweep.thesis})", HEAD)
        for rate in arguments.rates or sweep.rates:
            for seed in range(arguments.seeds):
                for row in rows_of(sweep, rate, jobs, seed, arguments.data):
                    report.add(row)


if __name__ == "__main__":
    main()
