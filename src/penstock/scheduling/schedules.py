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

from penstock.arguments import FLAG, Entries, check_fields, entries, instance, integer
from penstock.errors import ScheduleError, counted
from penstock.scheduling.actions import (
    Action,
    HostCopy,
    Message,
    Reduce,
    Update,
    WeightMove,
    WeightReading,
    format_programs,
)
from penstock.scheduling.definitions import Drain, Guarantees, PipelineShape, ScheduleDefinition, Segment, Step
from penstock.scheduling.lowering import Lowering, follow_sends, sources_of
from penstock.scheduling.orders import INFERENCE, STREAMED_INFERENCE
from penstock.scheduling.placements import Placement, Skip, StageLayout
from penstock.scheduling.residence import with_residence
from penstock.scheduling.schedule_checks import (
    check_form,
    check_guarantees,
    check_norms,
    check_ranks,
    check_skips,
    check_streamed,
    check_ties,
    existing_definition,
)
from penstock.scheduling.schedule_names import identify


def continued_action(action: Action, guarantees: Guarantees) -> Action:
    """What takes the place of `action` of a fresh run in one that continues another one; versions below 0 are of the
    other run.
    """
    delay = guarantees.delays[action.stage]
    if isinstance(action, WeightReading):
        version = action.microbatch // guarantees.microbatches_per_update[action.stage] - delay
        return type(action)(action.stage, action.microbatch, version)
    if isinstance(action, Update):
        return Update(action.stage, action.version, action.version - 1 - delay)
    if isinstance(action, Message | Reduce | HostCopy | WeightMove):
        return action
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
        definition = existing_definition(self.method)
        check_fields(self, _RULES, ScheduleError)
        for name in ("ties", "skips"):
            object.__setattr__(self, name, _read_groups(name, getattr(self, name)))
        if (placement := self.replicated) is not None:
            check_ranks(definition, placement, self.ranks)
        elif definition.layout is StageLayout.V_SHAPE:
            placement = Placement.folded(self.ranks)
        else:
            placement = Placement.straight(self.ranks, self.stages_per_rank)
        stages, ties = len(placement.stages), self.ties
        waiting = frozenset(range(stages) if self.norms and stages > 1 else chain.from_iterable(ties))
        shape = PipelineShape(placement, self.microbatches, self.vertical_sync, waiting)
        check_form(definition, self.stages_per_rank, vertical_sync=self.vertical_sync)
        definition.check(shape)
        guarantees = definition.guarantees(shape)
        check_guarantees(definition, shape, guarantees)
        check_ties(definition, stages, ties)
        if self.norms:
            check_norms(definition, placement, ties)
        check_skips(stages, self.skips)
        if streamed := self.streamed:
            check_streamed(definition, shape, guarantees, streamed=streamed, recomputed=self.recomputed, ties=ties)
        for name, value in {"definition": definition, "shape": shape, "guarantees": guarantees}.items():
            object.__setattr__(self, name, value)

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
            f"{self.name}: {counted(self.ranks, 'rank')}, {counted(self.stages, 'stage')}, "
            f"{counted(self.microbatches, 'microbatch')} a minibatch{sync}; {counted(minibatches, 'minibatch')}:"
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


def _check_count(name: str, value: int) -> None:
    integer(0).but("give 0 or more").check(f"schedule: {name}", value, ScheduleError)
