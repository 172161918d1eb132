"""A training job as the fleet sees it: the work that is left, how many workers it takes, and what it is owed."""

from dataclasses import dataclass

from penstock.arguments import FLAG, TEXT, check_fields, integer, number
from penstock.errors import PlanError

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
