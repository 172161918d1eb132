"""ZB-V (zero bubble, V-shaped): a rank holds two stages, r and 2p - 1 - r, and weight backwards fill idle time.

A microbatch goes from rank 0 to the last rank and back, so that its first backward is on rank 0, where it started. Its
gradients take the same way. So fewer weight backwards wait at the end than in ZB-H1. If forwards, input backwards and
weight backwards take equally long, a rank is idle for p - 1 forwards of its half-size stages; in 1F1B with a flush it
is idle for 6 (p - 1). Every rank keeps 2p microbatches on both stages together, which take as much memory as the p that
1F1B keeps on its first rank.
Source: [ZB-V 2024, section 6].
"""

from collections.abc import Iterator

from penstock.scheduling.actions import Backward, BackwardInput, BackwardWeight, Compute, Forward, Update
from penstock.scheduling.definitions import Guarantees, PipelineShape, ScheduleDefinition, flushing
from penstock.scheduling.placements import StageLayout
from penstock.scheduling.v_blocks import check_folded


# p = 2, m = 3, first step, stage before the letter. B --- is a whole backward: no other rank waits for gradients of
# stages 0 and p, so there the weight backward would directly follow the input backward.
#
#   rank 0   0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0B0 --- 3F2 3I2 3W2 0B1 --- 0B2 --- 0U1 3U1
#   rank 1   ... 1F0 2F0 1F1 2F1 2B0 --- 1F2 1I0 1W0 2F2 2B1 --- 1I1 2I2 1I2 1W1 2W2 1W2 1U1 2U1
#
# Updates come at the end of the step, because gradients of weights that two stages share must all be complete first.
@flushing
def order(shape: PipelineShape, rank: int, minibatch: int) -> Iterator[Compute]:
    stages, microbatches = shape.stages_of(rank), shape.rank_microbatches(rank, minibatch)
    forwards, inputs, weights = ({stage: iter(microbatches) for stage in stages} for _ in range(3))
    for turn in _turns(shape.placement.length, min(stages), len(microbatches)):
        stage = stages[turn.islower()]
        letter = turn.upper()
        if letter == "F" and (due := next(forwards[stage], None)) is not None:
            yield Forward(stage, due, minibatch)
        whole = letter == "B" and _sends_nothing(shape, stage)
        if letter in "BI" and (due := next(inputs[stage], None)) is not None:
            yield Backward(stage, due, minibatch) if whole else BackwardInput(stage, due, minibatch)
        if letter in "BW" and (due := next(weights[stage], None)) is not None and not whole:
            yield BackwardWeight(stage, due, minibatch)
    for stage in stages:
        yield Update(stage, minibatch + 1, minibatch)


def _turns(length: int, rank: int, microbatches: int) -> str:
    """The turns of `rank`, in a pipeline of `length` ranks, in a step: F, I, W, or B for I and W.

    Capitals are for the rank's first stage, small letters for its second. A turn is skipped if no microbatch is left.
    """
    # With fewer microbatches the pipe is never full; the order is then that of a full pipe, with turns skipped.
    more = max(microbatches - (2 * length - 1), 0)
    behind = length - rank
    warm_up = "F" * (2 * behind - 1) + "fF" * rank + "fb" * behind
    steady = "FBfb" * (more + rank) + "Bfb" * (behind - 1)
    cool_down = "Ii" * rank + ("IW" if rank else "B") * behind + "w" * rank + "W" * rank
    return warm_up + steady + cool_down


def _sends_nothing(shape: PipelineShape, stage: int) -> bool:
    """Whether no other rank waits for the gradients of `stage`: the one before it is on its rank, or there is none.

    Then a whole backward is as good as its two halves one after the other.
    """
    return stage in (0, shape.placement.length)


def guarantees(shape: PipelineShape) -> Guarantees:
    """One version; on rank r min(m, 2p - r) microbatches are in flight on its first stage, min(m, r + 1) on its second.

    A microbatch is in flight from its forward to its weight backward. Both stages together never have more than 2p. Up
    to r + 1 on the first stage and up to r on the second (or 1, if that is less) have had their input backward; none
    where all backwards are whole.
    """
    in_flight, pending = [], []
    length = shape.placement.length
    for stage in range(shape.stages):
        count = shape.placement.max_microbatches(stage, shape.microbatches)
        rank = min(stage, shape.stages - 1 - stage)
        if stage < length:
            most, late = 2 * length - rank, min(rank + 1, count - length + 1)
        else:
            most, late = rank + 1, min(rank, count - 2 * length + 1 + rank)
        in_flight.append(min(count, most))
        pending.append(max(late, 0 if stage == length else 1) if stage else 0)
    held = [shape.stages_of(rank)[0] for rank in range(shape.ranks)]
    return Guarantees.of(
        shape,
        in_flight,
        pending_weight_backwards=pending,
        in_flight_of_rank=tuple(min(2 * length, in_flight[q] + in_flight[-1 - q]) for q in held),
    )


ZB_V = ScheduleDefinition("zb-v", order, guarantees, check_folded, layout=StageLayout.V_SHAPE, splits_backward=True)
