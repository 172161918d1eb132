"""Local search: small changes of a proposed plan, judged by the simulator's times.

A planner's closed form leaves out what only the whole schedule shows, so its best plan is seldom the best of its
neighborhood. The moves are:

  1. one cut to any place between its neighbors, or adjacent cuts by the same few layers. `PlanVariants` times all of
     these in one pass, so that all are tried in every round;
  2. other replicas: one moves to another stage, two stages become one, a stage becomes two, one device more or fewer is
     used; where devices differ also other devices (`device_moves`). Each needs a simulation of its own. Those whose
     bound is above the best plan are left out (`lower_bounds`), the others are ordered by it, and the first few are
     timed, with cuts like those before the move and with others.

The result is the same in every run: effort is counted in simulated actions, not in seconds.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from math import inf

import numpy as np

from penstock.errors import PlanError, ScheduleError
from penstock.planning.memory import cuts_of, peaks_of_cuts
from penstock.planning.pipedream.interleaving import joint_moves
from penstock.planning.predictions import count_rounds
from penstock.planning.requests import if_runnable, number_ranks, stages_on_devices
from penstock.planning.search.device_moves import Groups, moved_devices
from penstock.planning.search.lower_bounds import LowerBounds, Structure
from penstock.planning.stage_costs import ChainCosts, Counts
from penstock.simulating.assumptions import Assumptions
from penstock.simulating.cut_variants import LayerSums, PlanVariants, estimate_actions, kinds_of
from penstock.values.clusters import Cluster
from penstock.values.link_tables import LinkLevels
from penstock.values.plans import Plan, Stage
from penstock.values.profiles import Profile

_PLACES = 400
"""The most moves of single cuts in a round; on longer chains, places far from a cut are left out."""

_ALL_LENGTHS = 32
"""Of more cuts than these, only runs of 2, 4, 8 and so on are moved together."""

_LONG = 400
"""The bounds of all proposals for a chain of more layers would take too long."""

_SORTING = 4
"""Sorting the actions of a new structure costs as much as this number of passes over them."""

_TRIED = 4
"""How many structures are timed before the search goes on from the best of them."""

_ROUNDS = 2
"""Rounds of moves of cuts before structures are compared."""

_MOST_ROUNDS = 100

_KEPT_ACTIONS = 1_000_000
"""How many sorted actions are kept, about 100 MB."""

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

    def __init__(self, profile: Profile, costs: ChainCosts, cluster: Cluster, assumptions: Assumptions) -> None:
        self._profile = profile
        self._costs = costs
        self._cluster = cluster
        self._assumptions = assumptions
        self._sums = LayerSums.by_kind(profile, cluster)
        self._kinds = kinds_of(cluster)
        seconds = {kind: sums.forward[-1] + sums.backward[-1] for kind, sums in self._sums.items()}
        self._least_work = float(min(seconds.values()))
        links = cluster.links
        self._is_flat = isinstance(links, LinkLevels) and len({rate for count, rate in links.levels if count > 1}) <= 1
        self._fastest_first = sorted(range(cluster.devices), key=lambda device: float(seconds[self._kinds[device]]))
        self._bounds = LowerBounds(profile, costs, cluster, assumptions)
        self._variants: dict[object, PlanVariants | None] = {}
        """By structure; None if it cannot run."""
        self._kept_actions = 0

    def time(self, plan: Plan, *, cuts: Sequence[tuple[int, ...]], effort: Effort) -> Timed | None:
        """`plan` with the best of `cuts` and of those with the least bound; None if there is no effort left, or if
        nothing fits.
        """
        if effort.actions <= 0:
            return None
        variants = self._variants_of(plan, effort)
        if variants is None:
            return None
        every = dict.fromkeys(cuts)
        if not plan.definition.layout.has_several:
            every |= dict.fromkeys(filter(None, [self._bounds.cuts(Structure.of(plan))]))
        return self._best(plan, variants, np.array(list(every)), effort, np.inf)

    def _variants_of(self, plan: Plan, effort: Effort) -> PlanVariants | None:
        """What times other cuts of `plan`; None if it cannot run."""
        key = _structure_of(plan)
        if key not in self._variants:
            if self._kept_actions > _KEPT_ACTIONS:
                self._variants.clear()
                self._kept_actions = 0
            try:
                self._variants[key] = made = PlanVariants(plan, self._cluster, self._assumptions)
            except (PlanError, ScheduleError):
                self._variants[key] = None
            else:
                self._kept_actions += made.actions
                effort.spend(_SORTING * made.actions)
        return self._variants[key]

    def adopt(self, plan: Plan, other: Plan) -> Plan | None:
        """`plan` with the ranks of the stages of `other`, and with its cuts if it has one stage per rank; None if the
        schedule of `plan` cannot run it.
        """
        if plan.definition.layout.has_several:
            return None
        shape = shape_of(other)
        changed = self._arrange(plan, shape)
        return changed if changed is None or len(other.stages) > len(shape) else _moved(changed, cuts_of(other))

    def least_seconds(self, plan: Plan) -> float:
        """The seconds for a sample that `plan` takes at least, whatever its cuts.

        Where a rank holds several stages, these are the seconds of its slowest rank or link with its own cuts, which
        are chosen to make it least; with replicas, and on long chains, an equal share of the work.
        """
        if not plan.definition.layout.has_several and len(self._profile) <= _LONG:
            return self._per_sample(self._bounds.least_seconds(Structure.of(plan)), plan)
        if plan.definition.layout.has_several and max(plan.replicas) == 1 and plan.predicted is not None:
            return plan.predicted.bottleneck_seconds / self._profile.microbatch_size
        return self._least_work / plan.ranks / self._profile.microbatch_size

    def _per_sample(self, seconds: float, plan: Plan) -> float:
        return seconds / (plan.microbatches * self._profile.microbatch_size)

    def move_cuts(self, timed: Timed, effort: Effort, most_rounds: int = _MOST_ROUNDS) -> Timed:
        """The plan after moves of cuts, as long as they make it faster."""
        for _ in range(most_rounds):
            if effort.actions <= 0:
                break
            moves = _moves(np.array(cuts_of(timed.plan)))
            found = self._best(timed.plan, timed.variants, moves, effort, timed.seconds * _BETTER)
            if found is None:
                break
            timed = found
        return timed

    def move_replicas(
        self,
        timed: Timed,
        effort: Effort,
        *,
        below: float,
        straight: bool,
        tried: set[Groups],
        stages: int | None = None,
        ranks: int | None = None,
    ) -> Timed:
        """The plan after moves of replicas and of cuts, as long as they make it faster; it keeps to `stages` and
        `ranks`, and to structures that can take less than `below` seconds for a sample. Those `tried` are left out, and
        those that it tries are added.
        """
        here = timed
        while effort.actions > 0:
            below = min(below, timed.seconds)
            every = self._structures(here.plan, straight, below)
            changed = [each for each in every if stages in (None, len(each.stages)) and ranks in (None, each.ranks)]
            untried = (each for each in changed if self._alike(shape_of(each)) not in tried)
            fresh = list(islice(filter(effort.covers, untried), _TRIED))
            tried.update(self._alike(shape_of(each)) for each in fresh)
            before = cuts_of(here.plan)
            timings = [
                found
                for each in fresh
                if (found := self.time(each, cuts=_adapted(before, len(each.stages)), effort=effort)) is not None
            ]
            if not timings:
                break
            # These cuts may be far from the best, so each is improved before they are compared.
            here = min((self.move_cuts(each, effort, _ROUNDS) for each in timings), key=lambda found: found.seconds)
            if here.seconds < _PROMISING * timed.seconds:
                here = self.move_cuts(here, effort)
            # Two moves may gain what the first of them loses.
            if here.seconds > _PROMISING * timed.seconds:
                here = timed
            if here.seconds < timed.seconds * _BETTER:
                timed = here
        return timed

    def _best(self, plan: Plan, variants: PlanVariants, cuts: Counts, effort: Effort, below: float) -> Timed | None:
        """The fastest of `cuts` that fits and takes less than `below` seconds for a sample; of equally fast ones that
        with the most equal stages.
        """
        table = cuts
        if self._cluster.least_memory_bytes is not None:
            assumed = self._assumptions
            peaks = peaks_of_cuts(plan, cuts, self._costs, assumed.kept_copies, shared=assumed.shard_optimizer)
            rooms = [min(self._cluster.memory_of(each) or inf for each in devices) for devices in shape_of(plan)]
            table = cuts[(peaks <= rooms).all(axis=1)]
        samples = plan.microbatches * self._profile.microbatch_size
        seconds = variants.minibatch_seconds(self._sums, table, below * samples)
        played = int(np.isfinite(seconds).sum())
        if not played:
            return None
        effort.spend(variants.actions * (1 + played / 500))
        near = np.flatnonzero(seconds <= seconds.min() * (1 + 1e-9))
        work = self._costs.seconds[table[near, :-1], table[near, 1:]] / np.array(plan.replicas)
        best = near[(work**2).sum(axis=1).argmin()]
        each = float(seconds[best]) / samples
        return Timed(_moved(plan, table[best]), each, variants) if each < below else None

    def _structures(self, plan: Plan, straight: bool, below: float) -> list[Plan]:
        """Plans with other replicas that can take less than `below` seconds for a sample, those with the least bound
        first.
        """
        if plan.definition.layout.has_several:
            return []
        scored = []
        structure = Structure.of(plan)
        every: Iterable[Groups]
        if self._cluster.is_equal:
            shapes = dict.fromkeys(_neighbors(plan.replicas, self._cluster.devices, straight))
            every = (self._grouped(plan, replicas) for replicas in shapes)
        else:
            moved = moved_devices(structure.groups, self._fastest_first)
            every = {self._alike(own): own for own in moved if not straight or max(map(len, own)) == 1}.values()
        for groups in every:
            least = self._per_sample(self._bounds.least_seconds(replace(structure, groups=groups)), plan)
            changed = self._arrange(plan, groups) if least < below else None
            if changed is not None:
                # Deeper pipelines, and those on fewer devices, are further from their bounds.
                scored.append((least * count_rounds(changed), -changed.ranks, changed))
        scored.sort(key=lambda each: each[:2])
        return [changed for *_, changed in scored]

    def _alike(self, groups: Groups) -> Groups:
        """Equal for groups that differ only in which of equal devices they hold, where all links are equal."""
        if not self._is_flat or self._cluster.is_equal:
            return groups
        return tuple(tuple(sorted(self._kinds[device] for device in devices)) for devices in groups)

    def _grouped(self, plan: Plan, replicas: Sequence[int]) -> Groups:
        """The ranks of stages with other replicas, in the same order."""
        order = [rank for stage in plan.stages for rank in stage.ranks]
        order += [rank for rank in range(self._cluster.devices) if rank not in set(order)]
        if sorted(order[: sum(replicas)]) != list(range(sum(replicas))):
            order = list(range(self._cluster.devices))
        ends = np.cumsum((0, *replicas)).tolist()
        return tuple(tuple(sorted(order[start:stop])) for start, stop in pairwise(ends))

    def _arrange(self, plan: Plan, groups: Groups) -> Plan | None:
        """`plan` with stages on other devices, with any cuts; None if its schedule cannot run them."""
        if len(groups) > len(self._profile):
            return None
        if plan.routing == "split" and any(self._profile.microbatch_size % len(own) for own in groups):
            return None
        ends = [*range(len(groups)), len(self._profile)]
        placed = zip(pairwise(ends), groups, strict=True)
        stages, devices = number_ranks(tuple(Stage(*span, own) for span, own in placed))
        return if_runnable(lambda: replace(plan, stages=stages, devices=devices, predicted=None))


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


def _adapted(cuts: tuple[int, ...], stages: int) -> list[tuple[int, ...]]:
    """`cuts` for another number of stages: without one of them, or with one more in the middle of a stage."""
    if stages == len(cuts) - 1:
        return [cuts]
    if stages == len(cuts) - 2:
        return [cuts[:index] + cuts[index + 1 :] for index in range(1, len(cuts) - 1)]
    if stages == len(cuts):
        middles = [(index, (start + stop) // 2) for index, (start, stop) in enumerate(pairwise(cuts), start=1)]
        return [(*cuts[:index], cut, *cuts[index:]) for index, cut in middles if cuts[index - 1] < cut]
    return []


def _moves(cuts: Counts) -> Counts:
    """All cuts that differ by one move."""
    count = len(cuts) - 2
    far = max(1, _PLACES // max(1, count) // 2)
    here = cuts[1:-1]
    lows, highs = np.maximum(cuts[:-2] + 1, here - far), np.minimum(cuts[2:], here + far + 1)
    widths = highs - lows
    places = np.arange(widths.sum()) + np.repeat(lows - np.cumsum(widths) + widths, widths)
    moved = np.repeat(np.arange(1, count + 1), widths)
    other = places != cuts[moved]
    rows = np.repeat(cuts[None], other.sum(), axis=0)
    rows[np.arange(len(rows)), moved[other]] = places[other]
    lengths = range(2, count + 1)
    some = tuple(lengths) if count <= _ALL_LENGTHS else tuple(each for each in lengths if each.bit_count() == 1)
    shifted = cuts + joint_moves(count, some, (-2, -1, 1, 2))
    return np.concatenate([rows, shifted[(np.diff(shifted, axis=1) > 0).all(axis=1)]])


def _structure_of(plan: Plan) -> object:
    """Equal for plans that differ only in their cuts."""
    groups = tuple(stage.ranks for stage in stages_on_devices(plan))
    return plan.schedule, groups, plan.microbatches, plan.vertical_sync, plan.recompute, plan.routing


def shape_of(plan: Plan) -> Groups:
    """The devices of the stages of one pipeline; where a rank holds several stages, those of the first."""
    return tuple(dict.fromkeys(stage.ranks for stage in stages_on_devices(plan)))


def _moved(plan: Plan, cuts: Sequence[int] | Counts) -> Plan:
    """`plan` with other cuts and without a prediction."""
    ends = [int(cut) for cut in cuts]
    stages = tuple(Stage(*own, stage.ranks) for stage, own in zip(plan.stages, pairwise(ends), strict=True))
    return replace(plan, stages=stages, predicted=None)
