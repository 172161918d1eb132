"""The names of the planners, and their options besides the profile and the cluster.

All planners share them. One checked value holds them, so that no option is checked twice or passed one by one through
every call.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from penstock.arguments import FLAG, Rule, check_fields, integer, number
from penstock.errors import PlanError, ScheduleError, counted
from penstock.planning.memory import OPTIMIZER_COPIES, interval_bytes, live_counts, peak_bytes
from penstock.planning.stage_costs import AllReduce, ChainCosts, Counts, Flags, chain_costs
from penstock.scheduling.definitions import PipelineShape, ScheduleDefinition
from penstock.scheduling.orders import DEFAULT_SCHEDULE
from penstock.scheduling.placements import Placement
from penstock.scheduling.schedule_names import identify, names_of
from penstock.values.clusters import Cluster
from penstock.values.plans import MICROBATCHES, Plan, Stage, require_schedule
from penstock.values.profiles import Profile

_RULES: dict[str, Rule[Any]] = {
    "microbatches": MICROBATCHES,
    "stages": integer(1).optional,
    "stages_per_rank": integer(1),
    "straight": FLAG,
    "vertical_sync": FLAG,
    "recompute": FLAG,
    "optimizer_copies": number(0),
    "shard_optimizer": FLAG,
    "full_duplex": FLAG,
    "buffers": integer(0),
}


class PlannerName(StrEnum):
    """Lists the planners in the order in which they run; `UNIFORM` and `ORDER` run only if they are named, and `TWO_BW`
    also where `PIPEDREAM` would take too long."""

    PIPEDREAM = "pipedream"
    TWO_BW = "2bw"
    SPP = "spp"
    INTERLEAVED = "interleaved"
    UNIFORM = "uniform"
    ORDER = "order"
    """The stages of the other planners, and an order that is found for them."""


@dataclass(frozen=True, slots=True)
class Request:
    """Holds how the plan will be run, and which plans are allowed."""

    schedule: ScheduleDefinition | str = DEFAULT_SCHEDULE
    microbatches: int = 1
    stages: int | None = None
    """The number of all stages, on all ranks; None lets the planner choose."""
    stages_per_rank: int = 1
    straight: bool = False
    """Whether every stage has one rank only, without replicas."""
    allreduce: AllReduce = "ring"
    vertical_sync: bool = False
    recompute: bool = False
    optimizer_copies: float = OPTIMIZER_COPIES
    shard_optimizer: bool = False
    full_duplex: bool = False
    """Whether a link carries activations and gradients at the same time; [PipeDream 2019] adds their times."""
    buffers: int = 0
    """The number of messages on each side of a stage that memory is reserved for; the papers leave them out."""

    def __post_init__(self) -> None:
        definition = require_schedule(self.schedule)
        object.__setattr__(self, "schedule", identify(definition))
        layout = definition.layout
        check_fields(self, _RULES, PlanError)
        if self.stages_per_rank > 1 and not layout.has_several:
            raise PlanError(
                f"stages_per_rank: expected 1 under {self.schedule}, found {self.stages_per_rank}: only the schedules "
                f"{names_of(lambda each: each.layout.has_several, ' and ')} put several stages on a rank"
            )
        if not layout.accepts(self.stages_per_rank):
            single = names_of(lambda each: each.splits_backward and not each.layout.has_several)
            raise PlanError(
                f"stages_per_rank: expected 2 under {self.schedule}, found {self.stages_per_rank}: give 2, or plan for "
                f"{single}"
            )
        if self.stages is not None and self.stages % self.stages_per_rank:
            raise PlanError(
                f"stages: expected a multiple of {self.stages_per_rank} stages per rank, found {self.stages}: "
                "stages counts the stages of all ranks"
            )

    @property
    def definition(self) -> ScheduleDefinition:
        """The definition of the schedule."""
        return require_schedule(self.schedule)

    def copies(self, replicas: int) -> float:
        """The optimizer's state of each of `replicas`, in units of the weights."""
        return self.optimizer_copies / replicas if self.shard_optimizer else self.optimizer_copies

    def peaks(self, plan: Plan, costs: ChainCosts) -> tuple[float, ...]:
        """The peak bytes of each rank."""
        return peak_bytes(plan, costs, self.optimizer_copies, shared=self.shard_optimizer)

    def costs(self, profile: Profile, cluster: Cluster) -> ChainCosts:
        """The costs of `profile` on the devices of `cluster` under the options of this request."""
        return chain_costs(
            profile, cluster, recompute=self.recompute, full_duplex=self.full_duplex, buffers=self.buffers
        )

    def arrange(self, stages: tuple[Stage, ...], profile: Profile, cluster: Cluster | None = None) -> Plan:
        """A plan of these stages for microbatches of the profile's size, without a prediction.

        `cluster`: the ranks of `stages` are the numbers of its devices, of which some may be left out.
        """
        devices: tuple[int, ...] = ()
        if cluster is not None:
            stages, devices = number_ranks(stages)
        return Plan(
            stages,
            schedule=self.schedule,
            microbatches=self.microbatches,
            microbatch_size=profile.microbatch_size,
            vertical_sync=self.vertical_sync,
            recompute=self.recompute,
            devices=devices,
        )

    def stage_count(self, devices: int) -> int:
        """The number of stages without replicas on `devices` devices; `PlanError` if these are too few."""
        stages = self.stages if self.stages is not None else devices * self.stages_per_rank
        if stages > devices * self.stages_per_rank:
            raise PlanError(
                f"stages: expected at most {devices * self.stages_per_rank} ({counted(devices, 'device')} with "
                f"{counted(self.stages_per_rank, 'stage')} each), found {stages}: use fewer "
                "stages or describe more devices"
            )
        return stages


@dataclass(frozen=True, slots=True)
class Room:
    """Holds the memory of each of the `workers` of a pipeline, and the request that says how much a stage needs."""

    request: Request
    workers: int
    size_bytes: float

    def counts(self, replicas: int, behind: int) -> tuple[int, int]:
        """`live_counts` of a stage of this pipeline."""
        asked = self.request
        return live_counts(
            asked.schedule, asked.microbatches, replicas, behind, self.workers, vertical_sync=asked.vertical_sync
        )

    def fitting(
        self, costs: ChainCosts, counts: tuple[int, int], starts: Counts | None = None, *, replicas: int = 1
    ) -> Flags:
        """[i, j]: whether layers i up to and without j fit as a stage with these `counts`; `starts`: only these i."""
        fits: Flags = interval_bytes(costs, *counts, self.request.copies(replicas), starts) <= self.size_bytes
        return fits


def number_ranks(stages: tuple[Stage, ...]) -> tuple[tuple[Stage, ...], tuple[int, ...]]:
    """(Stages on ranks without gaps, the device of every rank) for `stages` whose ranks are devices, in their order."""
    devices = tuple(sorted({device for stage in stages for device in stage.ranks}))
    rank_of = {device: rank for rank, device in enumerate(devices)}
    ranked = (Stage(each.start, each.stop, tuple(rank_of[device] for device in each.ranks)) for each in stages)
    return tuple(ranked), devices


def stages_on_devices(plan: Plan) -> tuple[Stage, ...]:
    """The stages of `plan` with the numbers of devices as ranks: the reverse of `number_ranks`."""
    devices = plan.devices or range(plan.ranks)
    return tuple(replace(stage, ranks=tuple(devices[rank] for rank in stage.ranks)) for stage in plan.stages)


def can_run(
    definition: ScheduleDefinition,
    ranks: int,
    stages_per_rank: int,
    microbatches: int,
    *,
    vertical_sync: bool = False,
    replicas: int = 1,
) -> bool:
    """Whether `definition` accepts stages on `ranks` ranks in a row with `replicas` each."""
    rows = definition.layout.ranks(ranks * stages_per_rank, ranks)
    placement = Placement(tuple(tuple(range(row * replicas, (row + 1) * replicas)) for row in rows))
    try:
        definition.check(PipelineShape(placement, microbatches, vertical_sync))
    except ScheduleError:
        return False
    return True


def if_runnable(make: Callable[[], Plan]) -> Plan | None:
    """The plan that `make` makes; None if there is none, or if its schedule cannot run it."""
    try:
        plan = make()
        plan.definition.check(PipelineShape(plan.placement, plan.microbatches, plan.vertical_sync))
    except (PlanError, ScheduleError):
        return None
    return plan
