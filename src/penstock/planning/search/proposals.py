"""What each planner proposes when the search asks it, with the closed form that it compares by.

The planners speak of different things: some know replicas, some split microbatches, some want the number of stages.
Here all of them answer the same question. A new planner is a file of its own, a method here, a line in
`Proposer.propose`, and its schedules in `constraints`.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from penstock.errors import PlanError
from penstock.planning.costs import chain_costs
from penstock.planning.memory import peak_bytes
from penstock.planning.pipedream.partitions import find_pipedream
from penstock.planning.planner_names import PlannerName
from penstock.planning.predictions import foresee
from penstock.planning.requests import Request
from penstock.planning.search.constraints import PlannerQuery
from penstock.planning.spp.stage_numbers import find_spp
from penstock.planning.two_bw.pipeline_searches import rank_pipelines
from penstock.planning.uniform import plan_uniform
from penstock.planning.widening import widen
from penstock.scheduling.orders import DEFAULT_SCHEDULE
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan
from penstock.values.profiles import Profile

__all__ = ["Proposer"]

_PROPOSED = 3
"""Parallel pipelines that one trial proposes."""

_BUFFERS = 2
"""Messages on either side of a stage that memory is set aside for, where it is."""


class Proposer:
    """Asks planners about one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._limit = cluster.memory_bytes
        self._unlimited: dict[tuple[int, Request], Plan | None] = {}
        """What was found without a limit in mind; the same for all schedules without several stages per rank."""

    def propose(self, trial: PlannerQuery) -> Iterator[Plan]:
        """The plans of one trial. `PlanError` if there are none."""
        profile, request = trial.profile, trial.request
        match trial.planner:
            case PlannerName.PIPEDREAM:
                yield from self._ask_pipedream(profile, request)
            case PlannerName.TWO_BW:
                yield from self._ask_two_bw(trial)
            case PlannerName.SPP:
                yield from _demand(find_spp(profile, self._cluster, request, whole_samples=True))
            case PlannerName.INTERLEAVED:
                yield from self._ask_interleaved(profile, request)
            case PlannerName.UNIFORM:
                yield plan_uniform(profile, self._cluster, request)
            case other:
                raise AssertionError(f"wishes let no planner {other} through")

    def _ask_pipedream(self, profile: Profile, request: Request) -> Iterator[Plan]:
        """Links carry both directions at once, as the simulator has it."""
        at_once = replace(request, full_duplex=True)
        found = list(self._with_room(partial(self._find_pipedream, profile), profile, at_once))
        yield from found or _demand(None)

    def _ask_two_bw(self, trial: PlannerQuery) -> Iterator[Plan]:
        for buffers in (0,) if self._limit is None else (0, _BUFFERS):
            ranked = rank_pipelines(trial.profile, self._cluster, replace(trial.request, buffers=buffers))
            allowed = [candidate for candidate in ranked if trial.may_recompute or not candidate.recompute]
            yield from (candidate.plan(self._cluster) for candidate in allowed[:_PROPOSED])

    def _ask_interleaved(self, profile: Profile, request: Request) -> Iterator[Plan]:
        """d equal pipelines of several stages per rank, on all devices, for every d of 2 or more that goes."""
        devices = self._cluster.devices
        for replicas in range(2, devices + 1):
            length = devices // replicas
            stages = length * request.stages_per_rank
            if devices % replicas or length < 2 or request.microbatches % replicas or stages > len(profile):
                continue
            if not request.can_run(length, replicas=replicas):
                continue
            alone = replace(request, microbatches=request.microbatches // replicas, stages=stages)
            one = Cluster.uniform(length, self._cluster.slowest, self._limit)
            for narrow in self._with_room(partial(find_pipedream, profile, one), profile, alone):
                yield widen(narrow, replicas, profile, self._cluster, request)

    def _find_pipedream(self, profile: Profile, request: Request) -> Plan | None:
        if request.definition.layout.has_several:
            return find_pipedream(profile, self._cluster, request)
        free = replace(request, schedule=DEFAULT_SCHEDULE, microbatches=1, vertical_sync=False, buffers=0)
        key = profile.microbatch_size, free
        if key not in self._unlimited:
            self._unlimited[key] = find_pipedream(profile, replace(self._cluster, memory_bytes=None), free)
        (found,) = _demand(self._unlimited[key])
        costs = chain_costs(
            profile, recompute=request.recompute, full_duplex=request.full_duplex, buffers=request.buffers
        )
        plan = foresee(found.stages, profile, costs, self._cluster, request)
        if self._limit is not None and max(peak_bytes(plan, costs, request.optimizer_copies)) > self._limit:
            return find_pipedream(profile, self._cluster, request)
        return plan

    def _with_room(self, find: Callable[[Request], Plan | None], profile: Profile, request: Request) -> Iterator[Plan]:
        """What `find` finds; and if that may be too much in memory with messages, what it finds with room for some."""
        plan = find(request)
        if plan is None:
            return
        yield plan
        if self._limit is not None:
            roomy = chain_costs(profile, recompute=plan.recompute, buffers=_BUFFERS)
            if max(peak_bytes(plan, roomy, request.optimizer_copies)) > self._limit:
                other = find(replace(request, buffers=_BUFFERS))
                yield from () if other is None else (other,)


def _demand(found: Plan | None) -> tuple[Plan]:
    if found is None:
        raise PlanError("no plan of this kind fits in memory")
    return (found,)
