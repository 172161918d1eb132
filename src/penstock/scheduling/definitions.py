"""Schedule definitions: an order of compute actions, and what the order guarantees.

A definition is data. Its `order` yields what each rank computes. Its `guarantees` state how much memory that takes and
which weights it reads. The verifier checks one against the other. Every property of a schedule that the rest of
Penstock uses is a field here, so that a new schedule is one value in one file.

Rules of this file:
  1. A definition uses ranks, stages, microbatches and versions: no time, no tensor, no message.
  2. An order is a pure function of its three arguments, and takes time proportional to what it yields; or once, to what
     all ranks yield.
  3. Beside actions an order yields marks: events that lowering needs and that no program contains.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import wraps
from typing import TypeAlias

from penstock.arguments import FLAG, TEXT, Entries, FieldRules, check_fields, function, instance, integer, text_of
from penstock.errors import ScheduleError
from penstock.scheduling.actions import Backward, BackwardInput, BackwardWeight, Compute, Forward, HostCopy
from penstock.scheduling.placements import Placement, StageLayout


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """Holds the sizes of a pipeline: its placement, and the microbatches of a minibatch (m), over all replicas.

    `waiting`: the stages whose updates need data of other stages, so an order may have to defer these updates.
    """

    placement: Placement
    microbatches: int
    vertical_sync: bool = False
    waiting: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        count = integer(1).but("give microbatches=1 or more")
        count.check("schedule: microbatches", self.microbatches, ScheduleError)

    @property
    def ranks(self) -> int:
        """The number of ranks, replicas included."""
        return self.placement.ranks

    @property
    def stages(self) -> int:
        """The number of stages of the pipeline."""
        return len(self.placement.stages)

    @property
    def stages_per_rank(self) -> int:
        """``v``: the number of stages that each rank holds."""
        return self.stages // self.placement.length

    def rank_of(self, stage: int) -> int:
        """The rank of the first replica of `stage`."""
        return self.placement.rank_of(stage)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, ascending."""
        return self.placement.stages_of(rank)

    def microbatches_of(self, minibatch: int) -> range:
        """The global numbers of the microbatches of `minibatch`."""
        return range(minibatch * self.microbatches, (minibatch + 1) * self.microbatches)

    def rank_microbatches(self, rank: int, minibatch: int) -> range:
        """The microbatches of `minibatch` that `rank` takes: all of them if its stages have no replicas."""
        return self.placement.microbatches_of(rank, self.microbatches_of(minibatch))

    def microbatches_before(self, rank: int, minibatch: int) -> int:
        """The number of microbatches that `rank` takes from all minibatches before `minibatch`."""
        return len(self.placement.microbatches_of(rank, range(minibatch * self.microbatches)))


@dataclass(frozen=True, slots=True)
class Step:
    """Names the segment that admits `minibatch`: its forwards, and the backwards and updates due by then."""

    minibatch: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Names the segment of a program that finishes what is in flight after `minibatches` steps."""

    minibatches: int


Segment: TypeAlias = Step | Drain


@dataclass(frozen=True, slots=True)
class Summed:
    """Marks that all replicas of `stage` have their gradients for the update to `version`, which comes later.

    Lowering puts the messages that other stages wait for here.
    """

    stage: int
    version: int


Entry: TypeAlias = Compute | HostCopy | Summed
"""An action or a mark: the type that an order yields."""
Order: TypeAlias = Callable[[PipelineShape, int, Segment], Iterator[Entry]]
"""Yields what a rank computes in a segment."""


def flushing(order: Callable[[PipelineShape, int, int], Iterator[Entry]]) -> Order:
    """The order of a schedule that flushes, from what a rank computes for a minibatch: a drain has nothing to do."""

    @wraps(order)
    def order_of_segment(shape: PipelineShape, rank: int, segment: Segment) -> Iterator[Entry]:
        return order(shape, rank, segment.minibatch) if isinstance(segment, Step) else iter(())

    return order_of_segment


class VersionRule(Enum):
    """Says which version of its stage's weights a forward reads; the verifier recomputes each by counting updates."""

    OWN_MINIBATCH = "the version made by the updates of all earlier minibatches"
    PREVIOUS_MINIBATCH = "the version made by the updates of all earlier minibatches but one"
    NEWEST = "the newest version of its stage at that moment"
    INPUT_STAGE = "the version that the input stage read for this microbatch"
    INITIAL = "version 0, since nothing is trained"


@dataclass(frozen=True, slots=True)
class Guarantees:
    """States the limits and versions of a schedule; `verify` checks every program against them.

    All fields but `rule` have one number per stage or per rank.

    `versions`: weight versions of a stage that exist at once (version x is in slot ``x % versions[stage]``).
    `in_flight`: microbatches whose forward is done and whose backward is not, on each replica of a stage. A split
    backward is done when its weight backward is, because that needs the activations of the forward.
    `rule`: the version that a forward reads.
    `microbatches_per_update`: the microbatches whose gradients one update of a stage sums, over all its replicas.
    `pending_updates`: updates of a stage that have gradients and are not made yet, at once.
    `pending_weight_backwards`: the microbatches in flight whose input backward is done.
    `in_flight_of_rank`: the microbatches in flight on all stages of a rank together.
    """

    versions: tuple[int, ...]
    in_flight: tuple[int, ...]
    rule: VersionRule
    microbatches_per_update: tuple[int, ...]
    pending_updates: tuple[int, ...]
    pending_weight_backwards: tuple[int, ...]
    in_flight_of_rank: tuple[int, ...]

    @classmethod
    def of(
        cls,
        shape: PipelineShape,
        in_flight: Sequence[int],
        *,
        versions: Sequence[int] | None = None,
        rule: VersionRule = VersionRule.OWN_MINIBATCH,
        microbatches_per_update: Sequence[int] | None = None,
        pending_updates: Sequence[int] | None = None,
        pending_weight_backwards: Sequence[int] | None = None,
        in_flight_of_rank: Sequence[int] | None = None,
    ) -> "Guarantees":
        """Makes the guarantees of a schedule; the defaults are those of one that flushes.

        The defaults: one version, one update per minibatch, made before the gradients of the next one, no split
        backward, and for a rank the sum of what is in flight on its stages.
        """
        stages, ranks = range(shape.stages), range(shape.ranks)
        each = [in_flight[stage] for stage in stages]
        sums = [sum(each[stage] for stage in shape.stages_of(rank)) for rank in ranks]
        return cls(
            versions=(1,) * shape.stages if versions is None else tuple(versions),
            in_flight=tuple(in_flight),
            rule=rule,
            microbatches_per_update=tuple(microbatches_per_update or (shape.microbatches for _ in stages)),
            pending_updates=tuple(pending_updates or (1 for _ in stages)),
            pending_weight_backwards=tuple(pending_weight_backwards or (0 for _ in stages)),
            in_flight_of_rank=tuple(in_flight_of_rank or sums),
        )

    @property
    def trains(self) -> bool:
        """Whether there are backwards and updates."""
        return self.rule is not VersionRule.INITIAL

    @property
    def splits(self) -> bool:
        """Whether there are split backwards."""
        return any(self.pending_weight_backwards)

    @property
    def delays(self) -> tuple[int, ...]:
        """The delay of each stage once the pipe is full.

        It counts the updates between the version that a gradient is computed at and the version that it updates.
        """
        match self.rule:
            case VersionRule.NEWEST:
                return tuple(count - 1 for count in self.versions)
            case VersionRule.INPUT_STAGE:
                return (self.versions[0] - 1,) * len(self.versions)
            case VersionRule.PREVIOUS_MINIBATCH:
                return (1,) * len(self.versions)
            case VersionRule.OWN_MINIBATCH | VersionRule.INITIAL:
                return (0,) * len(self.versions)


def count_in_flight(order: Order, shape: PipelineShape) -> Guarantees:
    """The guarantees of an order that flushes: what is in flight is counted along the row of each rank in a step."""
    in_flight, pending = [0] * shape.stages, [0] * shape.stages
    of_ranks: Counter[tuple[int, ...]] = Counter()
    for rank in range(shape.ranks):
        now, halves = Counter[int](), Counter[int]()
        held = shape.stages_of(rank)
        for action in order(shape, rank, Step(0)):
            stage = action.stage
            now[stage] += isinstance(action, Forward) - isinstance(action, Backward | BackwardWeight)
            halves[stage] += isinstance(action, BackwardInput) - isinstance(action, BackwardWeight)
            in_flight[stage] = max(in_flight[stage], now[stage])
            pending[stage] = max(pending[stage], halves[stage])
            of_ranks[held] = max(of_ranks[held], now.total())
    return Guarantees.of(
        shape,
        in_flight,
        pending_weight_backwards=pending,
        # Replicas take the microbatches of one another in other steps.
        in_flight_of_rank=[of_ranks[shape.stages_of(rank)] for rank in range(shape.ranks)],
    )


def _accept_any(shape: PipelineShape) -> None:
    """Accepts every shape: the check of a schedule that runs with any number of ranks and microbatches."""


_OWN = "docs/architecture.md says what a schedule of your own consists of"
_RULES: FieldRules = {
    "order": function(("shape", "rank", "segment"), _OWN),
    "guarantees": function(("shape",), _OWN),
    "check": function(("shape",), _OWN),
    "layout": instance(StageLayout, "a StageLayout", "give one, or leave it out"),
    "flushes": FLAG,
    "splits_backward": FLAG,
    "updates_per_microbatch": FLAG,
    "has_vertical_sync": FLAG,
    "defers_updates": FLAG,
    "saves_memory": FLAG,
    "for_streams": FLAG,
    "programs": Entries(TEXT),
}


@dataclass(frozen=True, slots=True, repr=False)
class ScheduleDefinition:
    """Defines a schedule: the `order` of a rank's actions, its `guarantees` for a pipeline's shape, and properties.

    Pass one to `Pipeline`, `plan`, `Plan` or `Schedule` in place of a name to use a schedule of your own.
    """

    name: str
    order: Order
    guarantees: Callable[[PipelineShape], Guarantees]
    check: Callable[[PipelineShape], None] = _accept_any
    """Raises `ScheduleError` for a shape that the schedule cannot run, and says what to do."""
    layout: StageLayout = StageLayout.ONE_PER_RANK
    """In a V, activations and gradients share queues, and receives follow the order of sends."""
    flushes: bool = True
    """Whether the pipe is empty after every step, so that training equals that on one device."""
    splits_backward: bool = False
    """Whether backwards are split into an input backward and a weight backward."""
    updates_per_microbatch: bool = False
    """Whether an update sums a fixed number of microbatches, as one from each replica, instead of a minibatch."""
    has_vertical_sync: bool = False
    """Whether the schedule accepts `vertical_sync`: all stages read the version that the input stage read."""
    defers_updates: bool = False
    """Whether updates of waiting stages, in a schedule without a flush, come after the data that they need arrives."""
    saves_memory: bool = False
    """Whether it keeps less than others of its layout and takes longer: sought by name and where memory is limited."""
    for_streams: bool = False
    """Whether it visits each stage once each way, for stages that are streamed: sought by name and for these."""
    programs: tuple[str, ...] = ()
    """What each rank computes in a step, where `define_by_programs` made the schedule; the file of a plan has it."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise ScheduleError(
                f"ScheduleDefinition: expected a name, got {text_of(self.name)}; plans and messages name the "
                "schedule by it, so give it one"
            )
        check_fields(self, _RULES, ScheduleError)

    @property
    def synchronizes_updates(self) -> bool:
        """Whether all stages make the same updates, each late enough to use data of all other stages."""
        return self.flushes or self.defers_updates

    @property
    def updates_at_once(self) -> bool:
        """Whether the updates of a step could all be made at its end: no action of the step reads the new weights."""
        return self.flushes and not self.updates_per_microbatch

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"ScheduleDefinition({self.name!r})"
