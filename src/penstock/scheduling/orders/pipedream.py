"""1F1B without a flush (PipeDream): every microbatch has its own update, and no rank ever waits in steady state.

A stage of r replicas makes one update per round of r microbatches, one from each replica. With weight stashing a
microbatch's backward reads the version that its forward read, so that the gradient is correct. Without vertical sync
that is the newest version of each stage, and a microbatch reads versions of different age on different stages. With
vertical sync all stages read the version that the input stage read, which takes p versions on every stage.
Source: [PipeDream 2019, sections 3.2 and 3.3].
"""

from collections.abc import Iterator
from typing import assert_never

from penstock.errors import ScheduleError
from penstock.scheduling.actions import Backward, Forward, Update
from penstock.scheduling.definitions import (
    Drain,
    Entry,
    Guarantees,
    PipelineShape,
    ScheduleDefinition,
    Segment,
    Step,
    VersionRule,
)


# p = 3, m = 1: steps 0 to 3, and the drain after them. The update directly follows each B. The version that F and B
# read is in brackets, w(s) = p - 1 - s updates behind the microbatch:
#
#   rank 0   F0(0) F1(0) F2(0) B0(0) F3(1) B1(0)  |  B2(0) B3(1)
#   rank 1         F0(0) F1(0) B0(0) F2(1) B1(0) F3(2) B2(1)  |  B3(2)
#   rank 2               F0(0) B0(0) F1(1) B1(1) F2(2) B2(2) F3(3) B3(3)  |
def order(shape: PipelineShape, rank: int, segment: Segment) -> Iterator[Entry]:
    (stage,) = shape.stages_of(rank)
    stride, warm_up = shape.placement.stride(stage), shape.placement.depth(stage) - 1
    match segment:
        case Step(minibatch):
            admitted = shape.microbatches_of(minibatch)
            turns = admitted
        case Drain(minibatches):
            stop = minibatches * shape.microbatches
            admitted = range(stop)
            # To the end of the last round, and then one round more for every round in flight.
            turns = range(stop, -(-stop // stride) * stride + warm_up * stride)
        case _:
            assert_never(segment)
    mine = shape.placement.microbatches_of(rank, turns)
    for turn in turns:
        if turn in mine:
            if isinstance(segment, Step):
                yield Forward(stage, turn, _version(shape, stage, turn // stride))
            due = turn - warm_up * stride
            if 0 <= due < admitted.stop:
                yield Backward(stage, due, _version(shape, stage, due // stride))
        # All replicas update when the last replica's turn ends the round, so that none waits for a later step.
        round_ = turn // stride - warm_up
        if turn % stride == stride - 1 and round_ >= 0:
            yield Update(stage, round_ + 1, _version(shape, stage, round_))


def _version(shape: PipelineShape, stage: int, round_: int) -> int:
    """The version that the microbatches of a round read."""
    reader = 0 if shape.vertical_sync else stage
    return max(0, round_ - (shape.placement.depth(reader) - 1))


def guarantees(shape: PipelineShape) -> Guarantees:
    """Without replicas p - s microbatches are in flight on stage s, with as many versions, or p with vertical sync."""
    placement = shape.placement
    in_flight = tuple(placement.depth(stage) for stage in range(shape.stages))
    return Guarantees.of(
        shape,
        versions=in_flight[:1] * shape.stages if shape.vertical_sync else in_flight,
        in_flight=in_flight,
        rule=VersionRule.INPUT_STAGE if shape.vertical_sync else VersionRule.NEWEST,
        microbatches_per_update=tuple(placement.stride(stage) for stage in range(shape.stages)),
    )


def check(shape: PipelineShape) -> None:
    """With vertical sync the rounds of all stages must be the same."""
    if shape.vertical_sync and not shape.placement.split and not shape.placement.equal(range(shape.stages)):
        raise ScheduleError(
            "schedule 'pipedream': vertical sync needs equally many replicas of every stage, got "
            f"{shape.placement.text()}: stages that update after different numbers of microbatches have no common "
            "version; give them equal numbers, or drop vertical_sync"
        )


PIPEDREAM = ScheduleDefinition(
    "pipedream", order, guarantees, check, flushes=False, updates_per_microbatch=True, has_vertical_sync=True
)
