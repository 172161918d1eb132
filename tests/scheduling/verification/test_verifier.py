"""The verifier: each law broken once on purpose, and caught with the row that breaks it.

That nothing wrong passes is the business of `test_verified_programs`.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from penstock.scheduling.actions import (
    Backward,
    Compute,
    Forward,
    Update,
)
from penstock.scheduling.definitions import Drain, PipelineShape, Segment, Step
from penstock.scheduling.orders import PIPEDREAM
from penstock.scheduling.schedules import Schedule, inference
from penstock.scheduling.verification.verifier import Verification, verify, verify_programs
from support.broken_programs import assert_broken, change, complaint, promising

FLUSH = Schedule("1f1b-flush", 2, 2)
# rank 0: 0F0@0 0S0>1 0F1@0 0S1>1 0R0<1 0B0@0 0R1<1 0B1@0 0U1<0
# rank 1: 1R0<0 1F0@0 1B0@0 1S0>0 1R1<0 1F1@0 1B1@0 1S1>0 1U1<0
STASH = Schedule("pipedream", 2, 1)
# 3 minibatches:
# rank 0: 0F0@0 0S0>1 0F1@0 0S1>1 0R0<1 0B0@0 0U1<0 0F2@1 0S2>1 0R1<1 0B1@0 0U2<0 0R2<1 0B2@1 0U3<1
# rank 1: 1R0<0 1F0@0 1B0@0 1S0>0 1U1<0 1R1<0 1F1@1 1B1@1 1S1>0 1U2<1 1R2<0 1F2@2 1B2@2 1S2>0 1U3<2
SYNC = Schedule("pipedream", 2, 1, vertical_sync=True)
TWO_BW = Schedule("2bw", 2, 2)
ALONE = Schedule("interleaved", 1, 1, 2)
# rank 0: 0F0@0 1F0@0 1B0@0 0B0@0 0U1<0 1U1<0
INFERENCE = inference(2, 1, 2)
# rank 0: 0F0@0 0S0>1 0F1@0 0S1>1
# rank 1: 1R0<0 1F0@0 1R1<0 1F1@0


LAWS = {
    "place": (
        (FLUSH, 1, ("0F1@0 ", "1F1@0 ")),
        "an action is of a stage of its rank and of a microbatch of the program",
        "rank 0: 0F0@0 0S0>1 >>1F1@0<< 0S1>1 0R0<1 0B0@0 0R1<1 0B1@0 0U1<0",
        "stages [0] on rank 0",
        "move the action",
    ),
    "microbatch": (
        (FLUSH, 1, ("0U1<0", "0F2@0 0U1<0")),
        "an action is of a stage of its rank and of a microbatch of the program",
        "rank 0: ... 0S0>1 0F1@0 0S1>1 0R0<1 0B0@0 0R1<1 0B1@0 >>0F2@0<< 0U1<0",
        "microbatches 0 to 1",
        "drop the action, or verify more minibatches",
    ),
    "forward twice": (
        (FLUSH, 1, ("1F1@0", "1F1@0 1F1@0")),
        "each microbatch goes forward and backward exactly once on each stage",
        "rank 1: 1R0<0 1F0@0 1B0@0 1S0>0 1R1<0 1F1@0 >>1F1@0<< 1B1@0 1S1>0 1U1<0",
        "a microbatch that is not done yet",
        "drop the second one",
    ),
    "backward twice": (
        (FLUSH, 1, ("1B0@0", "1B0@0 1B0@0")),
        "each microbatch goes forward and backward exactly once on each stage",
        "rank 1: 1R0<0 1F0@0 1B0@0 >>1B0@0<< 1S0>0 1R1<0 1F1@0 1B1@0 1S1>0 1U1<0",
        "a microbatch that is not done yet",
        "drop the second one",
    ),
    "forward missing": (
        (FLUSH, 1, ("1F1@0 ", ""), ("1B1@0 ", "")),
        "each microbatch goes forward and backward exactly once on each stage",
        "rank 1: 1R0<0 1F0@0 1B0@0 1S0>0 1R1<0 1S1>0 1U1<0 >>end<<",
        "a forward of microbatch 1 on stage 1 before the end",
        "add it, or verify fewer minibatches",
    ),
    "leak": (
        (STASH, 3, ("0R2<1 0B2@1 0U3<1", ""), ("1S2>0 ", "")),
        "nothing is in flight after the drain: every forward had its backward",
        "rank 0: 0F0@0 0S0>1 0F1@0 0S1>1 0R0<1 0B0@0 0U1<0 >>0F2@1<< 0S2>1 0R1<1 0B1@0 0U2<0",
        "a backward of microbatch 2 on stage 0 before the end",
        "let the step or the drain yield it",
    ),
    "order of backwards": (
        (FLUSH, 1, ("0R0<1 0B0@0 0R1<1 0B1@0", "0R1<1 0B1@0 0R0<1 0B0@0")),
        "a stage takes its microbatches in ascending order, so that all schedules sum gradients alike",
        "rank 0: 0F0@0 0S0>1 0F1@0 0S1>1 0R1<1 >>0B1@0<< 0R0<1 0B0@0 0U1<0",
        "microbatch 0 first",
        "put 0 before 1",
    ),
    "order of forwards": (
        (FLUSH, 1, ("0F0@0 0S0>1 0F1@0 0S1>1", "0F1@0 0S1>1 0F0@0 0S0>1")),
        "a stage takes its microbatches in ascending order, so that all schedules sum gradients alike",
        "rank 0: >>0F1@0<< 0S1>1 0F0@0 0S0>1 0R0<1 0B0@0 0R1<1 0B1@0 ...",
        "microbatch 0 first",
        "put 0 before 1",
    ),
    "stash": (
        (STASH, 3, ("0B1@0 ", "0B1@1 ")),
        "a backward reads the version that its forward read",
        "rank 0: ... 0S1>1 0R0<1 0B0@0 0U1<0 0F2@1 0S2>1 0R1<1 >>0B1@1<< 0U2<0 0R2<1 0B2@1 0U3<1",
        "version 0, which 0F1@0 read",
        "give both the same version",
    ),
    "version of a flush": (
        (FLUSH, 2, ("0F2@1 ", "0F2@0 "), ("0B2@1 ", "0B2@0 ")),
        "a forward reads the version made by the updates of all earlier minibatches",
        "rank 0: ... 0F1@0 0S1>1 0R0<1 0B0@0 0R1<1 0B1@0 0U1<0 >>0F2@0<< 0S2>1 0F3@1 0S3>1 0R2<1 0B2@0 0R3<1 0B3@1 ...",
        "version 1 for microbatch 2 on stage 0",
        "read version 1",
    ),
    "version of 2bw, too fresh on the last stage": (
        (TWO_BW, 3, ("1F4@1 ", "1F4@2 "), ("1B4@1 ", "1B4@2 ")),
        "a forward reads the version made by the updates of all earlier minibatches but one",
        "rank 1: ... 1S2>0 1R3<0 1F3@0 1B3@0 1S3>0 1U2<0 1R4<0 >>1F4@2<< 1B4@2 1S4>0 1R5<0 1F5@1 1B5@1 1S5>0 1U3<1",
        "version 1 for microbatch 4 on stage 1",
        "read version 1",
    ),
    "version of pipedream": (
        (STASH, 3, ("0F2@1 ", "0F2@0 "), ("0B2@1 ", "0B2@0 ")),
        "a forward reads the newest version of its stage at that moment",
        "rank 0: 0F0@0 0S0>1 0F1@0 0S1>1 0R0<1 0B0@0 0U1<0 >>0F2@0<< 0S2>1 0R1<1 0B1@0 0U2<0 0R2<1 0B2@0 0U3<1",
        "version 1 for microbatch 2 on stage 0",
        "read version 1",
    ),
    "version of vertical sync": (
        (SYNC, 3, ("1F2@1 ", "1F2@2 "), ("1B2@1 ", "1B2@2 ")),
        "a forward reads the version that the input stage read for this microbatch",
        "rank 1: ... 1U1<0 1R1<0 1F1@0 1B1@0 1S1>0 1U2<0 1R2<0 >>1F2@2<< 1B2@2 1S2>0 1U3<1",
        "version 1 for microbatch 2 on stage 1",
        "read version 1",
    ),
    "version of an inference": (
        (INFERENCE, 1, ("1F1@0", "1F1@1")),
        "a forward reads version 0, since nothing is trained",
        "rank 1: 1R0<0 1F0@0 1R1<0 >>1F1@1<<",
        "version 0 for microbatch 1 on stage 1",
        "read version 0",
    ),
    "version that is not there yet": (
        (FLUSH, 2, ("0U1<0 ", ""), ("0F3@1 0S3>1", "0F3@1 0S3>1 0U1<0")),
        "a forward reads the version made by the updates of all earlier minibatches",
        "rank 0: ... 0S0>1 0F1@0 0S1>1 0R0<1 0B0@0 0R1<1 0B1@0 >>0F2@1<< 0S2>1 0F3@1 0S3>1 0U1<0 0R2<1 0B2@1 0R3<1 ...",
        "a version that exists: stage 0 has made only 0 by then",
        "put the update before the forward, or the forward later",
    ),
    "training in an inference": (
        (INFERENCE, 1, ("1F1@0", "1F1@0 1B1@0")),
        "an inference has forwards only",
        "rank 1: 1R0<0 1F0@0 1R1<0 1F1@0 >>1B1@0<<",
        "no backward and no update",
        "drop it, or train",
    ),
    "update that skips a version": (
        (STASH, 3, ("0U2<0", "0U3<0")),
        "an update makes the next version from all backwards of its microbatches, and they read one version",
        "rank 0: ... 0R0<1 0B0@0 0U1<0 0F2@1 0S2>1 0R1<1 0B1@0 >>0U3<0<< 0R2<1 0B2@1 0U3<1",
        "version 2, the next of stage 0",
        "make version 2",
    ),
    "update too early": (
        (FLUSH, 1, ("1B1@0 1S1>0 1U1<0", "1U1<0 1B1@0 1S1>0")),
        "an update makes the next version from all backwards of its microbatches, and they read one version",
        "rank 1: 1R0<0 1F0@0 1B0@0 1S0>0 1R1<0 1F1@0 >>1U1<0<< 1B1@0 1S1>0",
        "2 backwards of stage 1 for it, found 1",
        "move the update",
    ),
    "update from gradients of another version": (
        (STASH, 3, ("0U3<1", "0U3<0")),
        "an update makes the next version from all backwards of its microbatches, and they read one version",
        "rank 0: ... 0F2@1 0S2>1 0R1<1 0B1@0 0U2<0 0R2<1 0B2@1 >>0U3<0<<",
        "gradients at version 1",
        "name the version the backwards read",
    ),
    "update missing": (
        (STASH, 3, (" 1U3<2", "")),
        "an update makes the next version from all backwards of its microbatches, and they read one version",
        "rank 1: ... 1B1@1 1S1>0 1U2<1 1R2<0 1F2@2 1B2@2 1S2>0 >>end<<",
        "an update of stage 1 after its last backward",
        "yield the update after the last backward",
    ),
    "slot overwritten": (
        (promising(STASH, versions=(1, 1)), 3),
        "no version is overwritten while it is needed: stage 0 keeps 1",
        "rank 0: ... 0S1>1 0R0<1 0B0@0 0U1<0 0F2@1 0S2>1 0R1<1 >>0B1@0<< 0U2<0 0R2<1 0B2@1 0U3<1",
        "version 1 or newer: 0 gave its slot to 1",
        "update later, or guarantee more versions",
    ),
    "in flight": (
        (FLUSH, 1, ("1B0@0 1S0>0 1R1<0 1F1@0", "1R1<0 1F1@0 1B0@0 1S0>0")),
        "activations in flight stay within the guarantee: at most 1 on stage 1",
        "rank 1: 1R0<0 1F0@0 1R1<0 >>1F1@0<< 1B0@0 1S0>0 1B1@0 1S1>0 1U1<0",
        "a backward first: 1 in flight already",
        "run a backward first, or guarantee more",
    ),
    "pending updates": (
        (promising(Schedule("2bw", 2, 2, norms=True), pending_updates=(1, 2)), 3),
        "pending updates stay within the guarantee: at most 1 on stage 0",
        "rank 0: ... 0S2>1 0R1<1 0B1@0 0N1<1 0F3@0 0S3>1 0R2<1 >>0B2@0<< 0N1>1 0U1<0 0F4@1 0S4>1 0R3<1 0B3@0 0N2<1 ...",
        "the update of stage 0 to version 1 first",
        "update first, or guarantee more",
    ),
    "message over a stage": (
        (Schedule("1f1b-flush", 3, 2), 1, ("0S0>1", "0S0>2")),
        "messages pass only between neighbors or stages that share weights or a skip, on different ranks",
        "rank 0: 0F0@0 >>0S0>2<< 0F1@0 0S1>1 0R0<1 0B0@0 0R1<1 0B1@0 0U1<0",
        "a neighbor of stage 0 on another rank",
        "let lower() derive the messages",
    ),
    "message to oneself": (
        (ALONE, 1, ("1F0@0", "1R0<0 1F0@0")),
        "messages pass only between neighbors or stages that share weights or a skip, on different ranks",
        "rank 0: 0F0@0 >>1R0<0<< 1F0@0 1B0@0 0B0@0 0U1<0 1U1<0",
        "a neighbor of stage 1 on another rank",
        "let lower() derive the messages",
    ),
    "message never received": (
        (FLUSH, 1, (" 1R1<0", "")),
        "every message is sent once and received once; none is left over after the drain",
        "rank 0: 0F0@0 0S0>1 0F1@0 >>0S1>1<< 0R0<1 0B0@0 0R1<1 0B1@0 0U1<0",
        "1R1<0 on rank 1",
        "receive it, or do not send it",
    ),
    "message never sent": (
        (FLUSH, 1, (" 0S1>1", "")),
        "every message is sent once and received once; none is left over after the drain",
        "rank 1: 1R0<0 1F0@0 1B0@0 1S0>0 >>1R1<0<< 1F1@0 1B1@0 1S1>0 1U1<0",
        "0S1>1 on rank 0",
        "send it, or do not receive it",
    ),
    "message sent twice": (
        (FLUSH, 1, ("0S1>1", "0S1>1 0S1>1")),
        "every message is sent once and received once; none is left over after the drain",
        "rank 0: 0F0@0 0S0>1 0F1@0 0S1>1 >>0S1>1<< 0R0<1 0B0@0 0R1<1 0B1@0 0U1<0",
        "a new message",
        "drop the second one",
    ),
    "data before the receive": (
        (FLUSH, 1, ("1R1<0 1F1@0", "1F1@0 1R1<0")),
        "an action comes after what it needs",
        "rank 1: 1R0<0 1F0@0 1B0@0 1S0>0 >>1F1@0<< 1R1<0 1B1@0 1S1>0 1U1<0",
        "the receive of the activation of microbatch 1 on stage 1 before 1F1@0",
        "put it before, or let lower() derive the messages",
    ),
    "data of a gradient": (
        (FLUSH, 1, ("0R1<1 0B1@0", "0B1@0 0R1<1")),
        "an action comes after what it needs",
        "rank 0: 0F0@0 0S0>1 0F1@0 0S1>1 0R0<1 0B0@0 >>0B1@0<< 0R1<1 0U1<0",
        "the receive of the gradient of microbatch 1 on stage 0 before 0B1@0",
        "put it before, or let lower() derive the messages",
    ),
    "data of one's own forward": (
        (FLUSH, 1, ("1F0@0 1B0@0", "1B0@0 1F0@0")),
        "an action comes after what it needs",
        "rank 1: 1R0<0 >>1B0@0<< 1F0@0 1S0>0 1R1<0 1F1@0 1B1@0 1S1>0 1U1<0",
        "the forward of microbatch 0 on stage 1 before 1B0@0",
        "put it before, or let lower() derive the messages",
    ),
    "data of a neighbour on the same rank": (
        (ALONE, 1, ("0F0@0 1F0@0", "1F0@0 0F0@0")),
        "an action comes after what it needs",
        "rank 0: >>1F0@0<< 0F0@0 1B0@0 0B0@0 0U1<0 1U1<0",
        "the forward of microbatch 0 on stage 0 before 1F0@0",
        "put it before, or let lower() derive the messages",
    ),
    "sent before it is made": (
        (FLUSH, 1, ("0F1@0 0S1>1", "0S1>1 0F1@0")),
        "an action comes after what it needs",
        "rank 0: 0F0@0 0S0>1 >>0S1>1<< 0F1@0 0R0<1 0B0@0 0R1<1 0B1@0 0U1<0",
        "the forward of microbatch 1 on stage 0 before 0S1>1",
        "put it before, or let lower() derive the messages",
    ),
    "fifo": (
        (FLUSH, 1, ("1R0<0 1F0@0 1B0@0 1S0>0 1R1<0 ", "1R1<0 1R0<0 1F0@0 1B0@0 1S0>0 ")),
        "messages are received in the order in which they were sent, on each edge between two ranks",
        "rank 1: >>1R1<0<< 1R0<0 1F0@0 1B0@0 1S0>0 1F1@0 1B1@0 1S1>0 ...",
        "1R0<0, since 0S0>1 is what rank 0 sends next to rank 1",
        "order the two ranks alike",
    ),
}


@pytest.mark.parametrize("broken", LAWS)
def test_each_law_broken_once(broken: str) -> None:
    assert_broken(*LAWS[broken])


def test_deadlock_shows_every_rank_that_waits() -> None:
    programs = change(
        STASH,
        3,
        ("0F2@1 0S2>1 0R1<1 0B1@0 0U2<0 ", "0F2@1 0R1<1 0B1@0 0U2<0 0S2>1 "),
        ("1R1<0 1F1@1 1B1@1 1S1>0 1U2<1 1R2<0", "1R1<0 1R2<0 1F1@1 1B1@1 1S1>0 1U2<1"),
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
        "pipedream: every invariant holds for 30 actions in 3 minibatches; per stage at most 2 1 in flight, 2 1 weight "
        "versions"
    )
    assert verify_programs(STASH.program(3), STASH, 3) == verification
