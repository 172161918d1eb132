"""What a fleet divides among whom: kinds of devices, how many there are and what they cost; and training jobs, the work
that is left of them, how many workers they take, and what they are owed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.arguments import FLAG, TEXT, Entries, check_fields, instance, integer, number
from penstock.errors import PlanError

_KIND_RULES = {
    "name": TEXT.but("give the kind's name"),
    "workers": integer(1, unit="workers").but("give the number of devices of this kind"),
    "price_per_hour": number(0).but("give what one device costs for an hour, or 0"),
    "workers_per_server": integer(1, unit="workers").but("give the devices of one server, or leave it out").optional,
    "pool": TEXT.but("give the name of the kind whose devices these are"),
    "consolidated": FLAG,
    "region": TEXT.but("give the name of the place where these machines are, or leave it out"),
    "egress_per_gigabyte": number(0).but("give what a gigabyte costs that leaves the region, or leave it out"),
    "preempted_every_seconds": number(above=0, unit="seconds")
    .but("give the mean time until a spot device is taken away, or leave it out")
    .optional,
}


@dataclass(frozen=True, slots=True)
class Kind:
    """Devices of one kind, each of which is a worker.

    Kinds with the same `pool` are the same devices, used in different ways: jobs that need one server and jobs that may
    be spread, say. They share one number of workers.
    """

    name: str
    workers: int
    price_per_hour: float = 0.0
    """What one device costs while a job has it."""
    workers_per_server: int | None = None
    """None if the devices are all alike in their distance."""
    pool: str = ""
    """Empty if no other kind has the same devices."""
    consolidated: bool = False
    """Whether the workers of a job must be on as few servers as possible."""
    region: str = ""
    """Where these machines are. Empty if moving to them costs nothing."""
    egress_per_gigabyte: float = 0.0
    """What a gigabyte costs that leaves the region."""
    preempted_every_seconds: float | None = None
    """The mean time until a device is taken away, as spot machines are. It is back in the next round. None: never."""

    def __post_init__(self) -> None:
        check_fields(self, _KIND_RULES, PlanError, f" in kind {self.name!r}")

    @property
    def devices(self) -> str:
        """The name of its devices: that of the pool, or its own."""
        return self.pool or self.name


def moving_cost(gigabytes: float, region: str, kind: Kind, kinds: Sequence[Kind]) -> float:
    """The price of moving so much data from `region` to that of `kind`: 0 if one of them is not known. `kinds`: those
    of the fleet; those of `region` say what leaving it costs.
    """
    if not gigabytes or not region or not kind.region or region == kind.region:
        return 0.0
    return gigabytes * max((found.egress_per_gigabyte for found in kinds if found.region == region), default=0.0)


_RULES = {
    "name": TEXT.but("give the job's name"),
    "steps": number(above=0, unit="steps").but("give the steps that are left, and drop jobs that have none"),
    "workers": integer(1, unit="workers").but("give the number of devices that the job takes at a time"),
    "weight": number(above=0).but("give a larger weight to a job that should get more"),
    "elapsed_seconds": number(0, unit="seconds").but("give the seconds since the job arrived"),
    "isolated_seconds": number(0, unit="seconds").but("give the seconds that its past steps take on a share of 1/n"),
    "deadline_seconds": number(above=0, unit="seconds").but("give the seconds that are left, or leave it out").optional,
    "entity": TEXT.but("give the name of an entity of the problem"),
    "gigabytes": number(0, unit="gigabytes").but("give the size of its data and its checkpoint, or leave it out"),
    "region": TEXT.but("give the name of the place where its data is, or leave it out"),
}


@dataclass(frozen=True, slots=True)
class Job:
    """A job that takes `workers` devices of one kind at a time.

    Steps are of any unit in which throughputs are given per second: minibatches, or samples.
    """

    name: str
    steps: float
    """What is left, more than 0."""
    workers: int = 1
    weight: float = 1.0
    """The share that it is owed, relative to other jobs; inside an entity, to the other jobs of it."""
    elapsed_seconds: float = 0.0
    """The time since its arrival, of which finish-time fairness takes account."""
    isolated_seconds: float = 0.0
    """The time that its finished steps would have taken on 1/n of the fleet."""
    deadline_seconds: float | None = None
    """The time that is left until it must be done. None if it has no deadline."""
    entity: str = ""
    """The team that the job belongs to, for hierarchical policies."""
    gigabytes: float = 0.0
    """What moves with the job to another region: its data and its checkpoint."""
    region: str = ""
    """Where its data is. Empty if it is not known; then the first move costs nothing."""

    def __post_init__(self) -> None:
        check_fields(self, _RULES, PlanError, f" in job {self.name!r}")


_ENTITY_RULES = {
    "name": TEXT.but("give the entity's name"),
    "weight": number(above=0).but("give a larger weight to an entity that should get more"),
    "first_come": FLAG,
}


@dataclass(frozen=True, slots=True)
class Entity:
    """A team or user: the jobs of an entity share what its weight earns, all equally or one after the other."""

    name: str
    weight: float = 1.0
    first_come: bool = False
    """Whether its jobs are served in the order of their arrival (FIFO). Otherwise they share by their weights."""

    def __post_init__(self) -> None:
        check_fields(self, _ENTITY_RULES, PlanError, f" in entity {self.name!r}")


_SPEEDS = Entries(number(0, unit="steps per second").but("give 0 where the job cannot run"))


@dataclass(frozen=True, slots=True)
class Arrival:
    """A job and the time at which it comes. Its deadline counts from then."""

    seconds: float
    job: Job
    throughputs: tuple[float, ...]
    """Steps per second on each kind, on all workers of the job."""

    def __post_init__(self) -> None:
        instance(Job, "a Job", "build one").check("job", self.job, PlanError, " in an Arrival")
        rule = number(0, unit="seconds").but("give the seconds from the start to the job's arrival")
        check_fields(self, {"seconds": rule}, PlanError, f" in the arrival of {self.job.name!r}")
        _SPEEDS.check(f"throughputs of {self.job.name!r}", self.throughputs, PlanError)
