"""Refinement: from the proposals of the planners to the best plan of every family, by local search."""

from collections.abc import Mapping, Sequence

from penstock.planning.costs import chain_costs, simulator_options
from penstock.planning.search.constraints import PlanConstraints
from penstock.planning.search.families import Family, family_of, fastest, share_stages
from penstock.planning.search.local_search import Effort, LocalSearch, Timed
from penstock.progress import progress_line
from penstock.scheduling.definitions import ScheduleDefinition
from penstock.scheduling.orders import METHODS
from penstock.simulating.assumptions import Assumptions
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan
from penstock.values.profiles import Profile

__all__ = ["Refiner"]

_QUICK = 8_000
"""Simulated actions for every device that the first look at a family may spend."""

_DEEP = 12_000
"""Simulated actions for every device that the search around the best plan of a family may spend."""

_SEEDS = 4
"""How many proposals of a family are looked at, if the effort lasts."""

_NEAR = 1.2
"""A family that takes this many times as long as the best one after the first look is not searched further."""


class Refiner:
    """Searches around the proposals for one cluster and one set of constraints."""

    def __init__(self, profiles: Sequence[Profile], cluster: Cluster, constraints: PlanConstraints) -> None:
        self._profiles = {profile.microbatch_size: profile for profile in profiles}
        self._first = profiles[0]
        self._cluster = cluster
        self._constraints = constraints
        options = simulator_options(constraints.allreduce, constraints.optimizer_copies)
        self._assumptions = Assumptions(**options, shared_nic=constraints.shared_nic)
        self._searches: dict[tuple[int, bool], LocalSearch] = {}
        self.exact = not constraints.shared_nic and not any(profile.crossings for profile in profiles)
        """Whether the times of the local search are those of the simulator."""

    def families(self, proposals: Sequence[Plan]) -> dict[Family, list[Plan]]:
        """The accepted plans of every family: the proposals, and their stages under the other schedules."""
        every: dict[Plan, Plan] = {plan: plan for plan in proposals}
        for size, profile in self._profiles.items():
            costs = {again: chain_costs(profile, recompute=again, full_duplex=True) for again in (False, True)}
            own = [plan for plan in proposals if plan.microbatch_size == size]
            allreduce = self._constraints.allreduce
            for plan in share_stages(own, self._microbatches(profile), profile, costs, self._cluster, allreduce):
                every.setdefault(plan, plan)
        families: dict[Family, list[Plan]] = {}
        for plan in every:
            if self._constraints.accepts(plan):
                families.setdefault(family_of(plan), []).append(plan)
        return families

    def search(self, families: Mapping[Family, Sequence[Plan]], progress: bool | None) -> list[list[Plan]]:
        """For every family its best plan and, in case that this does not fit in the end, others."""
        looked = {
            family: self._look(family, plans)
            for family, plans in progress_line(list(families.items()), _name, "comparing", progress)
        }
        best = min((timed.seconds for own in looked.values() for timed in own[:1]), default=0.0)
        found = []
        for family, own in progress_line(list(looked.items()), _name, "improving", progress):
            seeds = fastest(families[family], 2)
            if own and own[0].seconds <= _NEAR * best:
                own = [self._improve(family, own[0]), *own]
            found.append(list(dict.fromkeys([*(timed.plan for timed in own), *seeds])))
        return found

    def _look(self, family: Family, plans: Sequence[Plan]) -> list[Timed]:
        """The first proposals of a family, timed, with the best of them improved a little; fastest first."""
        search = self._search(family)
        effort = Effort(_QUICK * self._cluster.devices)
        shapes: dict[object, Plan] = {}
        for plan in fastest(plans, len(plans)):
            shapes.setdefault((tuple(stage.ranks for stage in plan.stages), plan.microbatches), plan)
        timed = [found for plan in list(shapes.values())[:_SEEDS] if (found := search.time(plan, effort)) is not None]
        timed.sort(key=lambda found: found.seconds)
        return [search.move_cuts(timed[0], effort), *timed] if timed else []

    def _improve(self, family: Family, timed: Timed) -> Timed:
        search = self._search(family)
        effort = Effort(_DEEP * self._cluster.devices)
        timed = search.move_cuts(timed, effort)
        return search.move_replicas(timed, effort, straight=family.straight, stages=self._constraints.stages)

    def _search(self, family: Family) -> LocalSearch:
        profile = self._profiles[family.microbatch_size or 0]
        key = profile.microbatch_size, family.recompute
        if key not in self._searches:
            costs = chain_costs(profile, recompute=family.recompute)
            allreduce = self._constraints.allreduce
            self._searches[key] = LocalSearch(profile, costs, self._cluster, allreduce, self._assumptions)
        return self._searches[key]

    def _microbatches(self, profile: Profile) -> dict[ScheduleDefinition | str, int]:
        """The number of microbatches under every schedule that may be searched."""
        count = self._constraints.opened().count_microbatches
        counts: dict[ScheduleDefinition | str, int] = {}
        for definition in METHODS:
            microbatches = count(profile, self._first, self._cluster, definition)
            if microbatches and definition.name in self._constraints.opened().schedules:
                counts[definition.name] = microbatches
        return counts


def _name(entry: tuple[Family, object]) -> str:
    return str(entry[0].schedule)
