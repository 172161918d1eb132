"""GPipe: all forwards of a minibatch, then all its backwards, then one update.

This is the simplest flush: every activation of the minibatch is kept until the last forward is done. Backwards run in
ascending order here, so that all schedules sum gradients in one order and those that flush agree bit for bit.
Source: [GPipe 2019, section 2.3].
"""

from collections.abc import Iterator

from penstock.scheduling.actions import Backward, Compute, Forward, Update
from penstock.scheduling.definitions import Guarantees, PipelineShape, ScheduleDefinition, flushing


# p = 3, m = 3, first step:
#
#   rank 0   F0 F1 F2 .. .. .. .. B0 B1 B2 U1
#   rank 1   .. F0 F1 F2 .. .. B0 B1 B2 U1
#   rank 2   .. .. F0 F1 F2 B0 B1 B2 U1
@flushing
def order(shape: PipelineShape, rank: int, minibatch: int) -> Iterator[Compute]:
    (stage,) = shape.stages_of(rank)
    for microbatch in shape.rank_microbatches(rank, minibatch):
        yield Forward(stage, microbatch, minibatch)
    for microbatch in shape.rank_microbatches(rank, minibatch):
        yield Backward(stage, microbatch, minibatch)
    yield Update(stage, minibatch + 1, minibatch)


def guarantees(shape: PipelineShape) -> Guarantees:
    """One version; all microbatches of a replica are in flight: m, or m / r with r replicas."""
    return Guarantees.of(
        shape,
        in_flight=tuple(shape.placement.max_microbatches(stage, shape.microbatches) for stage in range(shape.stages)),
    )


GPIPE = ScheduleDefinition("gpipe", order, guarantees)
