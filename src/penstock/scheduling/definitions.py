"""What a scheduling method is: an order of compute actions, and the promises that the order keeps.

A method is data. Its `order` says what each rank computes; its `guarantees` says what that costs and which weights it
reads, and the verifier holds one against the other. So a new schedule is one file in `orders/`, and nothing else.

Laws of this file:
  1. A method knows ranks, stages, microbatches and versions: no time, no tensor, no message.
  2. An order is a pure function of its three arguments, and takes time proportional to what it yields.
  3. Beside actions an order yields marks: moments that lowering needs to know of and that no program holds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from penstock.errors import ScheduleError
from penstock.scheduling.actions import Compute
from penstock.scheduling.placements import Placement

__all__ = [
    "Drain",
    "Entry",
    "Guarantees",
    "LastUpdate",
    "NormRule",
    "Order",
    "PipelineShape",
    "ScheduleDefinition",
    "Segment",
    "Step",
    "Summed",
    "VersionRule",
    "accept_any",
]


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """The sizes of a pipeline: where its stages are, and the microbatches of a minibatch (m), over all replicas.

    `waiting`: the stages whose updates need what other stages know, so that an order may not update at once.
    """

    placement: Placement
    microbatches: int
    vertical_sync: bool = False
    waiting: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        size = self.microbatches
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ScheduleError(
                f"schedule: microbatches must be a whole number of at least 1, got {size!r}; "
                "give microbatches=1 or more"
            )

    @property
    def ranks(self) -> int:
        """How many ranks there are, replicas included."""
        return self.placement.ranks

    @property
    def stages(self) -> int:
        """How many stages the pipeline has."""
        return len(self.placement.stages)

    @property
    def stages_per_rank(self) -> int:
        """``v``."""
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

    def taken_by(self, rank: int, minibatch: int) -> range:
        """Those of them that `rank` takes."""
        return self.placement.taken_by(rank, self.microbatches_of(minibatch))

    def taken_before(self, rank: int, minibatch: int) -> int:
        """How many microbatches `rank` takes of all minibatches before `minibatch`."""
        return len(self.placement.taken_by(rank, range(minibatch * self.microbatches)))


@dataclass(frozen=True, slots=True)
class Step:
    """The part of a program that admits `minibatch`: its forwards, and the backwards and updates due by then."""

    minibatch: int


@dataclass(frozen=True, slots=True)
class Drain:
    """The part of a program that finishes what is in flight after `minibatches` steps."""

    minibatches: int


Segment: TypeAlias = Step | Drain


@dataclass(frozen=True, slots=True)
class Summed:
    """A mark: all replicas of `stage` have their gradients for the update to `version`, which comes later.

    What others wait for leaves here.
    """

    stage: int
    version: int


@dataclass(frozen=True, slots=True)
class LastUpdate:
    """A mark: `stage` has made its last update, the one to `version`, before the pipe is empty."""

    stage: int
    version: int


Entry: TypeAlias = Compute | Summed | LastUpdate
"""What an order yields."""
Order: TypeAlias = Callable[[PipelineShape, int, Segment], Iterator[Entry]]


class VersionRule(Enum):
    """Which version of its stage's weights a forward reads; the verifier recomputes each by counting updates."""

    OWN_MINIBATCH = "the version made by the updates of all earlier minibatches"
    PREVIOUS_MINIBATCH = "the version made by the updates of all earlier minibatches but one"
    NEWEST = "the newest version of its stage at that moment"
    INPUT_STAGE = "the version that the input stage read for this microbatch"
    INITIAL = "version 0, since nothing is trained"


class NormRule(Enum):
    """Whose norms of gradients a stage knows at an update; see `known_norms`."""

    NONE = "nobody's norms"
    ALL = "the norms of all stages for this update"
    LAGGED = "the norms of all stages behind it for this update, and of the stage i before it for the update 2i earlier"


@dataclass(frozen=True, slots=True)
class Guarantees:
    """What a method costs and keeps to, per stage; `verify` holds every program to it.

    `versions`: weight versions of a stage that are alive at once (version x lives in slot ``x % versions[stage]``).
    `in_flight`: microbatches whose forward is done and whose backward is not, on each replica of a stage; a backward in
    two parts is done when its weight part is, since that needs what the forward saved.
    `rule`: the version that a forward reads. `flushes`: the pipe is empty after every step.
    `microbatches_per_update`: how many backwards one update of a stage sums up, over all its replicas.
    `gradients`: updates of a stage that have gradients and are not made yet, at once; one each if it is left out.
    `halves`: of those in flight, how many have had the input part of their backward; none if it is left out.
    """

    versions: tuple[int, ...]
    in_flight: tuple[int, ...]
    rule: VersionRule
    flushes: bool
    microbatches_per_update: tuple[int, ...]
    gradients: tuple[int, ...] = ()
    halves: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.gradients:
            object.__setattr__(self, "gradients", (1,) * len(self.versions))
        if not self.halves:
            object.__setattr__(self, "halves", (0,) * len(self.versions))

    @property
    def trains(self) -> bool:
        """Whether there are backwards and updates at all."""
        return self.rule is not VersionRule.INITIAL

    @property
    def splits(self) -> bool:
        """Whether there are backwards in two parts."""
        return any(self.halves)

    @property
    def delays(self) -> tuple[int, ...]:
        """By stage: the updates between the version that a gradient is taken at and the one that it updates, once the
        pipe is full.
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


def accept_any(shape: PipelineShape) -> None:
    """The check of a method that runs with any number of ranks and microbatches."""


@dataclass(frozen=True, slots=True)
class ScheduleDefinition:
    """A scheduling method: its `name`, the `order` of a rank's actions, and its `guarantees` for a shape of pipeline.

    `check` raises `ScheduleError` for a shape that the method cannot run, and says what to do.
    `interleaves`: a rank may hold several stages. `syncs`: the method has a vertical-sync form. `defers`: the order of
    a method without a flush makes the updates of waiting stages so late that what they need is there. `folds`: a rank
    holds two stages as in `Placement.folded`, so that activations and gradients share queues, in whichever order.
    """

    name: str
    order: Order
    guarantees: Callable[[PipelineShape], Guarantees]
    check: Callable[[PipelineShape], None] = accept_any
    interleaves: bool = False
    syncs: bool = False
    defers: bool = False
    folds: bool = False
