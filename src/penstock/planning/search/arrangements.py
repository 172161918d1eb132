"""Arrangements of a cluster whose devices differ: which of them are used, and in which order.

Most planners take the devices in the order in which they are numbered. With equal devices any other order is as good,
up to the links. With different ones they are asked once for each of a few arrangements: the order of the cluster, the
fastest device first, the slowest first, and the same without the slowest kinds or with one kind alone. The planner
`pipedream` needs none of this: its recurrence chooses devices and their order itself.

The kind of a device matters to a planner only where devices differ. So a cluster of equal devices is planned without
kinds, for the profile as it is on them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from penstock.errors import PlanError
from penstock.planning.planner_names import PlannerName
from penstock.planning.requests import number_ranks
from penstock.planning.search.constraints import PlanConstraints, PlannerQuery
from penstock.planning.search.proposals import Proposer
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan, Stage
from penstock.values.profiles import Profile

_MOST = 10
"""Arrangements that the planners are asked for."""

_DEEP = 2
"""Arrangements for which those planners are asked too that take long."""


class Arrangement:
    """Some devices of a cluster in some order, and the planners for them."""

    def __init__(self, cluster: Cluster, devices: tuple[int, ...], *, deep: bool = True) -> None:
        self.devices = devices
        self.deep = deep
        """Whether planners that take long are asked too."""
        self.is_whole = devices == tuple(range(cluster.devices))
        self._all = cluster.devices
        self._cluster = cluster if self.is_whole else cluster.pick(devices)
        self._proposer = Proposer(self._cluster)

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
        return tuple(query for query in queries if not _chooses_devices(query) and (self.deep or not _is_slow(query)))

    def propose(self, query: PlannerQuery) -> Iterator[Plan]:
        """The plans of one query, on the devices of the whole cluster. Raises `PlanError` if there are none."""
        for plan in self._proposer.propose(query):
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


def arrange_cluster(cluster: Cluster, profile: Profile) -> tuple[Arrangement, ...]:
    """The arrangements to plan for; a cluster of equal devices has one."""
    every = tuple(range(cluster.devices))
    if cluster.is_equal:
        return (Arrangement(cluster, every),)
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
    return tuple(Arrangement(cluster, order, deep=index < _DEEP) for index, order in enumerate(chosen))


def without_kinds(profiles: Sequence[Profile], cluster: Cluster) -> tuple[tuple[Profile, ...], Cluster]:
    """Profiles and cluster as they are planned for: of equal devices without kinds."""
    if not cluster.kinds or not cluster.is_equal:
        return tuple(profiles), cluster
    kind = cluster.kind_of(0)
    return tuple(profile.on(kind) for profile in profiles), replace(
        cluster, memory_bytes=cluster.memory_of(0), kinds=()
    )


def _is_slow(query: PlannerQuery) -> bool:
    return query.request.definition.layout.has_several


def _chooses_devices(query: PlannerQuery) -> bool:
    return query.planner == PlannerName.PIPEDREAM and not query.request.definition.layout.has_several
