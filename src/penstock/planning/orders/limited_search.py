"""The search for an order of given stages under given limits: seeds that fit in them, and what moves make of those.

The simulator says what fits; rows know of links and bytes less than it does. For many microbatches an order of fewer is
found, and a part in its middle repeated.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from operator import add, sub

from penstock.planning.orders.bounds import bound_of
from penstock.planning.orders.judged_stages import Judged, JudgedStages, named_plans
from penstock.planning.orders.local_moves import improve
from penstock.planning.orders.offloads import offload_order
from penstock.planning.orders.rows import ROUNDING, OrderCosts, Rows, TimedRows, repeated, rows_of, time_rows
from penstock.planning.orders.seeds import delay_rows, find_seeds, quick_seeds, spread_weights
from penstock.planning.orders.window_moves import rearrange
from penstock.values.plans import Plan, schedule

THOROUGH, QUICK = (1_000, 200_000, 12_000, 3), (200, 40_000, 0, 1)
"""(The most local moves on a seed, the most operations that they time, those that are then put in windows, and how
often all this is done), under the limit that was given and under lower ones.
"""
_GAIN = 1e-3
"""Moves go on in another round while one shortens the step by this share."""
_JUDGED, _JUDGED_OPERATIONS = 4, 600
"""The most seeds of each kind that the simulator judges, and of how many operations together."""
_ROUNDS = 5
"""How often limits are lowered by what the simulator found above them: links and messages take bytes, too."""
_FEWER = 0.8
"""The share of a limit under which orders of several stages per rank are sought, too."""
_LONG = 6, 64
"""An order of more microbatches than 6 times the ranks, and than 64, repeats its middle ..."""
_SHORT = 3, 48
"""... and is found for 3 times the ranks, or for 48 if these are more."""
_RELAXED = 1.5, 2.5
"""How much more memory orders may take that are brought within their limits by offloads."""
_MORE, _LOOKED_AT = 16, 24
"""How much longer rows are when they are compared, and how many are."""


@dataclass(frozen=True, slots=True)
class Start:
    """Rows under `costs`, and what the simulator says of them; a seed that fits, or what moves made of it."""

    search: "LimitedSearch"
    """That for its stages."""
    costs: OrderCosts
    seed: TimedRows
    judged: Judged

    def under(self, limits: tuple[float, ...]) -> "Start":
        """This start under higher limits."""
        more = map(sub, limits, self.search.limits)
        costs = replace(self.costs, limits=tuple(map(add, self.costs.limits, more)))
        return replace(self, search=replace(self.search, limits=limits), costs=costs)


@dataclass(frozen=True, slots=True)
class LimitedSearch:
    """The search for orders of `stages` under `limits`."""

    stages: JudgedStages
    limits: tuple[float, ...]
    """By rank of the schedule."""

    def with_plan(self, plan: Plan) -> "LimitedSearch":
        """This search for the stages of `plan`."""
        return replace(self, stages=replace(self.stages, plan=plan))

    def fits(self, judged: Judged) -> bool:
        """Whether a plan takes no more than the limits."""
        return all(peak <= limit * ROUNDING for peak, limit in zip(judged.peaks, self.limits, strict=True))

    @property
    def room(self) -> tuple[float, ...]:
        """By rank: the bytes for microbatches in flight."""
        return tuple(map(sub, self.limits, self.stages.fixed_bytes))

    @property
    def operations(self) -> int:
        """The most operations that an order of the stages has."""
        return 3 * len(self.stages.ranks) * self.stages.plan.microbatches

    @property
    def _judged(self) -> int:
        """How many seeds of a kind the simulator judges."""
        return max(1, min(_JUDGED, _JUDGED_OPERATIONS // self.operations))

    def all_costs(self, limits: tuple[float, ...]) -> Iterator[OrderCosts]:
        """One for each choice of the stages whose backwards are split: none, all, and all that have room for it.

        Where a rank has several stages, lower limits are tried, too.

        The backward of the input stage is whole: it sends no gradient, so nothing waits for its first half.
        """
        stages = range(len(self.stages.ranks))
        if min(limits) <= 0:
            return
        yield (every := self.stages.costs(frozenset(stages), limits))
        if not self.stages.whole_backwards:
            # A split backward is followed by a forward only where two microbatches fit.
            full = {stage for stage in stages if limits[every.ranks[stage]] < 2.5 * every.saved[stage]}
            for whole in dict.fromkeys((frozenset({0}), frozenset({0, *full}))):
                if len(whole) < len(stages):
                    yield (split := self.stages.costs(whole, limits))
                    if len(stages) > len(limits) and max(limits) < inf:
                        # Greedy forwards in a V delay what returns: less in flight may be faster.
                        yield replace(split, limits=tuple(_FEWER * limit for limit in limits))

    def starts(
        self, costs: OrderCosts, seeds_of: Callable[[JudgedStages, OrderCosts], list[TimedRows]]
    ) -> Iterator[Start]:
        """The best seed that fits. Where messages and workspace take more than was known, under lower limits."""
        for _ in range(_ROUNDS):
            score = partial(whole_score, costs)
            seeds = sorted(seeds_of(self.stages, shortened(costs))[:_LOOKED_AT], key=score)
            made = [
                Start(self, costs, seed, self.stages.judge(self.stages.plan_of(costs, seed)))
                for seed in seeds[: self._judged]
                if score(seed) < inf
            ]
            fitting = [start for start in made if self.fits(start.judged)]
            if fitting or not made:
                yield from sorted(fitting, key=seconds_of)[:1]
                return
            costs = replace(costs, limits=tuple(self.lowered(costs, made[0].judged, made[0].seed)))
            if min(costs.limits) <= 0:
                return

    def lowered(self, costs: OrderCosts, judged: Judged, seed: TimedRows) -> Iterator[float]:
        """The limits by which `seed` would have fewer microbatches in flight on the ranks where it does not fit."""
        for rank, row in enumerate(seed.rows):
            excess = judged.peaks[rank] - self.limits[rank]
            yield costs.peak(row) - excess if excess > 0 else costs.limits[rank]

    def quick_start(self) -> list[Start]:
        """The best of a few seeds, if one fits."""
        every = self.all_costs(tuple(map(sub, self.limits, self.stages.other_bytes)))
        scored = [(min((each.score for each in quick_seeds(shortened(costs))), default=inf), costs) for costs in every]
        starts = list[Start]()
        for _, costs in sorted(scored, key=lambda each: each[0]):
            starts += self.starts(costs, lambda _, short: quick_seeds(short))
            if len(starts) >= self._judged:
                break
        return sorted(starts, key=seconds_of)[:1]

    def least_delayed(self) -> list[Start]:
        """The named order that takes the least memory, delayed until it fits; nothing if it fits as it is.

        It fits wherever one microbatch at a time does, also where links and messages take more than `starts` expects.
        """
        named = min(self.stages.named, key=lambda each: max(each.peaks), default=None)
        return [] if named is None or self.fits(named) else self.delayed(named)

    def delayed(self, named: Judged) -> list[Start]:
        """The order of `named` delayed until it fits: as it is, with whole backwards, or one microbatch at a time."""
        made = schedule(named.plan)
        whole = frozenset(stage for stage, late in enumerate(made.guarantees.pending_weight_backwards) if not late)
        rows = rows_of(made, whole)
        if rows is None:
            return []
        costs = self.stages.costs(whole, self.limits)
        room = zip(self.limits, named.peaks, rows, strict=True)
        own = replace(costs, limits=tuple(limit - peak + costs.peak(row) for limit, peak, row in room))
        joined = replace(own, whole=frozenset(range(costs.stages)))
        # One microbatch in flight: no rank runs ahead of another, so that no message waits.
        alone = replace(joined, saved=(1.0,) * costs.stages, freed=(), limits=tuple(map(len, costs.held)))
        for tried in (own, joined, alone):
            starts = [each for overtakes in (False, True) for each in self._delays(tried, rows, overtakes=overtakes)]
            if starts:
                return starts
        return []

    def _delays(self, costs: OrderCosts, rows: Rows, *, overtakes: bool) -> Iterator[Start]:
        """The plan with `rows` delayed until it fits, under lower limits where that takes more than was known."""
        before: tuple[float, ...] = ()
        for _ in range(_ROUNDS):
            limits = tuple(map(max, costs.limits, costs.least))
            if limits == before:
                return
            costs, before = replace(costs, limits=limits), limits
            timed = min(delay_rows(costs, rows, overtakes=overtakes), key=lambda each: each.score, default=None)
            if timed is None:
                return
            judged = self.stages.judge(self.stages.plan_of(costs, timed))
            if self.fits(judged):
                yield Start(self, costs, timed, judged)
                return
            costs = replace(costs, limits=tuple(self.lowered(costs, judged, timed)))

    def improved(self, start: Start, most: tuple[int, int, int, int] = THOROUGH) -> Iterator[Start]:
        """The best order that leads on from `start`, if it can be repeated, and those before it while none fits."""
        short = shortened(start.costs)
        score = partial(whole_score, start.costs)
        rounds = [*moved_in_rounds(short, start.seed, min(most[0], most[1] // short.operations), *most[2:])]
        for seed in reversed(rounds or [start.seed]):
            best = min((seed, *spread_weights(short, seed)), key=score)
            if score(best) < inf:
                made = replace(start, seed=best, judged=self.stages.judge(self.stages.plan_of(start.costs, best)))
                yield made
                if self.fits(made.judged):
                    return

    def offloaded(self) -> Iterator[Judged]:
        """Orders that take too much memory, with what they have too much of offloaded; they fit."""
        stages, plan = self.stages, self.stages.plan
        if stages.cluster.host_bandwidth is None or len(plan.recomputed) == len(plan.stages):
            return
        over = [each.plan for each in stages.named if not self.fits(each)]
        for factor in _RELAXED if max(self.limits) < inf else ():
            relaxed = replace(self, limits=tuple(factor * limit for limit in self.limits))
            starts = (start for costs in relaxed.all_costs(relaxed.room) for start in relaxed.starts(costs, all_seeds))
            over += [start.judged.plan for start in starts]
        for plan in over:
            made = offload_order(stages.name, plan, stages.profile, stages.cluster, self.limits, **stages.options)
            if made is not None and self.fits(judged := stages.judge(made)):
                yield judged


def moved_in_rounds(costs: OrderCosts, timed: TimedRows, tries: int, put: int, rounds: int) -> Iterator[TimedRows]:
    """Rows after local moves and windows, again and again while a round shortens the step enough; the last are best.

    `tries` and `put`: see `improve` and `rearrange`, of which each round draws others.
    """
    least = bound_of(costs).seconds * ROUNDING
    for turn in range(rounds):
        # Nothing is to be gained where the rows are as fast as any order can be.
        if timed.seconds <= least:
            return
        moved = improve(costs, timed, tries, turn)
        before, timed = timed, rearrange(costs, moved, put, turn) if put else moved
        yield timed
        if timed.score > before.score * (1 - _GAIN):
            return


def seconds_of(start: Start) -> float:
    """What a step of its seed takes."""
    return start.judged.seconds


def all_seeds(stages: JudgedStages, short: OrderCosts) -> list[TimedRows]:
    """Seeds of all kinds."""
    named = named_plans(replace(stages.plan, microbatches=short.microbatches), whole_backwards=stages.whole_backwards)
    return find_seeds(short, list(map(schedule, named)))


def whole_score(costs: OrderCosts, timed: TimedRows) -> float:
    """The score of rows with some more microbatches, if their middle is repeated; infinite if that cannot run."""
    short = shortened(costs)
    if short is costs:
        return timed.score
    longer = replace(short, microbatches=short.microbatches + _MORE)
    rows = repeated(timed.rows, _MORE)
    whole = None if rows is None else time_rows(longer, rows)
    return inf if whole is None else whole.score


def shortened(costs: OrderCosts) -> OrderCosts:
    """`costs` with the microbatches that an order is found for."""
    if costs.microbatches <= max(_LONG[0] * costs.length, _LONG[1]):
        return costs
    return replace(costs, microbatches=max(_SHORT[0] * costs.length, _SHORT[1]))
