"""``plan="auto"``: measures the model and the links, plans, and gives every rank the same plan.

All processes measure the model at the same time, since those of one host share its caches, memory and clock, and will
train at the same time, too. The seconds are scaled to what layers take together. Rank 0 plans by its own measurement,
and sends the plan to all: two profiles never agree exactly.

The plan uses all ranks, with replicas of a stage where that is faster. If no schedule is given, the plan has one that
flushes, since a planner must not change which gradients a step applies. For the same reason replicas do not split
microbatches of a model with BatchNorm, whose statistics would be those of a share of the microbatch.

All ranks measure how fast their devices are. A slow one gets fewer layers. Every process is a rank, so that no device
is left out; where that would be faster, the log says so.
"""

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import torch

from penstock.capturing.chain import LayerChain, require_cuts
from penstock.capturing.export.guards import takes_statistics
from penstock.errors import PlanError, ScheduleError
from penstock.planning.planner_names import PlannerName
from penstock.planning.planners import plan as plan_on
from penstock.profiling.device_speeds import measure_speeds
from penstock.profiling.links import measure_links
from penstock.profiling.profiler import profile as measure
from penstock.profiling.training_loops import as_in_training, measure_rounds
from penstock.runtime.assembly.stages import make_schedule
from penstock.runtime.transport.collective_errors import gather_results
from penstock.runtime.transport.worlds import World
from penstock.scheduling.definitions import ScheduleDefinition
from penstock.scheduling.orders import DEFAULT_SCHEDULE
from penstock.training.wire_codecs import WireDtype
from penstock.values.clusters import Cluster
from penstock.values.crossings import Crossing
from penstock.values.device_kinds import DeviceKind
from penstock.values.plan_stages import Stage, ranks_text
from penstock.values.plans import Plan, Prediction, require_schedule
from penstock.values.profiles import LayerProfile, Profile

_WORTH_SAYING = 0.05


@dataclass(frozen=True, slots=True)
class Choices:
    """The arguments that the user has fixed; None leaves one to the planner."""

    schedule: ScheduleDefinition | str | None = None
    microbatches: int | None = None
    stages: int | None = None
    vertical_sync: bool = False
    whole_backwards: bool = False
    """Whether the stages cannot split a backward."""
    autocast: torch.dtype | None = None
    """The type that the model will compute in under autocast."""
    wire_dtype: WireDtype | None = None
    """How stages will send each other tensors."""

    @classmethod
    def of(cls, given: Mapping[str, Any], *, whole_backwards: bool) -> "Choices":
        """What the arguments of `Pipeline` that were `given` by name have fixed; others among them do not matter."""
        named = {field.name: given[field.name] for field in fields(cls) if field.name in given}
        return cls(**named, whole_backwards=whole_backwards)

    def stages_per_rank(self, ranks: int) -> int:
        """The stages that each of `ranks` ranks is to hold."""
        return require_schedule(self.schedule or DEFAULT_SCHEDULE).layout.default_stages_per_rank(self.stages, ranks)


@dataclass(frozen=True, slots=True)
class AutoPlan:
    """A plan, with the measurements that it was made from."""

    plan: Plan
    profile: Profile
    cluster: Cluster


def plan_automatically(
    plan: str,
    choices: Choices,
    *,
    world: World,
    chain: LayerChain,
    sample: tuple[Any, ...] | dict[str, Any],
    device: torch.device,
) -> AutoPlan:
    """The fastest plan for the processes of `world`, the same on all. Collective.

    A single process has as many ranks as `choices` gives it stages (half as many where a rank holds two), and instant
    links between them. An error on one rank is raised on all.
    """
    if plan != "auto":
        raise PlanError(
            f"plan=: expected a penstock.Plan or 'auto', found {plan!r}: load a file with penstock.Plan.load({plan!r})"
        )
    if world.processes > 1:
        cluster = measure_links(world, device)
    else:
        per_rank = choices.stages_per_rank(1)
        cluster = Cluster.uniform(max(1, (choices.stages or 1) // per_rank), math.inf)

    context = "while it measured the model and planned"
    profiles: list[Profile] = []

    def measure_layers() -> None:
        profiles.append(measure(chain, sample, autocast=choices.autocast, wire_dtype=choices.wire_dtype))

    gather_results(world, context, measure_layers)
    # All begin together: a process that measures while the others are done has the host to itself.
    rounds = gather_results(world, context, lambda: measure_rounds(profiles[0], chain, sample, choices.autocast))
    if speeds := measure_speeds(world, chain, sample, choices.autocast):
        cluster = cluster.with_kinds([DeviceKind(speed=speed) for speed in speeds])

    def work() -> tuple[dict[str, Any], dict[str, Any]] | None:
        if world.rank != 0:
            return None
        profile = as_in_training(profiles[0], rounds)
        made = fastest_plan(profile, cluster, chain, choices)
        values = {field.name: getattr(made, field.name) for field in fields(made)}
        # Every rank has the definition of a schedule of the user's own, which need not be one that can be pickled.
        named = made.schedule if isinstance(made.schedule, str) else None
        predicted = None if made.predicted is None else asdict(made.predicted)
        stages = tuple([(stage.start, stage.stop, stage.ranks) for stage in made.stages])
        return values | {"schedule": named, "predicted": predicted, "stages": stages}, asdict(profile)

    made = gather_results(world, context, work)[0]
    assert made is not None
    values, measured = made
    values["schedule"] = values["schedule"] or choices.schedule
    values["stages"] = tuple(Stage(*stage) for stage in values["stages"])
    values["predicted"] = values["predicted"] and Prediction(**values["predicted"])
    measured["layers"] = tuple(LayerProfile(**layer) for layer in measured["layers"])
    measured["crossings"] = tuple(Crossing(**crossing) for crossing in measured["crossings"])
    return AutoPlan(Plan(**values), Profile(**measured), cluster)


def fastest_plan(profile: Profile, cluster: Cluster, chain: LayerChain, choices: Choices) -> Plan:
    """The fastest plan by `penstock.plan` that runs on all devices of `cluster`.

    If there is none, raises the error of the simplest plan.
    """
    require_cuts(len(chain.layers), choices.stages or 1)
    flushes = choices.schedule is None and not choices.vertical_sync
    search = partial(
        plan_on,
        profile,
        cluster,
        microbatches=choices.microbatches,
        synchronous=flushes,
        vertical_sync=choices.vertical_sync,
        whole_backwards=choices.whole_backwards and choices.schedule is None,
    )
    per_rank = choices.stages_per_rank(cluster.devices)
    whole = any(takes_statistics(layer.module) for layer in chain.layers)
    # All planners, and if the best plan splits microbatches that must stay whole, the one that never does.
    for planner in (None, PlannerName.PIPEDREAM.value) if choices.stages is None else ():
        with suppress(PlanError, ScheduleError):
            # Under `torchrun` every process is a rank.
            made = search(schedule=choices.schedule, planner=planner, every_device=True)
            make_schedule(made, chain)
            if not (whole and made.routing == "split"):
                _advise(made, cluster, lambda: search(schedule=choices.schedule))
                return made
    made = search(
        schedule=DEFAULT_SCHEDULE if flushes else choices.schedule,
        stages=choices.stages or cluster.devices * per_rank,
        stages_per_rank=per_rank,
    )
    make_schedule(made, chain)
    return made


def _advise(made: Plan, cluster: Cluster, search: Callable[[], Plan]) -> None:
    """Says in the log of ``penstock`` if a plan without the slow devices would be faster."""
    if cluster.is_equal or made.predicted is None:
        return
    free = search()
    if free.predicted is None or free.ranks == made.ranks:
        return
    gain = free.predicted.samples_per_second / made.predicted.samples_per_second - 1
    if gain > _WORTH_SAYING:
        left = sorted(set(range(cluster.devices)) - set(free.devices or range(free.ranks)))
        logging.getLogger("penstock").warning(
            "the plan uses all %d ranks, since each is a process. Without %s it would be %.0f%% faster by the "
            "simulator: start fewer processes, without the slow devices",
            made.ranks,
            ranks_text(left),
            100 * gain,
        )
