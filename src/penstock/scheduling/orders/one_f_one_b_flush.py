"""1F1B with a flush (PipeDream-Flush): after a warm-up forwards and backwards alternate, and one update ends the step.

It is as fast as GPipe, but stage s keeps at most p - s microbatches in flight instead of m. A replicated stage keeps as
many as the ranks behind it need to stay busy.
Source: [PipeDream-2BW 2021, section 3.2].
"""

from collections.abc import Iterator

from penstock.scheduling.actions import Backward, Compute, Forward, Update
from penstock.scheduling.definitions import Guarantees, PipelineShape, ScheduleDefinition, flushing


# p = 3, m = 4, first step (p - 1 - s forwards of warm-up at stage s):
#
#   rank 0   F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3 U1
#   rank 1   .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 U1
#   rank 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3 U1
@flushing
def order(shape: PipelineShape, rank: int, minibatch: int) -> Iterator[Compute]:
    (stage,) = shape.stages_of(rank)
    warm_up = shape.placement.depth(stage) - 1
    microbatches = shape.rank_microbatches(rank, minibatch)
    for turn in range(len(microbatches) + warm_up):
        if turn < len(microbatches):
            yield Forward(stage, microbatches[turn], minibatch)
        if turn >= warm_up:
            yield Backward(stage, microbatches[turn - warm_up], minibatch)
    yield Update(stage, minibatch + 1, minibatch)


def guarantees(shape: PipelineShape) -> Guarantees:
    """One version; min(m, p - s) microbatches are in flight on stage s without replicas."""
    placement, m = shape.placement, shape.microbatches
    return Guarantees.of(
        shape,
        in_flight=tuple(
            min(placement.max_microbatches(stage, m), placement.depth(stage)) for stage in range(shape.stages)
        ),
    )


ONE_F_ONE_B_FLUSH = ScheduleDefinition("1f1b-flush", order, guarantees)
