"""Breadth-first: all microbatches of a step pass one stage of a rank before any passes its next, forward and backward.

So weights that live on the host are needed for one long visit each way, while those of the next stage are fetched. Only
the last stage computes the backward of each microbatch directly after its forward: it keeps one of them, recomputes
none, and the others wait less for its gradients. Without streamed stages it keeps more than any other schedule.
Source: looped breadth-first, [BreadthFirst 2023, section 4.1].
"""

from collections.abc import Iterator

from penstock.scheduling.actions import Backward, Compute, Forward, Update
from penstock.scheduling.definitions import Guarantees, PipelineShape, ScheduleDefinition, flushing
from penstock.scheduling.placements import StageLayout


# p = 2, v = 2, m = 2, first step, stage before the letter:
#
#   rank 0   0F0 0F1 2F0 2F1 ... 2B0 ... 2B1 0B0 0B1 0U1 2U1
#   rank 1   ... 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 1U1 3U1
@flushing
def order(shape: PipelineShape, rank: int, minibatch: int) -> Iterator[Compute]:
    stages, microbatches = shape.stages_of(rank), shape.rank_microbatches(rank, minibatch)
    last = shape.stages - 1
    for stage in stages:
        for microbatch in microbatches:
            yield Forward(stage, microbatch, minibatch)
            if stage == last:
                yield Backward(stage, microbatch, minibatch)
    for stage in reversed(stages):
        for microbatch in microbatches if stage < last else ():
            yield Backward(stage, microbatch, minibatch)
    for stage in stages:
        yield Update(stage, minibatch + 1, minibatch)


def guarantees(shape: PipelineShape) -> Guarantees:
    """One version; all microbatches of a replica are in flight on each stage, and one on the last."""
    most = [shape.placement.max_microbatches(stage, shape.microbatches) for stage in range(shape.stages)]
    return Guarantees.of(shape, in_flight=[*most[:-1], 1])


BREADTH_FIRST = ScheduleDefinition("breadth-first", order, guarantees, layout=StageLayout.ROUND_ROBIN, for_streams=True)
