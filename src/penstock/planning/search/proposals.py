"""The proposals of each planner for a query of the search, with the closed form that it compares by.

The planners have different inputs: some support replicas, some split microbatches, some need the number of stages. Here
all of them answer the same query. A new planner is a file of its own, a method here, a line in `Proposer.propose`, and
its schedules in `constraints`.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from penstock.errors import PlanError
from penstock.planning.costs import chain_costs
from penstock.planning.memory import peak_bytes
from penstock.planning.pipedream.partitions import find_pipedream, find_unequal
from penstock.planning.planner_names import PlannerName
from penstock.planning.predictions import foresee
from penstock.planning.requests import Request
from penstock.planning.search.constraints import PlannerQuery
from penstock.planning.spp.spp_search import find_spp
from penstock.planning.two_bw.pipeline_searches import rank_pipelines
from penstock.planning.uniform import plan_uniform
from penstock.planning.widening import widen
from penstock.scheduling.orders import DEFAULT_SCHEDULE
from penstock.values.clusters import Cluster
from penstock.values.device_kinds import DeviceKind
from penstock.values.plans import Plan
from penstock.values.profiles import Profile

__all__ = ["Proposer"]

_PROPOSED = 3
"""Parallel pipelines that one query proposes."""

_BUFFERS = 2
"""Messages on either side of a stage that memory is reserved for, where it is."""


class Proposer:
    """Runs the planners for one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._limit = cluster.least_memory_bytes
        self._unlimited: dict[tuple[int, Request], Plan | None] = {}
        """Plans without a memory limit; they are the same for all schedules with one stage per rank."""

    def propose(self, query: PlannerQuery) -> Iterator[Plan]:
        """The plans of one query. Raises `PlanError` if there are none."""
        profile, request = query.profile, query.request
        match query.planner:
            case PlannerName.PIPEDREAM:
                yield from self._propose_pipedream(profile, request)
            case PlannerName.TWO_BW:
                yield from self._propose_two_bw(query)
            case PlannerName.SPP:
                yield from _require(find_spp(profile, self._cluster, request, whole_samples=True))
            case PlannerName.INTERLEAVED:
                yield from self._propose_interleaved(profile, request)
            case PlannerName.UNIFORM:
                yield plan_uniform(profile, self._cluster, request)
            case other:
                raise AssertionError(f"constraints: unknown planner {other}")

    def _propose_pipedream(self, profile: Profile, request: Request) -> Iterator[Plan]:
        """Proposes PipeDream's plans; links carry both directions at once, as in the simulator."""
        duplex = replace(request, full_duplex=True)
        if not self._cluster.is_equal and not request.definition.layout.has_several:
            buffered = () if self._limit is None else (replace(duplex, buffers=_BUFFERS),)
            unequal = [plan for each in (duplex, *buffered) for plan in find_unequal(profile, self._cluster, each)]
            yield from unequal or _require(None)
            return
        found = list(self._with_buffers(partial(self._find_pipedream, profile), profile, duplex))
        yield from found or _require(None)

    def _propose_two_bw(self, query: PlannerQuery) -> Iterator[Plan]:
        for buffers in (0,) if self._limit is None else (0, _BUFFERS):
            ranked = rank_pipelines(query.profile, self._cluster, replace(query.request, buffers=buffers))
            allowed = [candidate for candidate in ranked if query.may_recompute or not candidate.recompute]
            yield from (candidate.plan(self._cluster) for candidate in allowed[:_PROPOSED])

    def _propose_interleaved(self, profile: Profile, request: Request) -> Iterator[Plan]:
        """Proposes d equal pipelines of several stages per rank, on all devices, for every possible d of 2 or more."""
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
            if not self._cluster.is_equal:
                one = one.with_kinds([self._slowest_kind(profile, rank * replicas, replicas) for rank in range(length)])
            for narrow in self._with_buffers(partial(find_pipedream, profile, one), profile, alone):
                yield widen(narrow, replicas, profile, self._cluster, request)

    def _slowest_kind(self, profile: Profile, first: int, count: int) -> DeviceKind:
        """The kind of the slowest of `count` devices, from `first` on."""
        kinds = {self._cluster.class_of(rank) for rank in range(first, first + count)}
        return max(kinds, key=lambda kind: profile.on(kind).seconds)

    def _find_pipedream(self, profile: Profile, request: Request) -> Plan | None:
        if request.definition.layout.has_several:
            return find_pipedream(profile, self._cluster, request)
        free = replace(request, schedule=DEFAULT_SCHEDULE, microbatches=1, vertical_sync=False, buffers=0)
        key = profile.microbatch_size, free
        if key not in self._unlimited:
            self._unlimited[key] = find_pipedream(profile, self._cluster.with_memory(None), free)
        (found,) = _require(self._unlimited[key])
        costs = chain_costs(
            profile,
            self._cluster,
            recompute=request.recompute,
            full_duplex=request.full_duplex,
            buffers=request.buffers,
        )
        plan = foresee(found.stages, profile, costs, self._cluster, request)
        if self._limit is not None and max(peak_bytes(plan, costs, request.optimizer_copies)) > self._limit:
            return find_pipedream(profile, self._cluster, request)
        return plan

    def _with_buffers(
        self, find: Callable[[Request], Plan | None], profile: Profile, request: Request
    ) -> Iterator[Plan]:
        """The plan that `find` finds, and another with memory for messages if the first may not fit with them."""
        plan = find(request)
        if plan is None:
            return
        yield plan
        if self._limit is not None:
            buffered = chain_costs(profile, recompute=plan.recompute, buffers=_BUFFERS)
            if max(peak_bytes(plan, buffered, request.optimizer_copies)) > self._limit:
                other = find(replace(request, buffers=_BUFFERS))
                yield from () if other is None else (other,)


def _require(found: Plan | None) -> tuple[Plan]:
    if found is None:
        raise PlanError("no plan of this kind fits in memory")
    return (found,)
