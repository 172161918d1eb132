"""The state of a real run, in a file that is always whole: what each job has done, and what it holds."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import PlanError
from penstock.fleet.histories import Held
from penstock.values.documents import read_json

__all__ = ["JobState", "RunState", "steps_done"]

_FORMAT = "penstock-fleet-run/1"
_STEP = re.compile(r"step-(\d+)")


@dataclass(slots=True)
class JobState:
    """What is known of a job."""

    status: str = "waiting"
    """waiting, running, done or failed."""
    lease: str = ""
    """The name of its last lease: it is in the environment of the processes."""
    kind: str = ""
    workers: tuple[int, ...] = ()
    started: float = 0.0
    """When its last lease began, in seconds of the run."""
    finished: float = 0.0
    leases: int = 0
    preemptions: int = 0
    failures: int = 0
    """In a row; a lease that ends as asked sets it to 0."""
    busy_seconds: float = 0.0


@dataclass(slots=True)
class RunState:
    """All jobs of a run, and the seconds that it has lasted, pauses of the executor left out."""

    jobs: dict[str, JobState]
    seconds: float = 0.0
    rounds: int = 0
    held: list[Held] = field(default_factory=list)

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
        states = {name: JobState(**{**row, "workers": tuple(row["workers"])}) for name, row in found["jobs"].items()}
        held = [Held(**{**row, "workers": tuple(row["workers"])}) for row in found["held"]]
        return cls(states, found["seconds"], found["rounds"], held)


def steps_done(checkpoints: Path) -> int:
    """The steps of the newest checkpoint in a directory that `Pipeline.save` writes to; 0 without one."""
    if not checkpoints.is_dir():
        return 0
    matches = (_STEP.fullmatch(entry.name) for entry in checkpoints.iterdir())
    return max((int(match[1]) for match in matches if match), default=0)
