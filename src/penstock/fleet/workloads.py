"""Jobs that arrive over time: traces from a file, and random ones as in [Narayanan 2021, section 5.7.1]."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from penstock.arguments import check_fields, integer, number
from penstock.errors import PlanError
from penstock.fleet.jobs import Job


@dataclass(frozen=True, slots=True)
class JobType:
    """A model that jobs train, and its steps per second on each kind."""

    name: str
    throughputs: tuple[float, ...]
    """In the order of the kinds; 0 where it cannot run."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A job and the time at which it comes. Its deadline counts from then."""

    seconds: float
    job: Job
    throughputs: tuple[float, ...]
    """Steps per second on each kind, on all workers of the job."""

    def __post_init__(self) -> None:
        rule = number(0, unit="seconds").but("give the seconds from the start to the job's arrival")
        check_fields(self, {"seconds": rule}, PlanError, f" in the arrival of {self.job.name!r}")


THESIS_KINDS = ("V100", "P100", "K80")
"""The order of the throughputs of `thesis_types`."""

_MEASURED = {
    # Steps per second of a model and batch size on one V100, P100 and K80. The thesis does not print them; its authors
    # published them with their code (stanford-futuredata/gavel, scheduler/simulation_throughputs.json). 0: too little
    # memory.
    "ResNet-18/16": (32.35, 35.87, 4.795),
    "ResNet-18/32": (29.95, 35.83, 7.176),
    "ResNet-18/64": (24.09, 22.3, 7.052),
    "ResNet-18/128": (17.99, 11.68, 1.807),
    "ResNet-18/256": (10.3, 7.723, 0.8856),
    "ResNet-50/16": (11.4, 9.053, 2.301),
    "ResNet-50/32": (7.787, 4.888, 1.237),
    "ResNet-50/64": (4.395, 2.619, 0.619),
    "ResNet-50/128": (2.497, 1.584, 0.3472),
    "Transformer/16": (11.06, 9.537, 5.467),
    "Transformer/32": (10.62, 7.869, 3.507),
    "Transformer/64": (8.618, 5.092, 1.752),
    "Transformer/128": (5.446, 3.074, 0.9816),
    "Transformer/256": (1.595, 1.678, 0.4583),
    "A3C/4": (7.176, 5.681, 3.439),
    "LSTM/5": (109.2, 90.78, 25.49),
    "LSTM/10": (81.65, 77.08, 23.79),
    "LSTM/20": (64.74, 58.17, 17.14),
    "LSTM/40": (45.24, 35.77, 11.5),
    "LSTM/80": (28.24, 21.16, 6.054),
    "Recoder/512": (23.32, 48.88, 32.86),
    "Recoder/1024": (13.28, 30.74, 20.05),
    "Recoder/2048": (7.47, 16.6, 10.44),
    "Recoder/4096": (3.906, 8.897, 5.3),
    "Recoder/8192": (2.842, 5.548, 2.699),
    "CycleGAN/1": (4.426, 2.403, 0.5048),
}


def thesis_types() -> tuple[JobType, ...]:
    """The 26 types of jobs of the thesis [table 5.2], with the throughputs that its authors measured."""
    return tuple(JobType(name, throughputs) for name, throughputs in _MEASURED.items())


def poisson_workload(
    types: Sequence[JobType], jobs: int, jobs_per_hour: float, *, seed: int = 0, gangs: bool = False
) -> tuple[Arrival, ...]:
    """`jobs` jobs of random types at random times, `jobs_per_hour` on average, whose durations spread over two orders
    of magnitude: 10^x minutes on the first kind, with x in [1.5, 3] for four of five jobs and in [3, 4] for the others.

    `gangs`: 25 % of the jobs take 2 to 4 workers, and 5 % take 8.
    """
    integer(1).check("poisson_workload(jobs=)", jobs, PlanError)
    number(above=0).check("poisson_workload(jobs_per_hour=)", jobs_per_hour, PlanError)
    random = numpy.random.default_rng(seed)
    times = numpy.cumsum(random.exponential(3600 / jobs_per_hour, jobs)).tolist()
    return tuple(_arrival(types, index, seconds, random, gangs) for index, seconds in enumerate(times))


def static_workload(types: Sequence[JobType], jobs: int, *, seed: int = 0, gangs: bool = False) -> tuple[Arrival, ...]:
    """As `poisson_workload`, where all jobs are there at the start."""
    integer(1).check("static_workload(jobs=)", jobs, PlanError)
    random = numpy.random.default_rng(seed)
    return tuple(_arrival(types, index, 0.0, random, gangs) for index in range(jobs))


def _arrival(
    types: Sequence[JobType], index: int, seconds: float, random: numpy.random.Generator, gangs: bool
) -> Arrival:
    kind = types[int(random.integers(len(types)))]
    exponent = random.uniform(1.5, 3) if random.random() < 0.8 else random.uniform(3, 4)
    luck, size = random.random(), int(random.integers(2, 5))
    workers = 1 if not gangs or luck < 0.7 else size if luck < 0.95 else 8
    steps = kind.throughputs[0] * 60 * 10**exponent
    return Arrival(seconds, Job(f"{index} {kind.name}", steps, workers=workers), kind.throughputs)
