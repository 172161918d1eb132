"""Jobs that arrive over time: traces from a file, and random ones as in [Narayanan 2021, section 5.7.1]."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from penstock.arguments import check_fields, integer, number
from penstock.errors import PlanError
from penstock.fleet.jobs import Job

__all__ = ["THESIS_KINDS", "Arrival", "JobType", "poisson_workload", "static_workload", "thesis_types"]


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

_SPEEDUPS = {
    # Over a K80 on a P100 and a V100 [Narayanan 2021, table 6.1]; the number of batch sizes [table 5.2].
    "ResNet-50": (3.7, 9.6, 4),
    "ResNet-18": (4.0, 6.8, 5),
    "A3C": (1.2, 2.2, 1),
    "Transformer": (3.3, 3.3, 5),
    "CycleGAN": (4.5, 9.3, 1),
    # Table 6.1 has no numbers for these two: the geometric means of the five.
    "LSTM": (3.05, 5.36, 5),
    "Recoder": (3.05, 5.36, 5),
}


def thesis_types() -> tuple[JobType, ...]:
    """The 26 types of jobs of the thesis. A step is what a V100 does in a second; all batch sizes of a model have the
    speedups of the model.
    """
    return tuple(
        JobType(f"{model}/{size}", (1.0, p100 / v100, 1 / v100))
        for model, (p100, v100, sizes) in _SPEEDUPS.items()
        for size in range(sizes)
    )


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
