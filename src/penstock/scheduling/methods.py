"""What a scheduling method is: an order of compute actions, and the promises that the order keeps.

A method is data. Its `order` says what each rank computes; its `promise` says what that costs and which weights it
reads, and the verifier holds one against the other. So a new schedule is one file in `orders/`, and nothing else.

Laws of this file:
  1. A method knows ranks, stages, microbatches and versions: no time, no tensor, no message.
  2. An order is a pure function of its three arguments, and takes time proportional to what it yields.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from penstock.errors import ScheduleError
from penstock.scheduling.actions import Compute
from penstock.scheduling.placements import Placement

__all__ = ["Drain", "Method", "Order", "Part", "Promise", "Shape", "Step", "VersionRule", "accept_any"]


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a pipeline: where its stages are, and the microbatches of a minibatch (m), over all replicas."""

    placement: Placement
    microbatches: int
    vertical_sync: bool = False

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


Part: TypeAlias = Step | Drain
Order: TypeAlias = Callable[[Shape, int, Part], Iterator[Compute]]


class VersionRule(Enum):
    """Which version of its stage's weights a forward reads; the verifier recomputes each by counting updates."""

    OWN_MINIBATCH = "the version made by the updates of all earlier minibatches"
    PREVIOUS_MINIBATCH = "the version made by the updates of all earlier minibatches but one"
    NEWEST = "the newest version of its stage at that moment"
    INPUT_STAGE = "the version that the input stage read for this microbatch"
    INITIAL = "version 0, since nothing is trained"


@dataclass(frozen=True, slots=True)
class Promise:
    """What a method costs and keeps to, per stage; `verify` holds every program to it.

    `versions`: weight versions of a stage that are alive at once (version x lives in slot ``x % versions[stage]``).
    `in_flight`: microbatches whose forward is done and whose backward is not, on each replica of a stage.
    `rule`: the version that a forward reads. `flushes`: the pipe is empty after every step.
    `microbatches_per_update`: how many backwards one update of a stage sums up, over all its replicas.
    """

    versions: tuple[int, ...]
    in_flight: tuple[int, ...]
    rule: VersionRule
    flushes: bool
    microbatches_per_update: tuple[int, ...]

    @property
    def trains(self) -> bool:
        """Whether there are backwards and updates at all."""
        return self.rule is not VersionRule.INITIAL


def accept_any(shape: Shape) -> None:
    """The check of a method that runs with any number of ranks and microbatches."""


@dataclass(frozen=True, slots=True)
class Method:
    """A scheduling method: its `name`, the `order` of a rank's actions, and its `promise` for a pipeline of some shape.

    `check` raises `ScheduleError` for a shape that the method cannot run, and says what to do.
    `interleaves`: a rank may hold several stages. `syncs`: the method has a vertical-sync form.
    """

    name: str
    order: Order
    promise: Callable[[Shape], Promise]
    check: Callable[[Shape], None] = accept_any
    interleaves: bool = False
    syncs: bool = False
