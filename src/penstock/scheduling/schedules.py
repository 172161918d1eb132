"""The schedule: what every rank does, in order, for each minibatch and for the drain.

One value with many readers: the verifier, the simulator, the pictures and the worker all take their actions from here,
so what is proved, predicted, drawn and run is the same thing.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

from penstock.errors import ScheduleError
from penstock.scheduling.actions import Action, format_programs
from penstock.scheduling.arrivals import follow_sends, sources_of
from penstock.scheduling.definitions import (
    Drain,
    Guarantees,
    NormRule,
    PipelineShape,
    ScheduleDefinition,
    Segment,
    Step,
)
from penstock.scheduling.lowering import lower_row
from penstock.scheduling.orders import INFERENCE, METHODS
from penstock.scheduling.placements import Placement
from penstock.values.crossings import Skip
from penstock.values.plans import Plan, schedule_hint

__all__ = ["Programs", "Schedule", "inference", "schedule"]

Programs: TypeAlias = tuple[tuple[Action, ...], ...]
Ties: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A scheduling method for a pipeline of some size: a value that prints, compares, and gives each rank's actions.

    `method`: the method's name. `ranks`: the number of processes. `microbatches`: how many one step carries, over all
    replicas. `stages_per_rank`: any number with 'interleaved', 2 with 'zb-v'. `vertical_sync`: with 'pipedream' only.
    `ties`: groups of stages that share weights; not with 'pipedream', whose stages update at different times.
    `replicated`: where the stages are, if it is not stage s on rank s mod `ranks` alone; see `Schedule.placed`.
    `norms`: whether stages tell each other the norms of their gradients, as `known_norms` says; an inference has none.
    `skips`: pairs of stages, others between them, that send each other values directly; see `choose_skips`.
    `methods`: where the name is looked up; give your own `ScheduleDefinition` here.

    `ScheduleError` says what does not fit.
    """

    method: str
    ranks: int
    microbatches: int
    stages_per_rank: int = 1
    vertical_sync: bool = False
    ties: Ties = ()
    replicated: Placement | None = None
    norms: bool = False
    skips: tuple[Skip, ...] = ()
    methods: tuple[ScheduleDefinition, ...] = field(default=METHODS, repr=False)
    shape: PipelineShape = field(init=False, repr=False, compare=False)
    guarantees: Guarantees = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        method = _find_method(self.method, self.methods)
        placement = _place(self, method)
        waiting = _waiting(self, len(placement.stages))
        shape = PipelineShape(placement, self.microbatches, self.vertical_sync, waiting)
        if method.folds and self.stages_per_rank != 2:
            raise ScheduleError(
                f"schedule {method.name!r}: a rank holds two stages, got stages_per_rank={self.stages_per_rank}; give "
                "stages_per_rank=2, or choose 'zb-h1'"
            )
        if self.stages_per_rank != 1 and not (method.interleaves or method.folds):
            raise ScheduleError(
                f"schedule {method.name!r}: a rank holds one stage, got stages_per_rank={self.stages_per_rank}; "
                "give stages_per_rank=1, or choose 'interleaved'"
            )
        if self.vertical_sync and not method.syncs:
            raise ScheduleError(
                f"schedule {method.name!r}: vertical_sync=True belongs to 'pipedream' only; drop it, or choose "
                "'pipedream'"
            )
        method.check(shape)
        # Only the method that was found is kept, so that schedules compare by what they do.
        object.__setattr__(self, "methods", (method,))
        straight = Placement.straight(shape.placement.length, self.stages_per_rank)
        object.__setattr__(self, "replicated", None if shape.placement == straight else shape.placement)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "guarantees", method.guarantees(shape))
        _check_ties(self, method)
        _check_norms(self)
        _check_skips(self)

    @classmethod
    def placed(
        cls,
        method: str,
        placement: Placement,
        microbatches: int,
        *,
        vertical_sync: bool = False,
        ties: Ties = (),
        norms: bool = False,
    ) -> "Schedule":
        """The schedule of stages that are somewhere else than one on each rank in turn, or have replicas."""
        per_rank = len(placement.stages) // placement.length
        return cls(method, placement.ranks, microbatches, per_rank, vertical_sync, ties, placement, norms)

    @property
    def placement(self) -> Placement:
        """Where the stages are, and which rank takes which microbatch."""
        return self.shape.placement

    @property
    def stages(self) -> int:
        """How many stages the pipeline has."""
        return self.shape.stages

    @property
    def flushes(self) -> bool:
        """Whether the pipe is empty after every step, so that there is nothing to drain."""
        return self.guarantees.flushes

    @property
    def deferred(self) -> frozenset[int]:
        """The stages whose updates come later than their gradients, since they need what other stages know."""
        (method,) = self.methods
        return self.shape.waiting if method.defers else frozenset()

    @property
    def norm_rule(self) -> NormRule:
        """Whose norms of gradients a stage knows at an update."""
        (method,) = self.methods
        if not self.norms or not self.guarantees.trains:
            return NormRule.NONE
        return NormRule.ALL if self.flushes or method.defers else NormRule.LAGGED

    @property
    def microbatches_per_update(self) -> int:
        """How many microbatches one update of a stage sums up; of a stage with the most, where they differ."""
        return max(self.guarantees.microbatches_per_update)

    def rank_of(self, stage: int) -> int:
        """The rank that holds `stage`; the first one of its replicas."""
        return self.shape.rank_of(stage)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, ascending."""
        return self.shape.stages_of(rank)

    def versions(self, stage: int) -> int:
        """How many weight versions of `stage` are alive at once; version x lives in slot ``x % versions(stage)``."""
        return self.guarantees.versions[stage]

    def in_flight(self, stage: int) -> int:
        """How many microbatches of `stage` wait for their backward at once, at most."""
        return self.guarantees.in_flight[stage]

    def last_taken(self, rank: int, stage: int, version: int) -> int | None:
        """The last of the microbatches that `rank` takes of those that the update of `stage` to `version` sums up."""
        size = self.guarantees.microbatches_per_update[stage]
        taken = self.placement.taken_by(rank, range((version - 1) * size, version * size))
        return taken[-1] if taken else None

    def step(self, minibatch: int) -> Programs:
        """Each rank's actions for `minibatch` (from 0): its forwards, and the backwards and updates due by then."""
        _check_count("minibatch", minibatch)
        return self._rows(Step(minibatch))

    def drain(self, minibatches: int) -> Programs:
        """Each rank's actions that finish what is in flight after `minibatches` steps; empty for flushing methods."""
        _check_count("minibatches", minibatches)
        return self._rows(Drain(minibatches))

    def program(self, minibatches: int) -> Programs:
        """Each rank's actions for `minibatches` whole steps and the drain."""
        parts = [*(self.step(minibatch) for minibatch in range(minibatches)), self.drain(minibatches)]
        return tuple(tuple(action for part in parts for action in part[rank]) for rank in range(self.ranks))

    def row(self, rank: int, part: Segment) -> tuple[Action, ...]:
        """The actions of `rank` alone in a step or a drain: what a worker runs, at no cost for the other ranks."""
        (method,) = self.methods
        row = self.lower(rank, part)
        if not method.folds or not isinstance(part, Step):
            return row
        return tuple(row[place] for place in _order_of_arrivals(self, rank, part.minibatch % self.placement.stride(0)))

    def lower(self, rank: int, part: Segment) -> tuple[Action, ...]:
        """The same with each receive directly before what uses it, whatever was sent before."""
        (method,) = self.methods
        order = method.order(self.shape, rank, part)
        return lower_row(order, rank, self.placement, self.ties, self.norm_rule, self.deferred, self.skips)

    def _rows(self, part: Segment) -> Programs:
        return tuple(self.row(rank, part) for rank in range(self.ranks))

    def __str__(self) -> str:
        minibatches = 1 if self.flushes else 1 + -(-self.ranks // self.microbatches)
        sync = ", vertical sync" if self.vertical_sync else ""
        if self.ranks > self.placement.length:
            sync += f", replicas {self.placement.text()}" + (" that split microbatches" if self.placement.split else "")
        head = (
            f"{self.method}: {_count(self.ranks, 'rank')}, {_count(self.stages, 'stage')}, "
            f"{_count(self.microbatches, 'microbatch')} a minibatch{sync}; {_count(minibatches, 'minibatch')}:"
        )
        return f"{head}\n{format_programs(self.program(minibatches))}"


def schedule(plan: Plan) -> Schedule:
    """The schedule of `plan`; `ScheduleError` if its numbers do not fit its method.

    With tensor parallelism a rank of the schedule is the group of ranks that hold a replica together: schedule rank g
    stands for the ranks from ``g * t`` on.
    """
    placement = Placement(
        tuple(
            tuple(rank // plan.tensor_parallel for rank in stage.ranks[:: plan.tensor_parallel])
            for stage in plan.stages
        ),
        split=plan.routing == "split" and max(plan.replicas) > 1,
    )
    return Schedule.placed(plan.schedule, placement, plan.microbatches, vertical_sync=plan.vertical_sync)


def inference(ranks: int, stages_per_rank: int, microbatches: int, placement: Placement | None = None) -> Schedule:
    """The schedule of an evaluation: forwards only, all at version 0; `placement` as `Schedule.replicated`."""
    return Schedule(INFERENCE.name, ranks, microbatches, stages_per_rank, replicated=placement, methods=(INFERENCE,))


@lru_cache(maxsize=1 << 12)
def _order_of_arrivals(schedule: Schedule, rank: int, minibatch: int) -> tuple[int, ...]:
    """The places of the actions of a step as `Schedule.lower` has them, in the order in which messages arrive.

    Steps that deal out their microbatches alike have it in common, so that it is worked out once.
    """
    placement = schedule.placement
    # Replicas that share every microbatch receive in the order of the first of them.
    first = placement.stages[placement.stages_of(rank)[0]][0] if placement.split else rank
    row = schedule.lower(first, Step(minibatch))
    others = {source: schedule.lower(source, Step(minibatch)) for source in sources_of(row, first, placement)}
    places = {action: place for place, action in enumerate(row)}
    return tuple(places[action] for action in follow_sends(row, first, placement, others))


def _find_method(name: str, methods: tuple[ScheduleDefinition, ...]) -> ScheduleDefinition:
    for method in methods:
        if method.name == name:
            return method
    names = [method.name for method in methods]
    hint = schedule_hint(str(name), names)
    raise ScheduleError(f"schedule: there is no method {name!r}. {hint}Choose one of {', '.join(map(repr, names))}")


def _place(schedule: Schedule, method: ScheduleDefinition) -> Placement:
    placement = schedule.replicated
    if placement is None and method.folds:
        return Placement.folded(schedule.ranks)
    if placement is None:
        return Placement.straight(schedule.ranks, schedule.stages_per_rank)
    held = sorted({rank for ranks in placement.stages for rank in ranks})
    if held != list(range(schedule.ranks)):
        raise ScheduleError(
            f"schedule {schedule.method!r}: expected stages on ranks 0 to {schedule.ranks - 1}, found them on {held}; "
            "number the ranks from 0 without gaps, or give Schedule.placed the placement alone"
        )
    return placement


def _waiting(schedule: Schedule, stages: int) -> frozenset[int]:
    if schedule.norms and stages > 1:
        return frozenset(range(stages))
    return frozenset(stage for group in schedule.ties for stage in group)


def _check_ties(schedule: Schedule, method: ScheduleDefinition) -> None:
    for group in schedule.ties:
        if len(group) < 2 or list(group) != sorted(set(group)) or not 0 <= group[0] <= group[-1] < schedule.stages:
            raise ScheduleError(
                f"schedule: ties {group!r}: expected two or more different stages of 0 to {schedule.stages - 1}, "
                "ascending; name the stages that share weights"
            )
        if not (schedule.flushes or method.defers):
            raise ScheduleError(
                f"schedule {schedule.method!r}: stages {', '.join(map(str, group))} share weights, and every stage "
                "updates at its own time, so that their copies drift apart; choose a flushing schedule (gpipe, "
                "1f1b-flush, interleaved, spp, zb-h1, zb-v) or 2bw, untie the weights, or put the layers that share "
                "them into one stage"
            )


def _check_norms(schedule: Schedule) -> None:
    """What nobody could know in time."""
    placement = schedule.placement
    if schedule.norm_rule is NormRule.LAGGED and not placement.split and not placement.equal(range(schedule.stages)):
        raise ScheduleError(
            f"schedule {schedule.method!r}: norms need equally many replicas of every stage, got {placement.text()}: "
            "stages that update after different numbers of microbatches have no common update; give them equal "
            "numbers, let replicas split microbatches, drop norms, or choose another schedule"
        )
    for stage in sorted({stage for group in schedule.ties for stage in group}):
        if schedule.norm_rule is NormRule.ALL and stage in schedule.deferred and placement.replicas(stage) > 1:
            raise ScheduleError(
                f"schedule {schedule.method!r}: stage {stage} shares weights and has {placement.replicas(stage)} "
                "replicas, so that its gradients are whole only when all stages have theirs, too late for norms; "
                "choose a flushing schedule, untie the weights, give the stage one rank, or drop norms"
            )


def _check_skips(schedule: Schedule) -> None:
    for skip in schedule.skips:
        here, there = skip
        if not 0 <= here < there - 1 < schedule.stages - 1 or list(schedule.skips) != sorted(set(schedule.skips)):
            raise ScheduleError(
                f"schedule: skips {schedule.skips!r}: expected different pairs of the stages 0 to "
                f"{schedule.stages - 1}, ascending, with other stages between the two; found {skip!r}. Leave out "
                "neighbours, which talk anyway"
            )


def _check_count(name: str, value: int) -> None:
    if value < 0:
        raise ScheduleError(f"schedule: {name} is counted from 0, got {value}; give 0 or more")


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number} {noun if number == 1 else plural}"
