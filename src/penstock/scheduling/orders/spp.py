"""List ordering (SPP): forwards run far ahead of backwards, so that slow links between stages are hidden.

This is the order that SPP's execution scheduler finds. Its list has 4p - 3 blocks, one for every forward, every
backward and every transfer, and in every pass each microbatch moves one block further. So stage s starts with up to
4(p - 1 - s) + 1 forwards, where 1F1B starts with p - s, and then alternates. It keeps four times as much in flight.
Source: [SPP 2022, algorithm 1].
"""

from collections.abc import Iterator

from penstock.scheduling.actions import Backward, Compute, Forward, Update
from penstock.scheduling.definitions import Guarantees, PipelineShape, ScheduleDefinition, flushing


# p = 2, m = 6, first step (4(p - 1 - s) + 1 forwards first at stage s):
#
#   rank 0   F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 .. B4 .. B5 U1
#   rank 1   .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 U1
@flushing
def order(shape: PipelineShape, rank: int, minibatch: int) -> Iterator[Compute]:
    (stage,) = shape.stages_of(rank)
    ahead = _most_in_flight(shape, stage)
    microbatches = shape.rank_microbatches(rank, minibatch)
    for microbatch in microbatches[:ahead]:
        yield Forward(stage, microbatch, minibatch)
    for turn, microbatch in enumerate(microbatches):
        yield Backward(stage, microbatch, minibatch)
        if turn + ahead < len(microbatches):
            yield Forward(stage, microbatches[turn + ahead], minibatch)
    yield Update(stage, minibatch + 1, minibatch)


def _most_in_flight(shape: PipelineShape, stage: int) -> int:
    """The paper's count; with replicas its p - s becomes the depth that keeps the ranks behind busy."""
    placement = shape.placement
    return min(placement.max_microbatches(stage, shape.microbatches), 4 * (placement.depth(stage) - 1) + 1)


def guarantees(shape: PipelineShape) -> Guarantees:
    """One version; without replicas min(m, 4(p - 1 - s) + 1) microbatches are in flight on stage s."""
    return Guarantees.of(shape, in_flight=tuple(_most_in_flight(shape, stage) for stage in range(shape.stages)))


SPP = ScheduleDefinition("spp", order, guarantees)
