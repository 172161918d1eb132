"""What is known of a real run: its jobs, their leases, and the nodes of its workers. It is on disk at any time."""

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import PlanError
from penstock.fleet.histories import Held
from penstock.fleet.jobs import Kind
from penstock.values.documents import read_json

_FORMAT = "penstock-fleet-run/3"
_STEP = re.compile(r"step-(\d+)")


@dataclass(slots=True)
class JobState:
    """What is known of a job."""

    status: str = "waiting"
    """waiting, running, done or failed."""
    lease: str = ""
    """The name of its last lease: it is in the environment of the processes."""
    finished: float = 0.0
    leases: int = 0
    preemptions: int = 0
    failures: int = 0
    """In a row; a lease that ends as asked sets it to 0."""
    isolated_seconds: float = 0.0
    """The time that its steps so far would have taken on 1/n of the fleet, n being the jobs at each moment."""
    steps_counted: float = 0.0
    """The steps that `isolated_seconds` is of."""
    least_rounds: int = 1
    """The rounds that a lease lasts at least. It doubles whenever a lease ends before a step was saved."""


@dataclass(slots=True)
class LeaseRecord:
    """A lease of a real run. Times are seconds of the run."""

    job: str
    kind: str
    devices: str
    workers: tuple[int, ...]
    nodes: tuple[str, ...]
    """The node of each worker."""
    first_round: int
    start: float
    steps_before: int
    """The steps that were saved when it began."""
    begun: float | None = None
    """When its training made its first step."""
    asked: float | None = None
    """When its training was asked to save and leave."""
    stop: float | None = None
    """When its last process ended."""
    steps_after: int = 0
    """The steps that were saved when it ended."""


@dataclass(slots=True)
class RunState:
    """All jobs of a run, and the seconds that it has lasted, pauses of the executor left out."""

    jobs: dict[str, JobState]
    seconds: float = 0.0
    rounds: int = 0
    leases: list[LeaseRecord] = field(default_factory=list)
    nodes: dict[str, list[str]] = field(default_factory=dict)
    """The node of each worker by the name of the devices; empty where the worker is not there."""

    def absent(self) -> dict[str, set[int]]:
        """The workers that are not there, by the name of the devices; none before the first look."""
        found = self.nodes.items()
        return {devices: {worker for worker, node in enumerate(names) if not node} for devices, names in found}

    def there(self, kinds: Sequence[Kind]) -> list[int]:
        """How many workers of each of `kinds` are there."""
        absent = self.absent()
        return [kind.workers - len(absent.get(kind.devices, ())) for kind in kinds]

    def nodes_of(self, devices: str, workers: Sequence[int]) -> tuple[str, ...]:
        """The node of each of `workers`; empty for one that is not there."""
        names = dict(enumerate(self.nodes.get(devices, [])))
        return tuple(names.get(worker, "") for worker in workers)

    def held(self, now: float | None = None) -> list[Held]:
        """The leases that have ended; with `now`, those that go on as well, up to then."""
        stops = [(lease, now if lease.stop is None else lease.stop) for lease in self.leases]
        return [Held(a.job, a.devices, a.workers, a.start, stop) for a, stop in stops if stop is not None]

    def save(self, path: Path) -> None:
        """Replaces the file at once, so that a reader finds the old state or the new one."""
        beside = path.with_suffix(".new")
        with beside.open("w", encoding="utf-8") as file:
            json.dump({"format": _FORMAT, **asdict(self)}, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)

    @classmethod
    def load(cls, path: Path, jobs: Sequence[str]) -> "RunState":
        """The state of a run that was interrupted, or a new one. Raises `PlanError` if it is of other jobs."""
        if not path.exists():
            return cls({name: JobState() for name in jobs})
        place = read_json(path, PlanError)
        place.check_format(_FORMAT)
        found: dict[str, Any] = dict(place.value) if isinstance(place.value, dict) else {}
        if list(found["jobs"]) != list(jobs):
            raise PlanError(
                f"{path}: expected a run of the jobs {', '.join(jobs)}, found {', '.join(found['jobs'])}: give another "
                "directory, or the fleet file that this run began with"
            )
        states = {name: JobState(**row) for name, row in found["jobs"].items()}
        lists = ("workers", "nodes")
        leases = [LeaseRecord(**{**row, **{key: tuple(row[key]) for key in lists}}) for row in found["leases"]]
        return cls(states, found["seconds"], found["rounds"], leases, found["nodes"])


def number_workers(
    kinds: Sequence[Kind], before: Mapping[str, Sequence[str]], there: Mapping[str, Mapping[str, int]]
) -> dict[str, list[str]]:
    """The node of each worker, by the name of the devices; empty for a worker that is not there. Workers keep the nodes
    that they had `before`. `there`: how many devices each node has; it should be `workers_per_server` of the kind.
    """
    found = {}
    for kind in kinds:
        left = Counter(there.get(kind.devices, {}))
        names = [*before.get(kind.devices, ()), *[""] * kind.workers][: kind.workers]
        for worker, name in enumerate(names):
            left[name] -= 1
            if left[name] < 0:
                names[worker] = ""
        new = left.elements()
        found[kind.devices] = [name or next(new, "") for name in names]
    return found


def steps_done(checkpoints: Path) -> int:
    """The steps of the newest checkpoint in a directory that `Pipeline.save` writes to; 0 without one."""
    if not checkpoints.is_dir():
        return 0
    matches = (_STEP.fullmatch(entry.name) for entry in checkpoints.iterdir())
    return max((int(match[1]) for match in matches if match), default=0)
