"""The proposals of each planner for a query of the search, with the closed form that it compares by.

The planners have different inputs: some support replicas, some split microbatches, some need the number of stages. Here
all of them answer the same query. A new planner is a file of its own, a method here, a line in `Proposer._propose`, and
its schedules in `constraints`.

Most planners take the devices in the order in which they are numbered. With equal devices any other order is as good,
up to the links. Of a cluster whose devices differ they are asked once for each of a few arrangements: the order of the
cluster, the fastest device first, the slowest first, and the same without the slowest kinds or with one kind alone. The
planner `pipedream` needs none of this: its recurrence chooses devices and their order itself.

The kind of a device matters to a planner only where devices differ. So a cluster of equal devices is planned without
kinds, for the profile as it is on them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain

from penstock.errors import PlanError, ScheduleError
from penstock.planning.memory import require_fit
from penstock.planning.pipedream.partitions import find_pipedream, find_unequal
from penstock.planning.predictions import foresee
from penstock.planning.requests import PlannerName, Request, can_run, number_ranks
from penstock.planning.search.constraints import PlanConstraints, PlannerQuery
from penstock.planning.spp.spp_search import MOST_ORDERED, find_spp, is_quick, propose_grouped
from penstock.planning.stage_costs import ChainCosts, chain_costs
from penstock.planning.two_bw.pipeline_searches import rank_pipelines
from penstock.scheduling.orders import DEFAULT_SCHEDULE
from penstock.values.clusters import Cluster
from penstock.values.device_kinds import DeviceKind
from penstock.values.plans import Plan, Stage
from penstock.values.profiles import Profile

_PROPOSED = 3
"""Parallel pipelines that one query proposes."""

_BUFFERS = 2
"""Messages on either side of a stage that memory is reserved for, where it is."""

_MOST = 10
"""Arrangements that the planners are asked for."""

_DEEP = 2
"""Arrangements for which those planners are asked too that take long."""


class Proposer:
    """Runs the planners for some devices of a cluster in some order; by default for all in theirs."""

    def __init__(self, cluster: Cluster, devices: tuple[int, ...] = (), *, deep: bool = True) -> None:
        every = tuple(range(cluster.devices))
        self.devices = devices or every
        self._deep = deep
        """Whether planners that take long are asked too."""
        self.is_whole = self.devices == every
        self._all = cluster.devices
        self._cluster = cluster if self.is_whole else cluster.pick(self.devices)
        self._limit = self._cluster.least_memory_bytes
        self._unlimited: dict[tuple[int, Request], Plan | None] = {}
        """Plans without a memory limit; they are the same for all schedules with one stage per rank."""
        self._costs: dict[tuple[int, bool, bool, int], ChainCosts] = {}
        self._parts: tuple[Proposer, ...] | None = None

    def queries(self, profiles: Sequence[Profile], constraints: PlanConstraints) -> tuple[PlannerQuery, ...]:
        """The planner queries for these devices. The default minibatch is the same for all arrangements."""
        try:
            queries = constraints.trials(profiles, self._cluster, self._all)
        except PlanError:
            if self.is_whole:
                raise
            return ()  # fewer devices may be too few for what is fixed
        if self.is_whole:
            return queries
        chosen = []
        for query in queries:
            several = query.request.definition.layout.has_several
            chooses_devices = query.planner == PlannerName.PIPEDREAM and not several
            if not chooses_devices and (self._deep or not several):
                chosen.append(query)
        return tuple(chosen)

    def propose(self, query: PlannerQuery) -> Iterator[Plan]:
        """The plans of one query on the devices of the whole cluster. Where the planner would use all, also those on
        half and on a quarter of them, since on slow links fewer are faster, and equal pipelines. Raises `PlanError` if
        there are none.
        """
        for plan in chain(self._propose(query), self._propose_parts(query)):
            yield plan if self.is_whole else self._placed(plan)

    def _placed(self, plan: Plan) -> Plan:
        stages = tuple(
            Stage(stage.start, stage.stop, tuple(self.devices[rank] for rank in stage.ranks)) for stage in plan.stages
        )
        ranked, devices = number_ranks(stages)
        predicted = plan.predicted
        if predicted is not None:
            peaks = dict(zip(self.devices, predicted.peak_bytes, strict=False))
            predicted = replace(predicted, peak_bytes=tuple(peaks[device] for device in devices))
        return replace(plan, stages=ranked, devices=devices, predicted=predicted)

    def _propose_parts(self, query: PlannerQuery) -> Iterator[Plan]:
        uses_all = query.planner == PlannerName.SPP or (
            query.planner == PlannerName.PIPEDREAM
            and not query.request.straight
            and query.request.stages is None
            and not query.request.definition.layout.has_several
        )
        if uses_all and not query.named and self._cluster.is_equal:
            if query.planner == PlannerName.PIPEDREAM and query.request.schedule == DEFAULT_SCHEDULE:
                yield from self._equal_pipelines(query.profile, query.request)
            if self._parts is None:
                counts = [count for count in (self._cluster.devices // 2, self._cluster.devices // 4) if count > 1]
                self._parts = tuple(Proposer(self._cluster.pick(range(count))) for count in counts)
            for part in self._parts:
                with suppress(PlanError, ScheduleError):
                    yield from part._propose(query)

    def _equal_pipelines(self, profile: Profile, request: Request) -> Iterator[Plan]:
        """Equal pipelines of stages with equal work on all devices, for every number of pipelines that divides theirs;
        the last is data parallelism. A search for other replicas seldom ends at these.
        """
        devices = self._cluster.devices
        for replicas in range(1, devices + 1):
            if devices % replicas == 0 and devices // replicas <= len(profile):
                narrow = Plan.balanced([layer.seconds for layer in profile.layers], devices // replicas)
                yield widen(narrow, replicas, profile, self._cluster, request)

    def _propose(self, query: PlannerQuery) -> Iterator[Plan]:
        profile, request = query.profile, query.request
        match query.planner:
            case PlannerName.PIPEDREAM:
                yield from self._propose_pipedream(profile, request)
            case PlannerName.TWO_BW:
                yield from self._propose_two_bw(profile, request)
            case PlannerName.SPP:
                many = self._cluster.devices > MOST_ORDERED and not query.named
                if not many or is_quick(profile, self._cluster):
                    yield from _require(find_spp(profile, self._cluster, request, whole_samples=True))
                if many:
                    yield from propose_grouped(profile, self._cluster, request)
            case PlannerName.INTERLEAVED:
                yield from self._propose_interleaved(profile, request)
            case PlannerName.UNIFORM:
                yield plan_uniform(profile, self._cluster, request)
            case other:
                raise AssertionError(f"constraints: unknown planner {other}")

    def _propose_pipedream(self, profile: Profile, request: Request) -> Iterator[Plan]:
        """Proposes PipeDream's plans: with links that carry both directions at once, as in the simulator, and with the
        sum of both, as in the paper. Few microbatches hide few messages, and then the sum is often the better guide.
        """
        if not self._cluster.is_equal and not request.definition.layout.has_several:
            duplex = replace(request, full_duplex=True)
            buffered = () if self._limit is None else (replace(duplex, buffers=_BUFFERS),)
            unequal = [plan for each in (duplex, *buffered) for plan in find_unequal(profile, self._cluster, each)]
            yield from unequal or _require(None)
            return
        found: list[Plan] = []
        for both_ways in (True,) if request.definition.layout.has_several else (True, False):
            wished = replace(request, full_duplex=both_ways)
            found += self._with_buffers(partial(self._find_pipedream, profile), profile, wished)
        yield from found or _require(None)

    def _propose_two_bw(self, profile: Profile, request: Request) -> Iterator[Plan]:
        for buffers in (0,) if self._limit is None else (0, _BUFFERS):
            ranked = rank_pipelines(profile, self._cluster, replace(request, buffers=buffers))
            alone = [candidate for candidate in ranked if candidate.replicas == 1]
            yield from (candidate.plan() for candidate in (*ranked[:_PROPOSED], *alone[:_PROPOSED]))

    def _propose_interleaved(self, profile: Profile, request: Request) -> Iterator[Plan]:
        """Proposes d equal pipelines of several stages per rank for every possible d of 2 or more: on all devices, or
        with the number of stages that is fixed.
        """
        for length, replicas in self._shapes(request):
            stages = length * request.stages_per_rank
            if length < 2 or request.microbatches % replicas or stages > len(profile):
                continue
            per_rank, count = request.stages_per_rank, request.microbatches
            if not can_run(request.definition, length, per_rank, count, replicas=replicas):
                continue
            alone = replace(request, microbatches=request.microbatches // replicas, stages=stages)
            one = Cluster.uniform(length, self._cluster.slowest, self._limit)
            if not self._cluster.is_equal:
                one = one.with_kinds([self._slowest_kind(profile, rank * replicas, replicas) for rank in range(length)])
            for narrow in self._with_buffers(partial(find_pipedream, profile, one), profile, alone):
                yield widen(narrow, replicas, profile, self._cluster, request)

    def _shapes(self, request: Request) -> Iterator[tuple[int, int]]:
        """(Ranks in a row, pipelines) to propose; two pipelines or more."""
        devices = self._cluster.devices
        if request.stages is None:
            yield from ((devices // count, count) for count in range(2, devices + 1) if devices % count == 0)
        else:
            length = request.stages // request.stages_per_rank
            yield from ((length, count) for count in range(2, devices // length + 1))

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
        costs = self._costs_of(profile, request)
        plan = foresee(found.stages, profile, costs, self._cluster, request)
        if self._limit is not None and max(request.peaks(plan, costs)) > self._limit:
            return find_pipedream(profile, self._cluster, request)
        return plan

    def _costs_of(self, profile: Profile, request: Request) -> ChainCosts:
        key = profile.microbatch_size, request.recompute, request.full_duplex, request.buffers
        if key not in self._costs:
            self._costs[key] = request.costs(profile, self._cluster)
        return self._costs[key]

    def _with_buffers(
        self, find: Callable[[Request], Plan | None], profile: Profile, request: Request
    ) -> Iterator[Plan]:
        """The plan that `find` finds, and another with memory for messages if the first may not fit with them."""
        plan = find(request)
        if plan is None:
            return
        yield plan
        if self._limit is not None:
            buffered = chain_costs(profile, recompute=bool(plan.recompute), buffers=_BUFFERS)
            if max(request.peaks(plan, buffered)) > self._limit:
                other = find(replace(request, buffers=_BUFFERS))
                yield from () if other is None else (other,)


def arrange_cluster(cluster: Cluster, profile: Profile) -> tuple[Proposer, ...]:
    """Proposers for the arrangements to plan for; a cluster of equal devices has one."""
    every = tuple(range(cluster.devices))
    if cluster.is_equal:
        return (Proposer(cluster),)
    classes = {kind: profile.on(kind).seconds for kind in dict.fromkeys(map(cluster.class_of, every))}
    seconds = [classes[cluster.class_of(rank)] for rank in every]
    fast_first = tuple(sorted(every, key=lambda rank: (seconds[rank], rank)))
    slow_first = tuple(sorted(every, key=lambda rank: (-seconds[rank], rank)))
    orders = [every, fast_first, slow_first]
    speeds = sorted(set(seconds))
    for slowest in speeds[-2::-1]:
        kept = [rank for rank in every if seconds[rank] <= slowest]
        orders += [tuple(kept), tuple(sorted(kept, key=lambda rank: (seconds[rank], rank)))]
    orders += [tuple(rank for rank in every if cluster.class_of(rank) == kind) for kind in classes]
    chosen = list(dict.fromkeys(orders))[:_MOST]
    return tuple(Proposer(cluster, order, deep=index < _DEEP) for index, order in enumerate(chosen))


def without_kinds(profiles: Sequence[Profile], cluster: Cluster) -> tuple[tuple[Profile, ...], Cluster]:
    """Profiles and cluster as they are planned for: of equal devices without kinds."""
    if not cluster.kinds or not cluster.is_equal:
        return tuple(profiles), cluster
    kind = cluster.kind_of(0)
    return tuple(profile.on(kind) for profile in profiles), replace(
        cluster, memory_bytes=cluster.memory_of(0), kinds=()
    )


def _require(found: Plan | None) -> tuple[Plan]:
    if found is None:
        raise PlanError("no plan of this kind fits in memory")
    return (found,)


def plan_uniform(profile: Profile, cluster: Cluster, request: Request) -> Plan:
    """A plan of stages with as equal numbers of layers as possible, which needs no measured times.

    `PlanError` if a stage does not fit in memory.
    """
    cut = Plan.uniform(
        len(profile),
        request.stage_count(cluster.devices),
        request.schedule,
        request.microbatches,
        request.stages_per_rank,
    )
    costs = chain_costs(profile, cluster, recompute=request.recompute)
    uniform = foresee(cut.stages, profile, costs, cluster, request)
    require_fit(uniform, request.peaks(uniform, costs), cluster)
    return uniform


def widen(narrow: Plan, replicas: int, profile: Profile, cluster: Cluster, request: Request) -> Plan:
    """The plan `narrow`, which has no replicas, with `replicas` of every stage and the microbatches of `request`.

    Consecutive ranks hold the replicas of one stage, so that an all-reduce stays inside a server if possible [Narayanan
    2021, section 3.3]. The stages of one pipeline are d ranks apart.
    """
    stages = tuple(
        Stage(stage.start, stage.stop, tuple(range(first * replicas, (first + 1) * replicas)))
        for stage in narrow.stages
        for (first,) in [stage.ranks]
    )
    costs = chain_costs(profile, cluster, recompute=request.recompute)
    return foresee(stages, profile, costs, cluster, request)
