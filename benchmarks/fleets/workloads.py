"""Random jobs that arrive over time, of the types and the throughputs of [Narayanan 2021, section 5.7.1, table 5.2]."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy

from penstock.errors import PlanError
from penstock.fleet import Arrival, Job


@dataclass(frozen=True, slots=True)
class JobType:
    """A model that jobs train, and its steps per second on each kind."""

    name: str
    throughputs: tuple[float, ...]
    """Of one worker, in the order of the kinds; 0 where it cannot run."""
    gangs: Mapping[int, tuple[float, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """The same of several workers together, by their number. Empty for a model that trains on one."""


THESIS_KINDS = ("V100", "P100", "K80")
"""The order of the throughputs of `thesis_types`."""

_GANGS = (2, 4, 8)
_MEASURED = {
    # Steps per second of a model and batch size on V100, P100 and K80: of one worker, and of gangs of 2, 4 and 8 where
    # the model trains on several. The thesis does not print them; its authors published them with their code
    # (stanford-futuredata/gavel, scheduler/simulation_throughputs.json, MIT licence). 0: too little memory.
    "ResNet-18/16": ((32.35, 35.87, 4.795), (100.1, 60.91, 8.758), (123.9, 94.32, 16.12), (382.6, 130.1, 26.92)),
    "ResNet-18/32": ((29.95, 35.83, 7.176), (94.25, 57.52, 13.18), (114.7, 97.04, 22.53), (340.0, 142.0, 43.92)),
    "ResNet-18/64": ((24.09, 22.3, 7.052), (74.14, 41.48, 12.5), (95.59, 74.99, 21.63), (255.8, 120.0, 42.64)),
    "ResNet-18/128": ((17.99, 11.68, 1.807), (23.99, 24.23, 3.631), (69.95, 45.35, 6.982), (162.1, 85.08, 13.66)),
    "ResNet-18/256": ((10.3, 7.723, 0.8856), (15.88, 14.23, 1.674), (27.78, 27.73, 3.405), (81.51, 53.96, 6.975)),
    "ResNet-50/16": ((11.4, 9.053, 2.301), (13.86, 16.19, 4.301), (23.2, 30.8, 7.704), (27.8, 44.76, 15.06)),
    "ResNet-50/32": ((7.787, 4.888, 1.237), (10.83, 9.749, 2.353), (13.76, 18.55, 4.379), (24.07, 33.57, 8.792)),
    "ResNet-50/64": ((4.395, 2.619, 0.619), (7.922, 5.516, 1.264), (9.452, 10.36, 2.412), (17.3, 18.22, 4.569)),
    "ResNet-50/128": ((2.497, 1.584, 0.3472), (4.223, 2.881, 0), (7.029, 5.191, 0), (10.29, 9.935, 0)),
    "Transformer/16": ((11.06, 9.537, 5.467), (14.15, 14.31, 7.047), (20.08, 21.23, 10.27), (71.65, 29.02, 18.62)),
    "Transformer/32": ((10.62, 7.869, 3.507), (13.33, 11.22, 5.097), (22.82, 18.16, 7.985), (63.98, 26.22, 13.91)),
    "Transformer/64": ((8.618, 5.092, 1.752), (15.88, 7.887, 3.063), (19.66, 13.31, 5.031), (49.65, 19.94, 8.976)),
    "Transformer/128": ((5.446, 3.074, 0.9816), (10.07, 5.087, 1.657), (14.17, 8.774, 2.865), (30.88, 13.68, 5.257)),
    "Transformer/256": ((1.595, 1.678, 0.4583), (2.885, 2.941, 0.8492), (4.763, 5.243, 1.513), (9.717, 9.253, 2.923)),
    "A3C/4": ((7.176, 5.681, 3.439),),
    "LSTM/5": ((109.2, 90.78, 25.49), (185.7, 76.92, 32.39), (126.7, 110.2, 44.09), (698.8, 133.5, 76.86)),
    "LSTM/10": ((81.65, 77.08, 23.79), (163.1, 72.53, 29.98), (121.5, 105.2, 42.96), (615.1, 127.8, 75.57)),
    "LSTM/20": ((64.74, 58.17, 17.14), (132.2, 62.33, 23.77), (111.0, 93.81, 35.7), (497.3, 116.6, 61.45)),
    "LSTM/40": ((45.24, 35.77, 11.5), (91.59, 48.04, 16.07), (96.03, 76.05, 22.99), (359.3, 102.2, 43.15)),
    "LSTM/80": ((28.24, 21.16, 6.054), (58.09, 31.84, 10.01), (74.81, 55.0, 16.39), (231.2, 82.93, 28.29)),
    "Recoder/512": ((23.32, 48.88, 32.86),),
    "Recoder/1024": ((13.28, 30.74, 20.05),),
    "Recoder/2048": ((7.47, 16.6, 10.44),),
    "Recoder/4096": ((3.906, 8.897, 5.3),),
    "Recoder/8192": ((2.842, 5.548, 2.699),),
    "CycleGAN/1": ((4.426, 2.403, 0.5048),),
}


def thesis_types() -> tuple[JobType, ...]:
    """The 26 types of jobs of the thesis [table 5.2], with the throughputs that its authors measured."""
    return tuple(JobType(name, rows[0], dict(zip(_GANGS, rows[1:], strict=False))) for name, rows in _MEASURED.items())


def poisson_workload(
    types: Sequence[JobType], jobs: int, jobs_per_hour: float, *, seed: int = 0, gangs: bool = False
) -> tuple[Arrival, ...]:
    """`jobs` jobs of random types at random times, `jobs_per_hour` on average, whose durations spread over two orders
    of magnitude: 10^x minutes on the first kind, with x in [1.5, 3] for four of five jobs and in [3, 4] for the others.

    `gangs`: 10 % of the jobs take 2 workers, 15 % take 4 and 5 % take 8, as in the authors' program. Such a job is of a
    type that has throughputs of this many workers, and its duration is that of the gang on the first kind.
    """
    random = numpy.random.default_rng(seed)
    times = numpy.cumsum(random.exponential(3600 / jobs_per_hour, jobs)).tolist()
    return tuple(_arrival(types, index, seconds, random, gangs) for index, seconds in enumerate(times))


def static_workload(types: Sequence[JobType], jobs: int, *, seed: int = 0, gangs: bool = False) -> tuple[Arrival, ...]:
    """As `poisson_workload`, where all jobs are there at the start."""
    random = numpy.random.default_rng(seed)
    return tuple(_arrival(types, index, 0.0, random, gangs) for index in range(jobs))


def _arrival(
    types: Sequence[JobType], index: int, seconds: float, random: numpy.random.Generator, gangs: bool
) -> Arrival:
    workers = int(random.choice((1, *_GANGS), p=(0.7, 0.1, 0.15, 0.05))) if gangs else 1
    able = [kind for kind in types if workers == 1 or workers in kind.gangs]
    if not able:
        raise PlanError(
            f"gangs: expected a type of jobs with throughputs of {workers} workers, found none: give JobType(gangs=)"
        )
    kind = able[int(random.integers(len(able)))]
    exponent = random.uniform(1.5, 3) if random.random() < 0.8 else random.uniform(3, 4)
    throughputs = kind.throughputs if workers == 1 else kind.gangs[workers]
    job = Job(f"{index} {kind.name}", throughputs[0] * 60 * 10**exponent, workers=workers)
    return Arrival(seconds, job, throughputs)
