"""Inference: forwards only, with the weights as they are.

This is the order of an evaluation; it keeps nothing for a backward. With several stages per rank microbatches run in
groups of p, as in `interleaved`, so that a rank does not wait while a microbatch passes through the other ranks; or
where stages are streamed in one group, so that each is fetched once.
"""

from collections.abc import Iterator

from penstock.scheduling.actions import Compute, Forward
from penstock.scheduling.definitions import Guarantees, PipelineShape, ScheduleDefinition, VersionRule, flushing
from penstock.scheduling.placements import StageLayout


# p = 2, v = 2, m = 3, first step, stage before the letter:
#
#   rank 0   0F0 0F1 2F0 2F1 0F2 ... 2F2
#   rank 1   ... 1F0 1F1 3F0 3F1 1F2 ... 3F2
@flushing
def order(shape: PipelineShape, rank: int, minibatch: int) -> Iterator[Compute]:
    yield from _in_groups(shape, rank, minibatch, shape.placement.length)


@flushing
def one_group(shape: PipelineShape, rank: int, minibatch: int) -> Iterator[Compute]:
    yield from _in_groups(shape, rank, minibatch, shape.microbatches)


def _in_groups(shape: PipelineShape, rank: int, minibatch: int, group: int) -> Iterator[Compute]:
    microbatches = shape.rank_microbatches(rank, minibatch)
    for first in range(0, len(microbatches), group):
        for stage in shape.stages_of(rank):
            for microbatch in microbatches[first : first + group]:
                yield Forward(stage, microbatch, 0)


def guarantees(shape: PipelineShape) -> Guarantees:
    """One version; nothing is in flight, because no backward follows."""
    return Guarantees.of(shape, in_flight=(0,) * shape.stages, rule=VersionRule.INITIAL)


INFERENCE = ScheduleDefinition("inference", order, guarantees, layout=StageLayout.ROUND_ROBIN)
STREAMED_INFERENCE = ScheduleDefinition("inference", one_group, guarantees, layout=StageLayout.ROUND_ROBIN)
