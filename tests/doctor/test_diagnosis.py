"""The rank to blame, in invented runs: of every verdict a case, and of cases that are easily confused."""

from dataclasses import replace
from typing import Any

import pytest

from penstock.doctor.conditions import Condition, Evidence
from penstock.doctor.diagnosis import BlockedEdge, Verdict, diagnose
from penstock.process_states import ProcessState
from penstock.scheduling.definitions import Step
from penstock.scheduling.placements import Placement
from penstock.scheduling.schedules import Schedule
from support.run_records import evidence_of, record_of, waiting_for, with_process

FLUSH = Schedule("1f1b-flush", ranks=3, microbatches=4)


def index_of(schedule: Schedule, rank: int, action: str, step: int = 2) -> int:
    return [str(one) for one in schedule.row(rank, Step(step))].index(action)


def stuck(**changes: Any) -> Evidence:
    """Rank 1 is in its forward of microbatch 8; rank 2 waits for it, and rank 0 for its first gradient."""
    return evidence_of(
        FLUSH,
        [
            record_of(FLUSH, 0, index_of(FLUSH, 0, "0R8<1")),
            record_of(FLUSH, 1, index_of(FLUSH, 1, "1F8@2"), **changes),
            record_of(FLUSH, 2, index_of(FLUSH, 2, "2R8<1"), seconds=29.0),
        ],
    )


def test_a_slow_rank_is_at_the_end_of_the_chain_of_waits() -> None:
    found = diagnose(stuck())

    assert (found.verdict, found.rank) == (Verdict.SLOW, 1)
    assert found.edge == BlockedEdge(1, 0, "0R8<1", 30.0)
    assert found.sentence == (
        "rank 1 is slow: forward 8 of stage 1 (1F8@2) has lasted 30 s (usually 500 ms); it is at "
        "/home/ada/train.py:31 in forward: x = self.slow(x)"
    )
    assert [one.condition for one in found.conditions] == [Condition.WAITING, Condition.COMPUTING, Condition.WAITING]


def test_a_wait_for_an_action_of_usual_length_is_healthy() -> None:
    usual = {"1F": 20.0}

    assert diagnose(stuck(usual=usual)).verdict is Verdict.HEALTHY
    assert diagnose(stuck(usual={"1F": 9.0})).verdict is Verdict.SLOW


@pytest.mark.parametrize(
    ("state", "verdict", "words"),
    [
        (ProcessState.STOPPED, Verdict.STOPPED, "rank 1 is stopped (SIGSTOP, Ctrl-Z or a debugger): process 101"),
        (ProcessState.GONE, Verdict.DEAD, "rank 1 is dead: process 101 on host, 4 s ago in 1F8@2 of step 2"),
        (ProcessState.RUNNING, Verdict.SILENT, "rank 1 runs, but its Python interpreter does not answer"),
        (ProcessState.UNKNOWN, Verdict.UNKNOWN, "nothing is known of rank 1"),
    ],
)
def test_a_process_that_does_not_answer(state: ProcessState, verdict: Verdict, words: str) -> None:
    found = diagnose(with_process(stuck(), 1, state=state, answered=False, age_seconds=4.0))

    assert (found.verdict, found.rank) == (verdict, 1)
    assert found.sentence.startswith(words)
    assert found.edge == BlockedEdge(1, 0, "0R8<1", 30.0)


def test_a_death_is_blamed_before_a_stopped_process_and_that_before_a_slow_one() -> None:
    stopped = with_process(stuck(), 2, state=ProcessState.STOPPED, answered=False)
    dead = with_process(stopped, 0, state=ProcessState.GONE, answered=False)

    assert (diagnose(stopped).verdict, diagnose(stopped).rank) == (Verdict.STOPPED, 2)
    assert (diagnose(dead).verdict, diagnose(dead).rank) == (Verdict.DEAD, 0)


def test_a_rank_in_the_users_code() -> None:
    outside: dict[str, Any] = {"call": "", "call_seconds": 40.0, "steps": 2}
    found = diagnose(stuck(**outside))

    assert (found.verdict, found.rank) == (Verdict.USER_CODE, 1)
    assert found.sentence.startswith(
        "rank 1 has been in the user's code, outside of the pipeline, for 40 s, after 2 steps; others are in step 2; it"
    )
    assert diagnose(stuck(**{**outside, "call_seconds": 0.5})).verdict is Verdict.HEALTHY


def test_a_rank_that_never_called_step() -> None:
    found = diagnose(stuck(call="", call_seconds=0.5, steps=0, segment="", rows=(), stages=()))

    assert (found.verdict, found.rank) == (Verdict.USER_CODE, 1)
    assert "and has never called step" in found.sentence


def test_ranks_that_make_different_calls_are_out_of_step() -> None:
    first, _, _ = (process.record for process in stuck().processes)
    assert first is not None
    second = replace(waiting_for(record_of(FLUSH, 1, 0, steps=2), (0,)), call="in an evaluation", segment="evaluation")
    found = diagnose(evidence_of(FLUSH, [first, replace(second, rows=())]))

    assert (found.verdict, found.rank) == (Verdict.OUT_OF_STEP, 1)
    assert "rank 0 in a step (step 2), rank 1 in an evaluation (evaluation)" in found.sentence


def test_ranks_in_one_step_that_wait_for_each_other_blame_no_rank() -> None:
    records = [waiting_for(record_of(FLUSH, rank, 0, rows=()), (1 - rank,)) for rank in (0, 1)]
    found = diagnose(evidence_of(FLUSH, records))

    assert (found.verdict, found.rank) == (Verdict.UNKNOWN, None)
    assert found.edge is not None


def test_a_failure_is_blamed_before_those_that_it_ended() -> None:
    informed = "TransportError in a step: rank 1 failed in a step, so rank 0 stops too"
    records = [process.record for process in stuck(failure="ValueError in a step: it is broken").processes]
    ended = evidence_of(FLUSH, [replace(records[0], failure=informed), *records[1:]])  # type: ignore[type-var, list-item]

    assert diagnose(ended).sentence == "rank 1 failed: ValueError in a step: it is broken"
    assert diagnose(ended).rank == 1


def test_a_run_that_a_timeout_has_ended_keeps_its_diagnosis() -> None:
    late = "TransportError in a step: nothing came from rank 1. Diagnosis: rank 1 is stopped"
    found = diagnose(stuck(failure=late))

    assert found.verdict is Verdict.FAILED
    assert found.sentence == "the run has ended. rank 1 found before: rank 1 is stopped"


def test_a_rank_that_left_is_blamed_only_if_it_is_missed() -> None:
    assert diagnose(stuck(left=True)).verdict is Verdict.LEFT
    records = [record_of(FLUSH, rank, 0, call="", left=True) for rank in range(3)]
    assert diagnose(evidence_of(FLUSH, records)).verdict is Verdict.HEALTHY


def test_a_sum_waits_for_the_other_replicas() -> None:
    schedule = Schedule.placed("1f1b-flush", Placement(((0, 1, 2),)), 3)
    sums = [index_of(schedule, rank, "0A3") for rank in range(3)]
    records = [record_of(schedule, rank, done if rank != 1 else 0) for rank, done in enumerate(sums)]
    found = diagnose(evidence_of(schedule, records))

    assert (found.verdict, found.rank) == (Verdict.SLOW, 1)
    assert found.conditions[0].waits_for == (1, 2)
    assert found.edge is not None
    assert found.edge.source == 1


def test_microbatches_in_turn_are_awaited_of_the_replica_that_has_them() -> None:
    schedule = Schedule.placed("1f1b-flush", Placement(((0, 1), (2,))), 4)
    row = [str(one) for one in schedule.row(2, Step(2))]
    records = [record_of(schedule, 0, 0), record_of(schedule, 1, 0), record_of(schedule, 2, row.index("1R9<0"))]

    assert evidence_of(schedule, records).conditions[2].waits_for == (1,)


def test_processes_of_a_tensor_parallel_rank_wait_for_their_own_peers() -> None:
    schedule = Schedule("1f1b-flush", ranks=2, microbatches=2)
    records = [record_of(schedule, rank, 0 if rank == 0 else index_of(schedule, 1, "1R4<0")) for rank in (0, 0, 1, 1)]
    records = [replace(record, process=process) for process, record in enumerate(records)]
    evidence = evidence_of(schedule, records)
    found = Evidence(replace(evidence.job, tensor_parallel=2), evidence.processes)

    assert [one.waits_for for one in found.conditions] == [(), (), (0,), (1,)]


def test_a_wait_of_another_thread_while_a_layer_computes_is_no_wait_of_the_rank() -> None:
    waiting = waiting_for(record_of(FLUSH, 1, index_of(FLUSH, 1, "1F8@2")), (2,))
    evidence = stuck(wait=waiting.wait)

    assert (diagnose(evidence).verdict, diagnose(evidence).rank) == (Verdict.SLOW, 1)


def test_a_wait_outside_of_the_program_is_the_transports() -> None:
    # A loss is read between two steps.
    records = [
        waiting_for(record_of(FLUSH, 0, 0, call="", rows=()), (2,)),
        record_of(FLUSH, 1, 0, call="", rows=(), call_seconds=1.0),
        record_of(FLUSH, 2, index_of(FLUSH, 2, "2F8@2")),
    ]
    found = diagnose(evidence_of(FLUSH, records))

    assert (found.verdict, found.rank) == (Verdict.SLOW, 2)
    assert found.edge == BlockedEdge(2, 0, "", 30.0)
