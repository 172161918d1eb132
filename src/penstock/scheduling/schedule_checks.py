"""Which arguments of a schedule fit together: its method, sizes, ties, norms, skips and streamed stages.

Each function raises `ScheduleError`, which says what was expected, what was found and which schedules would do.
"""

from itertools import chain

from penstock.arguments import is_count, text_of
from penstock.errors import ScheduleError
from penstock.scheduling.definitions import Guarantees, PipelineShape, ScheduleDefinition
from penstock.scheduling.placements import Placement, Skip, StageLayout
from penstock.scheduling.schedule_names import SCHEDULES, find_definition, names_of, schedule_hint


def existing_definition(method: ScheduleDefinition | str) -> ScheduleDefinition:
    """The definition that `method` is or names."""
    definition = find_definition(method)
    if definition is None:
        raise ScheduleError(
            f"schedule: there is no method {text_of(method)}. {schedule_hint(str(method))}Choose one of "
            f"{', '.join(map(repr, SCHEDULES))}"
        )
    return definition


def check_ranks(definition: ScheduleDefinition, placement: Placement, ranks: int) -> None:
    """Rejects a placement whose stages are not on the ranks from 0 to `ranks` - 1."""
    held = sorted({rank for stage in placement.stages for rank in stage})
    if held != list(range(ranks)):
        raise ScheduleError(
            f"schedule {definition.name!r}: expected stages on ranks 0 to {ranks - 1}, found them on {held}; "
            "number the ranks from 0 without gaps, or give Schedule.placed the placement alone"
        )


def check_form(definition: ScheduleDefinition, per_rank: int, *, vertical_sync: bool) -> None:
    """Rejects a number of stages per rank, or vertical sync, that the schedule does not have."""
    layout = definition.layout
    if not layout.accepts(per_rank):
        holds, give = ("two stages", 2) if layout is StageLayout.V_SHAPE else ("one stage", 1)
        instead = names_of(lambda each: _holds_otherwise(definition, each))
        raise ScheduleError(
            f"schedule {definition.name!r}: a rank holds {holds}, got stages_per_rank={per_rank}; give "
            f"stages_per_rank={give}, or choose {instead!r}"
        )
    if vertical_sync and not definition.has_vertical_sync:
        having = names_of(lambda each: each.has_vertical_sync)
        raise ScheduleError(
            f"schedule {definition.name!r}: vertical_sync=True belongs to {having!r} only; drop it, or choose "
            f"{having!r}"
        )


def _holds_otherwise(definition: ScheduleDefinition, other: ScheduleDefinition) -> bool:
    """Whether `other` takes one stage per rank where `definition` takes two, or any number where it takes one."""
    if definition.layout is StageLayout.V_SHAPE:
        return other.splits_backward and not other.layout.has_several
    return other.layout is StageLayout.ROUND_ROBIN


def check_guarantees(definition: ScheduleDefinition, shape: PipelineShape, guarantees: Guarantees) -> None:
    """Checks that the guarantees agree with the definition and have a number for every stage or rank."""
    for name in (
        "versions",
        "in_flight",
        "microbatches_per_update",
        "pending_updates",
        "pending_weight_backwards",
        "in_flight_of_rank",
    ):
        count, what = (shape.ranks, "rank") if name == "in_flight_of_rank" else (shape.stages, "stage")
        if len(getattr(guarantees, name)) != count:
            raise ScheduleError(
                f"schedule {definition.name!r}: guarantees.{name}: expected {count} numbers (one per {what}), found "
                f"{getattr(guarantees, name)!r}; return one for each {what}"
            )
    if guarantees.splits and not definition.splits_backward:
        raise ScheduleError(
            f"schedule {definition.name!r}: expected no pending weight backwards (splits_backward=False), found "
            f"{guarantees.pending_weight_backwards}; define it with splits_backward=True"
        )
    if set(guarantees.microbatches_per_update) != {shape.microbatches} and not definition.updates_per_microbatch:
        raise ScheduleError(
            f"schedule {definition.name!r}: expected updates of a minibatch, {shape.microbatches} microbatches, "
            f"found updates of {guarantees.microbatches_per_update}; define it with updates_per_microbatch=True"
        )


def check_ties(definition: ScheduleDefinition, stages: int, ties: tuple[tuple[int, ...], ...]) -> None:
    """Rejects groups that are no stages of the schedule, and schedules in which copies of a weight drift apart."""
    for group in ties:
        if len(group) < 2 or list(group) != sorted(set(group)) or not 0 <= group[0] <= group[-1] < stages:
            raise ScheduleError(
                f"schedule: ties {group!r}: expected two or more different stages of 0 to {stages - 1}, "
                "ascending; name the stages that share weights"
            )
        if not definition.synchronizes_updates:
            raise ScheduleError(
                f"schedule {definition.name!r}: stages {', '.join(map(str, group))} share weights, and every stage "
                "updates at its own time, so that their copies drift apart; choose a flushing schedule "
                f"({names_of(lambda each: each.flushes)}) or {names_of(lambda each: each.defers_updates)}, untie the "
                "weights, or put the layers that share them into one stage"
            )


def require_common_updates(definition: ScheduleDefinition) -> None:
    """Raises `ScheduleError` if stages update at times of their own, and so without the norms of the others."""
    if not definition.synchronizes_updates:
        raise ScheduleError(
            f"schedule {definition.name!r}: clip_grad_norm=, loss_scale= and on_nonfinite='skip' or 'rollback' need "
            "the gradients of all stages for an update, and every stage updates at its own time; choose "
            f"{names_of(lambda each: each.defers_updates)!r} or a flushing schedule "
            f"({names_of(lambda each: each.flushes)}), or leave these options out"
        )


def check_norms(definition: ScheduleDefinition, placement: Placement, ties: tuple[tuple[int, ...], ...]) -> None:
    """Rejects schedules in which a stage could not receive the norms before its update."""
    require_common_updates(definition)
    for stage in sorted(set(chain.from_iterable(ties))) if definition.defers_updates else ():
        if (replicas := placement.replicas(stage)) > 1:
            raise ScheduleError(
                f"schedule {definition.name!r}: stage {stage} shares weights and has {replicas} replicas, so "
                "that its gradients are whole only when all stages have theirs, too late for norms; choose a flushing "
                "schedule, untie the weights, give the stage one rank, or drop norms"
            )


def check_skips(stages: int, skips: tuple[Skip, ...]) -> None:
    """Rejects pairs of stages that are neighbors, no stages of the schedule, or out of order."""
    for skip in skips:
        here, there = skip if len(skip) == 2 else (-1, -1)
        if not 0 <= here < there - 1 < stages - 1 or list(skips) != sorted(set(skips)):
            raise ScheduleError(
                f"schedule: skips {skips!r}: expected different pairs of the stages 0 to "
                f"{stages - 1}, ascending, with other stages between the two; found {skip!r}. Leave out "
                "neighbors, which exchange messages anyway"
            )


def check_streamed(
    definition: ScheduleDefinition,
    shape: PipelineShape,
    guarantees: Guarantees,
    *,
    streamed: frozenset[int],
    recomputed: frozenset[int],
    ties: tuple[tuple[int, ...], ...],
) -> None:
    """Rejects schedules in which weights could not leave the device between the visits of a stage."""
    where = f"schedule {definition.name!r}: streamed"
    if wrong := sorted(stage for stage in streamed if not is_count(stage, least=0) or stage >= shape.stages):
        raise ScheduleError(
            f"{where}: expected stages 0 to {shape.stages - 1}, found {wrong[0]!r}; give stages of the schedule"
        )
    if not definition.updates_at_once:
        raise ScheduleError(
            f"{where}: expected a schedule that flushes, whose stages have one version of the weights, found one that "
            f"does not; choose {names_of(lambda each: each.for_streams)!r}, or keep older versions on the host with "
            "state_on_host=True and stream no stage"
        )
    if guarantees.trains and (kept := sorted(streamed - recomputed)):
        raise ScheduleError(
            f"{where}: expected stages that recompute, found stage {kept[0]}, which does not: what autograd saves in a "
            "forward holds the weights until the backward. Recompute the stage as a whole too, or do not stream it"
        )
    if tied := sorted(streamed.intersection(chain.from_iterable(ties))):
        raise ScheduleError(
            f"{where}: stage {tied[0]} shares weights with another stage, and shared weights stay on the device; leave "
            "it out, untie the weights, or put the layers that share them into one stage"
        )
    placement = shape.placement
    for stage in sorted(streamed) if guarantees.splits and not placement.split else ():
        several = len(placement.stages_of(placement.rank_of(stage))) > 1
        if several and (replicas := placement.replicas(stage)) > shape.microbatches:
            # A replica without one would not know in which order the others end the backwards of their stages.
            raise ScheduleError(
                f"{where}: expected a microbatch for each of the {replicas} replicas of stage {stage}, since backwards "
                f"are split, found {shape.microbatches}; give microbatches={replicas} or more, or choose "
                f"{names_of(lambda each: each.for_streams)!r}"
            )
