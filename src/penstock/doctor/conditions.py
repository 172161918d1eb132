"""The condition of each process of a run: dead, stopped, waiting, computing, or in the user's code.

Evidence is what can be seen of a process from outside: its last flight record, whether it has answered a request for
a new one, and what the operating system says of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from penstock.doctor.records import Frame, JobRecord, RankRecord, RowRecord
from penstock.process_states import ProcessIdentity, ProcessState
from penstock.scheduling.actions import Action, Receive, ReceiveNorms, ReceiveTied, Reduce, parse
from penstock.scheduling.lowering import peer
from penstock.scheduling.placements import Placement
from penstock.timelines.spans import Span


class Condition(StrEnum):
    """What a process does."""

    FAILED = "failed"
    """An error of its own ended its pipeline."""
    ENDED = "ended"
    """An error of another process ended its pipeline."""
    DEAD = "dead"
    STOPPED = "stopped"
    LEFT = "left"
    """It closed its pipeline, or its program ended."""
    SILENT = "silent"
    """It runs, and its interpreter does not answer."""
    COMPUTING = "computing"
    WAITING = "waiting"
    OUTSIDE = "outside"
    """It is outside of the pipeline, in the user's code."""
    UNKNOWN = "unknown"
    """Nothing is known of it."""


@dataclass(frozen=True, slots=True)
class ProcessEvidence:
    """Holds what can be seen of one process."""

    identity: ProcessIdentity
    state: ProcessState
    answered: bool
    """Whether `record` is its answer to the present request."""
    record: RankRecord | None
    age_seconds: float = 0.0
    """The age of the record."""
    stacks: str = ""
    """Stacks that it wrote at a signal, if its interpreter did not answer."""


@dataclass(frozen=True)
class Evidence:
    """Holds what can be seen of a run."""

    job: JobRecord
    processes: tuple[ProcessEvidence, ...]

    @cached_property
    def conditions(self) -> "tuple[RankCondition, ...]":
        """The condition of every process."""
        size = self.job.tensor_parallel
        return tuple(_condition(number, found, size) for number, found in enumerate(self.processes))


@dataclass(frozen=True, slots=True)
class RankCondition:
    """The condition of one process: what it does, in words, and for how many seconds; None if that is not known."""

    process: int
    condition: Condition
    words: str
    seconds: float | None = None
    waits_for: tuple[int, ...] = ()
    """The processes that it waits for."""
    action: str = ""
    """The action that it is in, if any."""


_LAYERS = ("F", "B", "I", "W")
"""Actions in which the layers of a stage run."""


def _current_action(record: RankRecord) -> tuple[RowRecord, str] | None:
    """The row of the rank that runs in this process, and the action that it has begun; None between actions."""
    if not record.call:
        return None
    return next(((row, row.program[row.done]) for row in record.rows if row.runs and row.done < len(row.program)), None)


def kind_of(action: str) -> str:
    """The stage and the kind of an action in text form: ``3F`` of ``3F0@1``."""
    digits = len(action) - len(action.lstrip("0123456789"))
    return action[: digits + 1]


def user_frame(record: RankRecord | None) -> Frame | None:
    """The innermost call in the user's own files, of the thread that trains; of any file if there is none."""
    if record is None:
        return None
    frames = [frame for thread in record.threads if thread.trains for frame in reversed(thread.frames)]
    return next((frame for frame in frames if not frame.library), frames[0] if frames else None)


def _condition(process: int, found: ProcessEvidence, size: int) -> RankCondition:
    """`size`: the processes of a rank."""
    record = found.record
    if record is not None and record.failure:
        caused = record.failure.startswith("TransportError")
        condition = Condition.ENDED if caused else Condition.FAILED
        return RankCondition(process, condition, record.failure, found.age_seconds + record.call_seconds)
    if record is not None and record.left:
        return RankCondition(process, Condition.LEFT, "closed its pipeline or ended", found.age_seconds)
    if found.state is ProcessState.GONE:
        return RankCondition(process, Condition.DEAD, f"no process {found.identity.pid}{_last_seen(found)}")
    if found.state is ProcessState.STOPPED:
        return RankCondition(process, Condition.STOPPED, f"process {found.identity.pid} is stopped{_last_seen(found)}")
    if record is None or not found.answered:
        if found.state is ProcessState.UNKNOWN:
            return RankCondition(process, Condition.UNKNOWN, f"on host {found.identity.host}{_last_seen(found)}")
        return RankCondition(process, Condition.SILENT, f"its interpreter does not answer{_last_seen(found)}")
    return _activity(process, record, size)


def _last_seen(found: ProcessEvidence) -> str:
    """Where the process was when it wrote its last record."""
    record = found.record
    if record is None:
        return ", no record"
    current = _current_action(record)
    doing = f"in {current[1]} of {record.segment}" if current else (record.call or "outside of the pipeline")
    return f", {found.age_seconds:.0f} s ago {doing}"


def _activity(process: int, record: RankRecord, size: int) -> RankCondition:
    current, wait = _current_action(record), record.wait
    action = current[1] if current else ""
    # While a layer computes, only another thread can wait: for a loss, say.
    if wait is not None and kind_of(action)[-1:] not in _LAYERS:
        seconds = max(wait.seconds, current[0].seconds) if current else wait.seconds
        words = Span(0, action, 0.0, 0.0).words if action and _awaited(action) else wait.context
        return RankCondition(process, Condition.WAITING, words, seconds, wait.processes, action=action)
    if current is not None:
        row = current[0]
        words, awaited = Span(row.rank, action, 0.0, 0.0).words, _awaited(action)
        if awaited is not None and len(record.rows) == 1:
            others = _peers(awaited, row.rank, Placement(record.stages, record.split))
            waits_for = tuple(rank * size + process % size for rank in others)
            return RankCondition(process, Condition.WAITING, words, row.seconds, waits_for, action=action)
        words = f"{words} of stage {parse(action).stage}"
        return RankCondition(process, Condition.COMPUTING, words, row.seconds, action=action)
    if record.call:
        return RankCondition(process, Condition.COMPUTING, record.call, record.call_seconds)
    return RankCondition(process, Condition.OUTSIDE, "outside of the pipeline", record.call_seconds)


def _awaited(action: str) -> Action | None:
    """The action if a rank waits for others in it."""
    parsed = parse(action)
    return parsed if isinstance(parsed, Receive | ReceiveTied | ReceiveNorms | Reduce) else None


def _peers(action: Action, rank: int, placement: Placement) -> Sequence[int]:
    """The ranks that an action of `rank` waits for."""
    if isinstance(action, Reduce):
        return [other for other in placement.stages[action.stage] if other != rank]
    if isinstance(action, Receive):
        return placement.ranks_for(action.source, action.microbatch)
    assert isinstance(action, ReceiveTied | ReceiveNorms)
    return [peer(action, rank, placement)]
