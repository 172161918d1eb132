"""Throughputs from plans: how fast each job runs on each kind of machine, by the planner's best plan for it.

Gavel's policies need this table and ask the user for it. Here a profile of the model is enough; what was measured on a
kind overrides what is planned.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from penstock.arguments import Entries, check_arguments, check_fields, instance, number
from penstock.errors import PlanError, counted, visible
from penstock.fleet.jobs import Entity, Job, Kind
from penstock.fleet.problems import Pair, Problem
from penstock.planning import plan
from penstock.values import Cluster, DeviceKind, Plan, Profile

_KIND = instance(Kind, "a Kind", "build one")
_RULES = {
    "bytes_per_second": number(above=0, infinite=True).but("give the bandwidth between two devices"),
    "latency_seconds": number(0, unit="seconds").but("give the latency of a message, or leave it out"),
}


@dataclass(frozen=True, slots=True)
class Machines:
    """A kind of devices as the planner sees it."""

    kind: Kind
    speed: float = 1.0
    """How fast one device computes, over the device on which the profiles were measured."""
    memory_bytes: float | None = None
    bytes_per_second: float = float("inf")
    """Of the link between any two devices of a job."""
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        _KIND.check("kind", self.kind, PlanError, " in Machines")
        check_fields(self, _RULES, PlanError, f" in kind {self.kind.name!r}")
        self.device(self.speed)

    def device(self, speed: float) -> DeviceKind:
        """One device, which is `speed` times as fast as a profile says. Raises `PlanError`."""
        return DeviceKind(self.kind.name, speed, self.memory_bytes, self.kind.price_per_hour)

    def cluster(self, workers: int, speed: float) -> Cluster:
        """That many devices of this kind, for profiles of devices that are slower by the factor `speed`."""
        links = Cluster.uniform(workers, self.bytes_per_second, latency_seconds=self.latency_seconds)
        return links.with_kinds(self.device(speed))


_MODEL_RULES = {
    "job": instance(Job, "a Job", "build one"),
    "profile": instance(Profile, "a Profile", "measure or load one, or leave it out").optional,
    **dict.fromkeys(("profiles", "measured"), instance(Mapping, "a mapping", "write kinds and what is known of each")),
    "options": instance(Mapping, "a mapping", "write keywords of penstock.plan and their values"),
}


@dataclass(frozen=True, slots=True)
class ModelJob:
    """A job and what is known of its speed. One of its steps is a sample."""

    job: Job
    profile: Profile | None = None
    """Measured on a device of speed 1. None if all speeds are measured."""
    profiles: Mapping[str, Profile] = field(default_factory=lambda: MappingProxyType({}))
    """Profiles that were measured on a kind, by its name; their times are not scaled."""
    measured: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Samples per second that were measured, by the name of the kind; 0 where the job does not run."""
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Keywords of `penstock.plan`, such as `batch_size` and `asynchronous`."""

    def __post_init__(self) -> None:
        check_fields(self, _MODEL_RULES, PlanError, " in a ModelJob")


@dataclass(frozen=True, slots=True)
class PlannedSpeed:
    """How fast a job runs on a kind, and why."""

    samples_per_second: float
    """0 if it cannot run."""
    reason: str
    """Where the number comes from, or why there is none."""
    plan: Plan | None = None
    """The plan that the planner chose. None if the speed was measured, or nothing fits."""


@dataclass(frozen=True, slots=True)
class ThroughputTable:
    """Speeds of jobs (rows) on kinds (columns), each with its plan."""

    jobs: tuple[ModelJob, ...]
    machines: tuple[Machines, ...]
    speeds: tuple[tuple[PlannedSpeed, ...], ...]

    def throughputs(self) -> tuple[tuple[float, ...], ...]:
        """Samples per second."""
        return tuple(tuple(speed.samples_per_second for speed in row) for row in self.speeds)

    def problem(
        self, pairs: Sequence[Pair] = (), entities: Sequence[Entity] = (), budget: float | None = None
    ) -> Problem:
        """What a policy decides about. Raises `PlanError` with the reasons if a job runs on no kind."""
        for model, row in zip(self.jobs, self.speeds, strict=True):
            if not any(speed.samples_per_second for speed in row):
                reasons = (f"{m.kind.name}: {speed.reason}" for m, speed in zip(self.machines, row, strict=True))
                raise PlanError(
                    f"job {model.job.name!r}: expected a kind that it runs on, found none: {'; '.join(reasons)}. Give "
                    "it more workers or other machines, or leave it out"
                )
        jobs, kinds = tuple(model.job for model in self.jobs), tuple(machines.kind for machines in self.machines)
        return Problem(jobs, kinds, self.throughputs(), pairs=tuple(pairs), entities=tuple(entities), budget=budget)

    def describe(self) -> str:
        """A line for each job and kind: steps per second, and the plan or the reason."""
        lines = []
        for model, row in zip(self.jobs, self.speeds, strict=True):
            for machines, speed in zip(self.machines, row, strict=True):
                number = f"{speed.samples_per_second:.4g} steps/s" if speed.samples_per_second else "does not run"
                lines.append(f"{visible(model.job.name)} on {visible(machines.kind.name)}: {number} ({speed.reason})")
        return "\n".join(lines)


def throughput_table(jobs: Sequence[ModelJob], machines: Sequence[Machines]) -> ThroughputTable:
    """The speed of each job on all its workers of each kind: measured, or that of the fastest plan that fits."""
    rules = {
        "jobs": Entries(instance(ModelJob, "a ModelJob", "build one")),
        "machines": Entries(instance(Machines, "Machines", "build them of a Kind")),
    }
    models, there = check_arguments("throughput_table", rules, PlanError, jobs=jobs, machines=machines).values()
    return ThroughputTable(models, there, tuple(tuple(_speed(model, each) for each in there) for model in models))


def _speed(model: ModelJob, machines: Machines) -> PlannedSpeed:
    kind, job = machines.kind, model.job
    if kind.name in model.measured:
        return PlannedSpeed(float(model.measured[kind.name]), "measured")
    if job.workers > kind.workers:
        return PlannedSpeed(0.0, f"it takes {counted(job.workers, 'worker')}, expected at most {kind.workers}")
    profile, speed = model.profiles.get(kind.name), 1.0
    if profile is None:
        if model.profile is None:
            return PlannedSpeed(0.0, "it has no profile and no measurement for this kind")
        profile, speed = model.profile, machines.speed
    try:
        found = plan(profile, machines.cluster(job.workers, speed), **{"progress": False, **model.options})
    except PlanError as error:
        return PlannedSpeed(0.0, str(error).partition("\n")[0])
    assert found.predicted is not None, "the planner predicts what it plans"
    stages = counted(len(found.stages), "stage")
    what = f"planned: {found.schedule}, {stages}, {found.microbatches} x {found.microbatch_size}"
    return PlannedSpeed(found.predicted.samples_per_second, what, found)
