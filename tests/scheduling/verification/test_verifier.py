"""The verifier: each law broken once on purpose, and caught with the row that breaks it.

That nothing wrong passes is the business of `test_verified_programs`.
"""

from collections.abc import Iterator
from dataclasses import replace

from penstock.scheduling.actions import Backward, Compute, Forward, Update
from penstock.scheduling.definitions import Drain, PipelineShape, Segment, Step
from penstock.scheduling.orders import PIPEDREAM
from penstock.scheduling.schedules import Schedule
from penstock.scheduling.verification.verifier import Verification, verify, verify_programs
from support.broken_programs import change, complaint, promising

FLUSH = Schedule("1f1b-flush", 2, 2)
# rank 0: 0F0@0 0S0>1 0F1@0 0S1>1 0R0<1 0B0@0 0R1<1 0B1@0 0U1<0
# rank 1: 1R0<0 1F0@0 1B0@0 1S0>0 1R1<0 1F1@0 1B1@0 1S1>0 1U1<0
STASH = Schedule("pipedream", 2, 1)


def test_deadlock_shows_every_rank_that_waits() -> None:
    programs = change(
        STASH,
        3,
        "0F2@1 0S2>1 0R1<1 0B1@0 0U2<0 -> 0F2@1 0R1<1 0B1@0 0U2<0 0S2>1; "
        "1R1<0 1F1@1 1B1@1 1S1>0 1U2<1 1R2<0 -> 1R1<0 1R2<0 1F1@1 1B1@1 1S1>0 1U2<1",
    )

    assert complaint(lambda: verify_programs(programs, STASH, 3)) == [
        "schedule 'pipedream' violates an invariant: no rank waits forever, when receives block and sends do not",
        "  rank 0: ... 0S0>1 0F1@0 0S1>1 0R0<1 0B0@0 0U1<0 0F2@1 >>0R1<1<< 0B1@0 0U2<0 0S2>1 0R2<1 0B2@1 0U3<1",
        "  rank 1: 1R0<0 1F0@0 1B0@0 1S0>0 1U1<0 1R1<0 >>1R2<0<< 1F1@1 1B1@1 1S1>0 1U2<1 1F2@2 1B2@2 1S2>0 ...",
        "  found: rank 0 waits for rank 1, rank 1 waits for rank 0",
        "  fix: send before the receive that waits for the answer",
    ]


def lag(shape: PipelineShape, rank: int, part: Segment) -> Iterator[Compute]:
    """An order of two ranks that is right as a whole, but whose rank 1 puts each backward off to the next step."""
    match part:
        case Step(minibatch):
            if rank == 1 and minibatch:
                yield Backward(1, minibatch - 1, minibatch - 1)
                yield Update(1, minibatch, minibatch - 1)
            yield Forward(rank, minibatch, minibatch)
            if rank == 0:
                yield Backward(0, minibatch, minibatch)
                yield Update(0, minibatch + 1, minibatch)
        case Drain(minibatches):
            if rank == 1:
                yield Backward(1, minibatches - 1, minibatches - 1)
                yield Update(1, minibatches, minibatches - 1)


def procrastinate(shape: PipelineShape, rank: int, part: Segment) -> Iterator[Compute]:
    """1F1B, all of it in the drain."""
    if isinstance(part, Drain):
        for minibatch in range(part.minibatches):
            yield from PIPEDREAM.order(shape, rank, Step(minibatch))  # type: ignore[misc]
        yield from PIPEDREAM.order(shape, rank, part)  # type: ignore[misc]


def test_a_step_must_not_wait_for_the_next() -> None:
    schedule = Schedule(replace(PIPEDREAM, name="lagging", order=lag), 2, 1)

    assert verify_programs(schedule.program(3), schedule, 3).in_flight == (1, 1)
    assert complaint(lambda: verify(schedule, 3)) == [
        "schedule 'lagging' violates an invariant: no rank waits forever within step(0), when receives block and sends "
        "do not",
        "  rank 0: 0F0@0 0S0>1 >>0R0<1<< 0B0@0 0U1<0 0F1@1 0S1>1 0R1<1 0B1@1 0U2<1 ...",
        "  found: rank 0 waits for rank 1",
        "  fix: send before the receive that waits for the answer, and in the same step or an earlier one",
    ]


def test_a_step_carries_its_own_minibatch() -> None:
    idle = Schedule(replace(PIPEDREAM, name="idle", order=procrastinate), 2, 1)

    assert complaint(lambda: verify(idle, 3)) == [
        "schedule 'idle' violates an invariant: a step carries the forwards and offloads of its own minibatch, and a "
        "drain none",
        "  rank 0: >>0F0@0<< 0S0>1 0F1@0 0S1>1 0R0<1 0B0@0 0U1<0 0F2@1 ...",
        "  expected: in drain(3) no such action",
        "  fix: yield it in the step that it belongs to",
    ]
    assert complaint(lambda: verify(promising(STASH, flushes=True), 3)) == [
        "schedule 'pipedream' violates an invariant: a step carries the actions of its own minibatch, and a drain none",
        "  rank 0: 0F0@0 0S0>1 0F1@0 0S1>1 >>0R0<1<< 0B0@0 0U1<0 0F2@1 0S2>1 0R1<1 0B1@0 0U2<0 ...",
        "  expected: in step(1) only microbatches 1 to 1",
        "  fix: yield it in the step that it belongs to",
    ]


def test_what_cannot_be_verified() -> None:
    assert complaint(lambda: verify_programs(FLUSH.program(1)[:1], FLUSH, 1)) == [
        "schedule '1f1b-flush': expected one row of actions for each of its 2 ranks, found 1 rows; give an empty row "
        "to a rank that has nothing to do"
    ]
    assert complaint(lambda: verify(FLUSH, 0)) == [
        "verify(minibatches=): expected a whole number, 1 or more, found 0: give 1 or more, since there is "
        "nothing to prove in none"
    ]


def test_what_is_proved() -> None:
    verification = verify(STASH, 3)

    assert verification == Verification("pipedream", 3, 30, (2, 1), (2, 1), (2, 1), (0, 0))
    assert str(verification) == (
        "pipedream: every invariant holds for 30 actions in 3 minibatches; per stage at most 2 1 in flight; weight "
        "versions: 2 1"
    )
    assert verify_programs(STASH.program(3), STASH, 3) == verification
