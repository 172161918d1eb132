"""ZB-H1 (zero bubble): 1F1B with a flush whose weight backwards are deferred to fill idle time at the end.

Only the input backward is on the path of a gradient from stage to stage, so gradients go back faster than in 1F1B. At
the end of a step a rank computes weight backwards while it waits for gradients, and after the last one. Stage s defers
up to s of them. 1F1B has p - s microbatches in flight there, so no stage keeps more than the p that 1F1B keeps on its
first. The bubble of (p - 1)(F + I + W) shrinks to (p - 1)(F + I - W), or to (p - 1) max(F, I) if weight backwards take
longer than forwards or input backwards.
Source: [ZeroBubble 2024, section 2.2].
"""

from collections.abc import Iterator

from penstock.scheduling.actions import Backward, BackwardInput, BackwardWeight, Compute, Forward, Update
from penstock.scheduling.definitions import Guarantees, PipelineShape, ScheduleDefinition, flushing


# p = 3, m = 4, first step; stage s defers s weight backwards. B -- is a whole backward: no rank waits for a gradient of
# the first stage, so there the weight backward would directly follow the input backward.
#
#   rank 0   F0 F1 F2 .. .. B0 -- F3 B1 -- B2 -- B3 -- U1
#   rank 1   .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3 U1
#   rank 2   .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3 U1
@flushing
def order(shape: PipelineShape, rank: int, minibatch: int) -> Iterator[Compute]:
    (stage,) = shape.stages_of(rank)
    warm_up, behind = shape.placement.depth(stage) - 1, _kept_back(shape, stage)
    microbatches = shape.rank_microbatches(rank, minibatch)
    for turn in range(len(microbatches) + warm_up + behind):
        if turn < len(microbatches):
            yield Forward(stage, microbatches[turn], minibatch)
        if 0 <= turn - warm_up < len(microbatches):
            backward = BackwardInput if stage else Backward
            yield backward(stage, microbatches[turn - warm_up], minibatch)
        if stage and turn >= warm_up + behind:
            yield BackwardWeight(stage, microbatches[turn - warm_up - behind], minibatch)
    yield Update(stage, minibatch + 1, minibatch)


def _kept_back(shape: PipelineShape, stage: int) -> int:
    """The number of weight backwards that `stage` defers in its steady phase: s without replicas.

    It can compute that many while a gradient goes from it to the first stage, if all ranks are equally busy.
    """
    return shape.placement.full_depth(stage) - shape.placement.depth(stage)


def guarantees(shape: PipelineShape) -> Guarantees:
    """One version; without replicas min(m, p) microbatches are in flight on every stage.

    A microbatch is in flight from its forward to its weight backward. On stage s > 0 up to min(m, s + 1) of them have
    had their input backward, the one just computed included; backwards of stage 0 are whole. A stage of r replicas has
    ceil(ranks / r) in flight, so that ranks which are equally busy keep equally many.
    """
    placement, m = shape.placement, shape.microbatches
    most = [placement.max_microbatches(stage, m) for stage in range(shape.stages)]
    return Guarantees.of(
        shape,
        in_flight=tuple(min(most[stage], placement.full_depth(stage)) for stage in range(shape.stages)),
        pending_weight_backwards=(
            0,
            *(min(most[stage], _kept_back(shape, stage) + 1) for stage in range(1, shape.stages)),
        ),
    )


ZB_H1 = ScheduleDefinition("zb-h1", order, guarantees, splits_backward=True)
