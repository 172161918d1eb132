"""V-Half: two stages per rank in a V, as in ZB-V, with half of the activations.

Between neighbouring ranks a microbatch takes two units on its ways down and one on its ways up. Every rank keeps at
most p + 1 (with an even p, p + 2) microbatches on both stages together; in ZB-V these are 2p. If forwards, input
backwards and weight backwards take equally long and m >= p > 2, a rank is idle for 3p - 7 forwards of its half-size
stages with an even p, and for 3p - 4 with an odd one; in 1F1B with a flush it is idle for 6 (p - 1).
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
#   rank 0   0F0 0F1 ... 3F0 3I0 0F2 3W0 3F1 0B0 --- 3I1 3F2 3I2 0B1 --- 0B2 --- 3W1 3W2 0U1 3U1
#   rank 1   ... 1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2 1U1 2U1
@flushing
def order(shape: PipelineShape, rank: int, minibatch: int) -> Iterator[Compute]:
    length = shape.placement.length
    # With an even p the ways would meet in one unit without the waits.
    block = VBlock((2, 1, 2, 1), (0, 0, 1) if length % 2 else (3, 3, 1))
    return follow_block(block, 2 * ((length + 2) // 2), shape, rank, minibatch)


def guarantees(shape: PipelineShape) -> Guarantees:
    """One version; what is in flight is counted. On both stages of a rank it is at most 2 floor((p + 2) / 2)."""
    return count_in_flight(order, shape)


V_HALF = ScheduleDefinition(
    "v-half", order, guarantees, check_folded, layout=StageLayout.V_SHAPE, splits_backward=True, saves_memory=True
)
