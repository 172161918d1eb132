"""Interleaved 1F1B: a rank holds v stages, spread evenly over the model, and the bubble of the flush shrinks to 1/v.

Microbatches run in groups of p: a rank computes a group's forwards on its first stage, then on its second, and so on;
backwards begin with the last stage. The schedule sends v times as much, and keeps more activations than 1F1B.
Source: [PTD-P 2021, section 2.2.2].
"""

from collections.abc import Iterator

from penstock.errors import ScheduleError
from penstock.scheduling.actions import Backward, Compute, Forward, Update
from penstock.scheduling.definitions import Guarantees, PipelineShape, ScheduleDefinition, flushing
from penstock.scheduling.placements import StageLayout


# p = 2, v = 2, m = 2, first step, stage before the letter. Rank r warms up with 2(p - 1 - r) + (v - 1)p forwards.
#
#   rank 0   0F0 0F1 2F0 2F1 ... 2B0 ... 2B1 0B0 0B1 0U1 2U1
#   rank 1   ... 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 1U1 3U1
#
# Updates come at the end of the step, because gradients of weights that two stages share must all be complete first.
@flushing
def order(shape: PipelineShape, rank: int, minibatch: int) -> Iterator[Compute]:
    stages, microbatches = shape.stages_of(rank), shape.rank_microbatches(rank, minibatch)
    length = shape.placement.length
    turns = len(microbatches) * len(stages)
    warm_up = min(2 * (length - 1 - stages[0]) + (len(stages) - 1) * length, turns)
    for turn in range(turns + warm_up):
        if turn < turns:
            round_, member = _place(shape, turn)
            yield Forward(stages[round_], microbatches[member], minibatch)
        if turn >= warm_up:
            round_, member = _place(shape, turn - warm_up)
            yield Backward(stages[-1 - round_], microbatches[member], minibatch)
    for stage in stages:
        yield Update(stage, minibatch + 1, minibatch)


def _place(shape: PipelineShape, turn: int) -> tuple[int, int]:
    """The index of the rank's stage that computes at `turn`, and of its microbatch."""
    length = shape.placement.length
    group, within = divmod(turn, shape.stages)
    round_, member = divmod(within, length)
    return round_, group * length + member


def guarantees(shape: PipelineShape) -> Guarantees:
    """One version; `_in_flight` counts the microbatches in flight on a stage.

    On all v stages of a rank together they are those of the warm-up of [PTD-P 2021, section 2.2.2], and one more.
    """
    length, per_rank = shape.placement.length, shape.stages_per_rank
    held = [shape.stages_of(rank)[0] for rank in range(shape.ranks)]
    most = per_rank * shape.placement.max_microbatches(0, shape.microbatches)
    return Guarantees.of(
        shape,
        in_flight=tuple(_in_flight(shape, stage) for stage in range(shape.stages)),
        in_flight_of_rank=tuple(min(2 * (length - 1 - q) + (per_rank - 1) * length + 1, most) for q in held),
    )


def _in_flight(shape: PipelineShape, stage: int) -> int:
    """The microbatches in flight right after the forward of a group's last microbatch, when they are the most.

    They are two groups, less the backwards done by then. `ahead` counts the rank's backwards since those of the older
    group were due on this stage. The first p are of this stage, the next ones of the other stages, and from p * v on of
    this stage again.
    """
    length = shape.placement.length
    round_, rank = divmod(stage, length)
    ahead = (2 * round_ + 1 - shape.stages_per_rank) * length + 2 * rank + 1
    done = min(max(ahead, 0), length) + max(ahead - shape.stages, 0)
    return min(shape.placement.max_microbatches(stage, shape.microbatches), 2 * length - done)


def check(shape: PipelineShape) -> None:
    """Each of the parallel pipelines needs whole groups of p microbatches."""
    if not shape.placement.equal(range(shape.stages)):
        raise ScheduleError(
            f"schedule 'interleaved': all stages must have equally many replicas, got {shape.placement.text()}; give "
            "them equal numbers, or choose '1f1b-flush'"
        )
    group = shape.placement.length * shape.placement.stride(0)
    if shape.microbatches % group:
        lower = shape.microbatches // group * group
        upper = lower + group
        choice = f"{lower} or {upper}" if lower else f"{upper}"
        raise ScheduleError(
            f"schedule 'interleaved': microbatches must be a multiple of the number of ranks, {group}, got "
            f"microbatches={shape.microbatches}; give microbatches={choice}, or choose '1f1b-flush'"
        )


INTERLEAVED = ScheduleDefinition("interleaved", order, guarantees, check, layout=StageLayout.ROUND_ROBIN)
