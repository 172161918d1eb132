"""The choices that the user fixed, and the planner queries that they leave.

The search tries all values of every choice that is not fixed: planner, schedule, microbatches and so on. A query is one
call of one planner. Combinations that make no sense are left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, get_args

from penstock.arguments import FLAG, check_fields, choice, integer, number, text_of
from penstock.errors import PlanError, suggestion
from penstock.planning.memory import OPTIMIZER_COPIES
from penstock.planning.requests import PlannerName, Request, can_run
from penstock.planning.stage_costs import AllReduce, simulator_options
from penstock.planning.two_bw.pipeline_searches import PIPELINE_SCHEDULES
from penstock.scheduling.definitions import ScheduleDefinition
from penstock.scheduling.orders import METHODS, SPP
from penstock.scheduling.placements import StageLayout
from penstock.scheduling.schedule_names import (
    SCHEDULES,
    find_definition,
    has_taken_name,
    identify,
    names_of,
    schedule_hint,
)
from penstock.simulating.assumptions import Options
from penstock.values.clusters import Cluster
from penstock.values.plans import MICROBATCHES, Plan
from penstock.values.profiles import Profile

MICROBATCHES_PER_DEVICE = 4
"""The microbatches per device in the default minibatch. A flush then idles for about a fifth of the time."""

_MOST_FLAT = 128
"""With more devices the planner `2bw` runs instead of `pipedream`, unless the number of stages is given."""


_DEPTHS = (48, 32, 24, 16, 12, 8, 6, 4, 3, 2)
"""Stages of straight pipelines, beside the most that there can be: on slow links fewer are faster."""


@dataclass(frozen=True, slots=True)
class PlannerQuery:
    """A call of one planner for one profile and one request."""

    planner: str
    profile: Profile
    request: Request
    named: bool = False
    """Whether the user named the planner."""


@dataclass(frozen=True, slots=True)
class PlanConstraints:
    """Holds the fixed choices; None leaves a choice to the search. `PlanError` names a choice that makes no sense."""

    planner: str | None = None
    schedule: ScheduleDefinition | str | None = None
    microbatches: int | None = None
    batch_size: int | None = None
    stages: int | None = None
    stages_per_rank: int | None = None
    straight: bool = False
    synchronous: bool | None = None
    """Whether only schedules that train as one device does are planned for; by default unless a schedule, a planner or
    an option of other schedules is named."""
    vertical_sync: bool = False
    recompute: bool | None = None
    allreduce: AllReduce = "ring"
    optimizer_copies: float = OPTIMIZER_COPIES
    shared_nic: bool = False
    whole_backwards: bool = False
    every_device: bool = False
    state_on_host: bool = False
    shard_optimizer: bool = False
    streamed: bool | None = None
    """Whether stages are streamed; by default where nothing fits otherwise."""
    tied_layers: tuple[tuple[int, ...], ...] = ()
    """Groups of layers that share trained weights. A stage that shares them with another one is not streamed."""

    def __post_init__(self) -> None:
        planners = tuple(map(str, PlannerName))
        if self.planner is not None and self.planner not in planners:
            _refuse("planner", self.planner, planners, suggestion(str(self.planner), planners))
        if self.schedule is not None:
            definition = find_definition(self.schedule)
            if definition is None or has_taken_name(definition):
                _refuse("schedule", self.schedule, SCHEDULES, schedule_hint(str(self.schedule)))
            object.__setattr__(self, "schedule", identify(definition))
        counts = dict.fromkeys(("batch_size", "stages", "stages_per_rank"), integer(1).optional)
        names = ("straight", "vertical_sync", "shared_nic", "whole_backwards", "every_device")
        flags = dict.fromkeys((*names, "state_on_host", "shard_optimizer"), FLAG)
        choices = dict.fromkeys(("recompute", "synchronous", "streamed"), FLAG.optional)
        more = {**choices, "optimizer_copies": number(0), "allreduce": choice(get_args(AllReduce))}
        check_fields(self, {"microbatches": MICROBATCHES.optional, **counts, **flags, **more}, PlanError)
        if self.synchronous is None:
            object.__setattr__(self, "synchronous", not (self.schedule or self.planner or self.vertical_sync))
        if self.microbatches is not None and self.batch_size is not None:
            raise PlanError(
                f"microbatches and batch_size: expected one of them, found {self.microbatches} and {self.batch_size}: "
                "the number of microbatches is the batch size over the microbatch size"
            )
        if not self.schedules:
            raise PlanError(self._contradiction())

    @property
    def schedules(self) -> tuple[ScheduleDefinition | str, ...]:
        """The schedules that are compatible with everything that is fixed."""
        return tuple(identify(definition) for definition in self._definitions)

    @property
    def simulator_options(self) -> Options:
        """The options with which plans are simulated."""
        options = simulator_options(self.allreduce, self.optimizer_copies, shared_nic=self.shared_nic)
        return {**options, "state_on_host": self.state_on_host, "shard_optimizer": self.shard_optimizer}

    @property
    def kept_copies(self) -> float:
        """`optimizer_copies` on the device."""
        return 0.0 if self.state_on_host else self.optimizer_copies

    @property
    def _definitions(self) -> tuple[ScheduleDefinition, ...]:
        fixed = find_definition(self.schedule)
        return tuple(
            each
            for each in (METHODS if fixed is None else (fixed,))
            if not (each.for_streams and self.schedule is None)
            and (self.planner is None or plans_for(self.planner, each))
            and (not self.synchronous or each.flushes)
            and (not self.vertical_sync or each.has_vertical_sync)
            and not (self.whole_backwards and each.splits_backward)
            and (self.stages_per_rank is None or each.layout.accepts(self.stages_per_rank))
        )

    def trials(
        self, profiles: Sequence[Profile], cluster: Cluster, devices: int | None = None
    ) -> tuple[PlannerQuery, ...]:
        """All queries, planner by planner. `PlanError` if the fixed numbers leave none.

        `devices`: those that the default minibatch is for; by default those of `cluster`.
        """
        trials = tuple(self._trials(profiles, cluster, cluster.devices if devices is None else devices))
        if trials:
            return trials
        per_rank = self.stages_per_rank or 2
        if (
            self.stages is not None
            and self.stages % per_rank
            and all(each.layout.has_several for each in self._definitions)
        ):
            raise PlanError(
                f"stages: expected a multiple of {per_rank} stages per rank, found {self.stages}: "
                "stages counts the stages of all ranks"
            )
        if self.batch_size is not None:
            sizes = " or ".join(str(profile.microbatch_size) for profile in profiles)
            raise PlanError(
                f"batch_size: expected a multiple of the measured microbatch size, {sizes}, found {self.batch_size}: "
                "take another batch size, or measure a profile at a size that divides it"
            )
        raise PlanError(
            f"no plan: expected layers and devices for the schedule {' or '.join(map(str, self.schedules))}, found "
            f"{len(profiles[0])} layers on {cluster.devices} devices: use fewer stages per rank, or leave the schedule "
            "to the search"
        )

    def _trials(self, profiles: Sequence[Profile], cluster: Cluster, devices: int) -> Iterator[PlannerQuery]:
        for planner in self._planners(cluster):
            for schedule in self._definitions:
                if schedule.saves_memory and self.schedule is None and cluster.least_memory_bytes is None:
                    continue
                if plans_for(planner, schedule):
                    for profile in profiles:
                        microbatches = self.count_microbatches(profile, profiles[0], devices, schedule)
                        for request in self._requests(planner, schedule, profile, microbatches, cluster):
                            yield PlannerQuery(planner, profile, request, self.planner is not None)

    def opened(self) -> "PlanConstraints":
        """These constraints without those that only choose among plans: `accepts` applies them to the proposals.

        So a wish cannot lead the search to a plan that it would not find without the wish. A named planner, a schedule
        of the user's own, and one that is only sought by name where memory is free, remain.
        """
        if self.planner is not None:
            return self
        definition = find_definition(self.schedule)
        special = definition is not None and (definition.saves_memory or definition.for_streams)
        remains = special or (definition is not None and definition not in METHODS)
        return replace(
            self, schedule=self.schedule if remains else None, straight=False, synchronous=False, whole_backwards=False
        )

    def accepts(self, plan: Plan) -> bool:
        """Whether `plan` has what is fixed."""
        definition = plan.definition
        return (
            (self.schedule is None or plan.schedule == self.schedule)
            and (definition.flushes or not self.synchronous)
            and not (self.whole_backwards and definition.splits_backward)
            and (max(plan.replicas) == 1 or not self.straight)
            and self.stages in (None, len(plan.stages))
            and self.recompute in (None, plan.recompute)
        )

    def count_microbatches(self, profile: Profile, first: Profile, devices: int, schedule: ScheduleDefinition) -> int:
        """The number ``m`` of microbatches of `profile`'s size; 0 if the batch size is not a multiple of that size.

        The default batch size is four microbatches of the first profile for every device, and one microbatch where
        each has an update of its own.
        """
        if self.microbatches is not None:
            return self.microbatches
        if schedule.updates_per_microbatch and self.batch_size is None:
            return 1
        batch = self.batch_size
        if batch is None:
            batch = MICROBATCHES_PER_DEVICE * devices * first.microbatch_size
        return 0 if batch % profile.microbatch_size else batch // profile.microbatch_size

    def _planners(self, cluster: Cluster) -> Iterator[str]:
        if self.planner is not None:
            yield self.planner
            return
        # The stages of 2bw are seldom better than the others', so that it stands in for pipedream only.
        if cluster.devices <= _MOST_FLAT or self.stages is not None:
            yield PlannerName.PIPEDREAM.value
        elif not self.vertical_sync:
            yield PlannerName.TWO_BW.value
        if not self.vertical_sync and not self.straight:
            yield PlannerName.SPP.value
            yield PlannerName.INTERLEAVED.value

    def _requests(
        self, planner: str, schedule: ScheduleDefinition, profile: Profile, microbatches: int, cluster: Cluster
    ) -> Iterator[Request]:
        if not microbatches:
            return
        again = (self.recompute,) if self.recompute is not None else (False, True)
        # Recomputation gains nothing without a memory limit.
        if self.recompute is None and cluster.least_memory_bytes is None:
            again = (False,)
        for recompute in again:
            for per_rank in self._stages_per_rank(schedule):
                depths = self._depths(planner, schedule, profile, cluster, per_rank=per_rank, microbatches=microbatches)
                for stages, straight in depths:
                    yield Request(
                        schedule=identify(schedule),
                        microbatches=microbatches,
                        stages=stages,
                        stages_per_rank=per_rank,
                        straight=straight,
                        allreduce=self.allreduce,
                        vertical_sync=self.vertical_sync,
                        recompute=recompute,
                        optimizer_copies=self.kept_copies,
                        shard_optimizer=self.shard_optimizer,
                    )

    def _depths(
        self,
        planner: str,
        schedule: ScheduleDefinition,
        profile: Profile,
        cluster: Cluster,
        *,
        per_rank: int,
        microbatches: int,
    ) -> Iterator[tuple[int | None, bool]]:
        """The numbers of stages to ask `planner` for (None: any), each with whether they have no replicas."""
        if self.stages is not None and self.stages % per_rank:
            return
        straight = self._is_straight(planner, schedule)
        if not straight:
            yield self.stages, False
        if planner == PlannerName.PIPEDREAM and not cluster.is_equal and not schedule.layout.has_several:
            # Where devices differ, the planner chooses those of a straight pipeline itself.
            if straight or self.stages is None:
                yield self.stages, True
            return
        if straight or (planner == PlannerName.PIPEDREAM and self.stages is None):
            ranks = range(min(cluster.devices, len(profile) // per_rank), 0, -1)
            # The largest number of ranks in a row on which the schedule can run.
            most = next((count for count in ranks if can_run(schedule, count, per_rank, microbatches)), 0)
            if self.stages is not None:
                yield self.stages, True
            elif most:
                fewer = planner == PlannerName.PIPEDREAM and self.planner is None and per_rank == 1
                for count in (most, *(each for each in _DEPTHS if fewer and each < most)):
                    if count == most or can_run(schedule, count, per_rank, microbatches):
                        yield count * per_rank, True

    def _is_straight(self, planner: str, schedule: ScheduleDefinition) -> bool:
        if planner in (PlannerName.UNIFORM, PlannerName.INTERLEAVED):
            return planner == PlannerName.UNIFORM
        return self.straight or schedule.layout.has_several or schedule not in METHODS

    def _stages_per_rank(self, schedule: ScheduleDefinition) -> tuple[int, ...]:
        if schedule.layout is not StageLayout.ROUND_ROBIN:
            return (2,) if schedule.layout.has_several else (1,)
        return (self.stages_per_rank,) if self.stages_per_rank is not None else (2, 4)

    def _contradiction(self) -> str:
        fixed = {
            "planner": self.planner,
            "schedule": self.schedule,
            "synchronous": self.synchronous or None,
            "vertical_sync": self.vertical_sync or None,
            "whole_backwards": self.whole_backwards or None,
            "stages_per_rank": self.stages_per_rank if self.stages_per_rank != 1 else None,
        }
        given = ", ".join(f"{name}={value!r}" for name, value in fixed.items() if value is not None)
        looping, folding = (
            names_of(lambda each, layout=layout: each.layout is layout, " or ")  # type: ignore[misc]
            for layout in (StageLayout.ROUND_ROBIN, StageLayout.V_SHAPE)
        )
        return (
            f"{given}: expected choices that go together, found none that do: several stages per rank need "
            f"schedule={looping!r} (or {folding}, for two), vertical_sync needs "
            f"schedule={names_of(lambda each: each.has_vertical_sync)!r}, synchronous=True rules out "
            f"{names_of(lambda each: not each.flushes, ' and ')}, whole_backwards=True "
            f"{names_of(lambda each: each.splits_backward, ' and ')}, and the planner spp plans for "
            f"schedule={SPP.name!r}. Drop one of them"
        )


def plans_for(planner: str, schedule: ScheduleDefinition) -> bool:
    """Whether `planner` can plan for `schedule`."""
    match PlannerName(planner):
        case PlannerName.PIPEDREAM | PlannerName.UNIFORM:
            return True
        case PlannerName.TWO_BW:
            return schedule in PIPELINE_SCHEDULES
        case PlannerName.SPP:
            return schedule == SPP
        case PlannerName.INTERLEAVED:
            return schedule.layout.has_several and schedule in METHODS
        case PlannerName.ORDER:
            return schedule.updates_at_once and schedule in METHODS


def _refuse(name: str, value: object, known: Sequence[str], hint: str) -> NoReturn:
    raise PlanError(
        f"{name}: expected one of {', '.join(known)}, found {text_of(value)}. {hint}Choose one of them, or leave it "
        "out to try all"
    )
