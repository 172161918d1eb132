"""The state of a real run, in a file that is always whole: what each job has done, and what it holds."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import PlanError
from penstock.values.documents import read_json

_FORMAT = "penstock-fleet-run/2"
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
    least_rounds: int = 1
    """The rounds that a lease lasts at least. It doubles whenever a lease ends before a step was saved."""


@dataclass(slots=True)
class LeaseRecord:
    """A lease of a real run. Times are seconds of the run."""

    job: str
    kind: str
    devices: str
    workers: tuple[int, ...]
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
        leases = [LeaseRecord(**{**row, "workers": tuple(row["workers"])}) for row in found["leases"]]
        return cls(states, found["seconds"], found["rounds"], leases)


def steps_done(checkpoints: Path) -> int:
    """The steps of the newest checkpoint in a directory that `Pipeline.save` writes to; 0 without one."""
    if not checkpoints.is_dir():
        return 0
    matches = (_STEP.fullmatch(entry.name) for entry in checkpoints.iterdir())
    return max((int(match[1]) for match in matches if match), default=0)
