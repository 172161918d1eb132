"""Local search: small changes of a proposed plan, judged by the simulator's times.

A planner's closed form leaves out what only the whole schedule shows, so its best plan is seldom the best of its
neighborhood. The moves are:

  1. one cut to any place between its neighbors, or adjacent cuts by the same few layers. `PlanVariants` times all of
     these in one pass, so that all are tried in every round;
  2. other replicas: one moves to another stage, two stages become one, a stage becomes two, one device more or fewer is
     used. Each needs a simulation of its own. They are ordered by the closed form of their best cuts, and the first few
     are timed.

The result is the same in every run: effort is counted in simulated actions, not in seconds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise

import numpy as np

from penstock.errors import PlanError, ScheduleError
from penstock.planning.predictions import count_rounds
from penstock.planning.stage_costs import AllReduce, ChainCosts, Counts, Matrix, replicated_seconds
from penstock.scheduling.definitions import PipelineShape
from penstock.simulating.assumptions import Assumptions
from penstock.simulating.cut_variants import LayerSums, PlanVariants, estimate_actions
from penstock.values.chain_cuts import StageSeconds, cut_evenly, least_bottleneck
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan, Stage
from penstock.values.profiles import Profile

__all__ = ["Effort", "LocalSearch", "Timed", "shape_of"]

_PLACES = 400
"""The most moves of single cuts in a round; on longer chains, places far from a cut are left out."""

_SORTING = 4
"""Sorting the actions of a new structure costs as much as this number of passes over them."""

_TRIED = 4
"""How many structures are timed before the search goes on from the best of them."""

_ROUNDS = 2
"""Rounds of moves of cuts before structures are compared."""

_MOST_ROUNDS = 100

_KEPT_NUMBERS = 4_000_000
"""How many seconds of stages are kept, 32 MB."""

_PROMISING = 1.1
"""A structure that takes this many times as long as the best one is not searched further."""

_BETTER = 1 - 1e-6
"""A smaller gain is not worth another round."""


@dataclass(slots=True)
class Effort:
    """The simulated actions that a search may still spend."""

    actions: float

    def covers(self, plan: Plan) -> bool:
        """Whether it is enough to time a plan with other replicas."""
        return _SORTING * estimate_actions(plan) <= self.actions

    def spend(self, actions: float) -> bool:
        """Whether any effort was left; takes `actions` of it."""
        left = self.actions > 0
        self.actions -= actions
        return left


@dataclass(frozen=True, slots=True, eq=False)
class Timed:
    """A plan with its simulated seconds for one sample, and what times its variants."""

    plan: Plan
    seconds: float
    variants: PlanVariants


class LocalSearch:
    """Searches around plans for one profile on one cluster."""

    def __init__(
        self,
        profile: Profile,
        costs: ChainCosts,
        cluster: Cluster,
        allreduce: AllReduce,
        assumptions: Assumptions,
    ) -> None:
        self._profile = profile
        self._costs = costs
        self._cluster = cluster
        self._allreduce = allreduce
        self._assumptions = assumptions
        self._sums = LayerSums.of(profile)
        self._links: dict[tuple[int, int], float] = {}
        self._stage_tables: dict[tuple[int, float, float], Matrix] = {}

    def time(self, plan: Plan, *alike: Plan, effort: Effort) -> Timed | None:
        """`plan` with the best of its own cuts, those of plans that are `alike` but for the cuts, and those that
        balance it; None if there is no effort left, or if nothing fits.
        """
        if effort.actions <= 0:
            return None
        try:
            variants = PlanVariants(plan, self._cluster, self._assumptions)
        except (PlanError, ScheduleError):
            return None
        effort.spend(_SORTING * variants.actions)
        return self._best(plan, variants, [*map(_cuts, (plan, *alike)), *self._balanced(plan)], effort, np.inf)

    def adopt(self, plan: Plan, other: Plan) -> Plan | None:
        """`plan` with the ranks of the stages of `other`, and with its cuts if it has one stage per rank; None if the
        schedule of `plan` cannot run it.
        """
        if plan.definition.layout.has_several:
            return None
        shape = shape_of(other)
        changed = self._arrange(plan, shape)
        return changed if changed is None or len(other.stages) > len(shape) else _moved(changed, _cuts(other))

    def slowest_seconds(self, plan: Plan) -> float:
        """The seconds per microbatch of the slowest rank or link, where links carry both directions at once."""
        ranks: dict[tuple[int, ...], float] = {}
        links: dict[tuple[int, int], float] = {}
        for stage in plan.stages:
            ranks[stage.ranks] = ranks.get(stage.ranks, 0.0) + float(self._costs.seconds[stage.start, stage.stop])
        for one, other in pairwise(plan.stages):
            pair = one.ranks[-1], other.ranks[0]
            if pair[0] != pair[1]:
                sent = float(self._sums.crossing[other.start]) / self._bandwidth(pair)
                links[pair] = links.get(pair, 0.0) + sent
        return max(*ranks.values(), *links.values(), 0.0)

    def move_cuts(self, timed: Timed, effort: Effort, most_rounds: int = _MOST_ROUNDS) -> Timed:
        """The plan after moves of cuts, as long as they make it faster."""
        for _ in range(most_rounds):
            if effort.actions <= 0:
                break
            moves = _moves(np.array(_cuts(timed.plan)))
            found = self._best(timed.plan, timed.variants, moves, effort, timed.seconds)
            if found is None or found.seconds >= timed.seconds * _BETTER:
                break
            timed = found
        return timed

    def move_replicas(
        self, timed: Timed, effort: Effort, *, straight: bool, stages: int | None = None, ranks: int | None = None
    ) -> Timed:
        """The plan after moves of replicas and of cuts, as long as they make it faster; it keeps to `stages` and
        `ranks`.
        """
        tried: set[tuple[tuple[int, ...], ...]] = set()
        here = timed
        while effort.actions > 0:
            every = self._structures(here.plan, straight)
            changed = [each for each in every if stages in (None, len(each.stages)) and ranks in (None, each.ranks)]
            fresh = list(
                islice((each for each in changed if shape_of(each) not in tried and effort.covers(each)), _TRIED)
            )
            tried.update(map(shape_of, fresh))
            cut = [_moved(each, self._balance(each, 1.0)[1]) for each in fresh]
            timings = [found for each in cut if (found := self.time(each, effort=effort)) is not None]
            if not timings:
                break
            # The closed form's cuts may be far from the best, so each is improved before they are compared.
            here = min((self.move_cuts(each, effort, _ROUNDS) for each in timings), key=lambda found: found.seconds)
            if here.seconds < _PROMISING * timed.seconds:
                here = self.move_cuts(here, effort)
            # Two moves may gain what the first of them loses.
            if here.seconds > _PROMISING * timed.seconds:
                here = timed
            if here.seconds < timed.seconds * _BETTER:
                timed = here
        return timed

    def _best(
        self, plan: Plan, variants: PlanVariants, cuts: Sequence[Sequence[int]], effort: Effort, before: float
    ) -> Timed | None:
        """The fastest of `cuts` that fits; of equally fast ones that with the most equal stages."""
        table = np.array(sorted(set(map(tuple, cuts))), dtype=np.int64)
        table = table[self._fit(plan, table)]
        if not len(table):
            return None
        effort.spend(variants.actions * (1 + len(table) / 500))
        seconds = variants.minibatch_seconds(self._sums, table)
        work = self._costs.seconds[table[:, :-1], table[:, 1:]] / np.array(plan.replicas)
        near = seconds <= seconds.min() * (1 + 1e-9)
        best = int(np.where(near, (work**2).sum(axis=1), np.inf).argmin())
        each = float(seconds[best]) / (plan.microbatches * self._profile.microbatch_size)
        return Timed(_moved(plan, table[best]), each, variants) if each <= before else None

    def _fit(self, plan: Plan, cuts: Counts) -> Counts:
        """The indices of the cuts with which every rank has enough memory, by the planners' formula."""
        limit = self._cluster.memory_bytes
        if limit is None:
            return np.arange(len(cuts))
        placement = plan.placement
        guarantees = plan.definition.guarantees(PipelineShape(placement, plan.microbatches, plan.vertical_sync))
        fitting = np.ones(len(cuts), dtype=bool)
        starts, stops = cuts[:, :-1], cuts[:, 1:]
        saved, working = self._costs.saved_bytes[starts, stops], self._costs.working_bytes[starts, stops]
        weights = self._costs.parameter_bytes[starts, stops]
        sharers = np.array(plan.replicas) if placement.split else np.ones(len(plan.stages))
        for ranks in dict.fromkeys(placement.stages):
            held = list(placement.stages_of(ranks[0]))
            own = guarantees.in_flight_of_rank[ranks[0]] * (saved / sharers)[:, held].max(axis=1)
            copies = max(guarantees.versions[stage] for stage in held) + 1 + self._assumptions.optimizer_copies
            own = own + (working / sharers)[:, held].max(axis=1) + copies * weights[:, held].sum(axis=1)
            fitting &= own <= limit
        return np.flatnonzero(fitting)

    def _balanced(self, plan: Plan) -> list[tuple[int, ...]]:
        """The cuts with the fastest slowest part, where a cut counts not at all, one way, and both ways."""
        if plan.definition.layout.has_several:
            return []
        found = [self._balance(plan, ways)[1] for ways in (0.0, 1.0, 2.0)]
        return [cuts for cuts in found if cuts]

    def _balance(self, plan: Plan, ways: float) -> tuple[float, tuple[int, ...]]:
        """The seconds per microbatch of the slowest part, and the cuts with which it is fastest."""
        limit, seconds, exchange = self._bottleneck(plan, ways)
        return limit, cut_evenly(seconds, exchange, limit) if limit < np.inf else ()

    def _bottleneck(self, plan: Plan, ways: float) -> tuple[float, StageSeconds, list[Matrix]]:
        """The seconds per microbatch of the slowest part with the best cuts, and of every stage and cut."""
        exchange = self._exchange(plan, ways)

        def seconds(stage: int, starts: Counts) -> Matrix:
            return self._stage_seconds(plan, stage, starts)

        return least_bottleneck(seconds, exchange), seconds, exchange

    def _exchange(self, plan: Plan, ways: float) -> list[Matrix]:
        """By cut: the seconds that it takes at each position, over the links of all replicas."""
        exchange = []
        for one, other in pairwise(plan.stages):
            counts = len(one.ranks), len(other.ranks)
            links = counts[0] * counts[1] if plan.placement.split else max(counts)
            exchange.append(np.append(self._sums.crossing[:-1] * (ways / self._link(one, other) / links), np.inf))
        return exchange

    def _stage_seconds(self, plan: Plan, stage: int, starts: Counts) -> Matrix:
        """The seconds per microbatch of a stage from each of `starts` up to every layer."""
        own = plan.stages[stage]
        replicas = len(own.ranks)
        # A stage sums its gradients once for all microbatches of an update.
        turns = plan.microbatches / (1 if plan.placement.split else replicas)
        shared = 1.0 if plan.definition.updates_per_microbatch else max(1.0, turns)
        key = replicas, self._link(own, own), shared
        if key not in self._stage_tables:
            if len(self._stage_tables) * self._costs.seconds.size > _KEPT_NUMBERS:
                self._stage_tables.clear()
            weights = self._costs.parameter_bytes / shared
            self._stage_tables[key] = replicated_seconds(self._costs.seconds, weights, *key[:2], self._allreduce)
        return self._stage_tables[key][starts]

    def estimate_seconds(self, plan: Plan) -> float:
        """The seconds for a sample by closed form, where messages of replicas have links of their own."""
        if plan.definition.layout.has_several:
            slowest = self.slowest_seconds(plan) / max(plan.replicas)
        else:
            parts = [
                float(self._stage_seconds(plan, index, np.array([stage.start]))[0, stage.stop])
                for index, stage in enumerate(plan.stages)
            ]
            sent = zip(self._exchange(plan, 1.0), plan.stages[1:], strict=True)
            slowest = max(*parts, *(float(seconds[stage.start]) for seconds, stage in sent), 0.0)
        return slowest * count_rounds(plan) / (plan.microbatches * self._profile.microbatch_size)

    def _link(self, one: Stage, other: Stage) -> float:
        """The bandwidth of the slowest link between the first and last ranks of two stages."""
        ends = [(a, b) for a in (one.ranks[0], one.ranks[-1]) for b in (other.ranks[0], other.ranks[-1]) if a != b]
        return min(map(self._bandwidth, ends), default=np.inf)

    def _bandwidth(self, pair: tuple[int, int]) -> float:
        if pair not in self._links:
            here, there = pair
            self._links[pair] = min(self._cluster.bandwidth(here, there), self._cluster.bandwidth(there, here))
        return self._links[pair]

    def _structures(self, plan: Plan, straight: bool) -> list[Plan]:
        """Plans with other replicas, the fastest with its best cuts by closed form first; their own cuts are any."""
        if plan.definition.layout.has_several:
            return []
        scored = []
        devices = self._cluster.devices
        for replicas in dict.fromkeys(_neighbors(plan.replicas, devices, straight)):
            changed = self._rearrange(plan, replicas)
            if changed is None:
                continue
            limit = self._bottleneck(changed, 1.0)[0]
            if limit < np.inf:
                scored.append((count_rounds(changed) * limit, changed))
        scored.sort(key=lambda pair: pair[0])
        return [changed for _, changed in scored]

    def _rearrange(self, plan: Plan, replicas: Sequence[int]) -> Plan | None:
        """`plan` with other replicas, on ranks in the same order; None if its schedule cannot run them."""
        order = [rank for stage in plan.stages for rank in stage.ranks]
        order += [rank for rank in range(self._cluster.devices) if rank not in set(order)]
        if sorted(order[: sum(replicas)]) != list(range(sum(replicas))):
            order = list(range(self._cluster.devices))
        ends = np.cumsum((0, *replicas)).tolist()
        return self._arrange(plan, [tuple(sorted(order[start:stop])) for start, stop in pairwise(ends)])

    def _arrange(self, plan: Plan, ranks: Sequence[tuple[int, ...]]) -> Plan | None:
        """`plan` with stages on other `ranks`, with any cuts; None if its schedule cannot run them."""
        if len(ranks) > len(self._profile):
            return None
        if plan.routing == "split" and any(self._profile.microbatch_size % len(own) for own in ranks):
            return None
        stages = tuple(Stage(index, index + 1, own) for index, own in enumerate(ranks))
        stages = (*stages[:-1], replace(stages[-1], stop=len(self._profile)))
        try:
            changed = replace(plan, stages=stages, predicted=None)
            changed.definition.check(PipelineShape(changed.placement, plan.microbatches, plan.vertical_sync))
        except (PlanError, ScheduleError):
            return None
        return changed


def _neighbors(replicas: tuple[int, ...], devices: int, straight: bool) -> Iterator[tuple[int, ...]]:
    """Replicas that differ from `replicas` by one move."""
    count = len(replicas)
    for stage in range(count - 1):
        before, behind = replicas[stage : stage + 2]
        for both in (1,) if straight else dict.fromkeys((before + behind, before, behind)):
            yield (*replicas[:stage], both, *replicas[stage + 2 :])
    if sum(replicas) < devices:
        yield (*replicas, 1)
        yield (1, *replicas)
    if straight:
        return
    for stage, own in enumerate(replicas):
        for first in {1, own // 2, own - 1} - {0, own}:
            yield (*replicas[:stage], first, own - first, *replicas[stage + 1 :])
        for other in (own + 1, own - 1):
            if other and sum(replicas) - own + other <= devices:
                yield (*replicas[:stage], other, *replicas[stage + 1 :])
        for other in range(count):
            if own > 1 and other != stage:
                changed = list(replicas)
                changed[stage], changed[other] = own - 1, replicas[other] + 1
                yield tuple(changed)
    for width in range(1, devices + 1):
        for depth in {devices // width, count} - {0}:
            if width * depth <= devices:
                yield (width,) * depth


def _moves(cuts: Counts) -> list[tuple[int, ...]]:
    """The cuts and all that differ by one move."""
    count, layers = len(cuts) - 2, int(cuts[-1])
    rows = [tuple(cuts.tolist())]
    far = max(1, _PLACES // max(1, count) // 2)
    for cut in range(1, count + 1):
        low, high = int(cuts[cut - 1]) + 1, int(cuts[cut + 1])
        here = int(cuts[cut])
        for place in range(max(low, here - far), min(high, here + far + 1)):
            if place != here:
                rows.append((*rows[0][:cut], place, *rows[0][cut + 1 :]))
    for length in range(2, count + 1):
        for first in range(1, count - length + 2):
            for step in (-2, -1, 1, 2):
                moved = cuts.copy()
                moved[first : first + length] += step
                if (np.diff(moved) > 0).all() and moved[0] == 0 and moved[-1] == layers:
                    rows.append(tuple(moved.tolist()))
    return rows


def _cuts(plan: Plan) -> tuple[int, ...]:
    return (0, *(stage.stop for stage in plan.stages))


def shape_of(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The ranks of the stages of one pipeline; where a rank holds several stages, those of the first."""
    return tuple(dict.fromkeys(stage.ranks for stage in plan.stages))


def _moved(plan: Plan, cuts: Sequence[int] | Counts) -> Plan:
    """`plan` with other cuts and without a prediction."""
    ends = [int(cut) for cut in cuts]
    stages = tuple(Stage(*own, stage.ranks) for stage, own in zip(plan.stages, pairwise(ends), strict=True))
    return replace(plan, stages=stages, predicted=None)
