"""What became of the jobs of a workload: the result of a simulation or of a real run."""

from dataclasses import dataclass
from typing import Any

import numpy

from penstock.errors import counted
from penstock.fleet.jobs import Job, Kind
from penstock.fleet.problems import Floats


@dataclass(frozen=True, slots=True)
class CompletedJob:
    """A job that has finished."""

    job: Job
    arrived: float
    finished: float
    """Both in seconds from the start."""
    busy_seconds: float
    """The time for which it had workers, checkpoints included."""
    isolated_seconds: float
    """The time that its steps would have taken on 1/n of the fleet, for the n of each moment."""
    cost: float
    restarts: int = 0
    """How often it went on from a checkpoint, on other workers or after a pause."""

    @property
    def seconds(self) -> float:
        """The job completion time: from its arrival to its end."""
        return self.finished - self.arrived

    @property
    def fairness(self) -> float:
        """Finish-time fairness, rho: 1 or less if sharing the fleet did not delay it."""
        return self.seconds / self.isolated_seconds

    @property
    def is_late(self) -> bool:
        """Whether it missed its deadline."""
        return self.job.deadline_seconds is not None and self.seconds > self.job.deadline_seconds * (1 + 1e-6)


@dataclass(frozen=True, slots=True)
class Held:
    """Workers that a job had for a time."""

    job: str
    devices: str
    workers: tuple[int, ...]
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class FleetRun:
    """All jobs of a run, in the order in which they finished."""

    kinds: tuple[Kind, ...]
    jobs: tuple[CompletedJob, ...]
    seconds: float
    """From the start to the end of the last job."""
    allocations: int
    """How often the policy was asked."""
    held: tuple[Held, ...] = ()
    """Who had which workers, if it was recorded."""

    @property
    def makespan(self) -> float:
        """From the first arrival to the last end."""
        return max(job.finished for job in self.jobs) - min(job.arrived for job in self.jobs)

    @property
    def mean_seconds(self) -> float:
        """The average job completion time."""
        return float(self.completion_seconds().mean())

    @property
    def fairness(self) -> float:
        """The average finish-time fairness."""
        return float(numpy.mean([job.fairness for job in self.jobs]))

    @property
    def cost(self) -> float:
        """What all jobs cost together."""
        return float(sum(job.cost for job in self.jobs))

    @property
    def late(self) -> int:
        """The jobs that missed their deadlines."""
        return sum(job.is_late for job in self.jobs)

    def completion_seconds(self) -> Floats:
        """All completion times, ascending."""
        return numpy.sort([job.seconds for job in self.jobs])

    def tail_seconds(self, share: float = 0.99) -> float:
        """The completion time that this share of the jobs does not exceed."""
        return float(numpy.quantile(self.completion_seconds(), share))

    def describe(self) -> str:
        """The figures of the run, one a line."""
        worst = max(job.fairness for job in self.jobs)
        lines = [
            f"{counted(len(self.jobs), 'job')} in {_hours(self.makespan)}, {counted(self.allocations, 'allocation')}",
            f"completion time: {_hours(self.mean_seconds)} on average, {_hours(self.tail_seconds(0.5))} median, "
            f"{_hours(self.tail_seconds())} for 99 %",
            f"finish-time fairness: {self.fairness:.3g} on average, {worst:.3g} at worst",
            f"restarts from a checkpoint: {sum(job.restarts for job in self.jobs) / len(self.jobs):.3g} per job",
        ]
        if any(kind.price_per_hour for kind in self.kinds):
            lines.append(f"cost: {self.cost:.6g}")
        if any(job.job.deadline_seconds is not None for job in self.jobs):
            lines.append(f"deadlines missed: {self.late} of {len(self.jobs)}")
        return "\n".join(lines)

    def as_document(self) -> dict[str, Any]:
        """The run as plain values, for JSON."""
        figures = ("makespan", "mean_seconds", "fairness", "cost", "late", "allocations")
        of_job = ("arrived", "finished", "busy_seconds", "fairness", "cost", "restarts")
        jobs = [
            {"job": job.job.name, **{name: getattr(job, name) for name in of_job}, "late": job.is_late}
            for job in self.jobs
        ]
        return {**{name: getattr(self, name) for name in figures}, "tail_seconds": self.tail_seconds(), "jobs": jobs}


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.3g} h" if seconds >= 3600 else f"{seconds:.4g} s"
