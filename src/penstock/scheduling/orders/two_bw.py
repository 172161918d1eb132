"""PipeDream-2BW: 1F1B without a flush, one update per minibatch, two weight versions on every stage.

A microbatch of minibatch t reads version max(t - 1, 0) on every stage, in its forward and its backward. The delay is
one update on every stage, so training is gradient descent with a delay of one. The gradients of minibatch t make a
version that minibatch t + 2 reads first, so an update that needs data of other stages has a whole minibatch of time.
Source: [PipeDream-2BW 2021, section 3.1].
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
    Summed,
    VersionRule,
)


# p = 3, m = 3: steps 0 and 1, and the drain after them. Every action reads version 0 here. Step 2 is the first that
# reads version 1, which U1 made during step 1 (on the last rank at the end of step 0):
#
#   rank 0   F0 F1 F2 B0  |  F3 B1 F4 B2 U1 F5 B3  |  B4 B5 U2
#   rank 1   F0 F1 B0 F2 B1  |  F3 B2 U1 F4 B3 F5 B4  |  B5 U2
#   rank 2   F0 B0 F1 B1 F2 B2 U1  |  F3 B3 F4 B4 F5 B5 U2  |
#
# With updates that wait for other stages, steps 1 and 2, and the drain after them. U1 comes directly before the first
# forward that reads its version:
#
#   rank 0   F3 B1 F4 B2 F5 B3  |  U1 F6 B4 F7 B5 F8 B6  |  B7 B8 U2 U3
#   rank 1   F3 B2 F4 B3 F5 B4  |  U1 F6 B5 F7 B6 F8 B7  |  B8 U2 U3
#   rank 2   F3 B3 F4 B4 F5 B5  |  U1 F6 B6 F7 B7 F8 B8  |  U2 U3
def order(shape: PipelineShape, rank: int, segment: Segment) -> Iterator[Entry]:
    (stage,) = shape.stages_of(rank)
    behind = (shape.placement.depth(stage) - 1) * shape.placement.stride(stage)
    waits = stage in shape.waiting
    match segment:
        case Step(minibatch):
            turns = shape.microbatches_of(minibatch)
            if waits and minibatch > 1:
                yield _update(stage, minibatch - 1)
        case Drain(minibatches):
            turns = range(minibatches * shape.microbatches, minibatches * shape.microbatches + behind)
        case _:
            assert_never(segment)
    mine = shape.placement.microbatches_of(rank, turns)
    for turn in turns:
        due, last = divmod(turn - behind, shape.microbatches)
        if turn in mine:
            if isinstance(segment, Step):
                yield Forward(stage, turn, max(segment.minibatch - 1, 0))
            if due >= 0:
                yield Backward(stage, turn - behind, max(due - 1, 0))
        # All replicas update when it is the turn of the minibatch's last microbatch, so none waits for a later step.
        if due >= 0 and last == shape.microbatches - 1:
            yield Summed(stage, due + 1) if waits else _update(stage, due + 1)
    if waits and isinstance(segment, Drain):
        for version in range(max(segment.minibatches - 1, 1), segment.minibatches + 1):
            yield _update(stage, version)


def _update(stage: int, version: int) -> Update:
    """The update to `version`: gradients of minibatch t, computed at version max(t - 1, 0), make version t + 1."""
    return Update(stage, version, max(version - 2, 0))


def guarantees(shape: PipelineShape) -> Guarantees:
    """Two versions; without replicas p - s microbatches are in flight on stage s.

    A stage whose updates wait keeps the gradients of two minibatches.
    """
    return Guarantees.of(
        shape,
        versions=(2,) * shape.stages,
        in_flight=tuple(shape.placement.depth(stage) for stage in range(shape.stages)),
        rule=VersionRule.PREVIOUS_MINIBATCH,
        pending_updates=tuple(2 if stage in shape.waiting else 1 for stage in range(shape.stages)),
    )


def check(shape: PipelineShape) -> None:
    """A minibatch must fill the pipe: m >= p."""
    # The verifier would also accept this order with m = p - 1; with less, a forward is due before its version is made.
    least = shape.stages if shape.placement.split else shape.ranks
    what = "stages" if least == shape.stages else f"ranks ({shape.placement.text()})"
    if shape.microbatches < least:
        raise ScheduleError(
            f"schedule '2bw': {least} {what} need at least {least} microbatches, got "
            f"microbatches={shape.microbatches}; with fewer, a minibatch does not fill the pipe. Give "
            f"microbatches={least} or more, use fewer stages, or choose 'pipedream' or '1f1b-flush'"
        )


TWO_BW = ScheduleDefinition("2bw", order, guarantees, check, flushes=False, defers_updates=True)
