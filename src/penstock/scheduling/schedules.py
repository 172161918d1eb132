"""The schedule: the actions of every rank, in order, for each minibatch and for the drain.

The verifier, the simulator, the pictures and the worker all take their actions from this one value, so the program that
is proved is also the one that is simulated, drawn and run.

A run of an asynchronous schedule begins with one version of the weights, so its first forwards read version 0 until a
newer one is old enough. A run that goes on where another one was cut (`Schedule.continued`) has the versions before as
well. It reads the versions that an endless run reads: with stage s at version n of the endless run, version n - i is -i
here. The microbatches that were in flight at the cut are computed again.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import TypeAlias, assert_never

from penstock.arguments import FLAG, Entries, check_fields, entries, instance, integer, is_count, text_of
from penstock.errors import ScheduleError
from penstock.scheduling.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    HostCopy,
    Message,
    Recompute,
    Reduce,
    Update,
    WeightMove,
    format_programs,
)
from penstock.scheduling.definitions import (
    Drain,
    Guarantees,
    PipelineShape,
    ScheduleDefinition,
    Segment,
    Step,
)
from penstock.scheduling.lowering import Lowering, follow_sends, sources_of
from penstock.scheduling.norms import require_common_updates
from penstock.scheduling.orders import INFERENCE, STREAMED_INFERENCE
from penstock.scheduling.placements import Placement, Skip, StageLayout
from penstock.scheduling.residence import with_residence
from penstock.scheduling.schedule_names import SCHEDULES, find_definition, identify, names_of, schedule_hint


def _version_read(guarantees: Guarantees, stage: int, microbatch: int) -> int:
    """The version that `stage` reads for `microbatch` in a run that continues another one; below 0, one of that run."""
    return microbatch // guarantees.microbatches_per_update[stage] - guarantees.delays[stage]


def continued_action(action: Action, guarantees: Guarantees) -> Action:
    """What takes the place of `action` of a fresh run in one that continues another one."""
    if isinstance(action, Message | Reduce | HostCopy | WeightMove):
        return action
    match action:
        case Forward(stage, microbatch) | Backward(stage, microbatch) | Recompute(stage, microbatch):
            return type(action)(stage, microbatch, _version_read(guarantees, stage, microbatch))
        case BackwardInput(stage, microbatch) | BackwardWeight(stage, microbatch):
            return type(action)(stage, microbatch, _version_read(guarantees, stage, microbatch))
        case Update(stage, version):
            return Update(stage, version, version - 1 - guarantees.delays[stage])
        case _:
            assert_never(action)


Programs: TypeAlias = tuple[tuple[Action, ...], ...]
Ties: TypeAlias = tuple[tuple[int, ...], ...]

_COUNT = integer(1).but("give 1 or more")
_RULES = {
    "ranks": _COUNT,
    "microbatches": _COUNT,
    "stages_per_rank": _COUNT,
    "vertical_sync": FLAG,
    "places": _COUNT,
    **dict.fromkeys(("norms", "gathers"), FLAG),
    "replicated": instance(Placement, "a Placement", "use penstock.schedule(plan), which makes one").optional,
}


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule for a pipeline of a given size: a value that prints, compares, and yields each rank's actions.

    `method`: the name of one of Penstock's schedules, or a `ScheduleDefinition` of your own. `ranks`: the number of
    processes. `microbatches`: the number in one step, over all replicas. `stages_per_rank`: a number that the
    schedule's layout accepts. `vertical_sync`: whether all stages read one version, if the schedule supports it.
    `ties`: groups of stages that share weights; schedules in which each stage updates at its own time accept none.
    `replicated`: the ranks of the stages, if they differ from the schedule's layout; see `Schedule.placed`.
    `norms`: whether every update has the norms of the gradients of all stages, which they send each other; schedules in
    which each stage updates at its own time accept none.
    `gathers`: whether replicas update a part of the weights each and gather them, so that an update waits for all.
    `skips`: pairs of stages that are not adjacent and send each other values directly; see `choose_skips`.
    `recomputed`: the stages that compute their forwards again before their backwards, as a whole.
    `streamed`: the stages whose weights are on the host between their visits; see `residence`. `places`: how many of
    them a rank has room for at once.
    `continued`: whether the run goes on where another one was cut, and reads its last versions; see `continue_run`.

    Raises `ScheduleError` if the arguments do not fit together.
    """

    method: ScheduleDefinition | str = field(compare=False)
    ranks: int
    microbatches: int
    stages_per_rank: int = 1
    vertical_sync: bool = False
    ties: Ties = ()
    replicated: Placement | None = field(default=None, compare=False)
    norms: bool = False
    skips: tuple[Skip, ...] = ()
    recomputed: frozenset[int] = frozenset()
    streamed: frozenset[int] = frozenset()
    places: int = 2
    continued: bool = False
    gathers: bool = False
    definition: ScheduleDefinition = field(init=False, repr=False)
    shape: PipelineShape = field(init=False, repr=False)
    guarantees: Guarantees = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        definition = _find(self.method)
        check_fields(self, _RULES, ScheduleError)
        for name in ("ties", "skips"):
            object.__setattr__(self, name, _read_groups(name, getattr(self, name)))
        placement = _place_stages(self, definition)
        shape = PipelineShape(placement, self.microbatches, self.vertical_sync, _waiting(self, len(placement.stages)))
        _check_form(self, definition)
        definition.check(shape)
        derived = {"definition": definition, "shape": shape, "guarantees": definition.guarantees(shape)}
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        _check_guarantees(self)
        _check_ties(self)
        _check_norms(self)
        _check_skips(self)
        _check_streamed(self)

    @classmethod
    def placed(
        cls,
        method: ScheduleDefinition | str,
        placement: Placement,
        microbatches: int,
        *,
        vertical_sync: bool = False,
        ties: Ties = (),
        norms: bool = False,
        recomputed: frozenset[int] = frozenset(),
        streamed: frozenset[int] = frozenset(),
        places: int = 2,
    ) -> "Schedule":
        """The schedule of stages whose ranks differ from the schedule's layout, or that have replicas."""
        per_rank = len(placement.stages) // placement.length
        return cls(
            method=method,
            ranks=placement.ranks,
            microbatches=microbatches,
            stages_per_rank=per_rank,
            vertical_sync=vertical_sync,
            ties=ties,
            replicated=placement,
            norms=norms,
            recomputed=recomputed,
            streamed=streamed,
            places=places,
        )

    @property
    def name(self) -> str:
        """The name of the schedule's definition."""
        return self.definition.name

    @property
    def placement(self) -> Placement:
        """The ranks of the stages, and which rank takes which microbatch."""
        return self.shape.placement

    @property
    def stages(self) -> int:
        """The number of stages of the pipeline."""
        return self.shape.stages

    @property
    def flushes(self) -> bool:
        """Whether the pipe is empty after every step, so that there is nothing to drain."""
        return self.definition.flushes

    @property
    def deferred(self) -> frozenset[int]:
        """The stages whose updates come later than their gradients, because they need data of other stages."""
        return self.shape.waiting if self.definition.defers_updates else frozenset()

    @property
    def microbatches_per_update(self) -> int:
        """The number of microbatches that one update sums; the largest, if the stages differ."""
        return max(self.guarantees.microbatches_per_update)

    def rank_of(self, stage: int) -> int:
        """The rank of the first replica of `stage`."""
        return self.shape.rank_of(stage)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, ascending."""
        return self.shape.stages_of(rank)

    def versions(self, stage: int) -> int:
        """The number of weight versions of `stage` at once; version x is in slot ``x % versions(stage)``."""
        return self.guarantees.versions[stage]

    def in_flight(self, stage: int) -> int:
        """The most microbatches of `stage` that wait for their backward at once."""
        return self.guarantees.in_flight[stage]

    def last_microbatch(self, rank: int, stage: int, version: int) -> int | None:
        """The last microbatch of `rank` that the update of `stage` to `version` sums; None if it takes none."""
        size = self.guarantees.microbatches_per_update[stage]
        taken = self.placement.microbatches_of(rank, range((version - 1) * size, version * size))
        return taken[-1] if taken else None

    def step(self, minibatch: int) -> Programs:
        """Each rank's actions for `minibatch` (from 0): its forwards, and the backwards and updates due by then."""
        _check_count("minibatch", minibatch)
        return self._rows(Step(minibatch))

    def drain(self, minibatches: int) -> Programs:
        """Each rank's actions that finish what is in flight after `minibatches` steps; none if the schedule flushes."""
        _check_count("minibatches", minibatches)
        return self._rows(Drain(minibatches))

    def program(self, minibatches: int) -> Programs:
        """Each rank's actions for `minibatches` whole steps and the drain."""
        _check_count("minibatches", minibatches)
        segments = [*(self.step(minibatch) for minibatch in range(minibatches)), self.drain(minibatches)]
        return tuple(tuple(action for segment in segments for action in segment[rank]) for rank in range(self.ranks))

    @property
    def steps_alike(self) -> bool:
        """Whether one step is like another one. A definition of a user may order each of them otherwise."""
        return bool(self.definition.programs) or isinstance(identify(self.definition), str)

    @property
    def follows_sends(self) -> bool:
        """Whether receives follow the order of the sends: where several stages of a rank share a queue in any order."""
        layout, written = self.definition.layout, self.definition.programs
        return layout is StageLayout.V_SHAPE or (layout.has_several and bool(written))

    def row(self, rank: int, segment: Segment) -> tuple[Action, ...]:
        """The actions of `rank` alone in a step or a drain: what a worker runs, without computing the other ranks'."""
        if not self.follows_sends or not isinstance(segment, Step):
            return self._stream(self.lower(rank, segment))
        row, minibatch = _lower_step(self, rank, segment.minibatch), segment.minibatch
        order = _order_of_arrivals(self, rank, minibatch % self.placement.stride(0) if self.steps_alike else minibatch)
        return self._stream(tuple(map(row.__getitem__, order)))

    def rows(self, rank: int, segments: Iterable[Segment]) -> Iterator[tuple[Action, ...]]:
        """`row` of each of `segments`; for many of them in less time."""
        if self.follows_sends:
            return (self.row(rank, segment) for segment in segments)
        return map(self._stream, self._lower(rank, segments))

    def lower(self, rank: int, segment: Segment) -> tuple[Action, ...]:
        """The row with each receive directly before the action that uses it, in whatever order the messages arrive."""
        return next(self._lower(rank, (segment,)))

    def _lower(self, rank: int, segments: Iterable[Segment]) -> Iterator[tuple[Action, ...]]:
        lowering = Lowering(
            rank,
            self.placement,
            ties=self.ties,
            norms=self.norms,
            deferred=self.deferred,
            skips=self.skips,
            recomputed=self.recomputed,
        )
        for segment in segments:
            row = lowering.lower(self.definition.order(self.shape, rank, segment))
            yield tuple(continued_action(action, self.guarantees) for action in row) if self.continued else tuple(row)

    def _stream(self, row: tuple[Action, ...]) -> tuple[Action, ...]:
        return with_residence(row, self.streamed, self.places) if self.streamed else row

    def _rows(self, segment: Segment) -> Programs:
        return tuple(self.row(rank, segment) for rank in range(self.ranks))

    def __str__(self) -> str:
        minibatches = 1 if self.flushes else 1 + -(-self.ranks // self.microbatches)
        sync = ", vertical sync" if self.vertical_sync else ""
        if self.ranks > self.placement.length:
            sync += f", replicas {self.placement.text()}" + (" that split microbatches" if self.placement.split else "")
        head = (
            f"{self.name}: {_count(self.ranks, 'rank')}, {_count(self.stages, 'stage')}, "
            f"{_count(self.microbatches, 'microbatch')} a minibatch{sync}; {_count(minibatches, 'minibatch')}:"
        )
        return f"{head}\n{format_programs(self.program(minibatches))}"


def inference(
    ranks: int,
    stages_per_rank: int,
    microbatches: int,
    placement: Placement | None = None,
    *,
    streamed: frozenset[int] = frozenset(),
    places: int = 2,
) -> Schedule:
    """The schedule of an evaluation: forwards only, all at version 0; `placement` is `Schedule.replicated`."""
    sizes = ranks, microbatches, stages_per_rank
    if streamed:
        return Schedule(STREAMED_INFERENCE, *sizes, replicated=placement, streamed=streamed, places=places)
    return Schedule(INFERENCE, *sizes, replicated=placement)


@lru_cache(maxsize=1 << 12)
def _order_of_arrivals(schedule: Schedule, rank: int, minibatch: int) -> tuple[int, ...]:
    """The indices of a step's actions in the row of `Schedule.lower`, in the order in which messages arrive.

    Steps that assign their microbatches to the same replicas share this order, so it is cached.
    """
    placement = schedule.placement
    # Replicas that share every microbatch use the order of the first replica.
    first = placement.stages[placement.stages_of(rank)[0]][0] if placement.split else rank
    row = _lower_step(schedule, first, minibatch)
    others = {source: _lower_step(schedule, source, minibatch) for source in sources_of(row, first, placement)}
    places = {action: place for place, action in enumerate(row)}
    return tuple(places[action] for action in follow_sends(row, first, placement, others))


@lru_cache(maxsize=16)
def _lower_step(schedule: Schedule, rank: int, minibatch: int) -> tuple[Action, ...]:
    """`Schedule.lower` of a step. The order of a rank needs the rows of its neighbors, which follow or came before."""
    return schedule.lower(rank, Step(minibatch))


def _read_groups(name: str, given: object) -> tuple[tuple[int, ...], ...]:
    """The groups of stages in `given`. `ScheduleError` for anything else than lists of whole numbers."""
    groups = entries(name, given, ScheduleError)
    rule = Entries(integer().but("give groups of stages"))
    return tuple(rule.check(f"{name}[{index}]", group, ScheduleError) for index, group in enumerate(groups))


def _find(method: ScheduleDefinition | str) -> ScheduleDefinition:
    definition = find_definition(method)
    if definition is None:
        raise ScheduleError(
            f"schedule: there is no method {text_of(method)}. {schedule_hint(str(method))}Choose one of "
            f"{', '.join(map(repr, SCHEDULES))}"
        )
    return definition


def _place_stages(schedule: Schedule, definition: ScheduleDefinition) -> Placement:
    placement = schedule.replicated
    if placement is None and definition.layout is StageLayout.V_SHAPE:
        return Placement.folded(schedule.ranks)
    if placement is None:
        return Placement.straight(schedule.ranks, schedule.stages_per_rank)
    held = sorted({rank for ranks in placement.stages for rank in ranks})
    if held != list(range(schedule.ranks)):
        raise ScheduleError(
            f"schedule {definition.name!r}: expected stages on ranks 0 to {schedule.ranks - 1}, found them on {held}; "
            "number the ranks from 0 without gaps, or give Schedule.placed the placement alone"
        )
    return placement


def _check_form(schedule: Schedule, definition: ScheduleDefinition) -> None:
    per_rank, layout = schedule.stages_per_rank, definition.layout
    if not layout.accepts(per_rank):
        holds, give = ("two stages", 2) if layout is StageLayout.V_SHAPE else ("one stage", 1)
        instead = names_of(lambda each: _holds_otherwise(definition, each))
        raise ScheduleError(
            f"schedule {definition.name!r}: a rank holds {holds}, got stages_per_rank={per_rank}; give "
            f"stages_per_rank={give}, or choose {instead!r}"
        )
    if schedule.vertical_sync and not definition.has_vertical_sync:
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


def _check_guarantees(schedule: Schedule) -> None:
    """Checks that the guarantees agree with the definition and have a number for every stage or rank."""
    definition, guarantees = schedule.definition, schedule.guarantees
    stages, ranks = schedule.stages, schedule.ranks
    for name in (
        "versions",
        "in_flight",
        "microbatches_per_update",
        "pending_updates",
        "pending_weight_backwards",
        "in_flight_of_rank",
    ):
        count, what = (ranks, "rank") if name == "in_flight_of_rank" else (stages, "stage")
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
    if set(guarantees.microbatches_per_update) != {schedule.microbatches} and not definition.updates_per_microbatch:
        raise ScheduleError(
            f"schedule {definition.name!r}: expected updates of a minibatch, {schedule.microbatches} microbatches, "
            f"found updates of {guarantees.microbatches_per_update}; define it with updates_per_microbatch=True"
        )


def _waiting(schedule: Schedule, stages: int) -> frozenset[int]:
    if schedule.norms and stages > 1:
        return frozenset(range(stages))
    return frozenset(stage for group in schedule.ties for stage in group)


def _check_ties(schedule: Schedule) -> None:
    for group in schedule.ties:
        if len(group) < 2 or list(group) != sorted(set(group)) or not 0 <= group[0] <= group[-1] < schedule.stages:
            raise ScheduleError(
                f"schedule: ties {group!r}: expected two or more different stages of 0 to {schedule.stages - 1}, "
                "ascending; name the stages that share weights"
            )
        if not schedule.definition.synchronizes_updates:
            raise ScheduleError(
                f"schedule {schedule.name!r}: stages {', '.join(map(str, group))} share weights, and every stage "
                "updates at its own time, so that their copies drift apart; choose a flushing schedule "
                f"({names_of(lambda each: each.flushes)}) or {names_of(lambda each: each.defers_updates)}, untie the "
                "weights, or put the layers that share them into one stage"
            )


def _check_norms(schedule: Schedule) -> None:
    """Rejects schedules in which a stage could not receive the norms before its update."""
    if not schedule.norms:
        return
    require_common_updates(schedule.definition)
    for stage in sorted({stage for group in schedule.ties for stage in group} & schedule.deferred):
        if (replicas := schedule.placement.replicas(stage)) > 1:
            raise ScheduleError(
                f"schedule {schedule.name!r}: stage {stage} shares weights and has {replicas} replicas, so "
                "that its gradients are whole only when all stages have theirs, too late for norms; choose a flushing "
                "schedule, untie the weights, give the stage one rank, or drop norms"
            )


def _check_skips(schedule: Schedule) -> None:
    for skip in schedule.skips:
        here, there = skip if len(skip) == 2 else (-1, -1)
        if not 0 <= here < there - 1 < schedule.stages - 1 or list(schedule.skips) != sorted(set(schedule.skips)):
            raise ScheduleError(
                f"schedule: skips {schedule.skips!r}: expected different pairs of the stages 0 to "
                f"{schedule.stages - 1}, ascending, with other stages between the two; found {skip!r}. Leave out "
                "neighbors, which exchange messages anyway"
            )


def _check_streamed(schedule: Schedule) -> None:
    """Rejects schedules in which weights could not leave the device between the visits of a stage."""
    streamed, where = schedule.streamed, f"schedule {schedule.name!r}: streamed"
    if not streamed:
        return
    if wrong := sorted(stage for stage in streamed if not is_count(stage, least=0) or stage >= schedule.stages):
        raise ScheduleError(
            f"{where}: expected stages 0 to {schedule.stages - 1}, found {wrong[0]!r}; give stages of the schedule"
        )
    if not schedule.definition.updates_at_once:
        raise ScheduleError(
            f"{where}: expected a schedule that flushes, whose stages have one version of the weights, found one that "
            f"does not; choose {names_of(lambda each: each.for_streams)!r}, or keep older versions on the host with "
            "state_on_host=True and stream no stage"
        )
    if schedule.guarantees.trains and (kept := sorted(streamed - schedule.recomputed)):
        raise ScheduleError(
            f"{where}: expected stages that recompute, found stage {kept[0]}, which does not: what autograd saves in a "
            "forward holds the weights until the backward. Recompute the stage as a whole too, or do not stream it"
        )
    if tied := sorted(streamed.intersection(chain.from_iterable(schedule.ties))):
        raise ScheduleError(
            f"{where}: stage {tied[0]} shares weights with another stage, and shared weights stay on the device; leave "
            "it out, untie the weights, or put the layers that share them into one stage"
        )
    placement = schedule.placement
    for stage in sorted(streamed) if schedule.guarantees.splits and not placement.split else ():
        several = len(placement.stages_of(placement.rank_of(stage))) > 1
        if several and (replicas := placement.replicas(stage)) > schedule.microbatches:
            # A replica without one would not know in which order the others end the backwards of their stages.
            raise ScheduleError(
                f"{where}: expected a microbatch for each of the {replicas} replicas of stage {stage}, since backwards "
                f"are split, found {schedule.microbatches}; give microbatches={replicas} or more, or choose "
                f"{names_of(lambda each: each.for_streams)!r}"
            )


def _check_count(name: str, value: int) -> None:
    integer(0).but("give 0 or more").check(f"schedule: {name}", value, ScheduleError)


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number} {noun if number == 1 else plural}"
