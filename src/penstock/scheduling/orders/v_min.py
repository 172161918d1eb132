"""V-Min: two stages per rank in a V, as in ZB-V, with a third of the activations.

Between neighbouring ranks a microbatch takes one unit on all four ways, the least that is possible. Every rank keeps at
most 2 floor((p + 4) / 3) microbatches on both stages together; in ZB-V these are 2p. If forwards, input backwards and
weight backwards take equally long and m >= p > 2, a rank is idle for 4p - 5 forwards of its half-size stages, and for
4p - 7 if 3 divides p; in 1F1B with a flush it is idle for 6 (p - 1).
Source: [V 2024, section 3].
"""

from collections.abc import Iterator

from penstock.scheduling.actions import Compute
from penstock.scheduling.definitions import Guarantees, PipelineShape, ScheduleDefinition, count_in_flight, flushing
from penstock.scheduling.placements import StageLayout
from penstock.scheduling.v_blocks import VBlock, check_folded, follow_block


# p = 2, m = 3, first step, stage before the letter. B --- is a whole backward: no other rank waits for gradients of
# stages 0 and p.
#
#   rank 0   0F0 ... ... 3F0 3I0 0F1 3W0 0B0 --- 3F1 3I1 0F2 3W1 0B1 --- 3F2 3I2 3W2 ... 0B2 --- 0U1 3U1
#   rank 1   ... 1F0 2F0 ... ... 2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 2W2 1W2 1U1 2U1
@flushing
def order(shape: PipelineShape, rank: int, minibatch: int) -> Iterator[Compute]:
    length = shape.placement.length
    # If 3 divides p the ways would meet in one unit without the waits.
    block = VBlock((1, 1, 1, 1), (0, 0, 0) if length % 3 else (2, 2, 2))
    return follow_block(block, 2 * ((length + 4) // 3), shape, rank, minibatch)


def guarantees(shape: PipelineShape) -> Guarantees:
    """One version; what is in flight is counted. On both stages of a rank it is at most 2 floor((p + 4) / 3)."""
    return count_in_flight(order, shape)


V_MIN = ScheduleDefinition(
    "v-min", order, guarantees, check_folded, layout=StageLayout.V_SHAPE, splits_backward=True, saves_memory=True
)
