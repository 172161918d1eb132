"""Refinement: from the proposals of the planners to the best plan of every family, by local search.

A family has one schedule, with or without replicas, which split microbatches or not, with or without recomputation, one
microbatch size and one number of stages per rank.

Which layers and ranks go together depends little on the schedule. So the stages that are proposed for one schedule are
tried under all others, too, and in the end those of all improved families in the other families. Structures that cannot
be as fast as the best plan of any family are not searched (`lower_bounds`), but every family has a start, from which
the search may reach others. In all else the search in a family does not depend on the others. So a wish that excludes
families takes stages away from the remaining ones, and adds hardly any but structures that are slower than the best
plan without the wish.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf

from penstock.planning.memory import cuts_of, overfull_rank
from penstock.planning.predictions import count_rounds, predict, slowest_seconds, speed_of
from penstock.planning.requests import PlannerName, if_runnable, stages_on_devices
from penstock.planning.search.constraints import PlanConstraints, plans_for
from penstock.planning.search.device_moves import Groups
from penstock.planning.search.local_search import Effort, LocalSearch, Timed, shape_of
from penstock.planning.stage_costs import chain_costs
from penstock.progress import progress_line
from penstock.scheduling.definitions import ScheduleDefinition
from penstock.scheduling.orders import METHODS
from penstock.simulating.assumptions import Assumptions
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan, Routing
from penstock.values.profiles import Profile


@dataclass(frozen=True, slots=True)
class Family:
    """What the plans of a family have in common."""

    schedule: ScheduleDefinition | str
    straight: bool
    splits: bool
    """Whether replicas split every microbatch."""
    recompute: bool
    microbatch_size: int | None
    stages_per_rank: int


def family_of(plan: Plan) -> Family:
    """The family of `plan`."""
    straight = max(plan.replicas) == 1
    splits = not straight and plan.routing == "split"
    return Family(
        plan.schedule,
        straight,
        splits=splits,
        recompute=bool(plan.recompute),
        microbatch_size=plan.microbatch_size,
        stages_per_rank=plan.stages_per_rank,
    )


def _arrange(
    plan: Plan, definition: ScheduleDefinition, microbatches: int, profile: Profile, routing: Routing
) -> Plan | None:
    """The stages of `plan` under `definition`; None if it cannot run them."""
    if routing == "split" and any(profile.microbatch_size % count for count in plan.replicas):
        return None
    return if_runnable(
        lambda: Plan(
            plan.stages,
            definition.name,
            microbatches,
            profile.microbatch_size,
            recompute=plan.recompute,
            routing=routing,
            devices=plan.devices,
        )
    )


def _split(plan: Plan) -> Plan:
    """`plan` as the planner spp would run its stages if they had replicas."""
    alone = max(plan.replicas) == 1 and plans_for(PlannerName.SPP, plan.definition)
    return replace(plan, routing="split") if alone else plan


_QUICK = 4_000
"""Simulated actions for every device that the first look at a family may spend."""

_DEEP = 8_000
"""Simulated actions for every device that the search around the best plan of a family may spend."""

_LEAST = 140_000
"""What it may spend at least, on machines of few devices."""

_SEEDS = 4
"""How many proposals of a family are looked at, if the effort lasts."""

_FIRST_ROUNDS = 2
"""Rounds of moves of the cuts of each of them."""

_HOPELESS = 2.0
"""A family whose first proposals take this many times as long as the best plan so far is not improved."""

_CLOSE = 1.05
"""A second structure that takes no more than this many times as long as the best one is a start of its own."""

_RANKED = 12
"""How many families are simulated in the end."""

_ATTEMPTS = 16
"""How many plans of a family are simulated until one fits in memory."""

_BUFFERS = 2
"""Messages on either side of a stage that memory is reserved for, where it is limited."""

_ROUNDING = 1 + 1e-9
"""Bounds add in another order than the simulator."""

_NEAR = 1.45
"""A family whose bound is this many times the seconds of the best plan is not looked at, and one that takes this long
after the first look is not searched further."""


class Refiner:
    """Searches around the proposals for one cluster and one set of constraints."""

    def __init__(self, profiles: Sequence[Profile], cluster: Cluster, constraints: PlanConstraints) -> None:
        self._profiles = {profile.microbatch_size: profile for profile in profiles}
        self._first = profiles[0]
        self._cluster = cluster
        self._constraints = constraints
        self._assumptions = Assumptions(**constraints.simulator_options)
        self._searches: dict[tuple[int, bool], LocalSearch] = {}
        self.exact = not constraints.shared_nic and not any(profile.crossings for profile in profiles)
        """Whether the times of the local search are those of the simulator, and there is enough memory for all."""
        self.exact = self.exact and cluster.least_memory_bytes is None

    def families(self, proposals: Sequence[Plan]) -> dict[Family, list[Plan]]:
        """The accepted plans of every family: the proposals, and their stages under the other schedules."""
        every = dict.fromkeys(map(_split, proposals))
        for size, profile in self._profiles.items():
            own = [plan for plan in proposals if plan.microbatch_size == size]
            every |= dict.fromkeys(self._share_stages(own, profile))
        families: dict[Family, list[Plan]] = {}
        for plan in every:
            if self._constraints.accepts(plan):
                families.setdefault(family_of(plan), []).append(plan)
        return families

    def _share_stages(self, plans: Iterable[Plan], profile: Profile) -> Iterator[Plan]:
        """The stages of `plans` under every schedule that may be searched, with its number of microbatches.

        Each has a prediction by closed form. Plans with several stages per rank are left out, and so are those that a
        schedule cannot run or that do not fit.
        """
        cluster = self._cluster
        costs = {again: chain_costs(profile, cluster, recompute=again, full_duplex=True) for again in (False, True)}
        kinds = {(plan.stages, plan.devices, plan.recompute): plan for plan in plans if plan.stages_per_rank == 1}
        slowest = {
            key: slowest_seconds(
                stages_on_devices(plan), costs[bool(plan.recompute)], cluster, self._constraints.allreduce
            )
            for key, plan in kinds.items()
        }
        for definition, microbatches in self._microbatches(profile).items():
            for key, plan in kinds.items():
                if definition.layout.has_several:
                    continue
                for routing in self._routings(plan, definition):
                    made = _arrange(plan, definition, microbatches, profile, routing)
                    if made is not None:
                        predicted = predict(made, profile, costs[bool(plan.recompute)], slowest[key])
                        if overfull_rank(predicted.peak_bytes, plan.used(cluster)) is None:
                            yield replace(made, predicted=predicted, planner=plan.planner)

    def _routings(self, plan: Plan, definition: ScheduleDefinition) -> tuple[Routing, ...]:
        if not plans_for(PlannerName.SPP, definition):
            return ("round-robin",)
        # The planner spp divides microbatches among replicas. Where devices differ, few others plan replicas for it.
        return ("split",) if self._cluster.is_equal or max(plan.replicas) == 1 else ("split", "round-robin")

    def search(self, families: Mapping[Family, Sequence[Plan]], progress: bool | None) -> list[list[Plan]]:
        """The best plan of each of the fastest families, with others in case that it does not fit in the end."""
        looked: dict[Family, list[Timed]] = {}
        best = inf
        bounds = {family: min(map(self._search(family).least_seconds, plans)) for family, plans in families.items()}
        # The bounds of several stages per rank are too low, so that these would be looked at too closely.
        order = sorted(families, key=lambda family: (family.stages_per_rank > 1, bounds[family]))
        for family in progress_line(order, lambda family: str(family.schedule), "comparing", progress):
            looked[family] = self._look(family, families[family], best)
            best = min([best, *(timed.seconds for timed in looked[family][:1])])
        order.sort(key=lambda family: looked[family][0].seconds if looked[family] else inf)
        improved: dict[Family, Timed] = {}
        near = _NEAR * best
        for family in progress_line(order[:_RANKED], lambda family: str(family.schedule), "improving", progress):
            own = looked[family]
            if own and own[0].seconds <= near:
                other = next((timed for timed in own[1:] if shape_of(timed.plan) != shape_of(own[0].plan)), None)
                starts = [own[0], *([other] if other is not None and other.seconds <= _CLOSE * own[0].seconds else [])]
                improved[family] = self._improve(family, starts, best)
                best = min(best, improved[family].seconds)
        timings = {family: [*self._adopt(family, families[family], improved), *looked[family]] for family in order}
        order.sort(key=lambda family: timings[family][0].seconds if timings[family] else inf)
        if self._cluster.least_memory_bytes is None:
            order = [family for family in order if timings[family]] or order
        found = []
        for family in order[:_RANKED]:
            own = timings[family]
            attempts = _ATTEMPTS if self._cluster.least_memory_bytes is not None else 2
            others = sorted(families[family], key=speed_of, reverse=True)[:attempts]
            found.append(list(dict.fromkeys([*(timed.plan for timed in own), *others])))
        return found

    def _look(self, family: Family, plans: Sequence[Plan], best: float) -> list[Timed]:
        """The first proposals of a family, timed, with the best of them improved a little; fastest first.

        Those that cannot be as fast as `best` seconds a sample are left out, unless there are no others; then the best
        is looked at if it can be nearly as fast.
        """
        search = self._search(family)
        effort = Effort(_QUICK * self._cluster.devices)
        shapes: dict[object, list[Plan]] = {}
        # Deeper pipelines are further from their bounds.
        for plan in sorted(plans, key=lambda plan: search.least_seconds(plan) * count_rounds(plan) / plan.microbatches):
            groups = tuple(stage.ranks for stage in stages_on_devices(plan))
            shapes.setdefault((groups, plan.microbatches), []).append(plan)
        seeds = list(shapes.values())
        bounds = [min(map(search.least_seconds, alike)) for alike in seeds]
        by_bound = sorted(range(len(seeds)), key=bounds.__getitem__)
        # The closed form is too pessimistic for some structures and the bound too optimistic for others.
        both = list(dict.fromkeys(chain.from_iterable(enumerate(by_bound))))
        able = [seed for seed in both if bounds[seed] <= best * _ROUNDING][:_SEEDS]
        close = [seed for seed in both if best * _ROUNDING < bounds[seed] <= _NEAR * best][:_SEEDS]
        timed: list[Timed] = []
        for seed in (*able, *close):
            if seed in close and timed:
                break
            found = search.time(seeds[seed][0], cuts=list(map(cuts_of, seeds[seed])), effort=effort)
            timed += [] if found is None else [found]
        timed.sort(key=lambda found: found.seconds)
        if not timed or timed[0].seconds > _HOPELESS * best:
            return timed
        # The cuts of a proposal may be far from its best, so that each is improved before they are compared.
        near = [found for found in timed if found.seconds <= _HOPELESS * timed[0].seconds]
        moved = [search.move_cuts(found, Effort(_QUICK * self._cluster.devices), _FIRST_ROUNDS) for found in near]
        first = min(moved, key=lambda found: found.seconds)
        return [search.move_cuts(first, effort), *sorted(timed, key=lambda found: found.seconds)]

    def _improve(self, family: Family, starts: Sequence[Timed], best: float) -> Timed:
        """The plan of a family after a local search from `starts`, among structures that can be faster than `best`."""
        search = self._search(family)
        tried: set[Groups] = set()
        # Where devices differ, a family with replicas may have no proposals of its own.
        straight = family.straight if self._cluster.is_equal else self._constraints.straight
        found = []
        for start in starts:
            effort = Effort(max(_LEAST, _DEEP * self._cluster.devices))
            timed = search.move_replicas(
                search.move_cuts(start, effort),
                effort,
                below=best,
                straight=straight,
                tried=tried,
                stages=self._constraints.stages,
                ranks=self._cluster.devices if self._constraints.every_device else None,
            )
            found.append(timed)
            best = min(best, timed.seconds)
        return min(found, key=lambda timed: timed.seconds)

    def _adopt(self, family: Family, plans: Sequence[Plan], improved: Mapping[Family, Timed]) -> list[Timed]:
        """The best plans of a family after a try of the stages of the improved ones, with its own of these; fastest
        first.
        """
        fastest_first = sorted(improved.values(), key=lambda timed: timed.seconds)
        shapes: dict[object, Plan] = {}
        for timed in fastest_first:
            shapes.setdefault(shape_of(timed.plan), timed.plan)
        search = self._search(family)
        found = [improved[family]] if family in improved else []
        own = found[0].plan if found else plans[0]
        for shape, plan in shapes.items():
            known = found and shape == shape_of(own)
            made = None if known else search.adopt(own, plan)
            if made is None or family_of(made) != family or not self._constraints.accepts(made):
                continue
            if search.least_seconds(made) > fastest_first[0].seconds * _ROUNDING:
                continue
            effort = Effort(_QUICK * self._cluster.devices)
            other = search.time(made, cuts=[cuts_of(made)], effort=effort)
            found += [search.move_cuts(other, effort)] if other is not None else []
        return sorted(found, key=lambda timed: timed.seconds)

    def _search(self, family: Family) -> LocalSearch:
        profile = self._profiles[family.microbatch_size or 0]
        key = profile.microbatch_size, family.recompute
        if key not in self._searches:
            # Moves leave room for messages, which the proposals do not.
            buffers = 0 if self._cluster.least_memory_bytes is None else _BUFFERS
            costs = chain_costs(profile, self._cluster, recompute=family.recompute, buffers=buffers)
            self._searches[key] = LocalSearch(profile, costs, self._cluster, self._assumptions)
        return self._searches[key]

    def _microbatches(self, profile: Profile) -> dict[ScheduleDefinition, int]:
        """The number of microbatches under every schedule that may be searched."""
        opened = self._constraints.opened()
        counts = {
            definition: opened.count_microbatches(profile, self._first, self._cluster.devices, definition)
            for definition in METHODS
            if definition.name in opened.schedules
        }
        return {definition: count for definition, count in counts.items() if count}
