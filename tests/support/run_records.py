"""Flight records of invented runs, for tests of the diagnosis."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.doctor.conditions import Evidence, ProcessEvidence
from penstock.doctor.records import (
    ActionRecord,
    Frame,
    JobRecord,
    Memory,
    RankRecord,
    RowRecord,
    ThreadRecord,
    WaitRecord,
)
from penstock.process_states import ProcessIdentity, ProcessState
from penstock.scheduling.definitions import Step
from penstock.scheduling.schedules import Schedule

STACK = (
    Frame("/home/ada/train.py", 12, "main", "train(pipe)", False),
    Frame("/home/ada/train.py", 31, "forward", "x = self.slow(x)", False),
    Frame("/usr/lib/python3/json.py", 7, "load", "", True),
)


def record_of(
    schedule: Schedule, rank: int, done: int, *, steps: int = 3, seconds: float = 30.0, **changes: Any
) -> RankRecord:
    """The record of `rank`, which has done the first `done` actions of its last step and is in the next one."""
    program = tuple(str(action) for action in schedule.row(rank, Step(max(0, steps - 1))))
    row = RowRecord(rank, program, done, runs=done < len(program), seconds=seconds)
    known = RankRecord(
        job="job",
        process=rank,
        identity=ProcessIdentity("host", "machine", 100 + rank, 1),
        written_unix=1000.0,
        request="word",
        failure="",
        left=False,
        call="in a step",
        call_seconds=seconds + 1,
        steps=steps,
        segment=f"step {steps - 1}" if steps else "",
        stages=schedule.placement.stages,
        split=schedule.placement.split,
        rows=(row,) if steps else (),
        last=(ActionRecord(program[0], seconds + 1, 0.5),) if done else (),
        usual={f"{stage}{kind}": 0.5 for stage in range(schedule.stages) for kind in "FB"},
        wait=None,
        memory=Memory(host_bytes=10**9),
        threads=(ThreadRecord("MainThread", True, STACK),),
    )
    return replace(known, **changes)


def evidence_of(schedule: Schedule, records: Sequence[RankRecord]) -> Evidence:
    """The evidence of processes that run and have answered."""
    processes = tuple(
        ProcessEvidence(record.identity, ProcessState.RUNNING, answered=True, record=record) for record in records
    )
    identities = tuple(record.identity for record in records)
    return Evidence(JobRecord("job", schedule.name, len(records), 1, plan="", processes=identities), processes)


def with_process(evidence: Evidence, process: int, **changes: Any) -> Evidence:
    """`evidence` with other facts on one process."""
    processes = list(evidence.processes)
    processes[process] = replace(processes[process], **changes)
    return Evidence(evidence.job, tuple(processes))


def waiting_for(record: RankRecord, processes: tuple[int, ...], seconds: float = 30.0) -> RankRecord:
    """`record` outside of its program, waiting for `processes`."""
    return replace(record, wait=WaitRecord("reports", processes, seconds))
