"""Schedules that a user could have written in a script, for the tests; each is proved, trained and compared."""

from collections.abc import Iterator
from dataclasses import replace

from penstock import ScheduleDefinition
from penstock.scheduling import (
    Backward,
    BackwardInput,
    Compute,
    Forward,
    Guarantees,
    Offload,
    PipelineShape,
    Reload,
    Segment,
    Step,
    Update,
    VersionRule,
    define_by_programs,
)
from penstock.scheduling.definitions import Entry


def eager_order(shape: PipelineShape, rank: int, segment: Segment) -> Iterator[Compute]:
    """1F1B with a flush that runs up to 2 (p - s) - 1 forwards ahead."""
    if isinstance(segment, Step):
        (stage,) = shape.stages_of(rank)
        microbatches = shape.rank_microbatches(rank, segment.minibatch)
        ahead = 2 * (shape.stages - stage) - 2
        for turn in range(len(microbatches) + ahead):
            if turn < len(microbatches):
                yield Forward(stage, microbatches[turn], segment.minibatch)
            if turn >= ahead:
                yield Backward(stage, microbatches[turn - ahead], segment.minibatch)
        yield Update(stage, segment.minibatch + 1, segment.minibatch)


def eager_guarantees(shape: PipelineShape) -> Guarantees:
    """One version; at most 2 (p - s) - 1 microbatches in flight."""
    return Guarantees.of(
        shape, [min(shape.microbatches, 2 * (shape.stages - stage) - 1) for stage in range(shape.stages)]
    )


EAGER = ScheduleDefinition("eager", eager_order, eager_guarantees)


def late_order(shape: PipelineShape, rank: int, segment: Segment) -> Iterator[Compute]:
    """All forwards of a minibatch, and then all backwards of the one before it: never flushes, stale by one update."""
    (stage,) = shape.stages_of(rank)
    due = (segment.minibatch if isinstance(segment, Step) else segment.minibatches) - 1
    if isinstance(segment, Step):
        for microbatch in shape.rank_microbatches(rank, segment.minibatch):
            yield Forward(stage, microbatch, max(segment.minibatch - 1, 0))
    if due >= 0:
        for microbatch in shape.rank_microbatches(rank, due):
            yield Backward(stage, microbatch, max(due - 1, 0))
        yield Update(stage, due + 1, max(due - 1, 0))


def late_guarantees(shape: PipelineShape) -> Guarantees:
    """Two versions; two minibatches in flight."""
    return Guarantees.of(
        shape, [2 * shape.microbatches] * shape.stages, versions=[2] * shape.stages, rule=VersionRule.PREVIOUS_MINIBATCH
    )


LATE = ScheduleDefinition("late", late_order, late_guarantees, flushes=False)


def rolling_order(shape: PipelineShape, rank: int, segment: Segment) -> Iterator[Compute]:
    """Every microbatch has its own update: the backward of k follows the forward of k + p - 1 - s."""
    (stage,) = shape.stages_of(rank)
    ahead = shape.stages - 1 - stage
    if isinstance(segment, Step):
        turns = shape.microbatches_of(segment.minibatch)
    else:
        stop = segment.minibatches * shape.microbatches
        turns = range(stop, stop + ahead)
    for turn in turns:
        if isinstance(segment, Step):
            yield Forward(stage, turn, max(0, turn - ahead))
        if (due := turn - ahead) >= 0:
            yield Backward(stage, due, max(0, due - ahead))
            yield Update(stage, due + 1, max(0, due - ahead))


def rolling_guarantees(shape: PipelineShape) -> Guarantees:
    """p - s versions and microbatches in flight."""
    depths = [shape.stages - stage for stage in range(shape.stages)]
    return Guarantees.of(
        shape, depths, versions=depths, rule=VersionRule.NEWEST, microbatches_per_update=[1] * shape.stages
    )


ROLLING = ScheduleDefinition("rolling", rolling_order, rolling_guarantees, flushes=False, updates_per_microbatch=True)

BY_HAND = define_by_programs(
    "by hand",
    """
    rank 0: 0F0@0 0F1@0 0F2@0 0F3@0 0B0@0 0B1@0 0B2@0 0B3@0 0U1<0
    rank 1: 1F0@0 1I0@0 1F1@0 1I1@0 1F2@0 1I2@0 1W0@0 1F3@0 1I3@0 1W1@0 1W2@0 1W3@0 1U1<0
    """,
)
"""For two ranks and four microbatches."""

ROUNDS = define_by_programs(
    "rounds",
    """
    rank 0: 0F0@0 0F1@0 | 0F2@0 0B0@0 | 0B1@0 0B2@0 0U1<0
    rank 1: 1F0@0 1B0@0 | 1F1@0 1B1@0 | 1F2@0 1B2@0 1U1<0
    """,
)
"""For two ranks and three microbatches or more: the part between the bars is repeated."""

OWN = {definition.name: definition for definition in (EAGER, LATE, ROLLING, BY_HAND, ROUNDS)}


def offloading(definition: ScheduleDefinition) -> ScheduleDefinition:
    """The same, with every microbatch offloaded after its forward, and reloaded while what comes before its backward
    runs, if that is not its forward.
    """

    def order(shape: PipelineShape, rank: int, segment: Segment) -> Iterator[Entry]:
        row: list[Entry] = []
        for entry in definition.order(shape, rank, segment):
            if isinstance(entry, Backward | BackwardInput):
                at = len(row) - (len(row) > 0 and not isinstance(row[-1], Offload))
                row.insert(at, Reload(entry.stage, entry.microbatch))
            row.append(entry)
            if isinstance(entry, Forward):
                row.append(Offload(entry.stage, entry.microbatch))
        yield from row

    return replace(definition, name=f"{definition.name} offloaded", order=order)


def make_local(definition: ScheduleDefinition) -> ScheduleDefinition:
    """The same from functions that no other process can read."""
    return replace(
        definition,
        order=lambda shape, rank, segment: definition.order(shape, rank, segment),
        guarantees=lambda shape: definition.guarantees(shape),
    )
