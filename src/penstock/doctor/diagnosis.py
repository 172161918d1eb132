"""The diagnosis of a run that stands still: from evidence to a verdict, without any effect.

Ranks that wait point to those they wait for. The verdict names a rank at the end of such a chain, or one that is dead
or stopped. If several could be named, the reason that explains most comes first: a failure before a death, a death
before a stopped process, and that before a slow one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from penstock.doctor.conditions import Condition, Evidence, RankCondition, kind_of, user_frame
from penstock.doctor.records import RankRecord
from penstock.errors import counted
from penstock.timelines.spans import Span
from penstock.values.quantities import seconds_text

_PATIENCE_SECONDS = 2.0
"""Waits that are shorter are part of every run."""
_SLOW_FACTOR = 3.0
"""An action that takes this many times as long as usual is slow."""


class Verdict(StrEnum):
    """Why a run stands still."""

    HEALTHY = "healthy"
    FAILED = "failed"
    DEAD = "dead"
    STOPPED = "stopped"
    LEFT = "left"
    SILENT = "silent"
    SLOW = "slow"
    USER_CODE = "in the user's code"
    OUT_OF_STEP = "out of step"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class BlockedEdge:
    """The blocked edge: `target` waits for a message, a sum or anything else of `source`; both are processes."""

    source: int
    target: int
    action: str
    """The action in which `target` waits; empty if it waits outside of its program."""
    seconds: float | None

    def __str__(self) -> str:
        what = f"{Span(0, self.action, 0.0, 0.0).words} ({self.action})" if self.action else "it"
        since = f" for {seconds_text(self.seconds)}" if self.seconds is not None else ""
        return f"{self.source}->{self.target}: rank {self.target} waits{since} for rank {self.source}: {what}"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The verdict on a run, the rank to blame, the edge that is blocked, and what to do."""

    verdict: Verdict
    rank: int | None
    """The process to blame; None if there is none."""
    sentence: str
    """The verdict in one line."""
    advice: str
    edge: BlockedEdge | None
    conditions: tuple[RankCondition, ...]

    def __str__(self) -> str:
        return self.sentence


def diagnose(evidence: Evidence) -> Diagnosis:
    """Finds the rank to blame for a run that stands still."""
    conditions = evidence.conditions
    records = [process.record for process in evidence.processes]
    waiting = [one for one in conditions if one.condition is Condition.WAITING]
    for condition, verdict in _FATAL.items():
        found = [one for one in conditions if one.condition is condition]
        if condition is Condition.LEFT:
            found = [one for one in found if any(one.process in other.waits_for for other in waiting)]
        if found:
            return _conclude(evidence, verdict, _first(found, evidence))
    ended = [one for one in conditions if one.condition is Condition.ENDED]
    if ended:
        # One that was only informed of a failure says less.
        own = [one for one in ended if "stops too" not in one.words]
        return _conclude(evidence, Verdict.FAILED, _first(own or ended, evidence))
    roots = list(_roots(conditions))
    if max((one.seconds or 0.0 for one in waiting), default=0.0) < _PATIENCE_SECONDS:
        return _healthy(evidence)
    if not roots:
        return _out_of_step(evidence, waiting)
    root = roots[0]
    match root.condition:
        case Condition.UNKNOWN:
            return _conclude(evidence, Verdict.UNKNOWN, root)
        case Condition.OUTSIDE:
            if (root.seconds or 0.0) < _PATIENCE_SECONDS and _steps(records[root.process]) > 0:
                return _healthy(evidence)
            return _conclude(evidence, Verdict.USER_CODE, root)
        case _:
            if not _is_slow(root, records[root.process]):
                return _healthy(evidence)
            return _conclude(evidence, Verdict.SLOW, root)


_FATAL = {
    Condition.FAILED: Verdict.FAILED,
    Condition.DEAD: Verdict.DEAD,
    Condition.STOPPED: Verdict.STOPPED,
    Condition.LEFT: Verdict.LEFT,
    Condition.SILENT: Verdict.SILENT,
}
"""The conditions in which a rank never goes on by itself, the one that explains most first."""


def _first(found: list[RankCondition], evidence: Evidence) -> RankCondition:
    """The condition that began first, where that is known."""

    def age(one: RankCondition) -> float:
        process = evidence.processes[one.process]
        return process.age_seconds if process.record is not None else 0.0

    return max(found, key=lambda one: (age(one), -one.process))


def _roots(conditions: tuple[RankCondition, ...]) -> Iterator[RankCondition]:
    """The processes that do not wait, at the end of the chains of waits, from the longest wait on."""
    seen: set[int] = set()
    waiting = [one for one in conditions if one.condition is Condition.WAITING]
    pending = [one.process for one in sorted(waiting, key=lambda one: one.seconds or 0.0)]
    while pending:
        process = pending.pop()
        if process in seen or process >= len(conditions):
            continue
        seen.add(process)
        one = conditions[process]
        if one.condition is Condition.WAITING:
            pending += reversed(one.waits_for)
        else:
            yield one


def _blocked_edge(culprit: int, conditions: tuple[RankCondition, ...]) -> BlockedEdge | None:
    """The edge from `culprit` on which another process has waited longest."""
    direct = [one for one in conditions if one.condition is Condition.WAITING and culprit in one.waits_for]
    if not direct:
        return None
    # A sum or a loss is awaited of several ranks; a message comes from this one.
    one = max(direct, key=lambda one: (-len(one.waits_for), one.seconds or 0.0))
    return BlockedEdge(culprit, one.process, one.action, one.seconds)


def _steps(record: RankRecord | None) -> int:
    return record.steps if record is not None else 0


def _is_slow(root: RankCondition, record: RankRecord | None) -> bool:
    seconds = root.seconds or 0.0
    usual = record.usual.get(kind_of(root.action)) if record is not None and root.action else None
    return seconds > max(_PATIENCE_SECONDS, _SLOW_FACTOR * (usual or 0.0))


def _conclude(evidence: Evidence, verdict: Verdict, culprit: RankCondition) -> Diagnosis:
    record = evidence.processes[culprit.process].record
    sentence, advice = _words(evidence, verdict, culprit, record)
    frame = user_frame(record)
    if verdict in (Verdict.SLOW, Verdict.USER_CODE) and frame is not None:
        sentence += f"; it is at {frame}"
    edge = _blocked_edge(culprit.process, evidence.conditions)
    return Diagnosis(verdict, culprit.process, sentence, advice, edge, conditions=evidence.conditions)


def _words(evidence: Evidence, verdict: Verdict, culprit: RankCondition, record: RankRecord | None) -> tuple[str, str]:
    """The verdict in one line, and the advice."""
    rank = f"rank {culprit.process}"
    identity = evidence.processes[culprit.process].identity
    where = f"process {identity.pid} on {identity.host}"
    match verdict:
        case Verdict.FAILED:
            cause = culprit.words.partition("Diagnosis: ")[2]
            if culprit.condition is Condition.ENDED and cause:
                return f"the run has ended. {rank} found before: {cause}", "Start again when the cause is removed"
            return f"{rank} failed: {culprit.words}", "Correct that error; its log has the traceback"
        case Verdict.DEAD:
            return (
                f"{rank} is dead: {where}{culprit.words.removeprefix(f'no process {identity.pid}')}",
                "Look at its log, and at the kernel's (dmesg) for the out-of-memory killer",
            )
        case Verdict.STOPPED:
            return (
                f"{rank} is stopped (SIGSTOP, Ctrl-Z or a debugger): {where}"
                f"{culprit.words.removeprefix(f'process {identity.pid} is stopped')}",
                f"Continue it with `kill -CONT {identity.pid}` on {identity.host}",
            )
        case Verdict.LEFT:
            return f"{rank} left the training before the others", "Every rank must make the same calls: compare them"
        case Verdict.SILENT:
            return (
                f"{rank} runs, but its Python interpreter does not answer: {where}",
                "A call into a library holds Python's lock, or the process waits for a disk: its stacks are below if "
                f"it wrote any; `py-spy dump --native --pid {identity.pid}` shows more",
            )
        case Verdict.SLOW:
            return _slow_words(rank, culprit, record), "Its stack is below. Pipeline.stragglers() compares the ranks"
        case Verdict.USER_CODE:
            return _outside_words(rank, culprit, evidence), "Its stack is below: every rank must make the same calls"
        case _:
            return f"nothing is known of {rank}, {culprit.words}", "Run `penstock doctor` on its host as well"


def _slow_words(rank: str, culprit: RankCondition, record: RankRecord | None) -> str:
    usual = record.usual.get(kind_of(culprit.action)) if record is not None and culprit.action else None
    compared = f" (usually {seconds_text(usual)})" if usual is not None else ""
    action = f" ({culprit.action})" if culprit.action else ""
    lasts = seconds_text(culprit.seconds or 0.0)
    return f"{rank} is slow: {culprit.words}{action} has lasted {lasts}{compared}"


def _outside_words(rank: str, culprit: RankCondition, evidence: Evidence) -> str:
    made = _steps(evidence.processes[culprit.process].record)
    others = max(_steps(process.record) for process in evidence.processes)
    since = f"{rank} has been in the user's code, outside of the pipeline, for {seconds_text(culprit.seconds or 0.0)}"
    if others > made == 0:
        return f"{since}, and has never called step"
    if others > made:
        return f"{since}, after {counted(made, 'step')}; others are in step {others - 1}"
    return since


def _out_of_step(evidence: Evidence, waiting: list[RankCondition]) -> Diagnosis:
    """The verdict where all wait for each other, so that no rank is at the end of the chain."""
    records = {one.process: evidence.processes[one.process].record for one in waiting}
    calls = {process: record.call for process, record in records.items() if record is not None}
    parts = ", ".join(f"rank {one.process} {_where(records[one.process])}" for one in waiting[:4])
    different = len(set(calls.values())) > 1 or len({_steps(record) for record in records.values()}) > 1
    first = max(waiting, key=lambda one: one.seconds or 0.0)
    edge = _blocked_edge(first.waits_for[0], evidence.conditions) if first.waits_for else None
    sentence = f"all ranks wait for each other: {parts}"
    if different:
        return Diagnosis(
            Verdict.OUT_OF_STEP,
            min(waiting, key=lambda one: (_steps(records[one.process]), one.process)).process,
            f"the ranks are out of step, and {sentence}",
            "Every rank must make the same calls in the same order: compare their code",
            edge,
            conditions=evidence.conditions,
        )
    advice = "The link between the two ranks of the blocked edge may have failed"
    return Diagnosis(Verdict.UNKNOWN, None, sentence, advice, edge, conditions=evidence.conditions)


def _where(record: RankRecord | None) -> str:
    if record is None:
        return "nowhere known"
    return f"{record.call or 'outside of the pipeline'} ({record.segment or 'no step yet'})"


def _healthy(evidence: Evidence) -> Diagnosis:
    records = [process.record for process in evidence.processes if process.record is not None]
    steps = max((record.steps for record in records), default=0)
    return Diagnosis(
        Verdict.HEALTHY,
        None,
        f"nothing is blocked: no rank waits for longer than is usual (step {max(0, steps - 1)})",
        "Nothing need be done",
        None,
        conditions=evidence.conditions,
    )
