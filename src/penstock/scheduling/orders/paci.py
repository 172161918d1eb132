"""PACI: 1F1B without a flush and without stashing, one update per minibatch, one weight version on every stage.

A forward and a backward read the newest weights of their stage, so that updates may lie between the two of a
microbatch: the *drift*. Its gradient is then that of no one set of weights. A stage sums the gradients of a minibatch
before it updates, which bounds the drift: at most ceil((p-1-s) / m) updates on stage s, so one where m >= p - 1.
Source: [PACI 2026].
"""

from collections.abc import Iterator
from typing import assert_never

from penstock.errors import ScheduleError
from penstock.scheduling.actions import Backward, Forward, Update
from penstock.scheduling.definitions import (
    Drain,
    EarlierNorms,
    Entry,
    Guarantees,
    PipelineShape,
    ScheduleDefinition,
    Segment,
    Step,
    VersionRule,
)


# p = 3, m = 2: steps 0 to 2, and the drain after them. The version that F and B read is in brackets. U1 directly
# follows B1, and U2 follows B3:
#
#   rank 0   F0(0) F1(0)  |  F2(0) B0(0) F3(0) B1(0) U1  |  F4(1) B2(1) F5(1) B3(1) U2  |  B4(2) B5(2) U3
#   rank 1   F0(0) F1(0) B0(0)  |  F2(0) B1(0) U1 F3(1) B2(1)  |  F4(1) B3(1) U2 F5(2) B4(2)  |  B5(2) U3
#   rank 2   F0(0) B0(0) F1(0) B1(0) U1  |  F2(1) B2(1) F3(1) B3(1) U2  |  F4(2) B4(2) F5(2) B5(2) U3  |
def order(shape: PipelineShape, rank: int, segment: Segment) -> Iterator[Entry]:
    (stage,) = shape.stages_of(rank)
    size, stride, behind = shape.microbatches, shape.placement.stride(stage), _behind(shape, stage)
    match segment:
        case Step(minibatch):
            turns, stop = shape.microbatches_of(minibatch), (minibatch + 1) * size
        case Drain(minibatches):
            stop = minibatches * size
            turns = range(stop, stop + behind + stride)
        case _:
            assert_never(segment)
    mine = shape.placement.microbatches_of(rank, turns)
    for turn in turns:
        due = turn - behind
        if turn in mine:
            if isinstance(segment, Step):
                yield Forward(stage, turn, max(due, 0) // size)
            if 0 <= due < stop:
                yield Backward(stage, due, due // size)
        # All replicas update when it is the turn of the minibatch's last microbatch, so none waits for a later step.
        if 0 <= due < stop and due % size == size - 1:
            yield Update(stage, due // size + 1, due // size)
        # The stage before has the gradients of each microbatch one turn of its replicas later.
        made, rest = divmod(due - stride + 1, size)
        if stage in shape.waiting and made > 0 and not rest:
            yield EarlierNorms(stage, made)


def _behind(shape: PipelineShape, stage: int) -> int:
    """How many microbatches a backward is behind the forward before it."""
    return (shape.placement.depth(stage) - 1) * shape.placement.stride(stage)


def guarantees(shape: PipelineShape) -> Guarantees:
    """One version; without replicas p - s microbatches are in flight on stage s."""
    stages = range(shape.stages)
    return Guarantees.of(
        shape,
        in_flight=tuple(shape.placement.depth(stage) for stage in stages),
        rule=VersionRule.UNSTASHED,
        drift=tuple(-(-_behind(shape, stage) // shape.microbatches) for stage in stages),
    )


def check(shape: PipelineShape) -> None:
    """Each replica must have a microbatch of every minibatch: else the norms of the stage before come too late."""
    most = max(shape.placement.stride(stage) for stage in range(shape.stages))
    if shape.microbatches < most:
        raise ScheduleError(
            f"schedule 'paci': {most} replicas that take microbatches in turn need at least {most} microbatches, got "
            f"microbatches={shape.microbatches}; give {most} or more, or let replicas split microbatches"
        )


PACI = ScheduleDefinition("paci", order, guarantees, check, flushes=False, stashes=False)
